"""A write log that rots under dirty data while the daemon is down: all but what is damaged is saved, and what is lost is
never shown."""

import json
import random

import nbd
import pytest

from daemon import DIRTY, Daemon, refused, samples
from log_cases import damage, flip
from programs import MIB

BLOCK = 4096
BLOCKS = 64
# Where its two superblocks are.
SUPERBLOCKS = [0, 16 * BLOCK]
# Where its ring begins, in blocks.
RING_START = 32


@pytest.fixture
def daemon(tmp_path):
    with Daemon(tmp_path) as daemon:
        yield daemon


def errno_of(ask, *arguments):
    """With which error a request fails; `None`: it does not."""
    try:
        ask(*arguments)
    except nbd.Error as error:
        return error.errno
    return None


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


def damaged(daemon, blocks, arguments=(), data=lambda rng: rng.randbytes(BLOCK)):
    """A daemon that was killed over a volume `v`, whose log was then damaged where it has these of its blocks; what it
    should hold, and what its backend holds, which is older."""
    backend = daemon.home / "image"
    daemon.create("v", "--backend", f"file:{backend}", *DIRTY, *arguments)
    rng = random.Random(7)
    model = {block: data(rng) for block in range(BLOCKS)}
    client = daemon.nbd("v")
    for block in model:
        client.pwrite(data(rng), block * BLOCK)
    client.flush()
    daemon.ok("volume", "flush", "v")
    for block, content in model.items():
        client.pwrite(content, block * BLOCK)
        client.flush()
    client.shutdown()
    daemon.kill()
    for block in blocks:
        # Each write has made a span of a block of control and one of data.
        flip(daemon.log_of("v"), (RING_START + 2 * (BLOCKS + block) + 1) * BLOCK + 10)
    return model, backend


def test_log_damage_costs_what_is_damaged_and_nothing_else(daemon):
    model, backend = damaged(daemon, [5, 6, 40])
    before = backend.read_bytes()
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
    # Writes are taken, and bring it back.
    for block in (5, 40):
        model[block] = rng_block(block)
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


def rng_block(seed):
    return random.Random(seed).randbytes(BLOCK)


