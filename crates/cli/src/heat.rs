//! `hdcs volume heat`: what of a volume is hot in its cache, to look at or to keep, and the warm-up from such a file.

use std::fmt::Write as _;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use clap::Args;
use hdcs_api::WarmedFrom;
use hdcs_core::cache::heat_map::{Heat, HeatMap};
use hdcs_server::catalogue::VolumeName;
use hdcs_server::data_dir::{heat, sealed};
use hyper::Method;
use serde::Serialize;

use super::client::Client;
use super::size::show;
use super::volume::api_path;
use super::{Failure, output};

/// Lines of the histogram.
const LINES: u64 = 16;
/// Characters of one line of it.
const WIDTH: u64 = 48;

#[derive(Args, Debug)]
pub struct Arguments {
    /// Name of the volume
    name: VolumeName,
    /// Write the heat map to a file, for `hdcs volume warm --from`
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// How many bytes are how hot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
struct Parts {
    #[serde(rename = "hot_bytes")]
    hot: u64,
    #[serde(rename = "warm_bytes")]
    warm: u64,
    #[serde(rename = "cool_bytes")]
    cool: u64,
    #[serde(rename = "cold_bytes")]
    cold: u64,
}

impl Parts {
    fn add(&mut self, heat: Heat, bytes: u64) {
        *match heat {
            Heat::Hot => &mut self.hot,
            Heat::Warm => &mut self.warm,
            Heat::Cool => &mut self.cool,
            Heat::Cold => &mut self.cold,
        } += bytes;
    }

    fn cached_bytes(&self) -> u64 {
        self.hot + self.warm + self.cool
    }

    /// `#` hot, `+` warm, `.` cool, blanks cold; nothing that is there is too small to be seen.
    fn bar(&self, all: u64) -> String {
        let mut bar = String::new();
        for (sign, bytes) in [("#", self.hot), ("+", self.warm), (".", self.cool)] {
            let signs = u128::from(bytes) * u128::from(WIDTH) / u128::from(all.max(1));
            bar += &sign.repeat((signs as usize).max(usize::from(bytes > 0)));
        }
        bar
    }
}

/// A part of the volume's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct Stretch {
    offset: u64,
    bytes: u64,
    #[serde(flatten)]
    parts: Parts,
}

/// What a map says, in short.
#[derive(Clone, Debug, Serialize)]
struct Summary {
    bytes: u64,
    unit_bytes: u64,
    #[serde(flatten)]
    parts: Parts,
    histogram: Vec<Stretch>,
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<PathBuf>,
}

impl Summary {
    fn of(map: &HeatMap) -> Self {
        let units = map.bytes().div_ceil(map.unit_bytes());
        let step = units.div_ceil(LINES) * map.unit_bytes();
        let mut parts = Parts::default();
        let mut histogram: Vec<Stretch> = (0..map.bytes().div_ceil(step))
            .map(|line| Stretch {
                offset: line * step,
                bytes: step.min(map.bytes() - line * step),
                parts: Parts::default(),
            })
            .collect();
        for (first, end, heat) in map.runs() {
            parts.add(heat, end - first);
            for stretch in &mut histogram[(first / step) as usize..end.div_ceil(step) as usize] {
                let inside = end.min(stretch.offset + stretch.bytes) - first.max(stretch.offset);
                stretch.parts.add(heat, inside);
            }
        }
        Self {
            bytes: map.bytes(),
            unit_bytes: map.unit_bytes(),
            parts,
            histogram,
            file: None,
        }
    }

    fn text(&self, name: &VolumeName) -> String {
        let mut text = format!(
            "volume {name}: {} in units of {}\n\n",
            show(self.bytes),
            show(self.unit_bytes)
        );
        let parts = &self.parts;
        for (word, bytes, meaning) in [
            (
                "# hot",
                parts.hot,
                "in memory and used, or in the SSD tier and used more than once",
            ),
            (
                "+ warm",
                parts.warm,
                "in memory, or in the SSD tier and used once",
            ),
            (
                ". cool",
                parts.cool,
                "in the SSD tier, not used since it came there",
            ),
            ("  cold", parts.cold, "not cached"),
        ] {
            let share = output::percent(bytes, self.bytes);
            // Writing to a string does not fail.
            let _ = writeln!(text, "{word:8}{:>10}{share:>6}  {meaning}", show(bytes));
        }
        text.push('\n');
        let width = WIDTH as usize + 2;
        for stretch in &self.histogram {
            let bar = stretch.parts.bar(stretch.bytes);
            let share = output::percent(stretch.parts.cached_bytes(), stretch.bytes);
            let _ = writeln!(
                text,
                "{:>10} |{bar:width$}|{share:>5}",
                show(stretch.offset)
            );
        }
        text
    }
}

fn at(path: &Path) -> impl Fn(&dyn std::fmt::Display) -> Failure + '_ {
    move |error| Failure::failed(format!("heat map: {}: {error}", path.display()))
}

/// The map in a file.
fn read(path: &Path) -> Result<HeatMap, Failure> {
    heat::read(path).map_err(|error| at(path)(&format!("{error}: nothing is done")))
}

