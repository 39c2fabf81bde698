"""Snapshots and clones of volumes on images of a real Ceph: they are Ceph's own, as `rbd` shows them."""

import json
import random
import signal

import pytest

import snapshot_cases as cases
from daemon import DIRTY, Daemon, refused
from object_stores import Model
from programs import MIB
from snapshot_cases import SMALL, check, snapshots


class Images:
    """Images of one test."""

    copy = []

    def __init__(self, cluster, prefix):
        self.cluster, self.prefix = cluster, prefix

    def image(self, name):
        return f"rbd/{self.prefix}-{name}"

    def url(self, name):
        return self.cluster.url(self.image(name))

    def snapshot_url(self, name, snap):
        return self.cluster.url(f"{self.image(name)}@{snap}")

    def export(self, name):
        return self.cluster.export(self.image(name))

    def export_snapshot(self, name, snap):
        return self.cluster.export(f"{self.image(name)}@{snap}")

    def absent(self, name):
        return self.image(name).split("/")[1] not in self.cluster.rbd("ls", "rbd").decode().split()

    def leftovers(self, name):
        return []

    def snaps(self, name):
        listed = self.cluster.rbd("snap", "ls", self.image(name), "--format", "json")
        return [one["name"] for one in json.loads(listed)]


@pytest.fixture
def images(cluster, request):
    return Images(cluster, request.node.name.replace("test_", "").replace("[", "-").replace("]", ""))


@pytest.mark.parametrize("mode", ["cache", "storage"])
def test_rbd_snapshot_holds_what_was_acknowledged(images, tmp_path, mode):
    cases.holds_what_was_acknowledged(images, tmp_path, "--mode", mode)
    assert images.snaps("first") == ["monday"]


@pytest.mark.parametrize("policy", ["write-back", "write-through"])
def test_rbd_snapshot_under_load_is_a_prefix(images, tmp_path, policy):
    cases.under_load_is_a_prefix(images, tmp_path, "--policy", policy)


def test_rbd_snapshot_in_storage_mode_under_load_is_a_prefix(images, tmp_path):
    cases.under_load_is_a_prefix(images, tmp_path, "--mode", "storage")


def test_rbd_snapshot_and_clone_survive_kills(images, tmp_path):
    cases.survives_kills(images, tmp_path)


def test_rbd_clones_second_boot_reads_the_cache(images, tmp_path):
    cases.second_boot_reads_the_cache(images, tmp_path)


def test_rbd_snapshots_are_refused(images, tmp_path):
    cases.are_refused(images, tmp_path, "file:/nowhere/c")


def test_rbd_snapshots_are_those_of_ceph(images, cluster, tmp_path):
    """What `rbd` makes, HDCS lists, clones and deletes, and the other way round; what has clones stays."""
    data = random.Random(3).randbytes(MIB)
    image = images.image("v")
    with Daemon(tmp_path, SMALL) as daemon:
        daemon.create("v", "--backend", images.url("v"), size="16M")
        daemon.write("v", data)
        daemon.ok("volume", "snapshot", "v", "ours")
        cluster.rbd("snap", "create", "--no-progress", f"{image}@theirs")
        cluster.rbd("snap", "create", "--no-progress", f"{image}@not ours: a name")
        cluster.rbd("snap", "protect", f"{image}@theirs")
        assert [one["name"] for one in snapshots(daemon)] == ["ours", "theirs", "not ours: a name"]
        assert images.snaps("v") == ["ours", "theirs", "not ours: a name"]
        refused(daemon.cli("volume", "snapshot", "v", "theirs", "--delete"), 1, "it is protected",
                f"`rbd snap unprotect {image}@theirs`")
        daemon.json("volume", "clone", "v@theirs", "c", "--backend", images.url("c"))
        assert daemon.read("c", MIB) == data
        cluster.rbd("clone", "--rbd-default-clone-format", "2", f"{image}@ours", images.image("by-hand"))
        assert {one["name"]: one["clones"] for one in snapshots(daemon)} == {
            "ours": [f"rbd:{images.image('by-hand')}"], "theirs": ["c"], "not ours: a name": [],
        }
        refused(daemon.cli("volume", "snapshot", "v", "ours", "--delete"), 1, "these clones begin with",
                images.image("by-hand"), "`rbd rm`", "`rbd flatten`")
        cluster.rbd("flatten", "--no-progress", images.image("by-hand"))
        daemon.ok("volume", "snapshot", "v", "ours", "--delete")
        assert images.snaps("v") == ["theirs", "not ours: a name"]
        # A volume that is deleted leaves its image, and so what its snapshot is needed for.
        daemon.ok("volume", "delete", "c")
        refused(daemon.cli("volume", "snapshot", "v", "theirs", "--delete"), 1, f"rbd:{images.image('c')}")
        cluster.rbd("rm", "--no-progress", images.image("c"))
        cluster.rbd("snap", "unprotect", f"{image}@theirs")
        daemon.ok("volume", "snapshot", "v", "theirs", "--delete")
        # A limit that Ceph was given is its to say.
        daemon.stop()
        cluster.rbd("snap", "limit", "set", "--limit", "1", image)
        daemon.start()
        refused(daemon.cli("volume", "snapshot", "v", "more"), 1, "as many snapshots as it can have")
        # A clone without a snapshot needs what it began with for as long as it is there.
        daemon.stop()
        cluster.rbd("snap", "limit", "clear", image)
        daemon.start()
        daemon.json("volume", "clone", "v", "now", "--backend", images.url("now"))
        kept = daemon.json("volume", "snapshot", "v", "--list")
        assert kept["clones"] == ["now"] and len(kept["snapshots"]) == 1
        # Nothing of it goes with the volume.
        daemon.ok("volume", "delete", "v")
        assert daemon.read("now", MIB) == data
        daemon.stop()
    assert images.snaps("v") == ["not ours: a name"]


def test_rbd_snapshot_of_a_cluster_that_is_away(images, cluster, tmp_path):
    """It can be cancelled, nothing is made, clients go on, and when the cluster is back it is made."""
    model = Model(17, 16 * MIB)
    with Daemon(tmp_path, SMALL) as daemon:
        daemon.create("v", "--backend", images.url("v"), *DIRTY, size="16M")
        client = daemon.nbd("v")
        model.write(client, 50)
        daemon.ok("volume", "snapshot", "v", "before")
        model.write(client, 50)
        cluster.signal_osd(signal.SIGSTOP)
        try:
            status, text = daemon.api("POST", "/v1/volumes/v/snapshots", '{"name": "s"}')
            assert status >= 500, text
            model.write(client, 50)
        finally:
            cluster.signal_osd(signal.SIGCONT)
            # As in test_rbd_faults.py: a lease that ran out is only renewed by peering.
            cluster.ceph("osd", "down", "0")
        daemon.until(lambda: daemon.cli("volume", "snapshot", "v", "s").returncode == 0)
        daemon.json("volume", "clone", "v@s", "c", "--backend", images.url("c"))
        check(daemon, "c", model)
        client.shutdown()
        daemon.stop()
    assert images.snaps("v") == ["before", "s"]
