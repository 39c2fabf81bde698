//! Ctrl-C and SIGTERM for commands that undo what they have begun.
//!
//! 1. From [`Interrupts::watch`] on, neither ends the process by itself.
//! 2. Work that may end anywhere goes on under [`Interrupts::or`], which drops it: whatever it holds (a file that
//!    is not whole, a process, threads) undoes itself when it is dropped.
//! 3. What blocks is done [`apart`], or an interrupt would not be seen meanwhile.

use std::thread;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;

use super::Failure;

/// A watch for both signals.
#[derive(Debug)]
pub struct Interrupts {
    interrupt: Signal,
    terminate: Signal,
}

impl Interrupts {
    /// Watch from now on.
    pub fn watch() -> Result<Self, Failure> {
        let cannot = |error| Failure::failed(format!("cannot watch for Ctrl-C: {error}"));
        Ok(Self {
            interrupt: signal(SignalKind::interrupt()).map_err(cannot)?,
            terminate: signal(SignalKind::terminate()).map_err(cannot)?,
        })
    }

    /// Wait for the next one.
    pub async fn wait(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }

    /// Do some work, unless an interrupt comes before its end.
    pub async fn or<T>(
        &mut self,
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        tokio::select! {
            biased;
            done = work => done,
            () = self.wait() => Err(Failure::interrupted("interrupted")),
        }
    }
}

/// Begin something that blocks on a thread of its own. One that nobody waits for any more is left behind: the
/// process is about to end.
pub fn apart<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> impl Future<Output = Result<T, Failure>> {
    let (answer, answered) = oneshot::channel();
    let thread = thread::Builder::new().name("apart".to_owned());
    let begun = thread.spawn(move || drop(answer.send(work())));
    async move {
        begun.map_err(|error| Failure::failed(format!("cannot start a thread: {error}")))?;
        let ended = || Failure::failed("a thread has ended without an answer");
        answered.await.map_err(|_| ended())?
    }
}
