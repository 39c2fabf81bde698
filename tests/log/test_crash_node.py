"""The real program, killed in mid-write; and its disk without power. `make crash` does it at length."""

import os
import subprocess
from pathlib import Path

import pytest

from programs import BENCH, ROOT


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


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system, which takes root")
def test_crash_power_cut():
    verdict = crash("--kills", "8", "--power", timeout=240)
    assert "8 kills" in verdict and "every promised write was there" in verdict
    mounts = Path("/proc/mounts").read_text()
    assert "crash-data" not in mounts
