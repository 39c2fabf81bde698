//! Who holds an image, and taking it from who is dead.
//!
//! The cluster notices only after half a minute that a client has died, but a node that is started
//! again after a crash should not wait for that. So whoever takes the lock leaves a note with the
//! image that names its process. One on the same host can tell that this process has gone.
//!
//! The note only shortens the wait; safety never rests on it. Whoever loses the lock is locked out
//! by the cluster before the next owner writes a byte, dead or not.

use std::fs;

use hdcs_device::Errno;
use serde::{Deserialize, Serialize};

use super::ceph::Image;
use crate::BackendError;

/// The note's name among the image's metadata.
const NOTE: &str = "hdcs.owner";
/// Others may take the lock in between; not for ever.
const ATTEMPTS: usize = 3;

/// A process on a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Process {
    /// Names the host and its last start.
    boot: String,
    /// In which process numbers mean the same.
    namespace: String,
    number: u32,
    /// When it started, in ticks since the host did.
    started: u64,
}

/// What is left with the image.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    /// The client's address in the cluster.
    address: String,
    process: Process,
}

impl Process {
    fn this() -> Option<Self> {
        let number = std::process::id();
        let namespace = fs::read_link("/proc/self/ns/pid").ok()?;
        Some(Self {
            boot: fs::read_to_string("/proc/sys/kernel/random/boot_id")
                .ok()?
                .trim()
                .to_owned(),
            namespace: namespace.to_string_lossy().into_owned(),
            number,
            started: started(number)?,
        })
    }

    /// Whether it is known that it runs no more: false for one on another host.
    fn has_ended(&self, this: &Self) -> bool {
        self.boot == this.boot
            && self.namespace == this.namespace
            && started(self.number) != Some(self.started)
    }
}

/// When a process started; none if it does not run.
fn started(number: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
    // The name, in parentheses, may hold anything; the state and then numbers follow.
    let (_, rest) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    if matches!(fields.first(), Some(&("Z" | "X"))) {
        return None;
    }
    // The 22nd field of the line, the first two of which are cut off.
    fields.get(19)?.parse().ok()
}

/// Make this process the owner of an image, or say who is. Blocks.
pub fn take(image: &Image, place: &str, steal: bool) -> Result<(), BackendError> {
    let failed = |what: &str, errno: Errno| super::failure(place, what, errno);
    let this = Process::this();
    for _ in 0..ATTEMPTS {
        let owner = image
            .lock_owner()
            .map_err(|errno| failed("asking who holds its lock", errno))?;
        if let Some(owner) = owner {
            let why = if steal {
                "steal=on was given"
            } else if ended(image, &owner, this.as_ref()) {
                "its process on this host has ended"
            } else if !image
                .watchers()
                .map_err(|errno| failed("asking who uses it", errno))?
                .contains(&owner)
            {
                "it is not connected any more"
            } else {
                return Err(BackendError::Refused(format!(
                    "{place} is in use by the client at {owner}; stop that one (a client that has \
                     crashed lets go after 30 s), or take the image away from it for good by \
                     creating a volume over it with the option steal=on"
                )));
            };
            tracing::warn!(image = place, owner, "taking the image over: {why}");
            match image.break_lock(&owner) {
                // Somebody else was faster; see who.
                Ok(()) | Err(Errno(libc::EBUSY | libc::ENOENT)) => {}
                Err(errno) => return Err(failed("taking its lock away from a client", errno)),
            }
        }
        match image.lock() {
            Ok(()) => {
                leave_note(image, place, this);
                return Ok(());
            }
            Err(Errno(libc::EROFS | libc::EBUSY | libc::EAGAIN)) => {}
            Err(errno) => return Err(failed("taking its exclusive lock", errno)),
        }
    }
    Err(BackendError::Refused(format!(
        "{place} is in use: other clients take its lock again and again"
    )))
}

/// Whether the owner's own note says that it was a process of this host which has ended.
fn ended(image: &Image, owner: &str, this: Option<&Process>) -> bool {
    let Ok(Some(note)) = image.note(NOTE) else {
        return false;
    };
    let note = serde_json::from_str::<Note>(&note);
    match (note, this) {
        (Ok(note), Some(this)) => note.address == owner && note.process.has_ended(this),
        _ => false,
    }
}

/// Without the note a successor only waits longer, so what fails here is not fatal.
fn leave_note(image: &Image, place: &str, process: Option<Process>) {
    let (Ok(Some(address)), Some(process)) = (image.lock_owner(), process) else {
        return;
    };
    let note = serde_json::to_string(&Note { address, process });
    let left = image.set_note(NOTE, &note.expect("a note is plain text and numbers"));
    if let Err(errno) = left {
        tracing::warn!(image = place, error = %errno, "leaving a note of the owner with the image");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_that_runs_has_not_ended() {
        let this = Process::this().unwrap();
        assert!(!this.has_ended(&this));
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let other = Process {
            number: child.id(),
            started: started(child.id()).unwrap(),
            ..this.clone()
        };
        assert!(!other.has_ended(&this));
        child.kill().unwrap();
        // Also before anybody has asked how it ended.
        while !other.has_ended(&this) {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(other.has_ended(&this));
    }

    #[test]
    fn process_elsewhere_or_reused_number() {
        let this = Process::this().unwrap();
        let elsewhere = Process {
            boot: "another".to_owned(),
            number: u32::MAX,
            ..this.clone()
        };
        assert!(!elsewhere.has_ended(&this), "another host");
        let container = Process {
            namespace: "pid:[1]".to_owned(),
            number: u32::MAX,
            ..this.clone()
        };
        assert!(!container.has_ended(&this), "another container");
        let reused = Process {
            started: this.started + 1,
            ..this.clone()
        };
        assert!(reused.has_ended(&this), "the number is another process's");
    }
}
