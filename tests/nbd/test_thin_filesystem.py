"""A file system on a thin volume gives back what its files took: fstrim, and blkdiscard of the whole device."""

import os
import random
from contextlib import ExitStack

from daemon import Daemon
from filesystems import as_file, as_loop, mounted, needs_fuse
from programs import MIB, run

pytestmark = needs_fuse


def test_ext4_gives_back_what_it_trims(tmp_path):
    with Daemon(tmp_path, {"log_size_mib": 64}) as daemon:
        daemon.create("v", size="256M")
        image = daemon.data / "volumes/v/data"

        def allocated():
            daemon.ok("volume", "flush", "v")
            found = os.stat(image).st_blocks * 512
            assert daemon.volume("v")["allocated_bytes"] == found
            return found

        with ExitStack() as stack:
            uri = f"nbd+unix:///v?socket={daemon.data / 'nbd.sock'}"
            as_file(stack, uri, tmp_path / "disk")
            device = as_loop(stack, tmp_path / "disk")
            run("mkfs.ext4", "-q", device)
            with ExitStack() as inner:
                where = mounted(inner, device, tmp_path / "mnt")
                empty = allocated()
                (where / "large").write_bytes(random.Random(1).randbytes(96 * MIB))
                run("sync", "-f", where)
                full = allocated()
                assert full >= empty + 96 * MIB
                (where / "large").unlink()
                run("sync", "-f", where)
                run("fstrim", "-v", where)
                assert allocated() <= full - 95 * MIB
            run("fsck.ext4", "-n", "-f", device)
            run("blkdiscard", device)
            assert allocated() == 0
        daemon.stop()
