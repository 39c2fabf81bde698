"""Ctrl-C and SIGTERM at every part of an import and an export: what the command has made is gone, what was there
before is as it was, and exit status and message say so."""

import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

from daemon import COMMAND_SECONDS, Daemon
from programs import MIB, run
from transfer_cases import interrupt_after, names, popen, slow

INTERRUPTED = 130


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    """One daemon for the tests of this module; each uses volumes of its own."""
    with Daemon(tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon
        daemon.stop()


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM], ids=["int", "term"])
def number(request):
    return request.param


def catches(process, number):
    """Whether a process does something of its own when it is told to end."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16) >> (number - 1) & 1


def interrupted(process, *parts):
    """It has ended as it should, and says so."""
    said = process.communicate(timeout=COMMAND_SECONDS)[1].decode()
    assert process.returncode == INTERRUPTED, said
    for part in ("error: ", *parts):
        assert part in said, said


class Tool:
    """A program of QEMU's that hangs at one of its commands, and says when it does."""

    def __init__(self, directory, program, command, words="hang"):
        self.directory = directory / "tool"
        self.directory.mkdir()
        # A short path, since a unix socket is made in there.
        self.temporary = Path(tempfile.mkdtemp(prefix="hdcs-tool-", dir="/tmp"))
        path = self.directory / program
        hang = f"echo $$ > {self.directory}/number; mv {self.directory}/number {self.directory}/hangs; exec sleep 1000"
        real = shutil.which(program)
        path.write_text(f"#!/bin/sh\nhang() {{ {hang}; }}\n"
                        f'case "$1" in {command}) {words.format(real=real)};; esac\nexec {real} "$@"\n')
        path.chmod(0o755)

    def environment(self):
        return {**os.environ, "PATH": f"{self.directory}:{os.environ['PATH']}", "TMPDIR": str(self.temporary)}

    def hangs(self):
        return (self.directory / "hangs").exists()

    def is_gone(self):
        number = (self.directory / "hangs").read_text().strip()
        return not Path(f"/proc/{number}").exists() and os.listdir(self.temporary) == []


@pytest.fixture
def hanging(tmp_path):
    """Makes such a program."""
    made = []

    def make(*arguments):
        made.append(Tool(tmp_path, *arguments))
        return made[-1]

    yield make
    for tool in made:
        shutil.rmtree(tool.temporary)


def test_import_is_interrupted_before_its_standard_input_begins(daemon, number):
    importing = popen(daemon, "volume", "import", "begin", "-", "--size", "8M", stdin=subprocess.PIPE)
    daemon.until(lambda: catches(importing, number))
    importing.send_signal(number)
    # Its standard input stays open until then.
    importing.wait(COMMAND_SECONDS)
    interrupted(importing, "import is interrupted: nothing was made")
    assert "begin" not in names(daemon)


@pytest.mark.parametrize("program, command", [("qemu-img", "info"), ("qemu-img", "check"), ("qemu-nbd", "-f")])
def test_import_is_interrupted_while_qemu_looks_at_the_image(daemon, hanging, tmp_path, number, program, command):
    image = tmp_path / "image.qcow2"
    run("qemu-img", "create", "-f", "qcow2", image, "4M")
    tool = hanging(program, command)
    importing = popen(daemon, "volume", "import", "looks", image, env=tool.environment())
    daemon.until(tool.hangs)
    importing.send_signal(number)
    interrupted(importing, "import is interrupted: nothing was made")
    assert tool.is_gone() and "looks" not in names(daemon)


@pytest.mark.parametrize("program, command, words", [
    ("qemu-img", "create", "hang"),
    ("qemu-nbd", "-f", "hang"),
    # It serves the file, and does not end when it is to.
    ("qemu-nbd", "-f", 'trap "kill \\$child; hang" TERM; {real} "$@" & child=$!; wait $child; exit'),
], ids=["create", "serve", "end"])
def test_export_is_interrupted_while_qemu_works(daemon, hanging, tmp_path, number, program, command, words):
    name = f"works-{tmp_path.name}"
    daemon.create(name, size="4M")
    tool = hanging(program, command, words)
    out = tmp_path / "out"
    out.mkdir()
    export = popen(daemon, "volume", "export", name, out / "image", "--format", "qcow2", env=tool.environment())
    daemon.until(tool.hangs)
    export.send_signal(number)
    interrupted(export, f"export is interrupted: volume {name}: nothing of it is left")
    assert tool.is_gone() and os.listdir(out) == []


def key_that_waits(tmp_path):
    """A command that says that it was begun, and gives a key only when it may go on."""
    path, begun, go = (tmp_path / name for name in ("key.sh", "begun", "go"))
    path.write_text(f"#!/bin/sh\ntouch {begun}\nwhile [ ! -e {go} ]; do sleep 0.01; done\n"
                    f"printf {bytes(range(32)).hex()}\n")
    path.chmod(0o700)
    return path, begun, go


@pytest.mark.parametrize("storage", [False, True], ids=["cache", "storage"])
def test_import_is_interrupted_while_its_volume_is_made(daemon, tmp_path, number, storage):
    key, begun, go = key_that_waits(tmp_path)
    image = tmp_path / "image.raw"
    image.write_bytes(b"i" * MIB)
    mode = ["--mode", "storage", "--store-path", tmp_path / "store"] if storage else []
    importing = popen(daemon, "volume", "import", "made", image, "--backend", f"file:{tmp_path}/made.img",
                      "--encrypt", "--key-command", key, *mode)
    daemon.until(begun.exists)
    importing.send_signal(number)
    assert b"volume made is being made" in importing.stderr.readline()
    go.touch()
    interrupted(importing, "interrupted", "removed again")
    assert "made" not in names(daemon)
    assert not (tmp_path / "made.img").exists() and not (tmp_path / "store").exists()


