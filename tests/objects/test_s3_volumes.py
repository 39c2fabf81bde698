"""Volumes on a real S3: what is flushed is in the bucket and nothing else is needed to read it; the store may
go, the daemon may die, another node may take over; what is damaged or forbidden is said clearly."""

import errno

import nbd
import pytest

from daemon import DIRTY, Daemon, homes, refused
from object_stores import (
    BLOCK,
    EAGER,
    ROOM,
    ROOMY,
    Load,
    Model,
    conforms,
    counters,
    fills,
    serves_without_its_store,
    survives_kills,
    taken_over,
    waits_for_its_store,
)
from programs import MIB


def test_s3_store_conforms(s3):
    conforms("store_conformance", s3.url("store-conformance"))


def test_s3_backend_conforms(s3):
    conforms("conformance", s3.url("backend-conformance"))


def test_s3_daemon_killed_finds_everything_again(s3, tmp_path):
    model = Model(1, 48 * MIB)
    with Daemon(tmp_path, EAGER) as daemon:
        survives_kills(daemon, s3.url("killed"), model, 3)
        found = counters(daemon)["store"]
        assert found["puts"] > 0 and found["gets"] > 0 and found["trouble"] is None
        status, page = daemon.api("GET", "/metrics")
        assert status == 200
        assert 'hdcs_volume_store_requests_total{volume="v",op="put"}' in page
        assert 'hdcs_volume_store_puts_total{volume="v",object="manifest"}' in page
        assert found["puts_manifest"] > 0 and found["puts_data"] > 0
        daemon.stop()
    names = s3.names("killed")
    assert any(name.startswith("data/") for name in names)
    assert any(name.startswith("manifest/") for name in names)


def test_s3_bucket_alone_is_what_was_flushed(s3, tmp_path):
    """Without the first node's caches and logs; its later writes were not flushed to the store."""
    one, two = homes(tmp_path)
    model = Model(2, 32 * MIB)
    with Daemon(one, ROOM) as daemon:
        daemon.create("v", "--backend", s3.url("alone"), *DIRTY, size="32M")
        client = daemon.nbd("v")
        model.write(client, 200)
        daemon.ok("volume", "flush", "v")
        before = bytes(model.image)
        model.write(client, 50)
        assert counters(daemon)["dirty_bytes"] > 0
        daemon.kill()
    model.image[:] = before
    with Daemon(two, ROOM) as daemon:
        taken_over(daemon, s3.url("alone"), model)
        daemon.stop()


def test_s3_second_owner_fences_the_first(s3, tmp_path):
    one, two = homes(tmp_path)
    model = Model(3, 16 * MIB)
    with Daemon(one, EAGER) as first, Daemon(two, EAGER) as second:
        first.create("v", "--backend", s3.url("owned"), size="16M")
        client = first.nbd("v")
        model.write(client, 60)
        first.ok("volume", "flush", "v")
        taken_over(second, s3.url("owned"), model)
        # The first does not know yet: what it takes now stays in its log and never gets there.
        client.pwrite(b"x" * BLOCK, 0)
        fenced = "another node has taken the volume over"
        first.until(lambda: fenced in first.log())
        first.until(lambda: fenced in (first.volume("v")["reason"] or ""))
        assert counters(first)["dirty_bytes"] >= BLOCK
        other = second.nbd("v")
        model.write(other, 60)
        second.ok("volume", "flush", "v")
        second.ok("volume", "evict", "v")
        model.check(other)
        assert second.volume("v")["state"] == "healthy"
        other.shutdown()
        second.stop()


def test_s3_gateway_goes_and_comes_back_under_load(s3, tmp_path):
    size = 48 * MIB
    one, two = homes(tmp_path)
    with Daemon(one, EAGER) as daemon:
        url = s3.url("away", retry_s=2, timeout_s=5)
        daemon.create("v", "--backend", url, "--persist", "on-write", size="48M")
        load = Load(daemon, "v", size, 4)
        load.start()
        daemon.until(lambda: counters(daemon)["store"]["puts"] > 3)
        s3.gateway_down()
        try:
            # Clients go on: what they write stays in the log, until that is full; then they wait.
            daemon.until(lambda: "refused" in (daemon.volume("v")["reason"] or ""))
            daemon.until(lambda: fills(daemon))
            assert load.is_alive() and not load.failure
            assert daemon.json("status")["state"] == "degraded"
        finally:
            s3.up()
        daemon.until(lambda: counters(daemon)["store"]["trouble"] is None)
        model = load.end()
        daemon.ok("volume", "flush", "v")
        daemon.until(lambda: daemon.volume("v")["state"] == "healthy")
        assert counters(daemon)["store"]["retries"] > 0
        assert counters(daemon)["errors"] == 0
        daemon.stop()
    with Daemon(two, ROOM) as daemon:
        taken_over(daemon, s3.url("away"), model)
        daemon.stop()


