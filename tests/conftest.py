"""Fixtures of the black-box suite: a server in a directory of its own, and volumes on it.

The suite tests `target/release/hdcs` (or HDCS_BINARY). With HDCS_SERVER_CMD it tests another NBD
server instead, such as `target/release/examples/nbd_memory`, which is started with `--data DIR`
takes lines `create NAME BYTES` on its standard input, and ends with it; what needs the program
itself is skipped.

Every wait has a limit. A test that runs into it loses its server, so that it fails instead of
hanging; whatever a test starts ends with it.
"""

import itertools
import os
import secrets
import select
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest

# Fixtures of their own files.
pytest_plugins = ["ceph_cluster", "object_stores"]

ROOT = Path(__file__).resolve().parent.parent
HDCS = Path(os.environ.get("HDCS_BINARY", ROOT / "target/release/hdcs"))
SERVER_CMD = os.environ.get("HDCS_SERVER_CMD")

START_SECONDS = 30
STOP_SECONDS = 30
CLIENT_SECONDS = 120
TEST_SECONDS = 240

MIB = 1 << 20

# A store that the tests of several files share is in their names.
STORES = ("rbd", "s3", "hdfs")

# Small enough that tests overrun every part of it.
CONFIG = {
    "memory_max_mib": 1040,
    # The volumes of all tests of a file are open at once.
    "volumes_memory_mib": 600,
    "log_size_mib": 32,
    "cache_total_size_mib": 64,
}