def test_import_is_interrupted_twice_while_its_volume_is_made(daemon, tmp_path):
    key, begun, go = key_that_waits(tmp_path)
    image = tmp_path / "image.raw"
    image.write_bytes(b"i" * MIB)
    importing = popen(daemon, "volume", "import", "twice", image, "--encrypt", "--key-command", key)
    daemon.until(begun.exists)
    importing.send_signal(signal.SIGINT)
    importing.stderr.readline()
    importing.send_signal(signal.SIGTERM)
    interrupted(importing, "volume twice is still being made: delete it")
    go.touch()
    daemon.until(lambda: "twice" in names(daemon))
    daemon.ok("volume", "delete", "twice")


def test_import_is_interrupted_while_it_is_copied(daemon, tmp_path, number):
    source = tmp_path / "source.raw"
    source.write_bytes(random.Random(9).randbytes(64 * MIB))
    url = slow(tmp_path, "slow.img", 500)
    importing = popen(daemon, "volume", "import", "cancel-import", source, "--backend", url)
    said = interrupt_after(importing, b" imported, ", number)
    assert importing.returncode == INTERRUPTED and "interrupted" in said and "removed again" in said
    assert "cancel-import" not in names(daemon)
    assert os.listdir(tmp_path) == ["source.raw"]


def test_storage_import_is_interrupted_while_it_is_copied(daemon, tmp_path, number):
    importing = popen(daemon, "volume", "import", "cancel-home", "-", "--size", "64M", "--mode", "storage",
                      "--store-path", tmp_path / "store", "--backend", f"file:{tmp_path}/cold.img",
                      stdin=subprocess.PIPE)
    importing.stdin.write(random.Random(12).randbytes(24 * MIB))
    importing.stdin.flush()

    def is_at_home():
        assert importing.poll() is None
        volume = [one for one in daemon.json("volume", "list") if one["name"] == "cancel-home"]
        return volume and volume[0]["counters"]["write_bytes"] >= 16 * MIB

    daemon.until(is_at_home)
    importing.send_signal(number)
    # Its standard input stays open until then.
    importing.wait(COMMAND_SECONDS)
    interrupted(importing, "interrupted", "removed again")
    assert "cancel-home" not in names(daemon) and os.listdir(tmp_path) == []


def test_import_is_interrupted_while_it_is_made_durable(daemon, tmp_path, number):
    source = tmp_path / "source.raw"
    source.write_bytes(random.Random(10).randbytes(MIB))
    importing = popen(daemon, "volume", "import", "durable", source, "--backend", slow(tmp_path, "slow.img", 3000),
                      "--set", "policy=write-through")

    def is_written():
        assert importing.poll() is None
        volume = [one for one in daemon.json("volume", "list") if one["name"] == "durable"]
        return volume and volume[0]["counters"]["write_bytes"] == MIB

    daemon.until(is_written)
    importing.send_signal(number)
    interrupted(importing, "interrupted", "removed again")
    assert "durable" not in names(daemon)
    assert os.listdir(tmp_path) == ["source.raw"]


def test_import_that_is_interrupted_is_kept_if_that_was_said(daemon):
    importing = popen(daemon, "volume", "import", "kept", "-", "--size", "8M", "--keep", stdin=subprocess.PIPE)
    importing.stdin.write(b"k" * MIB)
    importing.stdin.flush()
    daemon.until(lambda: "kept" in names(daemon))
    importing.send_signal(signal.SIGTERM)
    # Its input ends only after that, or it might see that first.
    importing.wait(COMMAND_SECONDS)
    interrupted(importing, "kept as far as it came")
    assert "kept" in names(daemon)


def test_export_is_interrupted_while_it_is_copied(daemon, tmp_path, number):
    image = tmp_path / "slow.img"
    image.write_bytes(random.Random(8).randbytes(64 * MIB))
    name = f"cancel-export-{number}"
    daemon.json("volume", "create", name, "--backend", slow(tmp_path, "slow.img", 500))
    export = popen(daemon, "volume", "export", name, tmp_path / "out.raw")
    said = interrupt_after(export, b" exported, ", number)
    assert export.returncode == INTERRUPTED and "ETA" in said
    assert f"export is interrupted: volume {name}: nothing of it is left" in said
    assert os.listdir(tmp_path) == ["slow.img"]


def test_export_of_a_snapshot_is_interrupted(daemon, tmp_path, number):
    image = tmp_path / "slow.img"
    image.write_bytes(random.Random(8).randbytes(32 * MIB))
    name = f"snap-{number}"
    daemon.json("volume", "create", name, "--backend", slow(tmp_path, "slow.img", 500))
    daemon.ok("volume", "snapshot", name, "s", "--copy")
    before = names(daemon)
    export = popen(daemon, "volume", "export", f"{name}@s", tmp_path / "out.raw")
    said = interrupt_after(export, b" exported, ", number)
    assert export.returncode == INTERRUPTED and "nothing of it is left" in said
    assert names(daemon) == before and not [one for one in os.listdir(tmp_path) if one.startswith("out")]
    daemon.ok("volume", "snapshot", name, "s", "--delete")
