//! Groups of the nodes of a fixed cluster, as operators ask for them and see them.
//!
//! What is asked for is checked here, and the records are read here. The data path does the rest, by [`Replication`]; on
//! a node whose data path has none of it, whatever needs it is refused.

mod changes;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

pub use changes::set_group;
use hdcs_api::groups::{
    Group, GroupChange, GroupPhase, GroupRecord as ApiRecord, GroupRequest, GroupRole, GroupView,
};
use hdcs_api::{ApiError, CreateVolume, ErrorKind, Mode};
use hdcs_core::replication::Member;
use hdcs_core::replication::record::{Config, GroupRecord, Nodes, Phase, Seat, Shape};
use hdcs_core::volume::LogFailure;
use uuid::Uuid;

use super::setup::Setup;
use super::{ANSWER_TIME_MAX, at_volume, failed, invalid, looks};
use crate::catalogue::{Entry, VolumeName};
use crate::cluster::records::{RecordStore, Removal, StoreError};
use crate::cluster::spec::VolumeSpecFile;
use crate::cluster::{ack_level, ack_word, short_word, when_short};
use crate::config::VolumeSettings;
use crate::config::cluster::Cluster;

/// Copies of a log in all.
const REPLICAS: std::ops::RangeInclusive<u8> = 2..=3;
/// Why a volume with copies does not go on without its log.
pub(super) const PAST_COPIES: &str = "`log_failure` is \"pass-through\", which writes past the log, and so past its \
                                      copies: say log_failure=read-only";
/// What the first copy says of when it was brought up: it never was.
const FIRST_JOINED: u64 = 1;

/// Work of the data path that an operator waits for.
pub type Work<T> = Pin<Box<dyn Future<Output = Result<T, ApiError>> + Send>>;

/// What the data path does of replication.
pub trait Replication: Send + Sync {
    /// What this node sees of a group, if it has a part in it.
    fn view(&self, volume: Uuid) -> Option<GroupView>;

    /// Why this node has no copy of use, if it should have one.
    fn trouble(&self, volume: Uuid) -> Option<String>;

    /// Have this node, a member that does not serve, take the group whose newest record is given. It ends when the volume
    /// is served, or with the reason why it is not.
    fn take_over(&self, spec: VolumeSpecFile, record: GroupRecord) -> Work<()>;

    /// Have the group become this, whose newest record is given and which this node serves. It ends when a record says
    /// so, or with the reason why none does.
    fn configure(&self, spec: VolumeSpecFile, record: GroupRecord, shape: Shape) -> Work<()>;
}

/// The group that a new volume is to have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupPlan {
    /// This node.
    pub primary: Member,
    /// The nodes whose copies are to be brought up.
    pub others: Nodes,
    /// What was asked for.
    pub request: GroupRequest,
}

impl GroupPlan {
    /// The first record: the primary alone is a member, and the others are to join.
    pub fn first_record(&self, epoch: u64) -> GroupRecord {
        let seat = Seat {
            member: self.primary,
            joined: FIRST_JOINED,
        };
        let config = Config {
            members: [seat].into_iter().collect(),
            replicas: self.request.replicas,
            ack: ack_level(self.request.ack),
            copies_min: self.request.copies_least(),
            when_short: when_short(self.request.when_short),
        };
        GroupRecord {
            epoch,
            ..GroupRecord::first(self.primary, config, self.others.clone())
        }
    }
}

