"""Events of clients: who opened what, who was refused and why, why a connection ended; and floods of them."""

import contextlib
import os
import resource
import socket
import ssl
import struct

import nbd
import pytest

from daemon import Daemon
from programs import MIB, free_port, run
from raw_client import OPTION, READ, WRITE, Client
from tls_daemon import TlsDaemon, tls_sh

SECONDS = 30
US = f"uid {os.getuid()}, pid {os.getpid()}"
START_TLS = struct.pack(">I", 3) + struct.pack(">QII", OPTION, 5, 0)
LIMITS = {"nbd_handshake_max_ms": 400, "nbd_stall_max_ms": 400}

# They hold more sockets than a process may by default.
HARD = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (HARD, HARD))


def found(daemon, **wanted):
    """The events in which these fields are as given; of `why`, `who` and `what` a part is enough."""

    def is_so(event, key, value):
        text = event.get(key, "")
        return value in text if key in ("why", "who", "what") else text == value

    events = daemon.json("events", "--limit", "4096")
    return [event for event in events if all(is_so(event, *one) for one in wanted.items())]


def one(daemon, **wanted):
    """The last such event, once there is one: it is written beside what it tells of."""
    events = []

    def is_there():
        events[:] = found(daemon, **wanted)
        return bool(events)

    try:
        daemon.until(is_there)
    except AssertionError as error:
        raise AssertionError(f"no event has {wanted}\n{daemon.ok('events')}") from error
    return events[-1]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("clients")) as daemon:
        for name in ("left", "gone", "junk", "large", "deleted"):
            daemon.create(name)
        yield daemon


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """Clients `a` and `b`, one that is revoked, and one whose time is over."""
    directory = tmp_path_factory.mktemp("authority")
    tls_sh(directory)
    tls_sh(directory, "client", "a", "DNS:a.example,URI:spiffe://hdcs/a")
    tls_sh(directory, "client", "b", "email:b@example.org")
    tls_sh(directory, "client", "bad", "DNS:bad.example")
    tls_sh(directory, "client", "late", "DNS:late.example", "expired")
    tls_sh(directory, "revoke", "bad")
    return directory


@pytest.fixture
def secure(tmp_path, authority):
    with TlsDaemon(tmp_path, authority, {"nbd_tls_client_crl_file": str(authority / "crl.pem")}) as daemon:
        daemon.create("v", "--allow", "a.example")
        yield daemon


def test_client_that_opens_and_leaves_is_named(daemon):
    handle = daemon.nbd("left")
    opened = one(daemon, kind="connect", outcome="done", volume="left")
    assert opened["who"] == US
    handle.shutdown()
    ended = one(daemon, kind="disconnect", outcome="seen", volume="left")
    assert ended["who"] == US and ended["why"] == "the client left"
    assert ended["number"] > opened["number"]
    assert f"connect done  volume left  by {US}" in daemon.ok("events", "left")


def test_client_that_goes_without_a_word_is_named(daemon):
    with Client(daemon) as client:
        client.open("gone")
    one(daemon, kind="disconnect", outcome="seen", volume="gone", who=US, why="without saying that it leaves")


@pytest.mark.parametrize("name, junk, why", [
    ("junk", bytes(28), "something that is no request"),
    ("large", struct.pack(">IHHQQI", 0x25609513, 0, WRITE, 7, 0, 64 * MIB), "a write of more than 32 MiB"),
])
def test_client_that_breaks_the_protocol_is_named(daemon, name, junk, why):
    with Client(daemon) as client:
        client.open(name).socket.sendall(junk)
        client.is_ended()
        one(daemon, kind="disconnect", outcome="refused", volume=name, who=US, why=f"broke the protocol: {why}")


def test_client_that_breaks_the_handshake_is_named(daemon):
    with Client(daemon) as client:
        client.take(18)
        client.socket.sendall(struct.pack(">I", 0xFF))
        client.is_ended()
    event = one(daemon, kind="disconnect", who=US, why="flags that are not known")
    assert "volume" not in event


