"""A file system on NBD: nbdfuse gives a file, a loop device on it holds ext4."""

from contextlib import ExitStack
from pathlib import Path

from filesystems import as_file, as_loop, make_tree, mounted, needs_fuse, same_tree
from programs import MIB, run

pytestmark = needs_fuse

SIZE = 256 * MIB


def test_ext4_over_nbdfuse(server, tmp_path):
    uri = server.uri(server.new_volume(SIZE))
    source = tmp_path / "source"
    make_tree(source, 1)
    disk = tmp_path / "disk"
    with ExitStack() as stack:
        as_file(stack, uri, disk)
        device = as_loop(stack, disk)
        run("mkfs.ext4", "-q", device)
        with ExitStack() as mount:
            root = mounted(mount, device, tmp_path / "root")
            run("cp", "-r", source, root / "first")
            run("cp", "-r", root / "first", root / "second")
            run("rm", "-r", root / "first" / "d0")
            run("sync", "-f", root)
            run("fstrim", root, check=False)
        run("e2fsck", "-f", "-n", device)
    # Everything is closed; what a new client sees came from the volume.
    with ExitStack() as stack:
        as_file(stack, uri, disk)
        device = as_loop(stack, disk)
        run("e2fsck", "-f", "-n", device)
        with ExitStack() as mount:
            root = mounted(mount, device, tmp_path / "root")
            assert same_tree(source, root / "second")
            assert not (root / "first" / "d0").exists()
            assert same_tree(source / "d1", root / "first" / "d1")
    assert run("losetup", "--associated", disk).stdout == ""


def test_image_that_was_kept_mounts_without_us(server, tmp_path):
    """After `delete --keep-data` all is in the plain image, dirty data included."""
    name = server.new_volume(SIZE, "--set", "destage_age_max_ms=86400000")
    source = tmp_path / "source"
    make_tree(source, 2)
    disk = tmp_path / "disk"
    with ExitStack() as stack:
        as_file(stack, server.uri(name), disk)
        device = as_loop(stack, disk)
        run("mkfs.ext4", "-q", device)
        with ExitStack() as mount:
            root = mounted(mount, device, tmp_path / "root")
            run("cp", "-r", source, root / "tree")
    shown = server.volume(name)
    assert shown["counters"]["dirty_bytes"] > 0
    data = server.json("volume", "delete", name, "--keep-data")["data"]
    assert data.startswith("file:")
    image = Path(data.removeprefix("file:"))
    with ExitStack() as stack:
        run("e2fsck", "-f", "-n", image)
        device = as_loop(stack, image)
        root = mounted(stack, device, tmp_path / "root")
        assert same_tree(source, root / "tree")
    image.unlink()