def run(*command, timeout=CLIENT_SECONDS, check=True, env=None):
    """Run a client to its end; its output is in the failure, if it fails."""
    command = [str(word) for word in command]
    environment = dict(os.environ, LC_ALL="C", **(env or {}))
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=environment
    )
    if check and done.returncode != 0:
        raise AssertionError(
            f"{shlex.join(command)} exited with {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done


def free_port():
    """A TCP port that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def free_ports(count):
    """The first of so many TCP ports in a row that nobody uses at the moment: below those that the kernel
    gives to clients, any of which could take one before its server does, and apart for each worker."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 3
    while True:
        first = 10_000 + worker * 7_400 + secrets.randbelow(7_400 - count)
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return first
        except OSError:
            continue


class Server:
    """A server process and its data directory."""

    def __init__(self, directory, tls=None):
        self.directory = Path(directory)
        self.socket = self.directory / "nbd.sock"
        self.tls = tls
        self.port = free_port() if tls else None
        self.process = None
        self.log = None
        self.numbers = itertools.count(1)

    def command(self):
        """What starts it."""
        if SERVER_CMD:
            command = [*shlex.split(SERVER_CMD), "--data", str(self.directory)]
            if self.tls:
                command += ["--tcp", f"127.0.0.1:{self.port}", "--require-tls", "--tls"]
                command += [self.tls / "server-cert.pem", self.tls / "server-key.pem"]
                command += [self.tls / "ca-cert.pem"]
            return [str(word) for word in command]
        config = {key: str(value) for key, value in CONFIG.items()}
        if self.tls:
            config["nbd_listen"] = f'["unix:nbd.sock", "tcp:127.0.0.1:{self.port}"]'
            for key, name in [
                ("nbd_tls_cert_file", "server-cert.pem"),
                ("nbd_tls_key_file", "server-key.pem"),
                ("nbd_tls_client_ca_file", "ca-cert.pem"),
            ]:
                config[key] = f'"{self.tls / name}"'
        path = self.directory.with_suffix(".toml")
        path.write_text("".join(f"{key} = {value}\n" for key, value in config.items()))
        return [str(HDCS), "serve", "--config", str(path), "--data", str(self.directory)]

    def start(self):
        """Start it and wait until it says that it is ready."""
        self.log = open(self.directory.with_suffix(".log"), "ab")
        self.process = subprocess.Popen(
            self.command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            start_new_session=True,
        )
        self.line(START_SECONDS)

    def line(self, seconds):
        """The next line that it prints."""
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        line = self.process.stdout.readline() if ready else b""
        if not line:
            self.kill()
            raise AssertionError(f"the server said nothing\n{self.messages()}")
        return line.decode()

    def messages(self):
        """What it wrote to stderr."""
        return self.directory.with_suffix(".log").read_text(errors="replace")

    def stop(self):
        """Stop it cleanly."""
        self.process.stdin.close()
        if not SERVER_CMD:
            self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the server did not stop\n{self.messages()}") from None
        finally:
            self.close()
        assert status == 0, f"exit status {status}\n{self.messages()}"

    def kill(self):
        """End it as a crash would."""
        self.process.kill()
        self.process.wait()

    def close(self):
        """Give back what its process occupied here."""
        self.process.stdout.close()
        self.log.close()

    def hdcs(self, *arguments, **options):
        """Run the command line tool against it."""
        return run(HDCS, *arguments, "--data", self.directory, **options)

    def create_volume(self, size_bytes, *arguments, name=None):
        """A new volume; its name."""
        name = name or f"v{next(self.numbers)}"
        if SERVER_CMD:
            self.process.stdin.write(f"create {name} {size_bytes}\n".encode())
            self.process.stdin.flush()
            assert self.line(START_SECONDS) == "ok\n"
        else:
            self.hdcs("volume", "create", name, "--size", size_bytes, *arguments)
        return name

    def uri(self, name=""):
        """The NBD URI of a volume on the unix socket."""
        return f"nbd+unix:///{name}?socket={self.socket}"

    def tls_uri(self, name, certificates):
        """The NBD URI of a volume on the TLS port."""
        return f"nbds://localhost:{self.port}/{name}?tls-certificates={certificates}"


def make_server(**options):
    """A running server; `end_server` is its end."""
    home = Path(tempfile.mkdtemp(prefix="hdcs-test-"))
    data = home / "data"
    data.mkdir(mode=0o700)
    server = Server(data, **options)
    try:
        server.start()
    except BaseException:
        shutil.rmtree(home, ignore_errors=True)
        raise
    return server


def end_server(server):
    """Stop a server, if it still runs, and remove what it left."""
    try:
        if server.process.poll() is None:
            server.stop()
    finally:
        if server.process.poll() is None:
            server.kill()
        shutil.rmtree(server.directory.parent, ignore_errors=True)


@pytest.fixture(scope="module")
def module_server():
    """One server for the tests of a module."""
    server = make_server()
    yield server
    end_server(server)


@pytest.fixture
def server(module_server):
    """The module's server, running, with a limit on the test's time."""
    if module_server.process.poll() is not None:
        module_server.start()
    limit = threading.Timer(TEST_SECONDS, module_server.kill)
    limit.start()
    yield module_server
    limit.cancel()
    assert module_server.process.poll() is None, (
        f"the server ended with {module_server.process.poll()}\n{module_server.messages()}"
    )


@pytest.fixture
def volume(server):
    """URI of a new volume of 64 MiB."""
    return server.uri(server.create_volume(64 * MIB))


@pytest.fixture(scope="session")
def certificates():
    """Directory of a certificate authority with a server's and a client's certificate."""
    with tempfile.TemporaryDirectory(prefix="hdcs-tls-") as directory:
        run(ROOT / "testenv/tls.sh", directory)
        yield Path(directory)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """With several workers, a file's tests run on one, and so do the files that share a real store."""
    for item in items:
        name = item.path.stem
        group = next((store for store in STORES if store in name), name)
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    """What a test that passed has left on the disk goes at once: all of them together would take some 40 GB."""
    report = (yield).get_result()
    if report.when == "call":
        item.has_passed = report.passed
    directory = getattr(item, "funcargs", {}).get("tmp_path")
    if report.when == "teardown" and directory and report.passed and getattr(item, "has_passed", False):
        # The directory itself stays: another test of the same name would get it, and some name volumes by it.
        for path in directory.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    """A run in which everything passed leaves nothing on the disk."""
    if exitstatus == 0 and "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(session.config._tmp_path_factory.getbasetemp(), ignore_errors=True)


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    """A failure is told at once: a run that is cut short would keep it to itself."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid} failed in its {report.when}:\n{report.longreprtext}", flush=True)


# What needs the daemon itself, not just an NBD server.
needs_hdcs = pytest.mark.skipif(
    SERVER_CMD is not None, reason="HDCS_SERVER_CMD is not the daemon"
)
