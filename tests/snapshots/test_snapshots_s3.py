"""Snapshots and thin clones of volumes on a real S3: a snapshot holds what was acknowledged before it, while
clients go on; a clone shares its parent's objects and nothing else; what one of them needs is never freed."""

import pytest

import snapshot_cases as cases
from daemon import DIRTY, Daemon, homes, refused
from object_stores import BLOCK, EAGER, Model, counters
from programs import MIB
from snapshot_cases import KILLED_BLOCKS, SMALL, check, clone, content_of, copy_of, snapshots


def test_snapshot_holds_what_was_acknowledged_and_a_clone_begins_with_it(s3, tmp_path):
    with Daemon(tmp_path, SMALL) as daemon:
        _, _, after, apart = cases.go_apart(daemon, s3)
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
        clone(daemon, s3, "c@own", "cc", "first-clone-clone")
        check(daemon, "cc", apart)
        clone(daemon, s3, "v", "now", "first-now")
        check(daemon, "now", after)
        kept = daemon.json("volume", "snapshot", "v", "--list")
        assert [one["name"] for one in kept["snapshots"]] == ["monday"], "none is left behind"
        assert kept["clones"] == ["now"]
        daemon.stop()


@pytest.mark.parametrize("mode", ["cache", "storage"])
def test_snapshot_under_load_is_a_prefix_of_what_the_client_wrote(s3, tmp_path, mode):
    cases.under_load_is_a_prefix(s3, tmp_path, "--mode", mode, "--persist", "on-write", where=f"load-{mode}")


def test_snapshot_keeps_what_its_parent_overwrites_and_a_deleted_clone_frees_it(s3, tmp_path):
    size = 24 * MIB
    kept, model = Model(7, size), None
    with Daemon(tmp_path, {**EAGER, **SMALL}) as daemon:
        daemon.create("v", "--backend", s3.url("gc"), "--persist", "on-write", size="24M")
        client = daemon.nbd("v")
        kept.write(client, 400, lengths=(65536,))
        daemon.ok("volume", "snapshot", "v", "kept")
        clone(daemon, s3, "v@kept", "c", "gc-clone")
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
    """Whatever the daemon was killed in, the snapshots that are there hold what they are of."""
    with Daemon(tmp_path, {**EAGER, **SMALL}) as daemon:
        sure = cases.taken_under_kills(daemon, s3, "killed-snapshots", then=lambda number: None)
        there = [int(one["name"][1:]) for one in snapshots(daemon)]
        assert sure <= set(there) and len(there) == len(set(there))
        for one in sorted(there)[-6:]:
            clone(daemon, s3, f"v@s{one}", f"c{one}", f"killed-clone-{one}")
            data = daemon.read(f"c{one}", KILLED_BLOCKS * BLOCK)
            assert data == content_of(one), f"snapshot {one}"
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
        clone(first, s3, "v", "c", "taken-clone")
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
        clone(daemon, s3, "v@s", "c", f"{name}-clone")
        check(daemon, "c", model)
        client.shutdown()
        daemon.stop()
