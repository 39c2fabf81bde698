//! What a link takes in: each frame is checked against the stage, judged before memory is taken for its payload, and
//! dispatched once it is whole.

use hdcs_core::base::buf::{Buf, BufMut, Pool};
use hdcs_core::base::limits::{BLOCK_BYTES, REQUEST_BLOCKS_MAX};
use hdcs_core::wire::{AckMarks, AppendMarks, FRAME_BY_OPENER, Greeting, Kind, NodeId, Refusal};
use zerocopy::FromBytes;

use super::{Link, Stage};
use crate::error::{Blame, FrameError, Refused, Side, Violation, Why};
use crate::event::{Answer, Event, Request, Span};
use crate::frame::{Frame, Head};
use crate::handshake::{self, Greeted};
use crate::intake::{Front, Pieces, Step};
use crate::requests::{Reply, Room, is_urgent};
use crate::streams::Fate;

impl Link {
    /// Take what has come, as far as it goes.
    pub(super) fn advance(&mut self) {
        if let Err(why) = self.take() {
            self.end(why);
        }
    }

    fn take(&mut self) -> Result<(), Why> {
        while self.ended.is_none() && !matches!(self.stage, Stage::Asked(..)) {
            if let Some(front) = self.intake.take_waiting() {
                let Some(pieces) = pieces(&self.pool, front.head.payload_bytes as usize) else {
                    self.intake.wait(front);
                    return Ok(());
                };
                self.intake.take(front, pieces);
            }
            let step = self.intake.next(self.version, self.purpose);
            let step = step.map_err(|error| self.frame_error(error))?;
            match step {
                None => return Ok(()),
                Some(Step::Front(front)) => {
                    self.check_stage(front.head.kind)?;
                    self.judge(front)?;
                }
                Some(Step::Whole(front, pieces)) => self.dispatch(front, pieces)?,
            }
        }
        Ok(())
    }

    fn frame_error(&self, error: FrameError) -> Why {
        Why::Frame {
            frame: self.intake.frame(),
            error,
        }
    }

    fn violation(&self, error: Violation) -> Why {
        Why::Violation {
            frame: self.intake.frame(),
            error,
        }
    }

    /// Whether a frame of this kind may come now.
    fn check_stage(&self, kind: Kind) -> Result<(), Why> {
        let (fits, when) = match &self.stage {
            Stage::Greeting(_) => (
                matches!(kind, Kind::Welcome | Kind::Refuse),
                "before the Welcome",
            ),
            Stage::Awaiting | Stage::Asked(..) => (kind == Kind::Hello, "before the Hello"),
            // The other side may still refuse what this side has said in its Welcome.
            Stage::Open if kind == Kind::Refuse => (!self.is_connector, "after the Welcome"),
            Stage::Open if kind.is_handshake() => (false, "after the handshake"),
            Stage::Open => {
                let fits = self.purpose.is_some_and(|purpose| kind.is_for(purpose));
                (fits, "on a connection of this purpose")
            }
        };
        if fits {
            return Ok(());
        }
        Err(self.violation(Violation::Unexpected { kind, when }))
    }

    /// Look at the front of a frame before memory is taken for its payload, or dispatch it if it has none.
    fn judge(&mut self, front: Front) -> Result<(), Why> {
        let head = front.head;
        let room = match head.kind {
            Kind::Append => {
                let marks = body::<AppendMarks>(&front.meta)?;
                if marks.reserved != [0; 24] {
                    return Err(self.frame_error(FrameError::Field("reserved")));
                }
                let fate = self.receiving.appending(&head, &marks);
                match fate.map_err(|error| self.violation(error))? {
                    Fate::Take => None,
                    Fate::Drop => Some(Room::Nowhere),
                }
            }
            Kind::Request => {
                let asked = self.answering.asking(&head);
                asked.map_err(|error| self.violation(error))?;
                None
            }
            Kind::Answer => {
                let room = self.asking.answering(&head);
                Some(room.map_err(|error| self.violation(error))?)
            }
            _ => None,
        };
        if head.payload_bytes == 0 {
            return self.dispatch(front, Pieces::new());
        }
        match room {
            Some(Room::Into(into)) => {
                let mut pieces = Pieces::new();
                pieces.push(into);
                self.intake.take(front, pieces);
            }
            Some(Room::Nowhere) => self.intake.take(front, Pieces::new()),
            // The next turn of the loop looks for memory.
            Some(Room::Pool) | None => self.intake.wait(front),
        }
        Ok(())
    }

