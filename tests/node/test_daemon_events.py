"""`hdcs events`: what was done and refused, by whom and why; kept over a restart, bounded whatever clients do."""

import json
import os
import socket
import subprocess

import pytest

from daemon import Daemon
from programs import HDCS


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("events")) as daemon:
        yield daemon


def events(daemon, *arguments):
    return daemon.json("events", *arguments)


def one(daemon, condition):
    """The event for which the condition holds; it is written beside the answer to the request."""
    found = []

    def is_there():
        found[:] = [event for event in events(daemon) if condition(event)]
        return bool(found)

    daemon.until(is_there)
    return found[-1]


def test_changes_say_who_and_what(daemon):
    daemon.create("v")
    daemon.ok("volume", "set", "v", "destage_age_max_ms=5000")
    created = one(daemon, lambda e: e["kind"] == "create" and e.get("volume") == "v")
    assert created["outcome"] == "done"
    assert created["who"].startswith(f"uid {os.getuid()}, pid ")
    assert json.loads(created["what"])["bytes"] == 16 << 20
    changed = one(daemon, lambda e: e["kind"] == "set")
    assert json.loads(changed["what"]) == {"settings": {"destage_age_max_ms": 5000}}
    assert changed["number"] > created["number"]


def test_refusals_say_why(daemon):
    done = daemon.cli("volume", "delete", "none")
    assert done.returncode == 1
    event = one(daemon, lambda e: e["kind"] == "delete" and e.get("volume") == "none")
    assert event["outcome"] == "refused" and "no volume none" in event["why"]
    assert daemon.api("POST", "/v1/volumes", '{"name": "x", "bytes": 7}')[0] == 422
    event = one(daemon, lambda e: e.get("volume") == "x")
    assert event["outcome"] == "refused" and "multiple of 512" in event["why"]


def test_a_key_is_no_part_of_an_event(daemon, tmp_path):
    key = tmp_path / "key"
    key.write_text("5e" * 32)
    daemon.create("secret", "--encrypt", "--key-file", key)
    event = one(daemon, lambda e: e.get("volume") == "secret" and e["kind"] == "create")
    assert str(key) in event["what"]
    assert b"5e5e5e" not in (daemon.data / "events.jsonl").read_bytes()


def test_events_of_one_volume_in_order_and_for_people(daemon):
    for name in ("first", "second"):
        daemon.create(name)
        daemon.ok("volume", "delete", name)
    one(daemon, lambda e: e["kind"] == "delete" and e.get("volume") == "second")
    of_first = events(daemon, "first")
    assert {event["volume"] for event in of_first} == {"first"}
    numbers = [event["number"] for event in of_first]
    assert numbers == sorted(numbers)
    line = daemon.ok("events", "--limit", "1").splitlines()
    assert len(line) == 1 and "by " in line[0]
    status, text = daemon.api("GET", "/v1/events?afer=1")
    assert status == 400 and "afer" in text


def test_changes_of_state_are_events(tmp_path):
    with Daemon(tmp_path) as daemon:
        daemon.create("v")
        daemon.kill()
        log = daemon.log_of("v")
        log.rename(log.with_suffix(".away"))
        daemon.start()
        event = one(daemon, lambda e: e["kind"] == "state" and e["what"].endswith("error"))
        assert event["volume"] == "v" and "write log is lost" in event["why"]


def test_events_survive_a_restart_and_a_flood_is_counted(tmp_path):
    with Daemon(tmp_path) as daemon:
        daemon.create("v")
        one(daemon, lambda e: e["kind"] == "create")
        daemon.kill()
        daemon.start()
        before = one(daemon, lambda e: e["kind"] == "create")
        assert before["volume"] == "v"
        for number in range(3000):
            assert daemon.api("DELETE", f"/v1/volumes/none{number}")[0] == 404
        daemon.stop()
        daemon.start()
        # Each of them was kept or counted.
        found = events(daemon, "--limit", "4096")
        kept = [event for event in found if event["kind"] == "delete"]
        dropped = [event for event in found if event["kind"] == "events-dropped"]
        assert dropped and len(kept) < 1000
        assert sum(event.get("count", 1) for event in kept + dropped) >= 3000
        sizes = [(daemon.data / name).stat().st_size for name in os.listdir(daemon.data) if name.startswith("events")]
        assert sum(sizes) <= 4 << 20


def test_starts_and_stops_say_how_the_run_before_ended(tmp_path):
    def started(daemon):
        return [event for event in events(daemon) if event["kind"] == "start"]

    with Daemon(tmp_path) as daemon:
        daemon.until(lambda: started(daemon))
        assert "why" not in started(daemon)[0]
        daemon.stop()
        daemon.start()
        daemon.until(lambda: len(started(daemon)) == 2)
        assert started(daemon)[1]["why"].startswith("the last run stopped cleanly at ")
        stopped = one(daemon, lambda e: e["kind"] == "stop")
        assert (stopped["outcome"], stopped["who"]) == ("done", "signal SIGTERM")
        daemon.kill()
        daemon.start()
        daemon.until(lambda: len(started(daemon)) == 3)
        assert started(daemon)[2]["why"].endswith("did not stop: it was killed or the machine failed")
        daemon.stop()
        # A start that is refused is an event, too, and no run.
        kept = daemon.config
        with socket.create_server(("127.0.0.1", 0)) as other:
            daemon.config = {**kept, "metrics_listen": f"127.0.0.1:{other.getsockname()[1]}"}
            daemon.refuses(1, "metrics_listen")
        daemon.config = kept
        daemon.start()
        daemon.until(lambda: len(started(daemon)) == 5)
        failed, after = started(daemon)[3:]
        assert failed["outcome"] == "failed" and "another program has it" in failed["why"]
        assert after["why"].startswith("the last run stopped cleanly at ")


def test_events_are_followed(daemon):
    follow = subprocess.Popen(
        [HDCS, "--data", str(daemon.data), "events", "--follow", "--json", "--limit", "1"],
        stdout=subprocess.PIPE, text=True,
    )
    try:
        json.loads(follow.stdout.readline())
        daemon.create("later")
        while json.loads(follow.stdout.readline()).get("volume") != "later":
            pass
    finally:
        follow.kill()
        follow.wait()
        follow.stdout.close()
