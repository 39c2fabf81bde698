//! A state machine that is not idempotent stands on a log of records with a client table, and is compared with a plain
//! reference that forgets nothing: through repeats, crashes, checkpoints, and clients beyond the bound.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::Arc;

use hdcs_core::base::buf::Pool;
use hdcs_core::base::error::FormatError;
use hdcs_core::base::io::{Nanos, SectorRange};
use hdcs_core::base::limits::{
    BLOCK_BYTES, CLIENT_RESULT_BYTES_MAX, CLIENT_RESULTS_MAX, CLIENTS_MAX, RECORD_BYTES_MAX,
    SPANS_IN_FLIGHT_MAX,
};
use hdcs_core::format::{EntryKind, LOG_HEADER_BLOCKS, seal};
use hdcs_core::log::clients::{
    Admission, CHECKPOINT_BYTES_MAX, CLIENT_VERSION, ClientRecord, ClientTable, EFFECT_BYTES_MAX,
};
use hdcs_core::log::replay::{Found, Record};
use hdcs_core::log::write_log::{Entry, Span, SpanWrite};

use super::evidence::Bench;

const NOW: Nanos = Nanos(1);
const REGION_BYTES: usize = 16 << 20;
const KEPT: u64 = CLIENT_RESULTS_MAX as u64;

/// Append a record, as an owner of the log does; where its span follows.
fn append(bench: &mut Bench, pool: &Arc<Pool>, bytes: &[u8]) -> u64 {
    let blocks = bytes.len().div_ceil(BLOCK_BYTES);
    let mut data = pool.alloc(blocks * BLOCK_BYTES).unwrap();
    data[..bytes.len()].copy_from_slice(bytes);
    data[bytes.len()..].fill(0);
    let data = data.freeze().slice(0..blocks * BLOCK_BYTES);
    bench.log.append_record(NOW, bytes.len(), data)
}

/// The bytes of a record that a replay has found.
fn bytes_of<'a>(bench: &'a Bench, record: &Record) -> &'a [u8] {
    let slot = record.position % bench.log.ring_blocks();
    let at = (LOG_HEADER_BLOCKS + slot) as usize * BLOCK_BYTES + usize::from(record.offset);
    &bench.device[at..at + record.bytes as usize]
}

/// The log on the device with its records, each with the position at which its span follows. It is opened anew.
fn reopen(bench: &mut Bench) -> Vec<(u64, Vec<u8>)> {
    let (mut at, mut found) = (0, Vec::new());
    bench.log = bench
        .open_telling(&mut 0, |what| match what {
            Found::Span(span) => at = span.start,
            Found::Record(record) => found.push((at, record)),
            Found::Entries(_) | Found::Done => {}
        })
        .unwrap();
    let (offset, block) = bench.log.superblock_for_opening();
    bench.device[offset as usize..][..BLOCK_BYTES].copy_from_slice(&block);
    let bytes = |(at, record): (u64, Record)| (at, bytes_of(bench, &record).to_vec());
    found.into_iter().map(bytes).collect()
}

/// A list to which every request appends itself. Its result is where in the list that was.
struct Machine {
    bench: Bench,
    pool: Arc<Pool>,
    table: ClientTable,
    list: Vec<(u64, u64)>,
    writes: VecDeque<SpanWrite>,
}

fn encode_list(list: &[(u64, u64)]) -> Vec<u8> {
    let numbers = list.iter().flat_map(|(client, number)| [*client, *number]);
    numbers.flat_map(u64::to_le_bytes).collect()
}

fn decode_list(bytes: &[u8]) -> Vec<(u64, u64)> {
    let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap());
    let items = bytes.chunks_exact(16);
    items
        .map(|item| (number(&item[..8]), number(&item[8..])))
        .collect()
}

/// Results of all lengths.
fn result_of(index: usize) -> Vec<u8> {
    let length = [8, 9, 100, CLIENT_RESULT_BYTES_MAX][index % 4];
    let mut result = vec![index as u8; length];
    result[..8].copy_from_slice(&(index as u64).to_le_bytes());
    result
}

impl Machine {
    fn new() -> Self {
        Self {
            bench: Bench::new(REGION_BYTES),
            pool: Pool::new(8 << 20),
            table: ClientTable::new(0),
            list: Vec::new(),
            writes: VecDeque::new(),
        }
    }

