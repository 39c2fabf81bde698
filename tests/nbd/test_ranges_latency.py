"""A discard of half a volume of 1 TiB, and zeroes of the other half, beside clients that read and write a little.

Timings do not decide: the bound is what only a step that depends on the length of a range would break, on any machine.
`-s` shows what was measured, beside what the same clients wait for when there are no ranges.
"""

import os
import threading
import time

import pytest

from daemon import Daemon
from programs import MIB

GIB = 1 << 30
TIB = 1 << 40
# The longest trim or zeroing that the protocol has room for, in whole blocks.
PIECE = 4 * GIB - 4096
# How long the clients are alone before, for comparison.
ALONE_SECONDS = 0.5
# A lookup of each block of the range takes tens of seconds.
SLOWEST_SECONDS = 5


class Neighbour(threading.Thread):
    """A client that writes and reads one block after another, and notes how long each takes."""

    def __init__(self, client, offset):
        super().__init__()
        self.client, self.offset = client, offset
        self.ended = threading.Event()
        self.count = 0
        self.error = None
        self.begin()

    def begin(self):
        """Measure anew."""
        self.slowest = {"write": 0, "read": 0}

    def run(self):
        try:
            while not self.ended.is_set():
                self.step()
        except Exception as error:  # noqa: BLE001
            self.error = error

    def step(self):
        offset = self.offset + self.count % 512 * 4096
        data = self.count.to_bytes(8, "little") * 512
        for name, act in [
            ("write", lambda: self.client.pwrite(data, offset)),
            ("read", lambda: self.client.pread(4096, offset)),
        ]:
            begin = time.monotonic()
            answer = act()
            slowest = self.slowest
            slowest[name] = max(slowest[name], time.monotonic() - begin)
        assert bytes(answer) == data
        self.count += 1


def ask_all(client, ask, first, end, piece, depth=16):
    """Ask for a range in pieces, some at a time."""
    under_way = []
    for at in range(first, end, piece):
        under_way.append(ask(client, min(piece, end - at), at))
        while len(under_way) >= depth:
            client.poll(-1)
            under_way = [cookie for cookie in under_way if not client.aio_command_completed(cookie)]
    while under_way:
        client.poll(-1)
        under_way = [cookie for cookie in under_way if not client.aio_command_completed(cookie)]


def in_ms(slowest):
    return {what: f"{seconds * 1000:.1f} ms" for what, seconds in slowest.items()}


def ask_beside_neighbours(daemon, client, size, label, piece=PIECE):
    """Discard the first half of the volume "large" and zero the rest, but for its last 16 MiB; what that cost others."""
    end = size - 16 * MIB
    neighbours = {
        "another volume": Neighbour(daemon.nbd("small"), 0),
        "the same volume": Neighbour(daemon.nbd("large"), end),
    }
    for neighbour in neighbours.values():
        neighbour.start()
    try:
        time.sleep(ALONE_SECONDS)
        for name, neighbour in neighbours.items():
            print(f"{label}, {name}, alone: slowest {in_ms(neighbour.slowest)}")
            neighbour.begin()
        begin = time.monotonic()
        ask_all(client, lambda nbd, count, at: nbd.aio_trim(count, at), 0, size // 2, piece)
        ask_all(client, lambda nbd, count, at: nbd.aio_zero(count, at), size // 2, end, piece)
        client.flush()
        daemon.ok("volume", "flush", "large")
        took = time.monotonic() - begin
    finally:
        for neighbour in neighbours.values():
            neighbour.ended.set()
            neighbour.join()
    for name, neighbour in neighbours.items():
        assert neighbour.error is None, f"{name}: {neighbour.error!r}"
        print(f"{label}, {name}: slowest {in_ms(neighbour.slowest)}, in {took:.1f} s")
        assert max(neighbour.slowest.values()) < SLOWEST_SECONDS


def fill(client, size):
    """Write a MiB at each 64th of the volume; where."""
    data = os.urandom(MIB)
    places = [at * (size // 64) for at in range(64)]
    for place in places:
        client.pwrite(data, place)
        assert bytes(client.pread(MIB, place)) == data
    return places


@pytest.mark.parametrize("policy", ["write-back", "write-through"])
# The smaller pieces are so many that the log has no room for an entry for each.
@pytest.mark.parametrize("piece", [PIECE, 64 * MIB])
def test_ranges_of_half_a_tebibyte_delay_no_other_client(tmp_path, policy, piece):
    image = tmp_path / "large"
    with Daemon(tmp_path) as daemon:
        arguments = ["--backend", f"file:{image}", "--policy", policy]
        daemon.create("large", *arguments, size=TIB)
        daemon.create("small", size=64 * MIB)
        client = daemon.nbd("large")
        # Something of it is dirty and something cached, all over it.
        places = fill(client, TIB)
        ask_beside_neighbours(daemon, client, TIB, f"{policy}, {piece >> 20} MiB", piece)
        for place in places:
            assert bytes(client.pread(MIB, place)) == bytes(MIB)
        client.shutdown()
        daemon.stop()
    assert os.stat(image).st_blocks * 512 < 64 * MIB


def test_ranges_of_half_a_tebibyte_over_objects_delay_no_other_client(tmp_path, s3):
    with Daemon(tmp_path) as daemon:
        daemon.create("large", "--backend", s3.url("ranges"), size=TIB)
        daemon.create("small", size=64 * MIB)
        client = daemon.nbd("large")
        places = fill(client, TIB)
        # Something of it is in objects and something in the log.
        daemon.ok("volume", "flush", "large")
        for place in places[::2]:
            client.pwrite(os.urandom(MIB), place)
        ask_beside_neighbours(daemon, client, TIB, "objects")
        for place in places:
            assert bytes(client.pread(MIB, place)) == bytes(MIB)
        client.shutdown()
        daemon.stop()
