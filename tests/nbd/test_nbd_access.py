"""Who may open which volume over TCP: certificates with names, lists of who is allowed, revocation, reload, and
strangers by the hundred beside clients that are served."""

import contextlib
import json
import os
import resource
import signal
import socket
import ssl
import struct
import subprocess
import threading
import time

import nbd
import pytest

from daemon import Daemon, refused
from programs import MIB, free_port, run
from tls_daemon import TlsDaemon, tls_sh

SECONDS = 30

# They hold more sockets than a process may by default.
HARD = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (HARD, HARD))
OPTION = 0x49484156454F5054


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """An authority with a server and two clients, `a` and `b`, one whose time is over, and one without a name."""
    directory = tmp_path_factory.mktemp("authority")
    tls_sh(directory)
    tls_sh(directory, "client", "a", "DNS:a.example,URI:spiffe://hdcs/a")
    tls_sh(directory, "client", "b", "email:b@example.org")
    tls_sh(directory, "client", "late", "DNS:a.example", "expired")
    return directory


@pytest.fixture
def daemon(tmp_path, authority):
    with TlsDaemon(tmp_path, authority) as daemon:
        yield daemon


def refuses(daemon, name, own):
    with pytest.raises(nbd.Error):
        daemon.open(name, own)


def test_client_opens_what_its_certificate_may_open(daemon):
    daemon.create("of-a", "--allow", "a.example,dns:other", size="16M")
    daemon.create("of-both", "--allow", "spiffe://hdcs/a,b@example.org", size="16M")
    daemon.create("nobodys", size="16M")
    daemon.create("everyones", "--set", "allow=any", size="16M")
    assert daemon.listed("a") == ["everyones", "of-a", "of-both"]
    assert daemon.listed("b") == ["everyones", "of-both"]
    assert daemon.listed(".") == ["everyones"]
    for own, names in [("a", ["of-a", "of-both"]), ("b", ["of-both"])]:
        for name in names:
            handle = daemon.open(name, own)
            handle.pwrite(own.encode() * 512, 0)
            assert handle.pread(512, 0) == own.encode() * 512
            handle.shutdown()
    for own, name in [("a", "nobodys"), ("b", "of-a"), (".", "of-both"), ("b", "not-there")]:
        done = run("nbdinfo", daemon.tls_uri(name, own), check=False)
        assert done.returncode != 0 and "No such file or directory for export" in done.stderr
    daemon.tells("denied to client dns:a.example (and 1 more names)")
    # Over the unix socket whoever may open that opens everything.
    assert daemon.nbd("nobodys").pread(512, 0) == bytes(512)


def test_qemu_and_nbdcopy_with_a_certificate(daemon, tmp_path):
    daemon.create("v", "--allow", "a.example", size="16M")
    image = tmp_path / "image"
    image.write_bytes(os.urandom(16 * MIB))
    run("nbdcopy", image, daemon.tls_uri("v", "a"))

    def qemu(own):
        image = daemon.qemu("v", own)
        return run("qemu-img", "convert", "-O", "raw", *image, tmp_path / "back", check=False)

    done = qemu("a")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "back").read_bytes() == image.read_bytes()
    done = qemu("b")
    assert done.returncode != 0 and "no open volume of this name that this client may open" in done.stderr


def test_clients_that_nobody_vouches_for_get_nothing(daemon, authority, tmp_path):
    daemon.create("v", "--allow", "any", size="16M")
    stranger = tmp_path / "stranger"
    tls_sh(stranger)
    tls_sh(stranger, "client", "a", "DNS:a.example")
    # They trust our authority; it is ours that does not trust them.
    for own in ["stranger/a", "none"]:
        (tmp_path / own).mkdir(exist_ok=True)
        (tmp_path / own / "ca-cert.pem").write_bytes((authority / "ca-cert.pem").read_bytes())
    for own in [tmp_path / "stranger/a", tmp_path / "none", authority / "late"]:
        assert daemon.listed(own) == []
        refuses(daemon, "v", own)
    # Nor is anything said to a client that starts TLS unasked.
    done = subprocess.run(
        ["openssl", "s_client", "-connect", f"127.0.0.1:{daemon.port}", "-CAfile", authority / "ca-cert.pem"],
        input=b"", capture_output=True, timeout=SECONDS, check=False,
    )
    assert b"no peer certificate available" in done.stdout, "TLS starts only when it is asked for"
    daemon.tells("did not get through its TLS handshake")
    daemon.open("v", "a").shutdown()


