"""Resize of volumes in storage mode: local store and backend get the size with the volume, under load, beside tiers, scrubs
and snapshots, and over crashes; what was cut off is gone."""

import json
import os
import random
import shutil

import pytest

from daemon import Daemon, hdcs, refused
from encryption_cases import encrypted, key_file
from home_layouts import BLOCK, store_bytes
from object_stores import Load, Model
from programs import MIB, run
from resize_cases import (
    GROWN,
    START,
    Command,
    create,
    home_file,
    model_resized,
    resize,
    spread,
    write,
)
from snapshot_cases import SMALL, check, copy_of
from storage_cases import Post, files, home, image, kept, url


def has_all(daemon, tmp_path, model):
    """The volume, and after a flush its backend, has what the model has; nothing is wrong with the local store."""
    check(daemon, "v", model)
    assert daemon.cli("check", "v").returncode == 0
    daemon.ok("volume", "scrub", "v", "--rate", "1G")
    assert home(daemon)["damaged_reads"] == 0
    daemon.ok("volume", "flush", "v")
    assert image(tmp_path).read_bytes() == bytes(model.image)
    shown = home(daemon)
    assert sum(shown[f"{kind}_bytes"] for kind in ("dirty", "zero", "clean", "absent")) == len(model.image)


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_storage_resize_under_load_loses_nothing(tmp_path, is_encrypted):
    key = encrypted(key_file(tmp_path)) if is_encrypted else ()
    with Daemon(tmp_path) as daemon:
        create(daemon, url(tmp_path), *key, size=16 * MIB)
        load = Load(daemon, "v", 16 * MIB, 21)
        load.start()
        for mebibytes in (17, 70, 18, 130, 16, 64):
            before = load.rounds
            daemon.until(lambda before=before: load.rounds > before or load.failure)
            resize(daemon, mebibytes * MIB)
        model = load.end()
        model_resized(model, 64 * MIB)
        for restart in (daemon.kill, daemon.stop):
            restart()
            daemon.start()
            check(daemon, "v", model)
            write(daemon, model)
        has_all(daemon, tmp_path, model)
        daemon.stop()
        assert hdcs("check", daemon.data).returncode == 0
        daemon.start()
        check(daemon, "v", model)
        daemon.stop()


@pytest.mark.parametrize("restart", [False, True])
def test_storage_resize_brings_back_nothing_that_was_cut_off(tmp_path, restart):
    model = Model(2, GROWN)
    with Daemon(tmp_path) as daemon:
        create(daemon, url(tmp_path), size=GROWN)
        for size in (64 * MIB, START + BLOCK):
            spread(daemon, model)
            resize(daemon, size, model)
            if restart:
                daemon.kill()
                daemon.start()
            resize(daemon, GROWN, model)
            if restart:
                daemon.kill()
                daemon.start()
            check(daemon, "v", model)
            rows = json.loads(run("nbdinfo", "--map", "--json",
                                  f"nbd+unix:///v?socket={daemon.data / 'nbd.sock'}").stdout)
            assert all(row["type"] == 3 for row in rows if row["offset"] >= size)
        write(daemon, model)
        has_all(daemon, tmp_path, model)
        daemon.stop()


def test_storage_resize_beside_a_tier_and_a_tier_beside_it(tmp_path):
    model = Model(3, GROWN)
    with Daemon(tmp_path) as daemon:
        create(daemon, url(tmp_path, "?delay_us=6000"), size=GROWN)
        for size in (GROWN + 20 * MIB, 70 * MIB, GROWN):
            write(daemon, model, 150)
            flush = Command(daemon, "volume", "flush", "v")
            daemon.until(lambda: home(daemon)["tier"] == "copying" or not flush.is_alive())
            beside = Command(daemon, "volume", "resize", "v", "--size", str(size), "--shrink")
            # Another one while it runs, or after it.
            again = Command(daemon, "volume", "flush", "v")
            for command in (flush, beside, again):
                command.ok()
            model_resized(model, size)
            daemon.ok("volume", "flush", "v")
            assert image(tmp_path).read_bytes() == model.image
            check(daemon, "v", model)
        has_all(daemon, tmp_path, model)
        daemon.stop()


def test_storage_resize_beside_a_scrub(tmp_path):
    model = Model(4, GROWN)
    with Daemon(tmp_path) as daemon:
        create(daemon, url(tmp_path), "--set", "destage_age_max_ms=1", size=GROWN)
        client = daemon.nbd("v")
        for offset in range(0, GROWN, 2 * MIB):
            data = model.rng.randbytes(MIB)
            client.pwrite(data, offset)
            model.image[offset : offset + MIB] = data
        client.shutdown()
        daemon.until(lambda: daemon.volume("v")["counters"]["log_used_bytes"] == 0)
        # Slower where the resizes take longer.
        for rate in ("40M", "10M", "2M"):
            scrub = Command(daemon, "volume", "scrub", "v", "--rate", rate)
            for size in (GROWN + 10 * MIB, 70 * MIB, 50 * MIB, GROWN):
                resize(daemon, size, model)
            was_beside = scrub.is_alive()
            scrub.ok()
            if was_beside:
                break
        assert was_beside, "each scrub ended before the resizes"
        has_all(daemon, tmp_path, model)
        daemon.stop()


