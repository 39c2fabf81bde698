//! What every file of the tree has to keep to, checked.
//!
//! 1. A Rust source begins with its `//!` text.
//! 2. No marker of unfinished work, none of a merge, and no test that is switched off.
//! 3. No file beyond [`LINES_MAX`] lines, unless it is listed with a reason.
//! 4. No path of somebody's machine.
//! 5. A relative link in a document leads to a file, and its fragment to a heading; a path of the tree that stands in code
//!    leads to something that is there.
//! 6. Every dependency has its line in docs/DEPENDENCIES.md, and every line there a dependency.
//! 7. A member of the workspace uses what it depends on.
//! 8. Every decision has its line in docs/decisions/README.md.
//! 9. A row of a table that names functions and then a source names functions of that source.
//! 10. No type has too many methods, and those that have do not grow ([`super::methods`]).
//!
//! What cannot be read is a finding. Nothing is changed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// A file of more lines is asked what it hides.
const LINES_MAX: usize = 1000;

/// Files that are longer, each with the reason.
const LONG_FILES: &[(&str, &str)] = &[
    ("LICENSE", "a given text"),
    ("Cargo.lock", "generated"),
    ("docs/openapi.json", "generated"),
];

/// Directories without sources of ours.
const SKIPPED: &[&str] = &[
    "target",
    "third_party",
    "results",
    "hdcs-data",
    "__pycache__",
    "corpus",
    "artifacts",
];

/// Extensions and names of text files of ours.
const TEXT: &[&str] = &[
    "rs", "toml", "md", "sh", "py", "c", "h", "json", "yml", "yaml", "html", "js", "css", "cfg",
    "ini", "Makefile", "run", "lock", "LICENSE",
];

/// Where the reasons for dependencies are.
const DEPENDENCIES: &str = "docs/DEPENDENCIES.md";
/// Where the decisions are listed.
const DECISIONS: &str = "docs/decisions/README.md";

/// Everything that is wrong, as `path:line: what`.
pub fn check(root: &Path) -> Vec<String> {
    let mut findings = Vec::new();
    let mut files = Vec::new();
    walk(root, root, &mut files, &mut findings);
    files.sort();
    for path in &files {
        let name = path.to_string_lossy().into_owned();
        match fs::read_to_string(root.join(path)) {
            Ok(text) => {
                check_text(&name, &text, &mut findings);
                if has_extension(path, "md") {
                    check_links(root, path, &text, &mut findings);
                    check_rows(root, path, &text, &mut findings);
                }
            }
            Err(error) => findings.push(format!("{name}:1: cannot be read: {error}")),
        }
    }
    check_dependencies(root, &files, &mut findings);
    check_decisions(root, &files, &mut findings);
    super::methods::check(root, &files, &mut findings);
    findings
}

/// Rule 8.
fn check_decisions(root: &Path, files: &[PathBuf], findings: &mut Vec<String>) {
    let index = fs::read_to_string(root.join(DECISIONS)).unwrap_or_default();
    let index_path = Path::new(DECISIONS);
    for path in files {
        if path.parent() == index_path.parent()
            && path != index_path
            && let Some(name) = path.file_name().and_then(|name| name.to_str())
            && !index.contains(&format!("]({name})"))
        {
            findings.push(format!("{DECISIONS}:1: has no line for {name}"));
        }
    }
}

/// Whether a file's name ends in `.extension`.
fn has_extension(path: &Path, extension: &str) -> bool {
    path.extension().is_some_and(|found| found == extension)
}

