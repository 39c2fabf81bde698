"""Encryption at rest through the daemon: no plaintext on the log, the cache device or in the bucket; nothing is
lost or wrong by it; without the right key a volume stays shut and the others serve."""

import json
import os
import socket
import sys

import pytest

from daemon import DIRTY, Daemon, hdcs, refused
from encryption_cases import encrypted, grow_cold, key_file, marked, marks
from home_layouts import seal
from log_cases import is_replayed, is_sound
from object_stores import EAGER, Model, counters
from programs import MIB

LINE = 16384


CACHED = {"memory_max_mib": 128, "cache_total_size_mib": 96, "read_ahead_max_kib": 0,
          "sequential_cutoff_kib": 1 << 20}


@pytest.mark.parametrize("persist", ["on-write", "on-flush"])
def test_encryption_leaves_no_plaintext_on_the_log_and_survives_kills(tmp_path, persist):
    key = key_file(tmp_path)
    image = tmp_path / "image"
    with Daemon(tmp_path) as daemon:
        dirty = [*DIRTY[:-1], persist]
        daemon.create("plain", *dirty)
        daemon.create("v", "--backend", f"file:{image}", *dirty, *encrypted(key))
        shown = daemon.volume("v")["encryption"]
        assert shown["place"] == {"key_file": str(key)}
        data = marked(4 * MIB, 1)
        for name in ["plain", "v"]:
            daemon.write(name, data)
        assert marks(daemon.log_of("plain")) >= 4 * MIB // 512, "the mark is where it is looked for"
        assert marks(daemon.log_of("v")) == 0
        daemon.kill()
        is_sound(daemon)
        is_replayed(daemon, data, image)
    text = "".join((tmp_path / "log").read_text(errors="replace"))
    assert key.read_text().strip() not in text


def test_encryption_survives_kills_under_random_writes(tmp_path):
    key = key_file(tmp_path, form="raw")
    model = Model(7, 16 * MIB)
    with Daemon(tmp_path, EAGER) as daemon:
        daemon.create("v", "--persist", "on-write", *encrypted(key))
        for _ in range(4):
            client = daemon.nbd("v")
            model.write(client, 200)
            daemon.kill()
            daemon.start()
            client = daemon.nbd("v")
            model.check(client)
            client.shutdown()
        daemon.stop()


def test_encryption_of_the_ssd_tier_serves_and_is_warm_after_a_restart(tmp_path):
    key = key_file(tmp_path)
    size = 48 * MIB
    data = marked(size, 2)
    with Daemon(tmp_path, CACHED) as daemon:
        daemon.create("v", *encrypted(key), size="48M")
        daemon.online()
        daemon.write("v", data)
        grow_cold(daemon)
        for _ in range(3):
            assert daemon.read_all("v", size) == data
        before = counters(daemon)
        assert before["ssd_hit_blocks"] > 1000 and before["cache_corrupt_blocks"] == 0
        assert marks(daemon.data / "cache") == 0
        daemon.stop()
        assert marks(daemon.data / "cache") == 0
        daemon.start()
        assert daemon.online()["warm_lines"] > 1000
        assert daemon.read_all("v", size) == data
        after = counters(daemon)
        assert after["ssd_hit_blocks"] > 4000, "warm"
        assert after["cache_corrupt_blocks"] == 0
        daemon.ok("check", daemon.data / "cache")
        daemon.stop()


def test_encryption_shares_no_line_between_keys(tmp_path):
    data = marked(4 * MIB, 3)
    with Daemon(tmp_path, CACHED) as daemon:
        daemon.online()
        for name in ["a", "b"]:
            daemon.create(name, *encrypted(key_file(tmp_path, name)))
            daemon.write(name, data)
            grow_cold(daemon, name)
            daemon.ok("volume", "promote", name, "--length", "4M")
        cache = daemon.cache()
        assert cache["shared_lines"] == 0 and cache["filled_lines"] >= 2 * 4 * MIB // LINE
        for name in ["a", "b"]:
            assert daemon.read_all(name, len(data)) == data
        daemon.stop()


def test_encryption_with_a_missing_or_wrong_key_shuts_the_volume_alone(tmp_path):
    key = key_file(tmp_path)
    right = key.read_bytes()
    with Daemon(tmp_path) as daemon:
        daemon.create("other", *DIRTY)
        daemon.create("v", *DIRTY, *encrypted(key))
        data = marked(MIB, 4)
        for name in ["v", "other"]:
            daemon.write(name, data)
        needed = daemon.volume("v")["encryption"]["wrapped_with"]
        daemon.stop()
        key.unlink()
        daemon.start()
        daemon.until(lambda: daemon.volume("v")["phase"] == "failed")
        reason = daemon.volume("v")["reason"]
        assert str(key) in reason and "hdcs volume open" in reason, reason
        assert daemon.read("other", MIB) == data
        # What its log holds cannot be told without the key, so nothing is lost without a word.
        refused(daemon.cli("volume", "delete", "v"), 1, "--discard-dirty")
        key_file(tmp_path)
        refused(daemon.cli("volume", "open", "v"), 1, needed, str(key))
        done = hdcs("check", daemon.log_of("v"))
        assert done.returncode == 0 and "without its key not its spans" in done.stdout and needed in done.stdout
        key.write_bytes(right)
        daemon.ok("volume", "open", "v")
        assert daemon.read("v", MIB) == data
        daemon.stop()


