"""An image whose file is removed, replaced, cut or made longer by somebody else: nothing acknowledged goes where nobody
finds it, nothing that is missing passes for zeroes, and what is somebody else's stays."""

import fcntl
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import nbd
import pytest

from daemon import DIRTY, Daemon, refused
from disks import needs_root, small_file_system, state
from mirror_fuse import mirror
from programs import MIB, run

BLOCK = 4096
SIZE = 16 * MIB


@contextmanager
def volume_over(tmp_path, image, *options, size="16M"):
    """A daemon with a volume that was flushed, and has nothing of it in memory."""
    home = tmp_path / "home"
    home.mkdir()
    with Daemon(home) as daemon:
        daemon.create("v", "--backend", f"file:{image}", *options, size=size)
        daemon.write("v", b"D" * MIB, 8 * MIB)
        daemon.ok("volume", "flush", "v")
        daemon.ok("volume", "evict", "v")
        yield daemon


def dirty(daemon):
    return daemon.volume("v")["counters"]["dirty_bytes"]


def flush(daemon):
    """Begin to write everything dirty to the backend, and wait until that is done or cannot be."""
    assert daemon.api("POST", "/v1/volumes/v/flush")[0] == 200
    daemon.until(lambda: state(daemon) == "degraded" or dirty(daemon) == 0)


def is_open_to_write(process, path):
    """Whether a process has a file open, and not only to look at it."""
    for number in Path(f"/proc/{process.pid}/fd").iterdir():
        try:
            flags = int((Path(f"/proc/{process.pid}/fdinfo") / number.name).read_text().split()[3], 8)
            if number.samefile(path) and flags & os.O_ACCMODE == os.O_RDWR:
                return True
        except OSError:
            # It was closed meanwhile.
            pass
    return False


@pytest.mark.parametrize("then", ["replaced", "removed"])
def test_image_that_changes_while_its_lock_is_waited_for_is_opened_anew(tmp_path, then):
    image, other = tmp_path / "image", tmp_path / "other"
    image.write_bytes(bytes(SIZE))
    other.write_bytes(b"o" * SIZE)
    with Daemon(tmp_path) as daemon, open(image, "r+b") as held:
        fcntl.lockf(held, fcntl.LOCK_EX)
        made = []

        def create():
            made.append(daemon.cli("volume", "create", "v", "--size", "16M", "--backend", f"file:{image}"))

        creation = threading.Thread(target=create)
        creation.start()
        daemon.until(lambda: is_open_to_write(daemon.process, image))
        if then == "replaced":
            other.rename(image)
        else:
            image.unlink()
        held.close()
        creation.join()
        assert made[0].returncode == 0, made[0].stderr
        data = os.urandom(MIB)
        daemon.write("v", data)
        daemon.ok("volume", "flush", "v")
        assert image.read_bytes() == data + (b"o" if then == "replaced" else b"\0") * (SIZE - MIB)


def test_first_flush_of_an_image_looks_for_it(tmp_path):
    image = tmp_path / "image"
    with Daemon(tmp_path) as daemon:
        daemon.create("v", "--backend", f"file:{image}", *DIRTY)
        image.rename(tmp_path / "away")
        image.write_bytes(bytes(SIZE))
        daemon.write("v", b"w" * BLOCK)
        flush(daemon)
        assert dirty(daemon) > 0
        daemon.tells("the image was removed or replaced while its volume is open")
        assert "the image was removed or replaced" in daemon.volume("v")["reason"]
        (tmp_path / "away").rename(image)
        daemon.until(lambda: state(daemon) == "healthy")
        daemon.ok("volume", "flush", "v")
        assert image.read_bytes()[:BLOCK] == b"w" * BLOCK


@pytest.mark.parametrize("then", ["removed", "replaced"])
def test_deletion_of_a_volume_whose_image_has_just_left_its_place_keeps_its_dirty_data(tmp_path, then):
    image, away = tmp_path / "image", tmp_path / "away"
    with volume_over(tmp_path, image, *DIRTY) as daemon:
        daemon.write("v", b"w" * MIB)
        image.rename(away)
        if then == "replaced":
            image.write_bytes(bytes(SIZE))
        with ThreadPoolExecutor() as threads:
            deletion = threads.submit(daemon.cli, "volume", "delete", "v")
            daemon.until(lambda: state(daemon) == "degraded")
            assert dirty(daemon) >= MIB and not deletion.done()
            away.rename(image)
            assert deletion.result().returncode == 0
    assert image.read_bytes()[:MIB] == b"w" * MIB