    /// A frame is whole.
    fn dispatch(&mut self, front: Front, pieces: Pieces) -> Result<(), Why> {
        let Front { head, meta } = front;
        match head.kind {
            Kind::Hello => self.on_hello(&body(&meta)?)?,
            Kind::Welcome => self.on_welcome(&body(&meta)?)?,
            Kind::Refuse => self.on_refuse(&body(&meta)?)?,
            Kind::Ping => self.outbox.pong = Some(head.number),
            Kind::Pong => self.on_pong(head.number)?,
            Kind::Bye => {
                return Err(Blame::from_code(head.code).map_or(Why::Bye, Why::Blamed));
            }
            Kind::Open => {
                let asked = self.receiving.asked(&head);
                asked.map_err(|error| self.violation(error))?;
                self.events.push_back(Event::StreamAsked {
                    stream: head.stream,
                    epoch: head.epoch,
                    position: head.position,
                    meta,
                });
            }
            Kind::Append => self.on_append(&head, &body(&meta)?, pieces),
            Kind::Ack => self.on_ack(&head, &body(&meta)?)?,
            Kind::Close => self.on_close(&head)?,
            Kind::Request => self.events.push_back(Event::Asking(Request {
                number: head.number,
                code: head.code,
                urgent: is_urgent(&head),
                meta,
                payload: frozen(pieces),
                checksum: head.payload_checksum,
                room_bytes: head.room_bytes,
            })),
            Kind::Answer => self.on_answer(&head, meta, pieces)?,
            Kind::Credit => {
                let granted = self.asking.grant(head.position);
                granted.map_err(|error| self.violation(error))?;
                self.tell_of_room();
            }
        }
        Ok(())
    }

    fn on_hello(&mut self, greeting: &Greeting) -> Result<(), Why> {
        // Of a greeting in versions that this program does not know, nothing else need mean what it seems to.
        let offered = handshake::versions(greeting);
        let own = self.config.own;
        if own.versions.common(offered).is_none() {
            self.refuse(Refused::Version {
                refuser: own.versions,
                refused: offered,
            });
            return Ok(());
        }
        let greeted = handshake::read(greeting).map_err(|error| self.violation(error))?;
        self.place.node = Some(greeted.identity.number);
        self.place.purpose = Some(greeted.purpose);
        match handshake::judge_hello(&own, &greeted) {
            Err(refused) => self.refuse(refused),
            Ok(version) => {
                self.events.push_back(Event::Asked {
                    peer: greeted.identity,
                    purpose: greeted.purpose,
                });
                self.stage = Stage::Asked(Box::new(greeted), version);
            }
        }
        Ok(())
    }

    pub(super) fn welcome(&mut self) {
        let stage = std::mem::replace(&mut self.stage, Stage::Awaiting);
        let Stage::Asked(greeted, version) = stage else {
            return;
        };
        let expected = NodeId::default();
        let welcome = handshake::greet(&self.config.own, expected, version, greeted.purpose);
        let frame = Frame::with(Head::new(Kind::Welcome), &welcome);
        self.outbox.stage(frame);
        self.open(&greeted, version);
        self.advance();
    }

    fn on_welcome(&mut self, greeting: &Greeting) -> Result<(), Why> {
        let greeted = handshake::read(greeting).map_err(|error| self.violation(error))?;
        if self.purpose != Some(greeted.purpose) {
            let purpose = Violation::Purpose(greeting.purpose.get());
            return Err(self.violation(purpose));
        }
        let Stage::Greeting(known) = &self.stage else {
            return Ok(());
        };
        self.place.node = Some(greeted.identity.number);
        let judged = handshake::judge_welcome(&self.config.own, known, &greeted);
        match judged.map_err(|error| self.violation(error))? {
            Ok(version) => self.open(&greeted, version),
            Err(refused) => self.refuse(refused),
        }
        Ok(())
    }

    fn open(&mut self, greeted: &Greeted, version: u16) {
        self.stage = Stage::Open;
        self.version = Some(version);
        self.purpose = Some(greeted.purpose);
        self.outbox.version = version;
        self.asking.begin(greeted.credit_bytes);
        self.next_ping = self.now;
        self.events.push_back(Event::Opened {
            peer: greeted.identity,
            version,
        });
    }

