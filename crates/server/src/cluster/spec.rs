//! What a volume with a group is, as another node has to know it: to make a copy of the log, and to serve the volume
//! after a takeover.
//!
//! | of the volume's entry | here | on the other node |
//! |---|---|---|
//! | name, UUID, size, backend, settings | the same | the same |
//! | log: size | the same | a file of its own in the data directory |
//! | log: number, which its superblock has | named here | a copy has the same |
//! | number, shard, pins | no | the node's own; none |
//! | wrapped data key | the same | the same; what unwraps it is read on each node, from a file or command of the same name |
//! | local store | no | a volume with a group has none |

use std::collections::BTreeMap;

use hdcs_api::value::Value;
use hdcs_backend::crypt::Encryption;
use hdcs_core::base::limits::{BLOCK_BYTES, LOG_BYTES_MAX, LOG_BYTES_MIN};
use hdcs_core::format::LOG_HEADER_BLOCKS;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::catalogue::{Entry, LOG_FILE, LogPlace, VolumeName, check_volume_bytes};

/// The longest URL of a backend, and the longest name of a key.
const TEXT_BYTES_MAX: usize = 4096;
/// Settings at most: there are fewer keys.
const SETTINGS_MAX: usize = 256;

/// See the module. It is the content of `spec-N.json`. Whoever changes it writes the next revision.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeSpecFile {
    /// Counts what was written: 1 is the first one.
    pub revision: u64,
    /// Name of the volume.
    pub name: VolumeName,
    /// Its identity everywhere.
    pub uuid: Uuid,
    /// Its size.
    pub bytes: u64,
    /// Number of its write log, random, the same in every copy.
    pub log: u64,
    /// Length of the log's region: so every copy has a ring of the same size.
    pub log_bytes: u64,
    /// URL of the backend, which means the same on every node.
    pub backend: String,
    /// What the backend is, if that was known when the group was made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend_identity: Option<String>,
    /// How it is encrypted, if it is: the data key only wrapped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encryption: Option<Encryption>,
    /// With fewer members the volume takes no writes.
    pub copies_min: u8,
    /// Settings that differ from the node's. The nodes' own should be the same, too.
    pub settings: BTreeMap<String, Value>,
}

impl VolumeSpecFile {
    /// What other nodes have to know of a volume that this node is about to make, with this number of its log; none if it
    /// has no backend that others could reach.
    pub fn of(entry: &Entry, log: u64, copies_min: u8) -> Option<Self> {
        Some(Self {
            revision: 1,
            name: entry.name.clone(),
            uuid: entry.uuid,
            bytes: entry.bytes,
            log,
            log_bytes: entry.log.bytes,
            backend: entry.backend.clone()?,
            backend_identity: entry.backend_identity.clone(),
            encryption: entry.encryption.clone(),
            copies_min,
            settings: entry.settings.clone(),
        })
    }

    /// The entry of the volume on a node that is to have a copy, under that node's number for it. The whole log is to be
    /// prepared, as a copy may be filled at any time.
    pub fn entry(&self, number: u32) -> Entry {
        Entry {
            name: self.name.clone(),
            number,
            uuid: self.uuid,
            bytes: self.bytes,
            log: LogPlace {
                path: LOG_FILE.into(),
                bytes: self.log_bytes,
                prepared: None,
            },
            backend: Some(self.backend.clone()),
            backend_identity: self.backend_identity.clone(),
            backend_is_new: false,
            encryption: self.encryption.clone(),
            home: None,
            pins: Vec::new(),
            shard: None,
            is_replicated: true,
            settings: self.settings.clone(),
        }
    }

    /// The next revision, which says what this entry does of what may change: the size and the settings.
    #[must_use]
    pub fn changed(&self, entry: &Entry) -> Self {
        Self {
            revision: self.revision + 1,
            bytes: entry.bytes,
            settings: entry.settings.clone(),
            ..self.clone()
        }
    }

