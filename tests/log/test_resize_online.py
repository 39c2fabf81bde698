"""Resize of volumes in use: under load, with clients of the old size, over crashes, and what is beyond the end."""

import json
import os

import nbd
import pytest

from daemon import DIRTY, Daemon, refused
from object_stores import EAGER, Load
from programs import MIB, run


@pytest.fixture
def daemon(tmp_path):
    with Daemon(tmp_path, EAGER) as daemon:
        yield daemon
        daemon.stop()


def resize(daemon, name, mebibytes, *options):
    assert daemon.json("volume", "resize", name, "--size", f"{mebibytes}M", *options)["bytes"] == mebibytes * MIB


def test_resize_under_load_loses_nothing(daemon):
    daemon.create("v", "--persist", "on-write", size="16M")
    load = Load(daemon, "v", 16 * MIB, 21)
    load.start()
    for mebibytes in (17, 64, 18, 16, 40, 32):
        before = load.rounds
        daemon.until(lambda before=before: load.rounds > before or load.failure)
        resize(daemon, "v", mebibytes, "--shrink")
    model = load.end()
    for restart in (daemon.kill, daemon.stop):
        restart()
        daemon.start()
        client = daemon.nbd("v")
        assert client.get_size() == 32 * MIB
        model.check(client)
        assert client.pread(16 * MIB, 16 * MIB) == bytes(16 * MIB)
        client.shutdown()


def test_resize_is_seen_by_those_who_connect_after_it(daemon):
    """NBD has no message for it: a client keeps the size that it was told."""
    daemon.create("v", size="8M")
    old = daemon.nbd("v")
    old.pwrite(b"o" * MIB, 7 * MIB)
    resize(daemon, "v", 16)
    new = daemon.nbd("v")
    assert (old.get_size(), new.get_size()) == (8 * MIB, 16 * MIB)
    assert json.loads(run("nbdinfo", "--json", f"nbd+unix:///v?socket={daemon.data / 'nbd.sock'}").stdout)[
        "exports"][0]["export-size"] == 16 * MIB
    new.pwrite(b"n" * MIB, 15 * MIB)
    assert old.pread(MIB, 7 * MIB) == b"o" * MIB
    resize(daemon, "v", 4, "--shrink")
    # What is beyond the end now is an error for both, and the rest goes on.
    for client in (old, new):
        for request in (lambda c=client: c.pread(4096, 7 * MIB), lambda c=client: c.pwrite(b"x" * 4096, 7 * MIB),
                        lambda c=client: c.pread(8192, 4 * MIB - 4096)):
            with pytest.raises(nbd.Error):
                request()
        client.pwrite(b"y" * 4096, 0)
        assert client.pread(4096, 4 * MIB - 4096) == bytes(4096)
        client.shutdown()
    assert os.stat(daemon.data / "volumes/v/data").st_size == 4 * MIB


@pytest.mark.parametrize("restart", [False, True])
def test_what_was_cut_off_does_not_come_back(daemon, restart):
    """Neither from the caches, nor from the log, nor from the backend."""
    daemon.create("v", size="8M")
    daemon.write("v", b"d" * (8 * MIB))
    daemon.ok("volume", "flush", "v")
    # In DRAM and on the SSD.
    assert daemon.read("v", 8 * MIB) == b"d" * (8 * MIB)
    daemon.ok("volume", "promote", "v")
    daemon.ok("volume", "set", "v", "destage_age_max_ms=86400000", "dirty_ratio_min=80",
              "dirty_ratio_max=90")
    daemon.write("v", b"l" * MIB, 6 * MIB)
    resize(daemon, "v", 4, "--shrink")
    if restart:
        daemon.kill()
        daemon.start()
    resize(daemon, "v", 8)
    assert daemon.read("v", 8 * MIB) == b"d" * (4 * MIB) + bytes(4 * MIB)
    rows = json.loads(run("nbdinfo", "--map", "--json", f"nbd+unix:///v?socket={daemon.data / 'nbd.sock'}").stdout)
    assert all(row["type"] == 3 for row in rows if row["offset"] >= 4 * MIB)
    if restart:
        daemon.kill()
        daemon.start()
        assert daemon.read("v", 8 * MIB) == b"d" * (4 * MIB) + bytes(4 * MIB)


def test_resize_that_cannot_be_done_changes_nothing(tmp_path):
    with Daemon(tmp_path) as daemon:
        daemon.create("v", *DIRTY, size="8M")
        daemon.write("v", b"k" * MIB)
        for size, status, why in (("4M", 1, "--shrink"), ("4097", 2, "512"), ("2P", 2, "1P")):
            refused(daemon.cli("volume", "resize", "v", "--size", size), status, why)
            assert daemon.volume("v")["bytes"] == 8 * MIB
        assert daemon.read("v", MIB) == b"k" * MIB
