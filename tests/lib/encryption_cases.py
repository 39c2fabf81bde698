"""Encrypted volumes: their keys, and what betrays plain text."""

import random
import secrets

# Found in any 4 KiB block of what a test writes, wherever that lies.
MARK = b"plaintext-of-a-client:"


def key_file(home, name="key", form="hex"):
    path = home / name
    raw = secrets.token_bytes(32)
    path.write_bytes(raw if form == "raw" else raw.hex().encode() + b"\n")
    path.chmod(0o600)
    return path


def encrypted(key):
    return ["--encrypt", "--key-file", key]


def marked(size, seed):
    """Data of which every sector holds the mark."""
    rng = random.Random(seed)
    sectors = (MARK + rng.randbytes(512 - len(MARK)) for _ in range(size // 512))
    return b"".join(sectors)


def marks(path):
    return path.read_bytes().count(MARK)


def grow_cold(daemon, name="v"):
    daemon.ok("volume", "flush", name)
    daemon.ok("volume", "evict", name)
