"""A write log whose device takes no writes any more, under `log_failure=pass-through`: clients notice nothing, and the
old log, when it is back, takes nothing back."""

import os
import random
import subprocess

import nbd
import pytest

from daemon import DIRTY, Daemon, hdcs, refused
from home_layouts import DATA
from programs import MIB

BLOCK = 4096
BLOCKS = 4096

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system, which takes root")


class Device:
    """A block device whose blocks take space of a small file system, so that writes to it can be made to fail."""

    def __init__(self, home):
        self.small = home / "small"
        self.backing = self.small / "device"
        self.filler = self.small / "filler"

    def __enter__(self):
        self.small.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(self.small)], check=True)
        with open(self.backing, "wb") as file:
            file.truncate(32 * MIB)
        made = subprocess.run(["losetup", "--find", "--show", str(self.backing)], capture_output=True, text=True)
        self.path = made.stdout.strip()
        if made.returncode:
            subprocess.run(["umount", str(self.small)], check=True)
            pytest.skip(f"no loop device: {made.stderr.strip()}")
        return self

    def __exit__(self, *_):
        if self.path:
            self.detach()
        subprocess.run(["umount", str(self.small)], check=True)

    def detach(self):
        subprocess.run(["losetup", "--detach", self.path], check=True)
        self.path = None

    def break_from(self, offset, length):
        """These bytes lose their place, and whatever is free is taken: a write to them fails, others do not."""
        subprocess.run(["fallocate", "--punch-hole", f"--offset={offset}", f"--length={length}", str(self.backing)],
                       check=True)
        with open(self.filler, "wb", buffering=0) as file, pytest.raises(OSError):
            while file.write(bytes(BLOCK)):
                pass

    def mend(self):
        self.filler.unlink()


@pytest.fixture
def device(tmp_path):
    with Device(tmp_path) as device:
        yield device


@pytest.fixture
def daemon(tmp_path, device):
    # After the device, so that it is stopped before that goes.
    (tmp_path / "node").mkdir()
    with Daemon(tmp_path / "node") as daemon:
        yield daemon


def create(daemon, device, *arguments, persist="on-write"):
    backend = daemon.home / "image"
    daemon.create("v", "--backend", f"file:{backend}", "--log-path", device.path, "--log-size", "16M",
                  "--set", "log_failure=pass-through", *DIRTY, *arguments)
    daemon.ok("volume", "set", "v", f"persist={persist}")
    return backend


class Client:
    """Writes, and knows what has to be there."""

    def __init__(self, daemon, model=None):
        self.handle = daemon.nbd("v")
        self.random = random.Random(4)
        self.model = model or {}

    def write(self, block):
        data = self.random.randbytes(BLOCK)
        self.handle.pwrite(data, block * BLOCK)
        self.model[block] = data

    def check(self):
        for block, data in self.model.items():
            assert self.handle.pread(BLOCK, block * BLOCK) == data, block

    def close(self):
        self.handle.shutdown()


def holds(path, model):
    content = path.read_bytes()
    return all(content[block * BLOCK :][:BLOCK] == data for block, data in model.items())


def is_given_up(daemon):
    volume = daemon.volume("v")
    return volume["state"] == "degraded" and "writes go to the backend" in (volume["reason"] or "")


@pytest.mark.parametrize("persist", ["on-write", "on-flush"])
def test_policy_log_failure_is_no_error_and_an_old_log_takes_nothing_back(daemon, device, persist):
    backend = create(daemon, device, persist=persist)
    client = Client(daemon)
    for block in range(200):
        client.write(block)
    client.handle.flush()
    assert daemon.volume("v")["counters"]["dirty_bytes"] >= 200 * BLOCK
    device.break_from(4 * MIB, 28 * MIB)
    # The first that the device has no place for is written to the backend, after all that was dirty.
    for block in range(200, 1200):
        client.write(block)
    client.handle.flush()
    daemon.until(lambda: is_given_up(daemon))
    volume = daemon.volume("v")
    assert volume["counters"]["dirty_bytes"] == 0 and volume["counters"]["policy"] == "write-through"
    assert holds(backend, client.model)
    daemon.tells("goes to the backend, and then what clients write")
    # What the log's device still has is older than this.
    for block in range(0, 1200, 3):
        client.write(block)
    client.handle.flush()
    client.check()
    assert holds(backend, client.model)
    # Acknowledged and not flushed: that the node ends takes nothing from the backend.
    client.write(5)
    model = client.model
    daemon.kill()
    device.mend()
    daemon.start()
    daemon.until(lambda: daemon.volume("v")["state"] == "healthy")
    client = Client(daemon, model)
    client.check()
    client.handle.flush()
    assert holds(backend, model)
    # It is a cache again.
    for block in range(0, 300, 2):
        client.write(block)
    client.handle.flush()
    volume = daemon.volume("v")
    assert volume["counters"]["policy"] == "write-back" and volume["counters"]["dirty_bytes"] > 0
    daemon.kill()
    daemon.start()
    client = Client(daemon, model)
    client.check()
    client.close()
    daemon.ok("volume", "flush", "v")
    assert holds(backend, model)
    daemon.stop()


