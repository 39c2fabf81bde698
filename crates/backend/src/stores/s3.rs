//! S3 and what speaks like it: Ceph's gateway, MinIO, and others.
//!
//! A conditional put is `If-None-Match: *`; a store that does not honour it is found out by the
//! conformance suite, not here. Requests are signed over their content, so that what arrives is
//! what was sent, without TLS too.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use object_store::aws::{AmazonS3, AmazonS3Builder, S3ConditionalPut};
use object_store::client::{HttpError, HttpErrorKind};
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use object_store::path::Path as Key;
use object_store::{
    Certificate, ClientOptions, Error, ObjectStore, ObjectStoreExt, PutMode, PutOptions,
    PutPayload, RetryConfig,
};
// Only named: object_store's HTTP client, with TLS from the provider that the program has anyway.
use reqwest as _;

use super::{Condition, Listing, Object, Pending, Store, StoreError, bounded, brief};

/// Time to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The region of stores that have none.
const REGION: &str = "us-east-1";

/// Where the secrets are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Credentials {
    /// `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` and `AWS_SESSION_TOKEN` of the environment.
    #[default]
    Environment,
    /// A file in the form of `~/.aws/credentials`; its section `default`.
    File(PathBuf),
    /// The role of the machine or container that this runs on.
    Instance,
}

/// What is needed to reach a prefix in a bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The bucket.
    pub bucket: String,
    /// What all names begin with, without a `/` at its end.
    pub prefix: String,
    /// `http://HOST:PORT` or `https://…`; none: Amazon's, by region.
    pub endpoint: Option<String>,
    /// The region.
    pub region: Option<String>,
    /// Where the secrets are.
    pub credentials: Credentials,
    /// Certificates to trust besides the system's.
    pub ca: Option<PathBuf>,
    /// Time for one request.
    pub timeout: Duration,
}

/// Pages of a listing that may follow one another without a name that is new.
const EMPTY_PAGES_MAX: usize = 16;
/// Longest name of an error that is repeated.
const CODE_BYTES_MAX: usize = 64;

/// See the module.
#[derive(Debug)]
pub struct S3 {
    client: AmazonS3,
    bucket: String,
    prefix: String,
    endpoint: String,
}

impl S3 {
    /// Prepare to use a bucket. Nothing is sent yet.
    pub fn new(config: &Config) -> Result<Self, StoreError> {
        use_our_cryptography();
        let endpoint = config.endpoint.clone();
        let mut options = ClientOptions::new()
            .with_connect_timeout(CONNECT_TIMEOUT)
            .with_timeout(config.timeout)
            .with_http1_only()
            .with_allow_http(true);
        if let Some(path) = &config.ca {
            for certificate in certificates(path)? {
                options = options.with_root_certificate(certificate);
            }
        }
        let mut builder = AmazonS3Builder::new()
            .with_bucket_name(&config.bucket)
            .with_region(config.region.as_deref().unwrap_or(REGION))
            .with_conditional_put(S3ConditionalPut::ETagMatch)
            .with_client_options(options)
            .with_http_connector(bounded::Connector)
            // Retries are the client's, the same for all stores.
            .with_retry(RetryConfig {
                max_retries: 0,
                ..RetryConfig::default()
            });
        if let Some(endpoint) = &endpoint {
            builder = builder.with_endpoint(endpoint);
        }
        if let Some(secrets) = secrets(&config.credentials)? {
            builder = builder
                .with_access_key_id(secrets.id)
                .with_secret_access_key(secrets.key);
            if let Some(token) = secrets.token {
                builder = builder.with_token(token);
            }
        }
        let client = builder
            .build()
            .map_err(|error| StoreError::Refused(format!("S3: {}", brief(&error.to_string()))))?;
        Ok(Self {
            client,
            bucket: config.bucket.clone(),
            prefix: config.prefix.clone(),
            endpoint: endpoint.unwrap_or_else(|| "Amazon".to_owned()),
        })
    }

