//! The section `[cluster]`: the nodes of a small, fixed cluster, which keep copies of one another's write logs.
//!
//! ```toml
//! [cluster]
//! id = "6f1c…"                        # the same on every node
//! node = "a"                          # which of the nodes below this one is
//! listen = "127.0.0.1:7001"
//! records = "/srv/hdcs-records"       # a directory that all nodes see
//!
//! [cluster.nodes.a]
//! number = 1
//! id = "0d3e…"
//! address = "127.0.0.1:7001"          # where the other nodes reach it
//! ```
//!
//! Invariants of a [`Cluster`]:
//! 1. This node is one of its nodes.
//! 2. No two nodes have a number, an id or an address in common.
//! 3. Other hosts reach this node by TLS only, unless the file says that it may be without.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use hdcs_api::value::Value;
use hdcs_core::base::limits::LEASE_MS_MAX;
use hdcs_core::replication::Member;
use hdcs_core::wire::{WIRE_VERSION, WIRE_VERSION_OLDEST};
use uuid::Uuid;

use super::value::{self, Setting};
use super::{ConfigError, Key, KeyError, suggest};

/// The name of the section.
pub const SECTION: &str = "cluster";
/// The table in it that has one table for each node.
const NODES: &str = "nodes";
/// Keys without a default.
pub(super) const NEEDED: [&str; 6] = ["id", "node", "listen", "records", "number", "address"];
/// Nodes of a fixed cluster at most: each one has to be written into the file of every other one.
pub const CLUSTER_NODES_MAX: usize = 64;
/// As long as a label of a host's name.
const NODE_NAME_BYTES_MAX: usize = 63;
/// As long as a host's name, and a port.
const ADDRESS_BYTES_MAX: usize = 253 + 6;

settings! {
    /// The keys of `[cluster]`, as they are written.
    ClusterSettings
    /// UUID of the cluster: the same in the file of each node, and in no other cluster. Make one with `uuidgen`.
    id: Option<Uuid> = None, ();
    /// Which of `[cluster.nodes.NAME]` this node is.
    node: Option<NodeName> = None, ();
    /// Where this node listens for the other nodes.
    listen: Option<ListenAddress> = None, ();
    /// Directory with the records of groups: one that all nodes see, such as on NFS, or on one machine any directory. It
    /// must be there. Whoever can write to it can take any volume of the cluster.
    records: Option<PathBuf> = None, "it is not given";
    /// Certificate chain (PEM) of this node, for both roles, with the DNS name `NODE-ID.CLUSTER-ID.hdcs`.
    tls_certificate: Option<PathBuf> = None, "no TLS";
    /// Private key (PEM) of the certificate.
    tls_key: Option<PathBuf> = None, "no TLS";
    /// Authority (PEM) that has signed the certificates of all nodes.
    tls_authority: Option<PathBuf> = None, "no TLS";
    /// Whether nodes on other hosts are spoken to without TLS: whoever reaches `listen` reads and changes what volumes hold.
    plain_open: bool = false, ();
    /// A member that answers nothing for so long is left out, and joins anew later. Until then writes wait for it.
    member_deadline_ms: u64 = 2_000, 100..=600_000;
    /// While clients write to a volume, a copy of it that is brought up gets so many MiB in a second beside what they write.
    /// Nothing holds it up while nobody writes.
    resync_mib_s: u64 = 64, 1..=1_000_000;
    /// The newest version of the messages between nodes that this node speaks: lower it while nodes of an older program are
    /// in the cluster, so that a downgrade stays possible. Two nodes speak the newest version that both have.
    wire_version_max: u64 = u64::from(WIRE_VERSION), u64::from(WIRE_VERSION_OLDEST)..=u64::from(WIRE_VERSION);
    /// For so long after its members have answered it a primary that is cut off goes on to answer reads. Another node that
    /// takes its group waits that out, unless the primary has given the group up. It is the same on all nodes.
    lease_ms: u64 = 2_000, 500..=u64::from(LEASE_MS_MAX);
}

