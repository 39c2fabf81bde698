//! What nobody has set follows from the machine: its memory, its processors, and the room beside the data directory.
//!
//! | setting | chosen |
//! |---|---|
//! | `memory_max_mib` | a quarter of the memory that the process may use, from 1024 to 8192; never more than three quarters of it |
//! | `cache_total_size_mib` | the size of the `cache` file that is there, if its index fits the memory; else a tenth of the free room, from 1024 to 65536, eight times the memory and half of the room at most |
//! | `log_size_mib` | a quarter of `memory_max_mib`, from 512 to 2048; a sixteenth of the free room at most; of that a 64th of what is free, but 16 at least, is taken when a log is made, and the rest as it is needed |
//! | `shards` | one up to four processors; beyond, one for four of them, from 2 to 8, as long as each has 1024 of `memory_max_mib` |
//!
//! A shard takes a whole processor when it is busy, and clients, backends and the kernel need some as well. With less
//! memory each would have less than the smallest usual node has for its one shard. Where `shard_processor` is set, there
//! are as many as it names.
//!
//! The index of the SSD tier takes a 256th of its size in memory, so eight times the memory is a 32nd of it. The index of a
//! write log takes up to a 20th of what the log holds: more memory has room for more that is in logs.
//!
//! Invariants:
//! 1. What the configuration sets is what it sets.
//! 2. What was chosen keeps to the relations of [`Config::check`]; where it would not, the least is taken.

use std::path::{Path, PathBuf};
use std::{fs, io};

use super::{BY_MACHINE, Config, ConfigError};

const MIB: u64 = 1 << 20;

/// What a machine has, in MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Machine {
    /// Memory that the process may use.
    pub memory: u64,
    /// Free room beside the data directory.
    pub free: u64,
    /// The file of the SSD tier that is there already.
    pub cache: Option<u64>,
    /// Processors that the process may use at once; one at least.
    pub processors: u64,
}

impl Machine {
    /// This one, for a data directory, whose cache file would be `cache`. What cannot be known counts as little.
    pub fn here(data: &Path, cache: &Path) -> Self {
        let free = rustix::fs::statvfs(data).map_or(0, |found| found.f_bavail * found.f_frsize);
        let is_file = |found: &fs::Metadata| found.is_file() && found.len() >= MIB;
        let cache = fs::metadata(cache).ok().filter(is_file);
        Self {
            memory: memory_bytes() / MIB,
            free: free / MIB,
            cache: cache.map(|found| found.len() / MIB),
            processors: processors_at_once(),
        }
    }
}

/// The shards of a node that nobody has said the number of.
pub fn shards_of(processors: u64, memory_max_mib: u64) -> usize {
    const FOR_ONE: u64 = 4;
    const MEMORY_MIB: u64 = 1024;
    const MOST: u64 = 8;
    if processors <= FOR_ONE {
        return 1;
    }
    let by_processors = (processors / FOR_ONE).clamp(2, MOST);
    by_processors.min(memory_max_mib / MEMORY_MIB).max(1) as usize
}

