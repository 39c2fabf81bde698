//! Who may open which volume.
//!
//! ```text
//!  the client came                          allow = []   allow = ["dns:a"]      allow = ["any"]
//!  over a unix socket                       opens        opens                  opens
//!  with a certificate that was verified     refused      opens if it is `a`     opens
//!  over TCP that asks for no certificate    opens        refused                opens
//! ```
//!
//! Invariants:
//! 1. A name counts only if it is in a certificate that TLS has verified.
//! 2. A volume that names nobody is opened by no certificate: an authority signs for more than one
//!    purpose, and a new volume is nobody's until somebody says whose it is.
//! 3. A volume that names clients is opened by nobody who has shown no name.
//! 4. A revoked identity opens nothing, whatever is allowed.
//!
//! Names are compared whole: no wildcard, neither in a rule nor in a certificate, stands for others.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hdcs_core::base::limits::{ALLOWED_CLIENTS_MAX, CLIENT_NAME_BYTES_MAX, CLIENT_NAMES_MAX};
use rustls::pki_types::CertificateDer;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

/// The word for "every client whose certificate is good".
const ANY: &str = "any";

/// A name in a client's certificate, one of its subject alternative names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Name {
    /// Of a host, in lower case.
    Dns(String),
    /// Such as SPIFFE's.
    Uri(String),
    /// A mail address, its domain in lower case.
    Email(String),
}

impl Name {
    fn dns(name: &str) -> Self {
        Self::Dns(name.to_ascii_lowercase())
    }

    fn email(address: &str) -> Self {
        match address.rsplit_once('@') {
            Some((local, domain)) => {
                Self::Email(format!("{local}@{}", domain.to_ascii_lowercase()))
            }
            None => Self::Email(address.to_owned()),
        }
    }

    /// The name that somebody wrote, with its kind before it or not; `None` if no certificate can have it.
    fn parse(text: &str) -> Option<Self> {
        let is_host = |text: &str| {
            let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
            text.len() <= 253
                && text.starts_with(|c: char| c.is_ascii_alphanumeric())
                && text.chars().all(is_allowed)
        };
        let is_plain = |text: &str| {
            text.len() <= CLIENT_NAME_BYTES_MAX && text.chars().all(|c| c.is_ascii_graphic())
        };
        let is_address = |text: &str| {
            let parts = text.rsplit_once('@');
            is_plain(text)
                && parts.is_some_and(|(local, domain)| !local.is_empty() && is_host(domain))
        };
        let is_uri = |text: &str| {
            let parts = text.split_once(':');
            is_plain(text)
                && parts.is_some_and(|(scheme, rest)| !scheme.is_empty() && !rest.is_empty())
        };
        if let Some(host) = text.strip_prefix("dns:") {
            return is_host(host).then(|| Self::dns(host));
        }
        if let Some(uri) = text.strip_prefix("uri:") {
            return is_uri(uri).then(|| Self::Uri(uri.to_owned()));
        }
        if let Some(address) = text.strip_prefix("email:") {
            return is_address(address).then(|| Self::email(address));
        }
        if text.contains("://") {
            is_uri(text).then(|| Self::Uri(text.to_owned()))
        } else if text.contains('@') {
            is_address(text).then(|| Self::email(text))
        } else {
            is_host(text).then(|| Self::dns(text))
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dns(name) => write!(f, "dns:{name}"),
            Self::Uri(uri) => write!(f, "uri:{uri}"),
            Self::Email(address) => write!(f, "email:{address}"),
        }
    }
}

/// A client that has shown a certificate which was verified.
#[derive(Debug)]
pub struct Identity {
    names: Vec<Name>,
    /// The certificate and what leads to its authority, to be verified again when that has changed.
    chain: Vec<CertificateDer<'static>>,
    /// From where it came, if that is known.
    address: Option<SocketAddr>,
    revoked: AtomicBool,
}

