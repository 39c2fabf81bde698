//! `hdcs top`: a live table of rates, made of the differences between two looks at the counters.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use clap::Args;
use hdcs_api::{Counters, Status, Volume};
use tokio::signal::unix::{SignalKind, signal};

use super::client::Client;
use super::size::show;
use super::{Failure, output};

/// Where the shard stands, if there are several: beside the state.
const SHARD_COLUMN: usize = 2;

/// Clears the screen and goes to its corner.
const CLEAR: &str = "\x1b[2J\x1b[H";

/// Columns and lines of the terminal, if it tells.
fn terminal_size() -> Option<(usize, usize)> {
    // SAFETY: all zeroes is a valid size, which the request fills in.
    let mut size: libc::winsize = unsafe { std::mem::zeroed() };
    let fd = std::io::stdout().as_raw_fd();
    // SAFETY: the request writes one `winsize`.
    let done = unsafe { libc::ioctl(fd, libc::TIOCGWINSZ, &raw mut size) } == 0;
    (done && size.ws_col > 0 && size.ws_row > 0)
        .then(|| (usize::from(size.ws_col), usize::from(size.ws_row)))
}

/// As much of a text as a screen shows without wrapping or scrolling; the last line stays free.
fn fit(text: &str, (columns, lines): (usize, usize)) -> String {
    let lines = text.lines().take(lines.saturating_sub(1));
    let cut = lines.map(|line| line.chars().take(columns).collect::<String>());
    cut.collect::<Vec<_>>().join("\n")
}

/// Show a screen: cut to the terminal if there is one, else as it is.
fn show_screen(text: &str, is_terminal: bool) {
    if is_terminal {
        let fitted = terminal_size().map_or(text.to_owned(), |size| fit(text, size));
        output::line(&format!("{CLEAR}{fitted}"));
    } else {
        output::line(text);
    }
    // A reader that has gone is no error.
    let _ = std::io::stdout().flush();
}

#[derive(Args, Debug)]
pub struct Arguments {
    /// Seconds between two looks
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = parse_interval)]
    interval: f64,
    /// Stop after so many tables [default: until q or Ctrl-C; 1 without a terminal]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    iterations: Option<u64>,
}

fn parse_interval(text: &str) -> Result<f64, String> {
    let seconds: f64 = text
        .parse()
        .map_err(|_| "not a number of seconds".to_owned())?;
    if (0.1..=3600.0).contains(&seconds) {
        Ok(seconds)
    } else {
        Err("between 0.1 and 3600 seconds".to_owned())
    }
}

/// A terminal that passes on single keys, until this is dropped.
struct Keys {
    before: libc::termios,
}

impl Keys {
    fn new() -> Option<Self> {
        let fd = std::io::stdin().as_raw_fd();
        // SAFETY: all zeroes is a valid termios, which tcgetattr fills in.
        let mut before: libc::termios = unsafe { std::mem::zeroed() };
        // SAFETY: a descriptor and a place of the right type.
        if unsafe { libc::tcgetattr(fd, &raw mut before) } != 0 {
            return None;
        }
        let mut single = before;
        single.c_lflag &= !(libc::ICANON | libc::ECHO);
        // SAFETY: as above.
        (unsafe { libc::tcsetattr(fd, libc::TCSANOW, &raw const single) } == 0)
            .then_some(Self { before })
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        let fd = std::io::stdin().as_raw_fd();
        // SAFETY: what tcgetattr returned.
        unsafe { libc::tcsetattr(fd, libc::TCSANOW, &raw const self.before) };
    }
}

/// Resolves when `q` is pressed, or never.
async fn quit_key(is_terminal: bool) {
    if !is_terminal {
        return std::future::pending().await;
    }
    let (pressed, quit) = tokio::sync::oneshot::channel();
    // A thread of its own: reading a terminal blocks, and the process ends without it.
    std::thread::spawn(move || {
        use std::io::{BufReader, Read};
        for byte in BufReader::new(std::io::stdin()).bytes() {
            if matches!(byte, Ok(b'q' | b'Q') | Err(_)) {
                break;
            }
        }
        let _ = pressed.send(());
    });
    let _ = quit.await;
}

pub async fn run(client: &Client, arguments: &Arguments) -> Result<(), Failure> {
    let is_terminal = std::io::stdout().is_terminal() && std::io::stdin().is_terminal();
    let iterations = match arguments.iterations {
        None if !is_terminal => Some(1),
        chosen => chosen,
    };
    let at = |error| Failure::failed(format!("cannot run: signals: {error}"));
    let mut terminate = signal(SignalKind::terminate()).map_err(at)?;
    let _keys = if is_terminal { Keys::new() } else { None };
    tokio::select! {
        ended = show_tables(client, arguments.interval, iterations, is_terminal) => ended,
        _ = tokio::signal::ctrl_c() => Ok(()),
        _ = terminate.recv() => Ok(()),
        () = quit_key(is_terminal) => Ok(()),
    }
}

