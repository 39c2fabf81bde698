"""Write logs share the space of a small file system: each has its full size, what it uses goes where it is written, and
comes back from those that are quiet."""

import random
import subprocess
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path

from daemon import Daemon, hdcs
from disks import attach, blank, needs_root
from filesystems import mounted
from programs import MIB, run

SYSTEM = 192 * MIB
LEAST = 16 * MIB
VOLUME = 256 * MIB


@contextmanager
def small_ext4(tmp_path, size=SYSTEM):
    with ExitStack() as stack:
        device = attach(blank(tmp_path / "small.img", size))
        stack.callback(run, "losetup", "--detach", device)
        run("mkfs.ext4", "-q", "-m", "0", device)
        yield mounted(stack, device, tmp_path / "small")


@contextmanager
def node(tmp_path, small):
    """A daemon whose logs lie on the small file system, over images that fail while a file is there."""
    daemon = Daemon(tmp_path, {"log_path": str(small), "memory_max_mib": 1024})
    # Nobody says how large logs are.
    daemon.config.pop("log_size_mib", None)
    with daemon:
        yield daemon


def create(daemon, tmp_path, name):
    url = f"file:{tmp_path}/{name}.image?error_file={tmp_path}/{name}.fails&error_kind=eio"
    daemon.create(name, "--backend", url, "--persist", "on-write", size="256M")


def log_bytes(daemon, name):
    """Size of a log, what is prepared of it, and what is in use, in bytes."""
    counters = daemon.volume(name)["counters"]
    return counters["log_ring_bytes"], counters["log_prepared_bytes"], counters["log_used_bytes"]


def taken(daemon, name):
    """What the file of a log takes up."""
    return file_of(daemon, name).stat().st_blocks * 512


def file_of(daemon, name):
    (path,) = Path(daemon.config["log_path"]).glob(f"{name}-*.log")
    return path


class Writer:
    """Writes random data to a volume, and knows it."""

    def __init__(self, daemon, name):
        self.daemon, self.name, self.rng, self.model = daemon, name, random.Random(name), {}

    def write(self, mib):
        client = self.daemon.nbd(self.name)
        for _ in range(mib):
            offset = self.rng.randrange(VOLUME // MIB) * MIB
            self.model[offset] = self.rng.randbytes(MIB)
            client.pwrite(self.model[offset], offset)
        client.shutdown()

    def check(self):
        client = self.daemon.nbd(self.name)
        for offset, data in self.model.items():
            assert client.pread(MIB, offset) == data, (self.name, offset)
        client.shutdown()


@needs_root
def test_log_space_goes_where_it_is_used_and_comes_back(tmp_path):
    with small_ext4(tmp_path) as small, node(tmp_path, small) as daemon:
        names = ["a", "b", "c"]
        for name in names:
            create(daemon, tmp_path, name)
        sizes = [log_bytes(daemon, name) for name in names]
        assert sum(size for size, _, _ in sizes) > SYSTEM, sizes
        for name, (_, prepared, used) in zip(names, sizes):
            assert LEAST * 15 // 16 <= prepared <= LEAST and used == 0
            assert LEAST <= taken(daemon, name) < LEAST + 2 * MIB
        writers = {name: Writer(daemon, name) for name in names}

        # One fills up while its backend fails: it is given what there is, piece by piece.
        (tmp_path / "a.fails").touch()
        writers["a"].write(10)
        daemon.until(lambda: log_bytes(daemon, "a")[1] > 40 * MIB)
        writers["a"].write(40)
        daemon.until(lambda: taken(daemon, "a") > 90 * MIB)
        prepared = log_bytes(daemon, "a")[1]
        assert "up to" in daemon.ok("volume", "show", "a")

        # What it has is found again after a crash, and so is what it holds.
        daemon.kill()
        checked = hdcs("inspect", file_of(daemon, "a")).stdout
        assert f" {prepared // 4096} prepared," in checked and "PROBLEM" not in checked, checked
        daemon.start()
        daemon.until(lambda: daemon.volume("a")["phase"] == "open")
        assert log_bytes(daemon, "a")[1] >= prepared
        writers["a"].check()

        # Another one finds no space, and goes on in what it has until the first one has been quiet.
        (tmp_path / "a.fails").unlink()
        daemon.ok("volume", "flush", "a")
        (tmp_path / "b.fails").touch()
        writers["b"].write(9)
        daemon.until(lambda: taken(daemon, "a") < LEAST + 2 * MIB)
        daemon.until(lambda: log_bytes(daemon, "b")[1] > 40 * MIB)
        writers["b"].write(30)
        assert log_bytes(daemon, "a")[1] <= LEAST
        daemon.kill()
        daemon.start()
        daemon.until(lambda: all(daemon.volume(name)["phase"] == "open" for name in names))

        # Somebody else takes all that is left.
        filler = small / "filler"
        subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=1M"], capture_output=True)
        (tmp_path / "b.fails").unlink()
        for name in names:
            writers[name].write(25)
        daemon.ok("volume", "flush", "b")
        for name in names:
            writers[name].check()
        # Quiet logs make room: what was taken of a full file system shows as free again.
        daemon.until(lambda: all(taken(daemon, name) < LEAST + 2 * MIB for name in names))
        daemon.kill()
        daemon.start()
        daemon.until(lambda: all(daemon.volume(name)["phase"] == "open" for name in names))
        for name in names:
            writers[name].check()
            daemon.ok("volume", "flush", name)
            image = (tmp_path / f"{name}.image").read_bytes()
            for offset, data in writers[name].model.items():
                assert image[offset : offset + MIB] == data, (name, offset)
        daemon.stop()


@needs_root
def test_log_of_a_given_size_keeps_its_space(tmp_path):
    with small_ext4(tmp_path) as small, node(tmp_path, small) as daemon:
        daemon.create("v", "--log-size", "64M", size="64M")
        size, prepared, _ = log_bytes(daemon, "v")
        assert size == prepared and taken(daemon, "v") >= 64 * MIB
        assert "up to" not in daemon.ok("volume", "show", "v")
        daemon.stop()


@needs_root
def test_burst_to_many_volumes_leaves_their_backends_the_space_that_it_needs(tmp_path):
    """Everything is on one file system: what logs take, their sparse backends need there once more."""
    with small_ext4(tmp_path, 1024 * MIB) as small:
        memory = {"memory_max_mib": 1024, "volumes_memory_mib": 400, "cache_total_size_mib": 16}
        daemon = Daemon(tmp_path, memory, data=small / "data")
        daemon.config.pop("log_size_mib", None)
        with daemon:
            names = [f"v{number}" for number in range(16)]
            written = dict.fromkeys(names, 0)
            for name in names:
                daemon.create(name, "--persist", "on-write", size="64M")

            def write(name):
                rng, client = random.Random(name), daemon.nbd(name)
                for number in range(40):
                    client.pwrite(rng.randbytes(MIB), number * MIB)
                    written[name] += 1

            for name in names:
                threading.Thread(target=write, args=[name], daemon=True).start()
            # Together with the least that each log keeps this is nearly all that there is.
            daemon.until(lambda: all(count == 40 for count in written.values()))
            for name in names:
                daemon.ok("volume", "flush", name)
            for name in names:
                rng, client = random.Random(name), daemon.nbd(name)
                for number in range(40):
                    assert client.pread(MIB, number * MIB) == rng.randbytes(MIB), (name, number)
                client.shutdown()
            daemon.stop()
