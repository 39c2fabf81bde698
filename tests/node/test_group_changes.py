"""Copies of a volume that come and go while it is written to: how many, where, and what writes need."""

import json
import signal
import threading
import time

import nbd
import pytest
from daemon import DIRTY, freeze, hdcs, refused
from encryption_cases import encrypted, key_file, marked, marks
from group_cases import (
    BLOCK, BLOCKS, SIZE, History, alone, comes_back, create, goes_on_at, groups_left, is_served, is_whole, nodes, record,
)


class Writer:
    """A client that stays connected while copies come and go, and whose writes must not fail."""

    def __init__(self, daemon, seed, name="v"):
        self.history = History(seed)
        self.failed = None
        self.ends = threading.Event()
        self.thread = threading.Thread(target=self.run, args=(daemon, name))
        self.thread.start()

    def run(self, daemon, name):
        history, client = self.history, daemon.nbd(name)
        try:
            while not self.ends.is_set():
                at = history.random.randrange(BLOCKS)
                history.writes += 1
                before = history.told.get(at, ({0}, None))
                history.told[at] = ({*before[0], history.writes}, before[1])
                client.pwrite(history.block(history.writes), at * BLOCK)
                history.told[at] = ({history.writes}, history.writes)
            client.shutdown()
        except nbd.Error as error:
            self.failed = error

    def goes_on(self, daemon, count=50):
        """Wait until it has written some more."""
        least = self.history.writes + count
        daemon.until(lambda: self.failed or self.history.writes > least)
        assert not self.failed, self.failed

    def end(self):
        self.ends.set()
        self.thread.join()
        assert not self.failed, self.failed
        return self.history


def change(daemon, *arguments, name="v"):
    return daemon.json("group", "set", name, *arguments)["record"]


def test_copies_come_and_go_under_load_and_each_that_is_there_can_take_over(tmp_path):
    with nodes(tmp_path, 3) as (a, b, c):
        create((a, b, c), tmp_path)
        writer = Writer(a, 11)
        for names in ("a,b", "a", "a,b", "a,b,c", "a,c"):
            found = change(a, "--nodes", names)
            assert found["replicas"] == len(names.split(","))
            is_whole(a, found["replicas"])
            assert record(a)["members"] == names.split(",")
            writer.goes_on(a)
        # Who was taken out has forgotten the volume by itself, also after a restart.
        b.until(lambda: b.json("volume", "list") == [])
        b.stop()
        b.start()
        assert b.json("volume", "list") == []
        history = writer.end()
        goes_on_at(a, c, history)
        assert record(c)["members"] == ["c"] and record(c)["joiners"] == ["a"]
        # The node that died is taken out while it is away, and lets go of its copy once it is back.
        change(c, "--nodes", "b,c")
        is_whole(c, 2)
        a.start()
        a.until(lambda: a.json("volume", "list") == [])
        history.write(c, 100)
        goes_on_at(c, b, history)


@pytest.mark.parametrize("before, after", [("one", "all"), ("all", "majority"), ("majority", "all")])
def test_level_is_changed_under_load_and_what_it_says_holds(tmp_path, before, after):
    with nodes(tmp_path, 3) as (a, b, c):
        create((a, b, c), tmp_path, ack=before)
        writer = Writer(a, 12)
        assert change(a, "--ack", after)["ack"] == after
        writer.goes_on(a)
        if after == "majority":
            # Those who answer are enough.
            freeze(c.process.pid)
            writer.goes_on(a)
        history = writer.end()
        a.kill()
        c.signal(signal.SIGCONT)
        b.ok("volume", "takeover", "v")
        history.check(b)


def test_primary_that_stood_still_leaves_out_nobody_when_it_goes_on(tmp_path):
    with nodes(tmp_path, 3, **{"cluster.member_deadline_ms": 1000}) as (a, b, c):
        create((a, b, c), tmp_path)
        writer = Writer(a, 15)
        for _ in range(3):
            # It is excused once it has not stood still for as long as it waits for others.
            time.sleep(1.5)
            writer.goes_on(a)
            before = record(a)["revision"]
            freeze(a.process.pid)
            # Twice as long as it waits for others.
            time.sleep(2)
            a.signal(signal.SIGCONT)
            writer.goes_on(a, 500)
            assert record(a)["revision"] == before
        history = writer.end()
        a.kill()
        b.ok("volume", "takeover", "v")
        history.check(b)


