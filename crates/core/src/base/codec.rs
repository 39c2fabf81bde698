//! What makes blocks smaller on their way to a medium, and whole again on their way back.
//!
//! The driver brings the algorithms; here only their place in the data path is decided. What was
//! stored says by which [`Method`] it was, so a volume whose setting changes reads what it has.

use core::fmt::Debug;

/// An algorithm, by the number that it has in every format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Method {
    /// LZ4 block format: fast both ways.
    Lz4 = 1,
    /// Zstandard (RFC 8878): smaller, and slower to make.
    Zstd = 2,
}

impl Method {
    /// Every method.
    pub const ALL: [Self; 2] = [Self::Lz4, Self::Zstd];

    /// The method with this number in a format.
    pub fn of_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|&method| method as u8 == number)
    }
}

/// The algorithms.
///
/// Invariants:
/// 1. `decompress` by the same method gives what `compress` got, if it is asked for as many bytes.
/// 2. `decompress` takes any bytes whatever: it returns false, or fills `plain` with something that
///    only the checksum of the plain bytes can judge.
/// 3. Neither allocates without a bound that follows from the lengths of its arguments.
pub trait Codec: Debug + Send + Sync {
    /// Store `plain` at the beginning of `stored` and return how many bytes that took; `None` if it
    /// does not fit there. What `stored` holds then is undefined.
    fn compress(&self, method: Method, plain: &[u8], stored: &mut [u8]) -> Option<usize>;

    /// Fill `plain` from `stored`, which `compress` returned; false if it cannot be that.
    #[must_use]
    fn decompress(&self, method: Method, stored: &[u8], plain: &mut [u8]) -> bool;
}
