//! TLS for NBD: certificates from files, and a connection without I/O.
//!
//! A session is never resumed: every connection shows its certificate again, and what that may do is
//! decided by what is in force then.
//!
//! Ciphertext that was received waits in an inbox of its own until the session wants plaintext;
//! replies are encrypted when the shard takes output, never far ahead of it. So TLS bounds memory
//! as the plain transport does. A failed handshake or a broken record ends the connection, after
//! the alert that says why.

mod refusal;

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use hdcs_core::base::inbox::Inbox;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, VerifierBuilderError, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig, ServerConnection};
use smallvec::SmallVec;
use thiserror::Error;
use x509_parser::prelude::{FromDer, X509Certificate};

use self::refusal::Remembering;
use crate::Chunk;
use crate::access::Identity;

/// Ciphertext received at once: several of the largest records (16 KiB and a little each).
const INBOX_BYTES: usize = 128 << 10;
/// The same before the handshake is over: a record that is cut in two, and the next.
const HANDSHAKE_INBOX_BYTES: usize = 20 << 10;
/// Ciphertext made ahead of what the shard has taken.
const OUTPUT_BYTES_MAX: usize = 128 << 10;
/// What a connection of the library takes up, with a record each way: measured.
const STATE_BYTES: usize = 48 << 10;
/// Plaintext of one record at most.
const RECORD_BYTES: usize = 16 << 10;

/// Why certificates cannot be used.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// A file cannot be read, or is not PEM.
    #[error("{}: cannot read {what}: {source}", path.display())]
    Pem {
        /// The file.
        path: PathBuf,
        /// What it should hold.
        what: &'static str,
        /// Why not.
        source: pem::Error,
    },
    /// A file holds no certificate.
    #[error("{}: holds no certificate (a PEM block `CERTIFICATE` is expected)", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// The certificate or the key is not usable, or they do not belong together.
    #[error("{} with key {}: {source}", certificate.display(), key.display())]
    Identity {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// Why not.
        source: rustls::Error,
    },
    /// A file holds no list of revoked certificates.
    #[error("{}: holds no list of revoked certificates (a PEM block `X509 CRL` is expected)", path.display())]
    NoRevocations {
        /// The file.
        path: PathBuf,
    },
    /// A list of revoked certificates cannot be used.
    #[error("{}: cannot be used as list of revoked certificates: {source}", path.display())]
    Revocations {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: rustls::Error,
    },
    /// A certificate authority for clients cannot be used.
    #[error("{}: cannot be used as certificate authority of clients: {reason}", path.display())]
    ClientAuthority {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
}

/// The files of a listener that speaks TLS, all PEM.
#[derive(Clone, Debug, Default)]
pub struct Files {
    /// Its chain of certificates.
    pub certificate: PathBuf,
    /// The key of that.
    pub key: PathBuf,
    /// Authorities one of which must have signed what a client shows; none: clients show nothing.
    pub client_authority: Option<PathBuf>,
    /// Lists of what these authorities have revoked.
    pub client_revocations: Option<PathBuf>,
}

/// What was in the files.
#[derive(Clone, Debug)]
pub struct Material {
    /// How to speak TLS.
    pub config: Arc<ServerConfig>,
    /// Who verifies clients, if they show certificates.
    pub verifier: Option<Arc<dyn ClientCertVerifier>>,
    /// Up to when the node's own certificate is good: milliseconds of Unix time.
    pub valid_until_ms: Option<u64>,
}

/// Read what a listener needs to speak TLS.
pub fn load(files: &Files) -> Result<Material, ConfigError> {
    let (certificate, key) = (&files.certificate, &files.key);
    let chain = certificates(certificate, "a certificate")?;
    let private = PrivateKeyDer::from_pem_file(key).map_err(|source| ConfigError::Pem {
        path: key.clone(),
        what: "a private key",
        source,
    })?;
    let identity = |source| ConfigError::Identity {
        certificate: certificate.clone(),
        key: key.clone(),
        source,
    };
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(identity)?;
    let verifier = match &files.client_authority {
        None => None,
        Some(path) => {
            let revocations = files.client_revocations.as_deref();
            let verifier = verifier(path, revocations, provider)?;
            Some(Arc::new(Remembering(verifier)) as Arc<dyn ClientCertVerifier>)
        }
    };
    let builder = match &verifier {
        None => builder.with_no_client_auth(),
        Some(verifier) => builder.with_client_cert_verifier(Arc::clone(verifier)),
    };
    let valid_until_ms = chain.first().and_then(valid_until_ms);
    let mut config = builder.with_single_cert(chain, private).map_err(identity)?;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    let config = Arc::new(config);
    Ok(Material {
        config,
        verifier,
        valid_until_ms,
    })
}

