//! Values of configuration keys: from TOML, from `key=value` on the command line, from the control
//! API and the catalogue, each checked against what its key takes.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use hdcs_api::value::Value;
use hdcs_core::base::codec::Method;
use hdcs_core::base::limits::{BLOCK_BYTES, CACHE_LINE_BLOCKS_MAX};
use hdcs_core::cache::Tiering;
use hdcs_core::volume::{Discard, LogFailure, Persist, Policy, WhenFull};
use hdcs_device::durability::Durability;
use hdcs_frontend::access::Allow;

/// The value in a TOML file; what no key takes is described for the error.
pub fn from_toml(value: &toml::Value) -> Result<Value, String> {
    Ok(match value {
        toml::Value::Boolean(truth) => Value::Bool(*truth),
        toml::Value::Integer(number) => Value::Int(*number),
        toml::Value::String(text) => Value::Text(text.clone()),
        toml::Value::Array(items) => Value::List(
            items
                .iter()
                .map(|item| match item {
                    toml::Value::String(text) => Some(text.clone()),
                    toml::Value::Integer(number) => Some(number.to_string()),
                    _ => None,
                })
                .collect::<Option<_>>()
                .ok_or("a list that holds something other than strings and whole numbers")?,
        ),
        toml::Value::Float(number) => return Err(format!("the fraction {number}")),
        toml::Value::Datetime(date) => return Err(format!("the date {date}")),
        toml::Value::Table(_) => return Err("a table".to_owned()),
    })
}

/// A type that a key can have.
pub trait Setting: Sized {
    /// What restricts its values beside the type.
    type Bounds;
    /// What the key takes, for errors and documentation.
    fn expects(bounds: &Self::Bounds) -> String;
    /// The value, or `None` if it is not what the key takes.
    fn accept(value: &Value, bounds: &Self::Bounds) -> Option<Self>;
    /// As it would be given.
    fn value(&self) -> Value;
}

impl Setting for u64 {
    type Bounds = RangeInclusive<u64>;
    fn expects(bounds: &Self::Bounds) -> String {
        format!("a whole number from {} to {}", bounds.start(), bounds.end())
    }
    fn accept(value: &Value, bounds: &Self::Bounds) -> Option<Self> {
        match value {
            Value::Int(number) => u64::try_from(*number).ok().filter(|n| bounds.contains(n)),
            _ => None,
        }
    }
    fn value(&self) -> Value {
        // No key's range reaches beyond.
        Value::Int(i64::try_from(*self).unwrap_or(i64::MAX))
    }
}

impl Setting for bool {
    type Bounds = ();
    fn expects((): &()) -> String {
        "true or false".to_owned()
    }
    fn accept(value: &Value, (): &()) -> Option<Self> {
        match value {
            Value::Bool(truth) => Some(*truth),
            _ => None,
        }
    }
    fn value(&self) -> Value {
        Value::Bool(*self)
    }
}

/// A type with a few values, each with a name.
pub trait Word: Copy + PartialEq + 'static {
    /// Names and values.
    const WORDS: &'static [(&'static str, Self)];
    /// The name of a value.
    fn word(self) -> &'static str {
        Self::WORDS
            .iter()
            .find(|(_, value)| *value == self)
            .map_or("?", |(word, _)| word)
    }
    /// The value of a name.
    fn from_word(text: &str) -> Option<Self> {
        let found = Self::WORDS.iter().find(|(word, _)| *word == text);
        found.map(|(_, value)| *value)
    }
}

impl Word for Persist {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("on-write", Self::OnWrite),
        ("on-flush", Self::OnFlush),
        ("auto", Self::Auto),
    ];
}

impl Word for Policy {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("write-back", Self::WriteBack),
        ("write-through", Self::WriteThrough),
        ("write-around", Self::WriteAround),
        ("read-only", Self::ReadOnly),
        ("pass-through", Self::PassThrough),
    ];
}

impl Word for Option<Method> {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("off", None),
        ("lz4", Some(Method::Lz4)),
        ("zstd", Some(Method::Zstd)),
    ];
}