/// The processors that this process may run on.
pub fn processors() -> io::Result<Vec<usize>> {
    // SAFETY: all zeroes is a valid, empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the call writes at most the size of the set to it.
    let result = unsafe { libc::sched_getaffinity(0, size_of_val(&set), &raw mut set) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    let all = 0..libc::CPU_SETSIZE as usize;
    // SAFETY: the set has a bit for each number below its size.
    Ok(all
        .filter(|&number| unsafe { libc::CPU_ISSET(number, &set) })
        .collect())
}

/// How many processors this process may run on, and the control groups that it is in let it use at once, rounded down.
fn processors_at_once() -> u64 {
    let count = processors().map_or(1, |found| found.len() as u64);
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let read = |file: &Path| fs::read_to_string(file).ok();
    let of_second = limit_files(&groups, "cpu.max", None).into_iter();
    let of_second = of_second.filter_map(|file| quota(&read(&file)?, None));
    let of_first = limit_files(&groups, "", Some(("cpu", "cpu.cfs_quota_us"))).into_iter();
    let of_first = of_first.filter_map(|file| {
        let period = read(&file.with_file_name("cpu.cfs_period_us"))?;
        quota(&read(&file)?, Some(&period))
    });
    of_second.chain(of_first).fold(count, u64::min).max(1)
}

/// Whole processors that a quota of a control group allows: what it says, `max` or less than nothing being no limit, and a
/// period, which stands behind it or in a file of its own.
fn quota(quota: &str, period: Option<&str>) -> Option<u64> {
    let mut words = quota.split_whitespace();
    let quota = words.next()?.parse::<i64>().ok()?;
    let period = period.or(words.next())?.trim().parse::<u64>().ok()?;
    u64::try_from(quota).ok()?.checked_div(period)
}

/// Memory of the machine, or of the control group that the process is in, if that has less.
fn memory_bytes() -> u64 {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = meminfo.lines().find_map(|line| {
        let rest = line.strip_prefix("MemTotal:")?;
        rest.trim().strip_suffix(" kB")?.parse::<u64>().ok()
    });
    let total = total.unwrap_or(0) * 1024;
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let first = Some(("memory", "memory.limit_in_bytes"));
    let limits = limit_files(&groups, "memory.max", first)
        .into_iter()
        .filter_map(|file| {
            let limit = fs::read_to_string(file).ok()?;
            // In the second version, `max` is none.
            limit.trim().parse::<u64>().ok()
        });
    limits.fold(total, u64::min)
}

/// Where limits may be, by what `/proc/self/cgroup` says: of the groups that the process is in, by either version of
/// control groups, and of those above them. The file has this name in the second version (empty: none is looked for), and
/// is this one of a kind of groups in the first.
fn limit_files(groups: &str, second: &str, first: Option<(&str, &str)>) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':');
        let (_, kinds, group) = (parts.next(), parts.next(), parts.next());
        let (top, file) = match (kinds, first) {
            (Some(""), _) if !second.is_empty() => ("/sys/fs/cgroup".to_owned(), second),
            (Some(kinds), Some((kind, file))) if kinds.split(',').any(|one| one == kind) => {
                (format!("/sys/fs/cgroup/{kind}"), file)
            }
            _ => continue,
        };
        let group = Path::new(&top).join(group.unwrap_or("").trim_start_matches('/'));
        let groups = group
            .ancestors()
            .take_while(|group| group.starts_with(&top));
        files.extend(groups.map(|group| group.join(file)));
    }
    files
}

impl Config {
    /// Choose what nobody has set; whether it suffices for the rest says [`Self::check`]. Returns what was chosen, to be said to the operator, if anything was.
    pub fn fit(&mut self, machine: &Machine) -> Option<String> {
        let sizes = self.fit_sizes(machine);
        let shards = self.fit_shards(machine);
        let all: Vec<String> = sizes.into_iter().chain(shards).collect();
        (!all.is_empty()).then(|| {
            let all = all.join("; ");
            format!("{all}; set them in the configuration file to choose others")
        })
    }

    /// Whether the machine has the memory that it may take.
    pub fn check_machine(&self, machine: &Machine) -> Result<(), ConfigError> {
        let (wanted, there) = (self.node.memory_max_mib, machine.memory);
        // Zero: it is not known.
        if there == 0 || wanted <= there {
            return Ok(());
        }
        Err(ConfigError::Relation(format!(
            "`memory_max_mib` is {wanted}, but the machine, or the control group of this process, has {there} MiB: lower it"
        )))
    }

    /// As many shards as are best, and no more than there is memory for.
    fn fit_shards(&mut self, machine: &Machine) -> Option<String> {
        if !self.node.shards.is_auto() || !self.node.shard_processor.numbers().is_empty() {
            return None;
        }
        let wanted = shards_of(machine.processors, self.node.memory_max_mib);
        let fitted = (2..=wanted).rev().find_map(|count| {
            let mut fitted = self.clone();
            fitted.node.shards.choose(count);
            fitted.check().is_ok().then_some(fitted)
        });
        *self = fitted?;
        let (processors, shards) = (machine.processors, self.node.shards.count());
        Some(format!(
            "threads of the data path for {processors} processors: shards = {shards}"
        ))
    }

