//! One run from a seed: openings, work, endings, and the verification at last.

use fastrand::Rng;
use hdcs_core::base::io::{Nanos, SectorRange};
use hdcs_core::base::limits::{REQUEST_BYTES_MAX, SECTOR_BYTES};
use hdcs_core::node::stop::Hung;

use crate::engine::{Ended, Simulated};
use crate::outcome;
use crate::plant::Plant;
use crate::scenario::{Ending, Scenario};
use crate::violation::Violation;
use crate::workload::Ask;
use crate::world::{Coverage, World};

/// Reads after which a line goes to the SSD tier, where that is looked at.
const PROMOTE_HITS: u8 = 3;
/// Openings that may be refused one after another before a run gives up; each is excused, and then
/// its cause is taken away.
const REFUSALS_MAX: u32 = 3;

/// How to run a seed.
pub type Options = outcome::Options<Plant>;
/// What came of a run.
pub type Outcome = outcome::Outcome<Coverage>;

/// Run one seed.
pub fn run(seed: u64, options: Options) -> Outcome {
    let mut scenario = match options.plant {
        // In a scenario of every kind it would show once in a hundred seeds.
        Some(Plant::StaleReadmission) => Scenario::draw_for_cache_trouble(seed),
        Some(Plant::KeptNumber) => Scenario::draw_for_lost_logs(seed),
        Some(Plant::ForgottenMark | Plant::HastyUnmark) => Scenario::draw_for_direct_crashes(seed),
        Some(Plant::StuckRead) => Scenario::draw_for_spoiled_reads(seed),
        Some(Plant::ForgottenLoss | Plant::ShownLoss | Plant::LoneLoss) => {
            Scenario::draw_for_damaged_logs(seed)
        }
        Some(Plant::UnmarkedEnd) => Scenario::draw_for_rests(seed),
        Some(Plant::ForgottenHead) => Scenario::draw_for_damaged_ends(seed),
        Some(Plant::StuckReplay) => Scenario::draw_for_spoiled_replays(seed),
        Some(Plant::StarvedRead) => Scenario::draw_for_hot_blocks(seed),
        Some(Plant::StaleBefore) => Scenario::draw_for_lost_logs_of_stores(seed),
        Some(Plant::ArrivalsFirst) => Scenario::draw_for_light_loads(seed),
        Some(
            Plant::UnwatchedLog
            | Plant::UntoldWaiters
            | Plant::ReadsHoldWrites
            | Plant::PatientClose
            | Plant::HastyReopen,
        ) => Scenario::draw_for_silent_logs(seed),
        Some(Plant::KeptCut) => Scenario::draw_for_cuts(seed),
        Some(Plant::OlderTail) => Scenario::draw_for_rotten_superblocks(seed),
        Some(Plant::HastyPreparation | Plant::HastyGift) => {
            Scenario::draw_for_sound_log_space(seed)
        }
        Some(Plant::IdleScrub) => Scenario::draw_for_scrubs(seed),
        Some(Plant::DeafFlush | Plant::UndoubtedFlush) => Scenario::draw_for_failing_flushes(seed),
        Some(Plant::LateInvalidation) => Scenario::draw_for_cached_direct_crashes(seed),
        Some(Plant::LostKeeping | Plant::LateKeeping | Plant::StaleLog) => {
            Scenario::draw_for_failed_logs(seed)
        }
        Some(Plant::GuessedLineage | Plant::MisplacedFill) => Scenario::draw_for_clones(seed),
        Some(Plant::ForgottenTie) => Scenario::draw_for_undone_writes(seed),
        Some(Plant::UncutStore) => Scenario::draw_for_cut_short_sizes_of_stores(seed),
        Some(Plant::UntieredClose | Plant::DirtyClose) => Scenario::draw_for_closes_of_stores(seed),
        Some(Plant::UntieredSnapshot | Plant::UnheldSnapshot) => {
            Scenario::draw_for_snapshots_of_stores(seed)
        }
        Some(Plant::SwallowedSnapshot | Plant::SweptSnapshot) => {
            Scenario::draw_for_snapshots_of_objects(seed)
        }
        Some(
            Plant::ReadPastStore
            | Plant::FlushPastStore
            | Plant::ExtentsPastStore
            | Plant::HastyTier,
        ) => Scenario::draw_for_local_stores(seed),
        Some(_) => Scenario::draw_without_stacks(seed),
        None => Scenario::draw(seed),
    };
    if let Some(
        Plant::EarlyCommit | Plant::FalseAtomicity | Plant::HastySnapshot | Plant::LooseSnapshot,
    ) = options.plant
    {
        for volume in &mut scenario.volumes {
            volume.config.backend_atomic = true;
        }
    }
    if options.plant == Some(Plant::LeakySnapshot) {
        for volume in &mut scenario.volumes {
            // So that there is something to hold back.
            volume.config.backend_atomic = false;
            volume.config.dirty_ratio_min = 0;
            volume.config.dirty_age_max = Nanos::from_millis(1);
        }
    }
    if let Some(Plant::EarlyDirectAck | Plant::HastySwitch | Plant::ForgottenFlush) = options.plant
    {
        scenario.draw_policies(&mut Rng::with_seed(seed));
    }
    if let Some(step) = options.crash_at {
        scenario = scenario.shortened();
        scenario.endings.insert(0, Ending::PowerCut(step));
    }
    run_scenario(&scenario, options)
}

