//! Every bound of the system, with the reason for its value and the relations between them.

/// The unit in which devices, the log and the caches are addressed. It matches the page size and
/// the physical sector of current drives, so that no write is a read-modify-write on the medium.
pub const BLOCK_BYTES: usize = 4096;
/// The unit of a client's request: the smallest that block protocols and file systems ask for.
pub const SECTOR_BYTES: usize = 512;
/// Sectors in one block.
pub const BLOCK_SECTORS: u64 = (BLOCK_BYTES / SECTOR_BYTES) as u64;

/// The largest piece in which a request reaches a volume, aligned to its own size. A frontend cuts
/// larger requests; a bounded piece bounds every buffer, span and stall behind it.
pub const REQUEST_BYTES_MAX: usize = 1 << 20;
/// Blocks in the largest request.
pub const REQUEST_BLOCKS_MAX: usize = REQUEST_BYTES_MAX / BLOCK_BYTES;
/// The largest request that a protocol may announce (NBD's customary maximum).
pub const PROTOCOL_REQUEST_BYTES_MAX: usize = 32 << 20;

/// The smallest volume: one block.
pub const VOLUME_BYTES_MIN: u64 = BLOCK_BYTES as u64;
/// The largest volume. [`crate::base::io::BlockKey`] has 40 bits for the block.
pub const VOLUME_BYTES_MAX: u64 = 1 << 50;
/// The largest volume number. [`crate::base::io::BlockKey`] has 24 bits for the volume.
pub const VOLUME_NUMBER_MAX: u32 = (1 << 24) - 1;
/// The longest volume name: it must fit a file name, an NBD export name and a metric's label.
pub const VOLUME_NAME_BYTES_MAX: usize = 64;

/// The smallest write log: room for several of the largest spans, so that appending and
/// destaging overlap.
pub const LOG_BYTES_MIN: u64 = 16 << 20;
/// The largest write log. Its index lives in memory (about 100 bytes per logged write).
pub const LOG_BYTES_MAX: u64 = 1 << 40;
/// Data blocks in one span at most: one full request, or many small ones.
pub const SPAN_DATA_BLOCKS_MAX: usize = 512;
/// Entries in one span at most.
pub const SPAN_ENTRIES_MAX: usize = 512;
/// Data that is compressed at once at most: what is read of it costs no more than that.
pub const LOG_PIECE_BYTES_MAX: usize = 64 << 10;
/// A piece is stored compressed if that saves this share of it, as a divisor: less is not worth the time of those
/// who read it.
pub const LOG_PIECE_SAVING_DIVISOR: usize = 8;
/// Entries that a log holds for each of its blocks at most, where memory is plentiful: data of 4 KiB that compresses to
/// a quarter fills it.
pub const LOG_BLOCK_ENTRIES_MAX: u64 = 4;
/// Parts that the index of a log has for each entry that the log may hold: the entry itself, and a run of sectors that
/// names it. Writes that cut others into runs, and those that are a span each, have more, and fill the log sooner.
pub const LOG_ENTRY_PARTS: u64 = 2;
/// Memory of one such part at most: an entry has 72 bytes, a span 64, a run in a B-tree up to 68; tables that grow have
/// room for a quarter more.
pub const LOG_PART_BYTES: u64 = 80;
/// Memory of a log's index for the checksum of each of its blocks.
pub const LOG_BLOCK_CHECKSUM_BYTES: u64 = 4;
/// Entries of one generation of destage at most: bounds the plan's memory.
pub const DESTAGE_ENTRIES_MAX: u64 = 8 << 10;
/// Memory for each piece that destage writes: its place in the plan, and there in the order of the volume and of the
/// log.
pub const DESTAGE_PIECE_BYTES: u64 = 288;

const fn least(a: u64, b: u64) -> u64 {
    if a < b { a } else { b }
}

/// Pieces that later writes cut the entries of a generation into, beyond which every entry is taken as it is, with a
/// log that may hold so many entries: bounds the plan's memory. To write something that a later generation writes again
/// costs time, and does no harm.
pub const fn pieces_max(entries_max: u64) -> u64 {
    least(entries_max / 2, 2 * DESTAGE_ENTRIES_MAX)
}

