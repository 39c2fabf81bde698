"""The SSD tier of the read cache: its state, and that no restart brings old data back."""

import os
import random
import shutil
import signal

import pytest

from daemon import Daemon, freeze, samples
from disks import served_disk
from programs import MIB

CACHE = {"memory_max_mib": 192, "cache_total_size_mib": 64}
CONTENT_BYTES = 8 * MIB


def write_through(daemon, data):
    """Write to the volume, and have the backend hold it."""
    daemon.write("v", data)
    daemon.ok("volume", "flush", "v")


def filled(daemon, data):
    """A volume of which some of the content, whole segments of it, is in the SSD tier."""
    daemon.online()
    daemon.create("v")
    write_through(daemon, data)
    daemon.ok("volume", "evict", "v")
    daemon.ok("volume", "promote", "v")
    assert daemon.cache()["ssd_used_bytes"] >= 2 * MIB, f"{daemon.cache()}\n{daemon.log()}"


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
        assert daemon.online()["warm_lines"] > 0
        assert daemon.cache()["ssd_reason"] is None
        assert state_of(daemon.api("GET", "/metrics")[1]) == "online"
        assert daemon.read("v", CONTENT_BYTES) == old
        assert (daemon.data / "node.json").read_text() == identity
        daemon.stop()
    with Daemon(tmp_path, {**CACHE, "cache_total_size_mib": 0}) as daemon:
        assert daemon.cache()["ssd_state"] == "off"
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
        assert daemon.online()["warm_lines"] == 0
        assert daemon.read("v", CONTENT_BYTES) == new
        daemon.stop()


def problem(daemon, part):
    """What the status says is wrong with a part; None if nothing is."""
    status = daemon.json("status")
    found = [one for one in status["problems"] if one["part"] == part]
    assert len(found) <= 1
    assert status["state"] == ("degraded" if status["problems"] else "healthy")
    return found[0] if found else None


def test_cache_device_that_is_not_there_is_done_without(tmp_path):
    path = "/dev/hdcs-no-such-device"
    data = content(1)
    with Daemon(tmp_path, {**CACHE, "cache_path": path, "cache_retry_ms": 20}) as daemon:
        daemon.tells("starts without its SSD tier")
        daemon.tells(path)
        daemon.create("v")
        write_through(daemon, data)
        assert daemon.read("v", CONTENT_BYTES) == data
        daemon.until(lambda: "the last time" in daemon.cache()["ssd_reason"])
        found = problem(daemon, "SSD tier")
        assert found["state"] == "offline" and "no such device" in found["reason"], found
        assert found["reason"] in " ".join(daemon.ok("status").split())
        assert daemon.cache()["ssd_failures"] == 1
        assert not os.path.exists(path)
        daemon.stop()


def test_cache_device_that_comes_late_is_taken_into_use(tmp_path):
    """A device with what it held before is there only after the start: nothing of that is served."""
    device = tmp_path / "link"
    config = {**CACHE, "cache_path": str(device / "cache"), "cache_retry_ms": 20}
    old, new = content(1), content(2)
    place = tmp_path / "place"
    place.mkdir()
    device.symlink_to(place)
    with Daemon(tmp_path, config) as daemon:
        filled(daemon, old)
        daemon.stop()
        # What cannot be looked at: a link that leads to itself.
        device.unlink()
        device.symlink_to(device)
        daemon.start()
        assert problem(daemon, "SSD tier")["state"] == "offline"
        write_through(daemon, new)
        device.unlink()
        device.symlink_to(place)
        daemon.online()
        assert problem(daemon, "SSD tier") is None
        found = daemon.cache()
        assert found["warm_lines"] == 0 and found["ssd_readmissions"] == 1
        assert daemon.read("v", CONTENT_BYTES) == new
        daemon.ok("volume", "evict", "v")
        daemon.ok("volume", "promote", "v")
        assert daemon.cache()["ssd_used_bytes"] >= 2 * MIB, f"{daemon.cache()}\n{daemon.log()}"
        assert daemon.read("v", CONTENT_BYTES) == new
        daemon.kill()
        daemon.start()
        assert daemon.online()["warm_lines"] > 0
        assert daemon.read("v", CONTENT_BYTES) == new
        daemon.stop()


@pytest.fixture
def failing_disk(tmp_path):
    with served_disk(tmp_path / "disk") as home:
        yield home


def test_cache_device_that_dies_is_told_and_holds_up_nothing(tmp_path, failing_disk):
    config = {**CACHE, "cache_path": str(failing_disk / "mount/disk")}
    old, new = content(1), content(2)
    with Daemon(tmp_path, config) as daemon:
        filled(daemon, old)
        identity = (daemon.data / "node.json").read_text()
        (failing_disk / "fail").touch()
        write_through(daemon, new)
        assert (daemon.data / "node.json").read_text() != identity
        found = daemon.cache()
        assert found["ssd_state"] == "offline"
        assert "failed too often in a row" in found["ssd_reason"]
        assert problem(daemon, "SSD tier")["state"] == "offline"
        shown = " ".join(daemon.ok("status").split())
        assert "failed too often in a row" in shown and "SSD tier: offline for" in shown
        assert state_of(daemon.api("GET", "/metrics")[1]) == "offline"
        daemon.tells("new identity")
        assert daemon.read("v", CONTENT_BYTES) == new
        daemon.stop()
    (failing_disk / "fail").unlink()
    with Daemon(tmp_path, config) as daemon:
        assert daemon.online()["warm_lines"] == 0
        assert daemon.read("v", CONTENT_BYTES) == new
        daemon.stop()


