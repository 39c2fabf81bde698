//! Mutual TLS between nodes, without I/O: both show a certificate that the cluster's authority has signed.
//!
//! A node's certificate has the DNS name [`certificate_name`] of its cluster and itself, and is good for servers and clients.
//! So a certificate opens nothing in another cluster, and nobody can speak for another node: the side that connects checks the
//! name in the handshake, the other once it was greeted ([`Transport::vouches_for`]). Only TLS 1.3 is spoken, and no session is
//! resumed.
//!
//! What is received cannot land where it is to lie: ciphertext goes to an inbox of this, and what it decrypts to is copied to
//! the place that the link names; what is sent is copied as it is encrypted. That is the price of rustls without kernel TLS.
//! Both buffers are bounded. A broken record, or a peer that closes TCP in mid-record, ends the link with an error.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, IoSlice, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hdcs_core::base::inbox::Inbox;
use hdcs_core::base::io::Nanos;
use hdcs_core::wire::{ClusterId, NodeId};
use rustls::client::{Resumption, WebPkiServerVerifier, verify_server_name};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName};
use rustls::server::{NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use rustls::{
    ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection,
};
use smallvec::SmallVec;
use thiserror::Error;

use crate::error::Why;
use crate::handshake::Identity;
use crate::link::Link;
use crate::transport::{Chunk, Receive, Transport, waiting_bytes};

/// Ciphertext received at once: several of the largest records (16 KiB and a little each).
const INBOX_BYTES: usize = 128 << 10;
/// Ciphertext made ahead of what the driver has taken.
const OUTPUT_BYTES_MAX: usize = 128 << 10;
/// Plaintext of one record at most.
const RECORD_BYTES: usize = 16 << 10;
/// What a connection of the library takes up, with a record each way.
const STATE_BYTES: usize = 48 << 10;

/// The DNS name in the certificate of a node: `NODE.CLUSTER.hdcs`, of UUIDs.
pub fn certificate_name(cluster: ClusterId, node: NodeId) -> String {
    format!("{node}.{cluster}.hdcs")
}

/// Why credentials cannot be used.
#[derive(Debug, Error)]
pub enum CredentialsError {
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
    /// A file holds nothing of what it should.
    #[error("{}: holds no {what} (a PEM block `{block}` is expected)", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
        /// What it should hold.
        what: &'static str,
        /// In which PEM block.
        block: &'static str,
    },
    /// Certificate and key are not usable, or do not belong together.
    #[error("{} with key {}: {source}", certificate.display(), key.display())]
    Identity {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// Why not.
        source: rustls::Error,
    },
    /// The authority, or a list of what it has revoked, cannot be used.
    #[error("{}: cannot be used as authority of the cluster's nodes, or its list of revoked certificates: {reason}", path.display())]
    Authority {
        /// The authority's file.
        path: PathBuf,
        /// What the library says.
        reason: String,
    },
}

/// The files of a node that speaks TLS to others, all PEM.
#[derive(Clone, Debug, Default)]
pub struct Files {
    /// Its chain of certificates.
    pub certificate: PathBuf,
    /// The key of that.
    pub key: PathBuf,
    /// The authority of the cluster's nodes.
    pub authority: PathBuf,
    /// Lists of what that has revoked.
    pub revocations: Option<PathBuf>,
}

/// How a node speaks TLS to others, in both roles.
#[derive(Clone)]
pub struct Credentials {
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credentials")
    }
}

