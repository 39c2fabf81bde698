"""What a client, a device or a disk that is too small may do: whatever that is, the daemon lives and serves the others."""

import os
import random
import socket
import struct
import subprocess

import nbd
import pytest

from daemon import DIRTY, Daemon
from programs import MIB
from raw_client import OPTION, REQUEST, Client

BLOCK = 4096
SIZE = 16 * MIB
WORD = struct.Struct(">IHHQQI")
# The ends of every width, what lies beside them and beside the volume's end, and what is off every grid.
NUMBERS = sorted({
    value
    for bits in (0, 1, 8, 9, 12, 15, 16, 20, 24, 25, 31, 32, 33, 62, 63, 64)
    for value in ((1 << bits) - 1, 1 << bits, (1 << bits) + 1)
} | {SIZE - 1, SIZE, SIZE - 512, SIZE + 512, (1 << 64) - 512, (1 << 64) - 4096})


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("attacks")) as daemon:
        daemon.create("v", size=str(SIZE))
        daemon.create("other", size="4M")
        yield daemon
        daemon.stop()


def lives(daemon, what):
    assert daemon.process.poll() is None, f"{what}: it has ended\n{daemon.log()[-3000:]}"
    word = os.urandom(BLOCK)
    daemon.write("other", word)
    assert daemon.read("other", BLOCK) == word, what


def shout(daemon, words, opens=True):
    """Send something, and take what comes until nothing more does."""
    with Client(daemon) as client:
        if opens:
            client.open("v")
        else:
            client.take(18)
            client.socket.sendall(struct.pack(">I", 3))
        try:
            client.socket.sendall(words)
            client.socket.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        client.is_ended()


def test_every_wrong_field_of_a_request_ends_one_connection_at_most(daemon):
    good = {"magic": REQUEST, "flags": 0, "kind": 0, "cookie": 7, "offset": 0, "length": BLOCK}
    widths = {"magic": 32, "flags": 16, "kind": 16, "cookie": 64, "offset": 64, "length": 32}
    for kind in range(12):
        words = b""
        for field, width in widths.items():
            for value in NUMBERS:
                wrong = {**good, "kind": kind, field: value % (1 << width)}
                # A magic that is wrong ends the connection: it goes alone.
                if field == "magic":
                    if kind == 0:
                        shout(daemon, WORD.pack(*wrong.values()))
                    continue
                if wrong["kind"] == 1 and wrong["length"] > MIB:
                    # A write of which not all comes.
                    shout(daemon, WORD.pack(*wrong.values()) + bytes(1000))
                    continue
                payload = bytes(wrong["length"]) if wrong["kind"] == 1 else b""
                if wrong["kind"] == 2:
                    continue
                words += WORD.pack(*wrong.values()) + payload
        shout(daemon, words)
        lives(daemon, f"command {kind}")


def test_two_wrong_fields_of_requests_end_no_daemon(daemon):
    chance = random.Random(11)
    for _ in range(60):
        words = b""
        for _ in range(100):
            flags, kind = chance.choice([0, 0, 1, chance.randrange(1 << 16)]), chance.randrange(9)
            offset, length = chance.choice(NUMBERS) % (1 << 64), chance.choice(NUMBERS) % (1 << 32)
            length = min(length, MIB) if kind == 1 else length
            words += WORD.pack(REQUEST, flags, kind, chance.randrange(1 << 64), offset, length)
            words += bytes(length) if kind == 1 else b""
            if kind == 2:
                break
        shout(daemon, words)
    lives(daemon, "pairs")


def test_every_wrong_option_ends_one_connection_at_most(daemon):
    chance = random.Random(12)
    bodies = [b"", bytes(4), bytes(8), b"\xff" * 4, b"\xff" * 64, struct.pack(">I", 1) + b"v", struct.pack(">I", 2) + b"v",
              struct.pack(">I", 1) + b"v" + struct.pack(">H", 9), struct.pack(">I", 1) + b"v" + struct.pack(">I", 1 << 31),
              struct.pack(">I", 1) + b"v" + struct.pack(">II", 1, 1 << 31) + b"base:", bytes(range(256)) * 16, b"v" * 5000]
    for kind in [*range(16), 255, 1 << 16, (1 << 31) + 1, (1 << 32) - 1]:
        for body in bodies:
            for said in {len(body), 0, len(body) + 1, max(len(body) - 1, 0), 1 << 31, (1 << 32) - 1}:
                shout(daemon, struct.pack(">QII", OPTION, kind, said) + body, opens=False)
        lives(daemon, f"option {kind}")
    for magic in (0, OPTION + 1, (1 << 64) - 1):
        shout(daemon, struct.pack(">QII", magic, 1, 0), opens=False)
    for _ in range(100):
        shout(daemon, chance.randbytes(chance.randrange(1, 3000)), opens=False)
    lives(daemon, "noise")