    fn append(&mut self, record: &ClientRecord<'_>) -> u64 {
        while self.bench.log.flights() >= SPANS_IN_FLIGHT_MAX {
            self.write_one();
        }
        let at = append(&mut self.bench, &self.pool, &record.encode());
        self.table.appended(record, at);
        at
    }

    fn register(&mut self) -> Option<(u64, u64)> {
        let client = self.table.next_client()?;
        let at = self.append(&ClientRecord::Registration { client });
        Some((client, at))
    }

    /// A request that is taken; where its span follows.
    fn take(&mut self, client: u64, number: u64) -> u64 {
        let result = result_of(self.list.len());
        self.list.push((client, number));
        let effect = encode_list(&[(client, number)]);
        self.append(&ClientRecord::Request {
            client,
            number,
            result: &result,
            effect: &effect,
        })
    }

    fn checkpoint(&mut self) {
        let state = encode_list(&self.list);
        let record = ClientRecord::Checkpoint {
            clients: self.table.clients().clone(),
            state: &state,
        };
        self.append(&record);
    }

    /// Have the log end what it collects, and begin to write it.
    fn seal(&mut self) {
        self.bench.log.seal(NOW);
        while let Some(write) = self.bench.log.next_write(SPANS_IN_FLIGHT_MAX) {
            self.writes.push_back(write);
        }
    }

    /// A span that is being written is durable.
    fn write_one(&mut self) {
        self.seal();
        if let Some(write) = self.writes.pop_front() {
            self.bench.write(&write);
            self.bench.end(&[write]);
            self.table.committed(self.bench.log.durable());
        }
    }

    fn write_all(&mut self) {
        self.seal();
        while !self.writes.is_empty() {
            self.write_one();
        }
    }

    /// Move the tail as far as that is allowed.
    fn move_tail(&mut self) {
        let limit = self.table.tail_max();
        let spans: Vec<_> = self.bench.log.spans().iter().map(Span::end).collect();
        let count = spans.iter().take_while(|end| **end <= limit).count();
        if count > 0 {
            self.bench.retire(count);
            assert_eq!(self.bench.log.tail(), limit);
        }
    }

    /// It stops, with some of the writes that are under way done, and starts again.
    fn crash(&mut self, is_done: impl FnMut(&SpanWrite) -> bool) {
        self.seal();
        let committed = self.bench.log.durable();
        let mut is_done = is_done;
        for write in std::mem::take(&mut self.writes) {
            if is_done(&write) {
                self.bench.write(&write);
            }
        }
        let records = reopen(&mut self.bench);
        assert!(self.bench.log.durable() >= committed);
        let tail = self.bench.log.tail();
        self.table = ClientTable::new(tail);
        self.list.clear();
        for (at, bytes) in records {
            let record = ClientRecord::parse(&bytes).unwrap();
            if !self.table.replayed(&record, at) {
                assert!(!self.table.is_whole(), "all that was appended counts");
                continue;
            }
            match record {
                ClientRecord::Registration { .. } => {}
                ClientRecord::Request { effect, .. } => self.list.extend(decode_list(effect)),
                ClientRecord::Checkpoint { state, .. } => self.list = decode_list(state),
            }
        }
        assert!(self.table.is_whole());
        self.table.committed(self.bench.log.durable());
    }
}

/// What was appended, from the first record on: a client that registered, or its request.
type Fact = (u64, Option<u64>);

/// All records that are in the log or ever were, with the positions at which their spans follow.
#[derive(Default)]
struct Reference {
    facts: Vec<(u64, Fact)>,
    given: u64,
}

impl Reference {
    /// The clients that are known, each with the place of its last record.
    fn known(&self) -> BTreeMap<u64, usize> {
        let mut known = BTreeMap::new();
        for (place, (_, (client, number))) in self.facts.iter().enumerate() {
            if number.is_none() && known.len() == CLIENTS_MAX {
                let oldest = *known.iter().min_by_key(|(_, last)| **last).unwrap().0;
                known.remove(&oldest);
            }
            if number.is_none() || known.contains_key(client) {
                known.insert(*client, place);
            }
        }
        known
    }

