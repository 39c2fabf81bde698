"""Heat maps: what is hot in a cache is told, kept in a file, and brought back by a warm-up from it."""

import json
import random
from contextlib import contextmanager

from daemon import Daemon, hdcs, refused
from programs import MIB

BLOCK = 4096
KIB = 1024

# Nothing is read ahead and long reads are kept, so what is cached is what was read.
CONFIG = {"memory_max_mib": 128, "cache_total_size_mib": 32, "read_ahead_max_kib": 0,
          "sequential_cutoff_kib": 1 << 20}
# Where the hot spots of a volume are; nothing else of it is read.
HOT = [(3 * MIB, 512 * KIB), (11 * MIB, 256 * KIB)]


def left(daemon, name="v"):
    return daemon.volume(name)["counters"]["warm_left_bytes"]


@contextmanager
def node(tmp_path, *settings, **config):
    """A daemon, its cache in use, with a volume of 16 MiB over a file; and what is in that."""
    data = random.Random(7).randbytes(16 * MIB)
    (tmp_path / "image").write_bytes(data)
    with Daemon(tmp_path, {**CONFIG, **config}) as daemon:
        if daemon.config["cache_total_size_mib"]:
            daemon.online()
        chosen = [word for setting in settings for word in ("--set", setting)]
        daemon.create("v", *chosen, "--backend", f"file:{tmp_path / 'image'}")
        yield daemon, data


def read(daemon, ranges, data, name="v", piece=64 * KIB):
    """Read ranges, as they should be; how many blocks of that were misses."""
    before = daemon.volume(name)["counters"]["miss_blocks"]
    client = daemon.nbd(name)
    for offset, size in ranges:
        for at in range(offset, offset + size, piece):
            assert bytes(client.pread(piece, at)) == data[at : at + piece], at
    client.shutdown()
    return daemon.volume(name)["counters"]["miss_blocks"] - before


def blocks(ranges):
    return sum(size for _, size in ranges) // BLOCK


def saved(daemon, path, name="v"):
    """Save the heat map of a volume of which the hot spots were read, the first one twice."""
    summary = daemon.json("volume", "heat", name, "--save", path)
    assert summary["file"] == str(path)
    return summary


def test_heat_tells_what_is_hot_and_warms_up_another_cache(tmp_path):
    path = tmp_path / "map"
    with node(tmp_path) as (daemon, data):
        empty = daemon.json("volume", "heat", "v")
        assert empty["cold_bytes"] == empty["bytes"] == 16 * MIB
        assert read(daemon, HOT, data) == blocks(HOT)
        assert read(daemon, HOT[:1], data) == 0
        summary = saved(daemon, path)
        assert summary["unit_bytes"] == 16 * KIB
        assert summary["hot_bytes"] == HOT[0][1]
        assert summary["warm_bytes"] == HOT[1][1]
        assert summary["cool_bytes"] == 0
        stretches = {line["offset"]: line for line in summary["histogram"]}
        assert stretches[3 * MIB]["hot_bytes"] == HOT[0][1]
        assert stretches[11 * MIB]["warm_bytes"] == HOT[1][1]
        assert stretches[5 * MIB]["cold_bytes"] == MIB
        text = daemon.ok("volume", "heat", "v")
        assert text.startswith("volume v: 16 MiB in units of 16 KiB\n"), text
        hot = next(line for line in text.splitlines() if line.lstrip().startswith("3 MiB |"))
        assert hot.count("#") == 24 and hot.endswith(" 50%"), text
        daemon.ok("volume", "detach", "v")
    # Another node over the same image, whose cache has seen nothing of it.
    (tmp_path / "other").mkdir()
    with Daemon(tmp_path / "other", CONFIG) as other:
        other.online()
        other.create("w", "--backend", f"file:{tmp_path / 'image'}")
        said = other.ok("volume", "warm", "w", "--from", path, "--wait")
        assert said == "volume w: 0 B are left to warm up\n", said
        assert read(other, HOT, data, "w") == 0
        cold = [(offset + size, MIB) for offset, size in HOT]
        assert read(other, cold, data, "w") == blocks(cold)


