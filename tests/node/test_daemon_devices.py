"""Raw block devices for the write log and the read cache, one of them with a volatile write cache and
no power, one that is swapped for another disk."""

import os
import random
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from daemon import DIRTY, Daemon, refused
from disks import attach, blank
from programs import CLIENT_SECONDS, MIB, ROOT, run

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="attaching loop devices needs root")

BLOCK = 4096
PLUGIN = ROOT / "target/testenv/nbdkit-power.so"


def detach(device):
    run("losetup", "--detach", device)


def test_raw_devices_for_log_and_cache(tmp_path, loop):
    log, cache = loop("log-disk", 32 * MIB), loop("cache-disk", 64 * MIB)
    data = random.Random(1).randbytes(8 * MIB)
    with Daemon(tmp_path, {"cache_path": cache, "cache_total_size_mib": 64}) as daemon:
        volume = daemon.create("v", "--log-path", log, *DIRTY)
        # All of the device, if nothing else was said.
        assert (volume["log_path"], volume["log_bytes"]) == (log, 32 * MIB)
        daemon.write("v", data)
        daemon.kill()
        daemon.start()
        assert daemon.volume("v")["counters"]["replayed_bytes"] == 8 * MIB
        assert daemon.read("v", 8 * MIB) == data
        daemon.ok("volume", "flush", "v")
        daemon.ok("volume", "promote", "v")
        daemon.stop()
        daemon.start()
        status = daemon.cache()
        assert status["ssd_state"] in ("warming", "online")
        daemon.until(lambda: daemon.cache()["warm_lines"] > 0)
        assert daemon.read("v", 8 * MIB) == data
        done = daemon.cli("volume", "create", "w", "--size", "16M", "--log-path", log)
        refused(done, 2, "is the write log of volume v")
        # Once the volume is gone, its device is empty.
        daemon.ok("volume", "delete", "v")
        daemon.create("w", "--log-path", log)


def test_another_disk_in_the_place_of_the_log(tmp_path, loop):
    """It is not written to; the volume opens from its backend once that is asked for."""
    log, precious = loop("log-disk", 32 * MIB), loop("precious", 32 * MIB)
    run("mkfs.ext4", "-q", precious)
    place = tmp_path / "disk"
    place.symlink_to(log)
    with Daemon(tmp_path) as daemon:
        daemon.create("v", "--log-path", place, *DIRTY)
        daemon.write("v", b"o" * MIB)
        daemon.ok("volume", "flush", "v")
        daemon.write("v", b"n" * MIB)
        daemon.stop()
        place.unlink()
        daemon.start()
        assert "No such file" in daemon.volume("v")["reason"]
        place.symlink_to(precious)
        before = Path(tmp_path / "precious").read_bytes()
        refused(daemon.cli("volume", "open", "v"), 1, f"{MIB} dirty bytes", "--discard-dirty")
        refused(daemon.cli("volume", "open", "v", "--discard-dirty"), 1, "holds data", "--log-overwrite")
        refused(daemon.cli("volume", "delete", "v"), 1, f"{MIB} dirty bytes")
        assert Path(tmp_path / "precious").read_bytes() == before
        # The right disk again: nothing was lost.
        place.unlink()
        place.symlink_to(log)
        assert daemon.json("volume", "open", "v")["lost"] is None
        assert daemon.read("v", MIB) == b"n" * MIB
        daemon.stop()
        # An empty one, for good.
        place.unlink()
        place.symlink_to(loop("new-disk", 32 * MIB))
        daemon.start()
        lost = daemon.json("volume", "open", "v", "--discard-dirty")["lost"]
        assert lost["dirty_bytes_max"] == MIB and lost["log_kept"] is None
        assert daemon.read("v", MIB) == b"o" * MIB
        daemon.write("v", b"p" * MIB)
        daemon.kill()
        daemon.start()
        assert daemon.read("v", MIB) == b"p" * MIB
        # Deleting a volume wipes its own device alone.
        daemon.stop()
        place.unlink()
        place.symlink_to(precious)
        daemon.start()
        daemon.ok("volume", "delete", "v", "--discard-dirty")
        assert Path(tmp_path / "precious").read_bytes() == before


def listens(path):
    """Whether someone accepts connections at a Unix socket: its file is there a moment before."""
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


