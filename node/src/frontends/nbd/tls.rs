//! TLS for NBD: certificates from files, and a connection without I/O.
//!
//! Ciphertext that was received waits in an inbox of its own until the session wants plaintext;
//! replies are encrypted when the shard takes output, never far ahead of it. So TLS bounds memory
//! as the plain transport does. A failed handshake or a broken record ends the connection, after
//! the alert that says why.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection};
use smallvec::SmallVec;
use thiserror::Error;

use super::inbox::Inbox;
use crate::frontends::Chunk;

/// Ciphertext received at once: several of the largest records (16 KiB and a little each).
const INBOX_BYTES: usize = 128 << 10;
/// Ciphertext made ahead of what the shard has taken.
const OUTPUT_BYTES_MAX: usize = 128 << 10;
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
    /// A certificate authority for clients cannot be used.
    #[error("{}: cannot be used as certificate authority of clients: {reason}", path.display())]
    ClientAuthority {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
}

/// What a listener needs to speak TLS: a chain of certificates and its key, both PEM. With
/// `client_authority`, clients must show a certificate that it signed.
pub fn load(
    certificate: &Path,
    key: &Path,
    client_authority: Option<&Path>,
) -> Result<Arc<ServerConfig>, ConfigError> {
    let chain = certificates(certificate, "a certificate")?;
    let private = PrivateKeyDer::from_pem_file(key).map_err(|source| ConfigError::Pem {
        path: key.to_owned(),
        what: "a private key",
        source,
    })?;
    let identity = |source| ConfigError::Identity {
        certificate: certificate.to_owned(),
        key: key.to_owned(),
        source,
    };
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(identity)?;
    let builder = match client_authority {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let unusable = |reason: String| ConfigError::ClientAuthority {
                path: path.to_owned(),
                reason,
            };
            let mut roots = RootCertStore::empty();
            for root in certificates(path, "a certificate authority")? {
                roots
                    .add(root)
                    .map_err(|error| unusable(error.to_string()))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                .build()
                .map_err(|error| unusable(error.to_string()))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let config = builder.with_single_cert(chain, private).map_err(identity)?;
    Ok(Arc::new(config))
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
}

impl Tls {
    /// Await the client's hello. `output` is what goes before TLS, in the clear.
    pub fn new(config: Arc<ServerConfig>, output: VecDeque<Chunk>) -> Result<Self, rustls::Error> {
        let mut connection = ServerConnection::new(config)?;
        connection.set_buffer_limit(Some(2 * RECORD_BYTES));
        Ok(Self {
            connection,
            inbox: Inbox::new(INBOX_BYTES),
            output,
            encrypted_bytes: 0,
            broken: false,
        })
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
                Err(_) => break,
            }
            let mut unread = self.inbox.unread();
            if unread.is_empty() {
                return Ok(0);
            }
            let Ok(taken @ 1..) = self.connection.read_tls(&mut unread) else {
                break;
            };
            self.inbox.consume(taken);
            if self.connection.process_new_packets().is_err() {
                break;
            }
        }
        self.broken = true;
        Err(Broken)
    }

    /// Tell the peer that nothing follows.
    pub fn close(&mut self) {
        self.connection.send_close_notify();
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
