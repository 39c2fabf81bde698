//! Child processes: started so that none outlives this program, watched for their CPU time and
//! memory, stopped by their own id.
//!
//! 1. A child dies with the thread that started it (`PR_SET_PDEATHSIG`), also when that is killed.
//! 2. Dropping a [`Server`] stops it: politely, then by force after [`STOP_TIMEOUT`].

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use std::{fs, io, thread};

use crate::failure::{Context, Failure, Result};

/// How long a server may take to become ready: it may have a large log to write at first.
const START_TIMEOUT: Duration = Duration::from_mins(2);
/// How long a server may take to stop when asked.
const STOP_TIMEOUT: Duration = Duration::from_mins(1);
/// How often something is looked at that cannot be waited for.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// CPU time and memory of a process.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// User and system time of all its threads, in microseconds.
    pub cpu_us: f64,
    /// Resident memory in bytes.
    pub rss_bytes: u64,
}

/// A server that runs beside the load.
#[derive(Debug)]
pub struct Server {
    name: String,
    child: Child,
    /// Kept open, so that a later line of the child does not meet a closed pipe.
    stdout: Option<BufReader<ChildStdout>>,
}

/// Let the child get a signal when its parent dies.
pub fn die_with_parent(command: &mut Command) -> &mut Command {
    // SAFETY: prctl is async-signal-safe and touches nothing of the parent.
    unsafe {
        command.pre_exec(|| {
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) == -1 {
                return Err(std::io::Error::last_os_error());
            }
            Ok(())
        })
    }
}

impl Server {
    /// Start a server whose messages go to `log`, and wait until `socket` accepts connections.
    pub fn start_on_socket(
        name: &str,
        command: &mut Command,
        socket: &Path,
        log: &Path,
    ) -> Result<Self> {
        Self::start_when(name, command, log, || UnixStream::connect(socket).is_ok())
    }

