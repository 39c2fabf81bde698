"""A place in a store of objects whose volume was deleted: another node may still have it open, or be on the way to
delete it, when the next volume is made there."""

import json
import os
import threading

import pytest

from daemon import COMMAND_SECONDS, refused
from encryption_cases import encrypted, key_file
from programs import MIB
from removed_cases import BLOCK, KEY, filled, is_data, is_key


def reopened(node, name):
    node.kill()
    node.start()
    node.until(lambda: node.volume(name)["phase"] in ("open", "failed"))
    assert node.volume(name)["phase"] == "open", node.volume(name)["reason"]


def test_node_that_has_a_deleted_volume_open_cannot_write_into_the_next_one_there(store):
    here, late = store.nodes
    store.create(late, "old")
    for block in range(6):
        late.write("old", os.urandom(BLOCK), block * BLOCK)
        late.ok("volume", "flush", "old")
    store.create(here, "old")
    status, answer = here.api("DELETE", "/v1/volumes/old?remove_data=true")
    assert status == 200 and json.loads(answer)["data"] is None, answer
    assert not store.data()
    store.create(here, "new")
    data = filled(here, "new")
    before = dict(store.s3.objects)
    late.write("old", b"L" * BLOCK)
    flushed = late.cli("volume", "flush", "old", "--timeout", "5")
    assert flushed.returncode != 0, flushed.stdout
    late.until(lambda: "owner" in (late.volume("old")["reason"] or ""))
    # Its owner removes manifests that it has replaced.
    there = dict(store.s3.objects)
    assert all(there.get(name, was) == was for name, was in before.items() if "manifest/" in name)
    here.write("new", b"n" * BLOCK, MIB)
    here.ok("volume", "flush", "new")
    reopened(here, "new")
    assert here.read("new", MIB) == data


def test_deletion_that_goes_on_late_leaves_the_next_volume_alone(store):
    late, here = store.nodes
    store.create(late, "v")
    filled(late, "v")
    # It ends between noting that it gives the place up, and doing so.
    store.kill_at_put(late)
    with pytest.raises(Exception):
        late.api("DELETE", "/v1/volumes/v?remove_data=true")
    late.wait()
    store.create(here, "v")
    filled(here, "v", BLOCK)
    begun, may_go = [threading.Event(), threading.Event()], [threading.Event(), threading.Event()]

    def slow(handler, bucket, names):
        waiting = [turn for turn in (0, 1) if not begun[turn].is_set()]
        if waiting and is_data(names):
            begun[waiting[0]].set()
            may_go[waiting[0]].wait(COMMAND_SECONDS)
        handler.delete(bucket, names)

    store.at_deletes(slow)
    answers = []

    def delete(node, query):
        thread = threading.Thread(target=lambda: answers.append(node.api("DELETE", f"/v1/volumes/v{query}")))
        thread.start()
        return thread

    removals = [delete(here, "?remove_data=true")]
    try:
        assert begun[0].wait(COMMAND_SECONDS)
        late.start()
        late.until(lambda: late.volume("v")["phase"] == "failed")
        removals.append(delete(late, ""))
        assert begun[1].wait(COMMAND_SECONDS)
        may_go[0].set()
        removals[0].join()
        store.create(here, "w")
        data = filled(here, "w")
    finally:
        for turn in may_go:
            turn.set()
        for removal in removals:
            removal.join()
        store.s3.tell("delete", None)
    assert len(answers) == 2
    reopened(here, "w")
    assert here.read("w", MIB) == data


def test_deletion_that_is_not_answered_leaves_the_key_of_the_next_volume_alone(store, tmp_path):
    late, here = store.nodes
    options = encrypted(key_file(tmp_path))
    store.create(late, "v", *options)
    filled(late, "v")
    made = threading.Event()

    def lose(handler, bucket, names):
        if not is_key(names) or made.is_set():
            handler.delete(bucket, names)
            return
        with store.s3.lock:
            for name in names:
                store.s3.objects.pop(f"{bucket}/{name}")
        store.create(here, "w", *options)
        made.set()
        handler.answer(503, b"<Error><Code>SlowDown</Code></Error>")

    store.at_deletes(lose)
    late.api("DELETE", "/v1/volumes/v?remove_data=true")
    assert made.is_set()
    store.s3.tell("delete", None)
    assert is_key(store.s3.objects)
    data = filled(here, "w")
    reopened(here, "w")
    assert here.read("w", MIB) == data


def leaves_alone(late, here, why):
    """A node starts, refuses its volume `v` for that reason, and has not fenced `w`, which another node has there."""
    late.start()
    late.until(lambda: late.volume("v")["phase"] == "failed")
    assert why in late.volume("v")["reason"], late.volume("v")["reason"]
    here.write("w", b"w" * BLOCK, MIB)
    here.ok("volume", "flush", "w")


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_node_that_starts_leaves_a_volume_alone_that_came_where_its_own_was(store, tmp_path, is_encrypted):
    late, here = store.nodes
    options = encrypted(key_file(tmp_path)) if is_encrypted else ()
    store.create(late, "v", *options)
    filled(late, "v")

    store.kill_in_deletion(late, lambda _names: not store.data())
    store.create(here, "w")
    data = filled(here, "w")
    leaves_alone(late, here, "another image stands in its place")
    assert not [name for name in store.s3.objects if name.endswith(KEY)]
    reopened(here, "w")
    assert here.read("w", MIB) == data
    late.ok("volume", "delete", "v")
    here.ok("volume", "evict", "w")
    assert here.read("w", MIB) == data


