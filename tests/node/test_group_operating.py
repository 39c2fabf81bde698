"""What operators of groups are told: what a takeover waits for, what is wrong, and what is refused."""

import json
import shutil
import threading
import time
import uuid
from contextlib import contextmanager

from daemon import DIRTY, Daemon, freeze, refused
from group_cases import (
    BLOCK, SIZE, History, alone, comes_back, create, free_ports, goes_on_at, groups_left, is_served, is_whole,
    nodes, record,
)


@contextmanager
def asked(daemon, *command):
    """A command that goes on meanwhile; how it ended is in the list afterwards."""
    ended = []
    asking = threading.Thread(target=lambda: ended.append(daemon.cli(*command)))
    asking.start()
    yield ended
    asking.join()


def here(daemon, name="v"):
    return daemon.json("group", "show", name)["here"]


def takeover(daemon, name="v"):
    return (here(daemon, name) or {}).get("takeover")


def test_takeover_says_on_standard_error_what_it_waits_for(tmp_path):
    with nodes(tmp_path, **{"cluster.lease_ms": 5_000}) as (a, b):
        create((a, b), tmp_path)
        history = History(1)
        history.write(a, 50)
        a.kill()
        with asked(b, "volume", "takeover", "v", "--json") as ended:
            b.until(lambda: takeover(b) and takeover(b)["waits"] == "lease")
            found = takeover(b)
            assert (found["promised"], found["silent"], found["promises_needed"]) == (["b"], ["a"], 1)
            assert 0 < found["lease_ms"] < 6_100
        assert ended[0].returncode == 0, ended[0].stderr
        # Nothing else is on standard output.
        assert json.loads(ended[0].stdout)["record"]["primary"] == "b"
        lines = [line for line in ended[0].stderr.splitlines() if "may answer no reads any more" in line]
        assert len(lines) >= 2, ended[0].stderr
        assert lines[0].startswith("volume v: ") and lines[0].endswith("; a has not answered")
        assert takeover(b) is None
        history.check(b)


def test_takeover_of_a_group_that_is_removed_ends_at_once(tmp_path):
    with nodes(tmp_path) as (a, b):
        create((a, b), tmp_path, ack="one")
        a.kill()
        began = time.monotonic()
        with asked(b, "volume", "takeover", "v") as ended:
            b.until(lambda: takeover(b) and takeover(b)["waits"] == "promises")
            assert takeover(b)["silent"] == ["a"]
            # It is said once a second.
            time.sleep(2)
            b.ok("volume", "delete", "v", "--discard-dirty")
        refused(ended[0], 1, "volume v: its group was removed", str(tmp_path / "records"))
        assert "waiting for promises: 1 of 2 (b); a has not answered" in ended[0].stderr
        assert time.monotonic() - began < 30
        assert b.json("volume", "list") == []


def test_takeover_whose_record_has_gone_ends_and_says_where_it_was_looked_for(tmp_path):
    with nodes(tmp_path) as (a, b):
        create((a, b), tmp_path, ack="one")
        a.kill()
        began = time.monotonic()
        with asked(b, "volume", "takeover", "v") as ended:
            b.until(lambda: takeover(b) and takeover(b)["waits"] == "promises")
            (group,) = groups_left(tmp_path)
            shutil.rmtree(group)
        refused(ended[0], 1, "no record of its group is in", str(tmp_path / "records"))
        assert time.monotonic() - began < 30
        # That is no reason to give up a copy.
        assert b.volume("v")["state"] == "error"
        assert b.log_of("v").exists()


def test_records_that_are_away_while_a_member_dies_are_blamed_and_not_the_log(tmp_path):
    with nodes(tmp_path, **{"cluster.member_deadline_ms": 500}) as (a, b):
        create((a, b), tmp_path, "--set", "log_answer_max_ms=1000")
        history = History(2)
        history.write(a, 50)
        records = tmp_path / "records"
        away = records.rename(tmp_path / "away")
        # As where something is to be mounted.
        records.mkdir()
        b.kill()
        client = a.nbd("v")
        write = client.aio_pwrite(bytes(BLOCK), 0)
        history.told.pop(0, None)

        def reason():
            return a.volume("v")["reason"] or ""
        a.until(lambda: "node b has not confirmed what was written, and cannot be left out" in reason())
        for part in (str(records), "mount it again", "writes and flushes wait"):
            assert part in reason(), reason()
        assert "device" not in reason()
        problems = {one["part"]: one["reason"] for one in a.json("status")["problems"]}
        assert str(records) in problems["records of groups"]
        # Who has copies has had records: it makes no other cluster's of what is empty.
        b.refuses(2, str(records), "mount it again")
        assert list(records.iterdir()) == []
        records.rmdir()
        away.rename(records)
        while not client.aio_command_completed(write):
            client.poll(-1)
        client.shutdown()
        a.until(lambda: record(a)["members"] == ["a"])
        comes_back(b, a)
        a.until(lambda: a.volume("v")["state"] == "healthy" and a.json("status")["problems"] == [])
        history.check(a)


