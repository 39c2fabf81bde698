"""The SSD tier through the daemon: it serves, it is warm after any end, and it is never stale."""

import json
import random
import uuid

import pytest

from daemon import MIB, Daemon, hdcs, samples

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


def read_all(daemon, size, name="v"):
    """The whole volume, in pieces that leave the cache time to write what it fills."""
    client = daemon.nbd(name)
    data = b"".join(bytes(client.pread(1 << 18, at)) for at in range(0, size, 1 << 18))
    client.shutdown()
    return data


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
        dram_bytes = daemon.json("status")["cache"]["dram_bytes"]
        assert dram_bytes < SIZE
        assert read_all(daemon, SIZE) == data
        first = reads(daemon)
        assert first["miss"] == SIZE // BLOCK
        assert read_all(daemon, SIZE) == data
        second = reads(daemon)
        from_ssd = second["ssd_hit"] - first["ssd_hit"]
        # DRAM has its share, a few lines were refused; the rest comes from the SSD.
        assert from_ssd >= (SIZE - dram_bytes) / BLOCK * 0.8, (first, second)
        assert second["miss"] - first["miss"] <= SIZE / BLOCK * 0.2, (first, second)
        found = metrics(daemon)
        # Counters go on while the page is made; nobody reads now.
        assert found['hdcs_volume_read_blocks_total{volume="v",tier="ssd"}'] == second["ssd_hit"]
        assert found['hdcs_volume_read_blocks_total{volume="v",tier="backend"}'] == second["miss"]


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_cache_is_warm_after_a_restart(tmp_path, end):
    size = 16 * MIB
    failing = tmp_path / "backend-fails"
    url = f"file:{tmp_path}/image?error_file={failing}&error_on=read"
    with Daemon(tmp_path, CONFIG) as daemon:
        data = made(daemon, size, 2, "--backend", url)
        # Twice: what was refused the first time is taken the second.
        for _ in range(2):
            read_all(daemon, size)
            daemon.ok("volume", "evict", "v") if not warm_share(daemon, size) else None
        getattr(daemon, end)()
        cached = json.loads(hdcs("inspect", daemon.data / "cache", "--json").stdout)["cache"]
        assert cached["cached_bytes"] >= size * 0.6, cached
        daemon.start()
        cache = daemon.json("status")["cache"]
        assert cache["warm_lines"] == cached["lines"]
        assert read_all(daemon, size) == data
        found = reads(daemon)
        assert found["ssd_hit"] >= cached["cached_bytes"] / BLOCK * 0.95, found
        assert found["miss"] <= (size - cached["cached_bytes"]) / BLOCK * 1.05, found
        assert found["log_hit"] == 0


def warm_share(daemon, size):
    """Whether the SSD tier holds most of it."""
    return daemon.json("status")["cache"]["ssd_used_bytes"] >= size * 0.9
