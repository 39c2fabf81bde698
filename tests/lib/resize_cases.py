"""A volume in storage mode that changes its size, and the model of that."""

import threading

from daemon import Daemon
from home_layouts import store_bytes
from object_stores import THREAD_SECONDS, Model
from programs import MIB
from snapshot_cases import check, copy_of
from storage_cases import SMALL_LOG

# A page of a home's map is of 63 MiB.
START = 48 * MIB


GROWN = 130 * MIB


def create(daemon, backend, *arguments, size=START):
    return daemon.create("v", "--mode", "storage", "--backend", backend, *SMALL_LOG, *arguments, size=str(size))


def home_file(daemon):
    return daemon.data / "volumes/v/home"


def resize(daemon, size, model=None):
    """Give the volume a size, and the model with it; the local store's file has the room for that, and no more."""
    assert daemon.json("volume", "resize", "v", "--size", str(size), "--shrink")["bytes"] == size
    needs = store_bytes(size, is_encrypted=bool(daemon.volume("v").get("encryption")))
    assert home_file(daemon).stat().st_size == needs
    assert home_file(daemon).stat().st_blocks * 512 >= needs
    if model:
        model_resized(model, size)


def model_resized(model, size):
    model.image[size:] = bytes(max(size - len(model.image), 0))


def write(daemon, model, count=200):
    client = daemon.nbd("v")
    model.write(client, count)
    client.shutdown()


def spread(daemon, model):
    """Something in every page of the map: dirty, clean, zero, and only in the backend."""
    client = daemon.nbd("v")
    model.write(client, 100)
    daemon.ok("volume", "flush", "v")
    model.write(client, 100)
    for offset in range(0, len(model.image) - 4 * MIB, 20 * MIB):
        client.zero(4 * MIB, offset)
        model.image[offset : offset + 4 * MIB] = bytes(4 * MIB)
    client.flush()
    client.shutdown()


class Command(threading.Thread):
    """A command that runs beside whatever the test does."""

    def __init__(self, daemon, *words):
        super().__init__(daemon=True)
        self.daemon_under_test, self.words = daemon, words
        self.start()

    def run(self):
        self.done = self.daemon_under_test.cli(*self.words)

    def end(self):
        self.join(THREAD_SECONDS)
        assert not self.is_alive(), f"{self.words} never ended"
        return self.done

    def ok(self):
        done = self.end()
        assert done.returncode == 0, f"{self.words}\n{done.stdout}{done.stderr}"
        return done.stdout


def resized_over(one, place):
    """A volume over a place is resized, also while it is tiered out and killed; what the place has then."""
    model = Model(13, START)
    with Daemon(one) as daemon:
        create(daemon, place)
        write(daemon, model)
        resize(daemon, GROWN, model)
        spread(daemon, model)
        flush = Command(daemon, "volume", "flush", "v")
        resize(daemon, GROWN + 20 * MIB, model)
        flush.ok()
        resize(daemon, 40 * MIB, model)
        daemon.kill()
        daemon.start()
        resize(daemon, GROWN, model)
        write(daemon, model)
        check(daemon, "v", model)
        daemon.ok("volume", "scrub", "v", "--rate", "1G")
        daemon.ok("volume", "flush", "v")
        tiered = copy_of(model, 14)
        write(daemon, model)
        # It is not there, and no resize shows it.
        resize(daemon, GROWN + 20 * MIB, model)
        check(daemon, "v", model)
        daemon.kill()
    model_resized(tiered, GROWN + 20 * MIB)
    return tiered
