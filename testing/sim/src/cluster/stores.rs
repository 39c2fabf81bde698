//! What nodes and managers have to do with the store.

use hdcs_core::base::io::Nanos;
use hdcs_core::replication::participant::Role;
use hdcs_core::replication::record::GroupRecord;

use super::keys::Key;
use super::manager::Seen;
use super::store::Fate;
use super::world::{ClusterWorld, Happening};
use super::{Plant, media};
use crate::violation::Violation;

/// Who is not told how asking ended reads the record after so long.
const REREAD: Nanos = Nanos::from_millis(250);

/// Watches that are late, of so many, and by how much at most.
const LATE_ONE_IN: u32 = 20;
const LATE_MAX_MILLIS: u64 = 2_000;
/// A manager stands still at one look of so many, and for how long.
const STANDS_ONE_IN: u32 = 40;
const STANDS_MILLIS: std::ops::Range<u64> = 1_000..6_000;

/// A planted bug has a primary go by a record that the store does not have yet.
fn see_early(world: &mut ClusterWorld, node: usize, record: &GroupRecord) {
    let now = world.nodes[node].now(world.engine.now());
    if world.role(node) != Some(Role::Serves) {
        return;
    }
    let Some(up) = world.nodes[node].up.as_mut() else {
        return;
    };
    let Some(seen) = up.participant.record() else {
        return;
    };
    let (before, after) = (&seen.config, &record.config);
    let is_early = match world.plant {
        Some(Plant::EarlyLeave) => after.members.count() < before.members.count(),
        Some(Plant::EarlyLevel) => {
            after.members == before.members && after.copies_to_commit() < before.copies_to_commit()
        }
        _ => false,
    };
    if is_early {
        up.participant.see(now, record);
    }
}

/// A manager looks at all, and asks for a record if it wants another one.
pub(super) fn manager_looks(world: &mut ClusterWorld, index: usize) {
    let stands = !world.is_calm && world.random.u32(..STANDS_ONE_IN) == 0;
    let pause = if stands { STANDS_MILLIS } else { 50..250 };
    let pause = Nanos::from_millis(world.random.u64(pause));
    world.engine.after(pause, Happening::Manager(index));
    let seen = |node| match world.role(node) {
        None => Seen::Nothing,
        Some(Role::Follows) => Seen::Follows,
        Some(Role::Takes | Role::Serves) => Seen::Leads,
    };
    let seen: Vec<Seen> = (0..world.nodes.len()).map(seen).collect();
    let now = world.engine.now();
    let manager = &mut world.managers[index];
    // Its watch may be late.
    if world.is_calm || world.random.u8(..4) > 0 {
        manager.record = world.store.record().clone();
    }
    // It acts before it hears that it has the key no more.
    let believed = manager.key;
    manager.key = world.keys.keep(index, now);
    world.coverage.keys_lost += u64::from(believed.is_some_and(|key| manager.key != Some(key)));
    let wanted = manager.look(now, &seen, world.operator.places());
    if let Some((record, key)) = wanted.zip(believed.or(manager.key)) {
        let pause = world.scenario.store.draw(&mut world.random);
        world
            .engine
            .after(pause, Happening::ManagerWrites(record, Some(key)));
    }
}

/// What a manager wants is written, if it has the key, or what an operator has asked for.
pub(super) fn manager_writes(
    world: &mut ClusterWorld,
    mut record: GroupRecord,
    key: Option<Key>,
) -> Result<(), Violation> {
    if let Some(key) = key
        && !world.keys.takes(key, world.engine.now())?
    {
        world.engine.note("keyless", [key.manager as u64, 0, 0, 0]);
        world.coverage.keyless += 1;
        return Ok(());
    }
    if world.plant == Some(Plant::BlindManager) {
        record.revision = world.store.record().revision + 1;
    }
    world.write_record(&record)
}

impl ClusterWorld {
    /// A node asks for a record.
    pub(super) fn ask_store(&mut self, node: usize, mut record: GroupRecord) {
        if self.plant == Some(Plant::ForgottenMin) && self.store.record().primary().is_none() {
            record.config.copies_min = self.store.record().config.copies_min;
        }
        let life = self.nodes[node].life;
        let now = self.nodes[node].now(self.engine.now());
        if self.plant == Some(Plant::ServesUnasked)
            && self.role(node) == Some(Role::Takes)
            && let Some(up) = self.nodes[node].up.as_mut()
        {
            return up.participant.see(now, &record);
        }
        see_early(self, node, &record);
        let fate = self.draw_fate(node);
        let late = if fate == Fate::Late {
            self.random.u64(200..2_500)
        } else {
            0
        };
        let pause = self
            .scenario
            .store
            .draw(&mut self.random)
            .plus(Nanos::from_millis(late));
        if fate != Fate::Lost {
            let members = self.store.record().config.members.iter();
            if { members }.any(|member| !record.config.members.contains(member)) {
                media::member_leaves(self);
            }
            self.media.asked(&record);
            self.engine.after(
                pause,
                Happening::Ask {
                    node,
                    life,
                    record,
                    fate,
                },
            );
        }
        if fate != Fate::Told {
            self.coverage.unknown += 1;
            self.engine.after(REREAD, Happening::Reread { node, life });
        }
    }

