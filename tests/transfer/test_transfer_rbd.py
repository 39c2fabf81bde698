"""Import to images of a real Ceph: one that is there stays as it is, one that an import has made goes with it."""

from daemon import Daemon, refused
from programs import MIB
from snapshot_cases import SMALL
from transfer_cases import fails_early, names


def listed(cluster):
    return cluster.rbd("ls", "rbd").decode().split()


def test_rbd_import_removes_the_image_that_it_made_and_no_other(cluster, tmp_path):
    image = tmp_path / "image.raw"
    image.write_bytes(b"i" * (8 * MIB))
    (tmp_path / "there").write_bytes(b"t" * (8 * MIB))
    cluster.rbd("import", "--no-progress", tmp_path / "there", "rbd/transfer-there")
    with Daemon(tmp_path, SMALL) as daemon:
        place = ["--backend", cluster.url("rbd/transfer-there")]
        refused(daemon.cli("volume", "import", "i", image, *place), 1, "is there already", "left as it was")
        assert "i" not in names(daemon)
        said = fails_early(daemon, "i", *place, "--overwrite", "--set", "destage_age_max_ms=86400000")
        assert "which was there before, stays" in said
        assert "transfer-there" in listed(cluster)
        new = ["--backend", cluster.url("rbd/transfer-new")]
        said = fails_early(daemon, "i", *new, "--set", "policy=write-through")
        assert "the volume is removed again" in said and "left" not in said
        assert "transfer-new" not in listed(cluster)
        daemon.ok("volume", "import", "i", image, *new)
        daemon.ok("volume", "flush", "i")
        assert cluster.export("rbd/transfer-new") == image.read_bytes()
        daemon.stop()
    assert cluster.export("rbd/transfer-there") == b"t" * (8 * MIB)
