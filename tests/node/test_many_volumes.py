"""A node with the memory that it chooses itself serves hundreds of volumes."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from daemon import Daemon
from programs import MIB

VOLUMES = 200
SMALL_LOG = ["--log-size", "16M"]


def resident(process):
    """Memory that a process has, but for pages of files."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the kernel does not say")


def test_two_hundred_volumes_serve_and_survive_a_kill(tmp_path):
    names = [f"vm-{number:03}" for number in range(VOLUMES)]
    with Daemon(tmp_path, {"memory_max_mib": 1024}) as daemon, ThreadPoolExecutor(4) as workers:
        daemon.create("first", *SMALL_LOG, size="64M")
        before = resident(daemon.process)
        list(workers.map(lambda name: daemon.create(name, *SMALL_LOG, size="64M"), names))
        each = (resident(daemon.process) - before) / VOLUMES
        print(f"\neach idle volume takes {each / 1024:.0f} KiB")
        assert each < MIB / 2
        for number, name in enumerate(names):
            daemon.write(name, bytes([number]) * 4096)
        daemon.kill()
        daemon.start()
        phases = {volume["name"]: volume["phase"] for volume in daemon.json("volume", "list")}
        assert phases == dict.fromkeys(["first", *names], "open")
        for number, name in enumerate(names):
            assert daemon.read(name, 4096) == bytes([number]) * 4096
        daemon.stop()