def test_encryption_is_checked_without_the_key(tmp_path):
    key, image = key_file(tmp_path), tmp_path / "image"
    with Daemon(tmp_path) as daemon:
        daemon.create("v", "--backend", f"file:{image}", *DIRTY, *encrypted(key))
        daemon.write("v", marked(2 * MIB, 9))
        daemon.ok("volume", "flush", "v")
        daemon.write("v", marked(MIB, 10), 4 * MIB)
        daemon.stop()
    log, backend = str(daemon.log_of("v")), f"file:{image}"

    def checked(*arguments):
        done = hdcs("check", *arguments, "--json")
        found = {report["path"]: report for report in json.loads(done.stdout)}
        assert done.returncode == int(any(report["problems"] for report in found.values()))
        return found

    found = checked(daemon.data)
    assert found[log]["spans"] > 0 and found[log]["note"] is None
    key.rename(tmp_path / "elsewhere")
    for target in (daemon.data, daemon.data / "volumes/v"):
        found = checked(target)
        assert found[log]["problems"] == [] and found[log]["spans"] == 0
        assert "without its key not its spans" in found[log]["note"] and str(key) in found[log]["note"]
        # The image is kept in plain, as without encryption.
        assert found[backend]["problems"] == [] and found[backend]["bytes"] >= 2 * MIB
        assert "raw image" in found[backend]["note"] and str(key) not in found[backend]["note"]
    assert checked(log)[log]["problems"] == []
    with open(log, "r+b") as file:
        file.seek(100)
        byte = file.read(1)[0]
        file.seek(100)
        file.write(bytes([byte ^ 1]))
    image.rename(tmp_path / "away")
    found = checked(daemon.data)
    assert "superblock" in found[log]["problems"][0], found
    assert "does not exist" in found[backend]["problems"][0]


def move_tail(path):
    """Somebody without the key has the log begin behind what is in it, in its newest superblock, with a checksum that is
    right; what the superblocks were."""
    places = (0, 16 * 4096)
    with open(path, "r+b") as file:
        blocks = []
        for place in places:
            file.seek(place)
            blocks.append(bytearray(file.read(4096)))
        assert all(block[:8] == b"HDCSLOG\0" for block in blocks)
        before = [bytes(block) for block in blocks]
        sequence = [int.from_bytes(block[48:56], "little") for block in blocks]
        newest = sequence.index(max(sequence))
        block = blocks[newest]
        block[80:88] = (int.from_bytes(block[80:88], "little") + 4).to_bytes(8, "little")
        seal(block)
        file.seek(places[newest])
        file.write(block)
    return dict(zip(places, before))


def test_encryption_refuses_a_forged_superblock_of_the_log(tmp_path):
    key = key_file(tmp_path)
    with Daemon(tmp_path) as daemon:
        daemon.create("v", *DIRTY, *encrypted(key))
        data = marked(MIB, 9)
        daemon.write("v", data)
        daemon.kill()
        log = daemon.log_of("v")
        before = move_tail(log)
        refused(hdcs("check", daemon.data, "--no-backend"), 1, "1 problem")
        hidden = tmp_path / "hidden"
        key.rename(hidden)
        daemon.ok("check", daemon.data, "--no-backend")
        hidden.rename(key)
        daemon.start()
        daemon.until(lambda: daemon.volume("v")["phase"] == "failed")
        reason = daemon.volume("v")["reason"]
        assert "does not authenticate" in reason and "put the superblocks back" in reason, reason
        with open(log, "r+b") as file:
            for place, block in before.items():
                file.seek(place)
                file.write(block)
        daemon.ok("volume", "open", "v")
        assert daemon.read("v", MIB) == data
        daemon.stop()


