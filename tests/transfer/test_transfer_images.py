"""Export and import of whole volumes: every byte, holes, streams, snapshots, bad input, what is in the way."""

import fcntl
import json
import os
import random
import subprocess

import pytest

from daemon import COMMAND_SECONDS, DIRTY, Daemon, refused
from programs import HDCS, MIB, run
from transfer_cases import fails_early, names, popen, slow

SIZE = 48 * MIB


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    """One daemon for the tests of this module; each uses volumes of its own."""
    # The volumes of all tests are open at once.
    room = {"memory_max_mib": 1040, "volumes_memory_mib": 600}
    with Daemon(tmp_path_factory.mktemp("daemon"), room) as daemon:
        yield daemon
        daemon.stop()


def sparse(path, seed, size=SIZE):
    """A raw image: data of odd places and lengths, a run of zeroes that is allocated, and holes."""
    rng = random.Random(seed)
    with open(path, "wb") as file:
        file.truncate(size)
        for _ in range(40):
            length = rng.randrange(1, 300) * 512
            file.seek(rng.randrange((size - length) // 512) * 512)
            file.write(rng.randbytes(length))
        file.seek(size // 2)
        file.write(bytes(4 * MIB))
        file.seek(size - 512)
        file.write(rng.randbytes(512))
    return path


def allocated(path):
    return path.stat().st_blocks * 512


def uri(daemon, name):
    return f"nbd+unix:///{name}?socket={daemon.data / 'nbd.sock'}"


def same(daemon, name, path, form="raw"):
    run("qemu-img", "compare", "-f", "raw", "-F", form, uri(daemon, name), path)


def test_raw_there_and_back(daemon, tmp_path):
    source = sparse(tmp_path / "source.raw", 1)
    done = daemon.json("volume", "import", "raw", source)
    assert (done["bytes"], done["format"]) == (SIZE, "raw")
    assert 0 < done["data_bytes"] <= 12 * MIB, "zeroes and holes are no data"
    same(daemon, "raw", source)
    # What was not imported costs nothing in the backend.
    daemon.ok("volume", "flush", "raw")
    image = daemon.data / "volumes/raw/data"
    assert allocated(image) <= 12 * MIB
    back = tmp_path / "back.raw"
    done = daemon.json("volume", "export", "raw", back)
    assert done["bytes"] == SIZE and done["data_bytes"] <= 12 * MIB
    assert back.read_bytes() == source.read_bytes()
    assert allocated(back) <= 12 * MIB
    assert sorted(os.listdir(tmp_path)) == ["back.raw", "source.raw"]


def test_export_has_what_is_only_in_the_log(daemon, tmp_path):
    daemon.create("log", "--set", "destage_age_max_ms=86400000", size="8M")
    daemon.write("log", b"l" * MIB, 3 * MIB)
    daemon.ok("volume", "export", "log", tmp_path / "log.raw")
    data = (tmp_path / "log.raw").read_bytes()
    assert data == bytes(3 * MIB) + b"l" * MIB + bytes(4 * MIB)


def test_qcow2_there_and_back(daemon, tmp_path):
    source = sparse(tmp_path / "source.raw", 2)
    image = tmp_path / "image"
    run("qemu-img", "convert", "-c", "-O", "qcow2", source, image)
    done = daemon.json("volume", "import", "qcow", image)
    assert (done["bytes"], done["format"]) == (SIZE, "qcow2"), "told by its first bytes"
    same(daemon, "qcow", source)
    back = tmp_path / "back.qcow2"
    done = daemon.json("volume", "export", "qcow", back, "--format", "qcow2")
    assert done["format"] == "qcow2"
    run("qemu-img", "check", back)
    run("qemu-img", "compare", "-f", "raw", "-F", "qcow2", source, back)
    same(daemon, "qcow", back, "qcow2")
    assert allocated(back) <= 14 * MIB
    assert json.loads(run("qemu-img", "info", "--output=json", back).stdout)["virtual-size"] == SIZE


def test_streams(daemon, tmp_path):
    source = sparse(tmp_path / "source.raw", 3)
    with open(source, "rb") as file:
        reader = subprocess.Popen(["cat"], stdin=file, stdout=subprocess.PIPE)
        done = popen(daemon, "volume", "import", "stream", "-", "--size", SIZE, stdin=reader.stdout)
        reader.stdout.close()
        assert done.communicate(timeout=COMMAND_SECONDS)[1] == b"" and done.returncode == 0
        assert reader.wait() == 0
    same(daemon, "stream", source)
    out = popen(daemon, "volume", "export", "stream", "-", "--json", stdout=subprocess.PIPE)
    data, said = out.communicate(timeout=COMMAND_SECONDS)
    assert out.returncode == 0 and data == source.read_bytes()
    assert json.loads(said)["bytes"] == SIZE


def test_sizes(daemon, tmp_path):
    odd = tmp_path / "odd.raw"
    odd.write_bytes(b"o" * (3 * MIB + 700))
    assert daemon.json("volume", "import", "odd", odd)["bytes"] == 3 * MIB + 1024
    assert daemon.read("odd", 3 * MIB + 1024) == b"o" * (3 * MIB + 700) + bytes(324)
    daemon.json("volume", "import", "larger", odd, "--size", "5M")
    assert daemon.volume("larger")["bytes"] == 5 * MIB
    assert daemon.read("larger", 5 * MIB) == b"o" * (3 * MIB + 700) + bytes(2 * MIB - 700)
    done = daemon.cli("volume", "import", "small", odd, "--size", "3M")
    refused(done, 2, "--size 3145728", "3146752 bytes")
    tiny = tmp_path / "tiny.raw"
    tiny.write_bytes(b"t")
    daemon.ok("volume", "import", "tiny", tiny)
    assert daemon.read("tiny", 4096) == b"t" + bytes(4095)
    assert "small" not in names(daemon)


def test_import_takes_a_backend_that_is_there_only_when_told(daemon, tmp_path):
    source = sparse(tmp_path / "source.raw", 4, 8 * MIB)
    there = tmp_path / "there.img"
    arguments = ["volume", "import", "over", source, "--backend", f"file:{there}"]
    for data in (b"t", b"\0"):
        there.write_bytes(data * (8 * MIB))
        refused(daemon.cli(*arguments), 1, "is there already", "left as it was", "--overwrite")
        assert "over" not in names(daemon) and there.read_bytes() == data * (8 * MIB)
    there.write_bytes(b"t" * (8 * MIB))
    daemon.ok(*arguments, "--overwrite", "--size", "8M")
    same(daemon, "over", source)
    daemon.ok("volume", "flush", "over")
    assert there.read_bytes() == source.read_bytes()


def test_import_takes_an_image_of_another_format_when_told(daemon, tmp_path):
    source, there = sparse(tmp_path / "source.raw", 5, 8 * MIB), tmp_path / "there.qcow2"
    run("qemu-img", "create", "-q", "-f", "qcow2", there, "8M")
    os.truncate(there, 8 * MIB)
    before = there.read_bytes()
    arguments = ["volume", "import", "over-qcow2", source, "--backend", f"file:{there}"]
    refused(daemon.cli(*arguments), 1, "--overwrite")
    assert there.read_bytes() == before
    daemon.ok(*arguments, "--overwrite")
    daemon.ok("volume", "flush", "over-qcow2")
    assert there.read_bytes() == source.read_bytes()


def test_import_that_fails_removes_what_it_made_and_nothing_else(daemon, tmp_path):
    there = tmp_path / "there.img"
    there.write_bytes(b"t" * (8 * MIB))
    said = fails_early(daemon, "half", "--backend", f"file:{there}", "--overwrite", *DIRTY)
    assert "removed again" in said and f"file:{there}, which was there before, stays" in said
    assert there.read_bytes() == b"t" * (8 * MIB), "nothing was written to it by then"
    fails_early(daemon, "half", "--backend", f"file:{tmp_path}/new.img")
    fails_early(daemon, "half")
    fails_early(daemon, "half", "--overwrite")
    assert os.listdir(tmp_path) == ["there.img"] and not (daemon.data / "kept").exists()


def test_import_does_not_write_over_the_image_itself(daemon, tmp_path):
    image, link = tmp_path / "image.raw", tmp_path / "link.raw"
    image.write_bytes(b"i" * MIB)
    link.hardlink_to(image)
    for other in (image, link):
        done = daemon.cli("volume", "import", "itself", image, "--backend", f"file:{other}", "--overwrite")
        refused(done, 2, "it is the image itself")
    assert "itself" not in names(daemon) and image.read_bytes() == b"i" * MIB


def test_import_passes_on_what_a_new_volume_takes(daemon, tmp_path):
    source = sparse(tmp_path / "source.raw", 5, 8 * MIB)
    image = tmp_path / "image.raw"
    daemon.ok("volume", "import", "options", source, "--backend", f"file:{image}", "--log-size", "17M",
              "--persist", "on-write", "--set", "when_full=error")
    volume = daemon.volume("options")
    assert volume["log_bytes"] == 17 * MIB and volume["settings"]["when_full"] == "error"
    daemon.ok("volume", "flush", "options")
    assert image.read_bytes() == source.read_bytes()
    refused(daemon.cli("volume", "import", "options", source), 1, "exists already")
    same(daemon, "options", source)


# A log that holds less than the image.
STORAGE = ["--mode", "storage", "--log-size", "16M"]


@pytest.mark.parametrize("form", ["raw", "qcow2", "stream"])
def test_storage_import_there_and_back(daemon, tmp_path, form):
    name, source = f"home-{form}", tmp_path / "source.raw"
    store, cold = tmp_path / "store", tmp_path / "cold.img"
    with open(sparse(source, 21), "r+b") as file:
        file.seek(MIB)
        file.write(random.Random(22).randbytes(22 * MIB))
    image = source
    if form == "qcow2":
        image = tmp_path / "image"
        run("qemu-img", "convert", "-O", "qcow2", source, image)
    arguments = ["volume", "import", name, image, "--backend", f"file:{cold}", *STORAGE, "--store-path", store]
    if form == "stream":
        arguments[3:4] = ["-", "--size", SIZE]
        importing = popen(daemon, *arguments, stdin=subprocess.PIPE)
        said = importing.communicate(source.read_bytes(), timeout=COMMAND_SECONDS)[1]
        assert importing.returncode == 0, said
    else:
        daemon.ok(*arguments)
    volume = daemon.volume(name)
    assert (volume["mode"], volume["home_path"], volume["bytes"]) == ("storage", str(store), SIZE)
    assert volume["counters"]["home"]["dirty_bytes"] >= 22 * MIB - 16 * MIB
    same(daemon, name, source)
    # Neither of them needs the backend, which has nothing of it yet.
    for form in ("raw", "qcow2"):
        back = tmp_path / f"back.{form}"
        daemon.ok("volume", "export", name, back, "--format", form)
        run("qemu-img", "compare", "-f", "raw", "-F", form, source, back)
    assert allocated(cold) == 0
    daemon.ok("volume", "flush", name)
    assert cold.read_bytes() == source.read_bytes() and allocated(cold) <= 36 * MIB
    daemon.ok("volume", "delete", name)
    assert not store.exists()


def test_storage_import_has_whole_blocks(daemon, tmp_path):
    odd = tmp_path / "odd.raw"
    odd.write_bytes(b"o" * (3 * MIB + 700))
    assert daemon.json("volume", "import", "blocks", odd, *STORAGE)["bytes"] == 3 * MIB + 1024
    assert daemon.volume("blocks")["bytes"] == 3 * MIB + 4096
    assert daemon.read("blocks", 3 * MIB + 4096) == b"o" * (3 * MIB + 700) + bytes(3396)
    done = daemon.cli("volume", "import", "sectors", odd, *STORAGE, "--size", str(3 * MIB + 1024))
    refused(done, 2, "in storage mode its size is a multiple of 4096")
    assert "sectors" not in names(daemon)


def test_storage_import_over_a_backend_that_is_there(daemon, tmp_path):
    source = sparse(tmp_path / "source.raw", 23, 8 * MIB)
    there = tmp_path / "there.img"
    there.write_bytes(b"t" * (8 * MIB))
    arguments = ["volume", "import", "home-over", source, "--backend", f"file:{there}", *STORAGE]
    refused(daemon.cli(*arguments), 1, "is there already", "left as it was", "--overwrite")
    daemon.ok(*arguments, "--overwrite")
    same(daemon, "home-over", source)
    assert there.read_bytes() == b"t" * (8 * MIB), "until it is tiered out"
    daemon.ok("volume", "flush", "home-over")
    assert there.read_bytes() == source.read_bytes()


def test_storage_import_that_fails_removes_its_home(daemon, tmp_path):
    store, there = tmp_path / "store", tmp_path / "there.img"
    place = [*STORAGE, "--store-path", store]
    fails_early(daemon, "half", *place)
    fails_early(daemon, "half", *place, "--backend", f"file:{tmp_path}/new.img")
    assert os.listdir(tmp_path) == []
    there.write_bytes(b"t" * (8 * MIB))
    said = fails_early(daemon, "half", *place, "--backend", f"file:{there}", "--overwrite")
    assert f"file:{there}, which was there before, stays" in said
    assert os.listdir(tmp_path) == ["there.img"] and there.read_bytes() == b"t" * (8 * MIB)


def test_import_takes_no_file_for_log_or_home(daemon, tmp_path):
    source, there = tmp_path / "source.raw", tmp_path / "there"
    for path in (source, there):
        path.write_bytes(b"p" * (4 * MIB))
    new = ["volume", "import", "taken", source, "--backend", f"file:{tmp_path}/new.img"]
    refused(daemon.cli(*new, *STORAGE, "--store-path", there), 2, "it exists already", "choose another")
    refused(daemon.cli(*new, "--log-path", there), 2, "it exists already", "choose another")
    for option in ("--store-path", "--log-path"):
        refused(daemon.cli(*new, *STORAGE, option, source), 2, "it is the image itself")
    refused(daemon.cli(*new, "--store-path", tmp_path / "store"), 2, "--store-path is for --mode storage")
    assert "taken" not in names(daemon)
    assert there.read_bytes() == source.read_bytes() == b"p" * (4 * MIB)
    assert sorted(os.listdir(tmp_path)) == ["source.raw", "there"]


def test_storage_import_to_a_device(daemon, tmp_path, loop):
    source, small, large = tmp_path / "source.raw", loop("small", 8 * MIB), loop("large", 12 * MIB)
    source.write_bytes(random.Random(24).randbytes(8 * MIB))
    arguments = ["volume", "import", "device", source, *STORAGE, "--store-path"]
    refused(daemon.cli(*arguments, small), 1, f"{small} holds {8 * MIB} bytes", "are needed", "--store-path")
    assert "device" not in names(daemon)
    daemon.ok(*arguments, large)
    same(daemon, "device", source)
    daemon.ok("volume", "delete", "device", "--discard-dirty")
    # It was given back empty.
    said = fails_early(daemon, "device", *STORAGE, "--store-path", large)
    assert "removed again" in said
    daemon.ok(*arguments, large)


def test_import_leaves_alone_what_comes_while_it_looks(daemon, tmp_path):
    """The key's command runs when the place was looked at and is not made yet."""
    source, there, key = (tmp_path / name for name in ("source.raw", "there.img", "key.sh"))
    source.write_bytes(b"i" * (4 * MIB))
    key.write_text(f"#!/bin/sh\nhead -c 4M /dev/zero | tr '\\0' p > {there}\nprintf {bytes(range(32)).hex()}\n")
    key.chmod(0o700)
    done = daemon.cli("volume", "import", "late", source, "--backend", f"file:{there}",
                      "--encrypt", "--key-command", key)
    refused(done, 1, "is there already, and is left as it was", "--overwrite")
    assert there.read_bytes() == b"p" * (4 * MIB) and "late" not in names(daemon)


@pytest.mark.parametrize("begin, what", [(b"KDMV", "VMDK"), (b"\x1f\x8b", "gzip"), (b"vhdxfile", "VHDX")])
def test_import_guesses_no_other_format(daemon, tmp_path, begin, what):
    image = tmp_path / "image"
    image.write_bytes(begin + bytes(MIB))
    refused(daemon.cli("volume", "import", "guess", image), 2, what, "--format raw")
    assert "guess" not in names(daemon)


def test_import_refuses_a_qcow2_that_is_not_whole(daemon, tmp_path):
    source = sparse(tmp_path / "source.raw", 6)
    image = tmp_path / "image.qcow2"
    run("qemu-img", "convert", "-O", "qcow2", source, image)
    cut = tmp_path / "cut.qcow2"
    for share in (2, 3, 50):
        cut.write_bytes(image.read_bytes()[: image.stat().st_size // share])
        refused(daemon.cli("volume", "import", "cut", cut), 1, "cut.qcow2", "damaged")
    cut.write_bytes(b"QFI\xfb" + bytes(50))
    refused(daemon.cli("volume", "import", "cut", cut), 1, "cut.qcow2")
    cut.write_bytes(b"nothing")
    refused(daemon.cli("volume", "import", "cut", cut, "--format", "qcow2"), 1, "no qcow2")
    assert "cut" not in names(daemon)


def test_import_refuses_a_qcow2_that_does_not_stand_alone(daemon, tmp_path):
    base, image = tmp_path / "base.raw", tmp_path / "image.qcow2"
    base.write_bytes(b"b" * MIB)
    run("qemu-img", "create", "-f", "qcow2", "-b", base, "-F", "raw", image)
    refused(daemon.cli("volume", "import", "alone", image), 1, "overlay of", "base.raw", "qemu-img convert")
    run("qemu-img", "create", "-f", "qcow2", "-o", f"data_file={tmp_path}/data.raw", image, "1M")
    refused(daemon.cli("volume", "import", "alone", image), 1, "another file", "data.raw")
    create = ["qemu-img", "create", "-f", "qcow2", "--object", "secret,id=s,data=password",
              "-o", "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10", image, "1M"]
    # It measures the processor, and gives up where that is busy ("Unable to get accurate CPU usage").
    for _ in range(20):
        if run(*create, check=False).returncode == 0:
            break
    else:
        run(*create)
    refused(daemon.cli("volume", "import", "alone", image), 1, "encrypted", "qemu-img convert")
    assert "alone" not in names(daemon)


def test_qcow2_needs_qemu_and_says_so(daemon, tmp_path):
    image = tmp_path / "image.qcow2"
    run("qemu-img", "create", "-f", "qcow2", image, "1M")
    command = [HDCS, "volume", "import", "none", image, "--data", daemon.data]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": "/nowhere"}, timeout=60)
    refused(done, 1, "qemu-img", "install qemu-utils")
    assert "none" not in names(daemon)


def test_bad_arguments(daemon, tmp_path):
    daemon.create("args", size="1M")
    there = tmp_path / "there"
    there.write_bytes(b"precious")
    refused(daemon.cli("volume", "export", "args", there), 1, "exists already", "--overwrite")
    assert there.read_bytes() == b"precious"
    refused(daemon.cli("volume", "export", "args", tmp_path), 2, "no ordinary file")
    refused(daemon.cli("volume", "export", "args", "/dev/null"), 2, "no ordinary file")
    refused(daemon.cli("volume", "export", "args", tmp_path / "no/such"), 1, "No such file")
    refused(daemon.cli("volume", "export", "nobody", tmp_path / "new"), 1, "nobody")
    refused(daemon.cli("volume", "export", "args", "-", "--format", "qcow2"), 2, "pipe")
    refused(daemon.cli("volume", "export", "args@snap", tmp_path / "new"), 1, "no snapshot snap", "--list")
    clone = ["--snapshot", "--clone-backend"]
    refused(daemon.cli("volume", "export", "args", tmp_path / "new", *clone, "s3://b/p"), 2, "it must name a bucket")
    refused(daemon.cli("volume", "export", "args", tmp_path / "new", *clone, "file:/x"), 2, "hdcs volume snapshot args")
    refused(daemon.cli("volume", "import", "bad", tmp_path / "none"), 1, "No such file")
    refused(daemon.cli("volume", "import", "bad", tmp_path), 2, "neither a file nor")
    refused(daemon.cli("volume", "import", "bad", "-"), 2, "--size")
    (tmp_path / "empty").touch()
    refused(daemon.cli("volume", "import", "bad", tmp_path / "empty"), 1, "empty")
    assert sorted(os.listdir(tmp_path)) == ["empty", "there"] and "bad" not in names(daemon)
    daemon.ok("volume", "export", "args", there, "--overwrite")
    assert there.read_bytes() == bytes(MIB)


def test_export_replaces_nothing_that_is_in_use(daemon, tmp_path):
    image, link, other = (tmp_path / name for name in ("own.img", "link.img", "other"))
    daemon.create("own", "--backend", f"file:{image}", size="4M")
    daemon.write("own", b"o" * MIB)
    daemon.ok("volume", "snapshot", "own", "s", "--copy")
    link.hardlink_to(image)
    other.write_bytes(b"precious")
    before = image.read_bytes()
    with open(other, "r+b") as locked:
        fcntl.lockf(locked, fcntl.LOCK_EX)
        for target, why in [
            (image, "the backend of volume own"),
            (link, "the backend of volume own"),
            (other, "locked by a program"),
            (daemon.data / "volumes/own/log", "in the data directory"),
            (daemon.data / "new.raw", "in the data directory"),
            (tmp_path / "own.img.hdcs-snap/s", "among the snapshots"),
        ]:
            refused(daemon.cli("volume", "export", "own", target, "--overwrite"), 2, why)
    assert image.read_bytes() == before and other.read_bytes() == b"precious"
    assert daemon.read("own", MIB) == b"o" * MIB
    daemon.ok("volume", "export", "own", other, "--overwrite")
    assert other.read_bytes() == b"o" * MIB + bytes(3 * MIB)


def test_export_of_a_snapshot_of_a_file(daemon, tmp_path):
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    # In the data directory, elsewhere with options, and encrypted but for the image.
    for name, *arguments in [
        ("in", ),
        ("home", "--mode", "storage"),
        ("out", "--backend", f"file:{tmp_path}/an image?direct=off"),
        ("key", "--backend", f"file:{tmp_path}/key.img", "--encrypt", "--key-file", key),
    ]:
        daemon.create(name, *arguments, size="4M")
        daemon.write(name, b"1" * MIB)
        daemon.ok("volume", "snapshot", name, "s", "--copy")
        daemon.write(name, b"2" * MIB)
        before = names(daemon)
        out = tmp_path / f"{name}.raw"
        assert daemon.json("volume", "export", f"{name}@s", out)["volume"] == name
        assert out.read_bytes() == b"1" * MIB + bytes(3 * MIB)
        daemon.ok("volume", "export", f"{name}@s", out, "--overwrite", "--format", "qcow2")
        daemon.create("of-out", size="4M")
        daemon.write("of-out", b"1" * MIB)
        same(daemon, "of-out", out, "qcow2")
        daemon.ok("volume", "delete", "of-out")
        assert names(daemon) == before
        done = daemon.cli("volume", "export", f"{name}@s", tmp_path / "new", "--clone-backend", "s3://bucket/p")
        refused(done, 2, "leave --clone-backend out")
        daemon.ok("volume", "snapshot", name, "s", "--delete")
        assert daemon.read(name, MIB) == b"2" * MIB


def test_standard_input_that_ends_early_leaves_nothing(daemon):
    assert "removed again" in fails_early(daemon, "early")


def test_import_that_is_kept_is_there_as_far_as_it_came(daemon):
    done = popen(daemon, "volume", "import", "kept", "-", "--size", "8M", "--keep", stdin=subprocess.PIPE)
    said = done.communicate(b"k" * (3 * MIB), timeout=COMMAND_SECONDS)[1].decode()
    assert done.returncode == 1 and "kept as far as it came" in said
    assert "kept" in names(daemon)


def test_standard_output_that_is_closed_ends_the_export(daemon):
    daemon.create("closed", size="64M")
    out = popen(daemon, "volume", "export", "closed", "-", stdout=subprocess.PIPE)
    out.stdout.read(1000)
    out.stdout.close()
    said = out.stderr.read().decode()
    assert out.wait(COMMAND_SECONDS) == 1
    assert "standard output" in said and "reader has ended" in said


def test_standard_output_without_room_ends_the_export(daemon):
    daemon.create("full", size="4M")
    with open("/dev/full", "wb") as full:
        out = popen(daemon, "volume", "export", "full", "-", stdout=full)
        said = out.communicate(timeout=COMMAND_SECONDS)[1].decode()
    assert out.returncode == 1 and "standard output" in said and "o space left" in said


@pytest.mark.parametrize("form", ["raw", "qcow2"])
def test_export_without_room_leaves_nothing(daemon, tmp_path, form):
    """Into a file system of 4 MiB, in a namespace of its own."""
    name = f"room-{form}"
    daemon.create(name, size="16M")
    daemon.write(name, random.Random(7).randbytes(8 * MIB))
    small = tmp_path / "small"
    small.mkdir()
    export = f"{HDCS} volume export {name} {small}/image --format {form} --data {daemon.data}"
    script = f"mount -t tmpfs -o size=4m none {small} && {export}; status=$?; ls -A {small}; exit $status"
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS)
    refused(done, 1, "o space left")
    assert done.stdout == "" and os.listdir(small) == []


def test_progress_that_nobody_reads_ends_nothing(daemon, tmp_path):
    image, out = tmp_path / "slow.img", tmp_path / "out.raw"
    image.write_bytes(random.Random(11).randbytes(64 * MIB))
    daemon.json("volume", "create", "unread", "--backend", slow(tmp_path, "slow.img", 500))
    export = popen(daemon, "volume", "export", "unread", out, stdout=subprocess.DEVNULL)
    assert b" exported, " in export.stderr.readline()
    export.stderr.close()
    assert export.wait(COMMAND_SECONDS) == 0
    assert out.read_bytes() == image.read_bytes()


def test_clients_are_warned_of_and_go_on(daemon, tmp_path):
    daemon.create("live", size="8M")
    client = daemon.nbd("live")
    client.pwrite(b"1" * MIB, 0)
    done = daemon.cli("volume", "export", "live", tmp_path / "live.raw")
    assert done.returncode == 0 and "warning: volume live has clients" in done.stderr
    assert (tmp_path / "live.raw").read_bytes() == b"1" * MIB + bytes(7 * MIB)
    client.pwrite(b"2" * MIB, 0)
    assert client.pread(MIB, 0) == b"2" * MIB
    client.shutdown()


def test_daemon_that_dies_ends_the_copy(tmp_path):
    image = tmp_path / "slow.img"
    image.write_bytes(random.Random(10).randbytes(64 * MIB))
    with Daemon(tmp_path) as daemon:
        daemon.json("volume", "create", "v", "--backend", slow(tmp_path, "slow.img", 500))
        export = popen(daemon, "volume", "export", "v", tmp_path / "out.raw")
        export.stderr.readline()
        daemon.kill()
        said = export.communicate(timeout=COMMAND_SECONDS)[1].decode()
        assert export.returncode == 1 and "connection" in said
        assert not [name for name in os.listdir(tmp_path) if name.startswith("out")]
