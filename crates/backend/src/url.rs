//! Backend URLs: `SCHEME:PLACE?option=value&…`.
//!
//! Each backend's own file takes its place and its options apart ([`Scheme`]); what is common is
//! here. `%XX` stands for one byte, so that a path may hold `?`, `&` and `%`. An option that nobody
//! knows is an error that names the nearest one that exists.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::{Place, SCHEMES};
use crate::filters;

/// Schemes of the contract that are not there yet.
const PLANNED: &[&str] = &["ec"];

/// What is wrong with a URL.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum UrlError {
    /// No scheme, or one that is not known.
    #[error("backend `{0}`: the scheme is not known; use {forms}", forms = forms())]
    Scheme(String),
    /// A scheme of a later version.
    #[error("backend `{url}`: {scheme} is not available yet; available is {forms}", forms = forms())]
    Planned {
        /// As given.
        url: String,
        /// Its scheme.
        scheme: &'static str,
    },
    /// A scheme that was left out of this program.
    #[error(
        "backend `{url}`: this program was built without {scheme}: run one that was built with it (`make build`)"
    )]
    LeftOut {
        /// As given.
        url: String,
        /// Its scheme.
        scheme: &'static str,
    },
    /// What follows the scheme is not what it must be.
    #[error("backend `{url}`: {must}")]
    Place {
        /// As given.
        url: String,
        /// What it must be.
        must: &'static str,
    },
    /// An escape is not two hexadecimal digits.
    #[error("backend: `{0}`: % must be followed by two hexadecimal digits (%25 is % itself)")]
    Escape(String),
    /// An option that does not exist.
    #[error("backend option `{name}` is not known{}", suggest(*nearest))]
    Unknown {
        /// As given.
        name: String,
        /// What was probably meant.
        nearest: Option<&'static str>,
    },
    /// A secret, which everybody would see who looks at the volume.
    #[error(
        "backend URL: it holds a secret ({what}), which would be shown to everybody and kept; put \
         secrets into the environment of `hdcs serve` or into a file (option `credentials`)"
    )]
    Secret {
        /// Where it stands.
        what: &'static str,
    },
    /// An option twice.
    #[error("backend option `{0}` is given twice")]
    Twice(String),
    /// An option whose value is not what it must be.
    #[error("backend option `{name}={value}`: must be {must}")]
    Value {
        /// The option.
        name: &'static str,
        /// As given.
        value: String,
        /// What it must be.
        must: &'static str,
    },
    /// An option that means nothing without another.
    #[error("backend option `{name}` needs `{needs}` too")]
    Needs {
        /// The option.
        name: &'static str,
        /// What is missing.
        needs: &'static str,
    },
}

fn suggest(nearest: Option<&'static str>) -> String {
    nearest.map_or_else(String::new, |name| format!("; did you mean `{name}`?"))
}

/// The forms of all URLs that can be used.
/// Schemes that this program was built without.
const LEFT_OUT: &[&str] = &[
    #[cfg(not(feature = "rbd"))]
    "rbd",
    #[cfg(not(feature = "s3"))]
    "s3",
    #[cfg(not(feature = "hdfs"))]
    "hdfs",
];

fn forms() -> String {
    let forms: Vec<&str> = SCHEMES.iter().map(|scheme| scheme.form).collect();
    forms.join(", ")
}

/// See [`Scheme::parse`].
pub type Parse = fn(&Given<'_>, &mut OptionList) -> Result<Box<dyn Place>, UrlError>;

/// How one kind of backend is named in a URL.
#[derive(Debug)]
pub struct Scheme {
    /// What stands before the colon.
    pub name: &'static str,
    /// The form of its URLs, for messages.
    pub form: &'static str,
    /// The names of its options, for suggestions.
    pub options: &'static [&'static str],
    /// Takes apart what follows the colon, and its own options.
    pub parse: Parse,
}

/// What is given to [`Scheme::parse`].
#[derive(Clone, Copy, Debug)]
pub struct Given<'a> {
    /// The whole URL, for messages.
    pub url: &'a str,
    /// What is between the colon and the options, not decoded.
    pub place: &'a str,
}