settings! {
    /// The keys of `[cluster.nodes.NAME]`, as they are written.
    NodeEntry
    /// Its number, by which the records name it. It is never given to another node.
    number: u64 = 0, 1..=u64::from(u16::MAX);
    /// UUID of the node. Make one with `uuidgen`.
    id: Option<Uuid> = None, ();
    /// Where the other nodes reach it.
    address: Option<NodeAddress> = None, ();
}

/// The name of a node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NodeName(String);

impl NodeName {
    fn parse(text: &str) -> Option<Self> {
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
        let is_name = (1..=NODE_NAME_BYTES_MAX).contains(&text.len())
            && text.chars().all(is_allowed)
            && !text.starts_with('-');
        is_name.then(|| Self(text.to_owned()))
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// `HOST:PORT`; the host is looked up whenever it is connected to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NodeAddress(String);

impl NodeAddress {
    fn parse(text: &str) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        // An IPv6 address has colons of its own, and so stands in brackets.
        let is_host = if let Some(rest) = host.strip_prefix('[') {
            let ip = rest.strip_suffix(']');
            ip.is_some_and(|ip| ip.parse::<std::net::Ipv6Addr>().is_ok())
        } else {
            let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
            !host.is_empty() && host.chars().all(is_allowed)
        };
        let is_port = port.parse::<u16>().is_ok_and(|port| port > 0);
        (is_host && is_port && text.len() <= ADDRESS_BYTES_MAX).then(|| Self(text.to_owned()))
    }

    /// `HOST:PORT`.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// `IP:PORT` with a port that others can know: not 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListenAddress(SocketAddr);

/// A [`Setting`] that is one text, or was not given.
macro_rules! text_setting {
    ($kind:ty, $expects:literal, $parse:expr, $show:expr) => {
        impl Setting for Option<$kind> {
            type Bounds = ();
            fn expects((): &()) -> String {
                $expects.to_owned()
            }
            fn accept(value: &Value, (): &()) -> Option<Self> {
                match value {
                    Value::Text(text) => $parse(text.as_str()).map(Some),
                    _ => None,
                }
            }
            fn value(&self) -> Value {
                Value::Text(self.as_ref().map_or(String::new(), $show))
            }
        }
    };
}
text_setting!(
    Uuid,
    "a UUID in quotes, such as uuidgen prints",
    |text| Uuid::parse_str(text).ok().filter(|id| !id.is_nil()),
    ToString::to_string
);
text_setting!(
    NodeName,
    "the name of a node in quotes: letters, digits, `_` and `-`, 63 at most",
    NodeName::parse,
    ToString::to_string
);
text_setting!(
    NodeAddress,
    "\"HOST:PORT\" or \"[IPv6]:PORT\"",
    NodeAddress::parse,
    |address: &NodeAddress| address.0.clone()
);
text_setting!(
    ListenAddress,
    "\"IP:PORT\" or \"[IPv6]:PORT\", with a port from 1",
    |text: &str| {
        let address = text.parse().ok();
        address
            .filter(|address: &SocketAddr| address.port() > 0)
            .map(ListenAddress)
    },
    |address: &ListenAddress| address.0.to_string()
);

/// One node of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterNode {
    /// By what records name it.
    pub member: Member,
    /// By what it is known on connections.
    pub id: Uuid,
    /// Where it is reached.
    pub address: NodeAddress,
}

/// The files with which nodes prove who they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterTls {
    /// Certificate chain of this node.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// Who has signed the certificates of all nodes.
    pub authority: PathBuf,
}

