//! The files beside a volume's entry, each with a format of its own: whatever a newer program has written there is left
//! to that program. Records may be renewed at any time, so this is looked at before the volume is.

use std::path::Path;

use hdcs_core::base::error::FormatError;
use hdcs_core::format::LogSuperblock;

use super::dirty::{RECORD, RECORD_FILE};
use super::heat::{self, HEAT_FILE, HeatFileError};
use super::kept::KEPT_FILE;
use super::key::{KEY, KEY_FILE};
use super::sealed::{self, Kind};

/// What is known of a volume's scrubs.
pub const SCRUB: Kind = Kind {
    magic: "hdcs-scrub",
    version: 1,
};
/// Its name in a volume's directory.
pub const SCRUB_FILE: &str = "scrub.json";

/// Why a newer program is needed for a volume, if one has written a file of its directory.
pub fn refuse_newer(directory: &Path) -> Result<(), String> {
    for (name, kind) in [(KEY_FILE, KEY), (RECORD_FILE, RECORD), (SCRUB_FILE, SCRUB)] {
        let path = directory.join(name);
        sealed::refuse_newer(&path, kind)
            .map_err(|error| format!("{}: {error}", path.display()))?;
    }
    let newer = |name: &str, error: &FormatError| {
        let is_newer = matches!(error, FormatError::Newer { .. });
        is_newer.then(|| format!("{}: {error}", directory.join(name).display()))
    };
    if let Err(HeatFileError::Format(error)) = heat::read(&directory.join(HEAT_FILE))
        && let Some(why) = newer(HEAT_FILE, &error)
    {
        return Err(why);
    }
    if let Ok(block) = std::fs::read(directory.join(KEPT_FILE))
        && let Err(error) = LogSuperblock::parse(&block)
        && let Some(why) = newer(KEPT_FILE, &error)
    {
        return Err(why);
    }
    Ok(())
}
