"""Thin provisioning: what is not written costs nothing, what is discarded is given back, and clients are told
so, from the log, from the backend and over a restart."""

import json
import os
import random

import nbd
import pytest

from daemon import DIRTY, Daemon
from programs import MIB, run

SIZE = 64 * MIB


def uri(daemon, name):
    return f"nbd+unix:///{name}?socket={daemon.data / 'nbd.sock'}"


def mapped(daemon, name):
    """Whether each MiB of the volume is told to be data, by two clients that agree."""
    rows = json.loads(run("nbdinfo", "--map", "--json", uri(daemon, name)).stdout)
    by_nbdinfo = spread((row["offset"], row["length"], row["type"] & 2 == 0) for row in rows)
    rows = json.loads(run("qemu-img", "map", "-f", "raw", "--output=json", uri(daemon, name)).stdout)
    by_qemu = spread((row["start"], row["length"], row["data"]) for row in rows)
    assert by_nbdinfo == by_qemu
    return by_nbdinfo


def spread(rows):
    units = [False] * (SIZE // MIB)
    for start, length, is_data in rows:
        for unit in range(start // MIB, -(-(start + length) // MIB)):
            units[unit] |= is_data
    return units


def units(*ranges):
    return [any(first <= unit < end for first, end in ranges) for unit in range(SIZE // MIB)]


def allocated(image):
    return os.stat(image).st_blocks * 512


@pytest.fixture
def thin(tmp_path):
    with Daemon(tmp_path, {"log_size_mib": 64}) as daemon:
        daemon.create("v", *DIRTY, size="64M")
        yield daemon, daemon.data / "volumes/v/data"
        daemon.stop()


def test_map_is_right_in_the_log_in_the_backend_and_over_a_restart(thin):
    daemon, image = thin
    assert mapped(daemon, "v") == units() and allocated(image) == 0
    daemon.write("v", random.Random(1).randbytes(8 * MIB), 4 * MIB)
    # Only in the log so far, and then after its replay.
    assert allocated(image) == 0 and mapped(daemon, "v") == units((4, 12))
    daemon.kill()
    daemon.start()
    assert mapped(daemon, "v") == units((4, 12))
    daemon.ok("volume", "flush", "v")
    assert mapped(daemon, "v") == units((4, 12)) and allocated(image) >= 8 * MIB
    client = daemon.nbd("v")
    client.trim(2 * MIB, 5 * MIB)
    client.zero(2 * MIB, 9 * MIB)
    client.flush()
    # The log is laid over the backend.
    assert mapped(daemon, "v") == units((4, 5), (7, 9), (11, 12))
    daemon.kill()
    daemon.start()
    assert mapped(daemon, "v") == units((4, 5), (7, 9), (11, 12))
    daemon.ok("volume", "flush", "v")
    assert allocated(image) <= 5 * MIB
    assert mapped(daemon, "v") == units((4, 5), (7, 9), (11, 12))
    daemon.stop()
    daemon.start()
    assert mapped(daemon, "v") == units((4, 5), (7, 9), (11, 12))
    assert daemon.read("v", 2 * MIB, 5 * MIB) == bytes(2 * MIB)
    assert daemon.volume("v")["allocated_bytes"] == allocated(image)


def test_zeroes_that_are_to_keep_their_space_keep_it(thin):
    daemon, image = thin
    daemon.write("v", b"z" * (4 * MIB))
    daemon.ok("volume", "flush", "v")
    before = allocated(image)
    client = daemon.nbd("v")
    client.zero(2 * MIB, 0, nbd.CMD_FLAG_NO_HOLE)
    client.shutdown()
    daemon.ok("volume", "flush", "v")
    assert allocated(image) >= before - 4096
    assert daemon.read("v", 4 * MIB) == bytes(2 * MIB) + b"z" * (2 * MIB)


def test_discards_of_a_whole_volume_give_everything_back(thin):
    daemon, image = thin
    daemon.write("v", random.Random(2).randbytes(16 * MIB))
    daemon.ok("volume", "flush", "v")
    daemon.write("v", b"y" * MIB, 20 * MIB)
    client = daemon.nbd("v")
    client.trim(SIZE, 0)
    client.shutdown()
    daemon.ok("volume", "flush", "v")
    assert allocated(image) == 0 and mapped(daemon, "v") == units()
    assert daemon.volume("v")["allocated_bytes"] == 0


def test_small_discards_give_back_whole_blocks(thin):
    """A discard gives back what it covers whole, and zeroes what it covers."""
    daemon, image = thin
    daemon.write("v", b"s" * MIB)
    daemon.ok("volume", "flush", "v")
    client = daemon.nbd("v")
    for block in range(0, 256, 2):
        client.trim(4096, block * 4096)
    client.trim(512, 4096 + 512)
    client.shutdown()
    daemon.ok("volume", "flush", "v")
    assert allocated(image) <= MIB // 2 + 4096
    data = daemon.read("v", 3 * 4096)
    assert data == bytes(4096) + b"s" * 512 + bytes(512) + b"s" * 3072 + bytes(4096)
