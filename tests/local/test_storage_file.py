"""Storage mode over a file: the data lives in the node's local store, and the backend gets what is dirty when that is asked for."""

import os
import re
import threading
import time

import pytest

from daemon import DIRTY, Daemon, refused, samples
from object_stores import Load, Model
from programs import MIB, run
from storage_cases import SIZE, SMALL_LOG, check, create, fill, home, image, is_tiered, url


def test_storage_fills_to_the_last_byte_while_the_backend_does_not_answer(tmp_path):
    stop = tmp_path / "stop"
    model = Model(1, SIZE)
    with Daemon(tmp_path) as daemon:
        shown = create(daemon, url(tmp_path, f"?error_file={stop}&error_kind=hang&error_on=write"))
        assert shown["mode"] == "storage" and shown["home_path"].endswith("/v/home")
        stop.touch()
        fill(daemon, model)
        check(daemon, model)
        found = daemon.volume("v")
        assert found["state"] == "healthy" and found["counters"]["errors"] == 0
        # The log holds less than a third of it: the rest is in the home.
        assert found["counters"]["home"]["dirty_bytes"] >= SIZE - 17 * MIB
        assert found["counters"]["home"]["tiered_bytes"] == 0
        refused(daemon.cli("volume", "flush", "v", "--timeout", "2"), 1, "out of time")
        # The backend still has what it was given, and that is waited for by nobody.
        client = daemon.nbd("v")
        model.write(client, 200)
        model.check(client)
        client.shutdown()
        stop.unlink()
        daemon.ok("volume", "flush", "v")
        assert is_tiered(daemon) and home(daemon)["backend_between"] is False
        assert image(tmp_path).read_bytes() == bytes(model.image)
        check(daemon, model)
        daemon.stop()


