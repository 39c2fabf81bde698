//! The border between the backend side of a volume and the rest of it.

use super::Destaging;
use crate::base::buf::{Buf, BufMut};
use crate::base::io::SectorRange;
use crate::log::extent_index::ExtentIndex;
use crate::volume::compression::{Compression, Packed};
use crate::volume::damage::Damage;
use crate::volume::direct::Direct;
use crate::volume::filling::Filling;
use crate::volume::health::Health;
use crate::volume::open_log::OpenLog;
use crate::volume::port::Port;
use crate::volume::read::Reads;
use crate::volume::write::Writes;
use crate::volume::{CachedBlocks, Volume, VolumeConfig};

/// What the backend side takes of the rest of the volume.
pub(in crate::volume) struct DestageSources<'a> {
    pub(super) config: &'a VolumeConfig,
    /// Whether the volume closes, and is to destage everything first.
    pub(super) close: Option<bool>,
    pub(super) log: &'a mut OpenLog,
    pub(super) index: &'a mut ExtentIndex,
    pub(super) cached: &'a mut CachedBlocks,
    pub(super) compression: &'a mut Compression,
    pub(super) damage: &'a mut Damage,
    pub(super) direct: &'a mut Direct,
    pub(super) writes: &'a Writes,
    pub(super) reads: &'a mut Reads,
    pub(super) filling: &'a mut Filling,
    pub(super) port: &'a mut Port,
    pub(super) health: &'a Health,
}

impl DestageSources<'_> {
    /// The sectors of a part out of its blocks in the log, if their checksums are right; `place` is
    /// for what is to be unpacked.
    pub(super) fn checked_part(
        &mut self,
        range: SectorRange,
        position: u64,
        blocks: &Buf,
        place: Option<(Packed, BufMut)>,
    ) -> Option<Buf> {
        let good = self.log.blocks_match(blocks, position);
        match place {
            _ if !good => None,
            None => {
                let start = range.offset_in_block();
                Some(blocks.slice(start..start + range.bytes()))
            }
            Some((packed, mut buf)) => self
                .compression
                .unpack(self.config.codec, &packed, range, blocks)
                .map(|data| {
                    buf.copy_from_slice(data);
                    buf.freeze()
                }),
        }
    }

    /// The same of a compressed entry whose blocks were read alone and match, in the memory that they were read
    /// into; or these, if they cannot be unpacked.
    pub(super) fn unpacked_in_place(
        &mut self,
        packed: &Packed,
        range: SectorRange,
        data: BufMut,
    ) -> Result<Buf, BufMut> {
        let (compression, codec) = (&mut *self.compression, self.config.codec);
        let Some(part) = compression.unpack(codec, packed, range, &data) else {
            return Err(data);
        };
        let mut place = data.widen().narrow(0..range.bytes());
        place.copy_from_slice(part);
        Ok(place.freeze())
    }
}

impl Volume {
    /// The destage side, and what it takes of the rest.
    pub(in crate::volume) fn destage_side(&mut self) -> (&mut Destaging, DestageSources<'_>) {
        let sources = DestageSources {
            config: &self.config,
            close: self.close,
            log: &mut self.log,
            index: &mut self.index,
            cached: &mut self.cached,
            compression: &mut self.compression,
            damage: &mut self.damage,
            direct: &mut self.direct,
            writes: &self.writes,
            reads: &mut self.reads,
            filling: &mut self.filling,
            port: &mut self.port,
            health: &self.health,
        };
        (&mut self.destaging, sources)
    }
}