impl Word for WhenFull {
    const WORDS: &'static [(&'static str, Self)] = &[("wait", Self::Wait), ("error", Self::Error)];
}

/// Whether something is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Switch {
    /// It is not.
    #[default]
    Off,
    /// It is.
    On,
}

impl Word for Switch {
    const WORDS: &'static [(&'static str, Self)] = &[("off", Self::Off), ("on", Self::On)];
}

impl Word for LogFailure {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("read-only", Self::ReadOnly),
        ("pass-through", Self::PassThrough),
    ];
}

impl Word for Discard {
    const WORDS: &'static [(&'static str, Self)] =
        &[("pass", Self::Pass), ("ignore", Self::Ignore)];
}

impl Word for Tiering {
    const WORDS: &'static [(&'static str, Self)] =
        &[("benefit", Self::Benefit), ("recency", Self::Recency)];
}

/// Nothing says: by what is measured.
impl Word for Option<Durability> {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("measure", None),
        ("dsync", Some(Durability::Dsync)),
        ("fdatasync", Some(Durability::Fdatasync)),
    ];
}

/// Implements [`Setting`] for a [`Word`].
macro_rules! word_setting {
    ($kind:ty) => {
        impl Setting for $kind {
            type Bounds = ();
            fn expects((): &()) -> String {
                let words: Vec<_> = Self::WORDS
                    .iter()
                    .map(|(w, _)| format!("\"{w}\""))
                    .collect();
                format!("one of {}", words.join(", "))
            }
            fn accept(value: &Value, (): &()) -> Option<Self> {
                match value {
                    Value::Text(text) => Self::from_word(text),
                    _ => None,
                }
            }
            fn value(&self) -> Value {
                Value::Text(self.word().to_owned())
            }
        }
    };
}
word_setting!(Persist);
word_setting!(Policy);
word_setting!(Option<Method>);
word_setting!(WhenFull);
word_setting!(LogFailure);
word_setting!(Discard);
word_setting!(Switch);
word_setting!(Tiering);
word_setting!(Option<Durability>);

/// Size of a line of the SSD tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LineKib(u64);

impl LineKib {
    /// Sizes whose index keeps its promise (16 bytes per 4 KiB) and that a small read can afford.
    const SIZES: [u64; 3] = [16, 32, 64];

    /// In blocks.
    pub const fn blocks(self) -> usize {
        self.0 as usize * 1024 / BLOCK_BYTES
    }
}

const _: () = assert!(LineKib(LineKib::SIZES[2]).blocks() == CACHE_LINE_BLOCKS_MAX);

impl Default for LineKib {
    fn default() -> Self {
        Self(Self::SIZES[0])
    }
}

impl Setting for LineKib {
    type Bounds = ();
    fn expects((): &()) -> String {
        let [small, middle, large] = Self::SIZES;
        format!("{small}, {middle} or {large}")
    }
    fn accept(value: &Value, (): &()) -> Option<Self> {
        let found = u64::accept(value, &(0..=u64::MAX))?;
        Self::SIZES.contains(&found).then_some(Self(found))
    }
    fn value(&self) -> Value {
        self.0.value()
    }
}

/// How many threads the data path has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shards {
    count: usize,
    /// Nobody has said it.
    is_auto: bool,
}

impl Default for Shards {
    /// One, until as many are chosen as are best.
    fn default() -> Self {
        Self {
            count: 1,
            is_auto: true,
        }
    }
}

impl Shards {
    /// More than any machine makes use of.
    pub const MAX: usize = 64;
    const AUTO: &'static str = "auto";

    /// So many.
    pub const fn of(count: usize) -> Self {
        Self {
            count,
            is_auto: false,
        }
    }

    /// How many that is.
    pub const fn count(self) -> usize {
        self.count
    }

    /// Whether nobody has said it.
    pub const fn is_auto(self) -> bool {
        self.is_auto
    }

    /// Have so many, since nobody has said it.
    pub const fn choose(&mut self, count: usize) {
        self.count = count;
    }
}

