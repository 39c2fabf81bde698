//! The border between the direct side of a volume and the rest of it.

use super::Direct;
use super::flushes::Flusher;
use crate::base::error::RequestError;
use crate::base::io::Reply;
use crate::base::limits::SECTOR_BYTES;
use crate::volume::damage::Damage;
use crate::volume::destaging::Destaging;
use crate::volume::filling::Filling;
use crate::volume::open_log::OpenLog;
use crate::volume::port::{Kind, Port};
use crate::volume::read::Reads;
use crate::volume::write::{Waiter, Writes};
use crate::volume::{CachedBlocks, Context, Phase, Volume, VolumeConfig};

/// What the direct side takes of the rest of the volume.
pub(in crate::volume) struct DirectSources<'a> {
    pub(super) config: &'a VolumeConfig,
    pub(super) phase: Phase,
    pub(super) log: &'a mut OpenLog,
    pub(super) cached: &'a mut CachedBlocks,
    pub(super) damage: &'a Damage,
    pub(super) writes: &'a mut Writes,
    pub(super) reads: &'a mut Reads,
    pub(super) filling: &'a mut Filling,
    pub(super) destaging: &'a mut Destaging,
    pub(super) port: &'a mut Port,
}

impl DirectSources<'_> {
    pub(super) fn sectors(&self) -> u64 {
        self.config.bytes / SECTOR_BYTES as u64
    }

    /// The backend has flushed; what of the log goes with it has to be durable too.
    pub(super) fn end_flush(&mut self, flusher: Flusher, cx: &mut Context<'_>) {
        let Flusher { id, kind, until } = flusher;
        let log = self.log.get();
        if self.log.has_failed() {
            let error = match kind {
                Kind::Flush => RequestError::ReadOnly,
                // The backend has this write.
                _ => RequestError::Io,
            };
            return self.port.reply(id, kind, Err(error), cx);
        }
        if log.durable_sequence() >= until {
            return self.port.reply(id, kind, Ok(Reply::Done), cx);
        }
        self.writes.waiters.wait(Waiter {
            until,
            id,
            kind,
            fua: false,
        });
    }
}

impl Volume {
    /// The direct side, and what it takes of the rest.
    #[inline]
    pub(in crate::volume) fn direct_side(&mut self) -> (&mut Direct, DirectSources<'_>) {
        let sources = DirectSources {
            config: &self.config,
            phase: self.phase,
            log: &mut self.log,
            cached: &mut self.cached,
            damage: &self.damage,
            writes: &mut self.writes,
            reads: &mut self.reads,
            filling: &mut self.filling,
            destaging: &mut self.destaging,
            port: &mut self.port,
        };
        (&mut self.direct, sources)
    }

    /// Take the next steps towards the policy of the configuration.
    pub(in crate::volume) fn switch_path(&mut self) {
        let (direct, from) = self.direct_side();
        direct.switch_path(&from);
    }
}
