//! What a deletion that did not end has come to at its place, without opening the volume: that may fail for reasons of
//! its own, or take over what is whole.

use std::time::Instant;

use hdcs_core::objects::references;

use super::contents::{newest_manifest, refuse_other};
use super::opening::within;
use super::{OPEN_PATIENCE, backend_error, objects_place};
use crate::BackendError;

/// What is at the place of a volume that was to be given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remains {
    /// The volume, given up. If it is a clone, its parent keeps nothing for it any more.
    GivenUp,
    /// The volume, whole.
    Whole,
    /// Nothing, or another volume.
    Nothing,
}

/// Look at the place of a URL, where a volume of that identity was to be given up. Blocks.
pub fn remains(url: &str, identity: Option<&str>) -> Result<Remains, BackendError> {
    let place = objects_place(url)?;
    let client = place.brief_client()?;
    within(Instant::now() + place.open_time, &client, async {
        let there = newest_manifest(&client).await?;
        let is_ours = |there: &_| refuse_other(there, identity).is_ok();
        let Some(there) = there.filter(is_ours) else {
            return Ok(Remains::Nothing);
        };
        if !there.gone {
            return Ok(Remains::Whole);
        }
        let parent = there.ancestors.last();
        if let Some(reach) = parent.and_then(|parent| place.reach.elsewhere(&parent.location)) {
            // Whoever gave the clone up may not have come so far.
            let parent = client.beside(reach.reach(Some(OPEN_PATIENCE))?);
            let name = references::name(&there.volume).to_string();
            let deleted = parent.delete(&name).await;
            deleted.map_err(|error| backend_error(&error))?;
        }
        Ok(Remains::GivenUp)
    })
}
