"""Resize of a volume on a real S3 that has a snapshot: what the snapshot holds stays, also beyond the new end."""

from daemon import MIB, Daemon
from object_stores import EAGER


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
