//! What a node needs at its start to speak with the others of its cluster.

use std::fs::{self, File};
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::time::{Duration, Instant};

use hdcs_core::base::buf::Pool;
use hdcs_core::base::io::Nanos;
use hdcs_core::base::limits::WIRE_CREDIT_BYTES_MIN;
use hdcs_core::replication::participant::Times;
use hdcs_core::wire::{BootId, ClusterId, NodeId};
use hdcs_messenger::handshake::{Identity, Own, Versions};
use hdcs_messenger::tls::{Credentials, CredentialsError, Files};
use thiserror::Error;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use uuid::Uuid;

use super::names;
use super::records::{RecordStore, StoreError};
use crate::catalogue::{self, Found};
use crate::config::cluster::{Cluster, ClusterNode};
use crate::data_dir::Layout;
use crate::shard::groups::{GroupEvent, GroupsConfig};
use crate::shard::links::{self, LinksConfig, PeerConfig};

/// How long an address that is in use is waited for, and how often it is tried meanwhile.
const ADDRESS_PATIENCE: Duration = Duration::from_secs(2);
const ADDRESS_PAUSE: Duration = Duration::from_millis(20);
/// Memory that spans of other nodes come into.
const SPANS_BYTES: usize = 64 << 20;

/// Why a node cannot speak with others.
#[derive(Debug, Error)]
pub enum JoinError {
    /// It cannot listen.
    #[error(
        "`listen` of [cluster], {address}: {source}: stop the program that has that address, or change it"
    )]
    Listen {
        /// Where.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// Another node's address means nothing.
    #[error("`address` of [cluster.nodes.{name}], {address}: it cannot be looked up: {why}")]
    Address {
        /// Which node.
        name: String,
        /// What the file says.
        address: String,
        /// Why.
        why: String,
    },
    /// Its certificate is of no use.
    #[error("the TLS files of [cluster]: {0}")]
    Tls(#[from] CredentialsError),
}

/// See that the records are this cluster's, and that this node runs only once; what is to be held for that. A node that has
/// copies already has had records: an empty directory is one that is not mounted, and is not made another cluster's.
pub fn claim_records(cluster: &Cluster, layout: &Layout) -> Result<File, StoreError> {
    let (records, member) = (&cluster.records, cluster.own.member);
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let who = format!(
        "node {}, process {} on {}, data directory {}",
        cluster.node,
        std::process::id(),
        host.trim(),
        layout.root().display()
    );
    let store = RecordStore::new(records, member);
    let root = layout.root();
    let found = catalogue::list(layout).map_err(|source| StoreError::Io {
        path: root.to_owned(),
        source,
    })?;
    let has_copy = |found: &Found| matches!(found, Found::Entry(entry) if entry.is_replicated);
    if found.values().any(has_copy) {
        store.is_there()?;
    }
    // Before anything is written there, or a node of that cluster is kept from starting.
    store.is_of(cluster.id)?;
    let running = store.be_the_only_one(&who)?;
    RecordStore::open(records, member)?.claim(cluster.id)?;
    Ok(running)
}

/// What the first shard needs to have copies, for the run of this node that has this number; and what it tells of them.
pub fn join(
    cluster: &Cluster,
    run: u64,
) -> Result<(GroupsConfig, UnboundedReceiver<GroupEvent>), JoinError> {
    names::learn(cluster);
    let address = cluster.listen;
    let listener = listen(address).map_err(|source| JoinError::Listen { address, source })?;
    let others = (cluster.nodes.iter()).filter(|(_, node)| node.member != cluster.own.member);
    let peers: Result<Vec<_>, _> = others.map(|(name, node)| peer(name, node)).collect();
    let credentials = cluster.tls.as_ref().map(|tls| {
        Credentials::load(&Files {
            certificate: tls.certificate.clone(),
            key: tls.key.clone(),
            authority: tls.authority.clone(),
            revocations: None,
        })
    });
    let boot = Uuid::new_v4();
    let (events, told) = unbounded_channel();
    let links = LinksConfig {
        own: Own {
            identity: Identity {
                cluster: ClusterId(*cluster.id.as_bytes()),
                node: NodeId(*cluster.own.id.as_bytes()),
                number: u32::from(cluster.own.member.0),
                boot: BootId(*boot.as_bytes()),
                boots: run,
            },
            versions: Versions::KNOWN.limited(cluster.wire_version_max),
            credit_bytes: 2 * WIRE_CREDIT_BYTES_MIN,
        },
        peers: peers?,
        credentials: credentials.transpose()?,
        pool: Pool::new(SPANS_BYTES),
        seed: boot.as_u64_pair().0,
        times: links::Times::default(),
    };
    let config = GroupsConfig {
        me: cluster.own.member,
        times: Times {
            member_max: Nanos::from_millis(cluster.member_deadline_ms),
            lease: Nanos::from_millis(cluster.lease_ms),
            ..Times::default()
        },
        resync_bytes_s: cluster.resync_mib_s << 20,
        links,
        listener: listener.into(),
        events,
    };
    Ok((config, told))
}

/// Listen. The kernel lets go of a killed program's address only after its operations in flight have ended, which may be a
/// moment after the program has gone.
fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let began = Instant::now();
    loop {
        match TcpListener::bind(address) {
            Err(error)
                if error.kind() == io::ErrorKind::AddrInUse
                    && began.elapsed() < ADDRESS_PATIENCE =>
            {
                std::thread::sleep(ADDRESS_PAUSE);
            }
            bound => return bound,
        }
    }
}

fn peer(name: &str, node: &ClusterNode) -> Result<PeerConfig, JoinError> {
    let text = node.address.as_str();
    let unknown = |why: String| JoinError::Address {
        name: name.to_owned(),
        address: text.to_owned(),
        why,
    };
    let mut found = text
        .to_socket_addrs()
        .map_err(|error| unknown(error.to_string()))?;
    let address = found.next();
    Ok(PeerConfig {
        member: node.member,
        node: NodeId(*node.id.as_bytes()),
        address: address.ok_or_else(|| unknown("there is no such host".to_owned()))?,
    })
}
