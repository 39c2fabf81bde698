//! STARTTLS with a real TLS client in memory, and certificates that cannot be used.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use tempfile::TempDir;

use super::*;
use crate::Ending;
use crate::nbd::tls::{ConfigError, Files, load};

/// Certificates made by the script that the black-box tests use, too.
fn certificates() -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    tls_sh(directory.path(), &[]);
    directory
}

/// Run that script.
fn tls_sh(directory: &Path, arguments: &[&str]) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testenv/tls.sh");
    let made = Command::new(script).arg(directory).args(arguments).output();
    let made = made.unwrap();
    assert!(made.status.success(), "{made:?}");
}

fn files(directory: &Path, authority: Option<&str>, revocations: Option<&str>) -> Files {
    let path = |name: &str| directory.join(name);
    Files {
        certificate: path("server-cert.pem"),
        key: path("server-key.pem"),
        client_authority: authority.map(path),
        client_revocations: revocations.map(path),
    }
}

fn server_config(directory: &Path, authority: Option<&str>) -> NbdConfig {
    let material = load(&files(directory, authority, None)).unwrap();
    NbdConfig {
        tls: Some(material.config),
        require_tls: true,
        ..NbdConfig::default()
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
        assert!(secure.wire.session.opened().is_some());
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
    let request = request_bytes(command::READ, 0, 2, 0, 1 << 20).repeat(8);
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
    assert!(secure.wire.session.opened().is_some());
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
    let file = |field: fn(&mut Files) -> &mut PathBuf, name: &str| {
        let mut files = files(directory.path(), Some("ca-cert.pem"), Some("crl.pem"));
        *field(&mut files) = path(name);
        files
    };
    let certificate: fn(&mut Files) -> &mut PathBuf = |files| &mut files.certificate;
    let key: fn(&mut Files) -> &mut PathBuf = |files| &mut files.key;
    let authority: fn(&mut Files) -> &mut PathBuf =
        |files| files.client_authority.as_mut().unwrap();
    let revocations: fn(&mut Files) -> &mut PathBuf =
        |files| files.client_revocations.as_mut().unwrap();
    std::fs::write(
        path("broken-crl"),
        "-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n",
    )
    .unwrap();
    tls_sh(directory.path(), &["revoke"]);
    load(&file(key, "server-key.pem")).unwrap();
    let cases = [
        (certificate, "missing", "cannot read a certificate"),
        (key, "missing", "cannot read a private key"),
        (certificate, "empty", "holds no certificate"),
        (key, "empty", "a private key"),
        (certificate, "broken", "server-key.pem"),
        (key, "client-key.pem", "server-cert.pem"),
        (authority, "empty", "holds no certificate"),
        (authority, "broken", "authority of clients"),
        (revocations, "missing", "cannot read a list of revoked"),
        (revocations, "empty", "holds no list of revoked"),
        (revocations, "broken-crl", "as list of revoked"),
    ];
    for (field, name, what) in cases {
        let error: ConfigError = load(&file(field, name)).unwrap_err();
        let message = error.to_string();
        assert!(message.contains(path(name).to_str().unwrap()), "{message}");
        assert!(message.contains(what), "{message}");
    }
}

/// What a client may open of `disk` (allowed to any), `frozen` (to nobody) and two more.
#[test]
fn client_sees_and_opens_only_what_its_certificate_may_open() {
    let directory = certificates();
    for (name, names) in [
        ("a", "DNS:A.example,URI:spiffe://x/a"),
        ("b", "email:b@example.org"),
    ] {
        tls_sh(directory.path(), &["client", name, names]);
    }
    let volumes = || {
        let volume = |number, name: &str, allow: &[&str]| {
            MemoryVolume::new(Export {
                opening: crate::OpeningId::default(),
                number: VolumeNumber(number),
                name: name.to_owned(),
                bytes: 1 << 20,
                read_only: false,
                discards: true,
                allow: Allow::parse(allow.iter().copied()).unwrap(),
            })
        };
        vec![
            volume(1, "everyones", &["any"]),
            volume(2, "nobodys", &[]),
            volume(3, "of-a", &["dns:other", "dns:a.example"]),
            volume(4, "of-both", &["spiffe://x/a", "b@Example.org"]),
        ]
    };
    let cases: [(Option<&str>, &[&str]); 3] = [
        (Some("a"), &["everyones", "of-a", "of-both"]),
        (Some("b"), &["everyones", "of-both"]),
        // Without a name, only what is allowed to any.
        (Some("."), &["everyones"]),
    ];
    for (own, expected) in cases {
        let own = own.map(|own| directory.path().join(own));
        for name in ["everyones", "nobodys", "of-a", "of-both", "away"] {
            for kind in [
                option::EXPORT_NAME,
                option::INFO,
                option::GO,
                option::LIST_META_CONTEXT,
            ] {
                let server = server_config(directory.path(), Some("ca-cert.pem"));
                let client = client_config(directory.path(), own.as_deref());
                let mut secure = Secure::start(server, client, 13);
                secure.wire.host = MemoryHost::new(1 << 20, volumes());
                let (why, allow) = ("a secret".to_owned(), Allow::default());
                secure
                    .wire
                    .host
                    .not_open
                    .push(("away".to_owned(), Unopened { why, allow }));
                secure.send(&option_bytes(option::LIST, &[]));
                let listed = secure.plain.split_off(0);
                for name in ["everyones", "nobodys", "of-a", "of-both"] {
                    let is_listed = listed
                        .windows(name.len())
                        .any(|part| part == name.as_bytes());
                    assert_eq!(is_listed, expected.contains(&name), "{name}");
                }
                secure.send(&option_bytes(option::STRUCTURED_REPLY, &[]));
                secure.plain.clear();
                let data = match kind {
                    option::EXPORT_NAME => name.as_bytes().to_vec(),
                    option::LIST_META_CONTEXT => meta_query(name, &[]),
                    _ => info_query(name, &[]),
                };
                secure.send(&option_bytes(kind, &data));
                let told = &secure.plain;
                assert!(!told.windows(8).any(|part| part == b"a secret"));
                let is_refused = if kind == option::EXPORT_NAME {
                    told.is_empty() && secure.wire.closed
                } else {
                    told[12..16] == option_reply::ERR_UNKNOWN.to_be_bytes()
                };
                assert_eq!(
                    is_refused,
                    !expected.contains(&name),
                    "{own:?} {name} {kind}"
                );
            }
        }
    }
}

#[test]
fn revoked_certificate_is_refused() {
    let directory = certificates();
    for name in ["a", "b"] {
        tls_sh(directory.path(), &["client", name, "DNS:x"]);
    }
    tls_sh(directory.path(), &["client", "late", "DNS:x", "expired"]);
    tls_sh(directory.path(), &["revoke", "a"]);
    let material = load(&files(
        directory.path(),
        Some("ca-cert.pem"),
        Some("crl.pem"),
    ))
    .unwrap();
    for (name, refusal) in [
        (
            "a",
            Some("TLS: its certificate is revoked (it says that it is of dns:x)"),
        ),
        ("b", None),
        (
            "late",
            Some("TLS: its certificate has expired (it says that it is of dns:x)"),
        ),
    ] {
        let is_good = refusal.is_none();
        let server = NbdConfig {
            tls: Some(Arc::clone(&material.config)),
            require_tls: true,
            ..NbdConfig::default()
        };
        let own = directory.path().join(name);
        let secure = Secure::start(server, client_config(directory.path(), Some(&own)), 14);
        assert_eq!(!secure.wire.closed, is_good, "{name}");
        assert_eq!(
            matches!(secure.wire.session.peer(), Peer::Named(_)),
            is_good
        );
        let refusal = refusal.map(|why| Ending::Violation(why.into()));
        assert_eq!(secure.wire.session.ending(), refusal.as_ref());
    }
}

#[test]
fn handshake_is_made_in_one_session_and_what_follows_in_another() {
    let directory = certificates();
    for seed in 0..40 {
        let server = server_config(directory.path(), Some("ca-cert.pem"));
        let client = client_config(directory.path(), Some(directory.path()));
        let mut wire = Wire::new(NbdConfig::default(), seed);
        wire.inbound.clear();
        wire.session = NbdSession::for_handshake(server);
        wire.feed_bytes_max = [usize::MAX, 1, 700, 5000][seed as usize % 4];
        wire.collect();
        wire.greet(0b11);
        assert_eq!(
            wire.option_error(option::GO, &info_query("disk", &[])),
            option_reply::ERR_TLS_REQD
        );
        assert_eq!(wire.option_error(option::STARTTLS, &[]), option_reply::ACK);
        assert!(wire.session.has_started_tls());
        let name = ServerName::try_from("localhost").unwrap();
        let mut client = ClientConnection::new(Arc::new(client), name).unwrap();
        // What a client sends behind the end of its handshake comes with it, or not.
        if seed % 2 == 0 {
            let go = option_bytes(option::GO, &info_query("disk", &[]));
            client.writer().write_all(&go).unwrap();
        }
        // Some bytes at a time, until the first session takes no more.
        let mut cipher = VecDeque::new();
        loop {
            let mut flight = Vec::new();
            while client.wants_write() {
                client.write_tls(&mut flight).unwrap();
            }
            cipher.extend(flight);
            wire.collect();
            let told: Vec<u8> = wire.inbound.drain(..).collect();
            client.read_tls(&mut &told[..]).unwrap();
            client.process_new_packets().unwrap();
            let Receive::Into(place) = wire.session.receive(&mut wire.host) else {
                break;
            };
            let bytes = cipher.len().min(place.len()).min(wire.feed_bytes_max);
            for (place, byte) in place.iter_mut().zip(cipher.drain(..bytes)) {
                *place = byte;
            }
            if bytes > 0 {
                wire.session.received(bytes, &mut wire.host);
            }
        }
        let session = NbdSession::new(NbdConfig::default());
        let session = std::mem::replace(&mut wire.session, session);
        assert_eq!(session.opened(), None);
        let admitted = session.into_admitted().expect("its handshake is over");
        assert!(matches!(admitted.peer(), Peer::Named(_)));
        wire.session = NbdSession::admitted(admitted);
        wire.send(cipher.make_contiguous());
        let plain = Vec::new();
        let mut secure = Secure {
            wire,
            client,
            plain,
        };
        if seed % 2 == 1 {
            secure.send(&option_bytes(option::GO, &info_query("disk", &[])));
        }
        secure.exchange();
        assert!(secure.wire.session.opened().is_some(), "seed {seed}");
        assert!(matches!(secure.wire.session.peer(), Peer::Named(_)));
    }
}
