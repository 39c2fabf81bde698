"""Clients that mean harm, and one that does not: each a process of its own.

    hostile.py attack NAME SOCKET VOLUME SECONDS   be hostile for so long
    hostile.py watch SOCKET OWN SHARED SECONDS     be well-behaved for so long; say `ready`, and in the end
                                                   as JSON how it went

`tests/nbd/test_hostile_clients.py` and `make hostile` run them side by side. An attack ends on its own; it decides
nothing, and what the daemon does to its connections is all the same to it: it makes new ones. SOCKET is the path of
a unix socket, or HOST:PORT for `tls_flood`.
"""

import json
import os
import random
import resource
import selectors
import socket
import struct
import sys
import time

OPTION = 0x49484156454F5054
REQUEST = 0x25609513
READ, WRITE, DISC, FLUSH, TRIM, CACHE, WRITE_ZEROES, BLOCK_STATUS = range(8)
EXPORT_NAME, GO, STARTTLS, STRUCTURED_REPLY, SET_META_CONTEXT = 1, 7, 5, 8, 10

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
# What is discarded as a whole. The longest command is of nearly 4 GiB.
VOLUME_BYTES = 512 * GIB
LONGEST = 4 * GIB - MIB
CLIENT_SECONDS = 120
# Answers that take longer are listed with their times, so many of them.
SLOW_SECONDS = 0.01
SLOW_MAX = 10_000
# Whoever attacks does not wait for long.
HOSTILE_SECONDS = 3


def request(kind, offset, size, cookie=7, data=b""):
    return struct.pack(">IHHQQI", REQUEST, 0, kind, cookie, offset, size) + data


def option(kind, data=b""):
    return struct.pack(">QII", OPTION, kind, len(data)) + data


def connect(address, seconds=HOSTILE_SECONDS):
    if ":" in address:
        host, port = address.rsplit(":", 1)
        connection = socket.create_connection((host, int(port)), seconds)
    else:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(seconds)
        connection.connect(address)
    return connection


def take(connection, size):
    data = bytearray()
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionError("the connection has ended")
        data += more
    return bytes(data)


def opened(address, volume, structured=False, seconds=HOSTILE_SECONDS):
    """A connection with its export open."""
    connection = connect(address, seconds)
    name = volume.encode()
    take(connection, 18)
    connection.sendall(struct.pack(">I", 3))
    if structured:
        contexts = [b"base:allocation", b"hdcs:cache"]
        queries = b"".join(struct.pack(">I", len(one)) + one for one in contexts)
        text = struct.pack(">I", len(name)) + name + struct.pack(">I", len(contexts)) + queries
        connection.sendall(option(STRUCTURED_REPLY) + option(SET_META_CONTEXT, text))
        replies = 0
        while replies < 2:
            _, _, kind, size = struct.unpack(">QIII", take(connection, 20))
            take(connection, size)
            replies += kind == 1
    connection.sendall(option(EXPORT_NAME, name))
    take(connection, 10)
    return connection


class Swarm:
    """Connections that send something again and again, and take as much of the answers as they please."""

    def __init__(self, address, volume, count, text, structured=False, bytes_per_second=0):
        self.make = lambda: opened(address, volume, structured)
        self.text = text
        self.rate = bytes_per_second
        self.selector = selectors.DefaultSelector()
        self.wanted = count
        self.ended = 0

    def add(self):
        try:
            connection = self.make()
        except (OSError, ConnectionError):
            return False
        connection.setblocking(False)
        events = selectors.EVENT_WRITE | (selectors.EVENT_READ if self.rate else 0)
        # How much of the text is sent; what may be taken next, and when.
        self.selector.register(connection, events, [0, 0.0])
        return True

    def drop(self, connection):
        self.selector.unregister(connection)
        connection.close()
        self.ended += 1

    def run(self, end):
        view = memoryview(self.text)
        looked = 0.0
        while (now := time.monotonic()) < end:
            if len(self.selector.get_map()) < self.wanted and now - looked > 0.05:
                while len(self.selector.get_map()) < self.wanted and self.add():
                    pass
                looked = now
            if not self.selector.get_map():
                time.sleep(0.05)
                continue
            idle = True
            for key, events in self.selector.select(0.05):
                connection, state = key.fileobj, key.data
                try:
                    if events & selectors.EVENT_WRITE:
                        sent = connection.send(view[state[0] : state[0] + 256 * KIB])
                        state[0] = (state[0] + sent) % len(view)
                        idle = False
                    if events & selectors.EVENT_READ and now >= state[1]:
                        size = MIB if self.rate < 0 else 4 * KIB
                        taken = len(connection.recv(size))
                        if not taken:
                            self.drop(connection)
                            continue
                        state[1] = now + (taken / self.rate if self.rate > 0 else 0)
                        idle = False
                except BlockingIOError:
                    pass
                except OSError:
                    self.drop(connection)
            if idle:
                time.sleep(0.01)


def deaf(kind, offset, size, count=40, **options):
    """Many requests, and no answer taken."""
    return lambda address, volume: Swarm(
        address, volume, count, request(kind, offset, size) * 8192, **options
    ).run


def greedy(kind, offset, size, count=16, **options):
    """Many requests, and all answers taken at once."""
    return deaf(kind, offset, size, count, bytes_per_second=-1, **options)


