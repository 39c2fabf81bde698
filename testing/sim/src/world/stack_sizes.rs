//! Changes of size of what lies below a volume. A local store that an interrupted one has left larger than its volume is
//! cut before anything is asked of it, as [`Sizes`](hdcs_core::local::sizes::Sizes) decides.

use hdcs_core::local::sizes::Act;
use hdcs_core::local::{Ask as StoreAsk, Event as StoreEvent};
use hdcs_core::node::resize::Resize;
use hdcs_core::objects::io::Ask as ObjectAsk;

use super::stack::SIZE;
use super::{Done, IoError, Plant, SECTOR_BYTES, Token, Violation, World};

impl World {
    /// Ask what lies below a volume for a size.
    pub(super) fn size_stack(&mut self, unit: usize, bytes: u64) -> Result<(), Violation> {
        let Some(local) = &mut self.units[unit].local else {
            return self.submit_to_objects(unit, Token(SIZE), ObjectAsk::Resize { bytes });
        };
        if local.sizes.is_uncut() {
            local.uncut.push((Token(SIZE), StoreAsk::Resize { bytes }));
            return Ok(());
        }
        let has = local.status().bytes;
        let bytes = local.sizes.begin(Token(SIZE), bytes, has);
        self.size_store(unit, bytes)
    }

    /// Ask a local store for a size.
    pub(super) fn size_store(&mut self, unit: usize, bytes: u64) -> Result<(), Violation> {
        let state = &mut self.units[unit];
        let has = state.local_store().status().bytes;
        let is_left_over = state.resizing.is_none_or(|resize| !resize.shrinks());
        if bytes < has && is_left_over && self.planted.is(Plant::UncutStore) {
            self.end_of_stack(unit, SIZE, Ok(Done::Written));
            return Ok(());
        }
        let (token, ask) = (Token(SIZE), StoreAsk::Resize { bytes });
        self.step_store(unit, StoreEvent::Submit { token, ask })
    }

    /// What lies below a volume has the size that it was asked for, or has not.
    pub(super) fn stack_resized(
        &mut self,
        unit: usize,
        result: Result<(), IoError>,
    ) -> Result<(), Violation> {
        self.engine.note(
            "stack resized",
            [unit as u64, u64::from(result.is_ok()), 0, 0],
        );
        let state = &mut self.units[unit];
        if let Some(local) = &mut state.local {
            let mut has = local.status().bytes;
            if self.planted.is(Plant::UncutStore) {
                has = has.min(state.config.bytes);
            }
            match local.sizes.ended(result.is_ok(), has) {
                None => return Ok(()),
                Some(Act::Ask(bytes)) => return self.size_store(unit, bytes),
                Some(Act::End(Some(_), _)) => {}
                Some(Act::End(None, bytes)) => return self.store_was_cut(unit, bytes, result),
            }
        }
        let state = &mut self.units[unit];
        let Some(mut resize) = state.resizing.filter(Resize::awaits_backend) else {
            return Ok(());
        };
        let bytes = if resize.is_at_backend() {
            resize.bytes()
        } else {
            resize.before()
        };
        if result.is_ok() {
            let sectors = bytes / SECTOR_BYTES as u64;
            if resize.shrinks() && self.planted.is(Plant::KeptCut) {
                state.keep_cut(sectors);
            }
            state.backend.resize(sectors);
            self.check_commits(unit)?;
        }
        let act = resize.backend_resized(result);
        self.units[unit].resizing = Some(resize);
        self.perform_resize(unit, act)
    }

    /// A local store was larger than its volume, and is not any more, or is for now: what waits for that goes on.
    fn store_was_cut(
        &mut self,
        unit: usize,
        bytes: u64,
        result: Result<(), IoError>,
    ) -> Result<(), Violation> {
        self.coverage.stores_cut += u64::from(result.is_ok());
        let state = &mut self.units[unit];
        if result.is_ok() {
            state.backend.resize(bytes / SECTOR_BYTES as u64);
        }
        let waiting = std::mem::take(&mut state.local_store().uncut);
        waiting.into_iter().try_for_each(|(token, ask)| match ask {
            StoreAsk::Resize { bytes } => self.size_stack(unit, bytes),
            ask => self.step_store(unit, StoreEvent::Submit { token, ask }),
        })
    }
}
