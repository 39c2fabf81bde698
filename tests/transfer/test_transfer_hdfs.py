"""Import to a real HDFS: what it has made there goes with an import that does not end."""

from daemon import Daemon, refused
from programs import MIB
from snapshot_cases import SMALL
from transfer_cases import fails_early


def test_hdfs_import_that_does_not_end_leaves_nothing_in_the_way(hdfs, tmp_path):
    image = tmp_path / "image.raw"
    image.write_bytes(b"i" * (8 * MIB))
    place = ["--backend", hdfs.url("transfer")]
    with Daemon(tmp_path, SMALL) as daemon:
        said = fails_early(daemon, "i", *place, "--set", "policy=write-through")
        assert "the volume is removed again" in said and "left" not in said
        daemon.ok("volume", "import", "i", image, *place)
        assert daemon.read("i", 8 * MIB) == image.read_bytes()
        refused(daemon.cli("volume", "import", "other", image, *place), 2, "is the backend of volume i")
        daemon.stop()
