"""Deletions that a store refuses, or does not answer: what was acknowledged is never lost, and asking again ends them."""

import json
import subprocess

import nbd
import pytest

from daemon import refused
from encryption_cases import encrypted, key_file
from programs import MIB
from removed_cases import BLOCK, KillsBeforePut, filled, is_data, is_key

REFUSED = b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
BUSY = b"<Error><Code>SlowDown</Code></Error>"


def place(store, name):
    """A place of its own, whose requests are not repeated for long."""
    return store.url.replace("bucket/volume", f"bucket/{name}").replace("=60", "=1")


def references(store):
    return [name for name in store.s3.objects if "parent/clone/" in name]


@pytest.fixture
def clone(store):
    """A node with a clone `c` of a snapshot of `parent`."""
    node, _ = store.nodes
    node.create("parent", "--backend", place(store, "parent"), size=str(8 * MIB))
    node.data_of_parent = filled(node, "parent")
    node.ok("volume", "snapshot", "parent", "s")
    node.ok("volume", "clone", "parent@s", "c", "--backend", place(store, "c"))
    node.write("c", b"c" * BLOCK)
    node.ok("volume", "flush", "c")
    return node


def takes_no_puts(store):
    with store.s3.lock:
        store.s3.lie, store.s3.told = ("put", lambda handler: handler.answer(503, BUSY)), 0


def takes_no_write(node, name):
    with pytest.raises(nbd.Error):
        node.write(name, b"n" * BLOCK)


def refuses_deletes_of_references(handler, bucket, names):
    if any("clone/" in name for name in names):
        handler.answer(403, REFUSED)
    else:
        handler.delete(bucket, names)


@pytest.mark.parametrize("restarts", [False, True])
def test_clone_that_is_given_up_and_not_released_takes_no_more_writes(store, clone, restarts):
    store.at_deletes(refuses_deletes_of_references)
    refused(clone.cli("volume", "delete", "c"), 1, "did not end", "delete it again")
    assert references(store)
    takes_no_write(clone, "c")
    assert clone.volume("c")["phase"] == "failed"
    refused(clone.cli("volume", "delete", "c"), 1, "cannot be seen")
    if restarts:
        clone.kill()
        clone.start()
        clone.until(lambda: clone.volume("c")["phase"] != "opening")
    store.s3.tell("delete", None)
    clone.ok("volume", "delete", "c")
    assert not references(store)
    clone.ok("volume", "snapshot", "parent", "s", "--delete")
    assert clone.read("parent", MIB) == clone.data_of_parent


def test_clone_that_could_not_be_given_up_is_whole_until_its_deletion_goes_on(store, clone):
    takes_no_puts(store)
    refused(clone.cli("volume", "delete", "c"), 1, "did not end", "delete it again")
    takes_no_write(clone, "c")
    store.s3.tell("put", None)
    refused(clone.cli("volume", "open", "c"), 1, "delete it again")
    clone.kill()
    clone.start()
    clone.until(lambda: clone.volume("c")["phase"] == "open")
    assert clone.read("c", BLOCK) == b"c" * BLOCK
    takes_no_puts(store)
    refused(clone.cli("volume", "delete", "c"), 1, "did not end")
    store.s3.tell("put", None)
    # It is opened for that.
    clone.ok("volume", "delete", "c")
    assert not references(store)


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_removal_that_the_store_refuses_goes_on_when_asked_again(store, tmp_path, is_encrypted):
    node, other = store.nodes
    options = encrypted(key_file(tmp_path)) if is_encrypted else ()
    node.create("v", *options, "--backend", place(store, "v"), size=str(8 * MIB))
    filled(node, "v")
    store.at_deletes(lambda handler, _bucket, _names: handler.answer(403, REFUSED))
    status, answer = node.api("DELETE", "/v1/volumes/v?remove_data=true")
    assert status != 200 and "deleting it did not end" in answer, answer
    assert "delete it again" in node.volume("v")["reason"]
    assert any("data/" in name for name in store.data())
    made = node.cli("volume", "create", "w", "--size", "8M", "--backend", place(store, "v"))
    refused(made, 2, "the backend of volume v already")
    store.s3.tell("delete", None)
    status, answer = node.api("DELETE", "/v1/volumes/v")
    assert status == 200 and json.loads(answer)["data"] is None, answer
    assert not store.data()
    other.create("w", *options, "--backend", place(store, "v"), size=str(8 * MIB))


