//! Pictures of the results, by gnuplot: SVG to embed, PNG to look at.
//!
//! The script and its data are kept beside each picture, so that it can be drawn anew.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::Command;

use crate::bars::median;
use crate::compare::Findings;
use crate::failure::{Context, Result};
use crate::hits::Row;
use crate::peers::{Peer, Place};
use crate::process;
use crate::profiles;
use crate::results::Directory;

/// Style that all pictures share.
const STYLE: &str = "\
set border 3 lc rgb '#888888'
set tics nomirror out scale 0.5 tc rgb '#333333'
set grid y lc rgb '#e4e4e4' lt 1 lw 1
set title font ',15' offset 0,0.3
";

/// A line of a diagram.
pub struct Series {
    /// Name in the legend.
    pub name: String,
    /// `#rrggbb`.
    pub colour: &'static str,
    /// Points.
    pub points: Vec<(f64, f64)>,
}

/// Colour of a peer: what is compared with is muted, HDCS is not.
fn colour(peer: Peer) -> &'static str {
    match peer {
        Peer::Device => "#999999",
        Peer::DeviceDurable => "#616161",
        Peer::Nbdkit => "#c8a25a",
        Peer::Qemu => "#8d6e63",
        Peer::OnWrite | Peer::DramHit | Peer::Sustained => "#1565c0",
        Peer::OnFlush | Peer::SsdHit | Peer::Four | Peer::SustainedFour => "#2e9e5b",
        Peer::Miss | Peer::SustainedMemory | Peer::Beside => "#c2185b",
    }
}

/// Draw `body` as NAME.svg and NAME.png.
fn draw(body: &str, size: (u32, u32), results: &Directory, name: &str) -> Result<()> {
    let (width, height) = size;
    let mut script = String::new();
    let svg = results.file(&format!("{name}.svg"));
    let png = results.file(&format!("{name}.png"));
    let outputs = [
        ("svg dynamic", "sans,12", svg, ""),
        // Twice the pixels, for dense screens.
        ("pngcairo", "sans,12", png, " fontscale 1.6 linewidth 1.8"),
    ];
    for (terminal, font, path, scale) in outputs {
        let (width, height) = if scale.is_empty() {
            (width, height)
        } else {
            (width * 2, height * 2)
        };
        let _ = writeln!(
            script,
            "reset\nset terminal {terminal} size {width},{height} font '{font}' background rgb 'white'{scale}\n\
             set output '{}'\n{STYLE}{body}\nunset output",
            path.display()
        );
    }
    let file = results.file(&format!("raw/{name}.gnuplot"));
    std::fs::write(&file, script).context(file.display())?;
    process::output_of(Command::new("gnuplot").arg(&file)).map(drop)
}

/// Text of a gnuplot string.
fn quoted(text: &str) -> String {
    format!(
        "\"{}\"",
        text.replace(['"', '\\'], "").replace('_', "\\\\_")
    )
}

/// The part of a distribution that is slower than a quantile, spread out: 50 % is 0.3, 99 % is 2,
/// 99.99 % is 4.
fn spread(quantile: f64) -> f64 {
    -(1.0 - quantile).log10()
}

/// Latency by quantile, from counts by nanoseconds.
pub fn latency_curve(histogram: &[(u64, u64)]) -> Vec<(f64, f64)> {
    let total: u64 = histogram.iter().map(|(_, count)| count).sum();
    let mut below = 0;
    let mut points = Vec::new();
    for (ns, count) in histogram {
        below += count;
        // The very last bin would be at infinity; it holds the slowest request alone.
        if below < total {
            let x = spread(below as f64 / total as f64);
            if (0.0..=5.0).contains(&x) {
                points.push((x, *ns as f64 / 1000.0));
            }
        }
    }
    points
}

/// Latency curves of one load.
pub fn latency(title: &str, series: &[Series], results: &Directory, name: &str) -> Result<()> {
    let mut body = format!(
        "set title {}\nset logscale y\nset ylabel 'latency, µs'\nset xlabel 'share of requests that were faster'\n\
         set xrange [0:4.3]\nset xtics ('0' 0, '50 %%' 0.301, '90 %%' 1, '99 %%' 2, '99.9 %%' 3, '99.99 %%' 4)\n\
         set grid x y lc rgb '#e4e4e4' lt 1 lw 1\nset key top left reverse Left samplen 2\n\
         set format y '%.0f'\n",
        quoted(title)
    );
    let mut plots = Vec::new();
    for (index, line) in series
        .iter()
        .filter(|line| !line.points.is_empty())
        .enumerate()
    {
        let _ = writeln!(body, "$line{index} << EOD");
        for (x, y) in &line.points {
            let _ = writeln!(body, "{x:.5} {y:.3}");
        }
        body.push_str("EOD\n");
        plots.push(format!(
            "$line{index} with lines lw 2.5 lc rgb '{}' title {}",
            line.colour,
            quoted(&line.name)
        ));
    }
    if plots.is_empty() {
        return Ok(());
    }
    let _ = writeln!(body, "plot {}", plots.join(", "));
    draw(&body, (800, 480), results, name)
}

