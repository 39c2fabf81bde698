"""The SSD tier of the read cache: its state, and that no restart brings old data back."""

import os
import random
import shutil
import subprocess

import pytest
from daemon import MIB, Daemon, samples

CACHE = {"memory_max_mib": 192, "cache_total_size_mib": 64}
CONTENT_BYTES = 8 * MIB


def cache(daemon):
    return daemon.json("status")["cache"]


def online(daemon):
    daemon.until(lambda: cache(daemon)["ssd_state"] == "online")


def write_through(daemon, data):
    """Write to the volume, and have the backend hold it."""
    daemon.write("v", data)
    daemon.ok("volume", "flush", "v")


def filled(daemon, data):
    """A volume of which some of the content, whole segments of it, is in the SSD tier."""
    online(daemon)
    daemon.create("v")
    write_through(daemon, data)
    daemon.ok("volume", "evict", "v")
    daemon.ok("volume", "promote", "v")
    assert cache(daemon)["ssd_used_bytes"] >= 2 * MIB


def content(seed):
    return random.Random(seed).randbytes(CONTENT_BYTES)


def state_of(page):
    """The state that a page of metrics names; it must be one."""
    found = samples(page)
    prefix = 'hdcs_cache_ssd_state{state="'
    states = {name[len(prefix) : -2]: v for name, v in found.items() if name.startswith(prefix)}
    assert set(states) == {"off", "warming", "online", "offline"}
    assert sum(states.values()) == 1
    return next(state for state, value in states.items() if value == 1)


def test_cache_is_warm_after_a_restart_and_says_what_it_is(tmp_path):
    old = content(1)
    with Daemon(tmp_path, CACHE) as daemon:
        filled(daemon, old)
        identity = (daemon.data / "node.json").read_text()
        daemon.stop()
    with Daemon(tmp_path, CACHE) as daemon:
        online(daemon)
        assert cache(daemon)["warm_lines"] > 0
        assert cache(daemon)["ssd_reason"] is None
        assert state_of(daemon.api("GET", "/metrics")[1]) == "online"
        assert daemon.read("v", CONTENT_BYTES) == old
        assert (daemon.data / "node.json").read_text() == identity
        daemon.stop()
    with Daemon(tmp_path, {**CACHE, "cache_total_size_mib": 0}) as daemon:
        assert cache(daemon)["ssd_state"] == "off"
        assert state_of(daemon.api("GET", "/metrics")[1]) == "off"
        assert "off" in daemon.ok("status")
        daemon.stop()


@pytest.mark.parametrize("meanwhile", ["off", "elsewhere", "lost"])
def test_cache_that_missed_writes_starts_empty(tmp_path, meanwhile):
    old, new = content(1), content(2)
    with Daemon(tmp_path, CACHE) as daemon:
        filled(daemon, old)
        daemon.stop()
    here, away = daemon.data / "cache", tmp_path / "away"
    other = {
        "off": {"cache_total_size_mib": 0},
        "elsewhere": {"cache_path": str(tmp_path / "other")},
        "lost": {},
    }[meanwhile]
    if meanwhile == "lost":
        shutil.move(here, away)
    with Daemon(tmp_path, {**CACHE, **other}) as daemon:
        write_through(daemon, new)
        daemon.stop()
    if meanwhile == "lost":
        shutil.move(away, here)
    with Daemon(tmp_path, CACHE) as daemon:
        online(daemon)
        assert cache(daemon)["warm_lines"] == 0
        assert daemon.read("v", CONTENT_BYTES) == new
        daemon.stop()


def test_cache_device_that_is_not_there_is_refused(tmp_path):
    path = "/dev/hdcs-no-such-device"
    Daemon(tmp_path, {"cache_path": path}).refuses(1, path, "no such device", "cache_path")
    assert not os.path.exists(path)


@pytest.fixture
def failing_disk(tmp_path):
    """A file whose writes fail while `fail` exists."""
    home = tmp_path / "disk"
    (home / "mount").mkdir(parents=True)
    if not all(shutil.which(tool) for tool in ("nbdkit", "nbdfuse", "fusermount3")):
        pytest.skip("nbdkit and nbdfuse are needed")
    server = [
        "nbdkit", "--exit-with-parent", "--filter=error", "memory", "64M",
        f"error-file={home / 'fail'}", "error-pwrite=EIO", "error-pwrite-rate=100%",
        "error-pread-rate=0",
    ]
    fuse = ["nbdfuse", str(home / "mount/disk"), "[", *server, "]"]
    process = subprocess.Popen(fuse, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not (home / "mount/disk").exists():
            assert process.poll() is None
        yield home
    finally:
        subprocess.run(["fusermount3", "-u", "-z", home / "mount"], check=True)
        process.wait(10)


def test_cache_device_that_dies_is_told_and_holds_up_nothing(tmp_path, failing_disk):
    config = {**CACHE, "cache_path": str(failing_disk / "mount/disk")}
    old, new = content(1), content(2)
    with Daemon(tmp_path, config) as daemon:
        filled(daemon, old)
        identity = (daemon.data / "node.json").read_text()
        (failing_disk / "fail").touch()
        write_through(daemon, new)
        assert (daemon.data / "node.json").read_text() != identity
        found = cache(daemon)
        assert found["ssd_state"] == "offline"
        assert "restart the daemon" in found["ssd_reason"]
        assert found["ssd_reason"] in " ".join(daemon.ok("status").split())
        assert state_of(daemon.api("GET", "/metrics")[1]) == "offline"
        assert "new identity" in daemon.log()
        assert daemon.read("v", CONTENT_BYTES) == new
        daemon.stop()
    (failing_disk / "fail").unlink()
    with Daemon(tmp_path, config) as daemon:
        online(daemon)
        assert cache(daemon)["warm_lines"] == 0
        assert daemon.read("v", CONTENT_BYTES) == new
        daemon.stop()
