"""Imports and exports that are slow, interrupted or refused."""

import signal
import subprocess
import time

from daemon import COMMAND_SECONDS
from programs import HDCS, MIB


def names(daemon):
    return {volume["name"] for volume in daemon.json("volume", "list")}


def popen(daemon, *arguments, **options):
    command = [str(word) for word in (HDCS, *arguments, "--data", daemon.data)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, **options)


def fails_early(daemon, name, *arguments):
    """An import of which only a part comes; what it says."""
    command = ("volume", "import", name, "-", "--size", "8M", *arguments)
    done = popen(daemon, *command, stdin=subprocess.PIPE)
    said = done.communicate(b"e" * (3 * MIB), timeout=COMMAND_SECONDS)[1].decode()
    assert done.returncode == 1 and "3145728 of 8388608" in said, said
    assert name not in names(daemon)
    return said


def slow(tmp_path, name, milliseconds):
    """A backend whose every request takes so long, so that there is something to interrupt."""
    return f"file:{tmp_path}/{name}?delay_us={milliseconds * 1000}"


def interrupt_after(process, pattern, number=signal.SIGINT):
    """Send a signal once a line of progress says so; all that it printed."""
    said = b""
    end = time.monotonic() + COMMAND_SECONDS
    while pattern not in said:
        assert time.monotonic() < end and process.poll() is None, said
        said += process.stderr.readline()
    process.send_signal(number)
    return (said + process.communicate(timeout=COMMAND_SECONDS)[1]).decode()
