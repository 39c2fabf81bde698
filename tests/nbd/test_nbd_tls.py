"""NBD with STARTTLS: encrypted clients work, others learn nothing."""

import json
import shutil
import tempfile

import pytest

from programs import MIB, ROOT, run
from tls_daemon import TlsDaemon

SIZE = 64 * MIB


@pytest.fixture(scope="module")
def tls_server(certificates):
    """A daemon that wants TLS, and a client's certificate, on its TCP port."""
    with tempfile.TemporaryDirectory(prefix="hdcs-test-") as home, TlsDaemon(home, certificates) as daemon:
        daemon.create("secret", "--allow", "any", size=SIZE)
        yield daemon
        daemon.stop()


@pytest.fixture
def uri(tls_server, certificates):
    """The volume for a client with the right certificates."""
    return tls_server.tls_uri("secret", certificates)


def qemu_image(server, certificates):
    """QEMU's words for the volume and its certificates."""
    credentials = f"tls-creds-x509,id=tls0,endpoint=client,dir={certificates}"
    image = (
        f"driver=nbd,host=localhost,port={server.port},export=secret,"
        "tls-creds=tls0,tls-hostname=localhost"
    )
    return ["--object", credentials, "--image-opts", image]


def test_nbdinfo_over_tls(uri):
    info = json.loads(run("nbdinfo", "--json", uri).stdout)
    assert info["TLS"] is True
    assert info["exports"][0]["export-size"] == SIZE


def test_nbdcopy_over_tls(uri, tmp_path):
    source, back = tmp_path / "source", tmp_path / "back"
    source.write_bytes(bytes(range(256)) * (SIZE // 256))
    run("nbdcopy", source, uri)
    run("nbdcopy", uri, back)
    assert back.read_bytes() == source.read_bytes()


def test_qemu_over_tls(tls_server, certificates):
    image = qemu_image(tls_server, certificates)
    info = json.loads(run("qemu-img", "info", "--output=json", *image).stdout)
    assert info["virtual-size"] == SIZE
    commands = ["write -P 0x5a 512 4M", "read -P 0x5a 512 4M", "flush"]
    arguments = [word for command in commands for word in ("-c", command)]
    done = run("qemu-io", *arguments, *image)
    assert "failed" not in done.stdout, done.stdout


def test_client_without_tls_learns_nothing(tls_server):
    for name in ["", "secret", "nothing"]:
        plain = f"nbd://localhost:{tls_server.port}/{name}"
        done = run("nbdinfo", "--list", "--json", plain, check=False)
        assert done.returncode != 0
        assert "secret" not in done.stdout.replace(plain, "")


def test_client_without_a_certificate_is_refused(tls_server, certificates, tmp_path):
    shutil.copy(certificates / "ca-cert.pem", tmp_path)
    stranger = tls_server.tls_uri("secret", tmp_path)
    assert run("nbdinfo", stranger, check=False).returncode != 0


def test_client_of_another_authority_is_refused(tls_server, tmp_path):
    run(ROOT / "testenv/tls.sh", tmp_path)
    stranger = tls_server.tls_uri("secret", tmp_path)
    assert run("nbdinfo", stranger, check=False).returncode != 0


def test_refused_clients_leave_the_server_serving(tls_server, uri):
    run("nbdinfo", f"nbd://localhost:{tls_server.port}/secret", check=False)
    assert "newstyle-fixed with TLS" in run("nbdinfo", uri).stdout