/// Requests in each second of a run.
pub fn seconds(per_second: &[f64], mean: f64, results: &Directory, name: &str) -> Result<()> {
    let mut body = String::from(
        "set title 'Steady state: 4k random write, depth 32, log overrun four times'\n\
         set ylabel 'thousand requests a second'\nset xlabel 'seconds'\nset yrange [0:*]\nset key top right samplen 2\n\
         $data << EOD\n",
    );
    for (second, iops) in per_second.iter().enumerate() {
        let _ = writeln!(body, "{second} {:.3}", iops / 1000.0);
    }
    let _ = writeln!(
        body,
        "EOD\nplot $data with lines lw 2.5 lc rgb '#1565c0' title 'each second', \
         {mean} / 1000.0 with lines lw 1.5 lc rgb '#999999' title 'mean', \
         {mean} / 2000.0 with lines lw 1.5 dt 2 lc rgb '#c2185b' title 'half of the mean'"
    );
    draw(&body, (800, 400), results, name)
}

/// Bars of requests a second and latency curves, one of each for every profile.
pub fn comparison(findings: &Findings, results: &Directory) -> Result<()> {
    let mut bars: Vec<Panel> = Vec::new();
    for profile in profiles::all() {
        let mut by_peer = Vec::new();
        let mut series = Vec::new();
        for peer in Peer::ALL {
            let samples: Vec<_> = findings
                .samples
                .iter()
                .filter(|s| {
                    s.profile == profile.name && s.peer == peer.name() && s.place == Place::Disk
                })
                .collect();
            if samples.is_empty() {
                continue;
            }
            let value = median(samples.iter().map(|s| s.outcome.iops));
            by_peer.push(PanelBar {
                name: peer.name(),
                colour: colour(peer),
                value,
                label: thousands(value),
            });
            let mut merged: BTreeMap<u64, u64> = BTreeMap::new();
            for (ns, count) in samples.iter().flat_map(|s| &s.outcome.histogram) {
                *merged.entry(*ns).or_default() += count;
            }
            let merged: Vec<(u64, u64)> = merged.into_iter().collect();
            series.push(Series {
                name: peer.name().into(),
                colour: colour(peer),
                points: latency_curve(&merged),
            });
        }
        if !by_peer.is_empty() {
            latency(
                profile.title,
                &series,
                results,
                &format!("latency-{}", profile.name),
            )?;
            if profile.load.rate.is_none() {
                bars.push(Panel {
                    title: profile.title,
                    bars: by_peer,
                });
            }
        }
    }
    if bars.is_empty() {
        Ok(())
    } else {
        panels(None, &bars, results, "iops")
    }
}

/// Horizontal bars that compare with one another.
pub struct Panel<'a> {
    /// What they measure.
    pub title: &'a str,
    /// From the top.
    pub bars: Vec<PanelBar<'a>>,
}

/// One of them.
pub struct PanelBar<'a> {
    /// Whose it is.
    pub name: &'a str,
    /// `#rrggbb`.
    pub colour: &'a str,
    /// Its length.
    pub value: f64,
    /// What is written at its end.
    pub label: String,
}

/// Panels of bars, two in a row.
pub fn panels(
    title: Option<&str>,
    panels: &[Panel],
    results: &Directory,
    name: &str,
) -> Result<()> {
    let rows = panels.len().div_ceil(2);
    let (title, top, height) = match title {
        Some(title) => (format!(" title {} font ',15'", quoted(title)), 0.74, 80),
        None => (String::new(), 0.93, 40),
    };
    let mut body = format!(
        "set multiplot layout {rows},2{title} margins 0.13,0.97,0.02,{top} spacing 0.15,0.09\n\
         set style fill solid noborder\nunset key\nset xrange [0:*]\nset grid x lc rgb '#e4e4e4' lt 1 lw 1\nunset grid\n\
         set border 2\nset xtics format ''\nunset xtics\n"
    );
    for (index, Panel { title, bars }) in panels.iter().enumerate() {
        let most = bars.iter().map(|bar| bar.value).fold(0.0, f64::max);
        let tics: Vec<String> = bars
            .iter()
            .enumerate()
            .map(|(row, bar)| format!("'{}' {}", bar.name, bars.len() - row))
            .collect();
        let _ = writeln!(
            body,
            "set title {} font ',13'\nset yrange [0.4:{}]\nset ytics ({}) scale 0\nset xrange [0:{}]\n$bars{index} << EOD",
            quoted(title),
            bars.len() as f64 + 0.6,
            tics.join(", "),
            most * 1.25
        );
        for (row, bar) in bars.iter().enumerate() {
            let rgb = u32::from_str_radix(&bar.colour[1..], 16).unwrap_or(0);
            let _ = writeln!(
                body,
                "{} {} {rgb} \"{}\"",
                bar.value,
                bars.len() - row,
                bar.label
            );
        }
        let _ = writeln!(
            body,
            "EOD\nplot $bars{index} using (0):2:(0):1:($2-0.36):($2+0.36):3 with boxxyerror lc rgb variable, \
             '' using 1:2:4 with labels left offset 0.6,0 tc rgb '#333333'"
        );
    }
    body.push_str("unset multiplot\n");
    draw(&body, (960, 190 * rows as u32 + height), results, name)
}

