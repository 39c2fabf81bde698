//! Compressed objects: what a driver makes of slots, and what a get of frames brings.

use hdcs_core::base::buf::{Buf, BufMut};
use hdcs_core::base::codec::{Codec, Method};
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::objects::format::{DataFooter, SLOT_BYTES};
use hdcs_core::objects::frames::{FRAMES_OFFSET, Frames, Part, pack};
use hdcs_core::objects::io::{Kind, Name, StoreError, Stored};
use zerocopy::FromBytes;

use super::plant::Plant;
use super::reader::uuid_at;
use super::world::{CLONE_PLACE, Fault, ObjectsWorld, PLACE};
use crate::violation::Violation;

/// LZ4, behind a byte that tells the method. What writes leave shrinks only by the second method, which
/// takes the words of a block for differences first; by the first one, only zeroes do.
#[derive(Debug)]
pub struct SimCodec;

/// What compresses by this method instead of by itself.
fn differences(method: Method, plain: &[u8], forward: bool) -> Vec<u8> {
    let mut out = plain.to_vec();
    if method == Method::Zstd {
        for slot in out.chunks_exact_mut(SLOT_BYTES) {
            let mut before = 0u64;
            for word in slot[..BLOCK_BYTES].as_chunks_mut::<8>().0 {
                let value = u64::from_le_bytes(*word);
                let result = if forward {
                    value.wrapping_sub(before)
                } else {
                    value.wrapping_add(before)
                };
                before = if forward { value } else { result };
                *word = result.to_le_bytes();
            }
        }
    }
    out
}

impl Codec for SimCodec {
    fn compress(&self, method: Method, plain: &[u8], stored: &mut [u8]) -> Option<usize> {
        let (mark, rest) = stored.split_first_mut()?;
        *mark = method as u8;
        let bytes = lz4_flex::block::compress_into(&differences(method, plain, true), rest);
        Some(1 + bytes.ok()?)
    }

    fn decompress(&self, method: Method, stored: &[u8], plain: &mut [u8]) -> bool {
        let Some((_, rest)) = stored.split_first().filter(|(m, _)| **m == method as u8) else {
            return false;
        };
        let bytes = lz4_flex::block::decompress_into(rest, plain);
        if bytes.ok() != Some(plain.len()) {
            return false;
        }
        plain.copy_from_slice(&differences(method, plain, false));
        true
    }
}

/// Whether an object is a compressed one, as its footer says.
pub fn is_compressed(kind: Kind, object: &[u8]) -> bool {
    kind == Kind::Data
        && DataFooter::read_from_suffix(object).is_ok_and(|(_, footer)| footer.is_compressed())
}

impl ObjectsWorld {
    /// How the next owner, or this one from now on, compresses. Drawn aside, so that a run without
    /// compression is what it was.
    pub(super) fn draw_compression(&mut self) -> Option<Method> {
        if !self.compresses {
            return None;
        }
        let methods = [
            None,
            Some(Method::Lz4),
            Some(Method::Zstd),
            Some(Method::Zstd),
        ];
        self.choices.choice(methods).flatten()
    }

    /// The setting changes now and then.
    pub(super) fn change_compression(&mut self, owner: usize) {
        if self.compresses && self.choices.u8(0..20) == 0 {
            let method = self.draw_compression();
            if let Some(machine) = &mut self.owners[owner].machine {
                machine.set_compression(method);
            }
        }
    }

    /// What a driver puts.
    pub(super) fn pack(
        &mut self,
        owner: usize,
        name: Name,
        data: &[Buf],
        slot_bytes: usize,
        method: Method,
    ) -> (Vec<u8>, Frames) {
        let bytes = self.gather(name, data);
        let (slots, table) = bytes.split_at(slot_bytes);
        let mut slots = slots.to_vec();
        if self.plant == Some(Plant::DroppedBlock) && slots.len() > SLOT_BYTES {
            // As if a frame had one slot less than its place says.
            slots.copy_within(SLOT_BYTES.., 0);
        }
        let uuid = uuid_at(self.owners[owner].place);
        let (object, frames) = pack(&SimCodec, method, uuid, name.number, &slots, table);
        self.coverage.compressed += 1;
        self.coverage.frames += frames.part(0, frames.slots()).units().count() as u64;
        (object, frames)
    }

    /// A get of slots of a compressed object is answered.
    pub(super) fn look_into_frames(
        &mut self,
        owner: usize,
        name: &str,
        part: &Part,
        mut buf: BufMut,
        fault: Fault,
    ) -> Result<Result<Stored, StoreError>, Violation> {
        let Some(object) = self.store.get(name).cloned() else {
            self.check_lost(owner, name)?;
            return Ok(Err(StoreError::NotFound));
        };
        let from = part.offset() as usize;
        let Some(stored) = object.get(from..from + part.bytes()) else {
            return Ok(Err(StoreError::Short));
        };
        Self::check_units(name, &object, part)?;
        self.coverage.frame_gets += 1;
        let mut stored = stored.to_vec();
        if self.plant == Some(Plant::FramesOffByOne) {
            stored.rotate_left(1);
        }
        if fault == Fault::Corrupt {
            self.last_fault = self.engine.now();
            let at = self.random.usize(0..stored.len());
            stored[at] ^= 1 << self.random.u8(0..8);
        }
        part.unpack(&SimCodec, &stored, &mut buf);
        if self.plant == Some(Plant::SkipFrameChecksum)
            && let Some(number) = name.rsplit('/').next().and_then(|n| n.parse().ok())
        {
            // As if the checksum were one of what is stored.
            buf[100] ^= 1;
            Self::put_right(Name::own(Kind::Data, number), 0, &mut buf);
        }
        Ok(Ok(Stored::Read(buf)))
    }

    /// What is encrypted for itself has one name, whichever get brings it.
    fn check_units(name: &str, object: &[u8], part: &Part) -> Result<(), Violation> {
        let uuid = uuid_at(if name.starts_with(PLACE) {
            PLACE
        } else {
            CLONE_PLACE
        });
        let number = name.rsplit('/').next().and_then(|n| n.parse().ok());
        let Ok(frames) = Frames::parse(&uuid, number.unwrap_or(0), object) else {
            let what = format!("{name} is no compressed object");
            return Err(Violation::new("units", what));
        };
        let whole = frames.part(0, frames.slots());
        let mut all = whole.units().map(|(unit, range)| {
            let begin = range.start + FRAMES_OFFSET;
            (unit, begin..begin + range.len())
        });
        let from = part.offset() as usize;
        for (unit, range) in part.units() {
            let there = (unit, range.start + from..range.end + from);
            if !all.any(|one| one == there) {
                let what = format!("{name}: {there:?} is no unit of it");
                return Err(Violation::new("units", what));
            }
        }
        Ok(())
    }

    /// A get of the lengths of frames brings those of another object.
    pub(super) fn plant_foreign_frames(&mut self, name: &str, buf: &mut [u8]) {
        let others = self.store.below(PLACE);
        let mut others = others.filter(|(other, object)| {
            let frames_only = &object[..object.len().min(FRAMES_OFFSET)];
            other.as_str() != name && is_compressed(Kind::Data, object) && frames_only != buf
        });
        if let Some((_, other)) = others.next() {
            // As if nobody had looked whose it is.
            let mut head = other[..FRAMES_OFFSET].to_vec();
            head[24..48].copy_from_slice(&buf[24..48]);
            head[16..24].fill(0);
            let sum = hdcs_core::format::control_checksum(&head);
            head[16..24].copy_from_slice(&sum.to_le_bytes());
            buf.copy_from_slice(&head);
        }
    }
}