/// Collect the text files below `directory`, relative to `root`.
fn walk(root: &Path, directory: &Path, files: &mut Vec<PathBuf>, findings: &mut Vec<String>) {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) => {
            findings.push(format!(
                "{}:1: cannot be listed: {error}",
                directory.display()
            ));
            return;
        }
    };
    for entry in entries.flatten() {
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        let Ok(kind) = entry.file_type() else {
            continue;
        };
        if kind.is_dir() {
            if !SKIPPED.contains(&name.as_str()) && name != ".git" {
                walk(root, &path, files, findings);
            }
        } else if kind.is_file() {
            let extension = name.rsplit('.').next().unwrap_or(&name);
            if TEXT.contains(&extension)
                && let Ok(relative) = path.strip_prefix(root)
            {
                files.push(relative.to_path_buf());
            }
        }
    }
}

/// Words that say that something is unfinished. They are put together here so that this file may
/// be checked like any other.
fn unfinished_words() -> Vec<String> {
    [
        ("to", "do!("),
        ("unimple", "mented!("),
        ("FIX", "ME"),
        ("TO", "DO"),
        ("XX", "X"),
        ("#[ig", "nore"),
    ]
    .iter()
    .map(|(a, b)| format!("{a}{b}"))
    .collect()
}

/// Beginnings of paths that exist on one machine only.
fn machine_paths() -> Vec<String> {
    [("/wo", "rk/"), ("/ro", "ot/"), ("/ho", "me/")]
        .iter()
        .map(|(a, b)| format!("{a}{b}"))
        .collect()
}

/// Rules 1 to 4 on one file.
fn check_text(name: &str, text: &str, findings: &mut Vec<String>) {
    if has_extension(Path::new(name), "rs") && !text.starts_with("//!") {
        findings.push(format!(
            "{name}:1: does not begin with `//!`: say what the module is for"
        ));
    }
    let generated = has_extension(Path::new(name), "lock") || name == "LICENSE";
    let lines = text.lines().count();
    if lines > LINES_MAX && !LONG_FILES.iter().any(|(file, _)| *file == name) {
        findings.push(format!(
            "{name}:{lines}: more than {LINES_MAX} lines: split it by what it hides"
        ));
    }
    if generated {
        return;
    }
    for (number, line) in text.lines().enumerate() {
        let number = number + 1;
        for word in unfinished_words() {
            if line.contains(&word) {
                findings.push(format!(
                    "{name}:{number}: `{word}`: finish it, or write down elsewhere what is missing"
                ));
            }
        }
        if ["<<<<<<< ", ">>>>>>> "]
            .iter()
            .any(|mark| line.starts_with(mark))
        {
            findings.push(format!("{name}:{number}: a merge was left undecided"));
        }
        for path in machine_paths() {
            if mentions_path(line, &path) {
                findings.push(format!("{name}:{number}: `{path}`: a path of one machine"));
            }
        }
    }
}

/// Whether `path` stands in `line` as the beginning of an absolute path, not inside a longer one.
fn mentions_path(line: &str, path: &str) -> bool {
    line.match_indices(path).any(|(at, _)| {
        line[..at]
            .chars()
            .next_back()
            .is_none_or(|before| !(before.is_alphanumeric() || "._-}$)".contains(before)))
    })
}

/// Rule 5 on one document.
fn check_links(root: &Path, document: &Path, text: &str, findings: &mut Vec<String>) {
    for (number, path) in paths(text) {
        if !root.join(&path).exists() {
            findings.push(format!(
                "{}:{number}: `{path}`: there is no such file",
                document.display()
            ));
        }
    }
    let directory = root.join(document.parent().unwrap_or(Path::new("")));
    for (number, target) in links(text) {
        if target.contains("://") || target.starts_with("mailto:") {
            continue;
        }
        let (path, fragment) = target.split_once('#').unwrap_or((&target, ""));
        let file = if path.is_empty() {
            root.join(document)
        } else {
            directory.join(path)
        };
        let place = format!("{}:{}", document.display(), number);
        if !file.exists() {
            findings.push(format!("{place}: the link `{target}` leads nowhere"));
        } else if !fragment.is_empty() {
            let known = fs::read_to_string(&file).unwrap_or_default();
            if !headings(&known).contains(fragment) {
                findings.push(format!("{place}: `{target}`: no such heading"));
            }
        }
    }
}

