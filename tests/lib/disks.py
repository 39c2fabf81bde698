"""Disks that fail, hang or are small, for a daemon to stand on."""

import os
import shutil
import signal
import subprocess
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from programs import run


class Home(type(Path())):
    """A directory with the process that serves a disk below it."""

    process = None

    def pull(self):
        """The disk is gone, from one moment to the next."""
        self.process.kill()
        self.process.wait()


@contextmanager
def served_disk(directory, error="EIO"):
    """A file whose writes fail while `fail` exists; it answers nothing while its process is stopped."""
    home = Home(directory)
    (home / "mount").mkdir(parents=True)
    if not all(shutil.which(tool) for tool in ("nbdkit", "nbdfuse", "fusermount3")):
        pytest.skip("nbdkit and nbdfuse are needed")
    server = [
        "nbdkit", "--exit-with-parent", "--filter=error", "memory", "64M",
        f"error-file={home / 'fail'}", f"error-pwrite={error}", "error-pwrite-rate=100%",
        "error-pread-rate=0",
    ]
    fuse = ["nbdfuse", str(home / "mount/disk"), "[", *server, "]"]
    process = subprocess.Popen(fuse, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not (home / "mount/disk").exists():
            assert process.poll() is None
        home.process = process
        yield home
    finally:
        process.send_signal(signal.SIGCONT)
        subprocess.run(["fusermount3", "-u", "-z", home / "mount"], check=True)
        process.wait(10)


def attach(path):
    """A loop device on a file."""
    return run("losetup", "--find", "--show", path).stdout.strip()


def blank(path, size):
    with open(path, "wb") as file:
        file.truncate(size)
    return path


@pytest.fixture
def loop(tmp_path):
    """Makes loop devices that end with the test."""
    with ExitStack() as stack:

        def make(name, size):
            device = attach(blank(tmp_path / name, size))
            stack.callback(run, "losetup", "--detach", device, check=False)
            return device

        yield make


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system, which takes root")


@contextmanager
def small_file_system(directory, size):
    """A tmpfs of this size in a directory that is made."""
    directory.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)], check=True
    )
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def state(daemon, name="v"):
    return daemon.volume(name)["state"]
