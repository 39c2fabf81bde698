//! Makes operations fail: a share of them (`error_rate`), while a file exists (`error_file`), in
//! a way (`error_kind`: `eio`, `enospc`, `gone`, `hang`, `fenced`), of one kind (`error_on`: `read`,
//! `write`, `flush`, `zero`).
//!
//! With a file and no rate, all fail while it exists. An operation that hangs goes on when the
//! file is gone; without a file it hangs for ever. Once one was fenced, all are.

use std::path::PathBuf;

use hdcs_core::base::error::IoError;
use hdcs_core::base::io::{Nanos, Token};
use hdcs_device::ring::Outcome;

use super::Chance;
use super::later::earlier;
use crate::url::{OptionList, UrlError};
use crate::{Ask, Backend, Capabilities, Operation, Port};

/// The names of its options.
pub const OPTIONS: &[&str] = &["error_rate", "error_file", "error_kind", "error_on"];

/// How often the file is looked for at most.
const LOOK_EVERY: Nanos = Nanos::from_millis(5);

/// In which way an operation fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Input/output error.
    Eio,
    /// No space.
    Enospc,
    /// Not reachable.
    Gone,
    /// Not at all, for the time being.
    Hang,
    /// Another owner has taken over; from then on nothing reaches the backend.
    Fenced,
}

/// Which operations may fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum On {
    /// All.
    All,
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Flushes.
    Flush,
    /// Zeroing and discarding.
    Zero,
}

/// What fails.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Which share.
    pub rate: f64,
    /// Only while this exists.
    pub file: Option<PathBuf>,
    /// How.
    pub kind: Kind,
    /// What.
    pub on: On,
}

impl Options {
    /// Take the options out of the list.
    pub fn parse(list: &mut OptionList) -> Result<Option<Self>, UrlError> {
        let kinds = [
            ("eio", Kind::Eio),
            ("enospc", Kind::Enospc),
            ("gone", Kind::Gone),
            ("hang", Kind::Hang),
            ("fenced", Kind::Fenced),
        ];
        let ons = [
            ("all", On::All),
            ("read", On::Read),
            ("write", On::Write),
            ("flush", On::Flush),
            ("zero", On::Zero),
        ];
        let rate = list.share("error_rate")?;
        let file = list.path("error_file")?;
        let kind = list.word(
            "error_kind",
            &kinds,
            "`eio`, `enospc`, `gone`, `hang` or `fenced`",
        )?;
        let must = "`all`, `read`, `write`, `flush` or `zero`";
        let on = list.word("error_on", &ons, must)?;
        if rate.is_none() && file.is_none() {
            let given = kind.map(|_| "error_kind").or(on.map(|_| "error_on"));
            return match given {
                Some(name) => Err(UrlError::Needs {
                    name,
                    needs: "error_rate` or `error_file",
                }),
                None => Ok(None),
            };
        }
        Ok(Some(Self {
            rate: rate.unwrap_or(1.0),
            file,
            kind: kind.unwrap_or(Kind::Eio),
            on: on.unwrap_or(On::All),
        }))
    }
}

/// See the module.
pub struct Error {
    options: Options,
    chance: Chance,
    active: bool,
    looked: Option<Nanos>,
    hanging: Vec<Operation>,
    fenced: bool,
    inner: Box<dyn Backend>,
}

impl Error {
    /// Over `inner`.
    pub fn new(options: Options, seed: u64, inner: Box<dyn Backend>) -> Self {
        Self {
            // Another stream than the delay's, which has the same seed.
            chance: Chance::new(seed ^ 0x0DD5_EED5),
            active: options.file.is_none(),
            options,
            looked: None,
            hanging: Vec::new(),
            fenced: false,
            inner,
        }
    }

    fn look(&mut self, now: Nanos) {
        let Some(file) = &self.options.file else {
            return;
        };
        if self
            .looked
            .is_none_or(|looked| now.since(looked) >= LOOK_EVERY)
        {
            self.looked = Some(now);
            self.active = file.exists();
        }
    }

    fn fails(&mut self, ask: &Ask) -> bool {
        let on = match ask {
            Ask::Read { .. } => On::Read,
            Ask::Write { .. } => On::Write,
            Ask::Flush => On::Flush,
            Ask::Zero { .. } => On::Zero,
            _ => On::All,
        };
        let chosen = self.options.on == On::All || self.options.on == on;
        self.fenced || self.active && chosen && self.chance.share() < self.options.rate
    }
}

impl Backend for Error {
    fn submit(&mut self, now: Nanos, operation: Operation, port: &mut Port<'_>) {
        self.look(now);
        if !self.fails(&operation.ask) {
            return self.inner.submit(now, operation, port);
        }
        match self.options.kind {
            Kind::Eio => port.end(operation.token, Err(IoError::Failed)),
            Kind::Enospc => port.end(operation.token, Err(IoError::NoSpace)),
            Kind::Gone => port.end(operation.token, Err(IoError::Unreachable)),
            Kind::Hang => self.hanging.push(operation),
            Kind::Fenced => {
                self.fenced = true;
                port.end(operation.token, Err(IoError::Fenced));
            }
        }
    }

    fn completed(&mut self, now: Nanos, token: Token, outcome: Outcome, port: &mut Port<'_>) {
        self.inner.completed(now, token, outcome, port);
    }

    fn poll(&mut self, now: Nanos, port: &mut Port<'_>) {
        if !self.hanging.is_empty() {
            self.look(now);
            if !self.active {
                for operation in std::mem::take(&mut self.hanging) {
                    self.inner.submit(now, operation, port);
                }
            }
        }
        self.inner.poll(now, port);
    }

    fn next_wakeup(&self) -> Option<Nanos> {
        let look = (!self.hanging.is_empty() && self.options.file.is_some())
            .then(|| self.looked.unwrap_or_default().plus(LOOK_EVERY));
        earlier(look, self.inner.next_wakeup())
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn finish(&mut self) -> bool {
        self.inner.finish()
    }
}
