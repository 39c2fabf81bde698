//! What the operating system is told about large pieces of memory.
//!
//! Nothing here fails: memory that the system has no huge pages for, or that it cannot bring in now, comes in small pages as
//! it is used.

use std::ptr::NonNull;

use crate::Errno;

/// The system's pages are not larger than this, nor is what pieces of memory are aligned to.
const PAGE_BYTES: usize = 4096;

/// Have so much memory lie in huge pages, and the first `touched_bytes` of it be there at once.
///
/// # Safety
/// The memory is mapped, writable and stays so during the call; its content stays as it is.
pub unsafe fn prepare(address: NonNull<u8>, bytes: usize, touched_bytes: usize) {
    let skipped = address.as_ptr().align_offset(PAGE_BYTES).min(bytes);
    let bytes = (bytes - skipped) / PAGE_BYTES * PAGE_BYTES;
    let touched_bytes = touched_bytes.min(bytes) / PAGE_BYTES * PAGE_BYTES;
    let advise = |bytes: usize, advice: i32, what: &str| {
        if bytes == 0 {
            return;
        }
        // SAFETY: the range lies within the memory; neither advice changes what is in it.
        let result = unsafe { libc::madvise(address.as_ptr().add(skipped).cast(), bytes, advice) };
        if result < 0 {
            let error = Errno::last();
            tracing::debug!(%error, bytes, "memory is not {what}");
        }
    };
    advise(bytes, libc::MADV_HUGEPAGE, "in huge pages");
    // Since Linux 5.14.
    advise(touched_bytes, libc::MADV_POPULATE_WRITE, "touched");
}

#[cfg(test)]
mod tests {
    use hdcs_core::base::buf::Pool;

    use super::*;

    /// How many pages of this memory are there.
    fn resident_pages(address: NonNull<u8>, bytes: usize) -> usize {
        let mut pages = vec![0u8; bytes / PAGE_BYTES];
        // SAFETY: the memory is there, and there is a byte for each of its pages.
        let result = unsafe { libc::mincore(address.as_ptr().cast(), bytes, pages.as_mut_ptr()) };
        assert_eq!(result, 0);
        pages.iter().filter(|&&page| page & 1 == 1).count()
    }

    #[test]
    fn memory_is_there_once_it_is_touched_and_holds_what_it_held() {
        let pool = Pool::new(64 << 20);
        let (address, bytes) = pool.memory();
        assert_eq!(bytes, 64 << 20);
        let mut buf = pool.alloc(1 << 20).unwrap();
        buf.fill(7);
        // SAFETY: the pool is there.
        unsafe { prepare(address, bytes, 32 << 20) };
        let half = bytes / 2;
        assert_eq!(resident_pages(address, half), half / PAGE_BYTES);
        // A huge page may reach over the end of what was asked for.
        let all = resident_pages(address, bytes);
        assert!(all <= (half + (2 << 20)) / PAGE_BYTES, "{all}");
        assert!(buf.iter().all(|&byte| byte == 7));
    }
}