def test_allow_is_shown_changed_and_checked(daemon):
    daemon.create("v", size="16M")
    assert daemon.json("volume", "show", "v")["settings"]["allow"] == []
    refuses(daemon, "v", "a")
    daemon.ok("volume", "set", "v", "allow=a.example,b@example.org")
    shown = daemon.json("volume", "show", "v")
    assert shown["settings"]["allow"] == ["dns:a.example", "email:b@example.org"]
    assert "allow" in shown["overridden"] and "dns:a.example" in daemon.ok("volume", "show", "v")
    handles = {own: daemon.open("v", own) for own in ["a", "b"]}
    local = daemon.nbd("v")
    # Who loses the right loses the connection; the others keep theirs.
    daemon.ok("volume", "set", "v", "allow=b@example.org")
    daemon.until(lambda: ended(handles["a"]))
    assert handles["b"].pread(512, 0) == bytes(512) and local.pread(512, 0) == bytes(512)
    refuses(daemon, "v", "a")
    for bad in ["allow=*.example", "allow=a b", "allow=5"]:
        refused(daemon.cli("volume", "set", "v", bad), 2, "`allow` takes a list of names of certificates")
    daemon.stop()
    daemon.start()
    assert daemon.listed("b") == ["v"] and daemon.listed("a") == []
    daemon.ok("volume", "set", "v", "allow=default")
    assert daemon.listed("b") == []


def ended(handle):
    try:
        handle.pread(512, 0)
    except nbd.Error:
        return True
    return False


def test_node_wide_allow_and_a_volume_of_its_own(tmp_path, authority):
    with TlsDaemon(tmp_path, authority, {"allow": ["any"]}) as daemon:
        daemon.create("v", size="16M")
        daemon.create("closed", "--set", "allow=", size="16M")
        assert daemon.listed("b") == ["v"]


def test_volume_that_is_not_open_is_explained_to_those_who_may_open_it(daemon, tmp_path):
    away = tmp_path / "away"
    away.write_bytes(bytes(16 * MIB))
    daemon.ok("volume", "create", "v", "--backend", f"file:{away}", "--allow", "a.example")
    daemon.stop()
    away.rename(tmp_path / "elsewhere")
    daemon.start()
    told = {own: run("qemu-img", "info", *daemon.qemu("v", own), check=False).stderr for own in ["a", "b"]}
    assert "volume v is not open" in told["a"] and str(away) in told["a"]
    assert "not open:" not in told["b"] and str(away) not in told["b"]


def test_plain_loopback_opens_what_names_nobody(tmp_path):
    port = free_port()
    with Daemon(tmp_path, {"nbd_listen": [f"tcp:127.0.0.1:{port}"]}) as daemon:
        daemon.create("v", size="16M")
        daemon.create("of-a", "--allow", "a.example", size="16M")
        listed = run("nbdinfo", "--list", "--json", f"nbd://127.0.0.1:{port}").stdout
        assert [export["export-name"] for export in json.loads(listed)["exports"]] == ["v"]
        done = run("nbdinfo", f"nbd://127.0.0.1:{port}/of-a", check=False)
        assert "No such file or directory for export" in done.stderr


def test_tcp_for_others_asks_for_certificates(tmp_path, authority):
    tls = {"nbd_tls_cert_file": str(authority / "server-cert.pem"),
           "nbd_tls_key_file": str(authority / "server-key.pem")}
    config = {"nbd_listen": ["tcp:0.0.0.0:0"], **tls}
    Daemon(tmp_path, config).refuses(2, "nbd_tls_client_ca_file", "nbd_tls_open = true")
    both = {**config, "nbd_tls_open": True, "nbd_tls_client_ca_file": str(authority / "ca-cert.pem")}
    Daemon(tmp_path, both).refuses(2, "give one of them")
    with_list = {**config, "nbd_tls_open": True, "nbd_tls_client_crl_file": "x"}
    Daemon(tmp_path, with_list).refuses(2, "needs `nbd_tls_client_ca_file`")
    # An operator who says so may serve everybody. The address is loopback here, so that nobody else is.
    port = free_port()
    config = {"nbd_listen": [f"tcp:127.0.0.1:{port}"], **tls, "nbd_tls_open": True}
    with Daemon(tmp_path, config) as daemon:
        daemon.create("v", size="16M")
        (tmp_path / "ca-cert.pem").write_bytes((authority / "ca-cert.pem").read_bytes())
        run("nbdinfo", f"nbds://localhost:{port}/v?tls-certificates={tmp_path}")


