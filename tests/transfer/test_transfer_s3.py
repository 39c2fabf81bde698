"""Import to and export from volumes on a real S3: what lives at a place stays what it is, what an import has made there
goes with it, and nothing is left of the clone through which a snapshot is read."""

import random
import signal
import time

from daemon import COMMAND_SECONDS, DIRTY, Daemon, homes, refused
from object_stores import counters
from programs import HDCS, MIB
from snapshot_cases import SMALL, snapshots
from transfer_cases import fails_early, interrupt_after, names, popen


def image_of(directory, seed, size=8 * MIB):
    path = directory / f"{seed}.raw"
    path.write_bytes(random.Random(seed).randbytes(size))
    return path


def test_s3_import_leaves_a_volume_and_its_owner_alone(s3, tmp_path):
    one, two = homes(tmp_path)
    image = image_of(tmp_path, 1)
    with Daemon(one, SMALL) as first, Daemon(two, SMALL) as second:
        first.create("v", "--backend", s3.url("lives"), size="8M")
        first.write("v", b"v" * MIB)
        first.ok("volume", "flush", "v")
        there = sorted(s3.names("lives"))
        done = second.cli("volume", "import", "i", image, "--backend", s3.url("lives"))
        refused(done, 1, "is there already", "left as it was", "--overwrite")
        assert "i" not in names(second) and sorted(s3.names("lives")) == there
        # Its owner has not been taken over.
        first.write("v", b"w" * MIB, MIB)
        first.ok("volume", "flush", "v")
        assert first.volume("v")["state"] == "healthy"
        # Told to, it takes over, and then overwrites; what does not end leaves the last flush there.
        said = fails_early(second, "i", "--backend", s3.url("lives"), "--overwrite", *DIRTY)
        assert "which was there before, stays" in said
        second.create("v", "--backend", s3.url("lives"), size="8M")
        assert second.read("v", 2 * MIB) == b"v" * MIB + b"w" * MIB
        second.stop()
        first.kill()


def test_s3_import_leaves_a_clone_alone(s3, tmp_path):
    image = image_of(tmp_path, 2)
    with Daemon(tmp_path, SMALL) as daemon:
        daemon.create("v", "--backend", s3.url("imported-parent"), size="8M")
        daemon.write("v", b"v" * MIB)
        daemon.ok("volume", "snapshot", "v", "s")
        daemon.ok("volume", "clone", "v@s", "c", "--backend", s3.url("imported-clone"))
        daemon.ok("volume", "detach", "c")
        done = daemon.cli("volume", "import", "i", image, "--backend", s3.url("imported-clone"))
        refused(done, 1, "is there already")
        said = fails_early(daemon, "i", "--backend", s3.url("imported-clone"), "--overwrite", *DIRTY)
        assert "which was there before, stays" in said
        (kept,) = snapshots(daemon)
        assert len(kept["clones"]) == 1, "it still says what it needs"
        daemon.json("volume", "create", "c", "--backend", s3.url("imported-clone"))
        assert daemon.read("c", 8 * MIB) == b"v" * MIB + bytes(7 * MIB)
        daemon.stop()


def left(s3, place):
    """What is at a place beside manifests, which stay to say that it was given up."""
    return [name for name in s3.names(place) if not name.startswith("manifest/")]


def test_s3_import_that_does_not_end_leaves_nothing_there(s3, tmp_path):
    image = image_of(tmp_path, 3)
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    with Daemon(tmp_path, SMALL) as daemon:
        for more in ([], ["--encrypt", "--key-file", key]):
            place = ["--backend", s3.url("undone"), *more]
            said = fails_early(daemon, "i", *place, "--set", "policy=write-through")
            assert "the volume is removed again" in said and "left" not in said
            assert left(s3, "undone") == []
        daemon.ok("volume", "import", "i", image, "--backend", s3.url("undone"))
        assert daemon.read("i", 8 * MIB) == image.read_bytes()
        daemon.stop()


def test_s3_storage_import_and_export(s3, tmp_path):
    image = image_of(tmp_path, 7, 24 * MIB)
    store, back = tmp_path / "store", tmp_path / "back.raw"
    with Daemon(tmp_path, SMALL) as daemon:
        place = ["--backend", s3.url("home"), "--mode", "storage", "--store-path", store]
        assert "the volume is removed again" in fails_early(daemon, "i", *place)
        assert left(s3, "home") == [] and not store.exists()
        daemon.ok("volume", "import", "i", image, *place)
        assert daemon.volume("i")["mode"] == "storage"
        daemon.ok("volume", "export", "i", back)
        assert back.read_bytes() == image.read_bytes()
        assert not [name for name in s3.names("home") if name.startswith("data/")], "it is all here"
        daemon.ok("volume", "export", "i", back, "--overwrite", "--snapshot", "--clone-backend", s3.url("home-clone"))
        assert back.read_bytes() == image.read_bytes()
        assert [name for name in s3.names("home") if name.startswith("data/")]
        # Over what is there, in the other mode.
        done = daemon.cli("volume", "import", "j", image, "--backend", s3.url("home"), "--overwrite")
        refused(done, 2, "is the backend of volume i already")
        daemon.ok("volume", "detach", "i")
        other = image_of(tmp_path, 8, 24 * MIB)
        daemon.ok("volume", "import", "j", other, "--backend", s3.url("home"), "--overwrite")
        daemon.ok("volume", "flush", "j")
        assert daemon.read("j", 24 * MIB) == other.read_bytes()
        daemon.stop()


