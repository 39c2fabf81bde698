"""What happens to volumes on Ceph when something dies: the cluster, the daemon, the right to the image, the
space. Nothing acknowledged is lost, and nothing is written by who has lost the right to."""

import random
import signal

from daemon import DIRTY, Daemon, refused
from object_stores import BLOCK, EAGER, Worker
from programs import MIB

OUTAGE_MS = 62_000


def content(model, size):
    """The image that a model of {offset: bytes} describes."""
    image = bytearray(size)
    for offset, data in model.items():
        image[offset : offset + len(data)] = data
    return bytes(image)


class Load(Worker):
    """Writes blocks, and knows what it wrote."""

    def __init__(self, daemon, name, size, seed):
        super().__init__(daemon, name)
        self.rng = random.Random(seed)
        self.size = size
        self.model = {}

    def round(self):
        offset = self.rng.randrange(self.size // BLOCK) * BLOCK
        data = self.rng.randbytes(BLOCK)
        self.client.pwrite(data, offset)
        self.model[offset] = data
        if self.rng.random() < 0.02:
            self.client.flush()
            check = self.rng.choice(list(self.model))
            assert self.client.pread(BLOCK, check) == self.model[check]

    def end(self):
        """Stop; what the volume holds now."""
        super().end()
        return self.model


def test_rbd_cluster_goes_and_comes_back_under_load(cluster, tmp_path):
    size = 64 * MIB
    with Daemon(tmp_path, EAGER) as daemon:
        daemon.create("v", "--backend", cluster.url("rbd/load"), "--persist", "on-write", size="64M")
        load = Load(daemon, "v", size, 1)
        load.start()
        counters = lambda: daemon.volume("v")["counters"]  # noqa: E731
        daemon.until(lambda: counters()["destaged_bytes"] > MIB)
        cluster.kill_osd()
        before = counters()["destaged_bytes"]
        # Clients go on: what they write stays in the log.
        daemon.until(lambda: counters()["dirty_bytes"] > 2 * MIB)
        assert not load.failure
        cluster.up()
        daemon.until(lambda: counters()["destaged_bytes"] > before + 4 * MIB)
        model = load.end()
        daemon.ok("volume", "flush", "v")
        assert daemon.volume("v")["state"] == "healthy"
        assert cluster.export("rbd/load") == content(model, size)
        daemon.stop()
    cluster.rbd("rm", "--no-progress", "rbd/load")


def test_rbd_outage_of_more_than_a_minute(cluster, tmp_path):
    """The disks answer nothing. One volume is under load, and its writers come to wait; another one belongs to
    a daemon that is started meanwhile."""
    homes = [tmp_path / "one", tmp_path / "two"]
    for home in homes:
        home.mkdir()
    size = 64 * MIB
    with Daemon(homes[0], EAGER) as one, Daemon(homes[1]) as two:
        two.create("late", "--backend", cluster.url("rbd/late"), *DIRTY)
        two.create("w", *DIRTY)
        two.write("late", b"o" * 2 * MIB)
        two.ok("volume", "flush", "late")
        two.write("late", b"n" * MIB)
        two.stop()
        one.create("v", "--backend", cluster.url("rbd/long"), "--persist", "on-write", size="64M")
        load = Load(one, "v", size, 5)
        load.start()
        counters = lambda name: one.volume(name)["counters"]  # noqa: E731
        one.until(lambda: counters("v")["destaged_bytes"] > MIB)
        cluster.signal_osd(signal.SIGSTOP)
        try:
            two.start()
            one.until(lambda: counters("v")["throttled_requests"] > 0)
            assert two.read("w", MIB) == bytes(MIB)
            two.until(lambda: two.volume("late")["phase"] == "waiting")
            one.until(lambda: (one.volume("v")["trouble_ms"] or 0) > OUTAGE_MS)
            shown = {found["part"]: found for found in one.json("status")["problems"]}
            found = shown["volume v"]
            assert found["state"] == "degraded" and "backend: no answer for" in found["reason"]
            assert one.json("status")["state"] == "degraded"
            assert "volume v: degraded for" in one.ok("status")
            assert load.is_alive() and not load.failure and counters("v")["errors"] == 0
            before = counters("v")["destaged_bytes"]
        finally:
            cluster.signal_osd(signal.SIGCONT)
            # The only OSD of a pool may wait for ever for the read lease that ran out while it stood still;
            # peering anew gives it one.
            cluster.ceph("osd", "down", "0")
        one.until(lambda: counters("v")["destaged_bytes"] > before + 4 * MIB)
        model = load.end()
        one.ok("volume", "flush", "v")
        assert one.json("status")["problems"] == []
        assert cluster.export("rbd/long") == content(model, size)
        two.until(lambda: two.volume("late")["state"] == "healthy")
        assert two.read("late", 2 * MIB) == b"n" * MIB + b"o" * MIB
        two.ok("volume", "flush", "late")
        one.stop()
        two.stop()
    assert cluster.export("rbd/late") == content({0: b"n" * MIB, MIB: b"o" * MIB}, 16 * MIB)


def test_rbd_stop_while_the_cluster_is_away(cluster, tmp_path):
    """It ends in bounded time although the image cannot be closed, and takes it back at the next start."""
    with Daemon(tmp_path) as daemon:
        daemon.create("v", "--backend", cluster.url("rbd/away"), *DIRTY)
        daemon.write("v", b"a" * MIB)
        daemon.ok("volume", "flush", "v")
        cluster.kill_osd()
        try:
            daemon.stop()
            daemon.tells("ended without closing backends")
        finally:
            cluster.up()
        daemon.start()
        assert daemon.log().count("its process on this host has ended") == 1
        # The same with writes to the image under way.
        daemon.write("v", b"b" * MIB, MIB)
        cluster.kill_osd()
        try:
            assert daemon.api("POST", "/v1/volumes/v/flush", "{}")[0] < 300
            daemon.signal(signal.SIGTERM)
            assert daemon.wait() == 1
            daemon.tells("stopped without closing volumes that hang")
            daemon.tells("left with operations under way")
        finally:
            cluster.up()
        daemon.start()
        assert daemon.log().count("its process on this host has ended") == 2
        assert daemon.read("v", 2 * MIB) == b"a" * MIB + b"b" * MIB
        daemon.ok("volume", "flush", "v")
        daemon.stop()
    assert cluster.export("rbd/away") == content({0: b"a" * MIB, MIB: b"b" * MIB}, 16 * MIB)


def test_rbd_daemon_killed_takes_its_image_back_at_once(cluster, tmp_path):
    rng = random.Random(4)
    model = {}
    with Daemon(tmp_path, EAGER) as daemon:
        # The right to lock a dead client out is among those that an ordinary user has.
        url = cluster.url("rbd/killed", **cluster.user("hdcs", tmp_path))
        daemon.create("v", "--backend", url, "--persist", "on-write", size="32M")
        for _ in range(3):
            client = daemon.nbd("v")
            for _ in range(200):
                offset = rng.randrange(8192) * BLOCK
                model[offset] = rng.randbytes(BLOCK)
                client.pwrite(model[offset], offset)
            daemon.kill()
            # The cluster believes for half a minute that the dead one still holds the image.
            daemon.start()
            assert daemon.volume("v")["state"] == "healthy", daemon.log()
            client = daemon.nbd("v")
            for offset, data in model.items():
                assert client.pread(BLOCK, offset) == data
            client.shutdown()
        assert daemon.log().count("its process on this host has ended") == 3
        daemon.ok("volume", "flush", "v")
        assert cluster.export("rbd/killed") == content(model, 32 * MIB)


def test_rbd_second_owner_is_refused_or_fences_the_first(cluster, tmp_path):
    homes = [tmp_path / "one", tmp_path / "two"]
    for home in homes:
        home.mkdir()
    size = 16 * MIB
    with Daemon(homes[0]) as one, Daemon(homes[1], EAGER) as two:
        one.create("v", "--backend", cluster.url("rbd/owned"), *DIRTY)
        one.write("v", b"1" * MIB)
        one.ok("volume", "flush", "v")
        # Dirty when the image is taken away, so it must never get there.
        one.write("v", b"2" * MIB, 4 * MIB)
        owner = cluster.rbd("lock", "ls", "rbd/owned", "--format", "json").decode()
        address = owner.split('"address":"')[1].split('"')[0]
        refused(two.cli("volume", "create", "v", "--backend", cluster.url("rbd/owned")), 1,
                f"in use by the client at {address}", "steal=on")
        assert one.volume("v")["state"] == "healthy"
        two.json("volume", "create", "v", "--backend", cluster.url("rbd/owned", steal="on"))
        two.write("v", b"3" * MIB, 8 * MIB)
        two.ok("volume", "flush", "v")
        one.ok("volume", "set", "v", "destage_age_max_ms=10", "dirty_ratio_min=0")
        one.tells("another client has taken the image over")
        one.until(lambda: one.volume("v")["state"] == "error")
        refused(one.cli("volume", "flush", "v"), 1, "another owner took it over")
        assert one.volume("v")["counters"]["dirty_bytes"] >= MIB
        expected = content({0: b"1" * MIB, 8 * MIB: b"3" * MIB}, size)
        assert cluster.export("rbd/owned") == expected
        assert two.volume("v")["state"] == "healthy"
        one.stop()
        two.stop()
    assert cluster.export("rbd/owned") == expected


def test_rbd_full_pool_fills_the_log_and_recovers(cluster, tmp_path):
    rng = random.Random(6)
    model = {}
    cluster.make_pool("small")
    cluster.ceph("osd", "pool", "set-quota", "small", "max_bytes", str(4 * MIB))
    with Daemon(tmp_path, EAGER) as daemon:
        daemon.create("v", "--backend", cluster.url("small/v"), "--persist", "on-write", size="64M")
        client = daemon.nbd("v")

        def write_one():
            offset = rng.randrange(64 * MIB // BLOCK) * BLOCK
            model[offset] = rng.randbytes(BLOCK)
            client.pwrite(model[offset], offset)
            client.flush()
            return daemon.volume("v")["state"] == "degraded"

        for index in range(8):
            model[index * MIB] = rng.randbytes(MIB)
            client.pwrite(model[index * MIB], index * MIB)
        # The cluster notices only after a while that the pool is full.
        daemon.until(write_one)
        assert daemon.volume("v")["counters"]["backend_errors"] > 0
        image = content(model, 64 * MIB)
        for offset in range(0, 64 * MIB, MIB):
            assert client.pread(MIB, offset) == image[offset : offset + MIB]
        cluster.ceph("osd", "pool", "set-quota", "small", "max_bytes", "0")
        daemon.until(lambda: daemon.volume("v")["state"] == "healthy")
        daemon.ok("volume", "flush", "v")
        client.shutdown()
        assert cluster.export("small/v") == image
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0
