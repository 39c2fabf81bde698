//! Backends that are being opened or closed on threads of their own, because that blocks.
//!
//! A place is opened again only when what was open there before has closed, and a program that
//! ends waits for all of them. Both waits are bounded: a backend whose cluster has gone closes never.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

static CLOSING: Mutex<Vec<String>> = Mutex::new(Vec::new());
static CLOSED: Condvar = Condvar::new();

/// No holder leaves the list half changed, so a panic elsewhere changes nothing.
fn list() -> MutexGuard<'static, Vec<String>> {
    CLOSING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Something is under way at a place, until this is dropped.
#[derive(Debug)]
pub struct Busy(String);

/// Note that something is under way at the place `name`.
pub fn begin(name: String) -> Busy {
    list().push(name.clone());
    Busy(name)
}

impl Drop for Busy {
    fn drop(&mut self) {
        let mut closing = list();
        if let Some(at) = closing.iter().position(|other| *other == self.0) {
            closing.swap_remove(at);
        }
        CLOSED.notify_all();
    }
}

/// Run what closes the place `name` on a thread.
pub fn close(name: String, close: impl FnOnce() + Send + 'static) {
    let busy = begin(name);
    let started = std::thread::Builder::new()
        .name("hdcs-close".into())
        .spawn(move || {
            close();
            drop(busy);
        });
    if let Err(error) = started {
        // What was to be closed went with the closure, on this thread.
        tracing::error!(%error, "no thread to close a backend on");
    }
}

/// Wait until nothing is being closed at the place `name`, or anywhere; whether that came about.
pub fn wait(name: Option<&str>, patience: Duration) -> bool {
    let is_there = |closing: &mut Vec<String>| match name {
        Some(name) => closing.iter().any(|other| other == name),
        None => !closing.is_empty(),
    };
    let waited = CLOSED.wait_timeout_while(list(), patience, is_there);
    let (closing, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
    drop(closing);
    !timeout.timed_out()
}

/// End a program whose backends were used: wait for them, and if some do not close, end without
/// running what the libraries run at an end, which their own threads do not survive.
pub fn leave(status: u8, patience: Duration) {
    if !wait(None, patience) {
        say_unclosed();
        exit_now(status);
    }
}

/// Log which backends are still being closed as the program ends.
pub fn say_unclosed() {
    tracing::warn!(places = list().join(", "), "ended without closing backends");
}

/// End the program without running what libraries run at an end.
pub fn exit_now(status: u8) -> ! {
    // SAFETY: ends the process.
    unsafe { libc::_exit(i32::from(status)) }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn closing_is_waited_for() {
        let (go, may_close) = channel::<()>();
        close("a place of this test".to_owned(), move || {
            may_close.recv().unwrap();
        });
        let place = Some("a place of this test");
        assert!(!wait(place, Duration::from_millis(10)));
        assert!(wait(Some("another one"), Duration::from_secs(30)));
        go.send(()).unwrap();
        assert!(wait(place, Duration::from_secs(30)));
    }
}
