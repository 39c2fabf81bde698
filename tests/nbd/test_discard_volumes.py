"""discard=ignore: trims are acknowledged and change nothing, and are not offered to clients that connect."""

import os

from daemon import Daemon, refused
from programs import MIB


def allocated(path):
    return os.stat(path).st_blocks * 512


def test_discard_is_ignored_passed_again_and_changed_while_a_client_is_connected(tmp_path):
    image = tmp_path / "image"
    data = os.urandom(4 * MIB)
    with Daemon(tmp_path) as daemon:
        daemon.create("v", "--backend", f"file:{image}")
        daemon.write("v", data)
        daemon.ok("volume", "flush", "v")
        client = daemon.nbd("v")
        assert client.can_trim()
        daemon.ok("volume", "set", "v", "discard=ignore")
        # One that was connected before may still ask, and is answered.
        client.trim(MIB, 0)
        client.flush()
        assert bytes(client.pread(MIB, 0)) == data[:MIB]
        # Zeroes are still zeroes.
        client.zero(MIB, MIB)
        client.shutdown()
        late = daemon.nbd("v")
        assert not late.can_trim() and late.can_zero()
        late.shutdown()
        daemon.ok("volume", "flush", "v")
        expected = data[:MIB] + bytes(MIB) + data[2 * MIB :]
        assert daemon.read("v", 4 * MIB) == expected
        assert image.read_bytes()[: 4 * MIB] == expected and allocated(image) >= 3 * MIB
        daemon.stop()
        daemon.start()
        assert daemon.volume("v")["settings"]["discard"] == "ignore"
        daemon.ok("volume", "set", "v", "discard=default")
        client = daemon.nbd("v")
        assert client.can_trim()
        client.trim(4 * MIB, 0)
        client.shutdown()
        daemon.ok("volume", "flush", "v")
        assert daemon.read("v", 4 * MIB) == bytes(4 * MIB)
        assert allocated(image) < MIB
        refused(daemon.cli("volume", "set", "v", "discard=maybe"), 2, "discard", "ignore")
