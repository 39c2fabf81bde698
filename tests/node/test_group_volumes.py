"""What volumes with copies on several nodes can be and do: encryption, policies, changes, snapshots; and what is seen of
them."""

import os
import tempfile
import threading
import time

import pytest

from daemon import DIRTY, refused
from encryption_cases import encrypted, key_file, marked, marks
from group_cases import (
    History, comes_back, create, goes_on_at, groups_left, is_served, is_whole, nodes, record,
)
from lying_s3 import LyingS3


def test_encrypted_volume_goes_on_at_another_node_and_no_medium_has_plain_text(tmp_path):
    key = key_file(tmp_path)
    with nodes(tmp_path, **{"cluster.member_deadline_ms": 500}) as (a, b):
        create((a, b), tmp_path, *encrypted(key))
        data = marked(1 << 20, 1)
        a.write("v", data)
        history = History(21)
        history.write(a, 300)
        assert [marks(daemon.log_of("v")) for daemon in (a, b)] == [0, 0]
        other = key_file(tmp_path, "other")
        refused(a.cli("volume", "rotate-key", "v", "--key-file", other), 1, "other nodes have copies")
        secret = key.read_text().strip()
        spec = next((tmp_path / "records").glob("*/spec-1.json")).read_text()
        assert secret not in spec and "wrapped" in spec
        goes_on_at(a, b, history)
        # What the other one lacks by now it is sent from the log's medium.
        history.write(b, 200)
        comes_back(a, b)
        history.write(b, 100)
        goes_on_at(b, a, history)
        assert [marks(daemon.log_of("v")) for daemon in (a, b)] == [0, 0]
        a.stop()


def test_copy_of_an_encrypted_volume_is_made_once_its_node_has_the_key(tmp_path):
    key = key_file(tmp_path)
    with nodes(tmp_path, **{"cluster.member_deadline_ms": 500}) as (a, b):
        create((a, b), tmp_path, *encrypted(key))
        history = History(22)
        history.write(a, 100)
        b.stop()
        away = key.rename(tmp_path / "away")
        b.start()
        b.tells("its keys: ")
        b.until(lambda: "its keys: " in (b.volume("v")["reason"] or ""))
        assert b.volume("v")["state"] == "error"
        # The other one says that the node is there.
        a.until(lambda: [one["state"] for one in a.json("group", "show", "v")["here"]["others"]] == ["no-copy"])
        # It goes on with those that have the key: the copy without it is left out.
        history.write(a, 50)
        assert record(a)["members"] == ["a"]
        away.rename(key)
        is_whole(a, 2)
        history.write(a, 50)
        goes_on_at(a, b, history)


def test_damage_of_an_encrypted_copy_is_found_when_it_is_opened(tmp_path):
    with nodes(tmp_path, **{"cluster.member_deadline_ms": 500}) as (a, b):
        create((a, b), tmp_path, *encrypted(key_file(tmp_path)))
        history = History(23)
        history.write(a, 300)
        b.kill()
        log = b.log_of("v")
        with open(log, "r+b") as file:
            file.seek(40 * 4096)
            block = file.read(4096)
            file.seek(40 * 4096)
            file.write(bytes(255 - byte for byte in block))
        b.start()
        b.tells("its copy: ")
        b.kill()
        a.until(lambda: record(a)["members"] == ["a"])
        log.unlink()
        comes_back(b, a)
        goes_on_at(a, b, history)


def test_records_of_a_deleted_volume_whose_node_is_gone_for_good_go_when_that_is_said(tmp_path):
    with nodes(tmp_path) as (a, b):
        create((a, b), tmp_path)
        b.kill()
        a.ok("volume", "delete", "v", "--discard-dirty")
        (group,) = groups_left(tmp_path)
        os.utime(group / "removed.json", (0, 0))
        mark = group / "gone-2"
        a.tells(f"if that node is gone for good, `touch {mark}` says so")
        mark.touch()
        a.until(lambda: not groups_left(tmp_path))
        # If it comes back all the same, its copy is deleted there.
        b.start()
        b.until(lambda: "no record of its group" in (b.volume("v")["reason"] or ""))
        b.ok("volume", "delete", "v", "--discard-dirty")
        assert b.json("volume", "list") == []


