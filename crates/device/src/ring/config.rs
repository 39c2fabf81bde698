//! How a ring is set up.

/// When queued operations go to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Submit {
    /// All of a turn at once.
    Batch,
    /// Each read at once while the device has little to do, and each write that a client waits for, so that it starts
    /// earlier; the others before replies are sent, all together, for each costs a system call.
    Each,
}

/// How a ring is set up.
#[derive(Clone, Copy, Debug)]
pub struct RingConfig {
    /// Places in the submission queue; the completion queue has eight times as many.
    pub entries: u32,
    /// When operations go to the kernel.
    pub submit: Submit,
    /// Whether completions are handled only when the thread waits (`DEFER_TASKRUN`).
    pub defer_taskrun: bool,
    /// Threads that make writes durable; 0: io_uring does.
    pub writer_threads: usize,
    /// Whether they ask for a high priority.
    pub raise_priority: bool,
}

impl Default for RingConfig {
    fn default() -> Self {
        Self {
            entries: 512,
            submit: Submit::Each,
            defer_taskrun: true,
            writer_threads: 0,
            raise_priority: false,
        }
    }
}
