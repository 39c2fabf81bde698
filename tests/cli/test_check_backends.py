"""hdcs check of backends: what it reads, that it ends, and that it disturbs nobody."""

import json
import os
import signal
import subprocess
import time

from daemon import COMMAND_SECONDS, DIRTY, Daemon, hdcs, refused
from programs import HDCS, MIB


def reports(done):
    return {report["path"]: report for report in json.loads(done.stdout)}


def test_check_reads_the_image_of_a_volume_in_use_and_offline(tmp_path):
    with Daemon(tmp_path) as daemon:
        backend = daemon.create("v")["backend"]
        daemon.write("v", os.urandom(3 * MIB), MIB)
        daemon.ok("volume", "flush", "v")
        client = daemon.nbd("v")
        found = reports(daemon.cli("check", "v", "--json"))
        assert len(found) == 3 and found[backend]["bytes"] >= 3 * MIB
        assert found[backend]["problems"] == [] and "no checksums" in found[backend]["note"]
        # Log and cache alone, when that is asked for.
        found = reports(daemon.cli("check", "v", "--json", "--no-backend"))
        assert set(found) == {f"{daemon.data}/volumes/v/log", f"{daemon.data}/cache"}
        # Nobody was disturbed.
        client.pwrite(b"n" * 4096, 0)
        client.flush()
        client.shutdown()
        daemon.stop()
        within = f"./{daemon.data.name}"
        for target in (daemon.data, daemon.data / "volumes/v", backend, within, f"{within}/volumes/v"):
            found = reports(hdcs("check", target, "--json", cwd=tmp_path))
            assert found[backend]["bytes"] >= 3 * MIB and found[backend]["problems"] == []
            done = hdcs("check", target, cwd=tmp_path)
            assert done.returncode == 0 and "good" in done.stdout and "MiB read" in done.stdout


def test_check_tells_a_backend_that_is_gone_or_cannot_be_read(tmp_path):
    with Daemon(tmp_path) as daemon:
        image = tmp_path / "disk.img"
        daemon.create("v", "--backend", f"file:{image}", *DIRTY)
        daemon.stop()
        image.rename(tmp_path / "away")
        refused(hdcs("check", daemon.data), 1, "1 problem")
        assert "does not exist" in hdcs("check", daemon.data).stdout
        refused(hdcs("check", f"file:{image}"), 1, "1 problem")
        assert hdcs("check", daemon.data, "--no-backend").returncode == 0
    refused(hdcs("check", "s3://bucket/prefix?nonsense=1"), 2, "nonsense")
    refused(hdcs("check", "file:/x", "--rate", "0"), 2, "at least 1")


def test_check_that_finds_unreadable_sectors_names_them(tmp_path):
    """The system refuses to read a part of the image, as a disk with a bad sector does."""
    image = tmp_path / "disk.img"
    image.write_bytes(os.urandom(4 * MIB))
    # Every read at once, and then the second of the single sectors.
    inject = "--inject=pread64:error=EIO:when=2+2"
    command = ["strace", "-f", "-q", "-o", "/dev/null", "-P", image, "-e", "trace=pread64", inject, HDCS, "check",
               f"file:{image}"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=COMMAND_SECONDS)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "cannot be read" in done.stdout and "Input/output error" in done.stdout
    assert str(image) in done.stdout and "restore" in done.stdout


def test_check_with_a_rate_tells_progress_and_can_be_interrupted(tmp_path):
    image = tmp_path / "disk.img"
    image.write_bytes(os.urandom(64 * MIB))
    command = [str(HDCS), "check", f"file:{image}", "--rate", "2M"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    said = b""
    end = time.monotonic() + COMMAND_SECONDS
    while b" of 64 MiB checked, " not in said:
        assert time.monotonic() < end and process.poll() is None, said
        said += process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=COMMAND_SECONDS)
    assert process.returncode == 1 and b"interrupted" in err and b"no problem in that" in err, err


def test_check_of_what_is_not_there_asks_for_no_backup(tmp_path):
    refused(hdcs("check", f"file:{tmp_path}/none"), 1, "put right what is said above, and check it again")
    refused(hdcs("check", "nope:/x"), 2, "the scheme is not known", "file:PATH")


def test_check_says_what_to_do_about_each_problem(tmp_path):
    with Daemon(tmp_path) as daemon:
        daemon.create("v", *DIRTY)
        daemon.create("w", "--mode", "storage")
        for name in "vw":
            daemon.write(name, os.urandom(MIB))
        daemon.stop()
        log, store = daemon.log_of("v"), daemon.data / "volumes/w/home"
        for path in (log, store):
            with open(path, "r+b") as file:
                file.seek(24)
                file.write(b"\xff" * 8)
            done = hdcs("check", path)
            refused(done, 1, "do what is said with each problem")
            assert "superblock 0" in done.stdout and "the other one is used" in done.stdout
        # Both superblocks, and what is between them.
        with open(log, "r+b") as file:
            file.write(b"\xff" * 17 * 4096)
        for target in ("v", daemon.data / "volumes/v"):
            done = hdcs("check", target, "--data", daemon.data)
            refused(done, 1, "found 1 problem")
            assert f"{log}: " in done.stdout and "volume open NAME --discard-dirty" in done.stdout, done.stdout