/// A fixed cluster, and which of its nodes this one is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// UUID of the cluster.
    pub id: Uuid,
    /// Name of this node.
    pub node: String,
    /// What this node is, of [`Self::nodes`].
    pub own: ClusterNode,
    /// Where this node listens for the others.
    pub listen: SocketAddr,
    /// Directory with the records.
    pub records: PathBuf,
    /// How connections are encrypted; none: they are not.
    pub tls: Option<ClusterTls>,
    /// How long a member may leave everything unanswered, in milliseconds.
    pub member_deadline_ms: u64,
    /// What a copy that is brought up gets beside what clients write, in MiB in a second.
    pub resync_mib_s: u64,
    /// The newest version of the wire that it speaks.
    pub wire_version_max: u16,
    /// For how long a primary relies on what its members have answered, in milliseconds.
    pub lease_ms: u64,
    /// All nodes by name, this one included.
    pub nodes: BTreeMap<String, ClusterNode>,
}

impl Cluster {
    /// The node of a number, if the cluster has it.
    pub fn name_of(&self, member: Member) -> Option<&str> {
        let found = self.nodes.iter().find(|(_, node)| node.member == member);
        found.map(|(name, _)| name.as_str())
    }

    /// A node as it is called in messages: by its name, or by its number if the cluster does not have it.
    pub fn called(&self, member: Member) -> String {
        let name = self.name_of(member);
        name.map_or_else(|| format!("number {}", member.0), str::to_owned)
    }

    /// Read the section. The outer error is about one key, the inner one about several.
    pub(super) fn parse(section: &toml::Value) -> Result<Result<Self, ConfigError>, KeyError> {
        let mut settings = ClusterSettings::default();
        let mut nodes = BTreeMap::new();
        for (key, value) in table_of(SECTION, section)? {
            if key == NODES {
                nodes = parse_nodes(value)?;
                continue;
            }
            let set = |value: &Value| settings.set(key, value);
            let known = ClusterSettings::keys();
            set_key(SECTION, key, value, &known, set)?;
        }
        Ok(Self::of(settings, nodes))
    }

    fn of(
        settings: ClusterSettings,
        entries: BTreeMap<String, NodeEntry>,
    ) -> Result<Self, ConfigError> {
        let tls = tls_of(&settings)?;
        let node = needed("node", settings.node)?.0;
        let listen = needed("listen", settings.listen)?.0;
        if !listen.ip().is_loopback() && tls.is_none() && !settings.plain_open {
            return refuse(format!(
                "`listen` of [cluster] is {listen}, which other hosts can reach, without TLS: give `tls_certificate`, \
                 `tls_key` and `tls_authority`, or say `plain_open = true` if everybody there may read and change what \
                 volumes hold"
            ));
        }
        let nodes = nodes_of(entries)?;
        let Some(own) = nodes.get(&node).cloned() else {
            let names: Vec<_> = nodes.keys().map(String::as_str).collect();
            return refuse(format!(
                "`node` of [cluster] is \"{node}\", and there is no [cluster.nodes.{node}]: the nodes are {}",
                names.join(", ")
            ));
        };
        let records = needed("records", settings.records)?;
        if !records.is_absolute() {
            return refuse(format!(
                "`records` of [cluster] is {}: give an absolute path, since all nodes mean the same directory",
                records.display()
            ));
        }
        Ok(Self {
            id: needed("id", settings.id)?,
            node,
            own,
            listen,
            records,
            tls,
            member_deadline_ms: settings.member_deadline_ms,
            resync_mib_s: settings.resync_mib_s,
            wire_version_max: u16::try_from(settings.wire_version_max).unwrap_or(WIRE_VERSION),
            lease_ms: settings.lease_ms,
            nodes,
        })
    }
}

fn refuse<T>(message: String) -> Result<T, ConfigError> {
    Err(ConfigError::Relation(message))
}

fn needed<T>(key: &str, value: Option<T>) -> Result<T, ConfigError> {
    value.map_or_else(
        || refuse(format!("[cluster] needs `{key}`: see docs/GROUPS.md")),
        Ok,
    )
}

