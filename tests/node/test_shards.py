"""Several threads of the data path: which has which volume, what is said of each, and what a start with another number finds."""

import json
import os
import random
import signal
import threading

import pytest

from daemon import DIRTY, Daemon, hdcs, refused, samples
from programs import MIB

SHARDS = 3
# One socket for each shard: they listen in turn.
SOCKETS = [f"unix:nbd{number}.sock" for number in range(SHARDS)]
CONFIG = {"shards": SHARDS, "nbd_listen": SOCKETS, "memory_max_mib": 512}


class Node(Daemon):
    """A node with several shards, and a socket for each."""

    def __init__(self, home, **config):
        super().__init__(home, {**CONFIG, **config})

    def uri(self, name=""):
        """The socket of the shard that has the volume."""
        shard = (self.volume(name)["shard"] or 0) if name else 0
        return f"nbd+unix:///{name}?socket={self.data / f'nbd{shard}.sock'}"

    def shards(self):
        return self.json("status")["shards"]

    def metrics(self):
        status, page = self.api("GET", "/metrics")
        assert status == 200
        return samples(page)

    def threads(self):
        tasks = f"/proc/{self.process.pid}/task"
        names = [open(f"{tasks}/{task}/comm").read().strip() for task in os.listdir(tasks)]
        return sorted(name for name in names if name.startswith("hdcs-shard"))


def made(node, count=SHARDS, *arguments):
    """New volumes, which are spread over the shards."""
    names = [node.new_volume("16M", *arguments) for _ in range(count)]
    of = [node.volume(name)["shard"] for name in names]
    assert sorted(of) == sorted(number % SHARDS for number in range(count))
    return names


def content(name, size=4 * MIB):
    return random.Random(name).randbytes(size)