def test_policy_log_failure_of_a_direct_policy_costs_no_write(daemon, device):
    """Nothing goes to the log but the mark that writes go past it, and the device has no place for that."""
    backend = create(daemon, device, "--policy", "write-around")
    device.break_from(0, BLOCK)
    client = Client(daemon)
    for block in range(50):
        client.write(block)
    client.handle.flush()
    assert holds(backend, client.model)
    daemon.until(lambda: is_given_up(daemon))
    client.write(60)
    daemon.kill()
    device.mend()
    daemon.start()
    client = Client(daemon, client.model)
    client.check()
    client.handle.flush()
    client.close()
    assert daemon.volume("v")["state"] == "healthy"
    daemon.stop()


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_policy_log_failure_for_good_needs_a_new_log_and_loses_nothing(daemon, device, end):
    backend = create(daemon, device)
    client = Client(daemon)
    device.break_from(4 * MIB, 28 * MIB)
    for block in range(1200):
        client.write(block)
    client.handle.flush()
    daemon.until(lambda: is_given_up(daemon))
    client.write(7)
    model = client.model
    client.close()
    # All is in the backend: a stop is a clean one, and so is a crash.
    getattr(daemon, end)()
    device.detach()
    daemon.start()
    volume = daemon.volume("v")
    assert volume["state"] == "error" and "held nothing that the backend does not have" in volume["reason"]
    with pytest.raises(nbd.Error):
        daemon.nbd("v")
    daemon.ok("volume", "open", "v", "--log-path", daemon.home / "new.log", "--log-size", "16M")
    client = Client(daemon, model)
    client.check()
    client.write(9)
    client.handle.flush()
    client.close()
    assert daemon.volume("v")["state"] == "healthy"
    daemon.ok("volume", "flush", "v")
    assert holds(backend, model)
    daemon.stop()


def test_policy_log_failure_in_storage_mode_is_a_home_whose_sums_may_be_old(daemon, device):
    """What went past the log is in the local store's data, and the sums of it that were not committed went with the node."""
    create(daemon, device, "--mode", "storage", "--store-path", daemon.home / "home")
    client = Client(daemon)
    for block in range(200):
        client.write(block)
    client.handle.flush()
    device.break_from(4 * MIB, 28 * MIB)
    for block in range(200, 1200):
        client.write(block)
    client.handle.flush()
    daemon.until(lambda: is_given_up(daemon))
    for block in range(0, 1200, 3):
        client.write(block)
    daemon.kill()
    device.mend()
    daemon.start()
    client = Client(daemon, client.model)
    client.check()
    client.handle.flush()
    client.close()
    assert daemon.volume("v")["state"] == "healthy"
    daemon.stop()


def test_policy_log_failure_superblock_beside_the_log_is_not_done_without(daemon, device):
    """A damaged one is not taken for none: the old log could be replayed."""
    backend = create(daemon, device)
    client = Client(daemon)
    for block in range(100):
        client.write(block)
    device.break_from(4 * MIB, 28 * MIB)
    for block in range(100, 1200):
        client.write(block)
    daemon.until(lambda: is_given_up(daemon))
    for block in range(100):
        client.write(block)
    client.handle.flush()
    daemon.kill()
    device.mend()
    kept = daemon.data / "volumes/v/superblock"
    good = kept.read_bytes()
    kept.write_bytes(bytes(BLOCK))
    daemon.start()
    volume = daemon.volume("v")
    assert volume["state"] == "error" and "superblock: " in volume["reason"] and "restore it" in volume["reason"]
    kept.write_bytes(good)
    daemon.ok("volume", "open", "v")
    client = Client(daemon, client.model)
    client.check()
    client.close()
    assert holds(backend, client.model)
    daemon.stop()


def test_policy_log_failure_is_read_only_unless_it_is_set(daemon):
    daemon.create("w")
    assert daemon.volume("w")["settings"]["log_failure"] == "read-only"
    refused(daemon.cli("volume", "set", "w", "log_failure=maybe"), 2, '"read-only", "pass-through"')
    daemon.ok("volume", "set", "w", "log_failure=pass-through")
    assert daemon.volume("w")["settings"]["log_failure"] == "pass-through"


def test_policy_log_failure_hides_no_damage_of_a_home(daemon, device):
    """A check takes what does not match in the local store for damage, though the log that was given up still holds it."""
    daemon.create("v", "--mode", "storage", "--backend", f"file:{daemon.home / 'image'}", "--log-path", device.path,
                  "--log-size", "16M", "--set", "log_failure=pass-through", *DIRTY)
    home = daemon.data / "volumes/v/home"
    client = Client(daemon)
    for block in range(200):
        client.write(block)
    device.break_from(4 * MIB, 28 * MIB)
    for block in range(200, 1200):
        client.write(block)
    client.handle.flush()
    daemon.until(lambda: is_given_up(daemon))
    client.close()
    daemon.stop()
    assert hdcs("check", daemon.data).returncode == 0
    with open(home, "r+b") as file:
        file.seek(DATA + 7 * BLOCK + 100)
        byte = file.read(1)[0]
        file.seek(DATA + 7 * BLOCK + 100)
        file.write(bytes([byte ^ 1]))
    done = hdcs("check", daemon.data)
    refused(done, 1, "1 problem")
    assert f"bytes {7 * BLOCK} to {8 * BLOCK} of the volume do not match" in done.stdout, done.stdout
