//! Traces from files, in the formats that public collections use.
//!
//! | format | what it is |
//! |---|---|
//! | `msr` | lines `time,host,disk,Read|Write,offset,bytes,response`: MSR Cambridge, from the SNIA's collection |
//! | `oracle` | records of 24 bytes (u32 time, u64 object, u32 bytes, i64 next access): `oracleGeneral` of libCacheSim |
//! | `plain` | one block number a line; empty lines and `#` comments are passed over |

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use clap::ValueEnum;
use hdcs_core::base::limits::BLOCK_BYTES;

use super::trace::Trace;
use crate::failure::{Context, Failure, Result};

const ORACLE_RECORD_BYTES: usize = 24;
/// One request of a file may cover so much; what is larger is damage.
const REQUEST_BYTES_MAX: u64 = 1 << 30;

/// How a file is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// MSR Cambridge: lines of seven values.
    Msr,
    /// oracleGeneral: records of 24 bytes.
    Oracle,
    /// One block number a line.
    Plain,
}

impl Format {
    /// By the file's name.
    fn of(path: &Path) -> Self {
        let name = path.to_string_lossy().to_lowercase();
        let extension = path.extension().unwrap_or_default();
        if extension.eq_ignore_ascii_case("csv") {
            Self::Msr
        } else if name.contains("oraclegeneral") {
            Self::Oracle
        } else {
            Self::Plain
        }
    }
}

/// The trace in a file. Its blocks get numbers in the order in which they come first.
pub fn trace(path: &Path, format: Option<Format>, reads_only: bool) -> Result<Trace> {
    let bytes = fs::read(path).context(path.display())?;
    let requests = match format.unwrap_or_else(|| Format::of(path)) {
        Format::Msr => lines(path, &bytes, |line| msr(line, reads_only))?,
        Format::Oracle => oracle(path, &bytes)?,
        Format::Plain => lines(path, &bytes, plain)?,
    };
    if requests.is_empty() {
        return Err(Failure::new(format!(
            "{}: it holds no request; `--format` says how it is written",
            path.display()
        )));
    }
    let mut numbers = HashMap::new();
    let blocks = requests
        .into_iter()
        .map(|block| {
            let next = numbers.len() as u64;
            *numbers.entry(block).or_insert(next)
        })
        .collect();
    Ok(Trace {
        name: path
            .file_name()
            .map_or_else(String::new, |name| name.to_string_lossy().into()),
        blocks,
        footprint: numbers.len(),
    })
}

/// What identifies a block: its disk and its number.
type Block = (u64, u64);

fn lines(
    path: &Path,
    bytes: &[u8],
    mut parse: impl FnMut(&str) -> Option<Vec<Block>>,
) -> Result<Vec<Block>> {
    let text = std::str::from_utf8(bytes).context(path.display())?;
    let mut out = Vec::new();
    for (number, line) in (1..).zip(text.lines().map(str::trim)) {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let blocks = parse(line).context(format_args!(
            "{}:{number}: `{line}` is no request",
            path.display()
        ))?;
        out.extend(blocks);
    }
    Ok(out)
}

fn plain(line: &str) -> Option<Vec<Block>> {
    Some(vec![(0, line.parse().ok()?)])
}

fn msr(line: &str, reads_only: bool) -> Option<Vec<Block>> {
    let values: Vec<&str> = line.split(',').map(str::trim).collect();
    let [_, _, disk, kind, offset, bytes, ..] = values[..] else {
        return None;
    };
    let disk = disk.parse().ok()?;
    let (offset, bytes): (u64, u64) = (offset.parse().ok()?, bytes.parse().ok()?);
    match kind.to_lowercase().as_str() {
        "write" if reads_only => return Some(Vec::new()),
        "read" | "write" => {}
        _ => return None,
    }
    if bytes > REQUEST_BYTES_MAX {
        return None;
    }
    let block = BLOCK_BYTES as u64;
    let end = offset.checked_add(bytes)?.div_ceil(block);
    Some((offset / block..end).map(|block| (disk, block)).collect())
}

fn oracle(path: &Path, bytes: &[u8]) -> Result<Vec<Block>> {
    let records = bytes.chunks_exact(ORACLE_RECORD_BYTES);
    if !records.remainder().is_empty() {
        return Err(Failure::new(format!(
            "{}: {} bytes are not records of {ORACLE_RECORD_BYTES}; is it compressed still?",
            path.display(),
            bytes.len()
        )));
    }
    Ok(records
        .map(|record| {
            let object = record[4..12].try_into().expect("eight bytes");
            (0, u64::from_le_bytes(object))
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: &str, content: &[u8], reads_only: bool) -> Result<Trace> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(name);
        fs::write(&path, content).unwrap();
        trace(&path, None, reads_only)
    }

    #[test]
    fn read_msr_cuts_requests_into_blocks() {
        let text = "128166372003061629,hm,1,Read,383496192,32768,413\n\
                    128166372016382155,hm,1,Write,2822144000,1024,12\n\
                    128166372026382245,hm,1,Read,383496192,4096,7\n\
                    128166372026382245,hm,0,Read,383496192,4096,7\n";
        let trace = read("hm.csv", text.as_bytes(), false).unwrap();
        assert_eq!(trace.blocks, [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 9]);
        assert_eq!(trace.footprint, 10);
        let reads = read("hm.csv", text.as_bytes(), true).unwrap();
        assert_eq!(reads.blocks, [0, 1, 2, 3, 4, 5, 6, 7, 0, 8]);
    }

    #[test]
    fn read_oracle_general_takes_each_object_as_a_block() {
        let mut bytes = Vec::new();
        for object in [99u64, 7, 99] {
            bytes.extend(1u32.to_le_bytes());
            bytes.extend(object.to_le_bytes());
            bytes.extend(4096u32.to_le_bytes());
            bytes.extend((-1i64).to_le_bytes());
        }
        let trace = read("w01.oracleGeneral.bin", &bytes, false).unwrap();
        assert_eq!((trace.blocks, trace.footprint), (vec![0, 1, 0], 2));
        let error = read("w01.oracleGeneral", &bytes[1..], false).err().unwrap();
        assert!(error.to_string().contains("71 bytes"), "{error}");
    }

    #[test]
    fn read_names_the_line_that_is_no_request() {
        let trace = read("t", b"# blocks\n5\n\n6\n5\n", false).unwrap();
        assert_eq!(trace.blocks, [0, 1, 0]);
        let error = read("t", b"5\nsix\n", false).err().unwrap();
        assert!(error.to_string().ends_with("t:2: `six` is no request"));
        let error = read("t.csv", b"1,h,0,Trim,0,4096,1\n", false)
            .err()
            .unwrap();
        assert!(error.to_string().contains("t.csv:1"), "{error}");
        assert!(read("t", b"# nothing\n", false).is_err());
    }
}