/// Memory that a volume needs at most to know what a log of so many bytes holds, which is so many entries, and to
/// destage it.
pub const fn log_memory_bytes(log_bytes: u64, entries_max: u64) -> u64 {
    let parts = entries_max.saturating_mul(LOG_ENTRY_PARTS);
    let pieces = pieces_max(entries_max) + least(entries_max, DESTAGE_ENTRIES_MAX);
    (log_bytes / BLOCK_BYTES as u64 * LOG_BLOCK_CHECKSUM_BYTES)
        .saturating_add(parts.saturating_mul(LOG_PART_BYTES))
        .saturating_add(pieces * DESTAGE_PIECE_BYTES)
}
/// The longest zeroing that is one backend operation, and that adjacent ones become in the log.
pub const ZERO_SECTORS_MAX: u64 = (4 << 30) / SECTOR_BYTES as u64;
/// What each volume has of memory for the index of its log, whatever others hold: what it admits a write by, and some
/// hundred entries beside.
pub const LOG_INDEX_BYTES_LEAST: u64 = 128 << 10;
/// The same for the plan of a generation: its least is what one span holds, each entry of which may cut another one.
pub const DESTAGE_PLAN_BYTES_LEAST: u64 = 96 << 10;
/// The same over an atomic backend, where a generation is never shorter than it would be with plenty.
pub const DESTAGE_PLAN_BYTES_ATOMIC: u64 = (2 * DESTAGE_ENTRIES_MAX + 1) * DESTAGE_PIECE_BYTES;
/// The same for what was written past the log and is not flushed.
pub const UNFLUSHED_BYTES_LEAST: u64 = 72 << 10;
/// Room to read one largest item from the log when the pool has none, each part rounded up to blocks and to a power of
/// two of them, beside the compressed ones as they are stored.
pub const DESTAGE_RESERVE_BYTES: usize = 6 * REQUEST_BYTES_MAX;
/// Memory of one run in a tree at most, if they came in order, which leaves its nodes half full.
pub const RUN_BYTES: u64 = 68;
/// Blocks of a span's control part at most, as this version writes them. So those of every span that may be on its
/// way fit a small pool of each volume.
pub const SPAN_CONTROL_BLOCKS: usize = 1;
/// Spans being written at once at most: enough to keep a device busy with large writes.
pub const SPANS_IN_FLIGHT_MAX: usize = 8;

/// Blocks that a joiner's copy may lack of what is committed when it is read back and joins (4 MiB): commits wait for
/// the rest, some milliseconds.
pub const JOIN_LAG_BLOCKS_MAX: u64 = 1024;

/// Points of its log that a joiner names. The last one in common is looked for among them; were they fewer, more of the log
/// would be sent again.
pub const JOIN_POINTS_MAX: usize = 256;

/// For how long a primary may rely on what its members have echoed, in milliseconds, at most: whoever takes its group waits
/// for as long before it serves.
pub const LEASE_MS_MAX: u32 = 30_000;

/// Work of one kind in one step of a volume, in looks at runs, entries, parts of items or blocks: some ten
/// microseconds, for which clients wait.
pub const STEP_WORK_MAX: usize = 512;
/// Runs of the index that a discard or write-zeroes takes out at once; if it covers more, they go in steps.
pub const INDEX_RUNS_AT_ONCE_MAX: usize = 128;
/// Discards and write-zeroes at once whose runs go in steps; more wait for admission.
pub const INDEX_LONG_MAX: usize = 16;

/// Times that a block of the log is read before it counts as bad: what was wrong may have been the way.
pub const LOG_READ_TRIES_MAX: u8 = 3;

/// Bad blocks of a log that are remembered at most: destage stops before the first one.
pub const LOG_BAD_BLOCKS_MAX: usize = 1024;

/// Position that a log begins or is cut at, at most: sums with one do not overflow. A million blocks a second reach it
/// in 146,000 years.
pub const LOG_POSITION_MAX: u64 = 1 << 62;

/// Ranges of sectors that a log records as lost at most: half of its superblock.
pub const LOST_RANGES_MAX: usize = 128;

/// Requests of one volume in flight at most; more wait in their frontend.
pub const VOLUME_REQUESTS_MAX: usize = 1024;

