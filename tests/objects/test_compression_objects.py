"""Compressed objects on a real S3 and HDFS: the bucket holds half of what was written or less, and whoever reads it, in whatever
way, reads what was written."""

import random

import pytest

from daemon import Daemon, homes, refused
from encryption_cases import encrypted, grow_cold, key_file
from object_stores import EAGER, Model, bodies
from programs import MIB

# Words as in a log or a table.
WORDS = [f"{number:06} storage cache object frame {number % 7} ".encode() for number in range(3000)]


def words(length, seed):
    chosen = random.Random(seed)
    text = b""
    while len(text) < length:
        text += b"".join(chosen.choices(WORDS, k=10_000))
    return text[:length]


def data_bytes(store, prefix):
    return sum(len(body) for name, body in bodies(store, prefix).items() if name.startswith("data/"))


def is_compressed(body):
    return body.startswith(b"HDCSOFRM")


def read(daemon, name, length):
    client = daemon.nbd(name)
    data = b"".join(client.pread(min(MIB, length - at), at) for at in range(0, length, MIB))
    client.shutdown()
    return data


@pytest.mark.parametrize("method", ["lz4", "zstd"])
def test_compression_objects_bucket_holds_less_than_half_after_a_kill_and_a_takeover(s3, tmp_path, method):
    one, two = homes(tmp_path)
    prefix = f"compressed-{method}"
    url = s3.url(prefix)
    data = bytearray(words(48 * MIB, 1))
    # What does not shrink lies between what does.
    data[20 * MIB : 21 * MIB] = random.Random(2).randbytes(MIB)
    with Daemon(one, EAGER) as daemon:
        daemon.create("v", "--backend", url, "--compress", method, size="48M")
        daemon.write("v", bytes(data))
        client = daemon.nbd("v")
        chosen = random.Random(3)
        for _ in range(300):
            at = chosen.randrange(48 * MIB // 512 - 1) * 512
            piece = words(512, at)
            client.pwrite(piece, at)
            data[at : at + 512] = piece
        client.flush()
        client.shutdown()
        daemon.kill()
        daemon.start()
        grow_cold(daemon, "v")
        assert read(daemon, "v", len(data)) == data
        stored = data_bytes(s3, prefix)
        assert stored < len(data) / 2, f"{stored} bytes"
        daemon.kill()
    with Daemon(two, EAGER) as daemon:
        # Whoever takes it over need not compress.
        daemon.json("volume", "create", "v", "--backend", url)
        assert read(daemon, "v", len(data)) == data
        daemon.ok("check", url)
        daemon.stop()


def test_compression_objects_setting_changes_while_clients_go_on(s3, tmp_path):
    url = s3.url("changing")
    model = Model(4, 16 * MIB)
    with Daemon(tmp_path, EAGER) as daemon:
        daemon.create("v", "--backend", url, size="16M")
        client = daemon.nbd("v")
        kinds = []
        for word in ["off", "zstd", "lz4", "off"]:
            daemon.ok("volume", "set", "v", f"compression={word}")
            before = set(s3.names("changing"))
            model.write(client, 100)
            client.pwrite(words(64 * 4096, len(kinds)), 0)
            model.image[: 64 * 4096] = words(64 * 4096, len(kinds))
            client.flush()
            daemon.ok("volume", "flush", "v")
            found = bodies(s3, "changing").items()
            new = [body for name, body in found if name.startswith("data/") and name not in before]
            kinds.append({is_compressed(body) for body in new if len(body) > 30_000})
        assert kinds[0] == {False} and True in kinds[1] and True in kinds[2] and kinds[3] == {False}, kinds
        grow_cold(daemon, "v")
        model.check(client)
        client.shutdown()
        refused(daemon.cli("volume", "set", "v", "compression=gzip"), 2, '"off", "lz4", "zstd"')
        daemon.stop()


def test_compression_objects_snapshot_clone_and_garbage(s3, tmp_path):
    data = words(32 * MIB, 5)
    with Daemon(tmp_path, EAGER) as daemon:
        daemon.create("v", "--backend", s3.url("kept"), "--compress", "zstd", size="32M")
        daemon.write("v", data)
        daemon.ok("volume", "snapshot", "v", "monday")
        daemon.json("volume", "clone", "v@monday", "c", "--backend", s3.url("kept-clone"))
        # Overwritten again and again: most of what is stored becomes garbage, and is copied and freed.
        for turn in range(6):
            other = words(32 * MIB, 6 + turn)
            daemon.write("v", other)
            daemon.ok("volume", "flush", "v")
        for name in ["v", "c"]:
            grow_cold(daemon, name)
        assert read(daemon, "v", len(data)) == other
        assert read(daemon, "c", len(data)) == data
        daemon.ok("volume", "delete", "c")
        daemon.ok("volume", "snapshot", "v", "monday", "--delete")

        def is_small():
            daemon.write("v", words(MIB, 99))
            daemon.ok("volume", "flush", "v")
            return data_bytes(s3, "kept") < 40 * MIB

        daemon.until(is_small)
        grow_cold(daemon, "v")
        assert read(daemon, "v", len(data)) == words(MIB, 99) + other[MIB:]
        daemon.ok("check", "v")
        daemon.stop()


def test_compression_objects_encrypted_are_small_and_secret_and_checked(s3, tmp_path):
    key = key_file(tmp_path)
    prefix = "compressed-secret"
    data = words(24 * MIB, 7)
    with Daemon(tmp_path, EAGER) as daemon:
        create = ["--backend", s3.url(prefix), "--compress", "zstd", *encrypted(key)]
        daemon.create("v", *create, size="24M")
        daemon.write("v", data)
        daemon.ok("volume", "flush", "v")
        found = bodies(s3, prefix)
        assert data_bytes(s3, prefix) < len(data) / 2
        assert not [name for name, body in found.items() if b"storage cache" in body]
        # Not even that a frame is one of zstd shows.
        assert not [name for name, body in found.items() if b"\x28\xb5\x2f\xfd" in body[576:600]]
        grow_cold(daemon, "v")
        daemon.kill()
        daemon.start()
        assert read(daemon, "v", len(data)) == data
        daemon.ok("check", "v")
        name = max((len(body), name) for name, body in found.items() if name.startswith("data/"))[1]
        client, place = s3.client(), {"Bucket": s3.bucket, "Key": f"{prefix}/{name}"}
        for at in [30, 1000]:
            bad = bytearray(found[name])
            bad[at] ^= 1
            client.put_object(**place, Body=bytes(bad))
            done = daemon.cli("check", "v")
            refused(done, 1, "check found")
            assert name in done.stdout and "damaged" in done.stdout, done.stdout
        client.put_object(**place, Body=found[name])
        daemon.ok("check", "v")
        daemon.stop()


def test_compression_objects_on_hdfs(hdfs, tmp_path):
    data = words(16 * MIB, 8)
    with Daemon(tmp_path, EAGER) as daemon:
        daemon.create("v", "--backend", hdfs.url("compressed"), "--compress", "lz4", size="16M")
        daemon.write("v", data)
        daemon.ok("volume", "flush", "v")
        grow_cold(daemon, "v")
        daemon.kill()
        daemon.start()
        assert read(daemon, "v", len(data)) == data
        assert daemon.volume("v")["allocated_bytes"] < len(data) / 2
        daemon.ok("check", hdfs.url("compressed"))
        daemon.stop()
