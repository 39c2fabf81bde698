"""The promise of each cache policy, seen at the backing file, and what a volume says of its policy."""

import errno
import signal
import subprocess

import nbd
import pytest

from daemon import DIRTY, Daemon, refused, samples
from object_stores import counters
from programs import HDCS, MIB

POLICIES = ["write-back", "write-through", "write-around", "read-only", "pass-through"]
DIRECT = ["write-through", "write-around", "pass-through"]


@pytest.fixture
def daemon(tmp_path):
    with Daemon(tmp_path) as daemon:
        yield daemon


def image(daemon, name):
    return daemon.data / f"volumes/{name}/data"


@pytest.mark.parametrize("policy", DIRECT)
def test_policy_direct_has_the_write_in_the_backing_file_at_the_ack(daemon, policy):
    daemon.create("v", "--policy", policy)
    client = daemon.nbd("v")
    for number in range(1, 9):
        client.pwrite(bytes([number]) * 8192, number * 8192 + 512)
        with open(image(daemon, "v"), "rb") as file:
            file.seek(number * 8192 + 512)
            assert file.read(8192) == bytes([number]) * 8192
    found = counters(daemon)
    assert (found["policy"], found["dirty_bytes"], found["log_spans"]) == (policy, 0, 0)
    assert found["direct_bytes"] == 8 * 8192
    daemon.kill()
    content = image(daemon, "v").read_bytes()
    daemon.start()
    assert daemon.read("v", 16 * MIB) == content
    daemon.stop()


def test_policy_write_back_has_it_in_the_log_alone(daemon):
    daemon.create("v", "--policy", "write-back", *DIRTY)
    daemon.write("v", b"w" * MIB)
    assert not any(image(daemon, "v").read_bytes())
    daemon.kill()
    assert not any(image(daemon, "v").read_bytes())
    daemon.start()
    assert daemon.read("v", MIB) == b"w" * MIB
    daemon.stop()


def test_policy_of_reads(daemon):
    """Write-through keeps what was written, write-around does not; pass-through keeps nothing at all."""
    for policy, first, second in [
        ("write-through", True, True), ("write-around", False, True), ("pass-through", False, False),
    ]:
        daemon.create(policy, "--policy", policy, "--set", "read_ahead_max_kib=0")
        client = daemon.nbd(policy)
        client.pwrite(b"x" * 65536, 0)
        for is_hit in [first, second]:
            before = counters(daemon, policy)
            assert client.pread(65536, 0) == b"x" * 65536
            after = counters(daemon, policy)
            hits = after["dram_hit_blocks"] - before["dram_hit_blocks"]
            misses = after["miss_blocks"] - before["miss_blocks"]
            assert (hits, misses) == ((16, 0) if is_hit else (0, 16)), policy
        client.shutdown()
    daemon.stop()


def test_policy_read_only_refuses_writes(daemon):
    daemon.create("v", *DIRTY)
    daemon.write("v", b"a" * MIB)
    early = daemon.nbd("v")
    daemon.ok("volume", "set", "v", "policy=read-only")
    assert image(daemon, "v").read_bytes()[:MIB] == b"a" * MIB, "what was dirty is destaged"
    for ask in [lambda c: c.pwrite(b"b" * 4096, 0), lambda c: c.trim(4096, 0), lambda c: c.zero(4096, 0)]:
        with pytest.raises(nbd.Error) as refusal:
            ask(early)
        assert refusal.value.errnum == errno.EPERM
    early.flush()
    assert early.pread(4096, 0) == b"a" * 4096
    late = daemon.nbd("v")
    assert late.is_read_only() and not early.is_read_only()
    daemon.ok("volume", "set", "v", "policy=write-back")
    early.pwrite(b"c" * 4096, 0)
    assert early.pread(4096, 0) == b"c" * 4096
    daemon.stop()


def test_policy_shows_in_every_place(daemon):
    made = daemon.create("v", "--policy", "write-around")
    assert made["settings"]["policy"] == "write-around" and "policy" in made["overridden"]
    for policy in POLICIES:
        changed = daemon.json("volume", "set", "v", f"policy={policy}")
        found = changed["counters"]
        assert (found["policy"], found["policy_remaining_bytes"]) == (policy, 0)
        assert policy in daemon.ok("volume", "show", "v")
        status, page = daemon.api("GET", "/metrics")
        assert status == 200
        found = {p: samples(page)[f'hdcs_volume_policy{{volume="v",policy="{p}"}}'] for p in POLICIES}
        assert found == {p: float(p == policy) for p in POLICIES}
    refused(daemon.cli("volume", "set", "v", "policy=write-never"), 2, "write-back", "pass-through")
    daemon.stop()


def test_policy_change_survives_a_kill_while_the_log_drains(daemon):
    """Its backend takes nothing: the change waits, says how much is left, and goes on after a restart."""
    path = daemon.home / "slow.img"
    daemon.create("v", "--backend", f"file:{path}?error_rate=1", *DIRTY)
    daemon.write("v", b"d" * (2 * MIB))
    change = subprocess.Popen(
        [str(HDCS), "volume", "set", "v", "policy=write-through", "--data", str(daemon.data)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    daemon.until(lambda: daemon.volume("v")["settings"]["policy"] == "write-through")
    daemon.until(lambda: counters(daemon)["backend_errors"] > 0)
    found = counters(daemon)
    assert (found["policy"], found["policy_remaining_bytes"]) == ("write-back", 2 * MIB)
    # The log takes what comes meanwhile.
    daemon.write("v", b"e" * 4096)
    assert "until" in daemon.ok("volume", "show", "v")
    change.send_signal(signal.SIGINT)
    _, said = change.communicate(timeout=60)
    assert change.returncode == 1 and "the change goes on" in said, said
    daemon.kill()
    daemon.start()
    assert daemon.read("v", 2 * MIB) == b"e" * 4096 + b"d" * (2 * MIB - 4096)
    assert counters(daemon)["policy"] == "write-back"
    daemon.kill()


def test_policy_error_of_the_backend_is_the_client_s(daemon):
    path = daemon.home / "bad.img"
    daemon.create("v", "--backend", f"file:{path}?error_rate=1&error_on=write", "--policy", "write-through")
    client = daemon.nbd("v")
    with pytest.raises(nbd.Error) as failure:
        client.pwrite(b"x" * 4096, 0)
    assert failure.value.errnum == errno.EIO
    shown = daemon.volume("v")
    assert shown["state"] == "degraded" and "write-through" in shown["reason"]
    daemon.kill()
