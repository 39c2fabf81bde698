"""A NameNode that lies: whatever it answers, the daemon lives, keeps to its memory, and says that the store cannot
be used."""

import os
import random
import socket
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from daemon import Daemon

BLOCK = 4096
# An answer that is announced with a GiB, how much of it comes, and how much more memory that may cost.
LONG = (1 << 30).to_bytes(4, "big") + bytes(256 << 20)
LONG_MEMORY_MAX = 64 << 20
# Kerberos: the client asks for the ways to authenticate before anything else.
SECURE = """<configuration>
  <property><name>hadoop.security.authentication</name><value>kerberos</value></property>
</configuration>"""


def framed(header, body=b""):
    """An answer of Hadoop's RPC: its length, and its parts with theirs."""
    parts = b"".join(bytes([len(part)]) + part for part in (header, body))
    return len(parts).to_bytes(4, "big") + parts


# Protocol buffers of `RpcResponseHeaderProto`: field 1 the number of the call (-33 while authenticating), 2 its status;
# and of `RpcSaslProto`: field 2 the state.
NEGOTIATING = b"\x08\xdf\xff\xff\xff\x0f"
LIES = {
    "no such status": framed(NEGOTIATING + b"\x10\x63"),
    "no such state": framed(NEGOTIATING + b"\x10\x00", b"\x10\x63"),
    "state out of turn": framed(NEGOTIATING + b"\x10\x00", b"\x10\x03"),
    "challenge to nobody": framed(NEGOTIATING + b"\x10\x00", b"\x10\x04"),
    "no message": bytes(64),
    "long message": b"\x3f\xff\xff\xff" + bytes(64),
    "nonsense": random.Random(5).randbytes(4096),
    "nothing": b"",
}


@contextmanager
def name_node(answer):
    """Answer whatever is asked with the same bytes; the address, and who has asked."""
    asked = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection):
        with connection:
            connection.settimeout(10)
            try:
                while connection.recv(4096):
                    asked.append(True)
                    connection.sendall(answer)
                    if not answer:
                        return
            except OSError:
                pass

    def accept():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1], asked
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def options_of(authentication, directory, timeout_seconds):
    """The options of a place whose users are known in this way."""
    options = f"retry_s=1&timeout_s={timeout_seconds}"
    if authentication == "kerberos":
        (directory / "core-site.xml").write_text(SECURE)
        options += f"&conf={directory}"
    return options


@pytest.mark.parametrize("authentication", ["simple", "kerberos"])
def test_answers_of_a_name_node_end_no_daemon(tmp_path, authentication):
    options = options_of(authentication, tmp_path, timeout_seconds=2)
    data = tmp_path / "data"
    data.mkdir()
    with Daemon(data) as daemon:
        daemon.create("local", size="4M")
        for what, answer in LIES.items():
            with name_node(answer) as (port, asked):
                url = f"hdfs://127.0.0.1:{port}/volumes/v?{options}"
                done = daemon.cli("volume", "create", "v", "--size", "16M", "--backend", url)
            assert asked, f"{what}: nobody asked\n{done.stderr}"
            assert done.returncode != 0, f"{what}: {done.stdout}"
            assert daemon.process.poll() is None, f"{what}: it has ended\n{daemon.log()[-3000:]}"
            assert "HDFS at 127.0.0.1" in done.stderr, f"{what}: {done.stderr}"
            word = os.urandom(BLOCK)
            daemon.write("local", word)
            assert daemon.read("local", BLOCK) == word, what
        if authentication == "kerberos":
            assert "the HDFS client gave an operation up" in daemon.log()
        daemon.stop()


def most_resident(process):
    """The most memory that a process has had."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmHWM")


@pytest.mark.parametrize("authentication", ["simple", "kerberos"])
def test_length_that_a_name_node_announces_takes_no_memory(tmp_path, authentication):
    options = options_of(authentication, tmp_path, timeout_seconds=5)
    data = tmp_path / "data"
    data.mkdir()
    with Daemon(data) as daemon, name_node(LONG) as (port, asked):
        url = f"hdfs://127.0.0.1:{port}/volumes/v?{options}"
        before = most_resident(daemon.process)
        done = daemon.cli("volume", "create", "v", "--size", "16M", "--backend", url)
        assert asked and done.returncode != 0, done.stdout
        assert most_resident(daemon.process) < before + LONG_MEMORY_MAX
        assert "announces a message of 1073741824 bytes" in done.stderr + daemon.log()
        daemon.stop()
