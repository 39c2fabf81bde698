//! Which state a clone began as: the same name for all clones of one snapshot.
//!
//! The clone's own objects do not say; what it has left with its parent does, by the snapshot's pin,
//! which is never used twice. If that cannot be read now, the clone serves as any volume: what it reads
//! is then cached for itself alone.

use hdcs_core::objects::Parent;
use hdcs_core::objects::format::Reference;
use hdcs_core::objects::io::Kind;
use uuid::Uuid;

use super::{Driver, OPEN_PATIENCE};
use crate::stores::{Client, StoreError, runtime};

/// The name of what a volume began as, if it is a clone and that can be found out. Blocks.
pub(super) fn origin(driver: &Driver) -> Option<String> {
    let parent = driver.machine.parent()?;
    let client = driver.ancestors.get(&parent.location)?;
    let client = client.with_patience(OPEN_PATIENCE);
    match runtime().block_on(reference(&client, &parent)) {
        Ok(reference) if reference.clone == driver.machine.uuid() => Some(format!(
            "state {} of the volume {} in an object store",
            reference.pin,
            Uuid::from_bytes(parent.volume)
        )),
        Ok(_) => None,
        Err(why) => {
            tracing::warn!(
                "{}: which snapshot of {} it began as cannot be read: {why}: until it is opened again, \
                 what it reads is cached for itself alone",
                driver.client.place(),
                client.place()
            );
            None
        }
    }
}

/// What the clone has left with its parent.
async fn reference(client: &Client, parent: &Parent) -> Result<Reference, String> {
    let name = parent.reference.to_string();
    let failed = |error: StoreError| error.to_string();
    // Its length is not known; the first name after one that is a little shorter is its own.
    let before = &name[..name.len() - 1];
    let page = client.list(Kind::Clone.prefix(), before, 1).await;
    let page = page.map_err(failed)?;
    let found = page.objects.first().filter(|object| object.name == name);
    let object = found.ok_or("its reference is not there")?;
    let bytes = (object.bytes as usize).min(Reference::BYTES_MAX);
    let got = client.get(&name, 0, bytes).await.map_err(failed)?;
    Reference::parse(&parent.volume, &got).map_err(|error| error.to_string())
}
