//! Checker: what a read may return.
//!
//! 1. A sector holds what was written there, or what it held at first; never anything else.
//! 2. It is not older than what was acknowledged, or returned by another read, before the read was
//!    sent. Writes in flight may be seen or not.
//! 3. After a crash it belongs to the same prefix of the epoch's writes as every other sector.
//! 4. A range that is said to be a hole or zero reads as zeroes.
//! 5. What was cut off since the read was sent may be anything; what the read has of it nobody reads later.

use hdcs_core::base::io::{Extent, ExtentState};
use hdcs_core::base::limits::SECTOR_BYTES;

use crate::content::{Content, WriteId};
use crate::model::{History, Outcome, ReadOp, Seq};
use crate::violation::Violation;

/// Check what a read returned, and remember what it tells. Returns one above the newest write that
/// was certainly seen.
pub fn check_read(
    history: &mut History,
    volume: u32,
    read: ReadOp,
    data: &[u8],
) -> Result<WriteId, Violation> {
    if data.len() != read.range.bytes() {
        return Err(Violation::new(
            "read-length",
            format!("{} bytes for {:?}", data.len(), read.range),
        ));
    }
    let mut seen_end = 0;
    for (index, bytes) in data.chunks(SECTOR_BYTES).enumerate() {
        let sector = read.range.start + index as u64;
        let content = Content::decode(volume, sector, bytes).ok_or_else(|| {
            Violation::new(
                "read-foreign",
                format!(
                    "sector {sector} returned bytes that nobody wrote there: {}",
                    describe(bytes)
                ),
            )
        })?;
        if history.is_kept(sector, read.issued) {
            let seen = check_sector(history, sector, content, read.issued)?;
            seen_end = seen_end.max(seen);
        }
    }
    Ok(seen_end)
}

fn describe(bytes: &[u8]) -> String {
    format!("they start {:02x?}", &bytes[..24])
}

/// Check one sector that a read sent at `issued` returned as `content`.
pub fn check_sector(
    history: &mut History,
    sector: u64,
    content: Content,
    issued: Seq,
) -> Result<WriteId, Violation> {
    let held = &history.sectors[sector as usize];
    let floor_seen = held.seen.iter().find(|&&(_, seq)| seq != 0 && seq < issued);
    let floor_seen = floor_seen.map_or(0, |&(id, _)| id);
    let mut candidate = None;
    let mut candidates = 0;
    let mut passing = false;
    let mut blocked_by = None;
    for &id in held.versions.iter().rev() {
        if history.write(id).content == content && history.may_be_present(id) {
            candidate = Some(id);
            candidates += 1;
            // Until it ended, the backend may have shown it to one and not to the next.
            passing |= history.write(id).direct && history.write(id).ended > issued;
        }
        if id <= floor_seen || history.is_present(id, issued) {
            blocked_by = Some(id);
            break;
        }
    }
    if blocked_by.is_none() && held.base == content {
        candidate = Some(0);
        candidates += 1;
    }
    let Some(found) = candidate else {
        return Err(explain(history, sector, content, issued, blocked_by));
    };
    // What was fetched before a loss says nothing of what is seen after it.
    if held.loose || issued < history.loosened {
        return Ok(0);
    }
    if candidates == 1 {
        narrow(history, sector, found)?;
    }
    if passing {
        return Ok(0);
    }
    // The oldest candidate is the least that can be said.
    let seq = history.tick();
    let seen = &mut history.sectors[sector as usize].seen;
    if found > seen[0].0 {
        *seen = [(found, seq), seen[0]];
    }
    Ok(if candidates == 1 && found > 0 {
        found + 1
    } else {
        0
    })
}

/// `sector` was seen at version `found`: its write is there, and the newer ones are not, as far as
/// a crash decided that.
fn narrow(history: &mut History, sector: u64, found: WriteId) -> Result<(), Violation> {
    raise(history, found);
    let versions = &history.sectors[sector as usize].versions;
    for &id in versions.iter().rev().take_while(|&&id| id > found) {
        let write = history.writes[id as usize];
        if write.direct || matches!(write.outcome, Outcome::Refused | Outcome::Failed) {
            continue;
        }
        let epoch = history.epochs.get_mut(write.epoch);
        if let Some(epoch) = epoch.filter(|epoch| !epoch.mixed) {
            epoch.hi = epoch.hi.min(id);
        }
    }
    check_prefixes(history, sector, found)
}