def test_member_that_is_away_is_no_hindrance_to_a_change(tmp_path):
    with nodes(tmp_path, 3, **{"cluster.member_deadline_ms": 500}) as (a, b, c):
        create((a, b, c), tmp_path)
        history = History(13)
        history.write(a, 50)
        b.kill()
        assert change(a, "--nodes", "a,c")["members"] == ["a", "c"]
        history.write(a, 50)
        goes_on_at(a, c, history)
        b.start()
        b.until(lambda: b.json("volume", "list") == [])


def test_node_that_was_taken_out_while_it_was_away_frees_its_copy_of_a_volume_that_is_gone_since(tmp_path):
    with nodes(tmp_path, 3, **{"cluster.member_deadline_ms": 500}) as (a, b, c):
        create((a, b, c), tmp_path)
        History(16).write(a, 50)
        b.kill()
        change(a, "--nodes", "a,c")
        a.ok("volume", "delete", "v", "--discard-dirty")
        c.until(lambda: c.json("volume", "list") == [])
        assert b.log_of("v").exists()
        # What was removed is remembered until it is back, and no longer.
        assert len(groups_left(tmp_path)) == 1 and a.json("group", "list") == []
        b.start()
        b.until(lambda: b.json("volume", "list") == [] and not groups_left(tmp_path))
        assert not b.log_of("v").exists()
        create((a, b, c), tmp_path)


def test_copy_that_takes_long_to_open_holds_up_no_other_group(tmp_path):
    key = tmp_path / "key"
    key.write_text("3" * 64)
    key.chmod(0o600)
    # While this is there, whoever needs the key waits, in the middle of opening a copy.
    held = tmp_path / "held"
    command = tmp_path / "command"
    command.write_text(f"#!/bin/sh\nwhile [ -e {held} ]; do sleep 0.05; done\ncat {key}\n")
    command.chmod(0o700)
    with nodes(tmp_path, 3, **{"cluster.member_deadline_ms": 500}) as (a, b, c):
        create((a, b, c), tmp_path, "--encrypt", "--key-command", command, name="slow", ack="majority")
        create((a, b, c), tmp_path, ack="majority")
        history = History(17)
        history.write(a, 50)
        b.stop()
        held.touch()
        b.spawn()
        is_whole(a, 3)
        a.kill()
        # It takes the promise of the one whose other copy is not open.
        c.ok("volume", "takeover", "v")
        assert "its keys: " not in b.log(), "it waits still"
        history.check(c)
        assert "b" not in record(c, "slow")["members"]
        held.unlink()
        b.ready()
        c.ok("volume", "takeover", "slow")


def test_copy_goes_only_once_the_one_that_takes_its_place_is_there(tmp_path):
    with nodes(tmp_path, 3, **{"cluster.member_deadline_ms": 500}) as (a, b, c):
        create((a, b, c), tmp_path)
        change(a, "--nodes", "a,b")
        is_whole(a, 2)
        history = History(18)
        history.write(a, 100)
        c.stop()
        found = change(a, "--nodes", "a,c")
        assert (found["members"], found["joiners"]) == (["a", "b"], ["c"])
        history.write(a, 50)
        c.start()
        a.until(lambda: record(a)["members"] == ["a", "c"])
        b.until(lambda: b.json("volume", "list") == [])
        goes_on_at(a, c, history)


def test_volume_whose_log_has_not_all_its_space_yet_gets_copies(tmp_path):
    with nodes(tmp_path) as (a, b):
        alone(a, tmp_path, "--log-size", "1G")
        history = History(19)
        history.write(a, 50)
        change(a, "--replicas", "2", "--nodes", "a,b")
        is_whole(a, 2)
        goes_on_at(a, b, history)