    fn key(&self, name: &str) -> Key {
        Key::from(format!("{}/{name}", self.prefix))
    }

    /// What an error of an operation on an object means.
    fn error(&self, what: &str, error: &Error) -> StoreError {
        let text = error.to_string();
        // S3 says so when conditional writes of one name meet: neither was refused for good.
        let met = text.contains("ConditionalRequestConflict");
        let message = || {
            // What the store calls it comes first: the text is long, and cut.
            let code = code(&text).map_or(String::new(), |code| format!("{code}: "));
            let (place, text) = (self.place(), brief(&text));
            format!("{place}: {what}: {code}{text}")
        };
        let has_any = |words: &[&str]| words.iter().any(|word| text.contains(word));
        match error {
            _ if text.contains("NoSuchBucket") => StoreError::Refused(format!(
                "{}: the bucket `{}` does not exist; create it, or correct the URL",
                self.place(),
                self.bucket
            )),
            Error::NotFound { .. } => StoreError::NotFound,
            Error::Generic { .. } if has_any(&["416 Range Not", "InvalidRange"]) => {
                StoreError::Short
            }
            Error::AlreadyExists { .. } | Error::Precondition { .. } if !met => StoreError::Exists,
            _ if is_denied(error, &text) => {
                if has_any(&["QuotaExceeded"]) {
                    return StoreError::NoSpace(message());
                }
                // Its clock, not its key, is what a store complains about in this way.
                if has_any(&["RequestTimeTooSkewed"]) {
                    return StoreError::Refused(format!("{}; set this node's clock", message()));
                }
                StoreError::Refused(format!(
                    "{}; check the credentials and what they allow",
                    message()
                ))
            }
            Error::Generic { .. } if has_any(&["507 Insufficient", "XMinioStorageFull"]) => {
                StoreError::NoSpace(message())
            }
            Error::Generic { .. } if is_for_good(&text) => StoreError::Failed(message()),
            Error::Generic { .. } | Error::AlreadyExists { .. } | Error::Precondition { .. } => {
                StoreError::Unreachable(format!("{}{}", message(), cause(error)))
            }
            _ => StoreError::Failed(message()),
        }
    }
}

/// What a store's answer calls an error.
fn code(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once("<Code>")?;
    let (code, _) = rest.split_once("</Code>")?;
    let is_word = !code.is_empty() && code.bytes().all(|byte| byte.is_ascii_alphanumeric());
    (is_word && code.len() <= CODE_BYTES_MAX).then_some(code)
}

impl Store for S3 {
    fn put<'a>(&'a self, name: &'a str, data: Bytes, condition: Condition) -> Pending<'a, ()> {
        Box::pin(async move {
            let mode = match condition {
                Condition::Always => PutMode::Overwrite,
                Condition::IfAbsent => PutMode::Create,
            };
            let options = PutOptions::from(mode);
            let payload = PutPayload::from_bytes(data);
            match self
                .client
                .put_opts(&self.key(name), payload, options)
                .await
            {
                Ok(_) => Ok(()),
                Err(error) => match self.error(&format!("put {name}"), &error) {
                    // Nothing needs to be there for a put but the bucket.
                    StoreError::NotFound => Err(StoreError::Refused(format!(
                        "{}: put {name}: the bucket is not there",
                        self.place()
                    ))),
                    error => Err(error),
                },
            }
        })
    }

    fn get<'a>(&'a self, name: &'a str, offset: u64, bytes: usize) -> Pending<'a, Bytes> {
        Box::pin(async move {
            let range = offset..offset + bytes as u64;
            self.client
                .get_range(&self.key(name), range)
                .await
                .map_err(|error| self.error(&format!("get {name}"), &error))
        })
    }

    fn delete<'a>(&'a self, name: &'a str) -> Pending<'a, ()> {
        Box::pin(async move {
            match self.client.delete(&self.key(name)).await {
                Ok(()) | Err(Error::NotFound { .. }) => Ok(()),
                Err(error) => Err(self.error(&format!("delete {name}"), &error)),
            }
        })
    }