/// Up to when a certificate is good, if it can be parsed.
fn valid_until_ms(certificate: &CertificateDer<'_>) -> Option<u64> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    let seconds = u64::try_from(certificate.validity().not_after.timestamp()).ok()?;
    seconds.checked_mul(1000)
}

/// The certificates in force, which can be replaced while clients are served.
#[derive(Debug)]
pub struct Certificates {
    files: Files,
    current: Mutex<Material>,
    /// Held by whoever reads the files again.
    reloads: Mutex<()>,
    /// Clients that have shown a certificate and are connected.
    shown: Mutex<Vec<Weak<Identity>>>,
}

impl Certificates {
    /// Those in these files.
    pub fn load(files: Files) -> Result<Self, ConfigError> {
        Ok(Self {
            current: Mutex::new(load(&files)?),
            files,
            reloads: Mutex::default(),
            shown: Mutex::default(),
        })
    }

    /// What is in force.
    pub fn current(&self) -> Material {
        held(&self.current).clone()
    }

    /// Look again whether a client is trusted whenever that may have changed. `under` is what it was trusted by.
    pub fn watch(&self, identity: &Arc<Identity>, under: &Material) {
        let mut shown = held(&self.shown);
        shown.retain(|one| one.strong_count() > 0);
        shown.push(Arc::downgrade(identity));
        // Under the lock, so that no reload passes in between.
        let current = self.current();
        if !Arc::ptr_eq(&current.config, &under.config) {
            current.look_at(identity);
        }
    }

    /// Read the files again. Clients that are trusted no more are revoked; returns how many. If a file cannot be
    /// used, what was in force stays so.
    pub fn reload(&self) -> Result<usize, ConfigError> {
        // One after the other: what was read first must not come into force last.
        let _reload = held(&self.reloads);
        let fresh = load(&self.files)?;
        let shown = held(&self.shown);
        *held(&self.current) = fresh.clone();
        let connected = shown.iter().filter_map(Weak::upgrade);
        let trusted = connected.filter(|identity| !identity.is_revoked());
        Ok(trusted.filter(|identity| !fresh.look_at(identity)).count())
    }
}

/// No holder of these locks leaves something half-changed behind.
fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Material {
    /// Whether a client's certificates are good by what is here; revoke it if not.
    fn look_at(&self, identity: &Identity) -> bool {
        let is_good = match (&self.verifier, identity.chain().split_first()) {
            (Some(verifier), Some((own, more))) => {
                let now = UnixTime::now();
                verifier.verify_client_cert(own, more, now).is_ok()
            }
            _ => false,
        };
        if !is_good {
            identity.revoke();
        }
        is_good
    }
}

