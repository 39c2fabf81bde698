//! One run from a seed: openings, work, endings, and the verification at last.

use std::panic::{AssertUnwindSafe, catch_unwind};

use hdcs_core::io::SectorRange;
use hdcs_core::limits::{REQUEST_BYTES_MAX, SECTOR_BYTES};

use crate::plant::Plant;
use crate::scenario::{Ending, Scenario};
use crate::violation::Violation;
use crate::workload::Ask;
use crate::world::{Coverage, Ended, World};

/// Openings that may be refused one after another before a run gives up; each is excused, and then
/// its cause is taken away.
const REFUSALS_MAX: u32 = 3;

/// How to run a seed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Print everything that happens.
    pub verbose: bool,
    /// Plant a bug.
    pub plant: Option<Plant>,
    /// A short variant with one crash after so many steps (none if beyond its end).
    pub crash_at: Option<u64>,
}

/// What came of a run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The seed.
    pub seed: u64,
    /// Equal runs have equal hashes.
    pub trace_hash: u64,
    /// The rule that was broken, if one was.
    pub violation: Option<Violation>,
    /// The last things that happened.
    pub tail: Vec<String>,
    /// What the run saw.
    pub coverage: Coverage,
}

/// Run one seed.
pub fn run(seed: u64, options: Options) -> Outcome {
    let mut scenario = Scenario::draw(seed);
    if let Some(step) = options.crash_at {
        scenario = scenario.shortened();
        scenario.endings.insert(0, Ending::PowerCut(step));
    }
    let mut world = World::new(scenario.clone(), options.plant, options.verbose);
    let result = catch_unwind(AssertUnwindSafe(|| drive(&mut world, &scenario)));
    let violation = match result {
        Ok(result) => result.err(),
        Err(panic) => {
            let message = panic
                .downcast_ref::<String>()
                .cloned()
                .or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
            Some(Violation::new("assertion", message.unwrap_or_default()))
        }
    };
    let outcome = Outcome {
        seed,
        trace_hash: world.trace.hash(),
        violation,
        tail: world.trace.tail(),
        coverage: world.coverage,
    };
    if outcome
        .violation
        .as_ref()
        .is_some_and(|violation| violation.rule == "assertion")
    {
        // What a panic left behind cannot be trusted to drop well.
        std::mem::forget(world);
    }
    outcome
}

fn drive(world: &mut World, scenario: &Scenario) -> Result<(), Violation> {
    for &ending in &scenario.endings {
        opening(world, scenario, ending)?;
    }
    finish(world)
}

/// One opening with its work and its ending.
fn opening(world: &mut World, scenario: &Scenario, ending: Ending) -> Result<(), Violation> {
    world.unrest();
    let (crash_at, power) = match ending {
        Ending::PowerCut(step) => (Some(step), true),
        Ending::Kill(step) => (Some(step), false),
        Ending::Close { .. } => (None, true),
    };
    let views = world.judge_rot();
    world.start(crash_at)?;
    world.give_work(scenario.requests);
    let mut opened = false;
    let mut judged = None;
    let ended = world.run_until(|world| {
        if world.is_open() && !opened {
            opened = true;
            judged = world.check_rot(&views).err();
        }
        judged.is_some() || world.is_idle() || world.is_broken()
    })?;
    if let Some(violation) = judged {
        return Err(violation);
    }
    if ended == Ended::Crash {
        return world.crash(power);
    }
    if world.has_failed() {
        world.crash(false)?;
        world.heal_logs();
        return Ok(());
    }
    if scenario.reopens
        && world.is_open()
        && !world.is_broken()
        && reopen(world, scenario.requests / 4)? == Ended::Crash
    {
        return world.crash(power);
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

/// Destage everything, cut every volume, and let it grow again: what comes back is zero.
fn shrink(world: &mut World) -> Result<Ended, Violation> {
    world.calm();
    for unit in 0..world.units() {
        world.begin_destage_all(unit)?;
    }
    let ended = world.run_until(|world| world.is_destaged() || world.is_broken())?;
    if ended == Ended::Crash || world.is_broken() {
        return Ok(ended);
    }
    for unit in 0..world.units() {
        let sectors = world.sectors(unit);
        world.set_sectors(unit, sectors.div_ceil(3))?;
        world.set_sectors(unit, sectors)?;
        let end = SectorRange::between(sectors.saturating_sub(64), sectors);
        world.send(unit, Ask::Read(end))?;
    }
    world.run_until(|world| world.is_idle())
}

/// Close volumes and cache. Faults go on for a while, so that closing meets them as well.
fn close(world: &mut World, destage: bool) -> Result<Ended, Violation> {
    world.close(destage)?;
    let mut patience = 500;
    let ended = world.run_until(|world| {
        patience -= 1;
        patience == 0 || world.is_closed()
    })?;
    if ended == Ended::Crash {
        return Ok(ended);
    }
    world.calm();
    if world.run_until(|world| world.is_closed())? == Ended::Crash {
        return Ok(Ended::Crash);
    }
    world.close_cache()?;
    world.run_until(|world| world.is_cache_closed())
}

/// All is well from here on: everything must be there, and end.
fn finish(world: &mut World) -> Result<(), Violation> {
    world.calm();
    let mut refusals = 0;
    loop {
        let views = world.judge_rot();
        world.start(None)?;
        world.run_until(|world| world.is_open() || world.has_failed())?;
        if !world.has_failed() {
            world.check_rot(&views)?;
            break;
        }
        refusals += 1;
        world.crash(false)?;
        if !world.heal_logs() || refusals > REFUSALS_MAX {
            return Err(Violation::new(
                "open-refused",
                "refused with nothing wrong any more",
            ));
        }
    }
    verify(world)?;
    world.check_lost()?;
    if world.is_rotten() {
        return world.crash(false);
    }
    for unit in 0..world.units() {
        world.begin_destage_all(unit)?;
    }
    world.run_until(World::is_destaged)?;
    close(world, true)?;
    world.stop(true)
}

/// Read everything.
fn verify(world: &mut World) -> Result<(), Violation> {
    let piece = (REQUEST_BYTES_MAX / SECTOR_BYTES) as u64;
    for unit in 0..world.units() {
        let sectors = world.sectors(unit);
        for start in (0..sectors).step_by(piece as usize) {
            let range = SectorRange::between(start, sectors.min(start + piece));
            while !world.send(unit, Ask::Read(range))? {
                // Buffers come back as the machines rest.
                world.pause()?;
            }
            world.run_until(|world| world.is_idle())?;
        }
    }
    Ok(())
}
