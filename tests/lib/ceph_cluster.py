"""A real Ceph cluster on loopback for the tests of a session: one mon, one mgr, one OSD."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from programs import ROOT, free_ports

UP_SECONDS = 180
COMMAND_SECONDS = 60
# The daemons of a cluster use so many ports from its first one.
PORTS = 100


class Cluster:
    """A cluster in a directory of its own, and Ceph's own programs against it."""

    def __init__(self):
        # Its unix sockets are in there, so that the path must be short.
        self.directory = Path(tempfile.mkdtemp(prefix="hdcs-ceph-", dir="/tmp"))
        self.conf = self.directory / "ceph.conf"
        self.port = free_ports(PORTS)

    def up(self):
        """Start what does not run; returns when the cluster is healthy."""
        self.script(
            "ceph-up.sh", "--size", "6G", "--mem", "1G", "--pgs", "8", "--port", str(self.port),
            "--timeout", str(UP_SECONDS), "--auth", "cephx",
        )

    def script(self, name, *options):
        done = subprocess.run(
            [ROOT / "testenv" / name, self.directory, *options],
            capture_output=True,
            text=True,
            timeout=UP_SECONDS + COMMAND_SECONDS,
        )
        assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"

    def end(self):
        """Stop everything and remove it."""
        try:
            self.script("ceph-down.sh", "--purge", "--fast")
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)

    def program(self, *command, check=True):
        """Run one of Ceph's programs; what it printed, as bytes."""
        done = subprocess.run(
            [str(word) for word in command], capture_output=True, timeout=COMMAND_SECONDS
        )
        text = (done.stdout + done.stderr).decode(errors="replace")[-2000:]
        assert not check or done.returncode == 0, f"{command}: {done.returncode}\n{text}"
        return done.stdout

    def ceph(self, *command):
        return self.program("ceph", "-c", self.conf, *command)

    def rbd(self, *command, check=True):
        return self.program("rbd", "-c", self.conf, *command, check=check)

    def export(self, image):
        """The content of an image, read without HDCS."""
        return self.rbd("export", "--no-progress", image, "-")

    def make_pool(self, name):
        self.ceph("osd", "pool", "create", name, "8", "8", "replicated")
        self.ceph("osd", "pool", "set", name, "size", "1", "--yes-i-really-mean-it")
        self.ceph("osd", "pool", "application", "enable", name, "rbd")

    def signal_osd(self, number):
        """Send the OSD a signal; its process and where that is recorded."""
        record = self.directory / "run/osd.0.launched"
        pid = int(record.read_text())
        assert str(self.conf).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        os.kill(pid, number)
        return pid, record

    def kill_osd(self):
        """The disks vanish, without a word."""
        pid, record = self.signal_osd(signal.SIGKILL)
        end = time.monotonic() + COMMAND_SECONDS
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < end, "the OSD does not die"
            time.sleep(0.02)
        record.unlink()
        # Peers would report it; a cluster of one has none.
        self.ceph("osd", "down", "0")

    def user(self, name, directory, keyring=None):
        """A user with no more rights than docs/OPERATING.md asks for; the options of a URL for it."""
        made = directory / f"{name}.keyring"
        rights = ["mon", "profile rbd", "osd", "profile rbd"]
        self.ceph("auth", "get-or-create", f"client.{name}", *rights, "-o", made)
        text = self.conf.read_text()
        text = text.replace(str(self.directory / "client.admin.keyring"), str(keyring or made))
        conf = directory / f"{name}.conf"
        conf.write_text(text)
        return {"conf": conf, "id": name}

    def url(self, image, **options):
        """The backend URL of POOL/IMAGE."""
        options = {"conf": self.conf, **options}
        return f"rbd:{image}?" + "&".join(f"{name}={value}" for name, value in options.items())


@pytest.fixture(scope="session")
def cluster():
    """The cluster, started for the first test that needs it."""
    made = Cluster()
    try:
        made.up()
        yield made
    finally:
        made.end()
