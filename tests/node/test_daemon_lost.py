"""Volumes that have lost something: their backend for a while, their write log for good."""

import fcntl
import json
import os
import shutil
import signal
import subprocess

import pytest

from daemon import DIRTY, Daemon, freeze, hdcs, refused, samples
from disks import served_disk
from programs import MIB

LOG_BYTES = 16 * MIB


def reason(daemon, name="v"):
    volume = daemon.volume(name)
    assert volume["state"] == "error", volume
    return volume["reason"]


def refused_export(daemon, name, *parts):
    """Clients are told why the volume is not there."""
    done = subprocess.run(
        ["qemu-img", "info", f"nbd+unix:///{name}?socket={daemon.data / 'nbd.sock'}"],
        capture_output=True, text=True, timeout=60,
    )
    assert done.returncode != 0
    for part in parts:
        assert part in done.stderr, done.stderr


def recorded(daemon, name="v"):
    """What is recorded of a volume's dirty data."""
    return json.loads((daemon.data / "volumes" / name / "dirty.json").read_text())["content"]


def part_recorded(daemon):
    """What is recorded of the dirty data once anything is. A look may fall into the middle of either write, and what
    changes later is too little to be recorded again."""
    daemon.until(lambda: recorded(daemon)["dirty_bytes"] > 0)
    part = recorded(daemon)["dirty_bytes"]
    assert part <= 2 * MIB
    return part


def with_dirty_megabyte(daemon, *arguments):
    """A volume `v` whose backend has `o` and whose log has a megabyte of `n` at its beginning."""
    daemon.create("v", *DIRTY, *arguments)
    daemon.write("v", b"o" * 2 * MIB)
    daemon.ok("volume", "flush", "v")
    daemon.write("v", b"n" * MIB)


def test_lost_log_is_told_and_given_up_only_when_told_to(tmp_path):
    with Daemon(tmp_path) as daemon:
        with_dirty_megabyte(daemon)
        daemon.create("w", *DIRTY)
        daemon.write("w", b"w" * MIB)
        daemon.stop()
        daemon.log_of("v").unlink()
        daemon.start()
        why = reason(daemon)
        for part in ("its write log is lost", "was closed at", f"held {MIB} dirty bytes",
                     "has everything written before", "--discard-dirty"):
            assert part in why, why
        assert "its write log is lost" in daemon.ok("volume", "list")
        assert daemon.json("status")["volumes_by_state"]["error"] == 1
        refused_export(daemon, "v", "volume v is not open", "its write log is lost")
        # The others serve.
        assert daemon.read("w", MIB) == b"w" * MIB
        opened = daemon.cli("volume", "open", "v")
        refused(opened, 1, f"{MIB} dirty bytes", "--discard-dirty")
        assert opened.stderr.startswith("error: volume v: write log: cannot open"), "the volume is named once"
        refused(daemon.cli("volume", "delete", "v"), 1, f"{MIB} dirty bytes", "--discard-dirty")
        refused(daemon.cli("volume", "detach", "v"), 1, f"{MIB} dirty bytes", "--discard-dirty")
        assert not daemon.log_of("v").exists()
        opened = daemon.json("volume", "open", "v", "--discard-dirty")
        assert opened["volume"]["state"] == "healthy"
        assert opened["lost"]["dirty_bytes_max"] == MIB
        assert opened["lost"]["complete_until"].endswith("Z")
        daemon.tells("is opened without its log")
        assert daemon.read("v", 2 * MIB) == b"o" * 2 * MIB
        # From now on it is a volume like any other.
        daemon.write("v", b"p" * MIB)
        daemon.kill()
        daemon.start()
        assert daemon.read("v", 2 * MIB) == b"p" * MIB + b"o" * MIB
        assert daemon.json("volume", "open", "v")["lost"] is None
        assert hdcs("check", daemon.data).returncode == 0


def test_lost_log_after_a_crash_is_bounded_by_its_size(tmp_path):
    with Daemon(tmp_path) as daemon:
        with_dirty_megabyte(daemon)
        part = part_recorded(daemon)
        assert recorded(daemon)["in_use"] is True
        daemon.kill()
        daemon.log_of("v").unlink()
        daemon.start()
        why = reason(daemon)
        assert f"held {part} dirty bytes when that was last recorded" in why, why
        assert f"and {LOG_BYTES} at most" in why, why
        opened = daemon.json("volume", "open", "v", "--discard-dirty")
        assert opened["lost"]["dirty_bytes_max"] == LOG_BYTES


