"""Several threads of the data path: clients come to any, and volumes move between them under load."""

import fcntl
import json
import random
import re
import signal
import struct
import subprocess
import threading
import time

import nbd
import pytest

from daemon import COMMAND_SECONDS, DIRTY, Daemon, freeze, hdcs, refused, samples
from disks import served_disk
from programs import CLIENT_SECONDS, HDCS, MIB, run
from tls_daemon import TlsDaemon, tls_sh

SHARDS = {"shards": 3, "memory_max_mib": 512, "volumes_memory_mib": 200, "cache_total_size_mib": 64}
SIZE = 64 * MIB


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """An authority with a server and a client, `a`."""
    directory = tmp_path_factory.mktemp("authority")
    tls_sh(directory)
    tls_sh(directory, "client", "a", "DNS:a.example")
    return directory


def shard_of(daemon, name):
    return daemon.volume(name)["shard"]


def move(daemon, name, to):
    daemon.ok("volume", "set", name, "--shard", str(to))
    assert shard_of(daemon, name) == to


def move_while(daemon, name, process, connections):
    """Move a volume round and round, from when a client has so many connections to it until it ends; how often."""
    daemon.until(lambda: daemon.volume(name)["connections"] >= connections or process.poll() is not None)
    moves = 0
    deadline = time.monotonic() + CLIENT_SECONDS
    while process.poll() is None:
        assert time.monotonic() < deadline
        move(daemon, name, (shard_of(daemon, name) + 1) % 3)
        moves += 1
    return moves


def test_every_client_reaches_every_volume(tmp_path):
    with Daemon(tmp_path, SHARDS) as daemon:
        names = [f"v{number}" for number in range(6)]
        for number, name in enumerate(names):
            daemon.create(name)
            daemon.write(name, bytes([number + 1]) * MIB)
        assert len({shard_of(daemon, name) for name in names}) == 3
        clients = [daemon.nbd(name) for name in names]
        for number, client in enumerate(clients):
            assert client.pread(MIB, 0) == bytes([number + 1]) * MIB
        assert [daemon.volume(name)["connections"] for name in names] == [1] * 6
        listed = json.loads(run("nbdinfo", "--list", "--json", daemon.uri()).stdout)
        assert sorted(export["export-name"] for export in listed["exports"]) == names
        info = json.loads(run("nbdinfo", "--map", "--json", daemon.uri("v5")).stdout)
        assert sum(extent["length"] for extent in info) == 16 * MIB
        daemon.ok("volume", "delete", "v0", "--discard-dirty")
        with pytest.raises(nbd.Error):
            clients[0].pread(512, 0)
        with pytest.raises(nbd.Error):
            daemon.nbd("v0")
        assert clients[1].pread(MIB, 0) == bytes([2]) * MIB


