//! `dir:PATH`: a volume as files below a directory of any file system.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use std::{fs, io};

use super::objects::{self, ObjectsPlace, Reach};
use super::url::{Given, OptionList, Scheme, UrlError};
use super::{BackendError, Place};
use crate::stores::dir::Dir;
use crate::stores::{Store, is_name};

/// See the module.
pub const SCHEME: Scheme = Scheme {
    name: "dir",
    form: "dir:PATH",
    options: &[objects::TIMEOUT, objects::RETRY],
    parse,
};

/// Take a URL's place apart.
pub fn parse_place(given: &Given<'_>, options: &mut OptionList) -> Result<ObjectsPlace, UrlError> {
    let path = given.place.trim_end_matches('/');
    if !is_path(path) {
        return Err(given.refuse(
            "it must be the absolute path of a directory, of letters, digits, `-`, `_`, `.` and `/`, as in \
             dir:/srv/slow/NAME",
        ));
    }
    let timeout = objects::seconds(options, objects::TIMEOUT)?;
    let patience = objects::seconds(options, objects::RETRY)?;
    let path = path.to_owned();
    Ok(ObjectsPlace::new(
        Arc::new(InDirectory { path, timeout }),
        patience,
    ))
}

fn parse(given: &Given<'_>, options: &mut OptionList) -> Result<Box<dyn Place>, UrlError> {
    parse_place(given, options).map(|place| Box::new(place) as Box<dyn Place>)
}

fn is_path(path: &str) -> bool {
    path.strip_prefix('/').is_some_and(is_name)
}

/// Whether a path names nothing. Blocks.
pub fn is_absent(path: &Path) -> bool {
    fs::symlink_metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

#[derive(Debug)]
struct InDirectory {
    path: String,
    timeout: Duration,
}

impl Reach for InDirectory {
    fn name(&self) -> String {
        format!("dir {}", self.path)
    }

    fn local_path(&self) -> Option<&Path> {
        Some(Path::new(&self.path))
    }

    fn is_gone(&self) -> bool {
        is_absent(Path::new(&self.path))
    }

    fn location(&self) -> String {
        self.path.clone()
    }

    fn elsewhere(&self, location: &str) -> Option<Arc<dyn Reach>> {
        let (path, timeout) = (location.to_owned(), self.timeout);
        is_path(location).then(|| Arc::new(InDirectory { path, timeout }) as _)
    }

    fn store(&self) -> String {
        "dir".to_owned()
    }

    fn proves_absence(&self) -> bool {
        false
    }

    fn reach(&self, timeout: Option<Duration>) -> Result<Arc<dyn Store>, BackendError> {
        let timeout = timeout.map_or(self.timeout, |most| most.min(self.timeout));
        Ok(Arc::new(Dir::new(&PathBuf::from(&self.path), timeout)))
    }
}

#[cfg(test)]
mod tests {
    use crate::url::BackendUrl;

    #[test]
    fn places_are_told_apart() {
        let name = |url: &str| BackendUrl::parse(url).unwrap().place.name();
        assert_eq!(name("dir:/srv/a?timeout_s=5"), name("dir:/srv/a/"));
        assert_ne!(name("dir:/srv/a"), name("dir:/srv/ab"));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for url in [
            "dir:",
            "dir:/",
            "dir:srv/a",
            "dir:/srv/../a",
            "dir:/srv/a b",
        ] {
            let refusal = BackendUrl::parse(url).unwrap_err().to_string();
            assert!(refusal.contains("absolute path of a directory"), "{url}");
        }
    }
}