    /// The requests of a client: number, index in the list, position.
    fn requests(&self, client: u64) -> Vec<(u64, usize, u64)> {
        let requests = self.facts.iter().filter(|(_, fact)| fact.1.is_some());
        let own = requests
            .enumerate()
            .filter(|(_, (_, fact))| fact.0 == client);
        own.map(|(index, (at, fact))| (fact.1.unwrap(), index, *at))
            .collect()
    }

    fn admit(&self, client: u64, number: u64, committed: u64) -> Admission<'static> {
        if !self.known().contains_key(&client) {
            return Admission::Unknown;
        }
        let requests = self.requests(client);
        let highest = requests.iter().map(|request| request.0).max().unwrap_or(0);
        if number == 0 || number + KEPT <= highest {
            return Admission::TooOld;
        }
        if let Some((_, index, at)) = requests.iter().find(|request| request.0 == number) {
            return if *at < committed {
                Admission::Repeated(result_of(*index).leak())
            } else {
                Admission::UnderWay(*at)
            };
        }
        let owed =
            |request: &(u64, usize, u64)| request.0 + KEPT <= number && request.2 >= committed;
        if requests.iter().any(owed) {
            return Admission::Ahead;
        }
        Admission::Take
    }

    fn may_register(&self, committed: u64) -> bool {
        let known = self.known();
        let oldest = known.values().min().copied();
        known.len() < CLIENTS_MAX || oldest.is_some_and(|place| self.facts[place].0 < committed)
    }

    /// What lies at `head` or behind it was lost.
    fn lose(&mut self, head: u64) {
        self.facts.retain(|(at, _)| *at < head);
        let registered = self.facts.iter().filter(|(_, fact)| fact.1.is_none());
        self.given = registered.map(|(_, fact)| fact.0).max().unwrap_or(0);
    }

    fn list(&self) -> Vec<(u64, u64)> {
        let facts = self.facts.iter().map(|(_, fact)| *fact);
        facts
            .filter_map(|(client, number)| Some((client, number?)))
            .collect()
    }
}

#[test]
fn requests_take_effect_once_whatever_is_repeated_lost_or_forgotten() {
    let (mut seen, mut replayed_behind) = ([0; 6], 0);
    for seed in 0..24 {
        let mut random = fastrand::Rng::with_seed(seed);
        let (mut machine, mut reference) = (Machine::new(), Reference::default());
        // Some runs have few clients with many requests, others more clients than are kept.
        let registers = [1, 12][random.usize(..2)];
        for _ in 0..1500 {
            let committed = machine.bench.log.durable();
            match random.usize(..100) {
                0..60 => {
                    // The last ones are busier.
                    let most = random.u64(1..80);
                    let back = random.u64(..most);
                    let client = (reference.given + 1).saturating_sub(back);
                    let requests = reference.requests(client);
                    let highest = requests.iter().map(|request| request.0).max().unwrap_or(0);
                    let number = match random.usize(..20) {
                        0 => highest + KEPT + random.u64(..2),
                        1..12 => highest.saturating_sub(random.u64(..KEPT + 2)),
                        _ => highest + random.u64(1..4),
                    };
                    let expected = reference.admit(client, number, committed);
                    let admission = machine.table.admit(client, number);
                    assert_eq!(admission, expected, "seed {seed}, {client} {number}");
                    let kind = match admission {
                        Admission::Take => 0,
                        Admission::Repeated(_) => 1,
                        Admission::UnderWay(_) => 2,
                        Admission::Ahead => 3,
                        Admission::TooOld => 4,
                        Admission::Unknown => 5,
                    };
                    seen[kind] += 1;
                    if admission == Admission::Take && machine.bench.log.has_room(1, None) {
                        let at = machine.take(client, number);
                        reference.facts.push((at, (client, Some(number))));
                    }
                }
                60..72 if random.usize(..12) < registers => {
                    let may = reference.may_register(committed);
                    assert_eq!(machine.table.next_client().is_some(), may, "seed {seed}");
                    if may && machine.bench.log.has_room(1, None) {
                        let (client, at) = machine.register().unwrap();
                        assert!(client == reference.given + 1);
                        reference.given = client;
                        reference.facts.push((at, (client, None)));
                    }
                }
                60..80 => machine.seal(),
                80..93 => machine.write_one(),
                93..96 => {
                    if machine.bench.log.has_room(200, None) {
                        machine.checkpoint();
                    }
                }
                96..99 => machine.move_tail(),
                _ => {
                    machine.crash(|_| random.u8(..4) > 0);
                    reference.lose(machine.bench.log.head());
                    replayed_behind += usize::from(machine.bench.log.tail() > 0);
                }
            }
            machine.table.check_invariants();
            assert_eq!(machine.list, reference.list(), "seed {seed}");
        }
    }
    assert!(seen.iter().all(|count| *count > 50), "{seen:?}");
    assert!(
        replayed_behind > 50,
        "crashes after tails: {replayed_behind}"
    );
}