def at_once(work, names):
    """Do something with each volume, all at the same time."""
    failures = []

    def run(name):
        try:
            work(name)
        except Exception as error:  # noqa: BLE001 whatever it is, the test has failed
            failures.append((name, error))

    threads = [threading.Thread(target=run, args=[name]) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_volumes_are_spread_and_listed_with_their_shards(tmp_path):
    with Node(tmp_path) as node:
        names = made(node, 6)
        assert node.threads() == [f"hdcs-shard-{number}" for number in range(SHARDS)]
        listed = {volume["name"]: volume["shard"] for volume in node.json("volume", "list")}
        assert sorted(listed.values()) == [0, 0, 1, 1, 2, 2]
        table = node.ok("volume", "list").splitlines()
        assert "SHARD" in table[0]
        for name in names:
            shown = [line.split() for line in node.ok("volume", "show", name).splitlines()]
            assert ["shard", str(listed[name])] in shown
        shards = node.shards()
        assert [shard["number"] for shard in shards] == [0, 1, 2]
        assert [shard["volumes"] for shard in shards] == [2, 2, 2]
        top = node.ok("top", "--interval", "0.1").splitlines()
        rows = {row[0]: row[2] for row in (line.split() for line in top[1:])}
        assert rows == {"VOLUME": "SHARD", **{name: str(listed[name]) for name in names}}
        text = node.ok("status")
        assert all(f"shard {number}" in text for number in range(SHARDS))
        found = node.metrics()
        assert {name: found[f'hdcs_volume_shard{{volume="{name}"}}'] for name in names} == listed
        for number in range(SHARDS):
            assert found[f'hdcs_shard_up{{shard="{number}"}}'] == 1
            assert found[f'hdcs_shard_volumes{{shard="{number}"}}'] == 2
            assert found[f'hdcs_shard_turns_total{{shard="{number}"}}'] > 0
        node.ok("volume", "delete", names[0])
        assert node.volume(node.new_volume())["shard"] == listed[names[0]], "where one is free"
        node.stop()


def test_one_shard_is_as_it_was(tmp_path):
    with Daemon(tmp_path) as daemon:
        daemon.create("v")
        assert daemon.volume("v")["shard"] is None
        assert "SHARD" not in daemon.ok("volume", "list") + daemon.ok("top", "--interval", "0.1")
        assert samples(daemon.api("GET", "/metrics")[1])['hdcs_volume_shard{volume="v"}'] == 0
        assert len(daemon.json("status")["shards"]) == 1


def test_volumes_on_all_shards_are_written_at_once_and_survive_kill(tmp_path):
    with Node(tmp_path) as node:
        names = made(node, SHARDS, *DIRTY)
        at_once(lambda name: node.write(name, content(name)), names)
        found = node.metrics()
        for name in names:
            assert node.read(name, 4 * MIB) == content(name)
            assert found[f'hdcs_volume_client_bytes_total{{volume="{name}",op="write"}}'] == 4 * MIB
        assert node.json("status")["dirty_bytes"] == SHARDS * 4 * MIB
        assert all(shard["replies"] > 0 for shard in node.shards())
        node.kill()
        # Another number of shards finds the same volumes.
        for shards in [1, 2, SHARDS]:
            node.config.update({"shards": shards, "nbd_listen": SOCKETS[:shards]})
            node.start()
            for name in names:
                assert node.read(name, 4 * MIB) == content(name)
            node.kill()


def test_volumes_that_change_shards_at_each_start_are_never_stale(tmp_path):
    """Whatever DRAM tiers and the SSD tier keep, what was written last is what is read."""
    with Node(tmp_path, cache_total_size_mib=64) as node:
        names = made(node)
        for turn in range(4):
            data = {name: content(f"{name} {turn}") for name in names}
            at_once(lambda name: node.write(name, data[name]), names)
            for name in names:
                node.ok("volume", "flush", name)
                assert node.read(name, 4 * MIB) == data[name]
                node.ok("volume", "promote", name)
            node.stop() if turn % 2 else node.kill()
            shards = [1, 3, 2, 3][turn]
            node.config.update({"shards": shards, "nbd_listen": SOCKETS[:shards]})
            node.start()
            for name in names:
                assert node.read(name, 4 * MIB) == data[name]


def test_stop_with_destage_empties_the_logs_of_all_shards(tmp_path):
    with Node(tmp_path, destage_on_stop=True) as node:
        names = made(node, SHARDS, *DIRTY)
        at_once(lambda name: node.write(name, content(name)), names)
        images = {name: node.volume(name)["backend"].removeprefix("file:") for name in names}
        node.stop()
        for name, image in images.items():
            with open(image, "rb") as file:
                assert file.read(4 * MIB) == content(name)
        node.start()
        assert node.json("status")["dirty_bytes"] == 0


def test_stop_without_destage_keeps_the_logs_of_all_shards(tmp_path):
    with Node(tmp_path) as node:
        names = made(node, SHARDS, *DIRTY)
        at_once(lambda name: node.write(name, content(name)), names)
        node.stop()
        node.start()
        assert node.json("status")["dirty_bytes"] == SHARDS * 4 * MIB
        for name in names:
            assert node.read(name, 4 * MIB) == content(name)


def test_new_volume_finds_nothing_of_one_that_was_deleted(tmp_path):
    with Node(tmp_path, cache_total_size_mib=64) as node:
        names = made(node)
        for turn in range(3):
            for name in names:
                node.write(name, content(f"{name} {turn}", MIB))
                assert node.read(name, MIB) == content(f"{name} {turn}", MIB)
            for name in names:
                node.ok("volume", "delete", name, "--discard-dirty")
            for name in reversed(names):
                node.create(name)
                assert node.read(name, MIB) == bytes(MIB)
        assert sorted(node.volume(name)["shard"] for name in names) == [0, 1, 2]


def test_ssd_tier_is_one_for_all_shards_and_is_warm_after_a_restart(tmp_path):
    with Node(tmp_path, cache_total_size_mib=64) as node:
        node.online()
        names = made(node)
        for name in names:
            # The same on each: stored once.
            node.write(name, content("same"))
            node.ok("volume", "flush", name)
            node.ok("volume", "evict", name)
            node.ok("volume", "promote", name)
        cache = node.cache()
        # Lines of 16 KiB, of which two of three volumes need none of their own.
        assert cache["shared_lines"] >= 256, cache
        node.stop()
        node.start()
        assert node.online()["warm_lines"] > 0
        before = {name: node.volume(name)["counters"]["ssd_hit_blocks"] for name in names}
        for name in names:
            assert node.read(name, 4 * MIB) == content("same")
            assert node.volume(name)["counters"]["ssd_hit_blocks"] > before[name]


def test_commands_reach_volumes_wherever_they_are(tmp_path):
    with Node(tmp_path, cache_total_size_mib=64) as node:
        for name in made(node):
            node.write(name, content(name))
            node.ok("volume", "flush", name)
            node.ok("volume", "promote", name)
            node.ok("volume", "evict", name)
            node.ok("volume", "set", name, "iops_max=1000")
            node.ok("volume", "resize", name, "32M")
            assert node.volume(name)["bytes"] == 32 * MIB
            node.ok("volume", "scrub", name)
            assert node.read(name, 4 * MIB) == content(name)
            node.ok("volume", "delete", name, "--discard-dirty")
        assert [shard["volumes"] for shard in node.shards()] == [0, 0, 0]


def test_shard_that_hangs_shows_by_its_number(tmp_path):
    from test_daemon_hangs import stop_thread

    with Node(tmp_path, cache_answer_max_ms=1000) as node:
        names = made(node)
        of = {node.volume(name)["shard"]: name for name in names}
        thread = stop_thread(node, "hdcs-shard-1")
        found = node.metrics()
        assert [found[f'hdcs_shard_up{{shard="{number}"}}'] for number in range(SHARDS)] == [1, 0, 1]
        assert f'hdcs_volume_dirty_bytes{{volume="{of[1]}"}}' not in found
        assert f'hdcs_volume_dirty_bytes{{volume="{of[2]}"}}' in found
        status, answer = node.api("GET", "/v1/status")
        assert status == 504 and "data path" in str(answer)
        node.signal(signal.SIGTERM)
        # A thread that is traced dies for whoever traces it first.
        node.until(lambda: os.waitpid(thread, 0x40000000 | os.WNOHANG) != (0, 0))
        assert node.wait() == 1
        node.tells("the data path, which does not answer")


@pytest.mark.parametrize(
    "text, parts",
    [
        ("shards = 0", ['"auto" or a whole number from 1 to 64', "found 0"]),
        ("shards = 65", ["from 1 to 64", "found 65"]),
        ('shards = "many"', ['"auto"', 'found "many"']),
        ("memory_max_mib = 256\nshards = 32", ["MiB are needed by 32 shards", "`shards` among them"]),
        ('shards = 3\nshard_processor = "0,1"', ["names 2 processors for 3 shards"]),
        ('shards = 2\nshard_processor = "0,0"', ["names processor 0 twice"]),
        ('shards = 1\nshard_processor = "0,1"', ["names 2 processors for 1 shard"]),
        ('shard_processor = "0-2,1"', ["names processor 1 twice"]),
        ('shard_processor = "2-0"', ["ranges in quotes", "0-3,8"]),
        ('memory_max_mib = 256\nshard_processor = "0-31"', ["MiB are needed by 32 shards"]),
    ],
)
def test_configuration_of_shards_is_refused(tmp_path, text, parts):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    done = hdcs("serve", "--config", path, "--data", tmp_path / "d")
    refused(done, 2, "configuration", *parts)


def test_processor_that_is_not_there_is_refused(tmp_path):
    there = os.sched_getaffinity(0)
    missing = next(number for number in range(1023, 0, -1) if number not in there)
    Daemon(tmp_path, {"shard_processor": missing}).refuses(
        2, f"names processor {missing}, which is not there"
    )


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor")
def test_shards_keep_to_their_processors(tmp_path):
    chosen = sorted(os.sched_getaffinity(0))[:2]
    processors = ",".join(str(number) for number in reversed(chosen))
    # As many shards as it names.
    config = {"shards": "auto", "nbd_listen": SOCKETS[:2], "shard_processor": processors}
    with Node(tmp_path, **config) as node:
        assert [shard["processor"] for shard in node.shards()] == chosen[::-1]
        tasks = f"/proc/{node.process.pid}/task"
        for task in os.listdir(tasks):
            name = open(f"{tasks}/{task}/comm").read().strip()
            if name.startswith("hdcs-shard-"):
                number = int(name.rpartition("-")[2])
                assert os.sched_getaffinity(int(task)) == {chosen[::-1][number]}


def test_auto_is_one_shard(tmp_path):
    with Daemon(tmp_path, {"shards": "auto"}) as daemon:
        assert len(json.loads(daemon.api("GET", "/v1/status")[1])["shards"]) == 1