    fn on_refuse(&mut self, refusal: &Refusal) -> Result<(), Why> {
        let expected = match &self.stage {
            Stage::Greeting(known) => Some(known.node),
            _ => None,
        };
        let refused = handshake::read_refusal(&self.config.own, expected, refusal);
        let by = Side::Peer;
        Err(match refused {
            Some(refusal) => Why::Refused { by, refusal },
            None => Why::Blamed(Blame::Other(refusal.reason.get())),
        })
    }

    fn on_pong(&mut self, number: u64) -> Result<(), Why> {
        let sent = self.ping.filter(|sent| sent.0 == number);
        let sent = sent.ok_or_else(|| self.violation(Violation::Pong(number)))?;
        self.ping = None;
        self.next_ping = sent.plus(self.config.ping_interval).max(self.now);
        self.events.push_back(Event::Echo { sent });
        Ok(())
    }

    fn on_append(&mut self, head: &Head, marks: &AppendMarks, pieces: Pieces) {
        // Its stream may have been closed while it came.
        if pieces.is_empty() {
            return;
        }
        if let Some(marks) = self.receiving.appended(head, marks) {
            self.events.push_back(Event::Span(Span {
                stream: head.stream,
                epoch: head.epoch,
                follows: head.number,
                position: head.position,
                marks,
                parts: frozen(pieces),
                checksum: head.payload_checksum,
            }));
        }
    }

    fn on_ack(&mut self, head: &Head, marks: &AckMarks) -> Result<(), Why> {
        let acked = self.sending.acked(head, marks);
        let Some((progress, has_room)) = acked.map_err(|error| self.violation(error))? else {
            return Ok(());
        };
        self.events.push_back(Event::Acked {
            stream: head.stream,
            progress,
        });
        if has_room {
            self.events.push_back(Event::Room);
        }
        Ok(())
    }

    fn on_close(&mut self, head: &Head) -> Result<(), Why> {
        let stream = head.stream;
        let by_opener = head.flags & FRAME_BY_OPENER != 0;
        let closed = if by_opener {
            self.receiving.closed(stream)
        } else {
            self.sending.closed(stream)
        };
        if closed.map_err(|error| self.violation(error))? {
            if !by_opener {
                self.outbox.forget_stream(stream);
            }
            self.events.push_back(Event::StreamClosed {
                stream,
                own: !by_opener,
                code: head.code,
            });
        }
        Ok(())
    }

    fn on_answer(&mut self, head: &Head, meta: Box<[u8]>, mut pieces: Pieces) -> Result<(), Why> {
        let answered = self.asking.answered(head);
        let answered = answered.map_err(|error| self.violation(error))?;
        if let Reply::Awaited { into, has_buffer } = answered {
            // What came into a buffer of the asker's is in one piece.
            let into = if has_buffer {
                pieces.pop().or(into)
            } else {
                into
            };
            self.events.push_back(Event::Answered(Answer {
                number: head.number,
                code: head.code,
                meta,
                into,
                payload: frozen(pieces),
                payload_bytes: head.payload_bytes as usize,
                checksum: head.payload_checksum,
            }));
        }
        self.tell_of_room();
        Ok(())
    }

    fn tell_of_room(&mut self) {
        if self.asking.take_short() {
            self.events.push_back(Event::Room);
        }
    }
}

/// The structure that is a meta; its length was checked with its kind.
fn body<T: FromBytes>(meta: &[u8]) -> Result<T, Why> {
    let error = FrameError::Field("meta");
    T::read_from_bytes(meta).map_err(|_| Why::Frame { frame: 0, error })
}

fn frozen(pieces: Pieces) -> Vec<Buf> {
    pieces.into_iter().map(BufMut::freeze).collect()
}

/// Buffers for so many bytes, largest first, none of which is larger than what it holds but the last by a part of a block;
/// `None` while the pool has no such.
fn pieces(pool: &Pool, bytes: usize) -> Option<Pieces> {
    let mut pieces = Pieces::new();
    let (mut left, mut run_max) = (bytes, REQUEST_BLOCKS_MAX);
    while left > 0 {
        let blocks = left.div_ceil(BLOCK_BYTES).min(run_max);
        let run: usize = 1 << blocks.ilog2();
        let piece = left.min(run * BLOCK_BYTES);
        match pool.alloc(piece) {
            Some(buf) => {
                pieces.push(buf);
                left -= piece;
            }
            // What is free lies in shorter runs.
            None if run > 1 => run_max = run / 2,
            None => return None,
        }
    }
    Some(pieces)
}
