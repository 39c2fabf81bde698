"""NBD with fio's engine: writes in flight, then every block verified."""

import json

import pytest

from programs import run

JOBS = {
    "random-4k": ["--rw=randwrite", "--bs=4k", "--iodepth=32"],
    "random-mixed-sizes": ["--rw=randwrite", "--bsrange=512-128k", "--bs_unaligned=0", "--iodepth=16"],
    "sequential-1m": ["--rw=write", "--bs=1m", "--iodepth=4"],
    "random-flushing": ["--rw=randwrite", "--bs=4k", "--iodepth=8", "--fsync=32"],
}


@pytest.mark.parametrize("job", JOBS)
def test_fio_verifies(volume, job):
    done = run(
        "fio",
        "--name=verify",
        "--ioengine=nbd",
        f"--uri={volume}",
        "--size=64M",
        "--io_size=64M",
        "--randseed=7",
        "--verify_state_save=0",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--do_verify=1",
        "--output-format=json",
        *JOBS[job],
    )
    report = json.loads(done.stdout[done.stdout.index("{") :])
    (result,) = report["jobs"]
    assert result["error"] == 0
    assert result["write"]["total_ios"] > 0
    assert result["read"]["total_ios"] > 0, "nothing was verified"
