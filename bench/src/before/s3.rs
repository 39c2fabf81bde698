//! S3: Ceph's gateway over a cluster in memory, so that no disk limits it. The direct client puts and gets
//! whole objects, one for each block that is asked for.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::path::Path as Key;
use object_store::{ClientOptions, ObjectStoreExt, PutPayload, RetryConfig};
// Only named: object_store's HTTP client, with the program's cryptography.
use reqwest as _;
use tokio::runtime::Runtime;

use super::direct::{self, Lane, reads};
use super::store::Behind;
use super::testenv::{Scripts, Testenv};
use crate::failure::{Context, Failure, Result};
use crate::fio::{Load, Outcome};

/// Objects that are read at random: one for each block of a disk would take minutes to make.
pub const OBJECTS_MAX: u64 = 4096;
/// Requests in flight while objects are made that are read later.
const PREPARE_DEPTH: u32 = 32;
/// The daemons that serve data.
const DAEMONS: [&str; 2] = ["run/rgw.launched", "run/osd.0.launched"];

/// A running gateway.
#[derive(Debug)]
pub struct Gateway {
    client: Arc<AmazonS3>,
    runtime: Runtime,
    /// How much is there to be read, by the size of its objects.
    there: HashMap<u64, u64>,
    testenv: Testenv,
}

impl Gateway {
    /// Bring one up below `parent`.
    pub fn up(scripts: &Path, parent: &Path) -> Result<Self> {
        let testenv = Testenv::up(&Scripts {
            directory: scripts,
            parent,
            name: "s3",
            up: ("s3-up.sh", &["--timeout", "120"]),
            down: ("s3-down.sh", &["--purge"]),
            ports: 110,
        })?;
        Ok(Self {
            client: Arc::new(client(&testenv)?),
            runtime: direct::runtime()?,
            there: HashMap::new(),
            testenv,
        })
    }

    fn run(&self, load: &Load, raw: &Path) -> Result<Outcome> {
        let data = direct::random(load.block_bytes, load.seed);
        let lane = || Objects {
            client: Arc::clone(&self.client),
            data: data.clone(),
            reads: reads(load),
        };
        let lanes = (0..load.depth).map(|_| lane()).collect();
        direct::run(&self.runtime, load, lanes, raw)
    }

    /// The load as it is run: over fewer objects when they are read at random.
    fn fitted(load: &Load) -> Load {
        let mut load = load.clone();
        if load.rw == "randread" {
            load.span_bytes = load.span_bytes.min(OBJECTS_MAX * load.block_bytes);
        }
        load
    }
}

/// A client with the key that `s3-up.sh` made. A failed request is repeated as object_store does.
fn client(testenv: &Testenv) -> Result<AmazonS3> {
    // Somebody else may have chosen one already, which will do.
    drop(rustls::crypto::ring::default_provider().install_default());
    let path = testenv.said("credentials")?;
    let text = std::fs::read_to_string(path).context(path)?;
    let secret = |name: &str| {
        text.lines()
            .filter_map(|line| line.split_once(" = "))
            .find_map(|(key, value)| (key == name).then_some(value))
            .context(format_args!("{path}: no {name}"))
    };
    AmazonS3Builder::new()
        .with_bucket_name(testenv.said("bucket")?)
        .with_endpoint(testenv.said("endpoint")?)
        .with_region("us-east-1")
        .with_access_key_id(secret("aws_access_key_id")?)
        .with_secret_access_key(secret("aws_secret_access_key")?)
        .with_client_options(ClientOptions::new().with_http1_only().with_allow_http(true))
        .with_retry(RetryConfig::default())
        .build()
        .context("the direct client")
}

impl Behind for Gateway {
    fn url(&self, name: &str) -> String {
        let said = |word: &str| self.testenv.said(word).unwrap_or_default();
        format!(
            "s3://{}/{name}?endpoint={}&credentials={}",
            said("bucket"),
            said("endpoint"),
            said("credentials")
        )
    }

    fn prepare(&mut self, load: &Load, raw: &Path) -> Result<()> {
        let load = Self::fitted(load);
        let there = self.there.get(&load.block_bytes).copied().unwrap_or(0);
        if !reads(&load) || there >= load.span_bytes {
            return Ok(());
        }
        let fill = Load {
            block_bytes: load.block_bytes,
            depth: PREPARE_DEPTH,
            ..Load::random("write", load.span_bytes)
        };
        self.run(&fill, raw)?;
        self.there.insert(load.block_bytes, load.span_bytes);
        Ok(())
    }

    fn direct(&mut self, _name: &str, load: &Load, raw: &Path) -> Result<Outcome> {
        self.run(&Self::fitted(load), raw)
    }

    fn cpu_us(&self) -> Result<f64> {
        self.testenv.cpu_us(&DAEMONS)
    }

    fn down(self: Box<Self>) -> Result<()> {
        self.testenv.down()
    }
}

/// Puts or gets one object after another.
struct Objects {
    client: Arc<AmazonS3>,
    data: Bytes,
    reads: bool,
}

impl Lane for Objects {
    async fn request(&mut self, offset: u64) -> Result<()> {
        let bytes = self.data.len();
        let key = Key::from(format!("direct/{bytes}/{:08x}", offset / bytes as u64));
        if !self.reads {
            let data = PutPayload::from_bytes(self.data.clone());
            return self.client.put(&key, data).await.map(drop).context("put");
        }
        let got = self.client.get(&key).await.context("get")?;
        let got = got.bytes().await.context("get")?;
        if got.len() == bytes {
            return Ok(());
        }
        Err(Failure::new(format!("{key} holds {} bytes", got.len())))
    }
}
