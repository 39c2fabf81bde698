"""Compression of the write log through the daemon: nothing is lost or wrong by it, the log takes less, and what
cannot be read is refused."""

import random
import secrets
import struct

import pytest

from daemon import DIRTY, Daemon, hdcs, refused
from log_cases import is_replayed, is_sound
from object_stores import EAGER, Model, counters
from programs import MIB

BLOCK = 4096
RING_START = 32 * BLOCK


def text(size, seed):
    """Data of which less than half is left."""
    rng = random.Random(seed)
    return b"".join(rng.randbytes(16) + b"the same in every record, or so; " for _ in range(size // 48))[:size]


def mixed(size, seed):
    """Every 64 KiB are text or noise."""
    rng = random.Random(seed)
    pieces = (rng.randbytes(1 << 16) if rng.random() < 0.4 else text(1 << 16, at) for at in range(size >> 16))
    return b"".join(piece.ljust(1 << 16, b"\0") for piece in pieces)


def write_in_pieces(daemon, data, name="v"):
    """Requests of all sizes, some of them not aligned to blocks."""
    client = daemon.nbd(name)
    rng, at = random.Random(1), 0
    while at < len(data):
        size = rng.choice([512, 4096, 4096, 12288, 65536, 1 << 20])
        client.pwrite(data[at : at + size], at)
        at += size
    client.flush()
    client.shutdown()


@pytest.mark.parametrize("method", ["lz4", "zstd"])
def test_compressed_log_survives_kills(tmp_path, method):
    data = mixed(8 * MIB, 1)
    image = tmp_path / "image"
    with Daemon(tmp_path) as daemon:
        daemon.create("v", "--backend", f"file:{image}", "--compress", method, *DIRTY)
        write_in_pieces(daemon, data)
        shown = daemon.ok("volume", "show", "v")
        assert "compressed in the log" in shown, shown
        daemon.kill()
        is_sound(daemon)
        assert "compressed: " in hdcs("inspect", daemon.log_of("v")).stdout
        is_replayed(daemon, data, image)


def test_compressed_log_is_less_full(tmp_path):
    data = text(8 * MIB, 2)
    with Daemon(tmp_path) as daemon:
        used = {}
        for method in ["off", "lz4", "zstd"]:
            daemon.create(method, "--compress", method, *DIRTY)
            daemon.write(method, data)
            found = counters(daemon, method)
            assert found["dirty_bytes"] == len(data), "what is dirty is what clients wrote"
            used[method] = found["log_used_bytes"]
            if method == "off":
                assert found["log_stored_bytes"] == found["log_plain_bytes"]
            else:
                assert found["log_stored_bytes"] < found["log_plain_bytes"] * 0.7
        assert used["lz4"] < used["off"] * 0.7 and used["zstd"] < used["off"] * 0.7, used
        daemon.stop()


def test_compression_is_switched_while_clients_go_on(tmp_path):
    model = Model(3, 16 * MIB)
    with Daemon(tmp_path, EAGER) as daemon:
        daemon.create("v", "--persist", "on-write")
        for method in ["lz4", "zstd", "off", "zstd", "lz4", "default"]:
            daemon.ok("volume", "set", "v", f"compression={method}")
            client = daemon.nbd("v")
            model.write(client, 100)
            daemon.kill()
            daemon.start()
            client = daemon.nbd("v")
            model.check(client)
            client.shutdown()
        refused(daemon.cli("volume", "set", "v", "compression=gzip"), 2, "compression", "lz4")
        daemon.stop()


def test_compressed_and_encrypted_log_survives_kills(tmp_path):
    key = tmp_path / "key"
    key.write_text(secrets.token_hex(32))
    key.chmod(0o600)
    data = text(4 * MIB, 4)
    with Daemon(tmp_path) as daemon:
        daemon.create("v", "--compress", "lz4", *DIRTY, "--encrypt", "--key-file", key)
        daemon.write("v", data)
        assert counters(daemon)["log_used_bytes"] < len(data) * 0.8
        assert b"the same in every" not in daemon.log_of("v").read_bytes()
        daemon.kill()
        is_sound(daemon)
        assert "compressed: " in hdcs("inspect", daemon.log_of("v")).stdout
        daemon.start()
        assert daemon.read("v", len(data)) == data
        daemon.stop()


def seal(block, offset):
    """Put the CRC-64/NVME of a block right, whose place for it is at an offset."""
    block[offset : offset + 8] = bytes(8)
    crc = 0xFFFFFFFFFFFFFFFF
    for byte in block:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x9A6C9329AC4BC9B5 if crc & 1 else 0)
    block[offset : offset + 8] = struct.pack("<Q", crc ^ 0xFFFFFFFFFFFFFFFF)


def change(path, at, field, value):
    """Change a byte of the block at `at`, and put its checksum right."""
    with path.open("r+b") as log:
        log.seek(at)
        block = bytearray(log.read(BLOCK))
        block[field] = value
        seal(block, 16)
        log.seek(at)
        log.write(block)


def first_entry_is_compressed(daemon, method, data):
    """Make a volume whose log holds `data`, compressed, and nothing else; the daemon is killed then."""
    daemon.create("v", "--compress", method, *DIRTY)
    daemon.write("v", data)
    daemon.kill()


def test_compressed_log_of_a_newer_program_is_refused_and_kept(tmp_path):
    # Byte 26 of an entry is its method; entries begin behind the head of 128 bytes.
    method, data = 128 + 26, text(BLOCK, 5)
    with Daemon(tmp_path) as daemon:
        first_entry_is_compressed(daemon, "lz4", data)
        log = daemon.log_of("v").read_bytes()
        assert log[RING_START + 8] == 1 and log[RING_START + method] == 1
        change(daemon.log_of("v"), RING_START, method, 9)
        done = hdcs("check", daemon.log_of("v"))
        assert done.returncode == 1 and "method 9" in done.stdout + done.stderr, done.stdout + done.stderr
        daemon.start()
        daemon.until(lambda: daemon.volume("v")["phase"] == "failed")
        assert "method 9" in daemon.volume("v")["reason"]
        refused(daemon.cli("volume", "delete", "v"), 1, "--discard-dirty")
        daemon.stop()
        # Nothing was changed by the attempt: whoever knows the method finds everything.
        change(daemon.log_of("v"), RING_START, method, 1)
        daemon.start()
        assert daemon.read("v", BLOCK) == data
        daemon.stop()


def test_compressed_data_that_is_wrong_is_found_and_not_returned(tmp_path):
    checksum, data = 128 + 28, text(BLOCK, 6)
    with Daemon(tmp_path) as daemon:
        first_entry_is_compressed(daemon, "zstd", data)
        before = daemon.log_of("v").read_bytes()[RING_START + checksum]
        change(daemon.log_of("v"), RING_START, checksum, before ^ 1)
        done = hdcs("check", daemon.log_of("v"))
        assert done.returncode == 1 and "cannot be decompressed" in done.stdout + done.stderr
        daemon.start()
        client = daemon.nbd("v")
        with pytest.raises(Exception, match="Input/output error"):
            client.pread(BLOCK, 0)
        daemon.kill()