def test_client_that_asks_for_no_export_of_ours_is_refused_and_named(daemon):
    with pytest.raises(nbd.Error):
        daemon.nbd("nowhere")
    event = one(daemon, kind="connect", outcome="refused", volume="nowhere")
    assert event["who"] == US and event["why"] == "there is no such export"
    # libnbd asks twice; that is one refusal.
    assert event.get("count", 1) == 1
    # A name from outside is a text on one line, and no more than that.
    with Client(daemon) as client:
        client.take(18)
        name = b"\n" * 4000
        client.socket.sendall(struct.pack(">I", 3) + struct.pack(">QII", OPTION, 1, len(name)) + name)
        client.is_ended()
    one(daemon, kind="disconnect", outcome="refused", why="asked for an export that it does not get")
    assert all(len(event.get("volume", "")) <= 401 and "\n" not in event.get("volume", "") for event in found(daemon))


def test_client_of_a_volume_that_is_not_open_is_told_and_named(tmp_path):
    image = tmp_path / "image"
    image.write_bytes(bytes(16 * MIB))
    with Daemon(tmp_path) as daemon:
        daemon.ok("volume", "create", "v", "--backend", f"file:{image}")
        daemon.stop()
        image.rename(tmp_path / "away")
        daemon.start()
        with pytest.raises(nbd.Error):
            daemon.nbd("v")
        one(daemon, kind="connect", outcome="refused", volume="v", who=US, why="the volume is not open: ")


def test_client_of_a_volume_that_is_deleted_is_named(daemon):
    handle = daemon.nbd("deleted")
    one(daemon, kind="connect", outcome="done", volume="deleted")
    handle.shutdown()
    one(daemon, kind="disconnect", volume="deleted")
    daemon.ok("volume", "delete", "deleted")


def test_clients_that_are_too_many_are_refused_and_named(tmp_path):
    port = free_port()
    config = {"nbd_connections_max": 2, "nbd_listen": ["unix:nbd.sock", f"tcp:127.0.0.1:{port}"]}
    with Daemon(tmp_path, config) as daemon:
        daemon.create("v")
        with Client(daemon) as one_client, Client(daemon) as other, Client(daemon) as refused:
            refused.is_ended()
            one(daemon, kind="connect", outcome="refused", who=US, why="raise nbd_connections_max")
            one_client.open("v"), other.open("v")
        sockets = [socket.create_connection(("127.0.0.1", port), SECONDS) for _ in range(3)]
        one(daemon, kind="connect", outcome="refused", who="tcp 127.0.0.1", why="raise nbd_connections_max")
        for each in sockets:
            each.close()


def test_clients_over_tls_are_named_by_address_and_certificate(secure):
    secure.open("v", "a").shutdown()
    opened = one(secure, kind="connect", outcome="done", volume="v")
    assert opened["who"] == "tcp 127.0.0.1, certificate of dns:a.example (and 1 more names)"
    assert opened["what"].startswith("port ")
    ended = one(secure, kind="disconnect", volume="v")
    assert (ended["who"], ended["what"], ended["why"]) == (opened["who"], opened["what"], "the client left")
    with pytest.raises(nbd.Error):
        secure.open("v", "b")
    event = one(secure, kind="connect", outcome="refused", volume="v")
    assert event["who"] == "tcp 127.0.0.1, certificate of email:b@example.org"
    assert event["why"] == "it is not in `allow` (hdcs volume set v allow=...)"


def handshake(daemon, context, hostname="localhost"):
    """Python's TLS up to where the server has said what it thinks of it."""
    with socket.create_connection(("127.0.0.1", daemon.port), SECONDS) as client:
        assert len(client.recv(18, socket.MSG_WAITALL)) == 18
        client.sendall(START_TLS)
        assert len(client.recv(20, socket.MSG_WAITALL)) == 20
        with contextlib.suppress(OSError), context.wrap_socket(client, server_hostname=hostname) as wrapped:
            wrapped.recv(1)