    fn draw_fate(&mut self, node: usize) -> Fate {
        let one_in = self.scenario.unknown_one_in;
        let is_odd = !self.is_calm && one_in > 0 && self.random.u32(..one_in) == 0;
        match self.random.u8(..3) {
            _ if !self.store.is_reached(node) => Fate::Lost,
            0 if is_odd => Fate::Lost,
            1 if is_odd => Fate::Late,
            _ if is_odd => Fate::AnswerLost,
            _ => Fate::Told,
        }
    }

    /// The store gets to know what a node asks for.
    pub(super) fn ask_arrives(
        &mut self,
        node: usize,
        life: u32,
        record: &GroupRecord,
        fate: Fate,
    ) -> Result<(), Violation> {
        self.write_record(record)?;
        if fate == Fate::Told {
            self.tell(node, life, false);
        }
        Ok(())
    }

    fn tell(&mut self, node: usize, life: u32, is_reread: bool) {
        let record = self.store.record().clone();
        let pause = self.scenario.store.draw(&mut self.random);
        self.engine.after(
            pause,
            Happening::Answer {
                node,
                life,
                record,
                is_reread,
            },
        );
    }

    /// A node reads the record, as soon as it reaches the store.
    pub(super) fn reread(&mut self, node: usize, life: u32) {
        if self.nodes[node].life != life || self.nodes[node].up.is_none() {
            return;
        }
        if self.store.is_reached(node) {
            self.tell(node, life, true);
        } else {
            self.engine.after(REREAD, Happening::Reread { node, life });
        }
    }

    /// A node is told what the store has.
    pub(super) fn answered(&mut self, node: usize, record: &GroupRecord, is_reread: bool) {
        let now = self.nodes[node].now(self.engine.now());
        let Some(up) = self.nodes[node].running() else {
            return;
        };
        let seen = up.participant.record().map(|seen| seen.revision);
        if seen == Some(record.revision) && is_reread {
            up.participant.ask_again(now);
        } else if self.plant == Some(Plant::ForgottenMin) && record.config.is_short() {
            let mut record = record.clone();
            record.config.copies_min = 1;
            up.participant.see(now, &record);
        } else {
            up.participant.see(now, record);
        }
        self.touched.insert(node);
    }

    /// A watch brings the next record to a node, if it gets there.
    pub(super) fn watch(&mut self, node: usize) {
        if !self.nodes[node].runs() || !self.store.is_reached(node) {
            return;
        }
        if let Some(record) = self.store.next_seen(node) {
            self.answered(node, &record, false);
        }
    }

    /// A node gets what it is still to see.
    pub(super) fn watch_again(&mut self, node: usize) {
        for _ in 0..self.store.unseen(node) {
            let pause = self.scenario.store.draw(&mut self.random);
            self.engine.after(pause, Happening::Watch { node });
        }
    }

    /// Put a record in the place of the one before it, if that is the one that is there.
    pub(super) fn write_record(&mut self, record: &GroupRecord) -> Result<(), Violation> {
        let last = self.store.record().clone();
        if !self.store.swap(record)? {
            return Ok(());
        }
        self.engine.note(
            "record",
            [
                record.revision,
                record.epoch,
                record.config.members.count() as u64,
                record.joiners.len() as u64,
            ],
        );
        let needs = |record: &GroupRecord| {
            let config = &record.config;
            (
                config.replicas,
                config.ack,
                config.copies_min,
                config.when_short,
            )
        };
        self.coverage.configured += u64::from(needs(&last) != needs(record));
        let (old, new) = (last.config.members.count(), record.config.members.count());
        self.coverage.joins += new.saturating_sub(old) as u64;
        self.coverage.leaves += old.saturating_sub(new) as u64;
        let nodes = &self.nodes;
        let media = &self.media;
        let come = record.config.members.iter();
        let come = come.filter(|member| !last.config.members.contains(*member));
        // One that was hurt since was whole when it joined.
        let come = come.filter(|member| !media.is_hurt(usize::from(member.0)));
        self.serving.record(
            record,
            come.map(|member| (member, nodes[usize::from(member.0)].superblock())),
        )?;
        self.media.record(record);
        self.fault_beside();
        for node in 0..self.nodes.len() {
            let late = if self.is_calm {
                0
            } else if self.random.u32(..LATE_ONE_IN) == 0 {
                self.random.u64(..LATE_MAX_MILLIS)
            } else {
                self.random.u64(..200)
            };
            let pause = self
                .scenario
                .store
                .draw(&mut self.random)
                .plus(Nanos::from_millis(late));
            self.engine.after(pause, Happening::Watch { node });
        }
        Ok(())
    }
}