def test_files_that_are_cut_short_below_a_daemon_end_it_not(tmp_path):
    """The backend's, log's and cache's files lose their ends, so that reads bring less than was asked for, or nothing."""
    image = tmp_path / "image"
    with Daemon(tmp_path) as daemon:
        daemon.create("other", size="4M")
        daemon.create("v", "--backend", f"file:{image}", size=str(SIZE))
        data = os.urandom(SIZE)
        daemon.write("v", data)
        daemon.ok("volume", "flush", "v")
        daemon.create("dirty", *DIRTY, size="8M")
        dirty = os.urandom(4 * MIB)
        daemon.write("dirty", dirty)
        chance = random.Random(13)

        def reads(name, expected):
            client = daemon.nbd(name)
            right = 0
            for _ in range(40):
                at = chance.randrange(len(expected) // BLOCK) * BLOCK
                try:
                    assert bytes(client.pread(BLOCK, at)) == expected[at : at + BLOCK], f"{name} at {at}"
                    right += 1
                except nbd.Error:
                    pass
            try:
                client.shutdown()
            except nbd.Error:
                pass
            return right

        for path in (daemon.data / "cache", image, daemon.log_of("dirty")):
            whole = path.stat().st_size
            for left in (whole // 2 + 777, 5 * BLOCK, 1, 0):
                daemon.ok("volume", "evict", "v")
                os.truncate(path, left)
                lives(daemon, f"{path.name} of {left} bytes")
                # What is not there any more fails, and nothing else is shown in its place.
                reads("v", data)
                reads("dirty", dirty)
                lives(daemon, f"{path.name} of {left} bytes, read")
            if path != image:
                # What a raw image has lost and got back as zeroes nobody can tell.
                os.truncate(path, whole)
        status = daemon.json("status")
        assert {one["name"] for one in daemon.json("volume", "list")} == {"other", "v", "dirty"} and status
        daemon.kill()
        # What it finds at its start is no better.
        os.truncate(daemon.log_of("dirty"), 9 * BLOCK)
        daemon.start()
        lives(daemon, "after its start")
        daemon.stop()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system, which takes root")
def test_disk_without_space_fails_what_needs_it_and_ends_nothing(tmp_path):
    """The data directory's file system is full: volumes that are there go on as they say, and nothing is made."""
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(small)], check=True)
    try:
        (tmp_path / "home").mkdir()
        with Daemon(tmp_path / "home", data=small / "d") as daemon:
            daemon.create("other", size="4M")
            daemon.write("other", bytes(4 * MIB))
            daemon.create("v", "--set", "when_full=error", *DIRTY, size="64M")
            daemon.write("v", os.urandom(MIB))
            with open(small / "filler", "wb", buffering=0) as file, pytest.raises(OSError):
                while file.write(bytes(1 << 16)):
                    pass
            for command in (["create", "w", "--size", "4M"], ["set", "v", "dirty_ratio_max=70"],
                            ["snapshot", "v", "s"], ["resize", "v", "--size", "65M"], ["delete", "other"]):
                daemon.cli("volume", *command)
                assert daemon.process.poll() is None, f"{command}\n{daemon.log()[-3000:]}"
            client = daemon.nbd("v")
            client.set_strict_mode(0)
            for at in range(0, 32 * MIB, MIB):
                try:
                    client.pwrite(os.urandom(MIB), at)
                except nbd.Error:
                    break
            assert daemon.process.poll() is None, daemon.log()[-3000:]
            os.unlink(small / "filler")
            daemon.until(lambda: daemon.json("status"))
            data = os.urandom(BLOCK)
            daemon.create("x", size="4M")
            daemon.write("x", data)
            assert daemon.read("x", BLOCK) == data
            daemon.kill()
            daemon.start()
            assert daemon.read("x", BLOCK) == data
            daemon.kill()
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
