"""The daemon's life: start, stop, the lock, the data directory, sockets and ports."""

import os
import shutil
import signal
import socket
import stat
import subprocess
import time

import nbd
import pytest

from daemon import DIRTY, Daemon, hdcs, refused
from programs import HDCS, MIB


def test_ready_line_names_every_socket_and_sockets_are_private(tmp_path):
    with Daemon(tmp_path, {"nbd_listen": ["unix:nbd.sock", "tcp:127.0.0.1:0"],
                           "metrics_listen": "127.0.0.1:0"}) as daemon:
        daemon.kill()
        line = daemon.start()
        data = daemon.data
        assert line.startswith(f"hdcs: ready, data {data}, nbd unix {data}/nbd.sock, nbd tcp 127.0.0.1:")
        assert f"control {data}/control.sock" in line
        assert "metrics tcp 127.0.0.1:" in line
        for name in ("nbd.sock", "control.sock"):
            assert stat.S_IMODE((data / name).stat().st_mode) == 0o600
        assert stat.S_IMODE(data.stat().st_mode) == 0o700
        daemon.stop()
        assert not (data / "nbd.sock").exists()
        assert not (data / "control.sock").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_graceful_stop_keeps_dirty_data_in_the_log(tmp_path, number):
    with Daemon(tmp_path) as daemon:
        daemon.create("v", *DIRTY)
        daemon.write("v", b"x" * MIB)
        daemon.signal(number)
        assert daemon.wait() == 0, daemon.log()
        assert "BAD" not in hdcs("check", daemon.data).stdout
        assert "closed cleanly at" in hdcs("inspect", daemon.log_of("v")).stdout
        daemon.start()
        assert daemon.volume("v")["counters"]["dirty_bytes"] == MIB
        assert daemon.read("v", MIB) == b"x" * MIB


def test_graceful_stop_destages_if_policy_says_so(tmp_path):
    with Daemon(tmp_path, {"destage_on_stop": True}) as daemon:
        daemon.create("v", *DIRTY)
        daemon.write("v", b"x" * MIB)
        daemon.stop()
        assert (daemon.data / "volumes/v/data").read_bytes()[:MIB] == b"x" * MIB


def test_second_signal_settles_for_the_log(tmp_path):
    with Daemon(tmp_path, {"destage_on_stop": True}) as daemon:
        daemon.create("v", *DIRTY, "--backend", f"file:{tmp_path}/b?delay_us=1000000&rate_mib=1")
        daemon.write("v", os.urandom(8 * MIB))
        daemon.signal(signal.SIGTERM)
        daemon.tells("writing what is dirty")
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0, daemon.log()
        daemon.tells("told again")
        daemon.start()
        assert daemon.volume("v")["counters"]["dirty_bytes"] > 0


def test_stop_that_fails_says_why_in_its_last_line(tmp_path):
    """A backend that hangs for ever keeps its volume from closing; the node does not wait for ever."""
    failing = tmp_path / "fails"
    with Daemon(tmp_path) as daemon:
        daemon.create("v", *DIRTY, "--backend", f"file:{tmp_path}/b?error_file={failing}&error_kind=hang")
        daemon.write("v", b"x" * MIB)
        failing.touch()
        client = daemon.nbd("v")
        client.aio_pread(nbd.Buffer(4096), 8 * MIB)
        daemon.until(lambda: daemon.volume("v")["counters"]["requests_in_flight"] == 1)
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 1
        last = daemon.log().strip().splitlines()[-1]
        assert last.startswith("error: the node has stopped, but not cleanly: "), last
        assert "did not close in time: v; their backend hangs" in last
        failing.unlink()
        daemon.start()
        assert daemon.read("v", MIB) == b"x" * MIB


def test_kill_loses_nothing_and_leaves_no_obstacle(tmp_path):
    with Daemon(tmp_path) as daemon:
        daemon.create("v", *DIRTY)
        daemon.write("v", b"y" * MIB, offset=MIB)
        daemon.kill()
        assert (daemon.data / "nbd.sock").exists()
        daemon.start()
        assert daemon.read("v", MIB, offset=MIB) == b"y" * MIB


def test_second_daemon_is_refused_with_the_process_of_the_first(tmp_path):
    with Daemon(tmp_path) as daemon:
        other = tmp_path / "other"
        other.mkdir()
        second = Daemon(other, data=daemon.data)
        second.refuses(1, "another daemon", f"(process {daemon.process.pid})", str(daemon.data))
        assert daemon.ok("volume", "list")


def test_foreign_directory_is_refused_and_left_alone(tmp_path):
    data = tmp_path / "d"
    data.mkdir()
    (data / "thesis.tex").write_text("x")
    Daemon(tmp_path).refuses(1, "not an HDCS data directory", "thesis.tex", "--data")
    assert [path.name for path in data.iterdir()] == ["thesis.tex"]


def test_data_directory_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "d").write_text("")
    Daemon(tmp_path).refuses(1, "cannot use the data directory", str(tmp_path / "d"))


