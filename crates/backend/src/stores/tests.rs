//! The suite over a server in this process and over memory, and what happens to a request that
//! fails.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::conformance::conformance;
use super::memory::{Fault, Memory};
use super::s3::{Config, Credentials, S3};
use super::{Client, Condition, StoreError, runtime};

#[path = "../../examples/s3_server/server.rs"]
pub mod server;

/// Long enough for a few retries.
const PATIENCE: Duration = Duration::from_secs(5);

/// An S3 server of this process, and a directory that it keeps its objects in.
pub struct Served {
    pub directory: tempfile::TempDir,
    pub endpoint: String,
}

impl Served {
    pub fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("bucket")).unwrap();
        let credentials = directory.path().join("credentials");
        std::fs::write(
            &credentials,
            "[default]\naws_access_key_id = key\naws_secret_access_key = secret\n",
        )
        .unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let root = directory.path().to_path_buf();
        runtime().spawn(async move {
            let ended = server::serve(&root, listener, "key", "secret").await;
            panic!("the server ended: {ended:?}");
        });
        Self {
            directory,
            endpoint,
        }
    }

    pub fn config(&self, prefix: &str) -> Config {
        Config {
            bucket: "bucket".to_owned(),
            prefix: prefix.to_owned(),
            endpoint: Some(self.endpoint.clone()),
            region: None,
            credentials: Credentials::File(self.directory.path().join("credentials")),
            ca: None,
            timeout: Duration::from_secs(20),
        }
    }
}

fn client(config: &Config) -> Client {
    Client::new(S3::new(config).unwrap(), PATIENCE)
}

fn ends<T>(future: impl Future<Output = T>) -> T {
    runtime().block_on(future)
}

#[test]
fn s3_conforms() {
    let served = Served::start();
    let client = client(&served.config("some/prefix"));
    ends(conformance(&client)).unwrap();
    let counts = client.counters().counts();
    assert!(counts.puts > 100 && counts.lists > 10, "{counts:?}");
    assert_eq!(counts.trouble, None);
}

#[test]
fn puts_are_told_apart_by_what_they_put() {
    let served = Served::start();
    let client = client(&served.config("p"));
    for name in [
        "data/1",
        "data/2",
        "map/3",
        "manifest/4",
        "snapshot/5",
        "database/6",
    ] {
        ends(client.put(name, Bytes::from_static(b"x"), Condition::Always)).unwrap();
    }
    let counts = client.counters().counts();
    let (data, map, manifest) = (counts.puts_data, counts.puts_map, counts.puts_manifest);
    assert_eq!((counts.puts, data, map, manifest), (6, 2, 1, 1));
}

#[test]
fn s3_prefixes_are_apart() {
    let served = Served::start();
    let (one, other) = (client(&served.config("a")), client(&served.config("ab")));
    let data = Bytes::from_static(b"x");
    ends(one.put("data/1", data.clone(), Condition::IfAbsent)).unwrap();
    assert!(ends(other.list("", "", 10)).unwrap().objects.is_empty());
    ends(other.put("data/1", data, Condition::IfAbsent)).unwrap();
    assert_eq!(ends(one.list("", "", 10)).unwrap().objects.len(), 1);
}

#[test]
fn s3_refusals_say_why() {
    let served = Served::start();
    let message = |config: &Config| match ends(client(config).list("", "", 10)) {
        Err(StoreError::Refused(message)) => message,
        other => panic!("{other:?}"),
    };
    let absent = Config {
        bucket: "absent".to_owned(),
        ..served.config("p")
    };
    let said = message(&absent);
    assert!(said.contains("`absent` does not exist"), "{said}");
    let forged = served.directory.path().join("forged");
    let secrets = "aws_access_key_id = key\naws_secret_access_key = wrong\n";
    std::fs::write(&forged, secrets).unwrap();
    let forged = Config {
        credentials: Credentials::File(forged),
        ..served.config("p")
    };
    let said = message(&forged);
    assert!(said.contains("check the credentials"), "{said}");
    assert!(!said.contains("wrong"), "a secret in {said}");
    let missing = Config {
        credentials: Credentials::File("/nonexistent/credentials".into()),
        ..served.config("p")
    };
    let said = S3::new(&missing).unwrap_err().to_string();
    assert!(said.contains("/nonexistent/credentials"), "{said}");
}