/// Who says whether a client's certificate is good: signed by an authority, in its time, for clients, and
/// revoked by none of the lists. With lists, each authority that has a part in it must have one.
fn verifier(
    authorities: &Path,
    revocations: Option<&Path>,
    provider: Arc<CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, ConfigError> {
    let unusable = |reason: String| ConfigError::ClientAuthority {
        path: authorities.to_owned(),
        reason,
    };
    let mut roots = RootCertStore::empty();
    for root in certificates(authorities, "a certificate authority")? {
        roots
            .add(root)
            .map_err(|error| unusable(error.to_string()))?;
    }
    let mut builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
    if let Some(path) = revocations {
        let lists = CertificateRevocationListDer::pem_file_iter(path)
            .and_then(Iterator::collect::<Result<Vec<_>, _>>)
            .map_err(|source| ConfigError::Pem {
                path: path.to_owned(),
                what: "a list of revoked certificates",
                source,
            })?;
        if lists.is_empty() {
            return Err(ConfigError::NoRevocations {
                path: path.to_owned(),
            });
        }
        builder = builder.with_crls(lists);
    }
    builder.build().map_err(|error| match (error, revocations) {
        (VerifierBuilderError::InvalidCrl(source), Some(path)) => ConfigError::Revocations {
            path: path.to_owned(),
            source: source.into(),
        },
        (error, _) => unusable(error.to_string()),
    })
}

fn certificates(
    path: &Path,
    what: &'static str,
) -> Result<Vec<CertificateDer<'static>>, ConfigError> {
    let unreadable = |source| ConfigError::Pem {
        path: path.to_owned(),
        what,
        source,
    };
    let found = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(unreadable)?;
    if found.is_empty() {
        let path = path.to_owned();
        return Err(ConfigError::Empty { path });
    }
    Ok(found)
}

/// The peer ended or broke TLS; the connection ends.
#[derive(Debug)]
pub struct Broken;

/// One side of a TLS connection.
#[derive(Debug)]
pub struct Tls {
    connection: ServerConnection,
    inbox: Inbox,
    /// Ciphertext on its way out.
    output: VecDeque<Chunk>,
    /// How much of the first plain chunk is encrypted already.
    encrypted_bytes: usize,
    /// The peer broke TLS: the alert that says so is the last that is sent.
    broken: bool,
    closing: Closing,
    /// What was wrong, in words, if that was said.
    why: Option<String>,
}

/// Whether the peer has been told that nothing follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Closing {
    No,
    /// It is to be, behind what waits.
    Asked,
    Said,
}

/// A connection after its handshake, to be gone on with elsewhere.
#[derive(Debug)]
pub struct Parts {
    connection: ServerConnection,
    /// What was received and not decrypted.
    ciphertext: Vec<u8>,
}

impl Tls {
    /// Await the client's hello. `output` is what goes before TLS, in the clear.
    pub fn new(config: Arc<ServerConfig>, output: VecDeque<Chunk>) -> Result<Self, rustls::Error> {
        let mut connection = ServerConnection::new(config)?;
        connection.set_buffer_limit(Some(2 * RECORD_BYTES));
        // Until its handshake is over, a client is a stranger that gets little.
        let inbox = Inbox::new(HANDSHAKE_INBOX_BYTES);
        Ok(Self::over(connection, inbox, output))
    }

    fn over(connection: ServerConnection, inbox: Inbox, output: VecDeque<Chunk>) -> Self {
        Self {
            connection,
            inbox,
            output,
            encrypted_bytes: 0,
            broken: false,
            closing: Closing::No,
            why: None,
        }
    }

    /// Take the connection apart once its handshake is over and what it had to say is sent.
    pub fn into_parts(self) -> Parts {
        assert!(!self.connection.is_handshaking() && self.output.is_empty());
        Parts {
            ciphertext: self.inbox.unread().to_vec(),
            connection: self.connection,
        }
    }

    /// Go on with a connection.
    pub fn from_parts(parts: Parts) -> Self {
        let mut inbox = Inbox::new(INBOX_BYTES);
        inbox.room()[..parts.ciphertext.len()].copy_from_slice(&parts.ciphertext);
        inbox.received(parts.ciphertext.len());
        Self::over(parts.connection, inbox, VecDeque::new())
    }

    /// Whether the handshake is not over.
    pub fn is_handshaking(&self) -> bool {
        self.connection.is_handshaking()
    }

    /// The certificates that the client has shown and that were verified, its own first; none were asked for.
    pub fn peer_certificates(&self) -> Option<&[CertificateDer<'static>]> {
        self.connection.peer_certificates()
    }

    /// What the peer has done wrong, if it has.
    pub fn why_broken(&self) -> Option<&str> {
        self.why.as_deref()
    }

    /// Go on with the handshake, with what is here; whether it is over.
    pub fn shake(&mut self) -> Result<bool, Broken> {
        while self.connection.is_handshaking() {
            if self.inbox.unread().is_empty() {
                return Ok(false);
            }
            self.process()?;
        }
        self.inbox.grow(INBOX_BYTES);
        Ok(true)
    }