/// Check what is asked for a new volume with these settings.
fn check_plan(
    cluster: Option<&Cluster>,
    settings: &VolumeSettings,
    create: &CreateVolume,
    request: &GroupRequest,
) -> Result<GroupPlan, String> {
    let cluster = cluster.ok_or(
        "copies on other nodes need a cluster: give [cluster] in the configuration (docs/GROUPS.md)",
    )?;
    let (replicas, copies_min) = (request.replicas, request.copies_least());
    if !REPLICAS.contains(&replicas) {
        return Err(format!(
            "a volume has 2 or 3 replicas, this node's copy included, not {replicas}: for one copy, leave the group out"
        ));
    }
    if !(1..=replicas).contains(&copies_min) {
        return Err(format!(
            "copies_min is from 1 to the number of replicas, {replicas}, and not {copies_min}"
        ));
    }
    let others = check_nodes(cluster, request)?;
    if create.mode == Mode::Storage {
        return Err(
            "a volume in storage mode has no copies on other nodes yet: use cache mode".to_owned(),
        );
    }
    if settings.log_failure == LogFailure::PassThrough {
        return Err(PAST_COPIES.to_owned());
    }
    match &create.backend {
        None => Err(
            "the other nodes have to reach its backend, and the data directory is this node's alone: give --backend"
                .to_owned(),
        ),
        Some(url) if hdcs_backend::is_read_only(url) => Err(format!(
            "backend {url} is only read: nothing is ever in its log, and copies of that are of no use"
        )),
        Some(_) => Ok(GroupPlan {
            primary: cluster.own.member,
            others,
            request: request.clone(),
        }),
    }
}

/// The nodes but this one, if they are as many as there should be.
fn check_nodes(cluster: &Cluster, request: &GroupRequest) -> Result<Nodes, String> {
    let names: Vec<_> = cluster.nodes.keys().map(String::as_str).collect();
    let names = names.join(", ");
    if request.nodes.first() != Some(&cluster.node) {
        return Err(format!(
            "the first of its nodes is the one that is asked, {}: the nodes are {names}",
            cluster.node
        ));
    }
    let mut nodes = Nodes::new();
    for name in &request.nodes {
        let node = cluster.nodes.get(name);
        let node = node.ok_or_else(|| format!("there is no node {name}: the nodes are {names}"))?;
        if !nodes.insert(node.member) {
            return Err(format!("node {name} is named twice: one node has one copy"));
        }
    }
    if nodes.len() != usize::from(request.replicas) {
        return Err(format!(
            "{} replicas are on as many nodes, and {} are named: the nodes are {names}",
            request.replicas,
            nodes.len()
        ));
    }
    nodes.remove(&cluster.own.member);
    Ok(nodes)
}

/// Why the group of a volume was not removed.
#[derive(Debug)]
pub(in crate::control) struct NotRemoved {
    pub error: ApiError,
    /// Whether it is certain that nothing was written, and will not be.
    pub is_certain: bool,
}

impl From<ApiError> for NotRemoved {
    fn from(error: ApiError) -> Self {
        let is_certain = true;
        Self { error, is_certain }
    }
}

/// The groups of the cluster.
pub(in crate::control) struct Groups {
    setup: Arc<Setup>,
    store: Option<RecordStore>,
    /// None: the data path has none of it.
    replication: Option<Arc<dyn Replication>>,
}

impl Groups {
    pub(super) fn new(setup: Arc<Setup>, replication: Option<Arc<dyn Replication>>) -> Self {
        let cluster = setup.cluster();
        let store = cluster.map(|cluster| RecordStore::new(&cluster.records, cluster.own.member));
        Self {
            setup,
            store,
            replication,
        }
    }

    /// The group that a new volume is to have, if it is to have one and can.
    pub fn plan(
        &self,
        name: &VolumeName,
        create: &CreateVolume,
    ) -> Result<Option<GroupPlan>, ApiError> {
        let Some(request) = &create.group else {
            return Ok(None);
        };
        let at = |why: String| invalid(format!("volume {name}: {why}"));
        let settings = self.setup.settings_of(&create.settings);
        let settings = settings.map_err(|error| at(error.message))?;
        let plan = check_plan(self.setup.cluster(), &settings, create, request).map_err(at)?;
        self.replication()?;
        Ok(Some(plan))
    }

