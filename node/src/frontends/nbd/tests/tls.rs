//! STARTTLS with a real TLS client in memory, and certificates that cannot be used.

use std::io::{Read, Write};
use std::path::Path;
use std::process::Command;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use tempfile::TempDir;

use super::*;
use crate::frontends::nbd::tls::{ConfigError, load};

/// Certificates made by the script that the black-box tests use, too.
fn certificates() -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testenv/tls.sh");
    let made = Command::new(script).arg(directory.path()).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    directory
}

fn server_config(directory: &Path, authority: Option<&str>) -> NbdConfig {
    let authority = authority.map(|name| directory.join(name));
    let (certificate, key) = ("server-cert.pem", "server-key.pem");
    let config = load(
        &directory.join(certificate),
        &directory.join(key),
        authority.as_deref(),
    );
    NbdConfig {
        tls: Some(config.unwrap()),
        require_tls: true,
    }
}

/// A client that trusts the authority in `trusted`, and perhaps shows the certificate in `own`.
fn client_config(trusted: &Path, own: Option<&Path>) -> ClientConfig {
    let mut roots = RootCertStore::empty();
    let authority = CertificateDer::from_pem_file(trusted.join("ca-cert.pem")).unwrap();
    roots.add(authority).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    if let Some(own) = own {
        let certificate = CertificateDer::from_pem_file(own.join("client-cert.pem"));
        let key = PrivateKeyDer::from_pem_file(own.join("client-key.pem"));
        let chain = vec![certificate.unwrap()];
        builder.with_client_auth_cert(chain, key.unwrap()).unwrap()
    } else {
        builder.with_no_client_auth()
    }
}

/// A wire with a TLS client at its end.
struct Secure {
    wire: Wire,
    client: ClientConnection,
    plain: Vec<u8>,
}

impl Secure {
    /// Greet, start TLS, and shake hands as far as that goes.
    fn start(server: NbdConfig, client: ClientConfig, seed: u64) -> Self {
        let mut wire = Wire::new(server, seed);
        wire.greet(0b11);
        let ack = wire.option_error(option::STARTTLS, &[]);
        assert_eq!(ack, option_reply::ACK);
        let name = ServerName::try_from("localhost").unwrap();
        let client = ClientConnection::new(Arc::new(client), name).unwrap();
        let plain = Vec::new();
        let mut this = Self {
            wire,
            client,
            plain,
        };
        this.exchange();
        this
    }

    /// Move bytes between the two until neither has more to say.
    fn exchange(&mut self) {
        loop {
            let mut cipher = Vec::new();
            while self.client.wants_write() {
                self.client.write_tls(&mut cipher).unwrap();
            }
            self.wire.send(&cipher);
            self.wire.settle();
            let inbound: Vec<u8> = self.wire.inbound.drain(..).collect();
            let mut rest = &inbound[..];
            while !rest.is_empty() {
                self.client.read_tls(&mut rest).unwrap();
                if self.client.process_new_packets().is_err() {
                    return;
                }
                let mut buf = vec![0; 64 << 10];
                while let Ok(bytes @ 1..) = self.client.reader().read(&mut buf) {
                    self.plain.extend(&buf[..bytes]);
                }
            }
            if cipher.is_empty() && inbound.is_empty() {
                return;
            }
        }
    }

    fn send(&mut self, bytes: &[u8]) {
        for part in bytes.chunks(16 << 10) {
            self.client.writer().write_all(part).unwrap();
            self.exchange();
        }
    }
}