def test_volume_moves_while_fio_verifies_what_it_wrote(tmp_path):
    with Daemon(tmp_path, SHARDS) as daemon:
        daemon.create("v", size="64M")
        fio = subprocess.Popen(
            ["fio", "--name=v", "--thread", "--ioengine=nbd", f"--uri={daemon.uri('v')}", "--rw=randwrite",
             "--bsrange=512-64k", "--iodepth=32", "--size=48m", "--io_size=192m", "--verify=crc32c",
             "--verify_backlog=256", "--do_verify=1", "--verify_fatal=1",
             "--verify_state_save=0"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        moves = move_while(daemon, "v", fio, 1)
        output = fio.communicate()[0]
        assert fio.returncode == 0, output
        assert moves >= 3, f"it ended after {moves} moves"
        daemon.stop()
        assert "BAD" not in hdcs("check", daemon.data).stdout


def test_volume_moves_while_it_is_copied_in_and_out(tmp_path):
    with Daemon(tmp_path, SHARDS) as daemon:
        daemon.create("v", size="64M")
        source = tmp_path / "source"
        with open("/dev/urandom", "rb") as random:
            source.write_bytes(random.read(SIZE))
        for number in range(3):
            copies = [(source, daemon.uri("v")), (daemon.uri("v"), tmp_path / f"copy{number}")]
            for come, go in copies:
                copy = subprocess.Popen(["nbdcopy", "--flush", "--connections=2", str(come), str(go)])
                move_while(daemon, "v", copy, 2)
                assert copy.returncode == 0
            assert (tmp_path / f"copy{number}").read_bytes() == source.read_bytes()
        daemon.stop()
        daemon.start()
        assert daemon.read_all("v", SIZE) == source.read_bytes()


def test_tls_clients_follow_their_volume(tmp_path, authority):
    with TlsDaemon(tmp_path, authority, SHARDS) as daemon:
        daemon.create("v", "--allow", "a.example")
        client = daemon.open("v", "a")
        for number in range(9):
            data = bytes([number + 1]) * MIB
            client.pwrite(data, number * MIB)
            move(daemon, "v", number % 3)
            assert client.pread(MIB, number * MIB) == data
        other = daemon.open("v", "a")
        assert other.pread(MIB, 0) == bytes([1]) * MIB
        assert daemon.listed("a") == ["v"]
        # Nobody loses a right on the way, or keeps one.
        daemon.ok("volume", "set", "v", "allow=default")
        with pytest.raises(nbd.Error):
            client.pread(512, 0)


def test_move_keeps_what_is_unflushed_over_a_crash(tmp_path):
    with Daemon(tmp_path, SHARDS) as daemon:
        daemon.create("v")
        client = daemon.nbd("v")
        for number in range(6):
            client.pwrite(bytes([number + 1]) * MIB, number * MIB)
            move(daemon, "v", number % 3)
        client.flush()
        daemon.kill()
        daemon.start()
        for number in range(6):
            assert daemon.read("v", MIB, number * MIB) == bytes([number + 1]) * MIB


def test_volume_that_moves_reads_nothing_old_from_the_cache(tmp_path):
    with Daemon(tmp_path, SHARDS) as daemon:
        daemon.create("v", "--set", "cache_promote_hits=1")
        client = daemon.nbd("v")
        for number in range(9):
            data = bytes([number + 1]) * MIB
            client.pwrite(data, 0)
            daemon.ok("volume", "flush", "v")
            daemon.ok("volume", "promote", "v", "--offset", "0", "--length", "1M")
            for _ in range(3):
                assert client.pread(MIB, 0) == data
            move(daemon, "v", number * 2 % 3)
            assert client.pread(MIB, 0) == data


def test_move_says_what_is_wrong(tmp_path):
    with Daemon(tmp_path, SHARDS) as daemon:
        daemon.create("v")
        at = shard_of(daemon, "v")
        refused(daemon.cli("volume", "set", "v", "--shard", "3"), 2, "there is no shard 3", "0 to 2")
        refused(daemon.cli("volume", "set", "w", "--shard", "0"), 1, "no volume w")
        takes = "`--shard` takes the number of a shard, from 0, or `auto`"
        for wrong in ("x", "-1", "1.5", ""):
            refused(daemon.cli("volume", "set", "v", "--shard", wrong), 2, takes)
        refused(daemon.cli("volume", "set", "v", "shard=1"), 2, "shard is no setting: use `--shard 1`")
        refused(daemon.cli("volume", "set", "v", "shard=default"), 2, "shard is no setting: use `--shard auto`")
        for wrong in (-1, "some", None, [1]):
            status, answer = daemon.api("PATCH", "/v1/volumes/v", json.dumps({"settings": {}, "shard": wrong}))
            assert status == (400 if wrong is not None else 200), answer
        refused(daemon.cli("volume", "set", "v"), 2, "required")
        assert shard_of(daemon, "v") == at
        move(daemon, "v", at)
        # Settings change first, then it moves.
        daemon.ok("volume", "set", "v", "--shard", str((at + 1) % 3), "qos_weight=7")
        volume = daemon.volume("v")
        assert (volume["shard"], volume["settings"]["qos_weight"]) == ((at + 1) % 3, 7)


def test_move_of_a_node_with_one_shard_is_refused(tmp_path):
    with Daemon(tmp_path) as daemon:
        daemon.create("v")
        refused(daemon.cli("volume", "set", "v", "--shard", "1"), 2, "only shard 0", "`shards`")
        daemon.ok("volume", "set", "v", "--shard", "0")
        assert "0 (set for this volume)" in daemon.ok("volume", "show", "v")
        daemon.ok("volume", "set", "v", "--shard", "auto")
        assert daemon.volume("v")["shard"] is None


def test_volume_that_moves_is_shown_as_it_was_before(tmp_path):
    with Daemon(tmp_path, SHARDS) as daemon:
        daemon.create("v", "--set", "destage_age_max_ms=600000", size="64M")
        # Enough in its log that the replay takes its time.
        daemon.write("v", b"v" * (40 * MIB))
        ended = threading.Event()
        states, phases, wrong = set(), set(), []

        def look():
            while not ended.is_set():
                page = samples(daemon.api("GET", "/metrics")[1])
                states.update(key for key, value in page.items() if key.startswith("hdcs_volume_state{") and value == 1)
                volume, = json.loads(daemon.api("GET", "/v1/volumes")[1])
                phases.add(volume["phase"])
                status = json.loads(daemon.api("GET", "/v1/status")[1])
                counters = volume["counters"]
                if not counters or not counters["dirty_bytes"] or not counters["log_ring_bytes"]:
                    wrong.append(volume)
                if volume["reason"] or status["problems"] or not status["dirty_bytes"]:
                    wrong.append((volume["reason"], status["problems"], status["dirty_bytes"]))

        def load():
            client = daemon.nbd("v")
            while not ended.is_set():
                client.pwrite(b"w" * 4096, 0)
                client.flush()

        threads = [threading.Thread(target=run) for run in (look, look, load)]
        for thread in threads:
            thread.start()
        moves = 0
        # Until somebody has seen it move.
        deadline = time.monotonic() + CLIENT_SECONDS
        while moves < 9 or "moving" not in phases:
            assert time.monotonic() < deadline
            move(daemon, "v", moves % 3)
            moves += 1
        ended.set()
        for thread in threads:
            thread.join()
        assert not wrong, wrong[:3]
        assert phases == {"open", "moving"}
        assert len(states) == 1 and "healthy" in states.pop()
        seen = [event for event in daemon.json("events") if event["kind"] == "state"]
        assert all("error" not in json.dumps(event) for event in seen), seen


def test_flush_of_a_volume_that_moves_is_refused_as_all_else_is(tmp_path):
    url = f"file:{tmp_path / 'image'}?delay_us=3000000"
    (tmp_path / "image").write_bytes(b"x" * (16 * MIB))
    with Daemon(tmp_path, SHARDS) as daemon:
        daemon.create("v", "--backend", url)
        client = daemon.nbd("v")
        buffer = nbd.Buffer(4096)
        cookie = client.aio_pread(buffer, 0)
        client.poll(100)
        moving = threading.Thread(target=move, args=(daemon, "v", (shard_of(daemon, "v") + 1) % 3))
        moving.start()
        daemon.until(lambda: daemon.volume("v")["phase"] == "moving")
        said = "volume v: it is being moved: wait until that has ended"
        for command in (["flush", "v"], ["set", "v", "qos_weight=2"], ["promote", "v"], ["resize", "v", "32M"]):
            refused(daemon.cli("volume", *command), 1, said)
        while not client.aio_command_completed(cookie):
            client.poll(1000)
        moving.join()
        assert daemon.volume("v")["phase"] == "open"


def test_volume_whose_shard_is_auto_stays_until_the_next_start(tmp_path):
    with Daemon(tmp_path, SHARDS) as daemon:
        entry = daemon.data / "volumes" / "v" / "volume.json"

        def shown():
            lines = [line.split() for line in daemon.ok("volume", "show", "v").splitlines()]
            return [" ".join(line[1:]) for line in lines if line[:1] == ["shard"]]

        daemon.create("v")
        daemon.create("w")
        at = shard_of(daemon, "v")
        assert shown() == [str(at)] and daemon.volume("v")["shard_set"] is None
        # The shard that it is on, which would be another one otherwise: nothing else is on it.
        move(daemon, "v", 2)
        move(daemon, "w", 2)
        assert shown() == ["2 (set for this volume)"] and daemon.volume("v")["shard_set"] == 2
        assert re.search(r'"shard": *2\b', entry.read_text())
        assert "stays where it is" in daemon.ok("volume", "set", "v", "--shard", "auto")
        daemon.ok("volume", "set", "w", "--shard", "auto")
        assert shown() == ["2"] and daemon.volume("v")["shard_set"] is None
        assert '"shard"' not in entry.read_text()
        daemon.ok("volume", "set", "v", "--shard", "auto")
        daemon.stop()
        daemon.start()
        daemon.until(lambda: all(daemon.volume(name)["phase"] == "open" for name in ("v", "w")))
        assert shard_of(daemon, "v") != shard_of(daemon, "w")


def begin_move(daemon, name, to):
    """Have a volume move; the command, which goes on."""
    command = [str(HDCS), "volume", "set", name, "--shard", str(to), "--data", str(daemon.data)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def held_up(daemon, name):
    """A request of a client that takes a while, so that a move of the volume waits for it."""
    client = daemon.nbd(name)
    client.aio_pread(nbd.Buffer(4096), 8 * MIB)
    client.poll(100)
    return client


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_node_that_ends_while_a_volume_waits_to_move_loses_nothing(tmp_path, end):
    (tmp_path / "image").write_bytes(b"x" * (16 * MIB))
    with Daemon(tmp_path, SHARDS) as daemon:
        daemon.create("v", "--backend", f"file:{tmp_path / 'image'}?delay_us=3000000", *DIRTY)
        at = shard_of(daemon, "v")
        daemon.write("v", b"v" * MIB)
        client = held_up(daemon, "v")
        moving = begin_move(daemon, "v", (at + 1) % 3)
        daemon.until(lambda: daemon.volume("v")["phase"] == "moving")
        getattr(daemon, end)()
        said = moving.communicate()[0]
        assert moving.returncode == 1, said
        if end == "stop":
            assert "the node is stopping" in said
        del client
        daemon.start()
        daemon.until(lambda: daemon.volume("v")["phase"] == "open")
        assert daemon.read("v", MIB) == b"v" * MIB
        # It has not moved, so that it was set to nothing.
        assert daemon.volume("v")["shard_set"] is None
        move(daemon, "v", 2)
        assert daemon.read("v", MIB) == b"v" * MIB


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_node_that_ends_anywhere_in_a_move_loses_nothing(tmp_path, end):
    with Daemon(tmp_path, SHARDS) as daemon:
        daemon.create("v", *DIRTY)
        content = bytearray(4 * MIB)
        for turn in range(8):
            client = daemon.nbd("v")
            # What the replay on the other shard has to find.
            for at in range(turn, len(content) // 4096, 8):
                block = bytes([turn + 1]) * 4096
                client.pwrite(block, at * 4096)
                content[at * 4096 : at * 4096 + 4096] = block
            moving = begin_move(daemon, "v", (shard_of(daemon, "v") + 1) % 3)
            # Somewhere from before its beginning to behind its end.
            time.sleep(turn * 0.01)
            getattr(daemon, end)()
            said = moving.communicate()[0]
            assert moving.returncode in (0, 1), said
            daemon.start()
            daemon.until(lambda: daemon.volume("v")["phase"] == "open")
            volume = daemon.volume("v")
            assert volume["shard_set"] in (None, volume["shard"])
            assert daemon.read("v", len(content)) == content
        daemon.stop()
        assert "BAD" not in hdcs("check", daemon.data).stdout


def test_volume_that_cannot_be_opened_where_it_goes_is_shown_and_opens_again(tmp_path):
    with Daemon(tmp_path, SHARDS) as daemon:
        daemon.create("v", *DIRTY)
        move(daemon, "v", 0)
        client = daemon.nbd("v")
        client.pwrite(b"v" * MIB, 0)
        client.flush()
        log = daemon.log_of("v")
        log.rename(tmp_path / "away")
        refused(daemon.cli("volume", "set", "v", "--shard", "1"), 1, "volume v:", "its write log is lost",
                "put the log back and run `hdcs volume open`")
        volume = daemon.volume("v")
        assert (volume["state"], volume["phase"], volume["counters"]) == ("error", "failed", None), volume
        assert "its write log is lost" in volume["reason"]
        assert "its write log is lost" in daemon.ok("status")
        assert samples(daemon.api("GET", "/metrics")[1])['hdcs_volume_state{volume="v",state="error"}'] == 1
        with pytest.raises(nbd.Error):
            client.pread(512, 0)
        with pytest.raises(nbd.Error):
            daemon.nbd("v")
        # It is not open: where it is opened next is set all the same.
        said = "volume v is not open, and goes to shard 2 when it is opened"
        assert said in daemon.ok("volume", "set", "v", "--shard", "2")
        assert daemon.volume("v")["phase"] == "failed"
        (tmp_path / "away").rename(log)
        daemon.ok("volume", "open", "v")
        volume = daemon.volume("v")
        assert (volume["state"], volume["phase"], volume["shard"]) == ("healthy", "open", 2)
        assert daemon.read("v", MIB) == b"v" * MIB
        move(daemon, "v", 1)
        assert daemon.read("v", MIB) == b"v" * MIB


def test_shard_of_a_volume_that_is_not_open_is_set_for_its_next_opening(tmp_path):
    with Daemon(tmp_path, SHARDS) as daemon:
        daemon.create("v")
        daemon.stop()
        locked = Locked(daemon.log_of("v"))
        daemon.start()
        daemon.until(lambda: daemon.volume("v")["phase"] == "waiting")

        def set_shard(shard):
            # While it is being tried again, it is busy.
            daemon.until(lambda: daemon.cli("volume", "set", "v", "--shard", shard).returncode == 0)
            return daemon.volume("v")["shard_set"]

        refused(daemon.cli("volume", "set", "v", "--shard", "3"), 2, "there is no shard 3")
        assert [set_shard(shard) for shard in ("1", "auto", "2")] == [1, None, 2]
        assert re.search(r'"shard": *2\b', (daemon.data / "volumes/v/volume.json").read_text())
        # Settings are for volumes that are open.
        assert daemon.cli("volume", "set", "v", "--shard", "0", "qos_weight=7").returncode == 1
        locked.release()
        daemon.until(lambda: daemon.volume("v")["phase"] == "open")
        assert shard_of(daemon, "v") == 2


def test_new_volume_goes_to_the_shard_that_is_said(tmp_path):
    with Daemon(tmp_path, SHARDS) as daemon:
        places = ["--backend", f"dir:{tmp_path / 'parent'}"]
        for name in ("v", "w"):
            daemon.create(name, "--shard", "2", *(places if name == "v" else []))
        daemon.ok("volume", "clone", "v", "c", "--shard", "2", "--backend", f"dir:{tmp_path / 'clone'}")
        image = tmp_path / "image"
        image.write_bytes(b"i" * (16 * MIB))
        daemon.ok("volume", "import", "i", image, "--shard", "2")
        names = ("v", "w", "c", "i")
        page = samples(daemon.api("GET", "/metrics")[1])
        for name in names:
            assert (shard_of(daemon, name), daemon.volume(name)["shard_set"]) == (2, 2)
            assert page[f'hdcs_volume_shard{{volume="{name}"}}'] == 2
        refused(daemon.cli("volume", "create", "x", "--size", "16M", "--shard", "3"), 2, "there is no shard 3", "0 to 2")
        refused(daemon.cli("volume", "create", "x", "--size", "16M", "--shard", "-1"), 2,
                "`--shard` takes the number of a shard, from 0")
        refused(daemon.cli("volume", "clone", "v", "x", "--shard", "9", "--backend", f"dir:{tmp_path / 'x'}"), 2,
                "there is no shard 9")
        assert not (tmp_path / "x").exists() and not daemon.json("volume", "snapshot", "v", "--list")["snapshots"]
        daemon.stop()
        daemon.start()
        daemon.until(lambda: all(daemon.volume(name)["phase"] == "open" for name in names))
        assert [shard_of(daemon, name) for name in names] == [2] * 4


def test_volumes_move_although_indexes_of_logs_have_used_up_their_memory(tmp_path):
    """What a log needs to be indexed it has left where it was."""
    config = {"shards": 2, "memory_max_mib": 256, "volumes_memory_mib": 20, "log_size_mib": 32}
    with Daemon(tmp_path, config) as daemon:
        names = [f"v{number}" for number in range(6)]
        places = random.Random(1).sample(range(0, 64 * MIB, 8192), 6000)
        used = 0
        for number, name in enumerate(names):
            daemon.create(name, *DIRTY, "--shard", str(number % 2), size="64M")
            client = daemon.nbd(name)
            for at in places:
                client.aio_pwrite(nbd.Buffer.from_bytearray(bytearray([number + 1]) * 4096), at)
                client.poll(0)
            while client.aio_in_flight():
                client.poll(1000)
            memory = daemon.json("status")["memory"]
            used = max(used, memory["volumes_index_bytes"])
        # From a half on all volumes destage, and a generation gives back some at once.
        assert used > memory["volumes_index_max_bytes"] // 3, memory
        for name in names[::2]:
            move(daemon, name, 1)
        for number, name in enumerate(names):
            assert daemon.volume(name)["state"] == "healthy"
            client = daemon.nbd(name)
            assert all(client.pread(4096, at) == bytes([number + 1]) * 4096 for at in places[::16])


def test_volume_does_not_go_where_there_is_no_memory_for_its_clients(tmp_path):
    with Daemon(tmp_path, SHARDS) as daemon:
        clients = {}
        # A shard has memory for 256 connections of those that may come from elsewhere.
        for shard, name in enumerate(["v", "w"]):
            daemon.create(name, "--shard", str(shard))
            daemon.write(name, name.encode() * MIB)
            clients[name] = [daemon.nbd(name) for _ in range(150)]
        daemon.until(lambda: daemon.volume("v")["connections"] == daemon.volume("w")["connections"] == 150)
        refused(daemon.cli("volume", "set", "v", "--shard", "1"), 1, "it is not moved: 150 clients are connected to it",
                "shard 1 has memory for", "`memory_max_mib`")
        volume = daemon.volume("v")
        assert (volume["shard"], volume["shard_set"], volume["phase"]) == (0, 0, "open")
        # Where there is, it goes.
        move(daemon, "v", 2)
        for name, theirs in clients.items():
            assert all(client.pread(4096, 0) == name.encode() * 4096 for client in theirs)


@pytest.mark.parametrize("take_away", ["delete", "detach"])
def test_volume_that_is_taken_away_does_not_move(tmp_path, take_away):
    (tmp_path / "image").write_bytes(b"x" * (16 * MIB))
    with Daemon(tmp_path, SHARDS) as daemon:
        daemon.create("v", "--backend", f"file:{tmp_path / 'image'}?delay_us=2000000")
        at = shard_of(daemon, "v")
        daemon.write("v", b"v" * MIB)
        taken = subprocess.Popen([str(HDCS), "volume", take_away, "v", "--data", str(daemon.data)])
        done = "deleted" if take_away == "delete" else "detached"
        daemon.until(lambda: daemon.volume("v")["counters"]["flush_remaining_bytes"])
        refused(daemon.cli("volume", "set", "v", "--shard", str((at + 1) % 3)), 1, f"it is being {done}")
        assert taken.wait(COMMAND_SECONDS) == 0
        refused(daemon.cli("volume", "set", "v", "--shard", "0"), 1, "no volume v")
        with open(tmp_path / "image", "rb") as image:
            assert image.read(MIB) == b"v" * MIB


def test_volume_whose_requests_hang_stays(tmp_path):
    with Daemon(tmp_path, SHARDS) as daemon:
        image = tmp_path / "image"
        image.write_bytes(b"x" * (16 * MIB))
        daemon.create("v", "--backend", f"file:{image}?delay_us=15000000")
        at = shard_of(daemon, "v")
        client = daemon.nbd("v")
        buffer = nbd.Buffer(4096)
        cookie = client.aio_pread(buffer, 0)
        client.poll(100)
        refused(daemon.cli("volume", "set", "v", "--shard", str((at + 1) % 3)), 1, "did not end in time")
        while not client.aio_command_completed(cookie):
            client.poll(1000)
        assert buffer.to_bytearray() == b"x" * 4096
        assert shard_of(daemon, "v") == at


def test_volume_whose_backend_hangs_stays_and_serves(tmp_path):
    switch = tmp_path / "switch"
    url = f"file:{tmp_path / 'image'}?error_file={switch}&error_kind=hang&error_on=write"
    with Daemon(tmp_path, {**SHARDS, "log_size_mib": 16}) as daemon:
        daemon.create("v", "--set", "destage_age_max_ms=1000", "--backend", url)
        at = shard_of(daemon, "v")
        client = daemon.nbd("v")
        switch.write_bytes(b"")
        client.pwrite(b"a" * MIB, 0)
        client.flush()
        # Something is destaged, and hangs.
        time.sleep(3)
        refused(daemon.cli("volume", "set", "v", "--shard", str((at + 1) % 3)), 1, "did not end in time")
        client.pwrite(b"b" * 4096, 8 * MIB)
        assert client.pread(4096, 0) == b"a" * 4096
        assert shard_of(daemon, "v") == at
        switch.unlink()
        daemon.until(lambda: daemon.volume("v")["phase"] == "open")


def test_volume_is_opened_where_it_was_put(tmp_path):
    with Daemon(tmp_path, SHARDS) as daemon:
        for name in ("v", "w", "x"):
            daemon.create(name)
        for name in ("v", "w", "x"):
            move(daemon, name, 2)
        daemon.stop()
        daemon.start()
        assert [shard_of(daemon, name) for name in ("v", "w", "x")] == [2] * 3
        daemon.stop()
        daemon.config["shards"] = 2
        daemon.start()
        daemon.until(lambda: all(daemon.volume(name)["phase"] == "open" for name in ("v", "w", "x")))
        assert {shard_of(daemon, name) for name in ("v", "w", "x")} == {0, 1}
        daemon.tells("volume v is set to shard 2, but this node has only shards 0 to 1 (`shards`): it is placed freely "
                     "until there is a shard 2 again")


def test_clients_that_come_while_their_volume_moves_wait_for_it(tmp_path):
    with Daemon(tmp_path, SHARDS) as daemon:
        daemon.create("v")
        daemon.write("v", b"v" * MIB)
        ended = threading.Event()
        refusals, served = [], []

        def come():
            while not ended.is_set():
                try:
                    client = daemon.nbd("v")
                    assert client.pread(4096, 0) == b"v" * 4096
                    served.append(client)
                    client.shutdown()
                except nbd.Error as error:
                    refusals.append(str(error))

        clients = [threading.Thread(target=come) for _ in range(4)]
        for client in clients:
            client.start()
        for number in range(20):
            move(daemon, "v", number % 3)
        ended.set()
        for client in clients:
            client.join()
        assert not refusals, refusals[:3]
        assert len(served) > 20


class Locked:
    """Somebody else has locked a file."""

    def __init__(self, path, waits=False):
        self.file = open(path, "r+b")
        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0)
        fcntl.fcntl(self.file, 38 if waits else 37, lock)  # F_OFD_SETLKW, F_OFD_SETLK

    def release(self):
        self.file.close()


def test_volume_whose_log_is_in_use_is_tried_again(tmp_path):
    with Daemon(tmp_path, SHARDS) as daemon:
        daemon.create("v")
        daemon.write("v", b"v" * MIB)
        daemon.stop()
        locked = Locked(daemon.log_of("v"))
        daemon.start()
        daemon.until(lambda: daemon.volume("v")["phase"] == "waiting")
        assert "in use by another program or volume" in json.dumps(daemon.volume("v"))
        locked.release()
        daemon.until(lambda: daemon.volume("v")["phase"] == "open")
        assert daemon.read("v", MIB) == b"v" * MIB


def test_clients_go_on_when_the_log_of_their_volume_is_in_use_for_a_while_as_it_moves(tmp_path):
    with Daemon(tmp_path, SHARDS) as daemon:
        daemon.create("v", *DIRTY)
        client = daemon.nbd("v")
        client.pwrite(b"v" * MIB, 0)
        client.flush()
        has_log, lets_go = threading.Event(), threading.Event()

        def take_log():
            # Free only between two shards.
            locked = Locked(daemon.log_of("v"), waits=True)
            has_log.set()
            lets_go.wait()
            locked.release()

        threading.Thread(target=take_log, daemon=True).start()
        deadline = time.monotonic() + CLIENT_SECONDS
        while not has_log.is_set():
            assert time.monotonic() < deadline
            to = (shard_of(daemon, "v") + 1) % 3
            moving = begin_move(daemon, "v", to)
            # The next shard may be faster: then once more.
            daemon.until(lambda: has_log.is_set() or moving.poll() is not None)
        # Longer than one opening waits for it.
        daemon.until(lambda: "is tried again while its clients wait" in daemon.log() or moving.poll() is not None)
        lets_go.set()
        said = moving.communicate(timeout=COMMAND_SECONDS)[0]
        assert moving.returncode == 0, said
        assert client.pread(MIB, 0) == b"v" * MIB
        client.pwrite(b"w" * 4096, 0)
        client.flush()
        volume = daemon.volume("v")
        assert (volume["shard"], volume["state"], volume["phase"]) == (to, "healthy", "open"), volume
        assert daemon.read("v", 4096) == b"w" * 4096
        daemon.stop()


def test_shard_move_beside_a_backend_that_hangs(tmp_path):
    """A backend that is on another file system than the logs takes nothing from that, so nobody who gives out its space
    waits for it, with another volume's log in hand."""
    with served_disk(tmp_path / "disk") as disk, Daemon(tmp_path, SHARDS) as daemon:
        daemon.create("v", size="64M")
        daemon.create("w", "--backend", f"file:{disk / 'mount/disk'}", size="64M")
        daemon.write("v", b"v" * MIB)
        freeze(disk.process.pid)
        try:
            # Free space is looked at every second.
            for to in (1, 2, 0, 1, 2):
                time.sleep(1.1)
                move(daemon, "v", to)
            assert daemon.read("v", MIB) == b"v" * MIB
        finally:
            disk.process.send_signal(signal.SIGCONT)
        daemon.stop()
