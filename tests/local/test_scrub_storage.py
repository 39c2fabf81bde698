"""A volume in storage mode: its local store under `hdcs check`, `hdcs inspect` and a scrub."""

import json
import os

from daemon import Daemon, hdcs, refused
from programs import MIB

BLOCK = 4096
# Where the copies of the first page of a home's map are.
PAGE = 8 * BLOCK


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))
        file.flush()
        os.fsync(file.fileno())


def test_home_is_checked_inspected_and_scrubbed(tmp_path):
    image = tmp_path / "image"
    with Daemon(tmp_path) as daemon:
        daemon.create("v", "--mode", "storage", "--backend", f"file:{image}", "--log-size", "16M",
                      "--set", "destage_age_max_ms=1", size="48M")
        home = daemon.data / "volumes/v/home"
        data = os.urandom(4 * MIB)
        daemon.write("v", data)
        daemon.until(lambda: daemon.volume("v")["counters"]["home"]["dirty_bytes"] == 4 * MIB)
        for target in ("v", home):
            assert daemon.cli("check", target).returncode == 0
        found = json.loads(hdcs("inspect", home, "--json").stdout)["home"]
        assert found["dirty_bytes"] == 4 * MIB and found["absent_bytes"] == 44 * MIB, found
        assert "4 MiB dirty" in hdcs("inspect", daemon.data).stdout
        assert daemon.cli("volume", "scrub", "v", "--rate", "1G").returncode == 0
        assert daemon.volume("v")["scrub"]["last"]["read_bytes"] >= 4 * MIB
        # One copy is damaged while the volume is open: it is named, nothing is lost.
        flip(home, PAGE + BLOCK + 100)
        for command in (("check", "v"), ("volume", "scrub", "v", "--rate", "1G")):
            done = daemon.cli(*command)
            refused(done, 1, "1 problem")
            assert "copy 1 of page 0" in done.stdout and "anew" in done.stdout
        assert daemon.read("v", 4 * MIB) == data
        daemon.kill()
        refused(hdcs("check", daemon.data), 1, "1 problem")
        # The next opening makes it good.
        daemon.start()
        assert daemon.cli("check", "v").returncode == 0
        assert daemon.cli("volume", "scrub", "v", "--rate", "1G").returncode == 0
        assert daemon.read("v", 4 * MIB) == data
        daemon.stop()
        # Another volume's home, and one that nothing is left of.
        with open(home, "r+b") as file:
            file.seek(PAGE)
            file.write(bytes(2 * BLOCK))
        done = hdcs("check", daemon.data)
        assert done.returncode == 1 and "both copies of page 0" in done.stdout