impl Credentials {
    /// Those in these files.
    pub fn load(files: &Files) -> Result<Self, CredentialsError> {
        let chain = certificates(&files.certificate, "certificate")?;
        let key =
            PrivateKeyDer::from_pem_file(&files.key).map_err(|source| CredentialsError::Pem {
                path: files.key.clone(),
                what: "a private key",
                source,
            })?;
        let mut roots = RootCertStore::empty();
        let authority = |reason: String| CredentialsError::Authority {
            path: files.authority.clone(),
            reason,
        };
        for root in certificates(&files.authority, "certificate authority")? {
            let added = roots.add(root);
            added.map_err(|error| authority(error.to_string()))?;
        }
        let roots = Arc::new(roots);
        let lists = match &files.revocations {
            Some(path) => revocations(path)?,
            None => Vec::new(),
        };
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let clients =
            WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider));
        let clients = clients.with_crls(lists.clone()).build();
        let clients = clients.map_err(|error| authority(error.to_string()))?;
        let servers = WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(&provider));
        let servers = servers.with_crls(lists).build();
        let servers = servers.map_err(|error| authority(error.to_string()))?;
        let identity = |source| CredentialsError::Identity {
            certificate: files.certificate.clone(),
            key: files.key.clone(),
            source,
        };
        let versions = &[&rustls::version::TLS13];
        let server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(versions)
            .map_err(identity)?
            .with_client_cert_verifier(clients);
        let mut server = server
            .with_single_cert(chain.clone(), key.clone_key())
            .map_err(identity)?;
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        let client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .map_err(identity)?
            .with_webpki_verifier(servers);
        let mut client = client.with_client_auth_cert(chain, key).map_err(identity)?;
        client.resumption = Resumption::disabled();
        Ok(Self {
            server: Arc::new(server),
            client: Arc::new(client),
        })
    }

    /// TLS with a node that is connected to.
    pub fn connect(&self, cluster: ClusterId, node: NodeId) -> Result<Tls, TlsError> {
        let name = server_name(cluster, node)?;
        let connection = ClientConnection::new(Arc::clone(&self.client), name);
        Ok(Tls::new(Connection::Client(connection.map_err(TlsError)?)))
    }

    /// TLS with somebody who has connected.
    pub fn accept(&self) -> Result<Tls, TlsError> {
        let connection = ServerConnection::new(Arc::clone(&self.server));
        Ok(Tls::new(Connection::Server(connection.map_err(TlsError)?)))
    }
}

fn server_name(cluster: ClusterId, node: NodeId) -> Result<ServerName<'static>, TlsError> {
    ServerName::try_from(certificate_name(cluster, node)).map_err(|_| {
        // UUIDs make names.
        TlsError(rustls::Error::General("not a name".to_owned()))
    })
}

fn certificates(
    path: &Path,
    what: &'static str,
) -> Result<Vec<CertificateDer<'static>>, CredentialsError> {
    let found = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|source| CredentialsError::Pem {
            path: path.to_owned(),
            what: "a certificate",
            source,
        })?;
    full(path, what, "CERTIFICATE", found)
}

fn revocations(
    path: &Path,
) -> Result<Vec<CertificateRevocationListDer<'static>>, CredentialsError> {
    let found = CertificateRevocationListDer::pem_file_iter(path)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|source| CredentialsError::Pem {
            path: path.to_owned(),
            what: "a list of revoked certificates",
            source,
        })?;
    full(path, "list of revoked certificates", "X509 CRL", found)
}

fn full<T>(
    path: &Path,
    what: &'static str,
    block: &'static str,
    found: Vec<T>,
) -> Result<Vec<T>, CredentialsError> {
    if found.is_empty() {
        let path = path.to_owned();
        return Err(CredentialsError::Empty { path, what, block });
    }
    Ok(found)
}

/// What ended TLS, with what it means for whoever operates the nodes.
#[derive(Clone, Debug, PartialEq, Error)]
#[error("{}", meaning(.0))]
pub struct TlsError(pub rustls::Error);