/// Hit rates by the size of the cache, a panel for each trace; what ships is the thick line.
pub fn hits(rows: &[Row], results: &Directory) -> Result<()> {
    let colours = [
        "#999999", "#c8a25a", "#8d6e63", "#7b1fa2", "#c2185b", "#2e9e5b", "#1565c0",
    ];
    let panels: Vec<&[Row]> = rows.chunk_by(|a, b| a.trace == b.trace).collect();
    let layout = panels.len().div_ceil(2);
    let mut body = format!(
        "set multiplot layout {layout},2\nset xlabel 'cache, %'\nset ylabel 'hits, %'\n\
         set key outside right top samplen 2 font ',9'\n"
    );
    for (number, panel) in panels.iter().enumerate() {
        let _ = writeln!(
            body,
            "set title {}\n$p{number} << EOD",
            quoted(&panel[0].trace)
        );
        for row in *panel {
            let _ = write!(body, "{}", row.percent);
            for (_, hits) in &row.hits {
                let _ = match hits {
                    Some(hits) => write!(body, " {hits:.2}"),
                    None => write!(body, " NaN"),
                };
            }
            body.push('\n');
        }
        let policies = &panel[0].hits;
        let lines: Vec<String> = (0..policies.len())
            .map(|index| {
                let colour = colours.get(index).unwrap_or(&"#0d9ddb");
                let width = if policies[index].0.starts_with("shipped") {
                    3.0
                } else {
                    1.5
                };
                format!(
                    "$p{number} using 1:{} with linespoints pt 7 ps 0.4 lw {width} lc rgb '{colour}' title {}",
                    index + 2,
                    quoted(policies[index].0)
                )
            })
            .collect();
        let _ = writeln!(body, "EOD\nplot {}", lines.join(", "));
    }
    body.push_str("unset multiplot\n");
    draw(&body, (960, 320 * layout as u32), results, "hits")
}

/// Requests a second as people say them.
pub fn thousands(iops: f64) -> String {
    if iops >= 10_000.0 {
        format!("{:.0}k", iops / 1000.0)
    } else if iops >= 1000.0 {
        format!("{:.1}k", iops / 1000.0)
    } else {
        format!("{iops:.0}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn curve_rises_to_the_slowest() {
        let curve = latency_curve(&[(1000, 50), (2000, 40), (9000, 9), (50_000, 1)]);
        assert_eq!(curve.len(), 3);
        assert!((curve[0].0 - 0.301).abs() < 0.001 && (curve[0].1 - 1.0).abs() < 1e-9);
        assert!((curve[2].0 - 2.0).abs() < 1e-6 && (curve[2].1 - 9.0).abs() < 1e-9);
    }

    #[test]
    fn pictures_are_drawn() {
        let directory = tempfile::tempdir().unwrap();
        let results = Directory::at(directory.path().to_path_buf()).unwrap();
        let line = Series {
            name: "a_b".into(),
            colour: "#1565c0",
            points: vec![(0.3, 10.0), (2.0, 100.0)],
        };
        latency("T", &[line], &results, "latency").unwrap();
        seconds(&[10.0, 20.0], 15.0, &results, "steady").unwrap();
        let bar = |name, value| PanelBar {
            name,
            colour: "#999999",
            value,
            label: thousands(value),
        };
        let panel = Panel {
            title: "T",
            bars: vec![bar("a", 5.0), bar("b", 7.0)],
        };
        panels(Some("title"), &[panel], &results, "iops").unwrap();
        let row = Row {
            trace: "t_1".into(),
            requests: 10,
            percent: 5,
            blocks: 1,
            hits: vec![("LRU", Some(40.0)), ("shipped", None)],
        };
        hits(&[row], &results).unwrap();
        for name in ["latency", "steady", "iops", "hits"] {
            for extension in ["svg", "png"] {
                let bytes = std::fs::metadata(results.file(&format!("{name}.{extension}")))
                    .unwrap()
                    .len();
                assert!(bytes > 1000, "{name}.{extension} has {bytes} bytes");
            }
        }
    }
}
