//! Checker: trouble below a volume is noticed, shown, and does not spread.
//!
//! 1. Once a backend has said that another owner has it, it is asked for nothing more; everything is
//!    answered with that; and the log's superblock, which holds its tail, is not written.
//! 2. While a backend operation is under way for longer than the volume's bound, the volume is not
//!    healthy; once all is well again and destaged, it is.
//! 3. The same holds of the log's device. While it has not answered for longer than its bound, no close waits for it,
//!    nor does a write or a flush of a volume whose clients are to be told of an error.
//! 4. A cache device that keeps an operation for longer than the cache's bound is given up. It is
//!    used again only when nothing of before is under way on it.

use hdcs_core::base::error::RequestError;
use hdcs_core::base::io::Nanos;
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::cache::SsdState;
use hdcs_core::format::LOG_HEADER_BLOCKS;
use hdcs_core::volume::State;

use crate::violation::Violation;

/// What a volume was told about the owner of its backend.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fence {
    is_up: bool,
    told: bool,
}

impl Fence {
    /// Another owner takes the backend over.
    pub fn put_up(&mut self) {
        self.is_up = true;
    }

    /// Whether the backend belongs to another owner.
    pub fn is_up(&self) -> bool {
        self.is_up
    }

    /// The volume is told so.
    pub fn tell(&mut self) {
        self.told = true;
    }

    /// The volume is opened anew: it has to be told again.
    pub fn reopened(&mut self) {
        self.told = false;
    }

    /// Whether it was.
    pub fn is_told(&self) -> bool {
        self.told
    }

    /// The volume asks its backend for something.
    pub fn check_ask(&self, unit: usize, what: &str) -> Result<(), Violation> {
        if !self.told {
            return Ok(());
        }
        Err(Violation::new(
            "fenced-asked",
            format!("{what} of volume {unit}, which knows that another owner has its backend"),
        ))
    }

    /// The volume writes to its log's device.
    pub fn check_log_write(&self, unit: usize, offset: u64) -> Result<(), Violation> {
        if !self.told || offset >= LOG_HEADER_BLOCKS * BLOCK_BYTES as u64 {
            return Ok(());
        }
        Err(Violation::new(
            "fenced-tail",
            format!("volume {unit}, whose backend has another owner, writes its log's superblock"),
        ))
    }

    /// The volume answers a request.
    pub fn check_reply(&self, unit: usize, error: Option<RequestError>) -> Result<(), Violation> {
        let told = matches!(error, Some(RequestError::Fenced | RequestError::Closing));
        if !self.told || told {
            return Ok(());
        }
        Err(Violation::new(
            "fenced-answer",
            format!("volume {unit}, whose backend has another owner, answers {error:?}"),
        ))
    }
}

/// The oldest operation of the backend or of the log of an open volume has been under way for so long.
pub fn check_shown(unit: usize, age: Nanos, max: Nanos, state: State) -> Result<(), Violation> {
    if age < max || state != State::Healthy {
        return Ok(());
    }
    Err(Violation::new(
        "hang-not-shown",
        format!("volume {unit} is healthy, though it was not answered for {age:?}"),
    ))
}

/// A volume whose log has not answered for too long is still closing, or not, with nothing else to wait for.
pub fn check_close(unit: usize, age: Nanos, is_closing: bool) -> Result<(), Violation> {
    if !is_closing {
        return Ok(());
    }
    Err(Violation::new(
        "silent-log-close",
        format!("volume {unit} does not close, as its log has not answered for {age:?}"),
    ))
}

/// A client that is to be told of an error still waits for such a log, or none does.
pub fn check_told(unit: usize, age: Nanos, waits: bool) -> Result<(), Violation> {
    if !waits {
        return Ok(());
    }
    Err(Violation::new(
        "silent-log-waits",
        format!("clients of volume {unit} wait for its log, which has not answered for {age:?}"),
    ))
}

/// The oldest operation of the cache device has been under way for so long.
pub fn check_given_up(age: Nanos, max: Nanos, state: SsdState) -> Result<(), Violation> {
    if age < max || state == SsdState::Offline {
        return Ok(());
    }
    Err(Violation::new(
        "cache-hang-not-noticed",
        format!("the SSD tier is {state:?}, though its device has not answered for {age:?}"),
    ))
}

/// The cache device is used again while so many operations of before are under way on it.
pub fn check_readmitted(under_way: usize) -> Result<(), Violation> {
    if under_way == 0 {
        return Ok(());
    }
    Err(Violation::new(
        "readmitted-too-early",
        format!("the SSD tier is readmitted with {under_way} operations under way on its device"),
    ))
}

/// All is well and destaged: so the volume says.
pub fn check_healthy(unit: usize, state: State) -> Result<(), Violation> {
    if state == State::Healthy {
        return Ok(());
    }
    Err(Violation::new(
        "not-healthy-again",
        format!("volume {unit} is {state:?}, though everything works and is destaged"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fence_that_is_ignored_is_caught() {
        let mut fence = Fence::default();
        fence.put_up();
        // It need not know before it is told.
        assert_eq!(fence.check_ask(0, "a write"), Ok(()));
        assert_eq!(fence.check_log_write(0, 0), Ok(()));
        assert_eq!(fence.check_reply(0, None), Ok(()));
        fence.tell();
        assert_eq!(
            fence.check_ask(0, "a write").unwrap_err().rule,
            "fenced-asked"
        );
        assert_eq!(
            fence.check_log_write(0, 4096).unwrap_err().rule,
            "fenced-tail"
        );
        let ring = LOG_HEADER_BLOCKS * BLOCK_BYTES as u64;
        assert_eq!(fence.check_log_write(0, ring), Ok(()));
        assert_eq!(
            fence.check_reply(0, None).unwrap_err().rule,
            "fenced-answer"
        );
        let wrong = fence.check_reply(0, Some(RequestError::Io));
        assert_eq!(wrong.unwrap_err().rule, "fenced-answer");
        assert_eq!(fence.check_reply(0, Some(RequestError::Fenced)), Ok(()));
    }

    #[test]
    fn hangs_that_do_not_show_are_caught() {
        let (short, long) = (Nanos(9), Nanos(10));
        assert_eq!(check_shown(0, short, long, State::Healthy), Ok(()));
        assert_eq!(check_shown(0, long, long, State::Degraded), Ok(()));
        let hidden = check_shown(0, long, long, State::Healthy);
        assert_eq!(hidden.unwrap_err().rule, "hang-not-shown");
        assert_eq!(check_given_up(long, long, SsdState::Offline), Ok(()));
        let kept = check_given_up(long, long, SsdState::Online);
        assert_eq!(kept.unwrap_err().rule, "cache-hang-not-noticed");
        assert!(check_close(0, long, false).is_ok() && check_told(0, long, false).is_ok());
        assert_eq!(
            check_close(0, long, true).unwrap_err().rule,
            "silent-log-close"
        );
        assert_eq!(
            check_told(0, long, true).unwrap_err().rule,
            "silent-log-waits"
        );
        assert!(check_readmitted(0).is_ok() && check_readmitted(1).is_err());
        assert!(check_healthy(0, State::Healthy).is_ok());
        assert!(check_healthy(0, State::Degraded).is_err());
    }
}
