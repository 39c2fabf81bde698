"""A primary answers reads only while no other node can have taken its group. The backend is an object store: unlike a file it
is not locked by a primary that stands still, so the next one acknowledges writes meanwhile."""

import signal
import struct
import time
from contextlib import contextmanager

import pytest

from daemon import DIRTY, freeze
from group_cases import BLOCK, is_served, is_whole, nodes, record
from lying_s3 import LyingS3
from raw_client import READ, Client

OLD, NEW = b"old!" * (BLOCK // 4), b"new!" * (BLOCK // 4)
LEASE_MS = 1_000


@contextmanager
def pair(tmp_path, **more):
    """Two nodes with a volume that says `OLD`, served by the first one."""
    credentials = tmp_path / "credentials"
    credentials.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    credentials.chmod(0o600)
    with LyingS3() as s3, nodes(tmp_path, **{"cluster.lease_ms": LEASE_MS, **more}) as (a, b):
        a.create("v", "--backend", s3.url(credentials), "--replicas", 2, "--ack", "all", "--nodes", "a,b",
                 *DIRTY, size="8M")
        is_whole(a, 2)
        a.write("v", OLD)
        yield a, b


def ask(client):
    client.ask(READ, 0, BLOCK)


def shown(daemon):
    with Client(daemon).open("v") as client:
        return client.read(0, BLOCK)


def answer(client):
    """What a read brought; `None`: the connection has ended, or there was an error."""
    try:
        if struct.unpack(">IIQ", client.take(16))[1]:
            return None
        return client.take(BLOCK)
    except (AssertionError, ConnectionResetError):
        return None


def test_read_that_waits_at_a_primary_that_stood_still_shows_nothing_old(tmp_path):
    with pair(tmp_path) as (a, b), Client(a).open("v") as early, Client(a).open("v") as late:
        freeze(a.process.pid)
        ask(early)
        b.ok("volume", "takeover", "v")
        b.write("v", NEW)
        ask(late)
        a.signal(signal.SIGCONT)
        assert answer(late) != OLD
        early.is_ended()
        assert shown(b) == NEW
        is_whole(b, 2)


def test_reads_wait_once_a_member_has_answered_nothing_for_the_time_of_a_lease(tmp_path):
    with pair(tmp_path, **{"cluster.member_deadline_ms": 600_000}) as (a, b), Client(a).open("v") as client:
        assert client.read(0, BLOCK) == OLD
        freeze(b.process.pid)
        time.sleep(2 * LEASE_MS / 1000)
        # Another node may have the promise of that one by now, for all that this one knows.
        ask(client)
        client.socket.settimeout(2)
        with pytest.raises(TimeoutError):
            client.take(1)
        b.signal(signal.SIGCONT)
        client.socket.settimeout(60)
        assert answer(client) == OLD


def test_reads_go_on_without_a_member_once_the_record_is_without_it(tmp_path):
    with pair(tmp_path, **{"cluster.member_deadline_ms": 500}) as (a, b), Client(a).open("v") as client:
        freeze(b.process.pid)
        # Nothing is written meanwhile: it is missed by its echoes alone.
        a.until(lambda: record(a)["members"] == ["a"])
        time.sleep(2 * LEASE_MS / 1000)
        assert client.read(0, BLOCK) == OLD
        b.signal(signal.SIGCONT)
        is_whole(a, 2)


def test_primary_that_restarts_waits_for_no_lease(tmp_path):
    with pair(tmp_path, **{"cluster.lease_ms": 30_000}) as (a, b):
        a.kill()
        a.start()
        began = time.monotonic()
        is_served(a)
        assert shown(a) == OLD
        assert time.monotonic() - began < 20, "the members' promises say that it has none"
