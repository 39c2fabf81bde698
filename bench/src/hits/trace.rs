//! Traces by model: seeded, so that every run has the same.
//!
//! | trace | model |
//! |---|---|
//! | zipf | each request draws a block by rank, its share falling with rank^-exponent |
//! | + scans | every other burst of 5,000 requests reads blocks once that nobody reads again |
//! | shifting | the popularity moves on by a tenth of the volume, six times |
//! | loop | one pass after the other over 12 % of the volume, in order |
//! | server | after the MSR Cambridge traces: 55 % of the requests go back to what was read a while ago |
//! | | (the distance in requests falls off as a power), 15 % draw from a hot set, 30 % are new, in runs of 1 to 64 |
//! | virtual disk | after the `CloudPhysics` traces: a guest's hot set that drifts, a nightly pass over a fixed |
//! | | sixth of the disk, and a third of all requests to blocks that are read once |

use fastrand::Rng;

/// Blocks of the volume that the models read.
pub const BLOCKS: usize = 50_000;

/// Requests of blocks, in order.
pub struct Trace {
    /// As the table says it.
    pub name: String,
    /// Numbers of 4 KiB blocks.
    pub blocks: Vec<u64>,
    /// What a cache is given in percent of.
    pub footprint: usize,
}

/// Cumulative shares by rank.
struct Zipf(Vec<f64>);

impl Zipf {
    fn new(blocks: usize, exponent: f64) -> Self {
        let mut sum = 0.0;
        let mut cumulative: Vec<f64> = (1..=blocks)
            .map(|rank| {
                sum += (rank as f64).powf(-exponent);
                sum
            })
            .collect();
        for part in &mut cumulative {
            *part /= sum;
        }
        Self(cumulative)
    }

    fn draw(&self, random: &mut Rng) -> u64 {
        let point = random.f64();
        let rank = self.0.partition_point(|&part| part < point);
        // Spread the ranks over the volume.
        (rank.min(self.0.len() - 1) as u64 * 7919) % self.0.len() as u64
    }
}

/// All models, each of `requests` requests.
pub fn models(requests: usize) -> Vec<Trace> {
    let mut random = Rng::with_seed(20_261_121);
    let mut zipf = |exponent: f64| -> Vec<u64> {
        let zipf = Zipf::new(BLOCKS, exponent);
        (0..requests).map(|_| zipf.draw(&mut random)).collect()
    };
    let (mild, steep) = (zipf(0.9), zipf(1.2));
    let scans = with_scans(&mild);
    let shifting = steep.iter().enumerate().map(|(request, &block)| {
        let shift = request * 6 / requests * BLOCKS / 10;
        (block + shift as u64) % BLOCKS as u64
    });
    let shifting = shifting.collect();
    let around = (0..requests as u64).map(|request| request % (BLOCKS as u64 * 12 / 100));
    [
        ("zipf 0.9", mild),
        ("zipf 1.2", steep),
        ("zipf 0.9 + scans", scans),
        ("zipf 1.2, shifting", shifting),
        ("loop over 12 %", around.collect()),
        ("server", server(requests)),
        ("virtual disk", virtual_disk(requests)),
    ]
    .into_iter()
    .map(|(name, blocks)| Trace {
        name: name.into(),
        blocks,
        footprint: BLOCKS,
    })
    .collect()
}

fn with_scans(requests: &[u64]) -> Vec<u64> {
    let mut next = 1_000_000;
    let mut out = Vec::with_capacity(requests.len());
    for (burst, requests) in requests.chunks(5_000).enumerate() {
        if burst % 2 == 0 {
            out.extend(requests);
        } else {
            out.extend(next..next + requests.len() as u64);
            next += requests.len() as u64;
        }
    }
    out
}

fn server(requests: usize) -> Vec<u64> {
    let mut random = Rng::with_seed(20_070_222);
    let hot = Zipf::new(BLOCKS / 10, 0.8);
    let mut out: Vec<u64> = Vec::with_capacity(requests);
    let mut fresh = 0;
    while out.len() < requests {
        let kind = random.u8(..100);
        if kind < 55 && out.len() > 100 {
            // Pareto with a shape of 0.35 above 16 requests: one in ten goes back 10,000 and more.
            let back = 16.0 * (1.0 - random.f64()).powf(-1.0 / 0.35);
            if back < out.len() as f64 {
                out.push(out[out.len() - back as usize]);
                continue;
            }
        } else if kind < 70 {
            out.push(1_000_000 + hot.draw(&mut random));
            continue;
        }
        // Runs are long and rare, so that new blocks are three requests in ten.
        if random.u8(..32) == 0 {
            let run = random.u64(1..=64);
            out.extend(fresh..fresh + run);
            fresh += run;
        }
    }
    out.truncate(requests);
    out
}

fn virtual_disk(requests: usize) -> Vec<u64> {
    let mut random = Rng::with_seed(20_150_216);
    let hot = Zipf::new(BLOCKS / 5, 1.0);
    let (pass, blocks) = (BLOCKS as u64 / 6, BLOCKS as u64);
    let mut once = 2_000_000;
    (0..requests)
        .map(|request| {
            // A "night" is the last eighth of each of six days.
            let hour = request * 48 / requests % 8;
            if hour == 7 && random.u8(..4) != 0 {
                return 1_000_000 + (request as u64) % pass;
            }
            if random.u8(..3) == 0 {
                once += 1;
                return once;
            }
            // The hot set drifts over the whole disk once in the trace.
            let drift = request as u64 * blocks / requests as u64 / 500 * 500;
            (hot.draw(&mut random) + drift) % blocks
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn models_are_the_same_every_time_and_as_long_as_asked_for() {
        let (first, second) = (models(5_000), models(5_000));
        for (first, second) in first.iter().zip(&second) {
            assert_eq!(first.blocks.len(), 5_000, "{}", first.name);
            assert_eq!(first.blocks, second.blocks, "{}", first.name);
        }
    }

    #[test]
    fn models_read_as_much_anew_as_they_say() {
        // A short trace has much that it would read again later.
        for (name, share) in [("server", 0.2..0.45), ("virtual disk", 0.3..0.65)] {
            let traces = models(100_000);
            let trace = traces.iter().find(|trace| trace.name == name).unwrap();
            let distinct = trace.blocks.iter().collect::<BTreeSet<_>>().len();
            let found = distinct as f64 / trace.blocks.len() as f64;
            assert!(share.contains(&found), "{name}: {found}");
        }
    }
}
