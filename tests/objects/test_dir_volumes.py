"""Volumes on a directory: as on S3, and what a file system does that a store does not: it is not mounted, it is another
one, it is full, it hangs."""

import os
import shutil

import pytest

from daemon import DIRTY, Daemon, homes, refused
from mirror_fuse import mirror
from object_stores import EAGER, ROOM, Model, conforms, counters, survives_kills, taken_over
from programs import MIB


def url(directory, **options):
    query = "&".join(f"{name}={value}" for name, value in options.items())
    return f"dir:{directory}?{query}" if query else f"dir:{directory}"


def test_dir_store_conforms(tmp_path):
    conforms("store_conformance", url(tmp_path / "store"))


def test_dir_backend_conforms(tmp_path):
    conforms("conformance", url(tmp_path / "backend"))


def test_dir_daemon_killed_finds_everything_again(tmp_path):
    with Daemon(tmp_path, EAGER) as daemon:
        survives_kills(daemon, url(tmp_path / "killed"), Model(1, 32 * MIB), 3)
        daemon.stop()


def test_dir_second_owner_finds_what_was_flushed_and_fences_the_first(tmp_path):
    one, two = homes(tmp_path)
    model = Model(2, 16 * MIB)
    place = url(tmp_path / "owned")
    with Daemon(one, ROOM) as first, Daemon(two, EAGER) as second:
        first.create("v", "--backend", place, *DIRTY, size="16M")
        client = first.nbd("v")
        model.write(client, 60)
        first.ok("volume", "flush", "v")
        client.pwrite(b"x" * 4096, 0)
        client.flush()
        taken_over(second, place, model)
        status, _ = first.api("POST", "/v1/volumes/v/flush", "{}")
        assert status < 300, status
        first.until(lambda: "another node has taken the volume over" in (first.volume("v")["reason"] or ""))
        other = second.nbd("v")
        model.write(other, 60)
        second.ok("volume", "flush", "v")
        second.ok("volume", "evict", "v")
        model.check(other)
        other.shutdown()
        second.stop()


def test_dir_snapshot_and_clone_of_a_compressed_and_encrypted_volume(tmp_path):
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    before = Model(3, 16 * MIB)
    with Daemon(tmp_path, ROOM) as daemon:
        daemon.create("v", "--backend", url(tmp_path / "parent"), "--compress", "lz4", "--encrypt", "--key-file", key,
                      *DIRTY, size="16M")
        client = daemon.nbd("v")
        before.write(client, 60)
        daemon.ok("volume", "snapshot", "v", "s")
        after = Model(4, 16 * MIB)
        after.image[:] = before.image
        after.write(client, 60)
        daemon.ok("volume", "flush", "v")
        daemon.ok("volume", "clone", "v@s", "c", "--backend", url(tmp_path / "child"))
        daemon.kill()
        daemon.start()
        for name, model in [("v", after), ("c", before)]:
            client = daemon.nbd(name)
            model.check(client)
            client.shutdown()
        refused(daemon.cli("volume", "snapshot", "v", "s", "--delete"), 1, "these clones begin with: c:")
        daemon.ok("volume", "export", "v@s", tmp_path / "s.raw", "--clone-backend", url(tmp_path / "scratch"))
        assert (tmp_path / "s.raw").read_bytes() == bytes(before.image)
        daemon.ok("volume", "delete", "c")
        daemon.ok("volume", "snapshot", "v", "s", "--delete")
        status, _ = daemon.api("DELETE", "/v1/volumes/v?remove_data=true")
        assert status == 200
        daemon.stop()
    left = [name for _, _, names in os.walk(tmp_path / "parent") for name in names]
    assert all("manifest" in str(path) for path, _, names in os.walk(tmp_path / "parent") if names), left


def test_dir_that_is_not_there_or_another_one_is_not_made_anew(tmp_path):
    place, away = tmp_path / "mount" / "v", tmp_path / "mount" / "away"
    with Daemon(tmp_path, {**EAGER, "memory_max_mib": 1024}) as daemon:
        refused(daemon.cli("volume", "create", "v", "--size", "16M", "--backend", url(place, retry_s=1)), 1, str(place), "make it first, or mount")
        assert not place.parent.exists()
        place.parent.mkdir()
        daemon.create("v", "--backend", url(place, retry_s=1), *DIRTY)
        daemon.write("v", b"a" * MIB)
        daemon.ok("volume", "flush", "v")
        place.rename(away)
        daemon.write("v", b"b" * MIB)
        status, _ = daemon.api("POST", "/v1/volumes/v/flush", "{}")
        assert status < 300, status
        daemon.until(lambda: "the directory is gone" in (daemon.volume("v")["reason"] or ""))
        place.mkdir()
        daemon.until(lambda: "another directory than before" in (daemon.volume("v")["reason"] or ""))
        assert list(place.iterdir()) == []
        place.rmdir()
        away.rename(place)
        daemon.until(lambda: daemon.volume("v")["state"] == "healthy")
        daemon.ok("volume", "flush", "v")
        daemon.ok("volume", "evict", "v")
        assert daemon.read("v", MIB) == b"b" * MIB
        # At the next start the file system is not mounted, and is waited for.
        daemon.stop()
        place.parent.rename(tmp_path / "unmounted")
        daemon.start()
        daemon.until(lambda: daemon.volume("v")["phase"] == "waiting")
        assert not place.parent.exists()
        (tmp_path / "unmounted").rename(place.parent)
        daemon.until(lambda: daemon.volume("v")["state"] == "healthy")
        assert daemon.read("v", MIB) == b"b" * MIB
        daemon.stop()


