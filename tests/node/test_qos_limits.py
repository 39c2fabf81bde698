"""Quality of service of volumes, as clients and operators see it. What is counted decides: a limit holds
on any machine. What a reservation brings is shown where the clock is made up (crates/core/tests/qos.rs)."""

import json
import subprocess
import time

import pytest

from daemon import COMMAND_SECONDS, Daemon, refused, samples
from programs import MIB

# So much of its rate may be saved up without a burst (BURST_TIME_MIN of crates/core/src/node/qos.rs).
BURST_SECONDS = 0.01
DEPTH = 32


@pytest.fixture
def daemon(tmp_path):
    with Daemon(tmp_path) as daemon:
        yield daemon


class Fio:
    """A run of fio against a volume, ended with the test."""

    def __init__(self, daemon, name, *arguments):
        uri = f"nbd+unix:///{name}?socket={daemon.data / 'nbd.sock'}"
        self.process = subprocess.Popen(
            # A thread, so that nothing is left when it is killed.
            ["fio", "--name=load", "--thread", "--ioengine=nbd", f"--uri={uri}", "--output-format=json",
             "--size=16M", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def result(self):
        out, errors = self.process.communicate(timeout=COMMAND_SECONDS)
        assert self.process.returncode == 0, out + errors
        (job,) = json.loads(out[out.index("{"):])["jobs"]
        assert job["error"] == 0
        return job


def random_writes(count, size="4k"):
    """So many writes, whatever is written twice."""
    return ["--rw=randwrite", f"--bs={size}", f"--iodepth={DEPTH}", "--norandommap",
            f"--number_ios={count}", "--io_size=1G"]


def endless_writes():
    return ["--rw=randwrite", "--bs=4k", f"--iodepth={DEPTH}", "--time_based", "--runtime=3600"]


def qos(daemon, name):
    return daemon.volume(name)["counters"]["qos"]


def set_keys(daemon, name, **keys):
    daemon.ok("volume", "set", name, *(f"{key}={value}" for key, value in keys.items()))


def seconds(job, kind="write"):
    # fio counts whole milliseconds.
    return job[kind]["runtime"] / 1000 + 0.002


def test_limit_of_requests_holds(daemon):
    daemon.create("v", "--set", "iops_max=500")
    with Fio(daemon, "v", *random_writes(1200)) as fio:
        job = fio.result()
    assert job["write"]["total_ios"] == 1200
    assert seconds(job) >= (1200 - 1) / 500 - BURST_SECONDS
    counted = daemon.volume("v")["counters"]
    assert counted["qos"]["delayed_requests"] > 1000
    assert counted["throttled_ms"] == 0, "that is the log's"
    page = samples(daemon.api("GET", "/metrics")[1])
    assert page['hdcs_volume_qos_delayed_requests_total{volume="v"}'] > 1000
    assert page['hdcs_volume_qos_delayed_seconds_total{volume="v"}'] > 1
    assert page['hdcs_volume_qos_waiting_requests{volume="v"}'] == 0
    assert page['hdcs_volume_throttled_seconds_total{volume="v"}'] == 0


def test_limit_of_bandwidth_holds_for_reads_and_writes(daemon):
    daemon.create("v", "--set", "bandwidth_max_mib_s=8")
    arguments = ["--rw=randrw", "--bs=64k", f"--iodepth={DEPTH}", "--io_size=16M"]
    with Fio(daemon, "v", *arguments) as fio:
        job = fio.result()
    moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
    assert moved == 16 * MIB
    longest = max(seconds(job, "read"), seconds(job))
    assert longest >= (moved - 65536) / (8 * MIB) - BURST_SECONDS


def test_burst_goes_at_once_and_the_rest_at_the_rate(daemon):
    daemon.create("v", "--set", "iops_max=100", "--set", "iops_burst=1000")
    with Fio(daemon, "v", *random_writes(1200)) as fio:
        job = fio.result()
    assert seconds(job) >= (1200 - 1000 - 1) / 100
    # What is saved up goes without delay; a slow machine only saves more.
    assert 0 < qos(daemon, "v")["delayed_requests"] <= 200


def test_limit_changes_under_load(daemon):
    daemon.create("v")
    with Fio(daemon, "v", *endless_writes()):
        daemon.until(lambda: daemon.volume("v")["counters"]["writes"] > 1000)
        assert qos(daemon, "v")["delayed_requests"] == 0, "nothing is set"
        set_keys(daemon, "v", iops_max=200)
        # Less than what was under way, and what the rate allows between the first answer's begin and the
        # second one's end.
        before = time.monotonic()
        first = daemon.volume("v")["counters"]["writes"]
        daemon.until(lambda: time.monotonic() > before + 2)
        second = daemon.volume("v")["counters"]["writes"]
        elapsed = time.monotonic() - before
        assert second - first <= 200 * (elapsed + BURST_SECONDS) + 1 + 2 * DEPTH
        # A new limit does not wait for the end of the old one's debt.
        set_keys(daemon, "v", iops_max=1)
        daemon.until(lambda: qos(daemon, "v")["waiting_requests"] == DEPTH)
        set_keys(daemon, "v", iops_max=0)
        reached = daemon.volume("v")["counters"]["writes"] + 1000
        daemon.until(lambda: daemon.volume("v")["counters"]["writes"] > reached)


def test_volume_at_its_limit_stops_and_comes_back(daemon):
    daemon.create("v", "--set", "iops_max=1")
    with Fio(daemon, "v", *endless_writes()):
        daemon.until(lambda: qos(daemon, "v")["waiting_requests"] > DEPTH / 2)
        daemon.stop()
    daemon.start()
    assert daemon.volume("v")["settings"]["iops_max"] == 1
    daemon.write("v", b"x" * 4096)
    assert daemon.read("v", 4096) == b"x" * 4096


def test_volume_at_its_limit_is_deleted(daemon):
    daemon.create("v", "--set", "iops_max=1")
    with Fio(daemon, "v", *endless_writes()):
        daemon.until(lambda: qos(daemon, "v")["waiting_requests"] > DEPTH / 2)
        daemon.ok("volume", "delete", "v", "--discard-dirty")
    assert daemon.json("volume", "list") == []


def test_client_that_goes_away_leaves_nothing_behind(daemon):
    """Its requests would take longer than this test."""
    daemon.create("v", "--set", "iops_max=1")
    client = daemon.nbd("v")
    buffers = [client.aio_pwrite(b"y" * 4096, 4096 * number) for number in range(200)]
    while client.aio_get_direction() & 2:
        client.poll(1000)
    daemon.until(lambda: qos(daemon, "v")["waiting_requests"] > 100)
    # Its socket is closed with it, without a word.
    del client, buffers
    daemon.until(lambda: qos(daemon, "v")["waiting_requests"] == 0)
    daemon.until(lambda: daemon.volume("v")["connections"] == 0)
    set_keys(daemon, "v", iops_max=0)
    daemon.write("v", b"z" * 8192)
    assert daemon.read("v", 8192) == b"z" * 8192


def test_volumes_with_weights_and_reservations_keep_their_data(daemon):
    for name, setting in [("a", "iops_min=500"), ("b", "qos_weight=400"), ("c", "iops_max=3000")]:
        daemon.create(name, "--set", setting)
    arguments = ["--rw=randwrite", "--bsrange=512-64k", "--bs_unaligned=0", f"--iodepth={DEPTH}",
                 "--fsync=64", "--io_size=8M", "--verify=crc32c", "--verify_fatal=1", "--do_verify=1",
                 "--verify_state_save=0"]
    with Fio(daemon, "a", *arguments) as a, Fio(daemon, "b", *arguments) as b:
        with Fio(daemon, "c", *arguments) as c:
            for fio in (a, b, c):
                assert fio.result()["read"]["total_ios"] > 0, "nothing was verified"
    assert daemon.volume("c")["counters"]["flushes"] > 0


def test_contradictions_are_refused_and_reservations_are_shown(daemon):
    daemon.create("v", "--set", "iops_min=4000")
    refused(daemon.cli("volume", "set", "v", "iops_max=3000"), 2,
            "iops_min (4000) must not be above iops_max (3000)")
    refused(daemon.cli("volume", "set", "v", "bandwidth_burst_mib=5"), 2,
            "needs bandwidth_max_mib_s")
    refused(daemon.cli("volume", "set", "v", "qos_weight=10001"), 2, "from 0 to 10000")
    assert "iops_max" not in daemon.volume("v")["overridden"]
    shown = daemon.ok("volume", "show", "v")
    assert "reserved 4000, served 0" in shown
    assert "not reached" not in shown, "nothing was asked for"
    assert samples(daemon.api("GET", "/metrics")[1])['hdcs_volume_qos_short{volume="v"}'] == 0
    # More than any machine does with one request at a time.
    set_keys(daemon, "v", iops_min=50_000_000)
    with Fio(daemon, "v", *endless_writes()):
        daemon.until(lambda: "not reached" in daemon.ok("volume", "show", "v"))
