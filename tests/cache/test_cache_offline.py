"""inspect and check of the read cache that a daemon left behind, and beside one that is at work."""

import json
import random
import threading

import pytest

from daemon import Daemon, hdcs, refused
from programs import MIB

LINE = 16384
FOOTER = MIB - 4096


def fill(daemon, name, size, seed):
    """Give a volume data, and bring it into the cache by reading it; the data."""
    data = random.Random(seed).randbytes(size)
    daemon.write(name, data)
    daemon.ok("volume", "flush", name)
    daemon.ok("volume", "evict", name)
    assert daemon.read(name, size) == data
    return data


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A stopped daemon whose cache holds 3 MiB of one volume and 1 MiB of another, and their data."""
    home = tmp_path_factory.mktemp("filled")
    with Daemon(home) as daemon:
        # Just as large: a read ahead of the data would bring in what lies behind it.
        daemon.create("a", size="3M")
        daemon.create("b", size="1M")
        data = {"a": fill(daemon, "a", 3 * MIB, 1), "b": fill(daemon, "b", MIB, 2)}
        daemon.stop()
        yield daemon, data


def inspected(path):
    done = hdcs("inspect", path, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def segments_offset(cache):
    """Where the first segment begins."""
    return (32 + 2 * cache["journal"]["half_blocks"]) * 4096


def test_cache_inspect_tells_what_is_cached_of_which_volume(filled):
    daemon, _ = filled
    path = daemon.data / "cache"
    found = inspected(path)
    assert found["kind"] == "cache"
    cache = found["cache"]
    assert cache["warm"] and cache["problems"] == []
    assert cache["line_bytes"] == LINE and cache["region_bytes"] == path.stat().st_size
    assert [volume["number"] for volume in cache["volumes"]] == [1, 2]
    # A fill that would have to wait is refused, so a few lines may be missing; none is too many.
    for volume, size in zip(cache["volumes"], (3 * MIB, MIB)):
        assert size * 3 / 4 <= volume["bytes"] == volume["lines"] * LINE <= size
    assert cache["cached_bytes"] == sum(volume["bytes"] for volume in cache["volumes"])
    assert inspected(daemon.data)["cache"]["cached_bytes"] == cache["cached_bytes"]
    text = hdcs("inspect", daemon.data).stdout
    assert "cached of volume number 1 (a): " in text, text


def test_cache_check_verifies_every_line(filled):
    daemon, _ = filled
    done = hdcs("check", daemon.data / "cache", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)[0]
    cache = inspected(daemon.data / "cache")["cache"]
    assert report["blocks"] == cache["lines"] * LINE // 4096
    assert report["segments"] == cache["used_segments"] >= 4
    done = hdcs("check", daemon.data)
    assert done.returncode == 0, done.stderr
    assert "cache: " in done.stdout


def test_cache_check_finds_one_flipped_bit_and_the_restart_serves_right_bytes(filled):
    daemon, data = filled
    path = daemon.data / "cache"
    good = path.read_bytes()
    base = segments_offset(inspected(path)["cache"])
    rng = random.Random(5)
    places = {
        100: "superblock 0",
        16 * 4096 + 8: "superblock 1",
        base + rng.randrange(60 * LINE): "segment 0",
        base + MIB + rng.randrange(60 * LINE): "segment 1",
        base + MIB + FOOTER + rng.randrange(64): "segment 1: its footer",
    }
    try:
        for offset, place in places.items():
            bad = bytearray(good)
            bad[offset] ^= 1 << rng.randrange(8)
            path.write_bytes(bad)
            for target in (path, daemon.data):
                done = hdcs("check", target)
                refused(done, 1, "check found 1 problem", "nothing is to be restored")
                assert place in done.stdout, f"{offset}: {done.stdout}"
                assert "clean data: fetched again" in done.stdout, done.stdout
        # All of it at once, and then the node itself.
        for offset in places:
            bad[offset] ^= 0x20
        path.write_bytes(bad)
        daemon.start()
        for name, expected in data.items():
            assert daemon.read(name, len(expected)) == expected
        daemon.stop()
    finally:
        path.write_bytes(good)


def test_cache_that_is_damaged_and_may_be_in_use_is_read_again_only_a_few_times(filled, tmp_path):
    daemon, _ = filled
    bad = bytearray((daemon.data / "cache").read_bytes())
    base = segments_offset(inspected(daemon.data / "cache")["cache"])
    # Both superblocks, and then the footer of each segment: nobody knows whether something is writing them.
    for offsets in [(100, 16 * 4096 + 8), range(base + FOOTER, len(bad) - 4096, MIB)]:
        damaged = bytearray(bad)
        for offset in offsets:
            damaged[offset] ^= 1
        path = tmp_path / "copy"
        path.write_bytes(damaged)
        refused(hdcs("check", path), 1, "check found", "nothing is to be restored")
        assert hdcs("inspect", path).returncode == 0


def test_cache_check_beside_a_daemon_at_work_finds_nothing_wrong(tmp_path):
    with Daemon(tmp_path, {"destage_age_max_ms": 1, "dirty_ratio_min": 0}) as daemon:
        daemon.create("v", size="32M")
        rng = random.Random(9)
        daemon.write("v", rng.randbytes(32 * MIB))
        stop = threading.Event()

        def work():
            client = daemon.nbd("v")
            while not stop.is_set():
                client.pread(1 << 18, rng.randrange(127) << 18)
                client.pwrite(rng.randbytes(4096), rng.randrange(8192) << 12)
            client.shutdown()

        worker = threading.Thread(target=work)
        worker.start()
        try:
            for _ in range(5):
                done = hdcs("check", daemon.data / "cache")
                assert done.returncode == 0, done.stdout
                assert inspected(daemon.data)["cache"]["problems"] == []
        finally:
            stop.set()
            worker.join()
