"""A file system on NBD: nbdfuse gives a file, a loop device on it holds ext4."""

import filecmp
import json
import os
import random
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from conftest import CLIENT_SECONDS, MIB, needs_hdcs, run

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/fuse").exists(),
    reason="mounting needs root and /dev/fuse",
)

SIZE = 256 * MIB


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


def test_ext4_over_nbdfuse(server, tmp_path):
    uri = server.uri(server.create_volume(SIZE))
    source = tmp_path / "source"
    make_tree(source, 1)
    disk = tmp_path / "disk"
    with ExitStack() as stack:
        as_file(stack, uri, disk)
        device = as_loop(stack, disk)
        run("mkfs.ext4", "-q", device)
        with ExitStack() as mount:
            root = mounted(mount, device, tmp_path / "root")
            run("cp", "-r", source, root / "first")
            run("cp", "-r", root / "first", root / "second")
            run("rm", "-r", root / "first" / "d0")
            run("sync", "-f", root)
            run("fstrim", root, check=False)
        run("e2fsck", "-f", "-n", device)
    # Everything is closed; what a new client sees came from the volume.
    with ExitStack() as stack:
        as_file(stack, uri, disk)
        device = as_loop(stack, disk)
        run("e2fsck", "-f", "-n", device)
        with ExitStack() as mount:
            root = mounted(mount, device, tmp_path / "root")
            assert same_tree(source, root / "second")
            assert not (root / "first" / "d0").exists()
            assert same_tree(source / "d1", root / "first" / "d1")
    assert run("losetup", "--associated", disk).stdout == ""


@needs_hdcs
def test_image_that_was_kept_mounts_without_us(server, tmp_path):
    """After `delete --keep-data` all is in the plain image, dirty data included."""
    name = server.create_volume(SIZE, "--set", "destage_age_max_ms=86400000")
    source = tmp_path / "source"
    make_tree(source, 2)
    disk = tmp_path / "disk"
    with ExitStack() as stack:
        as_file(stack, server.uri(name), disk)
        device = as_loop(stack, disk)
        run("mkfs.ext4", "-q", device)
        with ExitStack() as mount:
            root = mounted(mount, device, tmp_path / "root")
            run("cp", "-r", source, root / "tree")
    shown = json.loads(server.hdcs("volume", "show", name, "--json").stdout)
    assert shown["counters"]["dirty_bytes"] > 0
    deleted = server.hdcs("volume", "delete", name, "--keep-data", "--json")
    data = json.loads(deleted.stdout)["data"]
    assert data.startswith("file:")
    image = Path(data.removeprefix("file:"))
    with ExitStack() as stack:
        run("e2fsck", "-f", "-n", image)
        device = as_loop(stack, image)
        root = mounted(stack, device, tmp_path / "root")
        assert same_tree(source, root / "tree")
    image.unlink()
