//! HDFS: a NameNode and a DataNode in one JVM, one replica of each block. What is written cannot be
//! overwritten there, so the direct client appends; it reads at positions.

use std::path::Path;

use bytes::Bytes;
use hdfs_native::file::{FileReader, FileWriter};
use hdfs_native::{Client, ClientBuilder, WriteOptions};
use tokio::runtime::Runtime;

use super::direct::{self, Lane, reads};
use super::store::Behind;
use super::testenv::{Scripts, Testenv};
use crate::failure::{Context, Result};
use crate::fio::{Load, Outcome};

/// One piece of a file that is made to be read.
const PIECE_BYTES: u64 = 1 << 20;

/// A running HDFS.
#[derive(Debug)]
pub struct Hdfs {
    client: Client,
    runtime: Runtime,
    /// Size of the file that is read.
    whole_bytes: u64,
    testenv: Testenv,
}

impl Hdfs {
    /// Bring one up below `parent`.
    pub fn up(scripts: &Path, parent: &Path) -> Result<Self> {
        let testenv = Testenv::up(&Scripts {
            directory: scripts,
            parent,
            name: "hdfs",
            up: ("hdfs-up.sh", &["--datanodes", "1", "--timeout", "120"]),
            down: ("hdfs-down.sh", &[]),
            ports: 2,
        })?;
        let runtime = direct::runtime()?;
        let client = ClientBuilder::new()
            .with_url(format!("hdfs://{}", testenv.said("namenode")?))
            .with_io_runtime(runtime.handle().clone())
            .build()
            .context("the direct client")?;
        Ok(Self {
            client,
            runtime,
            whole_bytes: 0,
            testenv,
        })
    }

    fn file(&self, name: &str) -> Result<String> {
        Ok(format!("{}/direct/{name}", self.testenv.said("path")?))
    }

    /// An empty file with this name.
    fn create(&self, name: &str) -> Result<FileWriter> {
        let options = WriteOptions::default().replication(1).overwrite(true);
        let file = self.file(name)?;
        let created = self.runtime.block_on(self.client.create(&file, options));
        created.context(file)
    }
}

impl Behind for Hdfs {
    fn url(&self, name: &str) -> String {
        let said = |word: &str| self.testenv.said(word).unwrap_or_default();
        let (namenode, path) = (said("namenode"), said("path"));
        format!("hdfs://{namenode}{path}/{name}?replication=1")
    }

    fn prepare(&mut self, load: &Load, _raw: &Path) -> Result<()> {
        if !reads(load) || self.whole_bytes >= load.span_bytes {
            return Ok(());
        }
        let mut file = self.create("whole")?;
        let data = direct::random(PIECE_BYTES, load.seed);
        self.runtime.block_on(async {
            for _ in 0..load.span_bytes / PIECE_BYTES {
                Box::pin(file.write_bytes(data.clone()))
                    .await
                    .context("append")?;
            }
            Box::pin(file.close()).await.context("close")
        })?;
        self.whole_bytes = load.span_bytes;
        Ok(())
    }

    fn direct(&mut self, _name: &str, load: &Load, raw: &Path) -> Result<Outcome> {
        if reads(load) {
            let open = |_| {
                let file = self.file("whole")?;
                Ok(Reader {
                    file: self
                        .runtime
                        .block_on(self.client.read(&file))
                        .context(file)?,
                    bytes: load.block_bytes as usize,
                })
            };
            let lanes = (0..load.depth).map(open).collect::<Result<Vec<_>>>()?;
            return direct::run(&self.runtime, load, lanes, raw);
        }
        let data = direct::random(load.block_bytes, load.seed);
        let open = |lane| {
            Ok(Appender {
                file: self.create(&format!("lane-{lane}"))?,
                data: data.clone(),
            })
        };
        let lanes = (0..load.depth).map(open).collect::<Result<Vec<_>>>()?;
        direct::run(&self.runtime, load, lanes, raw)
    }

    fn cpu_us(&self) -> Result<f64> {
        self.testenv.cpu_us(&["pid"])
    }

    fn down(self: Box<Self>) -> Result<()> {
        self.testenv.down()
    }
}

/// Reads at positions of one file.
struct Reader {
    file: FileReader,
    bytes: usize,
}

impl Lane for Reader {
    async fn request(&mut self, offset: u64) -> Result<()> {
        let read = self.file.read_range(offset as usize, self.bytes);
        read.await.map(drop).context("read")
    }
}

/// Appends to a file of its own; what was asked for first is what comes first.
struct Appender {
    file: FileWriter,
    data: Bytes,
}

impl Lane for Appender {
    async fn request(&mut self, _offset: u64) -> Result<()> {
        let appended = self.file.write_bytes(self.data.clone());
        Box::pin(appended).await.context("append")?;
        self.file.hsync().await.context("hsync")
    }

    async fn finish(mut self) -> Result<()> {
        Box::pin(self.file.close()).await.context("close")
    }
}