/// Data of one connection in flight or waiting to be sent at most: enough to keep a fast network
/// busy. Where memory is short, connections have less; see [`crate::node::shares`].
pub const CONNECTION_DATA_BYTES_MAX: usize = 16 << 20;
/// Memory of one connection besides data at most: both inboxes of 128 KiB, tables, and as many
/// replies as can wait.
pub const CONNECTION_HEAP_BYTES_MAX: usize = 8 << 20;
/// What every connection has of the memory for connections, whatever others hold: enough for one that
/// asks one thing at a time. If less is left, no other one is accepted.
pub const CONNECTION_HEAP_BYTES_MIN: usize = 32 << 10;
/// What every connection may hold of clients' data, whatever others hold: a few small requests. With
/// what [`CONNECTION_SHARE`] gives, more connections than there ever are could be left with less than
/// a block, since nobody who holds much has to give it back.
pub const CONNECTION_DATA_BYTES_MIN: usize = 16 << 10;
/// Clients of a volume hold at most as much as they leave to those of other volumes, and each of
/// them a quarter of what its volume has left. So each leaves something for those that come later.
pub const CONNECTION_SHARE: (u64, u64) = (1, 4);
/// See [`CONNECTION_SHARE`].
pub const VOLUME_SHARE: (u64, u64) = (1, 1);

/// A segment of the SSD cache: written at once, large enough to be sequential for the device.
pub const SEGMENT_BYTES: usize = 1 << 20;

/// The smallest region of the SSD tier: a few segments beside the journal.
pub const CACHE_BYTES_MIN: u64 = 16 << 20;
/// The largest region of the SSD tier: lines are numbered in 32 bits, whatever their size.
pub const CACHE_BYTES_MAX: u64 = 4 << 40;
/// The smallest line: with single blocks, the index would be several times its budget per block.
pub const CACHE_LINE_BLOCKS_MIN: usize = 2;
/// The largest line: beyond it, a small random read costs too much to fill.
pub const CACHE_LINE_BLOCKS_MAX: usize = 16;
/// Lines of one segment at most, if they are compressed; lines of two blocks, of which more fit as they are, are not.
/// Memory is what bounds it: with so many, the index takes 16 bytes for each 4 KiB of the device at most.
pub const CACHE_SEGMENT_LINES_MAX: usize = 118;
/// Segments of the SSD tier that wait for their write or are being written; more are refused.
pub const CACHE_SEGMENT_WRITES_MAX: usize = 3;
/// Reads of the cache's own in flight at most, of each kind: footers at start, lines that are kept
/// at eviction, lines that are compared.
pub const CACHE_READS_MAX: usize = 16;
/// Invalidations that wait for the journal; beyond it, the next start is cold instead.
pub const CACHE_INVALIDATIONS_MAX: usize = 1 << 16;
/// Failed reads or writes in a row after which the SSD tier is given up.
pub const CACHE_ERRORS_IN_ROW_MAX: u32 = 8;
/// Earlier starts of a cache of which its superblocks tell how far the journal had come. A volume that was not opened
/// in any of them finds nothing in the cache.
pub const CACHE_STARTS_KEPT: usize = 16;
/// Segments behind the last one that has a footer whose footers are read twice at a start: as many as may be under
/// way beside one another, and some more.
pub const CACHE_FOOTERS_DOUBTED: usize = 8;
/// The largest share of the SSD tier, in percent, that pins may take.
pub const CACHE_PIN_RATIO_MAX: u8 = 60;
/// Share of a segment's lines, in percent, from which on a segment of pinned lines is passed over by
/// eviction: emptying it would write nearly all of it again.
pub const CACHE_PASS_OVER_RATIO: usize = 75;
/// Blocks of a range that an invalidation looks up one by one, as its caller waits. A longer range is
/// forgotten at once and found while the tiers walk over their places.
pub const CACHE_PROBE_BLOCKS_MAX: usize = 1024;
/// Places of each tier that one step walks over: some ten microseconds, or some hundred where all are aliases.
pub const CACHE_STEP_PLACES_MAX: usize = 4096;
/// Ranges that a tier is forgetting, kept apart at most: 16 KiB of memory, and some ten comparisons for a lookup
/// meanwhile.
pub const CACHE_FORGETTING_RANGES_MAX: usize = 1024;
/// Frames that one insert into the DRAM tier looks at to find one to reuse: bounds its time.
pub const DRAM_SWEEP_FRAMES_MAX: usize = 256;

