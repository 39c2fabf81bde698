//! File descriptors: as many as the system gives, and some of them kept for files.
//!
//! Invariant: clients never hold so many that volumes, keys, the catalogue and the control socket lack one.

use hdcs_core::base::limits::{DESCRIPTORS_MIN, DESCRIPTORS_RESERVED};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// There are fewer than a node can work with.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the limit of open files is {0} and a node needs at least {DESCRIPTORS_MIN}: raise it (`ulimit -n`, LimitNOFILE= of \
     a systemd service)"
)]
pub struct TooFew(u64);

/// Raise the limit of this process as far as it may; what it is then.
pub fn raise() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    // A limit that is not to be raised stays what it is.
    let _ = setrlimit(Resource::Nofile, raised);
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Connections on each of so many listeners, of which `wanted` were configured, under a limit of descriptors.
pub fn connections_max(limit: u64, listeners: usize, wanted: usize) -> Result<usize, TooFew> {
    if limit < DESCRIPTORS_MIN {
        return Err(TooFew(limit));
    }
    let reserved = (limit / 4).max(DESCRIPTORS_RESERVED).min(limit / 2);
    let each = (limit - reserved) / (listeners as u64).max(1);
    Ok(wanted
        .min(usize::try_from(each).unwrap_or(usize::MAX))
        .max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_kept_for_files() {
        assert_eq!(connections_max(1 << 20, 2, 1024), Ok(1024));
        assert_eq!(connections_max(4096, 3, 1024), Ok(1024));
        assert_eq!(connections_max(1024, 1, 1024), Ok(512));
        assert_eq!(connections_max(1024, 2, 1024), Ok(256));
        assert_eq!(connections_max(256, 1, 1024), Ok(128));
        assert_eq!(connections_max(DESCRIPTORS_MIN, 1000, 1024), Ok(1));
        assert_eq!(connections_max(100, 1, 1024), Err(TooFew(100)));
        assert_eq!(connections_max(u64::MAX, 0, 4096), Ok(4096));
    }
}