def trims(address, volume):
    """Trims and zeroes, of a block and of gibibytes."""
    chance = random.Random(1)
    text = b""
    for _ in range(4096):
        kind = chance.choice([TRIM, WRITE_ZEROES])
        if chance.random() < 0.1:
            text += request(kind, chance.randrange(4) * GIB, LONGEST)
        else:
            text += request(kind, chance.randrange(8 * GIB // 4096) * 4096, 4096)
    return Swarm(address, volume, 16, text, bytes_per_second=-1).run


def discards(address, volume):
    """All of the volume is discarded and made zero, again and again, over single blocks that are written."""
    chance = random.Random(2)
    text = b""
    for kind in (TRIM, WRITE_ZEROES):
        for offset in range(0, VOLUME_BYTES, 4 * GIB):
            for _ in range(8):
                block = chance.randrange(VOLUME_BYTES // 4096)
                text += request(WRITE, block * 4096, 4096, data=bytes(4096))
            text += request(kind, offset, LONGEST)
    return Swarm(address, volume, 4, text, bytes_per_second=-1).run


def half_writes(address, volume):
    """The heads of large writes and a third of their data."""
    return Swarm(address, volume, 40, request(WRITE, 0, MIB, data=bytes(MIB // 3)), bytes_per_second=-1).run


class Crowd:
    """Very many connections that are there and do nothing, or stop half-way into the handshake."""

    def __init__(self, count, make):
        self.count = count
        self.make = make

    def run(self, end):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4096), hard), hard))
        crowd = []
        while time.monotonic() < end:
            crowd = [one for one in crowd if not self.has_ended(one)]
            try:
                while len(crowd) < self.count and time.monotonic() < end:
                    connection = self.make()
                    connection.setblocking(False)
                    crowd.append(connection)
            except (OSError, ConnectionError):
                pass
            time.sleep(0.2)

    @staticmethod
    def has_ended(connection):
        try:
            if connection.recv(1, socket.MSG_PEEK):
                return False
        except BlockingIOError:
            return False
        except OSError:
            pass
        connection.close()
        return True


def idle(address, volume):
    return Crowd(900, lambda: opened(address, volume)).run


def half_open(address, volume):
    def make():
        connection = connect(address)
        connection.sendall(struct.pack(">I", 3) + option(GO)[:-1])
        return connection

    return Crowd(900, make).run


def tls_flood(address, volume):
    """STARTTLS, then a hello that is garbage, or half of one."""

    def make():
        connection = connect(address)
        take(connection, 18)
        connection.sendall(struct.pack(">I", 3) + option(STARTTLS))
        take(connection, 20)
        hello = bytes([22, 3, 1, 2, 0]) + os.urandom(512 if random.random() < 0.5 else 100)
        connection.sendall(hello)
        return connection

    return Crowd(200, make).run


# What is read lies in DRAM: block 256 of the volume. Each is called with an address and a volume.
ATTACKS = {
    "nothing": lambda address, volume: lambda end: None,
    "pipelined_reads": deaf(READ, MIB, 4096),
    "pipelined_sectors": deaf(READ, MIB, 512, structured=True),
    "read_flood": greedy(READ, MIB, 4096, count=40),
    "large_read_flood": greedy(READ, 0, 32 * MIB, structured=True),
    "slow_readers": deaf(READ, 0, 32 * MIB, bytes_per_second=20 * KIB),
    "slow_readers_structured": deaf(READ, 0, 32 * MIB, bytes_per_second=20 * KIB, structured=True),
    "cache_flood": greedy(CACHE, 0, LONGEST),
    "block_status_flood": greedy(BLOCK_STATUS, 0, LONGEST, structured=True),
    "block_status_deaf": deaf(BLOCK_STATUS, 0, LONGEST, structured=True),
    "flush_flood": greedy(FLUSH, 0, 0),
    "trim_flood": trims,
    "discard_flood": discards,
    "half_writes": half_writes,
    "idle": idle,
    "half_open": half_open,
    "tls_flood": tls_flood,
}


def watch(address, own, shared, seconds):
    """Read and write on a volume of one's own, and read on the one that is attacked."""
    def again(name):
        return opened(address, name, seconds=CLIENT_SECONDS)

    connections = {name: again(name) for name in (own, shared)}
    print("ready", flush=True)
    slowest, slow, errors, answers = {}, [], [], 0
    random_bytes = os.urandom(4096)
    end = time.monotonic() + seconds
    step = 0
    while time.monotonic() < end:
        step += 1
        offset = (step % 256) * 4096
        for what, volume, text, answer in [
            ("write", own, request(WRITE, offset, 4096, step, random_bytes), b""),
            ("read", own, request(READ, offset, 4096, step), random_bytes),
            ("read of the same volume", shared, request(READ, MIB, 4096, step), None),
        ]:
            begin = time.monotonic()
            connection = connections[volume]
            try:
                connection.sendall(text)
                _, error, cookie = struct.unpack(">IIQ", take(connection, 16))
                data = take(connection, 0 if what == "write" or error else 4096)
                if error or cookie != step or answer not in (None, data):
                    errors.append(f"{what}: error {error}")
            except OSError as error:
                errors.append(f"{what}: {error!r}")
                try:
                    connections[volume] = again(volume)
                except (OSError, ConnectionError) as refused:
                    errors.append(f"{what}: {refused!r}")
            took = time.monotonic() - begin
            slowest[what] = max(slowest.get(what, 0), round(took * 1000, 1))
            if took > SLOW_SECONDS and len(slow) < SLOW_MAX:
                slow.append([begin, begin + took])
            answers += 1
        time.sleep(0.002)
        if len(errors) > 10:
            break
    print(json.dumps({"answers": answers, "slowest_ms": slowest, "slow": slow, "errors": errors}))


def main(mode, *arguments):
    if mode == "watch":
        address, own, shared, seconds = arguments
        watch(address, own, shared, float(seconds))
    else:
        name, address, volume, seconds = arguments
        # The machine is not its own: what it costs in processor time is not what is tried here.
        os.nice(5)
        ATTACKS[name](address, volume)(time.monotonic() + float(seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