    /// Have an entry of this volume say the same; whether it did not.
    pub fn bring(&self, entry: &mut Entry) -> bool {
        let is_other = entry.bytes != self.bytes || entry.settings != self.settings;
        if is_other {
            entry.bytes = self.bytes;
            entry.settings.clone_from(&self.settings);
        }
        is_other
    }

    /// Blocks of the ring that every copy has.
    pub fn ring_blocks(&self) -> u64 {
        self.log_bytes / BLOCK_BYTES as u64 - LOG_HEADER_BLOCKS
    }

    /// Refuse what no node can have written.
    pub fn check(&self) -> Result<(), String> {
        if self.revision == 0 {
            return Err("it has no revision".to_owned());
        }
        check_volume_bytes(self.bytes)?;
        let is_size = (LOG_BYTES_MIN..=LOG_BYTES_MAX).contains(&self.log_bytes)
            && self.log_bytes.is_multiple_of(BLOCK_BYTES as u64);
        if !is_size {
            return Err(format!("no write log has {} bytes", self.log_bytes));
        }
        let texts = [Some(&self.backend), self.backend_identity.as_ref()];
        let keys = texts.into_iter().flatten().chain(self.settings.keys());
        if keys.map(String::len).any(|bytes| bytes > TEXT_BYTES_MAX) {
            return Err(format!("it has a text of more than {TEXT_BYTES_MAX} bytes"));
        }
        if self.settings.len() > SETTINGS_MAX {
            return Err(format!("it has more than {SETTINGS_MAX} settings"));
        }
        if self.copies_min == 0 {
            return Err("it serves without any copy".to_owned());
        }
        Ok(())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::catalogue::tests::entry;

    pub(crate) fn spec() -> VolumeSpecFile {
        let mut entry = entry("v", 7);
        entry.backend = Some("file:/shared/v.img?shared=on".to_owned());
        entry.backend_identity = Some("image 5".to_owned());
        VolumeSpecFile::of(&entry, 0xfeed_beef, 1).unwrap()
    }

    #[test]
    fn spec_of_an_entry_makes_the_same_volume_elsewhere() {
        let spec = spec();
        assert_eq!(spec.check(), Ok(()));
        let there = spec.entry(12);
        assert_eq!((there.number, there.uuid), (12, spec.uuid));
        assert!(there.is_replicated && there.log.prepared.is_none());
        assert_eq!(VolumeSpecFile::of(&there, spec.log, 1), Some(spec.clone()));
        assert_eq!(spec.ring_blocks(), (16 << 20) / 4096 - LOG_HEADER_BLOCKS);
        let own_file = entry("v", 7);
        assert_eq!(VolumeSpecFile::of(&own_file, 1, 1), None);
    }

    #[test]
    fn spec_of_the_next_revision_brings_an_entry_to_what_it_says() {
        let spec = spec();
        let mut entry = spec.entry(12);
        assert!(!spec.bring(&mut entry));
        entry.bytes *= 2;
        entry
            .settings
            .insert("dirty_ratio_max".to_owned(), Value::from_typed("50"));
        let next = spec.changed(&entry);
        assert_eq!((next.revision, next.bytes), (2, entry.bytes));
        let mut other = spec.entry(3);
        assert!(next.bring(&mut other));
        assert_eq!(
            (other.bytes, &other.settings),
            (entry.bytes, &entry.settings)
        );
        assert!(!next.bring(&mut other));
    }

    #[test]
    fn spec_that_no_node_wrote_is_refused() {
        let good = spec();
        let bad = [
            VolumeSpecFile {
                bytes: 1,
                ..good.clone()
            },
            VolumeSpecFile {
                log_bytes: 4096,
                ..good.clone()
            },
            VolumeSpecFile {
                log_bytes: good.log_bytes + 1,
                ..good.clone()
            },
            VolumeSpecFile {
                backend: "x".repeat(TEXT_BYTES_MAX + 1),
                ..good.clone()
            },
            VolumeSpecFile {
                revision: 0,
                ..good.clone()
            },
            VolumeSpecFile {
                copies_min: 0,
                ..good
            },
        ];
        for spec in bad {
            assert!(spec.check().is_err(), "{spec:?}");
        }
    }
}