def reload_by_signal(daemon):
    before = daemon.log().count("TLS files")
    daemon.signal(signal.SIGHUP)
    daemon.until(lambda: daemon.log().count("TLS files") > before)


def reload_by_command(daemon):
    daemon.ok("node", "reload")


@pytest.mark.parametrize("reload", [reload_by_signal, reload_by_command])
def test_revoked_client_is_ended_by_a_reload_and_others_live_on(tmp_path, reload):
    authority = tmp_path / "authority"
    tls_sh(authority)
    for name in ["a", "b"]:
        tls_sh(authority, "client", name, f"DNS:{name}.example")
    tls_sh(authority, "revoke")
    with TlsDaemon(tmp_path, authority, {"nbd_tls_client_crl_file": str(authority / "crl.pem")}) as daemon:
        daemon.create("v", "--allow", "any", size="16M")
        handles = {own: daemon.open("v", own) for own in ["a", "b"]}
        tls_sh(authority, "revoke", "a")
        daemon.open("v", "a").shutdown()
        reload(daemon)
        daemon.until(lambda: ended(handles["a"]))
        refuses(daemon, "v", "a")
        assert handles["b"].pread(512, 0) == bytes(512)
        daemon.open("v", "b").shutdown()
        # Files that cannot be used change nothing, and whoever asked is told.
        (authority / "crl.pem").write_text("nonsense")
        refused(daemon.cli("node", "reload"), 1, "crl.pem", "those that were read before stay in force")
        daemon.signal(signal.SIGHUP)
        daemon.until(lambda: daemon.log().count("stay in force") >= 1)
        daemon.open("v", "b").shutdown()
        refuses(daemon, "v", "a")
        assert handles["b"].pread(512, 0) == bytes(512)


def test_new_certificate_and_authority_are_used_after_a_reload(daemon, tmp_path, authority):
    daemon.stop()
    ours = tmp_path / "ours"
    tls_sh(ours)
    tls_sh(ours, "client", "a", "DNS:a.example")
    daemon.authority = ours
    for name in ["cert", "key"]:
        daemon.config[f"nbd_tls_{name}_file"] = str(ours / f"server-{name}.pem")
    daemon.config["nbd_tls_client_ca_file"] = str(ours / "ca-cert.pem")
    daemon.start()
    daemon.create("v", "--allow", "any", size="16M")
    old = daemon.open("v", "a")
    other = tmp_path / "other"
    tls_sh(other)
    tls_sh(other, "client", "a", "DNS:a.example")
    for name in ["server-cert.pem", "server-key.pem"]:
        (other / name).replace(ours / name)
    (ours / "both.pem").write_bytes((ours / "ca-cert.pem").read_bytes() + (other / "ca-cert.pem").read_bytes())
    (ours / "both.pem").replace(ours / "ca-cert.pem")
    daemon.ok("node", "reload")
    assert old.pread(512, 0) == bytes(512)
    # The new server's certificate is of the other authority, and so are its clients.
    daemon.open("v", other / "a").shutdown()
    with pytest.raises(nbd.Error):
        daemon.open("v", ours / "a")


def test_reload_without_tls_changes_nothing(tmp_path):
    with Daemon(tmp_path) as daemon:
        daemon.create("v", size="16M")
        daemon.signal(signal.SIGHUP)
        daemon.tells("SIGHUP")
        refused(daemon.cli("node", "reload"), 1, "nbd_tls_cert_file")
        assert daemon.nbd("v").pread(512, 0) == bytes(512)
        daemon.stop()


@contextlib.contextmanager
def strangers(port, count, words=b""):
    """So many connections over TCP that say no more than that."""
    sockets = []
    try:
        for _ in range(count):
            stranger = socket.socket()
            stranger.settimeout(SECONDS)
            stranger.connect(("127.0.0.1", port))
            if words:
                with contextlib.suppress(OSError):
                    stranger.sendall(words)
            sockets.append(stranger)
        yield sockets
    finally:
        for stranger in sockets:
            stranger.close()


START_TLS = struct.pack(">I", 3) + struct.pack(">QII", OPTION, 5, 0)


