"""The SSD tier through the daemon: it serves, it is warm after any end, and it is never stale."""

import json
import random
import uuid

import pytest

from daemon import Daemon, hdcs, samples
from programs import MIB

LINE = 16384
BLOCK = 4096
SIZE = 48 * MIB

# DRAM holds less than SIZE, the SSD tier more. Nothing is read ahead, so every count is a client's.
CONFIG = {
    "memory_max_mib": 128,
    "cache_total_size_mib": 96,
    "read_ahead_max_kib": 0,
    "sequential_cutoff_kib": 1 << 20,
}


def reads(daemon, name="v"):
    """Blocks that clients have read, by where they were found."""
    counters = daemon.volume(name)["counters"]
    return {tier: counters[f"{tier}_blocks"] for tier in ("log_hit", "dram_hit", "ssd_hit", "miss")}


def metrics(daemon):
    status, page = daemon.api("GET", "/metrics")
    assert status == 200
    return samples(page)


def made(daemon, size, seed, *arguments):
    """A new volume that is clean and in no cache; its data."""
    daemon.create("v", *arguments, size=f"{size // MIB}M")
    data = bytearray(random.Random(seed).randbytes(size))
    daemon.write("v", data)
    daemon.ok("volume", "flush", "v")
    daemon.ok("volume", "evict", "v")
    return data


def test_cache_serves_what_dram_cannot_hold_from_the_ssd(tmp_path):
    with Daemon(tmp_path, CONFIG) as daemon:
        data = made(daemon, SIZE, 1)
        dram_bytes = daemon.cache()["dram_bytes"]
        assert dram_bytes < SIZE
        assert daemon.read_all("v", SIZE) == data
        first = reads(daemon)
        assert first["miss"] == SIZE // BLOCK
        # What a slow device made the cache refuse.
        daemon.ok("volume", "promote", "v")
        assert daemon.read_all("v", SIZE) == data
        second = reads(daemon)
        from_ssd = second["ssd_hit"] - first["ssd_hit"]
        # DRAM has its share; the rest comes from the SSD.
        assert from_ssd >= (SIZE - dram_bytes) / BLOCK * 0.8, (first, second)
        assert second["miss"] - first["miss"] <= SIZE / BLOCK * 0.2, (first, second)
        found = metrics(daemon)
        # Counters go on while the page is made; nobody reads now.
        assert found['hdcs_volume_read_blocks_total{volume="v",tier="ssd"}'] == second["ssd_hit"]
        assert found['hdcs_volume_read_blocks_total{volume="v",tier="backend"}'] == second["miss"]


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_cache_is_warm_after_a_restart(tmp_path, end):
    size = 16 * MIB
    with Daemon(tmp_path, CONFIG) as daemon:
        data = made(daemon, size, 2)
        daemon.read_all("v", size)
        # What a slow device made the cache refuse; and it is given the time to write that.
        daemon.ok("volume", "promote", "v")
        daemon.until(lambda: daemon.cache()["ssd_written_bytes"] >= size - 2 * MIB)
        getattr(daemon, end)()
        cached = json.loads(hdcs("inspect", daemon.data / "cache", "--json").stdout)["cache"]
        # A crash loses the two segments that were being filled, nothing else.
        assert cached["cached_bytes"] >= size * 0.6, cached
        daemon.start()
        # What was under way at a kill may reach the device after that was looked at.
        warm = daemon.online()["warm_lines"]
        assert warm == cached["lines"] or end == "kill" and warm > cached["lines"]
        assert daemon.read_all("v", size) == data
        found = reads(daemon)
        assert found["miss"] <= (size - cached["cached_bytes"]) / BLOCK, found
        assert found["ssd_hit"] >= cached["cached_bytes"] / BLOCK * 0.9, found


