"""A store that lies: whatever an S3 answers, the daemon lives, takes no more of it than it asked for, and serves what is
right once the store tells the truth again."""

import os
import random
import threading
import time

import pytest

from daemon import COMMAND_SECONDS, DIRTY, Daemon, hdcs
from lying_s3 import LIES, LyingS3
from programs import MIB

SIZE = 8 * MIB
BLOCK = 4096
# What is taken of one answer at most: what was asked for, and what the kernel's buffers hold.
TAKEN_MAX = 48 * MIB
# Everything goes to the store at once, and nothing is read from elsewhere.
CONFIG = {"destage_age_max_ms": 10, "dirty_ratio_min": 0, "cache_total_size_mib": 0}


@pytest.fixture
def s3():
    with LyingS3() as server:
        yield server


@pytest.fixture
def credentials(tmp_path):
    path = tmp_path / "credentials"
    path.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def daemon(tmp_path, s3, credentials):
    with Daemon(tmp_path, CONFIG) as daemon:
        daemon.create("v", "--backend", s3.url(credentials), size=str(SIZE))
        daemon.data_of_v = os.urandom(SIZE)
        daemon.write("v", daemon.data_of_v)
        daemon.ok("volume", "flush", "v")
        daemon.create("local", size="4M")
        yield daemon


def lives(daemon, s3, what):
    """It runs, serves another volume, and has not taken what it did not ask for."""
    assert daemon.process.poll() is None, f"{what}: it has ended\n{daemon.log()[-3000:]}"
    word = os.urandom(BLOCK)
    daemon.write("local", word)
    assert daemon.read("local", BLOCK) == word, what
    assert s3.told > 0, f"{what}: nobody asked"
    assert s3.taken < TAKEN_MAX, f"{what}: {s3.taken} bytes were taken"


