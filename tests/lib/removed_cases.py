"""A store whose places are deleted and used again, and two nodes beside it."""

import json
import os
from contextlib import ExitStack

import pytest

from daemon import Daemon
from lying_s3 import LyingS3
from programs import MIB

BLOCK = 4096


CONFIG = {"destage_age_max_ms": 10, "dirty_ratio_min": 0, "cache_total_size_mib": 0}


KEY = "key/wrapped"


class Store:
    """A store, and two nodes beside it."""

    def __init__(self, stack, path):
        self.s3 = stack.enter_context(LyingS3())
        credentials = path / "credentials"
        credentials.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
        credentials.chmod(0o600)
        self.url = self.s3.url(credentials).replace("timeout_s=5&retry_s=2", "timeout_s=60&retry_s=60")
        self.nodes = []
        for name in "ab":
            (path / name).mkdir()
            self.nodes.append(stack.enter_context(Daemon(path / name, CONFIG)))

    def create(self, node, name, *options):
        node.create(name, *options, "--backend", self.url, size=str(8 * MIB))

    def elsewhere(self, name):
        """Another place."""
        return self.url.replace("bucket/volume", f"bucket/{name}")

    def at_deletes(self, act):
        """From now on whatever is deleted is deleted by this."""
        with self.s3.lock:
            self.s3.lie, self.s3.told = ("delete", act), 0

    def reuse(self, node):
        """Make a volume there, and delete it with its data."""
        self.create(node, "old")
        status, answer = node.api("DELETE", "/v1/volumes/old?remove_data=true")
        assert status == 200 and json.loads(answer)["data"] is None, answer

    def at_puts(self, act):
        """From now on whatever is put is put by this."""
        with self.s3.lock:
            self.s3.lie, self.s3.told = ("put", act), 0

    def kill_in_deletion(self, node, when, first=True):
        """Delete `v` with its data, and kill the node at the deletion of objects of which `when` is true: it is done
        `first`, or never is."""

        def killing(handler, bucket, names):
            if first:
                handler.delete(bucket, names)
            if when(names):
                node.process.kill()
            elif not first:
                handler.delete(bucket, names)

        self.at_deletes(killing)
        with pytest.raises(Exception):
            node.api("DELETE", "/v1/volumes/v?remove_data=true")
        node.wait()
        self.s3.tell("delete", None)

    def kill_at_put(self, node, puts=0):
        """Kill the node at a put, before which so many are done."""
        with self.s3.lock:
            self.s3.objects = KillsBeforePut(self.s3.objects)
            self.s3.objects.process, self.s3.objects.puts = node.process, puts

    def data(self):
        """What is there beside manifests."""
        return [name for name in self.s3.objects if "manifest/" not in name]


def is_key(names):
    return any(name.endswith(KEY) for name in names)


def is_data(names):
    return any("data/" in name for name in names)


@pytest.fixture
def store(tmp_path):
    with ExitStack() as stack:
        yield Store(stack, tmp_path)


def filled(node, name, size=MIB):
    data = os.urandom(size)
    node.write(name, data)
    node.ok("volume", "flush", name)
    return data


class KillsBeforePut(dict):
    """Objects; a process ends instead of the next put, or of one after it."""

    process, puts = None, 0

    def __setitem__(self, name, what):
        if self.process and self.puts:
            self.puts -= 1
        elif self.process:
            process, self.process = self.process, None
            process.kill()
            process.wait()
            return
        super().__setitem__(name, what)