def test_storage_resize_and_a_snapshot_keep_apart(tmp_path):
    before = Model(5, START)
    with Daemon(tmp_path, SMALL) as daemon:
        create(daemon, url(tmp_path, "?delay_us=20000"))
        client = daemon.nbd("v")
        before.write(client, 150)
        client.shutdown()
        snapshot = Post(daemon, "s")
        daemon.until(lambda: home(daemon)["tier"] == "copying")
        for size in (str(GROWN), "16M"):
            refused(daemon.cli("volume", "resize", "v", "--size", size, "--shrink"), 1, "volume v", "wait")
        assert snapshot.end()[0] == 200
        assert kept(tmp_path, "s") == before.image
        after = copy_of(before, 6)
        resize(daemon, GROWN, after)
        write(daemon, after)
        resize(daemon, 32 * MIB, after)
        assert daemon.json("volume", "clone", "v@s", "c", "--mode", "storage", *files(tmp_path))["bytes"] == START
        check(daemon, "c", before)
        daemon.ok("volume", "resize", "c", "--size", str(GROWN))
        model_resized(before, GROWN)
        check(daemon, "c", before)
        has_all(daemon, tmp_path, after)
        daemon.stop()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_storage_resize_survives_kills_and_stops_at_any_time(tmp_path, seed):
    """Before that the volume is resized and written at once: below the smaller size, and as far as it goes when
    nothing is resized. What was acknowledged is there in either size; what was cut off is not. A shrink is most often
    ended when the catalogue has it, a growth when the local store has its room."""
    rng = random.Random(seed)
    model = Model(seed, START)
    least = 16 * MIB
    with Daemon(tmp_path) as daemon:
        create(daemon, url(tmp_path, "?delay_us=5000"))
        entry = daemon.data / "volumes/v/volume.json"
        for _ in range(6):
            write(daemon, model, 100)
            size = rng.choice([least, 40 * MIB, 63 * MIB, 64 * MIB, 100 * MIB, GROWN])
            old = len(model.image)
            command = Command(daemon, "volume", "resize", "v", "--size", str(size), "--shrink")
            client = daemon.nbd("v")
            low = Model(rng.random(), least)
            low.image[:] = model.image[:least]
            for _ in range(rng.randrange(8)):
                low.write(client, 3)
            if rng.randrange(3):
                files = home_file(daemon).stat().st_size, entry.read_text()
                while command.is_alive() and (home_file(daemon).stat().st_size, entry.read_text()) == files:
                    pass
            rng.choice([daemon.kill, daemon.kill, daemon.stop])()
            command.end()
            model.image[:least] = low.image
            daemon.start()
            found = daemon.volume("v")["bytes"]
            assert found in (old, size) and (found == size or command.done.returncode != 0)
            model_resized(model, found)
            check(daemon, "v", model)
            assert daemon.cli("check", "v").returncode == 0
            daemon.until(lambda: home_file(daemon).stat().st_size == store_bytes(found))
        resize(daemon, GROWN, model)
        has_all(daemon, tmp_path, model)
        daemon.stop()


def test_storage_resize_that_was_interrupted_is_cut_at_the_next_start(tmp_path):
    model = Model(8, START)
    with Daemon(tmp_path) as daemon:
        create(daemon, url(tmp_path), "--set", "destage_age_max_ms=1")
        entry = daemon.data / "volumes/v/volume.json"
        write(daemon, model)
        small = tmp_path / "small"
        daemon.stop()
        shutil.copy(entry, small)
        daemon.start()
        resize(daemon, GROWN, model)
        daemon.write("v", b"x" * MIB, 100 * MIB)
        daemon.ok("volume", "flush", "v")
        daemon.write("v", b"y" * MIB, 60 * MIB)
        daemon.until(lambda: daemon.volume("v")["counters"]["log_used_bytes"] == 0)
        daemon.stop()
        large = tmp_path / "large"
        shutil.copy(entry, large)
        # As a node that ended after the home had grown, and before the catalogue said so.
        shutil.copy(small, entry)
        assert hdcs("check", daemon.data).returncode == 0
        daemon.start()
        model_resized(model, START)
        check(daemon, "v", model)
        assert home_file(daemon).stat().st_size == store_bytes(START)
        assert image(tmp_path).stat().st_size == START
        resize(daemon, GROWN, model)
        has_all(daemon, tmp_path, model)
        resize(daemon, START, model)
        daemon.stop()
        # A home that is too small is another one.
        now = tmp_path / "now"
        shutil.copy(entry, now)
        shutil.copy(large, entry)
        daemon.start()
        reason = daemon.volume("v")["reason"]
        assert "its local store is lost" in reason and f"of a volume of {START} bytes, not {GROWN}" in reason, reason
        daemon.stop()
        shutil.copy(now, entry)
        daemon.start()
        has_all(daemon, tmp_path, model)
        daemon.stop()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system, which takes root")
