//! `hdfs://HOST[:PORT]/PATH`: a volume as files below a directory of HDFS.

use std::sync::Arc;
use std::time::Duration;

use super::objects::{self, ObjectsPlace, Reach};
use super::url::{Given, OptionList, Scheme, UrlError};
use super::{BackendError, Place};
use crate::stores::hdfs::{Config, Hdfs};
use crate::stores::{Store, is_name};

/// See the module.
pub const SCHEME: Scheme = Scheme {
    name: "hdfs",
    form: "hdfs://HOST/PATH",
    options: &[
        "user",
        "conf",
        "replication",
        objects::TIMEOUT,
        objects::RETRY,
    ],
    parse,
};

/// More replicas than that HDFS refuses.
const REPLICATION_MAX: u64 = 512;

/// Take a URL's place apart.
pub fn parse_place(given: &Given<'_>, options: &mut OptionList) -> Result<ObjectsPlace, UrlError> {
    if given.place.contains('@') {
        return Err(UrlError::Secret {
            what: "what stands before the @; a user is named by the option `user`",
        });
    }
    let place = given.place.strip_prefix("//").unwrap_or("");
    let parts = place.trim_end_matches('/').split_once('/');
    let good = |authority: &str, path: &str| is_authority(authority) && is_name(path);
    let Some((authority, path)) = parts.filter(|(authority, path)| good(authority, path)) else {
        return Err(given.refuse(
            "it must name a NameNode and a directory of letters, digits, `-`, `_`, `.` and `/`, as in \
             hdfs://HOST:8020/volumes/NAME",
        ));
    };
    let config = Config {
        authority: authority.to_owned(),
        path: format!("/{path}"),
        user: options.take("user"),
        conf: options.path("conf")?,
        replication: options
            .number("replication", REPLICATION_MAX)?
            .map(|replicas| replicas as u32),
        timeout: objects::seconds(options, objects::TIMEOUT)?,
    };
    let patience = objects::seconds(options, objects::RETRY)?;
    Ok(ObjectsPlace::new(
        Arc::new(InDirectory { config }),
        patience,
    ))
}

fn parse(given: &Given<'_>, options: &mut OptionList) -> Result<Box<dyn Place>, UrlError> {
    parse_place(given, options).map(|place| Box::new(place) as Box<dyn Place>)
}

/// Whether it may be `HOST`, `HOST:PORT` or the name of a service.
fn is_authority(text: &str) -> bool {
    let (host, port) = text.split_once(':').unwrap_or((text, "1"));
    is_name(host) && !host.contains('/') && port.parse::<u16>().is_ok_and(|port| port > 0)
}

#[derive(Debug)]
struct InDirectory {
    config: Config,
}

impl Reach for InDirectory {
    fn name(&self) -> String {
        format!("hdfs {}{}", self.config.authority, self.config.path)
    }

    fn location(&self) -> String {
        self.config.path.clone()
    }

    fn elsewhere(&self, location: &str) -> Option<Arc<dyn Reach>> {
        let path = location.strip_prefix('/')?;
        let config = Config {
            path: location.to_owned(),
            ..self.config.clone()
        };
        is_name(path).then(|| Arc::new(InDirectory { config }) as _)
    }

    fn store(&self) -> String {
        format!("hdfs {}", self.config.authority)
    }

    fn reach(&self, timeout: Option<Duration>) -> Result<Arc<dyn Store>, BackendError> {
        let mut config = self.config.clone();
        config.timeout = timeout.map_or(config.timeout, |most| most.min(config.timeout));
        match Hdfs::new(&config) {
            Ok(store) => Ok(Arc::new(store)),
            Err(error) => Err(BackendError::Refused(error.to_string())),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::url::BackendUrl;

    #[test]
    fn places_are_told_apart() {
        let name = |url: &str| BackendUrl::parse(url).unwrap().place.name();
        let one = name("hdfs://host:8020/a/b?user=u&replication=2");
        assert_eq!(one, name("hdfs://host:8020/a/b/"));
        assert_ne!(one, name("hdfs://host:8020/a"));
        assert_ne!(one, name("hdfs://host/a/b"));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let refusal = |url: &str| BackendUrl::parse(url).unwrap_err().to_string();
        for url in [
            "hdfs://host",
            "hdfs:/a",
            "hdfs://:1/a",
            "hdfs://h:x/a",
            "hdfs://h/../a",
        ] {
            assert!(refusal(url).contains("a NameNode and a directory"), "{url}");
        }
        assert!(refusal("hdfs://u:p@host/a").contains("secret"));
        assert!(refusal("hdfs://host/a?replication=9999").contains("smaller number"));
    }
}