/// `found` was seen somewhere, so that it has survived, whatever came after it.
pub(crate) fn survived(
    history: &mut History,
    sector: u64,
    found: WriteId,
) -> Result<(), Violation> {
    raise(history, found);
    check_prefixes(history, sector, found)
}

fn raise(history: &mut History, found: WriteId) {
    let write = history.writes[found as usize];
    let epoch = history.epochs.get_mut(write.epoch);
    if let Some(epoch) = epoch.filter(|epoch| found > 0 && !epoch.mixed && !write.direct) {
        epoch.lo = epoch.lo.max(found + 1);
    }
}

fn check_prefixes(history: &History, sector: u64, found: WriteId) -> Result<(), Violation> {
    for (number, epoch) in history.epochs.iter().enumerate() {
        if epoch.lo > epoch.hi {
            return Err(Violation::new(
                "crash-not-a-prefix",
                format!(
                    "sector {sector} shows write {found}: of epoch {number}, write {} survived but write {} did not",
                    epoch.lo - 1,
                    epoch.hi
                ),
            ));
        }
    }
    Ok(())
}

fn explain(
    history: &History,
    sector: u64,
    content: Content,
    issued: Seq,
    blocked_by: Option<WriteId>,
) -> Violation {
    let versions = &history.sectors[sector as usize].versions;
    let what = match content {
        Content::Write(id) if !versions.contains(&id) => {
            let write = history.writes.get(id as usize);
            let cut_off = write
                .is_some_and(|write| write.range.start <= sector && sector < write.range.end());
            let (rule, why) = if cut_off {
                ("read-stale", "which was cut off with the end of the volume")
            } else {
                ("read-foreign", "which was never written there")
            };
            return Violation::new(rule, format!("sector {sector} returned write {id}, {why}"));
        }
        Content::Write(id) => format!("write {id} ({:?})", history.write(id).outcome),
        other => format!("{other:?}"),
    };
    let newest: Vec<_> = versions
        .iter()
        .rev()
        .take(6)
        .map(|&id| (id, history.write(id).outcome))
        .collect();
    let blocked = blocked_by.map_or_else(String::new, |id| {
        let write = history.write(id);
        let epoch = history.epochs.get(write.epoch);
        format!(
            ", though write {id} (epoch {}{}) is in place",
            write.epoch,
            epoch.map_or_else(String::new, |epoch| format!(
                ", which kept writes below {}..={}",
                epoch.lo, epoch.hi
            ))
        )
    });
    Violation::new(
        "read-stale",
        format!(
            "sector {sector} returned {what} to a read sent at {issued}{blocked}; newest versions: {newest:?} over \
             {:?}",
            history.sectors[sector as usize].base
        ),
    )
}

/// Check the answer to a question where data lives: nothing is dirty that was never written.
pub fn check_cache_extents(
    history: &History,
    asked: ReadOp,
    extents: &[Extent],
) -> Result<(), Violation> {
    check_shape(asked, extents)?;
    for extent in extents {
        let sectors = extent.range.start..extent.range.end();
        let mut sectors = sectors.filter(|&sector| history.is_kept(sector, asked.issued));
        match extent.state {
            ExtentState::Dirty => {
                let untouched = sectors.find(|&s| history.sectors[s as usize].versions.is_empty());
                if let Some(sector) = untouched {
                    return Err(Violation::new(
                        "extents-dirty",
                        format!("sector {sector} was never written and is said to be dirty"),
                    ));
                }
            }
            ExtentState::Clean | ExtentState::Cold => {}
            other => {
                return Err(Violation::new(
                    "extents-shape",
                    format!("{other:?} does not tell where data lives"),
                ));
            }
        }
    }
    Ok(())
}

/// Check the answer to an allocation request.
pub fn check_extents(
    history: &History,
    asked: ReadOp,
    extents: &[Extent],
) -> Result<(), Violation> {
    check_shape(asked, extents)?;
    for extent in extents {
        if !matches!(extent.state, ExtentState::Hole | ExtentState::Zero) {
            continue;
        }
        for sector in extent.range.start..extent.range.end() {
            let is_kept = history.is_kept(sector, asked.issued);
            if is_kept && !may_be_zero(history, sector, asked.issued) {
                return Err(Violation::new(
                    "extents-hide-data",
                    format!(
                        "sector {sector} holds data and is said to be {:?}",
                        extent.state
                    ),
                ));
            }
        }
    }
    Ok(())
}

