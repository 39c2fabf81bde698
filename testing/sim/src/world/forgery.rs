//! Somebody without the key writes to the device of a write log while the node is down: a superblock with another tail,
//! and with a checksum that is right. No opening may take it. What was there is put back, so that the run goes on.
//!
//! Every other log has keys. When something is forged follows from a stream of its own.

use std::sync::Arc;

use fastrand::Rng;
use hdcs_core::base::cipher::Authenticator;
use hdcs_core::base::error::OpenError;
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::format::{LOG_SUPERBLOCKS, LOG_UNFLUSHED, LogSuperblock};
use hdcs_core::log::replay::Replay;
use zerocopy::IntoBytes;

use super::{Violation, Volume, World};
use crate::content::mix;
use crate::plant::Plant;
use crate::toy_cipher::ToyCipher;

/// What authenticates the superblocks of a volume's log, if something does.
pub(super) fn log_keys(seed: u64, unit: usize) -> Option<Arc<dyn Authenticator>> {
    let key = mix(seed ^ mix(60 + unit as u64));
    key.is_multiple_of(2)
        .then(|| Arc::new(ToyCipher(key)) as Arc<dyn Authenticator>)
}

/// The first block of a new log, with its tag if it has keys; of one in place of a log that was given up, with what that
/// one says of the backend.
pub(super) fn first_block(
    block: &[u8; BLOCK_BYTES],
    carries_mark: bool,
    keys: Option<&dyn Authenticator>,
) -> [u8; BLOCK_BYTES] {
    let mut superblock = LogSuperblock::parse(block).expect("a new log's superblock is good");
    if carries_mark {
        superblock.flags = (superblock.flags.get() | LOG_UNFLUSHED).into();
    }
    superblock.seal_with(keys);
    zerocopy::transmute!(superblock)
}

impl World {
    /// See [`log_keys`].
    pub(super) fn log_keys(&self, unit: usize) -> Option<Arc<dyn Authenticator>> {
        log_keys(self.scenario.seed, unit)
    }

    /// A volume that begins to open authenticates its log.
    pub(super) fn authenticate_log(&self, unit: usize, volume: &mut Volume) {
        if let Some(keys) = self.log_keys(unit) {
            volume.authenticate_log(keys);
        }
    }

    /// Before a volume is opened, somebody forges a superblock of its log, sometimes.
    pub(super) fn forge_log_sometimes(&mut self, unit: usize) -> Result<(), Violation> {
        let mut random = Rng::with_seed(mix(self.scenario.seed ^ mix(80 + self.engine.now().0)));
        let Some(keys) = self.log_keys(unit).filter(|_| random.u8(..4) == 0) else {
            return Ok(());
        };
        let state = &self.units[unit];
        let mut blocks = [0, 1].map(|index| {
            let mut block = [0; BLOCK_BYTES];
            state.log.peek(LogSuperblock::offset_of(index), &mut block);
            block
        });
        let forged = &mut blocks[random.usize(..2)];
        let Ok(mut superblock) = LogSuperblock::parse(&forged[..]) else {
            return Ok(());
        };
        match random.u8(..3) {
            0 => superblock.tail = (superblock.tail.get() + 1).into(),
            1 => superblock.flags = (superblock.flags.get() ^ 1).into(),
            _ => superblock.sequence = (superblock.sequence.get() + LOG_SUPERBLOCKS).into(),
        }
        superblock.seal();
        forged.copy_from_slice(superblock.as_bytes());
        let mut replay = Replay::new(state.config.uuid, state.config.log_bytes);
        if !self.planted.is(Plant::ForgedLogTaken) {
            replay.authenticate(keys);
        }
        let mut result = Ok(());
        while result.is_ok()
            && let Some(mut read) = replay.next_read(&self.pool)
        {
            let index = (0..LOG_SUPERBLOCKS).find(|&index| {
                let place = LogSuperblock::offset_of(index);
                place == read.offset
            });
            let Some(index) = index else {
                break;
            };
            read.buf.copy_from_slice(&blocks[index as usize]);
            result = replay.read_done(self.engine.now(), read.chunk, Ok(read.buf), |_, _| {});
        }
        self.coverage.forged_logs += 1;
        if result != Err(OpenError::Forged) {
            let why = format!("a superblock of a log was forged, and an opening says {result:?}");
            return Err(Violation::new("forged-taken", why));
        }
        Ok(())
    }
}
