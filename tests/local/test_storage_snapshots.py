"""Snapshots and clones of volumes in storage mode: what is dirty is tiered out first, and kept as that has left it."""

import zlib

import pytest

from daemon import Daemon, refused
from object_stores import Model
from programs import MIB
from snapshot_cases import SMALL, check, copy_of, snapshots
from storage_cases import SIZE, SMALL_LOG, Post, create, files, fill, home, image, kept, url


@pytest.mark.parametrize("mode", ["cache", "storage"])
def test_storage_snapshot_is_cloned_in_either_mode_and_deleted(tmp_path, mode):
    before = Model(1, SIZE)
    with Daemon(tmp_path, SMALL) as daemon:
        create(daemon, url(tmp_path))
        fill(daemon, before)
        daemon.ok("volume", "snapshot", "v", "s", "--copy")
        after = copy_of(before, 2)
        client = daemon.nbd("v")
        after.write(client, 200)
        cloned = daemon.json("volume", "clone", "v@s", "c", "--mode", mode, *files(tmp_path))
        assert cloned["mode"] == mode and cloned["bytes"] == SIZE
        check(daemon, "c", before)
        daemon.write("c", b"c" * MIB)
        after.check(client)
        client.shutdown()
        daemon.ok("volume", "flush", "v")
        assert kept(tmp_path, "s") == bytes(before.image)
        assert image(tmp_path).read_bytes() == bytes(after.image)
        daemon.ok("volume", "snapshot", "v", "s", "--delete")
        assert snapshots(daemon) == []
        # The image of a deleted volume stays, with its snapshots.
        daemon.ok("volume", "snapshot", "v", "last", "--copy")
        daemon.ok("volume", "delete", "v")
        assert kept(tmp_path, "last") == bytes(after.image)
        daemon.stop()


def test_storage_snapshot_beside_a_tier_waits_for_that_and_holds_what_came_before_it(tmp_path):
    model = Model(3, SIZE)
    with Daemon(tmp_path, SMALL) as daemon:
        create(daemon, url(tmp_path, "?delay_us=20000"))
        fill(daemon, model)
        daemon.api("POST", "/v1/volumes/v/flush", "null")
        daemon.until(lambda: home(daemon)["tier"] == "copying")
        client = daemon.nbd("v")
        model.write(client, 100)
        # It holds this, and of what follows everything up to one write.
        states = {zlib.crc32(model.image)}
        snapshot = Post(daemon, "s")
        for _ in range(300):
            model.write(client, 1)
            states.add(zlib.crc32(model.image))
        assert snapshot.end()[0] == 200
        assert home(daemon)["tiers"] >= 2 and home(daemon)["tier"] == "idle"
        model.check(client)
        client.shutdown()
        clone = kept(tmp_path, "s")
        last = daemon.json("volume", "clone", "v", "now", *files(tmp_path))
        assert last["bytes"] == SIZE
        check(daemon, "now", model)
        assert zlib.crc32(clone) in states
        daemon.ok("volume", "flush", "v")
        assert image(tmp_path).read_bytes() == bytes(model.image)
        daemon.stop()


def test_storage_snapshot_is_cancelled_while_it_tiers(tmp_path):
    model = Model(5, SIZE)
    with Daemon(tmp_path, SMALL) as daemon:
        create(daemon, url(tmp_path, "?delay_us=20000"))
        fill(daemon, model)
        for cancel in ("flush", "copy"):
            while True:
                snapshot = Post(daemon, "s")
                daemon.until(lambda: home(daemon)["tier"] == "copying")
                assert daemon.api("DELETE", f"/v1/volumes/v/{cancel}")[0] == 200
                status, said = snapshot.end()
                assert status == 409 and "it was cancelled" in said
                # What is shown may be a moment old.
                daemon.until(lambda: home(daemon)["tier"] == "idle")
                if home(daemon)["dirty_bytes"] > 0:
                    break
                # It had copied everything before that came.
                fill(daemon, model)
        refused(daemon.cli("volume", "snapshot", "v", "s", "--copy", "--timeout", "0"), 1, "out of time")
        assert snapshots(daemon) == []
        daemon.ok("volume", "snapshot", "v", "s", "--copy")
        assert kept(tmp_path, "s") == bytes(model.image)
        daemon.stop()


def test_storage_snapshot_fails_where_a_tier_fails_and_says_what_to_do(tmp_path):
    stop = tmp_path / "stop"
    model = Model(6, SIZE)
    with Daemon(tmp_path, SMALL) as daemon:
        create(daemon, url(tmp_path, f"?error_file={stop}&error_on=write"))
        fill(daemon, model)
        stop.touch()
        status, said = Post(daemon, "s").end()
        assert status == 409, said
        for part in ("did not take all that is dirty", "nothing was made", "between two states", "hdcs volume flush"):
            assert part in said, said
        # What is shown may be a moment old.
        daemon.until(lambda: home(daemon)["tier"] == "idle")
        assert home(daemon)["backend_between"] is True
        check(daemon, "v", model)
        stop.unlink()
        daemon.ok("volume", "snapshot", "v", "s", "--copy")
        assert home(daemon)["backend_between"] is False
        assert kept(tmp_path, "s") == bytes(model.image)
        daemon.stop()


def test_storage_snapshot_on_s3_is_a_clone_s_begin_and_keeps_its_volume(s3, tmp_path):
    before = Model(7, SIZE)
    with Daemon(tmp_path, SMALL) as daemon:
        place = s3.url("snapped")
        daemon.create("v", "--mode", "storage", "--backend", place, *SMALL_LOG, size=str(SIZE))
        fill(daemon, before)
        daemon.ok("volume", "snapshot", "v", "s")
        after = copy_of(before, 8)
        client = daemon.nbd("v")
        after.write(client, 200)
        client.shutdown()
        daemon.ok("volume", "clone", "v@s", "c", "--mode", "storage", "--backend", s3.url("snapped-c"))
        check(daemon, "c", before)
        refused(daemon.cli("volume", "snapshot", "v", "s", "--delete"), 1, "these clones begin with: c:")
        refused(daemon.cli("volume", "delete", "v"), 1, "it has clones")
        # A clone of a clone, in storage mode both.
        apart = copy_of(before, 9)
        client = daemon.nbd("c")
        apart.write(client, 200)
        daemon.ok("volume", "clone", "c", "cc", "--backend", s3.url("snapped-cc"))
        check(daemon, "cc", apart)
        client.shutdown()
        daemon.ok("volume", "delete", "cc")
        daemon.ok("volume", "delete", "c")
        daemon.ok("volume", "snapshot", "v", "s", "--delete")
        check(daemon, "v", after)
        daemon.ok("volume", "delete", "v")
        daemon.stop()