    fn fit_sizes(&mut self, machine: &Machine) -> Option<String> {
        let unset = |key: &&str| !self.given.contains(*key);
        let keys: Vec<&str> = BY_MACHINE.iter().copied().filter(unset).collect();
        if keys.is_empty() {
            return None;
        }
        // A cache that was made with more memory may need more for its index than there is now: it is made anew then.
        let without_cache = Machine {
            cache: None,
            ..*machine
        };
        let chosen = [machine, &without_cache].map(|machine| {
            let mut fitted = self.clone();
            fitted.choose(&keys, machine);
            fitted
        });
        let [_, last] = &chosen;
        // If nothing suffices, what is said of it is said of the machine's sizes.
        let fits = |one: &&Self| one.check().is_ok();
        let fitted = chosen.iter().chain([&*self]).find(fits);
        *self = fitted.unwrap_or(last).clone();
        let node = &self.node;
        let chosen: Vec<String> = keys
            .iter()
            .map(|&key| {
                let value = match key {
                    "memory_max_mib" => node.memory_max_mib,
                    "log_size_mib" => node.log_size_mib,
                    _ => node.cache_total_size_mib,
                };
                format!("{key} = {value}")
            })
            .collect();
        Some(format!(
            "sizes for this machine ({} MiB of memory, {} MiB free for the data directory): {}",
            machine.memory,
            machine.free,
            chosen.join(", ")
        ))
    }

    fn choose(&mut self, keys: &[&str], machine: &Machine) {
        let node = &mut self.node;
        if keys.contains(&"memory_max_mib") {
            let wanted = (machine.memory / 4).clamp(1024, 8192);
            node.memory_max_mib = wanted.min((machine.memory / 4 * 3).max(128));
        }
        let memory = node.memory_max_mib;
        // A device or file elsewhere: nobody has said how much of it is ours.
        if keys.contains(&"cache_total_size_mib") && node.cache_path.is_none() {
            let wanted = (machine.free / 10).clamp(1024, 65_536);
            let wanted = wanted.min((memory * 8).max(1024)).min(machine.free / 2);
            let wanted = if wanted < super::CACHE_MIB_MIN {
                0
            } else {
                wanted
            };
            node.cache_total_size_mib = machine.cache.unwrap_or(wanted);
        }
        if keys.contains(&"log_size_mib") {
            let wanted = (memory / 4).clamp(512, 2048);
            node.log_size_mib = wanted.min((machine.free / 16).max(64));
        }
    }
}

#[cfg(test)]
mod tests {
    use hdcs_backend::memory::{Kind, Needs};

    use super::*;
    use crate::config::budget::Budget;

    fn fitted(text: &str, memory: u64, free: u64, cache: Option<u64>) -> (u64, u64, u64) {
        let mut config = Config::parse(text, Path::new("test.toml")).unwrap();
        let machine = Machine {
            memory,
            free,
            cache,
            processors: 4,
        };
        config.fit(&machine);
        config.check().unwrap();
        let node = &config.node;
        (
            node.memory_max_mib,
            node.cache_total_size_mib,
            node.log_size_mib,
        )
    }

    #[test]
    fn sizes_follow_from_memory_and_room() {
        // A small machine, a usual one, a large one.
        assert_eq!(fitted("", 2048, 20_000, None), (1024, 2000, 512));
        assert_eq!(fitted("", 24_000, 400_000, None), (6000, 40_000, 1500));
        assert_eq!(fitted("", 500_000, 8_000_000, None), (8192, 65_536, 2048));
    }

