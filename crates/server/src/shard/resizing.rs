//! Changes of size: performs what [`Resize`] decides.

use hdcs_backend::home::LocalStoreBackend;
use hdcs_backend::{Ask, Operation};
use hdcs_core::base::error::IoError;
use hdcs_core::base::io::Nanos;
use hdcs_core::base::limits::{SECTOR_BYTES, VOLUME_BYTES_MAX, VOLUME_BYTES_MIN};
use hdcs_core::cache::{Barrier, CacheEvent};
use hdcs_core::node::resize::{Act, Refusal, Resize, View};
use hdcs_core::volume::{Event, Trouble};
use hdcs_frontend::VolumeNumber;

use super::command::Answer;
use super::control::{NOT_OPEN, tell};
use super::served::Served;
use super::state::ShardState;
use super::turn::RESIZE_TOKEN;

/// Why a volume does not grow whose log was to be emptied for that.
const FLUSH_CANCELLED: &str = "what was cut off is still in its write log, and the flush that was to end that was \
                               cancelled: grow it again";

/// A change of size that is under way.
#[derive(Debug)]
pub struct Resizing {
    /// Where it is.
    pub resize: Resize,
    answer: Answer<()>,
}

impl Resizing {
    /// It ends, since its volume was closed.
    pub fn closed(self) {
        tell(self.answer, Err("the volume was closed".to_owned()));
    }
}

impl Served {
    /// Whether something is wrong that may keep its backend from getting what it is to have.
    fn keeps_backend_waiting(&self) -> bool {
        let trouble = self.volume.trouble();
        trouble.is_some_and(|(trouble, _)| trouble != Trouble::CopiesShort)
    }

    fn resize_view(&self, now: Nanos, persisted: Barrier) -> View {
        View {
            bytes: self.volume.config().bytes,
            destage_left_bytes: self.volume.stats(now).destage_all_remaining_bytes,
            cut: self.volume.cut(),
            is_flushed: self.volume.backend_is_flushed(),
            is_in_trouble: self.keeps_backend_waiting(),
            under_way: self.backend.under_way(),
            persisted,
        }
    }
}

impl ShardState {
    /// Whether a volume may get a new size; its slot.
    fn check_resize(&self, number: VolumeNumber, bytes: u64) -> Result<u32, String> {
        let slot = self.open_slot(number)?;
        let sizes = VOLUME_BYTES_MIN..=VOLUME_BYTES_MAX;
        if !bytes.is_multiple_of(SECTOR_BYTES as u64) || !sizes.contains(&bytes) {
            return Err(format!(
                "size {bytes}: must be a multiple of {SECTOR_BYTES} from {VOLUME_BYTES_MIN} to \
                 {VOLUME_BYTES_MAX}"
            ));
        }
        let served = self.volumes.get(slot).ok_or(NOT_OPEN)?;
        if served.resizing.is_some() {
            return Err("a resize is under way already; wait for its end".to_owned());
        }
        if served.snapshotting.is_some() {
            return Err("a snapshot is under way; wait for its end".to_owned());
        }
        Ok(slot)
    }

    /// Give a volume another size.
    pub(super) fn resize(&mut self, number: VolumeNumber, bytes: u64, answer: Answer<()>) {
        let slot = match self.check_resize(number, bytes) {
            Ok(slot) => slot,
            Err(error) => return tell(answer, Err(error)),
        };
        let (now, persisted) = (self.now, self.cache.persisted());
        let Some(served) = self.volumes.get_mut(slot) else {
            return;
        };
        let is_atomic = served.backend.capabilities().atomic_flush;
        let view = served.resize_view(now, persisted);
        let resize = Resize::begin(number.0, bytes, is_atomic, &view);
        served.grown = None;
        served.resizing = Some(Resizing { resize, answer });
        self.settle_later(slot);
        self.go_on_resizing(slot);
    }

    /// Let a volume have the size that its backend has grown to, and that the catalogue has recorded.
    pub(super) fn grow(&mut self, number: VolumeNumber, bytes: u64) -> Result<(), String> {
        let slot = self.open_slot(number)?;
        let served = self.volumes.get_mut(slot).ok_or(NOT_OPEN)?;
        if served.volume.config().bytes == bytes {
            return Ok(());
        }
        if served.resizing.is_some() || served.grown != Some(bytes) {
            return Err("its backend has another size".to_owned());
        }
        served.grown = None;
        self.step(slot, Event::Resize { bytes });
        self.publish(slot);
        match self.volumes.get(slot) {
            Some(served) if served.volume.config().bytes == bytes => Ok(()),
            _ => {
                Err("its log holds what was cut off before: flush it, and grow it again".to_owned())
            }
        }
    }