impl Identity {
    /// The owner of a chain of certificates, its own first, that was verified.
    pub fn new(chain: &[CertificateDer<'_>], address: Option<SocketAddr>) -> Self {
        Self {
            names: chain.first().map(|own| names_of(own)).unwrap_or_default(),
            chain: chain.iter().map(|one| one.clone().into_owned()).collect(),
            address,
            revoked: AtomicBool::new(false),
        }
    }

    /// Its certificates, its own first.
    pub fn chain(&self) -> &[CertificateDer<'static>] {
        &self.chain
    }

    /// The names in its certificate, in words.
    pub fn names(&self) -> String {
        in_words(&self.names)
    }

    /// It is trusted no more.
    pub fn revoke(&self) {
        self.revoked.store(true, Ordering::Release);
    }

    /// Whether it is trusted no more.
    pub fn is_revoked(&self) -> bool {
        self.revoked.load(Ordering::Acquire)
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.names[..] {
            [] => f.write_str("a client whose certificate has no name")?,
            names => write!(f, "client {}", in_words(names))?,
        }
        self.address
            .map_or(Ok(()), |address| write!(f, " at {address}"))
    }
}

fn in_words(names: &[Name]) -> String {
    match names {
        [] => "no name".to_owned(),
        [name] => name.to_string(),
        [first, more @ ..] => format!("{first} (and {} more names)", more.len()),
    }
}

/// The names of a certificate that count. What cannot be parsed has none.
fn names_of(certificate: &CertificateDer<'_>) -> Vec<Name> {
    let Ok((_, certificate)) = X509Certificate::from_der(certificate) else {
        return Vec::new();
    };
    let Ok(Some(extension)) = certificate.subject_alternative_name() else {
        return Vec::new();
    };
    let names = extension.value.general_names.iter();
    let names = names.filter_map(|name| match name {
        GeneralName::DNSName(name) => Some(Name::dns(name)),
        GeneralName::URI(uri) => Some(Name::Uri((*uri).to_owned())),
        GeneralName::RFC822Name(address) => Some(Name::email(address)),
        _ => None,
    });
    let is_short = |name: &Name| match name {
        Name::Dns(text) | Name::Uri(text) | Name::Email(text) => {
            text.len() <= CLIENT_NAME_BYTES_MAX
        }
    };
    names.filter(is_short).take(CLIENT_NAMES_MAX).collect()
}

/// Who is at the other end of a connection.
#[derive(Clone, Debug, Default)]
pub enum Peer {
    /// Somebody who was asked for no name.
    #[default]
    Unnamed,
    /// Whoever may open the node's unix socket: its owner, and root.
    Local,
    /// The owner of a certificate.
    Named(Arc<Identity>),
}

impl Peer {
    /// Whether it was trusted once and is so no more.
    pub fn is_revoked(&self) -> bool {
        matches!(self, Self::Named(identity) if identity.is_revoked())
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unnamed => f.write_str("a client without a certificate"),
            Self::Local => f.write_str("a local client"),
            Self::Named(identity) => identity.fmt(f),
        }
    }
}

/// Why a list of clients was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AllowError {
    /// What is no name of a client.
    #[error("{0:?} is no name that a certificate has")]
    Name(String),
    /// Too many.
    #[error("at most {ALLOWED_CLIENTS_MAX} clients, not {0}")]
    TooMany(usize),
}

/// The clients that may open a volume over TCP. None by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allow {
    names: Arc<[Name]>,
    any: bool,
}

impl Allow {
    /// Everybody.
    pub fn any() -> Self {
        Self {
            any: true,
            ..Self::default()
        }
    }