const _: () = assert!(BLOCK_BYTES.is_multiple_of(SECTOR_BYTES));
const _: () = assert!(
    SPAN_DATA_BLOCKS_MAX >= REQUEST_BLOCKS_MAX,
    "any request fits one span"
);
const _: () = assert!(
    LOG_BYTES_MIN >= 4 * (SPAN_DATA_BLOCKS_MAX * BLOCK_BYTES) as u64,
    "a log holds several of the largest spans"
);
const _: () = assert!(
    VOLUME_BYTES_MAX / BLOCK_BYTES as u64 <= 1 << 40,
    "a block number fits a key"
);
const _: () = assert!(
    LOG_PIECE_BYTES_MAX - LOG_PIECE_BYTES_MAX / LOG_PIECE_SAVING_DIVISOR <= u16::MAX as usize,
    "an entry of a span has 16 bits for the length of a compressed piece"
);
const _: () = assert!(
    REQUEST_BYTES_MAX / LOG_PIECE_BYTES_MAX + 1 < SPAN_ENTRIES_MAX,
    "the pieces of a request fit one span"
);
const _: () = assert!(PROTOCOL_REQUEST_BYTES_MAX.is_multiple_of(REQUEST_BYTES_MAX));
const _: () = assert!(
    CONNECTION_DATA_BYTES_MAX >= 4 * REQUEST_BYTES_MAX,
    "a connection has several of the largest pieces in flight"
);
const _: () = assert!(
    SEGMENT_BYTES == REQUEST_BYTES_MAX,
    "a segment is one buffer of the pool"
);
const _: () = assert!(
    (CACHE_PIN_RATIO_MAX as usize) < CACHE_PASS_OVER_RATIO,
    "pins cannot make a segment of every segment that is passed over"
);
const _: () = assert!(
    CACHE_BYTES_MAX / (CACHE_LINE_BLOCKS_MIN * BLOCK_BYTES) as u64 * 5 / 4 < u32::MAX as u64,
    "lines and aliases are numbered in 32 bits"
);

/// The largest volume over an object store: 2^22 pages of the map at worst, with a directory of 32 MiB, and a
/// manifest names every object of the map.
pub const OBJECT_VOLUME_BYTES_MAX: u64 = 16 << 40;
/// Stretches of 16 MiB of which a volume has inherited a part, at most: 2 MiB of memory. Of further
/// ones nothing counts as inherited.
pub const INHERITED_PAGES_MIXED_MAX: usize = 4096;
/// Blocks of one data object at most: what a destage generation of 4 KiB writes has, so that it
/// costs one put and one manifest.
pub const OBJECT_BATCH_BLOCKS_MAX: usize = 4096;
/// The smallest batch: below it an object is all overhead.
pub const OBJECT_BATCH_BLOCKS_MIN: usize = 8;
/// The longest name of a snapshot: that of a volume.
pub const OBJECT_SNAPSHOT_NAME_BYTES_MAX: usize = VOLUME_NAME_BYTES_MAX;
/// Snapshots of one volume at most: every manifest names them all.
pub const OBJECT_SNAPSHOTS_MAX: usize = 256;
/// Numbers of objects are below this: a place in the map has 48 bits for them. At a million numbers
/// for an opening, that is enough for 2^28 openings.
pub const OBJECT_NUMBER_MAX: u64 = 1 << 48;
/// Numbers that an owner may use from one manifest to the next; a later owner begins above them, so
/// what an earlier one still puts cannot be taken for its own.
pub const OBJECT_NUMBERS_AHEAD: u64 = 1 << 20;
/// Ranges that one data object unmaps at most.
pub const OBJECT_UNMAPPED_MAX: usize = 1024;
/// Runs of one data object at most: every block on its own, and what is unmapped, cut to 32 bits.
pub const OBJECT_RUNS_MAX: usize = OBJECT_BATCH_BLOCKS_MAX
    + OBJECT_UNMAPPED_MAX
    + ((OBJECT_VOLUME_BYTES_MAX / BLOCK_BYTES as u64) >> 32) as usize;