def trusting(authority, own=None):
    context = ssl.create_default_context(cafile=str(authority / "ca-cert.pem"))
    if own:
        context.load_cert_chain(str(own / "client-cert.pem"), str(own / "client-key.pem"))
    return context


def test_tls_handshakes_that_fail_say_who_and_why(secure, authority, tmp_path):
    stranger = tmp_path / "stranger"
    tls_sh(stranger)
    tls_sh(stranger, "client", "a", "DNS:a.example")
    for context, hostname, why in [
        (trusting(authority), "localhost", "it showed no certificate"),
        (trusting(authority, stranger / "a"), "localhost", "no authority in nbd_tls_client_ca_file has signed"),
        (trusting(authority, authority / "bad"), "localhost", "its certificate is revoked (it says that it is of dns:bad.example)"),
        (trusting(authority, authority / "late"), "localhost", "its certificate has expired (it says that it is of dns:late.example)"),
        (trusting(authority, authority / "a"), "elsewhere.example", "it refused this node's certificate"),
        (trusting(stranger, authority / "a"), "localhost", "it does not know the authority of this node's certificate"),
    ]:
        handshake(secure, context, hostname)
        event = one(secure, kind="tls", outcome="refused", why=why)
        assert event["who"].startswith("tcp 127.0.0.1") and event["what"].startswith("port ")
    run("nbdinfo", f"nbd://127.0.0.1:{secure.port}/v", check=False)
    one(secure, kind="tls", outcome="failed", who="tcp 127.0.0.1", why="before its TLS handshake was over")
    with socket.create_connection(("127.0.0.1", secure.port), SECONDS) as client:
        client.recv(18, socket.MSG_WAITALL)
        client.sendall(START_TLS)
        client.recv(20, socket.MSG_WAITALL)
        client.sendall(b"this is not TLS")
        while client.recv(1 << 16):
            pass
    one(secure, kind="tls", outcome="refused", why="corrupt message")
    secure.open("v", "a").shutdown()


def test_tls_handshake_that_stalls_or_gives_way_is_named(tmp_path, authority):
    with TlsDaemon(tmp_path, authority, {"nbd_handshake_max_ms": 400}) as daemon:
        with socket.create_connection(("127.0.0.1", daemon.port), SECONDS) as client:
            client.recv(18, socket.MSG_WAITALL)
            one(daemon, kind="tls", outcome="refused", who="tcp 127.0.0.1", why="took too long")
    with TlsDaemon(tmp_path, authority, {"nbd_tls_handshakes_max": 2}) as daemon:
        sockets = [socket.create_connection(("127.0.0.1", daemon.port), SECONDS) for _ in range(3)]
        one(daemon, kind="tls", outcome="refused", who="tcp 127.0.0.1", why="a newer client took its place")
        for each in sockets:
            each.close()


def test_certificates_that_are_read_again_and_clients_that_lose_their_right(tmp_path):
    authority = tmp_path / "authority"
    tls_sh(authority)
    tls_sh(authority, "client", "a", "DNS:a.example")
    tls_sh(authority, "revoke")
    with TlsDaemon(tmp_path, authority, {"nbd_tls_client_crl_file": str(authority / "crl.pem")}) as daemon:
        daemon.create("v", "--allow", "any")
        handle = daemon.open("v", "a")
        daemon.ok("volume", "set", "v", "allow=b.example")
        named = {"kind": "disconnect", "volume": "v", "who": "certificate of dns:a.example"}
        one(daemon, **named, outcome="refused", why="it may not open the volume any more")
        daemon.ok("volume", "set", "v", "allow=any")
        handle = daemon.open("v", "a")
        tls_sh(authority, "revoke", "a")
        daemon.ok("node", "reload")
        one(daemon, **named, outcome="refused", why="its certificate is not good any more")
        one(daemon, kind="reload", outcome="done", who=f"uid {os.getuid()}, pid ")
        event = one(daemon, kind="certificates", outcome="done")
        assert event["what"].startswith("a certificate valid until 20")
        assert event["what"].endswith("; 1 clients are not trusted any more")
        (authority / "crl.pem").write_text("nonsense")
        daemon.signal(1)
        one(daemon, kind="reload", outcome="failed", who="signal SIGHUP", why="crl.pem")
        del handle


