//! Puts and gets of compressed data objects: between slots and what is stored of them.
//!
//! Frames are compressed first and then encrypted, each for itself.

use bytes::{Bytes, BytesMut};
use hdcs_core::base::codec::Method;
use hdcs_core::base::error::FormatError;
use hdcs_core::objects::format::SLOT_BYTES;
use hdcs_core::objects::frames::{Frames, Part, pack};
use hdcs_core::objects::io::Name;

use super::{Ended, Got};
use crate::codec::CODECS;
use crate::crypt::ObjectKey;
use crate::stores::{Client, Condition, StoreError};

/// A compressed object.
#[derive(Clone)]
pub(super) struct Compressed {
    pub(super) name: Name,
    /// UUID of the volume that has put it, or is to put it.
    pub(super) writer: [u8; 16],
    pub(super) key: Option<ObjectKey>,
}

impl Compressed {
    /// Put it: `data` is slots, and after them runs and footer.
    pub(super) async fn put(
        self,
        client: &Client,
        method: Method,
        data: Bytes,
        slot_bytes: usize,
    ) -> Ended {
        let name = self.name.to_string();
        // It takes tens of milliseconds: other requests are not to wait for that.
        let packing = tokio::task::spawn_blocking(move || {
            let (slots, table) = data.split_at(slot_bytes);
            self.packed(method, slots, table)
        });
        let packed = packing.await;
        let (object, frames) = packed.map_err(|error| StoreError::Refused(error.to_string()))?;
        let put = client.put(&name, object.into(), Condition::Always);
        put.await?;
        Ok(Got::Packed(frames))
    }

    fn packed(&self, method: Method, slots: &[u8], table: &[u8]) -> (Vec<u8>, Frames) {
        let (writer, number) = (self.writer, self.name.number);
        let (mut object, frames) = pack(&CODECS, method, writer, number, slots, table);
        if let Some(key) = &self.key {
            let part = frames.part(0, frames.slots());
            let from = part.offset() as usize;
            let stored = &mut object[from..from + part.bytes()];
            key.encrypt_part(writer, number, &part, stored);
        }
        (object, frames)
    }

    /// Get slots of it that take so many bytes.
    pub(super) async fn get(self, client: &Client, part: &Part, bytes: usize) -> Ended {
        let name = self.name.to_string();
        let stored = client.get(&name, part.offset(), part.bytes()).await?;
        Ok(Got::Bytes(self.unpacked(part, &stored, bytes)))
    }

    fn unpacked(&self, part: &Part, stored: &[u8], bytes: usize) -> Bytes {
        let mut slots = BytesMut::zeroed(bytes);
        if let Some(key) = &self.key {
            let mut plain = stored.to_vec();
            key.decrypt_part(self.writer, self.name.number, part, &mut plain);
            part.unpack(&CODECS, &plain, &mut slots);
        } else {
            part.unpack(&CODECS, stored, &mut slots);
        }
        slots.freeze()
    }

    /// All slots of the whole object; those of a bad frame are zeroes.
    pub(super) fn slots(&self, object: &[u8]) -> Result<Bytes, FormatError> {
        let frames = Frames::parse(&self.writer, self.name.number, object)?;
        let part = frames.part(0, frames.slots());
        let mut stored = object[part.offset() as usize..].to_vec();
        // If it was cut, what is missing is no good frame.
        stored.resize(part.bytes(), 0);
        let bytes = frames.slots() as usize * SLOT_BYTES;
        Ok(self.unpacked(&part, &stored, bytes))
    }
}

#[cfg(test)]
mod tests;