/// The functions that a row of a table names in the cell before its last one, and the source that this names.
fn row_of_functions(line: &str) -> Option<(Vec<&str>, &str)> {
    let row = line.strip_prefix('|')?.trim_end().strip_suffix('|')?;
    let mut cells = row.rsplit('|');
    let source = cells.next()?.trim().strip_prefix('`')?.strip_suffix('`')?;
    let names = cells.next()?.split(',').map(str::trim);
    let names = names.filter_map(|name| name.strip_prefix('`')?.strip_suffix('`'));
    has_extension(Path::new(source), "rs").then(|| (names.collect(), source))
}

fn check_rows(root: &Path, document: &Path, text: &str, findings: &mut Vec<String>) {
    for (number, line) in prose(text) {
        let Some((names, source)) = row_of_functions(line) else {
            continue;
        };
        let Ok(source_text) = fs::read_to_string(root.join(source)) else {
            // Said by the rule on paths.
            continue;
        };
        for name in names {
            let begins = [format!("fn {name}("), format!("fn {name}<")];
            if !begins.iter().any(|begin| source_text.contains(begin)) {
                let document = document.display();
                findings.push(format!(
                    "{document}:{number}: `{name}`: there is no such function in {source}"
                ));
            }
        }
    }
}

/// Folders of the tree whose paths documents name.
const FOLDERS: [&str; 6] = [
    "bench/", "crates/", "testenv/", "testing/", "tests/", "xtask/",
];

/// Paths of the tree that a document names in code, with their lines; patterns are left out.
fn paths(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (number, line) in prose(text) {
        for code in line.split('`').skip(1).step_by(2) {
            let is_path = FOLDERS.iter().any(|folder| code.starts_with(folder));
            if is_path && !code.contains(|c: char| c.is_whitespace() || "*{<".contains(c)) {
                found.push((number, code.to_owned()));
            }
        }
    }
    found
}

/// Targets of the inline links of a document with their lines; code is left out.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (number, line) in prose(text) {
        let mut rest = line;
        while let Some(begin) = rest.find("](") {
            rest = &rest[begin + 2..];
            let Some(end) = rest.find(')') else { break };
            found.push((number, rest[..end].trim().to_owned()));
            rest = &rest[end..];
        }
    }
    found
}

/// Fragments of the headings, formed as the usual renderers do.
fn headings(text: &str) -> BTreeSet<String> {
    prose(text)
        .filter(|(_, line)| line.starts_with('#'))
        .map(|(_, line)| {
            line.trim_start_matches('#')
                .trim()
                .to_lowercase()
                .chars()
                .filter_map(|c| match c {
                    ' ' => Some('-'),
                    c if c.is_alphanumeric() || c == '-' || c == '_' => Some(c),
                    _ => None,
                })
                .collect()
        })
        .collect()
}

/// The lines outside of fenced code, numbered from 1.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fenced = false;
    text.lines().enumerate().filter_map(move |(number, line)| {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
            return None;
        }
        (!fenced).then_some((number + 1, line))
    })
}

/// The dependency tables of a manifest: name of each dependency.
fn dependencies_of(manifest: &toml::Table) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut take = |table: Option<&toml::Value>| {
        if let Some(table) = table.and_then(toml::Value::as_table) {
            names.extend(table.keys().cloned());
        }
    };
    for section in ["dependencies", "dev-dependencies", "build-dependencies"] {
        take(manifest.get(section));
    }
    take(
        manifest
            .get("workspace")
            .and_then(|workspace| workspace.get("dependencies")),
    );
    if let Some(targets) = manifest.get("target").and_then(toml::Value::as_table) {
        for target in targets.values() {
            take(target.get("dependencies"));
        }
    }
    names
}

