//! What goes wrong, and when.

use fastrand::Rng;
use hdcs_core::base::io::Nanos;

use super::link::End;
use super::manager::Manager;
use super::media;
use super::scenario::StandingClocks;
use super::world::{ClusterWorld, Happening};
use crate::violation::Violation;

/// The longest that a node is down, stands still or is cut off.
const DOWN_MAX_MILLIS: u64 = 3_000;

/// So long that others take a node for dead.
pub(super) fn draw_long_pause(random: &mut Rng) -> Nanos {
    Nanos::from_millis(random.u64(1_000..DOWN_MAX_MILLIS))
}

/// A node stands still just when it writes to the backend.
pub(super) fn stop_beside(world: &mut ClusterWorld, node: usize) {
    if !world.is_calm && world.random.u16(..300) == 0 {
        let life = world.nodes[node].life;
        world.engine.after(Nanos(1), Happening::Stop { node, life });
    }
}

impl ClusterWorld {
    /// Something goes wrong.
    pub(super) fn fault(&mut self) {
        if self.is_calm {
            return;
        }
        let pause = Nanos(self.random.u64(1..self.scenario.fault_pause.0 * 2));
        self.engine.after(pause, Happening::Fault);
        let node = self.random.usize(..self.nodes.len());
        // The primary is where things happen.
        let node = self.primary().map_or(
            node,
            |(primary, _)| if self.random.bool() { primary } else { node },
        );
        match self
            .random
            .u8(..if self.scenario.hurts_media { 20 } else { 16 })
        {
            0..3 => self.crash(node, true),
            3..5 => self.crash(node, false),
            5 => (0..self.nodes.len()).for_each(|node| self.crash(node, true)),
            6..9 => {
                let pause = self.draw_pause();
                self.pause(node, pause);
            }
            9..11 => self.cut_links(node),
            11 if self.random.bool() => self.cut_store(node),
            11 => {
                self.engine.note("leader of the store changes", [0; 4]);
                self.coverage.leader_changes += 1;
                self.keys.leader_changes(self.engine.now());
            }
            12 => self.isolate(node),
            13 => {
                self.slow[node] = 20;
                let pause = self.draw_pause();
                self.engine.after(pause, Happening::Fast { node });
            }
            14..16 => self.break_links(node),
            _ => media::hurt_medium(self, node),
        }
    }

    /// Something goes wrong just when the record changes, or a little later.
    pub(super) fn fault_beside(&mut self) {
        if !self.is_calm && self.random.u8(..4) == 0 {
            let pause = Nanos::from_micros(self.random.u64(1..60_000));
            let node = self.random.usize(..self.nodes.len());
            let life = self.nodes[node].life;
            self.engine.after(pause, Happening::Crash { node, life });
        }
    }

    /// A node is alone for so long that it is taken for dead, and goes on by itself. Sometimes another one is to take the
    /// group at once: then it may still have a lease when nobody else is waited for any more.
    fn isolate(&mut self, node: usize) {
        let pause = Nanos::from_millis(self.random.u64(1_000..2 * DOWN_MAX_MILLIS));
        let others: Vec<usize> = (0..self.nodes.len())
            .filter(|other| *other != node)
            .collect();
        for other in others {
            self.cut_for((node, other), pause);
            self.cut_for((other, node), pause);
        }
        self.store.cut(node, true);
        self.engine.after(pause, Happening::HealStore { node });
        let record = self.store.record();
        let candidates = record.config.members.iter();
        let candidates: Vec<_> = candidates
            .filter(|member| usize::from(member.0) != node)
            .collect();
        if self.primary().is_some_and(|(primary, _)| primary == node)
            && !candidates.is_empty()
            && self.random.u8(..4) > 0
        {
            let taking = record.taking(candidates[self.random.usize(..candidates.len())]);
            self.engine
                .after(Nanos(1), Happening::ManagerWrites(taking, None));
        }
    }

    pub(super) fn draw_pause(&mut self) -> Nanos {
        let max = [20, 300, DOWN_MAX_MILLIS][self.random.usize(..3)];
        Nanos::from_millis(self.random.u64(1..max))
    }

    /// A node goes down: with its power, or its process alone.
    pub(super) fn crash(&mut self, node: usize, is_power: bool) {
        let Some(up) = self.nodes[node].up.take() else {
            return;
        };
        self.engine
            .note("crash", [node as u64, u64::from(is_power), 0, 0]);
        self.coverage.crashes += 1;
        self.media.closed(node);
        for user in up.users() {
            self.shared.lose(user);
            self.leave_client(user);
            self.reader.leave(user);
        }
        let now = self.engine.now();
        let state = &mut self.nodes[node];
        state.life += 1;
        state.inbox.clear();
        (state.writes_fail, state.reads_fail) = (None, false);
        if let Some(local) = state.paused.take() {
            state.clock.go_on(now, local);
        }
        if is_power {
            state.disk.power_cut();
        } else {
            state.disk.process_kill();
        }
        for (pair, end) in self.links.of(node) {
            if let Some(connection) = self.links.close(pair, end) {
                self.tell_closed(connection, pair, end.other(), !is_power);
            }
        }
        let pause = self.draw_pause();
        self.engine.after(pause, Happening::Start { node });
    }