    fn list<'a>(&'a self, prefix: &'a str, after: &'a str, max: usize) -> Pending<'a, Listing> {
        Box::pin(async move {
            let whole = format!("{}/", self.prefix);
            let from = format!("{whole}{prefix}");
            let mut page_token = None;
            for _ in 0..EMPTY_PAGES_MAX {
                let options = PaginatedListOptions {
                    offset: (!after.is_empty()).then(|| format!("{whole}{after}")),
                    max_keys: Some(max),
                    page_token,
                    ..PaginatedListOptions::default()
                };
                let page = self.client.list_paginated(Some(&from), options).await;
                let page = page.map_err(|error| match self.error("list", &error) {
                    StoreError::NotFound => StoreError::Refused(format!(
                        "{}: list: the bucket is not there",
                        self.place()
                    )),
                    error => error,
                })?;
                let objects = page.result.objects.into_iter().filter_map(|meta| {
                    let name = meta.location.as_ref().strip_prefix(&whole)?;
                    // Some stores ignore where to begin.
                    (name > after).then(|| Object {
                        name: name.to_owned(),
                        bytes: meta.size,
                        modified_ms: meta.last_modified.timestamp_millis().max(0).cast_unsigned(),
                    })
                });
                let mut objects: Vec<Object> = objects.collect();
                page_token = page.page_token;
                if objects.is_empty() && page_token.is_some() {
                    continue;
                }
                objects.sort_unstable_by(|a, b| a.name.cmp(&b.name));
                return Ok(Listing {
                    objects,
                    more: page_token.is_some(),
                });
            }
            Err(StoreError::Failed(format!(
                "{}: list: it says that there is more, and names nothing new in {EMPTY_PAGES_MAX} pages",
                self.place()
            )))
        })
    }

    fn place(&self) -> String {
        format!(
            "S3 at {}, s3://{}/{}",
            self.endpoint, self.bucket, self.prefix
        )
    }
}

/// Whether the store does not let us. Listings come without a kind of error of their own.
fn is_denied(error: &Error, text: &str) -> bool {
    matches!(
        error,
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. }
    ) || text.contains("status code: 403")
        || text.contains("status code: 401")
}

/// Whether a request would fail in the same way again.
fn is_for_good(text: &str) -> bool {
    let Some((_, status)) = text.split_once("status code: ") else {
        return text.contains("missing region") || text.contains("redirect");
    };
    let transient = ["408", "425", "429"];
    status.starts_with('4') && !transient.iter().any(|code| status.starts_with(code))
}

/// The reason at the bottom of a failed connection, which the error itself does not name.
fn cause(error: &Error) -> String {
    let mut source = std::error::Error::source(error);
    let mut last = None;
    let mut connecting = false;
    while let Some(error) = source {
        if let Some(error) = error.downcast_ref::<HttpError>() {
            connecting = error.kind() == HttpErrorKind::Connect;
        }
        last = Some(error.to_string());
        source = error.source();
    }
    match last {
        Some(last) if connecting => format!(" ({last})"),
        _ => String::new(),
    }
}

/// The cryptography that the rest of the program uses, also for this client.
fn use_our_cryptography() {
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| {
        let provider = rustls::crypto::ring::default_provider();
        // Somebody else may have chosen one already, which will do.
        let _: Result<(), Arc<_>> = provider.install_default();
    });
}

fn certificates(path: &Path) -> Result<Vec<Certificate>, StoreError> {
    let refused = |what: String| {
        let path = path.display();
        StoreError::Refused(format!("S3: the certificates in {path}: {what}"))
    };
    let text = std::fs::read(path).map_err(|error| refused(error.to_string()))?;
    let found = Certificate::from_pem_bundle(&text).map_err(|error| refused(error.to_string()))?;
    if found.is_empty() {
        return Err(refused("there is none; PEM is expected".to_owned()));
    }
    Ok(found)
}