fn tls_of(settings: &ClusterSettings) -> Result<Option<ClusterTls>, ConfigError> {
    match (
        &settings.tls_certificate,
        &settings.tls_key,
        &settings.tls_authority,
    ) {
        (None, None, None) => Ok(None),
        (Some(certificate), Some(key), Some(authority)) => Ok(Some(ClusterTls {
            certificate: certificate.clone(),
            key: key.clone(),
            authority: authority.clone(),
        })),
        _ => refuse(
            "`tls_certificate`, `tls_key` and `tls_authority` of [cluster] belong together: give all or none"
                .to_owned(),
        ),
    }
}

/// The nodes, each with all that it needs and nothing that another one has.
fn nodes_of(
    entries: BTreeMap<String, NodeEntry>,
) -> Result<BTreeMap<String, ClusterNode>, ConfigError> {
    if !(2..=CLUSTER_NODES_MAX).contains(&entries.len()) {
        return refuse(format!(
            "[cluster] has from 2 to {CLUSTER_NODES_MAX} nodes, and the file has {} of [cluster.nodes.NAME]",
            entries.len()
        ));
    }
    let mut nodes: BTreeMap<String, ClusterNode> = BTreeMap::new();
    for (name, entry) in entries {
        let lacks = |key: &str| format!("[cluster.nodes.{name}] needs `{key}`");
        let (Some(id), Some(address)) = (entry.id, entry.address) else {
            return refuse(lacks(if entry.id.is_none() { "id" } else { "address" }));
        };
        if entry.number == 0 {
            return refuse(lacks("number"));
        }
        let node = ClusterNode {
            member: Member(entry.number as u16),
            id,
            address,
        };
        for (other, theirs) in &nodes {
            let twice = |key: &str, value: &dyn fmt::Display| {
                refuse(format!(
                    "[cluster.nodes.{other}] and [cluster.nodes.{name}] have the same `{key}`, {value}: give each node \
                     one of its own"
                ))
            };
            if theirs.member == node.member {
                return twice("number", &node.member.0);
            }
            if theirs.id == node.id {
                return twice("id", &node.id);
            }
            if theirs.address == node.address {
                return twice("address", &node.address.0);
            }
        }
        nodes.insert(name, node);
    }
    Ok(nodes)
}

fn parse_nodes(nodes: &toml::Value) -> Result<BTreeMap<String, NodeEntry>, KeyError> {
    let at = format!("{SECTION}.{NODES}");
    let mut entries = BTreeMap::new();
    for (name, node) in table_of(&at, nodes)? {
        if NodeName::parse(name).is_none() {
            return Err(KeyError::Value {
                key: at,
                expected: "names with letters, digits, `_` and `-`, 63 at most".to_owned(),
                found: format!("\"{name}\""),
            });
        }
        let at = format!("{at}.{name}");
        let mut entry = NodeEntry::default();
        for (key, value) in table_of(&at, node)? {
            let set = |value: &Value| entry.set(key, value);
            set_key(&at, key, value, &NodeEntry::keys(), set)?;
        }
        entries.insert(name.clone(), entry);
    }
    Ok(entries)
}

fn table_of<'a>(at: &str, value: &'a toml::Value) -> Result<&'a toml::Table, KeyError> {
    value.as_table().ok_or_else(|| KeyError::Value {
        key: at.to_owned(),
        expected: format!("a table: write [{at}]"),
        found: value.type_str().to_owned(),
    })
}

