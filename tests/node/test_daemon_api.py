"""The control API and the metrics, as programs see them."""

import http.client
import json
import os
import socket

import pytest

from daemon import DIRTY, Daemon, samples
from programs import MIB, ROOT


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    """One daemon for the tests of this module."""
    config = {"metrics_listen": "127.0.0.1:0"}
    with Daemon(tmp_path_factory.mktemp("daemon"), config) as daemon:
        yield daemon
        daemon.stop()


def test_openapi_document_is_the_one_that_is_checked_in(daemon):
    status, text = daemon.api("GET", "/openapi.json")
    assert status == 200
    document = json.loads(text)
    assert document == json.loads((ROOT / "docs/openapi.json").read_text())
    # Every path answers, if only that the volume is not there, or that the node is in no cluster.
    for path, operations in document["paths"].items():
        if "get" in operations:
            status, _ = daemon.api("GET", path.replace("{name}", "none"))
            assert status in ((409,) if path.startswith("/v1/groups") else (200, 404)), path


def test_metrics_are_what_prometheus_takes_and_what_happened(daemon):
    daemon.create("m", *DIRTY)
    daemon.write("m", b"m" * 2 * MIB)
    daemon.read("m", MIB)
    status, page = daemon.api("GET", "/metrics")
    assert status == 200
    found = samples(page)
    assert found['hdcs_volume_client_bytes_total{volume="m",op="write"}'] == 2 * MIB
    assert found['hdcs_volume_client_bytes_total{volume="m",op="read"}'] == MIB
    assert found['hdcs_volume_requests_total{volume="m",op="flush"}'] == 1
    assert found['hdcs_volume_dirty_bytes{volume="m"}'] == 2 * MIB
    assert found['hdcs_volume_state{volume="m",state="healthy"}'] == 1
    assert found['hdcs_volume_state{volume="m",state="degraded"}'] == 0
    assert found['hdcs_volume_log_used_bytes{volume="m"}'] >= 2 * MIB
    labels = 'volume="m",op="write",quantile='
    quantiles = [found[f'hdcs_volume_latency_seconds{{{labels}"{q}"}}'] for q in
                 ("0.5", "0.9", "0.99", "0.999", "0.9999")]
    assert 0 < quantiles[0] and quantiles == sorted(quantiles)
    assert found['hdcs_volume_latency_seconds_count{volume="m",op="write"}'] >= 2
    assert 0 < found['hdcs_memory_bytes{part="rss"}'] <= found['hdcs_memory_bytes{part="max"}']
    daemon.ok("volume", "flush", "m")
    found = samples(daemon.api("GET", "/metrics")[1])
    assert found['hdcs_volume_dirty_bytes{volume="m"}'] == 0
    assert found['hdcs_volume_destaged_bytes_total{volume="m"}'] == 2 * MIB


def test_metrics_over_tcp_are_metrics_only(tmp_path):
    with Daemon(tmp_path, {"metrics_listen": "127.0.0.1:0"}) as daemon:
        daemon.kill()
        port = int(daemon.start().rsplit(":", 1)[1])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        assert answer.status == 200
        assert answer.getheader("content-type").startswith("text/plain; version=0.0.4")
        assert "hdcs_info" in answer.read().decode()
        connection.request("GET", "/v1/volumes")
        answer = connection.getresponse()
        assert answer.status == 404
        answer.read()
        connection.close()


@pytest.mark.parametrize(
    "method, path, body, status, kind",
    [
        ("GET", "/v1/volumes/none", None, 404, "not-found"),
        ("GET", "/v1/volumes/%2e%2e", None, 422, "invalid"),
        ("GET", "/v1/volumes/..%2fx", None, 422, "invalid"),
        ("GET", "/nothing", None, 404, "not-found"),
        ("PUT", "/v1/volumes", "{}", 405, "no-method"),
        ("POST", "/v1/volumes", "{", 400, "malformed"),
        ("POST", "/v1/volumes", '{"name": "x"}', 422, "invalid"),
        ("POST", "/v1/volumes", '{"name": "../x", "bytes": 4096}', 422, "invalid"),
        ("POST", "/v1/volumes", '{"name": "x", "bytes": 4096, "sise": 1}', 400, "malformed"),
        ("POST", "/v1/volumes", '{"name": "x", "bytes": 1}', 422, "invalid"),
        ("POST", "/v1/volumes", '{"name": "x", "bytes": 4096, "log_path": "l"}', 422, "invalid"),
        ("DELETE", "/v1/volumes/none?force=true", "{}", 400, "malformed"),
    ],
)
def test_bad_requests_get_an_error_that_programs_and_people_understand(
    daemon, method, path, body, status, kind
):
    found, text = daemon.api(method, path, body)
    assert found == status, text
    error = json.loads(text)
    assert error["kind"] == kind and error["message"]


def test_request_that_is_too_large_is_refused(daemon):
    body = json.dumps({"name": "x" * 1_000_000, "bytes": 4096})
    status, text = daemon.api("POST", "/v1/volumes", body)
    assert status == 400 and "more than 65536 bytes" in json.loads(text)["message"]


def test_clients_that_say_nothing_or_nonsense_do_not_stop_others(daemon):
    idle = []
    for content in (b"", b"GET", b"\x00\xff" * 100, b"GET / HTTP/9.9\r\n\r\n"):
        client = socket.socket(socket.AF_UNIX)
        client.connect(str(daemon.data / "control.sock"))
        client.sendall(content)
        idle.append(client)
    assert daemon.json("status")["pid"] == daemon.process.pid
    for client in idle:
        client.close()


def test_creation_goes_on_without_its_client(daemon):
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(daemon.data / "control.sock"))
    body = b'{"name": "orphan", "bytes": 4096, "log_bytes": 67108864}'
    client.sendall(b"POST /v1/volumes HTTP/1.1\r\nhost: hdcs\r\ncontent-type: application/json\r\n"
                   b"content-length: %d\r\n\r\n%s" % (len(body), body))
    volumes = daemon.data / "volumes"
    daemon.until(lambda: {".new-orphan", "orphan"} & set(os.listdir(volumes)))
    client.close()
    daemon.until(lambda: daemon.api("GET", "/v1/volumes/orphan")[0] == 200)
    assert daemon.volume("orphan")["state"] == "healthy"
