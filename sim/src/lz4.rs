//! LZ4 for both methods, each marked, so that data compressed by one and read by the other is noticed.

use hdcs_core::codec::{Codec, Method};

/// See the module.
#[derive(Debug)]
pub struct Lz4 {
    /// Planted: it gives back something else, and says that it is right.
    pub confused: bool,
}

/// What volumes are given.
pub static LZ4: Lz4 = Lz4 { confused: false };
/// What a planted bug gives them.
pub static CONFUSED: Lz4 = Lz4 { confused: true };

impl Codec for Lz4 {
    fn compress(&self, method: Method, plain: &[u8], stored: &mut [u8]) -> Option<usize> {
        let (mark, rest) = stored.split_first_mut()?;
        *mark = method as u8;
        let bytes = lz4_flex::block::compress_into(plain, rest).ok()?;
        Some(1 + bytes)
    }

    fn decompress(&self, method: Method, stored: &[u8], plain: &mut [u8]) -> bool {
        let Some((&mark, rest)) = stored.split_first() else {
            return false;
        };
        if self.confused {
            plain.fill(mark);
            return true;
        }
        let bytes = lz4_flex::block::decompress_into(rest, plain).ok();
        mark == method as u8 && bytes == Some(plain.len())
    }
}
