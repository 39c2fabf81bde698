"""`make demo` does what it says, within its time, and leaves nothing running."""

import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent


def running_with(argument):
    """Processes that have `argument` in their command line."""
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it ended meanwhile
        if argument in line:
            found.append(line)
    return found


def test_demo_verifies_and_leaves_nothing(tmp_path):
    data, results = tmp_path / "data", tmp_path / "results"
    done = subprocess.run(
        [ROOT / "target/release/hdcs-bench", "demo", "--data", data, "--results", results],
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
