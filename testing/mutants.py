#!/usr/bin/env python3
"""mutants.py [--count N] [--seed S] - mutations of the core that its tests do not notice.

cargo-mutants says what could be changed in log, cache, volume, local store and objects. A random sample of that is
written into one copy of the sources, each mutation behind a switch that an environment variable turns on, so that all
are built at once. Each mutation then runs the unit tests that reach it, the quickest first, until one fails; what
survives runs in the simulator. What survives both is printed, with the share of all that could be built; where each
ended is in target/mutants/outcomes.json.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
OUT = ROOT / "target/mutants"
TREE = OUT / "tree"
CARGO_MUTANTS = "27.1.0"
PARSER = ["tree-sitter==0.26.1", "tree-sitter-rust==0.24.2"]
# Worlds of the simulator, and how many seeds of each.
WORLDS = {"home": 2000, "objects": 2000, "ranges": 30, "stack": 60, "node": 150}
WORLD_SECONDS = 60
# What a mutation may take: one that never ends is noticed by anybody.
MEMORY_BYTES_MAX = 4 << 30

SWITCH = """
extern crate std;

/// Which mutation is on, and which were asked for.
static mut ON: usize = usize::MAX;
static mut REACHED: [u8; %d] = [0; %d];

/// Whether a mutation is on.
#[inline(never)]
pub const fn mutant(id: usize) -> bool {
    unsafe {
        REACHED[id] = 1;
        ON == id
    }
}

unsafe extern "C" {
    fn atexit(at: extern "C" fn()) -> i32;
}

#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

extern "C" fn start() {
    if let Ok(id) = std::env::var("HDCS_MUTANT") {
        unsafe { ON = id.parse().unwrap() }
    }
    if std::env::var("HDCS_REACHED").is_ok() {
        unsafe { atexit(note) };
    }
}