/// Run one seed with local stores and object volumes below the volumes.
pub fn run_stacked(seed: u64, options: Options) -> Outcome {
    let mut scenario = Scenario::draw_for_stacks(seed);
    if let Some(step) = options.crash_at {
        scenario = scenario.shortened();
        scenario.endings.insert(0, Ending::PowerCut(step));
    }
    run_scenario(&scenario, options)
}

/// Run one scenario; of the options only the plant and whether to print count.
pub fn run_scenario(scenario: &Scenario, options: Options) -> Outcome {
    let world = World::new(scenario.clone(), options.plant, options.verbose);
    let drive = |world: &mut World| drive(world, scenario);
    Outcome::of(scenario.seed, world, drive, World::coverage)
}

fn drive(world: &mut World, scenario: &Scenario) -> Result<(), Violation> {
    for (index, &ending) in scenario.endings.iter().enumerate() {
        opening(world, scenario, ending)?;
        if scenario.lost_logs.get(index).is_some_and(|lost| *lost) {
            world.lose_log(0)?;
        }
    }
    finish(world, scenario)
}

/// How often a volume is opened again during one opening of the node, if there are several shards.
const SHARD_CHANGES: usize = 4;

/// One opening with its work and its ending.
fn opening(world: &mut World, scenario: &Scenario, ending: Ending) -> Result<(), Violation> {
    world.unrest();
    let (crash_at, power) = match ending {
        Ending::PowerCut(step) => (Some(step), true),
        Ending::Kill(step) => (Some(step), false),
        Ending::Rest | Ending::Close { .. } => (None, true),
    };
    world.start(crash_at)?;
    world.give_work(scenario.requests);
    let ended = world.run_until(|world| world.is_idle() || world.is_broken())?;
    if ended == Ended::Crash {
        if scenario.faults.rots_superblocks {
            world.rot_ends();
        }
        return world.crash(power);
    }
    if world.has_failed() {
        world.crash(false)?;
        world.heal_logs()?;
        return Ok(());
    }
    if ending == Ending::Rest && world.is_open() && !world.is_broken() {
        world.rest()?;
        world.rot_ends();
        return world.crash(scenario.shared_power);
    }
    if !world.is_cache_back()
        && world.is_open()
        && !world.is_broken()
        && outlast(world, scenario.requests / 4)? == Ended::Crash
    {
        return world.crash(power);
    }
    // Where there are several shards, it comes back to one that it was on.
    let reopens = match scenario.shards() {
        _ if !scenario.reopens => 0,
        1 => 1,
        _ => SHARD_CHANGES,
    };
    for _ in 0..reopens {
        if world.is_open()
            && !world.is_broken()
            && reopen(world, scenario.requests / 4)? == Ended::Crash
        {
            return world.crash(power);
        }
    }
    if scenario.shrinks && world.is_open() && !world.is_broken() && shrink(world)? == Ended::Crash {
        return world.crash(power);
    }
    let destage = matches!(ending, Ending::Close { destage: true });
    match close(world, destage)? {
        Ended::Crash => world.crash(power),
        Ended::Reached => world.stop(destage),
    }
}

