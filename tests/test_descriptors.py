"""File descriptors: the limit is raised, and some are kept for files however many clients come."""

import contextlib
import os
import resource
import socket
import struct
import subprocess
from pathlib import Path

import pytest

from conftest import free_port
from daemon import Daemon

OPTION = 0x49484156454F5054
SECONDS = 30

# They hold more sockets than a process may by default.
HARD = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (HARD, HARD))
EXPORT_V = struct.pack(">I", 3) + struct.pack(">QII", OPTION, 1, 1) + b"v"


class LimitedDaemon(Daemon):
    """A daemon on the unix socket and on loopback TCP, with so many descriptors."""

    def __init__(self, home, soft, hard, config=None):
        self.limit = f"--nofile={soft}:{hard}"
        self.port = free_port()
        listen = ["unix:nbd.sock", f"tcp:127.0.0.1:{self.port}"]
        super().__init__(home, {"nbd_listen": listen, **(config or {})})

    def command(self):
        return ["prlimit", self.limit, *super().command()]


@contextlib.contextmanager
def clients(port, count, words=b""):
    """So many connections over TCP that say that and no more."""
    sockets = []
    try:
        for _ in range(count):
            client = socket.socket()
            client.settimeout(SECONDS)
            client.connect(("127.0.0.1", port))
            with contextlib.suppress(OSError):
                client.sendall(words)
            sockets.append(client)
        yield sockets
    finally:
        for client in sockets:
            client.close()


def test_limit_is_raised_and_too_small_a_one_refused(tmp_path):
    with LimitedDaemon(tmp_path, 64, 4096) as daemon:
        limits = Path(f"/proc/{daemon.process.pid}/limits").read_text()
        row = next(line for line in limits.splitlines() if line.startswith("Max open files"))
        assert row.split()[3:5] == ["4096", "4096"]
        assert "open files has room" not in daemon.log()
        daemon.stop()
    LimitedDaemon(tmp_path, 100, 100).refuses(1, "the limit of open files is 100", "LimitNOFILE")


def test_clients_leave_descriptors_for_files(tmp_path):
    """More clients than descriptors: volumes are made, opened with their keys, written and recorded all the same."""
    key = tmp_path / "key"
    key.write_bytes(os.urandom(32))
    with LimitedDaemon(tmp_path, 300, 300) as daemon:
        daemon.tells("the limit of 300 open files has room for 75 connections")
        daemon.create("v")
        with clients(daemon.port, 300, EXPORT_V), clients(daemon.port, 300):
            for number in range(5):
                daemon.create(f"w{number}", "--encrypt", "--key-file", key)
                daemon.write(f"w{number}", os.urandom(1 << 20))
                daemon.ok("volume", "flush", f"w{number}")
                daemon.ok("volume", "set", f"w{number}", "dirty_ratio_max=60")
            daemon.ok("volume", "delete", "w0")
            assert daemon.json("status")
        for trouble in ["os error 24", "Too many open files", "cannot accept"]:
            assert trouble not in daemon.log()
        daemon.stop()
        daemon.start()
        assert {volume["state"] for volume in daemon.json("volume", "list")} == {"healthy"}


def test_tcp_has_keepalive(tmp_path):
    with LimitedDaemon(tmp_path, 4096, 4096) as daemon:
        daemon.create("v")
        with clients(daemon.port, 1, EXPORT_V) as [client]:
            greeting = b""
            while len(greeting) < 28:
                greeting += client.recv(28) or pytest.fail("the connection has ended")

            def has_keepalive():
                shown = subprocess.run(
                    ["ss", "-tno", "state", "established", f"( sport = :{daemon.port} )"],
                    capture_output=True, text=True, check=True, timeout=SECONDS,
                )
                return "timer:(keepalive," in shown.stdout

            daemon.until(has_keepalive)
