"""Whatever clients do, the daemon lives, keeps to its memory, and serves the others.

`HOSTILE_SECONDS` says how long each attack lasts (`make hostile TIME=60`). With `HOSTILE_SLOWEST_MS` the slowest
answer of the client beside is a bar; without it, as in `make test`, nothing depends on how fast the machine is.
The bar is for the daemon: time of an answer in which the disk ended nothing at all is not counted.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hostile
from daemon import Daemon
from hostile import ATTACKS, VOLUME_BYTES
from programs import CLIENT_SECONDS, MIB, free_port

SECONDS = float(os.environ.get("HOSTILE_SECONDS", 3))
SLOWEST_MS = float(os.environ.get("HOSTILE_SLOWEST_MS", 0))
PROGRAM = Path(hostile.__file__)
MEMORY_MIB = 512


def resident(process):
    """Memory of a process, without the pages of its files."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


class Disk:
    """The times in which the disk below a directory had something to do and ended nothing."""

    def __init__(self, directory):
        device = os.stat(directory).st_dev
        self.stat = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
        self.stalls = []
        self.ended = None

    def look(self):
        if not self.stat.exists():
            # Of a file system without a device of its own nothing is known.
            return
        counts = [int(word) for word in self.stat.read_text().split()]
        # Reads, writes, discards and flushes that have ended; after the first two, how many are under way.
        ended, under_way = sum(counts[at] for at in (0, 4, 11, 15)), counts[8]
        now = time.monotonic()
        if under_way == 0 or ended != self.ended:
            self.ended = ended
            self.stalls.append([now, now])
        else:
            self.stalls[-1][1] = now

    def longest(self):
        return max((end - begin for begin, end in self.stalls), default=0)

    def within(self, begin, end):
        """How much of a time that was."""
        return sum(max(0, min(end, last) - max(begin, first)) for first, last in self.stalls)


def start(*arguments):
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def daemon(tmp_path, request):
    config = {"memory_max_mib": MEMORY_MIB, "log_size_mib": 64, "nbd_stall_max_ms": 5000}
    if "tls" in request.node.name:
        certificates = request.getfixturevalue("certificates")
        config["nbd_listen"] = ["unix:nbd.sock", f"tcp:127.0.0.1:{free_port()}"]
        config["nbd_tls_cert_file"] = str(certificates / "server-cert.pem")
        config["nbd_tls_key_file"] = str(certificates / "server-key.pem")
        config["nbd_tls_client_ca_file"] = str(certificates / "ca-cert.pem")
    with Daemon(tmp_path, config) as daemon:
        daemon.create("target", size=str(VOLUME_BYTES))
        daemon.create("own", size="64M")
        # Not in the log any more, and then in DRAM.
        daemon.write("target", os.urandom(4 * MIB))
        daemon.ok("volume", "flush", "target")
        for _ in range(2):
            daemon.read("target", 2 * MIB)
        yield daemon


@pytest.mark.parametrize("attack", ATTACKS)
def test_attack_hurts_nobody_else(daemon, attack):
    address = str(daemon.data / "nbd.sock")
    target = daemon.config["nbd_listen"][1][4:] if attack == "tls_flood" else address
    before = resident(daemon.process)
    watcher = start("watch", address, "own", "target", SECONDS)
    # From here on nobody has to let it in.
    assert watcher.stdout.readline() == "ready\n", watcher.communicate()
    hostile = start("attack", attack, target, "target", SECONDS)
    most, disk = before, Disk(daemon.data)
    try:
        while watcher.poll() is None and daemon.process.poll() is None:
            most = max(most, resident(daemon.process))
            disk.look()
            time.sleep(0.01)
        told, trouble = watcher.communicate(timeout=CLIENT_SECONDS)
        _, complaint = hostile.communicate(timeout=CLIENT_SECONDS)
    finally:
        for process in (hostile, watcher):
            if process.poll() is None:
                process.kill()
            process.wait()
    assert daemon.process.poll() is None, f"it has ended\n{daemon.log()[-3000:]}"
    assert not complaint, complaint
    assert watcher.returncode == 0, trouble
    turn_ms = daemon.json("status")["longest_turn_us"] / 1000
    seen = json.loads(told)
    own_ms = max((end - begin - disk.within(begin, end) for begin, end in seen["slow"]), default=0) * 1000
    # For `make hostile`, which shows it.
    print(
        f"\n{attack}: {seen['answers']} answers beside it, slowest {seen['slowest_ms']} ms, "
        f"longest turn {turn_ms:.1f} ms, without stalls of the disk {own_ms:.1f} ms (longest {disk.longest() * 1000:.1f}), "
        f"memory {before >> 20} to {most >> 20} of {MEMORY_MIB} MiB"
    )
    assert seen["errors"] == []
    assert most <= MEMORY_MIB << 20
    assert not SLOWEST_MS or own_ms <= SLOWEST_MS
    # What it held is given back, and all is as before.
    daemon.until(lambda: daemon.json("status")["connections"] == 0)
    assert len(daemon.read("target", 4096, MIB)) == 4096
    daemon.stop()