@pytest.mark.parametrize("then", ["removed", "removed with its directory", "cut"])
def test_deletion_says_that_the_image_is_not_there_or_not_whole(tmp_path, then):
    directory = tmp_path / "images"
    directory.mkdir()
    image = directory / "image"
    with volume_over(tmp_path, image) as daemon:
        if then != "cut":
            image.unlink()
        else:
            os.truncate(image, MIB)
        if then == "removed with its directory":
            directory.rmdir()
        told = daemon.ok("volume", "delete", "v")
    if then == "removed":
        assert f"nothing is at file:{image} any more" in told and "is kept" not in told
    elif then == "removed with its directory":
        assert "its directory does not exist" in told
    else:
        assert f"of its {SIZE} bytes only {MIB} are there" in told


def test_file_that_takes_the_place_of_an_image_during_its_deletion_stays(tmp_path):
    image, other = tmp_path / "image", b"somebody else's" * 512
    with volume_over(tmp_path, f"{image}?delay_us=200000", *DIRTY) as daemon:
        # The flushes of the next second do not look again.
        daemon.write("v", b"w" * BLOCK)
        daemon.ok("volume", "flush", "v")
        daemon.write("v", b"x" * BLOCK)
        answers = []
        deletion = threading.Thread(
            target=lambda: answers.append(daemon.api("DELETE", "/v1/volumes/v?remove_data=true"))
        )
        deletion.start()
        time.sleep(0.15)
        image.rename(tmp_path / "away")
        image.write_bytes(other)
        deletion.join()
        assert image.read_bytes() == other, answers
        daemon.stop()


def test_pipe_in_the_place_of_an_image_is_refused_at_once(tmp_path):
    image = tmp_path / "image"
    with volume_over(tmp_path, image) as daemon:
        image.rename(tmp_path / "away")
        os.mkfifo(image)
        status, answer = daemon.api("DELETE", "/v1/volumes/v?remove_data=true&discard_dirty=true")
        assert status == 409 and "not the image that it has open" in answer, (status, answer)
        # Nobody waits for a writer.
        with pytest.raises(OSError, match="No such device or address"):
            os.open(image, os.O_WRONLY | os.O_NONBLOCK)
        daemon.stop()


@pytest.mark.parametrize("trouble", ["fails", "hangs"])
def test_image_whose_beginning_cannot_be_read_is_not_taken_for_the_bytes_of_a_volume(tmp_path, trouble):
    # A thread that waits for the mirror ends with it, before the daemon has to.
    with Daemon(tmp_path) as daemon, mirror(tmp_path) as (mounted, behind):
        image = behind / "image"
        run("qemu-img", "create", "-q", "-f", "qcow2", image, "16M")
        os.truncate(image, SIZE)
        before = image.read_bytes()
        (behind / trouble).touch()
        url = f"file:{mounted / 'image'}"
        asked = ("volume", "create", "v", "--backend", url)
        refused(daemon.cli(*asked), 1, "its beginning cannot be read", f"say {url}?raw=on")
        assert image.read_bytes() == before
        (behind / trouble).unlink()
        refused(daemon.cli(*asked), 2, "a qcow2 image")
        daemon.ok("volume", "create", "v", "--backend", f"{url}?raw=on")
        daemon.ok("volume", "create", "new", "--size", "16M", "--backend", f"file:{tmp_path}/new")


def test_resize_of_an_image_that_is_slow_to_be_seen_cuts_nothing_off(tmp_path):
    with Daemon(tmp_path) as daemon, mirror(tmp_path) as (mounted, behind):
        image = behind / "image"
        image.write_bytes(bytes(SIZE))
        daemon.ok("volume", "create", "v", "--backend", f"file:{mounted / 'image'}")
        beyond = os.urandom(MIB)
        with open(mounted / "image", "ab") as file:
            file.write(beyond)
        (behind / "slow").touch()
        refused(daemon.cli("volume", "resize", "v", "--size", "32M"), 1, "does not answer", "--shrink")
        (behind / "slow").unlink()
        assert image.read_bytes() == bytes(SIZE) + beyond