def test_volume_that_was_detached_and_is_moved_back_gets_a_group_of_its_own(tmp_path):
    with nodes(tmp_path) as (a, b):
        create((a, b), tmp_path)
        history = History(20)
        history.write(a, 50)
        a.kill()
        b.ok("volume", "takeover", "v")
        comes_back(a, b)
        a.ok("volume", "takeover", "v")
        is_whole(a, 2)
        a.ok("volume", "detach", "v")
        b.until(lambda: b.json("volume", "list") == [])
        a.stop()
        left = next((a.data / "detached").iterdir())
        left.rename(a.data / "volumes/v")
        a.start()
        history.write(a, 50)
        opened = openings(a)
        change(a, "--replicas", "2", "--nodes", "a,b")
        # What nodes of the last group may have written since, with openings that this one knows nothing of, stays older.
        assert openings(a) > opened + (1 << 32)
        is_whole(a, 2)
        goes_on_at(a, b, history)


def openings(daemon):
    """How often the log of a volume was opened, as it says."""
    done = hdcs("inspect", daemon.log_of("v"), "--json")
    return max(one["incarnation"] for one in json.loads(done.stdout)["log"]["superblocks"])


def test_change_that_cannot_be_is_refused(tmp_path):
    with nodes(tmp_path) as (a, b):
        create((a, b), tmp_path)
        before = record(a)
        for arguments, code, part in [
            ((), 2, "nothing is to change"),
            (("--replicas", "4"), 2, "1..=3"),
            (("--replicas", "0"), 2, "1..=3"),
            (("--replicas", "3"), 2, "on which nodes"),
            (("--nodes", "a,d"), 2, "there is no node d"),
            (("--nodes", "b"), 2, "take it over first"),
            (("--copies-min", "3"), 2, "from 1 to the number of replicas"),
        ]:
            refused(a.cli("group", "set", "v", *arguments), code, part)
        refused(b.cli("group", "set", "v", "--ack", "one"), 1, "node a serves it", "ask that one")
        refused(a.cli("group", "set", "w", "--ack", "one"), 1, "volume w")
        assert record(a) == before


def test_volume_of_one_node_gets_copies_while_its_client_goes_on(tmp_path):
    with nodes(tmp_path) as (a, b):
        alone(a, tmp_path)
        for arguments, part in [
            (("--ack", "one"), "on this node alone"),
            (("--replicas", "1"), "on this node alone"),
            (("--nodes", "a,d"), "there is no node d"),
            (("--nodes", "b"), "on this node alone"),
            (("--replicas", "2", "--nodes", "b,b"), "the first of its nodes"),
        ]:
            refused(a.cli("group", "set", "v", *arguments), 2, part)
        writer = Writer(a, 15)
        writer.goes_on(a)
        assert change(a, "--replicas", "2", "--nodes", "b,a")["primary"] == "a"
        is_whole(a, 2)
        writer.goes_on(a)
        history = writer.end()
        goes_on_at(a, b, history)
        comes_back(a, b)
        change(b, "--replicas", "1")
        a.until(lambda: a.json("volume", "list") == [])
        history.check(b)


@pytest.mark.parametrize("compression", ["off", "lz4"])
def test_encrypted_volume_of_one_node_gets_copies_while_its_client_goes_on(tmp_path, compression):
    with nodes(tmp_path) as (a, b):
        alone(a, tmp_path, *encrypted(key_file(tmp_path)), "--set", f"compression={compression}")
        data = marked(1 << 20, 3)
        a.write("v", data)
        writer = Writer(a, 24)
        writer.goes_on(a)
        change(a, "--replicas", "2", "--nodes", "a,b")
        is_whole(a, 2)
        writer.goes_on(a)
        history = writer.end()
        assert [marks(daemon.log_of("v")) for daemon in (a, b)] == [0, 0]
        goes_on_at(a, b, history)
        found = b.read("v", len(data))
        for at in set(range(0, len(data), BLOCK)) - {at * BLOCK for at in history.told}:
            assert found[at : at + BLOCK] == data[at : at + BLOCK]
        comes_back(a, b)
        history.write(b, 100)
        goes_on_at(b, a, history)