def test_place_whose_removal_was_cut_short_is_free_for_another_volume(store):
    late, here = store.nodes
    store.create(late, "v")
    filled(late, "v")
    old = [name for name in store.data() if "data/" in name]

    store.kill_in_deletion(late, is_data, first=False)
    assert old and set(old) <= set(store.data())
    store.create(here, "w")
    data = filled(here, "w")
    late.start()
    late.until(lambda: late.volume("v")["phase"] == "failed")
    late.ok("volume", "delete", "v")
    reopened(here, "w")
    assert here.read("w", MIB) == data
    here.until(lambda: not set(old) & set(store.data()))
    here.ok("volume", "evict", "w")
    assert here.read("w", MIB) == data


def test_encrypted_volume_whose_removal_was_cut_short_can_only_be_deleted(store, tmp_path):
    node, _ = store.nodes
    store.create(node, "v", *encrypted(key_file(tmp_path)))
    filled(node, "v")
    store.kill_in_deletion(node, is_key, first=False)
    assert is_key(store.s3.objects)
    node.start()
    node.until(lambda: node.volume("v")["phase"] == "failed")
    assert "its deletion has begun" in node.volume("v")["reason"], node.volume("v")["reason"]
    node.ok("volume", "delete", "v")
    assert not store.data()


@pytest.mark.parametrize("is_reused", [False, True])
def test_rotation_of_a_volume_that_is_not_there_any_more_leaves_no_key(store, tmp_path, is_reused):
    late, here = store.nodes
    options = encrypted(key_file(tmp_path))
    store.create(late, "v", *options)
    late.stop()
    store.create(here, "v", *options)
    here.api("DELETE", "/v1/volumes/v?remove_data=true")
    if is_reused:
        store.create(here, "w")
    late.start()
    late.until(lambda: late.volume("v")["phase"] == "failed")
    said = "another image stands in its place" if is_reused else "was deleted"
    done = late.cli("volume", "rotate-key", "v", "--key-file", key_file(tmp_path, "other-key"))
    refused(done, 1, said)
    assert not is_key(store.s3.objects)


def test_clone_of_a_volume_that_is_not_there_any_more_is_none_of_the_next_one(store):
    late, here = store.nodes
    store.create(late, "v")
    late.ok("volume", "snapshot", "v", "daily")
    late.stop()
    store.create(here, "v")
    here.ok("volume", "snapshot", "v", "daily", "--delete")
    here.api("DELETE", "/v1/volumes/v?remove_data=true")
    store.create(here, "w")
    here.ok("volume", "snapshot", "w", "daily")
    late.start()
    late.until(lambda: late.volume("v")["phase"] == "failed")
    said = "another image stands in its place"
    refused(late.cli("volume", "snapshot", "v", "--list"), 1, said)
    refused(late.cli("volume", "clone", "v@daily", "c", "--backend", store.elsewhere("c")), 1, said)
    assert not [name for name in store.data() if "/clone/" in name]


def creation(store, name, key=None):
    """What an import asks for: a new volume."""
    asked = {"name": name, "bytes": 8 * MIB, "backend": store.url, "must_be_new": True}
    return json.dumps(asked | ({"encryption": {"key_file": str(key)}} if key else {}))


@pytest.mark.parametrize("is_encrypted", [False, True])
@pytest.mark.parametrize("is_reused", [False, True])
def test_creation_that_was_killed_leaves_alone_what_came_to_its_place(store, tmp_path, is_encrypted, is_reused):
    late, here = store.nodes
    if is_reused:
        store.reuse(here)
    store.kill_at_put(late)
    with pytest.raises(Exception):
        late.api("POST", "/v1/volumes", creation(store, "v", key_file(tmp_path) if is_encrypted else None))
    late.wait()
    store.create(here, "w")
    data = filled(here, "w")
    leaves_alone(late, here, "is there already, and is left as it was")
    late.api("DELETE", "/v1/volumes/v?remove_data=true")
    reopened(here, "w")
    assert here.read("w", MIB) == data


@pytest.mark.parametrize("is_encrypted", [False, True])
@pytest.mark.parametrize("is_reused", [False, True])
@pytest.mark.parametrize("puts", [0, 1, 2])
def test_creation_that_was_killed_ends_at_the_next_start(store, tmp_path, is_encrypted, is_reused, puts):
    node, other = store.nodes
    if is_reused:
        store.reuse(other)
    store.kill_at_put(node, puts)
    with pytest.raises(Exception):
        node.api("POST", "/v1/volumes", creation(store, "v", key_file(tmp_path) if is_encrypted else None))
        # That many were not needed.
        node.process.kill()
        node.ok("status")
    node.wait()
    node.start()
    node.until(lambda: node.volume("v")["phase"] in ("open", "failed"))
    assert node.volume("v")["phase"] == "open", node.volume("v")["reason"]
    filled(node, "v")