fn meaning(error: &rustls::Error) -> String {
    use rustls::{AlertDescription as Alert, CertificateError as Bad, Error};
    let said = match error {
        Error::NoCertificatesPresented => {
            "the peer showed no certificate: give it one of the cluster's authority"
        }
        Error::InvalidCertificate(bad) => match bad {
            // Another authority of the same name is one whose signature is not good.
            Bad::UnknownIssuer | Bad::BadSignature => {
                "the cluster's authority has not signed the peer's certificate: it is of another cluster, or its authority was renewed"
            }
            Bad::Revoked => "the peer's certificate is revoked",
            Bad::UnknownRevocationStatus => {
                "no list of revoked certificates is of the authority that signed the peer's certificate"
            }
            Bad::Expired | Bad::ExpiredContext { .. } => {
                "the peer's certificate has expired: renew it, or set the clock"
            }
            Bad::NotValidYet | Bad::NotValidYetContext { .. } => {
                "the peer's certificate is not valid yet: set the clock"
            }
            Bad::NotValidForName | Bad::NotValidForNameContext { .. } => {
                "the peer's certificate is of another node: check the addresses of the nodes"
            }
            Bad::InvalidPurpose | Bad::InvalidPurposeContext { .. } => {
                "the peer's certificate is not good for both servers and clients, as a node's has to be"
            }
            other => return format!("the peer's certificate is not good: {other}"),
        },
        Error::AlertReceived(Alert::UnknownCA | Alert::DecryptError) => {
            "the peer does not know the authority of this node's certificate: it is of another cluster, or its authority was renewed"
        }
        Error::AlertReceived(Alert::CertificateRequired) => {
            "the peer wants a certificate, and this node showed none"
        }
        Error::AlertReceived(
            Alert::BadCertificate
            | Alert::CertificateUnknown
            | Alert::CertificateExpired
            | Alert::CertificateRevoked
            | Alert::UnsupportedCertificate,
        ) => {
            "the peer refused this node's certificate: it has expired, was revoked, or has the wrong name; see the peer's log"
        }
        Error::DecryptError => "a record was damaged between the two nodes: check the network",
        Error::InvalidMessage(_) => {
            "the peer does not speak TLS, or a record was damaged: check that both nodes have TLS on or off"
        }
        other => {
            return format!("{other}: check that both nodes have TLS on or off, and their logs");
        }
    };
    said.to_owned()
}

/// One side of a TLS connection.
#[derive(Debug)]
pub struct Tls {
    connection: Connection,
    /// Ciphertext that was received and not read.
    inbox: Inbox,
    /// Ciphertext on its way out.
    output: VecDeque<Chunk>,
    /// How much of the link's first chunk is encrypted already.
    encrypted_bytes: usize,
    is_broken: bool,
    is_closed: bool,
    now: Nanos,
}

/// What comes of reading.
enum Plaintext {
    Bytes(usize),
    /// More ciphertext is needed.
    More,
    /// The peer has closed TLS in order.
    End,
}

impl Tls {
    fn new(mut connection: Connection) -> Self {
        connection.set_buffer_limit(Some(2 * RECORD_BYTES));
        Self {
            connection,
            inbox: Inbox::new(INBOX_BYTES),
            output: VecDeque::new(),
            encrypted_bytes: 0,
            is_broken: false,
            is_closed: false,
            now: Nanos(0),
        }
    }

    /// Give the link what can be decrypted, as far as it takes it.
    fn pump(&mut self, link: &mut Link) {
        while !self.is_broken {
            let place = match link.receive() {
                Receive::Into(place) | Receive::IntoBoth(place, _) => place,
                Receive::Wait | Receive::Close => return,
            };
            match self.read(place) {
                Ok(Plaintext::Bytes(bytes)) => link.received(bytes, self.now),
                Ok(Plaintext::More) => return,
                Ok(Plaintext::End) => return link.received(0, self.now),
                Err(error) => {
                    self.is_broken = true;
                    link.broke(Why::Tls(TlsError(error)));
                }
            }
        }
    }

