"""Pins: a range stays in the SSD tier, through scans, restarts and writes, within limits."""

import random

from daemon import Daemon, refused
from programs import MIB

BLOCK = 4096
TIER = 96 * MIB
# Two of these are more than DRAM holds.
PINNED = 40 * MIB

# Nothing is read ahead, and long reads are kept, so every miss is a client's and a scan fills the tier.
CONFIG = {
    "memory_max_mib": 128,
    "cache_total_size_mib": TIER // MIB,
    "read_ahead_max_kib": 0,
    "sequential_cutoff_kib": 1 << 20,
}


def filled(daemon, name="v"):
    """Wait until everything that is pinned was looked at and fetched."""
    daemon.until(lambda: daemon.volume(name)["counters"]["pinned_left_bytes"] == 0)


def misses(daemon, size, offset, expected):
    """Blocks that reading a range fetches from the backend; it reads as it should."""
    before = daemon.volume("v")["counters"]["miss_blocks"]
    client = daemon.nbd("v")
    for at in range(offset, offset + size, MIB // 4):
        assert bytes(client.pread(MIB // 4, at)) == expected[at : at + MIB // 4], at
    client.shutdown()
    return daemon.volume("v")["counters"]["miss_blocks"] - before


def holds(daemon):
    """Where there was no room for what is kept, a line goes and is fetched again, once that is seen."""
    filled(daemon)


def scan(daemon):
    """Read more than twice the tier of another volume."""
    client = daemon.nbd("scanned")
    for at in range(0, 5 * TIER // 2, MIB // 4):
        client.pread(MIB // 4, at)
    client.shutdown()
    holds(daemon)


def test_pin_stays_through_scans_restarts_and_writes(tmp_path):
    with Daemon(tmp_path, CONFIG) as daemon:
        daemon.online()
        data = bytearray(random.Random(1).randbytes(2 * PINNED))
        assert daemon.cache()["dram_bytes"] < 2 * PINNED
        daemon.create("v", size="80M")
        daemon.write("v", data)
        daemon.ok("volume", "flush", "v")
        daemon.ok("volume", "evict", "v")
        daemon.create("scanned", size="240M")
        daemon.write("scanned", random.Random(2).randbytes(240 * MIB))
        daemon.ok("volume", "flush", "scanned")
        daemon.ok("volume", "evict", "scanned")
        said = daemon.ok("volume", "pin", "v", "--offset", "0", "--length", "40M")
        assert said == "volume v: 40 MiB in 1 range pinned, 100% in the SSD tier\n", said
        # The other half is there as well, but nothing keeps it from what is asked for later.
        daemon.ok("volume", "promote", "v")
        scan(daemon)
        daemon.ok("volume", "promote", "scanned")
        holds(daemon)
        assert misses(daemon, PINNED, 0, data) == 0
        assert misses(daemon, PINNED, PINNED, data) > 0
        daemon.stop()
        daemon.start()
        daemon.online()
        filled(daemon)
        assert daemon.volume("v")["pins"] == [{"offset": 0, "bytes": PINNED}]
        scan(daemon)
        assert misses(daemon, PINNED, 0, data) == 0
        # What is overwritten is fetched again once it is destaged, and stays.
        data[MIB : 2 * MIB] = random.Random(3).randbytes(MIB)
        daemon.write("v", data[MIB : 2 * MIB], MIB)
        daemon.ok("volume", "flush", "v")
        filled(daemon)
        scan(daemon)
        assert misses(daemon, PINNED, 0, data) == 0
        # So is all of it when the device has lost it.
        daemon.stop()
        (daemon.data / "cache").unlink()
        daemon.start()
        daemon.online()
        filled(daemon)
        assert misses(daemon, PINNED, 0, data) == 0


def test_pin_is_listed_joined_and_cut(tmp_path):
    with Daemon(tmp_path, CONFIG) as daemon:
        daemon.online()
        daemon.create("v")
        daemon.ok("volume", "pin", "v", "--length", "1M", "--no-wait")
        volume = daemon.json("volume", "pin", "v", "--offset", "1M", "--length", "1M")
        assert volume["pins"] == [{"offset": 0, "bytes": 2 * MIB}]
        assert volume["counters"]["pinned_bytes"] == 2 * MIB
        assert volume["counters"]["pinned_left_bytes"] == 0
        volume = daemon.json("volume", "unpin", "v", "--offset", "512K", "--length", "1M")
        assert volume["pins"] == [
            {"offset": 0, "bytes": MIB // 2},
            {"offset": 3 * MIB // 2, "bytes": MIB // 2},
        ]
        assert "1 MiB in 2 ranges pinned, 100%" in daemon.ok("volume", "show", "v")
        # What is cut off is not pinned any more.
        volume = daemon.json("volume", "resize", "v", "--size", "1M", "--shrink")
        assert volume["pins"] == [{"offset": 0, "bytes": MIB // 2}]
        status, page = daemon.api("GET", "/metrics")
        assert status == 200
        assert f'hdcs_volume_pinned_bytes{{volume="v"}} {MIB // 2}' in page
        assert "nothing is pinned" in daemon.ok("volume", "unpin", "v")
        daemon.ok("volume", "delete", "v")


def test_pin_is_refused_beyond_its_share_and_where_nothing_is_cached(tmp_path):
    with Daemon(tmp_path, {**CONFIG, "cache_total_size_mib": 32, "cache_pin_ratio_max": 30}) as daemon:
        daemon.online()
        daemon.create("v")
        daemon.create("w")
        refused(daemon.cli("volume", "pin", "v"), 1, "its pins would take 16777216 bytes",
                "cache_pin_ratio_max")
        assert daemon.volume("v")["pins"] == []
        daemon.ok("volume", "pin", "v", "--length", "6M")
        refused(daemon.cli("volume", "pin", "w", "--length", "6M"), 1, "beside 6291456 of other volumes")
        # Deleted, it takes nothing.
        daemon.ok("volume", "delete", "v")
        daemon.ok("volume", "pin", "w", "--length", "6M")
        for arguments in (["--offset", "1"], ["--length", "0"], ["--offset", "16M"]):
            refused(daemon.cli("volume", "pin", "w", *arguments), 2, "beyond its 16777216 bytes")
        daemon.create("through", "--policy", "pass-through")
        refused(daemon.cli("volume", "pin", "through"), 1, "its policy is pass-through")
        # A tier that has become too small keeps nothing, and says so.
        daemon.stop()
        daemon.config["cache_pin_ratio_max"] = 10
        daemon.start()
        daemon.online()
        volume = daemon.volume("w")
        assert volume["pins"] == [{"offset": 0, "bytes": 6 * MIB}]
        assert volume["counters"]["pinned_bytes"] == 0
        assert "cache_pin_ratio_max" in volume["pin_trouble"]
        daemon.stop()
        daemon.config["cache_total_size_mib"] = 0
        daemon.start()
        refused(daemon.cli("volume", "pin", "w", "--length", "1M"), 1, "has no SSD tier")
        assert "nothing is pinned" in daemon.ok("volume", "unpin", "w")
