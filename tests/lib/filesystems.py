"""A volume as a file, a loop device and a mounted file system."""

import filecmp
import os
import random
import subprocess
import time
from pathlib import Path

import pytest

from programs import CLIENT_SECONDS, run

needs_fuse = pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/fuse").exists(),
    reason="mounting needs root and /dev/fuse",
)


def make_tree(root, seed):
    """Files of many sizes in directories, from a seed."""
    rng = random.Random(seed)
    for number in range(300):
        path = root / f"d{number % 7}" / f"e{number % 3}" / f"file{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.randbytes(rng.choice([0, 1, 700, 4096, 30_000, 500_000])))


def same_tree(left, right):
    """Whether two directories hold the same files with the same content."""
    names = sorted(path.relative_to(left) for path in left.rglob("*") if path.is_file())
    _, differing, missing = filecmp.cmpfiles(left, right, names, shallow=False)
    return names and not differing and not missing


def as_file(stack, uri, path):
    """Present a volume as a file until the stack ends."""
    path.touch()
    process = subprocess.Popen(["nbdfuse", str(path), uri])

    def end():
        run("fusermount", "-u", path, check=False)
        try:
            status = process.wait(CLIENT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        assert status == 0

    stack.callback(end)
    deadline = time.monotonic() + CLIENT_SECONDS
    while path.stat().st_size == 0:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def as_loop(stack, path):
    """A loop device on a file until the stack ends."""
    device = run("losetup", "--find", "--show", path).stdout.strip()
    stack.callback(run, "losetup", "--detach", device)
    return device


def mounted(stack, device, where):
    """Mount a device until the stack ends."""
    where.mkdir(exist_ok=True)
    run("mount", device, where)
    stack.callback(run, "umount", where)
    return where