/// A machine with a client, whose registration is durable.
fn machine_with_client() -> (Machine, u64) {
    let mut machine = Machine::new();
    let (client, _) = machine.register().unwrap();
    machine.write_all();
    (machine, client)
}

#[test]
fn request_is_answered_when_it_is_committed_and_not_appended_again() {
    let (mut machine, client) = machine_with_client();
    assert_eq!(machine.table.admit(client, 1), Admission::Take);
    let at = machine.take(client, 1);
    assert_eq!(machine.table.admit(client, 1), Admission::UnderWay(at));
    machine.seal();
    assert_eq!(machine.table.admit(client, 1), Admission::UnderWay(at));
    machine.write_all();
    let result = result_of(0);
    assert_eq!(machine.table.admit(client, 1), Admission::Repeated(&result));
    machine.crash(|_| false);
    assert_eq!(machine.table.admit(client, 1), Admission::Repeated(&result));
    assert_eq!(machine.list, [(client, 1)]);
}

#[test]
fn request_that_was_lost_is_taken_again() {
    let (mut machine, client) = machine_with_client();
    machine.take(client, 1);
    machine.crash(|_| false);
    assert_eq!(machine.table.admit(client, 1), Admission::Take);
    machine.take(client, 1);
    // The span became durable, though nobody was told.
    machine.crash(|_| true);
    let result = result_of(0);
    assert_eq!(machine.table.admit(client, 1), Admission::Repeated(&result));
    assert_eq!(machine.list, [(client, 1)]);
}

#[test]
fn client_has_as_many_requests_under_way_as_results_are_kept() {
    let (mut machine, client) = machine_with_client();
    // In any order.
    for number in (1..=KEPT).rev() {
        assert_eq!(machine.table.admit(client, number), Admission::Take);
        machine.take(client, number);
    }
    let next = KEPT + 1;
    assert_eq!(machine.table.admit(client, next), Admission::Ahead);
    machine.write_all();
    assert_eq!(machine.table.admit(client, next), Admission::Take);
    machine.take(client, next);
    assert_eq!(machine.table.admit(client, 1), Admission::TooOld);
    assert!(matches!(
        machine.table.admit(client, 2),
        Admission::Repeated(_)
    ));
    for number in [0, u64::MAX] {
        let expected = if number == 0 {
            Admission::TooOld
        } else {
            Admission::Ahead
        };
        assert_eq!(machine.table.admit(client, number), expected);
    }
}

#[test]
fn client_that_was_silent_longest_is_forgotten_for_good() {
    let mut machine = Machine::new();
    for _ in 0..CLIENTS_MAX {
        machine.register().unwrap();
    }
    assert_eq!(machine.register(), None, "nothing is committed");
    machine.write_all();
    machine.take(1, 1);
    let (client, _) = machine.register().unwrap();
    assert_eq!(client, CLIENTS_MAX as u64 + 1);
    machine.write_all();
    for _ in 0..2 {
        assert_eq!(machine.table.admit(2, 1), Admission::Unknown);
        assert!(matches!(machine.table.admit(1, 1), Admission::Repeated(_)));
        assert_eq!(machine.table.admit(3, 1), Admission::Take);
        machine.crash(|_| false);
    }
    assert_eq!(
        machine.table.next_client(),
        Some(client + 1),
        "no number is given twice"
    );
}

#[test]
fn tail_waits_for_a_checkpoint_that_is_committed() {
    let (mut machine, client) = machine_with_client();
    machine.take(client, 1);
    machine.write_all();
    assert_eq!(machine.table.tail_max(), 0);
    let before = machine.bench.log.head();
    machine.checkpoint();
    machine.take(client, 2);
    machine.seal();
    assert_eq!(machine.table.tail_max(), 0);
    machine.write_all();
    assert_eq!(machine.table.tail_max(), before);
    machine.move_tail();
    machine.crash(|_| false);
    for (number, result) in [(1, result_of(0)), (2, result_of(1))] {
        assert_eq!(
            machine.table.admit(client, number),
            Admission::Repeated(&result)
        );
    }
    assert_eq!(machine.list, [(client, 1), (client, 2)]);
    // It may have moved less far than that.
    assert_eq!(machine.table.tail_max(), before);
}