impl Given<'_> {
    /// It is not what it must be.
    pub fn refuse(&self, must: &'static str) -> UrlError {
        UrlError::Place {
            url: self.url.to_owned(),
            must,
        }
    }
}

/// A parsed URL.
#[derive(Debug)]
pub struct BackendUrl {
    /// Where the data is.
    pub place: Box<dyn Place>,
    /// What stands between.
    pub filters: filters::Options,
}

impl BackendUrl {
    /// Take a URL apart.
    pub fn parse(url: &str) -> Result<Self, UrlError> {
        let (name, rest) = url
            .split_once(':')
            .ok_or_else(|| UrlError::Scheme(url.to_owned()))?;
        if let Some(scheme) = PLANNED.iter().find(|planned| **planned == name) {
            let url = url.to_owned();
            return Err(UrlError::Planned { url, scheme });
        }
        if let Some(scheme) = LEFT_OUT.iter().find(|left_out| **left_out == name) {
            let url = url.to_owned();
            return Err(UrlError::LeftOut { url, scheme });
        }
        let scheme = SCHEMES.iter().find(|scheme| scheme.name == name);
        let scheme = scheme.ok_or_else(|| UrlError::Scheme(url.to_owned()))?;
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let mut options = OptionList::parse(query)?;
        let place = (scheme.parse)(&Given { url, place }, &mut options)?;
        let filters = filters::Options::parse(&mut options)?;
        options.finish(scheme)?;
        Ok(Self { place, filters })
    }
}

fn bad(name: &'static str, value: &str, must: &'static str) -> UrlError {
    UrlError::Value {
        name,
        value: value.to_owned(),
        must,
    }
}

/// Put bytes in the place of their escapes.
pub fn decode(text: &str) -> Result<Vec<u8>, UrlError> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        rest = tail;
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digits = tail
            .get(..2)
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .filter(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit()))
            .and_then(|digits| u8::from_str_radix(digits, 16).ok());
        let Some(value) = digits else {
            return Err(UrlError::Escape(text.to_owned()));
        };
        bytes.push(value);
        rest = &tail[2..];
    }
    Ok(bytes)
}

/// Options that have not been taken yet.
#[derive(Debug)]
pub struct OptionList(Vec<(String, String)>);

impl OptionList {
    /// The options of a URL: what follows its question mark.
    pub fn parse(query: &str) -> Result<Self, UrlError> {
        let mut list: Vec<(String, String)> = Vec::new();
        for option in query.split('&').filter(|option| !option.is_empty()) {
            let (name, value) = option.split_once('=').unwrap_or((option, ""));
            let value = String::from_utf8(decode(value)?)
                .map_err(|_| UrlError::Escape(option.to_owned()))?;
            if list.iter().any(|(known, _)| known == name) {
                return Err(UrlError::Twice(name.to_owned()));
            }
            list.push((name.to_owned(), value));
        }
        Ok(Self(list))
    }

    /// The value of an option.
    pub fn take(&mut self, name: &str) -> Option<String> {
        let index = self.0.iter().position(|(known, _)| known == name)?;
        Some(self.0.swap_remove(index).1)
    }