async fn show_tables(
    client: &Client,
    interval: f64,
    iterations: Option<u64>,
    is_terminal: bool,
) -> Result<(), Failure> {
    let at = |error| Failure::failed(format!("cannot run: signals: {error}"));
    let mut resized = signal(SignalKind::window_change()).map_err(at)?;
    let mut before = look(client).await?;
    let mut shown = 0;
    let mut screen: Option<String> = None;
    while iterations.is_none_or(|most| shown < most) {
        let pause = tokio::time::sleep(Duration::from_secs_f64(interval));
        tokio::pin!(pause);
        loop {
            tokio::select! {
                () = &mut pause => break,
                _ = resized.recv() => if let Some(screen) = &screen {
                    show_screen(screen, is_terminal);
                },
            }
        }
        let now = look(client).await?;
        let status: Status = client.get("/v1/status").await?;
        let seconds = (now.at - before.at).as_secs_f64().max(0.001);
        let table = rates(&before.volumes, &now.volumes, seconds);
        let head = format!(
            "hdcs {}, up {} s, {} clients, {} dirty, memory {} of {}",
            status.version,
            status.uptime_ms / 1000,
            status.connections,
            show(status.dirty_bytes),
            show(status.memory.rss_bytes),
            show(status.memory.max_bytes)
        );
        let text = screen.insert(format!("{head}\n{table}"));
        show_screen(text, is_terminal);
        before = now;
        shown += 1;
    }
    Ok(())
}

struct Look {
    at: Instant,
    volumes: Vec<Volume>,
}

async fn look(client: &Client) -> Result<Look, Failure> {
    let volumes = client.get("/v1/volumes").await?;
    Ok(Look {
        at: Instant::now(),
        volumes,
    })
}

fn rates(before: &[Volume], now: &[Volume], seconds: f64) -> String {
    let earlier: BTreeMap<&str, &Counters> = before
        .iter()
        .filter_map(|volume| Some((volume.name.as_str(), volume.counters.as_ref()?)))
        .collect();
    let has_shards = now.iter().any(|volume| volume.shard.is_some());
    let mut columns = vec![
        "VOLUME",
        "STATE",
        ">READ/s",
        ">WRITE/s",
        ">READ",
        ">WRITE",
        ">HITS",
        ">P99 READ",
        ">P99 WRITE",
        ">DIRTY",
        ">LOG",
        ">DESTAGE",
    ];
    if has_shards {
        columns.insert(SHARD_COLUMN, ">SHARD");
    }
    let mut table = output::table(&columns);
    for volume in now {
        let zero = Counters::default();
        let c = volume.counters.as_ref().unwrap_or(&zero);
        let b = earlier.get(volume.name.as_str()).copied().unwrap_or(c);
        // A counter that went back belongs to a volume that was opened anew.
        let rate = |of: fn(&Counters) -> u64| of(c).saturating_sub(of(b)) as f64 / seconds;
        let hits = rate(|c| c.log_hit_blocks + c.dram_hit_blocks + c.ssd_hit_blocks);
        let misses = rate(|c| c.miss_blocks);
        let latency = volume.latency.clone().unwrap_or_default();
        let mut row = vec![
            volume.name.clone(),
            volume.state.clone(),
            format!("{:.0}", rate(|c| c.reads)),
            format!("{:.0}", rate(|c| c.writes)),
            format!("{}/s", show(rate(|c| c.read_bytes) as u64)),
            format!("{}/s", show(rate(|c| c.write_bytes) as u64)),
            output::percent(hits as u64, (hits + misses) as u64),
            format!("{:.0} µs", latency.read.p99_us),
            format!("{:.0} µs", latency.write.p99_us),
            show(c.dirty_bytes),
            output::percent(c.log_used_bytes, c.log_prepared_bytes),
            format!("{}/s", show(rate(|c| c.destaged_bytes) as u64)),
        ];
        if has_shards {
            row.insert(SHARD_COLUMN, output::shard(volume));
        }
        table.add_row(row);
    }
    output::trimmed(&table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn screen_is_cut_to_its_size() {
        let text = "123456\n12µ4\nthird\nfourth";
        assert_eq!(fit(text, (4, 3)), "1234\n12µ4");
        assert_eq!(fit(text, (80, 24)), text);
        assert_eq!(fit(text, (80, 0)), "");
    }
}
