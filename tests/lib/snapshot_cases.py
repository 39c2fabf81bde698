"""What holds for snapshots and clones, whatever keeps them: a place has `url(name)` and the words `copy` that its
commands need. That of plain images has `export(name)`, too, which reads one without HDCS."""

import random
import threading

from clone_cases import CONFIG as SHARING
from clone_cases import SIZE, boot, image
from daemon import DIRTY, Daemon, refused
from object_stores import BLOCK, EAGER, THREAD_SECONDS, Model, Worker, counters
from programs import MIB

# Enough for some hundred volumes over objects; it is not used up.
SMALL = {"log_size_mib": 16, "memory_max_mib": 8192, "volumes_memory_mib": 6144}
# What the volume has that is snapshotted while its daemon is killed.
KILLED_BLOCKS = 64


def snapshots(daemon, name="v"):
    return daemon.json("volume", "snapshot", name, "--list")["snapshots"]


def check(daemon, name, model):
    client = daemon.nbd(name)
    model.check(client)
    client.shutdown()


def copy_of(model, seed):
    copied = Model(seed, len(model.image))
    copied.image[:] = model.image
    return copied


class Journal(Worker):
    """Writes its number of the write into one random block after another, on one connection and one at a
    time: so a volume that holds a prefix of this can be told from one that does not."""

    def __init__(self, daemon, name, blocks, seed):
        super().__init__(daemon, name)
        self.rng = random.Random(seed)
        self.blocks = blocks
        self.written = []

    def round(self):
        block = self.rng.randrange(self.blocks)
        number = len(self.written) + 1
        self.client.pwrite(number.to_bytes(8, "little") * (BLOCK // 8), block * BLOCK)
        self.written.append(block)
        if number % 100 == 0:
            self.client.flush()

    def check_prefix(self, client, least):
        """What the client reads is all that was written up to some write, which is not before `least`."""
        found = [int.from_bytes(client.pread(BLOCK, block * BLOCK)[:8], "little") for block in range(self.blocks)]
        upto = max(found)
        assert upto >= least, f"write {least} was acknowledged before, {upto} is the last one there"
        expected = [0] * self.blocks
        for number, block in enumerate(self.written[:upto], 1):
            expected[block] = number
        assert found == expected


def snapshot(daemon, place, name, snap):
    return daemon.json("volume", "snapshot", name, snap, *place.copy)


def clone(daemon, place, source, name, where):
    return daemon.json("volume", "clone", source, name, "--backend", place.url(where), *place.copy)


def go_apart(daemon, place, *options):
    """Make a dirty volume `v`, a snapshot `monday` of it and a clone `c` of that, each of which goes its own way;
    what was made, and models of the snapshot, the volume and the clone."""
    size = 24 * MIB
    before = Model(1, size)
    daemon.create("v", "--backend", place.url("first"), *DIRTY, *options, size="24M")
    client = daemon.nbd("v")
    before.write(client, 150)
    assert counters(daemon)["dirty_bytes"] > 0
    made = snapshot(daemon, place, "v", "monday")
    assert made["name"] == "monday" and made["made_ms"] > 1_700_000_000_000
    after = copy_of(before, 2)
    after.write(client, 100)
    volume = clone(daemon, place, "v@monday", "c", "first-clone")
    assert volume["bytes"] == size
    check(daemon, "c", before)
    apart = copy_of(before, 3)
    other = daemon.nbd("c")
    apart.write(other, 100)
    daemon.ok("volume", "flush", "c")
    after.check(client)
    other.shutdown()
    client.shutdown()
    return made, before, after, apart


def holds_what_was_acknowledged(place, tmp_path, *options):
    """A snapshot holds what was acknowledged before it, a clone begins with it, and each goes its own way."""
    with Daemon(tmp_path, SMALL) as daemon:
        made, before, after, apart = go_apart(daemon, place, *options)
        (kept,) = snapshots(daemon)
        assert kept["name"] == "monday" and abs(kept["made_ms"] - made["made_ms"]) < 60_000
        assert "monday" in daemon.ok("volume", "snapshot", "v", "--list")
        # The image of a snapshot, while the volume goes on.
        daemon.ok("volume", "export", "v@monday", tmp_path / "monday.raw")
        assert (tmp_path / "monday.raw").read_bytes() == bytes(before.image)
        assert {volume["name"] for volume in daemon.json("volume", "list")} == {"v", "c"}
        # One without a snapshot begins with what is there now, and leaves none behind.
        clone(daemon, place, "v", "now", "first-now")
        check(daemon, "now", after)
        assert [one["name"] for one in snapshots(daemon)] == ["monday"]
        # A clone of a clone.
        snapshot(daemon, place, "c", "own")
        clone(daemon, place, "c@own", "cc", "first-clone-clone")
        apart.write(daemon.nbd("c"), 20)
        daemon.stop()
    models = [("v", "first", after), ("c", "first-clone", apart), ("now", "first-now", after)]
    with Daemon(tmp_path, SMALL) as daemon:
        for name, _, model in models:
            daemon.ok("volume", "flush", name)
            daemon.ok("volume", "evict", name)
            check(daemon, name, model)
        daemon.stop()
    for _, where, model in models:
        assert place.export(where) == bytes(model.image), where
    assert place.export_snapshot("first", "monday") == bytes(before.image)


def under_load_is_a_prefix(place, tmp_path, *options, where="load"):
    blocks = 512
    with Daemon(tmp_path, {**EAGER, **SMALL}) as daemon:
        daemon.create("v", "--backend", place.url(where), *options, size="16M")
        journal = Journal(daemon, "v", blocks, 5)
        journal.start()
        least = []
        for number in range(5):
            daemon.until(lambda: journal.failure or len(journal.written) > 300 * (number + 1))
            least.append(len(journal.written))
            daemon.ok("volume", "snapshot", "v", f"s{number}", *place.copy)
        journal.end()
        for number in range(5):
            clone(daemon, place, f"v@s{number}", f"c{number}", f"{where}-{number}")
            client = daemon.nbd(f"c{number}")
            journal.check_prefix(client, least[number])
            client.shutdown()
        daemon.stop()


def content_of(number):
    """What a volume has when the snapshot of that number is made of it."""
    return number.to_bytes(8, "little") * (BLOCK // 8 * KILLED_BLOCKS)


def taken_under_kills(daemon, place, where, then, *options):
    """Make a volume `v` and snapshots `s1`, `s2` and so on of it, whose blocks all say which one it is, and kill the
    daemon meanwhile, four times; the numbers of those that were made for certain. `then` follows each of them."""
    rng = random.Random(11)
    sure, number = set(), 0
    daemon.create("v", "--backend", place.url(where), "--persist", "on-write", *options, size="16M")
    for _ in range(4):
        enough = threading.Event()
        seen = []

        def work():
            nonlocal number
            while not enough.is_set():
                number += 1
                try:
                    client = daemon.nbd("v")
                    client.pwrite(content_of(number), 0)
                    client.shutdown()
                except Exception:  # noqa: BLE001 - the daemon was killed
                    return
                if daemon.cli("volume", "snapshot", "v", f"s{number}", *place.copy).returncode != 0:
                    return
                seen.append(number)
                then(number)

        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        daemon.until(lambda: len(seen) >= 2)
        enough.wait(rng.random() / 3)
        daemon.kill()
        enough.set()
        worker.join(THREAD_SECONDS)
        assert not worker.is_alive()
        sure.update(seen)
        daemon.start()
        daemon.until(lambda: all(v["phase"] == "open" for v in daemon.json("volume", "list")))
    return sure


def survives_kills(place, tmp_path, *options):
    """Whatever the daemon was killed in, the snapshots and clones that are there hold what they are of."""
    with Daemon(tmp_path, {**EAGER, **SMALL}) as daemon:
        def clone_it(number):
            url = place.url(f"killed-{number}")
            daemon.cli("volume", "clone", f"v@s{number}", f"k{number}", "--backend", url, *place.copy)

        sure = taken_under_kills(daemon, place, "killed", clone_it, *options)
        there = [int(one["name"][1:]) for one in snapshots(daemon)]
        assert sure <= set(there) and len(there) == len(set(there))
        for one in there:
            assert place.export_snapshot("killed", f"s{one}").startswith(content_of(one)), f"snapshot {one}"
        for volume in daemon.json("volume", "list"):
            if volume["name"] != "v":
                data = daemon.read(volume["name"], KILLED_BLOCKS * BLOCK)
                assert data == content_of(int(volume["name"][1:])), volume["name"]
        assert place.leftovers("killed") == []
        # What a clone that did not end has left is in the way, and says so, or is gone.
        for one in there[-3:]:
            clone(daemon, place, f"v@s{one}", f"a{one}", f"again-{one}")
            assert daemon.read(f"a{one}", KILLED_BLOCKS * BLOCK) == content_of(one)
        daemon.stop()


def second_boot_reads_the_cache(place, tmp_path):
    """Of two clones of one image the second one finds what the first one has read; the cache holds it once."""
    tree, data = image(tmp_path)
    rng = random.Random(4)
    with Daemon(tmp_path, SHARING) as daemon:
        daemon.create("v", "--backend", place.url("boot"), size=str(SIZE))
        client = daemon.nbd("v")
        for offset in range(0, SIZE, BLOCK):
            if any(data[offset : offset + BLOCK]):
                client.pwrite(data[offset : offset + BLOCK], offset)
        client.shutdown()
        snapshot(daemon, place, "v", "golden")
        for name in ["a", "b", "c"]:
            clone(daemon, place, "v@golden", name, f"boot-{name}")
            assert counters(daemon, name)["inherited_bytes"] == SIZE
        boot(daemon, "a", tree, tmp_path)
        assert counters(daemon, "a")["miss_blocks"] > 0
        lines = daemon.cache()["filled_lines"]
        boot(daemon, "b", tree, tmp_path)
        assert counters(daemon, "b")["miss_blocks"] == 0
        assert daemon.cache()["filled_lines"] == lines, "nothing was cached again"
        # What they write is their own, also after a restart, which knows what they still share.
        models = {name: Model(ord(name), SIZE) for name in "abc"}
        for name, model in models.items():
            model.image[:] = data
        for turn in range(2):
            for name in "ab":
                client = daemon.nbd(name)
                for _ in range(20):
                    # The upper half stays shared, however large the pieces are that a backend knows.
                    data_there, at = rng.randbytes(rng.choice([512, BLOCK, 65536])), rng.randrange(SIZE // 1024) * 512
                    at = min(at, SIZE // 2 - len(data_there))
                    client.pwrite(data_there, at)
                    models[name].image[at : at + len(data_there)] = data_there
                client.trim(64 * BLOCK, 8 * MIB)
                models[name].image[8 * MIB : 8 * MIB + 64 * BLOCK] = bytes(64 * BLOCK)
                client.flush()
                client.shutdown()
            for name, model in models.items():
                check(daemon, name, model)
            if turn:
                daemon.ok("volume", "flush", "a")
            daemon.kill()
            daemon.start()
            daemon.until(lambda: all(v["phase"] == "open" for v in daemon.json("volume", "list")))
        for name, model in models.items():
            check(daemon, name, model)
        assert 0 < counters(daemon, "a")["inherited_bytes"] < SIZE
        assert counters(daemon, "c")["inherited_bytes"] == SIZE
        daemon.online()
        assert daemon.read_all("c", SIZE) == data
        before = counters(daemon, "c")["miss_blocks"]
        assert daemon.read_all("c", SIZE) == data
        assert counters(daemon, "c")["miss_blocks"] == before
        daemon.stop()


def are_refused(place, tmp_path, elsewhere):
    with Daemon(tmp_path, SMALL) as daemon:
        daemon.create("v", "--backend", place.url("refused"), size="16M")
        snapshot(daemon, place, "v", "s")
        refused(daemon.cli("volume", "snapshot", "v", "s", *place.copy), 1, "there is a snapshot s", "--delete")
        refused(daemon.cli("volume", "snapshot", "v", "a/b", *place.copy), 2, "snapshot name")
        refused(daemon.cli("volume", "snapshot", "v", "t", "--delete"), 1, "no snapshot t", "--list")

        def made(source, url, name="c"):
            return daemon.cli("volume", "clone", source, name, "--backend", url, *place.copy)

        refused(made("v@t", place.url("new")), 1, "no snapshot t")
        refused(made("v@s", place.url("refused")), 2, "is the backend of volume v")
        refused(made("v@s", elsewhere), 2, "name a place in the same store")
        refused(made("v@s", place.url("new"), "v"), 1, "it exists already")
        # Something is there already, and stays as it is.
        daemon.create("o", "--backend", place.url("other"), size="16M")
        daemon.write("o", b"x" * MIB)
        daemon.ok("volume", "delete", "o")
        refused(made("v@s", place.url("other")), 2, "there is", "already: name a place where nothing is")
        assert place.export("other")[:MIB] == b"x" * MIB
        assert place.absent("new")
        # A policy that reads only, or writes past the log, is no hindrance.
        for policy in ["write-through", "read-only"]:
            daemon.ok("volume", "set", "v", f"policy={policy}")
            snapshot(daemon, place, "v", policy)
        assert [one["name"] for one in snapshots(daemon)] == ["s", "write-through", "read-only"]
        # A snapshot that a volume is over stays.
        over = daemon.json("volume", "create", "ro", "--backend", place.snapshot_url("refused", "s"))
        assert over["read_only"]
        refused(daemon.cli("volume", "snapshot", "ro", "x", *place.copy), 2, "it is a snapshot itself")
        refused(daemon.cli("volume", "snapshot", "v", "s", "--delete"), 1, "the backend of volume ro")
        daemon.ok("volume", "delete", "ro")
        for one in ["s", "write-through", "read-only"]:
            daemon.ok("volume", "snapshot", "v", one, "--delete")
        assert snapshots(daemon) == []
        # An encrypted volume's image is plain, and so are its snapshots.
        key = tmp_path / "key"
        key.write_bytes(bytes(range(32)))
        key.chmod(0o600)
        daemon.create("e", "--backend", place.url("cipher"), "--encrypt", "--key-file", key, size="16M")
        daemon.write("e", b"y" * MIB)
        snapshot(daemon, place, "e", "s")
        assert clone(daemon, place, "e@s", "ec", "cipher-clone")["encryption"]
        assert daemon.read("ec", MIB) == b"y" * MIB
        daemon.stop()
