"""Members whose disks fail or are full: the group goes on without them, and they come back."""

import shutil
import subprocess
from contextlib import suppress

from disks import needs_root, served_disk, small_file_system
from group_cases import SIZE, History, comes_back, create, goes_on_at, is_whole, nodes, record
from daemon import DIRTY, Daemon, refused

QUICK = {"cluster.member_deadline_ms": 500}


def test_member_whose_disk_fails_is_left_out_and_joins_once_it_is_good_again(tmp_path):
    with served_disk(tmp_path / "disk") as disk, nodes(tmp_path, **QUICK) as (a, b):
        create((a, b), tmp_path)
        history = History(31)
        history.write(a, 50)
        b.stop()
        log, served = b.log_of("v"), disk / "mount/disk"
        with open(served, "r+b") as file:
            file.write(log.read_bytes())
        log.unlink()
        log.symlink_to(served)
        comes_back(b, a)
        (disk / "fail").touch()
        history.write(a, 100)
        assert record(a)["members"] == ["a"]
        b.tells("a write to this node's copy of its log failed")
        (disk / "fail").unlink()
        b.kill()
        comes_back(b, a)
        history.write(a, 50)
        goes_on_at(a, b, history)


def problem(daemon):
    """What a node says is wrong with its volume, or with the copy that it should have."""
    problems = daemon.json("status")["problems"]
    return next((one["reason"] for one in problems if one["part"] == "volume v"), None)


@needs_root
def test_copy_for_which_there_is_no_room_is_told_of_and_made_once_there_is(tmp_path):
    with nodes(tmp_path) as (a, b):
        b.stop()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m,mode=700", "tmpfs", b.data], check=True)
        try:
            b.start()
            # Somebody else has the rest of it.
            room = shutil.disk_usage(b.data).free
            (b.data / "other").write_bytes(bytes(room - (4 << 20)))
            a.create(
                "v", "--backend", f"file:{tmp_path}/v.img", "--replicas", 2, "--ack", "all", "--nodes", "a,b",
                *DIRTY, size=SIZE,
            )
            history = History(32)
            history.write(a, 50)
            b.tells("its copy: ")
            assert "no space" in b.log().lower()
            assert record(a)["joiners"] == ["b"]
            assert b.json("volume", "list") == []
            status = b.json("status")
            assert status["state"] == "degraded"
            assert ["volume v", "error"] in [[one["part"], one["state"]] for one in status["problems"]]
            assert "no space" in problem(b).lower()
            a.until(lambda: "node b can be reached and has no usable copy: `hdcs status` there says why" in (problem(a) or ""))
            (b.data / "other").unlink()
            is_whole(a, 2)
            for daemon in (a, b):
                daemon.until(lambda daemon=daemon: problem(daemon) is None)
            history.write(a, 50)
            goes_on_at(a, b, history)
        finally:
            b.kill()
            subprocess.run(["umount", "-l", b.data], check=True)


def fill(path):
    """A file that takes all the room that there is."""
    with suppress(OSError), open(path, "wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


def records_on_a_disk_of_their_own(disk):
    return {"cluster.records": str(disk), "cluster.member_deadline_ms": 60_000}


@needs_root
def test_copy_is_opened_while_the_records_are_on_a_full_file_system(tmp_path):
    with small_file_system(tmp_path / "disk", "1m") as disk, \
            nodes(tmp_path, **records_on_a_disk_of_their_own(disk)) as (a, b):
        create((a, b), tmp_path)
        history = History(33)
        history.write(a, 50)
        b.kill()
        fill(disk / "other")
        b.start()
        # Each write takes its copy.
        history.write(a, 50)
        assert record(a)["members"] == ["a", "b"]
        (disk / "other").unlink()
        goes_on_at(a, b, history)


@needs_root
def test_copy_is_opened_while_the_records_are_read_only(tmp_path):
    with small_file_system(tmp_path / "disk", "1m") as disk, \
            nodes(tmp_path, **records_on_a_disk_of_their_own(disk)) as (a, b):
        create((a, b), tmp_path)
        history = History(34)
        history.write(a, 50)
        a.kill()
        b.kill()
        # As an older build left it: that b has a copy is not among the records.
        next(disk.glob("*/copy-2")).unlink()
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        b.start()
        b.tells("until they can be written again")
        b.until(lambda: b.json("group", "show", "v")["here"])
        assert b.volume("v")["state"] == "standby"
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        b.ok("volume", "takeover", "v")
        history.check(b)
        history.write(b, 50)
        comes_back(a, b)


@needs_root
def test_primary_that_started_while_the_records_were_read_only_serves_once_they_are_not(tmp_path):
    with small_file_system(tmp_path / "disk", "1m") as disk, \
            nodes(tmp_path, **records_on_a_disk_of_their_own(disk)) as (a, b):
        create((a, b), tmp_path)
        history = History(35)
        history.write(a, 50)
        a.kill()
        b.kill()
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        a.start()
        b.start()
        a.tells("records of groups")
        assert a.volume("v")["state"] == "standby"
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        a.until(lambda: a.volume("v")["state"] == "healthy")
        history.check(a)
        history.write(a, 50)


@needs_root
def test_takeover_whose_record_cannot_be_written_says_so_and_changes_nothing(tmp_path):
    with small_file_system(tmp_path / "disk", "1m") as disk, \
            nodes(tmp_path, **records_on_a_disk_of_their_own(disk)) as (a, b):
        create((a, b), tmp_path)
        history = History(36)
        history.write(a, 50)
        before = record(a)
        fill(disk / "other")
        refused(
            b.cli("volume", "takeover", "v"), 1, "could not be written", str(disk), "No space left",
            "Make room there, or mount it for writing, and begin the takeover again",
        )
        # The primary goes on.
        history.write(a, 50)
        assert record(a) == before
        (disk / "other").unlink()
        b.ok("volume", "takeover", "v")
        history.check(b)
        history.write(b, 50)


@needs_root
def test_node_whose_data_directory_is_full_says_what_needs_room(tmp_path):
    with nodes(tmp_path) as (a, b):
        b.stop()
        with small_file_system(tmp_path / "full", "1m") as disk:
            subprocess.run(["chmod", "700", disk], check=True)
            for name in ("node.json", "lock"):
                shutil.copy(b.data / name, disk)
            (disk / "volumes").mkdir()
            fill(disk / "other")
            full = Daemon(tmp_path / "1", b.config, data=disk)
            full.refuses(1, "cannot start as a node of the cluster", f"{disk}/node.json", "No space left", "free some space")
        assert a.json("volume", "list") == []
