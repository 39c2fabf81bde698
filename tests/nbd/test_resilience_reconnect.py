"""What clients see when the daemon dies under them, and when another client sends nonsense."""

import random
import select
import signal
import socket
import struct
import subprocess
import threading
import time

import pytest

from daemon import Daemon
from programs import MIB

BLOCK = 4096
CLIENT_SECONDS = 20


class QemuIo:
    """qemu-io that reconnects, fed command by command."""

    def __init__(self, daemon, name):
        image = (
            "driver=nbd,server.type=unix,"
            f"server.path={daemon.data / 'nbd.sock'},export={name},reconnect-delay=30"
        )
        self.process = subprocess.Popen(
            ["qemu-io", "--image-opts", image],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
        )
        self.text = ""
        self.operations = self.commands = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()

    def send(self, command, operations=1):
        """Hand it one command as soon as it has printed the prompt for it."""
        self.expect("qemu-io> ", self.commands + 1)
        self.commands += 1
        self.operations += operations
        self.process.stdin.write(f"{command}\n".encode())

    def finish(self):
        """Wait until everything that was sent has succeeded; nothing may fail."""
        self.expect(" bytes at offset ", self.operations)

    def run(self, command):
        """One operation from its beginning to its end."""
        self.send(command)
        self.finish()

    def expect(self, words, times):
        end = time.monotonic() + CLIENT_SECONDS
        while self.text.count(words) < times:
            left = end - time.monotonic()
            ready, _, _ = select.select([self.process.stdout], [], [], max(left, 0))
            piece = self.process.stdout.read(1 << 16) if ready else b""
            self.text += piece.decode()
            assert piece, f"qemu-io ended or hung:\n{self.text[-2000:]}"
            for trouble in ("failed", "rror"):
                assert trouble not in self.text, self.text[-2000:]


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_resilience_client_that_reconnects_sees_only_a_pause(tmp_path, end):
    rng = random.Random(end)
    with Daemon(tmp_path) as daemon:
        url = f"file:{tmp_path}/image?delay_us=30000"
        daemon.create("v", "--persist", "on-write", "--backend", url)
        with QemuIo(daemon, "v") as client:
            model = {}
            for number in range(6):
                for _ in range(12):
                    block = rng.randrange(512)
                    if block in model and rng.random() < 0.4:
                        client.run(f"read -P {model[block]} {block * BLOCK} {BLOCK}")
                    else:
                        model[block] = rng.randrange(1, 256)
                        client.run(f"write -P {model[block]} {block * BLOCK} {BLOCK}")
                # A read that waits for the backend is under way when the daemon ends, and a write
                # comes while it is gone.
                client.send(f"aio_read -P 0 {(1024 + number) * BLOCK} {BLOCK}")
                getattr(daemon, end)()
                block = rng.randrange(512)
                model[block] = rng.randrange(1, 256)
                client.send(f"write -P {model[block]} {block * BLOCK} {BLOCK}")
                daemon.start()
                # It tells of what ended in the background when it is asked.
                client.send("aio_flush", operations=0)
                client.finish()
            for block, byte in model.items():
                client.run(f"read -P {byte} {block * BLOCK} {BLOCK}")


def test_resilience_image_copy_goes_on_over_a_kill(tmp_path):
    """qemu-img copies a volume while the daemon is killed; the copy is exact."""
    size = 48 * MIB
    with Daemon(tmp_path, {"memory_max_mib": 128}) as daemon:
        # Slow enough to be caught in the act: no read is faster than its delay.
        url = f"file:{tmp_path}/image?delay_us=20000"
        daemon.create("v", "--backend", url, size="48M")
        data = random.Random(1).randbytes(size)
        daemon.write("v", data)
        daemon.ok("volume", "flush", "v")
        daemon.ok("volume", "evict", "v")
        source = (
            "driver=nbd,server.type=unix,"
            f"server.path={daemon.data / 'nbd.sock'},export=v,reconnect-delay=30"
        )
        copy = tmp_path / "copy"
        reads = daemon.volume("v")["counters"]["reads"]
        process = subprocess.Popen(
            ["qemu-img", "convert", "--image-opts", source, "-O", "raw", str(copy)],
            stderr=subprocess.PIPE,
        )
        try:
            daemon.until(lambda: daemon.volume("v")["counters"]["reads"] > reads)
            daemon.kill()
            daemon.start()
            _, errors = process.communicate(timeout=CLIENT_SECONDS)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == 0, errors
        assert copy.read_bytes() == data