    /// Decrypt into `place`.
    fn read(&mut self, place: &mut [u8]) -> Result<Plaintext, rustls::Error> {
        loop {
            match self.connection.reader().read(place) {
                Ok(0) => return Ok(Plaintext::End),
                Ok(bytes) => return Ok(Plaintext::Bytes(bytes)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return Err(rustls::Error::General("cannot be read".to_owned())),
            }
            let mut unread = self.inbox.unread();
            if unread.is_empty() {
                return Ok(Plaintext::More);
            }
            // Everything decrypted was read, so there is room for more.
            match self.connection.read_tls(&mut unread) {
                Ok(taken @ 1..) => self.inbox.consume(taken),
                _ => return Err(rustls::Error::General("takes no more records".to_owned())),
            }
            self.connection.process_new_packets()?;
        }
    }

    /// Encrypt what the link has to say, as far as there is room.
    fn encrypt(&mut self, link: &mut Link) {
        let mut cipher = Vec::new();
        let mut room = OUTPUT_BYTES_MAX.saturating_sub(waiting_bytes(&self.output));
        drain(&mut self.connection, &mut cipher);
        let is_ready = !self.connection.is_handshaking() && !self.is_broken;
        let mut is_drained = is_ready;
        if is_ready {
            let plain = link.output();
            while room > 0 && !plain.is_empty() {
                // The buffer of the connection is empty and larger than a record, so it takes some.
                let written = {
                    let slices = record(plain, self.encrypted_bytes, room.min(RECORD_BYTES));
                    self.connection.writer().write_vectored(&slices)
                };
                let Ok(taken @ 1..) = written else {
                    self.is_broken = true;
                    break;
                };
                room -= taken;
                self.encrypted_bytes = consume(plain, self.encrypted_bytes + taken);
                drain(&mut self.connection, &mut cipher);
            }
            is_drained = plain.is_empty();
        }
        if is_drained && link.ended().is_some() && !self.is_closed {
            self.is_closed = true;
            self.connection.send_close_notify();
            drain(&mut self.connection, &mut cipher);
        }
        if !cipher.is_empty() {
            let cipher = SmallVec::from_vec(cipher);
            self.output.push_back(Chunk::Bytes(cipher));
        }
    }
}

impl Transport for Tls {
    fn receive<'a>(&'a mut self, link: &'a mut Link) -> Receive<'a> {
        self.pump(link);
        match link.receive() {
            Receive::Wait => Receive::Wait,
            Receive::Close => Receive::Close,
            // What there was is read, so there is room.
            Receive::Into(_) | Receive::IntoBoth(..) => Receive::Into(self.inbox.room()),
        }
    }

    fn received(&mut self, bytes: usize, link: &mut Link, now: Nanos) {
        self.now = now;
        if bytes == 0 {
            if self.connection.is_handshaking() {
                link.broke(Why::NoTls);
            }
            return link.received(0, now);
        }
        self.inbox.received(bytes);
        self.pump(link);
    }

    fn output<'a>(&'a mut self, link: &'a mut Link, now: Nanos) -> &'a mut VecDeque<Chunk> {
        self.now = now;
        self.encrypt(link);
        &mut self.output
    }

    fn vouches_for(&self, peer: &Identity) -> bool {
        let Some([own, ..]) = self.connection.peer_certificates() else {
            return false;
        };
        let (Ok(certificate), Ok(name)) = (
            ParsedCertificate::try_from(own),
            server_name(peer.cluster, peer.node),
        ) else {
            return false;
        };
        verify_server_name(&certificate, &name).is_ok()
    }

    fn held_bytes(&self) -> usize {
        self.inbox.capacity() + waiting_bytes(&self.output) + STATE_BYTES
    }
}

/// What the next record is made of, of so many bytes at most: fronts of frames and blocks of data are small, and each record
/// costs more than its bytes do. The first `skip` bytes are in records before.
fn record(
    plain: &VecDeque<Chunk>,
    mut skip: usize,
    bytes_max: usize,
) -> SmallVec<[IoSlice<'_>; 8]> {
    let mut slices = SmallVec::new();
    let mut room = bytes_max;
    for chunk in plain {
        let rest = &chunk.bytes()[skip..];
        skip = 0;
        let taken = rest.len().min(room);
        slices.push(IoSlice::new(&rest[..taken]));
        room -= taken;
        if room == 0 {
            break;
        }
    }
    slices
}

/// So many bytes are in records. Returns how many of the first chunk that is left.
fn consume(plain: &mut VecDeque<Chunk>, mut bytes: usize) -> usize {
    while let Some(chunk) = plain.front()
        && bytes >= chunk.bytes().len()
    {
        bytes -= chunk.bytes().len();
        plain.pop_front();
    }
    bytes
}

/// Move what the connection wants to send to `cipher`.
fn drain(connection: &mut Connection, cipher: &mut Vec<u8>) {
    while connection.wants_write() && connection.write_tls(cipher).is_ok() {}
}

#[cfg(test)]
mod tests;