def test_s3_import_leaves_alone_a_volume_that_comes_while_it_looks(s3, tmp_path):
    """The key's command runs when the place was looked at and is not made yet."""
    one, two = homes(tmp_path)
    image, made, key = image_of(tmp_path, 9), tmp_path / "made", tmp_path / "key.sh"
    with Daemon(one, SMALL) as first, Daemon(two, SMALL) as second:
        create = f"{HDCS} volume create v --size 8M --backend '{s3.url('late-import')}' --data {second.data}"
        key.write_text(f"#!/bin/sh\n[ -e {made} ] || {create} > {made}\nprintf {bytes(range(32)).hex()}\n")
        key.chmod(0o700)
        done = first.cli("volume", "import", "i", image, "--backend", s3.url("late-import"), "--encrypt", "--key-command", key)
        refused(done, 1, "is there already, and is left as it was", "--overwrite")
        assert made.read_text().startswith("volume v is created") and "i" not in names(first)
        second.write("v", b"v" * MIB)
        second.ok("volume", "flush", "v")
        second.stop()
        # Whoever takes it over finds a volume that is not encrypted.
        first.create("w", "--backend", s3.url("late-import"), size="8M")
        assert first.read("w", 2 * MIB) == b"v" * MIB + bytes(MIB)
        first.stop()


def test_s3_export_of_a_snapshot_that_is_interrupted_leaves_no_clone(s3, tmp_path):
    with Daemon(tmp_path, SMALL) as daemon:
        daemon.create("v", "--backend", s3.url("exported"), size="32M")
        daemon.write("v", random.Random(4).randbytes(32 * MIB))
        daemon.ok("volume", "snapshot", "v", "s")
        daemon.ok("volume", "evict", "v")
        out = tmp_path / "out.raw"
        for number, options in enumerate([["v@s", out], ["v", out, "--snapshot"]]):
            clone = ["--clone-backend", f"{s3.url(f'exported-{number}')}&rate_mib=4"]
            export = popen(daemon, "volume", "export", *options, *clone)
            said = interrupt_after(export, b" exported, ", signal.SIGTERM)
            assert export.returncode == 130, said
            assert "export is interrupted: volume v: nothing of it is left" in said
            assert names(daemon) == {"v"} and not list(tmp_path.glob("out*"))
            (kept,) = snapshots(daemon)
            assert kept["clones"] == []
        refused(daemon.cli("volume", "export", "v@s", out), 2, "--clone-backend")
        daemon.ok("volume", "snapshot", "v", "s", "--delete")
        daemon.stop()


def test_s3_export_is_interrupted_before_its_clone_is_made(s3, tmp_path):
    """While what is dirty is written to the store, which takes its time."""
    with Daemon(tmp_path, SMALL) as daemon:
        daemon.create("v", "--backend", f"{s3.url('dirty')}&rate_mib=1", *DIRTY, size="16M")
        daemon.write("v", random.Random(5).randbytes(8 * MIB))
        options = ["--snapshot", "--clone-backend", s3.url("dirty-clone")]
        export = popen(daemon, "volume", "export", "v", tmp_path / "out.raw", *options)
        said = interrupt_after(export, b" flushed, ")
        assert export.returncode == 130 and "flush is interrupted" in said, said
        assert names(daemon) == {"v"} and s3.names("dirty-clone") == [] and not list(tmp_path.glob("out*"))
        daemon.until(lambda: counters(daemon)["flush_remaining_bytes"] == 0)
        assert counters(daemon)["dirty_bytes"] > 0
        daemon.ok("volume", "delete", "v", "--discard-dirty")
        daemon.stop()


def test_s3_import_is_interrupted_while_its_place_does_not_answer(s3, tmp_path):
    image = image_of(tmp_path, 6)
    with Daemon(tmp_path, SMALL) as daemon:
        s3.gateway_down()
        try:
            url = s3.url("silent", retry_s=3600)
            importing = popen(daemon, "volume", "import", "i", image, "--backend", url)
            end = time.monotonic() + COMMAND_SECONDS
            while not asked(daemon, "i"):
                assert time.monotonic() < end, daemon.log()
                if importing.poll() is not None:
                    # The question itself was in its way: it is a deletion.
                    said = importing.communicate()[1].decode()
                    assert "it is being deleted" in said, said
                    importing = popen(daemon, "volume", "import", "i", image, "--backend", url)
                time.sleep(0.05)
            importing.send_signal(signal.SIGINT)
            said = importing.communicate(timeout=COMMAND_SECONDS)[1].decode()
        finally:
            s3.up()
        assert importing.returncode == 130 and "volume i was not made" in said, said
        assert "i" not in names(daemon) and left(s3, "silent") == []
        daemon.stop()


def asked(daemon, name):
    """Whether a volume is being made."""
    status, said = daemon.api("DELETE", f"/v1/volumes/{name}")
    return status == 409 and "it is being created" in said
