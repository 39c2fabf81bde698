"""Programs and ports that tests use, whatever they test."""

import os
import secrets
import shlex
import socket
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# What `make test` builds, or what is named.
BUILT = Path(os.environ.get("HDCS_BUILT", ROOT / "target/checked")).absolute()
HDCS = BUILT / "hdcs"
BENCH = BUILT / "hdcs-bench"
EXAMPLES = BUILT / "examples"

CLIENT_SECONDS = 120

MIB = 1 << 20


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
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 6
    while True:
        first = 10_000 + worker * 3_700 + secrets.randbelow(3_700 - count)
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return first
        except OSError:
            continue


def running_with(argument):
    """Processes that have `argument` in their command line."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it ended meanwhile
        if argument in line:
            found.append(line)
    return found
