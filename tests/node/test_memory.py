"""The process keeps to `memory_max_mib`, and what does not fit is refused, with what to do."""

import random
import threading
import time
from pathlib import Path

import nbd

from daemon import Daemon, refused, samples
from lying_s3 import LyingS3
from programs import MIB

CAP_MIB = 256
# What the kernel counts beside what the program asks for: pages of the program's file, and what its allocator has not
# given back.
OVERHEAD_MIB = 48
LOAD_SECONDS = 15
CLIENTS = 2
# Requests of each client at once.
DEPTH = 16
PARTS = ("fixed", "connections", "pool", "cache_index", "volumes", "frames")
SMALL_LOG = ["--log-size", "16M"]


def most_resident(process):
    """The most memory that a process has had, pages of its files included."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the kernel does not say")


def memory(daemon):
    return daemon.json("status")["memory"]


def reserved(found):
    return sum(found[f"volumes_{part}_bytes"] for part in ("log", "tables", "buffers"))


def at_once(client, begin):
    """Have many requests under way together; `begin` begins one of them."""
    cookies = [begin() for _ in range(DEPTH)]
    for cookie in cookies:
        while not client.aio_command_completed(cookie):
            client.poll(-1)


def load(daemon, name, size, until, seed, failures):
    """Small and large writes, discards and reads at random."""
    rng = random.Random(seed)
    large, small = nbd.Buffer(MIB), nbd.Buffer(512)
    into = [nbd.Buffer(MIB) for _ in range(DEPTH)]

    def place(bytes_each):
        return bytes_each * rng.randrange(size // bytes_each)

    try:
        client = daemon.nbd(name)
        while time.monotonic() < until:
            at_once(client, lambda: client.aio_pwrite(small, place(512)))
            at_once(client, lambda: client.aio_pwrite(large, place(MIB)))
            at_once(client, lambda: client.aio_trim(4096, place(4096)))
            waiting = iter(into)
            at_once(client, lambda: client.aio_pread(next(waiting), place(MIB)))
            client.flush()
        client.shutdown()
    except Exception as error:
        failures.append(f"{name}: {error!r}")


def test_memory_stays_within_the_cap_under_load(tmp_path):
    config = {"memory_max_mib": CAP_MIB, "cache_total_size_mib": 64, "log_size_mib": 32}
    sizes = {"packed": 256, "home-1": 512, "home-2": 256, "cached-1": 512, "cached-2": 256}
    with Daemon(tmp_path, config) as daemon:
        for name, mib in sizes.items():
            mode = ["--mode", "storage"] if name.startswith("home") else []
            packed = ["--set", "compression=lz4"] if name == "packed" else []
            daemon.create(name, *mode, *packed, *SMALL_LOG, size=f"{mib}M")
        until = time.monotonic() + LOAD_SECONDS
        failures = []
        clients = [
            threading.Thread(target=load, args=(daemon, name, mib * MIB, until, f"{name} {number}", failures))
            for name, mib in sizes.items()
            for number in range(CLIENTS)
        ]
        for client in clients:
            client.start()
        while any(client.is_alive() for client in clients):
            found = memory(daemon)
            assert reserved(found) <= found["budget_volumes_bytes"]
            # What a tier copies is part of what a home has.
            daemon.ok("volume", "flush", "home-1")
            time.sleep(0.2)
        for client in clients:
            client.join()
        assert failures == []
        found, most = memory(daemon), most_resident(daemon.process)
        print(f"\nat most {most >> 20} MiB of {CAP_MIB}, of which volumes have reserved {reserved(found) >> 20}")
        assert most <= (CAP_MIB + OVERHEAD_MIB) << 20
        assert found["rss_max_bytes"] <= most
        # It was no load that anything would stand.
        assert most >= CAP_MIB * MIB // 2
        daemon.stop()


def test_memory_is_shown_by_part(tmp_path):
    with Daemon(tmp_path, {"memory_max_mib": CAP_MIB}) as daemon:
        before = memory(daemon)
        assert before["max_bytes"] == CAP_MIB * MIB
        assert sum(before[f"budget_{part}_bytes"] for part in PARTS) == CAP_MIB * MIB
        assert reserved(before) == 0
        daemon.create("home", "--mode", "storage", size="1G")
        found = memory(daemon)
        # 0.16 MiB for the map of a GiB at least, 2 MiB of checksums for each 256 MiB that are in memory, 12 MiB of pools.
        assert found["volumes_tables_bytes"] > MIB // 4
        assert found["volumes_buffers_bytes"] > 12 * MIB
        assert found["volumes_log_bytes"] > 0
        page = samples(daemon.api("GET", "/metrics")[1])
        for part in ("log", "tables", "buffers"):
            assert page[f'hdcs_memory_bytes{{part="volumes_{part}"}}'] == found[f"volumes_{part}_bytes"]
        for part in PARTS:
            assert page[f'hdcs_memory_bytes{{part="budget_{part}"}}'] == found[f"budget_{part}_bytes"]
        assert "reserved" in daemon.ok("status")
        daemon.ok("volume", "delete", "home", "--discard-dirty")
        daemon.until(lambda: reserved(memory(daemon)) == 0)
        daemon.stop()


def test_volume_that_memory_has_no_room_for_is_refused(tmp_path):
    short = ["MiB of memory", "for volumes are left", "memory_max_mib"]
    with Daemon(tmp_path, {"memory_max_mib": 160}) as daemon:
        large = daemon.cli("volume", "create", "large", "--size", "4T", "--mode", "storage", *SMALL_LOG)
        refused(large, 2, "large", *short)
        assert not (daemon.data / "volumes" / "large").exists()
        daemon.create("home", "--mode", "storage", *SMALL_LOG, size="64M")
        daemon.write("home", b"kept" * 1024)
        names = []
        while len(names) < 20:
            name = f"home-{len(names)}"
            made = daemon.cli("volume", "create", name, "--size", "64M", "--mode", "storage", *SMALL_LOG)
            if made.returncode:
                break
            names.append(name)
        refused(made, 2, name, *short)
        assert len(names) < 20
        found = memory(daemon)
        assert reserved(found) <= found["budget_volumes_bytes"]
        # A map that does not fit is not begun, and all is as it was.
        grown = daemon.cli("volume", "resize", "home", "--size", "4T")
        refused(grown, 2, "home", *short)
        assert daemon.volume("home")["bytes"] == 64 * MIB
        assert daemon.read("home", 4096) == b"kept" * 1024
        if names:
            daemon.ok("volume", "delete", names.pop(), "--discard-dirty")
            daemon.create("again", "--mode", "storage", *SMALL_LOG, size="64M")
        daemon.stop()


def test_volumes_that_were_open_before_a_restart_are_open_after_it(tmp_path):
    credentials = tmp_path / "credentials"
    credentials.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    credentials.chmod(0o600)
    homes = [f"home-{number}" for number in range(8)]

    def phases(daemon):
        return {volume["name"]: volume["phase"] for volume in daemon.json("volume", "list")}

    with LyingS3() as s3, Daemon(tmp_path, {"memory_max_mib": 512, "volumes_memory_mib": 240}) as daemon:
        for name in homes:
            daemon.create(name, "--mode", "storage", *SMALL_LOG, size="64M")
        # The last one has what the others have left, and comes first at a start.
        daemon.create("archive", *SMALL_LOG, "--backend", s3.url(credentials))
        daemon.stop()
        daemon.start()
        assert phases(daemon) == dict.fromkeys(["archive", *homes], "open")
        daemon.stop()
        # What finds too little waits until there is more.
        daemon.config["volumes_memory_mib"] = 150
        daemon.start()
        short = [name for name, phase in phases(daemon).items() if phase != "open"]
        assert short and "archive" not in short
        assert {phases(daemon)[name] for name in short} <= {"waiting", "opening"}
        daemon.ok("volume", "delete", homes[0], "--discard-dirty")
        daemon.until(lambda: phases(daemon)[short[0]] == "open")
        daemon.stop()


def test_volume_with_a_large_log_is_opened_with_a_cap_that_became_small(tmp_path):
    with Daemon(tmp_path, {"memory_max_mib": 512}) as daemon:
        daemon.create("wide", "--log-size", "512M")
        daemon.create("small", *SMALL_LOG)
        daemon.write("wide", b"dirty" * 4096 + bytes(1536))
        daemon.stop()
        daemon.config["memory_max_mib"] = 128
        daemon.start()
        # What indexes take follows what logs hold, and not how large they are.
        assert [daemon.volume(name)["state"] for name in ("small", "wide")] == ["healthy"] * 2
        assert daemon.read("wide", 4096) == (b"dirty" * 4096)[:4096]
        daemon.stop()