extern "C" fn note() {
    let reached = unsafe { &*(&raw const REACHED) };
    let _ = std::fs::write(std::env::var("HDCS_REACHED").unwrap(), reached);
}
"""


def enter_venv():
    """Run again in an environment that has the parser."""
    venv = OUT / "venv"
    python = venv / "bin/python"
    if pathlib.Path(sys.prefix) == venv:
        return
    if not (venv / ".complete").exists():
        shutil.rmtree(venv, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PARSER], check=True)
        (venv / ".complete").touch()
    os.execv(python, [python, *sys.argv])


def listed():
    """All mutations that cargo-mutants knows of, as it describes them."""
    found = subprocess.run(["cargo", "mutants", "--version"], capture_output=True, text=True, check=False)
    if CARGO_MUTANTS not in found.stdout:
        subprocess.run(["cargo", "install", "cargo-mutants", "--version", CARGO_MUTANTS, "--locked"], check=True)
    command = ["cargo", "mutants", "--list", "--json", "--package", "hdcs-core"]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)


class Source:
    """A source with mutations behind switches."""

    def __init__(self, path):
        import tree_sitter
        import tree_sitter_rust

        self.text = path.read_bytes()
        parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_rust.language()))
        self.root = parser.parse(self.text).root_node
        # By the node that they change: (genre, id, replacement).
        self.changes = {}

    def add(self, id, mutant):
        """Put a mutation behind its switch. False if this script does not know how."""
        start, genre = mutant["span"]["start"], mutant["genre"]
        at = (start["line"] - 1, start["column"] - 1)
        node = {
            "FnValue": self.function_body,
            "BinaryOperator": self.binary,
            "UnaryOperator": lambda at: self.first(at, ("unary_expression",)),
            "MatchArm": lambda at: self.first(at, ("match_arm",)),
            "MatchArmGuard": self.guard,
        }.get(genre, lambda at: None)(at)
        if node is None:
            return False
        self.changes.setdefault(node.id, []).append((genre, id, mutant["replacement"]))
        if genre == "MatchArm":
            self.changes.setdefault(node.parent.parent.id, []).append(("match", id, ""))
        return True

    def around(self, at):
        """The nodes around a place, the outermost first."""
        node, nodes = self.root, []
        while node is not None:
            nodes.append(node)
            node = next((c for c in node.children if c.start_point <= at < c.end_point), None)
        return nodes

    def first(self, at, kinds):
        return next((n for n in self.around(at) if n.type in kinds and n.start_point == at), None)

    def function_body(self, at):
        bodies = [n.child_by_field_name("body") for n in self.around(at) if n.type == "function_item"]
        return bodies[-1] if bodies else None

    def binary(self, at):
        for node in reversed(self.around(at)):
            if node.type in ("binary_expression", "compound_assignment_expr"):
                operator = node.child_by_field_name("operator")
                return None if operator.start_point != at or has_let(node) else node
        return None

    def guard(self, at):
        for node in self.around(at):
            condition = node.child_by_field_name("condition") if node.type == "match_pattern" else None
            if condition is not None and condition.start_point == at:
                return condition
        return None

    def raw(self, node):
        return self.text[node.start_byte : node.end_byte].decode()

    def mutated(self):
        """The text with all of them."""
        return self.emit(self.root)

    def emit(self, node):
        text, at = "", node.start_byte
        for child in node.children:
            text += self.text[at : child.start_byte].decode() + self.emit(child)
            at = child.end_byte
        text += self.text[at : node.end_byte].decode()
        changes = self.changes.get(node.id, [])
        others = "".join(self.other(node, *change) for change in changes)
        if not changes:
            return text
        match changes[0][0]:
            case "FnValue":
                return "{ " + others + text[1:]
            case "match":
                # The compiler names this line when the arm was needed.
                return f"match /* {switch(changes[0][1])} */{text.removeprefix('match')}"
            case "MatchArm":
                pattern = node.child_by_field_name("pattern")
                rest = text[len(self.emit(pattern)) :]
                condition = pattern.child_by_field_name("condition")
                if condition is None:
                    return f"{self.emit(pattern)} if !{switch(changes[0][1])}{rest}"
                before = self.text[pattern.start_byte : condition.start_byte].decode()
                return f"{before} !{switch(changes[0][1])} && ({self.emit(condition)}){rest}"
        return f"({others}{{ {text} }})"

    def other(self, node, genre, id, replacement):
        """What a mutation makes of its node, as the first part of a condition."""
        match genre:
            case "FnValue":
                return f"if {switch(id)} {{ return {replacement}; }} "
            case "MatchArmGuard":
                return f"if {switch(id)} {{ {replacement} }} else "
            case "UnaryOperator":
                return f"if {switch(id)} {{ {replacement}{self.raw(node.children[-1])} }} else "
            case "BinaryOperator":
                left, right = (self.raw(node.child_by_field_name(side)) for side in ("left", "right"))
                if node.type == "binary_expression":
                    left = f"({left})"
                return f"if {switch(id)} {{ {left} {replacement} ({right}) }} else "
        return ""


def switch(id):
    return f"crate::switch::mutant({id})"


def has_let(node):
    """Whether a condition binds something, which only `&&` can do."""
    if node.type == "let_condition":
        return True
    return node.type == "binary_expression" and any(has_let(child) for child in node.children)


def write_tree(mutants, paths):
    """Write these sources with the mutations (by id); those that this script cannot write are removed."""
    files = {path: Source(ROOT / path) for path in paths}
    for id, mutant in list(mutants.items()):
        if not files[mutant["file"]].add(id, mutant):
            del mutants[id]
    lines = {}
    for path, source in files.items():
        text = source.mutated()
        write_if_changed(TREE / path, text)
        # For what the compiler complains of: the mutations that have something in a line.
        for number, line in enumerate(text.splitlines(), 1):
            ids = [int(part.split(")")[0]) for part in line.split("switch::mutant(")[1:]]
            if ids:
                lines[(path, number)] = ids
    most = max(mutants) + 1
    write_if_changed(TREE / "crates/core/src/switch.rs", SWITCH % (most, most))
    return lines


def write_if_changed(path, text):
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def cargo(*arguments):
    """What cargo says, as messages, and whether it succeeded."""
    environment = os.environ | {"CARGO_TARGET_DIR": str(OUT / "target"), "RUSTFLAGS": "--cap-lints=allow"}
    command = ["cargo", *arguments, "--profile", "checked", "--message-format=json"]
    done = subprocess.run(command, cwd=TREE, env=environment, check=False, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")], done.returncode == 0


def spans(message):
    """All places that a message of the compiler names."""
    for span in message["spans"]:
        while span:
            yield span["file_name"], range(span["line_start"], span["line_end"] + 1)
            span = (span.get("expansion") or {}).get("span")
    for child in message["children"]:
        yield from spans(child)


def build(mutants):
    """Build all; what does not build is removed, one look at the errors after the other. The test programs, and the
    simulator."""
    paths, count = {mutant["file"] for mutant in mutants.values()}, len(mutants)
    while True:
        lines = write_tree(mutants, paths)
        messages, built = cargo("test", "--no-run", "--package", "hdcs-core")
        if built:
            break
        errors = [m["message"] for m in messages if m["reason"] == "compiler-message" and m["message"]["level"] == "error"]
        bad = {id for e in errors for path, numbers in spans(e) for n in numbers for id in lines.get((path, n), ())}
        bad &= set(mutants)
        if not bad:
            sys.exit("mutants.py: does not build:\n" + "\n".join(e["rendered"] or "" for e in errors[:5]))
        for id in bad:
            del mutants[id]
        print(f"{count - len(mutants)} do not build, {len(mutants)} are left", flush=True)
    tests = [m["executable"] for m in messages if m.get("executable") and m["profile"]["test"]]
    messages, built = cargo("build", "--package", "hdcs-sim")
    programs = [m["executable"] for m in messages if m.get("executable")]
    if not built or not programs:
        sys.exit("mutants.py: the simulator does not build")
    return tests, programs[0]


def run(command, seconds, **environment):
    """Whether a program ends well and in time."""
    limited = ["bash", "-c", f'ulimit -v {MEMORY_BYTES_MAX >> 10}; exec "$@"', "-", *command]
    try:
        done = subprocess.run(
            limited,
            cwd=TREE / "crates/core",
            env=os.environ | environment,
            timeout=seconds,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def baseline(named):
    """Run a command without a mutation: its seconds, and the mutations that it reaches."""
    name, command = named
    path = OUT / "reached" / name.replace("/", "_").replace(":", "_")
    since = time.monotonic()
    if not run(command, 600, HDCS_REACHED=str(path)):
        sys.exit(f"mutants.py: fails without a mutation: {' '.join(map(str, command))}")
    took = time.monotonic() - since
    return name, command, took, {id for id, byte in enumerate(path.read_bytes()) if byte}


def fails(id, commands):
    """The first of the commands that a mutation makes fail."""
    for name, command, took, reached in sorted(commands, key=lambda one: one[2]):
        if id in reached and not run(command, 30 + 10 * took, HDCS_MUTANT=str(id)):
            return name
    return None


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--count", type=int, default=200, help="how many are tried (200)")
    options.add_argument("--seed", type=int, default=1, help="which ones (1)")
    options = options.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    enter_venv()
    shutil.rmtree(OUT / "reached", ignore_errors=True)
    (OUT / "reached").mkdir()

    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout.split(b"\0")
    for name in filter(None, map(os.fsdecode, files)):
        (TREE / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, TREE / name)
    library = TREE / "crates/core/src/lib.rs"
    library.write_text(library.read_text() + "\n#[allow(missing_docs, unsafe_code)]\npub mod switch;\n")

    every = listed()
    mutants = dict(enumerate(random.Random(options.seed).sample(every, min(options.count, len(every)))))
    print(f"{len(mutants)} of {len(every)} mutations", flush=True)
    programs, simulator = build(mutants)

    workers = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
    tests = []
    for program in programs:
        names = subprocess.run([program, "--list", "--format=terse"], check=True, capture_output=True, text=True).stdout
        for line in names.splitlines():
            if line.endswith(": test"):
                name = line.removesuffix(": test")
                tests.append((name, [program, "--exact", name]))
    tests = list(workers.map(baseline, tests))
    worlds = [
        (world, [simulator, "--world", world, "--seeds", str(seeds), "--time", str(WORLD_SECONDS)])
        for world, seeds in WORLDS.items()
    ]
    worlds = list(workers.map(baseline, worlds))
    print(f"{len(tests)} unit tests and {len(worlds)} worlds pass without one", flush=True)

    outcomes = {}
    survivors = list(mutants)
    for kind, commands in (("unit", tests), ("simulator", worlds)):
        judged = {workers.submit(fails, id, commands): id for id in survivors}
        since, survivors = time.monotonic(), []
        for done, one in enumerate(concurrent.futures.as_completed(judged), 1):
            id, by = judged[one], one.result()
            if by:
                outcomes[id] = {"name": mutants[id]["name"], "kind": kind, "by": by}
            else:
                outcomes[id] = {"name": mutants[id]["name"], "kind": "survives"}
                survivors.append(id)
            rest = (time.monotonic() - since) / done * (len(judged) - done)
            print(
                f"[{kind} {done}/{len(judged)}, {rest / 60:.0f} min left] "
                f"{mutants[id]['name']}: {'caught by ' + by if by else 'survives'}",
                flush=True,
            )
    outcomes = [outcomes[id] for id in sorted(outcomes)]
    (OUT / "outcomes.json").write_text(json.dumps(outcomes, indent=1))
    counts = {kind: sum(o["kind"] == kind for o in outcomes) for kind in ("unit", "simulator", "survives")}
    print()
    for outcome in outcomes:
        if outcome["kind"] == "survives":
            print(f"survives: {outcome['name']}")
    print(
        f"{len(outcomes)} mutations: {counts['unit']} caught by unit tests, {counts['simulator']} by the simulator, "
        f"{counts['survives']} survive ({counts['survives'] / len(outcomes):.0%})"
    )


if __name__ == "__main__":
    main()
