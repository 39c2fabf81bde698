"""Storage mode on a real S3: a tier shows in the bucket as a whole or not at all."""

from daemon import Daemon
from encryption_cases import MARK, encrypted, key_file, marked, marks
from object_stores import ROOM, Model, bodies, taken_over
from programs import MIB
from resize_cases import resized_over
from storage_cases import SMALL_LOG, check, fill, home, is_tiered

SIZE = 48 * MIB


def homes(tmp_path, count):
    made = [tmp_path / str(number) for number in range(count)]
    for one in made:
        one.mkdir()
    return made


def test_storage_on_s3_fills_while_the_gateway_is_away_and_tiers_as_a_whole(s3, tmp_path):
    one, two = homes(tmp_path, 2)
    url = s3.url("storage", retry_s=2, timeout_s=5)
    model = Model(1, SIZE)
    with Daemon(one, ROOM) as daemon:
        daemon.create("v", "--mode", "storage", "--backend", url, *SMALL_LOG, size=str(SIZE))
        s3.gateway_down()
        try:
            fill(daemon, model)
            check(daemon, model)
            assert daemon.volume("v")["counters"]["errors"] == 0
            assert home(daemon)["dirty_bytes"] >= SIZE - 17 * MIB
        finally:
            s3.up()
        daemon.ok("volume", "flush", "v")
        assert is_tiered(daemon)
        before = bytes(model.image)
        client = daemon.nbd("v")
        model.write(client, 300)
        client.shutdown()
        # Killed in the middle of the next tier: the bucket has the one before.
        daemon.api("POST", "/v1/volumes/v/flush", "null")
        daemon.until(lambda: home(daemon)["tier"] in ("copying", "finishing", "idle"))
        is_done = is_tiered(daemon)
        daemon.kill()
        if not is_done:
            daemon.start()
            check(daemon, model)
            daemon.ok("volume", "flush", "v")
            daemon.write("v", b"z" * 4096)
            daemon.kill()
        assert bytes(model.image) != before
    with Daemon(two, ROOM) as daemon:
        taken_over(daemon, url, model)
        daemon.stop()


def test_storage_on_s3_that_is_encrypted_leaves_no_plaintext_anywhere(s3, tmp_path):
    one, two = homes(tmp_path, 2)
    key = key_file(tmp_path)
    url = s3.url("storage-secret")
    data = marked(8 * MIB, 1)
    with Daemon(one, ROOM) as daemon:
        daemon.create("v", "--mode", "storage", "--backend", url, *SMALL_LOG, *encrypted(key), size=str(SIZE))
        daemon.write("v", data)
        daemon.ok("volume", "flush", "v")
        assert is_tiered(daemon)
        volume = daemon.data / "volumes/v"
        assert marks(volume / "home") == 0 and marks(volume / "log") == 0
        found = bodies(s3, "storage-secret")
        assert sum(map(len, found.values())) > len(data), "it is in the bucket"
        assert not any(MARK in body for body in found.values())
        assert daemon.read("v", len(data)) == data
        daemon.stop()
    with Daemon(two, ROOM) as daemon:
        daemon.create("v", "--mode", "storage", "--backend", url, *SMALL_LOG, *encrypted(key), size=str(SIZE))
        assert daemon.read("v", len(data)) == data
        daemon.stop()


def test_storage_on_s3_is_resized_and_shows_nothing_that_was_not_tiered(s3, tmp_path):
    one, two = homes(tmp_path, 2)
    place = s3.url("storage-resize")
    tiered = resized_over(one, place)
    with Daemon(two, ROOM) as daemon:
        taken_over(daemon, place, tiered)
        daemon.stop()