    /// The group that a volume of this node alone is to have.
    pub fn plan_for(&self, entry: &Entry, change: &GroupChange) -> Result<GroupPlan, ApiError> {
        let name = &entry.name;
        let at = |why: &str| invalid(format!("volume {name}: {why}"));
        let cluster = self.cluster()?;
        let nodes = change.nodes.clone().unwrap_or_default();
        let count = u8::try_from(nodes.len()).unwrap_or(u8::MAX);
        let replicas = change.replicas.unwrap_or(count);
        if nodes.is_empty() || replicas < 2 {
            return Err(at(
                "it has no group, and is on this node alone: say which 2 or 3 nodes are to have copies (--replicas, --nodes)",
            ));
        }
        let (own, mut others): (Vec<_>, Vec<_>) =
            nodes.into_iter().partition(|node| *node == cluster.node);
        let mut nodes = own;
        nodes.append(&mut others);
        let request = GroupRequest {
            replicas,
            ack: change.ack.unwrap_or_default(),
            nodes,
            copies_min: change.copies_min,
            when_short: change.when_short.unwrap_or_default(),
        };
        if request.when_short == hdcs_api::groups::WhenShort::Error && request.copies_least() > 1 {
            return Err(at(
                "until other nodes have joined, all writes would fail: say when_short error once `hdcs group show` says that \
                 they have",
            ));
        }
        let create = CreateVolume {
            name: name.to_string(),
            mode: if entry.home.is_some() {
                Mode::Storage
            } else {
                Mode::Cache
            },
            backend: entry.backend.clone(),
            settings: entry.settings.clone(),
            group: Some(request),
            ..CreateVolume::default()
        };
        let plan = self.plan(name, &create)?;
        plan.ok_or_else(|| at("it has no group"))
    }

    /// Make the group of a volume whose files are there, with this number of its log, before it is opened. It begins with this
    /// epoch.
    pub async fn found(
        &self,
        entry: &Entry,
        log: u64,
        epoch: u64,
        plan: GroupPlan,
    ) -> Result<(), ApiError> {
        let name = &entry.name;
        let spec = VolumeSpecFile::of(entry, log);
        let spec = spec.ok_or_else(|| failed(format!("volume {name}: it has no backend")))?;
        self.refuse_name(name, Some(entry.uuid)).await?;
        let first = plan.first_record(epoch);
        let made = self.ask_store(move |store| store.create(&spec, &first));
        made.await.map_err(|error| at_volume(name.as_str(), error))
    }

    /// Refuse a name that another volume has whose group is among the records: at other nodes it means that one. A node
    /// that is alone has its names for itself.
    pub async fn refuse_name(&self, name: &VolumeName, own: Option<Uuid>) -> Result<(), ApiError> {
        if self.setup.cluster().is_none() {
            return Ok(());
        }
        let cluster = self.cluster()?;
        let found = self.ask_store(|store| store.is_there().and_then(|()| store.groups()));
        let found = found.await.map_err(|error| {
            let why = format!(
                "volume {name}: whether another volume of the cluster has this name is not to be seen: {}",
                error.message
            );
            ApiError::new(error.kind, why)
        })?;
        let taken = (found.into_values().flatten())
            .find(|(spec, _)| spec.name == *name && Some(spec.uuid) != own);
        let Some((_, record)) = taken else {
            return Ok(());
        };
        let members = record.config.members.iter();
        let members: Vec<_> = members.map(|member| cluster.called(member)).collect();
        Err(ApiError::new(
            ErrorKind::Conflict,
            format!(
                "volume {name}: another volume of the cluster has this name, with copies on {}: choose another",
                members.join(", ")
            ),
        ))
    }

    /// Have the nodes of a volume's group know its size and its settings, before they could serve it with others. Only
    /// who serves it asks for that.
    pub async fn change(&self, entry: &Entry) -> Result<(), ApiError> {
        if !entry.is_replicated {
            return Ok(());
        }
        let (entry, name) = (entry.clone(), entry.name.clone());
        let own = self.cluster()?.own.member;
        let changed = self.ask_store(move |store| {
            let record = store.read(entry.uuid)?;
            let is_own = record.is_some_and(|record| record.primary() == Some(own));
            let Some(spec) = store.spec(entry.uuid)?.filter(|_| is_own) else {
                return Ok(false);
            };
            if !spec.bring(&mut entry.clone()) {
                return Ok(true);
            }
            store.change(&spec.changed(&entry))
        });
        if changed
            .await
            .map_err(|error| at_volume(name.as_str(), error))?
        {
            return Ok(());
        }
        Err(ApiError::new(
            ErrorKind::Conflict,
            format!(
                "volume {name}: another node serves it by now, or has changed it at the same moment: ask the one that \
                 serves it (`hdcs group show {name}`)"
            ),
        ))
    }