impl Setting for Shards {
    type Bounds = ();
    fn expects((): &()) -> String {
        format!(
            "\"{}\" or a whole number from 1 to {}",
            Self::AUTO,
            Self::MAX
        )
    }
    fn accept(value: &Value, (): &()) -> Option<Self> {
        match value {
            Value::Text(text) if text == Self::AUTO => Some(Self::default()),
            Value::Int(number) => {
                let number = usize::try_from(*number).ok();
                let number = number.filter(|number| (1..=Self::MAX).contains(number));
                number.map(Self::of)
            }
            _ => None,
        }
    }
    fn value(&self) -> Value {
        if self.is_auto {
            return Value::Text(Self::AUTO.to_owned());
        }
        (self.count as u64).value()
    }
}

/// Processors, one for each thread of the data path; none: any.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Processors(Vec<usize>);

impl Processors {
    /// By the numbers of threads; empty: they keep to none.
    pub fn numbers(&self) -> &[usize] {
        &self.0
    }

    /// One number, or those from one to another: `8`, `0-3`.
    fn range(text: &str, bounds: &RangeInclusive<usize>) -> Option<RangeInclusive<usize>> {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let number = |text: &str| {
            let number = text.trim().parse().ok();
            number.filter(|number| bounds.contains(number))
        };
        let (first, last) = (number(first)?, number(last)?);
        (first <= last).then_some(first..=last)
    }

    /// Refuse what does not fit so many shards.
    pub(super) fn check(&self, shards: usize) -> Result<(), String> {
        let count = self.0.len();
        if count != 0 && count != shards {
            let (more, s) = (
                if count > 1 { "s" } else { "" },
                if shards > 1 { "s" } else { "" },
            );
            return Err(format!(
                "`shard_processor` names {count} processor{more} for {shards} shard{s} (`shards`): name one for each, or \
                 none"
            ));
        }
        let twice =
            (self.0.iter().enumerate()).find(|(place, number)| self.0[..*place].contains(number));
        match twice {
            Some((_, number)) => Err(format!(
                "`shard_processor` names processor {number} twice: a shard needs one for itself"
            )),
            None => Ok(()),
        }
    }
}

impl Setting for Processors {
    type Bounds = RangeInclusive<usize>;
    fn expects(bounds: &Self::Bounds) -> String {
        let (start, end) = (bounds.start(), bounds.end());
        format!(
            "a whole number from {start} to {end}, or several and ranges in quotes, such as \"0-3,8\"; empty: any"
        )
    }
    fn accept(value: &Value, bounds: &Self::Bounds) -> Option<Self> {
        let range = |text: &str| Self::range(text, bounds);
        let ranges: Option<Vec<_>> = match value {
            Value::Text(text) if text.is_empty() => Some(Vec::new()),
            Value::Text(text) => text.split(',').map(range).collect(),
            Value::List(items) => items.iter().map(|item| range(item)).collect(),
            Value::Int(one) => range(&one.to_string()).map(|one| vec![one]),
            Value::Bool(_) => None,
        };
        ranges.map(|ranges| Self(ranges.into_iter().flatten().collect()))
    }
    fn value(&self) -> Value {
        if let [number] = self.0[..] {
            return (number as u64).value();
        }
        let numbers: Vec<String> = self.0.iter().map(usize::to_string).collect();
        Value::Text(numbers.join(","))
    }
}

/// A path, or nothing; what nothing means is said by the bounds.
impl Setting for Option<PathBuf> {
    type Bounds = &'static str;
    fn expects(bounds: &Self::Bounds) -> String {
        format!("a path in quotes; empty: {bounds}")
    }
    fn accept(value: &Value, _bounds: &Self::Bounds) -> Option<Self> {
        match value {
            Value::Text(text) if text.is_empty() => Some(None),
            Value::Text(text) if !text.contains('\0') => Some(Some(PathBuf::from(text))),
            _ => None,
        }
    }
    fn value(&self) -> Value {
        let path = self.as_deref().map_or("".into(), Path::to_string_lossy);
        Value::Text(path.into_owned())
    }
}

