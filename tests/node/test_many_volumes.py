"""A node with little memory serves hundreds of volumes; `make stress-volumes` has a thousand, and prints figures."""

import os
import random
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbd

from daemon import DIRTY, Daemon
from programs import MIB

VOLUMES = int(os.environ.get("HDCS_VOLUMES", "200"))
HAS_FIGURES = "HDCS_VOLUMES" in os.environ
# The least that a node chooses for itself, which has room for 500.
MEMORY_MIB = 1024 if VOLUMES <= 400 else 2048
SHARDS = os.environ.get("HDCS_SHARDS")
LOG_MIB = 16
VOLUME_BLOCKS = 64 * MIB // 4096
# A tenth of the log, where figures are wanted.
DIRTY_BLOCKS = LOG_MIB * MIB // 4096 // 10 if HAS_FIGURES else 16
DEPTH = 16
CPU_ROUNDS, CPU_WRITES = 7, 4000
PROBES = 8


def resident(process):
    """Memory that a process has, but for pages of files."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the kernel does not say")


def processor_seconds(process):
    """Time of processors that a process has had, threads that have ended included."""
    # The kernel's number of the clock that counts it (CPUCLOCK_SCHED).
    return time.clock_gettime((~process.pid << 3) | 2)


def device_bytes_read(process):
    for line in Path(f"/proc/{process.pid}/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise AssertionError("the kernel does not say")


def content(name):
    """What a volume is filled with: blocks anywhere, each with bytes of its own."""
    chosen = random.Random(name)
    places = chosen.sample(range(VOLUME_BLOCKS), DIRTY_BLOCKS)
    return [(place * 4096, chosen.randbytes(16) * 256) for place in places]


def fill(daemon, name):
    client = daemon.nbd(name)
    under_way = []
    for offset, data in content(name):
        buffer = nbd.Buffer.from_bytearray(bytearray(data))
        under_way.append(client.aio_pwrite(buffer, offset))
        while client.aio_in_flight() >= DEPTH:
            client.poll(-1)
    while client.aio_in_flight():
        client.poll(-1)
    assert all(client.aio_command_completed(cookie) for cookie in under_way)
    client.shutdown()


def verify(daemon, name):
    client = daemon.nbd(name)
    for offset, data in content(name):
        assert client.pread(4096, offset) == data, f"{name} at {offset}"
    client.shutdown()


def processor_us_each(daemon, name):
    """What 4 KiB writes cost the node, one at a time."""
    client = daemon.nbd(name)
    before = processor_seconds(daemon.process)
    for number in range(CPU_WRITES):
        client.pwrite(bytes(4096), number * 7919 % VOLUME_BLOCKS * 4096)
    used = processor_seconds(daemon.process) - before
    client.shutdown()
    return used / CPU_WRITES * 1e6


def compare_with_one_alone(daemon, home):
    """A write beside idle volumes and without them, in turns."""
    home.mkdir()
    with Daemon(home, daemon.config) as alone:
        alone.create("first", "--log-size", f"{LOG_MIB}M", size="64M")
        pairs = [(processor_us_each(daemon, "first"), processor_us_each(alone, "first")) for _ in range(CPU_ROUNDS)]
        alone.stop()
    beside, without = (statistics.median(side) for side in zip(*pairs))
    ratio = statistics.median(one / other for one, other in pairs)
    print(f"a 4 KiB write costs {beside:.1f} us of processors beside {VOLUMES} idle volumes, {without:.1f} without: {ratio:.2f}")


class Probe(threading.Thread):
    """A client that asks for its volume until it gets it, and reads."""

    def __init__(self, daemon, name, began):
        super().__init__(daemon=True)
        self.node, self.name_of_volume, self.began = daemon, name, began
        self.served = None
        self.start()

    def run(self):
        while True:
            try:
                self.node.read(self.name_of_volume, 4096)
                self.served = time.monotonic() - self.began
                return
            except nbd.Error:
                time.sleep(0.02)


def start(daemon, names):
    """Start, and watch what opens when."""
    began = time.monotonic()
    daemon.spawn()
    probes = [Probe(daemon, name, began) for name in names[:: max(1, len(names) // PROBES)]]
    seen = []

    def all_open():
        try:
            status = daemon.status()
        except OSError:
            return False
        seen.append(status["start"])
        time.sleep(0.05)
        return status["volumes"] == len(names) + 1 and status["volumes_opening"] == 0 and status["start"] is None

    daemon.until(all_open)
    opened = time.monotonic() - began
    for probe in probes:
        probe.join()
    seen = [start for start in seen if start]
    assert all(start["volumes"] == len(names) + 1 for start in seen), seen
    assert all(one["left"] >= next_one["left"] for one, next_one in zip(seen, seen[1:])), seen
    daemon.ready()
    print(
        f"after a kill: first client served after {min(probe.served for probe in probes):.2f} s, all volumes open after "
        f"{opened:.2f} s; {processor_seconds(daemon.process):.2f} s of processors, "
        f"{device_bytes_read(daemon.process) / MIB:.0f} MiB read, {resident(daemon.process) / MIB:.0f} MiB of memory; "
        f"the start was seen {len(seen)} times under way"
    )


def test_many_volumes_serve_and_survive_a_kill(tmp_path):
    names = [f"vm-{number:03}" for number in range(VOLUMES)]
    config = {"memory_max_mib": MEMORY_MIB, **({"shards": int(SHARDS)} if SHARDS else {})}
    with Daemon(tmp_path, config) as daemon, ThreadPoolExecutor(4) as workers:
        small_log = ["--log-size", f"{LOG_MIB}M"]
        daemon.create("first", *small_log, size="64M")
        before = resident(daemon.process)
        list(workers.map(lambda name: daemon.create(name, *small_log, *DIRTY, size="64M"), names))
        each = (resident(daemon.process) - before) / VOLUMES
        print(f"\neach idle volume takes {each / 1024:.0f} KiB")
        assert each < MIB / 2
        if HAS_FIGURES:
            compare_with_one_alone(daemon, tmp_path / "alone")
        list(workers.map(lambda name: fill(daemon, name), names))
        dirty = daemon.status()["dirty_bytes"]
        assert dirty >= VOLUMES * DIRTY_BLOCKS * 4096, "it stays in the logs"
        for _ in range(3 if HAS_FIGURES else 1):
            daemon.kill()
            start(daemon, names)
        assert "commands wait already" not in daemon.log(), "no client is left without a reason"
        states = daemon.status()["volumes_by_state"]
        assert states["healthy"] == VOLUMES + 1, states
        list(workers.map(lambda name: verify(daemon, name), names))
        daemon.stop()