/// Wait until the cache device answers again, and go on with the work on a tier that came back.
fn outlast(world: &mut World, requests: u32) -> Result<Ended, Violation> {
    let back = world.run_until(|world| world.is_cache_back() || world.is_broken())?;
    if back == Ended::Crash || world.is_broken() {
        return Ok(back);
    }
    world.give_work(requests);
    world.run_until(|world| world.is_idle() || world.is_broken())
}

/// Close a volume and open it again, with the same cache, and go on with the work.
fn reopen(world: &mut World, requests: u32) -> Result<Ended, Violation> {
    world.begin_reopen(0)?;
    let mut patience = 2000;
    let closed = world.run_until(|world| {
        patience -= 1;
        patience == 0 || world.is_unit_closed(0)
    })?;
    if closed == Ended::Crash || !world.is_unit_closed(0) {
        return Ok(closed);
    }
    world.end_reopen(0)?;
    world.give_work(requests);
    world.run_until(|world| world.is_idle() || world.is_broken())
}

/// Have every volume cut, and leave before all of that is done, or after. Now and then the node crashes instead of closing.
fn cut(world: &mut World) -> Result<Ended, Violation> {
    for unit in 0..world.units() {
        world.resize_online(unit, world.sectors(unit).div_ceil(3))?;
    }
    let mut patience = world.choose(&[1, 3, 10, 30, 100, 2000]);
    let ended = world.run_until(|world| {
        patience -= 1;
        patience == 0 || !world.is_resizing() || world.is_broken()
    })?;
    Ok(if world.choose(&[true, false, false]) {
        Ended::Crash
    } else {
        ended
    })
}

/// Let every volume that was cut grow to what it was: what comes back is zero.
fn grow_back(world: &mut World) -> Result<(), Violation> {
    for unit in 0..world.units() {
        let (sectors, at_first) = (world.sectors(unit), world.sectors_at_first(unit));
        if sectors >= at_first {
            continue;
        }
        world.resize_online(unit, at_first)?;
        world.run_until(|world| !world.is_resizing())?;
        if world.sectors(unit) < at_first {
            let why = format!("volume {unit} does not grow, with nothing wrong any more");
            return Err(Violation::new("resize-refused", why));
        }
        read(world, unit, SectorRange::between(sectors, at_first))?;
    }
    Ok(())
}

/// Destage everything, cut every volume, and let it grow again: what comes back is zero.
fn shrink(world: &mut World) -> Result<Ended, Violation> {
    if has_stacks(world) {
        return cut(world);
    }
    world.calm();
    let ended = world.run_until(|world| !world.is_resizing() || world.is_broken())?;
    if ended == Ended::Crash || world.is_broken() {
        return Ok(ended);
    }
    for unit in 0..world.units() {
        world.begin_destage_all(unit)?;
    }
    let ended = run_unless_unreadable(world, |world| world.is_destaged() || world.is_broken())?;
    if ended == Ended::Crash || world.is_broken() {
        return Ok(ended);
    }
    let sizes: Vec<u64> = (0..world.units()).map(|unit| world.sectors(unit)).collect();
    for (unit, sectors) in sizes.iter().enumerate() {
        world.resize(unit, sectors.div_ceil(3))?;
    }
    // As a node does, which is not done with a cut before the cache has forgotten durably.
    let forgotten = world.cache_barrier();
    let ended = world.run_until(|world| world.is_persisted(forgotten) || world.is_broken())?;
    if ended == Ended::Crash || world.is_broken() {
        return Ok(ended);
    }
    for (unit, sectors) in sizes.into_iter().enumerate() {
        world.resize(unit, sectors)?;
        let end = SectorRange::between(sectors.saturating_sub(64), sectors);
        world.ask(unit, Ask::Read(end))?;
    }
    world.run_until(|world| world.is_idle())
}

/// Close volumes and cache. Faults go on for a while, so that closing meets them as well.
fn close(world: &mut World, destage: bool) -> Result<Ended, Violation> {
    world.close(destage)?;
    let mut patience = 500;
    let ended = world.run_until(|world| {
        patience -= 1;
        patience == 0 || world.stopped().is_some()
    })?;
    if ended == Ended::Crash {
        return Ok(ended);
    }
    world.calm();
    let ended = run_unless_unreadable(world, |world| world.stopped().is_some())?;
    if world.stopped() == Some(Err(Hung)) {
        // It has ended as by a crash.
        return Ok(Ended::Crash);
    }
    Ok(ended)
}