@pytest.mark.parametrize("kind", ["compressed", "encrypted", "storage"])
def test_log_damage_costs_no_more_on_volumes_of_all_kinds(daemon, kind):
    key = daemon.home / "key"
    key.write_text("7c" * 32 + "\n")
    key.chmod(0o600)
    arguments = {
        "compressed": ["--compress", "lz4"],
        "encrypted": ["--encrypt", "--key-file", key],
        "storage": ["--mode", "storage"],
    }
    text = kind == "compressed"
    data = (lambda rng: rng.randbytes(16) * (BLOCK // 16)) if text else (lambda rng: rng.randbytes(BLOCK))
    model, _ = damaged(daemon, [5, 6, 40], arguments[kind], data)
    for _ in range(2):
        daemon.start()
        assert "12288 bytes in 2 places are lost" in daemon.volume("v")["reason"]
        client = daemon.nbd("v")
        assert unreadable(client, model) == {5, 6, 40}
        client.shutdown()
        daemon.ok("volume", "flush", "v")
        daemon.kill()
    daemon.start()
    client = daemon.nbd("v")
    for block in (5, 6, 40):
        client.pwrite(model[block], block * BLOCK)
    client.flush()
    assert unreadable(client, model) == set()
    daemon.until(lambda: daemon.volume("v")["state"] == "healthy")
    client.shutdown()


def test_log_damage_is_told_wherever_somebody_looks(daemon):
    damaged(daemon, [5, 6, 40])
    log = daemon.log_of("v")
    seen = "12288 bytes of the volume in 2 places are lost"
    assert seen in daemon.ok("inspect", log)
    refused(daemon.cli("check", daemon.data), 1, "1 problem")
    daemon.start()
    assert "12288 bytes in 2 places are lost" in daemon.ok("volume", "show", "v")
    assert "12288 bytes in 2 places are lost" in daemon.ok("volume", "list", "--json")
    page = samples(daemon.api("GET", "/metrics")[1])
    assert page['hdcs_volume_lost_bytes{volume="v"}'] == 3 * BLOCK
    events = daemon.json("events")
    told = [event for event in events if "12288 bytes in 2 places are lost" in json.dumps(event)]
    assert told and told[-1]["volume"] == "v", events
    # It is still told of the log when the damaged block is destaged past.
    daemon.ok("volume", "flush", "v")
    daemon.stop()
    assert seen in daemon.ok("inspect", log)


def test_log_damage_is_not_passed_on_as_good_data(daemon):
    damaged(daemon, [5, 6, 40])
    daemon.start()
    copy = daemon.home / "copy"
    for form in ("raw", "qcow2"):
        done = daemon.cli("volume", "export", "v", copy, "--format", form)
        refused(done, 1, "input/output error: data failed its checksum and no good copy is left")
        assert not copy.exists()
    for command in (("snapshot", "v", "now", "--copy"),
                    ("clone", "v", "w", "--backend", f"file:{daemon.home}/w", "--copy"),
                    ("detach", "v")):
        refused(daemon.cli("volume", *command), 1, "12288 bytes in 2 places", "write over them first")
    assert not (daemon.home / "w").exists()
    # Whoever copies by what is allocated must not take it for a hole.
    client = nbd.NBD()
    client.add_meta_context("base:allocation")
    client.connect_uri(f"nbd+unix:///v?socket={daemon.data / 'nbd.sock'}")
    found = []
    client.block_status(BLOCK, 5 * BLOCK, lambda _, at, entries, error: found.extend(entries))
    assert found[1] == 0
    client.shutdown()
    daemon.ok("volume", "detach", "v", "--discard-dirty")


def test_log_damage_fails_reads_of_any_part_until_it_is_written(daemon):
    model, _ = damaged(daemon, [5])
    daemon.start()
    client = daemon.nbd("v")
    at = 5 * BLOCK
    for offset, count in [(at - 512, 1024), (at + BLOCK - 512, 1024), (0, 64 * BLOCK), (at + 1024, 512)]:
        assert errno_of(client.pread, count, offset) == "EIO"
    assert client.pread(5 * BLOCK, 0) == b"".join(model[block] for block in range(5))
    client.pwrite(b"\x11" * 512, at + 512)
    assert client.pread(512, at + 512) == b"\x11" * 512
    assert errno_of(client.pread, 1024, at) == "EIO"
    client.zero(1024, at + 1024)
    client.trim(2048, at + 2048)
    client.flush()
    daemon.kill()
    daemon.start()
    client = daemon.nbd("v")
    assert errno_of(client.pread, 512, at) == "EIO"
    assert client.pread(BLOCK - 512, at + 512) == b"\x11" * 512 + bytes(BLOCK - 1024)
    client.pwrite(b"\x12" * 512, at)
    assert client.pread(512, at) == b"\x12" * 512
    client.shutdown()
    daemon.until(lambda: daemon.volume("v")["state"] == "healthy")


def test_log_damage_is_remembered_over_kills_at_any_time(daemon):
    model, backend = damaged(daemon, [5, 6, 40])
    rng = random.Random(3)
    lost = {5, 6, 40}
    for round in range(6):
        daemon.start()
        client = daemon.nbd("v")
        assert unreadable(client, model) == lost
        for _ in range(rng.randrange(60)):
            block = rng.randrange(BLOCKS)
            if block not in lost:
                model[block] = rng.randbytes(BLOCK)
                client.pwrite(model[block], block * BLOCK)
        client.flush()
        if round % 2:
            daemon.ok("volume", "flush", "v")
        if round == 3:
            model[6] = rng.randbytes(BLOCK)
            client.pwrite(model[6], 6 * BLOCK)
            client.flush()
            lost.discard(6)
        daemon.kill()
    # One of the superblocks rots: the other one knows as much.
    for superblock in SUPERBLOCKS:
        flip(daemon.log_of("v"), superblock + 100)
        daemon.start()
        client = daemon.nbd("v")
        assert unreadable(client, model) == lost
        daemon.kill()
    daemon.start()
    daemon.ok("volume", "flush", "v")
    content = backend.read_bytes()
    assert all(content[b * BLOCK :][:BLOCK] == data for b, data in model.items() if b not in lost)


def test_log_damage_of_both_superblocks_refuses_the_volume(daemon):
    daemon.create("good")
    damaged(daemon, [5])
    log = daemon.log_of("v")
    for superblock in SUPERBLOCKS:
        flip(log, superblock + 2100)
    before = log.read_bytes()
    assert "neither superblock can be used" in daemon.ok("inspect", log)
    daemon.start()
    daemon.until(lambda: daemon.volume("v")["state"] == "error")
    volume = daemon.volume("v")
    assert "no usable superblock: checksum does not match" in volume["reason"], volume
    daemon.write("good", bytes(BLOCK))
    daemon.stop()
    assert log.read_bytes() == before


def test_log_damage_that_was_written_over_loses_nothing(daemon):
    model, _ = damaged(daemon, [])
    daemon.start()
    client = daemon.nbd("v")
    old, model[5] = model[5], rng_block(5)
    client.pwrite(model[5], 5 * BLOCK)
    client.flush()
    client.shutdown()
    daemon.kill()
    damage(daemon.log_of("v"), old)
    assert "1 data blocks of it are damaged" in daemon.ok("inspect", daemon.log_of("v"))
    refused(daemon.cli("check", daemon.data), 1, "1 problem")
    daemon.start()
    volume = daemon.volume("v")
    assert volume["state"] == "healthy" and volume["counters"]["log_corrupt_blocks"] == 1
    client = daemon.nbd("v")
    assert unreadable(client, model) == set()
    client.shutdown()


def test_log_damage_is_not_forgotten_with_the_log(daemon):
    damaged(daemon, [5, 6])
    daemon.start()
    refused(daemon.cli("volume", "delete", "v", "--keep-data"), 1, "8192 bytes in 1 places", "--discard-dirty")
    daemon.ok("volume", "flush", "v")
    daemon.stop()
    # The backend has all that the log held, and yet not all.
    daemon.log_of("v").unlink()
    daemon.start()
    daemon.until(lambda: daemon.volume("v")["state"] == "error")
    reason = daemon.volume("v")["reason"]
    assert "held 8192 dirty bytes" in reason, reason
    refused(daemon.cli("volume", "open", "v"), 1, "8192 dirty bytes")


@pytest.mark.parametrize("ends", ["stop", "kill"])
def test_log_damage_that_shows_while_the_volume_is_open_is_lost_at_the_next_start(daemon, ends):
    model, _ = damaged(daemon, [])
    daemon.start()
    # Whoever connects later is told that it is read-only.
    client = daemon.nbd("v")
    damage(daemon.log_of("v"), model[5])
    refused(daemon.cli("volume", "scrub", "v"), 1, "scrub found 1 problem")
    assert daemon.volume("v")["state"] == "inconsistent"
    assert errno_of(client.pwrite, bytes(BLOCK), 0) == "EIO"
    assert unreadable(client, model) == {5}
    client.shutdown()
    daemon.stop() if ends == "stop" else daemon.kill()
    daemon.start()
    assert "4096 bytes in 1 places are lost" in daemon.volume("v")["reason"]
    client = daemon.nbd("v")
    assert unreadable(client, model) == {5}
    client.pwrite(model[5], 5 * BLOCK)
    assert unreadable(client, model) == set()
    client.shutdown()
    daemon.until(lambda: daemon.volume("v")["state"] == "healthy")
    daemon.ok("volume", "flush", "v")