def test_heat_warms_up_after_the_cache_is_lost_and_can_be_cancelled(tmp_path):
    path = tmp_path / "map"
    # At a MiB a second it is never over before it is given up.
    with node(tmp_path, "cache_warm_rate_mib_s=1") as (daemon, data):
        everything = [(0, 16 * MIB)]
        read(daemon, everything, data)
        read(daemon, HOT, data)
        saved(daemon, path)
        daemon.stop()
        (daemon.data / "cache").unlink()
        daemon.start()
        daemon.online()
        daemon.ok("volume", "warm", "v", "--from", path)
        assert 0 < left(daemon) <= 16 * MIB
        assert daemon.volume("v")["counters"]["warm_bytes"] == 16 * MIB
        assert "of 16 MiB (`hdcs volume warm v --cancel`" in daemon.ok("volume", "show", "v")
        # Clients go on beside it, and what is hottest is first.
        daemon.until(lambda: left(daemon) <= 15 * MIB)
        assert read(daemon, HOT, data) == 0
        assert daemon.ok("volume", "warm", "v", "--cancel") == "volume v: 0 B are left to warm up\n"
        assert read(daemon, [(15 * MIB, MIB)], data) == blocks([(15 * MIB, MIB)])


def test_heat_map_of_a_larger_volume_is_cut_and_that_is_said(tmp_path):
    path = tmp_path / "map"
    with node(tmp_path) as (daemon, data):
        read(daemon, HOT, data)
        saved(daemon, path)
        daemon.create("small", size="4M")
        done = daemon.cli("volume", "warm", "small", "--from", path, "--wait")
        assert done.returncode == 0, done.stderr
        assert "left out: 256 KiB lie beyond the end of the volume (the map is of 16 MiB)" in done.stderr