def states(daemon, name="v"):
    """What the node has seen its volume go through."""
    events = daemon.json("events", name)
    return [event["what"] for event in events if event["kind"] == "state"]


def test_states_of_a_volume_and_its_copies_are_seen_and_said(tmp_path):
    with nodes(tmp_path, 3, **{"cluster.member_deadline_ms": 300}) as (a, b, c):
        create((a, b, c), tmp_path, ack="majority")
        for daemon in (b, c):
            daemon.until(lambda daemon=daemon: daemon.volume("v")["state"] == "standby")
            assert "takeover" in daemon.volume("v")["reason"]
            assert daemon.status()["problems"] == []
        a.until(lambda: a.volume("v")["state"] == "healthy")
        group = a.volume("v")["group"]
        assert (group["role"], group["primary"], group["members"]) == ("serves", "a", ["a", "b", "c"])
        assert "3 of 3: a, b, c; this node serves" in a.ok("volume", "show", "v")
        History(31).write(a, 50)

        def others():
            return {one["node"]: one for one in a.json("group", "show", "v")["here"]["others"]}
        a.until(lambda: [one["state"] for one in others().values()] == ["in-step", "in-step"])
        a.until(lambda: all(one["behind_bytes"] == 0 for one in others().values()))
        c.kill()
        # One copy less is not all well; two less, and writes wait.
        a.until(lambda: a.volume("v")["state"] == "degraded")
        a.until(lambda: "not those of c" in (a.volume("v")["reason"] or ""))
        a.until(lambda: others()["c"]["state"] == "away")
        b.kill()
        client = a.nbd("v")
        write = client.aio_pwrite(bytes(4096), 0)
        a.until(lambda: a.volume("v")["state"] == "read-only")
        assert "fewer nodes have a copy" in a.volume("v")["reason"]
        assert not client.is_read_only()
        b.start()
        c.start()
        is_whole(a, 3)
        while not client.aio_command_completed(write):
            client.poll(-1)
        client.shutdown()
        a.until(lambda: a.volume("v")["state"] == "healthy")
        a.kill()
        b.ok("volume", "takeover", "v")
        b.until(lambda: b.volume("v")["state"] == "degraded")
        c.until(lambda: c.volume("v")["group"]["primary"] == "b")
        assert c.volume("v")["state"] == "standby"
        b.until(lambda: any(what.startswith("standby →") for what in states(b)))


@pytest.mark.parametrize(
    "policy, persist, compression",
    [
        ("write-back", "on-write", "lz4"),
        ("write-back", "on-flush", "zstd"),
        ("write-through", "on-write", "off"),
        ("write-around", "on-write", "zstd"),
        ("pass-through", "on-flush", "off"),
    ],
)
def test_policy_loses_nothing_that_was_acknowledged(tmp_path, policy, persist, compression):
    dirty = [*DIRTY[:-1], persist, "--policy", policy, "--set", f"compression={compression}"]
    with nodes(tmp_path) as (a, b):
        create((a, b), tmp_path, dirty=dirty)
        history = History(41)
        history.write(a, 300)
        flush(a)
        if persist == "on-write":
            writer = threading.Thread(target=history.write_until_it_breaks, args=(a,))
            writer.start()
            a.until(lambda: history.writes > 500)
            a.kill()
            writer.join()
        else:
            a.kill()
        b.ok("volume", "takeover", "v")
        history.check(b)
        settings = b.volume("v")["settings"]
        assert (settings["policy"], settings["compression"]) == (policy, compression)
        history.write(b, 100)
        flush(b)
        comes_back(a, b)
        goes_on_at(b, a, history)
        a.ok("volume", "flush", "v")
        history.check(a)


