//! The stores that volumes lie on here, and what a run needs of each.

use std::path::Path;

use serde::Serialize;

use super::ceph::Cluster;
use super::hdfs::Hdfs;
use super::s3::{Gateway, OBJECTS_MAX};
use crate::failure::Result;
use crate::fio::{Load, Outcome, Target};

/// Which store is behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Store {
    /// Images on Ceph.
    Ceph,
    /// Objects on Ceph's gateway.
    S3,
    /// Files on HDFS.
    Hdfs,
}

impl Store {
    /// For people.
    pub const fn title(self) -> &'static str {
        match self {
            Self::Ceph => "Ceph",
            Self::S3 => "S3",
            Self::Hdfs => "HDFS",
        }
    }

    /// Whether volumes lie on it as objects, whose requests are counted.
    pub const fn has_objects(self) -> bool {
        matches!(self, Self::S3 | Self::Hdfs)
    }

    /// What the direct client does, where that is not what the profiles say.
    pub fn direct_does(self) -> Option<String> {
        match self {
            Self::Ceph => None,
            Self::S3 => Some(format!(
                "s3-direct: object_store, one object for each request's block, PUT or GET whole, as many at once as \
                 the depth; durable when answered.\nIt reads at random among {OBJECTS_MAX} objects."
            )),
            Self::Hdfs => Some(
                "hdfs-direct: hdfs-native. A file cannot be overwritten: for each of the depth, one file to which requests \
                 are appended\n(random or not), each made durable by hsync. Reads are positional, of one file."
                    .to_owned(),
            ),
        }
    }

    /// Bring it up below `parent`.
    pub fn up(self, scripts: &Path, parent: &Path) -> Result<Box<dyn Behind>> {
        Ok(match self {
            Self::Ceph => Box::new(Cluster::up(scripts, parent)?),
            Self::S3 => Box::new(Gateway::up(scripts, parent)?),
            Self::Hdfs => Box::new(Hdfs::up(scripts, parent)?),
        })
    }
}

/// A running store.
pub trait Behind {
    /// Make what a volume of this name needs to be there before it. If it can be written without HDCS,
    /// how.
    fn make(&self, _name: &str, _bytes: u64) -> Result<Option<Target>> {
        Ok(None)
    }
    /// The place of a volume, as its backend's URL.
    fn url(&self, name: &str) -> String;
    /// Do what a later [`Self::direct`] with this load finds done; what reports on that goes to `raw`.
    fn prepare(&mut self, _load: &Load, _raw: &Path) -> Result<()> {
        Ok(())
    }
    /// Run a load straight at it; the client's report is kept in `raw`.
    fn direct(&mut self, name: &str, load: &Load, raw: &Path) -> Result<Outcome>;
    /// CPU time of its daemons that serve data, in microseconds.
    fn cpu_us(&self) -> Result<f64>;
    /// Stop and remove it.
    fn down(self: Box<Self>) -> Result<()>;
}