    /// Remove the group of a volume that goes: the other nodes let go of their copies by themselves. That no group is
    /// found is an error if this node serves it: the records are there, and not to be seen.
    pub async fn remove(&self, entry: &Entry, is_kept_here: bool) -> Result<(), NotRemoved> {
        if !entry.is_replicated {
            return Ok(());
        }
        let keeper = is_kept_here.then_some(self.cluster()?.own.member);
        let uuid = entry.uuid;
        let name = entry.name.as_str();
        // Most of what is in the way is found before anything is written.
        let tried = self.ask_store(move |store| store.may_remove(uuid)).await;
        tried.map_err(|error| at_volume(name, error))?;
        let removed = self.ask_store(move |store| store.remove(uuid, keeper));
        let unknown = |error| NotRemoved {
            error: at_volume(name, error),
            is_certain: false,
        };
        let is_found = match removed.await.map_err(unknown)? {
            Removal::Done => true,
            Removal::NoGroup => false,
            Removal::Another(node) => {
                let node = self.cluster()?.called(node);
                let message = format!(
                    "volume {name}: node {node} has its group by now, and so it stays: ask there (`hdcs group show {name}`)"
                );
                return Err(ApiError::new(ErrorKind::Conflict, message).into());
            }
        };
        if is_found || !self.is_served(uuid) {
            return Ok(());
        }
        let records = self.cluster()?.records.display();
        Err(failed(format!(
            "volume {name}: no record of its group is in {records}: see that all nodes have the same directory there, and \
             try again"
        ))
        .into())
    }

    /// This node has nothing of a volume any more whose group was removed.
    pub async fn gone(&self, entry: &Entry) {
        if !entry.is_replicated {
            return;
        }
        let uuid = entry.uuid;
        if let Err(error) = self.ask_store(move |store| store.gone(uuid)).await {
            // It is tried again at the next look.
            tracing::debug!("volume {}: {error}", entry.name);
        }
    }

    /// All groups of the cluster, by the names of their volumes.
    pub async fn list(&self) -> Result<Vec<Group>, ApiError> {
        let cluster = self.cluster()?;
        let found = self.ask_store(RecordStore::groups).await?;
        let mut groups = Vec::new();
        for (uuid, found) in found {
            groups.push(match found {
                Ok((spec, record)) => self.group(cluster, &spec, &record),
                Err(error) => Group {
                    volume: String::new(),
                    uuid: uuid.to_string(),
                    record: None,
                    trouble: Some(error.to_string()),
                    here: None,
                },
            });
        }
        groups.sort_by(|one, other| (&one.volume, &one.uuid).cmp(&(&other.volume, &other.uuid)));
        Ok(groups)
    }

    /// The group of one volume.
    pub async fn show(&self, name: &str) -> Result<Group, ApiError> {
        let cluster = self.cluster()?;
        let (spec, record) = self.find(name).await?;
        Ok(self.group(cluster, &spec, &record))
    }

    /// Have this node take the group of a volume.
    pub async fn take_over(&self, name: &str) -> Result<Group, ApiError> {
        let cluster = self.cluster()?;
        let (spec, record) = self.find(name).await?;
        let own = cluster.own.member;
        let refuse = |why: String| {
            let message = format!("volume {name}: {why}");
            Err(ApiError::new(ErrorKind::Conflict, message))
        };
        if !record.config.members.contains(own) {
            let members = record.config.members.iter();
            let members: Vec<_> = members.map(|member| cluster.called(member)).collect();
            return refuse(format!(
                "this node, {}, is no member of its group, and so may lack what was acknowledged: ask one of {}",
                cluster.node,
                members.join(", ")
            ));
        }
        if record.primary() == Some(own) && self.is_served(spec.uuid) {
            return refuse(format!("this node, {}, serves it already", cluster.node));
        }
        self.replication()?.take_over(spec, record).await?;
        self.show(name).await
    }

