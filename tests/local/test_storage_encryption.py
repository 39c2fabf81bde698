"""Encryption of the home of a volume in storage mode: no plaintext in log or home, whatever is written and when; the
backend gets plaintext; a local store of another key, or without one, is refused; checks need no key."""

import json
import shutil

import pytest

from daemon import Daemon, hdcs
from encryption_cases import encrypted, key_file, marked, marks
from home_layouts import (
    BLOCK,
    ENCRYPTED_DATA,
    HEAD_BLOCKS,
    SUMS,
    change_superblocks,
    crc32c,
)
from home_layouts import (
    seal as seal_structure,
)
from object_stores import Model
from programs import MIB
from storage_cases import BAD, flip, is_refused, is_told_and_refused

SIZE = 32 * MIB


def home(daemon, name="v"):
    return daemon.volume(name)["counters"]["home"]


def home_path(daemon, name="v"):
    return daemon.data / "volumes" / name / "home"


def create(daemon, tmp_path, *arguments, name="v"):
    daemon.create(name, "--mode", "storage", "--backend", f"file:{tmp_path / name}.image", "--log-size", "16M",
                  "--persist", "on-write", "--set", "destage_age_max_ms=1", *arguments, size=str(SIZE))


def write(daemon, data, offset=0, name="v"):
    daemon.write(name, data, offset)
    daemon.until(lambda: daemon.volume(name)["counters"]["log_used_bytes"] == 0)


def test_storage_encryption_leaves_no_plaintext_on_the_node(tmp_path):
    key = key_file(tmp_path)
    data = marked(4 * MIB, 1)
    with Daemon(tmp_path) as daemon:
        create(daemon, tmp_path, name="plain")
        create(daemon, tmp_path, *encrypted(key))
        for name in ["plain", "v"]:
            write(daemon, data, name=name)
            # Parts of blocks, over what is there and over what only the backend has.
            write(daemon, data[:1536], MIB + 512, name=name)
            write(daemon, data[:512], 16 * MIB + 1024, name=name)
        assert marks(home_path(daemon, "plain")) >= 4 * MIB // 512, "the mark is where it is looked for"
        expected = bytearray(data)
        expected[MIB + 512 : MIB + 2048] = data[:1536]
        beside = bytes(1024) + data[:512] + bytes(BLOCK - 1536)

        def holds():
            assert daemon.read("v", len(data)) == bytes(expected)
            assert daemon.read("v", BLOCK, 16 * MIB) == beside
            assert marks(home_path(daemon)) == 0 and marks(daemon.log_of("v")) == 0

        holds()
        daemon.kill()
        daemon.start()
        holds()
        daemon.ok("volume", "scrub", "v", "--rate", "1G")
        daemon.ok("volume", "flush", "v")
        assert home(daemon)["dirty_bytes"] == 0
        # By contract the image is a raw one.
        image = (tmp_path / "v.image").read_bytes()
        assert image[: len(data)] == bytes(expected) and image[16 * MIB : 16 * MIB + BLOCK] == beside
        holds()
        daemon.ok("volume", "rotate-key", "v", "--key-file", key_file(tmp_path, "new"))
        key.unlink()
        daemon.stop()
        assert "encrypted with data key" in hdcs("inspect", home_path(daemon)).stdout
        daemon.ok("check", daemon.data)
        daemon.start()
        holds()
        daemon.stop()


@pytest.mark.parametrize("policy", ["write-back", "write-through"])
def test_storage_encryption_survives_kills_under_random_writes(tmp_path, policy):
    model = Model(3, SIZE)
    with Daemon(tmp_path) as daemon:
        create(daemon, tmp_path, "--policy", policy, *encrypted(key_file(tmp_path)))
        for _ in range(3):
            client = daemon.nbd("v")
            model.write(client, 300, lengths=(512, 1536, 8192, 256 << 10))
            daemon.kill()
            daemon.start()
            client = daemon.nbd("v")
            model.check(client)
            client.shutdown()
        assert home(daemon)["damaged_reads"] == 0
        daemon.ok("volume", "flush", "v")
        assert (tmp_path / "v.image").read_bytes() == bytes(model.image)
        daemon.stop()


def test_storage_encryption_is_checked_without_the_key(tmp_path):
    key = key_file(tmp_path)
    data = marked(4 * MIB, 2)
    with Daemon(tmp_path) as daemon:
        create(daemon, tmp_path, *encrypted(key))
        write(daemon, data)
        daemon.stop()
        daemon.ok("check", daemon.data)
        hidden = tmp_path / "hidden"
        key.rename(hidden)

        def checked():
            reports = json.loads(hdcs("check", daemon.data, "--no-backend", "--json").stdout)
            return next(report for report in reports if report["path"].endswith("/home"))

        found = checked()
        assert found["blocks"] >= 4 * MIB // BLOCK and not found["problems"] and not found["note"], found
        flip(home_path(daemon), ENCRYPTED_DATA + BAD + 1000)
        assert "1 sectors do not match" in checked()["note"]
        hidden.rename(key)
        is_told_and_refused(daemon, data)
        write(daemon, data[BAD : BAD + BLOCK], BAD)
        assert daemon.read("v", len(data)) == data
        daemon.stop()


def seal(path, data_key):
    """Have the superblocks say that the local store is encrypted with this key."""
    def change(block):
        block[80:96] = data_key

    change_superblocks(path, change)