def test_policy_that_refuses_writes_goes_on_refusing_them_elsewhere(tmp_path):
    with nodes(tmp_path) as (a, b):
        create((a, b), tmp_path)
        history = History(42)
        history.write(a, 100)
        a.ok("volume", "set", "v", "policy=read-only")
        goes_on_at(a, b, history)
        assert b.nbd("v").is_read_only()
        b.ok("volume", "set", "v", "policy=write-through")
        history.write(b, 100)
        history.check(b)


def flush(daemon, name="v"):
    client = daemon.nbd(name)
    client.flush()
    client.shutdown()


def test_change_of_settings_reaches_whoever_takes_over(tmp_path):
    with nodes(tmp_path) as (a, b):
        create((a, b), tmp_path)
        history = History(51)
        history.write(a, 50)
        refused(b.cli("volume", "set", "v", "dirty_ratio_max=50"), 1, "does not serve it")
        a.ok("volume", "set", "v", "dirty_ratio_max=88")
        refused(a.cli("volume", "set", "v", "log_failure=pass-through"), 2, "log_failure=read-only")
        b.until(lambda: b.volume("v")["settings"]["dirty_ratio_max"] == 88)
        # One that is away while something changes knows it before it serves.
        b.kill()
        a.until(lambda: record(a)["members"] == ["a"])
        a.ok("volume", "set", "v", "dirty_ratio_max=86", "policy=write-through")
        comes_back(b, a)
        a.kill()
        b.ok("volume", "takeover", "v")
        settings = b.volume("v")["settings"]
        assert (settings["dirty_ratio_max"], settings["policy"]) == (86, "write-through")
        history.check(b)
        comes_back(a, b)
        a.until(lambda: a.volume("v")["settings"]["dirty_ratio_max"] == 86)


@pytest.mark.parametrize("kind", ["file", "dir"])
def test_size_is_the_same_wherever_it_is_served(tmp_path, kind):
    backend = f"file:{tmp_path}/v.img" if kind == "file" else f"dir:{tmp_path}/objects"
    with nodes(tmp_path) as (a, b):
        create((a, b), tmp_path, backend=backend)
        history = History(52)
        history.write(a, 100)
        refused(b.cli("volume", "resize", "v", "--size", "64M"), 1, "does not serve it")
        a.ok("volume", "resize", "v", "--size", "32M")
        a.write("v", b"beyond " * 1024, 20 << 20)
        b.until(lambda: b.volume("v")["bytes"] == 32 << 20)
        a.kill()
        b.ok("volume", "takeover", "v")
        assert b.read("v", 512, 20 << 20)[:7] == b"beyond "
        history.check(b)
        # Smaller again: nobody finds what was cut off.
        b.ok("volume", "resize", "v", "--size", "16M", "--shrink")
        history.write(b, 50)
        comes_back(a, b)
        b.kill()
        a.ok("volume", "takeover", "v")
        assert a.volume("v")["bytes"] == 16 << 20
        history.check(a)
        a.ok("volume", "resize", "v", "--size", "32M")
        assert a.read("v", 512, 20 << 20) == bytes(512)
        a.ok("volume", "flush", "v")
        history.check(a)


def test_volume_that_is_detached_is_let_go_of_by_all(tmp_path):
    with nodes(tmp_path) as (a, b):
        create((a, b), tmp_path)
        history = History(61)
        history.write(a, 100)
        refused(b.cli("volume", "detach", "v"), 1, "detach it there")
        detached = a.json("volume", "detach", "v")
        assert detached["dirty_bytes_left"] == 0
        b.until(lambda: b.json("volume", "list") == [])
        assert a.json("volume", "list") == [] and a.json("group", "list") == []
        a.until(lambda: not groups_left(tmp_path))
        # All of it is in the backend, over which there may be a new volume, with copies again.
        create((a, b), tmp_path)
        history.check(a)


