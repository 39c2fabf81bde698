//! A cipher for the simulator: nothing that keeps a secret, but whoever encrypts or decrypts once too
//! often, not at all, or with another block's number, finds wrong bytes.

use hdcs_core::cipher::BlockCipher;

/// Adds to every byte what the number of its block and its place make: not its own inverse.
#[derive(Debug)]
pub struct ToyCipher(pub u64);

impl ToyCipher {
    fn pad(&self, number: u64) -> impl Iterator<Item = u8> {
        let mut state = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        std::iter::from_fn(move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            Some(state as u8)
        })
    }
}

impl BlockCipher for ToyCipher {
    fn encrypt(&self, number: u64, block: &mut [u8]) {
        for (byte, pad) in block.iter_mut().zip(self.pad(number)) {
            *byte = byte.wrapping_add(pad);
        }
    }

    fn decrypt(&self, number: u64, block: &mut [u8]) {
        for (byte, pad) in block.iter_mut().zip(self.pad(number)) {
            *byte = byte.wrapping_sub(pad);
        }
    }
}
