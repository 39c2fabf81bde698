//! LZ4 for both methods, marked so that one taken for the other shows.

use hdcs_core::base::codec::{Codec, Method};

/// LZ4 blocks.
#[derive(Debug)]
pub struct Lz4;

/// LZ4 is as a real node stores it, for the golden images.
fn mark(method: Method) -> &'static [u8] {
    match method {
        Method::Lz4 => &[],
        Method::Zstd => &[0xfd],
    }
}

impl Codec for Lz4 {
    fn compress(&self, method: Method, plain: &[u8], stored: &mut [u8]) -> Option<usize> {
        let mark = mark(method);
        let (head, rest) = stored.split_at_mut_checked(mark.len())?;
        head.copy_from_slice(mark);
        let bytes = lz4_flex::block::compress_into(plain, rest).ok()?;
        Some(mark.len() + bytes)
    }

    fn decompress(&self, method: Method, stored: &[u8], plain: &mut [u8]) -> bool {
        stored.strip_prefix(mark(method)).is_some_and(|stored| {
            let bytes = lz4_flex::block::decompress_into(stored, plain).ok();
            bytes == Some(plain.len())
        })
    }
}