def test_copy_of_a_volume_that_is_deleted_goes_when_its_node_is_back(tmp_path):
    with nodes(tmp_path) as (a, b):
        create((a, b), tmp_path)
        refused(b.cli("volume", "delete", "v", "--discard-dirty"), 1, "delete it there")
        history = History(62)
        history.write(a, 50)
        b.kill()
        a.ok("volume", "delete", "v", "--discard-dirty")
        assert a.json("group", "list") == []
        # That no records are to be seen says nothing: the copy stays.
        records = (tmp_path / "records").rename(tmp_path / "away")
        (tmp_path / "records").mkdir()
        b.refuses(2, str(tmp_path / "records"), "mount it again")
        assert b.log_of("v").exists()
        (tmp_path / "records").rmdir()
        records.rename(tmp_path / "records")
        b.start()
        b.until(lambda: b.json("volume", "list") == [])
        assert not b.log_of("v").exists()
        b.until(lambda: not groups_left(tmp_path))
        create((a, b), tmp_path)


@pytest.mark.parametrize("kind", ["file", "dir"])
def test_snapshots_and_clones_are_there_wherever_it_is_served(tmp_path, kind):
    backend = f"file:{tmp_path}/v.img" if kind == "file" else f"dir:{tmp_path}/v.objects"
    copy = ["--copy"] if kind == "file" else []
    clone = f"file:{tmp_path}/w.img" if kind == "file" else f"dir:{tmp_path}/w.objects"
    with nodes(tmp_path) as (a, b):
        create((a, b), tmp_path, backend=backend)
        history = History(71)
        history.write(a, 200)
        a.ok("volume", "snapshot", "v", "first", *copy)
        before = a.read_all("v", 16 << 20)
        history.write(a, 200)
        goes_on_at(a, b, history)
        listed = b.json("volume", "snapshot", "v", "--list")["snapshots"]
        assert [one["name"] for one in listed] == ["first"]
        b.ok("volume", "clone", "v@first", "w", "--backend", clone, *copy)
        assert b.read_all("w", 16 << 20) == before
        b.ok("volume", "snapshot", "v", "second", *copy)
        comes_back(a, b)
        history.write(b, 50)
        b.ok("volume", "delete", "w")
        b.kill()
        a.ok("volume", "takeover", "v")
        listed = a.json("volume", "snapshot", "v", "--list")["snapshots"]
        assert [one["name"] for one in listed] == ["first", "second"]
        for name in ("first", "second"):
            a.ok("volume", "snapshot", "v", name, "--delete")
        history.check(a)


def killed_during(daemon, seconds, *command):
    """Run a command and kill the daemon after so long, whatever the command has done by then."""
    running = threading.Thread(target=daemon.cli, args=command)
    running.start()
    time.sleep(seconds)
    daemon.kill()
    running.join()


def test_crash_in_the_middle_of_a_resize_leaves_one_size_or_the_other(tmp_path):
    # A command takes some hundredths of a second until it is asked for, and its steps as many.
    with nodes(tmp_path) as (a, b):
        create((a, b), tmp_path)
        history = History(81)
        size = 16 << 20
        for seconds in (0.02, 0.04, 0.06, 0.08, 0.12):
            history.write(a, 50)
            larger = size + (8 << 20)
            killed_during(a, seconds, "volume", "resize", "v", "--size", str(larger))
            b.ok("volume", "takeover", "v")
            size = b.volume("v")["bytes"]
            assert size in (larger - (8 << 20), larger)
            assert len(b.read("v", 4096, size - 4096)) == 4096
            history.check(b)
            comes_back(a, b)
            a.until(lambda size=size: a.volume("v")["bytes"] == size)
            a, b = b, a
        history.check(a)


def test_crash_in_the_middle_of_a_deletion_leaves_the_volume_or_nothing(tmp_path):
    with nodes(tmp_path) as (a, b):
        deleted = 0
        for seconds in (0.02, 0.05, 0.08, 0.12, 0.2):
            create((a, b), tmp_path)
            killed_during(a, seconds, "volume", "delete", "v", "--discard-dirty")
            a.start()
            if b.json("group", "list"):
                is_served(a)
                a.ok("volume", "delete", "v", "--discard-dirty")
            else:
                deleted += 1
            for daemon in (a, b):
                daemon.until(lambda daemon=daemon: daemon.json("volume", "list") == [])
            a.until(lambda: not groups_left(tmp_path))
        assert deleted > 0, "the last one has long ended"


