//! A node's clock: it runs at a rate of its own. In some worlds it may stand still while its node is paused.

use hdcs_core::base::io::Nanos;

/// See the module.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    /// World time and local time of the same moment.
    world: Nanos,
    local: Nanos,
    /// Local nanoseconds in a thousand of the world's.
    rate: u64,
}

impl Clock {
    /// A clock that shows `local` at `world` time, and goes on by so many thousandths.
    pub(super) fn new(world: Nanos, local: Nanos, rate: u64) -> Self {
        Self { world, local, rate }
    }

    /// What it shows at a time of the world.
    pub(super) fn at(&self, world: Nanos) -> Nanos {
        let passed = u128::from(world.since(self.world).0) * u128::from(self.rate) / 1000;
        self.local.plus(Nanos(passed as u64))
    }

    /// When it shows this, or more.
    pub(super) fn when(&self, local: Nanos) -> Nanos {
        let left = u128::from(local.since(self.local).0) * 1000;
        let left = left
            .div_ceil(u128::from(self.rate))
            .min(u128::from(u64::MAX / 2));
        self.world.plus(Nanos(left as u64))
    }

    /// It has stood still since it showed `local`, and goes on now.
    pub(super) fn go_on(&mut self, world: Nanos, local: Nanos) {
        (self.world, self.local) = (world, local);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clock_shows_at_least_what_was_waited_for() {
        for rate in [500, 999, 1000, 1001, 2000] {
            let clock = Clock::new(Nanos(17), Nanos(5), rate);
            for local in [5, 6, 1000, 123_456_789] {
                let when = clock.when(Nanos(local));
                assert!(clock.at(when).0 >= local);
                assert!(clock.at(when).0 <= local + 2);
            }
        }
    }

    #[test]
    fn clock_that_stood_still_goes_on_from_there() {
        let mut clock = Clock::new(Nanos(0), Nanos(0), 2000);
        assert_eq!(clock.at(Nanos(10)), Nanos(20));
        clock.go_on(Nanos(100), Nanos(20));
        assert_eq!(clock.at(Nanos(101)), Nanos(22));
    }
}