/// At least one run, one after another, within what was asked.
fn check_shape(asked: ReadOp, extents: &[Extent]) -> Result<(), Violation> {
    let mut next = asked.range.start;
    for extent in extents {
        let range = extent.range;
        if range.start != next || range.is_empty() || range.end() > asked.range.end() {
            return Err(Violation::new(
                "extents-shape",
                format!("{extents:?} for {:?}", asked.range),
            ));
        }
        next = range.end();
    }
    if next == asked.range.start {
        return Err(Violation::new(
            "extents-shape",
            format!("no extent for {:?}", asked.range),
        ));
    }
    Ok(())
}

fn may_be_zero(history: &History, sector: u64, issued: Seq) -> bool {
    let held = &history.sectors[sector as usize];
    for &id in held.versions.iter().rev() {
        if history.write(id).content == Content::Zero && history.may_be_present(id) {
            return true;
        }
        if history.is_present(id, issued) {
            return false;
        }
    }
    held.base == Content::Zero
}

#[cfg(test)]
mod tests {
    use hdcs_core::base::io::{Nanos, SectorRange};

    use super::*;

    const ONE: SectorRange = SectorRange::new(0, 1);

    fn history() -> History {
        History::new(vec![Content::Zero; 8])
    }

    fn acked(history: &mut History, range: SectorRange) -> WriteId {
        let id = history.issue_write(range, None);
        history.ack_write(id, Nanos(0));
        id
    }

