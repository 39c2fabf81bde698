"""A daemon of one's own for each test, its command line, its API and its volumes over NBD."""

import http.client
import itertools
import json
import os
import re
import select
import signal
import socket
import subprocess
import time
from pathlib import Path

import nbd

from programs import HDCS, MIB

START_SECONDS = 60
STOP_SECONDS = 60
COMMAND_SECONDS = 90

# Small, so that a daemon starts at once and a volume is made at once. Most of its memory is for volumes: the DRAM tier has
# 32 MiB.
CONFIG = {
    "memory_max_mib": 384,
    "volumes_memory_mib": 200,
    "log_size_mib": 16,
    "cache_total_size_mib": 16,
}

# Dirty data stays dirty: destage waits for its age and for a fuller log than a test makes.
DIRTY = ["--set", "destage_age_max_ms=86400000", "--set", "dirty_ratio_min=80",
         "--set", "dirty_ratio_max=90", "--persist", "on-write"]


def hdcs(*arguments, env=None, cwd=None, timeout=COMMAND_SECONDS):
    """Run the command line tool to its end, whatever that is."""
    environment = {key: value for key, value in os.environ.items() if key != "HDCS_DATA"}
    return subprocess.run(
        [str(HDCS), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**environment, "LC_ALL": "C", **(env or {})},
        cwd=cwd,
    )


def refused(done, status, *parts):
    """The command failed as it should: its status, one error, and what the error says."""
    assert done.returncode == status, f"{done.args}: {done.returncode}\n{done.stdout}{done.stderr}"
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    text = " ".join(done.stderr.split())
    for part in parts:
        assert part in text, f"{part!r} is not in {text!r}"


def freeze(process):
    """Stop a process, and return once each of its threads has stopped: the signal alone does not wait for that."""
    os.kill(process, signal.SIGSTOP)
    end = time.monotonic() + COMMAND_SECONDS
    # What follows the name, which stands in brackets, begins with the state.
    while any(") T " not in (task / "stat").read_text() for task in Path(f"/proc/{process}/task").iterdir()):
        assert time.monotonic() < end, f"process {process} does not stop"
        time.sleep(0.01)


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path):
        super().__init__("hdcs", timeout=COMMAND_SECONDS)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self.path))