def test_s3_outage_of_more_than_a_minute(s3, tmp_path):
    one, two = homes(tmp_path)
    url = s3.url("minute", retry_s=2, timeout_s=5)
    with Daemon(one, ROOMY) as daemon:
        model = serves_without_its_store(daemon, url, s3.gateway_down, s3.up)
        daemon.stop()
    with Daemon(two, ROOM) as daemon:
        taken_over(daemon, url, model)
        daemon.stop()


def test_s3_gateway_that_is_away_at_the_start_is_waited_for(s3, tmp_path):
    with Daemon(tmp_path, ROOM) as daemon:
        daemon.create("v", "--backend", s3.url("late", retry_s=1, timeout_s=5), *DIRTY, size="16M")
        waits_for_its_store(daemon, Model(8, 16 * MIB), s3.gateway_down, s3.up)
        daemon.stop()


def test_s3_quota_that_is_used_up_is_told_and_can_be_raised(s3, tmp_path):
    one, two = homes(tmp_path)
    model = Model(9, 32 * MIB)
    with Daemon(one, EAGER) as daemon:
        url = s3.url("quota", retry_s=2, timeout_s=5)
        daemon.create("v", "--backend", url, "--persist", "on-write", size="32M")
        client = daemon.nbd("v")
        model.write(client, 20)
        daemon.ok("volume", "flush", "v")
        s3.quota(objects=1)
        try:
            model.write(client, 50)
            daemon.until(lambda: "QuotaExceeded" in (daemon.volume("v")["reason"] or ""))
            assert daemon.volume("v")["state"] == "degraded"
            shown = daemon.json("status")["problems"]
            assert len(shown) == 1 and "QuotaExceeded" in shown[0]["reason"], shown
            # It is not fenced: clients go on.
            model.write(client, 20)
            model.check(client)
        finally:
            s3.quota(objects=None)
        daemon.until(lambda: daemon.volume("v")["state"] == "healthy")
        daemon.ok("volume", "flush", "v")
        assert counters(daemon)["errors"] == 0
        client.shutdown()
        daemon.stop()
    with Daemon(two, ROOM) as daemon:
        taken_over(daemon, s3.url("quota"), model)
        daemon.stop()


def test_s3_over_tls_trusts_the_authority_that_is_named(s3, tmp_path):
    one, two = homes(tmp_path)
    model = Model(10, 16 * MIB)
    with Daemon(one, EAGER) as daemon:
        stranger = s3.url("tls", endpoint=s3.tls, retry_s=1)
        done = daemon.cli("volume", "create", "v", "--size", "16M", "--backend", stranger)
        refused(done, 1, "certificate")
        daemon.create("v", "--backend", s3.url("tls", endpoint=s3.tls, ca=s3.ca), size="16M")
        client = daemon.nbd("v")
        model.write(client, 100)
        daemon.ok("volume", "flush", "v")
        daemon.ok("volume", "evict", "v")
        model.check(client)
        client.shutdown()
        daemon.stop()
    with Daemon(two, ROOM) as daemon:
        taken_over(daemon, s3.url("tls"), model)
        daemon.stop()


def test_s3_wrong_urls_and_keys_are_said_clearly(s3, tmp_path):
    forged = tmp_path / "forged"
    forged.write_text("[default]\naws_access_key_id = AKIANOBODY\naws_secret_access_key = hush\n")
    with Daemon(tmp_path, ROOM) as daemon:

        def create(url):
            return daemon.cli("volume", "create", "v", "--size", "16M", "--backend", url)

        absent = s3.url("p").replace(f"//{s3.bucket}/", "//nosuchbucket/")
        refused(create(absent), 2, "the bucket `nosuchbucket` does not exist")
        done = create(s3.url("p", credentials=forged))
        refused(done, 2, "check the credentials")
        assert "hush" not in done.stderr
        done = create(s3.url("p", secret_key="hush"))
        refused(done, 2, "holds a secret")
        assert "hush" not in done.stderr
        refused(create("s3://hdcs/p?endpoint=http://127.0.0.1:1"), 2, "no credentials")
        gone = s3.url("p", endpoint="http://127.0.0.1:1", retry_s=1)
        refused(create(gone), 1, "Connection refused")
        assert daemon.json("volume", "list") == []
        daemon.create("v", "--backend", s3.url("sized"), size="16M")
        daemon.ok("volume", "delete", "v", "--keep-data")
        refused(daemon.cli("volume", "create", "v", "--size", "32M", "--backend", s3.url("sized")), 2,
                "16777216 bytes", "leave --size out")
        daemon.json("volume", "create", "v", "--backend", s3.url("sized"))
        assert daemon.volume("v")["bytes"] == 16 * MIB
        daemon.stop()


