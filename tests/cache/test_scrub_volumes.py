"""Scrubs: flipped bytes on the node's devices are found while clients go on, told, and made good where they can be."""

import os
import random
import signal
import subprocess
import time

import pytest

from daemon import COMMAND_SECONDS, DIRTY, Daemon, refused, samples
from programs import HDCS, MIB

BLOCK = 4096
# Nothing is read ahead, and DRAM holds less than the SSD tier.
CONFIG = {"cache_total_size_mib": 64, "read_ahead_max_kib": 0, "sequential_cutoff_kib": 1 << 20}


def flip(path, data, count, seed=1):
    """Flip a bit in so many of the file's blocks that hold blocks of `data`; how many were found."""
    blocks = {bytes(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)}
    with open(path, "r+b") as file:
        held = file.read()
        places = [at for at in range(0, len(held), BLOCK) if held[at : at + BLOCK] in blocks]
        chosen = random.Random(seed).sample(places, min(count, len(places)))
        for at in chosen:
            file.seek(at + 77)
            file.write(bytes([held[at + 77] ^ 4]))
        file.flush()
        os.fsync(file.fileno())
    return len(chosen)


def last(daemon, name="v"):
    return daemon.volume(name)["scrub"]["last"]


def metric(daemon, what):
    status, page = daemon.api("GET", "/metrics")
    assert status == 200
    return samples(page)[f'hdcs_scrub_{what}{{volume="v"}}']


class Writer:
    """A client that goes on beside a scrub and reads back what it wrote."""

    def __init__(self, daemon, offset):
        self.client, self.offset, self.rng = daemon.nbd("v"), offset, random.Random(7)
        self.rounds = 0

    def round(self):
        data = self.rng.randbytes(2 * BLOCK)
        at = self.offset + self.rng.randrange(64) * 2 * BLOCK
        self.client.pwrite(data, at)
        assert bytes(self.client.pread(len(data), at)) == data
        self.rounds += 1


