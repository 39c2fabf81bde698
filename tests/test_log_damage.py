"""A write log that rots under dirty data while the daemon is down: all but what is damaged is saved, and what is lost is
never shown."""

import random

import nbd
import pytest
from daemon import DIRTY, MIB, Daemon, refused

BLOCK = 4096
BLOCKS = 64


@pytest.fixture
def daemon(tmp_path):
    with Daemon(tmp_path) as daemon:
        yield daemon


def damage(path, data):
    """Change one byte of where the log has `data`."""
    with open(path, "r+b") as file:
        content = file.read()
        at = content.index(data) + 1000
        assert content.count(data) == 1
        file.seek(at)
        file.write(bytes([content[at] ^ 1]))


def unreadable(client, model):
    """The blocks that cannot be read; all others hold what they should."""
    bad = set()
    for block, data in model.items():
        try:
            assert client.pread(BLOCK, block * BLOCK) == data, block
        except nbd.Error as error:
            assert error.errno == "EIO"
            bad.add(block)
    return bad


def test_log_damage_costs_what_is_damaged_and_nothing_else(daemon):
    backend = daemon.home / "image"
    log = daemon.home / "log"
    daemon.create("v", "--backend", f"file:{backend}", "--log-path", str(log), "--log-size", "16M", *DIRTY)
    rng = random.Random(7)
    model = {block: rng.randbytes(BLOCK) for block in range(BLOCKS)}
    client = daemon.nbd("v")
    # What the backend has is older than the log.
    for block in model:
        client.pwrite(rng.randbytes(BLOCK), block * BLOCK)
    client.flush()
    daemon.ok("volume", "flush", "v")
    for block, data in model.items():
        client.pwrite(data, block * BLOCK)
        client.flush()
    client.shutdown()
    daemon.kill()
    before = backend.read_bytes()
    for block in (5, 6, 40):
        damage(log, model[block])
    daemon.start()
    volume = daemon.volume("v")
    assert volume["state"] == "degraded" and "12288 bytes in 2 places are lost" in volume["reason"]
    assert (volume["counters"]["lost_bytes"], volume["counters"]["lost_ranges"]) == (3 * BLOCK, 2)
    client = daemon.nbd("v")
    assert unreadable(client, model) == {5, 6, 40}
    # Nothing that the backend had there is shown, also when all else is destaged and the daemon starts again.
    daemon.ok("volume", "flush", "v")
    content = backend.read_bytes()
    for block, data in model.items():
        held = content[block * BLOCK :][:BLOCK]
        assert held == (before[block * BLOCK :][:BLOCK] if block in (5, 6, 40) else data), block
    client.shutdown()
    daemon.stop()
    daemon.start()
    client = daemon.nbd("v")
    assert unreadable(client, model) == {5, 6, 40}
    refused(daemon.cli("volume", "snapshot", "v", "now"), 1, "12288 bytes in 2 places", "write over them")
    refused(daemon.cli("volume", "detach", "v"), 1, "12288 bytes in 2 places", "--discard-dirty")
    # Writes are taken, and bring it back.
    for block in (5, 40):
        model[block] = rng.randbytes(BLOCK)
        client.pwrite(model[block], block * BLOCK)
    client.flush()
    assert unreadable(client, model) == {6}
    daemon.kill()
    daemon.start()
    client = daemon.nbd("v")
    assert unreadable(client, model) == {6}
    model[6] = bytes(BLOCK)
    client.zero(BLOCK, 6 * BLOCK)
    client.flush()
    assert unreadable(client, model) == set()
    daemon.until(lambda: daemon.volume("v")["state"] == "healthy")
    daemon.ok("volume", "flush", "v")
    content = backend.read_bytes()
    assert all(content[block * BLOCK :][:BLOCK] == data for block, data in model.items())
    assert len(content) == 16 * MIB
    client.shutdown()
    daemon.stop()
