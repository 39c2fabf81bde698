"""What fails below the daemon: backends, log devices, space, memory. Nothing acknowledged is lost, and it
recovers when what failed is put right."""

import os
import random
import signal
import subprocess
import threading
from contextlib import contextmanager

import nbd
import pytest

from daemon import Daemon, hdcs
from disks import needs_root, small_file_system, state
from programs import MIB

BLOCK = 4096
CLIENT_SECONDS = 60


def image(path, model):
    """Whether a raw image holds exactly what a model of {offset: bytes} says."""
    content = path.read_bytes()
    return all(content[offset : offset + len(data)] == data for offset, data in model.items())


@contextmanager
def over_an_image(tmp_path):
    """A daemon with a volume that destages at once, and the image that it is over."""
    path = tmp_path / "image"
    with Daemon(tmp_path, {"destage_age_max_ms": 10, "dirty_ratio_min": 0}) as daemon:
        daemon.create("v", "--backend", f"file:{path}", "--persist", "on-write", size="64M")
        yield daemon, path


def test_resilience_image_that_is_moved_away_beneath_its_volume_takes_nothing_from_the_log(tmp_path):
    with over_an_image(tmp_path) as (daemon, path):
        daemon.write("v", b"a" * MIB)
        daemon.ok("volume", "flush", "v")
        away = path.rename(path.with_name("away"))
        model = {}

        def write():
            # What a flush took in the second before it looked again may be in the other file alone.
            offset = len(model) * BLOCK
            model[offset] = os.urandom(BLOCK)
            daemon.write("v", model[offset], offset)
            return state(daemon) == "degraded"

        daemon.until(write)
        daemon.tells("the image was removed or replaced while its volume is open")
        path.write_bytes(bytes(64 * MIB))
        daemon.write("v", b"z" * BLOCK, 32 * MIB)
        assert daemon.volume("v")["counters"]["dirty_bytes"] > 0
        assert path.read_bytes() == bytes(64 * MIB)
        away.rename(path)
        daemon.until(lambda: state(daemon) == "healthy" and daemon.volume("v")["counters"]["dirty_bytes"] == 0)
        daemon.tells("the image is back in its place")
        assert image(path, {**model, 32 * MIB: b"z" * BLOCK})
        daemon.stop()


@pytest.mark.parametrize("first", [0, 64 * MIB - BLOCK])
def test_resilience_image_that_is_cut_beneath_its_volume_is_not_made_whole_with_zeroes(tmp_path, first):
    with over_an_image(tmp_path) as (daemon, path):
        daemon.write("v", b"a" * MIB, 60 * MIB)
        daemon.ok("volume", "flush", "v")
        os.truncate(path, 8 * MIB)

        def write():
            # The second one would make it as long as before.
            daemon.write("v", b"b" * BLOCK, first)
            return state(daemon) == "degraded"

        daemon.until(write)
        daemon.tells("the image was cut while its volume is open")
        daemon.write("v", b"c" * BLOCK, 64 * MIB - BLOCK)
        daemon.write("v", b"d" * BLOCK, 16 * MIB)
        assert state(daemon) == "degraded"
        refusal = daemon.cli("volume", "delete", "v")
        assert refusal.returncode == 1 and "--discard-dirty" in refusal.stderr, refusal.stderr
        assert path.stat().st_size == 8 * MIB
        daemon.kill()
        daemon.start()
        daemon.until(lambda: "was cut" in (daemon.volume("v")["reason"] or ""))