#[test]
fn table_is_not_whole_without_the_checkpoint_behind_its_tail() {
    let mut table = ClientTable::new(8);
    assert!(!table.replayed(&ClientRecord::Registration { client: 3 }, 8));
    assert!(!table.is_whole() && table.admit(3, 1) == Admission::Unknown);
    let mut other = ClientTable::new(0);
    assert!(other.replayed(&ClientRecord::Registration { client: 1 }, 0));
    let clients = other.clients().clone();
    let checkpoint = ClientRecord::Checkpoint {
        clients,
        state: &[],
    };
    assert!(table.replayed(&checkpoint, 10) && table.is_whole());
    assert_eq!((table.tail_max(), table.admit(1, 1)), (8, Admission::Take));
    table.committed(12);
    assert_eq!(table.tail_max(), 10);
}

/// What a device holds may not be what anybody appended: nothing takes effect twice.
#[test]
fn table_ignores_a_record_that_was_there_before() {
    let mut table = ClientTable::new(0);
    let request = |number| ClientRecord::Request {
        client: 1,
        number,
        result: &[],
        effect: &[],
    };
    let registration = ClientRecord::Registration { client: 1 };
    assert!(!table.replayed(&request(1), 0));
    assert!(table.replayed(&registration, 2) && !table.replayed(&registration, 4));
    assert!(table.replayed(&request(9), 6) && !table.replayed(&request(9), 8));
    assert!(!table.replayed(&request(1), 10) && table.replayed(&request(2), 12));
}

/// The largest table, with the largest results.
#[test]
fn checkpoint_of_the_largest_table_is_a_record() {
    let mut table = ClientTable::new(0);
    for client in 1..=CLIENTS_MAX as u64 {
        assert!(table.replayed(&ClientRecord::Registration { client }, 0));
        for number in 1..=KEPT {
            let request = ClientRecord::Request {
                client,
                number,
                result: &[7; CLIENT_RESULT_BYTES_MAX],
                effect: &[],
            };
            assert!(table.replayed(&request, 0));
        }
    }
    let checkpoint = |state| ClientRecord::Checkpoint {
        clients: table.clients().clone(),
        state,
    };
    let state = vec![9; CHECKPOINT_BYTES_MAX];
    let bytes = checkpoint(&state).encode();
    assert_eq!(bytes.len(), RECORD_BYTES_MAX);
    let mut other = ClientTable::new(5);
    other.replayed(&ClientRecord::parse(&bytes).unwrap(), 6);
    other.committed(7);
    assert_eq!(
        other.admit(1, 1),
        Admission::Repeated(&[7; CLIENT_RESULT_BYTES_MAX])
    );
    assert_eq!(checkpoint(&state).encode(), bytes);

    let largest = ClientRecord::Request {
        client: 1,
        number: 1,
        result: &[7; CLIENT_RESULT_BYTES_MAX],
        effect: &vec![8; EFFECT_BYTES_MAX],
    };
    let bytes = largest.encode();
    assert_eq!(
        (bytes.len(), ClientRecord::parse(&bytes)),
        (RECORD_BYTES_MAX, Ok(largest))
    );
}

