"""Volumes with copies of their write logs on several nodes: each node a process of its own, over TCP."""

import signal
import threading
import time

import pytest
from daemon import freeze, refused
from group_cases import History, comes_back, create, goes_on_at, is_served, is_whole, nodes, record


def test_volume_goes_on_at_another_node_with_all_that_was_acknowledged(tmp_path):
    with nodes(tmp_path) as (a, b):
        create((a, b), tmp_path)
        history = History(1)
        history.write(a, 300)
        refused(b.cli("volume", "open", "v"), 1, "has a copy of its write log")
        writer = threading.Thread(target=history.write_until_it_breaks, args=(a,))
        writer.start()
        a.until(lambda: history.writes > 500)
        a.kill()
        writer.join()
        b.ok("volume", "takeover", "v")
        history.check(b)
        assert record(b)["primary"] == "b"
        history.write(b, 200)
        # The old primary comes back, is no primary any more, and is brought up.
        comes_back(a, b)
        refused(a.cli("volume", "open", "v"), 1, "has a copy of its write log")
        history.write(b, 200)
        goes_on_at(b, a, history)
        a.stop()


def test_primary_that_restarts_serves_again_by_itself(tmp_path):
    with nodes(tmp_path) as (a, b):
        create((a, b), tmp_path)
        history = History(2)
        history.write(a, 200)
        before = record(a)["epoch"]
        a.kill()
        a.start()
        is_served(a)
        history.check(a)
        assert record(a)["epoch"] == before + 1
        history.write(a, 100)
        is_whole(a, 2)
        history.check(a)


def test_member_that_is_lost_is_left_out_and_joins_when_it_is_back(tmp_path):
    with nodes(tmp_path, **{"cluster.member_deadline_ms": 500}) as (a, b):
        create((a, b), tmp_path)
        history = History(3)
        history.write(a, 100)
        b.kill()
        history.write(a, 200)
        assert record(a)["members"] == ["a"]
        comes_back(b, a)
        others = lambda: a.json("group", "show", "v")["here"]["others"]
        a.until(lambda: [(one["node"], one["state"]) for one in others()] == [("b", "in-step")])
        assert others()[0]["resync"] is None
        history.write(a, 100)
        goes_on_at(a, b, history)


def test_member_that_stops_in_order_holds_up_no_write(tmp_path):
    with nodes(tmp_path, **{"cluster.member_deadline_ms": 60_000}) as (a, b):
        create((a, b), tmp_path)
        history = History(19)
        history.write(a, 100)
        b.stop()
        began = time.monotonic()
        history.write(a, 100)
        assert time.monotonic() - began < 10
        assert record(a)["members"] == ["a"]
        comes_back(b, a)
        history.write(a, 50)
        goes_on_at(a, b, history)


def test_primary_that_stood_still_ends_its_clients_once_another_node_serves(tmp_path):
    with nodes(tmp_path) as (a, b):
        create((a, b), tmp_path)
        history = History(4)
        history.write(a, 100)
        # It has the image locked until it learns that it is no primary any more.
        freeze(a.process.pid)
        taking = threading.Thread(target=b.ok, args=("volume", "takeover", "v"))
        taking.start()
        b.until(lambda: record(b)["primary"] == "b")
        a.signal(signal.SIGCONT)
        taking.join()
        a.until(lambda: a.cli("volume", "open", "v").returncode != 0)
        history.write(b, 100)
        is_whole(b, 2)
        history.check(b)


def test_three_nodes_commit_by_majority_and_lose_none_of_it(tmp_path):
    with nodes(tmp_path, 3) as (a, b, c):
        create((a, b, c), tmp_path, ack="majority")
        history = History(5)
        history.write(a, 200)
        freeze(c.process.pid)
        history.write(a, 200)
        c.signal(signal.SIGCONT)
        a.kill()
        # It may be either: the longer log wins.
        c.ok("volume", "takeover", "v")
        history.check(c)
        history.write(c, 100)
        history.check(c)


def test_volume_with_copies_is_deleted_where_it_is_served_and_its_copies_go(tmp_path):
    with nodes(tmp_path) as (a, b):
        create((a, b), tmp_path)
        refused(b.cli("volume", "delete", "v", "--discard-dirty"), 1, "the volume is another node's")
        history = History(6)
        history.write(a, 50)
        a.ok("volume", "delete", "v", "--discard-dirty")
        assert a.json("group", "list") == []
        b.until(lambda: b.json("volume", "list") == [])
        assert not b.log_of("v").exists()
        a.stop()
        b.stop()


def test_writes_wait_while_too_few_members_are_there(tmp_path):
    with nodes(tmp_path, 3, **{"cluster.member_deadline_ms": 300}) as (a, b, c):
        create((a, b, c), tmp_path, ack="majority")
        history = History(7)
        history.write(a, 50)
        b.kill()
        c.kill()
        writer = threading.Thread(target=history.write, args=(a, 20))
        writer.start()
        a.until(lambda: record(a)["members"] == ["a"])
        writer.join(1)
        assert writer.is_alive(), "one copy of three is no majority"
        b.start()
        writer.join(30)
        assert not writer.is_alive()
        history.check(a)


@pytest.mark.parametrize("what", ["detach", "delete"])
def test_node_that_was_taken_over_removes_nothing_that_is_another_nodes(tmp_path, what):
    with nodes(tmp_path) as (a, b):
        create((a, b), tmp_path)
        history = History(11)
        history.write(a, 100)
        # It is asked while it still believes that the volume is its own.
        freeze(a.process.pid)
        ended = []
        asking = threading.Thread(
            target=lambda: ended.append(a.cli("volume", what, "v", "--discard-dirty")))
        asking.start()
        taking = threading.Thread(target=b.ok, args=("volume", "takeover", "v"))
        taking.start()
        b.until(lambda: record(b)["primary"] == "b")
        a.signal(signal.SIGCONT)
        asking.join()
        taking.join()
        refused(ended[0], 1, "volume v: ")
        history.write(b, 50)
        is_whole(b, 2)
        history.check(b)