    #[test]
    fn more_memory_than_there_is_is_refused() {
        let machine = |memory| Machine {
            memory,
            free: 20_000,
            cache: None,
            processors: 4,
        };
        let config = Config::parse("memory_max_mib = 2000\n", Path::new("test.toml")).unwrap();
        config.check_machine(&machine(2000)).unwrap();
        config.check_machine(&machine(0)).unwrap();
        let error = config
            .check_machine(&machine(1999))
            .unwrap_err()
            .to_string();
        assert!(error.contains("`memory_max_mib` is 2000"), "{error}");
        assert!(error.contains("has 1999 MiB"), "{error}");
    }

    #[test]
    fn sizes_leave_room_where_there_is_little() {
        assert_eq!(fitted("", 600, 20_000, None), (450, 2000, 512));
        assert_eq!(fitted("", 24_000, 3000, None), (6000, 1024, 187));
        assert_eq!(fitted("", 24_000, 20, None), (6000, 0, 64));
    }

    #[test]
    fn sizes_of_files_that_are_there_stay() {
        assert_eq!(fitted("", 24_000, 400_000, Some(1024)).1, 1024);
    }

    #[test]
    fn sizes_of_a_cache_whose_index_does_not_fit_are_chosen_anew() {
        assert_eq!(fitted("", 600, 20_000, Some(65_536)), (450, 2000, 512));
        let text = "memory_max_mib = 128\n";
        assert_eq!(fitted(text, 24_000, 400_000, Some(40_000)).1, 1024);
    }

    /// Volumes with the usual log that a node takes.
    fn volumes(config: &Config) -> u64 {
        let one = Needs {
            bytes: 1 << 30,
            log_bytes: config.node.log_size_mib * MIB,
            home_bytes: None,
            kind: Kind::File,
            encrypted: false,
            compressed: false,
        };
        let budget = Budget::of(&config.node, &config.volume).unwrap();
        budget.volumes_bytes / one.least_parts().total()
    }

    #[test]
    fn sizes_leave_memory_for_as_many_volumes_as_fixed_ones() {
        let fixed = volumes(&Config::default());
        for memory in (1366..64_000).step_by(97) {
            for free in [20_000, 400_000, 8_000_000] {
                let mut config = Config::default();
                let cache = None;
                config.fit(&Machine {
                    memory,
                    free,
                    cache,
                    processors: 4,
                });
                let found = volumes(&config);
                // The index of a larger SSD tier takes a little.
                assert!(
                    found + found / 20 >= fixed,
                    "{memory} {free}: {found} < {fixed}"
                );
            }
        }
    }

    #[test]
    fn sizes_that_are_set_stay_and_others_fit_them() {
        let text = "memory_max_mib = 128\n";
        assert_eq!(fitted(text, 24_000, 400_000, None), (128, 1024, 512));
        let text = "cache_total_size_mib = 0\nlog_size_mib = 64\n";
        assert_eq!(fitted(text, 24_000, 400_000, None), (6000, 0, 64));
        let text = "cache_path = \"/dev/nvme0n1\"\n";
        assert_eq!(fitted(text, 24_000, 400_000, None).1, 1024);
    }

    #[test]
    fn sizes_are_said_unless_all_are_set() {
        let machine = Machine {
            memory: 2048,
            free: 20_000,
            cache: None,
            processors: 4,
        };
        let said = Config::default().fit(&machine).unwrap();
        let part = "memory_max_mib = 1024, cache_total_size_mib = 2000, log_size_mib = 512";
        assert!(said.contains(part), "{said}");
        let text = "memory_max_mib = 512\ncache_total_size_mib = 64\nlog_size_mib = 64\n";
        let mut set = Config::parse(text, Path::new("test.toml")).unwrap();
        assert_eq!(set.fit(&machine), None);
    }