def test_s3_damaged_object_is_an_error_and_never_data(s3, tmp_path):
    content = bytes(range(1, 33)) * 128
    with Daemon(tmp_path, {**EAGER, "cache_total_size_mib": 0}) as daemon:
        daemon.create("v", "--backend", s3.url("damaged"), size="16M")
        daemon.write("v", content * 16)
        daemon.ok("volume", "flush", "v")
        client = s3.client()
        damaged = 0
        for name in s3.names("damaged"):
            if not name.startswith("data/"):
                continue
            key = {"Bucket": s3.bucket, "Key": f"damaged/{name}"}
            body = client.get_object(**key)["Body"].read()
            at = body.find(content)
            if at >= 0:
                # All 16 blocks are the same; the sixth of them loses a bit.
                at += 5 * BLOCK + 100
                changed = body[:at] + bytes([body[at] ^ 4]) + body[at + 1 :]
                client.put_object(**key, Body=changed)
                damaged += 1
        assert damaged == 1
        daemon.ok("volume", "evict", "v")
        reader = daemon.nbd("v")
        with pytest.raises(nbd.Error) as failed:
            reader.pread(BLOCK, 5 * BLOCK)
        assert failed.value.errnum == errno.EIO
        assert bytes(reader.pread(BLOCK, 9 * BLOCK)) == content
        daemon.tells("objects are damaged")
        reader.shutdown()


def test_s3_requests_are_few(s3, tmp_path):
    """Not one for each write: counted over 128 MiB of 4 KiB random writes, with a log of the default size, and memory for objects of 16 MiB.
    Each flush of destage puts what was gathered, and a manifest; with a small log it flushes more often."""
    size = 256 * MIB
    written = 128 * MIB
    with Daemon(tmp_path, {"log_size_mib": 512, "memory_max_mib": 2048}) as daemon:
        daemon.create("v", "--backend", s3.url("counted"), "--persist", "on-write", size="256M")
        before = counters(daemon)["store"]["puts"]
        model = Model(7, size)
        client = daemon.nbd("v")
        model.write(client, written // BLOCK, lengths=(BLOCK,))
        daemon.ok("volume", "flush", "v")
        store = counters(daemon)["store"]
        puts = store["puts"] - before
        print(f"{puts} puts, {store['put_bytes'] / MIB:.0f} MiB for {written // MIB} MiB written")
        assert puts <= 300 * written // (1 << 30)
        # What was written arrives once; what became sparse by overwriting is put together anew once.
        assert store["put_bytes"] < written * 5 // 2
        client.shutdown()
        daemon.stop()


def test_s3_flushes_of_clients_cost_no_requests(s3, tmp_path):
    """A client that flushes after every 32 writes costs what one that never does costs: in the bucket nothing
    shows before a manifest, so destage goes on past its flushes."""
    size = 256 * MIB
    written = 64 * MIB
    with Daemon(tmp_path, {"log_size_mib": 512, "memory_max_mib": 2048}) as daemon:
        url = s3.url("often")
        daemon.create("v", "--backend", url, "--persist", "on-flush", size="256M")
        before = counters(daemon)["store"]["puts"]
        model = Model(8, size)
        client = daemon.nbd("v")
        for _ in range(written // BLOCK // 32):
            model.write(client, 32, lengths=(BLOCK,))
        daemon.ok("volume", "flush", "v")
        found = counters(daemon)
        assert found["sync_points"] >= written // BLOCK // 32 - 1
        puts = found["store"]["puts"] - before
        print(f"{puts} puts for {written // MIB} MiB written")
        assert puts <= 300 * written // (1 << 30)
        client.shutdown()
        daemon.ok("volume", "evict", "v")
        client = daemon.nbd("v")
        model.check(client)
        client.shutdown()
        daemon.stop()


def test_s3_volume_is_resized_under_load(s3, tmp_path):
    """A resize commits what the bucket's volume was given, so it waits for the end of a generation; whoever
    takes over then finds everything."""
    one, two = homes(tmp_path)
    url = s3.url("resized")
    with Daemon(one, EAGER) as daemon:
        daemon.create("v", "--backend", url, "--persist", "on-flush", size="16M")
        load = Load(daemon, "v", 16 * MIB, 9)
        load.start()
        for mebibytes in (20, 24, 28, 24):
            before = counters(daemon)["store"]["puts_manifest"]
            daemon.until(lambda before=before: counters(daemon)["store"]["puts_manifest"] > before + 1)
            shrink = ["--shrink"] if mebibytes == 24 else []
            resized = daemon.json("volume", "resize", "v", "--size", f"{mebibytes}M", *shrink)
            assert resized["bytes"] == mebibytes * MIB
        model = load.end()
        daemon.ok("volume", "flush", "v")
        assert counters(daemon)["errors"] == 0
        daemon.stop()
    model.image.extend(bytes(8 * MIB))
    with Daemon(two, ROOM) as daemon:
        taken_over(daemon, url, model)
        daemon.stop()