def test_gets_that_lie_hurt_nobody(daemon, s3):
    chance = random.Random(3)
    client = daemon.nbd("v")
    for what in LIES["get"]:
        daemon.ok("volume", "evict", "v")
        s3.tell("get", what)
        at = chance.randrange(SIZE // BLOCK) * BLOCK
        try:
            # What differs from its checksum is never shown.
            assert bytes(client.pread(BLOCK, at)) == daemon.data_of_v[at : at + BLOCK], what
        except OSError:
            pass
        except Exception as error:
            assert "pread" in str(error) and daemon.process.poll() is None, f"{what}: {error}\n{daemon.log()[-3000:]}"
        lives(daemon, s3, what)
        s3.tell("get", None)
        assert bytes(client.pread(BLOCK, at)) == daemon.data_of_v[at : at + BLOCK], what
    client.shutdown()
    assert daemon.read("v", SIZE) == daemon.data_of_v
    daemon.stop()


def test_listings_that_lie_hurt_nobody(daemon, s3, credentials):
    url = s3.url(credentials)
    for number, what in enumerate(LIES["list"]):
        s3.tell("list", what)
        # It is looked at before it is used.
        daemon.cli("volume", "create", f"w{number}", "--size", "4M", "--backend", url.replace("?", f"{number}?"))
        checked = hdcs("check", url, timeout=COMMAND_SECONDS)
        assert checked.returncode in (0, 1), f"{what}: {checked.returncode}\n{checked.stdout}{checked.stderr}"
        lives(daemon, s3, what)
        s3.tell("list", None)
    assert daemon.read("v", SIZE) == daemon.data_of_v
    daemon.stop()
    daemon.start()
    assert daemon.read("v", SIZE) == daemon.data_of_v
    assert hdcs("check", url, timeout=COMMAND_SECONDS).returncode == 0
    daemon.stop()


@pytest.mark.parametrize("kind", ["put", "delete"])
def test_writes_that_are_answered_with_lies_are_made_good(daemon, s3, kind):
    chance = random.Random(5)
    expected = bytearray(daemon.data_of_v)
    for what in LIES[kind]:
        s3.tell(kind, what)

        def is_told():
            at = chance.randrange(SIZE // BLOCK) * BLOCK
            expected[at : at + BLOCK] = chance.randbytes(BLOCK)
            client = daemon.nbd("v")
            client.pwrite(bytes(expected[at : at + BLOCK]), at)
            client.shutdown()
            # It may wait until the store is better.
            daemon.cli("volume", "flush", "v", "--timeout", "1")
            return s3.told > 0

        daemon.until(is_told)
        lives(daemon, s3, what)
        s3.tell(kind, None)
        if what == "that it exists":
            # Somebody else has the volume, for all that anybody can tell.
            break
        daemon.ok("volume", "flush", "v")
        assert daemon.read("v", SIZE) == bytes(expected), what
    daemon.stop()


class SlowOnce(dict):
    """Objects, of which the next one takes longer to store than a disk would."""

    is_slow = False

    def __setitem__(self, name, what):
        if self.is_slow:
            self.is_slow = False
            time.sleep(14)
        super().__setitem__(name, what)


def test_delete_waits_for_a_store_as_long_as_its_url_says(tmp_path, s3, credentials):
    patient = s3.url(credentials).replace("timeout_s=5&retry_s=2", "timeout_s=30&retry_s=60")
    with Daemon(tmp_path, {"cache_total_size_mib": 0}) as daemon:
        daemon.create("v", *DIRTY, "--backend", patient)
        daemon.write("v", b"v" * MIB)
        with s3.lock:
            s3.objects = SlowOnce(s3.objects)
            s3.objects.is_slow = True
        assert daemon.json("volume", "delete", "v")["discarded_dirty_bytes"] == 0
        assert not s3.objects.is_slow


def is_data(names):
    """Whether the volume's data is deleted: it has written nothing twice, so none of it is garbage."""
    return any("data/" in name for name in names)


def test_place_whose_data_is_being_removed_is_taken_by_no_other_volume(daemon, s3, credentials):
    removes, may_go = threading.Event(), threading.Event()

    def slow(handler, bucket, names):
        if is_data(names):
            removes.set()
            may_go.wait(COMMAND_SECONDS)
        handler.delete(bucket, names)

    with s3.lock:
        s3.lie, s3.told = ("delete", slow), 0
    removal = threading.Thread(target=daemon.api, args=("DELETE", "/v1/volumes/v?remove_data=true"))
    removal.start()
    try:
        assert removes.wait(COMMAND_SECONDS)
        for name, why in (("v", "it is being deleted"), ("w", "the backend of volume v already")):
            made = daemon.cli("volume", "create", name, "--size", SIZE, "--backend", s3.url(credentials))
            assert made.returncode != 0 and why in made.stderr, made.stdout + made.stderr
    finally:
        s3.tell("delete", None)
        may_go.set()
        removal.join()
    daemon.create("w", "--backend", s3.url(credentials), size=str(SIZE))
    daemon.write("w", daemon.data_of_v)
    assert daemon.read("w", SIZE) == daemon.data_of_v


def data(s3):
    """What is there beside manifests, which stay to say that a place was given up."""
    return [name for name in s3.objects if "manifest/" not in name]


class KillsAfterPut(dict):
    """Objects; with the next one that is put, a process ends before it can hear of it."""

    process = None

    def __setitem__(self, name, what):
        super().__setitem__(name, what)
        process, self.process = self.process, None
        if process:
            process.kill()
            process.wait()


def kill_when_given_up(daemon, s3):
    """End the daemon in a deletion, once the place is given up and before it hears of that."""
    with s3.lock:
        s3.objects = KillsAfterPut(s3.objects)
        s3.objects.process = daemon.process
    with pytest.raises(Exception):
        daemon.api("DELETE", "/v1/volumes/v?remove_data=true")
    assert s3.objects.process is None, "something was put"
    daemon.wait()


def test_deletion_that_was_killed_after_it_gave_the_place_up_can_only_be_ended(daemon, s3, credentials):
    kill_when_given_up(daemon, s3)
    daemon.start()
    daemon.until(lambda: daemon.volume("v")["phase"] == "failed")
    assert "its deletion has begun" in daemon.volume("v")["reason"]
    for asked, why in (
        (("open", "v"), "delete it"),
        (("detach", "v"), "its deletion has begun"),
        (("delete", "v", "--keep-data"), "its removal has begun"),
    ):
        done = daemon.cli("volume", *asked)
        assert done.returncode == 1 and why in done.stderr, (asked, done.stdout + done.stderr)
    assert daemon.json("volume", "delete", "v")["data"] is None
    assert not data(s3)
    daemon.create("v", "--backend", s3.url(credentials), size=str(SIZE))


def test_deletion_that_was_killed_while_it_removed_objects_leaves_none_behind(daemon, s3):
    def killing(handler, bucket, names):
        handler.delete(bucket, names)
        if is_data(names):
            daemon.process.kill()

    with s3.lock:
        s3.lie, s3.told = ("delete", killing), 0
    with pytest.raises(Exception):
        daemon.api("DELETE", "/v1/volumes/v?remove_data=true")
    daemon.wait()
    s3.tell("delete", None)
    assert s3.objects
    daemon.start()
    daemon.until(lambda: daemon.volume("v")["phase"] == "failed")
    assert "its deletion has begun" in daemon.volume("v")["reason"]
    daemon.ok("volume", "delete", "v")
    assert not data(s3)


def test_volume_whose_place_another_node_has_given_up_is_not_taken_for_one_that_is_being_deleted(daemon, s3):
    kill_when_given_up(daemon, s3)
    # Another node would have noted that for itself.
    (daemon.data / "volumes" / "v" / "given-up-objects").unlink()
    daemon.start()
    daemon.until(lambda: daemon.volume("v")["phase"] == "failed")
    assert "was deleted" in daemon.volume("v")["reason"]
    before = dict(s3.objects)
    # Nothing is removed, and what is there can be opened by nobody.
    assert daemon.json("volume", "delete", "v", "--keep-data")["data"] is None
    assert s3.objects == before