/// A record lies beside others and beside writes in one span, and both are found where they are.
#[test]
fn log_takes_records_beside_writes() {
    let mut bench = Bench::new(REGION_BYTES);
    let pool = Pool::new(1 << 20);
    let records: [Vec<u8>; 3] = [vec![1; 10], vec![2; 5000], vec![3; BLOCK_BYTES]];
    for (block, record) in records.iter().enumerate() {
        let mut data = pool.alloc(BLOCK_BYTES).unwrap();
        data.fill(0xa0 + block as u8);
        let entry = Entry {
            range: SectorRange::new(block as u64 * 8, 8),
            kind: EntryKind::Write,
            no_hole: false,
            position: 0,
            stored: None,
            data: Some(data.freeze()),
            held_blocks: 0,
        };
        bench.log.append(NOW, entry, None);
        assert_eq!(append(&mut bench, &pool, record), 0);
    }
    bench.log.seal(NOW);
    let positions = |bench: &Bench| [0, 1, 2].map(|sequence| bench.log.entry(sequence).position);
    let sealed = positions(&bench);
    assert_eq!(sealed, [1, 3, 6]);
    bench.log.sync_point();
    assert_eq!(append(&mut bench, &pool, &[4]), 8, "behind a sync point");
    bench.log.seal(NOW);
    while let Some(span) = bench.log.next_write(SPANS_IN_FLIGHT_MAX) {
        bench.write(&span);
        bench.end(&[span]);
    }
    bench.log.check_invariants();
    bench.log.check_allocation();
    let found = reopen(&mut bench);
    let expected = records.into_iter().map(|record| (0, record));
    assert_eq!(found, expected.chain([(8, vec![4])]).collect::<Vec<_>>());
    assert_eq!(positions(&bench), sealed);
    assert_eq!(bench.log.sync_points(), 1);
}

/// One of each kind.
fn examples() -> Vec<Vec<u8>> {
    let mut table = ClientTable::new(0);
    let registration = ClientRecord::Registration { client: 1 };
    let request = |number| ClientRecord::Request {
        client: 1,
        number,
        result: b"made",
        effect: b"create a name",
    };
    table.replayed(&registration, 0);
    table.replayed(&request(1), 1);
    table.replayed(&request(3), 2);
    table.replayed(&ClientRecord::Registration { client: 2 }, 3);
    let checkpoint = ClientRecord::Checkpoint {
        clients: table.clients().clone(),
        state: b"names",
    };
    [registration, request(1), checkpoint]
        .map(|record| record.encode())
        .into()
}

#[test]
fn golden_client_records_are_still_written_and_read_the_same() {
    for version in 1..=CLIENT_VERSION {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"));
        let path = path.join(format!("tests/golden/clients-v{version}.bin"));
        if std::env::var_os("HDCS_UPDATE").is_some() {
            std::fs::write(&path, examples().concat()).unwrap();
        }
        let golden = std::fs::read(&path).unwrap();
        assert!(
            golden == examples().concat(),
            "raise CLIENT_VERSION and add an image"
        );
    }
    for mut bytes in examples() {
        assert_eq!(ClientRecord::parse(&bytes).unwrap().encode(), bytes);
        bytes[8] = CLIENT_VERSION as u8 + 1;
        seal(&mut bytes);
        let newer = FormatError::Newer {
            found: CLIENT_VERSION + 1,
            supported: CLIENT_VERSION,
        };
        assert_eq!(ClientRecord::parse(&bytes), Err(newer));
    }
}

#[test]
fn record_out_of_bounds_is_refused() {
    let [registration, request, checkpoint] = examples().try_into().unwrap();
    // Offsets: the header has 48 bytes; a client of a checkpoint 16, a result 16 and its bytes.
    let cases: [(&[u8], usize, u8, &str); 17] = [
        (&registration, 10, 0, "kind"),
        (&registration, 10, 4, "kind"),
        (&registration, 11, 1, "reserved"),
        (&registration, 24, 0, "client"),
        (&registration, 32, 1, "number"),
        (&registration, 40, 1, "result_bytes"),
        (&registration, 44, 1, "effect_bytes"),
        (&request, 10, 1, "number"),
        (&request, 24, 0, "client"),
        (&request, 32, 0, "number"),
        (&request, 40, 3, "effect_bytes"),
        (&checkpoint, 24, 1, "client"),
        (&checkpoint, 32, 65, "number"),
        (&checkpoint, 32, 1, "result_bytes"),
        (&checkpoint, 48 + 8, 9, "results"),
        (&checkpoint, 48 + 16, 3, "number"),
        (&checkpoint, 48 + 16 + 20, 9, "number"),
    ];
    for (good, at, byte, field) in cases {
        let mut bytes = good.to_vec();
        bytes[at] = byte;
        assert_eq!(ClientRecord::parse(&bytes), Err(FormatError::Checksum));
        seal(&mut bytes);
        let expected = Err(FormatError::Field(field));
        assert_eq!(ClientRecord::parse(&bytes), expected, "{at} {byte}");
    }
    for length in 0..checkpoint.len() {
        assert!(ClientRecord::parse(&checkpoint[..length]).is_err());
    }
}