/// Blocks of a page of the map at most. A smaller page costs more directory, a larger one more to read for one block
/// and to store for one change.
pub const OBJECT_PAGE_BLOCKS_MAX: u32 = 1024;
/// Blocks of a page of the map at least.
pub const OBJECT_PAGE_BLOCKS_MIN: u32 = 8;
/// Pages of the map at most: those of the largest volume, in a directory of 33 MiB.
pub const OBJECT_PAGES_MAX: u64 =
    OBJECT_VOLUME_BYTES_MAX / BLOCK_BYTES as u64 / OBJECT_PAGE_BLOCKS_MAX as u64;
/// Bytes of a page of the map at most: what is read for one block.
pub const OBJECT_PAGE_BYTES_MAX: usize = 16 << 10;
/// Bytes of the pages of one map object at most: few puts for a large map.
pub const OBJECT_MAP_BYTES_MAX: usize = 4 << 20;
/// Bytes of one buffer of a map object.
pub const OBJECT_MAP_CHUNK_BYTES: usize = 1 << 20;
/// Pages of one map object at most: bounds its index, which is read at once.
pub const OBJECT_MAP_PAGES_MAX: usize = 16 << 10;
/// Objects of the map at most: more than twice those of the largest volume that was written at random.
pub const OBJECT_MAPS_MAX: usize = 36 << 10;
/// Data objects of one usage table at most: it has 256 KiB.
pub const OBJECT_USAGE_ENTRIES_MAX: usize = 16_380;
/// Usage tables at most: for 33 million objects, those of the largest volume in the smallest batches that nodes use.
pub const OBJECT_USAGES_MAX: usize = 2048;
/// Changes that wait to be merged into the map, at which writes wait: 32 MiB of memory. With half of them
/// a checkpoint begins.
pub const OBJECT_CHANGES_MAX: usize = 1 << 20;
/// The largest manifest: one buffer.
pub const OBJECT_MANIFEST_BYTES_MAX: usize = 1 << 20;
/// Data objects since the map was stored, at which writes wait for the map: bounds the manifest and
/// the next opening.
pub const OBJECT_TAIL_MAX: usize = 8192;
/// Data objects since the map was stored, up to which what was begun since the last flush goes on to
/// the next one: between two flushes nothing is committed that was written after the first. So far
/// more may come between them than destage ever writes.
pub const OBJECT_TAIL_UNFLUSHED_MAX: usize = OBJECT_TAIL_MAX * 3 / 2;
/// Objects that are looked at in search of garbage after one commit at most: what a commit costs does not
/// grow with the volume.
pub const OBJECT_LAP_STEP: usize = 1024;
/// Beginnings of epochs that a manifest names: the newest ones; of what is older, nothing is deleted.
pub const OBJECT_BEGINNINGS_MAX: usize = 512;
/// Generations of clones at most: every manifest names them.
pub const OBJECT_ANCESTORS_MAX: usize = 16;
/// The longest place of an ancestor: a bucket and a key, or a path.
pub const OBJECT_LOCATION_BYTES_MAX: usize = 1024;

const _: () = assert!(
    OBJECT_MANIFEST_BYTES_MAX <= REQUEST_BYTES_MAX && OBJECT_MAP_CHUNK_BYTES <= REQUEST_BYTES_MAX,
    "a manifest and a piece of the map are one buffer each"
);
const _: () = assert!(
    OBJECT_TAIL_MAX * 2 * 16
        + OBJECT_BEGINNINGS_MAX * 8
        + OBJECT_SNAPSHOTS_MAX * 96
        + OBJECT_ANCESTORS_MAX * (32 + OBJECT_LOCATION_BYTES_MAX)
        + (OBJECT_MAPS_MAX + OBJECT_USAGES_MAX) * 16
        + 128
        <= OBJECT_MANIFEST_BYTES_MAX,
    "a manifest has room for twice the tail and every object of the map"
);
const _: () = assert!(
    OBJECT_BATCH_BLOCKS_MAX <= 1 << 16,
    "a place has 16 bits for a slot"
);
/// Memory of a volume for the lengths of frames of compressed objects: those of some 100 GiB in large
/// objects. Whose are not there are fetched again, 576 bytes each.
pub const OBJECT_FRAMES_MEMORY_BYTES: usize = 4 << 20;
/// Memory for what is neither gathered nor read: tables, one map object, manifests.
pub const OBJECT_CONTROL_BYTES: usize = 8 << 20;
/// The least memory for objects that are read: two pieces of the map.
pub const OBJECT_READ_MEMORY_BYTES_MIN: usize = 2 << 20;