def test_copy_that_is_being_opened_is_in_no_error(tmp_path):
    with nodes(tmp_path) as (a, b):
        create((a, b), tmp_path)
        b.stop()
        b.spawn()
        seen = []

        def stands_by():
            shown = b.cli("volume", "show", "v", "--json")
            if shown.returncode == 0:
                seen.append(json.loads(shown.stdout)["state"])
            return seen[-1:] == ["standby"] and here(b)
        b.until(stands_by)
        b.ready()
        assert set(seen) == {"standby"}


def test_name_is_given_once_in_a_cluster(tmp_path):
    with nodes(tmp_path, 3) as (a, b, c):
        a.create("v", "--backend", f"file:{tmp_path}/v.img", "--replicas", 2, "--nodes", "a,b", *DIRTY, size=SIZE)
        is_whole(a, 2)
        another = ("volume", "create", "v", "--size", SIZE)
        refused(c.cli(*another), 1, "volume v: another volume of the cluster has this name, with copies on a, b")
        refused(c.cli(*another, "--backend", f"file:{tmp_path}/w.img", "--replicas", 2, "--nodes", "c,b"), 1,
                "another volume of the cluster has this name")
        assert c.json("volume", "list") == []
        c.create("w", size=SIZE)
        # What a node had before under a name keeps it from having a copy.
        a.create("w", "--backend", f"file:{tmp_path}/w.img", "--replicas", 2, "--nodes", "a,c", *DIRTY, size=SIZE)
        c.until(lambda: "another volume of the name w" in (c.json("group", "show", "w")["trouble"] or ""))
        # Whether a name is free is not to be seen without the records.
        away = (tmp_path / "records").rename(tmp_path / "away")
        refused(c.cli("volume", "create", "x", "--size", SIZE), 1, "volume x: whether another volume", str(tmp_path / "records"))
        away.rename(tmp_path / "records")
        a.ok("volume", "delete", "v", "--discard-dirty")
        b.until(lambda: b.json("volume", "list") == [])
        c.create("v", size=SIZE)


def test_answer_of_a_change_says_with_how_many_copies_writes_go_on_and_why(tmp_path):
    with nodes(tmp_path, 3) as (a, b, c):
        alone(a, tmp_path)
        told = a.ok("group", "set", "v", "--nodes", "a,b,c")
        assert "writes go on while one member is left (--copies-min was left out: 1" in told
        is_whole(a, 3)
        told = a.ok("group", "set", "v", "--ack", "majority")
        assert "writes go on while one member is left (--copies-min is as it was)" in told
        assert "once others were left out, 1 is enough; to have writes wait for 2, give --copies-min 2" in told
        told = a.ok("group", "set", "v", "--copies-min", "3")
        assert "with fewer than 3 members writes wait\n" in told
        told = a.ok("group", "set", "v", "--nodes", "a,b")
        assert "with fewer than 2 members writes wait (--copies-min was 3, and cannot be more than the copies)" in told


def test_node_of_another_cluster_touches_no_records(tmp_path):
    with nodes(tmp_path) as (a, b):
        other = tmp_path / "other"
        other.mkdir()
        port = free_ports(1)[0]
        second = Daemon(other, {**a.config, "cluster.id": str(uuid.UUID(int=8)), "cluster.listen": f"127.0.0.1:{port}"})
        second.refuses(2, f"the records are those of cluster {uuid.UUID(int=9)}")
        third = Daemon(other, {**second.config, "cluster.nodes.a.number": 7})
        before = sorted((tmp_path / "records").iterdir())
        third.refuses(2, f"the records are those of cluster {uuid.UUID(int=9)}")
        assert sorted((tmp_path / "records").iterdir()) == before


def test_who_joins_and_leaves_and_what_is_connected_is_said(tmp_path):
    with nodes(tmp_path, **{"cluster.member_deadline_ms": 500}) as (a, b):
        cluster = a.status()["cluster"]
        assert (cluster["node"], cluster["number"], cluster["others"]) == ("a", 1, ["b"])
        assert (cluster["records"], cluster["records_trouble"]) == (str(tmp_path / "records"), None)
        create((a, b), tmp_path)
        a.tells("node b joins: its copy was brought up")
        a.until(lambda: a.status()["cluster"]["connected"] == ["b"])
        b.until(lambda: b.status()["cluster"]["connected"] == ["a"])
        told = a.ok("status")
        assert "node a, number 1, of" in told and "connected with b, of 1 others; records in" in told
        history = History(6)
        b.stop()
        history.write(a, 20)
        a.tells("node b leaves: it stops")
        assert a.status()["cluster"]["connected"] == []
        comes_back(b, a)
        b.kill()
        history.write(a, 20)
        a.tells("node b leaves: it is not reached")
        comes_back(b, a)
        freeze(b.process.pid)
        history.write(a, 20)
        a.tells("node b leaves: it has not confirmed in time")


