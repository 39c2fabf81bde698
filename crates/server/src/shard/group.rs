//! The shards of a node as a group: who is started when, and who gets which command.
//!
//! | command | goes to |
//! |---|---|
//! | opens a volume | the shard that it is on, or else the one that has least to do |
//! | is about a volume | the shard that it is on; the first one if it is on none, which says that it is not open |
//! | listens | each shard in turn |
//! | hands over a client | the shard with the fewest connections |
//! | says why a volume is not open | the first one: all read the same directory |
//! | has no answer and is about the node | all |
//! | has an answer of each shard | the one that is named: whoever asks gathers the answers |
//!
//! Invariants:
//! 1. The first shard is started first: it keeps what all share.
//! 2. A volume is on one shard at most: see [`Residents`].

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hdcs_core::node::placement::{self, Load};
use hdcs_frontend::VolumeNumber;

use super::command::{Command, Concern, VolumeSpec};
use super::peers::Peers;
use super::residents::Residents;
use super::{SendError, ShardConfig, ShardError, ShardHandle, clock, start};

/// What a shard has to do, as it was last reported.
#[derive(Debug, Default)]
struct Seen {
    /// Its thread's processor time, and when that was, in microseconds.
    cpu_us: AtomicU64,
    at_us: AtomicU64,
    /// The part of a processor that it had before.
    busy_permille: AtomicU64,
    connections: AtomicUsize,
}

/// The running shards of a node.
#[derive(Debug)]
pub struct Shards {
    handles: Vec<ShardHandle>,
    residents: Arc<Residents>,
    seen: Vec<Seen>,
    listeners: AtomicUsize,
    stopping: AtomicBool,
    started: Instant,
}

/// Start the shards of a node, one at least. Their threads end after [`Command::Stop`].
pub fn start_all(
    configs: Vec<ShardConfig>,
) -> Result<(Arc<Shards>, Vec<JoinHandle<()>>), ShardError> {
    let peers = Arc::new(Peers::of(configs.len()));
    let (shared_cache, origin) = (Arc::default(), clock::now());
    let (mut handles, mut threads) = (Vec::new(), Vec::new());
    for (number, mut config) in configs.into_iter().enumerate() {
        config.number = number;
        config.peers = Arc::clone(&peers);
        config.shared_cache = Arc::clone(&shared_cache);
        config.origin = origin;
        match start(config) {
            Ok((handle, thread)) => {
                handles.push(handle);
                threads.push(thread);
            }
            Err(error) => {
                peers.introduce(handles.clone());
                end_those_that_run(&peers, handles, threads);
                return Err(error);
            }
        }
    }
    peers.introduce(handles.clone());
    Ok((Arc::new(Shards::new(handles)), threads))
}

/// One of the shards could not be started: the others have nothing to do.
fn end_those_that_run(peers: &Peers, handles: Vec<ShardHandle>, threads: Vec<JoinHandle<()>>) {
    for number in handles.len()..peers.count() {
        peers.note_end(number, true);
    }
    for handle in handles {
        let (answer, _) = tokio::sync::oneshot::channel();
        let destage = false;
        // One that has ended already needs nothing.
        let _ = handle.send(Command::Stop { destage, answer });
    }
    for thread in threads {
        // A panic there has said so.
        let _ = thread.join();
    }
}

impl Shards {
    fn new(handles: Vec<ShardHandle>) -> Self {
        Self {
            residents: Arc::default(),
            seen: handles.iter().map(|_| Seen::default()).collect(),
            listeners: AtomicUsize::new(0),
            stopping: AtomicBool::new(false),
            started: Instant::now(),
            handles,
        }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.handles.len()
    }

    /// Whether any was told to stop.
    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// Where a volume is that is open, opens or closes.
    pub fn shard_of(&self, volume: VolumeNumber) -> Option<usize> {
        self.residents.shard_of(volume)
    }

    /// Hand a command to a shard, whatever it is about; never blocks.
    pub fn send_to(&self, shard: usize, command: Command) -> Result<(), SendError> {
        if let Command::Stop { .. } = command {
            self.stopping.store(true, Ordering::Relaxed);
        }
        match self.handles.get(shard) {
            Some(handle) => handle.send(command),
            None => Err(SendError::Stopped(Box::new(command))),
        }
    }

    /// Hand a command to whom it concerns; never blocks.
    pub fn send(&self, command: Command) -> Result<(), SendError> {
        let shard = match command.concerns() {
            Concern::Volume(number) => self.shard_of(number).unwrap_or(0),
            Concern::Opening => return self.open(command),
            Concern::Listener => {
                self.listeners.fetch_add(1, Ordering::Relaxed) % self.handles.len()
            }
            Concern::Client => self.least_connected(),
            Concern::Shared => 0,
            Concern::All => return self.send_to_all(&command),
            Concern::Each => {
                unreachable!("whoever asks for the answer of each shard names it: {command:?}")
            }
        };
        self.send_to(shard, command)
    }

    fn open(&self, mut command: Command) -> Result<(), SendError> {
        let Command::Open(spec, _) = &mut command else {
            unreachable!("nothing else opens a volume");
        };
        let VolumeSpec { name, shard, .. } = &**spec;
        let (wanted, count) = (*shard, self.count());
        let choose = |volumes: &[usize]| match wanted.filter(|&number| number < count) {
            Some(wanted) => wanted,
            None => placement::choose(volumes.iter().zip(&self.seen).map(|(&volumes, seen)| {
                let busy_permille = seen.busy_permille.load(Ordering::Relaxed);
                Load {
                    volumes,
                    busy_permille,
                }
            })),
        };
        let number = VolumeNumber(spec.config.number);
        let (shard, residence) = self.residents.stay(number, name, count, choose);
        spec.residence = residence;
        self.send_to(shard, command)
    }

    /// The shard with the fewest connections; it counts as having one more.
    fn least_connected(&self) -> usize {
        let connections = |seen: &Seen| seen.connections.load(Ordering::Relaxed);
        let seen = self.seen.iter().enumerate();
        let Some((number, least)) = seen.min_by_key(|(_, seen)| connections(seen)) else {
            return 0;
        };
        least.connections.fetch_add(1, Ordering::Relaxed);
        number
    }

    /// All get it that can; an error if one did not.
    fn send_to_all(&self, command: &Command) -> Result<(), SendError> {
        let mut result = Ok(());
        for handle in &self.handles {
            let copy = match command {
                Command::EndRevoked => Command::EndRevoked,
                _ => unreachable!("{command:?} does not concern all"),
            };
            result = result.and(handle.send(copy));
        }
        result
    }

    /// What a shard has reported: what its thread has had of its processor since the start, and its connections.
    pub fn note(&self, shard: usize, cpu: Duration, connections: usize) {
        let Some(seen) = self.seen.get(shard) else {
            return;
        };
        let order = Ordering::Relaxed;
        seen.connections.store(connections, order);
        let (cpu_us, at_us) = (
            cpu.as_micros() as u64,
            self.started.elapsed().as_micros() as u64,
        );
        let time_us = at_us.saturating_sub(seen.at_us.swap(at_us, order));
        let used_us = cpu_us.saturating_sub(seen.cpu_us.swap(cpu_us, order));
        let busy_permille = (used_us * 1_000).checked_div(time_us);
        seen.busy_permille.store(busy_permille.unwrap_or(0), order);
    }
}
