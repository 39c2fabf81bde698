"""Clones of one snapshot of a real Ceph image share one cached copy of it on a node, as far as the images
have no objects of their own; what is on each image is what was written to it."""

import random

from daemon import Daemon
from object_stores import BLOCK, Model, counters
from programs import MIB

SIZE = 48 * MIB
OBJECT = 4 * MIB
CONFIG = {
    "memory_max_mib": 496, "volumes_memory_mib": 140, "cache_total_size_mib": 192, "log_size_mib": 16, "sequential_cutoff_kib": 1 << 20,
}


def whole(daemon, name, size=SIZE):
    client = daemon.nbd(name)
    data = b"".join(bytes(client.pread(MIB, offset)) for offset in range(0, size, MIB))
    client.shutdown()
    return data


def golden(cluster, tmp_path, image, data):
    """An image with a snapshot."""
    (tmp_path / "image").write_bytes(data)
    cluster.rbd("import", "--no-progress", tmp_path / "image", image)
    cluster.rbd("snap", "create", "--no-progress", f"{image}@s")


def clone(cluster, snapshot, image):
    cluster.rbd("clone", "--rbd-default-clone-format", "2", snapshot, image)


def use(daemon, cluster, name, image):
    return daemon.json("volume", "create", name, "--backend", cluster.url(image))


def asked(daemon, name):
    return counters(daemon, name)["miss_blocks"]


def test_clones_of_an_rbd_snapshot_share_what_they_have_read(cluster, tmp_path):
    rng = random.Random(11)
    # The end of it is a hole of the parent.
    data = rng.randbytes(SIZE - 2 * OBJECT) + bytes(2 * OBJECT)
    golden(cluster, tmp_path, "rbd/golden", data)
    models = {}
    with Daemon(tmp_path, CONFIG) as daemon:
        for name in ["a", "b", "c"]:
            clone(cluster, "rbd/golden@s", f"rbd/golden-{name}")
        for name in ["a", "b"]:
            use(daemon, cluster, name, f"rbd/golden-{name}")
            assert counters(daemon, name)["inherited_bytes"] == SIZE
            models[name] = Model(ord(name), SIZE)
            models[name].image[:] = data
        assert whole(daemon, "a") == data
        assert asked(daemon, "a") > 0
        assert whole(daemon, "b") == data
        assert asked(daemon, "b") == 0

        def check():
            for name, model in models.items():
                client = daemon.nbd(name)
                model.check(client)
                client.shutdown()

        for turn in range(3):
            for name, model in models.items():
                client = daemon.nbd(name)
                model.write(client, 10)
                # What is discarded does not show the parent again.
                at = rng.randrange(SIZE // OBJECT) * OBJECT
                client.trim(OBJECT, at)
                model.image[at : at + OBJECT] = bytes(OBJECT)
                client.zero(BLOCK, at // 2)
                model.image[at // 2 : at // 2 + BLOCK] = bytes(BLOCK)
                client.flush()
                client.shutdown()
                check()
            if turn:
                daemon.ok("volume", "flush", "a")
            daemon.kill()
            daemon.start()
            check()
        # Opened anew, an image tells whole objects of its own apart, and nothing else.
        for name in models:
            daemon.ok("volume", "flush", name)
        daemon.stop()
        daemon.start()
        for name in models:
            inherited = counters(daemon, name)["inherited_bytes"]
            assert inherited % OBJECT == 0 and inherited < SIZE, inherited
        check()
        use(daemon, cluster, "c", "rbd/golden-c")
        assert whole(daemon, "c") == data
        # It is cut and grows: what comes back is zero, and not the parent's.
        daemon.ok("volume", "resize", "c", "--size", str(SIZE // 2 + BLOCK), "--shrink")
        daemon.ok("volume", "resize", "c", "--size", str(SIZE))
        cut = data[: SIZE // 2 + BLOCK] + bytes(SIZE // 2 - BLOCK)
        assert whole(daemon, "c") == cut
        daemon.stop()
        daemon.start()
        assert whole(daemon, "c") == cut
        check()
        daemon.stop()
    for name, model in models.items():
        assert cluster.export(f"rbd/golden-{name}") == bytes(model.image)
    assert cluster.export("rbd/golden-c") == cut


def test_clone_of_an_rbd_snapshot_without_a_parent_any_more_is_a_volume_like_others(cluster, tmp_path):
    data = random.Random(12).randbytes(SIZE)
    golden(cluster, tmp_path, "rbd/flat", data)
    for name in ["a", "b"]:
        clone(cluster, "rbd/flat@s", f"rbd/flat-{name}")
    with Daemon(tmp_path, CONFIG) as daemon:
        use(daemon, cluster, "a", "rbd/flat-a")
        assert whole(daemon, "a") == data
        daemon.write("a", bytes(MIB))
        daemon.stop()
        cluster.rbd("flatten", "--no-progress", "rbd/flat-a")
        daemon.start()
        assert counters(daemon, "a")["inherited_bytes"] == 0
        assert whole(daemon, "a") == bytes(MIB) + data[MIB:]
        # Another one still finds what that has read, as it began.
        use(daemon, cluster, "b", "rbd/flat-b")
        daemon.online()
        assert whole(daemon, "b") == data
        assert counters(daemon, "b")["ssd_hit_blocks"] > 0
        daemon.stop()