#[test]
fn starttls_then_everything_works_encrypted() {
    let directory = certificates();
    for seed in 0..4 {
        let server = server_config(directory.path(), None);
        let client = client_config(directory.path(), None);
        let mut secure = Secure::start(server, client, seed);
        assert!(!secure.client.is_handshaking());
        secure.wire.feed_bytes_max = [usize::MAX, 1000, 100_000][seed as usize % 3];
        secure.send(&option_bytes(option::STARTTLS, &[]));
        let reply = secure.plain.split_off(0);
        assert_eq!(reply[12..16], option_reply::ERR_INVALID.to_be_bytes());
        secure.send(&option_bytes(option::GO, &info_query("disk", &[])));
        assert!(secure.wire.session.volume().is_some());
        secure.plain.clear();
        let mut data = vec![0; 5 << 20];
        secure.wire.random.fill(&mut data);
        secure.send(&request_bytes(command::WRITE, 0, 1, 512, 5 << 20));
        secure.send(&data);
        assert_eq!(secure.plain.len(), 16);
        assert!(secure.wire.disk.bytes()[512..512 + (5 << 20)] == data);
        secure.plain.clear();
        secure.send(&request_bytes(command::READ, 0, 2, 512, 5 << 20));
        assert_eq!(secure.plain.len(), 16 + (5 << 20));
        assert!(secure.plain[16..] == data);
        secure.send(&request_bytes(command::DISC, 0, 3, 0, 0));
        assert!(secure.wire.closed);
        let state = secure.client.process_new_packets().unwrap();
        assert!(state.peer_has_closed(), "TLS is closed before the socket");
    }
}

#[test]
fn encryption_stays_close_to_what_is_sent() {
    let directory = certificates();
    let server = server_config(directory.path(), None);
    let client = client_config(directory.path(), None);
    let mut secure = Secure::start(server, client, 5);
    secure.send(&option_bytes(option::GO, &info_query("disk", &[])));
    let request = request_bytes(command::READ, 0, 2, 0, 8 << 20);
    secure.client.writer().write_all(&request).unwrap();
    let mut cipher = Vec::new();
    secure.client.write_tls(&mut cipher).unwrap();
    secure.wire.send(&cipher);
    while secure.wire.complete_one() {}
    let mut received = 0;
    loop {
        let output = secure.wire.session.output();
        let queued: usize = output
            .iter()
            .map(|chunk| match chunk {
                Chunk::Bytes(bytes) => bytes.len(),
                Chunk::Data(_) => panic!("data in the clear"),
            })
            .sum();
        assert!(queued <= 150 << 10);
        let Some(Chunk::Bytes(bytes)) = output.pop_front() else {
            break;
        };
        received += bytes.len();
    }
    assert!(received > 8 << 20);
}

#[test]
fn bytes_after_starttls_in_the_clear_close() {
    let directory = certificates();
    let mut wire = Wire::new(server_config(directory.path(), None), 6);
    wire.greet(0b11);
    let injected = [
        option_bytes(option::STARTTLS, &[]),
        option_bytes(option::LIST, &[]),
    ];
    wire.send(&injected.concat());
    wire.settle();
    assert!(wire.closed);
    assert!(wire.inbound.len() <= 20, "nothing was told");
}

#[test]
fn garbage_instead_of_a_hello_closes() {
    let directory = certificates();
    let mut wire = Wire::new(server_config(directory.path(), None), 7);
    wire.greet(0b11);
    wire.option_error(option::STARTTLS, &[]);
    wire.send(&option_bytes(option::LIST, &[]));
    wire.settle();
    assert!(wire.closed);
    let told: Vec<u8> = wire.inbound.into();
    assert!(!told.windows(4).any(|part| part == b"disk"));
}

#[test]
fn a_broken_record_closes_once_what_is_in_flight_ended() {
    let directory = certificates();
    let server = server_config(directory.path(), None);
    let client = client_config(directory.path(), None);
    let mut secure = Secure::start(server, client, 8);
    secure.send(&option_bytes(option::GO, &info_query("disk", &[])));
    let request = request_bytes(command::READ, 0, 2, 0, 8 << 20);
    secure.client.writer().write_all(&request).unwrap();
    let mut cipher = Vec::new();
    secure.client.write_tls(&mut cipher).unwrap();
    cipher.extend([0x17, 3, 3, 0, 32]);
    cipher.extend([0xaa; 32]);
    secure.wire.send(&cipher);
    assert_eq!(secure.wire.session.in_flight(), 8);
    let receive = secure.wire.session.receive(&mut secure.wire.host);
    assert!(matches!(receive, Receive::Wait));
    secure.wire.settle();
    assert!(secure.wire.closed);
}

