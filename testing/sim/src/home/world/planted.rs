//! What planted bugs do to what the local store wants done.

use hdcs_core::base::buf::Buf;
use hdcs_core::base::io::{Nanos, SectorRange, Token};
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::local::format::HomeSuperblock;
use zerocopy::IntoBytes;

use super::{Happening, StoreWorld};
use crate::content::Content;
use crate::home::plant::Plant;

impl StoreWorld {
    /// What a planted bug makes of a write to the store.
    pub(super) fn planted_write(&mut self, offset: u64, data: Vec<Buf>) -> (u64, Vec<Buf>) {
        if self.is_planted(Plant::CopyAtOnce) && self.is_of_map(offset) {
            let copy = self
                .store
                .submit_write(offset + BLOCK_BYTES as u64, &data, false);
            let at = self.engine.now().plus(Nanos(1));
            // Nobody waits for it.
            self.engine
                .at(at, Happening::StoreWrite(Token(u64::MAX), copy));
        }
        if self.is_planted(Plant::NoFill) && data.len() > 1 && !self.is_of_map(offset) {
            // The longest part is what was asked for; it has its place among the others.
            let index = (0..data.len())
                .max_by_key(|&n| self.is_asked_for(&data[n]))
                .unwrap_or(0);
            let before: usize = data[..index].iter().map(|buf| buf.len()).sum();
            return (offset + before as u64, vec![data[index].clone()]);
        }
        if self.is_planted(Plant::BetweenUnsaid) && offset < 2 * BLOCK_BYTES as u64 {
            let mut buf = self.pool.alloc(BLOCK_BYTES).expect("the pool is large");
            let mut unsaid = HomeSuperblock::parse(&data[0]).expect("the home has written it");
            unsaid.flags = 0.into();
            let unsaid = unsaid.counting(unsaid.commits.get(), unsaid.map_digest.get());
            buf.copy_from_slice(unsaid.tagged(self.cipher.as_deref()).as_bytes());
            return (offset, vec![buf.freeze()]);
        }
        (offset, data)
    }

    /// A buffer of a write has the content of one that was asked for.
    fn is_asked_for(&self, buf: &Buf) -> bool {
        let word = buf.get(8..16).and_then(|bytes| bytes.try_into().ok());
        let id = word.map_or(0, u64::from_le_bytes) as u32;
        let mut writes = self.generation.iter();
        writes.any(|write| write.content == Content::Write(id))
    }

    /// A planted bug: the backend gets what the local store has now.
    pub(super) fn write_what_is_there(&mut self, range: SectorRange) {
        let mut bytes = vec![0; range.bytes()];
        let offset = self.layout().data_offset(range.byte_offset());
        self.store.peek(offset, &mut bytes);
        self.decrypt(range.start, &mut bytes);
        if let Ok(contents) = Self::decode(range, &bytes) {
            let op = self.backend.submit_write(range, contents);
            self.backend.complete_write(op);
        }
    }

    /// Whether a place in the store is one of the map's first copies, or of a superblock.
    pub(super) fn is_of_root(&self, offset: u64) -> bool {
        self.is_of_map(offset) || offset < 2 * BLOCK_BYTES as u64
    }

    /// Whether a place in the store is one of the map's first copies.
    pub(in crate::home) fn is_of_map(&self, offset: u64) -> bool {
        let first = self.layout().page_offset(0, 0);
        let group = self.layout().page_offset(1, 0) - first;
        offset >= first && (offset - first).is_multiple_of(group)
    }
}
