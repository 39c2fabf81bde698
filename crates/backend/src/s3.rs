//! `s3://BUCKET/PREFIX`: a volume as objects below a prefix of a bucket.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use super::objects::{self, ObjectsPlace, Reach};
use super::url::{Given, OptionList, Scheme, UrlError};
use super::{BackendError, Place};
use crate::stores::s3::{Config, Credentials, S3};
use crate::stores::{Store, is_name};

/// See the module.
pub const SCHEME: Scheme = Scheme {
    name: "s3",
    form: "s3://BUCKET/PREFIX",
    options: &[
        "endpoint",
        "region",
        "credentials",
        "ca",
        INSECURE,
        objects::TIMEOUT,
        objects::RETRY,
    ],
    parse,
};

/// The option that says that data may go to the store unencrypted.
const INSECURE: &str = "insecure";

/// Options that people try and that would hold a secret.
const SECRETS: &[&str] = &[
    "access_key",
    "access_key_id",
    "aws_access_key_id",
    "aws_secret_access_key",
    "key",
    "password",
    "secret",
    "secret_access_key",
    "secret_key",
    "session_token",
    "token",
];

/// Take a URL's place apart.
pub fn parse_place(given: &Given<'_>, options: &mut OptionList) -> Result<ObjectsPlace, UrlError> {
    let secret = |what| Err(UrlError::Secret { what });
    if given.place.contains('@') {
        return secret("what stands before the @");
    }
    if let Some(what) = SECRETS.iter().find(|name| options.take(name).is_some()) {
        return secret(what);
    }
    let place = given.place.strip_prefix("//").unwrap_or("");
    let place = place.trim_end_matches('/');
    let parts = place.split_once('/');
    let Some((bucket, prefix)) =
        parts.filter(|(bucket, prefix)| is_bucket(bucket) && is_name(prefix))
    else {
        return Err(given.refuse(
            "it must name a bucket and a prefix of letters, digits, `-`, `_`, `.` and `/`, as in \
             s3://BUCKET/volumes/NAME",
        ));
    };
    let endpoint = options.take("endpoint");
    if let Some(endpoint) = &endpoint {
        let host = endpoint
            .strip_prefix("http://")
            .or_else(|| endpoint.strip_prefix("https://"));
        if host.is_some_and(|host| host.contains('@')) {
            return secret("what stands before the @ of the endpoint");
        }
        if host.is_none_or(|host| host.trim_end_matches('/').is_empty() || host.contains('?')) {
            return Err(UrlError::Value {
                name: "endpoint",
                value: endpoint.clone(),
                must: "http://HOST:PORT or https://HOST:PORT",
            });
        }
    }
    let credentials = match options.take("credentials").as_deref() {
        None => Credentials::Environment,
        Some("instance") => Credentials::Instance,
        Some(path) if path.starts_with('/') && !path.contains('\0') => {
            Credentials::File(path.into())
        }
        Some(other) => {
            return Err(UrlError::Value {
                name: "credentials",
                value: other.to_owned(),
                must: "the absolute path of a file, or `instance`",
            });
        }
    };
    let config = Config {
        bucket: bucket.to_owned(),
        prefix: prefix.to_owned(),
        endpoint: endpoint.map(|endpoint| endpoint.trim_end_matches('/').to_owned()),
        region: options.take("region"),
        credentials,
        ca: options.path("ca")?,
        timeout: objects::seconds(options, objects::TIMEOUT)?,
    };
    let patience = objects::seconds(options, objects::RETRY)?;
    let insecure = options.switch(INSECURE)?.unwrap_or(false);
    let place = InBucket { config, insecure };
    Ok(ObjectsPlace::new(Arc::new(place), patience))
}

fn parse(given: &Given<'_>, options: &mut OptionList) -> Result<Box<dyn Place>, UrlError> {
    parse_place(given, options).map(|place| Box::new(place) as Box<dyn Place>)
}

/// Whether what goes to an endpoint stays on this machine.
fn is_loopback(host_and_port: &str) -> bool {
    let (host, _) = host_and_port.split_once('/').unwrap_or((host_and_port, ""));
    let host = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, _)) => host,
        None => host.split_once(':').map_or(host, |(host, _)| host),
    };
    let address = host.parse::<IpAddr>();
    address.map_or(host.eq_ignore_ascii_case("localhost"), |it| {
        it.is_loopback()
    })
}

/// Whether it may be a bucket's name.
fn is_bucket(name: &str) -> bool {
    is_name(name) && (3..=63).contains(&name.len())
}

#[derive(Debug)]
struct InBucket {
    config: Config,
    insecure: bool,
}

impl Reach for InBucket {
    fn name(&self) -> String {
        let Config {
            bucket,
            prefix,
            endpoint,
            ..
        } = &self.config;
        let at = endpoint.as_deref().unwrap_or("amazon");
        format!("s3 {at} {bucket}/{prefix}")
    }

