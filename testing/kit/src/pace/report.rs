//! What a run of the model has shown.

use hdcs_core::base::io::Nanos;

/// One window of time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// Writes answered in it.
    pub writes: u64,
    /// Reads answered in it.
    pub reads: u64,
    /// Bytes that destage wrote in it.
    pub destaged_bytes: u64,
    /// Fill of the first volume's log at its end, in thousandths.
    pub fill: u32,
}

/// An answer: when, and after how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) at: Nanos,
    pub(super) took: Nanos,
    pub(super) volume: usize,
    pub(super) is_write: bool,
}

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// One after another from the beginning, each of [`WINDOW`].
    pub windows: Vec<Window>,
    /// Time that the processor worked.
    pub busy: Nanos,
    /// Turns of the loop.
    pub turns: u64,
    /// Spans written by all volumes.
    pub spans: u64,
    /// Bytes that were read from the log.
    pub log_read_bytes: u64,
    /// Time that writes waited to be admitted, in all.
    pub throttled: Nanos,
    pub(super) answers: Vec<Answer>,
}

/// Length of a window.
pub const WINDOW: Nanos = Nanos::from_millis(10);

/// Milliseconds from the beginning.
type Millis = core::ops::Range<u64>;

impl Report {
    /// The windows of a time.
    pub fn within(&self, millis: Millis) -> &[Window] {
        let window = WINDOW.as_millis();
        let end = (millis.end / window) as usize;
        &self.windows[(millis.start / window) as usize..end.min(self.windows.len())]
    }

    /// Writes a second in that time.
    pub fn write_iops(&self, millis: Millis) -> f64 {
        rate(self.within(millis), |window| window.writes)
    }

    /// Reads a second in that time.
    pub fn read_iops(&self, millis: Millis) -> f64 {
        rate(self.within(millis), |window| window.reads)
    }

    /// Writes a second to one volume in that time.
    pub fn write_iops_of(&self, volume: usize, millis: Millis) -> f64 {
        let seconds = (millis.end - millis.start) as f64 / 1000.0;
        let its = |answer: &&Answer| answer.is_write && answer.volume == volume;
        self.answers_in(millis).filter(its).count() as f64 / seconds
    }

    /// Latency of writes in that time that so many of a thousand do not exceed, in microseconds.
    pub fn write_latency(&self, millis: Millis, permille: usize) -> f64 {
        let writes = self.answers_in(millis).filter(|answer| answer.is_write);
        percentile(writes, permille)
    }

    /// The same of reads.
    pub fn read_latency(&self, millis: Millis, permille: usize) -> f64 {
        let reads = self.answers_in(millis).filter(|answer| !answer.is_write);
        percentile(reads, permille)
    }

    /// Writes a second in windows of so many milliseconds, which are windows put together.
    pub fn write_rates(&self, millis: Millis, of: u64) -> Vec<f64> {
        let windows = self.within(millis);
        let each = (of / WINDOW.as_millis()) as usize;
        let whole = windows.chunks_exact(each);
        whole
            .map(|windows| rate(windows, |window| window.writes))
            .collect()
    }

    /// Lowest and highest fill in that time, from 0 to 1.
    pub fn fill(&self, millis: Millis) -> (f64, f64) {
        let fills = self.within(millis).iter().map(|window| window.fill);
        let (low, high) = fills.fold((u32::MAX, 0), |(low, high), fill| {
            (low.min(fill), high.max(fill))
        });
        (f64::from(low) / 1000.0, f64::from(high) / 1000.0)
    }

    fn answers_in(&self, millis: Millis) -> impl Iterator<Item = &Answer> {
        let answers = self.answers.iter();
        answers.filter(move |answer| millis.contains(&answer.at.as_millis()))
    }
}

/// Standard deviation by the mean.
pub fn variation(rates: &[f64]) -> f64 {
    let count = rates.len() as f64;
    let mean = rates.iter().sum::<f64>() / count;
    let squares: f64 = rates.iter().map(|rate| (rate - mean).powi(2)).sum();
    (squares / count).sqrt() / mean
}

fn rate(windows: &[Window], of: impl Fn(&Window) -> u64) -> f64 {
    let seconds = windows.len() as f64 * WINDOW.0 as f64 / 1e9;
    windows.iter().map(of).sum::<u64>() as f64 / seconds
}

fn percentile<'a>(answers: impl Iterator<Item = &'a Answer>, permille: usize) -> f64 {
    let mut took: Vec<u64> = answers.map(|answer| answer.took.0).collect();
    took.sort_unstable();
    let at = (took.len() * permille / 1000).min(took.len().saturating_sub(1));
    took.get(at).copied().unwrap_or(0) as f64 / 1000.0
}
