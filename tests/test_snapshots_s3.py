"""Snapshots and thin clones of volumes on a real S3: a snapshot holds what was acknowledged before it, while
clients go on; a clone shares its parent's objects and nothing else; what one of them needs is never freed."""

import random
import threading

import pytest

from daemon import DIRTY, MIB, Daemon, refused
from object_stores import BLOCK, EAGER, THREAD_SECONDS, Model, counters
from test_s3_volumes import homes

SMALL = {"log_size_mib": 16}


def snapshots(daemon, name="v"):
    return daemon.json("volume", "snapshot", name, "--list")["snapshots"]


def clone(daemon, source, name, url):
    return daemon.json("volume", "clone", source, name, "--backend", url)


def check(daemon, name, model):
    client = daemon.nbd(name)
    model.check(client)
    client.shutdown()


def copy_of(model, seed):
    copied = Model(seed, len(model.image))
    copied.image[:] = model.image
    return copied


class Journal(threading.Thread):
    """Writes its number of the write into one random block after another, on one connection and one at a
    time: so a volume that holds a prefix of this can be told from one that does not."""

    def __init__(self, daemon, name, blocks, seed):
        super().__init__(daemon=True)
        self.client = daemon.nbd(name)
        self.rng = random.Random(seed)
        self.blocks = blocks
        self.written = []
        self.enough = threading.Event()
        self.failure = None

    def run(self):
        try:
            while not self.enough.is_set():
                block = self.rng.randrange(self.blocks)
                number = len(self.written) + 1
                self.client.pwrite(number.to_bytes(8, "little") * (BLOCK // 8), block * BLOCK)
                self.written.append(block)
                if number % 100 == 0:
                    self.client.flush()
        except Exception as error:  # noqa: BLE001 - whatever it was, the test fails with it
            self.failure = error

    def end(self):
        self.enough.set()
        self.join(THREAD_SECONDS)
        assert not self.is_alive(), "a request never ended"
        if self.failure:
            raise self.failure
        self.client.shutdown()

    def check_prefix(self, client, least):
        """What the client reads is all that was written up to some write, which is not before `least`."""
        found = [int.from_bytes(client.pread(BLOCK, block * BLOCK)[:8], "little") for block in range(self.blocks)]
        upto = max(found)
        assert upto >= least, f"write {least} was acknowledged before, {upto} is the last one there"
        expected = [0] * self.blocks
        for number, block in enumerate(self.written[:upto], 1):
            expected[block] = number
        assert found == expected


def test_snapshot_holds_what_was_acknowledged_and_a_clone_begins_with_it(s3, tmp_path):
    size = 24 * MIB
    before, after, apart = Model(1, size), None, None
    with Daemon(tmp_path, SMALL) as daemon:
        daemon.create("v", "--backend", s3.url("first"), *DIRTY, size="24M")
        client = daemon.nbd("v")
        before.write(client, 150)
        assert counters(daemon)["dirty_bytes"] > 0
        made = daemon.json("volume", "snapshot", "v", "monday")
        assert made["name"] == "monday" and made["made_ms"] > 1_700_000_000_000
        after = copy_of(before, 2)
        after.write(client, 100)
        volume = clone(daemon, "v@monday", "c", s3.url("first-clone"))
        assert volume["bytes"] == size
        check(daemon, "c", before)
        # Each goes its own way.
        apart = copy_of(before, 3)
        other = daemon.nbd("c")
        apart.write(other, 100)
        daemon.ok("volume", "flush", "c")
        after.check(client)
        other.shutdown()
        client.shutdown()
        assert [(one["name"], one["clones"]) for one in snapshots(daemon)] == [("monday", ["c"])]
        table = daemon.ok("volume", "snapshot", "v", "--list")
        assert "monday" in table and "SNAPSHOT" in table
        daemon.stop()
    with Daemon(tmp_path, SMALL) as daemon:
        for name, model in [("v", after), ("c", apart)]:
            daemon.ok("volume", "flush", name)
            daemon.ok("volume", "evict", name)
            check(daemon, name, model)
        # A clone of a clone reads through both, and one without a snapshot begins with what is there now.
        daemon.ok("volume", "snapshot", "c", "own")
        clone(daemon, "c@own", "cc", s3.url("first-clone-clone"))
        check(daemon, "cc", apart)
        clone(daemon, "v", "now", s3.url("first-now"))
        check(daemon, "now", after)
        kept = daemon.json("volume", "snapshot", "v", "--list")
        assert [one["name"] for one in kept["snapshots"]] == ["monday"], "none is left behind"
        assert kept["clones"] == ["now"]
        daemon.stop()


@pytest.mark.parametrize("mode", ["cache", "storage"])
def test_snapshot_under_load_is_a_prefix_of_what_the_client_wrote(s3, tmp_path, mode):
    blocks = 512
    with Daemon(tmp_path, {**SMALL, **EAGER}) as daemon:
        daemon.create("v", "--backend", s3.url(f"load-{mode}"), "--mode", mode, "--persist", "on-write", size="16M")
        journal = Journal(daemon, "v", blocks, 5)
        journal.start()
        least = []
        for number in range(3):
            daemon.until(lambda: journal.failure or len(journal.written) > 500 * (number + 1))
            least.append(len(journal.written))
            daemon.ok("volume", "snapshot", "v", f"s{number}")
        journal.end()
        for number in range(3):
            clone(daemon, f"v@s{number}", f"c{number}", s3.url(f"load-{mode}-{number}"))
            client = daemon.nbd(f"c{number}")
            journal.check_prefix(client, least[number])
            client.shutdown()
        daemon.stop()


def test_snapshot_keeps_what_its_parent_overwrites_and_a_deleted_clone_frees_it(s3, tmp_path):
    size = 24 * MIB
    kept, model = Model(7, size), None
    with Daemon(tmp_path, {**SMALL, **EAGER}) as daemon:
        daemon.create("v", "--backend", s3.url("gc"), "--persist", "on-write", size="24M")
        client = daemon.nbd("v")
        kept.write(client, 400, lengths=(65536,))
        daemon.ok("volume", "snapshot", "v", "kept")
        clone(daemon, "v@kept", "c", s3.url("gc-clone"))
        model = copy_of(kept, 8)

        def overwrite():
            for _ in range(5):
                for at in range(0, size, MIB):
                    data = model.rng.randbytes(MIB)
                    client.pwrite(data, at)
                    model.image[at : at + MIB] = data
                daemon.ok("volume", "flush", "v")

        overwrite()
        daemon.until(lambda: counters(daemon)["store"]["deletes"] > 0)
        daemon.ok("volume", "evict", "c")
        check(daemon, "c", kept)
        refused(daemon.cli("volume", "snapshot", "v", "kept", "--delete"), 1, "these clones begin with: c:",
                "delete them first")
        refused(daemon.cli("volume", "delete", "v"), 1, "it has clones", " c: ", "--keep-data")
        assert daemon.volume("v")["state"] == "healthy"
        shared = [name for name in s3.names("gc") if name.startswith("data/")]
        assert any(name.startswith("clone/") for name in s3.names("gc"))
        done = daemon.ok("volume", "delete", "c")
        assert "kept at" not in done
        assert not any(name.startswith("clone/") for name in s3.names("gc"))
        daemon.until(lambda: all(name.startswith("manifest/") for name in s3.names("gc-clone")))
        refused(daemon.cli("volume", "create", "c", "--backend", s3.url("gc-clone")), 2, "was deleted",
                "name another place")
        refused(daemon.cli("volume", "delete", "v"), 1, "it has snapshots: kept:")
        daemon.ok("volume", "snapshot", "v", "kept", "--delete")
        assert snapshots(daemon) == []
        # What was kept for them alone goes.
        gone = set(shared)
        daemon.until(lambda: gone - set(s3.names("gc")))
        overwrite()
        daemon.until(lambda: not set(shared) & set(s3.names("gc")))
        model.check(client)
        client.shutdown()
        daemon.ok("volume", "delete", "v")
        daemon.stop()


def test_snapshot_loop_survives_kills_of_the_daemon(s3, tmp_path):
    """Each snapshot is made of a volume whose blocks all say which one it is. Whatever the daemon was killed
    in, those that are there hold that."""
    rng = random.Random(11)
    blocks = 64
    sure, number = set(), 0
    with Daemon(tmp_path, {**SMALL, **EAGER}) as daemon:
        daemon.create("v", "--backend", s3.url("killed-snapshots"), "--persist", "on-write", size="16M")
        for _ in range(4):
            enough = threading.Event()
            seen = []

            def work():
                nonlocal number
                while not enough.is_set():
                    number += 1
                    try:
                        client = daemon.nbd("v")
                        client.pwrite(number.to_bytes(8, "little") * (BLOCK // 8 * blocks), 0)
                        client.shutdown()
                    except Exception:  # noqa: BLE001 - the daemon was killed
                        return
                    if daemon.cli("volume", "snapshot", "v", f"s{number}").returncode != 0:
                        return
                    seen.append(number)

            worker = threading.Thread(target=work, daemon=True)
            worker.start()
            daemon.until(lambda: len(seen) >= 2)
            enough.wait(rng.random() / 5)
            daemon.kill()
            enough.set()
            worker.join(THREAD_SECONDS)
            assert not worker.is_alive()
            sure.update(seen)
            daemon.start()
        there = [int(one["name"][1:]) for one in snapshots(daemon)]
        assert sure <= set(there) and len(there) == len(set(there))
        for one in sorted(there)[-6:]:
            clone(daemon, f"v@s{one}", f"c{one}", s3.url(f"killed-clone-{one}"))
            data = daemon.read(f"c{one}", blocks * BLOCK)
            assert data == one.to_bytes(8, "little") * (BLOCK // 8 * blocks), f"snapshot {one}"
        for one in there:
            if one not in sorted(there)[-6:]:
                daemon.ok("volume", "snapshot", "v", f"s{one}", "--delete")
        assert len(snapshots(daemon)) == 6
        daemon.stop()


def test_clone_that_another_node_has_is_not_deleted_with_the_volume(s3, tmp_path):
    one, two = homes(tmp_path)
    model = Model(13, 16 * MIB)
    with Daemon(one, SMALL) as first, Daemon(two, SMALL) as second:
        first.create("v", "--backend", s3.url("taken"), size="16M")
        client = first.nbd("v")
        model.write(client, 60)
        client.shutdown()
        clone(first, "v", "c", s3.url("taken-clone"))
        check(first, "c", model)
        second.json("volume", "create", "c", "--backend", s3.url("taken-clone"))
        # The first one does not know yet.
        first.ok("volume", "delete", "c")
        second.ok("volume", "evict", "c")
        check(second, "c", model)
        refused(first.cli("volume", "delete", "v"), 1, "it has clones", f"{s3.bucket}/taken-clone")
        first.ok("volume", "delete", "v", "--keep-data")
        second.ok("volume", "evict", "c")
        check(second, "c", model)
        second.stop()
        first.stop()


def test_snapshots_are_refused_where_they_cannot_be(s3, tmp_path):
    with Daemon(tmp_path, SMALL) as daemon:
        daemon.create("f", "--backend", s3.url("other"), size="16M")
        daemon.create("v", "--backend", s3.url("refused"), size="16M")
        daemon.ok("volume", "snapshot", "v", "s")
        refused(daemon.cli("volume", "snapshot", "v", "s"), 1, "there is a snapshot s", "--delete")
        refused(daemon.cli("volume", "snapshot", "v", "a/b"), 2, "snapshot name")
        refused(daemon.cli("volume", "snapshot", "v", "t", "--delete"), 1, "no snapshot t", "--list")
        refused(daemon.cli("volume", "snapshot", "absent", "s"), 1, "no volume absent")

        def made(source, url, name="c"):
            return daemon.cli("volume", "clone", source, name, "--backend", url)

        refused(made("v@t", s3.url("new")), 1, "no snapshot t")
        refused(made("v@s", s3.url("refused")), 2, "is the backend of volume v")
        refused(made("v@s", "file:/nowhere/c"), 2, "name a place in the same store")
        refused(made("v@s", s3.url("new"), "f"), 1, "it exists already")
        refused(made("v@s", s3.url("new", secret_key="hush")), 2, "holds a secret")
        assert {volume["name"] for volume in daemon.json("volume", "list")} == {"f", "v"}
        assert s3.names("new") == [] and s3.names("never") == []
        daemon.stop()


@pytest.mark.parametrize("state", ["away", "killed"])
def test_snapshot_of_a_store_that_is_away_ends_with_the_reason(s3, tmp_path, state):
    """Nothing is made, clients go on, and when the store is back it can be made."""
    name = f"gone-{state}"
    model = Model(17, 16 * MIB)
    with Daemon(tmp_path, SMALL) as daemon:
        url = s3.url(name, retry_s=2, timeout_s=5)
        daemon.create("v", "--backend", url, *DIRTY, size="16M")
        client = daemon.nbd("v")
        model.write(client, 50)
        s3.gateway_down()
        try:
            body = '{"name": "s"}'
            status, _ = daemon.api("POST", "/v1/volumes/v/snapshots", body)
            assert status >= 500
            model.write(client, 50)
            if state == "killed":
                client.shutdown()
                daemon.kill()
        finally:
            s3.up()
        if state == "killed":
            daemon.start()
            client = daemon.nbd("v")
        daemon.until(lambda: daemon.volume("v")["phase"] == "open")
        daemon.until(lambda: daemon.cli("volume", "snapshot", "v", "s").returncode == 0)
        clone(daemon, "v@s", "c", s3.url(f"{name}-clone"))
        check(daemon, "c", model)
        client.shutdown()
        daemon.stop()
