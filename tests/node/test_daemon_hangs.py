"""What the daemon does while something that it needs does not answer: whoever reads its log, the disk of its data
directory, the thread of its data path."""

import ctypes
import errno
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import time

import nbd
import pytest

from daemon import DIRTY, Daemon, freeze, refused, samples
from disks import served_disk
from mirror_fuse import mirror
from programs import HDCS, MIB
from raw_client import DISC, READ, Client

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


def test_abort_says_where_it_was(tmp_path):
    """As when a library's assertion fails; and it ends although nobody reads what it says."""
    with Daemon(tmp_path) as daemon:
        daemon.signal(signal.SIGABRT)
        assert daemon.wait() == -signal.SIGABRT
        told = daemon.log().split("hdcs: aborted (SIGABRT) in thread ")[1].splitlines()
        assert "acknowledged writes are in the write logs" in told[0]
        assert any("libc" in frame for frame in told[1:]), told
    with StalledReader(tmp_path) as daemon:
        fill = os.open(f"/proc/{daemon.process.pid}/fd/2", os.O_WRONLY | os.O_NONBLOCK)
        with pytest.raises(BlockingIOError):
            while True:
                os.write(fill, b"x")
        os.close(fill)
        daemon.signal(signal.SIGABRT)
        assert daemon.wait() == -signal.SIGALRM


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
        assert metric(daemon, 'hdcs_shard_up{shard="0"}') == 1
        thread = stop_thread(daemon, "hdcs-shard")
        status, page = daemon.api("GET", "/metrics")
        assert status == 200
        assert '\nhdcs_shard_up{shard="0"} 0\n' in page and 'hdcs_volume_size_bytes{volume="v"}' in page
        status, answer = daemon.api("GET", "/v1/status")
        assert status == 504 and "data path" in str(answer)
        daemon.signal(signal.SIGTERM)
        # A thread that is traced dies for whoever traces it first.
        daemon.until(lambda: os.waitpid(thread, WALL | os.WNOHANG) != (0, 0))
        assert daemon.wait() == 1
        daemon.tells("the data path, which does not answer")
    with Daemon(tmp_path, config) as daemon:
        assert daemon.volume("v")["state"] == "healthy"


@pytest.fixture
def hanging_log(tmp_path):
    """A disk for a write log, which answers nothing while its process is stopped."""
    with served_disk(tmp_path / "disk") as disk:
        yield disk


def create_on(daemon, disk, name):
    """A volume whose write log lies on that disk."""
    place = daemon.home / "write-log"
    daemon.create(name, "--log-path", place, *DIRTY)
    daemon.stop()
    with open(disk / "mount/disk", "r+b") as medium:
        medium.write(place.read_bytes())
    place.unlink()
    place.symlink_to(disk / "mount/disk")
    daemon.start()


def is_locked(path):
    with open(path, "r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def problem_of(daemon, name):
    problems = daemon.json("status")["problems"]
    return next((one for one in problems if one["part"] == f"volume {name}"), None)


def hung(daemon, disk, name):
    """Stop the disk below a volume's log, and have a write meet that; the client, which waits for it."""
    client = daemon.nbd(name)
    client.pwrite(b"a" * 4096, 0)
    client.flush()
    freeze(disk.process.pid)
    cookie = client.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(b"b" * 4096)), 0)
    daemon.until(lambda: problem_of(daemon, name))
    return client, cookie