    fn sees(history: &mut History, sector: u64, content: Content) -> Result<WriteId, &'static str> {
        let issued = history.tick();
        check_sector(history, sector, content, issued).map_err(|violation| violation.rule)
    }

    #[test]
    fn reads_of_acknowledged_data_pass_and_older_ones_do_not() {
        let mut history = history();
        let old = acked(&mut history, ONE);
        let new = acked(&mut history, ONE);
        assert_eq!(sees(&mut history, 0, Content::Write(new)), Ok(new + 1));
        assert_eq!(
            sees(&mut history, 0, Content::Write(old)),
            Err("read-stale")
        );
        assert_eq!(sees(&mut history, 0, Content::Zero), Err("read-stale"));
        assert_eq!(
            sees(&mut history, 1, Content::Write(new)),
            Err("read-foreign")
        );
    }

    #[test]
    fn reads_may_or_may_not_see_what_is_in_flight_but_not_go_back() {
        let mut history = history();
        let first = acked(&mut history, ONE);
        let second = history.issue_write(ONE, None);
        let early = history.issue_read(ONE);
        assert!(sees(&mut history, 0, Content::Write(first)).is_ok());
        assert!(sees(&mut history, 0, Content::Write(second)).is_ok());
        assert_eq!(
            sees(&mut history, 0, Content::Write(first)),
            Err("read-stale")
        );
        let late = check_sector(&mut history, 0, Content::Write(first), early.issued);
        assert!(late.is_ok(), "it was sent before anybody saw the second");
    }

    #[test]
    fn reads_of_a_refused_write_are_caught() {
        let mut history = history();
        let id = history.issue_write(ONE, None);
        history.refuse_write(id);
        assert!(sees(&mut history, 0, Content::Zero).is_ok());
        assert_eq!(sees(&mut history, 0, Content::Write(id)), Err("read-stale"));
    }

    #[test]
    fn reads_after_a_crash_must_agree_on_one_prefix() {
        let mut history = history();
        let ids: Vec<_> = (0..4)
            .map(|s| acked(&mut history, SectorRange::new(s, 1)))
            .collect();
        history.crash();
        assert!(sees(&mut history, 2, Content::Write(ids[2])).is_ok());
        assert_eq!(
            sees(&mut history, 1, Content::Zero),
            Err("read-stale"),
            "an earlier write"
        );
        assert!(
            sees(&mut history, 3, Content::Zero).is_ok(),
            "the last may be lost"
        );
        assert_eq!(
            sees(&mut history, 3, Content::Write(ids[3])),
            Err("read-stale"),
            "it came back"
        );
    }

    #[test]
    fn reads_after_rot_that_nobody_can_tell_may_see_half_a_generation() {
        let mut history = history();
        let ids = [0, 1].map(|sector| acked(&mut history, SectorRange::new(sector, 1)));
        history.crash();
        history.forgive(2);
        history.mix_all();
        assert!(sees(&mut history, 1, Content::Write(ids[1])).is_ok());
        assert!(sees(&mut history, 0, Content::Zero).is_ok());
        let gone_back = sees(&mut history, 1, Content::Zero);
        assert_eq!(gone_back, Err("read-stale"), "within one opening");
        let after = acked(&mut history, ONE);
        history.crash();
        assert!(sees(&mut history, 0, Content::Write(after)).is_ok());
        let lost = sees(&mut history, 0, Content::Write(ids[0]));
        assert_eq!(lost, Err("read-stale"), "what came later is a prefix");
    }

    #[test]
    fn reads_after_rot_miss_no_more_writes_than_it_has_taken() {
        let mut history = history();
        let ids = [0, 1, 2].map(|sector| acked(&mut history, SectorRange::new(sector, 1)));
        history.promise(history.next_write());
        history.crash();
        acked(&mut history, SectorRange::new(3, 1));
        history.promise(history.next_write());
        history.crash();
        history.forgive(2);
        history.mix_all();
        // The newest in either epoch.
        for sector in [2, 3] {
            assert!(
                sees(&mut history, sector, Content::Zero).is_ok(),
                "{sector}"
            );
        }
        for sector in [0, 1] {
            assert_eq!(sees(&mut history, sector, Content::Zero), Err("read-stale"));
            let kept = Content::Write(ids[sector as usize]);
            assert!(sees(&mut history, sector, kept).is_ok(), "{sector}");
        }
    }

    #[test]
    fn reads_after_a_crash_see_whole_writes() {
        let mut history = history();
        let id = acked(&mut history, SectorRange::new(0, 4));
        history.crash();
        assert!(sees(&mut history, 0, Content::Write(id)).is_ok());
        assert_eq!(sees(&mut history, 1, Content::Zero), Err("read-stale"));
    }

    #[test]
    fn reads_after_a_crash_see_what_was_promised() {
        let mut history = history();
        let id = acked(&mut history, ONE);
        let flush = history.issue_flush();
        history.ack_flush(flush);
        acked(&mut history, ONE);
        history.crash();
        assert_eq!(sees(&mut history, 0, Content::Zero), Err("read-stale"));
        assert!(sees(&mut history, 0, Content::Write(id)).is_ok());
    }

    #[test]
    fn reads_with_wrong_bytes_or_length_are_caught() {
        let mut history = history();
        let id = acked(&mut history, ONE);
        let mut bytes = [0; SECTOR_BYTES];
        Content::Write(id).fill(7, 0, &mut bytes);
        let read = history.issue_read(ONE);
        assert!(check_read(&mut history, 7, read, &bytes).is_ok());
        let short = check_read(&mut history, 7, read, &bytes[..256]);
        assert_eq!(short.unwrap_err().rule, "read-length");
        bytes[100] ^= 1;
        let flipped = check_read(&mut history, 7, read, &bytes);
        assert_eq!(flipped.unwrap_err().rule, "read-foreign");
    }

    #[test]
    fn extents_that_hide_data_or_leave_gaps_are_caught() {
        let mut history = history();
        acked(&mut history, SectorRange::new(2, 2));
        let asked = history.issue_read(SectorRange::new(0, 4));
        let extent = |start, count, state| Extent {
            range: SectorRange::new(start, count),
            state,
        };
        let rule = |extents: &[Extent]| {
            check_extents(&history, asked, extents)
                .err()
                .map(|violation| violation.rule)
        };
        let hole = extent(0, 2, ExtentState::Hole);
        assert_eq!(rule(&[hole, extent(2, 2, ExtentState::Data)]), None);
        assert_eq!(rule(&[hole]), None, "it may stop early");
        assert_eq!(
            rule(&[extent(0, 3, ExtentState::Hole)]),
            Some("extents-hide-data")
        );
        assert_eq!(
            rule(&[hole, extent(3, 1, ExtentState::Data)]),
            Some("extents-shape")
        );
        assert_eq!(rule(&[]), Some("extents-shape"));
    }
}
