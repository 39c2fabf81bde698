"""What the daemon does while something that it needs does not answer: whoever reads its log, the disk of its data
directory, the thread of its data path."""

import ctypes
import fcntl
import os
import re
import signal
import socket
import subprocess
import time

import pytest
from daemon import HDCS, Daemon

F_SETPIPE_SZ = 1031
PTRACE_SEIZE, PTRACE_INTERRUPT = 0x4206, 0x4207
WALL = 0x40000000


def metric(daemon, name):
    status, page = daemon.api("GET", "/metrics")
    assert status == 200
    return float(re.search(rf"^{name} (\S+)$", page, re.M)[1])


class StalledReader(Daemon):
    """A daemon whose standard error is a pipe that nobody reads."""

    def spawn(self):
        self.unread, write = os.pipe()
        fcntl.fcntl(write, F_SETPIPE_SZ, 4096)
        self.process = subprocess.Popen(
            self.command(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=write,
            env={**os.environ, "HDCS_LOG": "debug"},
        )
        os.close(write)

    def log(self):
        os.set_blocking(self.unread, False)
        return os.read(self.unread, 1 << 20).decode(errors="replace")


def test_log_that_nobody_reads_stops_nothing(tmp_path):
    with StalledReader(tmp_path) as daemon:
        # Each of these is a line in the log: enough of them for the pipe and the queue before it.
        for _ in range(5000):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(daemon.data / "control.sock"))
                client.sendall(b"nonsense\r\n\r\n")
                client.recv(1000)
        daemon.create("v", size="4M")
        daemon.write("v", b"x" * 4096)
        assert daemon.read("v", 4096) == b"x" * 4096
        assert metric(daemon, "hdcs_log_lines_dropped_total") > 0
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0


def test_log_is_whole_at_the_end(tmp_path):
    with Daemon(tmp_path) as daemon:
        daemon.stop()
        assert daemon.log().rstrip().endswith("stopped")
        # The last words come after what was logged, and are there even if the start fails.
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            daemon.config["nbd_listen"] = [f"tcp:127.0.0.1:{taken.getsockname()[1]}"]
            daemon.refuses(1, "another program has it")


@pytest.fixture
def frozen_disk(tmp_path):
    """A file system of its own that can be frozen: every write to it waits until it thaws."""
    image, place = tmp_path / "image", tmp_path / "disk"
    place.mkdir()
    subprocess.run(["truncate", "-s", "256M", image], check=True)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["fsfreeze", "-u", place], stderr=subprocess.DEVNULL)
        subprocess.run(["umount", "-l", place], check=True)


def test_data_disk_that_hangs_stops_neither_data_path_nor_api(tmp_path, frozen_disk):
    elsewhere = tmp_path / "logs"
    elsewhere.mkdir()
    config = {"log_path": str(elsewhere), "cache_total_size_mib": 0}
    with Daemon(tmp_path, config, data=frozen_disk / "d") as daemon:
        daemon.create("v", "--backend", f"file:{tmp_path / 'image.raw'}", size="4M")
        subprocess.run(["fsfreeze", "-f", frozen_disk], check=True)
        waiting = subprocess.Popen(
            [HDCS, "--data", str(daemon.data), "volume", "set", "v", "destage_age_max_ms=5000"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        try:
            for round in range(5):
                daemon.write("v", bytes([round]) * 4096)
                for path in ["/v1/status", "/v1/volumes", "/v1/events", "/metrics"]:
                    assert daemon.api("GET", path)[0] == 200
                time.sleep(0.5)
            assert waiting.poll() is None, waiting.stdout.read()
            daemon.signal(signal.SIGTERM)
            deadline = time.monotonic() + 30
            while "stopping" not in daemon.log():
                assert time.monotonic() < deadline, daemon.log()
                time.sleep(0.1)
        finally:
            subprocess.run(["fsfreeze", "-u", frozen_disk], check=True)
        daemon.wait()
        waiting.wait(30)


def stop_thread(daemon, name):
    """Stop one thread of the daemon, for as long as this thread lives."""
    tasks = f"/proc/{daemon.process.pid}/task"
    for task in os.listdir(tasks):
        with open(f"{tasks}/{task}/comm") as comm:
            if comm.read().strip() == name:
                break
    else:
        raise AssertionError(f"no thread {name}")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    for request in (PTRACE_SEIZE, PTRACE_INTERRUPT):
        assert libc.ptrace(request, int(task), None, None) == 0, os.strerror(ctypes.get_errno())
    os.waitpid(int(task), WALL)
    return int(task)


def test_shard_that_hangs_shows_and_the_stop_ends(tmp_path):
    config = {"cache_answer_max_ms": 1000}
    with Daemon(tmp_path, config) as daemon:
        daemon.create("v", size="4M")
        assert metric(daemon, "hdcs_shard_up") == 1
        thread = stop_thread(daemon, "hdcs-shard")
        status, page = daemon.api("GET", "/metrics")
        assert status == 200
        assert "\nhdcs_shard_up 0\n" in page and 'hdcs_volume_size_bytes{volume="v"}' in page
        status, answer = daemon.api("GET", "/v1/status")
        assert status == 504 and "data path" in str(answer)
        daemon.signal(signal.SIGTERM)
        # A thread that is traced dies for whoever traces it first.
        daemon.until(lambda: os.waitpid(thread, WALL | os.WNOHANG) != (0, 0))
        assert daemon.wait() == 1
        assert "the data path, which does not answer" in daemon.log()
    with Daemon(tmp_path, config) as daemon:
        assert daemon.volume("v")["state"] == "healthy"
