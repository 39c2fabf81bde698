//! LZ4 and Zstandard for [`hdcs_core::base::codec`].

use std::cell::RefCell;

use hdcs_core::base::codec::{Codec, Method};
use lz4_flex::block::{compress_into_with_table, get_maximum_output_size};
use zstd::bulk::{Compressor, Decompressor};

/// Level 1: a block must not wait longer for its compression than for its device.
const ZSTD_LEVEL: i32 = 1;

/// The algorithms of this program.
#[derive(Clone, Copy, Debug, Default)]
pub struct Codecs;

/// The one of them that everybody shares.
pub static CODECS: Codecs = Codecs;

/// Working memory of a thread: making it anew costs more than a block does.
struct Scratch {
    lz4: lz4_flex::block::CompressTable,
    roomy: Vec<u8>,
    zstd_in: Compressor<'static>,
    zstd_out: Decompressor<'static>,
}

impl Scratch {
    fn new() -> Self {
        let no_memory = "no memory for the contexts of zstd";
        Self {
            lz4: lz4_flex::block::CompressTable::default(),
            roomy: Vec::new(),
            zstd_in: Compressor::new(ZSTD_LEVEL).expect(no_memory),
            zstd_out: Decompressor::new().expect(no_memory),
        }
    }

    /// The library wants room for the worst case, whatever it comes to.
    fn lz4(&mut self, plain: &[u8], stored: &mut [u8]) -> Option<usize> {
        let worst = get_maximum_output_size(plain.len());
        if stored.len() >= worst {
            return compress_into_with_table(plain, stored, &mut self.lz4).ok();
        }
        self.roomy.resize(worst.max(self.roomy.len()), 0);
        let bytes = compress_into_with_table(plain, &mut self.roomy, &mut self.lz4).ok()?;
        stored
            .get_mut(..bytes)?
            .copy_from_slice(&self.roomy[..bytes]);
        Some(bytes)
    }
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch::new());
}

impl Codec for Codecs {
    fn compress(&self, method: Method, plain: &[u8], stored: &mut [u8]) -> Option<usize> {
        SCRATCH.with_borrow_mut(|scratch| match method {
            Method::Lz4 => scratch.lz4(plain, stored),
            Method::Zstd => scratch.zstd_in.compress_to_buffer(plain, stored).ok(),
        })
    }

    fn decompress(&self, method: Method, stored: &[u8], plain: &mut [u8]) -> bool {
        let bytes = match method {
            Method::Lz4 => lz4_flex::block::decompress_into(stored, plain).ok(),
            Method::Zstd => SCRATCH.with_borrow_mut(|scratch| {
                scratch.zstd_out.decompress_to_buffer(stored, plain).ok()
            }),
        };
        bytes == Some(plain.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts() -> Vec<Vec<u8>> {
        let mut random = fastrand::Rng::with_seed(3);
        let noise: Vec<u8> = (0..4096).map(|_| random.u8(..)).collect();
        let words: Vec<u8> = (0..65536).map(|_| b"abcd efg"[random.usize(..8)]).collect();
        vec![vec![0; 4096], vec![7; 1 << 20], noise, words]
    }

    #[test]
    fn codecs_give_back_what_they_got() {
        for plain in texts() {
            for method in Method::ALL {
                let mut stored = vec![0; plain.len() * 2];
                let bytes = CODECS.compress(method, &plain, &mut stored).unwrap();
                let mut back = vec![1; plain.len()];
                assert!(CODECS.decompress(method, &stored[..bytes], &mut back));
                assert!(back == plain);
                // Fewer or more bytes than there were are not what was stored.
                let mut short = vec![0; plain.len() - 1];
                assert!(!CODECS.decompress(method, &stored[..bytes], &mut short));
                let mut long = vec![0; plain.len() + 1];
                assert!(!CODECS.decompress(method, &stored[..bytes], &mut long));
            }
        }
    }

    #[test]
    fn codecs_say_when_it_does_not_fit() {
        let noise = &texts()[2];
        for method in Method::ALL {
            assert_eq!(CODECS.compress(method, noise, &mut [0; 4000]), None);
            assert_eq!(CODECS.compress(method, &[0; 4096], &mut []), None);
            // And when it does, the room need not be that of the worst case.
            let bytes = CODECS.compress(method, &[0; 4096], &mut [0; 100]);
            assert!(bytes.is_some_and(|bytes| bytes < 100), "{method:?}");
        }
    }

    #[test]
    fn codecs_survive_any_bytes() {
        let mut random = fastrand::Rng::with_seed(4);
        for plain in texts() {
            for method in Method::ALL {
                let mut stored = vec![0; plain.len() * 2];
                let bytes = CODECS.compress(method, &plain, &mut stored).unwrap();
                let mut back = vec![0; plain.len()];
                for _ in 0..200 {
                    let at = random.usize(..bytes);
                    stored[at] ^= random.u8(1..);
                    let end = random.usize(..=bytes);
                    let _whether_or_not = CODECS.decompress(method, &stored[..end], &mut back);
                }
            }
        }
    }
}