def test_heat_map_that_is_damaged_foreign_or_too_large_is_refused(tmp_path):
    path = tmp_path / "map"
    with node(tmp_path, "cache_warm_rate_mib_s=1") as (daemon, data):
        read(daemon, HOT, data)
        saved(daemon, path)
        daemon.ok("volume", "evict", "v")
        good = path.read_bytes()
        assert good[:8] == b"HDCSHEAT" and len(good) < 200
        bad = tmp_path / "bad"
        wrong = {
            "flipped": good[:70] + bytes([good[70] ^ 1]) + good[71:],
            "cut": good[:-1],
            "longer": good + b"\0",
            "foreign": b"PK\3\4" + good[4:],
            "newer": good[:8] + b"\2\0" + good[10:],
            "empty": b"",
            "large": good + bytes(MIB // 2),
            "too large": good + bytes(2 * MIB),
        }
        for what, content in wrong.items():
            bad.write_bytes(content)
            refused(daemon.cli("volume", "warm", "v", "--from", bad), 1, "heat map: ", str(bad))
            status, body = daemon.api("POST", "/v1/volumes/v/warm-from", content)
            # Only what no map can be is not looked at.
            refusals = [(400, "malformed")] if what == "too large" else [(422, "invalid")]
            assert (status, json.loads(body)["kind"]) in refusals, (what, body)
            # A disk that is slow for a moment changes the state.
            event = [event for event in daemon.json("events", "v") if event["kind"] != "state"][-1]
            assert (event["kind"], event["outcome"]) == ("warm-from", "refused"), (what, event)
            assert daemon.volume("v")["counters"]["warm_bytes"] == 0
        refused(daemon.cli("volume", "warm", "v", "--from", tmp_path / "absent"), 1, "No such file")
        refused(daemon.cli("volume", "warm", "v", "--from", path, "--length", "1M"), 2, "cannot be used with")
        # What is no heat map is not written over.
        bad.write_bytes(b"precious")
        refused(daemon.cli("volume", "heat", "v", "--save", bad), 1, "something else than a heat map")
        assert bad.read_bytes() == b"precious"
        refused(hdcs("volume", "heat", "none", "--data", daemon.data), 1, "no volume none")
        assert read(daemon, HOT, data) == blocks(HOT), "nothing was warmed up"


def test_heat_without_an_ssd_tier_is_that_of_dram(tmp_path):
    path = tmp_path / "map"
    with node(tmp_path, cache_total_size_mib=0) as (daemon, data):
        read(daemon, HOT, data)
        read(daemon, HOT[:1], data)
        summary = saved(daemon, path)
        assert (summary["hot_bytes"], summary["warm_bytes"]) == (HOT[0][1], HOT[1][1])
        daemon.stop()
        daemon.start()
        daemon.ok("volume", "warm", "v", "--from", path, "--wait")
        assert read(daemon, HOT, data) == 0
        assert daemon.volume("v")["counters"]["dram_hit_blocks"] == blocks(HOT)


def kept(daemon):
    return daemon.data / "volumes" / "v" / "heat.map"


def saved_by_itself(daemon):
    heat = daemon.volume("v")["heat"]
    return heat is not None and heat["saved_ms"] is not None


def warmed(daemon):
    """Wait for the end of the warm-up that the opening has begun, if it has."""
    daemon.online()
    daemon.until(lambda: left(daemon) == 0)


def test_cache_warms_up_by_itself_after_its_device_is_lost(tmp_path):
    with node(tmp_path, "cache_warm_up=on") as (daemon, data):
        read(daemon, HOT, data)
        daemon.stop()
        assert kept(daemon).exists()
        (daemon.data / "cache").unlink()
        daemon.start()
        warmed(daemon)
        assert saved_by_itself(daemon)
        assert "heat map" in daemon.ok("volume", "show", "v")
        assert read(daemon, HOT, data) == 0
        cold = [(0, MIB)]
        assert read(daemon, cold, data) == blocks(cold)
        # With the volume goes its map.
        daemon.ok("volume", "delete", "v")
        assert not kept(daemon).parent.exists()


def test_cache_that_survived_is_not_warmed_up(tmp_path):
    path = tmp_path / "map"
    with node(tmp_path, "cache_warm_up=on") as (daemon, data):
        gone = [(7 * MIB, 64 * KIB)]
        read(daemon, HOT + gone, data)
        saved(daemon, path)
        daemon.ok("volume", "evict", "v", "--offset", 7 * MIB, "--length", 64 * KIB)
        daemon.stop()
        # A map of a time when more was cached than the SSD tier has kept.
        kept(daemon).write_bytes(path.read_bytes())
        daemon.start()
        warmed(daemon)
        assert read(daemon, gone, data) == blocks(gone), "it was fetched although the cache was there"
        assert read(daemon, HOT, data) == 0


def test_heat_map_of_the_last_interval_warms_dram_up_after_a_crash(tmp_path):
    with node(tmp_path, "cache_warm_up=on", cache_total_size_mib=0, heat_save_interval_s=1) as (daemon, data):
        read(daemon, HOT, data)
        # Of all that was read, not of its beginning.
        daemon.until(lambda: kept(daemon).exists())
        kept(daemon).unlink()
        daemon.until(lambda: kept(daemon).exists())
        daemon.kill()
        daemon.start()
        daemon.until(lambda: left(daemon) == 0)
        assert read(daemon, HOT, data) == 0
        status, page = daemon.api("GET", "/metrics")
        assert status == 200
        assert 'hdcs_volume_heat_saved_timestamp_seconds{volume="v"}' in page
        # Off, nothing is kept and nothing is fetched.
        daemon.ok("volume", "set", "v", "cache_warm_up=off")
        daemon.stop()
        kept(daemon).unlink()
        daemon.start()
        assert daemon.volume("v")["heat"] is None
        assert read(daemon, HOT, data) == blocks(HOT)
        daemon.stop()
        assert not kept(daemon).exists()


def test_warm_up_by_itself_shows_is_cancelled_and_does_not_cost_the_map(tmp_path):
    settings = ["cache_warm_up=on", "cache_warm_rate_mib_s=1"]
    with node(tmp_path, *settings, cache_total_size_mib=0, heat_save_interval_s=1) as (daemon, data):
        read(daemon, [(0, 16 * MIB)], data)
        daemon.stop()
        before = kept(daemon).read_bytes()
        daemon.start()
        assert 0 < left(daemon) <= 16 * MIB
        assert "of 16 MiB (`hdcs volume warm v --cancel`" in daemon.ok("volume", "show", "v")
        # A map of a cache that is being warmed up says less than the last one.
        daemon.stop()
        assert kept(daemon).read_bytes() == before
        daemon.start()
        assert left(daemon) > 0
        daemon.ok("volume", "warm", "v", "--cancel")
        assert left(daemon) == 0


def test_heat_map_that_cannot_be_kept_or_read_stops_nothing(tmp_path):
    with node(tmp_path, heat_save_interval_s=1) as (daemon, data):
        # What stands in the way of a new file is a directory of its name.
        hindrance = kept(daemon).with_name("heat.map.tmp")
        hindrance.mkdir()
        daemon.ok("volume", "set", "v", "cache_warm_up=on")
        assert read(daemon, HOT, data) == blocks(HOT)
        daemon.until(lambda: (daemon.volume("v")["heat"] or {}).get("trouble"))
        volume = daemon.volume("v")
        assert "it is not kept" in volume["heat"]["trouble"]
        assert volume["state"] == "healthy"
        assert read(daemon, HOT, data) == 0
        assert not kept(daemon).exists()
        daemon.stop()
        hindrance.rmdir()
        kept(daemon).write_bytes(b"HDCSHEAT and nothing that is one")
        (daemon.data / "cache").unlink()
        daemon.start()
        daemon.tells("it is not warmed up")
        assert read(daemon, HOT, data) == blocks(HOT)
        daemon.until(lambda: (daemon.volume("v")["heat"] or {}).get("saved_ms"))
        assert daemon.volume("v")["heat"]["trouble"] is None
