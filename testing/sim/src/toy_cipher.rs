//! A cipher for the simulator: nothing that keeps a secret, but whoever encrypts or decrypts once too
//! often, not at all, or with another block's number, finds wrong bytes.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use hdcs_core::base::cipher::{Authenticator, BlockCipher, KeyedCipher, TAG_BYTES};
use hdcs_core::base::limits::SECTOR_BYTES;

use crate::content::mix;

/// From here on numbers are those of compressed lines.
const PACKED_NUMBERS: u64 = 1 << 40;

/// Adds to every eight bytes what the number of their block and their place make: not its own inverse. Simulators spend much
/// of their time here, so it is as simple as that.
#[derive(Debug)]
pub struct ToyCipher(pub u64);

impl ToyCipher {
    /// Give each eight bytes, as a number, another value, which their pad makes.
    fn change(&self, number: u64, block: &mut [u8], change: impl Fn(u64, u64) -> u64) {
        let mut pad = mix(self.0 ^ mix(number));
        let (words, rest) = block.as_chunks_mut();
        for word in words {
            *word = change(u64::from_le_bytes(*word), pad).to_le_bytes();
            pad = pad.wrapping_add(0x9e37_79b9_7f4a_7c15);
        }
        // The low bytes of a sum follow from the low bytes.
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        last = change(u64::from_le_bytes(last), pad).to_le_bytes();
        rest.copy_from_slice(&last[..rest.len()]);
    }
}

impl BlockCipher for ToyCipher {
    fn encrypt(&self, number: u64, block: &mut [u8]) {
        self.change(number, block, u64::wrapping_add);
    }

    fn decrypt(&self, number: u64, block: &mut [u8]) {
        self.change(number, block, u64::wrapping_sub);
    }
}

impl Authenticator for ToyCipher {
    fn tag(&self, bytes: &[u8]) -> [u8; TAG_BYTES] {
        let state = bytes.chunks(8).fold(mix(self.0), |state, word| {
            let mut bytes = [0; 8];
            bytes[..word.len()].copy_from_slice(word);
            mix(state ^ u64::from_le_bytes(bytes))
        });
        let mut tag = [0; TAG_BYTES];
        tag[..8].copy_from_slice(&state.to_le_bytes());
        tag[8..].copy_from_slice(&mix(state).to_le_bytes());
        tag
    }
}

impl KeyedCipher for ToyCipher {
    fn unit_tags(&self, first: u64, units: &[u8], tags: &mut [u32]) {
        assert_eq!(units.len(), tags.len() * SECTOR_BYTES, "a tag a sector");
        for ((number, unit), tag) in (first..).zip(units.chunks(SECTOR_BYTES)).zip(tags) {
            let state = u128::from_le_bytes(self.tag(unit)) as u64;
            *tag = mix(state ^ mix(number)) as u32;
        }
    }
}

/// What a planted bug gives a volume: of two compressed lines of so many blocks side by side, it brings the other
/// one, header and all.
#[derive(Debug)]
pub struct SwappingCipher {
    cipher: ToyCipher,
    line_blocks: u64,
    /// What compressed lines were before they were encrypted, block by block.
    packed: Mutex<BTreeMap<u64, Vec<u8>>>,
}

impl SwappingCipher {
    /// Over another cipher.
    pub fn new(cipher: ToyCipher, line_blocks: u64) -> Self {
        Self {
            cipher,
            line_blocks,
            packed: Mutex::default(),
        }
    }
}

impl BlockCipher for SwappingCipher {
    fn encrypt(&self, number: u64, block: &mut [u8]) {
        if number >= PACKED_NUMBERS {
            let mut packed = self.packed.lock().unwrap_or_else(PoisonError::into_inner);
            packed.insert(number, block.to_vec());
        }
        self.cipher.encrypt(number, block);
    }

    fn decrypt(&self, number: u64, block: &mut [u8]) {
        self.cipher.decrypt(number, block);
        let packed = self.packed.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(other) = packed.get(&(number ^ self.line_blocks)) {
            block.copy_from_slice(other);
        }
    }
}