/// Rules 6 and 7.
fn check_dependencies(root: &Path, files: &[PathBuf], findings: &mut Vec<String>) {
    let mut declared: BTreeMap<String, PathBuf> = BTreeMap::new();
    for path in files.iter().filter(|path| path.ends_with("Cargo.toml")) {
        let name = path.display();
        let text = fs::read_to_string(root.join(path)).unwrap_or_default();
        let manifest: toml::Table = match text.parse() {
            Ok(manifest) => manifest,
            Err(error) => {
                findings.push(format!("{name}:1: is not TOML: {error}"));
                continue;
            }
        };
        let dependencies = dependencies_of(&manifest);
        if manifest.contains_key("package") {
            let directory = path.parent().unwrap_or(Path::new(""));
            for dependency in unused(root, directory, files, &dependencies) {
                findings.push(format!("{name}:1: `{dependency}` is not used: take it out"));
            }
        }
        for dependency in dependencies {
            declared.entry(dependency).or_insert_with(|| path.clone());
        }
    }
    let reasons = fs::read_to_string(root.join(DEPENDENCIES)).unwrap_or_default();
    let listed = listed_dependencies(&reasons);
    for (dependency, manifest) in &declared {
        let own = dependency.starts_with("hdcs-");
        if !own && !listed.contains_key(dependency) {
            findings.push(format!(
                "{}:1: `{dependency}` has no line in {DEPENDENCIES}",
                manifest.display()
            ));
        }
    }
    for (dependency, line) in &listed {
        if !declared.contains_key(dependency) {
            findings.push(format!(
                "{DEPENDENCIES}:{line}: `{dependency}` is not a dependency any more"
            ));
        }
    }
}

/// The dependencies of the member at `directory` that no source of it names.
fn unused(
    root: &Path,
    directory: &Path,
    files: &[PathBuf],
    dependencies: &BTreeSet<String>,
) -> Vec<String> {
    let mut sources = String::new();
    for file in files {
        if file.starts_with(directory) && has_extension(file, "rs") {
            sources.push_str(&fs::read_to_string(root.join(file)).unwrap_or_default());
        }
    }
    dependencies
        .iter()
        .filter(|dependency| !names_crate(&sources, &dependency.replace('-', "_")))
        .cloned()
        .collect()
}

/// Whether a source names a crate: in a path, or in a `use` or `extern crate`.
fn names_crate(sources: &str, name: &str) -> bool {
    sources.match_indices(name).any(|(at, _)| {
        let before = sources[..at].chars().next_back();
        let after = &sources[at + name.len()..];
        let begins = before.is_none_or(|c| !c.is_alphanumeric() && c != '_');
        begins
            && (after.starts_with("::")
                || sources[..at].ends_with("use ")
                || sources[..at].ends_with("crate "))
    })
}

