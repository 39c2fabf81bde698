"""Snapshots and clones of volumes on files: sharing data on XFS, and copying it where nothing else is possible."""

import os
import random
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

import snapshot_cases as cases
from daemon import DIRTY, Daemon, refused
from filesystems import as_loop
from object_stores import BLOCK, EAGER, counters
from programs import HDCS, MIB, run
from snapshot_cases import SMALL, snapshots

# Large enough for mkfs.xfs, and sparse.
XFS_BYTES = 2 << 30


class Files:
    """Files in a directory."""

    def __init__(self, root, copy):
        self.root, self.copy = Path(root), ["--copy"] if copy else []

    def path(self, name):
        return self.root / name

    def url(self, name):
        return f"file:{self.path(name)}"

    def snapshot_path(self, name, snap):
        return self.root / f"{name}.hdcs-snap" / snap

    def snapshot_url(self, name, snap):
        return f"file:{self.snapshot_path(name, snap)}"

    def export(self, name):
        return self.path(name).read_bytes()

    def export_snapshot(self, name, snap):
        return self.snapshot_path(name, snap).read_bytes()

    def absent(self, name):
        return not self.path(name).exists()

    def leftovers(self, name):
        directory = self.root / f"{name}.hdcs-snap"
        return [path.name for path in directory.iterdir() if path.name.startswith(".")]