def test_member_says_that_nothing_comes_from_the_primary(tmp_path):
    with nodes(tmp_path) as (a, b):
        create((a, b), tmp_path)
        assert here(b)["silent_ms"] < 5_000 and here(a)["silent_ms"] is None
        assert "nothing has come" not in b.volume("v")["reason"]
        a.kill()
        b.until(lambda: "nothing has come from its primary, a, for " in b.volume("v")["reason"])
        assert here(b)["silent_ms"] >= 5_000
        assert "heard from the primary" in b.ok("group", "show", "v")
        assert b.volume("v")["state"] == "standby"


def test_second_node_of_one_identity_does_not_start_while_the_first_one_runs(tmp_path):
    with nodes(tmp_path) as (a, b):
        create((a, b), tmp_path)
        twin = tmp_path / "twin"
        twin.mkdir()
        # Its address is its own, as after a move to another host.
        second = Daemon(twin, {**a.config, "cluster.listen": f"127.0.0.1:{free_ports(1)[0]}"})
        second.refuses(2, "node 1 runs already: node a, process", str(a.data), "a `number` and an `id` of its own")
        assert record(a)["primary"] == "a"
        a.kill()
        a.start()
        is_served(a)


def test_volume_that_waits_for_copies_says_so_when_it_is_to_go(tmp_path):
    with nodes(tmp_path, **{"cluster.member_deadline_ms": 300}) as (a, b):
        create((a, b), tmp_path)
        a.ok("group", "set", "v", "--copies-min", "2")
        history = History(3)
        history.write(a, 50)
        b.kill()
        client = a.nbd("v")
        client.aio_pwrite(bytes(BLOCK), 0)
        a.until(lambda: a.volume("v")["state"] == "read-only")
        found = a.cli("volume", "detach", "v")
        refused(found, 1, "fewer nodes have a copy of its write log than writes need", "--copies-min")
        assert "backend" not in found.stderr and "device" not in found.stderr
        found = a.cli("volume", "resize", "v", "--size", "8M", "--shrink")
        refused(found, 1, "fewer nodes have a copy of its write log than writes need")
        assert "backend" not in found.stderr


def test_volume_with_fewer_copies_than_there_should_be_is_resized_while_it_is_destaged(tmp_path):
    destaged = ["--persist", "on-write", "--set", "destage_age_max_ms=1"]
    with nodes(tmp_path, **{"cluster.member_deadline_ms": 300}) as (a, b):
        create((a, b), tmp_path, backend=f"dir:{tmp_path}/objects", dirty=destaged)
        b.kill()
        a.until(lambda: a.volume("v")["state"] == "degraded" and record(a)["members"] == ["a"])
        history, ends = History(5), threading.Event()

        def writes():
            while not ends.is_set():
                history.write(a, 50)
        writer = threading.Thread(target=writes)
        writer.start()
        try:
            for size in range(17, 27):
                a.ok("volume", "resize", "v", "--size", f"{size}M")
        finally:
            ends.set()
            writer.join()
        history.check(a)


def test_copy_that_is_left_of_a_group_is_made_a_volume_by_hand(tmp_path):
    with nodes(tmp_path, 3, **{"cluster.member_deadline_ms": 60_000}) as (a, b, c):
        create((a, b, c), tmp_path, ack="majority")
        history = History(4)
        history.write(a, 200)
        goes_on_at(a, b, history)
        comes_back(a, b, 3)
        history.write(b, 200)
        # Each write was waited for, so each is a span of two blocks. What a node says of itself may be a moment old.
        c.until(lambda: here(c)["durable_blocks"] == 2 * history.writes)
        a.kill()
        b.kill()
        with asked(c, "volume", "takeover", "v") as ended:
            c.until(lambda: takeover(c) and takeover(c)["waits"] == "promises")
            c.ok("volume", "detach", "v", "--discard-dirty")
        refused(ended[0], 1, "its group was removed")
        c.stop()
        left = next((c.data / "detached").iterdir())
        left.rename(c.data / "volumes/v")
        c.start()
        history.check(c)
        # And the others, once they are back, have nothing of it.
        a.start()
        a.until(lambda: a.json("volume", "list") == [])
        history.write(c, 50)
        history.check(c)
