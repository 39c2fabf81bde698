"""`make demo` does what it says, within its time, and leaves nothing running."""

import subprocess

from programs import BENCH, ROOT, running_with


def test_demo_verifies_and_leaves_nothing(tmp_path):
    data, results = tmp_path / "data", tmp_path / "results"
    done = subprocess.run(
        [BENCH, "demo", "--data", data, "--results", results],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "VERIFIED" in done.stdout
    for load in ("randwrite", "randread", "zipf"):
        for extension in ("svg", "png"):
            assert (results / f"latency-{load}.{extension}").stat().st_size > 1000
    assert not list(data.iterdir())
    assert not running_with(str(data))
