"""The node and its log are lost in mid-load: the backing file alone is a disk that honours FUA could have been.

A client, libnbd, does what the journal of a file system does: data, a flush, a commit block with FUA, and after its
acknowledgement what relies on it. Whatever of that is in the backing file, the commit block and the data before it are
there too. `make crash-fua KILLS=200` does it at length."""

import os
import random
import threading
import time

import nbd

from daemon import Daemon
from programs import MIB

KILLS = int(os.environ.get("HDCS_FUA_KILLS", "5"))
SEED = int(os.environ.get("HDCS_FUA_SEED", "0")) or random.randrange(1, 1 << 32)

BLOCK = 4096
SIZE = 16 * MIB
SLOTS = 48
# Blocks: commit blocks at even ones, beside each of them a place for what relies on it; then places far away; then
# data that the commit block promises.
FAR, DATA = 1024, 2048
FAR_BLOCKS, DATA_BLOCKS = 512, 97

VOLUMES = {"onwrite": "on-write", "onflush": "on-flush"}
# Each write takes its own time, so that a kill finds some of a generation written.
SLOW = "delay_jitter_us=20000"
EAGER = ["--set", "destage_age_max_ms=100"]


def stamped(number):
    return number.to_bytes(8, "little") * (BLOCK // 8)


class Client(threading.Thread):
    """One connection, which writes transactions one after another until the node is gone."""

    def __init__(self, daemon, name, first, seed):
        super().__init__(daemon=True)
        self.nbd = daemon.nbd(name)
        self.name_of_volume, self.first, self.next = name, first, first
        self.random = random.Random(seed)

    def write(self, block, number, fua=False):
        self.nbd.pwrite(stamped(number), block * BLOCK, nbd.CMD_FLAG_FUA if fua else 0)

    def transaction(self, number):
        if number % 2:
            self.write(DATA + number % DATA_BLOCKS, number)
            self.nbd.flush()
        self.write(2 * (number % SLOTS), number, fua=True)
        # Acknowledged: this may rely on it from now on. Some of it lies beside commit blocks, where destage gathers.
        for _ in range(self.random.randrange(1, 5)):
            self.write(2 * self.random.randrange(SLOTS) + 1, number)
            self.write(FAR + self.random.randrange(FAR_BLOCKS), number)

    def run(self):
        try:
            while True:
                self.transaction(self.next)
                self.next += 1
        except nbd.Error:
            pass


def violations(image, first):
    """What of the transactions from `first` on is in the image without what it relies on."""
    held = image.read_bytes()

    def numbers(block):
        found = [
            int.from_bytes(held[at : at + 8], "little")
            for at in range(block * BLOCK, (block + 1) * BLOCK, 512)
        ]
        return min(found), max(found)

    relies = [numbers(2 * slot + 1)[1] for slot in range(SLOTS)]
    relies += [numbers(block)[1] for block in range(FAR, FAR + FAR_BLOCKS)]
    newest = max(relies)
    wrong = []
    for number in range(max(first, newest - SLOTS + 1), newest + 1):
        if numbers(2 * (number % SLOTS))[0] < number:
            wrong.append(f"{newest} relies on commit block {number}, which is not there")
    commits = [numbers(2 * slot)[1] for slot in range(SLOTS)]
    newest = max([newest, *commits])
    for number in range(max(first, newest - DATA_BLOCKS + 1), newest + 1):
        if number % 2 and numbers(DATA + number % DATA_BLOCKS)[0] < number:
            wrong.append(f"{newest} is there, and data of {number}, flushed before, is not")
    return newest, wrong


def test_crash_fua_orders_the_backend(tmp_path):
    print(f"HDCS_FUA_SEED={SEED} HDCS_FUA_KILLS={KILLS}")
    rng = random.Random(SEED)
    images = {name: tmp_path / f"{name}.img" for name in VOLUMES}
    first = dict.fromkeys(VOLUMES, 1)
    reached = dict.fromkeys(VOLUMES, 0)
    wrong = []
    with Daemon(tmp_path) as daemon:
        for name, persist in VOLUMES.items():
            daemon.create(name, "--backend", f"file:{images[name]}?{SLOW}", "--persist", persist, *EAGER)
        for kill in range(KILLS):
            clients = [Client(daemon, name, first[name], rng.random()) for name in VOLUMES]
            for client in clients:
                client.start()
            time.sleep(rng.uniform(0.15, 0.6))
            daemon.kill()
            for client in clients:
                client.join(60)
                assert not client.is_alive(), "a client of a node that is gone waits"
                name = client.name_of_volume
                newest, found = violations(images[name], client.first)
                reached[name] += newest >= client.first
                wrong += [f"kill {kill}, {name}: {why}" for why in found]
                first[name] = client.next + 1
                daemon.log_of(name).unlink()
            daemon.start()
            for name in VOLUMES:
                daemon.ok("volume", "open", name, "--discard-dirty")
        daemon.stop()
    print(f"{KILLS} kills, {reached} of them with something new in the backing file, {len(wrong)} violations")
    assert not wrong, f"seed {SEED}, {len(wrong)}:\n" + "\n".join(wrong[:20])
    # Without that it would have looked at nothing.
    assert all(count * 2 >= KILLS for count in reached.values()), reached
