"""Policies change, each to each other, while a client writes, reads and verifies."""

import errno
import random
import threading

import nbd
import pytest

from daemon import Daemon
from programs import MIB

POLICIES = ["write-back", "write-through", "write-around", "read-only", "pass-through"]
SIZE = 16 * MIB
BLOCK = 4096
SEED = 20261121


class Client(threading.Thread):
    """Writes, reads, flushes and verifies until it is told to stop."""

    def __init__(self, daemon, name, seed):
        super().__init__()
        self.nbd = daemon.nbd(name)
        self.random = random.Random(seed)
        self.holds = {}
        self.ended = threading.Event()
        self.wrong = None
        self.writes = self.refused = 0

    def run(self):
        try:
            while not self.ended.is_set():
                self.step()
            self.nbd.flush()
        except Exception as error:
            self.wrong = error

    def step(self):
        block = self.random.randrange(512)
        kind = self.random.random()
        if kind < 0.5:
            data = self.random.randbytes(8) * (BLOCK // 8)
            try:
                self.nbd.pwrite(data, block * BLOCK, nbd.CMD_FLAG_FUA if kind < 0.02 else 0)
                self.holds[block] = data
                self.writes += 1
            except nbd.Error as error:
                if error.errnum != errno.EPERM:
                    raise
                self.refused += 1
        elif kind < 0.53:
            self.nbd.flush()
        else:
            found = self.nbd.pread(BLOCK, block * BLOCK)
            expected = self.holds.get(block, bytes(BLOCK))
            assert found == expected, f"block {block}"


def every_pair():
    """A walk from policy to policy that takes each ordered pair once."""
    left = {policy: [other for other in POLICIES if other != policy] for policy in POLICIES}
    stack, walk = [POLICIES[0]], []
    while stack:
        nexts = left[stack[-1]]
        if nexts:
            stack.append(nexts.pop())
        else:
            walk.append(stack.pop())
    return walk[::-1]


@pytest.fixture
def daemon(tmp_path):
    with Daemon(tmp_path) as daemon:
        yield daemon


def test_policy_switches_under_load_lose_nothing(daemon):
    print(f"seed {SEED}")
    daemon.create("v", "--set", "destage_age_max_ms=86400000")
    client = Client(daemon, "v", SEED)
    client.start()
    walk = every_pair()
    assert len(walk) == len(POLICIES) * (len(POLICIES) - 1) + 1
    try:
        for policy in walk[1:]:
            before = client.writes + client.refused
            changed = daemon.json("volume", "set", "v", f"policy={policy}")
            assert changed["counters"]["policy"] == policy
            # Something happens under each.
            daemon.until(lambda: client.writes + client.refused > before + 20 or not client.is_alive())
    finally:
        client.ended.set()
        client.join()
    assert client.wrong is None, client.wrong
    assert client.writes > 200 and client.refused > 20
    expected = b"".join(client.holds.get(block, bytes(BLOCK)) for block in range(512))
    # What was flushed outlives the process, under whichever policy it ends.
    daemon.kill()
    daemon.start()
    assert daemon.read("v", len(expected)) == expected
    daemon.ok("volume", "set", "v", "policy=read-only")
    assert (daemon.data / "volumes/v/data").read_bytes()[: len(expected)] == expected
    daemon.stop()
