"""What a client that reconnects sees of a restart: a pause, and all of its data."""

import random

import nbd
import pytest

from programs import MIB


def connected(uri):
    """A new connection."""
    handle = nbd.NBD()
    handle.connect_uri(uri)
    return handle


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_data_is_there_after_a_restart(server, volume, end):
    rng = random.Random(end)
    model = {}
    for _ in range(3):
        handle = connected(volume)
        for offset, data in model.items():
            assert handle.pread(len(data), offset) == data
        for _ in range(200):
            offset, data = rng.randrange(16000) * 4096, rng.randbytes(4096)
            handle.pwrite(data, offset)
            model[offset] = data
        handle.flush()
        if end == "stop":
            server.stop()
        else:
            server.kill()
        server.start()


def test_volumes_are_listed_after_a_restart(server):
    name = server.new_volume(1 * MIB)
    server.stop()
    server.start()
    assert connected(server.uri(name)).get_size() == 1 * MIB
