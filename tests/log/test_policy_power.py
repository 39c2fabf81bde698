"""What went past the log is covered by a client's flush, also after the node crashed in between."""

import errno
import re
from urllib.parse import quote

import nbd
import pytest

from daemon import DIRTY, Daemon, hdcs

UNFLUSHED = "writes past the log may not be flushed"


@pytest.fixture
def daemon(tmp_path):
    with Daemon(tmp_path) as daemon:
        yield daemon


def test_policy_flush_after_a_crash_covers_what_went_past_the_log(daemon):
    """The backend flushes nothing while a file exists: then no flush that has to cover a direct write may succeed."""
    broken = daemon.home / "broken"
    options = f"error_file={quote(str(broken))}&error_on=flush"
    for name, policy in [("past", "write-around"), ("logged", "write-back")]:
        daemon.create(name, "--backend", f"file:{daemon.home / name}.img?{options}", "--policy", policy, *DIRTY)
    daemon.nbd("past").pwrite(b"p" * 4096, 0)
    broken.touch()
    daemon.ok("volume", "set", "past", "policy=write-back")
    daemon.nbd("logged").pwrite(b"l" * 4096, 0)
    daemon.kill()
    log = daemon.data / "volumes/past/log"
    assert UNFLUSHED in hdcs("inspect", log).stdout
    assert UNFLUSHED not in hdcs("inspect", daemon.data / "volumes/logged/log").stdout
    daemon.start()
    daemon.nbd("logged").flush()
    client = daemon.nbd("past")
    for _ in range(2):
        with pytest.raises(nbd.Error) as failure:
            client.flush()
        assert failure.value.errnum == errno.EIO
    assert client.pread(4096, 0) == b"p" * 4096
    broken.unlink()

    def is_flushed():
        try:
            client.flush()
        except nbd.Error:
            # What an earlier one has lost is told once.
            return False
        return True

    daemon.until(is_flushed)
    client.shutdown()
    daemon.stop()
    superblocks = [line for line in hdcs("inspect", log).stdout.splitlines() if ", sequence " in line]
    newest = max(superblocks, key=lambda line: int(re.search(r", sequence (\d+)", line)[1]))
    assert ", closed cleanly" in newest and UNFLUSHED not in newest