def test_dir_of_a_clone_that_is_not_mounted_keeps_what_its_parent_has_for_it(tmp_path):
    (tmp_path / "mount").mkdir()
    model = Model(5, 16 * MIB)
    with Daemon(tmp_path, ROOM) as daemon:
        daemon.create("v", "--backend", url(tmp_path / "v"), *DIRTY, size="16M")
        client = daemon.nbd("v")
        model.write(client, 40)
        client.shutdown()
        daemon.ok("volume", "clone", "v", "c", "--backend", url(tmp_path / "mount" / "c"))
        daemon.ok("volume", "detach", "c")
        # As old as a reference has to be that a scrub looks at.
        for reference in (tmp_path / "v" / "clone").iterdir():
            os.utime(reference, (0, 0))
        (tmp_path / "mount" / "c").rename(tmp_path / "away")
        daemon.ok("volume", "scrub", "v")
        assert list((tmp_path / "v" / "clone").iterdir()), "the reference stays"
        assert not (tmp_path / "mount" / "c").exists()
        (tmp_path / "away").rename(tmp_path / "mount" / "c")
        daemon.create("c2", "--backend", url(tmp_path / "mount" / "c"), size="16M")
        client = daemon.nbd("c2")
        model.check(client)
        client.shutdown()
        daemon.stop()


@pytest.mark.parametrize("mode", ["cache", "storage"])
def test_dir_that_is_gone_keeps_no_deletion_waiting(tmp_path, mode):
    """Requests of the volume, and a look at what depends on it, would be tried again for as long as `retry_s`."""
    place = tmp_path / "mount" / "gone"
    with Daemon(tmp_path, ROOM) as daemon:
        place.parent.mkdir()
        daemon.create("v", "--mode", mode, "--backend", url(place, retry_s=3600), "--set", "destage_age_max_ms=1000",
                      size="16M")
        daemon.write("v", b"x" * MIB)
        shutil.rmtree(place.parent)
        if mode == "storage":
            assert daemon.api("POST", "/v1/volumes/v/flush", "{}")[0] < 300
        daemon.until(lambda: counters(daemon)["store"]["retries"] > 0)
        refused(daemon.cli("volume", "delete", "v"), 1, "--keep-data")
        deleted = daemon.json("volume", "delete", "v", "--discard-dirty")
        # Its file system may only not be mounted: then it is still there.
        assert deleted["discarded_dirty_bytes"] == MIB and deleted["data"].startswith(f"dir:{place}")
        assert "nothing is there, or its file system is not mounted" in deleted["data_trouble"]
        daemon.stop()


def test_dir_inside_the_data_directory_is_refused(tmp_path):
    """A volume's deletion would take along what lies in its directory."""
    with Daemon(tmp_path, ROOM) as daemon:
        daemon.create("v", "--backend", url(tmp_path / "v"), size="16M")
        daemon.ok("volume", "snapshot", "v", "s")
        for place in [daemon.data / "volumes" / "w", daemon.data / "volumes" / "v" / "w", daemon.data / "w"]:
            refused(daemon.cli("volume", "create", "w", "--size", "16M", "--backend", url(place)), 2,
                    str(place), "inside the data directory")
            refused(daemon.cli("volume", "clone", "v@s", "w", "--backend", url(place)), 2, "inside the data directory")
            assert not place.exists()
        assert [volume["name"] for volume in daemon.json("volume", "list")] == ["v"]
        daemon.stop()


def test_dir_that_is_gone_lets_a_deletion_without_discard_end(tmp_path):
    with Daemon(tmp_path, ROOM) as daemon:
        place = tmp_path / "objects"
        daemon.create("v", "--mode", "storage", "--backend", url(place, retry_s=3), size="16M")
        daemon.write("v", b"x" * MIB)
        shutil.rmtree(place)
        refused(daemon.cli("volume", "delete", "v"), 1, f"nothing is at dir:{place}", f"{MIB} dirty bytes", "--discard-dirty")
        # A tier that is tried again and again is no progress.
        refused(daemon.cli("volume", "detach", "v"), 1, "its backend takes no data")
        assert daemon.volume("v")["counters"]["home"]["dirty_bytes"] == MIB
        daemon.json("volume", "delete", "v", "--discard-dirty")
        daemon.stop()


def test_dir_that_hangs_holds_nobody_up(tmp_path):
    with mirror(tmp_path) as (mounted, behind), Daemon(tmp_path, ROOM) as daemon:
        daemon.create("w")
        (behind / "waits").touch()
        try:
            refused(daemon.cli("volume", "create", "v", "--size", "16M", "--backend",
                               url(mounted / "v", timeout_s=1, retry_s=1)), 1, "no answer within 1 s")
            daemon.write("w", b"w" * MIB)
            assert daemon.read("w", MIB) == b"w" * MIB
        finally:
            (behind / "waits").unlink()
        daemon.stop()


def test_dir_wrong_places_are_said_clearly(tmp_path):
    with Daemon(tmp_path, ROOM) as daemon:

        def create(backend):
            return daemon.cli("volume", "create", "v", "--size", "16M", "--backend", backend)

        refused(create("dir:/srv/two words"), 2, "absolute path of a directory")
        refused(create("dir:/srv/../etc/v"), 2, "absolute path of a directory")
        file = tmp_path / "file"
        file.write_bytes(b"x")
        refused(create(url(file)), 2, "not a directory")
        refused(create(url("/proc/v", retry_s=1)), 1, "/proc/v")
        daemon.create("v", "--backend", url(tmp_path / "v"))
        assert counters(daemon)["store"]["puts"] > 0
        refused(daemon.cli("volume", "create", "w", "--size", "16M", "--backend", url(tmp_path / "v")), 2,
                "is the backend of volume v")
        daemon.stop()
