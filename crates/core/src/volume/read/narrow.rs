//! Reads of the backend once more, of exactly what is asked for.
//!
//! A fetch covers whole lines, and so sectors that are dirty in the log. A local store that has checksums refuses it if
//! one of them does not match, as after a crash those may that the log is about to write again. Then each part
//! that a client waits for is read by itself: nothing of it is dirty, so it matches, or its only copy is bad.

use crate::base::error::{IoError, RequestError};
use crate::base::io::{Action, Done, SectorRange};
use crate::volume::Context;
use crate::volume::op::Op;
use crate::volume::read::{ReadSources, Reads};

impl Reads {
    /// Read what `read` waits for, after a fetch of `whole` was refused for its checksum.
    pub(super) fn read_narrowly(
        &mut self,
        read: usize,
        part: SectorRange,
        whole: SectorRange,
        from: &mut ReadSources<'_>,
        cx: &mut Context<'_>,
    ) {
        if part == whole || from.port.is_fenced() {
            self.active[read].error = Some(RequestError::Corrupt);
            return;
        }
        let Some(buf) = cx.pool.alloc(part.bytes()) else {
            self.active[read].missing.push(part);
            return;
        };
        self.active[read].pending += 1;
        let token = from.port.begin(Op::FetchPart { read, part });
        cx.actions.push(Action::BackendRead {
            token,
            offset: part.byte_offset(),
            buf,
        });
    }

    pub(in crate::volume) fn part_was_fetched(
        &mut self,
        read: usize,
        part: SectorRange,
        result: Result<Done, IoError>,
        from: &mut ReadSources<'_>,
        cx: &mut Context<'_>,
    ) {
        match result {
            Ok(Done::Read(data)) => self.place(read, part).copy_from_slice(&data),
            Ok(_) => unreachable!("a read brings its buffer"),
            Err(error) => {
                from.port.stats.backend_errors += 1;
                self.active[read].error = Some(match error {
                    IoError::Corrupt => RequestError::Corrupt,
                    _ => RequestError::Io,
                });
            }
        }
        self.finish_read(read, from, cx);
    }
}