/// A tier flushes the backend after so many bytes. Up to that size of the volume, a tier to an atomic backend
/// shows as a whole; a volume over objects does not take much more than [`OBJECT_TAIL_MAX`] of the largest
/// batches between two flushes.
pub const HOME_TIER_FLUSH_BYTES: u64 = 64 << 30;
const _: () = assert!(
    HOME_TIER_FLUSH_BYTES * 2 <= (OBJECT_TAIL_MAX * OBJECT_BATCH_BLOCKS_MAX * BLOCK_BYTES) as u64,
    "what a tier writes between two flushes fits the tail, beside what is copied forward"
);
/// Blocks that a local store makes zero in one turn at most (1 GiB, 64 KiB of its map): a range of any size may be
/// discarded at once, and other volumes wait while a turn lasts.
pub const HOME_TURN_BLOCKS: u64 = 1 << 18;
/// A local store commits what nobody has flushed after so long. Under a policy that lets writes past the log nothing
/// else knows of a block that is new in the local store: a killed process would take it back, however old, where a raw
/// file would have it. One commit a second is two syncs, which no load notices.
pub const HOME_UNCOMMITTED_AGE_MS: u64 = 1000;
/// Memory for what a local store copies, fills and writes of its map at once: some of the largest copies.
pub const HOME_POOL_BYTES: usize = 8 << 20;
/// Memory for reads of which a local store and its backend have a part each. It is apart from [`HOME_POOL_BYTES`]: many
/// such reads would otherwise leave no run of memory for a copy of a tier, and none for a flush.
pub const HOME_READ_POOL_BYTES: usize = 4 << 20;
const _: () = assert!(
    HOME_READ_POOL_BYTES >= REQUEST_BYTES_MAX,
    "with nothing under way there is memory for the largest piece"
);
/// Memory for what an encrypted local store is writing: some of the largest writes, each a run and the rest of two
/// blocks.
pub const HOME_CIPHER_BYTES: usize = 4 << 20;
const _: () = assert!(
    HOME_CIPHER_BYTES >= 2 * REQUEST_BYTES_MAX,
    "with nothing under way there is memory for the largest write"
);
/// Memory for the checksums of a local store's data at once: all those of 8 GiB. What destage writes is in order, so it
/// reads and writes each block of the table once, however little of it is in memory.
pub const HOME_SUMS_BYTES: usize = 64 << 20;
/// Memory of a run of sectors that the log is to write again, about: two numbers, in nodes of a tree that are half
/// full. A quarter of [`HOME_SUMS_BYTES`] is for such runs, one for each of 419,430 writes that a log has at the
/// opening.
pub const HOME_UNSETTLED_RUN_BYTES: usize = 40;

/// Clients whose last results a log of records keeps at most: a checkpoint of all of them fits one record.
pub const CLIENTS_MAX: usize = 64;
/// Results that are kept of each, and so requests that it may have without an answer.
pub const CLIENT_RESULTS_MAX: usize = 8;
/// The largest result: what a request about a name answers with, attributes included.
pub const CLIENT_RESULT_BYTES_MAX: usize = 1 << 10;
/// The largest record of a log: it lies in one buffer, and in one span.
pub const RECORD_BYTES_MAX: usize = REQUEST_BYTES_MAX;
const _: () = assert!(
    CLIENTS_MAX * CLIENT_RESULTS_MAX * CLIENT_RESULT_BYTES_MAX <= RECORD_BYTES_MAX / 2,
    "a checkpoint has all results, and room for what they are about"
);

