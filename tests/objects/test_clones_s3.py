"""Clones of one snapshot share one cached copy of it on a node, and each has what it wrote for itself. The
store is a real S3; what it is asked is counted."""

import random

from clone_cases import CONFIG, SIZE, boot, image
from daemon import Daemon, refused, samples
from object_stores import BLOCK, Model, counters
from programs import MIB


def store(daemon, name):
    return counters(daemon, name)["store"]


def asked(daemon, name):
    """What a volume had of its backend so far: blocks for its client, and gets."""
    return counters(daemon, name)["miss_blocks"], store(daemon, name)["gets"]


def clones(daemon, s3, prefix, data, names=("a", "b")):
    """Clones of a volume that holds `data`, which was written as an image is: without its zeroes."""
    daemon.create("v", "--backend", s3.url(f"{prefix}"), size=str(SIZE))
    client = daemon.nbd("v")
    for offset in range(0, SIZE, BLOCK):
        block = data[offset : offset + BLOCK]
        if any(block):
            client.pwrite(block, offset)
    client.flush()
    client.shutdown()
    daemon.ok("volume", "snapshot", "v", "golden")
    for name in names:
        daemon.ok("volume", "clone", "v@golden", name, "--backend", s3.url(f"{prefix}-{name}"))


def test_clones_second_boot_reads_what_the_first_one_has_cached(s3, tmp_path):
    tree, data = image(tmp_path)
    with Daemon(tmp_path, CONFIG) as daemon:
        clones(daemon, s3, "boot", data)
        before = asked(daemon, "a")
        boot(daemon, "a", tree, tmp_path)
        first = asked(daemon, "a")
        assert first[0] > before[0] and first[1] > before[1]
        opened, lines = store(daemon, "b"), daemon.cache()["filled_lines"]
        boot(daemon, "b", tree, tmp_path)
        assert counters(daemon, "b")["miss_blocks"] == 0
        assert store(daemon, "b") == opened, "the store was asked for nothing"
        assert daemon.cache()["filled_lines"] == lines, "nothing was cached again"
        assert counters(daemon, "b")["inherited_bytes"] == SIZE
        assert samples(daemon.api("GET", "/metrics")[1])['hdcs_volume_inherited_bytes{volume="b"}'] == SIZE
        assert "cached with other clones" in daemon.ok("volume", "show", "b")
        # A later one finds it as well, and so does everybody after a restart.
        daemon.ok("volume", "clone", "v@golden", "c", "--backend", s3.url("boot-c"))
        assert daemon.read_all("c", SIZE) == data
        daemon.stop()
    with Daemon(tmp_path, CONFIG) as daemon:
        assert daemon.online()["warm_lines"] > 0
        opened = store(daemon, "b")
        (tmp_path / "again").mkdir()
        boot(daemon, "b", tree, tmp_path / "again")
        found = counters(daemon, "b")
        # What was in DRAM alone is gone: lines of the last segment, and others that were compared then, which are more
        # where the disk is slow.
        assert found["ssd_hit_blocks"] > 2 * found["miss_blocks"], found
        assert daemon.read_all("a", SIZE) == daemon.read_all("c", SIZE) == data
        before = asked(daemon, "b")
        assert daemon.read_all("b", SIZE) == data
        assert asked(daemon, "b") == before
        daemon.stop()


