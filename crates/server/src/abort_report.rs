//! What the log says when the process ends itself: a panic, an assertion of a library, a damaged heap.
//!
//! Without it, an abort in librbd or librados leaves one line that names no place.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

/// Most frames that are told.
const FRAMES_MAX: usize = 64;
/// How long writing them may take before the process ends without: standard error may have stalled.
const WRITE_SECONDS_MAX: u32 = 5;
/// Longest first line: of what is said, and a name.
const LINE_BYTES_MAX: usize = 160;
/// Longest name of a thread, the terminating zero included.
const THREAD_NAME_BYTES: usize = 16;

fn say(text: &[u8]) {
    // SAFETY: reads a slice that is valid; nothing can be done if it fails.
    unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len()) };
}

/// The frames of the calling thread.
fn frames() -> ([*mut c_void; FRAMES_MAX], c_int) {
    let mut frames = [null_mut(); FRAMES_MAX];
    // SAFETY: the array's length is told.
    let count = unsafe { libc::backtrace(frames.as_mut_ptr(), FRAMES_MAX as c_int) };
    (frames, count)
}

extern "C" fn report(_signal: c_int) {
    let mut name = [0u8; THREAD_NAME_BYTES];
    // SAFETY: calls that may be made in a handler of signals; `name` is as long as the kernel writes at most. The
    // second signal is delivered when the handler returns, and ends the process.
    unsafe {
        let mut alarms: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut alarms);
        libc::sigaddset(&raw mut alarms, libc::SIGALRM);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const alarms, null_mut());
        libc::alarm(WRITE_SECONDS_MAX);
        libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr());
        libc::signal(libc::SIGABRT, libc::SIG_DFL);
        libc::raise(libc::SIGABRT);
    }
    let end = name.iter().position(|&byte| byte == 0);
    let parts: [&[u8]; 3] = [
        b"hdcs: aborted (SIGABRT) in thread ",
        &name[..end.unwrap_or(name.len())],
        b"; acknowledged writes are in the write logs. Its frames, the newest first:\n",
    ];
    // At once, so that no other thread's line comes in between.
    let (mut line, mut len) = ([0; LINE_BYTES_MAX], 0);
    for part in parts {
        line[len..len + part.len()].copy_from_slice(part);
        len += part.len();
    }
    say(&line[..len]);
    let (frames, count) = frames();
    // SAFETY: as many frames as were told; writes to a descriptor without allocating.
    unsafe { libc::backtrace_symbols_fd(frames.as_ptr(), count, libc::STDERR_FILENO) };
}

/// Tell standard error where the process was when it is aborted. It ends by the same signal as without, or by
/// SIGALRM if standard error takes nothing.
pub fn install() {
    // The first call loads a library, which a handler may not do.
    let _ = frames();
    let handler = report as extern "C" fn(c_int);
    // SAFETY: the handler keeps to calls that are allowed in one.
    unsafe { libc::signal(libc::SIGABRT, handler as libc::sighandler_t) };
}
