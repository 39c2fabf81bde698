"""Encrypted volumes on a real S3: the bucket holds no plaintext, whoever has the key can take it over, whoever
has not cannot; clones have their parent's key; a rotation reaches the bucket."""

from daemon import Daemon, homes, refused
from encryption_cases import MARK, encrypted, grow_cold, key_file, marked
from object_stores import EAGER, Model, bodies
from programs import MIB


def test_encryption_s3_bucket_holds_no_plaintext_and_is_taken_over_with_the_key(s3, tmp_path):
    one, two = homes(tmp_path)
    key, other, new = (key_file(tmp_path, name) for name in ["key", "other", "new"])
    url = s3.url("encrypted")
    data = marked(24 * MIB, 1)
    with Daemon(one, EAGER) as daemon:
        daemon.create("plain", "--backend", s3.url("not-encrypted"))
        daemon.write("plain", data[:MIB])
        daemon.create("v", "--backend", url, *encrypted(key), size="24M")
        daemon.write("v", data)
        # Parts of blocks, which are read again to be made whole.
        client = daemon.nbd("v")
        for at in range(0, 64 * 4096, 4096):
            client.pwrite(data[at + 512 : at + 1024], at + 512)
        client.flush()
        client.shutdown()
        for name in ["v", "plain"]:
            grow_cold(daemon, name)
        assert daemon.read_all("v", len(data)) == data
        daemon.kill()
    found = bodies(s3, "encrypted")
    assert "key/wrapped" in found and any(name.startswith("data/") for name in found)
    assert sum(map(len, found.values())) > len(data)
    assert not [name for name, body in found.items() if MARK in body]
    assert any(MARK in body for body in bodies(s3, "not-encrypted").values())
    with Daemon(two, EAGER) as daemon:
        create = ["volume", "create", "v", "--backend", url]
        refused(daemon.cli(*create), 2, "is encrypted", "--encrypt")
        refused(daemon.cli(*create, *encrypted(other)), 2, str(other), "wrapped with key")
        plain = ["volume", "create", "p", "--backend", s3.url("not-encrypted"), *encrypted(key)]
        refused(daemon.cli(*plain), 2, "not encrypted")
        daemon.json(*create, *encrypted(key))
        assert daemon.read_all("v", len(data)) == data
        daemon.ok("volume", "rotate-key", "v", "--key-file", new)
        daemon.kill()
    three = tmp_path / "three"
    three.mkdir()
    with Daemon(three, EAGER) as daemon:
        create = ["volume", "create", "v", "--backend", url]
        refused(daemon.cli(*create, *encrypted(key)), 2, "wrapped with key")
        daemon.json(*create, *encrypted(new))
        assert daemon.read_all("v", len(data)) == data
        daemon.stop()


def test_encryption_s3_clone_has_its_parents_key(s3, tmp_path):
    key = key_file(tmp_path)
    model = Model(2, 16 * MIB)
    with Daemon(tmp_path, EAGER) as daemon:
        daemon.create("v", "--backend", s3.url("parent"), *encrypted(key))
        client = daemon.nbd("v")
        model.write(client, 200)
        clone = ["volume", "clone", "v", "c", "--backend", s3.url("child")]
        refused(daemon.cli(*clone, *encrypted(key)), 2, "as its parent is")
        daemon.json(*clone)
        shown = [daemon.volume(name)["encryption"]["data_key"] for name in ["v", "c"]]
        assert shown[0] == shown[1]
        copied = Model(3, 16 * MIB)
        copied.image[:] = model.image
        for name, one in [("v", model), ("c", copied)]:
            client = daemon.nbd(name)
            one.write(client, 100)
            grow_cold(daemon, name)
            one.check(client)
            client.shutdown()
        daemon.kill()
        daemon.start()
        for name, one in [("v", model), ("c", copied)]:
            client = daemon.nbd(name)
            one.check(client)
            client.shutdown()
        daemon.ok("volume", "delete", "c")
        daemon.until(lambda: not any(name.startswith("data/") for name in s3.names("child")))
        assert "key/wrapped" not in s3.names("child")
        assert "key/wrapped" in s3.names("parent")
        daemon.stop()


def test_encryption_s3_check_verifies_what_is_encrypted_where_the_key_is_known(s3, tmp_path):
    key = key_file(tmp_path)
    url = s3.url("checked-secret")
    with Daemon(tmp_path, EAGER) as daemon:
        daemon.create("v", "--backend", url, *encrypted(key), size="16M")
        daemon.write("v", marked(16 * MIB, 4))
        daemon.ok("volume", "flush", "v")
        daemon.ok("check", "v")
        without = daemon.json("check", url)[0]
        assert without["problems"] == [] and without["blocks"] == 0 and without["objects"] > 0
        assert "its data is encrypted" in without["note"] and "check it by its volume's name" in without["note"]
        name = next(name for name in s3.names("checked-secret") if name.startswith("data/"))
        client, place = s3.client(), {"Bucket": s3.bucket, "Key": f"checked-secret/{name}"}
        good = client.get_object(**place)["Body"].read()
        client.put_object(**place, Body=bytes([good[0] ^ 1]) + good[1:])
        done = daemon.cli("check", "v")
        refused(done, 1, "check found")
        assert name in done.stdout and "damaged" in done.stdout, done.stdout
        client.put_object(**place, Body=good)
        daemon.ok("check", "v")
        key.rename(tmp_path / "elsewhere")
        without = daemon.json("check", "v")[-1]
        assert without["problems"] == [] and "its data is encrypted" in without["note"] and str(key) in without["note"]
        client.delete_object(**place)
        done = daemon.cli("check", "v")
        refused(done, 1, "check found")
        assert name in done.stdout and "is missing" in done.stdout, done.stdout
        client.put_object(**place, Body=good)
        daemon.stop()
