//! How many methods the types of a crate have, so that none grows into one that nobody can read.
//!
//! Counted are the functions of all inherent `impl` blocks of a type in one crate, tests aside. The sources are formatted,
//! so a block and its functions are told by how far they are indented.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// A type with more methods is several machines that share their state.
const METHODS_MAX: usize = 60;

/// Types that have more, how many at most, and why. None may grow; who makes one smaller lowers its number here.
const LARGE: &[(&str, &str, usize, &str)] = &[
    (
        "core",
        "Volume",
        95,
        "what is left of it leads its machines in turn; failed and silent logs, the mark of the log's end and scrubs come out next",
    ),
    (
        "core",
        "WriteLog",
        70,
        "what its entries, spans and flights are is asked for by many; the open span comes out next",
    ),
    (
        "core",
        "ReadCache",
        70,
        "whatever volumes, drivers and the control plane ask of both tiers; each passes the question on",
    ),
    (
        "core",
        "ObjectVolume",
        151,
        "opening, checkpoints, collection and writes still share its fields",
    ),
    (
        "server",
        "Node",
        65,
        "every operation that leads several of its parts; moves between shards come out next",
    ),
    (
        "server",
        "Shard",
        77,
        "its turn, connections and commands share its tables; the ways of connections and volumes to other shards come out next",
    ),
    (
        "server",
        "ShardState",
        64,
        "what actions of volumes become; the cache and its device come out next",
    ),
    (
        "sim",
        "World",
        287,
        "whatever a fault or an audit touches; it decides nothing, and lies in files by fault and audit",
    ),
    ("sim", "StoreWorld", 81, "as above, of a local store alone"),
    ("sim", "ClusterWorld", 74, "as above, of several nodes"),
    ("sim", "ObjectsWorld", 76, "as above, of objects alone"),
];

/// Check all sources below `crates/` and `testing/`.
pub fn check(root: &Path, files: &[PathBuf], findings: &mut Vec<String>) {
    let mut counts: BTreeMap<(String, String), usize> = BTreeMap::new();
    for path in files {
        let mut parts = path
            .components()
            .map(|part| part.as_os_str().to_string_lossy());
        let (folder, of, source) = (parts.next(), parts.next(), parts.next());
        let is_ours = matches!(folder.as_deref(), Some("crates" | "testing"));
        let is_source = is_ours && source.as_deref() == Some("src");
        let is_test = path.to_string_lossy().contains("tests");
        let Some(of) = of.filter(|_| is_source && !is_test) else {
            continue;
        };
        if path.extension().is_none_or(|extension| extension != "rs") {
            continue;
        }
        for (name, count) in methods(&fs::read_to_string(root.join(path)).unwrap_or_default()) {
            *counts.entry((of.to_string(), name)).or_default() += count;
        }
    }
    judge(&counts, findings);
}

fn judge(counts: &BTreeMap<(String, String), usize>, findings: &mut Vec<String>) {
    for ((of, name), count) in counts {
        let listed = LARGE.iter().find(|(c, n, ..)| c == of && n == name);
        let max = listed.map_or(METHODS_MAX, |(_, _, max, _)| *max);
        if *count > max {
            findings.push(format!(
                "xtask/src/methods.rs:1: `{name}` in {of} has {count} methods, more than {max}: give a part of it its own state"
            ));
        }
    }
    for (of, name, max, _) in LARGE {
        let count = counts.get(&((*of).to_owned(), (*name).to_owned()));
        let count = count.copied().unwrap_or(0);
        // A few more or less at a time are nobody's business.
        if count + 10 < *max || count <= METHODS_MAX {
            findings.push(format!(
                "xtask/src/methods.rs:1: `{name}` in {of} has {count} methods now, not {max}: lower its number"
            ));
        }
    }
}

/// The methods of each type in a source.
fn methods(text: &str) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    let mut block: Option<(String, usize)> = None;
    for line in text.lines() {
        let code = line.trim_start();
        let indent = line.len() - code.len();
        if code.starts_with("mod tests {") {
            break;
        }
        if let Some(name) = inherent(code) {
            block = Some((name, indent));
            continue;
        }
        let Some((name, outer)) = &block else {
            continue;
        };
        if code == "}" && indent == *outer {
            block = None;
        } else if indent == outer + 4 && is_function(code) {
            *counts.entry(name.clone()).or_default() += 1;
        }
    }
    counts
}

/// The type of an inherent `impl` block that begins with this line.
fn inherent(code: &str) -> Option<String> {
    let rest = code.strip_prefix("impl")?;
    if rest.contains(" for ") || !rest.starts_with([' ', '<']) {
        return None;
    }
    let mut depth = 0;
    let rest = rest.trim_start_matches(|c| {
        match c {
            '<' => depth += 1,
            '>' => depth -= 1,
            _ => return depth > 0 || c == ' ',
        }
        true
    });
    let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_' && c != ':')?;
    let name = rest[..end].rsplit("::").next()?;
    (!name.is_empty()).then(|| name.to_owned())
}

fn is_function(code: &str) -> bool {
    let mut words = code.split_whitespace();
    words.find(|word| {
        !(word.starts_with("pub")
            || ["const", "async", "unsafe", "in"].contains(word)
            || word.ends_with(')'))
    }) == Some("fn")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_are_those_of_inherent_blocks() {
        let text = "impl World {\n    pub(super) fn a() {\n        fn inner() {}\n    }\n\n    const fn b() {}\n}\n\
                    impl<T: Into<u8>> Ring<T> {\n    pub async fn c() {}\n}\nimpl Clone for World {\n    fn d() {}\n}\n\
                    #[cfg(test)]\nmod tests {\n    impl World {\n        fn e() {}\n    }\n}\n";
        let found = methods(text);
        let expected = [("Ring".to_owned(), 1), ("World".to_owned(), 2)];
        assert_eq!(found.into_iter().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn type_that_grows_or_shrinks_is_found() {
        let listed = LARGE.iter();
        let mut counts: BTreeMap<_, _> = listed
            .map(|(of, name, max, _)| (((*of).to_owned(), (*name).to_owned()), *max))
            .collect();
        let findings_of = |counts: &BTreeMap<_, _>| {
            let mut findings = Vec::new();
            judge(counts, &mut findings);
            findings
        };
        assert_eq!(findings_of(&counts), Vec::<String>::new());
        let large = ("x".to_owned(), "Large".to_owned());
        counts.insert(large.clone(), METHODS_MAX + 1);
        let findings = findings_of(&counts);
        assert!(
            findings[0].contains("`Large` in x has 61 methods"),
            "{findings:?}"
        );
        counts.remove(&large);
        let (of, name, max, _) = LARGE[0];
        let listed = (of.to_owned(), name.to_owned());
        counts.insert(listed.clone(), max + 1);
        assert_eq!(findings_of(&counts).len(), 1);
        counts.insert(listed, max / 2);
        assert_eq!(findings_of(&counts).len(), 1);
    }
}