@pytest.mark.parametrize("restarts", [False, True])
def test_removal_that_the_store_never_lets_end_is_left_if_that_is_said(store, restarts):
    node, other = store.nodes
    node.create("v", "--backend", place(store, "v"), size=str(8 * MIB))
    filled(node, "v")
    store.at_deletes(lambda handler, _bucket, _names: handler.answer(403, REFUSED))
    status, answer = node.api("DELETE", "/v1/volumes/v?remove_data=true")
    assert status != 200 and "--discard-dirty" in answer, answer
    if restarts:
        node.kill()
        node.start()
        node.until(lambda: node.volume("v")["phase"] == "failed")
    told = node.json("volume", "delete", "v", "--discard-dirty")
    assert told["data"] is None and "which nobody can open any more" in told["data_trouble"], told
    assert any("data/" in name for name in store.data())
    store.s3.tell("delete", None)
    other.create("w", "--backend", place(store, "v"), size=str(8 * MIB))


@pytest.mark.parametrize("lost", ["log", "key"])
def test_removal_that_was_killed_goes_on_however_the_volume_fails_to_open(store, tmp_path, lost):
    node, _ = store.nodes
    key, log = key_file(tmp_path), tmp_path / "v.log"
    node.create("v", *encrypted(key), "--backend", store.url, "--log-path", log, size=str(8 * MIB))
    filled(node, "v")
    store.kill_in_deletion(node, is_key)
    assert store.data()
    (log if lost == "log" else key).unlink()
    node.start()
    node.until(lambda: node.volume("v")["phase"] == "failed")
    assert node.json("volume", "delete", "v")["data"] is None
    assert not store.data()


def test_removal_that_was_killed_has_not_wiped_the_log_device_yet(store, tmp_path):
    node, _ = store.nodes
    disk = tmp_path / "disk"
    with open(disk, "wb") as file:
        file.truncate(32 * MIB)
    made = subprocess.run(["losetup", "--find", "--show", disk], capture_output=True, text=True, check=True)
    device = made.stdout.strip()
    try:
        node.create("v", "--backend", store.url, "--log-path", device, size=str(8 * MIB))
        filled(node, "v")
        store.kill_in_deletion(node, is_data)
        node.start()
        node.until(lambda: node.volume("v")["phase"] == "failed")
        assert "its deletion has begun" in node.volume("v")["reason"], node.volume("v")["reason"]
        node.ok("volume", "delete", "v")
        assert not store.data()
        assert disk.read_bytes()[:BLOCK] == bytes(BLOCK)
    finally:
        node.kill()
        subprocess.run(["losetup", "--detach", device], check=True)


class OldReferences(KillsBeforePut):
    """Objects; references are put long ago, and the process ends instead of the first put of a clone's own."""

    def __setitem__(self, name, what):
        if "/place/" in name:
            return super().__setitem__(name, what)
        if "/clone/" in name:
            what = (what[0], "2026-11-20T00:00:00.000Z")
        return dict.__setitem__(self, name, what)


def test_reference_of_a_clone_that_died_at_a_place_that_was_used_before_is_forgotten(store):
    node, other = store.nodes
    node.create("parent", "--backend", place(store, "parent"), size=str(8 * MIB))
    filled(node, "parent")
    node.ok("volume", "snapshot", "parent", "s")
    other.create("old", "--backend", place(store, "place"), size=str(8 * MIB))
    filled(other, "old")
    assert other.api("DELETE", "/v1/volumes/old?remove_data=true")[0] == 200
    with store.s3.lock:
        store.s3.objects = OldReferences(store.s3.objects)
        store.s3.objects.process = node.process
    assert node.cli("volume", "clone", "parent@s", "c", "--backend", place(store, "place")).returncode != 0
    node.wait()
    assert references(store)
    node.start()
    node.until(lambda: node.volume("parent")["phase"] == "open")
    node.ok("volume", "scrub", "parent")
    node.until(lambda: not references(store))
    node.ok("volume", "snapshot", "parent", "s", "--delete")
    # The place is as free as before.
    node.create("new", "--backend", place(store, "place"), size=str(8 * MIB))
    data = filled(node, "new")
    node.ok("volume", "evict", "new")
    assert node.read("new", MIB) == data