def test_crash_in_the_middle_of_a_detachment_keeps_the_log_of_who_detaches(tmp_path):
    with nodes(tmp_path) as (a, b):
        for count, seconds in enumerate((0.02, 0.05, 0.08, 0.12, 0.2), 1):
            create((a, b), tmp_path)
            History(90 + count).write(a, 50)
            killed_during(a, seconds, "volume", "detach", "v", "--discard-dirty")
            a.start()
            if a.json("volume", "list"):
                a.until(lambda: a.volume("v")["phase"] == "open" or "detach it again" in (a.volume("v")["reason"] or ""))
                a.ok("volume", "detach", "v", "--discard-dirty")
            for daemon in (a, b):
                daemon.until(lambda daemon=daemon: daemon.json("volume", "list") == [])
            a.until(lambda: not groups_left(tmp_path))
            assert len(list((a.data / "detached").glob("*/log"))) == count


def test_crash_while_a_deletion_removes_data_leaves_no_group_and_another_one_ends_it(tmp_path):
    credentials = tmp_path / "credentials"
    credentials.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    credentials.chmod(0o600)
    with LyingS3() as s3, nodes(tmp_path) as (a, b):
        create((a, b), tmp_path, backend=s3.url(credentials))
        History(100).write(a, 50)
        a.ok("volume", "flush", "v")

        def kills(handler, bucket, names):
            if any("data/" in name for name in names):
                a.process.kill()
            else:
                handler.delete(bucket, names)

        def data():
            return [name for name in s3.objects if "data/" in name]
        with s3.lock:
            s3.lie, s3.told = ("delete", kills), 0
        assert data()
        with pytest.raises(Exception):
            a.api("DELETE", "/v1/volumes/v?remove_data=true")
        a.wait()
        s3.tell("delete", None)
        # Nobody takes over what has no data any more.
        assert b.json("group", "list") == []
        b.until(lambda: b.json("volume", "list") == [])
        a.start()
        a.until(lambda: "delete it again" in (a.volume("v")["reason"] or ""))
        assert data()
        a.ok("volume", "delete", "v")
        assert not data()
        assert a.json("volume", "list") == []
        a.until(lambda: not groups_left(tmp_path))


def test_group_is_removed_before_data_is_given_up(tmp_path):
    credentials = tmp_path / "credentials"
    credentials.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    credentials.chmod(0o600)
    with LyingS3() as s3, nodes(tmp_path) as (a, b):
        create((a, b), tmp_path, backend=s3.url(credentials))
        history = History(101)
        history.write(a, 50)
        a.ok("volume", "flush", "v")
        # Without its records it stays as it is, and is served.
        away = (tmp_path / "records").rename(tmp_path / "away")
        status, text = a.api("DELETE", "/v1/volumes/v?remove_data=true&discard_dirty=true")
        assert status != 200 and "no record of its group" in text, text
        away.rename(tmp_path / "records")
        # Nor does it go while they take no new files.
        taken = (tmp_path / "records" / "tmp").rename(tmp_path / "tmp")
        (tmp_path / "records" / "tmp").write_text("")
        status, text = a.api("DELETE", "/v1/volumes/v?remove_data=true&discard_dirty=true")
        assert status != 200 and "records of groups" in text and "delete it again" not in text, text
        (tmp_path / "records" / "tmp").unlink()
        taken.rename(tmp_path / "records" / "tmp")
        history.write(a, 50)
        history.check(a)
        a.ok("volume", "flush", "v")

        def kills(handler, name, body):
            a.process.kill()
        with s3.lock:
            s3.lie, s3.told = ("put", kills), 0
        with pytest.raises(Exception):
            a.api("DELETE", "/v1/volumes/v?remove_data=true")
        a.wait()
        s3.tell("put", None)
        assert b.json("group", "list") == []
        b.until(lambda: b.json("volume", "list") == [])
        a.start()
        a.until(lambda: "delete it again" in (a.volume("v")["reason"] or ""))
        # What was not given up yet stays, and the answer says so.
        assert "s3://bucket/volume" in a.ok("volume", "delete", "v")
        assert a.json("volume", "list") == []
        a.until(lambda: not groups_left(tmp_path))
        create((a, b), tmp_path, backend=s3.url(credentials))
        history.check(a)