#[test]
fn s3_that_nobody_serves_is_unreachable() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let served = Served::start();
    let config = Config {
        endpoint: Some(endpoint.clone()),
        ..served.config("p")
    };
    let client = Client::new(S3::new(&config).unwrap(), Duration::from_millis(400));
    let Err(StoreError::Unreachable(said)) = ends(client.get("data/1", 0, 1)) else {
        panic!("it was reached");
    };
    assert!(
        said.contains(&endpoint) && said.contains("refused"),
        "{said}"
    );
    let counts = client.counters().counts();
    assert!(
        counts.retries >= 1 && counts.retries == counts.gets - 1,
        "{counts:?}"
    );
    assert_eq!(counts.trouble, Some(said));
}

#[test]
fn memory_conforms() {
    let client = Client::new(Memory::default(), PATIENCE);
    ends(conformance(&client)).unwrap();
}

#[test]
fn request_is_repeated_until_it_ends_well() {
    let memory = Memory::default();
    let client = Client::new(memory.clone(), PATIENCE);
    let away = Fault::Fails(StoreError::Unreachable("away".to_owned()));
    memory.plan([away.clone(), away]);
    ends(client.put("data/1", Bytes::from_static(b"abc"), Condition::Always)).unwrap();
    let counts = client.counters().counts();
    assert_eq!((counts.puts, counts.retries, counts.put_bytes), (3, 2, 3));
    assert_eq!(counts.trouble, None);
}

#[test]
fn request_that_nobody_needs_any_more_is_not_repeated() {
    let memory = Memory::default();
    let client = Client::new(memory.clone(), Duration::from_hours(1));
    let away = StoreError::Unreachable("away".to_owned());
    memory.plan(std::iter::repeat_n(Fault::Fails(away.clone()), 12));
    let waiting = client.clone();
    let request = runtime().spawn(async move { waiting.delete("data/1").await });
    while client.counters().counts().trouble.is_none() {
        std::thread::yield_now();
    }
    // It is not repeated, or waits to be.
    client.counters().end();
    assert_eq!(runtime().block_on(request).unwrap(), Err(away.clone()));
    let retries = client.counters().counts().retries;
    assert_eq!(ends(client.delete("data/1")), Err(away));
    assert_eq!(client.counters().counts().retries, retries);
}

#[test]
fn conditional_put_whose_answer_is_lost_finds_itself() {
    let memory = Memory::default();
    let client = Client::new(memory.clone(), PATIENCE);
    memory.plan([Fault::AnswerLost]);
    let data = Bytes::from_static(b"mine");
    let ended = ends(client.put("manifest/1", data.clone(), Condition::IfAbsent));
    assert_eq!(ended, Err(StoreError::Exists));
    assert_eq!(ends(client.get("manifest/1", 0, 4)).unwrap(), data);
}

#[test]
fn request_that_cannot_succeed_is_not_repeated() {
    let memory = Memory::default();
    let client = Client::new(memory.clone(), PATIENCE);
    for error in [
        StoreError::NoSpace("full".to_owned()),
        StoreError::Refused("no".to_owned()),
        StoreError::Failed("odd".to_owned()),
    ] {
        memory.plan([Fault::Fails(error.clone())]);
        assert_eq!(ends(client.delete("data/1")), Err(error));
    }
    assert_eq!(client.counters().counts().retries, 0);
    let shared = Arc::new(client);
    assert_eq!(ends(shared.delete("data/1")), Ok(()));
}