    fn location(&self) -> String {
        format!("{}/{}", self.config.bucket, self.config.prefix)
    }

    fn elsewhere(&self, location: &str) -> Option<Arc<dyn Reach>> {
        let (bucket, prefix) = location.split_once('/')?;
        let config = Config {
            bucket: bucket.to_owned(),
            prefix: prefix.to_owned(),
            ..self.config.clone()
        };
        let insecure = self.insecure;
        let place = InBucket { config, insecure };
        (is_bucket(bucket) && is_name(prefix)).then(|| Arc::new(place) as _)
    }

    fn exposure(&self) -> Option<String> {
        let endpoint = self.config.endpoint.as_deref()?;
        let host = endpoint.strip_prefix("http://")?;
        let is_exposed = !self.insecure && !is_loopback(host);
        is_exposed.then(|| {
            format!(
                "{endpoint} is not encrypted, so whoever is between this machine and the store can read what \
                 is stored: use https://, or say `insecure=on` in the URL if the network is trusted"
            )
        })
    }

    fn store(&self) -> String {
        let at = self.config.endpoint.as_deref().unwrap_or("amazon");
        format!("s3 {at}")
    }

    fn reach(&self, timeout: Option<Duration>) -> Result<Arc<dyn Store>, BackendError> {
        let mut config = self.config.clone();
        config.timeout = timeout.map_or(config.timeout, |most| most.min(config.timeout));
        match S3::new(&config) {
            Ok(store) => Ok(Arc::new(store)),
            Err(error) => Err(BackendError::Refused(error.to_string())),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::url::BackendUrl;

    fn name(url: &str) -> String {
        BackendUrl::parse(url).unwrap().place.name()
    }

    fn refusal(url: &str) -> String {
        BackendUrl::parse(url).unwrap_err().to_string()
    }

    #[test]
    fn places_are_told_apart() {
        let one = name("s3://bucket/a/b?endpoint=http://h:1&region=r&timeout_s=9&delay_us=1");
        assert_eq!(one, name("s3://bucket/a/b/?endpoint=http%3A//h:1/"));
        assert_ne!(one, name("s3://bucket/a/b"));
        assert_ne!(one, name("s3://bucket/a/c?endpoint=http://h:1"));
    }

    #[test]
    fn endpoint_without_tls_is_for_loopback_unless_that_was_said() {
        let exposed = |endpoint: &str| {
            let url = format!("s3://bucket/a?endpoint={endpoint}");
            BackendUrl::parse(&url).unwrap().place.exposure()
        };
        for host in [
            "10.0.0.1:80",
            "rgw.example",
            "[2001:db8::1]:80",
            "127.0.0.1.example:80",
            "localhost.evil",
        ] {
            let said = exposed(&format!("http://{host}")).expect(host);
            assert!(said.contains("insecure=on"), "{said}");
            assert_eq!(exposed(&format!("http://{host}&insecure=on")), None);
            assert_eq!(exposed(&format!("https://{host}")), None);
        }
        for host in [
            "127.0.0.1:9000",
            "127.1.2.3",
            "localhost:80",
            "LOCALHOST",
            "[::1]:9000",
            "[::1]",
        ] {
            assert_eq!(exposed(&format!("http://{host}")), None, "{host}");
        }
        assert!(refusal("s3://bucket/a?insecure=yes").contains("`on` or `off`"));
        let one = name("s3://bucket/a?endpoint=http://h&insecure=on");
        assert_eq!(
            one,
            name("s3://bucket/a?endpoint=http://h"),
            "it is the same place"
        );
    }

    #[test]
    fn secrets_are_refused_and_not_repeated() {
        for url in [
            "s3://AKIA:hush@bucket/p",
            "s3://bucket/p?secret_key=hush",
            "s3://bucket/p?aws_secret_access_key=hush",
            "s3://bucket/p?endpoint=http://key:hush@host",
        ] {
            let said = refusal(url);
            assert!(said.contains("holds a secret"), "{said}");
            assert!(!said.contains("hush"), "{said}");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        assert!(refusal("s3://bucket").contains("a bucket and a prefix"));
        assert!(refusal("s3://bucket//a").contains("a bucket and a prefix"));
        assert!(refusal("s3://bucket/../a").contains("a bucket and a prefix"));
        assert!(refusal("s3:bucket/a").contains("a bucket and a prefix"));
        assert!(refusal("s3://bucket/a?endpoint=host:80").contains("http://HOST:PORT"));
        assert!(refusal("s3://bucket/a?credentials=here").contains("absolute path"));
        assert!(refusal("s3://bucket/a?timeout_s=0").contains("timeout_s"));
        assert!(refusal("s3://bucket/a?endpiont=x").contains("did you mean `endpoint`"));
    }
}
