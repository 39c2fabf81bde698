"""File descriptors: the limit is raised, and some are kept for files however many clients come."""

import contextlib
import os
import resource
import socket
import struct
import subprocess
import time
from pathlib import Path

import nbd
import pytest

from daemon import Daemon, hdcs
from lying_s3 import LyingS3
from programs import free_port

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


@contextlib.contextmanager
def visitors(path, count):
    """So many connections to a unix socket that say nothing."""
    sockets = []
    try:
        for _ in range(count):
            visitor = socket.socket(socket.AF_UNIX)
            visitor.settimeout(SECONDS)
            sockets.append(visitor)
            visitor.connect(str(path))
        yield sockets
    finally:
        for visitor in sockets:
            visitor.close()


def events(daemon, **wanted):
    found = daemon.json("events", "--limit", "4096")
    return [event for event in found if all(text in (event[key] or "") for key, text in wanted.items())]


def test_clients_that_take_every_place_keep_no_file_closed(tmp_path):
    """With every place taken: who is served is served, who comes is sent away and named, and volumes, keys and a store are
    opened with what is kept for them. Once they have gone, all is as before."""
    key = tmp_path / "key"
    key.write_bytes(os.urandom(32))
    credentials = tmp_path / "credentials"
    credentials.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    with LyingS3() as s3, LimitedDaemon(tmp_path, 300, 300) as daemon:
        daemon.create("v")
        client = daemon.nbd("v")
        with clients(daemon.port, 300), visitors(daemon.data / "nbd.sock", 300):
            daemon.until(lambda: events(daemon, kind="connect", outcome="refused", why="too many connections"))
            with pytest.raises(nbd.Error):
                daemon.nbd("v")
            for number in range(3):
                data = os.urandom(4096)
                client.pwrite(data, number * 4096)
                client.flush()
                assert client.pread(4096, number * 4096) == data
                daemon.create(f"w{number}", "--encrypt", "--key-file", key)
                daemon.ok("volume", "set", f"w{number}", "dirty_ratio_max=60")
            daemon.create("far", "--backend", s3.url(credentials))
            daemon.ok("volume", "snapshot", "far", "first")
            daemon.ok("volume", "flush", "far")
            assert s3.objects and not events(daemon, kind="accept", outcome="failed")
        daemon.until(lambda: daemon.json("status")["connections"] == 1)
        daemon.write("far", b"f" * 4096)
        assert daemon.read("far", 4096) == b"f" * 4096
        client.shutdown()
        daemon.stop()


def limit(daemon, count):
    subprocess.run(["prlimit", f"--nofile={count}:4096", "--pid", str(daemon.process.pid)], check=True)


def test_clients_are_served_while_there_is_no_descriptor_at_all(tmp_path):
    """The limit falls to what is in use: nobody else gets in, which is told, and who is there does not notice."""
    with LimitedDaemon(tmp_path, 4096, 4096) as daemon:
        daemon.create("v")
        client = daemon.nbd("v")
        client.pwrite(b"a" * 4096, 0)
        client.flush()
        daemon.json("status")
        # Each one that is in use is below it.
        limit(daemon, 1 + max(int(number) for number in os.listdir(f"/proc/{daemon.process.pid}/fd")))
        with visitors(daemon.data / "nbd.sock", 100) as waiting:
            end = time.monotonic() + 2
            rounds = 0
            while time.monotonic() < end:
                data = os.urandom(4096)
                client.pwrite(data, 4096)
                client.flush()
                assert client.pread(4096, 4096) == data
                rounds += 1
            assert rounds > 10 and daemon.process.poll() is None
            # What opens a file says that it cannot, and ends nothing.
            with contextlib.suppress(subprocess.TimeoutExpired):
                hdcs("volume", "create", "w", "--size", "4M", "--data", daemon.data, timeout=2)
            limit(daemon, 4096)
            # Those that waited are let in.
            assert waiting[-1].recv(8) == b"NBDMAGIC"
        assert events(daemon, kind="accept", outcome="failed", why="raise the limit of open files")
        assert events(daemon, kind="accept", outcome="done")
        daemon.create("x")
        daemon.write("x", b"x" * 4096)
        assert client.pread(4096, 0) == b"a" * 4096
        client.shutdown()
        daemon.stop()


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
