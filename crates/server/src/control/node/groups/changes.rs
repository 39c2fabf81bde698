//! Groups that are to be others: more or fewer copies, on other nodes, another level, and what becomes of writes for want
//! of members. What is asked for is checked here, at the node that serves; records are written by the data path.

use hdcs_api::groups::{Group, GroupChange};
use hdcs_api::{ApiError, ErrorKind};
use hdcs_core::replication::record::{GroupRecord, Nodes, Phase, Shape, WhenShort};

use super::Groups;
use crate::cluster::{ack_level, when_short};
use crate::config::cluster::Cluster;
use crate::control::node::replicas::begin;
use crate::control::node::{Node, invalid};

/// Copies of a log in all.
const REPLICAS: std::ops::RangeInclusive<usize> = 1..=3;

/// Have the copies of a volume be what is asked for. A volume of this node alone gets a group.
pub async fn set_group(node: &Node, name: &str, change: GroupChange) -> Result<Group, ApiError> {
    let entry = node.volumes.known(name).ok();
    if let Some(entry) = entry.filter(|entry| !entry.is_replicated) {
        let plan = node.groups.plan_for(&entry, &change)?;
        begin(node, &entry, plan).await?;
        return node.groups.show(name).await;
    }
    node.groups.set(name, change).await
}

impl Groups {
    /// Have the group of a volume become what is asked for, at the node that serves it.
    pub async fn set(&self, name: &str, change: GroupChange) -> Result<Group, ApiError> {
        let cluster = self.cluster()?;
        let (spec, record) = self.find(name).await?;
        let at = |why: String| format!("volume {name}: {why}");
        if let Some(why) = served_elsewhere(cluster, &record) {
            return Err(ApiError::new(ErrorKind::Conflict, at(why)));
        }
        if !self.is_served(spec.uuid) {
            let why = "its group is this node's, and this node does not serve it yet: try again";
            return Err(ApiError::new(ErrorKind::Conflict, at(why.to_owned())));
        }
        let shape = shape(cluster, &record, &change).map_err(|why| invalid(at(why)))?;
        if record.toward(&shape).is_some() {
            (self.replication()?.configure(spec, record, shape)).await?;
        }
        self.show(name).await
    }
}

/// Who is to be asked in place of this node, if it does not serve.
fn served_elsewhere(cluster: &Cluster, record: &GroupRecord) -> Option<String> {
    match record.phase {
        Phase::Serving { primary } if primary == cluster.own.member => None,
        Phase::Serving { primary } => Some(format!(
            "node {} serves it, and this is node {}: ask that one",
            cluster.called(primary),
            cluster.node
        )),
        Phase::Taking { candidate } => Some(format!(
            "node {} takes it over: ask that one once it serves",
            cluster.called(candidate)
        )),
    }
}

/// What the group of this record is to be, of which this node is the primary.
fn shape(cluster: &Cluster, record: &GroupRecord, change: &GroupChange) -> Result<Shape, String> {
    let config = &record.config;
    let nodes = nodes(cluster, record, change)?;
    let replicas = nodes.len() as u8;
    let copies_min = change
        .copies_min
        .unwrap_or_else(|| config.copies_min.min(replicas));
    if !(1..=replicas).contains(&copies_min) {
        return Err(format!(
            "copies_min is from 1 to the number of replicas, {replicas}, and not {copies_min}"
        ));
    }
    let when_short = change.when_short.map_or(config.when_short, when_short);
    let stay = config
        .members
        .only(|member| nodes.contains(&member))
        .count();
    if when_short == WhenShort::Error && stay < usize::from(copies_min) {
        return Err(format!(
            "of its members {stay} are there or stay, and with copies_min {copies_min} all writes would fail until others \
             have joined: raise it once `hdcs group show` says that they have"
        ));
    }
    Ok(Shape {
        nodes,
        ack: change.ack.map_or(config.ack, ack_level),
        copies_min,
        when_short,
    })
}

/// The nodes that are to have a copy.
fn nodes(cluster: &Cluster, record: &GroupRecord, change: &GroupChange) -> Result<Nodes, String> {
    let own = cluster.own.member;
    let now: Nodes = (record.config.members.iter())
        .chain(record.joiners.iter().copied())
        .collect();
    let replicas = change.replicas.map(usize::from);
    if let Some(replicas) = replicas.filter(|replicas| !REPLICAS.contains(replicas)) {
        return Err(format!(
            "a volume has 1, 2 or 3 replicas, and not {replicas}"
        ));
    }
    let Some(names) = &change.nodes else {
        return match replicas {
            None => Ok(now),
            Some(replicas) if replicas == now.len() => Ok(now),
            Some(1) => Ok(Nodes::from([own])),
            Some(replicas) => Err(format!(
                "it has {} replicas, and {replicas} are asked for: say on which nodes (--nodes)",
                now.len()
            )),
        };
    };
    let known: Vec<_> = cluster.nodes.keys().map(String::as_str).collect();
    let known = known.join(", ");
    let mut nodes = Nodes::new();
    for name in names {
        let node = cluster.nodes.get(name);
        let node = node.ok_or_else(|| format!("there is no node {name}: the nodes are {known}"))?;
        if !nodes.insert(node.member) {
            return Err(format!("node {name} is named twice: one node has one copy"));
        }
    }
    if replicas.is_some_and(|replicas| replicas != nodes.len()) || !REPLICAS.contains(&nodes.len())
    {
        return Err(format!(
            "{} replicas are on as many nodes, from 1 to 3, and {} are named",
            replicas.unwrap_or(nodes.len()),
            nodes.len()
        ));
    }
    if !nodes.contains(&own) {
        return Err(format!(
            "node {} serves it, and is not among the nodes: have one that stays take it over first (`hdcs volume \
             takeover`), and ask that one",
            cluster.node
        ));
    }
    Ok(nodes)
}
