"""What holds for a killed node's write log, in whatever form it has the data: compressed, encrypted or plain."""

from daemon import hdcs
from object_stores import counters


def flip(path, at):
    """Change one byte of a file."""
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def damage(path, data):
    """Change one byte of where the log has `data`."""
    content = path.read_bytes()
    assert content.count(data) == 1
    flip(path, content.index(data) + 1000)


def is_sound(daemon):
    """`inspect` and `check` find nothing wrong with the log of `v`, and leave it as it is."""
    log = daemon.log_of("v")
    before = log.read_bytes()
    for path in [daemon.data, log, log.parent]:
        done = hdcs("inspect", path)
        assert done.returncode == 0 and "PROBLEM" not in done.stdout, done.stdout
        done = hdcs("check", path)
        assert done.returncode == 0, done.stdout + done.stderr
    assert log.read_bytes() == before


def is_replayed(daemon, data, image):
    """`v` begins with `data`, which was in its log alone, and brings it to its backend, a file."""
    daemon.start()
    assert daemon.read("v", len(data)) == data
    found = counters(daemon)
    assert found["replayed_bytes"] >= len(data), found
    daemon.ok("check", "v")
    daemon.ok("volume", "flush", "v")
    # By contract the backing file is a raw image.
    assert image.read_bytes()[: len(data)] == data
    daemon.stop()
