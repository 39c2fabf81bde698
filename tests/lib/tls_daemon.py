"""A daemon with a TLS port, and certificates for it and its clients."""

import json

import nbd

from daemon import Daemon
from programs import ROOT, free_port, run


def tls_sh(directory, *arguments):
    run(ROOT / "testenv/tls.sh", directory, *arguments)


class TlsDaemon(Daemon):
    """A daemon with a TLS port on loopback that asks for certificates."""

    def __init__(self, home, authority, config=None, **options):
        self.port = free_port()
        self.authority = authority
        super().__init__(home, {
            "nbd_listen": ["unix:nbd.sock", f"tcp:127.0.0.1:{self.port}"],
            "nbd_tls_cert_file": str(authority / "server-cert.pem"),
            "nbd_tls_key_file": str(authority / "server-key.pem"),
            "nbd_tls_client_ca_file": str(authority / "ca-cert.pem"),
            **(config or {}),
        }, **options)

    def tls_uri(self, name, own):
        return f"nbds://localhost:{self.port}/{name}?tls-certificates={self.authority / own}"

    def open(self, name, own):
        """A connection over TLS, or an error."""
        handle = nbd.NBD()
        handle.set_uri_allow_local_file(True)
        handle.connect_uri(self.tls_uri(name, own))
        return handle

    def qemu(self, name, own):
        """A volume as QEMU names it, with a certificate."""
        credentials = f"tls-creds-x509,id=t,endpoint=client,dir={self.authority / own}"
        where = f"driver=nbd,host=localhost,port={self.port},export={name},tls-creds=t"
        return ["--object", credentials, "--image-opts", where]

    def listed(self, own):
        done = run("nbdinfo", "--list", "--json", self.tls_uri("", own), check=False)
        if done.returncode != 0:
            return []
        return [export["export-name"] for export in json.loads(done.stdout)["exports"]]