/// Dependencies listed in the document: the first cell of each row, in code quotes, with its line.
fn listed_dependencies(text: &str) -> BTreeMap<String, usize> {
    prose(text)
        .filter_map(|(number, line)| {
            let name = line.strip_prefix("| `")?.split('`').next()?;
            Some((name.to_owned(), number))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::root;

    fn findings_of(name: &str, text: &str) -> Vec<String> {
        let mut findings = Vec::new();
        check_text(name, text, &mut findings);
        findings
    }

    #[test]
    fn tree_is_tidy() {
        let findings = check(&root());
        assert!(findings.is_empty(), "\n{}", findings.join("\n"));
    }

    #[test]
    fn module_without_text_is_found() {
        assert_eq!(findings_of("a.rs", "fn a() {}\n").len(), 1);
        assert!(findings_of("a.rs", "//! Text.\n").is_empty());
    }

    #[test]
    fn unfinished_work_is_found() {
        for word in unfinished_words() {
            assert_eq!(
                findings_of("a.sh", &format!("x {word}\n")).len(),
                1,
                "{word}"
            );
        }
    }

    #[test]
    fn merge_that_was_left_undecided_is_found() {
        let text = format!("# A\n{} HEAD\nb\n{} other\n", "<".repeat(7), ">".repeat(7));
        assert_eq!(findings_of("a.md", &text).len(), 2);
    }

    #[test]
    fn long_file_is_found() {
        assert_eq!(findings_of("a.py", &"x\n".repeat(LINES_MAX + 1)).len(), 1);
        assert!(findings_of("a.py", &"x\n".repeat(LINES_MAX)).is_empty());
        assert!(findings_of("Cargo.lock", &"x\n".repeat(LINES_MAX + 1)).is_empty());
    }

    #[test]
    fn machine_path_is_found() {
        for path in machine_paths() {
            assert_eq!(
                findings_of("a.md", &format!("see {path}x\n")).len(),
                1,
                "{path}"
            );
            assert!(
                findings_of("a.md", &format!("see net{path}x\n")).is_empty(),
                "{path}"
            );
        }
    }

    #[test]
    fn link_to_nowhere_is_found() {
        let mut findings = Vec::new();
        let text = "[a](nothing.md) [b](README.md) [c](README.md#no-such) [d](https://example.org/x)\n\
                    ```\n[e](nothing.md)\n```\n";
        check_links(&root(), Path::new("x.md"), text, &mut findings);
        assert_eq!(findings.len(), 2, "{findings:?}");
    }

    #[test]
    fn path_to_nowhere_is_found() {
        let mut findings = Vec::new();
        let text =
            "`xtask/src/main.rs` `xtask/src/none.rs` `tests/*/test_*.py` `crates/x y` `none.rs`\n";
        check_links(&root(), Path::new("x.md"), text, &mut findings);
        assert_eq!(findings.len(), 1, "{findings:?}");
    }

    #[test]
    fn row_that_names_no_function_is_found() {
        let mut findings = Vec::new();
        let text = "| 1 | it checks | `check`, `unheard_of` | `xtask/src/tidy.rs` |\n\
                    | 2 | it is no source | `check` | `Makefile` |\n\
                    | 3 | it names none | and none | `xtask/src/tidy.rs` |\n";
        check_rows(&root(), Path::new("x.md"), text, &mut findings);
        assert_eq!(findings.len(), 1, "{findings:?}");
        assert!(findings[0].contains("unheard_of"));
    }

    #[test]
    fn decision_without_a_line_is_found() {
        let mut findings = Vec::new();
        let known = PathBuf::from("docs/decisions/2026-11-25-crates.md");
        let unknown = PathBuf::from("docs/decisions/2026-11-25-unheard-of.md");
        check_decisions(&root(), &[known, unknown], &mut findings);
        assert_eq!(findings.len(), 1, "{findings:?}");
    }

    #[test]
    fn dependencies_are_read_from_every_table() {
        let manifest: toml::Table = "[dependencies]\na-b = '1'\n[dev-dependencies]\nc = '1'\n\
            [target.'cfg(unix)'.dependencies]\nd = '1'\n[workspace.dependencies]\ne = '1'\n"
            .parse()
            .unwrap();
        let names: Vec<String> = dependencies_of(&manifest).into_iter().collect();
        assert_eq!(names, ["a-b", "c", "d", "e"]);
    }

    #[test]
    fn crate_name_is_told_from_its_like() {
        assert!(names_crate("use a_b::C;", "a_b"));
        assert!(names_crate("let x = a_b::c();", "a_b"));
        assert!(names_crate("extern crate a_b;", "a_b"));
        assert!(!names_crate("let a_b = 1; xa_b::c();", "a_b"));
    }

    #[test]
    fn listed_dependencies_are_rows() {
        let text = "| crate | why |\n|---|---|\n| `a` | x |\ntext `b`\n";
        assert_eq!(
            listed_dependencies(text).into_keys().collect::<Vec<_>>(),
            ["a"]
        );
    }
}
