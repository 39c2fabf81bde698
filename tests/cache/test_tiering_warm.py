"""A warm-up brings a range to the SSD tier in the background, no faster than its rate, and can be given up."""

import random

from daemon import Daemon, refused
from programs import MIB

CONFIG = {"memory_max_mib": 128, "cache_total_size_mib": 32, "read_ahead_max_kib": 0}


def left(daemon):
    return daemon.volume("v")["counters"]["warm_left_bytes"]


def test_warm_up_fills_in_the_background_and_can_be_cancelled(tmp_path):
    with Daemon(tmp_path, CONFIG) as daemon:
        daemon.online()
        data = random.Random(1).randbytes(8 * MIB)
        # At a MiB a second it is never over before it is given up.
        daemon.create("v", "--set", "cache_warm_rate_mib_s=1")
        daemon.write("v", data)
        daemon.ok("volume", "flush", "v")
        daemon.ok("volume", "evict", "v")
        said = daemon.ok("volume", "warm", "v")
        assert said.endswith(" are left to warm up\n"), said
        assert 0 < left(daemon) <= 16 * MIB
        assert "left to warm up" in daemon.ok("volume", "show", "v")
        assert daemon.ok("volume", "warm", "v", "--cancel") == "volume v: 0 B are left to warm up\n"
        assert left(daemon) == 0
        daemon.ok("volume", "evict", "v")
        daemon.ok("volume", "set", "v", "cache_warm_rate_mib_s=1000")
        daemon.ok("volume", "warm", "v", "--offset", "0", "--length", "8M")
        daemon.until(lambda: left(daemon) == 0)
        before = daemon.volume("v")["counters"]["miss_blocks"]
        assert daemon.read("v", 8 * MIB) == data
        assert daemon.volume("v")["counters"]["miss_blocks"] == before
        refused(daemon.cli("volume", "warm", "v", "--offset", "16M"), 2, "beyond its 16777216 bytes")
        refused(daemon.cli("volume", "warm", "v", "--cancel", "--length", "1M"), 2, "cannot be used with")
        daemon.stop()
        daemon.config["cache_total_size_mib"] = 0
        daemon.start()
        refused(daemon.cli("volume", "warm", "v"), 1, "no SSD tier to warm up")