def test_volume_is_not_served_any_more_whose_group_may_be_removed(tmp_path):
    with nodes(tmp_path) as (a, b), tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        create((a, b), tmp_path, backend=f"dir:{tmp_path}/objects")
        history = History(103)
        history.write(a, 50)
        # What is written in another file system cannot be given a name among the records.
        assert os.stat(elsewhere).st_dev != os.stat(tmp_path).st_dev
        temporary = tmp_path / "records" / "tmp"
        taken = temporary.rename(tmp_path / "tmp")
        temporary.symlink_to(elsewhere)
        status, text = a.api("DELETE", "/v1/volumes/v?remove_data=true&discard_dirty=true")
        assert status != 200 and "delete it again" in text, text
        temporary.unlink()
        taken.rename(temporary)
        # From here on the group could be gone at any moment, with what is written.
        assert a.volume("v")["phase"] != "open"
        with pytest.raises(Exception):
            history.write(a, 1)
        assert f"dir:{tmp_path}/objects" in a.ok("volume", "delete", "v")
        for daemon in (a, b):
            daemon.until(lambda daemon=daemon: daemon.json("volume", "list") == [])
        a.until(lambda: not groups_left(tmp_path))


def test_group_stays_if_something_begins_to_depend_on_a_volume_while_its_deletion_flushes(tmp_path):
    credentials = tmp_path / "credentials"
    credentials.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    credentials.chmod(0o600)
    with LyingS3() as s3, nodes(tmp_path) as (a, b):
        url = s3.url(credentials)
        create((a, b), tmp_path, backend=url)
        history = History(104)
        history.write(a, 50)
        a.ok("volume", "snapshot", "v", "first")
        before = set(s3.objects)
        a.ok("volume", "clone", "v@first", "w", "--backend", url.replace("bucket/volume", "bucket/clone"))
        references = {name: s3.objects[name] for name in set(s3.objects) - before if "bucket/volume/" in name}
        assert len(references) == 1, references
        a.ok("volume", "delete", "w")
        a.ok("volume", "snapshot", "v", "first", "--delete")
        a.until(lambda: not set(references) & set(s3.objects))
        history.write(a, 50)
        asked, goes_on = threading.Event(), threading.Event()

        def waits(handler, name, body):
            asked.set()
            assert goes_on.wait(60)
            handler.put(name, body)
        with s3.lock:
            s3.lie, s3.told = ("put", waits), 0
        answers = []
        deletion = threading.Thread(target=lambda: answers.append(a.api("DELETE", "/v1/volumes/v?remove_data=true")))
        deletion.start()
        assert asked.wait(30)
        # Another node that shares the store makes a clone of it.
        with s3.lock:
            s3.objects.update(references)
        s3.tell("put", None)
        goes_on.set()
        deletion.join()
        status, text = answers[0]
        assert status == 409 and "it has clones" in text, text
        assert record(a)["members"] == ["a", "b"]
        history.write(a, 50)
        history.check(a)


def test_volume_over_objects_is_deleted_with_its_data_while_it_is_written(tmp_path):
    with nodes(tmp_path) as (a, b):
        create((a, b), tmp_path, backend=f"dir:{tmp_path}/objects")
        history = History(102)
        writer = threading.Thread(target=history.write_until_it_breaks, args=(a,))
        writer.start()
        a.until(lambda: history.writes > 200)
        began = time.monotonic()
        status, text = a.api("DELETE", "/v1/volumes/v?remove_data=true&discard_dirty=true")
        assert status == 200, text
        assert time.monotonic() - began < 20
        writer.join()
        for daemon in (a, b):
            daemon.until(lambda daemon=daemon: daemon.json("volume", "list") == [])
        a.until(lambda: not groups_left(tmp_path))
        assert not list((tmp_path / "objects").rglob("*/data/*"))