@pytest.mark.parametrize("kind", ["eio", "hang"])
def test_resilience_failing_backend_fills_the_log_and_recovers(tmp_path, kind):
    """Writes go on into the log; when it is full they wait; when the backend is back all is there."""
    failing = tmp_path / "fails"
    rng = random.Random(kind)
    model = {}
    config = {"destage_age_max_ms": 10, "dirty_ratio_min": 0, "backend_answer_max_ms": 300}
    with Daemon(tmp_path, config) as daemon:
        url = f"file:{tmp_path}/image?error_file={failing}&error_kind={kind}"
        daemon.create("v", "--backend", url, "--persist", "on-write", size="64M")
        client = daemon.nbd("v")
        for index in range(16):
            model[index * MIB] = rng.randbytes(64 << 10)
            client.pwrite(model[index * MIB], index * MIB)
        failing.touch()
        for index in range(40):
            offset = index * MIB + MIB // 2
            model[offset] = rng.randbytes(64 << 10)
            client.pwrite(model[offset], offset)
        daemon.until(lambda: state(daemon) == "degraded")
        reason = daemon.volume("v")["reason"]
        if kind == "eio":
            assert "backend: writes fail for" in reason, reason
            assert daemon.volume("v")["counters"]["backend_errors"] > 0
        else:
            assert "backend: no answer for" in reason, reason
            assert daemon.volume("v")["trouble_ms"] >= 300
        status = daemon.json("status")
        assert status["state"] == "degraded"
        assert [one["part"] for one in status["problems"]] == ["volume v"], status["problems"]
        assert "volume v: degraded for" in daemon.ok("status")
        # More than the log holds: the writer comes to wait.
        done = []

        def write_more():
            writer = daemon.nbd("v")
            for index in range(40):
                data = rng.randbytes(MIB // 2)
                writer.pwrite(data, index * MIB + MIB // 2)
                model[index * MIB + MIB // 2] = data
                done.append(index)
            writer.shutdown()

        thread = threading.Thread(target=write_more)
        thread.start()
        daemon.until(lambda: daemon.volume("v")["counters"]["throttled_requests"] > 0)
        # Reads of what is in the log go on beside it.
        assert client.pread(64 << 10, 39 * MIB + MIB // 2) == model[39 * MIB + MIB // 2]
        assert len(done) < 40
        failing.unlink()
        thread.join(CLIENT_SECONDS)
        assert not thread.is_alive() and len(done) == 40
        daemon.ok("volume", "flush", "v")
        daemon.until(lambda: state(daemon) == "healthy")
        assert daemon.json("status")["problems"] == []
        counters = daemon.volume("v")["counters"]
        assert counters["errors"] == 0 and counters["dirty_bytes"] == 0
        for offset, data in model.items():
            assert client.pread(len(data), offset) == data
        client.shutdown()
        assert image(tmp_path / "image", model)


def test_resilience_hanging_backend_shows_to_readers_and_heals(tmp_path):
    """A read that the backend does not answer makes the volume degraded; its answer, healthy."""
    failing = tmp_path / "fails"
    with Daemon(tmp_path, {"backend_answer_max_ms": 100}) as daemon:
        url = f"file:{tmp_path}/image?error_file={failing}&error_kind=hang&error_on=read"
        daemon.create("v", "--backend", url, size="16M")
        failing.touch()
        client = daemon.nbd("v")
        read = client.aio_pread(nbd.Buffer(BLOCK), 0)
        daemon.until(lambda: state(daemon) == "degraded")
        assert "backend: no answer for" in daemon.volume("v")["reason"]
        failing.unlink()
        while not client.aio_command_completed(read):
            client.poll(-1)
        daemon.until(lambda: state(daemon) == "healthy")
        assert daemon.volume("v")["reason"] is None and daemon.volume("v")["trouble_ms"] is None
        client.shutdown()
        daemon.stop()


def test_resilience_backend_with_another_owner_is_left_alone(tmp_path):
    """Everything is refused, nothing reaches the backend, and the log keeps what it holds."""
    fenced = tmp_path / "fenced"
    rng = random.Random(9)
    config = {"destage_age_max_ms": 10, "dirty_ratio_min": 0}
    with Daemon(tmp_path, config) as daemon:
        url = f"file:{tmp_path}/image?error_file={fenced}&error_kind=fenced"
        daemon.create("v", "--backend", url, "--persist", "on-write", size="16M")
        client = daemon.nbd("v")
        before = rng.randbytes(MIB)
        client.pwrite(before, 0)
        daemon.ok("volume", "flush", "v")
        fenced.touch()
        after = rng.randbytes(MIB)
        # It is acknowledged before, or refused when, the backend says so.
        acknowledged = True
        try:
            client.pwrite(after, 0)
        except nbd.Error as error:
            assert error.errnum == 5, error
            acknowledged = False
        daemon.until(lambda: state(daemon) == "error")
        assert "another owner" in daemon.volume("v")["reason"]
        assert daemon.json("status")["problems"][0]["state"] == "error"
        for request in (
            lambda: client.pread(BLOCK, 0),
            lambda: client.pwrite(bytes(BLOCK), 0),
            client.flush,
        ):
            with pytest.raises(nbd.Error) as error:
                request()
            assert error.value.errnum == 5, error.value
        done = daemon.cli("volume", "flush", "v")
        assert done.returncode == 1 and "another owner" in done.stderr, done.stderr
        client.shutdown()
        # Even when the backend would take it again.
        fenced.unlink()
        daemon.until(lambda: daemon.volume("v")["connections"] == 0)
        dirty = daemon.volume("v")["counters"]["dirty_bytes"]
        assert (tmp_path / "image").read_bytes()[:MIB] == before
        daemon.stop()
        assert (tmp_path / "image").read_bytes()[:MIB] == before
        # Whoever gives the backend back finds everything in the log.
        daemon.start()
        assert dirty == MIB or not acknowledged
        expected = after if dirty else before
        assert daemon.read("v", MIB) == expected
        daemon.ok("volume", "flush", "v")
        assert (tmp_path / "image").read_bytes()[:MIB] == expected
        daemon.stop()


@pytest.mark.parametrize("kind", ["eio", "hang"])
def test_resilience_full_log_refuses_when_told_to(tmp_path, kind):
    """With `when_full=error` a write that does not fit fails with ENOSPC; what fitted stays."""
    failing = tmp_path / "fails"
    rng = random.Random(2)
    model = {}
    config = {"destage_age_max_ms": 10, "dirty_ratio_min": 0, "backend_answer_max_ms": 300}
    with Daemon(tmp_path, config) as daemon:
        url = f"file:{tmp_path}/image?error_file={failing}&error_kind={kind}"
        daemon.create("v", "--backend", url, "--persist", "on-write", "--set", "when_full=error",
                      size="64M")
        client = daemon.nbd("v")
        failing.touch()
        refused = 0
        for index in range(64):
            data = rng.randbytes(MIB // 2)
            try:
                client.pwrite(data, index * MIB)
                model[index * MIB] = data
            except nbd.Error as error:
                assert error.errnum == 28, error
                refused += 1
        assert refused > 0 and len(model) * MIB // 2 >= 8 * MIB, (refused, len(model))
        assert state(daemon) == "degraded"
        daemon.kill()
        daemon.start()
        client = daemon.nbd("v")
        for offset, data in model.items():
            assert client.pread(len(data), offset) == data
        failing.unlink()
        daemon.ok("volume", "flush", "v")
        daemon.until(lambda: state(daemon) == "healthy")
        client.pwrite(b"z" * BLOCK, 63 * MIB + MIB // 2)
        client.shutdown()
        assert image(tmp_path / "image", model)


@needs_root
def test_resilience_backend_without_space_recovers_when_there_is_some(tmp_path):
    rng = random.Random(3)
    model = {}
    with small_file_system(tmp_path / "small", "4m") as small, Daemon(
        tmp_path, {"destage_age_max_ms": 10, "dirty_ratio_min": 0}
    ) as daemon:
        daemon.create("v", "--backend", f"file:{small}/image", size="32M")
        client = daemon.nbd("v")
        for index in range(32):
            model[index * MIB] = rng.randbytes(MIB // 4)
            client.pwrite(model[index * MIB], index * MIB)
        client.flush()
        daemon.until(lambda: state(daemon) == "degraded")
        assert "backend: no space left for" in daemon.volume("v")["reason"]
        for offset, data in model.items():
            assert client.pread(len(data), offset) == data
        client.shutdown()
        # Neither an end of the daemon nor the full disk loses a byte.
        daemon.kill()
        daemon.start()
        daemon.until(lambda: state(daemon) == "degraded")
        subprocess.run(["mount", "-o", "remount,size=64m", str(small)], check=True)
        daemon.ok("volume", "flush", "v")
        daemon.until(lambda: state(daemon) == "healthy")
        assert daemon.volume("v")["counters"]["dirty_bytes"] == 0
        assert image(small / "image", model)
        daemon.stop()


@contextmanager
def thin_device(small, size):
    """A block device whose blocks take space of a small file system, so that writes to it can fail."""
    backing = small / "device"
    with open(backing, "wb") as file:
        file.truncate(size)
    done = subprocess.run(
        ["losetup", "--find", "--show", str(backing)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"no loop device: {done.stderr.strip()}")
    device = done.stdout.strip()
    try:
        yield device
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


@needs_root
def test_resilience_failing_log_device_turns_the_volume_read_only(tmp_path):
    """Writes are refused, reads and what was acknowledged stay; opened again, it goes on."""
    rng = random.Random(4)
    with small_file_system(tmp_path / "small", "64m") as small, thin_device(
        small, 32 * MIB
    ) as device, Daemon(tmp_path) as daemon:
        daemon.create("v", "--log-path", device, "--log-size", "16M", "--persist", "on-write",
                      "--set", "destage_age_max_ms=86400000", "--set", "dirty_ratio_min=80",
                      "--set", "dirty_ratio_max=90")
        client = daemon.nbd("v")
        model = {}
        for block in range(100):
            model[block * BLOCK] = rng.randbytes(BLOCK)
            client.pwrite(model[block * BLOCK], block * BLOCK)
        # The part of the log that was not used yet loses its space, and whatever is free is taken:
        # the device has nowhere to put what comes.
        subprocess.run(
            ["fallocate", "--punch-hole", "--offset=4MiB", "--length=28MiB", str(small / "device")],
            check=True,
        )
        filler = small / "filler"
        with open(filler, "wb") as file:
            with pytest.raises(OSError):
                while True:
                    file.write(bytes(MIB))
                    file.flush()
        with pytest.raises(nbd.Error) as error:
            for block in range(100, 2000):
                client.pwrite(rng.randbytes(BLOCK), block * BLOCK)
                model[block * BLOCK] = None
        assert error.value.errnum in (1, 5, 28, 30), error.value
        written = [offset for offset, data in model.items() if data]
        daemon.until(lambda: state(daemon) == "read-only")
        with pytest.raises(nbd.Error):
            client.pwrite(b"n" * BLOCK, 0)
        for offset in written:
            assert client.pread(BLOCK, offset) == model[offset]
        client.shutdown()
        # A stop that leaves a broken log behind is no success, and says so.
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 1
        last = daemon.log().strip().splitlines()[-1]
        assert "not cleanly" in last and "writes to the logs of these volumes failed or were not answered: v" in last
        filler.unlink()
        daemon.start()
        assert state(daemon) == "healthy"
        client = daemon.nbd("v")
        for offset in written:
            assert client.pread(BLOCK, offset) == model[offset]
        client.pwrite(b"y" * BLOCK, 0)
        client.flush()
        assert client.pread(BLOCK, 0) == b"y" * BLOCK
        client.shutdown()
        daemon.ok("volume", "flush", "v")
        daemon.stop()


def test_resilience_memory_stays_below_its_cap(tmp_path):
    """Volumes, connections and deep queues of large requests over slow backends: the cap holds."""
    with Daemon(tmp_path, {"memory_max_mib": 128}) as daemon:
        jobs = []
        for index in range(3):
            name = f"v{index}"
            url = f"file:{tmp_path}/{name}?delay_us=15000"
            daemon.create(name, "--backend", url, size="64M")
            for kind in ("write", "randrw", "read"):
                jobs += [
                    f"--name={name}-{kind}",
                    f"--uri=nbd+unix:///{name}?socket={daemon.data / 'nbd.sock'}",
                    f"--rw={kind}",
                ]
        command = [
            "fio", "--ioengine=nbd", "--bs=1m", "--iodepth=32", "--size=64m", "--io_size=48m",
            "--numjobs=2", "--randseed=5", "--refill_buffers", "--thread=1", *jobs,
        ]
        # Options before the first name are of all jobs.
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=CLIENT_SECONDS, cwd=tmp_path
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr
        status = open(f"/proc/{daemon.process.pid}/status").read()
        peak = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        peak_mib = int(peak.split()[1]) / 1024
        assert peak_mib < 128, peak
        for index in range(3):
            counters = daemon.volume(f"v{index}")["counters"]
            assert counters["errors"] == 0
            assert counters["write_bytes"] > 64 * MIB and counters["read_bytes"] > 64 * MIB
        assert hdcs("check", daemon.data).returncode == 0
