//! What nodes and the manager have to do with the store.

use hdcs_core::base::io::Nanos;
use hdcs_core::replication::participant::Role;
use hdcs_core::replication::record::GroupRecord;

use super::Plant;
use super::manager::Seen;
use super::store::Fate;
use super::world::{ClusterWorld, Happening};
use crate::violation::Violation;

/// Who is not told how asking ended reads the record after so long.
const REREAD: Nanos = Nanos::from_millis(250);

/// A planted bug has a primary go by a record that the store does not have yet.
fn leave_early(world: &mut ClusterWorld, node: usize, record: &GroupRecord) {
    let now = world.nodes[node].now(world.engine.now());
    if world.plant != Some(Plant::EarlyLeave) || world.role(node) != Some(Role::Serves) {
        return;
    }
    if let Some(up) = world.nodes[node].up.as_mut() {
        let seen = up.participant.record();
        let leaves =
            seen.is_some_and(|seen| record.config.members.count() < seen.config.members.count());
        if leaves {
            up.participant.see(now, record);
        }
    }
}

impl ClusterWorld {
    /// A node asks for a record.
    pub(super) fn ask_store(&mut self, node: usize, record: GroupRecord) {
        let life = self.nodes[node].life;
        let now = self.nodes[node].now(self.engine.now());
        if self.plant == Some(Plant::ServesUnasked)
            && self.role(node) == Some(Role::Takes)
            && let Some(up) = self.nodes[node].up.as_mut()
        {
            return up.participant.see(now, &record);
        }
        leave_early(self, node, &record);
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

    /// The manager looks at all, and asks for a record if it wants another one.
    pub(super) fn manager_looks(&mut self) {
        let pause = Nanos::from_millis(self.random.u64(50..250));
        self.engine.after(pause, Happening::Manager);
        let seen = |node| match self.role(node) {
            None => Seen::Nothing,
            Some(Role::Follows) => Seen::Follows,
            Some(Role::Takes | Role::Serves) => Seen::Leads,
        };
        let seen: Vec<Seen> = (0..self.nodes.len()).map(seen).collect();
        let now = self.engine.now();
        if let Some(record) = self.manager.look(now, self.store.record(), &seen) {
            let pause = self.scenario.store.draw(&mut self.random);
            self.engine.after(pause, Happening::ManagerWrites(record));
        }
    }
}
