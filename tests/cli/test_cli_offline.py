"""inspect and check: on what a daemon left behind, and beside a daemon that is at work."""

import json
import os
import threading

from daemon import DIRTY, Daemon, hdcs, refused
from programs import MIB


def test_offline_after_a_crash_tells_what_is_dirty(tmp_path):
    with Daemon(tmp_path) as daemon:
        daemon.create("v", *DIRTY)
        daemon.write("v", b"x" * MIB)
        daemon.kill()
        log = daemon.log_of("v")
        found = json.loads(hdcs("inspect", log, "--json").stdout)
        assert found["kind"] == "log"
        assert found["log"]["data_bytes"] == MIB
        assert found["log"]["problem"] is None
        assert "not closed cleanly" in hdcs("inspect", log).stdout
        directory = json.loads(hdcs("inspect", daemon.data, "--json").stdout)
        assert directory["daemon"] is None
        assert directory["volumes"][0]["log"]["data_bytes"] == MIB
        for target in (log, daemon.data / "volumes/v", daemon.data):
            done = hdcs("check", target)
            assert done.returncode == 0, done.stderr
            assert "good" in done.stdout
        # By name, without a daemon.
        assert hdcs("check", "v", "--data", daemon.data).returncode == 0


def test_check_finds_one_flipped_bit(tmp_path):
    with Daemon(tmp_path) as daemon:
        daemon.create("v", *DIRTY)
        for index in range(32):
            daemon.write("v", os.urandom(4096), offset=index * 4096)
        daemon.kill()
        log = daemon.log_of("v")
        good = log.read_bytes()
        for block in (0, 16, 32, 33, 44):
            bad = bytearray(good)
            bad[block * 4096 + 77] ^= 0x10
            log.write_bytes(bad)
            done = hdcs("check", log, "--json")
            assert done.returncode == 1, f"block {block}: {done.stdout}"
            assert json.loads(done.stdout)[0]["problems"]
        log.write_bytes(good)
        assert hdcs("check", log).returncode == 0


def test_check_finds_a_damaged_entry_and_identity(tmp_path):
    with Daemon(tmp_path) as daemon:
        daemon.create("v")
        daemon.stop()
        for path in (daemon.data / "node.json", daemon.data / "volumes/v/volume.json"):
            good = path.read_text()
            path.write_text(good[:-3])
            done = hdcs("check", daemon.data)
            refused(done, 1, "check found 1 problem")
            assert str(path) in done.stdout
            path.write_text(good)


def test_check_of_a_volume_at_work_finds_nothing_wrong(tmp_path):
    with Daemon(tmp_path, {"destage_age_max_ms": 1, "dirty_ratio_min": 0}) as daemon:
        daemon.create("v", "--persist", "on-write")
        stop = threading.Event()

        def work():
            client = daemon.nbd("v")
            while not stop.is_set():
                client.pwrite(os.urandom(64 * 1024), int.from_bytes(os.urandom(1), "big") * 65536 // 2)
            client.shutdown()

        worker = threading.Thread(target=work)
        worker.start()
        try:
            for _ in range(10):
                report = daemon.json("check", "v")[0]
                assert report["problems"] == [], report
        finally:
            stop.set()
            worker.join()
        assert hdcs("check", daemon.data).returncode == 0


def test_what_is_not_ours_is_told(tmp_path):
    other = tmp_path / "other"
    other.write_bytes(os.urandom(1 << 20))
    for command in ("inspect", "check"):
        refused(hdcs(command, other), 1, "nothing of HDCS", str(other))
        refused(hdcs(command, tmp_path / "none/at/all"), 1, "none/at/all")
        refused(hdcs(command, tmp_path), 1, "nothing of HDCS")
