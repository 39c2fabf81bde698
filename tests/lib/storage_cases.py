"""Volumes in storage mode over an image, and what their tests share."""

import errno
import json
import threading

import nbd
import pytest

from daemon import hdcs, refused
from home_layouts import BLOCK
from object_stores import THREAD_SECONDS
from programs import MIB

SIZE = 48 * MIB


# A log that wraps several times while the volume is filled.
SMALL_LOG = ["--log-size", "16M", "--persist", "on-write"]


def home(daemon, name="v"):
    return daemon.volume(name)["counters"]["home"]


def create(daemon, url, *arguments, size=SIZE):
    return daemon.create("v", "--mode", "storage", "--backend", url, *SMALL_LOG, *arguments,
                         size=str(size))


def image(tmp_path):
    return tmp_path / "image"


def url(tmp_path, options=""):
    return f"file:{image(tmp_path)}{options}"


def check(daemon, model):
    client = daemon.nbd("v")
    model.check(client)
    client.shutdown()


def fill(daemon, model):
    """Every byte of the volume, then random writes over it."""
    client = daemon.nbd("v")
    for offset in range(0, len(model.image), MIB):
        data = model.rng.randbytes(MIB)
        client.pwrite(data, offset)
        model.image[offset : offset + MIB] = data
    model.write(client, 300)
    client.shutdown()


def is_tiered(daemon):
    found = home(daemon)
    return found["dirty_bytes"] + found["zero_bytes"] == 0 and found["tier"] == "idle"


def files(tmp_path):
    """Words for a clone's place, and for a file system that may have no reflinks."""
    return ["--backend", f"file:{tmp_path}/clone", "--copy"]


def kept(tmp_path, name):
    return (tmp_path / "image.hdcs-snap" / name).read_bytes()


class Post(threading.Thread):
    """A snapshot that is asked for beside whatever the test does."""

    def __init__(self, daemon, name):
        super().__init__(daemon=True)
        self.daemon_under_test, self.name_of_snapshot = daemon, name
        self.start()

    def run(self):
        body = json.dumps({"name": self.name_of_snapshot, "copy": True})
        self.answer = self.daemon_under_test.api("POST", "/v1/volumes/v/snapshots", body)

    def end(self):
        self.join(THREAD_SECONDS)
        assert not self.is_alive(), "the snapshot never ended"
        return self.answer


BAD = 5 * BLOCK


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 16]))


def is_refused(daemon, size, offset):
    client = daemon.nbd("v")
    with pytest.raises(nbd.Error) as refusal:
        client.pread(size, offset)
    client.shutdown()
    return refusal.value.errnum == errno.EIO


def is_told_and_refused(daemon, data):
    """A check names the block in which a sector has rotted; once the daemon runs, it gives the sectors beside that alone."""
    done = hdcs("check", daemon.data)
    refused(done, 1, "1 problem")
    assert f"bytes {BAD} to {BAD + BLOCK} of the volume do not match" in done.stdout, done.stdout
    daemon.start()
    assert is_refused(daemon, BLOCK, BAD)
    assert daemon.read("v", 512, BAD) == data[BAD : BAD + 512]
