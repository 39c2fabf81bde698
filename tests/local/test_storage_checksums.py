"""Checksums of the data in the local store of a volume in storage mode: damage is refused, told and healed, a crash damages nothing."""

import os

import pytest

from daemon import Daemon, hdcs, refused
from home_layouts import BLOCK, DATA
from object_stores import Model
from programs import MIB
from storage_cases import BAD, flip, is_told_and_refused

SIZE = 48 * MIB


def home(daemon):
    return daemon.volume("v")["counters"]["home"]


def create(daemon, tmp_path, *arguments):
    daemon.create("v", "--mode", "storage", "--backend", f"file:{tmp_path / 'image'}", "--log-size", "16M",
                  "--set", "destage_age_max_ms=1", *arguments, size=str(SIZE))
    return daemon.data / "volumes/v/home"


def fill(daemon, data):
    daemon.write("v", data)
    daemon.until(lambda: home(daemon)["dirty_bytes"] == len(data)
                 and daemon.volume("v")["counters"]["log_used_bytes"] == 0)


def test_storage_checksums_find_a_flipped_byte(tmp_path):
    data = os.urandom(4 * MIB)
    with Daemon(tmp_path) as daemon:
        path = create(daemon, tmp_path)
        fill(daemon, data)
        daemon.stop()
        assert hdcs("check", daemon.data).returncode == 0
        flip(path, DATA + BAD + 1000)
        is_told_and_refused(daemon, data)
        assert daemon.read("v", BAD) == data[:BAD]
        assert daemon.read("v", 2 * MIB, BAD + BLOCK) == data[BAD + BLOCK : BAD + BLOCK + 2 * MIB]
        shown = daemon.volume("v")
        assert shown["state"] == "degraded" and f"byte {BAD + 512}" in shown["reason"], shown
        assert home(daemon)["damaged_sectors"] == 1
        daemon.tells(f"sector at byte {BAD + 512} of the volume does not match")
        done = daemon.cli("volume", "scrub", "v", "--rate", "1G")
        refused(done, 1, "1 problem")
        assert f"bytes {BAD} to {BAD + BLOCK} of the volume do not match" in done.stdout, done.stdout
        # It does not get to the backend either.
        refused(daemon.cli("volume", "flush", "v", "--timeout", "2"), 1, "out of time")
        with open(tmp_path / "image", "rb") as image:
            image.seek(BAD)
            assert image.read(BLOCK) in (bytes(BLOCK), b"")
        # What is written there heals it.
        daemon.write("v", data[BAD : BAD + BLOCK], BAD)
        daemon.until(lambda: home(daemon)["damaged_sectors"] == 0)
        assert daemon.read("v", len(data)) == data
        assert daemon.cli("volume", "scrub", "v", "--rate", "1G").returncode == 0
        daemon.ok("volume", "flush", "v")
        assert daemon.volume("v")["state"] == "healthy", "what was refused is tiered out"
        assert (tmp_path / "image").read_bytes()[: len(data)] == data
        daemon.stop()


@pytest.mark.parametrize("policy", ["write-back", "write-through"])
def test_storage_checksums_refuse_nothing_after_a_crash(tmp_path, policy):
    model = Model(7, SIZE)
    with Daemon(tmp_path) as daemon:
        create(daemon, tmp_path, "--persist", "on-write", "--policy", policy)
        for _ in range(4):
            client = daemon.nbd("v")
            model.write(client, 400)
            # The next write finds the process gone, or destaging, or neither.
            daemon.kill()
            daemon.start()
            client = daemon.nbd("v")
            model.check(client)
            client.shutdown()
            daemon.until(lambda: home(daemon)["checksums_rebuild_left_bytes"] == 0)
            assert home(daemon)["damaged_reads"] == 0
            assert daemon.cli("volume", "scrub", "v", "--rate", "1G").returncode == 0
        client = daemon.nbd("v")
        model.write(client, 400)
        daemon.kill()
        # Nobody has it open: what the log writes again is no damage.
        assert hdcs("check", daemon.data).returncode == 0
        daemon.start()
        daemon.ok("volume", "flush", "v")
        assert (tmp_path / "image").read_bytes() == bytes(model.image)
        daemon.stop()