@pytest.mark.parametrize("words", [b"", START_TLS, START_TLS + b"\x16\x03\x01"])
def test_half_open_connections_shut_out_nobody(tmp_path, authority, words):
    """More of them than there are places: neither the unix socket nor a client with a certificate waits long."""
    limits = {"nbd_connections_max": 300, "nbd_tls_handshakes_max": 50}
    with TlsDaemon(tmp_path, authority, limits) as daemon:
        daemon.create("v", "--allow", "any", size="16M")
        with strangers(daemon.port, 900, words):
            assert daemon.nbd("v").pread(512, 0) == bytes(512)
            daemon.open("v", "a").shutdown()


def test_half_hellos_of_one_address_shut_out_nobody(tmp_path, authority):
    """Strangers that begin a hello wait for their turn; those that wait keep no client of another address out."""
    limits = {"nbd_tls_handshakes_max": 20, "nbd_tls_handshakes_s": 5}
    with TlsDaemon(tmp_path, authority, limits) as daemon:
        daemon.create("v", "--allow", "any", size="16M")
        over, places = threading.Event(), []

        def flood():
            held = []
            while not over.is_set():
                with contextlib.suppress(OSError):
                    one = socket.socket()
                    one.settimeout(1)
                    # Another address than the client's, as far as the node can tell.
                    one.bind(("127.0.0.2", 0))
                    one.connect(("127.0.0.1", daemon.port))
                    one.recv(18, socket.MSG_WAITALL)
                    one.sendall(START_TLS)
                    one.recv(20, socket.MSG_WAITALL)
                    # Only now: bytes that come with STARTTLS end the connection.
                    one.sendall(b"\x16\x03\x01")
                    held.append(one)
                    places.append(None)
                held = held[-50:]

        threads = [threading.Thread(target=flood) for _ in range(32)]
        for thread in threads:
            thread.start()
        try:
            daemon.until(lambda: len(places) > 100)
            for _ in range(3):
                daemon.open("v", "a").shutdown()
        finally:
            over.set()
            for thread in threads:
                thread.join()


def test_strangers_are_ended_in_time(tmp_path, authority):
    with TlsDaemon(tmp_path, authority, {"nbd_handshake_max_ms": 500}) as daemon:
        with strangers(daemon.port, 20, START_TLS) as sockets:
            for stranger in sockets:
                with contextlib.suppress(ConnectionResetError):
                    while stranger.recv(1 << 16):
                        pass


def test_idle_clients_leave_the_unix_socket_served(tmp_path):
    """900 open exports that do nothing and 900 connections that say nothing."""
    port = free_port()
    config = {"nbd_listen": ["unix:nbd.sock", f"tcp:127.0.0.1:{port}"]}
    with Daemon(tmp_path, config) as daemon:
        daemon.create("v", size="16M")
        export = struct.pack(">I", 3) + struct.pack(">QII", OPTION, 1, 1) + b"v"
        with strangers(port, 900, export), strangers(port, 900):
            assert daemon.nbd("v").pread(512, 0) == bytes(512)
            daemon.tells("too many connections")
            daemon.create("w", size="16M")


def test_flood_of_handshakes_beside_a_client(tmp_path, authority):
    """Strangers that make the server compute do not slow a client that is served, nor keep a new one out."""
    with TlsDaemon(tmp_path, authority, {"nbd_tls_handshakes_s": 50}) as daemon:
        daemon.create("v", "--allow", "any", size="16M")
        over = threading.Event()
        counts = []

        def flood():
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            count = 0
            while not over.is_set():
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", daemon.port), SECONDS) as one:
                    assert len(one.recv(18, socket.MSG_WAITALL)) == 18
                    one.sendall(START_TLS)
                    one.recv(20, socket.MSG_WAITALL)
                    with context.wrap_socket(one) as secure:
                        count += 1
                        secure.recv(1)
            counts.append(count)

        threads = [threading.Thread(target=flood) for _ in range(16)]
        served = daemon.open("v", "a")
        begin = time.monotonic()
        for thread in threads:
            thread.start()
        try:
            for _ in range(200):
                served.pwrite(bytes(4096), 0)
            for _ in range(3):
                daemon.open("v", "b").shutdown()
            while time.monotonic() - begin < 3:
                served.pread(4096, 0)
        finally:
            over.set()
            for thread in threads:
                thread.join()
        took = time.monotonic() - begin
        assert sum(counts) <= 50 * took + 16, f"{sum(counts)} handshakes in {took:.1f} s"
