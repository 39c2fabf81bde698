//! The load of the crash test: one connection with many requests in flight, and a journal of what
//! was sent and what was promised.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex};
use std::thread;

use fastrand::Rng;

use super::Persist;
use super::model::{Change, Content, Model, Number, SECTOR_BYTES, content, stamp};
use crate::failure::{Context, Failure, Result};
use crate::nbd::{self, Command, FLAG_FUA, Receiver, Sender};

/// A cookie that is not a write's number but a flush's index.
const FLUSH_COOKIE: u64 = 1 << 63;
/// Largest write in sectors.
const WRITE_SECTORS_MAX: u32 = 256;
/// A volume takes requests in pieces that do not cross multiples of this, so a write that would
/// cross is two changes; the load keeps to one.
const PIECE_SECTORS: u32 = (1 << 20) / SECTOR_BYTES as u32;
/// Bytes of one read of the verification.
const READ_BYTES: usize = 1 << 20;
/// Reads of the verification in flight.
const READS_IN_FLIGHT: usize = 4;

/// What was sent, and what the volume has promised of it.
#[derive(Clone, Debug, Default)]
pub struct Journal {
    /// Changes in order of submission.
    pub changes: Vec<Change>,
    /// Everything up to this write is promised to survive.
    pub floor: Number,
    /// Last write that was acknowledged.
    pub acknowledged: Number,
    /// Changes acknowledged.
    pub acknowledgements: u64,
    /// Flushes acknowledged.
    pub flushes: u64,
    /// A reply with an error, which no request deserves while the node is up.
    pub error: Option<String>,
}

/// How to load a volume.
pub struct Plan<'a> {
    /// The NBD socket.
    pub socket: &'a Path,
    /// The export.
    pub volume: &'a str,
    /// What an acknowledgement promises.
    pub persist: Persist,
    /// Identity of the whole test in the stamps.
    pub run: u64,
    /// Number of the first write.
    pub first: Number,
    /// Sectors of the volume.
    pub sectors: u32,
    /// Requests in flight.
    pub depth: usize,
    /// Seed of the load.
    pub seed: u64,
}

/// State that the two halves of a connection share.
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    journal: Journal,
    in_flight: usize,
    /// For each flush sent: the last write acknowledged before it.
    flushes: Vec<Number>,
    /// Writes with FUA that are in flight.
    forced: Vec<Number>,
    /// The connection has ended.
    ended: bool,
}

impl State {
    /// A reply came.
    fn acknowledge(&mut self, cookie: u64, persist: Persist) {
        self.in_flight -= 1;
        if cookie & FLUSH_COOKIE != 0 {
            self.journal.flushes += 1;
            let covered = self.flushes[(cookie & !FLUSH_COOKIE) as usize];
            self.journal.floor = self.journal.floor.max(covered);
            return;
        }
        self.journal.acknowledgements += 1;
        self.journal.acknowledged = self.journal.acknowledged.max(cookie);
        let forced = self.forced.iter().position(|number| *number == cookie);
        if let Some(index) = forced {
            self.forced.swap_remove(index);
        }
        let durable = match persist {
            Persist::OnWrite => true,
            Persist::OnFlush => false,
            // Until the first flush is sent, the volume cannot know that the client flushes.
            Persist::Auto => self.flushes.is_empty(),
        };
        if durable || forced.is_some() {
            self.journal.floor = self.journal.floor.max(cookie);
        }
    }
}

/// A connection over which a volume is loaded.
pub struct Connection(Sender, Receiver);

/// Connect to the volume of a plan.
pub fn connect(plan: &Plan<'_>) -> Result<Connection> {
    let (sender, receiver, bytes) = nbd::connect(plan.socket, plan.volume)?;
    if bytes == u64::from(plan.sectors) * SECTOR_BYTES as u64 {
        Ok(Connection(sender, receiver))
    } else {
        Err(Failure::new(format!(
            "volume `{}` has {bytes} bytes after the restart",
            plan.volume
        )))
    }
}

