"""A node with little memory serves hundreds of volumes; `make stress-volumes` has a thousand."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from daemon import Daemon
from programs import MIB

VOLUMES = int(os.environ.get("HDCS_VOLUMES", "200"))
# The least that a node chooses for itself, which has room for 500.
MEMORY_MIB = 1024 if VOLUMES <= 400 else 2048
SMALL_LOG = ["--log-size", "16M"]


def resident(process):
    """Memory that a process has, but for pages of files."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the kernel does not say")


def test_many_volumes_serve_and_survive_a_kill(tmp_path):
    names = [f"vm-{number:03}" for number in range(VOLUMES)]
    with Daemon(tmp_path, {"memory_max_mib": MEMORY_MIB}) as daemon, ThreadPoolExecutor(4) as workers:
        daemon.create("first", *SMALL_LOG, size="64M")
        before = resident(daemon.process)
        list(workers.map(lambda name: daemon.create(name, *SMALL_LOG, size="64M"), names))
        each = (resident(daemon.process) - before) / VOLUMES
        print(f"\neach idle volume takes {each / 1024:.0f} KiB")
        assert each < MIB / 2
        for number, name in enumerate(names):
            daemon.write(name, bytes([number % 256]) * 4096)
        daemon.kill()
        daemon.start()

        def phases():
            return {volume["name"]: volume["phase"] for volume in daemon.json("volume", "list")}

        daemon.until(lambda: phases() == dict.fromkeys(["first", *names], "open"))
        for number, name in enumerate(names):
            assert daemon.read(name, 4096) == bytes([number % 256]) * 4096
        daemon.stop()