def test_lost_log_without_a_record_is_said_to_be_unknown(tmp_path):
    with Daemon(tmp_path) as daemon:
        with_dirty_megabyte(daemon)
        daemon.stop()
        daemon.log_of("v").unlink()
        (daemon.data / "volumes/v/dirty.json").unlink()
        daemon.start()
        assert f"not recorded: {LOG_BYTES} dirty bytes at most" in reason(daemon)
        refused(daemon.cli("volume", "open", "v"), 1, "--discard-dirty")
        daemon.ok("volume", "open", "v", "--discard-dirty")


def test_lost_log_that_held_nothing_needs_no_discard(tmp_path):
    with Daemon(tmp_path, {"destage_on_stop": True}) as daemon:
        with_dirty_megabyte(daemon)
        daemon.stop()
        daemon.log_of("v").unlink()
        daemon.start()
        assert "held nothing that the backend does not have" in reason(daemon)
        assert daemon.json("volume", "open", "v")["lost"]["dirty_bytes_max"] == 0
        assert daemon.read("v", 2 * MIB) == b"n" * MIB + b"o" * MIB


def test_lost_log_takes_what_the_cache_knew_with_it(tmp_path):
    image = tmp_path / "image"
    with Daemon(tmp_path) as daemon:
        with_dirty_megabyte(daemon, "--backend", f"file:{image}")
        daemon.ok("volume", "flush", "v")
        daemon.ok("volume", "promote", "v")
        assert daemon.read("v", MIB) == b"n" * MIB
        number = daemon.volume("v")["number"]
        daemon.stop()
        daemon.log_of("v").unlink()
        # Whoever loses a log may have to restore the backend too.
        with open(image, "r+b") as file:
            file.write(b"r" * 2 * MIB)
        daemon.start()
        daemon.ok("volume", "open", "v", "--discard-dirty")
        assert daemon.volume("v")["number"] > number
        assert daemon.read("v", 2 * MIB) == b"r" * 2 * MIB


def test_lost_log_with_another_one_in_its_place_is_moved_aside(tmp_path):
    with Daemon(tmp_path) as daemon:
        with_dirty_megabyte(daemon)
        daemon.create("w", *DIRTY)
        daemon.write("w", b"w" * MIB)
        daemon.stop()
        shutil.copy(daemon.log_of("w"), daemon.log_of("v"))
        other = daemon.log_of("w").read_bytes()
        daemon.start()
        assert "identity does not match" in reason(daemon)
        opened = daemon.json("volume", "open", "v", "--discard-dirty")
        kept = opened["lost"]["log_kept"]
        assert kept.startswith(f"{daemon.log_of('v')}.lost-")
        assert open(kept, "rb").read() == other, "nothing was written to it"
        assert daemon.read("w", MIB) == b"w" * MIB


def test_log_that_was_given_up_or_is_older_is_never_replayed(tmp_path):
    with Daemon(tmp_path) as daemon:
        with_dirty_megabyte(daemon)
        daemon.stop()
        old = tmp_path / "old"
        shutil.copy(daemon.log_of("v"), old)
        daemon.start()
        daemon.until(lambda: recorded(daemon)["incarnation"] == 2)
        daemon.ok("volume", "flush", "v")
        daemon.write("v", b"p" * MIB, offset=MIB)
        daemon.stop()
        newest = tmp_path / "newest"
        daemon.log_of("v").rename(newest)
        shutil.copy(old, daemon.log_of("v"))
        daemon.start()
        assert "an older copy of the log" in reason(daemon)
        # The right one is put back.
        shutil.copy(newest, daemon.log_of("v"))
        daemon.ok("volume", "open", "v")
        assert daemon.read("v", 2 * MIB) == b"n" * MIB + b"p" * MIB
        daemon.stop()
        daemon.log_of("v").unlink()
        daemon.start()
        daemon.ok("volume", "open", "v", "--discard-dirty")
        daemon.stop()
        shutil.copy(newest, daemon.log_of("v"))
        daemon.start()
        assert "another log of the volume" in reason(daemon)