def test_storage_encryption_refuses_a_home_that_is_not_of_its_key(tmp_path):
    key = key_file(tmp_path)
    data = marked(MIB, 4)
    with Daemon(tmp_path) as daemon:
        create(daemon, tmp_path, name="plain")
        create(daemon, tmp_path, *encrypted(key))
        for name in ["plain", "v"]:
            write(daemon, data, name=name)
        data_key = daemon.volume("v")["encryption"]["data_key"]
        own = bytes.fromhex(data_key.replace("-", ""))
        daemon.stop()
        kept = tmp_path / "kept"
        shutil.copy(home_path(daemon), kept)
        for name, found, why in [("v", bytes(16), "it is not encrypted, and its volume is"),
                                 ("v", bytes(15) + b"x", f"its volume with {data_key}"),
                                 ("plain", own, "its volume is not encrypted")]:
            seal(home_path(daemon, name), found)
            daemon.start()
            daemon.until(lambda name=name: daemon.volume(name)["phase"] == "failed")
            reason = daemon.volume(name)["reason"]
            assert why in reason and "put the right local store back" in reason, reason
            daemon.stop()
        shutil.copy(kept, home_path(daemon))
        seal(home_path(daemon, "plain"), bytes(16))
        daemon.start()
        for name in ["plain", "v"]:
            assert daemon.read(name, MIB) == data
        daemon.stop()


def test_storage_encryption_makes_an_encrypted_home_for_a_lost_one(tmp_path):
    with Daemon(tmp_path) as daemon:
        create(daemon, tmp_path, *encrypted(key_file(tmp_path)))
        write(daemon, marked(MIB, 5))
        before = daemon.volume("v")["encryption"]["data_key"]
        daemon.stop()
        home_path(daemon).unlink()
        daemon.start()
        daemon.until(lambda: daemon.volume("v")["phase"] == "failed")
        daemon.ok("volume", "open", "v", "--discard-dirty")
        data = marked(MIB, 6)
        write(daemon, data)
        assert daemon.read("v", MIB) == data
        assert marks(home_path(daemon)) == 0
        daemon.stop()
        inspected = json.loads(hdcs("inspect", home_path(daemon), "--json").stdout)
        assert inspected["home"]["data_key"] == before


def forge_page(path):
    """Somebody without the key says in both copies of the first page that its blocks are zeroes."""
    with open(path, "r+b") as file:
        for copy in range(2):
            file.seek((HEAD_BLOCKS + copy) * BLOCK)
            block = bytearray(file.read(BLOCK))
            assert block[:8] == b"HDCSHMAP"
            block[64:128] = b"\xff" * 64
            seal_structure(block)
            file.seek((HEAD_BLOCKS + copy) * BLOCK)
            file.write(block)


def forge_superblocks(path):
    """The same of the superblocks: the backend is between two states."""
    def change(block):
        block[64] ^= 1

    change_superblocks(path, change)


@pytest.mark.parametrize("forge", [forge_page, forge_superblocks])
def test_storage_encryption_refuses_a_forged_map(tmp_path, forge):
    data = marked(MIB, 7)
    with Daemon(tmp_path) as daemon:
        create(daemon, tmp_path, *encrypted(key_file(tmp_path)))
        write(daemon, data)
        daemon.stop()
        kept = tmp_path / "kept"
        shutil.copy(home_path(daemon), kept)
        forge(home_path(daemon))
        daemon.ok("check", daemon.data, "--no-backend")
        daemon.start()
        daemon.until(lambda: daemon.volume("v")["phase"] == "failed")
        reason = daemon.volume("v")["reason"]
        assert "does not authenticate" in reason and "put the local store back that was there" in reason, reason
        daemon.stop()
        shutil.copy(kept, home_path(daemon))
        daemon.start()
        assert daemon.read("v", MIB) == data
        daemon.stop()


def forge_sector(path, offset):
    """Somebody without the key changes a sector of the volume, and makes its CRC-32C right."""
    with open(path, "r+b") as file:
        file.seek(ENCRYPTED_DATA + offset)
        sector = bytearray(file.read(512))
        sector[100] ^= 1
        file.seek(ENCRYPTED_DATA + offset)
        file.write(sector)
        file.seek(SUMS + offset // 512 * 8)
        file.write(crc32c(sector).to_bytes(4, "little"))


def test_storage_encryption_refuses_a_forged_sector(tmp_path):
    data = marked(MIB, 8)
    with Daemon(tmp_path) as daemon:
        create(daemon, tmp_path, *encrypted(key_file(tmp_path)))
        write(daemon, data)
        daemon.stop()
        forge_sector(home_path(daemon), BAD + 512)
        daemon.ok("check", daemon.data, "--no-backend")
        daemon.start()
        assert is_refused(daemon, BLOCK, BAD)
        assert daemon.read("v", 512, BAD) == data[BAD : BAD + 512]
        daemon.until(lambda: "does not authenticate" in (tmp_path / "log").read_text(errors="replace"))
        assert home(daemon)["damaged_sectors"] == 1
        write(daemon, data[BAD : BAD + BLOCK], BAD)
        assert daemon.read("v", MIB) == data
        daemon.ok("volume", "flush", "v")
        assert (tmp_path / "v.image").read_bytes()[:MIB] == data
        daemon.stop()