/// A key. Not printable, on purpose.
struct Secrets {
    id: String,
    key: String,
    token: Option<String>,
}

fn secrets(from: &Credentials) -> Result<Option<Secrets>, StoreError> {
    match from {
        Credentials::Instance => Ok(None),
        Credentials::Environment => {
            let variable = |name: &str| std::env::var(name).ok().filter(|text| !text.is_empty());
            match (
                variable("AWS_ACCESS_KEY_ID"),
                variable("AWS_SECRET_ACCESS_KEY"),
            ) {
                (Some(id), Some(key)) => Ok(Some(Secrets {
                    id,
                    key,
                    token: variable("AWS_SESSION_TOKEN"),
                })),
                _ => Err(StoreError::Refused(
                    "S3: no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the \
                     environment of `hdcs serve`, or name a file with credentials=FILE in the URL \
                     (credentials=instance uses the role of the machine)"
                        .to_owned(),
                )),
            }
        }
        Credentials::File(path) => {
            let refused = |what: &str| {
                let path = path.display();
                StoreError::Refused(format!("S3: the credentials file {path}: {what}"))
            };
            let text =
                std::fs::read_to_string(path).map_err(|error| refused(&error.to_string()))?;
            from_file(&text).map(Some).ok_or_else(|| {
                refused(
                    "its section [default] must have aws_access_key_id = … and \
                     aws_secret_access_key = …",
                )
            })
        }
    }
}

/// The section `default` of a credentials file, or what stands before any section.
fn from_file(text: &str) -> Option<Secrets> {
    let (mut id, mut key, mut token) = (None, None, None);
    let mut ours = true;
    for line in text.lines().map(str::trim) {
        if let Some(section) = line.strip_prefix('[') {
            ours = section.trim_end_matches(']').trim() == "default";
            continue;
        }
        let Some((name, value)) = line.split_once('=').filter(|_| ours) else {
            continue;
        };
        let value = Some(value.trim().to_owned()).filter(|value| !value.is_empty());
        match name.trim() {
            "aws_access_key_id" => id = value,
            "aws_secret_access_key" => key = value,
            "aws_session_token" => token = value,
            _ => {}
        }
    }
    Some(Secrets {
        id: id?,
        key: key?,
        token,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_file_is_read() {
        let text = "[other]\naws_access_key_id = a\naws_secret_access_key = b\n\
                    # comment\n[default]\naws_access_key_id=ID\n aws_secret_access_key = K/=y \n";
        let found = from_file(text).unwrap();
        assert_eq!((found.id.as_str(), found.key.as_str()), ("ID", "K/=y"));
        assert!(found.token.is_none());
        assert!(from_file("[other]\naws_access_key_id=a\naws_secret_access_key=b").is_none());
        assert!(from_file("aws_access_key_id=a\naws_secret_access_key=").is_none());
    }

    #[test]
    fn code_of_an_error_is_found_and_nothing_else_is_taken_for_one() {
        let body = "403 Forbidden: <?xml?><Error><Code>QuotaExceeded</Code><Message/></Error>";
        assert_eq!(code(body), Some("QuotaExceeded"));
        assert_eq!(code("<Code>no</word></Code>"), None);
        assert_eq!(code("<Code></Code>"), None);
        assert_eq!(code(&format!("<Code>{}</Code>", "x".repeat(65))), None);
        assert_eq!(code("connection refused"), None);
    }

    #[test]
    fn permanent_errors_are_told_from_passing_ones() {
        assert!(is_for_good("non-2xx status code: 400 Bad Request: x"));
        assert!(!is_for_good(
            "non-2xx status code: 429 Too Many Requests: x"
        ));
        assert!(!is_for_good(
            "non-2xx status code: 503 Service Unavailable: x"
        ));
        assert!(!is_for_good("error sending request"));
    }
}