/// Load a volume until the connection breaks or `stop` is set; in the latter case all that was sent
/// is answered.
pub fn load(connection: Connection, plan: &Plan<'_>, stop: &AtomicBool) -> Result<Journal> {
    let Connection(sender, receiver) = connection;
    let shared = Shared {
        state: Mutex::default(),
        changed: Condvar::new(),
    };
    thread::scope(|scope| {
        scope.spawn(|| receive(receiver, &shared, plan.persist));
        send(sender, &shared, plan, stop);
    });
    let state = shared
        .state
        .into_inner()
        .map_err(|_| Failure::new("the load panicked"))?;
    Ok(state.journal)
}

fn receive(mut receiver: Receiver, shared: &Shared, persist: Persist) {
    loop {
        let reply = receiver.reply();
        let Ok(mut state) = shared.state.lock() else {
            return;
        };
        match reply {
            Ok((cookie, 0)) => state.acknowledge(cookie, persist),
            Ok((cookie, error)) => {
                state.in_flight -= 1;
                state.journal.error = Some(format!("request {cookie} failed with error {error}"));
            }
            Err(error) => {
                state.ended = true;
                // The end of the connection is what the test brings about; anything else is not.
                if !matches!(
                    error.kind(),
                    ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset
                ) {
                    state.journal.error = Some(format!("waiting for a reply: {error}"));
                }
            }
        }
        shared.changed.notify_one();
        if state.ended {
            return;
        }
    }
}

/// A change somewhere on the volume: mostly small, often unaligned, sometimes large, and half of
/// the time in a tenth of the volume, so that writes overlap.
fn choose(rng: &mut Rng, number: Number, sectors: u32) -> Change {
    let length = match rng.u8(0..10) {
        0..4 => 8,
        4..8 => rng.u32(1..=24),
        8 => rng.u32(1..=WRITE_SECTORS_MAX),
        _ => 1,
    };
    let range = if rng.bool() { sectors / 10 } else { sectors };
    let mut start = rng.u32(0..range - length);
    if rng.bool() {
        start -= start % 8;
    }
    let room = PIECE_SECTORS - start % PIECE_SECTORS;
    Change {
        number,
        start,
        sectors: length.min(room),
        zeroes: rng.u8(0..100) < 8,
    }
}

fn send(mut sender: Sender, shared: &Shared, plan: &Plan<'_>, stop: &AtomicBool) {
    let mut rng = Rng::with_seed(plan.seed);
    let mut number = plan.first;
    let mut data = vec![0; WRITE_SECTORS_MAX as usize * SECTOR_BYTES];
    loop {
        let Ok(state) = shared.state.lock() else {
            return;
        };
        let stopping = stop.load(Ordering::Relaxed);
        let busy = |state: &mut State| {
            !state.ended && state.in_flight >= if stopping { 1 } else { plan.depth }
        };
        let Ok(mut state) = shared.changed.wait_while(state, busy) else {
            return;
        };
        if state.ended {
            return;
        }
        if stopping {
            drop(state);
            let _ = sender.send(Command::Disconnect, 0, 0, 0, 0, &[]);
            return;
        }
        state.in_flight += 1;
        let sent = if rng.u16(0..100) < 2 {
            let cookie = FLUSH_COOKIE | state.flushes.len() as u64;
            let acknowledged = state.journal.acknowledged;
            state.flushes.push(acknowledged);
            drop(state);
            sender.send(Command::Flush, 0, cookie, 0, 0, &[])
        } else {
            let change = choose(&mut rng, number, plan.sectors);
            number += 1;
            let forced = rng.u8(0..100) < 4;
            state.journal.changes.push(change);
            if forced {
                state.forced.push(change.number);
            }
            drop(state);
            submit(
                &mut sender,
                plan.run,
                &change,
                forced,
                rng.bool(),
                &mut data,
            )
        };
        if sent.is_err() {
            // The receiver sees the end too, and what was answered before it.
            return;
        }
    }
}

