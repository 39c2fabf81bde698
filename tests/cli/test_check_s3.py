"""hdcs check of volumes on a real S3: in use under load, from elsewhere, and with damage."""

import json

import pytest

from daemon import COMMAND_SECONDS, Daemon, hdcs, refused
from object_stores import EAGER, Load
from programs import MIB


def backend_report(done):
    return next(report for report in json.loads(done.stdout) if report["path"].startswith("s3:"))


@pytest.fixture
def written(s3, tmp_path):
    """A volume with a snapshot, a clone, and much that was overwritten."""
    with Daemon(tmp_path, EAGER) as daemon:
        daemon.create("v", "--backend", s3.url("checked"), size="32M")
        load = Load(daemon, "v", 32 * MIB, 5)
        load.start()
        daemon.until(lambda: daemon.volume("v")["counters"]["store"]["puts_manifest"] > 5)
        yield daemon, load
        daemon.stop()


def test_s3_check_beside_an_owner_finds_nothing_wrong_and_damage_by_name(s3, written):
    daemon, load = written
    for _ in range(4):
        done = daemon.cli("check", "v", "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        report = backend_report(done)
        assert report["objects"] > 1 and report["blocks"] > 0
    load.end()
    daemon.ok("volume", "snapshot", "v", "monday")
    clone = s3.url("checked-clone")
    daemon.ok("volume", "clone", "v@monday", "c", "--backend", clone)
    daemon.ok("volume", "flush", "v")
    assert daemon.volume("v")["counters"]["errors"] == 0, "nobody was fenced"
    url = s3.url("checked")
    assert hdcs("check", url).returncode == 0 and hdcs("check", clone).returncode == 0
    client = s3.client()
    data = sorted(name for name in s3.names("checked") if name.startswith("data/"))
    found = set()
    for name in data:
        key = {"Bucket": s3.bucket, "Key": f"checked/{name}"}
        good = client.get_object(**key)["Body"].read()
        client.put_object(**key, Body=bytes(byte ^ 1 for byte in good))
        done = hdcs("check", url, timeout=COMMAND_SECONDS)
        client.put_object(**key, Body=good)
        # What nothing needs any more is no damage.
        if done.returncode == 1:
            refused(done, 1, "check found")
            assert name in done.stdout and "damaged" in done.stdout and "restore" in done.stdout
            found.add(name)
    assert found
    # A clone needs its parent's objects.
    name = found.pop()
    key = {"Bucket": s3.bucket, "Key": f"checked/{name}"}
    good = client.get_object(**key)["Body"].read()
    client.delete_object(**key)
    for target in (url, clone):
        done = hdcs("check", target)
        assert done.returncode == 1 and name in done.stdout and "is missing" in done.stdout, done.stdout
    client.put_object(**key, Body=good)
    assert hdcs("check", url).returncode == 0