    /// A node stands still.
    pub(super) fn pause(&mut self, node: usize, pause: Nanos) {
        let now = self.engine.now();
        let local = self.nodes[node].now(now);
        if !self.nodes[node].runs() {
            return;
        }
        self.engine.note("pause", [node as u64, 0, 0, 0]);
        self.coverage.pauses += 1;
        self.nodes[node].paused = Some(local);
        let life = self.nodes[node].life;
        let may_stop = self.scenario.clocks == StandingClocks::MayStop;
        let stood = may_stop && self.random.bool();
        self.engine
            .after(pause, Happening::Resume { node, life, stood });
    }

    /// It goes on.
    pub(super) fn resume(&mut self, node: usize, life: u32, stood: bool) -> Result<(), Violation> {
        if self.nodes[node].life != life {
            return Ok(());
        }
        let Some(local) = self.nodes[node].paused.take() else {
            return Ok(());
        };
        self.engine
            .note("resume", [node as u64, u64::from(stood), 0, 0]);
        if stood {
            self.nodes[node].clock.go_on(self.engine.now(), local);
        }
        self.touched.insert(node);
        self.take_inbox(node)?;
        self.watch_again(node);
        self.deliver_stalled();
        Ok(())
    }

    /// Nothing gets through between a node and some others, in one direction or both.
    fn cut_links(&mut self, node: usize) {
        let others = (0..self.nodes.len()).filter(|other| *other != node);
        let others: Vec<usize> = others.filter(|_| self.random.u8(..3) > 0).collect();
        let (out, back) =
            [(true, true), (true, true), (true, false), (false, true)][self.random.usize(..4)];
        let pause = self.draw_pause();
        for other in others {
            let ways = [((node, other), out), ((other, node), back)];
            for (way, _) in ways.into_iter().filter(|(_, is_cut)| *is_cut) {
                self.cut_for(way, pause);
            }
        }
    }

    /// Nothing gets through one way for so long. Ends of a connection there may give it up.
    fn cut_for(&mut self, (from, to): (usize, usize), pause: Nanos) {
        self.engine.note("cut", [from as u64, to as u64, 0, 0]);
        self.coverage.cuts += 1;
        self.links.cut(from, to, true);
        self.engine.after(pause, Happening::Heal { from, to });
        self.break_silent((from, to));
        self.break_silent((to, from));
    }

    fn break_silent(&mut self, pair: (usize, usize)) {
        for end in [End::Leader, End::Member] {
            if let Some(connection) = self.links.present(pair, end)
                && self.random.bool()
            {
                self.tell_closed(connection, pair, end, false);
            }
        }
    }

    /// Something gets through again.
    pub(super) fn heal(&mut self, from: usize, to: usize) {
        self.links.cut(from, to, false);
        self.deliver_stalled();
    }

    fn cut_store(&mut self, node: usize) {
        self.engine
            .note("cut from the store", [node as u64, 0, 0, 0]);
        self.store.cut(node, true);
        let pause = self.draw_pause();
        self.engine.after(pause, Happening::HealStore { node });
    }

    /// A node reaches the store again.
    pub(super) fn heal_store(&mut self, node: usize) {
        self.store.cut(node, false);
        self.watch_again(node);
    }

    /// Connections of a node break in mid-stream.
    fn break_links(&mut self, node: usize) {
        for (pair, _) in self.links.of(node) {
            let connection = self.links.present(pair, End::Leader);
            let Some(connection) = connection.filter(|_| self.random.bool()) else {
                continue;
            };
            self.engine
                .note("breaks", [pair.0 as u64, pair.1 as u64, 0, 0]);
            self.links.lose(connection, &mut self.random);
            self.tell_closed(connection, pair, End::Leader, true);
            self.tell_closed(connection, pair, End::Member, true);
        }
    }

    /// From now on nothing goes wrong.
    pub(super) fn calm(&mut self) {
        self.engine.note("calm", [0; 4]);
        self.is_calm = true;
        self.managers.iter_mut().for_each(Manager::calm);
        self.links.heal();
        self.deliver_stalled();
        media::calm_media(self);
        for node in 0..self.nodes.len() {
            self.slow[node] = 1;
            self.heal_store(node);
            let life = self.nodes[node].life;
            self.engine.after(Nanos(1), Happening::Start { node });
            self.engine.after(
                Nanos(1),
                Happening::Resume {
                    node,
                    life,
                    stood: false,
                },
            );
        }
    }
}