    /// What somebody wrote: names, or the word `any`.
    pub fn parse<'a>(items: impl IntoIterator<Item = &'a str>) -> Result<Self, AllowError> {
        let (mut names, mut any) = (Vec::new(), false);
        for item in items {
            if item == ANY {
                any = true;
                continue;
            }
            let name = Name::parse(item).ok_or_else(|| AllowError::Name(item.to_owned()))?;
            if !names.contains(&name) {
                names.push(name);
            }
            if names.len() > ALLOWED_CLIENTS_MAX {
                return Err(AllowError::TooMany(names.len()));
            }
        }
        let names = names.into();
        Ok(Self { names, any })
    }

    /// The same, as it would be written.
    pub fn items(&self) -> Vec<String> {
        let any = self.any.then(|| ANY.to_owned());
        any.into_iter()
            .chain(self.names.iter().map(ToString::to_string))
            .collect()
    }

    /// The rule of the table above.
    pub fn lets_in(&self, peer: &Peer) -> bool {
        match peer {
            Peer::Local => true,
            Peer::Unnamed => self.any || self.names.is_empty(),
            Peer::Named(identity) if identity.is_revoked() => false,
            Peer::Named(identity) => {
                self.any || identity.names.iter().any(|name| self.names.contains(name))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(names: &[&str]) -> Peer {
        let names = names
            .iter()
            .map(|name| Name::parse(name).unwrap())
            .collect();
        Peer::Named(Arc::new(Identity {
            names,
            chain: Vec::new(),
            address: None,
            revoked: AtomicBool::new(false),
        }))
    }

    fn allow(items: &[&str]) -> Allow {
        Allow::parse(items.iter().copied()).unwrap()
    }

    #[test]
    fn allow_lets_in_whom_the_table_says() {
        let (none, some, any) = (allow(&[]), allow(&["dns:a"]), allow(&["any"]));
        let rows = [
            (Peer::Local, [true, true, true]),
            (named(&["a"]), [false, true, true]),
            (named(&["b"]), [false, false, true]),
            (named(&[]), [false, false, true]),
            (Peer::Unnamed, [true, false, true]),
        ];
        for (peer, expected) in rows {
            let found = [&none, &some, &any].map(|allow| allow.lets_in(&peer));
            assert_eq!(found, expected, "{peer}");
        }
        let revoked = named(&["a"]);
        let Peer::Named(identity) = &revoked else {
            unreachable!()
        };
        identity.revoke();
        assert!(
            ![none, some, any]
                .iter()
                .any(|allow| allow.lets_in(&revoked))
        );
    }

    #[test]
    fn names_are_compared_whole_and_by_kind() {
        let peer = named(&["dns:Client.Example", "spiffe://x/A", "Me@Example.org"]);
        for good in [
            "client.example",
            "CLIENT.example",
            "uri:spiffe://x/A",
            "email:Me@EXAMPLE.org",
        ] {
            assert!(allow(&["other", good]).lets_in(&peer), "{good}");
        }
        for bad in [
            "example",
            "lient.example",
            "a.client.example",
            "spiffe://x/a",
            "spiffe://x/A/b",
            "me@example.org",
        ] {
            assert!(!allow(&[bad]).lets_in(&peer), "{bad}");
        }
        assert!(!allow(&["dns:x"]).lets_in(&named(&["uri:x:x"])));
    }

    #[test]
    fn names_that_no_certificate_has_are_refused() {
        for bad in [
            "",
            "*",
            "*.example",
            "a b",
            "a,b",
            "dns:",
            "dns:-a",
            "uri:x",
            "email:@b",
            "a@",
            "a:b",
            "ä",
            "all:x",
        ] {
            assert_eq!(Allow::parse([bad]), Err(AllowError::Name(bad.to_owned())));
        }
        let long = format!("uri:x:{}", "y".repeat(CLIENT_NAME_BYTES_MAX));
        assert!(Allow::parse([&*long]).is_err());
        let many: Vec<String> = (0..=ALLOWED_CLIENTS_MAX)
            .map(|n| format!("host{n}"))
            .collect();
        assert!(matches!(
            Allow::parse(many.iter().map(String::as_str)),
            Err(AllowError::TooMany(_))
        ));
        assert!(Allow::parse(many[1..].iter().map(String::as_str)).is_ok());
    }

    #[test]
    fn allow_is_written_as_it_is_read() {
        let text = ["any", "dns:a", "uri:spiffe://b/c", "email:d@e"];
        assert_eq!(allow(&text).items(), text);
        assert_eq!(allow(&["a", "A", "dns:a"]).items(), ["dns:a"]);
    }
}
