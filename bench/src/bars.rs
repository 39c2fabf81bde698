//! What the product has to reach, and how the measured figure is formed.

use std::fmt::Write as _;

/// Median; 0 of nothing.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_unstable_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        n if n % 2 == 1 => values[n / 2],
        n => f64::midpoint(values[n / 2 - 1], values[n / 2]),
    }
}

/// A bar that the product has to take.
#[derive(Debug)]
pub struct Bar {
    /// What is compared with what.
    pub what: String,
    /// The measured ratio or number; `None` when the run did not include it.
    pub measured: Option<f64>,
    /// What it has to be at least, or at most.
    pub must: f64,
    /// What would be better.
    pub aim: Option<f64>,
    /// Whether more is better.
    pub more: bool,
}

impl Bar {
    /// More is better.
    pub fn at_least(
        what: impl Into<String>,
        measured: Option<f64>,
        must: f64,
        aim: Option<f64>,
    ) -> Self {
        Self {
            what: what.into(),
            measured,
            must,
            aim,
            more: true,
        }
    }

    /// Less is better.
    pub fn at_most(
        what: impl Into<String>,
        measured: Option<f64>,
        must: f64,
        aim: Option<f64>,
    ) -> Self {
        Self {
            more: false,
            ..Self::at_least(what, measured, must, aim)
        }
    }

    /// It in one line, with the verdict.
    pub fn line(&self) -> String {
        let sign = if self.more { "≥" } else { "≤" };
        let reached = |bound: f64, value: f64| {
            if self.more {
                value >= bound
            } else {
                value <= bound
            }
        };
        let verdict = match self.measured {
            None => "not run".into(),
            Some(value) => {
                let word = match (
                    reached(self.must, value),
                    self.aim.is_some_and(|aim| reached(aim, value)),
                ) {
                    (_, true) => "pass, aim reached",
                    (true, false) => "pass",
                    (false, false) => "MISS",
                };
                format!("{value:>7.2}  {word}")
            }
        };
        let aim = self
            .aim
            .map_or(String::new(), |aim| format!(", aim {sign} {aim}"));
        format!(
            "{:<78} {:<24} {verdict}",
            self.what,
            format!("must {sign} {}{aim}", self.must)
        )
    }
}

/// A list of them under a title.
pub fn list(out: &mut String, title: &str, bars: &[Bar]) {
    let _ = writeln!(out, "{title}");
    for bar in bars {
        let _ = writeln!(out, "  {}", bar.line());
    }
}

/// Median over the repetitions of one value by another's in the same repetition; each value comes
/// with the number of its repetition.
#[cfg(feature = "stores")]
pub fn ratio_within(ours: &[(u32, f64)], theirs: &[(u32, f64)]) -> Option<f64> {
    let pairs: Vec<f64> = ours
        .iter()
        .filter_map(|(repetition, value)| {
            let (_, other) = theirs.iter().find(|(other, _)| other == repetition)?;
            Some(value / other)
        })
        .collect();
    (!pairs.is_empty()).then(|| median(pairs))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_few() {
        assert!(median([]).abs() < 1e-9);
        assert!((median([3.0, 1.0, 2.0]) - 2.0).abs() < 1e-9);
        assert!((median([4.0, 1.0]) - 2.5).abs() < 1e-9);
    }

    #[test]
    fn bar_tells_pass_from_miss() {
        let bar = |measured, more| Bar {
            what: "x".into(),
            measured,
            must: 1.0,
            aim: Some(if more { 2.0 } else { 0.5 }),
            more,
        };
        assert!(bar(Some(0.9), true).line().contains("MISS"));
        assert!(bar(Some(1.1), false).line().contains("MISS"));
        assert!(bar(Some(2.0), true).line().contains("aim reached"));
        assert!(bar(Some(0.9), false).line().ends_with("pass"));
        assert!(bar(None, false).line().contains("not run"));
    }
}