/// Write a map to a file in the place of an older one; nothing else is written over.
fn save(path: &Path, encoded: &[u8]) -> Result<(), Failure> {
    let is_absent =
        std::fs::symlink_metadata(path).is_err_and(|error| error.kind() == ErrorKind::NotFound);
    if !is_absent && read(path).is_err() {
        let why = "something else than a heat map is there: give another name, or remove it";
        return Err(at(path)(&why));
    }
    sealed::replace(path, encoded).map_err(|error| at(path)(&error))
}

pub async fn run(client: &Client, arguments: &Arguments) -> Result<(), Failure> {
    let name = &arguments.name;
    let encoded = client
        .get_bytes(&format!("{}/heat", api_path(name)))
        .await?;
    let map = HeatMap::parse(&encoded).map_err(|error| {
        Failure::failed(format!(
            "heat map: volume {name}: that of the daemon is not understood: {error}: is it of another version?"
        ))
    })?;
    let mut summary = Summary::of(&map);
    if let Some(path) = &arguments.save {
        save(path, &encoded)?;
        summary.file = Some(path.clone());
    }
    if arguments.json {
        return output::json(&summary);
    }
    match &summary.file {
        None => output::line(summary.text(name).trim_end()),
        Some(path) => output::line(&format!(
            "volume {name}: {} of {} are cached: written to {}",
            show(summary.parts.cached_bytes()),
            show(summary.bytes),
            path.display()
        )),
    }
    Ok(())
}

/// Begin a warm-up from a file.
pub async fn warm_from(
    client: &Client,
    name: &VolumeName,
    path: &Path,
) -> Result<WarmedFrom, Failure> {
    let encoded = read(path)?.encode();
    let target = format!("{}/warm-from", api_path(name));
    Ok(client.send_bytes(Method::POST, &target, encoded).await?)
}

/// What of a map is left out, if anything is.
pub fn left_out(warmed: &WarmedFrom) -> Option<String> {
    let mut parts = Vec::new();
    if warmed.beyond_bytes > 0 {
        parts.push(format!(
            "{} lie beyond the end of the volume (the map is of {})",
            show(warmed.beyond_bytes),
            show(warmed.map_volume_bytes)
        ));
    }
    if warmed.over_bytes > 0 {
        parts.push(format!(
            "{}, the coolest, are more than the cache holds",
            show(warmed.over_bytes)
        ));
    }
    (!parts.is_empty()).then(|| format!("left out: {}", parts.join("; ")))
}

#[cfg(test)]
mod tests {
    use hdcs_core::cache::heat_map::{Gathering, HEAT_BYTES_MAX};

    use super::*;

    const MIB: u64 = 1 << 20;

    fn summary() -> Summary {
        let mut gathering = Gathering::new(32 * MIB, 4);
        (0..256).for_each(|block| gathering.see(block, Heat::Hot));
        (256..768).for_each(|block| gathering.see(block, Heat::Warm));
        gathering.see(8191, Heat::Cool);
        Summary::of(&gathering.finish())
    }

    #[test]
    fn heat_is_summed_up_over_the_volume_and_over_each_stretch() {
        let summary = summary();
        let parts = |hot, warm, cool, all| Parts {
            hot,
            warm,
            cool,
            cold: all - hot - warm - cool,
        };
        assert_eq!(summary.parts, parts(MIB, 2 * MIB, 16 << 10, 32 * MIB));
        assert_eq!(summary.histogram.len(), 16);
        assert_eq!(summary.histogram[0].parts, parts(MIB, MIB, 0, 2 * MIB));
        assert_eq!(summary.histogram[1].parts, parts(0, MIB, 0, 2 * MIB));
        assert_eq!(summary.histogram[2].parts, parts(0, 0, 0, 2 * MIB));
        assert_eq!(summary.histogram[15].parts, parts(0, 0, 16 << 10, 2 * MIB));
    }

    #[test]
    fn heat_shows_as_bars_in_which_nothing_is_too_small() {
        let text = summary().text(&"v".parse().unwrap());
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "volume v: 32 MiB in units of 16 KiB");
        assert!(lines[2].starts_with("# hot        1 MiB    3%"), "{text}");
        let bars = &lines[7..];
        let half = "#".repeat(24) + &"+".repeat(24);
        assert_eq!(bars[0], format!("{:>10} |{half}  | 100%", "0 B"));
        assert_eq!(
            bars[2].trim_end_matches("0%").trim_end(),
            format!("{:>10} |{}|", "4 MiB", " ".repeat(50))
        );
        assert!(bars[15].contains("|. "), "{text}");
    }

    #[test]
    fn heat_map_is_not_written_over_something_else() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("map");
        let encoded = Gathering::new(MIB, 4).finish().encode();
        save(&path, &encoded).unwrap();
        save(&path, &encoded).unwrap();
        assert_eq!(read(&path).unwrap().encode(), encoded);
        std::fs::write(&path, b"precious").unwrap();
        assert!(save(&path, &encoded).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
        std::fs::write(&path, vec![0; HEAT_BYTES_MAX + 1]).unwrap();
        assert!(read(&path).unwrap_err().message.contains("larger than"));
    }
}
