"""An NBD client without a library, which does as little, and as wrongly, as a test wants."""

import socket
import struct

OPTION = 0x49484156454F5054
REQUEST = 0x25609513
READ, WRITE, DISC = 0, 1, 2
SECONDS = 60


class Client:
    """A client that does as little as it is told to."""

    def __init__(self, daemon):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(SECONDS)
        self.socket.connect(str(daemon.data / "nbd.sock"))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def take(self, size):
        data = b""
        while len(data) < size:
            more = self.socket.recv(size - len(data))
            assert more, "the connection has ended"
            data += more
        return data

    def open(self, name):
        """The shortest handshake."""
        self.take(18)
        self.socket.sendall(struct.pack(">I", 3))
        self.socket.sendall(struct.pack(">QII", OPTION, 1, len(name)) + name.encode())
        self.take(10)
        return self

    def ask(self, kind, offset, size, data=b""):
        self.socket.sendall(struct.pack(">IHHQQI", REQUEST, 0, kind, 7, offset, size) + data)

    def read(self, offset, size):
        self.ask(READ, offset, size)
        assert struct.unpack(">IIQ", self.take(16))[1:] == (0, 7)
        return self.take(size)

    def is_ended(self):
        """Wait for the end."""
        try:
            while self.socket.recv(1 << 20):
                pass
        except ConnectionResetError:
            pass