def scrub(daemon, *arguments, beside=None):
    """Run a scrub to its end, with something going on beside it."""
    command = [str(HDCS), "volume", "scrub", "v", "--data", str(daemon.data), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + COMMAND_SECONDS
    while process.poll() is None:
        assert time.monotonic() < end
        if beside:
            beside()
        else:
            time.sleep(0.01)
    out, err = process.communicate()
    return process.returncode, out, err


def test_scrub_of_a_clean_volume_finds_nothing_and_is_recorded(tmp_path):
    with Daemon(tmp_path) as daemon:
        daemon.create("v")
        assert last(daemon) is None
        daemon.write("v", os.urandom(4 * MIB))
        daemon.ok("volume", "flush", "v")
        writer = Writer(daemon, 8 * MIB)
        status, out, err = scrub(daemon, "--rate", "16M", beside=writer.round)
        assert status == 0 and "all good" in out, out + err
        assert writer.rounds > 0
        found = last(daemon)
        assert found["read_bytes"] >= 4 * MIB and found["bad_blocks"] == 0 and found["problems"] == []
        assert abs(found["ended_ms"] / 1000 - time.time()) < COMMAND_SECONDS
        assert metric(daemon, "last_problems") == 0 and metric(daemon, "running") == 0
        daemon.stop()
        daemon.start()
        assert last(daemon) == found


def test_scrub_drops_bad_lines_of_the_ssd_tier_before_a_client_meets_them(tmp_path):
    with Daemon(tmp_path, CONFIG) as daemon:
        daemon.create("v", size="16M")
        data = random.Random(3).randbytes(16 * MIB)
        daemon.write("v", data)
        daemon.ok("volume", "flush", "v")
        daemon.ok("volume", "evict", "v")
        daemon.ok("volume", "promote", "v")
        # A stop writes what is still in memory; after it the cache is warm, and DRAM is empty.
        daemon.stop()
        bad = flip(daemon.data / "cache", data, 40)
        assert bad == 40
        daemon.start()
        daemon.online()
        status, out, err = scrub(daemon, "--rate", "1G")
        assert status == 0, out + err
        found = last(daemon)
        assert found["bad_blocks"] == found["healed_blocks"] == bad, found
        assert metric(daemon, "last_healed_blocks") == bad
        assert daemon.read("v", 16 * MIB) == data
        counters = daemon.volume("v")["counters"]
        # What a client reads it has from the good lines, and what was dropped anew from the backend.
        assert counters["cache_corrupt_blocks"] == 0
        assert counters["ssd_hit_blocks"] > 0 and counters["miss_blocks"] >= bad
        # What was fetched anew is good.
        assert scrub(daemon, "--rate", "1G")[0] == 0 and last(daemon)["bad_blocks"] == 0


@pytest.mark.parametrize("encrypted", [False, True])
def test_scrub_writes_dirty_data_again_that_memory_still_has(tmp_path, encrypted):
    key = tmp_path / "key"
    key.write_bytes(os.urandom(32))
    options = ["--encrypt", "--key-file", key] if encrypted else []
    with Daemon(tmp_path) as daemon:
        daemon.create("v", *DIRTY, *options)
        data = random.Random(4).randbytes(2 * MIB)
        daemon.write("v", data)
        log = daemon.log_of("v")
        if encrypted:
            # What is written is not to be found as it was: these are blocks of the ring in use.
            held = log.read_bytes()
            blocks = [at for at in range(64 * BLOCK, 256 * BLOCK, BLOCK) if any(held[at : at + BLOCK])]
            bad = flip(log, b"".join(held[at : at + BLOCK] for at in blocks), 20)
        else:
            bad = flip(log, data, 20)
        assert bad == 20
        writer = Writer(daemon, 8 * MIB)
        status, out, err = scrub(daemon, "--rate", "1G", beside=writer.round)
        assert status == 0, out + err
        found = last(daemon)
        assert found["bad_blocks"] == found["healed_blocks"] and found["healed_blocks"] >= (1 if encrypted else bad)
        assert daemon.volume("v")["state"] == "healthy"
        # What the next start finds on the device is whole again.
        daemon.kill()
        daemon.start()
        assert daemon.read("v", 2 * MIB) == data
        assert daemon.cli("check", "v").returncode == 0
        daemon.ok("volume", "flush", "v")
        assert daemon.read("v", 2 * MIB) == data


def test_scrub_names_dirty_data_whose_only_copy_is_bad(tmp_path):
    with Daemon(tmp_path) as daemon:
        daemon.create("v", *DIRTY)
        data = random.Random(5).randbytes(MIB)
        daemon.write("v", data, 2 * MIB)
        # A replay leaves the data on the device.
        daemon.stop()
        daemon.start()
        assert flip(daemon.log_of("v"), data[5 * BLOCK : 6 * BLOCK], 1) == 1
        done = daemon.cli("volume", "scrub", "v", "--rate", "1G")
        refused(done, 1, "scrub found 1 problem")
        at = 2 * MIB + 5 * BLOCK
        assert f"bytes {at} to {at + BLOCK} of the volume" in done.stdout, done.stdout
        assert daemon.volume("v")["state"] == "inconsistent"
        assert metric(daemon, "last_problems") == 1 and metric(daemon, "last_healed_blocks") == 0
        problems = [problem["state"] for problem in daemon.json("status")["problems"]]
        assert "damaged" in problems
        daemon.tells(f"bytes {at} to")
        # The rest is still read.
        assert daemon.read("v", 5 * BLOCK, 2 * MIB) == data[: 5 * BLOCK]


def test_scrub_keeps_its_rate_is_cancelled_and_begins_again_after_a_restart(tmp_path):
    with Daemon(tmp_path) as daemon:
        daemon.create("v")
        daemon.write("v", os.urandom(16 * MIB))
        daemon.ok("volume", "flush", "v")
        rate = 2 * MIB

        def begin():
            started = time.monotonic()
            command = [HDCS, "volume", "scrub", "v", "--rate", str(rate), "--data", daemon.data]
            process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            daemon.until(lambda: daemon.volume("v")["scrub"]["read_bytes"] > 2 * MIB)
            seen = daemon.volume("v")["scrub"]
            # One read more than the rate allows may have been made.
            assert seen["read_bytes"] <= rate * (time.monotonic() - started) + 2 * MIB
            assert seen["running"] and seen["rate_bytes_per_s"] == rate
            return process

        process = begin()
        # One at a time.
        refused(daemon.cli("volume", "scrub", "v"), 1, "is being scrubbed")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=COMMAND_SECONDS)
        assert process.returncode == 1 and b"interrupted" in err
        daemon.until(lambda: not daemon.volume("v")["scrub"]["running"])
        assert last(daemon) is None
        process = begin()
        daemon.ok("volume", "scrub", "v", "--cancel")
        _, err = process.communicate(timeout=COMMAND_SECONDS)
        assert process.returncode == 1 and b"did not come to its end" in err
        refused(daemon.cli("volume", "scrub", "v", "--cancel"), 1, "not being scrubbed")
        process = begin()
        # A stop does not wait for it.
        daemon.stop()
        process.communicate(timeout=COMMAND_SECONDS)
        assert process.returncode == 1
        daemon.start()
        assert last(daemon) is None and not daemon.volume("v")["scrub"]["running"]
        daemon.ok("volume", "scrub", "v", "--rate", "1G")
        assert last(daemon)["read_bytes"] >= 16 * MIB
        # A volume goes whatever is being done to it.
        process = begin()
        daemon.ok("volume", "delete", "v")
        process.communicate(timeout=COMMAND_SECONDS)
        assert process.returncode == 1
        daemon.create("v")
        assert last(daemon) is None


def test_scrub_record_that_hangs_stops_nothing(tmp_path):
    with Daemon(tmp_path) as daemon:
        daemon.create("v")
        daemon.create("other")
        daemon.until((daemon.data / "volumes" / "v" / "scrub.json").exists)
        # Nobody reads the pipe, so that the next record cannot be written.
        os.mkfifo(daemon.data / "volumes" / "v" / "scrub.json.tmp")
        for _ in range(2):
            status, out, err = scrub(daemon)
            assert status == 0, out + err
        assert daemon.json("status")["volumes"] == 2
        assert daemon.api("GET", "/metrics")[0] == 200
        assert last(daemon)["problems"] == []
        daemon.ok("volume", "scrub", "other")
        assert last(daemon, "other")["problems"] == []
