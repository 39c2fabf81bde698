"""Real object stores for the tests of a session, and what is done alike on all of them: S3 by Ceph's
gateway over a cluster on loopback, HDFS by a NameNode and three DataNodes."""

import os
import random
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import boto3
import pytest

from daemon import DIRTY
from programs import EXAMPLES, MIB, ROOT, free_ports

UP_SECONDS = 240
COMMAND_SECONDS = 60
SUITE_SECONDS = 120
THREAD_SECONDS = 90
BLOCK = 4096
# What brings a store up uses so many ports from its first one.
PORTS = 110

# Everything goes to the store at once.
EAGER = {"destage_age_max_ms": 10, "dirty_ratio_min": 0, "memory_max_mib": 1024, "volumes_memory_mib": 600}
# Memory for a few volumes over objects.
ROOM = {"memory_max_mib": 1024, "volumes_memory_mib": 600}
OUTAGE_SECONDS = 61
# A log that has room for what is written in an outage.
ROOMY = {**EAGER, "log_size_mib": 384}


def script(name, *arguments, timeout=UP_SECONDS):
    """Run a script of testenv/; the last line that it printed, as a mapping."""
    command = [ROOT / "testenv" / name, *map(str, arguments)]
    # Into files: what it leaves running would hold a pipe open.
    with tempfile.TemporaryFile() as out:
        done = subprocess.run(command, stdout=out, stderr=out, timeout=timeout)
        out.seek(0)
        text = out.read().decode(errors="replace")
    assert done.returncode == 0, f"{command}: {done.returncode}\n{text[-3000:]}"
    last = text.strip().splitlines()[-1] if text.strip() else ""
    return dict(word.split("=", 1) for word in last.split() if "=" in word)


class Home:
    """A directory with a short path, since unix sockets are in it."""

    # What a snapshot or clone there has to be told: nothing, since it copies nothing.
    copy = ()

    def __init__(self, name):
        self.directory = Path(tempfile.mkdtemp(prefix=f"hdcs-{name}-", dir="/tmp"))
        self.port = free_ports(PORTS)

    def remove(self):
        shutil.rmtree(self.directory, ignore_errors=True)


class S3(Home):
    """The gateway, its bucket and a key for it."""

    def __init__(self):
        super().__init__("s3")

    def up(self):
        """Start what does not run."""
        said = script("s3-up.sh", self.directory, "--port", self.port, "--timeout", 120)
        self.endpoint, self.bucket = said["endpoint"], said["bucket"]
        self.tls, self.ca = said["tls"], said["ca"]
        self.credentials = Path(said["credentials"])

    def quota(self, objects):
        """The user may have so many objects; `None` for any number."""
        def admin(*command):
            done = subprocess.run(
                ["radosgw-admin", "-c", self.directory / "ceph.conf", "quota", *command,
                 "--quota-scope=user", "--uid=hdcs"],
                capture_output=True, text=True, timeout=COMMAND_SECONDS,
            )
            assert done.returncode == 0, done.stdout + done.stderr
        if objects is None:
            admin("disable")
        else:
            admin("set", f"--max-objects={objects}")
            admin("enable")

    def gateway_down(self):
        """The gateway vanishes; what it stored stays."""
        script("s3-down.sh", self.directory, "--gateway")

    def end(self):
        try:
            script("s3-down.sh", self.directory, "--purge")
        finally:
            self.remove()

    def url(self, prefix, **options):
        given = {"endpoint": self.endpoint, "credentials": self.credentials, **options}
        query = "&".join(f"{name}={value}" for name, value in given.items())
        return f"s3://{self.bucket}/{prefix}?{query}"

    def client(self):
        """A client that knows nothing of HDCS."""
        keys = dict(
            line.split(" = ") for line in self.credentials.read_text().splitlines() if " = " in line
        )
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=keys["aws_access_key_id"],
            aws_secret_access_key=keys["aws_secret_access_key"],
        )

    def names(self, prefix):
        """What is below a prefix, without it."""
        pages = self.client().get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=f"{prefix}/"
        )
        found = [item["Key"] for page in pages for item in page.get("Contents", [])]
        return [name[len(prefix) + 1 :] for name in found]


