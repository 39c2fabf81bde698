"""A port that speaks something else, where a store is expected: what asks there gets an error, and the daemon lives."""

import os
import socket
import threading

import pytest

from daemon import Daemon

BLOCK = 4096
ENDLESS = 64 << 20
# What is said to whoever connects.
NONSENSE = {
    "nothing": b"",
    "zeroes": bytes(1 << 16),
    "the largest lengths": b"\xff" * (1 << 16),
    "a length of a gigabyte": (1 << 30).to_bytes(4, "big") + bytes(1 << 16),
    "every byte": bytes(range(256)) * 64,
    "noise": os.urandom(1 << 16),
    "HTTP": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 3\r\n\r\nno\n" * 100,
    "text without an end": b"x" * ENDLESS,
}


class Nonsense:
    """Says the same to everybody, whatever they ask."""

    def __init__(self, words):
        self.words = words
        self.asked = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]

    def __enter__(self):
        threading.Thread(target=self.serve, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.listener.close()

    def serve(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            self.asked += 1
            threading.Thread(target=self.say, args=[client], daemon=True).start()

    def say(self, client):
        with client:
            client.settimeout(10)
            try:
                client.sendall(self.words)
                client.shutdown(socket.SHUT_WR)
                while client.recv(1 << 16):
                    pass
            except OSError:
                pass


@pytest.mark.parametrize("kind", ["hdfs", "s3"])
def test_store_that_speaks_nonsense_is_an_error(tmp_path, kind):
    credentials = tmp_path / "credentials"
    credentials.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    with Daemon(tmp_path) as daemon:
        daemon.create("local", size="4M")
        for number, (what, words) in enumerate(NONSENSE.items()):
            with Nonsense(words) as server:
                url = {
                    "hdfs": f"hdfs://127.0.0.1:{server.port}/v?user=hdcs&timeout_s=2&retry_s=1",
                    "s3": f"s3://bucket/v?endpoint=http://127.0.0.1:{server.port}&credentials={credentials}"
                          "&timeout_s=2&retry_s=1",
                }[kind]
                done = daemon.cli("volume", "create", f"far{number}", "--size", "4M", "--backend", url)
                assert daemon.process.poll() is None, f"{what}: it has ended\n{daemon.log()[-3000:]}"
                assert done.returncode in (1, 2) and "error: " in done.stderr, f"{what}: {done.stdout}{done.stderr}"
                assert server.asked > 0, what
            word = os.urandom(BLOCK)
            daemon.write("local", word)
            assert daemon.read("local", BLOCK) == word, what
        daemon.stop()