def test_lost_log_is_not_given_up_while_the_backend_is_away(tmp_path):
    image = tmp_path / "image"
    with Daemon(tmp_path) as daemon:
        with_dirty_megabyte(daemon, "--backend", f"file:{image}")
        daemon.stop()
        daemon.log_of("v").write_bytes(b"rubbish" * 4096)
        rubbish = daemon.log_of("v").read_bytes()
        image.rename(tmp_path / "away")
        daemon.start()
        refused(daemon.cli("volume", "open", "v", "--discard-dirty"), 1, "does not exist")
        assert daemon.log_of("v").read_bytes() == rubbish
        assert not image.exists()
        (tmp_path / "away").rename(image)
        daemon.ok("volume", "open", "v", "--discard-dirty")
        assert daemon.read("v", MIB) == b"o" * MIB
        # A new log is no reason to make a missing backend anew.
        daemon.stop()
        image.unlink()
        daemon.start()
        assert "does not exist" in reason(daemon)
        assert not image.exists()


def test_good_log_is_never_discarded(tmp_path):
    image = tmp_path / "image"
    with Daemon(tmp_path) as daemon:
        with_dirty_megabyte(daemon, "--backend", f"file:{image}")
        daemon.stop()
        image.rename(tmp_path / "away")
        daemon.start()
        refused(daemon.cli("volume", "open", "v", "--discard-dirty"), 1, "does not exist")
        (tmp_path / "away").rename(image)
        assert daemon.json("volume", "open", "v", "--discard-dirty")["lost"] is None
        assert daemon.read("v", MIB) == b"n" * MIB


def test_new_log_can_be_elsewhere(tmp_path):
    with Daemon(tmp_path) as daemon:
        with_dirty_megabyte(daemon)
        daemon.stop()
        daemon.log_of("v").unlink()
        daemon.start()
        place = tmp_path / "new-log"
        refused(daemon.cli("volume", "open", "v", "--discard-dirty", "--log-path", "/dev/hdcs-none"), 1,
                "no such device", "--log-path")
        precious = tmp_path / "precious"
        precious.write_text("precious")
        refused(daemon.cli("volume", "open", "v", "--discard-dirty", "--log-path", precious), 1, "exists already")
        assert precious.read_text() == "precious"
        daemon.ok("volume", "open", "v", "--discard-dirty", "--log-path", place, "--log-size", "32M")
        volume = daemon.volume("v")
        assert (volume["log_path"], volume["log_bytes"]) == (str(place), 32 * MIB)
        daemon.write("v", b"q" * MIB)
        daemon.kill()
        daemon.start()
        assert daemon.read("v", MIB) == b"q" * MIB
        assert not daemon.log_of("v").exists()


def test_unreachable_backend_is_waited_for_while_others_serve(tmp_path):
    mount = tmp_path / "mount"
    mount.mkdir()
    with Daemon(tmp_path) as daemon:
        with_dirty_megabyte(daemon, "--backend", f"file:{mount}/image")
        daemon.create("w", *DIRTY)
        daemon.write("w", b"w" * MIB)
        daemon.stop()
        before = recorded(daemon)
        mount.rename(tmp_path / "away")
        daemon.start()
        assert daemon.read("w", MIB) == b"w" * MIB
        assert daemon.volume("v")["phase"] == "waiting"
        assert "again by itself" in reason(daemon)
        assert str(mount) in reason(daemon)
        refused_export(daemon, "v", "volume v is not open", str(mount))
        refused(daemon.cli("volume", "open", "v"), 1, str(mount))
        refused(daemon.cli("volume", "detach", "v"), 1, f"{MIB} dirty bytes")
        daemon.until(lambda: "tried 3 times" in reason(daemon))
        assert recorded(daemon) == before, "what was known of its log is still known"
        assert not mount.exists()
        (tmp_path / "away").rename(mount)
        daemon.until(lambda: daemon.volume("v")["state"] == "healthy")
        assert daemon.read("v", 2 * MIB) == b"n" * MIB + b"o" * MIB
        daemon.tells("volume v is open now")


def test_stop_does_not_wait_for_an_unreachable_backend(tmp_path):
    mount = tmp_path / "mount"
    mount.mkdir()
    with Daemon(tmp_path) as daemon:
        with_dirty_megabyte(daemon, "--backend", f"file:{mount}/image")
        daemon.stop()
        mount.rename(tmp_path / "away")
        daemon.start()
        daemon.stop()