    /// Take ciphertext, which is there, from the inbox.
    fn process(&mut self) -> Result<(), Broken> {
        let mut unread = self.inbox.unread();
        if let Ok(taken @ 1..) = self.connection.read_tls(&mut unread) {
            self.inbox.consume(taken);
            match self.connection.process_new_packets() {
                Ok(_) => return Ok(()),
                Err(error) => self.why = Some(refusal::explain(&error)),
            }
        }
        self.broken = true;
        Err(Broken)
    }

    /// Memory that it takes up: its inbox, what was encrypted, and the library's state and buffers.
    pub fn held_bytes(&self) -> usize {
        let output: usize = self.output.iter().map(|one| one.held().heap_bytes).sum();
        self.inbox.capacity() + output + STATE_BYTES
    }

    /// Where ciphertext goes; empty while what is here must be read first.
    pub fn room(&mut self) -> &mut [u8] {
        self.inbox.room()
    }

    /// So much ciphertext came.
    pub fn received(&mut self, bytes: usize) {
        self.inbox.received(bytes);
    }

    /// Decrypt into `place`; 0 means that more ciphertext is needed.
    pub fn read(&mut self, place: &mut [u8]) -> Result<usize, Broken> {
        loop {
            match self.connection.reader().read(place) {
                // The peer closed TLS in order: it may still want its replies.
                Ok(0) => return Err(Broken),
                Ok(bytes) => return Ok(bytes),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => {
                    self.broken = true;
                    return Err(Broken);
                }
            }
            if self.inbox.unread().is_empty() {
                return Ok(0);
            }
            self.process()?;
        }
    }

    /// Tell the peer that nothing follows, once everything that waits is encrypted: a peer ignores what comes behind
    /// that.
    pub fn close(&mut self) {
        if self.closing == Closing::No {
            self.closing = Closing::Asked;
        }
    }

    /// Ciphertext to be sent; takes from `plain` what it encrypts.
    pub fn output(&mut self, plain: &mut VecDeque<Chunk>) -> &mut VecDeque<Chunk> {
        let waiting = |chunks: &VecDeque<Chunk>| -> usize {
            let bytes = |chunk: &Chunk| match chunk {
                Chunk::Bytes(bytes) => bytes.len(),
                Chunk::Data(data) => data.len(),
            };
            chunks.iter().map(bytes).sum()
        };
        let mut room = OUTPUT_BYTES_MAX.saturating_sub(waiting(&self.output));
        let mut cipher = Vec::new();
        if self.broken {
            plain.clear();
        }
        if !self.connection.is_handshaking() {
            while room > 0
                && let Some(chunk) = plain.front()
            {
                let bytes: &[u8] = match chunk {
                    Chunk::Bytes(bytes) => bytes,
                    Chunk::Data(data) => data,
                };
                let rest = &bytes[self.encrypted_bytes..];
                let piece = &rest[..rest.len().min(RECORD_BYTES).min(room)];
                // The connection's buffer is empty and larger than a record, so it takes some; it
                // refuses only what follows an error.
                let Ok(taken @ 1..) = self.connection.writer().write(piece) else {
                    self.broken = true;
                    plain.clear();
                    break;
                };
                room -= taken;
                self.encrypted_bytes += taken;
                if self.encrypted_bytes == bytes.len() {
                    plain.pop_front();
                    self.encrypted_bytes = 0;
                }
                drain(&mut self.connection, &mut cipher);
            }
        }
        if self.closing == Closing::Asked && plain.is_empty() {
            self.closing = Closing::Said;
            self.connection.send_close_notify();
        }
        drain(&mut self.connection, &mut cipher);
        if !cipher.is_empty() {
            self.output
                .push_back(Chunk::Bytes(SmallVec::from_vec(cipher)));
        }
        &mut self.output
    }
}

/// Move what the connection wants to send to `cipher`.
fn drain(connection: &mut ServerConnection, cipher: &mut Vec<u8>) {
    while connection.wants_write() {
        connection.write_tls(cipher).expect("writing to memory");
    }
}
