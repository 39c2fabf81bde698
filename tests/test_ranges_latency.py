"""A discard of half a volume of 1 TiB, and zeroes of the other half, beside clients that read and write a little.

Timings do not decide: the bound is what only a step that depends on the length of a range would break, on any machine.
`-s` shows what was measured.
"""

import os
import threading
import time

import pytest
from daemon import MIB, Daemon

GIB = 1 << 30
TIB = 1 << 40
# The longest trim or zeroing that the protocol has room for, in whole blocks.
PIECE = 4 * GIB - 4096
# A lookup of each block of the range takes tens of seconds.
SLOWEST_SECONDS = 5


class Neighbour(threading.Thread):
    """A client that writes and reads one block after another, and notes how long each takes."""

    def __init__(self, client, offset):
        super().__init__()
        self.client, self.offset = client, offset
        self.ended = threading.Event()
        self.slowest = {"write": 0, "read": 0}
        self.count = 0
        self.error = None

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
            self.slowest[name] = max(self.slowest[name], time.monotonic() - begin)
        assert bytes(answer) == data
        self.count += 1


def ask_all(client, ask, first, end, depth=16):
    """Ask for a range in the largest pieces, some at a time."""
    under_way = []
    for at in range(first, end, PIECE):
        under_way.append(ask(client, min(PIECE, end - at), at))
        while len(under_way) >= depth:
            client.poll(-1)
            under_way = [cookie for cookie in under_way if not client.aio_command_completed(cookie)]
    while under_way:
        client.poll(-1)
        under_way = [cookie for cookie in under_way if not client.aio_command_completed(cookie)]


def ask_beside_neighbours(daemon, client, size, label):
    """Discard the first half of the volume "large" and zero the rest, but for its last 16 MiB; what that cost others."""
    end = size - 16 * MIB
    neighbours = {
        "another volume": Neighbour(daemon.nbd("small"), 0),
        "the same volume": Neighbour(daemon.nbd("large"), end),
    }
    for neighbour in neighbours.values():
        neighbour.start()
    try:
        begin = time.monotonic()
        ask_all(client, lambda nbd, count, at: nbd.aio_trim(count, at), 0, size // 2)
        ask_all(client, lambda nbd, count, at: nbd.aio_zero(count, at), size // 2, end)
        client.flush()
        daemon.ok("volume", "flush", "large")
        took = time.monotonic() - begin
    finally:
        for neighbour in neighbours.values():
            neighbour.ended.set()
            neighbour.join()
    for name, neighbour in neighbours.items():
        assert neighbour.error is None, f"{name}: {neighbour.error!r}"
        slowest = {what: f"{seconds * 1000:.1f} ms" for what, seconds in neighbour.slowest.items()}
        print(f"{label}, {name}: slowest {slowest} of {neighbour.count}, in {took:.1f} s")
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
def test_ranges_of_half_a_tebibyte_delay_no_other_client(tmp_path, policy):
    image = tmp_path / "large"
    with Daemon(tmp_path) as daemon:
        arguments = ["--backend", f"file:{image}", "--policy", policy]
        daemon.create("large", *arguments, size=TIB)
        daemon.create("small", size=64 * MIB)
        client = daemon.nbd("large")
        # Something of it is dirty and something cached, all over it.
        places = fill(client, TIB)
        ask_beside_neighbours(daemon, client, TIB, policy)
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