def starts(daemon):
    """How many volumes a start opens, and how many of them it has not opened yet; none while nobody can say."""
    try:
        start = daemon.status()["start"]
    except OSError:
        return None
    return start and (start["volumes"], start["left"])


def test_opening_that_hangs_is_told_and_can_be_given_up(tmp_path):
    """A backend or a log that answers nothing at all: the volume can go, and what its thread brings in the
    end is closed; a stop waits for none of them."""
    with served_disk(tmp_path / "a") as a, served_disk(tmp_path / "b") as b, \
            served_disk(tmp_path / "c") as c:
        disks = {one: one / "mount/disk" for one in (a, b, c)}
        with Daemon(tmp_path) as daemon:
            daemon.create("w", *DIRTY)
            daemon.write("w", b"w" * MIB)
            for name, one in ("v", a), ("z", c):
                daemon.create(name, "--backend", f"file:{disks[one]}", *DIRTY, size="64M")
                daemon.write(name, b"o" * 2 * MIB)
                daemon.ok("volume", "flush", name)
                daemon.write(name, b"n" * MIB)
            place = tmp_path / "write-log"
            daemon.create("x", "--log-path", place, *DIRTY)
            daemon.stop()
            with open(disks[b], "r+b") as disk:
                disk.write(place.read_bytes())
            place.unlink()
            place.symlink_to(disks[b])
            before = recorded(daemon)
            for one in disks:
                freeze(one.process.pid)
            daemon.spawn()
            daemon.until(lambda: starts(daemon) == (4, 3))
            assert "1 of 4 are open after" in daemon.ok("status") and "s left" in daemon.ok("status")
            page = samples(daemon.api("GET", "/metrics")[1])
            assert page["hdcs_start_volumes_left"] == 3 and page["hdcs_start_left_seconds"] >= 0
            daemon.ready()
            daemon.tells("opened 1 of 4 volumes, about")
            assert daemon.read("w", MIB) == b"w" * MIB
            shown = {one["part"]: one for one in daemon.json("status")["problems"]}
            assert shown.keys() == {"volume v", "volume x", "volume z"}
            for one in shown.values():
                assert "has been opening for" in one["reason"] and one["for_ms"] >= 10_000, one
            assert daemon.volume("v")["phase"] == "opening"
            refused_export(daemon, "v", "volume v is not open", "it is being opened")
            # Nothing is given up for what is refused.
            refused(daemon.cli("volume", "delete", "v"), 1, f"{MIB} dirty bytes", "--discard-dirty")
            refused(daemon.cli("volume", "detach", "v"), 1, f"{MIB} dirty bytes", "--discard-dirty")
            refused(daemon.cli("volume", "delete", "x", "--discard-dirty"), 1, "does not answer",
                    "hdcs volume detach")
            assert [daemon.volume(name)["phase"] for name in "vx"] == ["opening"] * 2
            assert daemon.json("status")["volumes_opening"] == 3 and starts(daemon) == (4, 3)
            assert recorded(daemon) == before
            assert daemon.json("volume", "detach", "v", "--discard-dirty")["dirty_bytes_left"] == MIB
            detached = daemon.json("volume", "detach", "x")
            assert not os.path.exists(daemon.data / "volumes/x")
            # Another volume in its place is not touched by what comes late.
            daemon.create("v", *DIRTY)
            daemon.write("v", b"2" * MIB)
            part_recorded(daemon)
            record = recorded(daemon)
            for one in a, b:
                one.process.send_signal(signal.SIGCONT)
            daemon.until(lambda: daemon.cli("volume", "create", "u", "--backend", f"file:{disks[a]}",
                                            *DIRTY, "--json").returncode == 0)
            assert daemon.read("u", 2 * MIB) == b"o" * 2 * MIB, "its log was not replayed"
            with open(detached["log"], "r+b") as log:
                daemon.until(lambda: is_free(log))
            assert recorded(daemon) == record
            assert daemon.read("v", MIB) == b"2" * MIB
            # The third one hangs still.
            assert daemon.volume("z")["phase"] == "opening"
            daemon.stop()
            c.process.send_signal(signal.SIGCONT)
            daemon.start()
            assert daemon.read("z", 2 * MIB) == b"n" * MIB + b"o" * MIB
            daemon.stop()