def test_requests_about_images_that_hang_leave_the_node_its_threads(tmp_path):
    # A thread that waits for the mirror ends with it, before the daemon has to.
    with Daemon(tmp_path) as daemon, mirror(tmp_path) as (mounted, behind):
        (behind / "image").write_bytes(bytes(SIZE))
        (behind / "hangs").touch()

        def threads():
            return len(list(Path(f"/proc/{daemon.process.pid}/task").iterdir()))

        before = threads()

        def create(number):
            volume = {"name": f"v{number}", "backend": f"file:{mounted}/image"}
            return daemon.api("POST", "/v1/volumes", json.dumps(volume))

        with ThreadPoolExecutor(60) as pool:
            answers = list(pool.map(create, range(60)))
        for status, answer in answers:
            assert status != 200 and "not answer" in answer, answer
        assert threads() < before + 30
        daemon.create("healthy")


@needs_root
def test_image_whose_path_does_not_answer_keeps_nobody_else_waiting(tmp_path):
    # The image itself lies on a file system of this host.
    (tmp_path / "disk").mkdir()
    with Daemon(tmp_path) as daemon, mirror(tmp_path) as (mounted, behind):
        (behind / "disk").mkdir()
        run("mount", "--bind", tmp_path / "disk", mounted / "disk")
        try:
            daemon.create("v", "--backend", f"file:{mounted}/disk/image", *DIRTY)
            daemon.create("w")
            daemon.write("v", b"v" * BLOCK)
            (behind / "waits").touch()
            assert daemon.api("POST", "/v1/volumes/v/flush")[0] == 200
            with ThreadPoolExecutor() as threads:
                other = threads.submit(lambda: [daemon.write("w", bytes(BLOCK)) or time.sleep(0.05) for _ in range(40)])
                try:
                    other.result(timeout=60)
                    assert dirty(daemon) > 0
                finally:
                    (behind / "waits").unlink()
            daemon.until(lambda: dirty(daemon) == 0)
            daemon.ok("volume", "delete", "v")
        finally:
            run("umount", "-l", mounted / "disk")


def test_cut_image_on_fuse_is_not_made_whole_with_zeroes(tmp_path):
    with mirror(tmp_path) as (mounted, behind):
        image = mounted / "image"
        (behind / "image").write_bytes(bytes(SIZE))
        with volume_over(tmp_path, image) as daemon:
            daemon.write("v", b"E" * BLOCK, SIZE - BLOCK)
            daemon.ok("volume", "flush", "v")
            assert image.read_bytes()[-BLOCK:] == b"E" * BLOCK
            os.truncate(image, 4 * MIB)
            daemon.write("v", b"F" * BLOCK, SIZE - BLOCK)
            flush(daemon)
            assert image.stat().st_size == 4 * MIB
            assert state(daemon) == "degraded" and dirty(daemon) > 0
            daemon.tells("the image was cut while its volume is open")
            daemon.kill()


@needs_root
def test_image_that_is_cut_while_it_is_zeroed_is_not_made_whole(tmp_path):
    # Zeroes are written here in many pieces, since this file system does not zero in place.
    with small_file_system(tmp_path / "small", "1g") as small:
        image, size = small / "image", 768 * MIB
        with volume_over(tmp_path, image, size="768M") as daemon:
            client = daemon.nbd("v")
            client.zero(size - 16 * MIB, 16 * MIB, nbd.CMD_FLAG_NO_HOLE)
            client.shutdown()
            assert daemon.api("POST", "/v1/volumes/v/flush")[0] == 200
            while image.stat().st_blocks * 512 < 64 * MIB:
                time.sleep(0.001)
            os.truncate(image, 4 * MIB)
            daemon.until(lambda: state(daemon) == "degraded" or dirty(daemon) == 0)
            assert image.stat().st_size < size
            daemon.tells("the image was cut while its volume is open")
            daemon.kill()


@pytest.mark.parametrize("what", ["cut", "moved"])
def test_snapshot_of_an_image_that_is_not_there_whole_is_not_made(tmp_path, what):
    image = tmp_path / "image"
    with volume_over(tmp_path, image) as daemon:
        asked = ("volume", "snapshot", "v", "s", "--copy")
        if what == "cut":
            os.truncate(image, 4 * MIB)
        else:
            image.rename(tmp_path / "away")
            image.write_bytes(bytes(SIZE))
        assert daemon.cli(*asked).returncode == 1
        assert daemon.json("volume", "snapshot", "v", "--list")["snapshots"] == []
        if what == "cut":
            daemon.tells("the image was cut while its volume is open")
            daemon.kill()
        else:
            daemon.tells("the image was removed or replaced while its volume is open")
            (tmp_path / "away").rename(image)
            daemon.ok(*asked)
            assert (tmp_path / "image.hdcs-snap" / "s").read_bytes() == image.read_bytes()
            daemon.stop()


