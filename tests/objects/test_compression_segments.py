"""Compression of the SSD tier: a cache holds more than its device, nothing is lost or wrong by it, and what is damaged is
fetched again."""

import random
import secrets

import pytest

from daemon import Daemon, hdcs, samples
from object_stores import Model, counters
from programs import MIB

CACHE_MIB = 32
NODE = {"memory_max_mib": 192, "cache_total_size_mib": CACHE_MIB}
LINE = 16384
# More than the device has, and with half of its bytes noise less than that once it is compressed.
CONTENT = 44 * MIB
# A segment without its footer.
SEGMENT = MIB - 4096


def half_noise(size, seed):
    """Lines of which the first half is noise: two and a bit of four blocks are left."""
    rng = random.Random(seed)
    return b"".join(rng.randbytes(6144) + b"line %8d" % at * ((LINE - 6144) // 13) + bytes(9) for at in range(size // LINE))


def cached(daemon, data, *arguments, name="v"):
    """A volume whose content is in the SSD tier, and after a restart there alone."""
    daemon.online()
    daemon.create(name, *arguments, size=f"{len(data) // MIB}M")
    daemon.write(name, data)
    daemon.ok("volume", "flush", name)
    daemon.ok("volume", "evict", name)
    daemon.ok("volume", "promote", name)


def again(daemon):
    daemon.stop()
    daemon.start()
    daemon.online()


def encrypted(tmp_path):
    key = tmp_path / "key"
    key.write_text(secrets.token_hex(32))
    key.chmod(0o600)
    return ["--encrypt", "--key-file", key]


@pytest.mark.parametrize("method", ["lz4", "zstd"])
@pytest.mark.parametrize("encrypt", [False, True])
def test_compressed_cache_serves_more_than_its_device(tmp_path, method, encrypt):
    data = half_noise(CONTENT, 1)
    assert len(data) == CONTENT
    more = encrypted(tmp_path) if encrypt else []
    with Daemon(tmp_path, NODE) as daemon:
        cached(daemon, data, "--compress", method, *more)
        found = daemon.cache()
        assert found["ssd_bytes"] <= CACHE_MIB * MIB < CONTENT
        assert found["ssd_cached_bytes"] == CONTENT and found["ssd_evicted_lines"] == 0, found
        assert found["ssd_used_bytes"] == CONTENT // 2, found
        taken = counters(daemon)
        assert taken["ssd_plain_bytes"] >= CONTENT and taken["ssd_stored_bytes"] * 2 == taken["ssd_plain_bytes"], taken
        shown = daemon.ok("volume", "show", "v")
        assert "compressed in the SSD tier" in shown and "50" in shown, shown
        page = samples(daemon.api("GET", "/metrics")[1])
        assert page["hdcs_cache_ssd_cached_bytes"] == CONTENT
        again(daemon)
        before = counters(daemon)
        half = CONTENT // 2
        assert daemon.read("v", half) + daemon.read("v", half, half) == data
        after = counters(daemon)
        hits = after["ssd_hit_blocks"] + after["dram_hit_blocks"] - before["ssd_hit_blocks"] - before["dram_hit_blocks"]
        # Lines of the segment that was open at the stop were written, too.
        assert hits * 4096 == CONTENT and after["miss_blocks"] == before["miss_blocks"], after
        assert after["ssd_hit_blocks"] * 4096 > CACHE_MIB * MIB, after
        assert after["cache_corrupt_blocks"] == 0
        daemon.stop()
        done = hdcs("check", daemon.data)
        assert done.returncode == 0, done.stdout + done.stderr
        device = daemon.data / "cache"
        done = hdcs("inspect", device)
        assert done.returncode == 0 and "stored in 22" in done.stdout, done.stdout
        if encrypt:
            assert b"line        7" not in device.read_bytes()


def test_uncompressed_cache_serves_no_more_than_its_device(tmp_path):
    """What the test above proves something against."""
    data = half_noise(CONTENT, 1)
    with Daemon(tmp_path, NODE) as daemon:
        cached(daemon, data)
        found = daemon.cache()
        assert found["ssd_cached_bytes"] == found["ssd_used_bytes"] <= found["ssd_bytes"]
        assert found["ssd_evicted_lines"] > 0
        daemon.stop()


def test_noise_is_stored_as_it_is(tmp_path):
    data = random.Random(2).randbytes(8 * MIB)
    with Daemon(tmp_path, NODE) as daemon:
        cached(daemon, data, "--compress", "zstd")
        found = counters(daemon)
        assert found["ssd_stored_bytes"] == found["ssd_plain_bytes"] >= len(data), found
        assert "compressed in the SSD tier" not in daemon.ok("volume", "show", "v")
        again(daemon)
        assert daemon.read("v", len(data)) == data
        daemon.stop()


def test_compression_of_the_cache_is_switched_while_it_serves(tmp_path):
    data = half_noise(8 * MIB, 3)
    with Daemon(tmp_path, NODE) as daemon:
        cached(daemon, data)
        for method in ["lz4", "off", "zstd", "lz4"]:
            daemon.ok("volume", "set", "v", f"compression={method}")
            # What is there stays as it is stored, and is read.
            assert daemon.read("v", len(data)) == data
            before = counters(daemon)
            daemon.ok("volume", "evict", "v")
            daemon.ok("volume", "promote", "v")
            after = counters(daemon)
            plain, stored = (after[name] - before[name] for name in ("ssd_plain_bytes", "ssd_stored_bytes"))
            assert plain == len(data) and stored == (plain if method == "off" else plain // 2), (method, plain, stored)
            again(daemon)
            before = counters(daemon)
            assert daemon.read("v", len(data)) == data
            assert counters(daemon)["miss_blocks"] == before["miss_blocks"], method
        daemon.stop()


def test_volumes_share_what_one_of_them_has_stored(tmp_path):
    data = half_noise(4 * MIB, 4)
    with Daemon(tmp_path, NODE) as daemon:
        cached(daemon, data, name="plain")
        cached(daemon, data, "--compress", "lz4", name="packed")
        found = daemon.cache()
        # Only so many are compared at once; the others are stored for themselves.
        assert found["shared_lines"] > 0, found
        for name in ["plain", "packed"]:
            assert daemon.read(name, len(data)) == data
        daemon.stop()


@pytest.mark.parametrize("encrypt", [False, True])
def test_damage_of_a_compressed_line_is_fetched_again(tmp_path, encrypt):
    data = half_noise(8 * MIB, 5)
    more = encrypted(tmp_path) if encrypt else []
    with Daemon(tmp_path, NODE) as daemon:
        cached(daemon, data, "--compress", "lz4", *more)
        daemon.stop()
        device = daemon.data / "cache"
        content = bytearray(device.read_bytes())
        first = content.index(b"HDCSFOOT") - SEGMENT
        rng = random.Random(6)
        for _ in range(40):
            content[first + rng.randrange(118 * 2 * 4096)] ^= 1 << rng.randrange(8)
        device.write_bytes(content)
        done = hdcs("check", daemon.data)
        assert done.returncode != 0 and "do not match their checksums" in done.stdout + done.stderr, done
        daemon.start()
        daemon.online()
        assert daemon.read("v", len(data)) == data
        found = counters(daemon)
        assert found["cache_corrupt_blocks"] > 0 and daemon.cache()["corrupt_blocks"] > 0
        assert found["ssd_hit_blocks"] * 4096 > len(data) * 3 // 4, found
        # It is there again.
        before = counters(daemon)
        assert daemon.read("v", len(data)) == data
        assert counters(daemon)["miss_blocks"] == before["miss_blocks"]
        daemon.stop()


def test_scrub_finds_damage_in_compressed_lines(tmp_path):
    data = half_noise(8 * MIB, 7)
    with Daemon(tmp_path, NODE) as daemon:
        cached(daemon, data, "--compress", "zstd")
        daemon.stop()
        device = daemon.data / "cache"
        content = bytearray(device.read_bytes())
        first = content.index(b"HDCSFOOT") - SEGMENT
        content[first + 3 * 8192 + 100] ^= 4
        device.write_bytes(content)
        daemon.start()
        daemon.online()
        daemon.ok("volume", "scrub", "v")
        daemon.until(lambda: daemon.cache()["corrupt_blocks"] > 0)
        assert daemon.read("v", len(data)) == data
        assert counters(daemon)["cache_corrupt_blocks"] == 0, "the scrub has dropped it"
        daemon.stop()


def test_writes_and_reads_mix_over_a_compressed_cache(tmp_path):
    """Writes void lines; reads of parts of lines fill them anew; restarts of both kinds lie between."""
    model = Model(9, 16 * MIB)
    with Daemon(tmp_path, NODE) as daemon:
        daemon.create("v", "--compress", "lz4", *encrypted(tmp_path))
        for round_number in range(4):
            client = daemon.nbd("v")
            model.write(client, 150)
            model.check(client)
            client.shutdown()
            daemon.ok("volume", "flush", "v")
            daemon.ok("volume", "promote", "v")
            if round_number % 2:
                daemon.kill()
                daemon.start()
            else:
                again(daemon)
            client = daemon.nbd("v")
            model.check(client)
            client.shutdown()
        daemon.stop()
