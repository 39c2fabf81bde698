//! Looks at files that may hang. Each that does keeps a thread, and the control plane has 512 for everything that may
//! wait for a disk. So a directory has only a few of them, however often somebody asks for what lies there, and all
//! together have half; a look waits for its turn as long as it may take.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Semaphore;

use super::lock;

/// Looks at once.
const LOOKS_MAX: usize = 256;
/// Those in one directory that a request names.
const DIRECTORY_MAX: usize = 16;
/// Those at what the node's own volumes have.
const OWN_MAX: usize = 128;

static LOOKS: Semaphore = Semaphore::const_new(LOOKS_MAX);
/// What may be looked at, by directory, while somebody does.
static DIRECTORIES: Mutex<BTreeMap<String, Arc<Semaphore>>> = Mutex::new(BTreeMap::new());

/// The directory of a path or URL.
fn directory(place: &str) -> &str {
    let path = place.split('?').next().unwrap_or(place);
    path.rsplit_once('/').map_or("", |(directory, _)| directory)
}

fn looks_of(directory: &str) -> Arc<Semaphore> {
    let mut directories = lock(&DIRECTORIES);
    // Each permit that is taken holds one, and so does each that is waited for.
    directories.retain(|_, looks| Arc::strong_count(looks) > 1);
    let max = if directory.is_empty() {
        OWN_MAX
    } else {
        DIRECTORY_MAX
    };
    let made = || Arc::new(Semaphore::new(max));
    let looks = directories.entry(directory.to_owned()).or_insert_with(made);
    Arc::clone(looks)
}

/// Look at what a path or URL names on a thread of its own, since what it lies on may hang; `None` if it does. The empty
/// place is whatever the node's own volumes have.
pub(super) async fn in_time<T: Send + 'static>(
    place: &str,
    time_max: Duration,
    look: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let looks = looks_of(directory(place));
    let looked = async {
        let permits = (
            looks.acquire_owned().await.ok()?,
            LOOKS.acquire().await.ok()?,
        );
        let look = move || {
            let _permits = permits;
            look()
        };
        tokio::task::spawn_blocking(look).await.ok()
    };
    tokio::time::timeout(time_max, looked).await.ok()?
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[tokio::test]
    async fn directory_that_hangs_takes_a_bounded_number_of_threads_and_others_answer() {
        let (begins, begun) = channel();
        let (ends, may_end) = channel::<()>();
        let may_end = Arc::new(Mutex::new(may_end));
        for number in 0..2 * DIRECTORY_MAX {
            let (begins, may_end) = (begins.clone(), Arc::clone(&may_end));
            let hangs = move || {
                let _ = begins.send(());
                let _ = lock(&may_end).recv();
            };
            let place = format!("file:/looks-that-hang/{number}?raw=on");
            let looked = in_time(&place, Duration::from_millis(5), hangs).await;
            assert_eq!(looked, None);
        }
        drop(begins);
        let patience = Duration::from_secs(60);
        let other = in_time("/looks-that-answer/log", patience, || 7).await;
        assert_eq!(other, Some(7));
        drop(ends);
        assert_eq!(begun.iter().count(), DIRECTORY_MAX);
        let again = in_time("file:/looks-that-hang/log", patience, || 8).await;
        assert_eq!(again, Some(8));
    }
}
