"""`hdcs volume attach`: a block device where the kernel has a driver for it, else what to use in its place."""

import re
import subprocess

from daemon import Daemon
from programs import MIB


def run(*command):
    return subprocess.run([str(word) for word in command], capture_output=True, timeout=60, check=False)


def test_attach_gives_a_block_device_or_says_what_to_use(tmp_path):
    with Daemon(tmp_path) as daemon:
        daemon.create("v", size="8M")
        attached = daemon.cli("volume", "attach", "v")
        if attached.returncode == 0:
            device = re.search(r"/dev/nbd\d+", attached.stdout).group()
            try:
                content = bytes(range(256)) * 4096
                with open(device, "r+b", buffering=0) as file:
                    file.write(content)
                with open(device, "rb") as file:
                    assert file.read(MIB) == content
                assert daemon.cli("volume", "attach", "v", "--device", device).returncode == 1
            finally:
                run("nbd-client", "-d", device)
            return
        assert attached.returncode == 1
        assert "NBD driver" in attached.stderr or "nbd-client" in attached.stderr, attached.stderr
        # What it says instead is true.
        uri = re.search(r"'(nbd\+unix:///[^']*)'", attached.stderr).group(1)
        assert run("nbdinfo", "--size", uri).stdout.strip() == str(8 * MIB).encode()


def test_attach_refuses_what_is_no_volume_or_no_device(tmp_path):
    with Daemon(tmp_path) as daemon:
        assert daemon.cli("volume", "attach", "nothing").returncode == 1
        daemon.create("v", size="8M")
        refused = daemon.cli("volume", "attach", "v", "--device", "/dev/sda")
        assert refused.returncode in (1, 2) and "NBD" in refused.stderr
