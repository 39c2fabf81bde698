"""Nodes of a fixed cluster on this machine, and what a client has been told by them."""

import random
import socket
import uuid
from contextlib import ExitStack, contextmanager

import nbd

from daemon import DIRTY, Daemon, homes

BLOCK = 4096
BLOCKS = 4096
SIZE = f"{BLOCK * BLOCKS >> 20}M"


def free_ports(count):
    """Ports of loopback that nothing listens on at present, and that no connection is given as its own."""
    ports = []
    while len(ports) < count:
        port = random.randrange(20000, 32000)
        with socket.socket() as one:
            if port not in ports and one.connect_ex(("127.0.0.1", port)) != 0:
                ports.append(port)
    return ports


def config_of(number, ports, records, more):
    names = "abc"[: len(ports)]
    config = {
        "cluster.id": str(uuid.UUID(int=9)),
        "cluster.node": names[number],
        "cluster.listen": f"127.0.0.1:{ports[number]}",
        "cluster.records": str(records),
    }
    for index, name in enumerate(names):
        config[f"cluster.nodes.{name}.number"] = index + 1
        config[f"cluster.nodes.{name}.id"] = str(uuid.UUID(int=index + 1))
        config[f"cluster.nodes.{name}.address"] = f"127.0.0.1:{ports[index]}"
    return {**config, **more}


@contextmanager
def nodes(tmp_path, count=2, **more):
    """So many nodes, all started."""
    records = tmp_path / "records"
    records.mkdir()
    ports = free_ports(count)
    with ExitStack() as stack:
        yield [
            stack.enter_context(Daemon(home, config_of(number, ports, records, more)))
            for number, home in enumerate(homes(tmp_path, count))
        ]


def create(daemons, tmp_path, *more, name="v", ack="all", dirty=DIRTY, backend=None):
    """A volume with a copy on each node, all of which are members when this returns."""
    names = ",".join("abc"[: len(daemons)])
    backend = backend or f"file:{tmp_path}/{name}.img"
    daemons[0].create(
        name, "--backend", backend, "--replicas", len(daemons), "--ack", ack, "--nodes", names,
        *dirty, *more, size=SIZE,
    )
    is_whole(daemons[0], len(daemons), name)


def alone(daemon, tmp_path, *more, name="v"):
    """A volume of a node alone, over what all nodes reach."""
    daemon.create(name, "--backend", f"file:{tmp_path}/{name}.img", *DIRTY, *more, size=SIZE)


def is_served(daemon, name="v"):
    """Wait until a node serves a volume that it has."""
    daemon.until(lambda: daemon.cli("volume", "show", name).returncode == 0
                 and daemon.volume(name)["phase"] == "open")


def goes_on_at(dead, heir, history, name="v"):
    """A node is killed, another one takes over, and has all that was acknowledged."""
    dead.kill()
    heir.ok("volume", "takeover", name)
    history.check(heir, name)


def comes_back(daemon, primary, count=2, name="v"):
    """A node is started, and is a member again when this returns."""
    daemon.start()
    is_whole(primary, count, name)


def groups_left(tmp_path):
    """Directories of groups among the records."""
    found = (tmp_path / "records").iterdir()
    return [one for one in found if one.is_dir() and one.name != "tmp"]


def record(daemon, name="v"):
    return daemon.json("group", "show", name)["record"]


def is_whole(daemon, count, name="v"):
    """Wait until so many nodes are members and none is to join."""
    def reached():
        found = record(daemon, name)
        return len(found["members"]) == count and not found["joiners"]
    daemon.until(reached)


class History:
    """A client that knows what was acknowledged to it."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.told = {}
        self.writes = 0

    def block(self, number):
        return (f"write {number} ".encode() * 512)[:BLOCK]

    def write(self, daemon, count, name="v"):
        """So many writes, a flush after some; whatever is acknowledged is remembered. Those whose end is not known may or
        may not be there."""
        client = daemon.nbd(name)
        for _ in range(count):
            at = self.random.randrange(BLOCKS)
            self.writes += 1
            before = self.told.get(at, ({0}, None))
            # Until it is acknowledged either may be there.
            self.told[at] = ({*before[0], self.writes}, before[1])
            client.pwrite(self.block(self.writes), at * BLOCK)
            self.told[at] = ({self.writes}, self.writes)
            if self.random.random() < 0.1:
                client.flush()
        client.shutdown()

    def write_until_it_breaks(self, daemon, name="v"):
        """Write until the connection ends; what had been acknowledged."""
        try:
            while True:
                self.write(daemon, 100, name)
        except nbd.Error:
            return

    def check(self, daemon, name="v"):
        """What is read is what was acknowledged, or one of those whose end is not known."""
        data = daemon.read_all(name, BLOCK * BLOCKS)
        for at, (allowed, _) in self.told.items():
            found = data[at * BLOCK : (at + 1) * BLOCK]
            expected = [self.block(number) if number else bytes(BLOCK) for number in allowed]
            assert found in expected, f"block {at}: {found[:20]!r}, not one of {allowed}"
