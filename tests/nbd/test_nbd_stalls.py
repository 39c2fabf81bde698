"""Clients that stall, or are too many: they are ended, and hold up nobody else."""

import itertools
import os
import struct
import threading
import time

import pytest

from daemon import Daemon
from programs import MIB
from raw_client import OPTION, READ, WRITE, Client

LIMITS = {"nbd_handshake_max_ms": 400, "nbd_stall_max_ms": 400}


def pool_free(daemon):
    return daemon.json("status")["memory"]["pool_free_bytes"]


@pytest.fixture
def daemon(tmp_path):
    with Daemon(tmp_path, LIMITS) as daemon:
        daemon.create("v", "--persist", "on-write", size="64M")
        yield daemon


def test_client_without_a_handshake_is_ended(daemon):
    with Client(daemon) as patient:
        patient.open("v")
        with Client(daemon) as silent, Client(daemon) as half:
            half.take(18)
            half.socket.sendall(struct.pack(">I", 3) + struct.pack(">QII", OPTION, 7, 100))
            silent.is_ended()
            half.is_ended()
        assert daemon.log().count("it did not open an export") == 2
        # One that has opened its export may be silent for as long as it likes.
        assert patient.read(0, 4096) == bytes(4096)


@pytest.mark.parametrize("size", [0, 1, 100_000])
def test_client_that_stops_in_a_payload_is_ended(daemon, size):
    free = pool_free(daemon)
    with Client(daemon) as idle, Client(daemon) as stalled:
        idle.open("v")
        stalled.open("v")
        stalled.ask(WRITE, 0, MIB, os.urandom(size))
        if size < 32 << 10:
            assert pool_free(daemon) == free, "no buffer is held for it"
        stalled.is_ended()
        daemon.tells("it did not send a write's data")
        daemon.until(lambda: pool_free(daemon) == free)
        assert idle.read(0, 4096) == bytes(4096)


def test_client_that_sends_a_payload_byte_by_byte_is_ended(daemon):
    """What counts is that a part arrives in time, not that something does."""
    with Client(daemon) as slow:
        slow.open("v")
        slow.ask(WRITE, 0, MIB, bytes(100_000))
        stop = threading.Event()

        def drip():
            try:
                while not stop.wait(0.01):
                    slow.socket.send(b"x")
            except OSError:
                pass

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            daemon.tells("it did not send a write's data")
        finally:
            stop.set()
            thread.join()


def test_client_that_takes_no_replies_is_ended(daemon):
    daemon.write("v", os.urandom(32 * MIB))
    free = pool_free(daemon)
    with Client(daemon) as idle, Client(daemon) as deaf:
        idle.open("v")
        deaf.open("v")
        for index in range(32):
            deaf.ask(READ, index * MIB, MIB)
        daemon.tells("it took no replies")
        assert len(idle.read(0, 4096)) == 4096
    daemon.until(lambda: pool_free(daemon) >= free - MIB)


def test_client_that_takes_its_replies_slowly_is_ended(tmp_path):
    """Some progress is not enough: at this rate it would hold buffers for hours."""
    with Daemon(tmp_path, {**LIMITS, "nbd_stall_max_ms": 2000, "nbd_rate_min_kib_s": 100_000}) as daemon:
        daemon.create("v", size="64M")
        with Client(daemon) as idle, Client(daemon) as slow:
            idle.open("v")
            slow.open("v")
            for index in range(32):
                slow.ask(READ, index * MIB, MIB)
            with pytest.raises((AssertionError, ConnectionError)):
                # Replies always wait for it: while they wait for the disk, it is not the client that is slow.
                for index in itertools.count():
                    # Enough that each send ends in time: else it would be one that takes nothing.
                    slow.take(64 << 10)
                    time.sleep(0.01)
                    if index % 16 == 15:
                        slow.ask(READ, index % 64 * MIB, MIB)
            daemon.tells("it took its replies too slowly")
            daemon.tells(f"client=uid {os.getuid()}, pid {os.getpid()}")
            assert idle.read(0, 4096) == bytes(4096)


def test_slow_clients_leave_buffers_to_others(tmp_path):
    """However many there are; without limits, so that nobody is ended."""
    config = {"nbd_rate_min_kib_s": 0, "nbd_stall_max_ms": 600_000}
    with Daemon(tmp_path, config) as daemon:
        daemon.create("v", size="64M")
        daemon.create("w", size="64M")
        clients = [Client(daemon).open("v") for _ in range(60)]
        try:
            for client in clients:
                client.socket.setblocking(False)
                for _ in range(4):
                    client.ask(READ, 0, 32 * MIB)
            for name in ("v", "w"):
                with Client(daemon) as other:
                    other.open(name)
                    for index in range(100):
                        assert other.read(index * 4096, 4096) == bytes(4096)
            memory = daemon.json("status")["memory"]
            assert memory["pool_free_bytes"] >= memory["pool_bytes"] // 2 - 2 * MIB
        finally:
            for client in clients:
                client.socket.close()


def test_newest_of_too_many_connections_is_refused(tmp_path):
    with Daemon(tmp_path, {"nbd_connections_max": 3}) as daemon:
        daemon.create("v")
        clients = [Client(daemon).open("v") for _ in range(3)]
        for _ in range(5):
            with Client(daemon) as refused:
                refused.is_ended()
        daemon.until(lambda: "too many connections" in daemon.log() and "nbd_connections_max" in daemon.log())
        # Whoever tries again and again does not fill the log.
        assert daemon.log().count("too many connections") < 5
        for client in clients:
            assert client.read(0, 4096) == bytes(4096)
        clients.pop().socket.close()
        daemon.until(lambda: daemon.json("status")["connections"] == 2)
        with Client(daemon) as next_one:
            assert next_one.open("v").read(0, 4096) == bytes(4096)
        for client in clients:
            client.socket.close()