class Daemon:
    """One daemon and its data directory; a context manager that leaves nothing running."""

    def __init__(self, home, config=None, data=None):
        self.home = Path(home)
        self.data = Path(data) if data else self.home / "d"
        self.config = {**CONFIG, **(config or {})}
        if config and "memory_max_mib" in config and "volumes_memory_mib" not in config:
            del self.config["volumes_memory_mib"]
        self.process = None
        self.numbers = itertools.count(1)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        if self.process and self.process.poll() is None:
            self.kill()

    def command(self):
        path = self.home / "hdcs.toml"
        text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in self.config.items())
        path.write_text(text)
        return [str(HDCS), "serve", "--config", str(path), "--data", str(self.data)]

    def spawn(self):
        """Start it without waiting."""
        with open(self.home / "log", "ab") as log:
            self.process = subprocess.Popen(
                self.command(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log
            )

    def start(self):
        """Start it; its ready line."""
        self.spawn()
        return self.ready()

    def ready(self):
        """Wait until it has opened its volumes, or given up to wait for them; its ready line."""
        ready, _, _ = select.select([self.process.stdout], [], [], START_SECONDS)
        line = self.process.stdout.readline().decode() if ready else ""
        if not line:
            self.kill()
        assert line.startswith("hdcs: ready"), f"{line!r}\n{self.log()}"
        return line

    def refuses(self, status, *parts):
        """It does not start, and says why."""
        done = subprocess.run(
            self.command(), capture_output=True, text=True, timeout=START_SECONDS
        )
        refused(done, status, *parts)
        assert done.stdout == ""

    def log(self):
        # A thread of its own writes the log, a moment after what it tells of.
        time.sleep(0.05)
        return (self.home / "log").read_text(errors="replace")

    def signal(self, number):
        self.process.send_signal(number)

    def wait(self):
        status = self.process.wait(STOP_SECONDS)
        self.process.stdout.close()
        return status

    def stop(self):
        self.signal(signal.SIGTERM)
        status = self.wait()
        assert status == 0, f"exit status {status}\n{self.log()}"

    def kill(self):
        self.process.kill()
        self.wait()

    def cli(self, *arguments):
        """Run a command against it."""
        return hdcs(*arguments, "--data", self.data)

    def ok(self, *arguments):
        """Run a command that must succeed; what it printed."""
        done = self.cli(*arguments)
        assert done.returncode == 0, f"{arguments}\n{done.stdout}{done.stderr}\n{self.log()}"
        return done.stdout

    def json(self, *arguments):
        """Run a command that must succeed; its JSON."""
        return json.loads(self.ok(*arguments, "--json"))

    def create(self, name, *arguments, size="16M"):
        return self.json("volume", "create", name, "--size", size, *arguments)

    def new_volume(self, size="64M", *arguments):
        """A volume more; its name."""
        name = f"v{next(self.numbers)}"
        self.create(name, *arguments, size=size)
        return name

    def api(self, method, path, body=None):
        """One request to the control API: status and text."""
        connection = UnixConnection(self.data / "control.sock")
        try:
            try:
                connection.request(method, path, body, {"content-type": "application/json"})
            except BrokenPipeError:
                # Refused before the body was read; the answer is there all the same.
                pass
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def until(self, condition):
        """Wait for something that must come about while it runs."""
        end = time.monotonic() + COMMAND_SECONDS
        while not condition():
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < end, f"it did not come about\n{self.log()}"
            time.sleep(0.01)

    def tells(self, text):
        """Wait until its log has a text: it is written a moment after what it tells of."""
        end = time.monotonic() + COMMAND_SECONDS
        while text not in self.log():
            ended = self.process.poll() is not None
            assert not ended or text in self.log(), f"{text!r} is not in\n{self.log()}"
            assert time.monotonic() < end, f"{text!r} is not in\n{self.log()}"
            time.sleep(0.01)

    def volume(self, name):
        return self.json("volume", "show", name)

    def status(self):
        """The node as a whole, as soon as the control socket answers."""
        status, text = self.api("GET", "/v1/status")
        assert status == 200, text
        return json.loads(text)

    def cache(self):
        """The node's read cache."""
        return self.json("status")["cache"]

    def online(self):
        """The same, once a start has read what the cache's device holds."""
        self.until(lambda: self.cache()["ssd_state"] == "online")
        return self.cache()

    def log_of(self, name):
        """The file of a volume's write log."""
        return self.data / "volumes" / name / "log"

    def uri(self, name=""):
        """The NBD URI of a volume on the unix socket."""
        return f"nbd+unix:///{name}?socket={self.data / 'nbd.sock'}"

    def nbd(self, name):
        """A connected NBD client."""
        client = nbd.NBD()
        client.connect_uri(self.uri(name))
        return client

    def write(self, name, data, offset=0):
        """Write and flush, so that it is durable."""
        client = self.nbd(name)
        for at in range(0, len(data), MIB):
            client.pwrite(data[at : at + MIB], offset + at)
        client.flush()
        client.shutdown()

    def read(self, name, size, offset=0):
        client = self.nbd(name)
        data = client.pread(size, offset)
        client.shutdown()
        return bytes(data)

    def read_all(self, name, size):
        """The whole volume, in pieces that leave the cache time to write what it fills."""
        client = self.nbd(name)
        data = b"".join(bytes(client.pread(1 << 18, at)) for at in range(0, size, 1 << 18))
        client.shutdown()
        return data


def samples(page):
    """A page of metrics as {name{labels}: value}; every line must be one that Prometheus takes."""
    found = {}
    line_form = re.compile(
        r'([a-zA-Z_:][a-zA-Z0-9_:]*(?:\{[a-z_]+="(?:[^"\\]|\\.)*"(?:,[a-z_]+="(?:[^"\\]|\\.)*")*\})?)'
        r" (-?[0-9.]+(?:e-?[0-9]+)?|NaN|[+-]Inf)"
    )
    for line in page.splitlines():
        if re.fullmatch(r"# HELP [a-z_]+ \S.*|# TYPE [a-z_]+ (counter|gauge|summary)", line):
            continue
        match = line_form.fullmatch(line)
        assert match, f"not a sample: {line!r}"
        assert match[1] not in found, f"twice: {line!r}"
        found[match[1]] = float(match[2])
    return found


def homes(tmp_path, count=2):
    made = [tmp_path / str(number) for number in range(count)]
    for home in made:
        home.mkdir()
    return made
