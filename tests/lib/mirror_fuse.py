"""A directory that FUSE serves as a mirror of another one, as a network's file system does. Reads fail while there is a
file `fails` in the other one, and have no answer while there is a file `hangs`; nor have writes while there is a file
`stalls`. With a file `slow` each path takes its time, and with a file `waits` it has no answer."""

import ctypes
import errno
import os
import struct
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

# The requests that it serves, as in `linux/fuse.h`.
LOOKUP, FORGET, GETATTR, SETATTR, OPEN, READ, WRITE, STATFS = 1, 2, 3, 4, 14, 15, 16, 17
RELEASE, FSYNC, FLUSH, INIT, OPENDIR, ACCESS, RELEASEDIR, INTERRUPT, BATCH_FORGET = 18, 20, 25, 26, 27, 34, 29, 36, 42
# A request's head is as long.
HEAD_BYTES = 40
SETS_SIZE = 8
NO_ANSWER = object()
# Longer than a look at a file is waited for.
SLOW_SECONDS = 3.5


@contextmanager
def mirror(directory):
    """The mirror of a directory, and that directory; both are made."""
    if os.geteuid() != 0 or not Path("/dev/fuse").exists():
        pytest.skip("FUSE needs root and /dev/fuse")
    behind, mounted = directory / "behind", directory / "mounted"
    behind.mkdir()
    mounted.mkdir()
    command = [sys.executable, __file__, str(behind), str(mounted)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        try:
            if server.stdout.readline() != b"ready\n":
                pytest.skip("FUSE cannot be mounted here")
            yield mounted, behind
        finally:
            # What waits for an answer gets an error once nobody serves it.
            server.kill()
            subprocess.run(["umount", "-l", str(mounted)], check=False)


class Server:
    """Serves one request after another."""

    def __init__(self, behind, device):
        self.behind, self.device = behind, device
        self.nodes = {1: behind}

    def attributes(self, node):
        found = os.stat(self.nodes[node])
        times = int(found.st_atime), int(found.st_mtime), int(found.st_ctime)
        # Device numbers, flags and parts of a second are 0.
        return struct.pack("<6Q10I", node, found.st_size, found.st_blocks, *times, 0, 0, 0, found.st_mode, 1,
                           found.st_uid, found.st_gid, 0, 4096, 0)

    def is_told(self, what):
        return os.path.exists(os.path.join(self.behind, what))

    def answer(self, kind, node, body):
        if kind == INIT:
            # Version 7.31; writes of 128 KiB.
            return struct.pack("<4I2H2I2HI28x", 7, 31, 65536, 0, 12, 8, 131072, 1, 0, 0, 0)
        if kind in (FORGET, BATCH_FORGET, INTERRUPT):
            return NO_ANSWER
        if kind == LOOKUP:
            path = os.path.join(self.nodes[node], os.fsdecode(body.rstrip(b"\0")))
            # The numbers of the mirror are not those of the file system behind it.
            found = os.stat(path).st_ino + 10
            self.nodes[found] = path
            return struct.pack("<4Q2I", found, 0, 0, 0, 0, 0) + self.attributes(found)
        if kind in (GETATTR, SETATTR):
            valid, = struct.unpack_from("<I", body)
            if kind == SETATTR and valid & SETS_SIZE:
                os.truncate(self.nodes[node], *struct.unpack_from("<Q", body, 16))
            return struct.pack("<Q2I", 0, 0, 0) + self.attributes(node)
        if kind == OPEN:
            return struct.pack("<Q2I", os.open(self.nodes[node], os.O_RDWR), 0, 0)
        if kind == OPENDIR:
            return struct.pack("<Q2I", 0, 0, 0)
        if kind == READ:
            if self.is_told("fails"):
                raise OSError(errno.EIO, "told so")
            handle, offset, size = struct.unpack_from("<2QI", body)
            return os.pread(handle, size, offset)
        if kind == WRITE:
            handle, offset, size = struct.unpack_from("<2QI", body)
            return struct.pack("<2I", os.pwrite(handle, body[40:40 + size], offset), 0)
        if kind == RELEASE:
            os.close(*struct.unpack_from("<Q", body))
            return b""
        if kind == FSYNC:
            os.fsync(*struct.unpack_from("<Q", body))
            return b""
        if kind in (FLUSH, RELEASEDIR, ACCESS):
            return b""
        if kind == STATFS:
            return struct.pack("<5Q3I28x", 1 << 20, 1 << 19, 1 << 19, 1000, 900, 4096, 255, 4096)
        raise OSError(errno.ENOSYS, "not served")

    def serve(self):
        while True:
            try:
                message = os.read(self.device, 1 << 21)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT):
                    continue
                return
            kind = struct.unpack_from("<2I", message)[1]
            if kind == LOOKUP and self.is_told("slow"):
                time.sleep(SLOW_SECONDS)
            if holds := {READ: "hangs", WRITE: "stalls", LOOKUP: "waits"}.get(kind):
                threading.Thread(target=self.end_later, args=(message, holds), daemon=True).start()
            else:
                self.end(message)

    def end_later(self, message, holds):
        while self.is_told(holds):
            time.sleep(0.01)
        self.end(message)

    def end(self, message):
        length, kind, number, node = struct.unpack_from("<2I2Q", message)
        status, answer = 0, b""
        try:
            answer = self.answer(kind, node, message[HEAD_BYTES:length])
        except OSError as error:
            status = -(error.errno or errno.EIO)
        if answer is not NO_ANSWER:
            head = struct.pack("<IiQ", 16 + len(answer), status, number)
            try:
                os.write(self.device, head + answer)
            except OSError:
                # Whoever asked does not wait any more.
                pass


def main(behind, mounted):
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"mirror", os.fsencode(mounted), b"fuse", 0, options.encode()):
        sys.exit(os.strerror(ctypes.get_errno()))
    print("ready", flush=True)
    Server(behind, device).serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