@pytest.mark.parametrize("policy", ["write-through", "write-around", "pass-through"])
def test_storage_killed_keeps_what_went_past_the_log_and_nobody_flushed(tmp_path, policy):
    extra = MIB
    model = Model(2, SIZE)
    with Daemon(tmp_path) as daemon:
        create(daemon, url(tmp_path), "--policy", policy, size=SIZE + extra)
        client = daemon.nbd("v")
        for _ in range(100):
            offset = model.rng.randrange(SIZE // 512) * 512
            data = model.rng.randbytes(min(model.rng.choice((512, 4096, 65536)), SIZE - offset))
            client.pwrite(data, offset)
            model.image[offset : offset + len(data)] = data
        # The commit that is under way by now may be without the last of it: three pages are of another one.
        enough = home(daemon)["map_written_bytes"] + 3 * 4096
        fresh = iter(range(SIZE, SIZE + extra, 4096))

        def is_committed():
            client.pwrite(b"x" * 4096, next(fresh))
            return home(daemon)["map_written_bytes"] >= enough

        daemon.until(is_committed)
        assert daemon.volume("v")["counters"]["flushes"] == 0
        daemon.kill()
    with Daemon(tmp_path) as daemon:
        client = daemon.nbd("v")
        model.check(client)
        client.shutdown()
        daemon.ok("volume", "flush", "v")
        assert image(tmp_path).read_bytes()[:SIZE] == bytes(model.image)
        daemon.stop()


def test_storage_flush_with_nothing_to_do_counts_nothing(tmp_path):
    with Daemon(tmp_path) as daemon:
        create(daemon, url(tmp_path))
        daemon.write("v", b"x" * MIB)
        client = daemon.nbd("v")
        client.zero(4 * MIB, 8 * MIB)
        client.flush()
        client.shutdown()
        # Neither what goes through the log and the local store counts twice, nor do zeroes.
        assert "volume v is flushed: 1 MiB in" in daemon.ok("volume", "flush", "v")
        for _ in range(8):
            assert "volume v is flushed: 0 B in" in daemon.ok("volume", "flush", "v")
        daemon.stop()


def test_storage_flush_that_is_given_up_has_no_more_left_than_there_is(tmp_path):
    """The log holds 1 MiB at first and the local store nothing; by the end it is the other way round."""
    stop = tmp_path / "stop"
    with Daemon(tmp_path) as daemon:
        create(daemon, url(tmp_path, f"?error_file={stop}&error_kind=hang&error_on=write"))
        stop.touch()
        daemon.write("v", b"x" * MIB)
        said = daemon.cli("volume", "flush", "v", "--timeout", "3")
        refused(said, 1, "out of time", "volume v: 1 MiB of 1 MiB are still to go")
        stop.unlink()
        daemon.ok("volume", "flush", "v")
        daemon.stop()


def test_storage_age_of_what_is_dirty_counts_until_it_is_tiered_out(tmp_path):
    def age():
        _, page = daemon.api("GET", "/metrics")
        return samples(page)['hdcs_volume_dirty_age_seconds{volume="v"}']

    with Daemon(tmp_path, {"destage_age_max_ms": 1000}) as daemon:
        create(daemon, url(tmp_path))
        assert age() == 0
        daemon.write("v", b"x" * MIB)
        daemon.until(lambda: home(daemon)["dirty_bytes"] == MIB
                     and daemon.volume("v")["counters"]["log_used_bytes"] == 0)
        # The log is empty, and what is in the local store grows old.
        before = age()
        assert before > 0
        daemon.until(lambda: age() >= before + 1)
        daemon.ok("volume", "flush", "v")
        assert age() == 0
        daemon.stop()


def test_storage_writes_go_on_while_a_tier_gets_stuck(tmp_path):
    """A write to what is still to be copied waits for the copy, but not for a backend that takes nothing."""
    stop = tmp_path / "stop"
    model = Model(2, SIZE)
    with Daemon(tmp_path) as daemon:
        create(daemon, url(tmp_path, f"?error_file={stop}&error_kind=hang&error_on=write"))
        fill(daemon, model)
        stop.touch()
        flush = threading.Thread(target=daemon.cli, args=("volume", "flush", "v"))
        flush.start()
        daemon.until(lambda: home(daemon)["tier"] == "copying")
        client = daemon.nbd("v")
        model.write(client, 600)
        client.shutdown()
        daemon.until(lambda: "not reachable" in (home(daemon)["trouble"] or ""))
        stop.unlink()
        flush.join()
        daemon.until(lambda: is_tiered(daemon))
        daemon.ok("volume", "flush", "v")
        assert image(tmp_path).read_bytes() == bytes(model.image)
        daemon.stop()


def test_storage_over_an_image_that_is_there(tmp_path):
    model = Model(3, SIZE)
    model.image[:] = model.rng.randbytes(SIZE)
    image(tmp_path).write_bytes(model.image)
    before = bytes(model.image)
    with Daemon(tmp_path) as daemon:
        create(daemon, url(tmp_path))
        check(daemon, model)
        client = daemon.nbd("v")
        # Parts of blocks, whose rest only the backend has.
        model.write(client, 200, lengths=(512, 1536))
        for offset, length in ((5 * MIB + 512, 1024), (7 * MIB, MIB), (9 * MIB + 512, 5 * 4096)):
            client.zero(length, offset)
            model.image[offset : offset + length] = bytes(length)
        client.flush()
        client.shutdown()
        assert image(tmp_path).read_bytes() == before
        daemon.ok("volume", "flush", "v")
        assert home(daemon)["filled_blocks"] > 50
        assert image(tmp_path).read_bytes() == bytes(model.image)
        daemon.ok("volume", "evict", "v")
        check(daemon, model)
        daemon.stop()
        daemon.start()
        assert home(daemon)["clean_bytes"] > 0
        check(daemon, model)
        daemon.stop()


def test_storage_survives_kills_between_and_during_tiers(tmp_path):
    model = Model(4, SIZE)
    with Daemon(tmp_path) as daemon:
        create(daemon, url(tmp_path, "?delay_us=20000"))
        fill(daemon, model)
        for tiered in range(4):
            client = daemon.nbd("v")
            model.write(client, 150)
            if tiered % 2:
                daemon.api("POST", "/v1/volumes/v/flush", "null")
                daemon.until(lambda: home(daemon)["tier"] == "copying"
                             and home(daemon)["tiered_bytes"] > 0)
            daemon.kill()
            daemon.start()
            check(daemon, model)
            if tiered % 2:
                # What was interrupted is begun anew by itself; on a busy machine it may have ended before the kill.
                daemon.until(lambda: home(daemon)["backend_between"] is False)
                assert image(tmp_path).read_bytes() == bytes(model.image)
        daemon.stop()


def test_storage_tier_is_the_state_of_one_moment(tmp_path):
    """While a slow tier runs, two blocks far apart are written with the same number, one after the other."""
    last = SIZE - 4096
    with Daemon(tmp_path) as daemon:
        create(daemon, url(tmp_path, "?delay_us=3000"), "--set", "destage_age_max_ms=20")
        fill(daemon, Model(5, SIZE))
        client, enough = daemon.nbd("v"), threading.Event()
        written = [0]

        def write():
            while not enough.is_set():
                written[0] += 1
                for offset in (0, last):
                    client.pwrite(written[0].to_bytes(8, "little") * 512, offset)
                    client.flush()

        writer = threading.Thread(target=write)
        writer.start()
        try:
            daemon.until(lambda: written[0] > 5)
            for _ in range(3):
                before = written[0]
                daemon.ok("volume", "flush", "v")
                with open(image(tmp_path), "rb") as file:
                    first, second = (int.from_bytes(os.pread(file.fileno(), 8, offset), "little")
                                     for offset in (0, last))
                assert first in (second, second + 1), (first, second)
                assert before - 1 <= first <= written[0]
        finally:
            enough.set()
            writer.join()
        client.shutdown()
        daemon.stop()


def test_storage_tier_begins_beside_writes_that_nobody_flushes(tmp_path):
    """What goes past the log is flushed after 64 MiB otherwise, or at half of the deadline of destage: here after twelve
    hours."""
    with Daemon(tmp_path) as daemon:
        create(daemon, url(tmp_path), "--set", "policy=write-through", "--set", "destage_age_max_ms=86400000")
        daemon.write("v", b"t" * MIB, 8 * MIB)
        enough, written = threading.Event(), [0] * 4

        def write(number):
            client = daemon.nbd("v")
            while not enough.is_set():
                client.pwrite(bytes([number + 1]) * 512, (4 * (written[number] % 64) + number) * 512)
                written[number] += 1
                # Many beside every flush, and few in all.
                time.sleep(0.001)
            client.shutdown()

        writers = [threading.Thread(target=write, args=(number,)) for number in range(len(written))]
        for writer in writers:
            writer.start()
        try:
            for tiers in range(1, 4):
                before = written[:]
                daemon.until(lambda before=before: all(now > then for now, then in zip(written, before)))
                daemon.ok("volume", "flush", "v", "--timeout", "30")
                assert home(daemon)["tiers"] >= tiers
                assert image(tmp_path).read_bytes()[8 * MIB : 9 * MIB] == b"t" * MIB
        finally:
            enough.set()
            for writer in writers:
                writer.join()
        daemon.stop()


def test_storage_delete_tiers_out_first_or_says_what_is_lost(tmp_path):
    stop = tmp_path / "stop"
    model = Model(6, SIZE)
    with Daemon(tmp_path) as daemon:
        create(daemon, url(tmp_path, f"?error_file={stop}&error_on=write"))
        fill(daemon, model)
        stop.touch()
        refused(daemon.cli("volume", "delete", "v"), 1, "--discard-dirty")
        refused(daemon.cli("volume", "detach", "v"), 1, "--discard-dirty")
        check(daemon, model)
        stop.unlink()
        daemon.ok("volume", "delete", "v")
        assert image(tmp_path).read_bytes() == bytes(model.image)
        assert not (daemon.data / "volumes" / "v").exists()
        create(daemon, url(tmp_path))
        check(daemon, model)
        daemon.write("v", b"x" * MIB)
        daemon.stop()
        # Of a volume that is not open, the home is read.
        image(tmp_path).rename(tmp_path / "away")
        daemon.start()
        refused(daemon.cli("volume", "delete", "v"), 1, "dirty bytes", "--discard-dirty")
        (tmp_path / "away").rename(image(tmp_path))
        daemon.ok("volume", "open", "v")
        deleted = daemon.json("volume", "delete", "v", "--discard-dirty")
        assert deleted["discarded_dirty_bytes"] >= MIB
        assert image(tmp_path).read_bytes() == bytes(model.image)
        daemon.stop()


def test_storage_lost_home_is_told_and_given_up_only_when_told_to(tmp_path):
    model = Model(7, SIZE)
    with Daemon(tmp_path) as daemon:
        create(daemon, url(tmp_path))
        fill(daemon, model)
        daemon.ok("volume", "flush", "v")
        daemon.write("v", b"x" * 8 * MIB)
        daemon.stop()
        lost = daemon.data / "volumes" / "v" / "home"
        lost.rename(tmp_path / "kept")
        daemon.start()
        volume = daemon.volume("v")
        assert volume["state"] == "error"
        for part in ("its local store is lost", "was closed at", "--discard-dirty"):
            assert part in volume["reason"], volume["reason"]
        # What the log was about to give up is in both.
        held = int(re.search(r"held (\d+) dirty bytes", volume["reason"])[1])
        assert 8 * MIB <= held <= 16 * MIB
        refused(daemon.cli("volume", "open", "v"), 1, "--discard-dirty")
        refused(daemon.cli("volume", "delete", "v"), 1, "--discard-dirty")
        # Put back, it is all there.
        (tmp_path / "kept").rename(lost)
        daemon.ok("volume", "open", "v")
        assert daemon.read("v", 8 * MIB) == b"x" * 8 * MIB
        daemon.stop()
        with open(lost, "r+b") as file:
            file.write(b"something else".ljust(8192, b"!"))
        daemon.start()
        assert "its local store is lost" in daemon.volume("v")["reason"]
        opened = daemon.json("volume", "open", "v", "--discard-dirty")
        assert 8 * MIB <= opened["lost"]["dirty_bytes_max"] <= 16 * MIB
        assert opened["lost"]["is_home"]
        with open(opened["lost"]["home_kept"], "rb") as file:
            assert file.read(14) == b"something else", "what was in its place is told of, not lost"
        check(daemon, model)
        daemon.ok("volume", "flush", "v")
        assert image(tmp_path).read_bytes() == bytes(model.image)
        daemon.stop()
        lost.unlink()
        daemon.start()
        said = daemon.ok("volume", "open", "v", "--discard-dirty")
        assert "volume v is open, without its local store, which is lost: " in said
        daemon.stop()


def test_storage_lost_log_loses_what_only_it_held(tmp_path):
    with Daemon(tmp_path) as daemon:
        create(daemon, url(tmp_path), *DIRTY[:-2])
        daemon.write("v", b"a" * 8 * MIB)
        daemon.ok("volume", "set", "v", "policy=write-through")
        daemon.ok("volume", "set", "v", "policy=write-back")
        assert home(daemon)["dirty_bytes"] == 8 * MIB, "the log is empty by then"
        daemon.write("v", b"b" * MIB)
        daemon.stop()
        daemon.log_of("v").unlink()
        daemon.start()
        why = daemon.volume("v")["reason"]
        for part in ("its write log is lost", f"held {MIB} dirty bytes; the local store has everything written before",
                     "from its local store alone"):
            assert part in why, why
        refused(daemon.cli("volume", "open", "v"), 1, f"held {MIB} dirty bytes", "--discard-dirty")
        opened = daemon.json("volume", "open", "v", "--discard-dirty")
        assert opened["lost"]["dirty_bytes_max"] == MIB and not opened["lost"]["is_home"]
        assert daemon.read("v", 8 * MIB) == b"a" * 8 * MIB
        # With nothing in the log nothing is lost, and a new one is made at once.
        daemon.ok("volume", "set", "v", "policy=write-through")
        daemon.until(lambda: daemon.volume("v")["counters"]["log_used_bytes"] == 0)
        daemon.stop()
        daemon.log_of("v").unlink()
        daemon.start()
        assert "held nothing that the local store does not have" in daemon.volume("v")["reason"]
        assert daemon.json("volume", "open", "v")["lost"]["dirty_bytes_max"] == 0
        assert daemon.read("v", 8 * MIB) == b"a" * 8 * MIB
        daemon.ok("volume", "flush", "v")
        assert image(tmp_path).read_bytes()[:8 * MIB] == b"a" * 8 * MIB
        daemon.stop()


def test_storage_device_of_another_volume_is_never_formatted(tmp_path):
    disks = [tmp_path / "disk0", tmp_path / "disk1"]
    for disk in disks:
        with open(disk, "wb") as file:
            file.truncate(64 * MIB)
    devices = [run("losetup", "--find", "--show", disk).stdout.strip() for disk in disks]
    try:
        with Daemon(tmp_path) as daemon:
            for name, device in zip("ab", devices):
                daemon.create(name, "--mode", "storage", "--backend", f"file:{tmp_path / name}.img",
                              *SMALL_LOG, "--store-path", device, size=str(SIZE))
                daemon.write(name, name.encode() * MIB)
            daemon.stop()
            # Devices change their names.
            for device in devices:
                run("losetup", "--detach", device)
            for disk, device in zip(disks, reversed(devices)):
                run("losetup", device, disk)
            before = [disk.read_bytes() for disk in disks]
            daemon.start()
            assert "its local store is lost" in daemon.volume("a")["reason"]
            logs = [daemon.log_of(name) for name in "ab"]
            kept = [log.read_bytes() for log in logs]
            refused(daemon.cli("volume", "open", "a", "--discard-dirty"), 1, "holds something else", devices[0])
            assert [disk.read_bytes() for disk in disks] == before
            assert [log.read_bytes() for log in logs] == kept
            daemon.stop()
            for device in devices:
                run("losetup", "--detach", device)
            for disk, device in zip(disks, devices):
                run("losetup", device, disk)
            daemon.start()
            for name in "ab":
                assert daemon.read(name, MIB) == name.encode() * MIB
            daemon.stop()
    finally:
        for device in devices:
            run("losetup", "--detach", device, check=False)


def test_storage_lost_log_leaves_what_the_home_has(tmp_path):
    model = Model(8, SIZE)
    with Daemon(tmp_path) as daemon:
        create(daemon, url(tmp_path), "--set", "destage_age_max_ms=10")
        fill(daemon, model)
        daemon.until(lambda: daemon.volume("v")["counters"]["log_used_bytes"] == 0)
        daemon.stop()
        daemon.log_of("v").unlink()
        daemon.start()
        assert "its write log is lost" in daemon.volume("v")["reason"]
        daemon.ok("volume", "open", "v", "--discard-dirty")
        check(daemon, model)
        daemon.ok("volume", "flush", "v")
        assert image(tmp_path).read_bytes() == bytes(model.image)
        daemon.stop()


def test_storage_tiers_out_by_its_schedule(tmp_path):
    model = Model(9, SIZE)
    with Daemon(tmp_path) as daemon:
        create(daemon, url(tmp_path), "--set", "tier_interval_s=1")
        load = Load(daemon, "v", SIZE, 9)
        load.start()
        daemon.until(lambda: home(daemon)["tiers"] >= 2)
        model = load.end()
        daemon.until(lambda: is_tiered(daemon) and daemon.volume("v")["counters"]["dirty_bytes"] == 0)
        assert image(tmp_path).read_bytes() == bytes(model.image)
        status, page = daemon.api("GET", "/metrics")
        assert status == 200 and 'hdcs_volume_home_bytes{volume="v",state="dirty"} 0' in page
        daemon.stop()


def test_storage_refuses_what_it_cannot_do(tmp_path):
    with Daemon(tmp_path, {"memory_max_mib": 4096}) as daemon:
        def refuses(*arguments, status=1, parts=()):
            refused(daemon.cli("volume", "create", "w", *arguments), status, *parts)
            assert not (daemon.data / "volumes" / "w").exists()

        storage = ("--mode", "storage")
        refuses(*storage, "--size", "8T", "--backend", url(tmp_path), parts=("its local store", "--store-path"))
        assert not image(tmp_path).exists()
        refuses(*storage, "--size", str(MIB + 512), status=2, parts=("multiple of 4096",))
        refuses("--size", "16M", "--store-path", "/tmp/x", status=2, parts=("--mode storage",))
        other = tmp_path / "elsewhere"
        other.write_text("precious")
        refuses(*storage, "--size", "16M", "--store-path", other, status=2, parts=("exists",))
        assert other.read_text() == "precious"
        other.unlink()
        daemon.create("v", *storage, "--store-path", other)
        refuses(*storage, "--size", "16M", "--store-path", other, status=2, parts=("in use by volume v",))
        refused(daemon.cli("volume", "resize", "v", "--size", str(32 * MIB + 512)), 2, "multiple of 4096")
        assert "storage" in daemon.ok("volume", "show", "v")
        daemon.ok("volume", "delete", "v")
        assert not other.exists()
        daemon.stop()


def test_storage_whose_backend_has_another_owner_is_degraded_and_its_flush_ends(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    place = ("--mode", "storage", "--backend", f"dir:{tmp_path / 'objects'}", *SMALL_LOG)
    with Daemon(tmp_path / "one") as one, Daemon(tmp_path / "two") as two:
        one.create("v", *place)
        client = one.nbd("v")
        client.pwrite(b"1" * MIB, 0)
        one.ok("volume", "flush", "v")
        assert one.volume("v")["state"] == "healthy"
        two.create("w", *place)
        client.pwrite(b"2" * MIB, 0)
        client.flush()
        refused(one.cli("volume", "flush", "v"), 1, "another owner")
        shown = one.volume("v")
        assert shown["state"] == "degraded" and "another owner" in shown["reason"]
        assert f" {MIB} bytes are in the local store alone" in shown["reason"], shown["reason"]
        assert "another owner" in shown["counters"]["home"]["failed"]
        assert client.pread(MIB, 0) == b"2" * MIB, "the local store has it"
        client.shutdown()