@pytest.mark.parametrize("how", ["fails", "full", "pulled"])
def test_cache_device_that_dies_comes_back_empty(tmp_path, how):
    """Its writes fail, find no space, or it is gone and another one comes in its place."""
    error = "ENOSPC" if how == "full" else "EIO"
    with served_disk(tmp_path / "disk", error) as disk, served_disk(tmp_path / "other") as other:
        place, new = tmp_path / "place", tmp_path / "new"
        place.symlink_to(disk / "mount/disk")
        new.symlink_to(other / "mount/disk")
        if how == "pulled":
            comes_back_empty(tmp_path, place, disk.pull, lambda: new.rename(place))
        else:
            comes_back_empty(tmp_path, place, (disk / "fail").touch, (disk / "fail").unlink)


def comes_back_empty(tmp_path, place, fail, heal):
    config = {**CACHE, "cache_path": str(place), "cache_retry_ms": 50}
    old, new = content(1), content(2)
    with Daemon(tmp_path, config) as daemon:
        filled(daemon, old)
        fail()
        write_through(daemon, new)
        daemon.until(lambda: "the last time" in (daemon.cache()["ssd_reason"] or ""))
        assert daemon.cache()["ssd_state"] == "offline"
        heal()
        daemon.online()
        found = daemon.cache()
        assert found["ssd_reason"] is None
        assert found["ssd_failures"] == 1 and found["ssd_readmissions"] == 1
        page = samples(daemon.api("GET", "/metrics")[1])
        assert page["hdcs_cache_ssd_failures_total"] == 1
        assert page["hdcs_cache_ssd_readmissions_total"] == 1
        assert problem(daemon, "SSD tier") is None
        assert "1, 1" in daemon.ok("status")
        assert daemon.read("v", CONTENT_BYTES) == new
        daemon.ok("volume", "evict", "v")
        daemon.ok("volume", "promote", "v")
        assert found["ssd_used_bytes"] < daemon.cache()["ssd_used_bytes"]
        assert daemon.read("v", CONTENT_BYTES) == new
        daemon.stop()


def test_cache_device_that_hangs_holds_up_nothing_and_comes_back(tmp_path, failing_disk):
    """Reads, writes and destage go on beside a cache device that does not answer; so does the end."""
    config = {
        **CACHE, "cache_path": str(failing_disk / "mount/disk"),
        "cache_answer_max_ms": 300, "cache_retry_ms": 50,
    }
    old, new = content(1), content(2)
    with Daemon(tmp_path, config) as daemon:
        filled(daemon, old)
        # DRAM must not hide the device from reads.
        freeze(failing_disk.process.pid)
        assert daemon.read("v", CONTENT_BYTES) == old
        write_through(daemon, new)
        assert daemon.volume("v")["counters"]["dirty_bytes"] == 0
        daemon.until(lambda: daemon.cache()["ssd_state"] == "offline")
        assert "did not answer" in problem(daemon, "SSD tier")["reason"]
        assert daemon.read("v", CONTENT_BYTES) == new
        assert daemon.volume("v")["counters"]["errors"] == 0
        # Late answers change nothing; then the device is taken into use again.
        failing_disk.process.send_signal(signal.SIGCONT)
        assert daemon.online()["ssd_readmissions"] == 1
        assert daemon.read("v", CONTENT_BYTES) == new
        freeze(failing_disk.process.pid)
        write_through(daemon, old)
        assert daemon.read("v", CONTENT_BYTES) == old
        daemon.stop()
    failing_disk.process.send_signal(signal.SIGCONT)
    with Daemon(tmp_path, config) as daemon:
        daemon.online()
        assert daemon.read("v", CONTENT_BYTES) == old
        daemon.stop()


def test_cache_device_that_hangs_at_the_start_is_done_without(tmp_path, failing_disk):
    config = {
        **CACHE, "cache_path": str(failing_disk / "mount/disk"),
        "cache_answer_max_ms": 500, "cache_retry_ms": 50,
    }
    old, new = content(1), content(2)
    with Daemon(tmp_path, config) as daemon:
        filled(daemon, old)
        daemon.stop()
        freeze(failing_disk.process.pid)
        daemon.start()
        daemon.tells("no answer for")
        write_through(daemon, new)
        assert daemon.read("v", CONTENT_BYTES) == new
        failing_disk.process.send_signal(signal.SIGCONT)
        assert daemon.online()["warm_lines"] == 0
        assert daemon.read("v", CONTENT_BYTES) == new
        daemon.stop()