@pytest.mark.parametrize("when_full", ["wait", "error"])
def test_log_that_hangs_shows_and_is_waited_for_or_not(tmp_path, hanging_log, when_full):
    config = {"log_answer_max_ms": 300, "persist": "on-write"}
    with Daemon(tmp_path, config) as daemon:
        create_on(daemon, hanging_log, "v")
        daemon.create("w")
        daemon.ok("volume", "set", "v", f"when_full={when_full}")
        client, cookie = hung(daemon, hanging_log, "v")
        shown = problem_of(daemon, "v")
        assert shown["state"] == "degraded" and shown["for_ms"] >= 300
        assert "write log: its device has not answered" in shown["reason"]
        page = samples(daemon.api("GET", "/metrics")[1])
        assert page['hdcs_volume_state{volume="v",state="degraded"}'] == 1
        daemon.until(lambda: "has not answered" in daemon.ok("events", "v"))
        # The other volume has nothing to do with it, nor has what needs no log.
        daemon.write("w", b"w" * 4096)
        assert daemon.read("v", 4096, MIB) == bytes(4096)
        if when_full == "error":
            while not client.aio_peek_command_completed():
                client.poll(1000)
            with pytest.raises(nbd.Error) as error:
                client.aio_command_completed(cookie)
            assert error.value.errnum == errno.EIO
            other = daemon.nbd("v")
            with pytest.raises(nbd.Error):
                other.pwrite(b"c" * 4096, 0)
        else:
            client.poll(1000)
            assert not client.aio_peek_command_completed()
        hanging_log.process.send_signal(signal.SIGCONT)
        daemon.until(lambda: daemon.volume("v")["state"] == "healthy")
        if when_full == "wait":
            while not client.aio_peek_command_completed():
                client.poll(1000)
            assert client.aio_command_completed(cookie)
        daemon.kill()
        daemon.start()
        # What waited has its answer; what was told of an error may be there or not, and here it is.
        assert daemon.read("v", 4096) == b"b" * 4096


def test_log_that_hangs_holds_up_no_other_log(tmp_path, hanging_log):
    """After stalls a few threads write for all logs; none of them may be kept by one."""
    with Daemon(tmp_path, {"log_answer_max_ms": 300, "persist": "on-write"}) as daemon:
        create_on(daemon, hanging_log, "v")
        daemon.create("w", "--set", "when_full=error")
        client = daemon.nbd("v")

        def send(mark, size=4096):
            return client.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(mark * size)), 0)

        def finish(cookies):
            for cookie in cookies:
                while not client.aio_command_completed(cookie):
                    client.poll(1000)

        for _ in range(2):
            freeze(hanging_log.process.pid)
            cookie = send(b"a")
            time.sleep(0.05)
            hanging_log.process.send_signal(signal.SIGCONT)
            finish([cookie])
        freeze(hanging_log.process.pid)
        cookies = []
        for _ in range(8):
            # More than a span that waits for another takes up.
            cookies.append(send(b"b", 256 << 10))
            client.poll(50)
        for mark in (b"w", b"x"):
            daemon.write("w", mark * 4096)
        assert problem_of(daemon, "w") is None
        assert daemon.read("w", 4096) == b"x" * 4096
        hanging_log.process.send_signal(signal.SIGCONT)
        finish(cookies)
        assert daemon.read("v", 4096) == b"b" * 4096
        daemon.stop()


def test_backend_that_hangs_holds_up_no_other_volume(tmp_path, hanging_log):
    """However many of its reads hang, there are threads in the kernel for the others' writes."""
    with Daemon(tmp_path, {"cache_total_size_mib": 0, "persist": "on-write"}) as daemon:
        daemon.create("v", "--backend", f"file:{hanging_log / 'mount/disk'}", size="64M")
        daemon.create("w")
        client = daemon.nbd("v")
        freeze(hanging_log.process.pid)
        cookies = []
        for count in range(100):
            cookies.append(client.aio_pread(nbd.Buffer(4096), count * (512 << 10)))
        daemon.until(lambda: daemon.volume("v")["counters"]["requests_in_flight"] == 100)
        for mark in (b"w", b"x"):
            daemon.write("w", mark * 4096)
        assert daemon.read("w", 4096) == b"x" * 4096
        assert daemon.volume("w")["state"] == "healthy"
        hanging_log.process.send_signal(signal.SIGCONT)
        for cookie in cookies:
            while not client.aio_command_completed(cookie):
                client.poll(1000)
        daemon.stop()


def test_stop_does_not_wait_for_a_log_that_hangs(tmp_path, hanging_log):
    with Daemon(tmp_path, {"log_answer_max_ms": 300, "persist": "on-write"}) as daemon:
        create_on(daemon, hanging_log, "v")
        client, _ = hung(daemon, hanging_log, "v")
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 1
        last = daemon.log().strip().splitlines()[-1]
        assert "the logs of these volumes failed or were not answered: v" in last, daemon.log()
        del client
        hanging_log.process.send_signal(signal.SIGCONT)
        daemon.start()
        assert daemon.volume("v")["state"] == "healthy"
        assert daemon.read("v", 4096) in (b"a" * 4096, b"b" * 4096)


