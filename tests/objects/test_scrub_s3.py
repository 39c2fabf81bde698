"""A scrub of a volume on a real S3: beside load, with damage in an object."""

from daemon import Daemon, refused
from object_stores import EAGER, Load
from programs import MIB


def test_s3_scrub_beside_load_names_the_object_that_is_damaged(s3, tmp_path):
    with Daemon(tmp_path, EAGER) as daemon:
        daemon.create("v", "--backend", s3.url("scrubbed"), size="32M")
        load = Load(daemon, "v", 32 * MIB, 6)
        load.start()
        daemon.until(lambda: daemon.volume("v")["counters"]["store"]["puts_manifest"] > 5)
        # What the owner removes meanwhile is no damage.
        for _ in range(3):
            daemon.ok("volume", "scrub", "v", "--rate", "1G")
        load.end()
        daemon.ok("volume", "flush", "v")
        found = daemon.volume("v")["scrub"]["last"]
        assert found["problems"] == [] and found["read_bytes"] > 0
        client, names = s3.client(), set()
        for name in sorted(name for name in s3.names("scrubbed") if name.startswith("data/")):
            key = {"Bucket": s3.bucket, "Key": f"scrubbed/{name}"}
            try:
                good = client.get_object(**key)["Body"].read()
            except client.exceptions.NoSuchKey:
                # Its owner has removed it since.
                continue
            client.put_object(**key, Body=bytes(byte ^ 1 for byte in good))
            done = daemon.cli("volume", "scrub", "v", "--rate", "1G")
            client.put_object(**key, Body=good)
            # What nothing needs any more is no damage.
            if done.returncode != 0:
                refused(done, 1, "scrub found")
                assert name in done.stdout and "damaged" in done.stdout and "restore" in done.stdout
                problems = daemon.json("status")["problems"]
                assert any(name in problem["reason"] for problem in problems), problems
                names.add(name)
                break
        assert names
        # Once it is put right, the next one says so.
        daemon.ok("volume", "scrub", "v", "--rate", "1G")
        assert daemon.json("status")["problems"] == []
        assert daemon.volume("v")["counters"]["errors"] == 0, "nobody was fenced"
        daemon.stop()