    /// The next steps of a volume's resize.
    pub fn go_on_resizing(&mut self, slot: u32) {
        loop {
            let (now, persisted) = (self.now, self.cache.persisted());
            let Some(served) = self.volumes.get_mut(slot) else {
                return;
            };
            let view = served.resize_view(now, persisted);
            let Some(resizing) = &mut served.resizing else {
                return;
            };
            let Some(act) = resizing.resize.go_on(&view) else {
                return;
            };
            self.perform_resize(slot, act);
            if let Act::Backend(_) = act {
                self.perform(slot);
            }
        }
    }

    fn perform_resize(&mut self, slot: u32, act: Act) {
        match act {
            Act::Tell(bytes) => self.step(slot, Event::Resize { bytes }),
            Act::DestageAll => self.step(slot, Event::DestageAll),
            Act::TellTail => self.step(slot, Event::TellTail),
            Act::Forget(first, blocks) => {
                self.cache.invalidate(first, blocks);
                let barrier = self.cache.barrier();
                let served = self.volumes.get_mut(slot);
                if let Some(resizing) = served.and_then(|served| served.resizing.as_mut()) {
                    resizing.resize.forgotten(barrier);
                }
                // What makes it durable begins now, since the turn has polled the cache already.
                self.step_cache(CacheEvent::Poll);
            }
            Act::Backend(bytes) => {
                let (token, ask) = (RESIZE_TOKEN, Ask::Resize { bytes });
                self.ask_backend(slot, Operation { token, ask });
            }
            Act::End(result) => self.end_resize(slot, result),
        }
    }

    /// The backend has changed its size, or could not.
    pub(super) fn backend_resized(&mut self, slot: u32, result: Result<(), IoError>) {
        let served = self.volumes.get_mut(slot);
        if let Some(resizing) = served.and_then(|served| served.resizing.as_mut()) {
            let act = resizing.resize.backend_resized(result);
            self.perform_resize(slot, act);
        }
    }

    fn end_resize(&mut self, slot: u32, result: Result<(), Refusal>) {
        let Some(served) = self.volumes.get_mut(slot) else {
            return;
        };
        let Some(Resizing { resize, answer }) = served.resizing.take() else {
            return;
        };
        let (bytes, before) = (resize.bytes(), resize.before());
        let held = std::mem::take(&mut served.held);
        let trouble = served.volume.trouble();
        let waits_for_copies = matches!(trouble, Some((Trouble::CopiesTooFew, _)));
        let why = result.err().map(|refusal| match refusal {
            Refusal::Log | Refusal::Backend(IoError::Unreachable) if waits_for_copies => {
                "fewer nodes have a copy of its log than writes need: start the others again, or see `hdcs group set`".to_owned()
            }
            Refusal::FlushCancelled => FLUSH_CANCELLED.to_owned(),
            Refusal::Log => "its log cannot be written, or does not answer; `hdcs volume show` says why".to_owned(),
            Refusal::StillWritten => format!(
                "what lies beyond {bytes} bytes is being written: stop whoever writes there, then shrink it again"
            ),
            Refusal::Backend(error) => {
                // A shrunk volume keeps its new size over a backend that is larger than it.
                served.backend.resized(bytes.min(before));
                let home = served.backend.home();
                match (home.and_then(LocalStoreBackend::resize_trouble), home) {
                    (Some(trouble), _) => trouble.to_owned(),
                    (None, Some(_)) => format!("its local store cannot be resized: {error}"),
                    (None, None) => format!("the backend cannot be resized: {error}"),
                }
            }
        });
        if why.is_none() {
            served.backend.resized(bytes);
            if bytes > before {
                // Whoever asked records it first: see `grow`.
                served.grown = Some(bytes);
            } else {
                self.step(slot, Event::Resize { bytes });
            }
        }
        for operation in held {
            self.ask_backend(slot, operation);
        }
        self.publish(slot);
        tell(answer, why.map_or(Ok(()), Err));
    }
}