fn submit(
    sender: &mut Sender,
    run: u64,
    change: &Change,
    forced: bool,
    trim: bool,
    data: &mut [u8],
) -> std::io::Result<()> {
    let offset = u64::from(change.start) * SECTOR_BYTES as u64;
    let length = change.sectors * SECTOR_BYTES as u32;
    let flags = if forced { FLAG_FUA } else { 0 };
    if change.zeroes {
        let command = if trim {
            Command::Trim
        } else {
            Command::WriteZeroes
        };
        return sender.send(command, flags, change.number, offset, length, &[]);
    }
    let data = &mut data[..length as usize];
    for (index, sector) in data.chunks_exact_mut(SECTOR_BYTES).enumerate() {
        stamp(
            run,
            change.number,
            u64::from(change.start) + index as u64,
            sector,
        );
    }
    sender.send(Command::Write, flags, change.number, offset, length, data)
}

/// Read a whole volume.
pub fn read_all(socket: &Path, volume: &str, run: u64, model: &Model) -> Result<Vec<Content>> {
    let (mut sender, mut receiver, bytes) = nbd::connect(socket, volume)?;
    let total = model.sectors() * SECTOR_BYTES;
    if bytes != total as u64 {
        return Err(Failure::new(format!(
            "volume `{volume}` has {bytes} bytes, not {total}"
        )));
    }
    let pieces = total.div_ceil(READ_BYTES);
    let length = |piece: usize| READ_BYTES.min(total - piece * READ_BYTES);
    let mut found = vec![Content::Foreign; model.sectors()];
    let mut buffer = vec![0; READ_BYTES];
    let mut sent = 0;
    for done in 0..pieces {
        while sent < pieces && sent < done + READS_IN_FLIGHT {
            let offset = (sent * READ_BYTES) as u64;
            sender
                .send(
                    Command::Read,
                    0,
                    sent as u64,
                    offset,
                    length(sent) as u32,
                    &[],
                )
                .context("sending a read")?;
            sent += 1;
        }
        let (cookie, error) = receiver.reply().context("the reply to a read")?;
        if error != 0 {
            return Err(Failure::new(format!(
                "reading volume `{volume}` failed with error {error}"
            )));
        }
        let piece = cookie as usize;
        if piece >= pieces {
            return Err(Failure::new(format!(
                "a reply to a read that was not sent ({cookie})"
            )));
        }
        let data = &mut buffer[..length(piece)];
        receiver.data(data)?;
        let first = piece * READ_BYTES / SECTOR_BYTES;
        for (index, sector) in data.chunks_exact(SECTOR_BYTES).enumerate() {
            found[first + index] = content(run, (first + index) as u64, sector);
        }
    }
    // The connection ends without a farewell if this fails; the reads are done.
    let _ = sender.send(Command::Disconnect, 0, 0, 0, 0, &[]);
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(flushed_at: &[Number]) -> State {
        State {
            in_flight: 10,
            flushes: flushed_at.to_vec(),
            ..State::default()
        }
    }

    #[test]
    fn floor_follows_acknowledgements_on_write() {
        let mut state = state(&[]);
        state.acknowledge(5, Persist::OnWrite);
        state.acknowledge(3, Persist::OnWrite);
        assert_eq!(state.journal.floor, 5);
    }

    #[test]
    fn floor_follows_flushes_on_flush() {
        let mut state = state(&[4]);
        state.acknowledge(5, Persist::OnFlush);
        assert_eq!(state.journal.floor, 0);
        state.acknowledge(FLUSH_COOKIE, Persist::OnFlush);
        assert_eq!(state.journal.floor, 4);
        state.forced.push(9);
        state.acknowledge(9, Persist::OnFlush);
        assert_eq!(state.journal.floor, 9);
    }

    #[test]
    fn auto_changes_with_the_first_flush() {
        let mut state = state(&[]);
        state.acknowledge(5, Persist::Auto);
        state.flushes.push(5);
        state.acknowledge(7, Persist::Auto);
        assert_eq!(state.journal.floor, 5);
    }

    #[test]
    fn changes_stay_inside_the_volume_and_a_piece() {
        let mut rng = Rng::with_seed(1);
        for number in 1..100_000 {
            let change = choose(&mut rng, number, 65_536);
            assert!(change.sectors > 0 && change.start + change.sectors <= 65_536);
            assert_eq!(
                change.start / PIECE_SECTORS,
                (change.start + change.sectors - 1) / PIECE_SECTORS
            );
        }
    }
}
