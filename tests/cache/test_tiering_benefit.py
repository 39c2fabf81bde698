"""What reading costs decides what the read cache keeps: volumes on a slow and on a fast backend share it."""

import random

import pytest

from daemon import Daemon, samples
from programs import MIB

STEP = MIB // 4
FAR = 32 * MIB
NEAR = 192 * MIB

# Both tiers together hold less than half of what is read; nothing is read ahead, and long reads are kept.
CONFIG = {
    "memory_max_mib": 128,
    "cache_total_size_mib": 64,
    "read_ahead_max_kib": 0,
    "sequential_cutoff_kib": 1 << 20,
}


def read(client, size, expected, times=1):
    for at in range(0, size, STEP):
        for _ in range(times):
            assert bytes(client.pread(STEP, at)) == expected[at : at + STEP], at


def far_misses(tmp_path, tiering):
    """Blocks that a slow volume fetches again after a fast one was read, of what fits the cache; and the daemon's words."""
    with Daemon(tmp_path, {**CONFIG, "cache_tiering": tiering}) as daemon:
        daemon.online()
        data = {}
        for name, size, options in [("far", FAR, "?delay_us=50000"), ("near", NEAR, "")]:
            data[name] = random.Random(size).randbytes(size)
            image = tmp_path / name
            image.write_bytes(data[name])
            daemon.create(name, "--backend", f"file:{image}{options}", size=f"{size // MIB}M")
        far, near = daemon.nbd("far"), daemon.nbd("near")
        read(far, FAR, data["far"])
        before = daemon.volume("far")["counters"]["miss_blocks"]
        assert before == FAR // 4096
        # Each part is read again at once, so it has been of use.
        read(near, NEAR, data["near"], times=2)
        read(far, FAR, data["far"])
        misses = daemon.volume("far")["counters"]["miss_blocks"] - before
        shown = {name: daemon.volume(name)["benefit"] for name in data}
        words = daemon.ok("volume", "show", "far")
        page = samples(daemon.api("GET", "/metrics")[1])
        far.shutdown()
        near.shutdown()
        daemon.stop()
    return misses, shown, words, page


def test_benefit_keeps_what_is_slow_to_read_again(tmp_path):
    found = {}
    for tiering in ["recency", "benefit"]:
        (tmp_path / tiering).mkdir()
        found[tiering] = far_misses(tmp_path / tiering, tiering)
    misses, shown, words, page = found["benefit"]
    # How much more stays depends on what the near one's reads cost on a busy machine.
    assert misses < found["recency"][0] * 0.9, (misses, found["recency"][0])
    # No read of it is faster than its delay; one brings 16 lines.
    assert shown["far"]["miss_us"] > 50_000 / 16
    assert shown["far"]["miss_us"] > shown["near"]["miss_us"]
    assert shown["far"]["dram_weight"] >= 1 > shown["near"]["dram_weight"]
    assert "weight in DRAM, in SSD" in words
    cost = page['hdcs_volume_read_cost_seconds{volume="far",tier="backend"}']
    assert cost == pytest.approx(shown["far"]["miss_us"] / 1e6)
    assert page['hdcs_volume_cache_weight{volume="near",tier="dram"}'] < 1
    # Without it the costs are shown, and nothing is weighed.
    shown = found["recency"][1]
    assert shown["far"]["miss_us"] > 50_000 / 16
    assert {volume["dram_weight"] for volume in shown.values()} == {1}


def test_benefit_is_a_word_of_the_configuration(tmp_path):
    daemon = Daemon(tmp_path, {"cache_tiering": "profit"})
    daemon.refuses(2, "cache_tiering", '"benefit", "recency"')
