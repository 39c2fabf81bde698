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


def varint(value):
    """A number as protocol buffers have it."""
    low = bytes([value & 127 | (128 if value > 127 else 0)])
    return low + varint(value >> 7) if value > 127 else low


def field(number, value):
    """A field of a protocol buffer: a number, or bytes."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def parsed(message):
    """The fields of a protocol buffer that has only numbers and bytes."""
    fields, at = {}, 0

    def take():
        nonlocal at
        value = shift = 0
        while True:
            byte, at = message[at], at + 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        key, value = take(), take()
        if key & 7 == 2:
            value, at = message[at : at + value], at + value
        fields[key >> 3] = value
    return fields


def parts_of(message):
    """The parts of a call, each with its length before it (all of less than 128 bytes)."""
    while message:
        yield message[1 : 1 + message[0]]
        message = message[1 + message[0] :]


def obliging(connection, bodies, asked):
    """Answer calls by their methods as a NameNode does."""
    with connection.makefile("rb") as stream:
        assert stream.read(7)[:4] == b"hrpc"
        while length := stream.read(4):
            message = stream.read(int.from_bytes(length, "big"))
            header, *rest = parts_of(message)
            call = parsed(header)[3]
            if call & 1:
                # Who connects says who it is.
                continue
            method = parsed(rest[0])[1].decode()
            asked.append(method)
            body = bodies[method]
            answer = field(1, call >> 1) + field(2, 0) + field(3, 9)
            answer = varint(len(answer)) + answer + varint(len(body)) + body
            connection.sendall(len(answer).to_bytes(4, "big") + answer)


EMPTY_LISTING = field(1, field(2, 0))
LOCATED = (
    field(1, field(1, b"p") + field(2, 1) + field(3, 1) + field(4, 1 << 20)) + field(2, 0) + field(4, 0)
    + field(5, field(1, b"") + field(2, b"") + field(3, b"") + field(4, b""))
)


def coded(data_units, cell_bytes, located=LOCATED):
    """Answers that tell of a file of one block with erasure coding."""
    schema = field(1, b"rs") + field(2, data_units) + field(3, 1)
    policy = field(1, b"x") + field(2, schema) + field(3, cell_bytes) + field(4, 9)
    file = field(1, 1 << 20) + field(2, located) + field(3, 0) + field(5, 1) + field(7, policy)
    return {"getListing": EMPTY_LISTING, "getBlockLocations": field(1, file)}


BODIES = {
    "erasure coding": coded(200_000, (1 << 31) - 1),
    # Each of two bytes.
    "a quarter of a million entries": {"getListing": field(1, field(1, b"") * 250_000 + field(2, 0))},
}


@contextmanager
def name_node(answer):
    """Answer whatever is asked with the same bytes, or calls with these bodies; the port, and who has asked."""
    asked = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection):
        with connection:
            connection.settimeout(10)
            try:
                if isinstance(answer, dict):
                    obliging(connection, answer, asked)
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
        assert "the HDFS client gave an operation up" not in daemon.log()
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
        assert "announces a message of 1073741824 bytes" in done.stderr
        daemon.stop()


@pytest.mark.parametrize("what", BODIES)
def test_sizes_that_a_name_node_tells_take_no_memory(tmp_path, what):
    with Daemon(tmp_path) as daemon, name_node(BODIES[what]) as (port, asked):
        url = f"hdfs://127.0.0.1:{port}/volumes/v?{options_of('simple', tmp_path, timeout_seconds=5)}"
        before = most_resident(daemon.process)
        done = daemon.cli("volume", "create", "v", "--size", "16M", "--backend", url)
        assert asked and done.returncode != 0, done.stdout
        assert daemon.process.poll() is None, daemon.log()[-3000:]
        assert most_resident(daemon.process) < before + LONG_MEMORY_MAX
        assert "OutOfBounds" in done.stderr + daemon.log()
        daemon.stop()


def test_what_the_client_does_not_think_of_ends_an_operation_only(tmp_path):
    # A block with a DataNode and no number for it: an assertion of the client.
    node = field(1, field(1, b"") + field(2, b"") + field(3, b"") + field(4, 1) + field(5, 1) + field(6, 1))
    located = LOCATED + field(3, node)
    with Daemon(tmp_path) as daemon, name_node(coded(3, 64 << 10, located)) as (port, asked):
        url = f"hdfs://127.0.0.1:{port}/volumes/v?{options_of('simple', tmp_path, timeout_seconds=5)}"
        done = daemon.cli("volume", "create", "v", "--size", "16M", "--backend", url)
        assert asked and done.returncode != 0, done.stdout
        assert daemon.process.poll() is None, daemon.log()[-3000:]
        assert "the HDFS client gave an operation up" in daemon.log()
        daemon.create("local", size="4M")
        daemon.stop()


def message_of(stream):
    """The parts of the next call, in which each has its length before it."""
    length = stream.read(4)
    message, parts = stream.read(int.from_bytes(length, "big")), []
    while message:
        size = shift = 0
        while message[0] > 127:
            size, shift, message = size | (message[0] & 127) << shift, shift + 7, message[1:]
        size, message = size | message[0] << shift, message[1:]
        parts.append(message[:size])
        message = message[size:]
    return parts


def text_of(data):
    """Bytes as Hadoop writes them, if they are few."""
    return bytes([len(data)]) + data


def token_file(path, port):
    """A file with a delegation token for this NameNode, as Hadoop writes it."""
    # Owner, renewer and real user; issued, valid until 2100 (a long of eight bytes), its number and that of its key.
    until = b"\x88" + (4_102_444_800_000).to_bytes(8, "big")
    identifier = b"\0" + text_of(b"u") * 3 + b"\0" + until + b"\1\1"
    token = text_of(identifier) + text_of(b"secret") + text_of(b"HDFS_DELEGATION_TOKEN")
    path.write_bytes(b"HDTS\0\1" + text_of(b"a") + token + text_of(b"127.0.0.1:%d" % port) + b"\0")


def test_success_without_proof_ends_no_negotiation(tmp_path, monkeypatch):
    """A NameNode that does not know the token's key says that all is well."""
    challenge = b'realm="default",nonce="n",qop="auth-conf,auth-int,auth",charset=utf-8,cipher="3des",algorithm=md5-sess'
    method = field(1, b"TOKEN") + field(2, b"DIGEST-MD5") + field(3, b"") + field(4, b"default") + field(5, challenge)
    seen = []
    listener = socket.create_server(("127.0.0.1", 0))

    def say(connection, message):
        answer = b"".join(varint(len(part)) + part for part in (NEGOTIATING + b"\x10\x00", message))
        connection.sendall(len(answer).to_bytes(4, "big") + answer)

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, connection.makefile("rb") as stream:
                try:
                    connection.settimeout(5)
                    assert stream.read(7)[:4] == b"hrpc"
                    message_of(stream)
                    say(connection, field(2, 1) + field(4, method))
                    response = message_of(stream)[1]
                    seen.append("response" if b"digest-uri" in response else response)
                    say(connection, field(2, 0))
                    if stream.read(1):
                        seen.append("call")
                except OSError:
                    pass

    threading.Thread(target=serve, daemon=True).start()
    port = listener.getsockname()[1]
    token_file(tmp_path / "token", port)
    monkeypatch.setenv("HADOOP_TOKEN_FILE_LOCATION", str(tmp_path / "token"))
    options = options_of("kerberos", tmp_path, timeout_seconds=2)
    with Daemon(tmp_path) as daemon:
        url = f"hdfs://127.0.0.1:{port}/volumes/v?{options}"
        done = daemon.cli("volume", "create", "v", "--size", "16M", "--backend", url)
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        assert done.returncode != 0, done.stdout
        assert set(seen) == {"response"}
        assert "not finished after server success" in done.stderr + daemon.log()
        daemon.stop()
