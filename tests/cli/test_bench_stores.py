"""The benchmark before object stores: it works, counts requests, and leaves nothing."""

import json
import pathlib
import subprocess
import tempfile

import pytest

from programs import BENCH, ROOT, running_with

BENCH_SECONDS = 300
BLOCKS_A_GIB = (1 << 30) // 4096


def rows(report, title):
    """Rows of numbers of the table of requests of a profile, by its peers."""
    lines = iter(report[report.index("Requests to ") :].splitlines())
    for line in lines:
        if line == title:
            break
    heads = next(lines).split()
    found = {}
    for line in lines:
        if not line:
            break
        name, *cells = line.split()
        found[name] = dict(zip(heads, map(float, cells), strict=True))
    return found


@pytest.fixture
def cluster():
    """A directory with a short path, since unix sockets are in it."""
    with tempfile.TemporaryDirectory(prefix="hdcs-", dir="/tmp") as directory:
        yield pathlib.Path(directory)


@pytest.mark.parametrize("store", ["s3", "hdfs"])
def test_bench_counts_requests_of(store, cluster, tmp_path):
    data, results = tmp_path / "data", tmp_path / "results"
    command = [BENCH, store, "--quick", "--only", "burst,coldscan", "--data", data]
    done = subprocess.run(
        [*command, "--cluster", cluster, "--results", results],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=BENCH_SECONDS,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    direct, ours, flush = f"{store}-direct", f"hdcs-{store}", f"hdcs-{store}-flush"

    written = rows(done.stdout, "4k random write, depth 32, log larger than the burst")
    assert set(written) == {direct, ours, flush}
    assert written[direct]["PUTs"] == BLOCKS_A_GIB
    # Counted, not timed: what was written is batched, and all of it is in the store at the end.
    assert 0 < written[ours]["PUTs"] < BLOCKS_A_GIB / 10
    kinds = sum(written[ours][kind] for kind in ("data", "map", "manifest"))
    assert abs(written[ours]["PUTs"] - kinds) <= 2
    assert written[ours]["data"] > 0 and written[ours]["manifest"] > 0
    assert written[ours]["put/byte"] > 0.5

    read = rows(done.stdout, "1M sequential read, depth 4, nothing cached")
    assert read[direct]["GETs"] == 1024 and read[ours]["GETs"] > 0
    assert read[ours]["got/byte"] >= 1

    for line in ("4k random writes, log overrun: PUTs for a GiB", "log takes the burst / direct"):
        assert line in done.stdout
    (result,) = results.iterdir()
    samples = json.loads((result / "results.json").read_text())["samples"]
    counted = [sample for sample in samples if sample["requests"]]
    assert {sample["peer"] for sample in counted} == {direct, ours, flush}
    assert (result / "report.txt").read_text().strip() == done.stdout.strip()
    assert not list(data.iterdir()) and not list(cluster.iterdir())
    assert not running_with(str(cluster)) and not running_with(str(data))