/// Run until something is reached, which what is dirty on a device that reads nothing any more keeps from it: then
/// somebody ends the node.
fn run_unless_unreadable(
    world: &mut World,
    reached: impl Fn(&mut World) -> bool,
) -> Result<Ended, Violation> {
    let mut patience = 400;
    let ended = world.run_until(|world| {
        patience -= u32::from(world.has_dead_log());
        patience == 0 || reached(world)
    })?;
    Ok(if reached(world) { ended } else { Ended::Crash })
}

/// All is well from here on: everything must be there, and end.
fn finish(world: &mut World, scenario: &Scenario) -> Result<(), Violation> {
    world.calm();
    let mut refusals = 0;
    loop {
        start(world)?;
        if !world.has_failed() {
            break;
        }
        refusals += 1;
        world.crash(false)?;
        if !world.heal_logs()? || refusals > REFUSALS_MAX {
            return Err(Violation::new(
                "open-refused",
                "refused with nothing wrong any more",
            ));
        }
    }
    if world.has_scrubs() {
        scrub(world)?;
    } else {
        verify(world)?;
    }
    world.check_lost()?;
    world.check_snapshots()?;
    if world.is_rotten() {
        return world.crash(false);
    }
    if scenario.resizes {
        grow_back(world)?;
    }
    for unit in 0..world.units() {
        world.begin_destage_all(unit)?;
    }
    world.run_until(World::is_destaged)?;
    world.run_until(|world| world.is_cache_back())?;
    share(world)?;
    world.weigh()?;
    let mut pinned = Vec::new();
    for unit in 0..world.units() {
        promote(world, unit)?;
        count(world, unit)?;
        pinned.extend(pin(world, unit)?.map(|range| (unit, range)));
        warm_up(world, unit)?;
    }
    if world.has_pins() {
        promote_beside(world, &pinned)?;
    }
    if world.packed_rots() {
        return rot_packed(world);
    }
    end(world)
}

/// Whether something lies below any volume.
fn has_stacks(world: &World) -> bool {
    (0..world.units()).any(|unit| world.is_stacked(unit))
}

/// Start the node where nothing goes wrong any more.
fn start(world: &mut World) -> Result<(), Violation> {
    world.start(None)?;
    let is_known = |world: &mut World| world.is_open() || world.has_failed();
    world.run_until(is_known).map(drop)
}

/// Have what is at the bottom of the stacks get everything.
fn tier(world: &mut World) -> Result<(), Violation> {
    for unit in 0..world.units() {
        world.begin_destage_all(unit)?;
    }
    world.run_until(World::is_destaged)?;
    world.begin_tiers()?;
    world.run_until(|world| world.is_tiered())?;
    world.check_tiered()
}

/// Have a snapshot of every volume that something lies below, of what was just written as well.
fn keep(world: &mut World) -> Result<(), Violation> {
    for unit in 0..world.units() {
        if !world.is_stacked(unit) {
            continue;
        }
        let first = SectorRange::new(0, world.sectors(unit).min(64));
        ask(world, unit, Ask::Write(first, None, false))?;
        let before = world.coverage.snapshots;
        // An object volume may have to forget one first.
        for _ in 0..2 {
            if world.coverage.snapshots == before {
                world.begin_snapshot(unit, false)?;
                world.run_until(|world| !world.is_snapshotting(unit))?;
            }
        }
        if world.coverage.snapshots == before {
            let why = format!("no snapshot of volume {unit} is made, with nothing wrong any more");
            return Err(Violation::new("snapshot-refused", why));
        }
    }
    Ok(())
}

/// Close everything where nothing goes wrong any more.
fn end(world: &mut World) -> Result<(), Violation> {
    if has_stacks(world) {
        keep(world)?;
        tier(world)?;
    }
    // What failed before all was well may have shown until now; nothing fails any more.
    world.check_healthy()?;
    close(world, true)?;
    world.stop(true)
}

/// Start once more over lines that were stored compressed, let some of them rot, and read everything.
fn rot_packed(world: &mut World) -> Result<(), Violation> {
    for unit in 0..world.units() {
        if let Some(range) = world.promotable(unit) {
            world.compress(unit)?;
            rewrite(world, unit, range)?;
            destage(world, unit)?;
            world.settle()?;
            ask(world, unit, Ask::Promote(range))?;
        }
    }
    end(world)?;
    start(world)?;
    world.run_until(|world| world.is_cache_back())?;
    world.settle()?;
    let served: Vec<usize> = (0..world.units())
        .filter(|&unit| world.promotable(unit).is_some())
        .collect();
    world.rot_packed();
    verify(world)?;
    for unit in served {
        world.check_packed(unit)?;
    }
    end(world)
}