class Hdfs(Home):
    """The NameNode and its DataNodes."""

    def __init__(self):
        super().__init__("hdfs")

    def up(self):
        said = script(
            "hdfs-up.sh", self.directory, "--port", self.port, "--parent", os.getpid(),
            "--timeout", 120,
        )
        self.namenode, self.path = said["namenode"], said["path"]

    def do(self, *command):
        """Stop or start a part of it."""
        script("hdfs-do.sh", self.directory, *command, timeout=COMMAND_SECONDS)

    def end(self):
        try:
            script("hdfs-down.sh", self.directory)
        finally:
            self.remove()

    def url(self, name, **options):
        query = "&".join(f"{key}={value}" for key, value in options.items())
        return f"hdfs://{self.namenode}{self.path}/{name}?{query}"


def served(store):
    """A store that runs until the session ends."""
    try:
        store.up()
        yield store
    finally:
        store.end()


@pytest.fixture(scope="session")
def s3():
    """The S3, started for the first test that needs it."""
    yield from served(S3())


@pytest.fixture(scope="session")
def hdfs():
    """The HDFS, started for the first test that needs it."""
    yield from served(Hdfs())


def conforms(example, url):
    """A conformance suite passes over a place."""
    done = subprocess.run(
        [EXAMPLES / example, url], capture_output=True, text=True, timeout=SUITE_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "conforms" in done.stdout


class Model:
    """Random writes to a volume, and what it must hold after them."""

    def __init__(self, seed, size):
        self.rng = random.Random(seed)
        self.image = bytearray(size)

    def write(self, client, count, lengths=(512, BLOCK, 12800, 65536)):
        for _ in range(count):
            length = self.rng.choice(lengths)
            offset = self.rng.randrange((len(self.image) - length) // 512) * 512
            data = self.rng.randbytes(length)
            client.pwrite(data, offset)
            self.image[offset : offset + length] = data
            self.last = offset, length
        client.flush()

    def check(self, client):
        for offset in range(0, len(self.image), MIB):
            expected = bytes(self.image[offset : offset + MIB])
            assert bytes(client.pread(len(expected), offset)) == expected, f"at {offset}"


class Worker(threading.Thread):
    """A client that does one `round` after another until it is told to stop."""

    def __init__(self, daemon, name):
        super().__init__(daemon=True)
        self.client = daemon.nbd(name)
        self.enough = threading.Event()
        self.failure = None

    def run(self):
        try:
            while not self.enough.is_set():
                self.round()
        except Exception as error:  # noqa: BLE001 - whatever it was, the test fails with it
            self.failure = error

    def end(self):
        """Stop; whatever failed is raised."""
        self.enough.set()
        self.join(THREAD_SECONDS)
        assert not self.is_alive(), "a request never ended"
        if self.failure:
            raise self.failure
        self.client.shutdown()


class Load(Worker):
    """Writes blocks, and knows what it wrote. It rests after every fiftieth, for a log that has to last."""

    def __init__(self, daemon, name, size, seed, lengths=(BLOCK, 65536), rest_seconds=0):
        super().__init__(daemon, name)
        self.lengths = lengths
        self.rest_seconds = rest_seconds
        self.rounds = 0
        self.model = Model(seed, size)

    def round(self):
        self.model.write(self.client, 50, self.lengths)
        offset, length = self.model.last
        expected = self.model.image[offset : offset + length]
        assert bytes(self.client.pread(length, offset)) == expected
        self.rounds += 1
        self.enough.wait(self.rest_seconds)

    def end(self):
        """Stop; what the volume holds now."""
        super().end()
        return self.model


def counters(daemon, name="v"):
    return daemon.volume(name)["counters"]


def fills(daemon, name="v"):
    """Whether a volume's log is so full that its writers are held back."""
    found = counters(daemon, name)
    return found["throttled_requests"] > 0 and found["log_used_bytes"] > found["log_ring_bytes"] * 7 // 10


def survives_kills(daemon, url, model, kills):
    """A daemon that is killed again and again finds everything that it acknowledged, and so does its store."""
    size = len(model.image) // MIB
    daemon.create("v", "--backend", url, "--persist", "on-write", size=f"{size}M")
    for _ in range(kills):
        client = daemon.nbd("v")
        model.write(client, 150)
        daemon.kill()
        daemon.start()
        client = daemon.nbd("v")
        model.check(client)
        client.shutdown()
    daemon.ok("volume", "flush", "v")
    daemon.ok("volume", "evict", "v")
    client = daemon.nbd("v")
    model.check(client)
    client.shutdown()


def serves_without_its_store(daemon, url, down, up):
    """An outage of more than a minute under load, before which the log is large enough: clients see nothing
    but service, and in the end the store has everything. What the volume holds then."""
    size = 32 * MIB
    daemon.create("v", "--backend", url, "--persist", "on-write", size=str(size))
    load = Load(daemon, "v", size, 11, lengths=(BLOCK,), rest_seconds=0.2)
    load.start()
    daemon.until(lambda: counters(daemon)["store"]["puts"] > 3)
    down()
    try:
        daemon.until(lambda: (daemon.volume("v")["trouble_ms"] or 0) > 1)
        rounds, stored = load.rounds, counters(daemon)["store"]["put_bytes"]
        # By the clock: how long the volume says it is in trouble begins anew when the kind of trouble changes.
        end = time.monotonic() + OUTAGE_SECONDS
        daemon.until(lambda: time.monotonic() > end)
        found = counters(daemon)
        assert load.is_alive() and not load.failure and load.rounds > rounds + 50
        assert found["throttled_requests"] == 0 and found["errors"] == 0
        assert found["dirty_bytes"] > 8 * MIB and found["store"]["put_bytes"] == stored
        daemon.until(lambda: daemon.json("status")["state"] == "degraded")
    finally:
        up()
    daemon.until(lambda: counters(daemon)["store"]["trouble"] is None)
    daemon.until(lambda: daemon.volume("v")["state"] == "healthy")
    model = load.end()
    daemon.ok("volume", "flush", "v")
    found = counters(daemon)
    assert found["throttled_requests"] == 0 and found["errors"] == 0
    assert daemon.json("status")["problems"] == []
    return model


def waits_for_its_store(daemon, model, down, up):
    """A daemon that is started while the store of its volume `v` is away serves the others, and opens it
    when the store is back, with what was only in its log."""
    daemon.create("w", *DIRTY)
    daemon.write("w", b"w" * MIB)
    client = daemon.nbd("v")
    model.write(client, 50)
    client.shutdown()
    assert counters(daemon)["dirty_bytes"] > 0
    daemon.stop()
    down()
    try:
        daemon.start()
        assert daemon.read("w", MIB) == b"w" * MIB
        daemon.until(lambda: daemon.volume("v")["phase"] == "waiting")
        shown = {one["part"]: one["reason"] for one in daemon.json("status")["problems"]}
        assert shown.keys() == {"volume v"} and "again by itself" in shown["volume v"], shown
    finally:
        up()
    daemon.until(lambda: daemon.volume("v")["state"] == "healthy")
    client = daemon.nbd("v")
    model.check(client)
    daemon.ok("volume", "flush", "v")
    daemon.ok("volume", "evict", "v")
    model.check(client)
    client.shutdown()
    assert daemon.json("status")["problems"] == []


def taken_over(daemon, url, model, name="v"):
    """Another node with nothing of its own finds at the place what the model says."""
    volume = daemon.create(name, "--backend", url, size=str(len(model.image)))
    assert volume["bytes"] == len(model.image)
    client = daemon.nbd(name)
    model.check(client)
    client.shutdown()


def bodies(s3, prefix):
    client = s3.client()
    return {
        name: client.get_object(Bucket=s3.bucket, Key=f"{prefix}/{name}")["Body"].read()
        for name in s3.names(prefix)
    }