def is_free(file):
    """Whether nobody has locked a file."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    fcntl.lockf(file, fcntl.LOCK_UN)
    return True


def test_refused_backend_is_not_retried_and_opened_by_hand(tmp_path):
    image = tmp_path / "image"
    with Daemon(tmp_path) as daemon:
        with_dirty_megabyte(daemon, "--backend", f"file:{image}")
        daemon.stop()
        os.truncate(image, MIB)
        daemon.start()
        assert "it was cut or replaced" in reason(daemon)
        assert daemon.volume("v")["phase"] == "failed"
        refused(daemon.cli("volume", "open", "v"), 1, "it was cut or replaced", "hdcs volume open")
        os.truncate(image, 16 * MIB)
        assert daemon.volume("v")["state"] == "error"
        assert daemon.json("volume", "open", "v")["lost"] is None
        assert daemon.read("v", MIB) == b"n" * MIB


def test_detach_leaves_everything_in_place(tmp_path):
    image = tmp_path / "image"
    with Daemon(tmp_path) as daemon:
        with_dirty_megabyte(daemon, "--backend", f"file:{image}")
        detached = daemon.json("volume", "detach", "v")
        assert detached["dirty_bytes_left"] == 0
        assert detached["backend"] == f"file:{image}"
        assert daemon.json("volume", "list") == []
        refused_export(daemon, "v", "no open volume of this name")
        assert image.read_bytes()[: 2 * MIB] == b"n" * MIB + b"o" * MIB
        assert os.path.getsize(detached["log"]) == LOG_BYTES
        # Its backend is free for a volume of another name, or of the same.
        daemon.json("volume", "create", "v", "--backend", f"file:{image}")
        assert daemon.read("v", MIB) == b"n" * MIB


def test_detach_with_dirty_data_needs_the_word_and_can_be_taken_back(tmp_path):
    failing = tmp_path / "fails"
    image = tmp_path / "image"
    with Daemon(tmp_path) as daemon:
        with_dirty_megabyte(daemon, "--backend", f"file:{image}?error_file={failing}")
        daemon.ok("volume", "promote", "v")
        failing.touch()
        refused(daemon.cli("volume", "detach", "v"), 1, "takes no data", f"{MIB} dirty bytes",
                "--discard-dirty")
        assert daemon.read("v", MIB) == b"n" * MIB
        detached = daemon.json("volume", "detach", "v", "--discard-dirty")
        assert detached["dirty_bytes_left"] == MIB
        assert image.read_bytes()[: 2 * MIB] == b"o" * 2 * MIB
        failing.unlink()
        daemon.stop()
        # While it was detached its backend may have changed.
        with open(image, "r+b") as file:
            file.seek(MIB)
            file.write(b"r" * MIB)
        shutil.move(detached["directory"], daemon.data / "volumes/v")
        daemon.start()
        assert daemon.read("v", 2 * MIB) == b"n" * MIB + b"r" * MIB


def test_lost_log_can_be_detached(tmp_path):
    image = tmp_path / "image"
    with Daemon(tmp_path) as daemon:
        with_dirty_megabyte(daemon, "--backend", f"file:{image}")
        daemon.stop()
        daemon.log_of("v").unlink()
        daemon.start()
        detached = daemon.json("volume", "detach", "v", "--discard-dirty")
        assert detached["dirty_bytes_left"] == MIB
        assert daemon.json("volume", "list") == []
        assert image.read_bytes()[:MIB] == b"o" * MIB


@pytest.mark.parametrize("destage", [True, False])
def test_record_follows_the_log(tmp_path, destage):
    """It is exact after a stop, whatever the stop left, and says `in use` in between."""
    with Daemon(tmp_path, {"destage_on_stop": destage}) as daemon:
        with_dirty_megabyte(daemon)
        part_recorded(daemon)
        until = recorded(daemon)["complete_until_ms"]
        assert 0 < until <= recorded(daemon)["recorded_ms"]
        daemon.stop()
        record = recorded(daemon)
        assert record["in_use"] is False
        assert record["dirty_bytes"] == (0 if destage else MIB)
        assert record["nothing_dirty"] is destage
        if not destage:
            # What is dirty was dirty before the restart: the time does not run on.
            daemon.start()
            daemon.until(lambda: recorded(daemon)["incarnation"] == 2)
            assert recorded(daemon)["in_use"] is True
            assert recorded(daemon)["complete_until_ms"] == record["complete_until_ms"]