    #[test]
    fn limits_of_either_version_of_control_groups_are_looked_for() {
        let groups = "12:cpu,cpuacct:/a\n5:memory:/docker/1\n0::/system.slice/hdcs.service\n";
        let of_memory = Some(("memory", "memory.limit_in_bytes"));
        let found = limit_files(groups, "memory.max", of_memory);
        let expected = [
            "/sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/docker/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/system.slice/hdcs.service/memory.max",
            "/sys/fs/cgroup/system.slice/memory.max",
            "/sys/fs/cgroup/memory.max",
        ];
        assert_eq!(found, expected.map(PathBuf::from));
        assert_eq!(limit_files("no group\n", "a", None), Vec::<PathBuf>::new());
        let found = limit_files(groups, "", Some(("cpu", "cpu.cfs_quota_us")));
        let expected = [
            "/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us",
            "/sys/fs/cgroup/cpu/cpu.cfs_quota_us",
        ];
        assert_eq!(found, expected.map(PathBuf::from));
    }

    #[test]
    fn quotas_of_either_version_of_control_groups_are_whole_processors() {
        assert_eq!(quota("max 100000\n", None), None);
        assert_eq!(quota("650000 100000\n", None), Some(6));
        assert_eq!(quota("-1\n", Some("100000\n")), None);
        assert_eq!(quota("250000\n", Some("100000\n")), Some(2));
        assert_eq!(quota("50000 100000", None), Some(0));
        for nonsense in ["", "100000", "1 0", "a b"] {
            assert_eq!(quota(nonsense, None), None, "{nonsense}");
        }
    }

    #[test]
    fn shards_follow_from_processors_and_memory() {
        for (processors, memory_mib, shards) in [
            (1, 8192, 1),
            (2, 8192, 1),
            (4, 8192, 1),
            (5, 8192, 2),
            (8, 8192, 2),
            (15, 8192, 3),
            (16, 8192, 4),
            (64, 8192, 8),
            (1024, 1 << 20, 8),
            // So that each has what a node with one shard has at the least.
            (64, 128, 1),
            (64, 1024, 1),
            (64, 3000, 2),
        ] {
            assert_eq!(
                shards_of(processors, memory_mib),
                shards,
                "{processors} {memory_mib}"
            );
        }
    }

    #[test]
    fn shards_that_are_set_stay_and_others_fit_their_memory() {
        let shards = |text: &str, processors, memory| {
            let mut config = Config::parse(text, Path::new("test.toml")).unwrap();
            let said = config.fit(&Machine {
                memory,
                free: 400_000,
                cache: None,
                processors,
            });
            config.check().unwrap();
            let said = said.is_some_and(|said| said.contains("shards = "));
            (config.node.shards.count(), said)
        };
        assert_eq!(shards("", 2, 64_000), (1, false));
        assert_eq!(shards("", 32, 64_000), (8, true));
        assert_eq!(shards("shards = \"auto\"\n", 32, 64_000), (8, true));
        assert_eq!(shards("shards = 1\n", 32, 64_000), (1, false));
        assert_eq!(shards("shards = 3\n", 2, 64_000), (3, false));
        // The memory that is checked is what the machine has.
        assert_eq!(shards("shards = 12\n", 2, 24_000), (12, false));
        assert_eq!(shards("shard_processor = 1\n", 32, 64_000), (1, false));
        assert_eq!(shards("shard_processor = \"0-2\"\n", 2, 64_000), (3, false));
        assert_eq!(shards("", 32, 16_000), (3, true));
        // What is durable later must fit the buffers of each.
        let text = "memory_max_mib = 8192\nunpersisted_max_kib = 131072\n";
        assert_eq!(shards(text, 32, 64_000).0, 4);
    }

    #[test]
    fn shards_that_are_too_many_for_the_machine_are_told_with_its_memory() {
        let mut config = Config::parse("shards = 64\n", Path::new("test.toml")).unwrap();
        config.fit(&Machine {
            memory: 8_000,
            free: 400_000,
            cache: None,
            processors: 64,
        });
        let error = config.check().unwrap_err().to_string();
        assert!(error.contains("`memory_max_mib` is 2000"), "{error}");
    }

    #[test]
    fn this_machine_has_memory_and_room() {
        let directory = tempfile::tempdir().unwrap();
        let machine = Machine::here(directory.path(), &directory.path().join("cache"));
        assert!(machine.memory > 0 && machine.free > 0 && machine.cache.is_none());
    }
}