/// Set one key of a table; errors name it with its table.
fn set_key(
    at: &str,
    key: &str,
    value: &toml::Value,
    known: &[Key],
    set: impl FnOnce(&Value) -> Result<bool, KeyError>,
) -> Result<(), KeyError> {
    let name = format!("{at}.{key}");
    let Some(described) = known.iter().find(|known| known.name == key) else {
        let mut names: BTreeSet<&str> = known.iter().map(|key| key.name).collect();
        if at == SECTION {
            names.insert(NODES);
        }
        return Err(KeyError::Unknown {
            key: name,
            suggestion: suggest(key, names.iter().copied()),
        });
    };
    let refused = |found: String| KeyError::Value {
        key: name.clone(),
        expected: described.expects.clone(),
        found,
    };
    let value = value::from_toml(value).map_err(refused)?;
    match set(&value) {
        Ok(_) => Ok(()),
        Err(_) => Err(refused(value.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::Config;

    const GOOD: &str = r#"
[cluster]
id = "6f1c1a52-9f1b-4a53-9e07-1f60b3f1f001"
node = "a"
listen = "127.0.0.1:7001"
records = "/srv/records"

[cluster.nodes.a]
number = 1
id = "6f1c1a52-9f1b-4a53-9e07-1f60b3f1f00a"
address = "127.0.0.1:7001"

[cluster.nodes.b]
number = 2
id = "6f1c1a52-9f1b-4a53-9e07-1f60b3f1f00b"
address = "[::1]:7001"
"#;

    fn parse(text: &str) -> Result<Config, ConfigError> {
        Config::parse(text, Path::new("test.toml"))
    }

    fn refused(from: &str, to: &str) -> String {
        assert!(GOOD.contains(from), "{from}");
        let text = GOOD.replacen(from, to, 1);
        parse(&text).expect_err(&text).to_string()
    }

    #[test]
    fn cluster_is_what_the_section_says() {
        assert_eq!(parse("").unwrap().cluster, None);
        let config = parse(&format!("memory_max_mib = 1024\n{GOOD}")).unwrap();
        assert_eq!(config.node.memory_max_mib, 1024);
        let cluster = config.cluster.unwrap();
        assert_eq!(
            (cluster.node.as_str(), cluster.own.member),
            ("a", Member(1))
        );
        assert_eq!(cluster.listen, "127.0.0.1:7001".parse().unwrap());
        assert_eq!(cluster.member_deadline_ms, 2000);
        assert_eq!(cluster.wire_version_max, WIRE_VERSION);
        assert_eq!(cluster.lease_ms, 2000);
        assert_eq!(cluster.records, Path::new("/srv/records"));
        assert_eq!(cluster.nodes["b"].address.as_str(), "[::1]:7001");
        assert_eq!(cluster.name_of(Member(2)), Some("b"));
        assert_eq!(cluster.called(Member(3)), "number 3");
        assert_eq!(cluster.tls, None);
    }

    #[test]
    fn cluster_takes_tls_as_a_whole() {
        let all = "listen = \"0.0.0.0:7001\"\ntls_certificate = \"/c\"\ntls_key = \"/k\"\ntls_authority = \"/a\"";
        let with = GOOD.replacen("listen = \"127.0.0.1:7001\"", all, 1);
        let tls = parse(&with).unwrap().cluster.unwrap().tls.unwrap();
        assert_eq!(tls.authority, Path::new("/a"));
        let part = refused("records", "tls_key = \"/k\"\nrecords");
        assert!(part.contains("belong together"), "{part}");
        let open = refused("127.0.0.1:7001", "0.0.0.0:7001");
        assert!(
            open.contains("other hosts can reach") && open.contains("plain_open"),
            "{open}"
        );
        let said = all.split('\n').next().unwrap().to_owned() + "\nplain_open = true";
        let plain = GOOD.replacen("listen = \"127.0.0.1:7001\"", &said, 1);
        assert_eq!(parse(&plain).unwrap().cluster.unwrap().tls, None);
    }

    #[test]
    fn cluster_that_is_not_whole_is_refused_by_what_it_lacks() {
        for (from, to, part) in [
            (
                "id = \"6f1c1a52-9f1b-4a53-9e07-1f60b3f1f001\"",
                "",
                "needs `id`",
            ),
            ("node = \"a\"", "", "needs `node`"),
            ("listen = \"127.0.0.1:7001\"", "", "needs `listen`"),
            ("records = \"/srv/records\"", "", "needs `records`"),
            ("\"/srv/records\"", "\"records\"", "absolute path"),
            ("node = \"a\"", "node = \"c\"", "the nodes are a, b"),
            ("number = 2", "", "[cluster.nodes.b] needs `number`"),
            (
                "address = \"[::1]:7001\"",
                "",
                "[cluster.nodes.b] needs `address`",
            ),
            (
                "id = \"6f1c1a52-9f1b-4a53-9e07-1f60b3f1f00b\"",
                "",
                "[cluster.nodes.b] needs `id`",
            ),
        ] {
            let error = refused(from, to);
            assert!(error.contains(part), "{error}");
        }
        let (alone, _) = GOOD.split_once("[cluster.nodes.b]").unwrap();
        let error = parse(alone).unwrap_err().to_string();
        assert!(
            error.contains("from 2 to 64 nodes, and the file has 1"),
            "{error}"
        );
    }

    #[test]
    fn cluster_with_two_nodes_that_are_one_is_refused() {
        for (from, to, key) in [
            ("number = 2", "number = 1", "`number`, 1"),
            ("1f60b3f1f00b", "1f60b3f1f00a", "`id`, 6f1c1a52"),
            ("[::1]:7001", "127.0.0.1:7001", "`address`, 127.0.0.1:7001"),
        ] {
            let error = refused(from, to);
            assert!(
                error.contains("[cluster.nodes.a] and [cluster.nodes.b] have the same")
                    && error.contains(key),
                "{error}"
            );
        }
    }

    #[test]
    fn cluster_value_of_another_kind_names_its_key() {
        for (from, to, part) in [
            (
                "number = 2",
                "number = 0",
                "`cluster.nodes.b.number` takes a whole number from 1 to 65535, found 0",
            ),
            ("number = 2", "number = 65536", "found 65536"),
            (
                "\"127.0.0.1:7001\"",
                "\"127.0.0.1:0\"",
                "`cluster.listen` takes \"IP:PORT\"",
            ),
            (
                "\"127.0.0.1:7001\"",
                "7001",
                "`cluster.listen` takes \"IP:PORT\"",
            ),
            (
                "\"[::1]:7001\"",
                "\"::1:7001\"",
                "`cluster.nodes.b.address` takes \"HOST:PORT\"",
            ),
            ("\"[::1]:7001\"", "\"host\"", "found \"host\""),
            ("\"[::1]:7001\"", "\"a b:1\"", "found \"a b:1\""),
            (
                "\"6f1c1a52-9f1b-4a53-9e07-1f60b3f1f001\"",
                "\"lab\"",
                "`cluster.id` takes a UUID",
            ),
            (
                "node = \"a\"",
                "node = \"a/b\"",
                "`cluster.node` takes the name of a node",
            ),
            (
                "[cluster.nodes.b]",
                "[cluster.nodes.\"a b\"]",
                "`cluster.nodes` takes names with letters",
            ),
            (
                "[cluster]",
                "[cluster]\nmember_deadline_s = 2",
                "did you mean `member_deadline_ms`?",
            ),
            (
                "number = 2",
                "numbr = 2",
                "unknown key `cluster.nodes.b.numbr`: did you mean `number`?",
            ),
            (
                "[cluster.nodes.b]",
                "[cluster.nods.b]",
                "unknown key `cluster.nods`",
            ),
        ] {
            let error = refused(from, to);
            assert!(error.contains(part), "{error}");
        }
        let error = parse("cluster = 1").unwrap_err().to_string();
        assert!(
            error.contains("`cluster` takes a table: write [cluster], found integer"),
            "{error}"
        );
        let error = parse("[cluster]\nnodes = 1").unwrap_err().to_string();
        assert!(error.contains("`cluster.nodes` takes a table"), "{error}");
    }
}