def test_clones_see_nothing_of_each_other_through_the_cache(s3, tmp_path):
    rng = random.Random(3)
    data = rng.randbytes(SIZE)
    a, b = Model(4, SIZE), Model(5, SIZE)
    a.image[:] = b.image[:] = data
    with Daemon(tmp_path, CONFIG) as daemon:
        clones(daemon, s3, "apart", data)

        def check():
            for name, model in [("a", a), ("b", b)]:
                client = daemon.nbd(name)
                model.check(client)
                client.shutdown()

        for round in range(4):
            for name, model in [("a", a), ("b", b)]:
                client = daemon.nbd(name)
                # Sectors, blocks, and what spans several lines.
                model.write(client, 40)
                if round % 2:
                    offset = rng.randrange(SIZE // BLOCK - 8) * BLOCK
                    client.trim(8 * BLOCK, offset)
                    model.image[offset : offset + 8 * BLOCK] = bytes(8 * BLOCK)
                client.flush()
                client.shutdown()
                check()
            if round % 2:
                daemon.ok("volume", "flush", "a")
                check()
            daemon.kill()
            daemon.start()
            check()
        # What a clone drops of the cache is its own.
        inherited = counters(daemon, "b")["inherited_bytes"]
        assert 0 < inherited < SIZE
        daemon.ok("volume", "clone", "v@golden", "c", "--backend", s3.url("apart-c"))
        assert daemon.read_all("c", SIZE) == data
        daemon.ok("volume", "flush", "a")
        daemon.ok("volume", "evict", "a")
        before = asked(daemon, "c")
        assert daemon.read_all("c", SIZE) == data
        assert asked(daemon, "c") == before
        check()
        assert daemon.read_all("v", SIZE) == data
        daemon.stop()


def test_clones_of_different_snapshots_share_nothing_that_differs(s3, tmp_path):
    rng = random.Random(6)
    data = rng.randbytes(SIZE)
    with Daemon(tmp_path, CONFIG) as daemon:
        clones(daemon, s3, "two", data, names=("a",))
        later = rng.randbytes(MIB)
        daemon.write("v", later)
        daemon.ok("volume", "snapshot", "v", "later")
        daemon.ok("volume", "clone", "v@later", "b", "--backend", s3.url("two-b"))
        assert daemon.read_all("a", SIZE) == data
        assert daemon.read_all("b", SIZE) == later + data[MIB:]
        # A clone of a clone began as that, whatever its own parent has written since.
        daemon.write("b", bytes([9]) * MIB, 4 * MIB)
        daemon.ok("volume", "snapshot", "b", "own")
        daemon.ok("volume", "clone", "b@own", "c", "--backend", s3.url("two-c"))
        daemon.write("b", bytes([8]) * MIB, 4 * MIB)
        expected = later + data[MIB : 4 * MIB] + bytes([9]) * MIB + data[5 * MIB :]
        assert daemon.read_all("c", SIZE) == expected
        # It is cut and grows: what comes back is zero, and not the snapshot's.
        daemon.ok("volume", "resize", "c", "--size", str(SIZE // 2 + 512), "--shrink")
        daemon.ok("volume", "resize", "c", "--size", str(SIZE))
        cut = expected[: SIZE // 2 + 512] + bytes(SIZE // 2 - 512)
        assert daemon.read_all("c", SIZE) == cut
        daemon.kill()
        daemon.start()
        assert daemon.read_all("c", SIZE) == cut
        daemon.stop()


def test_clones_number_in_the_cache_is_of_the_snapshot_for_good(s3, tmp_path):
    data = random.Random(8).randbytes(SIZE)
    with Daemon(tmp_path, CONFIG) as daemon:
        clones(daemon, s3, "number", data, names=("a",))
        assert daemon.read_all("a", SIZE) == data
        daemon.ok("volume", "delete", "a")
        # The next one finds what the one before has read.
        daemon.ok("volume", "clone", "v@golden", "b", "--backend", s3.url("number-b"))
        before = asked(daemon, "b")
        assert daemon.read_all("b", SIZE) == data
        assert asked(daemon, "b") == before
        refused(daemon.cli("volume", "snapshot", "v", "golden", "--delete"), 1, "clone")
        daemon.stop()


def test_volumes_with_equal_content_share_one_copy(s3, tmp_path):
    size, piece, lines = 4 * MIB, 64 << 10, 4
    data = random.Random(9).randbytes(size)
    with Daemon(tmp_path, {**CONFIG, "read_ahead_max_kib": 0}) as daemon:
        for name in ["one", "two"]:
            daemon.create(name, "--backend", s3.url(f"equal-{name}"), size=str(size))
            daemon.write(name, data)
            daemon.ok("volume", "flush", name)
            daemon.ok("volume", "evict", name)
        # Beside a slow device the tier leaves out some of what clients read; a promotion waits for room.
        daemon.ok("volume", "promote", "one")
        daemon.until(lambda: daemon.cache()["filled_lines"] == size // piece * lines)
        assert daemon.read_all("one", size) == data
        two = daemon.nbd("two")
        used = daemon.cache()["ssd_used_bytes"]
        # The tier compares few lines at a time; under more it would store some twice.
        for offset in range(0, size, piece):
            before = daemon.cache()["shared_lines"]
            assert bytes(two.pread(piece, offset)) == data[offset : offset + piece]
            daemon.until(lambda: daemon.cache()["shared_lines"] == before + lines)
        found = daemon.cache()
        assert found["ssd_used_bytes"] == used and found["filled_lines"] == size // piece * lines, found
        two.shutdown()
        daemon.stop()
