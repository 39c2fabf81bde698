"""Volumes on a real HDFS: as on S3, and with DataNodes that die while they are written to."""

from daemon import DIRTY, Daemon, homes, refused
from object_stores import (
    EAGER,
    ROOM,
    ROOMY,
    Load,
    Model,
    conforms,
    counters,
    fills,
    serves_without_its_store,
    survives_kills,
    taken_over,
    waits_for_its_store,
)
from programs import MIB
from resize_cases import resized_over


def test_hdfs_store_conforms(hdfs):
    conforms("store_conformance", hdfs.url("store-conformance"))


def test_hdfs_backend_conforms(hdfs):
    conforms("conformance", hdfs.url("backend-conformance"))


def test_hdfs_daemon_killed_finds_everything_again(hdfs, tmp_path):
    model = Model(1, 32 * MIB)
    with Daemon(tmp_path, EAGER) as daemon:
        survives_kills(daemon, hdfs.url("killed"), model, 2)
        daemon.stop()


def test_hdfs_second_owner_finds_what_was_flushed_and_fences_the_first(hdfs, tmp_path):
    one, two = homes(tmp_path)
    model = Model(2, 16 * MIB)
    with Daemon(one, ROOM) as first, Daemon(two, EAGER) as second:
        first.create("v", "--backend", hdfs.url("owned"), *DIRTY, size="16M")
        client = first.nbd("v")
        model.write(client, 60)
        first.ok("volume", "flush", "v")
        client.pwrite(b"x" * 4096, 0)
        client.flush()
        taken_over(second, hdfs.url("owned"), model)
        # It is told to write its log out, and cannot any more.
        status, _ = first.api("POST", "/v1/volumes/v/flush", "{}")
        assert status < 300, status
        fenced = "another node has taken the volume over"
        first.until(lambda: fenced in (first.volume("v")["reason"] or ""))
        other = second.nbd("v")
        model.write(other, 60)
        second.ok("volume", "flush", "v")
        second.ok("volume", "evict", "v")
        model.check(other)
        other.shutdown()
        second.stop()


def test_hdfs_snapshot_and_clone(hdfs, tmp_path):
    before = Model(3, 16 * MIB)
    with Daemon(tmp_path, ROOM) as daemon:
        daemon.create("v", "--backend", hdfs.url("parent"), *DIRTY, size="16M")
        client = daemon.nbd("v")
        before.write(client, 60)
        daemon.ok("volume", "snapshot", "v", "s")
        after = Model(4, 16 * MIB)
        after.image[:] = before.image
        after.write(client, 60)
        daemon.ok("volume", "flush", "v")
        daemon.ok("volume", "clone", "v@s", "c", "--backend", hdfs.url("child"))
        daemon.kill()
        daemon.start()
        for name, model in [("v", after), ("c", before)]:
            client = daemon.nbd(name)
            model.check(client)
            client.shutdown()
        refused(daemon.cli("volume", "snapshot", "v", "s", "--delete"), 1, "these clones begin with: c:")
        daemon.ok("volume", "delete", "c")
        daemon.ok("volume", "snapshot", "v", "s", "--delete")
        daemon.ok("volume", "delete", "v")
        daemon.stop()


def test_hdfs_datanode_dies_under_load(hdfs, tmp_path):
    size = 48 * MIB
    one, two = homes(tmp_path)
    url = hdfs.url("load", replication=2, timeout_s=10)
    with Daemon(one, EAGER) as daemon:
        daemon.create("v", "--backend", url, "--persist", "on-write", size="48M")
        load = Load(daemon, "v", size, 4)
        load.start()
        daemon.until(lambda: counters(daemon)["store"]["puts"] > 3)
        hdfs.do("kill-datanode", 1)
        try:
            before = counters(daemon)["store"]["put_bytes"]
            daemon.until(lambda: counters(daemon)["store"]["put_bytes"] > before + 8 * MIB)
            model = load.end()
            daemon.ok("volume", "flush", "v")
            daemon.ok("volume", "evict", "v")
            # All of it is there although one of the three is not.
            client = daemon.nbd("v")
            model.check(client)
            client.shutdown()
            assert counters(daemon)["errors"] == 0
        finally:
            hdfs.do("start-datanode", 1)
        daemon.stop()
    with Daemon(two, ROOM) as daemon:
        taken_over(daemon, url, model)
        daemon.stop()


def test_hdfs_namenode_goes_and_comes_back_under_load(hdfs, tmp_path):
    size = 32 * MIB
    with Daemon(tmp_path, EAGER) as daemon:
        url = hdfs.url("away", retry_s=2, timeout_s=5)
        daemon.create("v", "--backend", url, "--persist", "on-write", size="32M")
        load = Load(daemon, "v", size, 5)
        load.start()
        daemon.until(lambda: counters(daemon)["store"]["puts"] > 3)
        hdfs.do("kill-namenode")
        try:
            daemon.until(lambda: counters(daemon)["store"]["trouble"] is not None)
            daemon.until(lambda: fills(daemon))
            assert load.is_alive() and not load.failure
            assert daemon.json("status")["state"] == "degraded"
        finally:
            hdfs.do("start-namenode")
        daemon.until(lambda: counters(daemon)["store"]["trouble"] is None)
        model = load.end()
        daemon.ok("volume", "flush", "v")
        daemon.ok("volume", "evict", "v")
        client = daemon.nbd("v")
        model.check(client)
        client.shutdown()
        daemon.stop()


def test_hdfs_outage_of_more_than_a_minute(hdfs, tmp_path):
    one, two = homes(tmp_path)
    url = hdfs.url("minute", retry_s=2, timeout_s=5)
    with Daemon(one, ROOMY) as daemon:
        model = serves_without_its_store(daemon, url, lambda: hdfs.do("kill-namenode"),
                                         lambda: hdfs.do("start-namenode"))
        daemon.stop()
    with Daemon(two, ROOM) as daemon:
        taken_over(daemon, url, model)
        daemon.stop()


def test_hdfs_namenode_that_is_away_at_the_start_is_waited_for(hdfs, tmp_path):
    with Daemon(tmp_path, ROOM) as daemon:
        daemon.create("v", "--backend", hdfs.url("late", retry_s=1, timeout_s=5), *DIRTY, size="16M")
        waits_for_its_store(daemon, Model(6, 16 * MIB), lambda: hdfs.do("kill-namenode"),
                            lambda: hdfs.do("start-namenode"))
        daemon.stop()


def test_hdfs_wrong_places_and_users_are_said_clearly(hdfs, tmp_path):
    with Daemon(tmp_path, ROOM) as daemon:

        def create(url):
            return daemon.cli("volume", "create", "v", "--size", "16M", "--backend", url)

        private = hdfs.url("private", user="owner")
        assert create(private).returncode == 0
        daemon.ok("volume", "delete", "v", "--keep-data")
        refused(create(hdfs.url("private", user="somebody")), 2, "Permission denied", "option `user`")
        refused(create("hdfs://127.0.0.1:1/volumes/v?retry_s=1"), 1, "HDFS at 127.0.0.1:1", "no answer within")
        refused(create("hdfs://user:word@127.0.0.1/v"), 2, "holds a secret")
        assert daemon.json("volume", "list") == []
        daemon.stop()


def test_hdfs_volume_in_storage_mode_is_resized(hdfs, tmp_path):
    one, two = homes(tmp_path)
    tiered = resized_over(one, hdfs.url("storage-resize"))
    with Daemon(two, ROOM) as daemon:
        taken_over(daemon, hdfs.url("storage-resize"), tiered)
        daemon.stop()
