"""The control API does what docs/openapi.json says: schemathesis asks it for everything that its schemas allow and
forbid, in seeded order, and finds no answer that is not in it."""

import contextlib
import socket
import subprocess
import threading

import pytest

from daemon import Daemon
from programs import ROOT

SCHEMATHESIS = ROOT / "target/testenv/schemathesis/bin/schemathesis"
SECONDS = 240

# A request that has the right form and asks for what cannot be gets 422.
CONFIG = """
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "404", "409", "422", "503", "504", "507"]
"""


@contextlib.contextmanager
def over_tcp(path):
    """A port on loopback that leads to a unix socket, for clients that know only TCP."""
    listener = socket.create_server(("127.0.0.1", 0))

    def copy(source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def serve(client):
        with client, socket.socket(socket.AF_UNIX) as server:
            server.connect(str(path))
            back = threading.Thread(target=copy, args=(server, client), daemon=True)
            back.start()
            copy(client, server)
            back.join()

    def accept():
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=serve, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


@pytest.mark.parametrize("seed", [1])
def test_api_does_what_its_description_says(tmp_path, seed):
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    with Daemon(tmp_path) as daemon, over_tcp(daemon.data / "control.sock") as port:
        # Something for what needs a volume; schemathesis finds it by this name, which is its smallest.
        daemon.create("0")
        done = subprocess.run(
            [SCHEMATHESIS, "run", ROOT / "docs/openapi.json", "--url", f"http://127.0.0.1:{port}",
             "--seed", str(seed), "--max-examples", "25", "--no-color", "--workers", "1"],
            cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS,
        )
        assert done.returncode == 0, done.stdout[-20000:] + done.stderr
        assert daemon.process.poll() is None, daemon.log()