@pytest.fixture(scope="module")
def xfs(tmp_path_factory):
    """A mounted XFS."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    home = tmp_path_factory.mktemp("xfs")
    with open(home / "image", "wb") as file:
        file.truncate(XFS_BYTES)
    run("mkfs.xfs", "-q", home / "image")
    with ExitStack() as stack:
        device = as_loop(stack, home / "image")
        (home / "mnt").mkdir()
        run("mount", device, home / "mnt")
        stack.callback(run, "umount", home / "mnt")
        yield home / "mnt"


@pytest.fixture
def shared(xfs, request):
    """A directory whose files can share data."""
    directory = xfs / request.node.name.replace("[", "-").replace("]", "")
    directory.mkdir()
    return Files(directory, copy=False)


@pytest.fixture
def copied(tmp_path):
    """A directory whose files cannot."""
    directory = tmp_path / "files"
    directory.mkdir()
    (directory / "a").write_bytes(b"x" * BLOCK)
    done = subprocess.run(["cp", "--reflink=always", directory / "a", directory / "b"], capture_output=True)
    if done.returncode == 0:
        pytest.skip("the file system of the temporary directory has reflinks")
    return Files(directory, copy=True)


@pytest.fixture(params=["shared", "copied"])
def files(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("mode", ["cache", "storage"])
def test_file_snapshot_holds_what_was_acknowledged(files, tmp_path, mode):
    cases.holds_what_was_acknowledged(files, tmp_path, "--mode", mode)
    assert files.leftovers("first") == []


@pytest.mark.parametrize("mode", ["cache", "storage"])
@pytest.mark.parametrize("policy", ["write-back", "write-through"])
def test_file_snapshot_under_load_is_a_prefix(files, tmp_path, policy, mode):
    cases.under_load_is_a_prefix(files, tmp_path, "--policy", policy, "--mode", mode)


@pytest.mark.parametrize("mode", ["cache", "storage"])
def test_file_snapshot_and_clone_survive_kills(files, tmp_path, mode):
    cases.survives_kills(files, tmp_path, "--mode", mode)


def test_file_clones_second_boot_reads_the_cache(shared, tmp_path):
    cases.second_boot_reads_the_cache(shared, tmp_path)


def test_file_snapshots_are_refused(files, tmp_path):
    cases.are_refused(files, tmp_path, "s3://bucket/c?endpoint=http://127.0.0.1:9")


def test_file_snapshot_shares_its_data(shared, tmp_path):
    with Daemon(tmp_path, SMALL) as daemon:
        daemon.create("v", "--backend", shared.url("v"), size="256M")
        # As a compressed file begins: whatever a client has written may be cloned.
        daemon.write("v", b"\x1f\x8b" + random.Random(1).randbytes(128 * MIB - 2))
        used = os.statvfs(shared.root)
        daemon.ok("volume", "snapshot", "v", "s")
        daemon.json("volume", "clone", "v@s", "c", "--backend", shared.url("c"))
        after = os.statvfs(shared.root)
        assert (used.f_bfree - after.f_bfree) * used.f_frsize < 16 * MIB
        refused(daemon.cli("volume", "clone", "v@s", "d", "--backend", f"file:{tmp_path}/elsewhere"), 2,
                "on another file system", "--copy")
        assert not list(tmp_path.glob("elsewhere*"))
        daemon.ok("volume", "clone", "v@s", "d", "--backend", f"file:{tmp_path}/elsewhere", "--copy")
        assert counters(daemon, "d")["inherited_bytes"] == 0
        assert daemon.read("d", MIB) == daemon.read("v", MIB)
        daemon.stop()


def test_file_snapshot_that_was_changed_is_another_origin(shared, tmp_path):
    """What is cached of a snapshot is not shown to a clone that began with something else under its name."""
    data = random.Random(5).randbytes(4 * MIB)
    with Daemon(tmp_path, SMALL) as daemon:
        daemon.create("v", "--backend", shared.url("v"), size="16M")
        daemon.write("v", data)
        daemon.ok("volume", "snapshot", "v", "s")
        daemon.ok("volume", "clone", "v@s", "a", "--backend", shared.url("a"))
        assert daemon.read("a", 4 * MIB) == data
        snap = shared.snapshot_path("v", "s")
        snap.chmod(0o600)
        with open(snap, "r+b") as file:
            file.write(b"z" * MIB)
        daemon.ok("volume", "clone", "v@s", "b", "--backend", shared.url("b"))
        assert daemon.read("b", 4 * MIB) == b"z" * MIB + data[MIB:]
        daemon.stop()
        daemon.start()
        daemon.until(lambda: all(v["phase"] == "open" for v in daemon.json("volume", "list")))
        assert daemon.read("a", 4 * MIB) == data
        assert 0 < counters(daemon, "a")["inherited_bytes"] < 16 * MIB
        # Without the snapshot nothing is known to be shared, and nothing is missing.
        daemon.ok("volume", "snapshot", "v", "s", "--delete")
        daemon.stop()
        daemon.start()
        daemon.until(lambda: all(v["phase"] == "open" for v in daemon.json("volume", "list")))
        assert counters(daemon, "a")["inherited_bytes"] == 0
        assert daemon.read("a", 4 * MIB) == data
        daemon.stop()


def test_file_copy_is_refused_unless_it_is_said(copied, tmp_path):
    with Daemon(tmp_path, SMALL) as daemon:
        daemon.create("v", "--backend", copied.url("v"), *DIRTY, size="16M")
        daemon.write("v", b"x" * MIB)
        refused(daemon.cli("volume", "snapshot", "v", "s"), 1, "no reflinks", "--copy")
        refused(daemon.cli("volume", "clone", "v", "c", "--backend", copied.url("c")), 1, "no reflinks", "--copy")
        assert counters(daemon, "v")["dirty_bytes"] > 0, "refused before it is flushed"
        assert snapshots(daemon) == [] and not copied.snapshot_path("v", "s").parent.exists()
        daemon.ok("volume", "snapshot", "v", "s", "--copy")
        assert copied.export_snapshot("v", "s") == b"x" * MIB + bytes(15 * MIB)
        # Holes stay holes.
        assert copied.snapshot_path("v", "s").stat().st_blocks * 512 < 2 * MIB
        daemon.stop()


def test_file_copy_goes_on_beside_writes_and_is_cancelled(copied, tmp_path):
    """While it is copied, clients write over what is not copied yet, and what it holds is from before. It
    shows how far it is, and ends at once when that is asked for."""
    size = 384 * MIB
    with Daemon(tmp_path, {**EAGER, **SMALL}) as daemon:
        daemon.create("v", "--backend", copied.url("v"), "--policy", "write-through", size=str(size))
        client = daemon.nbd("v")
        for at in range(0, size, MIB):
            client.pwrite((at // MIB + 1).to_bytes(4, "little") * (MIB // 4), at)
        client.flush()

        def begin(name):
            command = [str(HDCS), "volume", "snapshot", "v", name, "--copy", "--data",
                       str(daemon.data)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            daemon.until(lambda: process.poll() is not None or counters(daemon)["copy_remaining_bytes"] > 0)
            assert process.poll() is None, process.stderr.read()
            return process

        process = begin("cancelled")
        refused(daemon.cli("volume", "resize", "v", "--size", "512M"), 1, "being snapshotted")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode != 0 and "it was cancelled: nothing was made" in errors, errors
        assert counters(daemon)["copy_remaining_bytes"] == 0
        assert snapshots(daemon) == [] and copied.leftovers("v") == []

        process = begin("s")
        # Over the end of it, which is copied last, and in between.
        for at in [*range(size - 8 * MIB, size, MIB), *range(0, size - 8 * MIB, 7 * MIB)]:
            client.pwrite(b"new " * (MIB // 4), at)
        client.trim(4 * MIB, size - 32 * MIB)
        written_meanwhile = process.poll() is None or counters(daemon)["copy_remaining_bytes"] == 0
        out, errors = process.communicate(timeout=120)
        assert process.returncode == 0 and written_meanwhile, errors
        assert "snapshot s of volume v is made" in out
        snap = copied.export_snapshot("v", "s")
        for at in range(0, size, MIB):
            assert snap[at : at + MIB] == (at // MIB + 1).to_bytes(4, "little") * (MIB // 4), at
        client.flush()
        assert client.pread(MIB, size - MIB) == b"new " * (MIB // 4)
        # A kill in the middle leaves nothing that stays.
        process = begin("killed")
        daemon.kill()
        process.communicate(timeout=60)
        assert copied.leftovers("v") != []
        daemon.start()
        daemon.until(lambda: daemon.volume("v")["phase"] == "open")
        assert [one["name"] for one in snapshots(daemon)] == ["s"] and copied.leftovers("v") == []
        # A stop does not wait for it.
        process = begin("stopped")
        daemon.stop()
        process.communicate(timeout=60)
        assert copied.leftovers("v") == []


def test_file_snapshot_without_room_says_so(xfs, tmp_path):
    """Nothing of it stays, and clients go on."""
    small = tmp_path / "small"
    with open(tmp_path / "image", "wb") as file:
        file.truncate(64 * MIB)
    run("mke2fs", "-q", "-t", "ext4", tmp_path / "image")
    small.mkdir()
    with ExitStack() as stack:
        run("mount", as_loop(stack, tmp_path / "image"), small)
        stack.callback(run, "umount", small)
        with Daemon(tmp_path, SMALL) as daemon:
            daemon.create("v", "--backend", f"file:{small}/v", size="40M")
            data = random.Random(2).randbytes(40 * MIB)
            daemon.write("v", data)
            refused(daemon.cli("volume", "snapshot", "v", "s", "--copy"), 1, "no space left")
            assert snapshots(daemon) == []
            assert [path.name for path in (small / "v.hdcs-snap").iterdir()] == []
            daemon.write("v", data[:MIB], MIB)
            assert daemon.read("v", MIB, MIB) == data[:MIB]
            daemon.stop()


def test_file_snapshots_of_a_file_that_hdcs_made(tmp_path):
    """They go with the volume only if they are deleted before, and stay with its data."""
    with Daemon(tmp_path, SMALL) as daemon:
        for name in ["v", "w"]:
            daemon.create(name, size="16M")
            daemon.write(name, b"x" * MIB)
            daemon.ok("volume", "snapshot", name, "s", "--copy")
        refused(daemon.cli("volume", "delete", "v"), 1, "it has snapshots: s:", "delete them first", "--keep-data")
        daemon.ok("volume", "snapshot", "v", "s", "--delete")
        daemon.ok("volume", "delete", "v")
        kept = daemon.json("volume", "delete", "w", "--keep-data")["data"].removeprefix("file:")
        assert Path(kept).read_bytes()[:MIB] == b"x" * MIB
        assert Path(f"{kept}.hdcs-snap/s").read_bytes()[:MIB] == b"x" * MIB
        daemon.stop()


def test_file_clones_of_a_file_that_hdcs_made(tmp_path):
    """They need no place of their own: they live in the data directory as their parent does, and go with their volume."""
    old, new = random.Random(6).randbytes(4 * MIB), random.Random(7).randbytes(4 * MIB)
    with Daemon(tmp_path, SMALL) as daemon:
        daemon.create("v", size="16M")
        daemon.create("elsewhere", "--backend", f"file:{tmp_path}/elsewhere")
        daemon.write("v", old)
        daemon.ok("volume", "snapshot", "v", "s", "--copy")
        daemon.write("v", new)
        daemon.ok("volume", "resize", "v", "--size", "32M")
        made = daemon.json("volume", "clone", "v@s", "then", "--copy")
        assert made["bytes"] == 16 * MIB
        daemon.ok("volume", "clone", "v", "now", "--copy", "--mode", "storage")
        refused(daemon.cli("volume", "clone", "elsewhere", "c", "--copy"), 2, "give --backend")
        refused(daemon.cli("volume", "clone", "v", "now", "--copy"), 1, "it exists already")
        refused(daemon.cli("volume", "clone", "v", "far", "--copy", "--log-size", "1M"), 2, "write log")
        daemon.write("then", b"mine" * (MIB // 4), 8 * MIB)
        daemon.kill()
        # What a creation leaves that is killed while it copies.
        half = daemon.data / "volumes" / ".new-data-5d6e3f1e-0000-4000-8000-000000000000"
        half.mkdir()
        (half / "data.hdcs-making").write_bytes(b"x")
        daemon.start()
        daemon.until(lambda: all(v["phase"] == "open" for v in daemon.json("volume", "list")))
        assert daemon.read("then", 16 * MIB) == old + bytes(4 * MIB) + b"mine" * (MIB // 4) + bytes(7 * MIB)
        assert daemon.read("now", 4 * MIB) == new and daemon.volume("now")["bytes"] == 32 * MIB
        assert daemon.read("v", 4 * MIB) == new
        daemon.ok("volume", "delete", "then")
        daemon.ok("volume", "flush", "now")
        assert (daemon.data / "volumes" / "now" / "data").read_bytes()[: 4 * MIB] == new
        left = sorted(path.name for path in (daemon.data / "volumes").iterdir())
        assert left == ["elsewhere", "now", "v"]
        daemon.stop()


def test_file_block_device_has_no_snapshots(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("a loop device needs root")
    with open(tmp_path / "disk", "wb") as file:
        file.truncate(16 * MIB)
    with ExitStack() as stack, Daemon(tmp_path, SMALL) as daemon:
        device = as_loop(stack, tmp_path / "disk")
        daemon.json("volume", "create", "v", "--backend", f"file:{device}")
        refused(daemon.cli("volume", "snapshot", "v", "s", "--copy"), 1, "is a block device", "LVM")
        daemon.ok("volume", "delete", "v")
        daemon.stop()