def test_moved_image_keeps_its_size(tmp_path):
    image, away = tmp_path / "image", tmp_path / "away"
    with volume_over(tmp_path, image) as daemon:
        image.rename(away)
        image.write_bytes(bytes(SIZE))
        for size in ("32M", "12M"):
            refused(daemon.cli("volume", "resize", "v", "--size", size, "--shrink"), 1, "cannot be resized")
        assert [path.stat().st_size for path in (image, away)] == [SIZE, SIZE]
        away.rename(image)
        daemon.ok("volume", "resize", "v", "--size", "32M")
        assert image.stat().st_size == 32 * MIB
        daemon.stop()


def test_cut_image_does_not_grow_after_a_shrink_that_failed(tmp_path):
    image = tmp_path / "image"
    with volume_over(tmp_path, image) as daemon:
        os.truncate(image, 12 * MIB)
        for size in ("8M", "16M"):
            refused(daemon.cli("volume", "resize", "v", "--size", size, "--shrink"), 1, "cannot be resized")
        assert image.stat().st_size == 12 * MIB
        daemon.kill()


def test_growth_cuts_nothing_off_that_lies_beyond_the_end(tmp_path):
    image, more = tmp_path / "image", os.urandom(MIB)
    with volume_over(tmp_path, image) as daemon:
        with open(image, "ab") as file:
            file.write(more)
        asked = ("volume", "resize", "v", "--size", "64M")
        refused(daemon.cli(*asked), 1, "data beyond the 16777216 bytes", "--shrink")
        assert image.read_bytes()[SIZE:] == more
        daemon.ok(*asked, "--shrink")
        assert daemon.read("v", MIB, SIZE) == bytes(MIB)
        # What is longer and holds nothing loses nothing.
        os.truncate(image, 96 * MIB)
        daemon.ok("volume", "resize", "v", "--size", "80M")
        assert image.stat().st_size == 80 * MIB
        assert daemon.read("v", MIB, 8 * MIB) == b"D" * MIB
        daemon.stop()


def test_snapshot_is_not_removed_with_a_volume_over_it(tmp_path):
    image = tmp_path / "image"
    with volume_over(tmp_path, image) as daemon:
        daemon.ok("volume", "snapshot", "v", "s", "--copy")
        snapshot = tmp_path / "image.hdcs-snap" / "s"
        daemon.ok("volume", "create", "over", "--backend", f"file:{snapshot}")
        status, answer = daemon.api("DELETE", "/v1/volumes/over?remove_data=true")
        assert status == 409 and "is a snapshot, which is not removed" in answer, (status, answer)
        assert "put that back" not in answer
        daemon.ok("volume", "delete", "over")
        assert snapshot.exists()
        daemon.stop()


@pytest.mark.parametrize("must_be_new", [False, True])
def test_creation_that_was_killed_leaves_a_file_alone_that_came_to_its_place(tmp_path, must_be_new):
    image, command, go = tmp_path / "image", tmp_path / "command", tmp_path / "go"
    with Daemon(tmp_path) as daemon:
        made = daemon.data / "volumes/v"
        # The volume is made, and waits for its key before its image is.
        command.write_text(f"#!/bin/sh\nwhile [ -e {made} ] && [ ! -e {go} ]; do sleep 0.05; done\nprintf %064d 7\n")
        command.chmod(0o700)
        asked = {"name": "v", "bytes": SIZE, "backend": f"file:{image}", "must_be_new": must_be_new}
        asked["encryption"] = {"key_command": str(command)}

        def create():
            with suppress(Exception):
                daemon.api("POST", "/v1/volumes", json.dumps(asked))

        creating = threading.Thread(target=create)
        creating.start()
        daemon.until(made.exists)
        daemon.kill()
        creating.join()
        assert not image.exists()
        go.touch()
        run("qemu-img", "create", "-q", "-f", "qcow2", image, "64M")
        os.truncate(image, SIZE)
        before = image.read_bytes()
        daemon.start()
        daemon.until(lambda: daemon.volume("v")["phase"] != "opening")
        reason = daemon.volume("v")["reason"] or ""
        assert "is there already, and is left as it was" in reason, reason
        daemon.api("DELETE", "/v1/volumes/v?remove_data=true")
        assert image.read_bytes() == before
        daemon.stop()