    /// An option that is a whole number.
    pub fn number(&mut self, name: &'static str, max: u64) -> Result<Option<u64>, UrlError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        match value.parse() {
            Ok(number) if number <= max => Ok(Some(number)),
            Ok(_) => Err(bad(name, &value, "a smaller number")),
            Err(_) => Err(bad(name, &value, "a whole number")),
        }
    }

    /// An option that is a share between 0 and 1.
    pub fn share(&mut self, name: &'static str) -> Result<Option<f64>, UrlError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        match value.parse::<f64>() {
            Ok(share) if (0.0..=1.0).contains(&share) => Ok(Some(share)),
            _ => Err(bad(name, &value, "a number from 0 to 1")),
        }
    }

    /// An option that is an absolute path.
    pub fn path(&mut self, name: &'static str) -> Result<Option<PathBuf>, UrlError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        if !value.starts_with('/') || value.contains('\0') {
            return Err(bad(name, &value, "an absolute path"));
        }
        Ok(Some(PathBuf::from(value)))
    }

    /// One of some words.
    pub fn word<T: Copy>(
        &mut self,
        name: &'static str,
        words: &[(&str, T)],
        must: &'static str,
    ) -> Result<Option<T>, UrlError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        words
            .iter()
            .find(|(word, _)| *word == value)
            .map(|(_, meaning)| Some(*meaning))
            .ok_or_else(|| bad(name, &value, must))
    }

    /// `on` or `off`.
    pub fn switch(&mut self, name: &'static str) -> Result<Option<bool>, UrlError> {
        self.word(name, &[("on", true), ("off", false)], "`on` or `off`")
    }

    /// Whatever is left is not known.
    fn finish(mut self, scheme: &Scheme) -> Result<(), UrlError> {
        let Some((name, _)) = self.0.pop() else {
            return Ok(());
        };
        let nearest = scheme
            .options
            .iter()
            .chain(filters::OPTIONS.iter().copied().flatten())
            .map(|known| (distance(&name, known), *known))
            .min()
            .filter(|(distance, known)| *distance <= known.len() / 2)
            .map(|(_, known)| known);
        Err(UrlError::Unknown { name, nearest })
    }
}

/// Levenshtein distance.
fn distance(a: &str, b: &str) -> usize {
    let b = b.as_bytes();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, left) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, &right) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(left != right);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

/// The backend URL of an absolute path: what would mean something in a URL is escaped.
pub fn file_url(path: &Path) -> String {
    let bytes = path.as_os_str().as_bytes();
    let is_text = path.to_str().is_some();
    let mut url = b"file:".to_vec();
    for &byte in bytes {
        if byte == b'%' || byte == b'?' || byte.is_ascii_control() || (byte >= 0x80 && !is_text) {
            url.extend(format!("%{byte:02X}").bytes());
        } else {
            url.push(byte);
        }
    }
    String::from_utf8_lossy(&url).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path_of(url: &str) -> PathBuf {
        let place = BackendUrl::parse(url).unwrap().place;
        place.path().unwrap().to_path_buf()
    }

    #[test]
    fn paths_may_hold_anything() {
        assert_eq!(path_of("file:/a/b"), PathBuf::from("/a/b"));
        assert_eq!(path_of("file:///a/b"), PathBuf::from("/a/b"));
        assert_eq!(path_of("file:/a%3Fb%25=c&d"), PathBuf::from("/a?b%=c&d"));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let message = |url: &str| BackendUrl::parse(url).unwrap_err().to_string();
        assert!(message("/a/b").contains("use file:PATH"));
        assert!(message("nfs:/a").contains("scheme"));
        assert!(message("ec:pool").contains("not available yet"));
        assert!(message("file:a").contains("absolute"));
        assert!(message("file:").contains("absolute"));
        assert!(message("file:/a%zz").contains("hexadecimal"));
        assert!(message("file:/a%4").contains("hexadecimal"));
        assert!(message("file:/a?delay=3").contains("did you mean `delay_us`"));
        assert!(!message("file:/a?xyzzyplugh=3").contains("did you mean"));
        assert!(message("file:/a?delay_us=ten").contains("whole number"));
        assert!(message("file:/a?delay_us=1&delay_us=2").contains("twice"));
        assert!(message("file:/a?error_rate=2").contains("from 0 to 1"));
        assert!(message("file:/a?error_rate=nan").contains("from 0 to 1"));
        assert!(message("file:/a?error_kind=boom&error_rate=1").contains("eio"));
        assert!(message("file:/a?direct=maybe").contains("`on` or `off`"));
        assert!(message("file:/a?log=relative").contains("absolute path"));
    }

    #[test]
    fn options_reach_their_filters() {
        let url = BackendUrl::parse("file:/a?delay_us=5&rate_mib=7&error_rate=0.5&seed=9").unwrap();
        assert_eq!(url.filters.delay.as_ref().unwrap().delay.0, 5_000);
        assert_eq!(url.filters.rate.as_ref().unwrap().bytes_per_second, 7 << 20);
        assert!((url.filters.error.as_ref().unwrap().rate - 0.5).abs() < 1e-9);
        assert_eq!(url.filters.seed, 9);
        assert!(url.filters.log.is_none());
    }
}