def test_cache_is_never_stale_after_kills(tmp_path):
    """Cached blocks are overwritten and destaged, the daemon is killed: every byte is the last one."""
    size = 8 * MIB
    rng = random.Random(3)
    with Daemon(tmp_path, CONFIG) as daemon:
        model = made(daemon, size, 3)
        warm = stale = 0
        for _ in range(12):
            assert daemon.read_all("v", size) == model
            client = daemon.nbd("v")
            for _ in range(rng.randrange(1, 120)):
                data = rng.randbytes(rng.randrange(1, 17) * BLOCK)
                offset = rng.randrange(size // BLOCK - 16) * BLOCK
                client.pwrite(data, offset)
                model[offset : offset + len(data)] = data
                if rng.random() < 0.1:
                    # It goes back into the cache, and is overwritten again.
                    assert client.pread(len(data), offset) == data
            client.flush()
            client.shutdown()
            if rng.random() < 0.8:
                daemon.ok("volume", "flush", "v")
            daemon.kill()
            if rng.random() < 0.3:
                done = hdcs("check", daemon.data)
                assert done.returncode == 0, done.stdout
            daemon.start()
            cache = daemon.online()
            warm += cache["warm_lines"]
            stale += cache["corrupt_blocks"]
        assert daemon.read_all("v", size) == model
        assert warm > 0, "no restart was warm: nothing was tested"
        assert stale == 0
        assert reads(daemon)["miss"] < size // BLOCK


def test_cache_damage_is_counted_and_never_served(tmp_path):
    size = 8 * MIB
    rng = random.Random(4)
    with Daemon(tmp_path, CONFIG) as daemon:
        data = made(daemon, size, 4)
        daemon.read_all("v", size)
        path = daemon.data / "cache"
        for _ in range(3):
            daemon.stop()
            content = bytearray(path.read_bytes())
            cache = json.loads(hdcs("inspect", path, "--json").stdout)["cache"]
            base = (8 + 2 * cache["journal"]["half_blocks"]) * BLOCK
            # One bit in a line of each of the first segments, and the footer of another.
            for segment in range(4):
                content[base + segment * MIB + rng.randrange(LINE * 60)] ^= 1 << rng.randrange(8)
            content[base + 5 * MIB - 4096 + 4000 + rng.randrange(90)] ^= 1
            path.write_bytes(content)
            assert hdcs("check", path).returncode == 1
            daemon.start()
            daemon.online()
            assert daemon.read_all("v", size) == data
            counters = daemon.volume("v")["counters"]
            assert counters["cache_corrupt_blocks"] > 0
            found = metrics(daemon)
            name = 'hdcs_volume_corrupt_blocks_total{volume="v",place="cache"}'
            assert found[name] == counters["cache_corrupt_blocks"]
            assert daemon.cache()["corrupt_blocks"] > 0
            assert counters["errors"] == 0
            # What was bad is good again.
            assert daemon.read_all("v", size) == data


def test_cache_of_another_node_is_discarded(tmp_path):
    size = 4 * MIB
    homes = [tmp_path / name for name in ("one", "other")]
    for home in homes:
        home.mkdir()
    daemons = [Daemon(home, CONFIG) for home in homes]
    contents = []
    for daemon, seed in zip(daemons, (5, 6)):
        with daemon:
            contents.append(made(daemon, size, seed))
            daemon.read_all("v", size)
            daemon.stop()
    one, other = daemons
    (other.data / "cache").write_bytes((one.data / "cache").read_bytes())
    done = hdcs("check", other.data)
    assert done.returncode == 0 and "nothing in it counts" in done.stdout, done.stdout
    with other:
        assert other.online()["warm_lines"] == 0
        assert other.read_all("v", size) == contents[1]
        found = reads(other)
        assert found["miss"] == size // BLOCK and found["ssd_hit"] == 0, found
        other.stop()
        # From then on it is this node's.
        other.start()
        assert other.online()["warm_lines"] > 0
        assert other.read_all("v", size) == contents[1]


def test_cache_that_is_gone_or_cut_short_starts_cold_and_says_so(tmp_path):
    size = 4 * MIB
    with Daemon(tmp_path, CONFIG) as daemon:
        data = made(daemon, size, 7)
        path = daemon.data / "cache"
        whole = 96 * MIB
        for bytes_left, says in (
            (None, "is not there"),
            (0, "has 0 bytes instead"),
            (100, "has 100 bytes instead"),
            (5 * MIB + 3, "bytes instead"),
        ):
            daemon.read_all("v", size)
            daemon.stop()
            assert path.stat().st_size == whole
            if bytes_left is None:
                path.unlink()
            else:
                with open(path, "r+b") as cache:
                    cache.truncate(bytes_left)
            before = len(daemon.log())
            daemon.start()
            lines = daemon.log()[before:].splitlines()
            assert any(says in line and "starts cold" in line for line in lines), lines
            assert daemon.online()["warm_lines"] == 0
            assert daemon.read_all("v", size) == data
            assert reads(daemon)["miss"] == size // BLOCK


def test_cache_place_with_rot_in_its_magic_is_still_ours_and_another_file_is_not(tmp_path):
    size = 4 * MIB
    with Daemon(tmp_path, CONFIG) as daemon:
        data = made(daemon, size, 8)
        daemon.read_all("v", size)
        daemon.stop()
        path = daemon.data / "cache"
        with open(path, "r+b") as cache:
            cache.write(b"h")
        daemon.start()
        assert daemon.read_all("v", size) == data
        daemon.stop()
        foreign = uuid.UUID(int=9).bytes * 1024
        path.write_bytes(foreign)
        daemon.refuses(1, "not an HDCS cache")
        assert path.read_bytes() == foreign
