"""Volumes on images of a real Ceph cluster: what is on the image is what the clients wrote, and the image
can be used with HDCS, without it, and with it again."""

import errno
import json
import random
import subprocess
from contextlib import ExitStack

import nbd
import pytest

from daemon import DIRTY, Daemon, refused
from filesystems import as_file, as_loop, make_tree, mounted, same_tree
from programs import EXAMPLES, MIB, run
from resize_cases import resized_over

CONFORMANCE = EXAMPLES / "conformance"


def content(model, size):
    """The image that a model of {offset: bytes} describes."""
    image = bytearray(size)
    for offset, data in model.items():
        image[offset : offset + len(data)] = data
    return bytes(image)


def write(client, model, rng, count, size):
    """Random writes over one another."""
    image = bytearray(content(model, size))
    for _ in range(count):
        length = rng.choice([512, 4096, 12800, 65536, MIB])
        offset = rng.randrange((size - length) // 512) * 512
        data = rng.randbytes(length)
        client.pwrite(data, offset)
        image[offset : offset + length] = data
    client.flush()
    return {0: bytes(image)}


def test_rbd_conformance(cluster):
    done = subprocess.run(
        [CONFORMANCE, cluster.url("rbd/conformance")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "conforms" in done.stdout
    cluster.rbd("snap", "create", "--no-progress", "rbd/conformance@s")
    done = subprocess.run(
        [CONFORMANCE, cluster.url("rbd/conformance@s")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing changes it" in done.stdout and "conforms" in done.stdout


def test_rbd_image_is_made_and_is_plain_without_hdcs(cluster, tmp_path):
    rng = random.Random(1)
    size = 48 * MIB
    with Daemon(tmp_path) as daemon:
        daemon.create("v", "--backend", cluster.url("rbd/made"), size="48M")
        assert '"size":50331648' in cluster.rbd("info", "rbd/made", "--format", "json").decode()
        client = daemon.nbd("v")
        model = write(client, {}, rng, 40, size)
        client.trim(8 * MIB, 16 * MIB)
        client.zero(MIB + 512, 40 * MIB - 512)
        client.shutdown()
        image = bytearray(model[0])
        image[16 * MIB : 24 * MIB] = bytes(8 * MIB)
        image[40 * MIB - 512 : 41 * MIB] = bytes(MIB + 512)
        deleted = daemon.json("volume", "delete", "v", "--keep-data")
        assert deleted["data"] == cluster.url("rbd/made")
        assert deleted["discarded_dirty_bytes"] == 0
        assert cluster.export("rbd/made") == bytes(image)
        # Nobody holds the image any more.
        cluster.rbd("rm", "--no-progress", "rbd/made")
        daemon.stop()


def test_rbd_image_that_exists_is_used_as_it_is(cluster, tmp_path):
    rng = random.Random(2)
    size = 20 * MIB
    first = rng.randbytes(12 * MIB) + bytes(8 * MIB)
    (tmp_path / "image").write_bytes(first)
    cluster.rbd("import", "--no-progress", tmp_path / "image", "rbd/existing")
    url = cluster.url("rbd/existing")
    with Daemon(tmp_path) as daemon:
        refused(daemon.cli("volume", "create", "v", "--size", "16M", "--backend", url), 2,
                "has 20971520 bytes")
        made = daemon.json("volume", "create", "v", "--backend", url)
        assert made["bytes"] == size
        refused(daemon.cli("volume", "create", "w", "--backend", url), 2, "the backend of volume v")
        client = daemon.nbd("v")
        read = b"".join(client.pread(MIB, offset) for offset in range(0, size, MIB))
        assert read == first
        model = write(client, {0: first}, rng, 30, size)
        daemon.ok("volume", "flush", "v")
        assert cluster.export("rbd/existing") == model[0]
        # Ceph's own snapshots can be taken while the volume is in use.
        cluster.rbd("snap", "create", "--no-progress", "rbd/existing@now")
        client.pwrite(b"later" + bytes(507), 0)
        client.shutdown()
        daemon.ok("volume", "flush", "v")
        assert cluster.export("rbd/existing@now") == model[0]
        assert cluster.export("rbd/existing")[:5] == b"later"


def test_rbd_extents_are_those_of_the_image(cluster, tmp_path):
    """Only what the image holds is read and shown as data; a clone's parent counts."""
    (tmp_path / "base").write_bytes(b"b" * (4 * MIB) + bytes(28 * MIB))
    cluster.rbd("import", "--no-progress", tmp_path / "base", "rbd/base")
    cluster.rbd("snap", "create", "--no-progress", "rbd/base@s")
    cluster.rbd("snap", "protect", "rbd/base@s")
    cluster.rbd("clone", "rbd/base@s", "rbd/clone")
    with Daemon(tmp_path) as daemon:
        daemon.json("volume", "create", "v", "--backend", cluster.url("rbd/clone"))
        daemon.write("v", b"c" * 4096, 16 * MIB)
        daemon.ok("volume", "flush", "v")
        shown = run("nbdinfo", "--map", f"nbd+unix:///v?socket={daemon.data / 'nbd.sock'}").stdout
        rows = [line.split() for line in shown.splitlines()]
        data = [(int(start), int(length)) for start, length, kind, *_ in rows if kind == "0"]
        assert sum(length for _, length in data) <= 8 * MIB, shown
        assert any(start <= 16 * MIB < start + length for start, length in data), shown
        assert daemon.read("v", MIB) == b"b" * MIB
        assert daemon.read("v", 4096, 16 * MIB) == b"c" * 4096
        assert daemon.read("v", MIB, 24 * MIB) == bytes(MIB)
        daemon.stop()
    assert cluster.export("rbd/clone") == content(
        {0: b"b" * (4 * MIB), 16 * MIB: b"c" * 4096}, 32 * MIB
    )
    assert cluster.export("rbd/base@s") == (tmp_path / "base").read_bytes()


def test_rbd_image_grows_and_shrinks_with_its_volume(cluster, tmp_path):
    def image_bytes():
        text = cluster.rbd("info", "rbd/sized", "--format", "json").decode()
        return int(text.split('"size":')[1].split(",")[0])

    with Daemon(tmp_path) as daemon:
        daemon.create("v", "--backend", cluster.url("rbd/sized"), size="16M")
        daemon.ok("volume", "resize", "v", "--size", "32M")
        assert image_bytes() == 32 * MIB
        daemon.write("v", b"x" * MIB, 31 * MIB)
        daemon.ok("volume", "resize", "v", "--size", "8M", "--shrink")
        assert image_bytes() == 8 * MIB
        daemon.ok("volume", "resize", "v", "--size", "32M")
        assert daemon.read("v", MIB, 31 * MIB) == bytes(MIB)


def test_rbd_image_is_resized_with_a_volume_in_storage_mode(cluster, tmp_path):
    tiered = resized_over(tmp_path, cluster.url("rbd/stored"))
    assert cluster.export("rbd/stored") == tiered.image


def test_rbd_file_system_mounts_from_the_plain_image(cluster, tmp_path):
    source = tmp_path / "source"
    make_tree(source, 3)
    with Daemon(tmp_path) as daemon:
        daemon.create("v", "--backend", cluster.url("rbd/files"), size="128M")
        with ExitStack() as stack:
            uri = f"nbd+unix:///v?socket={daemon.data / 'nbd.sock'}"
            as_file(stack, uri, tmp_path / "disk")
            device = as_loop(stack, tmp_path / "disk")
            run("mkfs.ext4", "-q", device)
            with ExitStack() as mount:
                root = mounted(mount, device, tmp_path / "root")
                run("cp", "-r", source, root / "copy")
                run("sync", "-f", root)
        daemon.ok("volume", "delete", "v", "--keep-data")
        daemon.stop()
    (tmp_path / "plain").write_bytes(cluster.export("rbd/files"))
    with ExitStack() as stack:
        device = as_loop(stack, tmp_path / "plain")
        run("e2fsck", "-f", "-n", device)
        root = mounted(stack, device, tmp_path / "root")
        assert same_tree(source, root / "copy")


def test_rbd_another_image_in_its_place_is_refused(cluster, tmp_path):
    """The dirty data in the log belongs to the image that was there, and to no other."""
    with Daemon(tmp_path) as daemon:
        daemon.create("v", "--backend", cluster.url("rbd/swapped"), *DIRTY)
        daemon.write("v", b"d" * MIB)
        daemon.stop()
        cluster.rbd("mv", "rbd/swapped", "rbd/aside")
        cluster.rbd("create", "--size", "16M", "rbd/swapped")
        daemon.start()
        shown = daemon.volume("v")
        assert shown["state"] == "error", shown
        assert "another image stands in its place" in shown["reason"]
        daemon.stop()
        assert cluster.export("rbd/swapped") == bytes(16 * MIB)
        cluster.rbd("rm", "--no-progress", "rbd/swapped")
        daemon.start()
        assert "does not exist" in daemon.volume("v")["reason"]
        daemon.stop()
        cluster.rbd("mv", "rbd/aside", "rbd/swapped")
        daemon.start()
        assert daemon.read("v", MIB) == b"d" * MIB
        daemon.ok("volume", "flush", "v")
        assert cluster.export("rbd/swapped") == content({0: b"d" * MIB}, 16 * MIB)


def import_with_snapshot(cluster, directory, image, data):
    """An image with this content and a snapshot of it; the URL of the snapshot."""
    (directory / "import").write_bytes(data)
    cluster.rbd("import", "--no-progress", directory / "import", image)
    cluster.rbd("snap", "create", "--no-progress", f"{image}@s")
    return cluster.url(f"{image}@s")


def whole(client):
    size = client.get_size()
    return b"".join(client.pread(min(MIB, size - at), at) for at in range(0, size, MIB))


def test_rbd_snapshot_is_served_while_its_image_is_written(cluster, tmp_path):
    """By several nodes at once, and beside a volume over the image itself; what is cached of the one is
    never shown as the other's."""
    rng = random.Random(4)
    size = 20 * MIB
    (tmp_path / "other").mkdir()
    with Daemon(tmp_path, {"log_size_mib": 32}) as daemon, Daemon(tmp_path / "other") as other:
        daemon.create("disk", "--backend", cluster.url("rbd/lived"), size="20M")
        writer = daemon.nbd("disk")
        then = write(writer, {}, rng, 30, size)
        daemon.ok("volume", "flush", "disk")
        cluster.rbd("snap", "create", "--no-progress", "rbd/lived@then")
        # A user with no more rights than any volume on Ceph needs.
        url = cluster.url("rbd/lived@then", **cluster.user("reader", tmp_path))
        wrong = daemon.cli("volume", "create", "past", "--size", "16M", "--backend", url)
        refused(wrong, 2, "has 20971520 bytes")
        made = daemon.json("volume", "create", "past", "--backend", url)
        assert (made["bytes"], made["read_only"], made["state"]) == (size, True, "healthy"), made
        assert made["log_bytes"] == 16 * MIB, "the smallest log, since nothing is written to it"
        assert not daemon.volume("disk")["read_only"]
        other.json("volume", "create", "elsewhere", "--backend", url)
        readers = [daemon.nbd("past"), other.nbd("elsewhere")]
        now = then
        for turn in range(4):
            now = write(writer, now, rng, 10, size)
            daemon.ok("volume", "flush", "disk")
            for reader in readers:
                assert whole(reader) == then[0]
            assert whole(writer) == now[0]
            if turn % 2:
                daemon.ok("volume", "evict", "past")
                other.ok("volume", "evict", "elsewhere")
        for volume, node in [("past", daemon), ("elsewhere", other)]:
            shown = node.volume(volume)
            assert shown["state"] == "healthy" and shown["counters"]["miss_blocks"] > 0, shown
        assert now != then
        daemon.stop()
        other.stop()
    assert cluster.export("rbd/lived") == now[0]
    assert cluster.export("rbd/lived@then") == then[0]


def test_rbd_snapshot_is_warm_after_a_restart(cluster, tmp_path):
    data = random.Random(5).randbytes(6 * MIB)
    url = import_with_snapshot(cluster, tmp_path, "rbd/warm", data)
    with Daemon(tmp_path) as daemon:
        daemon.json("volume", "create", "v", "--backend", url)
        daemon.ok("volume", "promote", "v")
        assert daemon.read("v", MIB, 5 * MIB) == data[5 * MIB :]
        daemon.stop()
        daemon.start()
        daemon.online()
        client = daemon.nbd("v")
        assert whole(client) == data
        counters = daemon.volume("v")["counters"]
        assert counters["miss_blocks"] == 0 and counters["ssd_hit_blocks"] > 0, counters


def test_rbd_snapshot_refuses_what_would_write(cluster, tmp_path):
    data = random.Random(6).randbytes(4 * MIB) + bytes(4 * MIB)
    url = import_with_snapshot(cluster, tmp_path, "rbd/frozen", data)
    with Daemon(tmp_path) as daemon:
        made = daemon.ok("volume", "create", "v", "--backend", url)
        assert "8 MiB, healthy, read-only, backend" in made
        uri = f"nbd+unix:///v?socket={daemon.data / 'nbd.sock'}"
        shown = json.loads(run("nbdinfo", "--json", uri).stdout)["exports"][0]
        assert (shown["is_read_only"], shown["can_trim"], shown["can_flush"]) == (True, False, True)
        listed = run("qemu-nbd", "--list", "--socket", daemon.data / "nbd.sock").stdout
        assert "readonly" in listed, listed
        client = daemon.nbd("v")
        assert client.is_read_only()
        # Otherwise libnbd keeps to the flags, and nothing is sent.
        client.set_strict_mode(0)
        for ask in [
            lambda: client.pwrite(b"x" * 4096, 0),
            lambda: client.zero(4096, 0),
            lambda: client.trim(4096, 0),
        ]:
            with pytest.raises(nbd.Error) as failed:
                ask()
            assert failed.value.errnum == errno.EPERM, failed.value
        client.flush()
        run("nbdcopy", uri, tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == data
        counters = daemon.volume("v")["counters"]
        assert (counters["writes"], counters["trims"], counters["flushes"]) == (0, 0, 1), counters
        for size, more in [("16M", []), ("4M", ["--shrink"])]:
            done = daemon.cli("volume", "resize", "v", "--size", size, *more)
            refused(done, 1, "it is read-only", "is a snapshot")
        refused(daemon.cli("volume", "snapshot", "v", "t"), 2,
                "it is a snapshot itself", "`rbd clone rbd/frozen@s POOL/NEW`")
        for what in ["flush", "evict", "promote"]:
            daemon.ok("volume", what, "v")
        daemon.ok("check", "v")
        assert "read-only" in daemon.ok("volume", "list")
        assert "healthy, read-only" in daemon.ok("volume", "show", "v")
        assert daemon.json("volume", "list")[0]["read_only"] is True
        assert daemon.json("status")["state"] == "healthy"
        assert "Watchers: none" not in cluster.rbd("status", "rbd/frozen").decode()
        daemon.ok("volume", "detach", "v")
        daemon.json("volume", "create", "again", "--backend", url)
        assert daemon.read("again", MIB) == data[:MIB]
        deleted = daemon.json("volume", "delete", "again")
        assert deleted["data"] == url and deleted["discarded_dirty_bytes"] == 0
        assert "Watchers: none" in cluster.rbd("status", "rbd/frozen").decode()
        daemon.stop()
    assert cluster.export("rbd/frozen") == data
    assert cluster.export("rbd/frozen@s") == data


def test_rbd_snapshot_that_is_not_there(cluster, tmp_path):
    import_with_snapshot(cluster, tmp_path, "rbd/some", bytes(4 * MIB))
    before = cluster.rbd("ls", "rbd")
    with Daemon(tmp_path) as daemon:
        for image in ["rbd/some", "rbd/none"]:
            for size in [[], ["--size", "4M"]]:
                url = cluster.url(f"{image}@t")
                refused(daemon.cli("volume", "create", "v", *size, "--backend", url), 2,
                        f"rbd:{image}@t does not exist", f"`rbd snap ls {image}`")
        steal = cluster.url("rbd/some@s", steal="on")
        refused(daemon.cli("volume", "create", "v", "--backend", steal), 2, "leave out steal=on")
        assert daemon.json("volume", "list") == []
        daemon.stop()
    assert cluster.rbd("ls", "rbd") == before


def test_rbd_snapshot_that_is_deleted_underneath(cluster, tmp_path):
    """Never zeroes in the place of what it held. A protected one is not deleted at all; and another one
    of the same name is another one."""
    data = random.Random(7).randbytes(32 * MIB)
    url = import_with_snapshot(cluster, tmp_path, "rbd/lost", data)
    with Daemon(tmp_path, {"cache_total_size_mib": 0}) as daemon:
        daemon.json("volume", "create", "v", "--backend", url)
        client = daemon.nbd("v")
        cluster.rbd("snap", "protect", "rbd/lost@s")
        cluster.rbd("snap", "rm", "--no-progress", "rbd/lost@s", check=False)
        assert client.pread(MIB, 0) == data[:MIB]
        daemon.ok("volume", "evict", "v")
        # What is written now needs what the snapshot held to be kept for it.
        cluster.rbd("bench", "--io-type", "write", "--io-total", "16M", "--io-size", "1M",
                    "--io-threads", "1", "rbd/lost")
        assert client.pread(MIB, 0) == data[:MIB]
        cluster.rbd("snap", "unprotect", "rbd/lost@s")
        cluster.rbd("snap", "rm", "--no-progress", "rbd/lost@s")
        with pytest.raises(nbd.Error) as failed:
            client.pread(MIB, 4 * MIB)
        assert failed.value.errnum == errno.EIO, failed.value
        shown = daemon.volume("v")
        assert shown["state"] == "error", shown
        assert "its snapshot was found deleted" in shown["reason"], shown
        daemon.tells("the snapshot was deleted")
        daemon.stop()
        for again in [False, True]:
            if again:
                cluster.rbd("snap", "create", "--no-progress", "rbd/lost@s")
            daemon.start()
            shown = daemon.volume("v")
            said = "another image stands in its place" if again else "`rbd snap ls rbd/lost`"
            assert shown["state"] == "error" and shown["read_only"], shown
            assert said in shown["reason"], shown
            daemon.stop()
        daemon.start()
        daemon.ok("volume", "delete", "v")
        daemon.json("volume", "create", "v", "--backend", url)
        assert daemon.read("v", MIB, 20 * MIB) == data[20 * MIB : 21 * MIB]
        daemon.stop()


@pytest.fixture
def unlocked(cluster):
    """An image that two clients could write to at once."""
    cluster.rbd("create", "--size", "16M", "--image-feature", "layering", "rbd/unlocked")
    yield "rbd/unlocked"
    cluster.rbd("rm", "--no-progress", "rbd/unlocked")


def test_rbd_errors_say_what_to_do(cluster, unlocked, tmp_path):
    (tmp_path / "wrong.keyring").write_text(
        "[client.stranger]\nkey = AQAAAAAAAAAAEAAAAAAAAAAAAAAAAAAAAAAAAA==\n"
    )
    stranger = cluster.user("stranger", tmp_path, tmp_path / "wrong.keyring")
    dead = tmp_path / "dead.conf"
    dead.write_text("[global]\nmon_host = 127.0.0.1:9\nauth_client_required = none\n")
    for url, status, words in [
        (f"rbd:rbd/x?conf={tmp_path}/none.conf", 2, ["none.conf", "option conf=PATH"]),
        (f"rbd:rbd/x?conf={dead}", 1, ["connecting to the cluster as client.admin", "timed out"]),
        (cluster.url("rbd/x", **stranger), 2, ["connecting to the cluster as client.stranger"]),
        (cluster.url("nopool/x"), 2, ["there is no pool nopool", "ceph osd pool create nopool"]),
        (cluster.url(unlocked), 2, ["exclusive-lock", f"rbd feature enable {unlocked}"]),
        ("rbd:justone", 2, ["rbd:POOL/IMAGE"]),
    ]:
        with Daemon(tmp_path) as daemon:
            done = daemon.cli("volume", "create", "v", "--size", "16M", "--backend", url)
            refused(done, status, *words)
            assert daemon.json("volume", "list") == []
            daemon.stop()


def test_rbd_without_its_library(cluster, tmp_path, monkeypatch):
    """Where librbd is not installed everything else works, and what to install is said."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/librbd.so.1").write_text("no library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "lib"))
    with Daemon(tmp_path) as daemon:
        url = cluster.url("rbd/nolib")
        refused(daemon.cli("volume", "create", "v", "--size", "16M", "--backend", url), 2,
                "librbd cannot be loaded", "apt-get install librbd1")
        daemon.create("w")
        daemon.stop()