/// Units of a heat map at most, two bits of memory each while it is made: lines of 16 KiB of a volume of 256 GiB.
pub const HEAT_UNITS_MAX: usize = 1 << 24;
/// Runs of a heat map at most, and ranges of all warm-ups of a shard: a file of 1 MiB, and 4 MiB of ranges while caches
/// are warmed up.
pub const HEAT_RUNS_MAX: usize = 1 << 18;

/// Clients that a volume may name as those that may open it: what `hdcs volume show` can still print, and what a
/// handshake compares in microseconds.
pub const ALLOWED_CLIENTS_MAX: usize = 256;
/// Names of one client's certificate that count. Certificates have one or two; the rest of a longer list opens nothing.
pub const CLIENT_NAMES_MAX: usize = 64;
/// The longest name of a client: what URIs need. A longer one in a certificate opens nothing.
pub const CLIENT_NAME_BYTES_MAX: usize = 1024;

/// Descriptors that a node needs at least: its own files, one volume's, a few clients'.
pub const DESCRIPTORS_MIN: u64 = 128;
/// Descriptors that are kept for files, devices, stores and the control socket where the limit is at least twice that:
/// some ten of each of fifty volumes. Of larger limits it is a quarter.
pub const DESCRIPTORS_RESERVED: u64 = 512;

/// Work that the clients of a shard submit in one of its turns, where a read of a block from memory is 1: a millisecond
/// or two.
pub const TURN_WORK: usize = 256;
/// Work that each client may submit in a turn that is not spent, however many there are: what comes at once costs less.
pub const TURN_WORK_MIN: usize = 8;

/// Bytes of meta of a frame between nodes at most: a superblock and what is said beside it. It passes through an inbox that
/// each connection has, so it is small.
pub const WIRE_META_BYTES_MAX: usize = 8 << 10;
/// The same of an urgent request: a heartbeat, a promise. With [`WIRE_URGENT_MAX`] it is memory that is held beside the
/// credit.
pub const WIRE_URGENT_META_BYTES_MAX: usize = 4 << 10;
/// Urgent requests of one connection and direction at once at most: what managers and groups ask in the time of an answer.
pub const WIRE_URGENT_MAX: usize = 32;
/// Requests of one connection and direction at once at most, those included whose answer is late: bounds their table.
pub const WIRE_REQUESTS_MAX: usize = 1024;
/// Blocks of a span's control part at most, of any version: its header, its entries, the checksums of its data.
pub const WIRE_SPAN_CONTROL_BLOCKS_MAX: usize =
    (128 + SPAN_ENTRIES_MAX * 32 + SPAN_DATA_BLOCKS_MAX * 4).div_ceil(BLOCK_BYTES);
/// The largest span on the wire.
pub const WIRE_SPAN_BYTES_MAX: usize =
    (WIRE_SPAN_CONTROL_BLOCKS_MAX + SPAN_DATA_BLOCKS_MAX) * BLOCK_BYTES;
/// The largest payload of a request: one buffer of the pool. An answer may bring a span.
pub const WIRE_BULK_BYTES_MAX: usize = REQUEST_BYTES_MAX;
/// Buffers of which one payload is sent at most: every block of a span on its own.
pub const WIRE_PARTS_MAX: usize = WIRE_SPAN_BYTES_MAX / BLOCK_BYTES;
/// Logs that one connection carries in one direction at most: more volumes than a node serves well.
pub const WIRE_STREAMS_MAX: usize = 1024;
/// What the requests of a peer may cost at least: the largest request with room for the largest answer. With less it could
/// never be asked.
pub const WIRE_CREDIT_BYTES_MIN: u64 =
    (64 + WIRE_META_BYTES_MAX + WIRE_BULK_BYTES_MAX + WIRE_SPAN_BYTES_MAX) as u64;
/// Spans that wait to be sent on one connection, in bytes, at least: the largest one.
pub const WIRE_QUEUE_BYTES_MIN: usize = WIRE_SPAN_BYTES_MAX;
const _: () = assert!(
    SPAN_CONTROL_BLOCKS <= WIRE_SPAN_CONTROL_BLOCKS_MAX,
    "what a log writes can be sent"
);