/// Scrub everything once the devices have rotted once more, and read it.
fn scrub(world: &mut World) -> Result<(), Violation> {
    world.run_until(|world| world.is_cache_back() && world.is_scrubbed())?;
    if world.fills_before_scrub() {
        for unit in 0..world.units() {
            let all = SectorRange::new(0, world.sectors(unit));
            ask(world, unit, Ask::Promote(all))?;
        }
    }
    world.settle()?;
    world.rot();
    for unit in 0..world.units() {
        world.begin_scrub(unit);
    }
    world.run_until(|world| world.is_scrubbed())?;
    world.note_scrubbed();
    verify(world)?;
    world.check_scrubbed()
}

/// Promote what two clones have inherited on one of them, and read it on the other.
fn share(world: &mut World) -> Result<(), Violation> {
    let Some(range) = world.common() else {
        return Ok(());
    };
    ask(world, 0, Ask::Promote(range))?;
    world.settle()?;
    // Equal lines abound, and one can be shared so often and no more.
    let Some(range) = world.cached_of_origin(range) else {
        return Ok(());
    };
    world.watch(1, range);
    read(world, 1, range)?;
    world.check_shared(range)
}

/// Promote a range beside writes and destage, then with nothing else going on, and read it.
fn promote(world: &mut World, unit: usize) -> Result<(), Violation> {
    if world.has_pins() {
        // What is pinned comes back at any time, and what was promoted goes for it.
        return Ok(());
    }
    let Some(range) = world.promotable(unit) else {
        return Ok(());
    };
    send(world, unit, Ask::Promote(range))?;
    rewrite(world, unit, range)?;
    send(world, unit, Ask::Promote(range))?;
    world.begin_destage_all(unit)?;
    world.run_until(|world| world.is_idle() && world.is_destaged())?;
    read(world, unit, range)?;
    destage(world, unit)?;
    // A comparison of lines that is still under way may drop what is promoted to its place.
    world.settle()?;
    ask(world, unit, Ask::Evict(range))?;
    world.watch(unit, range);
    ask(world, unit, Ask::Promote(range))?;
    world.check_promoted(unit, range)?;
    world.settle()?;
    read_cached(world, unit, range)
}

/// Read a range as often as its lines have to be read before they go to the SSD tier, and look each time.
fn count(world: &mut World, unit: usize) -> Result<(), Violation> {
    // What is pinned goes there uncounted.
    let range = world.promotable(unit).filter(|_| !world.has_pins());
    let Some(range) = range else {
        return Ok(());
    };
    world.settle()?;
    world.count_from_now(unit, PROMOTE_HITS)?;
    for reads in 1..=PROMOTE_HITS {
        ask(world, unit, Ask::Evict(range))?;
        read(world, unit, range)?;
        world.check_counted(unit, range, reads, PROMOTE_HITS)?;
    }
    Ok(())
}

/// Pin a range, let a neighbour fill the tier and writes drop lines of it: it is there all the same.
fn pin(world: &mut World, unit: usize) -> Result<Option<SectorRange>, Violation> {
    // What is pinned of the others from the start may leave too little for this one.
    world.unpin_from(unit)?;
    let Some(range) = world.promotable(unit) else {
        return Ok(None);
    };
    rewrite(world, unit, range)?;
    destage(world, unit)?;
    world.pin(unit, range)?;
    world.run_until(|world| world.is_filled(unit))?;
    // A line that is still compared with another is at no address yet, and may have to be filled again.
    world.settle()?;
    world.run_until(|world| world.is_filled(unit))?;
    world.crowd()?;
    world.check_pinned_at_once(unit, range)?;
    let first = SectorRange::new(range.start, range.count.min(40));
    send(world, unit, Ask::Write(first, None, true))?;
    destage(world, unit)?;
    world.settle()?;
    world.run_until(|world| world.is_filled(unit))?;
    world.check_pinned(unit, range)?;
    read_cached(world, unit, range)?;
    Ok(Some(range))
}