    fn is_served(&self, volume: Uuid) -> bool {
        let view = self.replication.as_ref().and_then(|path| path.view(volume));
        view.is_some_and(|view| view.role == GroupRole::Serves)
    }

    fn cluster(&self) -> Result<&Cluster, ApiError> {
        self.setup.cluster().ok_or_else(|| {
            ApiError::new(
                ErrorKind::Conflict,
                "this node is alone: groups are there on nodes with [cluster] in their configuration (docs/GROUPS.md)",
            )
        })
    }

    fn replication(&self) -> Result<&Arc<dyn Replication>, ApiError> {
        self.replication.as_ref().ok_or_else(|| {
            ApiError::new(
                ErrorKind::Unavailable,
                "the data path of this node does not replicate: nothing was changed",
            )
        })
    }

    async fn find(&self, name: &str) -> Result<(VolumeSpecFile, GroupRecord), ApiError> {
        let found = self.ask_store(RecordStore::groups).await?;
        let mut troubles = Vec::new();
        for group in found.into_values() {
            match group {
                Ok((spec, record)) if spec.name.as_str() == name => return Ok((spec, record)),
                Ok(_) => {}
                Err(error) => troubles.push(error.to_string()),
            }
        }
        // It may be one of those of which that cannot be told.
        if troubles.is_empty() {
            let why = format!("volume {name}: it has no group");
            return Err(ApiError::new(ErrorKind::NotFound, why));
        }
        let troubles = troubles.join("; ");
        Err(failed(format!(
            "volume {name}: no group of it can be read: {troubles}"
        )))
    }

    /// Ask the store, which may wait for another host.
    async fn ask_store<T: Send + 'static>(
        &self,
        ask: impl FnOnce(&RecordStore) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let path = &self.cluster()?.records;
        let silent = || {
            let path = path.display();
            failed(format!(
                "records of groups: {path}: what it lies on does not answer"
            ))
        };
        let store = self.store.clone().ok_or_else(silent)?;
        let at = path.to_string_lossy();
        let asked = looks::in_time(&at, ANSWER_TIME_MAX, move || ask(&store)).await;
        let asked = asked.ok_or_else(silent)?;
        asked.map_err(|error| failed(error.to_string()))
    }

    fn group(&self, cluster: &Cluster, spec: &VolumeSpecFile, record: &GroupRecord) -> Group {
        let replication = self.replication.as_ref();
        Group {
            volume: spec.name.to_string(),
            uuid: spec.uuid.to_string(),
            record: Some(in_api(cluster, record)),
            trouble: replication.and_then(|path| path.trouble(spec.uuid)),
            here: replication.and_then(|path| path.view(spec.uuid)),
        }
    }
}

/// A record as the API says it.
fn in_api(cluster: &Cluster, record: &GroupRecord) -> ApiRecord {
    let (phase, primary) = match record.phase {
        Phase::Taking { candidate } => (GroupPhase::Taking, candidate),
        Phase::Serving { primary } => (GroupPhase::Serving, primary),
    };
    let config = &record.config;
    let called = |member| cluster.called(member);
    ApiRecord {
        revision: record.revision,
        epoch: record.epoch,
        phase,
        primary: called(primary),
        members: config.members.iter().map(called).collect(),
        joiners: record.joiners.iter().copied().map(called).collect(),
        ack: ack_word(config.ack),
        replicas: config.replicas,
        copies_min: config.copies_min,
        when_short: short_word(config.when_short),
        short: config.is_short(),
        floor_blocks: record.floor.position,
    }
}

#[cfg(test)]
mod tests;