/// A TCP address on which nothing but this host can reach us, or nothing.
impl Setting for Option<SocketAddr> {
    type Bounds = ();
    fn expects((): &()) -> String {
        "a loopback address in quotes, such as \"127.0.0.1:9100\"; empty: off".to_owned()
    }
    fn accept(value: &Value, (): &()) -> Option<Self> {
        match value {
            Value::Text(text) if text.is_empty() => Some(None),
            Value::Text(text) => parse_address(text)
                .filter(|address| address.ip().is_loopback())
                .map(Some),
            _ => None,
        }
    }
    fn value(&self) -> Value {
        Value::Text(self.map_or(String::new(), |address| address.to_string()))
    }
}

/// Where a frontend listens.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub enum Listen {
    /// A unix socket; a relative path is below the data directory.
    Unix(PathBuf),
    /// A TCP address.
    Tcp(SocketAddr),
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => write!(f, "tcp:{address}"),
        }
    }
}

impl Listen {
    fn parse(text: &str) -> Option<Self> {
        if let Some(path) = text.strip_prefix("unix:") {
            (!path.is_empty() && !path.contains('\0')).then(|| Self::Unix(path.into()))
        } else {
            text.strip_prefix("tcp:")
                .and_then(parse_address)
                .map(Self::Tcp)
        }
    }
}

/// `IP:PORT`, `[IPv6]:PORT` or `localhost:PORT`. Names are not looked up: a listening address is a
/// security decision, and a resolver must not make it.
fn parse_address(text: &str) -> Option<SocketAddr> {
    if let Some(port) = text.strip_prefix("localhost:") {
        let port = port.parse().ok()?;
        return Some(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port));
    }
    text.parse().ok()
}

impl Setting for Vec<Listen> {
    type Bounds = ();
    fn expects((): &()) -> String {
        "a list of \"unix:PATH\" and \"tcp:IP:PORT\"".to_owned()
    }
    fn accept(value: &Value, (): &()) -> Option<Self> {
        match value {
            Value::List(items) => items.iter().map(|item| Listen::parse(item)).collect(),
            Value::Text(item) => Listen::parse(item).map(|listen| vec![listen]),
            _ => None,
        }
    }
    fn value(&self) -> Value {
        Value::List(self.iter().map(ToString::to_string).collect())
    }
}

impl Setting for Allow {
    type Bounds = ();
    fn expects((): &()) -> String {
        "a list of names of certificates, \"dns:NAME\", \"uri:URI\" or \"email:ADDRESS\", or \"any\" (at the command \
         line with commas between)"
            .to_owned()
    }
    fn accept(value: &Value, (): &()) -> Option<Self> {
        match value {
            Value::List(items) => Self::parse(items.iter().map(String::as_str)).ok(),
            Value::Text(text) if text.is_empty() => Some(Self::default()),
            Value::Text(text) => Self::parse(text.split(',').map(str::trim)).ok(),
            _ => None,
        }
    }
    fn value(&self) -> Value {
        Value::List(self.items())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listen_forms() {
        assert_eq!(
            Listen::parse("unix:nbd.sock"),
            Some(Listen::Unix("nbd.sock".into()))
        );
        for good in ["tcp:127.0.0.1:10809", "tcp:[::1]:1", "tcp:localhost:0"] {
            assert!(
                matches!(Listen::parse(good), Some(Listen::Tcp(_))),
                "{good}"
            );
        }
        for bad in [
            "",
            "unix:",
            "tcp:",
            "tcp:example.org:1",
            "tcp:1.2.3.4",
            "udp:1.2.3.4:5",
            "tcp:1.2.3.4:99999",
        ] {
            assert_eq!(Listen::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn typed_values_have_types() {
        assert_eq!(Value::from_typed("5"), Value::Int(5));
        assert_eq!(Value::from_typed("true"), Value::Bool(true));
        assert_eq!(Value::from_typed("5s"), Value::Text("5s".into()));
    }

    #[test]
    fn metrics_address_must_be_loopback() {
        let text = |s: &str| Value::Text(s.to_owned());
        assert!(<Option<SocketAddr>>::accept(&text("127.0.0.1:1"), &()).is_some());
        assert!(<Option<SocketAddr>>::accept(&text("0.0.0.0:1"), &()).is_none());
    }
}