@pytest.mark.parametrize("looks", [1, 2])
def test_creation_that_is_slow_leaves_alone_what_came_to_its_place(store, looks):
    """It came after its node had looked so often, and had found nothing."""
    late, here = store.nodes
    listed = []

    def list_slowly(handler):
        if handler.key()[1].get("prefix") == "volume/manifest/" and len(listed) <= looks:
            listed.append(handler)
            if len(listed) > looks:
                store.create(here, "w")
        handler.list(handler.key()[1])

    with store.s3.lock:
        store.s3.lie = ("list", list_slowly)
    done = late.cli("volume", "create", "v", "--size", "8M", "--backend", store.url)
    refused(done, 1, "is there already, and is left as it was")
    data = filled(here, "w")
    reopened(here, "w")
    assert here.read("w", MIB) == data


def test_opening_of_a_deleted_volume_does_not_fence_the_next_one(store):
    late, here = store.nodes
    store.create(late, "v")
    late.stop()
    store.create(here, "v")
    here.api("DELETE", "/v1/volumes/v?remove_data=true")
    begun = threading.Event()

    def list_slowly(handler):
        if handler.key()[1].get("prefix") == "volume/clone/" and not begun.is_set():
            begun.set()
            store.create(here, "w")
        handler.list(handler.key()[1])

    with store.s3.lock:
        store.s3.lie = ("list", list_slowly)
    late.start()
    late.until(lambda: begun.is_set() and late.volume("v")["phase"] == "failed")
    store.s3.tell("list", None)
    here.until(lambda: here.volume("w")["phase"] == "open")
    filled(here, "w")


def test_clone_that_is_late_does_not_fence_who_was_first(store):
    late, here = store.nodes
    store.create(late, "v")
    late.ok("volume", "snapshot", "v", "s")
    place, begun = store.elsewhere("place"), threading.Event()

    def list_slowly(handler):
        has_referred = any("volume/clone/" in name for name in list(store.s3.objects))
        if has_referred and not begun.is_set():
            begun.set()
            here.create("w", "--backend", place, size=str(8 * MIB))
        handler.list(handler.key()[1])

    with store.s3.lock:
        store.s3.lie = ("list", list_slowly)
    done = late.cli("volume", "clone", "v@s", "c", "--backend", place)
    refused(done, 2, "there is a volume already")
    assert begun.is_set()
    filled(here, "w")


def test_encrypted_clone_is_made_where_a_volume_was_deleted(store, tmp_path):
    node, other = store.nodes
    node.create("parent", *encrypted(key_file(tmp_path)), "--backend", store.elsewhere("parent"), size=str(8 * MIB))
    data = filled(node, "parent")
    node.ok("volume", "snapshot", "parent", "s")
    store.reuse(other)
    node.ok("volume", "clone", "parent@s", "c", "--backend", store.url)
    assert node.read("c", MIB) == data
    assert is_key(store.s3.objects)


def test_key_whose_put_is_not_answered_is_known_again(store, tmp_path):
    node, other = store.nodes
    store.reuse(other)
    lost = threading.Event()

    def lose(handler, name, body):
        if name.endswith(KEY) and not lost.is_set():
            lost.set()
            with store.s3.lock:
                store.s3.objects[name] = (body, "2026-11-25T00:00:00.000Z")
            handler.answer(500, b"<Error><Code>InternalError</Code></Error>")
        else:
            handler.put(name, body)

    store.at_puts(lose)
    store.create(node, "v", *encrypted(key_file(tmp_path)))
    assert lost.is_set()
    store.s3.tell("put", None)


def test_creation_that_fails_leaves_no_key(store, tmp_path):
    node, other = store.nodes
    store.reuse(other)

    def refuse(handler, name, body):
        if "manifest/" in name:
            handler.answer(403, b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>")
        else:
            handler.put(name, body)

    store.at_puts(refuse)
    create = ("volume", "create", "v", "--size", "8M", *encrypted(key_file(tmp_path)), "--backend", store.url)
    refused(node.cli(*create), 1, "credentials")
    assert not is_key(store.s3.objects)
    store.s3.tell("put", None)
    node.ok(*create)


def test_key_that_is_in_the_way_is_named(store):
    node, other = store.nodes
    store.reuse(other)
    prefix = "bucket/volume/"
    store.s3.objects[prefix + KEY] = (b"something", "2026-11-25T00:00:00.000Z")
    create = ("volume", "create", "v", "--size", "8M", "--backend", store.url)
    refused(node.cli(*create), 2, "delete what is left of it there: the object key/wrapped")
    del store.s3.objects[prefix + KEY]
    node.ok(*create)