def test_stalls_name_the_client_and_what_it_owed(tmp_path):
    with Daemon(tmp_path, LIMITS) as daemon:
        for name in ("payload", "deaf"):
            daemon.create(name, size="64M")
        with Client(daemon), Client(daemon) as stalled, Client(daemon) as deaf:
            stalled.open("payload").ask(WRITE, 0, MIB)
            deaf.open("deaf")
            for index in range(32):
                deaf.ask(READ, index * MIB, MIB)
            stall = {"kind": "disconnect", "outcome": "refused", "who": US}
            one(daemon, **stall, why="the node ended it: it did not open an export")
            one(daemon, **stall, volume="payload", why="the node ended it: it did not send a write's data")
            one(daemon, **stall, volume="deaf", why="the node ended it: it took no replies")


def test_clients_that_the_node_sends_away_as_it_stops_are_named(tmp_path):
    with Daemon(tmp_path) as daemon:
        daemon.create("v")
        with Client(daemon) as client:
            client.open("v")
            daemon.stop()
        daemon.start()
        one(daemon, kind="disconnect", outcome="seen", volume="v", who=US, why="the node stops")


def test_what_is_no_request_is_refused_and_named(tmp_path):
    port = free_port()
    with Daemon(tmp_path, {"metrics_listen": f"127.0.0.1:{port}"}) as daemon:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(daemon.data / "control.sock"))
            client.sendall(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
            client.recv(100)
        one(daemon, kind="request", outcome="refused", who=US, why="it sent no HTTP request")
        with socket.create_connection(("127.0.0.1", port), SECONDS) as client:
            client.sendall(b"\x16\x03\x01 nor is this\r\n\r\n")
            client.recv(100)
        one(daemon, kind="request", outcome="refused", who="tcp 127.0.0.1", why="it sent no HTTP request")


def test_flood_of_refused_clients_leaves_what_was_done(tmp_path, authority):
    """2,000 clients that are refused, each in another way: an earlier change of state stays, also over a restart."""
    with TlsDaemon(tmp_path, authority) as daemon:
        daemon.create("v")
        state = one(daemon, kind="state", volume="v")
        with Client(daemon) as served:
            served.open("v")
            for number in range(2000):
                with Client(daemon) as client, contextlib.suppress(AssertionError):
                    client.open(f"nothing{number}")
            served.read(0, 4096)
        one(daemon, kind="events-dropped")
        for _ in range(200):
            with socket.create_connection(("127.0.0.1", daemon.port), SECONDS) as client:
                client.recv(18, socket.MSG_WAITALL)
        assert state in found(daemon, kind="state", volume="v")
        # What happens now is told now.
        daemon.create("w")
        one(daemon, kind="create", volume="w")
        daemon.stop()
        sizes = {path.name: path.stat().st_size for path in daemon.data.glob("events*")}
        assert sum(sizes.values()) <= 4 << 20, sizes
        daemon.start()
        assert state in found(daemon, kind="state", volume="v")
        # Each of them was kept or counted.
        kept = found(daemon, kind="connect", outcome="refused")
        dropped = found(daemon, kind="events-dropped")
        assert len(kept) < 1000
        assert sum(event.get("count", 1) for event in kept + dropped) >= 2000


def test_repeated_connections_of_a_client_become_one_event(tmp_path):
    with Daemon(tmp_path) as daemon:
        daemon.create("v")
        for _ in range(50):
            daemon.nbd("v").shutdown()
        daemon.stop()
        daemon.start()
        connects = found(daemon, kind="connect", volume="v")
        assert sum(event.get("count", 1) for event in connects) == 50
        assert len(connects) < 25