def test_storage_resize_without_room_says_what_is_missing_and_changes_nothing(tmp_path):
    where = tmp_path / "full"
    where.mkdir()
    run("mount", "-t", "tmpfs", "-o", f"size={store_bytes(START) + 20 * MIB}", "none", where)
    try:
        model = Model(9, START)
        with Daemon(tmp_path) as daemon:
            create(daemon, url(tmp_path), "--store-path", where / "home")
            write(daemon, model)
            needs = store_bytes(GROWN) - store_bytes(START)
            room = shutil.disk_usage(where).free
            refused(daemon.cli("volume", "resize", "v", "--size", str(GROWN)), 1,
                    f"{needs} bytes more in {where / 'home'}", f"{needs - room} of them are missing", "make room")
            assert daemon.volume("v")["bytes"] == START and shutil.disk_usage(where).free == room
            assert image(tmp_path).stat().st_size == START
            check(daemon, "v", model)
            for size in (START + 10 * MIB, 20 * MIB, START):
                daemon.ok("volume", "resize", "v", "--size", str(size), "--shrink")
                assert (where / "home").stat().st_size == store_bytes(size)
                model_resized(model, size)
            assert shutil.disk_usage(where).free >= room - MIB, "the room was not given back"
            refused(daemon.cli("volume", "resize", "v", "--size", str(START + 512)), 2, "multiple of 4096")
            has_all(daemon, tmp_path, model)
            daemon.stop()
    finally:
        run("umount", "--lazy", where)


def test_storage_resize_on_a_device_needs_a_larger_one(tmp_path):
    disk = tmp_path / "disk"
    # Whatever it held before, and whatever an earlier size has left.
    disk.write_bytes(b"\xff" * (store_bytes(START) + MIB))
    device = run("losetup", "--find", "--show", disk).stdout.strip()
    try:
        model = Model(10, START)
        with Daemon(tmp_path) as daemon:
            create(daemon, url(tmp_path), "--store-path", device, "--store-overwrite")
            write(daemon, model)
            has, needs = disk.stat().st_size, store_bytes(GROWN)
            refused(daemon.cli("volume", "resize", "v", "--size", str(GROWN)), 1, device, f"holds {has} bytes",
                    f"{needs} are needed")
            assert daemon.volume("v")["bytes"] == START
            with open(disk, "ab") as file:
                file.write(b"\xff" * (needs - has))
            run("losetup", "--set-capacity", device)
            for size in (GROWN, 20 * MIB, GROWN):
                daemon.ok("volume", "resize", "v", "--size", str(size), "--shrink")
                model_resized(model, size)
                check(daemon, "v", model)
                write(daemon, model)
            daemon.kill()
            daemon.start()
            has_all(daemon, tmp_path, model)
            daemon.stop()
    finally:
        run("losetup", "--detach", device, check=False)


def test_storage_resize_whose_backend_fails_leaves_the_old_size(tmp_path):
    stop = tmp_path / "stop"
    model = Model(11, START)
    with Daemon(tmp_path) as daemon:
        create(daemon, url(tmp_path, f"?error_file={stop}"))
        write(daemon, model)
        daemon.ok("volume", "flush", "v")
        write(daemon, model)
        stop.touch()
        refused(daemon.cli("volume", "resize", "v", "--size", str(GROWN)), 1, "its backend cannot be resized")
        assert daemon.volume("v")["bytes"] == START
        assert home_file(daemon).stat().st_size == store_bytes(START)
        stop.unlink()
        check(daemon, "v", model)
        resize(daemon, GROWN, model)
        has_all(daemon, tmp_path, model)
        daemon.stop()


def test_storage_resize_that_cannot_be_recorded_does_not_show(tmp_path):
    """A start would cut what was written behind the size that the catalogue has."""
    model = Model(12, START)
    with Daemon(tmp_path) as daemon:
        create(daemon, url(tmp_path))
        in_the_way = daemon.data / "volumes/v/volume.json.tmp"
        in_the_way.mkdir()
        refused(daemon.cli("volume", "resize", "v", "--size", str(GROWN)), 1, "volume.json")
        assert daemon.volume("v")["bytes"] == START
        write(daemon, model)
        in_the_way.rmdir()
        daemon.kill()
        daemon.start()
        assert daemon.volume("v")["bytes"] == START
        check(daemon, "v", model)
        resize(daemon, GROWN, model)
        write(daemon, model)
        has_all(daemon, tmp_path, model)
        daemon.stop()