@pytest.mark.parametrize("pause_ms", [5, 20, 60, 120, 250, 500])
def test_crash_while_a_volume_gets_a_group_leaves_one_that_opens(tmp_path, pause_ms):
    with nodes(tmp_path) as (a, b):
        alone(a, tmp_path)
        history = History(pause_ms)
        history.write(a, 100)
        asking = threading.Thread(target=a.cli, args=("group", "set", "v", "--nodes", "a,b"))
        asking.start()
        time.sleep(pause_ms / 1000)
        a.kill()
        asking.join()
        a.start()
        is_served(a)
        history.check(a)
        history.write(a, 50)
        if a.cli("group", "show", "v").returncode != 0:
            a.ok("group", "set", "v", "--nodes", "a,b")
        is_whole(a, 2)
        is_served(a)
        history.write(a, 50)
        goes_on_at(a, b, history)


def test_group_that_cannot_be_written_leaves_the_volume_as_it_was_and_its_client_goes_on(tmp_path):
    with nodes(tmp_path) as (a, b):
        alone(a, tmp_path)
        writer = Writer(a, 16)
        writer.goes_on(a)
        # Nothing can be given its name there.
        made = tmp_path / "records" / "tmp"
        made.rename(tmp_path / "aside")
        made.write_text("")
        refused(a.cli("group", "set", "v", "--nodes", "a,b"), 1, "records of groups")
        writer.goes_on(a)
        history = writer.end()
        a.kill()
        made.unlink()
        (tmp_path / "aside").rename(made)
        a.start()
        is_served(a)
        history.check(a)
        change(a, "--nodes", "a,b")
        is_whole(a, 2)
        history.check(a)


def test_group_whose_volume_says_nothing_of_it_is_finished_after_a_crash(tmp_path):
    with nodes(tmp_path) as (a, b):
        alone(a, tmp_path)
        history = History(17)
        history.write(a, 50)
        b.stop()
        entry = a.data / "volumes" / "v" / "volume.json"
        before = entry.read_bytes()
        change(a, "--nodes", "a,b")
        history.write(a, 50)
        a.kill()
        # As a crash leaves it that came before the last step.
        entry.write_bytes(before)
        a.start()
        a.tells("it was about to get a group")
        is_served(a)
        history.check(a)
        history.write(a, 50)
        comes_back(b, a)
        goes_on_at(a, b, history)


def test_writes_fail_for_want_of_members_if_that_is_wanted_and_go_on_with_them(tmp_path):
    with nodes(tmp_path, **{"cluster.member_deadline_ms": 300}) as (a, b):
        create((a, b), tmp_path)
        found = change(a, "--copies-min", "2", "--when-short", "error")
        assert (found["copies_min"], found["when_short"], found["short"]) == (2, "error", False)
        history = History(14)
        history.write(a, 50)
        b.kill()
        client = a.nbd("v")
        with pytest.raises(nbd.Error) as error:
            for number in range(100):
                client.pwrite(history.block(0), number * BLOCK)
        assert error.value.errno == "EIO"
        a.until(lambda: record(a)["short"])
        with pytest.raises(nbd.Error):
            client.pwrite(history.block(0), 0)
        # What is there is read, by the same client.
        client.pread(BLOCK, (BLOCKS - 1) * BLOCK)
        comes_back(b, a)
        a.until(lambda: writes(client, history))
        assert not record(a)["short"]
        # Fewer are enough, if that is said.
        change(a, "--copies-min", "1")
        b.kill()
        client.pwrite(history.block(2), BLOCK)
        client.shutdown()


def test_new_volume_whose_writes_fail_for_want_of_members_is_there_once_they_have_joined(tmp_path):
    with nodes(tmp_path) as (a, b):
        arguments = ["--replicas", "2", "--nodes", "a,b", "--copies-min", "2", "--when-short", "error"]
        for number in range(5):
            name = f"v{number}"
            a.create(name, "--backend", f"file:{tmp_path}/{name}.img", *arguments, *DIRTY, size=SIZE)
            assert not record(a, name)["short"]
            history = History(number)
            history.write(a, 20, name)
            history.check(a, name)
        b.kill()


def writes(client, history):
    try:
        client.pwrite(history.block(1), 0)
    except nbd.Error:
        return False
    return True
