//! Heat maps in files: what `hdcs volume heat --save` writes, and what is kept beside a volume's entry.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use hdcs_core::base::error::FormatError;
use hdcs_core::cache::heat_map::{HEAT_BYTES_MAX, HeatMap};

/// The map that is kept in a volume's directory.
pub const HEAT_FILE: &str = "heat.map";

/// Why a file is no heat map.
#[derive(Debug, thiserror::Error)]
pub enum HeatFileError {
    /// It could not be read.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// No map is so large.
    #[error("larger than {HEAT_BYTES_MAX} bytes: it is no heat map")]
    TooLarge,
    /// It is something else, or damaged.
    #[error("it is no heat map, or it is damaged: {0}")]
    Format(#[from] FormatError),
}

impl HeatFileError {
    /// Whether the file is not there.
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::Io(error) if error.kind() == io::ErrorKind::NotFound)
    }
}

/// The map in a file, of which no more is read than a map has.
pub fn read(path: &Path) -> Result<HeatMap, HeatFileError> {
    let mut bytes = Vec::new();
    File::open(path)?
        .take(HEAT_BYTES_MAX as u64 + 1)
        .read_to_end(&mut bytes)?;
    if bytes.len() > HEAT_BYTES_MAX {
        return Err(HeatFileError::TooLarge);
    }
    Ok(HeatMap::parse(&bytes)?)
}