#[test]
fn client_certificate_is_verified() {
    let directory = certificates();
    let server = || server_config(directory.path(), Some("ca-cert.pem"));
    let stranger = certificates();
    let ours = Some(directory.path());
    let client = client_config(directory.path(), ours);
    let mut secure = Secure::start(server(), client, 8);
    secure.send(&option_bytes(option::GO, &info_query("disk", &[])));
    assert!(secure.wire.session.volume().is_some());
    for identity in [None, Some(stranger.path())] {
        let client = client_config(directory.path(), identity);
        let secure = Secure::start(server(), client, 9);
        assert!(secure.wire.closed);
    }
}

#[test]
fn what_was_agreed_in_the_clear_is_forgotten() {
    let directory = certificates();
    let mut server = server_config(directory.path(), None);
    server.require_tls = false;
    let mut wire = Wire::new(server.clone(), 11);
    wire.greet(0b11);
    wire.send_option(option::STRUCTURED_REPLY, &[]);
    wire.option_replies(option::STRUCTURED_REPLY);
    assert_eq!(wire.option_error(option::STARTTLS, &[]), option_reply::ACK);
    let name = ServerName::try_from("localhost").unwrap();
    let config = Arc::new(client_config(directory.path(), None));
    let client = ClientConnection::new(config, name).unwrap();
    let plain = Vec::new();
    let mut secure = Secure {
        wire,
        client,
        plain,
    };
    secure.exchange();
    secure.send(&option_bytes(
        option::SET_META_CONTEXT,
        &meta_query("disk", &[]),
    ));
    assert_eq!(
        secure.plain[12..16],
        option_reply::ERR_INVALID.to_be_bytes()
    );
    // Where TLS is not required, a client may go on without it.
    let mut wire = Wire::new(server, 12);
    wire.greet(0b11);
    wire.go("disk");
}

#[test]
fn load_says_which_file_and_what() {
    let directory = certificates();
    let path = |name: &str| directory.path().join(name);
    std::fs::write(path("empty"), "nothing here\n").unwrap();
    std::fs::write(
        path("broken"),
        "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
    )
    .unwrap();
    let cases: [(&str, &str, Option<&str>, &str, &str); 8] = [
        (
            "missing",
            "server-key.pem",
            None,
            "missing",
            "cannot read a certificate",
        ),
        (
            "server-cert.pem",
            "missing",
            None,
            "missing",
            "cannot read a private key",
        ),
        (
            "empty",
            "server-key.pem",
            None,
            "empty",
            "holds no certificate",
        ),
        ("server-cert.pem", "empty", None, "empty", "a private key"),
        ("broken", "server-key.pem", None, "broken", "server-key.pem"),
        (
            "server-cert.pem",
            "client-key.pem",
            None,
            "client-key.pem",
            "server-cert.pem",
        ),
        (
            "server-cert.pem",
            "server-key.pem",
            Some("empty"),
            "empty",
            "holds no certificate",
        ),
        (
            "server-cert.pem",
            "server-key.pem",
            Some("broken"),
            "broken",
            "authority of clients",
        ),
    ];
    for (certificate, key, authority, file, what) in cases {
        let authority = authority.map(path);
        let error: ConfigError =
            load(&path(certificate), &path(key), authority.as_deref()).unwrap_err();
        let message = error.to_string();
        assert!(message.contains(path(file).to_str().unwrap()), "{message}");
        assert!(message.contains(what), "{message}");
    }
}
