"""Clones of one boot image that share the cache."""

import random
import subprocess
from contextlib import contextmanager

from programs import MIB

SIZE = 32 * MIB


# Either tier holds all of it, long streams included.
CONFIG = {
    "memory_max_mib": 940, "volumes_memory_mib": 500, "cache_total_size_mib": 128, "log_size_mib": 16, "sequential_cutoff_kib": 1 << 20,
}


FUSE_SECONDS = 60


def image(tmp_path):
    """A file system with content, and holes in between."""
    tree = tmp_path / "tree"
    rng = random.Random(7)
    for number in range(120):
        path = tree / f"d{number % 7}" / f"f{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.randbytes(rng.choice([700, 9000, 60_000, 400_000])))
    made = tmp_path / "image"
    made.touch()
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", tree, made, "32M"], check=True)
    return tree, made.read_bytes()


@contextmanager
def as_file(daemon, name, where):
    """A volume as a file."""
    where.touch()
    uri = f"nbd+unix:///{name}?socket={daemon.data / 'nbd.sock'}"
    pid = where.with_suffix(".pid")
    fuse = subprocess.Popen(["nbdfuse", "-r", "-P", pid, where, uri])
    try:
        daemon.until(pid.exists)
        yield where
    finally:
        subprocess.run(["fusermount3", "-u", where], check=True)
        fuse.wait(FUSE_SECONDS)


def boot(daemon, name, tree, tmp_path):
    """Check a file system and read every file of it, as a machine does that boots from it."""
    out = tmp_path / f"booted-{name}"
    out.mkdir()
    with as_file(daemon, name, tmp_path / f"disk-{name}") as disk:
        subprocess.run(["e2fsck", "-f", "-n", disk], check=True, capture_output=True)
        subprocess.run(["debugfs", "-R", f"rdump / {out}", disk], check=True, capture_output=True)
    for path in tree.rglob("*"):
        if path.is_file():
            assert (out / path.relative_to(tree)).read_bytes() == path.read_bytes()