/// Promote a range of every volume beside what is pinned: both are there.
fn promote_beside(world: &mut World, pinned: &[(usize, SectorRange)]) -> Result<(), Violation> {
    for unit in 0..world.units() {
        let Some(range) = world.promotable(unit) else {
            continue;
        };
        rewrite(world, unit, range)?;
        destage(world, unit)?;
        world.settle()?;
        world.run_until(|world| (0..world.units()).all(|unit| world.is_filled(unit)))?;
        ask(world, unit, Ask::Evict(range))?;
        world.watch(unit, range);
        ask(world, unit, Ask::Promote(range))?;
        world.run_until(|world| world.is_filled(unit))?;
        world.check_promoted(unit, range)?;
        for &(unit, range) in pinned {
            world.check_pinned(unit, range)?;
        }
        world.settle()?;
        read_cached(world, unit, range)?;
    }
    Ok(())
}

/// Let the cache lose a volume, and warm it up from what was hot: all of it is there again. Beside other volumes,
/// which may be worth more, all but what had to go for them.
fn warm_up(world: &mut World, unit: usize) -> Result<(), Violation> {
    if world.has_pins() || !world.warms_up() {
        return Ok(());
    }
    let Some(range) = world.promotable(unit) else {
        return Ok(());
    };
    rewrite(world, unit, range)?;
    destage(world, unit)?;
    world.settle()?;
    let all = SectorRange::new(0, world.sectors(unit));
    ask(world, unit, Ask::Evict(all))?;
    ask(world, unit, Ask::Promote(range))?;
    // A line that is still compared with another is in the cache, and at no address yet.
    world.settle()?;
    let heat = world.heat(unit);
    let hot = world.check_heat(unit, range, &heat)?;
    ask(world, unit, Ask::Evict(all))?;
    let evicted = world.evicted_lines();
    world.warm_up(unit, heat)?;
    world.run_until(|world| world.is_warmed_up(unit))?;
    if world.weighs_beside() {
        return world.check_warmed_up_beside(unit, &hot, evicted);
    }
    world.check_warmed_up(unit, range)?;
    world.settle()?;
    read_cached(world, unit, range)
}

/// Write all of a range. No two lines of it are the same from now on: a line can be shared so often and no more.
fn rewrite(world: &mut World, unit: usize, range: SectorRange) -> Result<(), Violation> {
    pieces(range).try_for_each(|piece| send(world, unit, Ask::Write(piece, None, false)))
}

/// Have everything destaged.
fn destage(world: &mut World, unit: usize) -> Result<(), Violation> {
    // What is accepted after that began would be destaged some time.
    world.run_until(|world| world.is_idle())?;
    world.begin_destage_all(unit)?;
    world.run_until(World::is_destaged).map(drop)
}

/// Read a range for which the backend is not needed any more.
fn read_cached(world: &mut World, unit: usize, range: SectorRange) -> Result<(), Violation> {
    world.watch(unit, range);
    read(world, unit, range)?;
    world.check_promotion_used(unit, range)
}

/// Send a request as soon as there is a buffer for it.
fn send(world: &mut World, unit: usize, ask: Ask) -> Result<(), Violation> {
    while !world.ask(unit, ask)? {
        // Buffers come back as the machines rest.
        world.pause()?;
    }
    Ok(())
}

/// Send a request, and wait until everything was answered.
fn ask(world: &mut World, unit: usize, ask: Ask) -> Result<(), Violation> {
    send(world, unit, ask)?;
    world.run_until(|world| world.is_idle()).map(drop)
}

/// Read a range, piece by piece.
fn read(world: &mut World, unit: usize, range: SectorRange) -> Result<(), Violation> {
    pieces(range).try_for_each(|piece| ask(world, unit, Ask::Read(piece)))
}

/// A range in requests, none of which crosses a multiple of the largest one.
fn pieces(range: SectorRange) -> impl Iterator<Item = SectorRange> {
    let most = (REQUEST_BYTES_MAX / SECTOR_BYTES) as u64;
    let mut start = range.start;
    std::iter::from_fn(move || {
        let end = range.end().min((start / most + 1) * most);
        let piece = SectorRange::between(start, end);
        start = end;
        (!piece.is_empty()).then_some(piece)
    })
}

/// Read everything.
fn verify(world: &mut World) -> Result<(), Violation> {
    for unit in 0..world.units() {
        read(world, unit, SectorRange::new(0, world.sectors(unit)))?;
    }
    Ok(())
}