def test_newer_data_directory_is_refused_and_left_alone(tmp_path):
    with Daemon(tmp_path) as daemon:
        daemon.stop()
        path = daemon.data / "node.json"
        text = path.read_text().replace('"version": 1', '"version": 2')
        path.write_text(text)
        daemon.refuses(1, "made by a newer program (format 2, this program knows 1): use that program", str(path))
        assert path.read_text() == text


def test_damaged_identity_is_refused_and_the_advice_works(tmp_path):
    with Daemon(tmp_path) as daemon:
        daemon.create("v", *DIRTY)
        daemon.write("v", b"z" * MIB)
        daemon.stop()
        path = daemon.data / "node.json"
        path.write_text(path.read_text().replace('"next_volume_number": 2', '"next_volume_number": 1'))
        daemon.refuses(1, "identity", "node.json", "checksum", "move it away")
        path.rename(daemon.data / "node.json.damaged")
        daemon.start()
        assert daemon.read("v", MIB) == b"z" * MIB
        # Its number is in use; a new volume gets another one.
        assert daemon.create("w")["number"] == 2


def test_busy_port_is_refused(tmp_path):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        for key, value in (("nbd_listen", [f"tcp:127.0.0.1:{port}"]),
                           ("metrics_listen", f"127.0.0.1:{port}")):
            daemon = Daemon(tmp_path, {key: value})
            daemon.refuses(1, f"tcp:127.0.0.1:{port}", "in use", key)


def test_busy_socket_is_refused_and_a_dead_one_is_replaced(tmp_path):
    path = tmp_path / "elsewhere.sock"
    busy = socket.socket(socket.AF_UNIX)
    busy.bind(str(path))
    busy.listen()
    daemon = Daemon(tmp_path, {"nbd_listen": [f"unix:{path}"]})
    daemon.refuses(1, str(path), "another program listens there")
    busy.close()
    with daemon:
        daemon.stop()


def test_file_in_the_place_of_a_socket_is_left_alone(tmp_path):
    path = tmp_path / "precious"
    path.write_text("x")
    Daemon(tmp_path, {"nbd_listen": [f"unix:{path}"]}).refuses(1, "not a socket", "move it away")
    assert path.read_text() == "x"


def test_socket_path_that_is_too_long_is_refused(tmp_path):
    daemon = Daemon(tmp_path, data=tmp_path / ("x" * 100))
    daemon.refuses(1, "a unix socket's at most 107", "shorter path")


def test_file_in_the_place_of_the_cache_is_left_alone(tmp_path):
    path = tmp_path / "precious"
    path.write_bytes(b"precious" * 1024)
    Daemon(tmp_path, {"cache_path": str(path)}).refuses(1, str(path), "not an HDCS cache", "cache_path")
    assert path.read_bytes() == b"precious" * 1024


def test_memory_stays_below_its_cap(tmp_path):
    with Daemon(tmp_path) as daemon:
        daemon.create("v", size="256M")
        daemon.write("v", os.urandom(64 * MIB))
        daemon.read("v", 16 * MIB)
        memory = daemon.json("status")["memory"]
        assert 0 < memory["rss_bytes"] <= memory["max_bytes"] == daemon.config["memory_max_mib"] * MIB


def test_interrupted_creation_and_deletion_are_cleaned_up_and_named(tmp_path):
    with Daemon(tmp_path) as daemon:
        daemon.create("v")
        daemon.kill()
        volumes = daemon.data / "volumes"
        shutil.copytree(volumes / "v", volumes / ".new-w")
        shutil.copytree(volumes / "v", volumes / ".gone-x-1")
        daemon.start()
        assert [path.name for path in volumes.iterdir()] == ["v"]
        daemon.tells(f"{volumes}/.new-w")
        daemon.tells(f"{volumes}/.gone-x-1")
        assert [volume["name"] for volume in daemon.json("volume", "list")] == ["v"]


def test_kill_in_the_middle_of_creation_leaves_all_or_nothing(tmp_path):
    with Daemon(tmp_path, {"log_size_mib": 64}) as daemon:
        for attempt in range(6):
            name = f"v{attempt}"
            command = [str(HDCS), "volume", "create", name, "--size", "16M", "--data", str(daemon.data)]
            client = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            time.sleep(0.01 * (attempt + 1))
            daemon.kill()
            client.wait(60)
            daemon.start()
            names = [path.name for path in (daemon.data / "volumes").iterdir()]
            assert not [found for found in names if found.startswith(".")]
            volumes = {volume["name"]: volume for volume in daemon.json("volume", "list")}
            assert set(volumes) == set(names)
            assert all(volume["state"] == "healthy" for volume in volumes.values())
            if name in volumes:
                daemon.ok("volume", "delete", name)


def test_unknown_volume_is_told(tmp_path):
    with Daemon(tmp_path) as daemon:
        for command in (["show"], ["flush"], ["evict"], ["promote"], ["delete"],
                        ["resize", "--size", "1G"]):
            refused(daemon.cli("volume", command[0], "none", *command[1:]), 1, "no volume none",
                    "hdcs volume list")