def test_volume_whose_log_hangs_is_detached_and_keeps_its_log_until_that_answers(tmp_path, hanging_log):
    with Daemon(tmp_path, {"log_answer_max_ms": 300, "persist": "on-write"}) as daemon:
        create_on(daemon, hanging_log, "v")
        client, _ = hung(daemon, hanging_log, "v")
        detached = daemon.json("volume", "detach", "v", "--discard-dirty")
        assert detached["dirty_bytes_left"] >= 4096
        daemon.tells("closed while the device of its write log does not answer")
        daemon.create("w")
        daemon.write("w", b"w" * 4096)
        # Its log is in use until the device has answered.
        del client
        hanging_log.process.send_signal(signal.SIGCONT)
        daemon.until(lambda: not is_locked(hanging_log / "mount/disk"))
        assert daemon.read("w", 4096) == b"w" * 4096
        daemon.stop()


def test_volume_whose_backend_hangs_is_not_deleted_before_that_ends_or_the_daemon_does(tmp_path):
    config = {"log_size_mib": 16, "cache_total_size_mib": 0}
    with mirror(tmp_path) as (mounted, behind), Daemon(tmp_path, config) as daemon:
        with (behind / "image").open("wb") as image:
            image.truncate(16 * MIB)
        daemon.create("v", "--backend", f"file:{mounted}/image", *DIRTY)
        daemon.write("v", b"x" * MIB)
        (behind / "stalls").touch()
        try:
            # It says what is wrong, and has left writes under way that do not end.
            refused(daemon.cli("volume", "delete", "v"), 1, "takes no data", "no answer for", "--discard-dirty")
            for _ in range(2):
                began = time.monotonic()
                refused(daemon.cli("volume", "delete", "v", "--discard-dirty"), 1, "it is being closed",
                        "restart the daemon")
                assert time.monotonic() - began < 40
            assert [volume["name"] for volume in daemon.json("volume", "list")] == ["v"]
        finally:
            (behind / "stalls").unlink()
        done = "dirty bytes were discarded"
        daemon.until(lambda: done in daemon.cli("volume", "delete", "v", "--discard-dirty").stdout)
        assert daemon.json("volume", "list") == []
        daemon.create("v", "--backend", f"file:{mounted}/image")
        daemon.stop()


@pytest.mark.parametrize("how", ["closed", "left", "half-closed"])
def test_clients_of_a_volume_that_hangs_keep_no_places(tmp_path, how):
    """They go while their requests hang, more of them than there are places; each gives its place back."""
    hangs = tmp_path / "hangs"
    config = {"nbd_connections_max": 3, "nbd_handshake_max_ms": 1000, "cache_total_size_mib": 0}
    with Daemon(tmp_path, config) as daemon:
        daemon.create("v", "--backend", f"file:{tmp_path}/b?error_file={hangs}&error_kind=hang", size="16M")
        daemon.create("w")
        hangs.touch()
        left = []
        for count in range(1, 9):
            client = Client(daemon).open("v")
            client.ask(READ, count << 20, 4096)
            daemon.until(lambda: daemon.volume("v")["counters"]["requests_in_flight"] == count)
            if how == "left":
                client.ask(DISC, 0, 0)
            if how == "half-closed":
                client.socket.shutdown(socket.SHUT_WR)
                left.append(client)
            else:
                client.socket.close()
            daemon.until(lambda: daemon.json("status")["connections"] == 0)
        with Client(daemon) as other:
            assert other.open("w").read(0, 4096) == bytes(4096)
        assert daemon.volume("v")["counters"]["requests_in_flight"] == 8, "they are under way without a client"
        hangs.unlink()
        daemon.until(lambda: daemon.volume("v")["counters"]["requests_in_flight"] == 0)
        with Client(daemon) as client:
            assert client.open("v").read(0, 4096) == bytes(4096)
        for client in left:
            client.socket.close()
        memory = daemon.json("status")["memory"]
        assert memory["pool_free_bytes"] > 0
        daemon.stop()


def test_command_says_that_the_daemon_hangs_and_waits_for_it(server):
    freeze(server.process.pid)
    command = [str(HDCS), "status", "--json", "--data", str(server.data)]
    asking = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = asking.stderr.readline()
    assert f"the daemon at {server.data}/control.sock does not answer; waiting" in line
    assert asking.poll() is None
    server.signal(signal.SIGCONT)
    out, err = asking.communicate(timeout=60)
    assert (asking.returncode, err) == (0, "")
    assert json.loads(out)["state"]
