"""Volumes through the command line: create, list, set, resize, flush, delete, and their errors."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from daemon import DIRTY, Daemon, refused
from programs import HDCS, MIB, run


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    """One daemon for the tests of this module; each uses volumes of its own."""
    with Daemon(tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon
        daemon.stop()


def dirty_bytes(daemon, name):
    return daemon.volume(name)["counters"]["dirty_bytes"]


def test_create_list_show_in_tables_and_json(daemon):
    made = daemon.create("first", size="64M")
    assert (made["bytes"], made["state"], made["phase"]) == (64 * MIB, "healthy", "open")
    assert made["backend"] == f"file:{daemon.data}/volumes/first/data"
    assert "first" in daemon.ok("volume", "list") and "64 MiB" in daemon.ok("volume", "list")
    assert [v for v in daemon.json("volume", "list") if v["name"] == "first"][0]["uuid"] == made["uuid"]
    assert made["uuid"] in daemon.ok("volume", "show", "first")
    assert daemon.json("status")["volumes_by_state"]["healthy"] >= 1
    assert "DRAM tier" in daemon.ok("status")
    image = daemon.data / "volumes/first/data"
    assert image.stat().st_size == 64 * MIB and image.stat().st_blocks == 0


def test_create_refuses_a_name_in_use(daemon):
    daemon.create("twice")
    refused(daemon.cli("volume", "create", "twice", "--size", "1G"), 1, "exists already")


def test_create_takes_a_backend_as_it_is(daemon, tmp_path):
    image = tmp_path / "disk.img"
    image.write_bytes(b"b" * MIB)
    done = daemon.cli("volume", "create", "raw", "--size", "2M", "--backend", f"file:{image}")
    refused(done, 2, "has 1048576 bytes, not 2097152", "leave --size out", "truncate -s 2097152")
    assert daemon.json("volume", "create", "raw", "--backend", f"file:{image}")["bytes"] == MIB
    assert daemon.read("raw", MIB) == b"b" * MIB
    done = daemon.cli("volume", "create", "raw2", "--backend", f"file:{image}")
    refused(done, 2, "is the backend of volume raw")


def test_create_says_what_to_do_with_an_empty_backend(daemon, tmp_path):
    image = tmp_path / "empty.img"
    image.touch()
    for size in ([], ["--size", "1M"]):
        done = daemon.cli("volume", "create", "v", *size, "--backend", f"file:{image}")
        refused(done, 2, "exists and is empty", "remove it", "truncate -s SIZE")


def test_create_makes_a_backend_that_is_not_there(daemon, tmp_path):
    done = subprocess.run(
        [HDCS, "volume", "create", "rel", "--size", "1M", "--backend", "file:new%20disk.img",
         "--data", daemon.data],
        cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "new disk.img").stat().st_size == MIB


@pytest.mark.parametrize(
    "backend, parts",
    [
        ("ec:pool", ["ec is not available yet", "file:PATH"]),
        ("/srv/disk", ["file:PATH"]),
        ("file:", ["absolute"]),
        ("file:/no/such/directory/disk", ["directory does not exist"]),
        ("file:/dev/null", ["neither a file nor a block device"]),
        ("file:/tmp/x?dely_us=1", ["dely_us", "delay_us"]),
    ],
)
def test_create_refuses_a_bad_backend(daemon, backend, parts):
    before = set(os.listdir(daemon.data / "volumes"))
    done = daemon.cli("volume", "create", "bad", "--size", "1M", "--backend", backend)
    refused(done, 2, *parts)
    assert set(os.listdir(daemon.data / "volumes")) == before


def test_create_refuses_places_inside_of_the_data_directory(daemon, tmp_path):
    daemon.create("victim")
    linked = tmp_path / "linked"
    linked.symlink_to(daemon.data)
    for there in (daemon.data / "volumes/victim/log", daemon.data / "events.1.jsonl", linked / "new"):
        for place in (["--backend", f"file:{there}"], ["--log-path", there],
                      ["--mode", "storage", "--store-path", there]):
            done = daemon.cli("volume", "create", "thief", "--size", "16M", *place)
            refused(done, 2, "inside the data directory", f"{daemon.data}/kept")
    (daemon.data / "kept").mkdir(exist_ok=True)
    daemon.create("v", "--backend", f"file:{daemon.data}/kept/v.img")


@pytest.mark.parametrize(
    "arguments, status, parts",
    [
        (["--log-size", "1M"], 2, ["write log", "from 16777216 (16M)"]),
        (["--log-size", "16777217"], 2, ["multiple of 4096"]),
        (["--log-size", "2T"], 2, ["write log", "(1T)"]),
        (["--set", "persit=auto"], 2, ["unknown key `persit`", "did you mean `persist`?"]),
        (["--set", "memory_max_mib=1"], 2, ["belongs to the node"]),
        (["--set", "persist=never"], 2, ["`persist` takes one of"]),
        (["--set", "dirty_ratio_min=90"], 2, ["must be below"]),
        (["--set", "unpersisted_max_kib=1000000"], 2, ["a quarter of the buffers"]),
        (["--set", "nonsense"], 2, ["KEY=VALUE"]),
        (["--log-path", "/proc/self/log"], 1, ["write log cannot be made", "/proc/self/log"]),
    ],
)
def test_create_refuses_bad_options(daemon, arguments, status, parts):
    before = set(os.listdir(daemon.data / "volumes"))
    refused(daemon.cli("volume", "create", "bad", "--size", "1M", *arguments), status, *parts)
    assert set(os.listdir(daemon.data / "volumes")) == before


def test_log_can_be_elsewhere_and_goes_with_its_volume(daemon, tmp_path):
    log = tmp_path / "the.log"
    assert daemon.create("far", "--log-path", log)["log_path"] == str(log)
    done = daemon.cli("volume", "create", "far2", "--size", "1M", "--log-path", log)
    refused(done, 2, "is the write log of volume far")
    daemon.write("far", b"f" * 4096)
    daemon.ok("volume", "delete", "far")
    assert not log.exists()


def test_log_and_home_leave_a_file_that_is_there(daemon, tmp_path):
    there = tmp_path / "precious"
    there.write_bytes(b"p" * 4096)
    for place in (["--log-path", there], ["--mode", "storage", "--store-path", there]):
        done = daemon.cli("volume", "create", "taken", "--size", "1M", *place)
        refused(done, 2, "it exists already", "choose another")
        assert there.read_bytes() == b"p" * 4096


def test_settings_of_a_volume_survive_a_restart(tmp_path):
    with Daemon(tmp_path, {"destage_age_max_ms": 5000}) as daemon:
        daemon.create("v", "--persist", "on-write")
        changed = daemon.json("volume", "set", "v", "dirty_ratio_max=60", "when_full=error")
        assert changed["settings"]["dirty_ratio_max"] == 60
        assert changed["overridden"] == ["dirty_ratio_max", "persist", "when_full"]
        refused(daemon.cli("volume", "set", "v", "dirty_ratio_mix=60"), 2, "did you mean")
        refused(daemon.cli("volume", "set", "v", "dirty_ratio_mix=default"), 2, "did you mean")
        refused(daemon.cli("volume", "set", "v", "when_full=maybe"), 2, '"wait", "error"')
        daemon.ok("volume", "set", "v", "when_full=default")
        daemon.kill()
        daemon.start()
        volume = daemon.volume("v")
        assert volume["settings"]["dirty_ratio_max"] == 60
        assert volume["settings"]["destage_age_max_ms"] == 5000
        assert volume["overridden"] == ["dirty_ratio_max", "persist"]


def test_numbers_are_never_used_again(tmp_path):
    with Daemon(tmp_path) as daemon:
        assert daemon.create("a")["number"] == 1
        daemon.ok("volume", "delete", "a")
        daemon.stop()
        daemon.start()
        assert daemon.create("a")["number"] == 2


def test_resize_grows_online_and_survives_a_restart(tmp_path):
    with Daemon(tmp_path) as daemon:
        daemon.create("v", size="4M")
        daemon.write("v", b"r" * MIB, offset=3 * MIB)
        assert daemon.json("volume", "resize", "v", "8M")["bytes"] == 8 * MIB
        daemon.write("v", b"s" * MIB, offset=7 * MIB)
        assert daemon.read("v", MIB, offset=3 * MIB) == b"r" * MIB
        daemon.kill()
        daemon.start()
        assert daemon.read("v", MIB, offset=7 * MIB) == b"s" * MIB
        assert daemon.read("v", MIB, offset=5 * MIB) == bytes(MIB)


def test_resize_shrinks_only_when_told_and_flushes_first(daemon):
    daemon.create("shrink", *DIRTY, size="8M")
    daemon.write("shrink", b"t" * MIB)
    refused(daemon.cli("volume", "resize", "shrink", "--size", "4M"), 1, "--shrink", "lost")
    assert daemon.json("volume", "resize", "shrink", "--size", "4M", "--shrink")["bytes"] == 4 * MIB
    assert dirty_bytes(daemon, "shrink") == 0
    assert (daemon.data / "volumes/shrink/data").stat().st_size == 4 * MIB
    assert daemon.read("shrink", MIB) == b"t" * MIB


def test_flush_brings_everything_to_the_backend(daemon):
    daemon.create("flush", *DIRTY)
    daemon.write("flush", b"u" * 2 * MIB)
    assert dirty_bytes(daemon, "flush") == 2 * MIB
    # What is left when the node answers counts: on a busy machine one of two writes may be done by then.
    said = daemon.ok("volume", "flush", "flush")
    assert "volume flush is flushed: 2 MiB" in said or "volume flush is flushed: 1 MiB" in said
    assert dirty_bytes(daemon, "flush") == 0
    assert (daemon.data / "volumes/flush/data").read_bytes()[: 2 * MIB] == b"u" * 2 * MIB
    assert "flushed: 0 B" in daemon.ok("volume", "flush", "flush")


def test_flush_shows_progress_and_can_be_interrupted_beside_client_io(daemon, tmp_path):
    backend = f"file:{tmp_path}/slow?rate_mib=1"
    daemon.create("slow", *DIRTY, "--backend", backend)
    daemon.write("slow", os.urandom(8 * MIB))
    command = [HDCS, "volume", "flush", "slow", "--data", daemon.data]
    flush = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = flush.stderr.readline()
        assert "flushed" in line and "/s, ETA" in line, line
        daemon.write("slow", b"b" * 4096, offset=12 * MIB)
        assert daemon.read("slow", 4096, offset=12 * MIB) == b"b" * 4096
        flush.send_signal(signal.SIGINT)
        out, err = flush.communicate(timeout=60)
    finally:
        flush.kill()
    assert flush.returncode == 130 and out == ""
    assert "error: flush is interrupted: volume slow:" in err and "still to go" in err
    volume = daemon.volume("slow")["counters"]
    assert volume["flush_remaining_bytes"] == 0 and volume["dirty_bytes"] > 0
    refused(daemon.cli("volume", "flush", "slow", "--timeout", "1"), 1, "flush is out of time")
    daemon.ok("volume", "delete", "slow", "--discard-dirty")


def test_evict_and_promote_check_their_range(daemon):
    daemon.create("range")
    daemon.write("range", b"v" * MIB)
    daemon.ok("volume", "flush", "range")
    daemon.ok("volume", "evict", "range")
    daemon.ok("volume", "promote", "range", "--offset", "0", "--length", "1M")
    before = daemon.volume("range")["counters"]
    assert daemon.read("range", MIB) == b"v" * MIB
    after = daemon.volume("range")["counters"]
    assert after["miss_blocks"] == before["miss_blocks"]
    for arguments in (["--offset", "1"], ["--length", "0"], ["--offset", "16M"],
                      ["--offset", "8M", "--length", "9M"]):
        refused(daemon.cli("volume", "promote", "range", *arguments), 2, "beyond its 16777216 bytes")


def test_delete_destages_first_and_keeps_a_backend_of_the_users(daemon, tmp_path):
    image = tmp_path / "kept.img"
    daemon.create("mine", *DIRTY, "--backend", f"file:{image}")
    daemon.write("mine", b"w" * MIB)
    deleted = daemon.json("volume", "delete", "mine")
    assert deleted == {"name": "mine", "discarded_dirty_bytes": 0, "data": f"file:{image}", "data_trouble": None}
    assert image.read_bytes()[:MIB] == b"w" * MIB
    assert not (daemon.data / "volumes/mine").exists()


def test_delete_removes_a_backing_file_of_its_own_unless_it_is_to_be_kept(daemon):
    daemon.create("own")
    assert daemon.json("volume", "delete", "own")["data"] is None
    daemon.create("own", *DIRTY)
    daemon.write("own", b"x" * MIB)
    kept = daemon.json("volume", "delete", "own", "--keep-data")["data"]
    path = Path(kept.removeprefix("file:"))
    assert path.parent == daemon.data / "kept"
    assert path.read_bytes()[:MIB] == b"x" * MIB
    # What was kept can be taken up again.
    assert daemon.json("volume", "create", "own2", "--backend", kept)["bytes"] == 16 * MIB
    assert daemon.read("own2", MIB) == b"x" * MIB


def test_delete_with_a_dead_backend_says_how_much_would_be_lost(daemon, tmp_path):
    dead = tmp_path / "dead"
    backend = f"file:{tmp_path}/b?error_file={dead}&error_kind=eio&error_on=write"
    daemon.create("dead", *DIRTY, "--backend", backend)
    daemon.write("dead", b"y" * MIB)
    dead.write_text("")
    done = daemon.cli("volume", "delete", "dead")
    refused(done, 1, "takes no data", "1048576 dirty bytes", "--discard-dirty")
    assert daemon.read("dead", MIB) == b"y" * MIB
    deleted = daemon.json("volume", "delete", "dead", "--discard-dirty")
    assert deleted["discarded_dirty_bytes"] == MIB


def test_delete_waits_for_a_slow_backend(daemon, tmp_path):
    # It takes one write after another, and some seconds for each.
    url = f"file:{tmp_path}/slow?delay_us=5000000"
    daemon.create("slow", *DIRTY, "--set", "cache_flush_queue_depth=1", "--backend", url)
    client = daemon.nbd("slow")
    places = range(0, 3 * MIB, MIB)
    for at in places:
        client.pwrite(b"slow" * 1024, at)
    client.flush()
    client.shutdown()
    begun = time.monotonic()
    assert daemon.json("volume", "delete", "slow")["discarded_dirty_bytes"] == 0
    assert time.monotonic() - begun > 12
    written = (tmp_path / "slow").read_bytes()
    assert all(written[at : at + 4096] == b"slow" * 1024 for at in places)


def test_deleting_a_copy_of_a_volume_leaves_the_original_alone(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    with Daemon(tmp_path) as daemon:
        places = ["--log-path", outside / "log", "--mode", "storage", "--store-path", outside / "home"]
        daemon.create("v", *DIRTY, *places)
        daemon.write("v", b"v" * MIB)
        daemon.stop()
        volumes = daemon.data / "volumes"
        shutil.copytree(volumes / "v", volumes / "v.bak")
        daemon.start()
        assert daemon.volume("v.bak")["state"] == "error"
        daemon.ok("volume", "delete", "v.bak", "--discard-dirty")
        assert not (volumes / "v.bak").exists()
        daemon.stop()
        daemon.start()
        assert daemon.read("v", MIB) == b"v" * MIB
        daemon.ok("volume", "delete", "v", "--discard-dirty")
        assert list(outside.iterdir()) == []


def test_deletion_that_did_not_end_goes_on_when_asked_again(tmp_path):
    with Daemon(tmp_path) as daemon:
        daemon.create("v", *DIRTY)
        daemon.create("other")
        volumes = daemon.data / "volumes"
        # No key can be overwritten where a directory is in its place.
        (volumes / "v" / "key.json").mkdir()
        for _ in range(2):
            refused(daemon.cli("volume", "delete", "v"), 1, "did not end", "delete it again")
        daemon.stop()
        # It keeps nobody from serving.
        daemon.start()
        daemon.tells("tried again at the next start")
        assert daemon.volume("other")["state"] == "healthy"
        daemon.create("v", *DIRTY)
        (volumes / "v" / "key.json").mkdir()
        refused(daemon.cli("volume", "delete", "v"), 1, "did not end", "delete it again")
        for rest in volumes.glob(".gone-v-*"):
            (rest / "key.json").rmdir()
        daemon.ok("volume", "delete", "v")
        assert [path.name for path in volumes.iterdir()] == ["other"]


def test_deletion_asked_for_again_leaves_an_image_that_may_be_somebody_elses(tmp_path):
    image = tmp_path / "image"
    image.write_bytes(bytes(16 * MIB))
    with Daemon(tmp_path) as daemon:
        daemon.create("v", "--backend", f"file:{image}")
        # No key can be overwritten where a directory is in its place.
        (daemon.data / "volumes" / "v" / "key.json").mkdir()
        status, why = daemon.api("DELETE", "/v1/volumes/v?remove_data=true")
        assert status == 500 and "did not end" in why
        refused(daemon.cli("volume", "detach", "v"), 1, "deletion has begun", "delete it again")
        for rest in (daemon.data / "volumes").glob(".gone-v-*"):
            (rest / "key.json").rmdir()
        image.write_bytes(b"of somebody else")
        assert daemon.json("volume", "delete", "v")["data"] == f"file:{image}"
        assert image.read_bytes() == b"of somebody else"


def test_deletion_that_has_begun_does_not_say_that_it_keeps_the_data(tmp_path):
    with Daemon(tmp_path) as daemon:
        daemon.create("v")
        (daemon.data / "volumes" / "v" / "key.json").mkdir()
        refused(daemon.cli("volume", "delete", "v"), 1, "did not end", "delete it again")
        refused(daemon.cli("volume", "delete", "v", "--keep-data"), 1, "cannot be kept")
        for rest in (daemon.data / "volumes").glob(".gone-v-*"):
            (rest / "key.json").rmdir()
        assert daemon.json("volume", "delete", "v")["data"] is None


def test_image_that_another_node_has_open_is_left_to_it(tmp_path):
    image = tmp_path / "image"
    homes = [tmp_path / name for name in ("one", "two")]
    for home in homes:
        home.mkdir()
    with Daemon(homes[0]) as one, Daemon(homes[1]) as two:
        one.create("v", "--backend", f"file:{image}")
        one.ok("volume", "detach", "v")
        two.create("w", "--backend", f"file:{image}")
        # The volume of the first node still knows the place, and is not open.
        refused(one.cli("volume", "create", "v", "--size", "16M", "--backend", f"file:{image}"), 1, "in use")
        assert two.json("volume", "delete", "w")["data"] == f"file:{image}"
        assert image.exists()


def test_file_in_the_place_of_a_volumes_image_is_not_removed_with_it(tmp_path):
    image, other = tmp_path / "image", b"somebody else's"
    with Daemon(tmp_path) as daemon:
        daemon.create("v", "--backend", f"file:{image}")
        image.rename(tmp_path / "away")
        image.write_bytes(other)
        status, answer = daemon.api("DELETE", "/v1/volumes/v?remove_data=true")
        assert status == 409 and "not the image that it has open" in str(answer), (status, answer)
        assert image.read_bytes() == other
        (tmp_path / "away").rename(image)
        assert daemon.api("DELETE", "/v1/volumes/v?remove_data=true")[0] == 200
        assert not image.exists()


def test_image_of_another_format_is_not_taken_for_the_bytes_of_a_volume(tmp_path):
    qcow2, packed, raw = (tmp_path / name for name in ("v.qcow2", "v.gz", "v.raw"))
    run("qemu-img", "create", "-q", "-f", "qcow2", qcow2, "16M")
    raw.write_bytes(bytes(16 * MIB))
    stream = gzip.compress(os.urandom(16 * MIB))
    packed.write_bytes(stream + bytes(-len(stream) % 512))
    before = [path.read_bytes() for path in (qcow2, packed)]
    with Daemon(tmp_path) as daemon:
        for path, what in ((qcow2, "a qcow2 image"), (packed, "compressed by gzip")):
            asked = ("volume", "create", "v", "--backend", f"file:{path}")
            refused(daemon.cli(*asked), 2, what, "would destroy", "hdcs volume import", f"file:{path}?raw=on")
        assert before == [path.read_bytes() for path in (qcow2, packed)]
        daemon.ok("volume", "create", "v", "--backend", f"file:{raw}")
        # What a client writes is its own, whatever it looks like.
        daemon.write("v", before[0][:4096])
        daemon.ok("volume", "detach", "v")
        refused(daemon.cli("volume", "create", "w", "--backend", f"file:{raw}"), 2, "a qcow2 image")
        daemon.ok("volume", "create", "w", "--backend", f"file:{raw}?raw=on")
        assert daemon.read("w", 4096) == before[0][:4096]
        daemon.stop()
        daemon.start()
        assert daemon.read("w", 4096) == before[0][:4096]


def test_home_whose_backend_is_gone_is_not_deleted_without_a_word(tmp_path):
    image = tmp_path / "image"
    data = os.urandom(4 * MIB)
    with Daemon(tmp_path) as daemon:
        daemon.create("v", "--mode", "storage", "--backend", f"file:{image}")
        daemon.write("v", data)
        daemon.ok("volume", "flush", "v")
        daemon.stop()
        for cut in (None, 8 * MIB):
            whole = image.read_bytes()
            if cut is None:
                image.unlink()
            else:
                os.truncate(image, cut)
            daemon.start()
            refused(daemon.cli("volume", "delete", "v"), 1, "only copy of its data", "--discard-dirty")
            daemon.stop()
            image.write_bytes(whole)
        daemon.start()
        assert daemon.read("v", 4 * MIB) == data
        daemon.stop()
        image.unlink()
        daemon.start()
        assert daemon.json("volume", "delete", "v", "--discard-dirty")["data"] is None


def test_damaged_catalogue_entry_costs_one_volume_and_loses_nothing(tmp_path):
    with Daemon(tmp_path) as daemon:
        daemon.create("good")
        daemon.create("bad", *DIRTY)
        daemon.write("bad", b"z" * MIB)
        daemon.stop()
        entry = daemon.data / "volumes/bad/volume.json"
        text = entry.read_text()
        entry.write_text(text.replace("16777216", "26777216", 1))
        daemon.start()
        assert daemon.volume("good")["state"] == "healthy"
        bad = daemon.volume("bad")
        assert bad["state"] == "error" and "checksum" in bad["reason"]
        assert str(entry) in bad["reason"]
        assert "checksum" in daemon.ok("volume", "list")
        refused(daemon.cli("volume", "delete", "bad"), 1, "unknown", "--discard-dirty")
        refused(daemon.cli("volume", "create", "bad", "--size", "1M"), 1, "exists already")
        refused(daemon.cli("volume", "flush", "bad"), 1, "not open", "checksum")
        daemon.stop()
        entry.write_text(text)
        daemon.start()
        assert daemon.read("bad", MIB) == b"z" * MIB


def test_newer_catalogue_entry_is_told_from_a_damaged_one(tmp_path):
    with Daemon(tmp_path) as daemon:
        daemon.create("v")
        daemon.stop()
        entry = daemon.data / "volumes/v/volume.json"
        entry.write_text(entry.read_text().replace('"version": 1', '"version": 7'))
        daemon.start()
        assert f"{entry}: made by a newer program (format 7, this program knows 1)" in daemon.volume("v")["reason"]


def test_corrupt_log_costs_one_volume_and_says_what_is_lost(tmp_path):
    with Daemon(tmp_path) as daemon:
        daemon.create("good")
        daemon.create("bad", *DIRTY)
        for index in range(64):
            daemon.write("bad", os.urandom(4096), offset=index * 4096)
        daemon.stop()
        log = daemon.data / "volumes/bad/log"
        content = bytearray(log.read_bytes())
        # The control part of the second span: what is before the ring, then a span of one control and one data block.
        content[(32 + 2) * 4096 + 40] ^= 1
        log.write_bytes(content)
        refused(daemon.cli("check", daemon.data), 1, "1 problem")
        assert daemon.cli("check", daemon.data / "volumes/good").returncode == 0
        found = json.loads(daemon.cli("inspect", log, "--json").stdout)
        assert found["log"]["broken_position"] == 2, found
        daemon.start()
        bad = daemon.volume("bad")
        assert bad["state"] == "error" and "corrupt" in bad["reason"], bad
        assert daemon.volume("good")["state"] == "healthy"
        refused(daemon.cli("volume", "delete", "bad"), 1, "--discard-dirty")
        daemon.ok("volume", "delete", "bad", "--discard-dirty")
        assert [v["name"] for v in daemon.json("volume", "list")] == ["good"]


def test_log_of_another_volume_is_refused(tmp_path):
    with Daemon(tmp_path) as daemon:
        daemon.create("a")
        daemon.create("b")
        daemon.stop()
        volumes = daemon.data / "volumes"
        (volumes / "a/log").rename(volumes / "swap")
        (volumes / "b/log").rename(volumes / "a/log")
        (volumes / "swap").rename(volumes / "b/log")
        daemon.start()
        for name in ("a", "b"):
            volume = daemon.volume(name)
            assert volume["state"] == "error" and "identity" in volume["reason"], volume


def test_backend_that_has_gone_is_not_replaced_by_an_empty_one(tmp_path):
    with Daemon(tmp_path) as daemon:
        image = tmp_path / "image"
        daemon.create("v", "--backend", f"file:{image}")
        daemon.stop()
        image.rename(tmp_path / "moved")
        daemon.start()
        volume = daemon.volume("v")
        assert volume["state"] == "error" and str(image) in volume["reason"]
        assert not image.exists()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 40 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "none", path])
    if mounted.returncode != 0:
        pytest.skip("mounting a file system needs root")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def test_full_disk_at_create_leaves_nothing_behind(tmp_path, small_disk):
    with Daemon(tmp_path, {"cache_total_size_mib": 0}, data=small_disk / "d") as daemon:
        daemon.create("fits")
        done = daemon.cli("volume", "create", "more", "--size", "1G", "--log-size", "64M")
        refused(done, 1, "no space", str(daemon.data), "smaller")
        assert os.listdir(daemon.data / "volumes") == ["fits"]
        assert daemon.volume("fits")["state"] == "healthy"
        daemon.create("small")
        daemon.stop()


def test_full_disk_for_the_cache_is_told(tmp_path, small_disk):
    daemon = Daemon(tmp_path, {"cache_total_size_mib": 64}, data=small_disk / "d")
    daemon.refuses(1, "cannot make the read cache", "cache_total_size_mib")
    assert not (small_disk / "d/cache").exists()


def test_top_prints_tables(daemon):
    daemon.create("busy")
    out = daemon.ok("top", "--iterations", "2", "--interval", "0.1")
    assert out.count("VOLUME") == 2 and "busy" in out
    refused(daemon.cli("top", "--interval", "0"), 2, "between 0.1 and 3600")


def test_operations_on_one_volume_do_not_overlap(daemon, tmp_path):
    daemon.create("once", *DIRTY, "--backend", f"file:{tmp_path}/slow?rate_mib=1")
    daemon.write("once", os.urandom(3 * MIB))
    delete = subprocess.Popen([HDCS, "volume", "delete", "once", "--data", daemon.data],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        daemon.until(lambda: daemon.volume("once")["counters"]["flush_remaining_bytes"] > 0)
        refused(daemon.cli("volume", "delete", "once"), 1, "it is being deleted")
        refused(daemon.cli("volume", "resize", "once", "--size", "1G"), 1, "it is being deleted")
    finally:
        delete.communicate(timeout=60)
    assert delete.returncode == 0


@pytest.fixture
def block_device(tmp_path):
    """A loop device of 32 MiB."""
    image = tmp_path / "device.img"
    image.write_bytes(bytes(32 * MIB))
    made = subprocess.run(["losetup", "--find", "--show", image], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip("loop devices need root")
    yield made.stdout.strip()
    subprocess.run(["losetup", "-d", made.stdout.strip()], check=True)


def test_log_on_a_block_device_never_destroys_what_is_there(tmp_path, block_device):
    with Daemon(tmp_path) as daemon:
        arguments = ["volume", "create", "v", "--size", "16M", "--log-path", block_device]
        with open(block_device, "r+b") as device:
            device.seek(1080)
            device.write(b"\x53\xef")
        refused(daemon.cli(*arguments), 1, block_device, "holds data", "--log-overwrite")
        made = daemon.json(*arguments, "--log-overwrite", *DIRTY)
        assert made["log_bytes"] == 32 * MIB
        daemon.write("v", b"d" * MIB)
        daemon.kill()
        daemon.start()
        assert daemon.read("v", MIB) == b"d" * MIB
        done = daemon.cli("volume", "create", "w", "--size", "16M", "--log-path", block_device)
        refused(done, 2, "is the write log of volume v")
        daemon.ok("volume", "delete", "v")
        # Wiped, so that it can be used again.
        daemon.json(*arguments)
        daemon.stop()