class Traffic:
    """A client that writes and verifies until it is told to end; a failure fails the test."""

    def __init__(self, daemon, name, seed, size):
        self.client = daemon.nbd(name)
        self.rng = random.Random(seed)
        self.size = size
        self.operations = self.commands = 0
        self.failure = None
        self.ending = threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self):
        model = {}
        try:
            while not self.ending.is_set():
                block = self.rng.randrange(self.size // BLOCK)
                if block in model:
                    assert self.client.pread(BLOCK, block * BLOCK) == model[block]
                model[block] = self.rng.randbytes(BLOCK)
                self.client.pwrite(model[block], block * BLOCK)
                self.operations += 1
            for block, data in model.items():
                assert self.client.pread(BLOCK, block * BLOCK) == data
            self.client.shutdown()
        except Exception as error:  # whatever it is, the test's thread raises it
            self.failure = error

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ending.set()
        self.thread.join(CLIENT_SECONDS)
        assert not self.thread.is_alive(), "a client hangs"
        if self.failure:
            raise self.failure

    def goes_on(self, daemon):
        """Wait for operations that begin after now."""
        target = self.operations + 3
        daemon.until(lambda: self.operations >= target or self.failure)
        assert self.failure is None, self.failure


def negotiated(path, name):
    """A raw connection in transmission phase."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(CLIENT_SECONDS)
    connection.connect(str(path))
    greeting = connection.recv(18, socket.MSG_WAITALL)
    assert greeting[:16] == b"NBDMAGICIHAVEOPT"
    export = name.encode()
    # Fixed newstyle without zeroes; NBD_OPT_EXPORT_NAME.
    connection.sendall(struct.pack(">I", 3) + b"IHAVEOPT" + struct.pack(">II", 1, len(export)) + export)
    assert len(connection.recv(10, socket.MSG_WAITALL)) == 10
    return connection


def ends(connection):
    """The server closes it; what it says before is bounded."""
    received = 0
    try:
        while piece := connection.recv(1 << 16):
            received += len(piece)
            assert received < MIB
    except ConnectionResetError:
        pass
    connection.close()


def test_resilience_nonsense_ends_its_own_connection_only(tmp_path):
    rng = random.Random(6)
    with Daemon(tmp_path) as daemon:
        daemon.create("v")
        path = daemon.data / "nbd.sock"
        with Traffic(daemon, "v", 1, 8 * MIB) as traffic:
            for _ in range(8):
                connection = socket.socket(socket.AF_UNIX)
                connection.settimeout(CLIENT_SECONDS)
                connection.connect(str(path))
                # Neither flags nor an option: the magic is wrong in any case.
                connection.sendall(b"\xff" * 4 + rng.randbytes(rng.randrange(64, 4096)))
                ends(connection)
            for _ in range(8):
                connection = negotiated(path, "v")
                connection.sendall(b"\0" + rng.randbytes(rng.randrange(64, 4096)))
                ends(connection)
            for length in (0xFFFFFFFF, 33 << 20):
                # A write whose payload is larger than any that is allowed.
                connection = negotiated(path, "v")
                connection.sendall(struct.pack(">IHHQQI", 0x25609513, 0, 1, 7, 0, length))
                ends(connection)
            traffic.goes_on(daemon)
            daemon.until(lambda: daemon.json("status")["connections"] == 1)
        assert daemon.volume("v")["state"] == "healthy"


def test_resilience_flush_is_cancelled_beside_client_traffic(tmp_path):
    """Ctrl-C ends `volume flush`; clients do not notice, and nothing is lost."""
    with Daemon(tmp_path, {"dirty_ratio_min": 80, "dirty_ratio_max": 95}) as daemon:
        url = f"file:{tmp_path}/image?delay_us=100000"
        daemon.create("v", "--backend", url, "--set", "destage_age_max_ms=86400000", "--set",
                      "cache_flush_queue_depth=1")
        rng = random.Random(2)
        client = daemon.nbd("v")
        scattered = {8 * MIB + block * 2 * BLOCK: rng.randbytes(BLOCK) for block in range(400)}
        for offset, data in scattered.items():
            client.pwrite(data, offset)
        client.flush()
        with Traffic(daemon, "v", 3, MIB) as traffic:
            command = [*daemon.command()[:1], "volume", "flush", "v", "--data", str(daemon.data)]
            flush = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            try:
                daemon.until(lambda: daemon.volume("v")["counters"]["flush_remaining_bytes"] > 0)
                traffic.goes_on(daemon)
                flush.send_signal(signal.SIGINT)
                _, errors = flush.communicate(timeout=CLIENT_SECONDS)
            finally:
                flush.kill()
                flush.wait()
            assert flush.returncode == 130 and "interrupted" in errors, (flush.returncode, errors)
            assert daemon.volume("v")["counters"]["flush_remaining_bytes"] == 0
            traffic.goes_on(daemon)
        daemon.kill()
        daemon.start()
        client = daemon.nbd("v")
        for offset, data in scattered.items():
            assert client.pread(BLOCK, offset) == data
        client.shutdown()
