"""Resize of a volume on a real S3 that has a snapshot: what the snapshot holds stays, also beyond the new end."""

from daemon import Daemon, refused
from object_stores import EAGER
from programs import MIB


def test_s3_shrunk_volume_leaves_its_snapshot_whole(s3, tmp_path):
    with Daemon(tmp_path, EAGER) as daemon:
        daemon.create("v", "--backend", s3.url("shrunk"), size="16M")
        daemon.write("v", b"a" * (16 * MIB))
        daemon.ok("volume", "snapshot", "v", "before")
        daemon.ok("volume", "resize", "v", "--size", "4M", "--shrink")
        daemon.write("v", b"b" * MIB, MIB)
        daemon.ok("volume", "resize", "v", "--size", "24M")
        daemon.ok("volume", "flush", "v")
        daemon.ok("volume", "evict", "v")
        after = b"a" * MIB + b"b" * MIB + b"a" * (2 * MIB) + bytes(20 * MIB)
        assert daemon.read("v", 24 * MIB) == after
        daemon.ok("volume", "clone", "v@before", "c", "--backend", s3.url("shrunk-clone"))
        assert daemon.volume("c")["bytes"] == 16 * MIB
        assert daemon.read("c", 16 * MIB) == b"a" * (16 * MIB)
        # The image of a snapshot, while the volume goes on.
        image = tmp_path / "before.raw"
        clone = ["--clone-backend", s3.url("shrunk-export")]
        daemon.ok("volume", "export", "v@before", image, *clone)
        assert image.read_bytes() == b"a" * (16 * MIB)
        daemon.ok("volume", "export", "v", tmp_path / "now.raw", "--snapshot", "--clone-backend", s3.url("shrunk-now"))
        assert (tmp_path / "now.raw").read_bytes() == after
        assert {volume["name"] for volume in daemon.json("volume", "list")} == {"v", "c"}
        assert [snapshot["name"] for snapshot in daemon.json("volume", "snapshot", "v", "--list")["snapshots"]] == ["before"]
        for target in ("v", "c"):
            assert daemon.cli("check", target).returncode == 0
        daemon.stop()


def test_s3_shrink_that_fails_leaves_a_volume_that_opens(s3, tmp_path):
    """The store is away for longer than a shrink waits, and comes back: it commits the smaller size then, so the
    catalogue must not say the larger one, or the node refuses its own volume as cut by somebody else."""
    url = s3.url("shrink-fails", retry_s=2, timeout_s=5)
    with Daemon(tmp_path, EAGER) as daemon:
        daemon.create("v", "--backend", url, size="16M")
        daemon.write("v", b"a" * (16 * MIB))
        daemon.ok("volume", "flush", "v")
        s3.gateway_down()
        try:
            refused(daemon.cli("volume", "resize", "v", "--size", "4M", "--shrink"), 1, "volume v", "resized")
        finally:
            s3.up()
        assert daemon.volume("v")["bytes"] == 4 * MIB
        daemon.until(lambda: daemon.volume("v")["counters"]["store"]["trouble"] is None)
        daemon.write("v", b"b" * MIB)
        daemon.ok("volume", "flush", "v")
        daemon.kill()
        daemon.start()
        assert daemon.volume("v")["bytes"] == 4 * MIB
        assert daemon.read("v", 4 * MIB) == b"b" * MIB + b"a" * (3 * MIB)
        daemon.ok("volume", "resize", "v", "--size", "8M")
        assert daemon.read("v", 8 * MIB) == b"b" * MIB + b"a" * (3 * MIB) + bytes(4 * MIB)
        daemon.stop()
