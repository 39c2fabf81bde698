//! What the nodes of the cluster are called, for lines of the log: the data path knows them by their numbers.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::OnceLock;

use hdcs_core::replication::Member;

use crate::config::cluster::Cluster;

/// The cluster of a process never changes.
static NAMES: OnceLock<BTreeMap<Member, String>> = OnceLock::new();

/// Know the nodes of this cluster by name from now on.
pub fn learn(cluster: &Cluster) {
    let nodes = cluster.nodes.iter();
    let names = nodes.map(|(name, node)| (node.member, name.clone()));
    let _ = NAMES.set(names.collect());
}

/// A node as it is called in the log: by its name, with its number.
#[derive(Clone, Copy, Debug)]
pub struct Named(pub Member);

impl fmt::Display for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match NAMES.get().and_then(|names| names.get(&self.0)) {
            Some(name) => write!(f, "{name} (number {})", self.0.0),
            None => write!(f, "{}", self.0),
        }
    }
}