class PowerDevice:
    """A block device with a volatile write cache: nbdkit's plugin, nbdfuse, a loop device. `link` is where
    it is to be found, whichever loop device it gets."""

    def __init__(self, home, size):
        self.home, self.size = home, size
        self.image = blank(home / "medium", size)
        self.link = home / "power-disk"
        self.file = home / "fuse"
        self.nbdkit = self.fuse = self.device = None
        self.on(keep=100)

    def on(self, **state):
        """Power on: of what was not flushed, as much is there as `state` says."""
        sock = self.home / "power.sock"
        sock.unlink(missing_ok=True)
        self.nbdkit = subprocess.Popen(
            ["nbdkit", "--foreground", "--unix", sock, PLUGIN, f"disk={self.image}",
             *(f"{key}={value}" for key, value in state.items())])
        self.wait(lambda: listens(sock), self.nbdkit)
        self.file.touch()
        self.fuse = subprocess.Popen(["nbdfuse", self.file, "--unix", sock])
        self.wait(lambda: self.file.stat().st_size == self.size, self.fuse)
        self.device = attach(self.file)
        self.link.unlink(missing_ok=True)
        self.link.symlink_to(self.device)

    @staticmethod
    def wait(condition, process):
        deadline = time.monotonic() + CLIENT_SECONDS
        while not condition():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)

    def cut(self):
        """Power off."""
        if self.nbdkit:
            self.nbdkit.kill()
            self.nbdkit.wait()
            self.nbdkit = None

    def off(self):
        """Take everything down; after a cut each step may complain."""
        self.cut()
        if self.device:
            run("losetup", "--detach", self.device, check=False)
        if self.fuse:
            run("fusermount3", "-u", "-z", self.file, check=False)
            try:
                self.fuse.wait(CLIENT_SECONDS)
            except subprocess.TimeoutExpired:
                self.fuse.send_signal(signal.SIGKILL)
                self.fuse.wait()
        self.device = self.fuse = None


@pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="needs /dev/fuse")
def test_log_on_a_raw_device_survives_power_cuts(tmp_path):
    """Every acknowledged write is there after each cut, whatever the device kept of the others."""
    seed = 11
    rng = random.Random(seed)
    print("seed", seed)
    disk = PowerDevice(tmp_path, 32 * MIB)
    model = {}
    try:
        with Daemon(tmp_path) as daemon:
            daemon.create("v", "--log-path", disk.link, "--log-size", "16M", "--persist", "on-write",
                          "--set", "destage_age_max_ms=50")
            for cut in range(4):
                client = daemon.nbd("v")
                for _ in range(rng.randrange(20, 60)):
                    offset = rng.randrange(64) * BLOCK
                    model[offset] = rng.randbytes(BLOCK)
                    client.pwrite(model[offset], offset)
                if cut % 2:
                    daemon.kill()
                    disk.cut()
                else:
                    disk.cut()
                    daemon.kill()
                del client
                disk.off()
                disk.on(keep=[0, 20, 50, 80][cut], seed=rng.randrange(1, 1 << 31),
                        mode="prefix" if cut == 2 else "random")
                daemon.start()
                volume = daemon.volume("v")
                assert volume["state"] == "healthy", volume
                for offset, data in model.items():
                    assert daemon.read("v", BLOCK, offset) == data, f"cut {cut}, offset {offset}"
            daemon.stop()
    finally:
        disk.off()


class Traced(Daemon):
    """A daemon of which it is told what it syncs."""

    def command(self):
        self.calls = self.home / "calls"
        self.calls.unlink(missing_ok=True)
        tracer = ["strace", "-D", "-f", "-q", "-y", "-e", "trace=fdatasync", "-o", str(self.calls)]
        return [*tracer, *super().command()]


def test_log_is_synced_before_it_is_replayed(tmp_path):
    """What a killed daemon had under way is read back from the disk's cache, and must not be lost with the power after."""
    with Traced(tmp_path, {"log_durability": "dsync"}) as daemon:
        daemon.create("v")
        daemon.write("v", b"x" * MIB)
        daemon.kill()
        daemon.start()
        daemon.until(lambda: f"<{daemon.log_of('v')}>" in daemon.calls.read_text())
        assert daemon.read("v", MIB) == b"x" * MIB
        daemon.stop()
