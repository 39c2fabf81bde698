//! Looks at files that may hang. Each that does keeps a thread, and the control plane has 512 for everything that may
//! wait for a disk. So a directory has only a few of them, however often somebody asks for what lies there, and one that
//! has not answered in time gets no more until it does; all together have three quarters, of which some are for the
//! node's own volumes alone. A look waits for its turn as long as it may take.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::lock;

/// Looks at what requests name, at once.
const LOOKS_MAX: usize = 256;
/// Those in one directory.
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

/// What a look keeps from others while it lasts.
#[derive(Default)]
struct Look {
    has_ended: bool,
    /// What its directory had left when it was late.
    rest: Option<OwnedSemaphorePermit>,
}

/// Look at what a path or URL names on a thread of its own, since what it lies on may hang; `None` if it does. The empty
/// place is whatever the node's own volumes have.
pub(super) async fn in_time<T: Send + 'static>(
    place: &str,
    time_max: Duration,
    look: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let directory = directory(place);
    let is_own = directory.is_empty();
    let looks = looks_of(directory);
    let kept = Arc::new(Mutex::new(Look::default()));
    let (own, keeps) = (Arc::clone(&looks), Arc::clone(&kept));
    let looked = async move {
        let permit = own.acquire_owned().await.ok()?;
        let shared = if is_own {
            None
        } else {
            Some(LOOKS.acquire().await.ok()?)
        };
        let look = move || {
            let _permits = (permit, shared);
            let found = look();
            let mut kept = lock(&keeps);
            kept.has_ended = true;
            kept.rest = None;
            found
        };
        tokio::task::spawn_blocking(look).await.ok()
    };
    let looked = tokio::time::timeout(time_max, looked).await;
    if looked.is_err() && !is_own {
        let mut kept = lock(&kept);
        // If it has begun, it keeps a reference; the others wait until it ends.
        if !kept.has_ended {
            let left = looks.available_permits();
            kept.rest = looks.try_acquire_many_owned(left as u32).ok();
        }
    }
    looked.ok()?
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    /// A look that says that it begins, and ends once nobody holds the other end of `may_end`.
    fn hanging(begins: &Sender<()>, may_end: &Arc<Mutex<Receiver<()>>>) -> impl FnOnce() + use<> {
        let (begins, may_end) = (begins.clone(), Arc::clone(may_end));
        move || {
            let _ = begins.send(());
            let _ = lock(&may_end).recv();
        }
    }

    #[tokio::test]
    async fn directory_that_hangs_takes_a_bounded_number_of_threads_and_others_answer() {
        let (begins, begun) = channel();
        let (ends, may_end) = channel::<()>();
        let may_end = Arc::new(Mutex::new(may_end));
        let mut looks = tokio::task::JoinSet::new();
        for number in 0..2 * DIRECTORY_MAX {
            let hangs = hanging(&begins, &may_end);
            looks.spawn(async move {
                let place = format!("file:/looks-that-hang/{number}?raw=on");
                in_time(&place, Duration::from_millis(50), hangs).await
            });
        }
        for looked in looks.join_all().await {
            assert_eq!(looked, None);
        }
        drop(begins);
        let other = in_time("/looks-that-answer/log", PATIENCE, || 7).await;
        assert_eq!(other, Some(7));
        drop(ends);
        assert_eq!(begun.iter().count(), DIRECTORY_MAX);
        let again = in_time("file:/looks-that-hang/log", PATIENCE, || 8).await;
        assert_eq!(again, Some(8));
    }

    #[tokio::test]
    async fn directory_that_is_late_gets_no_more_threads_until_it_answers() {
        let (begins, begun) = channel();
        let (ends, may_end) = channel::<()>();
        let may_end = Arc::new(Mutex::new(may_end));
        for number in 0..3 {
            let hangs = hanging(&begins, &may_end);
            let place = format!("file:/looks-that-are-late/{number}");
            let looked = in_time(&place, Duration::from_millis(50), hangs).await;
            assert_eq!(looked, None);
        }
        drop(begins);
        drop(ends);
        assert_eq!(begun.iter().count(), 1);
        let again = in_time("file:/looks-that-are-late/log", PATIENCE, || 8).await;
        assert_eq!(again, Some(8));
    }
}
