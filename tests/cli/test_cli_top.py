"""`hdcs top` on a terminal: keys, size, and what it leaves of the terminal's settings."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from contextlib import contextmanager

import pytest

from daemon import Daemon
from programs import HDCS

CLEAR = "\x1b[2J\x1b[H"
SECONDS = 30


class Top:
    """`hdcs top` on a pseudo-terminal of a given size."""

    def __init__(self, daemon, columns, lines):
        self.master, self.slave = pty.openpty()
        self.resize(columns, lines)
        self.before = termios.tcgetattr(self.slave)
        self.process = subprocess.Popen(
            [HDCS, "top", "--interval", "0.1", "--data", daemon.data],
            stdin=self.slave, stdout=self.slave, stderr=subprocess.PIPE, start_new_session=True,
        )
        self.text = ""

    def resize(self, columns, lines):
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def until(self, condition):
        """Read until what was shown is as wanted."""
        end = time.monotonic() + SECONDS
        while not condition(self.text):
            assert time.monotonic() < end and self.process.poll() is None, self.text
            if select.select([self.master], [], [], 0.1)[0]:
                self.text += os.read(self.master, 65536).decode()

    def screens(self):
        """Every whole screen that was shown, as lines."""
        return [screen.splitlines() for screen in self.text.split(CLEAR)[1:-1]]

    def press(self, key):
        os.write(self.master, key.encode())

    def ended(self):
        """It ends well and leaves the terminal as it was."""
        end = time.monotonic() + SECONDS
        while self.process.poll() is None:
            assert time.monotonic() < end, self.text
            # Whoever writes to a terminal that nobody reads may wait.
            if select.select([self.master], [], [], 0.05)[0]:
                os.read(self.master, 65536)
        assert self.process.returncode == 0, self.process.stderr.read()
        assert termios.tcgetattr(self.slave) == self.before

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.process.stderr.close()
        os.close(self.master)
        os.close(self.slave)


@contextmanager
def top(daemon, columns=200, lines=50):
    running = Top(daemon, columns, lines)
    try:
        yield running
    finally:
        running.close()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("top")) as daemon:
        for index in range(4):
            daemon.create(f"volume-{index}")
        yield daemon


def test_top_refreshes_until_q(daemon):
    with top(daemon) as running:
        running.until(lambda text: text.count(CLEAR) > 3)
        screen = running.screens()[0]
        assert screen[0].startswith("hdcs ") and "VOLUME" in screen[1]
        assert [line.split()[:2] for line in screen[2:6]] == [
            [f"volume-{index}", "healthy"] for index in range(4)
        ]
        # Other keys do nothing, arrows included, and none is echoed.
        running.press("x\x1b[A\x1b[B")
        shown = running.text.count(CLEAR)
        running.until(lambda text: text.count(CLEAR) > shown + 2)
        assert "^[" not in running.text and "\x1b[A" not in running.text
        running.press("q")
        running.ended()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_top_restores_the_terminal_on_a_signal(daemon, number):
    with top(daemon) as running:
        running.until(lambda text: CLEAR in text)
        running.process.send_signal(number)
        running.ended()


def test_top_fits_the_terminal_and_follows_its_size(daemon):
    with top(daemon, columns=40, lines=4) as running:
        running.until(lambda text: text.count(CLEAR) > 2)
        for screen in running.screens():
            assert len(screen) <= 3 and max(map(len, screen)) <= 40, screen
        running.resize(150, 20)
        running.process.send_signal(signal.SIGWINCH)
        running.until(lambda text: "volume-3" in text)
        running.until(lambda text: max(map(len, text.splitlines())) > 40)
        running.press("Q")
        running.ended()


def test_top_without_a_terminal_has_no_escape_codes(daemon):
    output = daemon.ok("top", "--interval", "0.1", "--iterations", "2")
    assert "\x1b" not in output
    assert output.count("VOLUME") == 2
    assert daemon.ok("top", "--interval", "0.1").count("VOLUME") == 1