def test_encryption_rotates_keys_while_it_serves(tmp_path):
    old, new = key_file(tmp_path, "old"), key_file(tmp_path, "new")
    with Daemon(tmp_path, EAGER) as daemon:
        daemon.create("plain")
        daemon.create("v", *encrypted(old))
        model = Model(5, 16 * MIB)
        client = daemon.nbd("v")
        model.write(client, 50)
        before = daemon.volume("v")["encryption"]
        wrapped = json.loads((daemon.data / "volumes/v/key.json").read_text())["content"]["key"]
        daemon.ok("volume", "rotate-key", "v", "--key-file", new)
        files = [path.read_bytes() for path in daemon.data.rglob("*") if path.is_file()]
        for secret in (wrapped["key"], wrapped["nonce"]):
            assert not any(secret.encode() in content for content in files)
        after = daemon.volume("v")["encryption"]
        assert after["data_key"] == before["data_key"]
        assert after["wrapped_with"] != before["wrapped_with"]
        model.write(client, 50)
        old.unlink()
        daemon.kill()
        daemon.start()
        client = daemon.nbd("v")
        model.check(client)
        # The same key elsewhere, while the old place is gone.
        moved = tmp_path / "moved"
        new.rename(moved)
        daemon.ok("volume", "rotate-key", "v", "--key-command", f"cat {moved}")
        daemon.stop()
        daemon.start()
        client = daemon.nbd("v")
        model.check(client)
        refused(daemon.cli("volume", "rotate-key", "plain", "--key-file", moved), 1, "not encrypted")
        refused(daemon.cli("volume", "rotate-key", "v"), 2, "--key-file")
        refused(daemon.cli("volume", "rotate-key", "v", "--key-file", tmp_path / "none"), 1, "none")
        daemon.stop()


def test_encryption_rotation_that_is_killed_leaves_one_of_the_keys(tmp_path):
    keys = [key_file(tmp_path, "0"), key_file(tmp_path, "1")]
    data = marked(MIB, 6)
    with Daemon(tmp_path) as daemon:
        daemon.create("v", *DIRTY, *encrypted(keys[0]))
        daemon.write("v", data)
        for turn in range(8):
            # Sent, and killed without waiting for the answer.
            body = f'{{"key_file": "{keys[(turn + 1) % 2]}"}}'
            with socket.socket(socket.AF_UNIX) as control:
                control.connect(str(daemon.data / "control.sock"))
                control.sendall(
                    f"POST /v1/volumes/v/rotate-key HTTP/1.1\r\nhost: hdcs\r\ncontent-type: "
                    f"application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
                )
                if turn % 2:
                    control.recv(1)
            daemon.kill()
            daemon.start()
            assert daemon.read("v", MIB) == data, f"turn {turn}"
        daemon.stop()


def test_encryption_of_a_deleted_volume_loses_its_key(tmp_path):
    key = key_file(tmp_path)
    with Daemon(tmp_path) as daemon:
        log = tmp_path / "elsewhere.log"
        daemon.create("v", "--log-path", log, *DIRTY, *encrypted(key))
        daemon.write("v", marked(MIB, 7))
        wrapped = daemon.data / "volumes/v/key.json"
        assert "aes-256-xts" in wrapped.read_text() and wrapped.stat().st_mode & 0o777 == 0o600
        daemon.ok("volume", "delete", "v", "--discard-dirty")
        assert not log.exists()
        left = [path.read_bytes() for path in daemon.data.rglob("*") if path.is_file()]
        assert not any(b"aes-256-xts" in content for content in left)
        daemon.stop()


def test_encryption_with_a_log_elsewhere_is_told_when_it_is_looked_at(tmp_path):
    key = key_file(tmp_path)
    with Daemon(tmp_path) as daemon:
        log = tmp_path / "elsewhere.log"
        daemon.create("v", "--log-path", log, *DIRTY, *encrypted(key))
        data = marked(MIB, 8)
        daemon.write("v", data)
        daemon.kill()
        done = hdcs("inspect", log)
        assert "encrypted with data key" in done.stdout, done.stdout
        done = hdcs("inspect", daemon.data)
        assert "PROBLEM" not in done.stdout and f"({MIB} bytes)" in done.stdout, done.stdout
        daemon.start()
        assert daemon.read("v", MIB) == data
        daemon.stop()


def test_encryption_refuses_what_is_no_key(tmp_path):
    key = key_file(tmp_path)
    with Daemon(tmp_path) as daemon:
        create = ["volume", "create", "v", "--size", "16M"]
        refused(daemon.cli(*create, "--encrypt"), 2, "--key-file")
        refused(daemon.cli(*create, "--key-file", key), 2, "--encrypt")
        refused(daemon.cli(*create, *encrypted(tmp_path / "none")), 1, "none")
        short = tmp_path / "short"
        short.write_text("secret")
        refused(daemon.cli(*create, *encrypted(short)), 2, "32 bytes", str(short))
        failing = ["--encrypt", "--key-command", "false"]
        refused(daemon.cli(*create, *failing), 1, "`false`", "failed")
        assert daemon.json("volume", "list") == []
        loud = tmp_path / "loud"
        loud.write_text(f"#!{sys.executable}\nprint('x' * 1000000)\n")
        loud.chmod(0o700)
        refused(daemon.cli(*create, "--encrypt", "--key-command", loud), 1, str(loud))
        key.chmod(0o644)
        daemon.create("v", *encrypted(key))
        daemon.tells("chmod 600")
        dumpable = os.stat(f"/proc/{daemon.process.pid}/environ").st_uid
        assert dumpable == 0
        daemon.stop()