    /// Start a server and wait until `ready` says so.
    pub fn start_when(
        name: &str,
        command: &mut Command,
        log: &Path,
        ready: impl Fn() -> bool,
    ) -> Result<Self> {
        let mut server = Self::start_and_leave(name, command, log)?;
        let deadline = Instant::now() + START_TIMEOUT;
        while !ready() {
            server.expect_alive(log)?;
            if Instant::now() > deadline {
                return Err(Failure::new(format!(
                    "{name} is not ready after {START_TIMEOUT:?}"
                )));
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(server)
    }

    /// Start a server and do not wait for anything.
    pub fn start_and_leave(name: &str, command: &mut Command, log: &Path) -> Result<Self> {
        Self::spawn(name, command.stdout(Stdio::null()), log)
    }

    /// Start a server that prints one line when it is ready, and return after that line.
    pub fn start_until_ready(name: &str, command: &mut Command, log: &Path) -> Result<Self> {
        let mut server = Self::spawn(name, command.stdout(Stdio::piped()), log)?;
        let mut stdout = BufReader::new(server.child.stdout.take().context("no standard output")?);
        let read = stdout.read_line(&mut String::new()).context(name)?;
        server.stdout = Some(stdout);
        if read == 0 {
            // It closed its output: it is about to end, and its log says why.
            let _ = server.child.wait();
            server.expect_alive(log)?;
        }
        Ok(server)
    }

    fn spawn(name: &str, command: &mut Command, log: &Path) -> Result<Self> {
        let log_file = File::options()
            .create(true)
            .append(true)
            .open(log)
            .context(log.display())?;
        let child = die_with_parent(command.stdin(Stdio::null()).stderr(log_file))
            .spawn()
            .context(format_args!(
                "cannot start {name} ({})",
                command.get_program().display()
            ))?;
        Ok(Self {
            name: name.to_owned(),
            child,
            stdout: None,
        })
    }

    fn expect_alive(&mut self, log: &Path) -> Result<()> {
        match self.child.try_wait().context(&self.name)? {
            None => Ok(()),
            Some(status) => {
                let text = fs::read_to_string(log).unwrap_or_default();
                let lines: Vec<&str> = text.lines().collect();
                let last = lines[lines.len().saturating_sub(5)..].join("\n  ");
                Err(Failure::new(format!(
                    "{} ended with {status}; its last words:\n  {last}",
                    self.name
                )))
            }
        }
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// CPU time and memory so far.
    pub fn usage(&self) -> Result<Usage> {
        usage_of(self.pid())
    }

    /// SIGKILL, and wait until it is gone.
    pub fn kill(mut self) -> Result<()> {
        self.child.kill().context(&self.name)?;
        self.child.wait().context(&self.name)?;
        Ok(())
    }

    /// SIGTERM, and wait until it is gone.
    pub fn stop(mut self) -> Result<ExitStatus> {
        self.terminate()
    }

    fn terminate(&mut self) -> Result<ExitStatus> {
        if let Some(status) = self.child.try_wait().context(&self.name)? {
            return Ok(status);
        }
        // SAFETY: plain system call; the child has not been waited for, so the id is its own.
        unsafe { libc::kill(self.child.id().cast_signed(), libc::SIGTERM) };
        let deadline = Instant::now() + STOP_TIMEOUT;
        loop {
            if let Some(status) = self.child.try_wait().context(&self.name)? {
                return Ok(status);
            }
            if Instant::now() > deadline {
                self.child.kill().context(&self.name)?;
                self.child.wait().context(&self.name)?;
                return Err(Failure::new(format!(
                    "{} did not stop within {STOP_TIMEOUT:?}",
                    self.name
                )));
            }
            thread::sleep(POLL_INTERVAL);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Err(failure) = self.terminate() {
            eprintln!("{failure}");
        }
    }
}

/// CPU time and memory of a process, of all its threads.
pub fn usage_of(pid: u32) -> Result<Usage> {
    let path = format!("/proc/{pid}/stat");
    let stat = fs::read_to_string(&path).context(&path)?;
    // SAFETY: sysconf reads constants.
    let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    Ok(Usage {
        cpu_us: cpu_us_of_stat(&stat).context(&path)?,
        rss_bytes: field_of_stat(&stat, 24).context(&path)? * page_bytes as u64,
    })
}

/// User and system time in the `stat` of a process or thread, in microseconds.
pub fn cpu_us_of_stat(stat: &str) -> Option<f64> {
    let ticks = field_of_stat(stat, 14)? + field_of_stat(stat, 15)?;
    // SAFETY: sysconf reads constants.
    let tick_hz = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    Some(ticks as f64 * 1e6 / tick_hz as f64)
}

/// A number in it, counted from 1.
fn field_of_stat(stat: &str, field: usize) -> Option<u64> {
    // The second field is the name in parentheses, which may hold anything; field 3 follows it.
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(field - 3)?.parse().ok()
}

/// Run a program to its end; its CPU time in microseconds, with that of its own children.
pub fn run_measured(command: &mut Command) -> Result<f64> {
    let program = command.get_program().display().to_string();
    let child = die_with_parent(command)
        .spawn()
        .context(format_args!("cannot start {program}"))?;
    let mut status = 0;
    // SAFETY: rusage is plain integers, for which zero is valid.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are to live locals; the child is ours and not waited for elsewhere.
    let waited =
        unsafe { libc::wait4(child.id().cast_signed(), &raw mut status, 0, &raw mut usage) };
    if waited == -1 {
        return Err(std::io::Error::last_os_error()).context(program);
    }
    if status != 0 {
        return Err(Failure::new(format!(
            "{program} failed with wait status {status:#x}"
        )));
    }
    Ok(cpu_us(&usage))
}

#[cfg(feature = "stores")]
/// CPU time of this process so far, in microseconds, without its children.
pub fn own_cpu_us() -> Result<f64> {
    // SAFETY: rusage is plain integers, for which zero is valid.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a live local.
    if unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) } == -1 {
        return Err(std::io::Error::last_os_error()).context("getrusage");
    }
    Ok(cpu_us(&usage))
}

fn cpu_us(usage: &libc::rusage) -> f64 {
    let micros = |time: libc::timeval| time.tv_sec as f64 * 1e6 + time.tv_usec as f64;
    micros(usage.ru_utime) + micros(usage.ru_stime)
}

/// Run a program to its end and take what it prints.
pub fn output_of(command: &mut Command) -> Result<String> {
    let program = command.get_program().display().to_string();
    let output = die_with_parent(command.stdin(Stdio::null()))
        .output()
        .context(format_args!("cannot start {program}"))?;
    if !output.status.success() {
        let arguments: Vec<String> = command
            .get_args()
            .map(|a| a.display().to_string())
            .collect();
        return Err(Failure::new(format!(
            "{program} {} ended with {}: {}",
            arguments.join(" "),
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        )));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The processors that this process may run on, by their numbers.
pub fn processors() -> Result<Vec<usize>> {
    // SAFETY: all zeroes is a valid, empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the call writes at most the size of the set to it.
    if unsafe { libc::sched_getaffinity(0, size_of_val(&set), &raw mut set) } < 0 {
        return Err(io::Error::last_os_error()).context("sched_getaffinity");
    }
    let all = 0..libc::CPU_SETSIZE as usize;
    // SAFETY: the set has a bit for each number below its size.
    Ok(all
        .filter(|&number| unsafe { libc::CPU_ISSET(number, &set) })
        .collect())
}

/// Have this thread, and what it starts from now on, run on these processors alone.
pub fn keep_to(processors: &[usize]) -> Result<()> {
    // SAFETY: all zeroes is a valid, empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for &number in processors {
        // SAFETY: the set has a bit for each number that `processors` gave.
        unsafe { libc::CPU_SET(number % libc::CPU_SETSIZE as usize, &mut set) };
    }
    // SAFETY: the call reads the set before it returns.
    if unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) } < 0 {
        return Err(io::Error::last_os_error()).context("sched_setaffinity");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_grows_with_work() {
        let before = usage_of(std::process::id()).unwrap();
        let begin = Instant::now();
        let mut sum = 0u64;
        while begin.elapsed() < Duration::from_millis(100) {
            sum = std::hint::black_box(sum.wrapping_mul(31).wrapping_add(7));
        }
        let after = usage_of(std::process::id()).unwrap();
        assert!(after.cpu_us > before.cpu_us);
        assert!(after.rss_bytes > 0);
    }

    #[test]
    fn server_that_ends_is_an_error_with_its_words() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        let mut command = Command::new("sh");
        command.args(["-c", "echo no luck >&2; exit 3"]);
        let failure = Server::start_until_ready("sh", &mut command, &log)
            .unwrap_err()
            .to_string();
        assert!(failure.contains("no luck"), "{failure}");
    }

    #[test]
    fn program_that_fails_is_an_error() {
        assert!(run_measured(Command::new("sh").args(["-c", "exit 1"])).is_err());
        assert!(
            output_of(Command::new("sh").args(["-c", "echo why >&2; exit 1"]))
                .unwrap_err()
                .to_string()
                .contains("why")
        );
    }
}
