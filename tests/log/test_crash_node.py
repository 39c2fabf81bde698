"""The real program, killed in mid-write; and its disk without power. `make crash` does it at length."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from programs import BENCH, ROOT

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system, which takes root")


def crash(*arguments, timeout):
    """Run the crash test; its last line says what was verified."""
    done = subprocess.run(
        [BENCH, "crash", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_crash_kill():
    verdict = crash("--kills", "12", timeout=180)
    assert "12 kills" in verdict and "every promised write was there" in verdict


@needs_root
def test_crash_power_cut():
    verdict = crash("--kills", "8", "--power", timeout=240)
    assert "8 kills" in verdict and "every promised write was there" in verdict
    mounts = Path("/proc/mounts").read_text()
    assert "crash-data" not in mounts


@needs_root
def test_crash_begins_anew_once_if_its_disk_loses_a_tool(tmp_path):
    command = [BENCH, "crash", "--kills", "2", "--power", "--data", tmp_path]
    test = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def tool():
        """The process that is the disk as a file."""
        for process in Path("/proc").glob("[0-9]*"):
            try:
                line = (process / "cmdline").read_bytes()
            except OSError:
                continue  # it ended meanwhile
            if line.startswith(b"nbdfuse\0" + bytes(tmp_path)):
                return int(process.name)
        return None
    end = time.monotonic() + 60
    # From then on all of the disk is there.
    while not list(tmp_path.glob("run-*/mount/node")):
        assert time.monotonic() < end and test.poll() is None
    found = tool()
    os.kill(found, signal.SIGABRT)
    out, _ = test.communicate(timeout=180)
    assert test.returncode == 0, out
    assert "nbdfuse, which the disk is made of, ended by itself" in out
    assert out.count("begun anew") == 1 and "2 kills" in out.splitlines()[-1]
