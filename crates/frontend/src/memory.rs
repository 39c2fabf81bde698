//! Volumes in memory: a [`Host`] for tests, fuzzing and trying clients without a node.
//!
//! Requests wait in [`MemoryHost::submitted`] until [`MemoryHost::perform`] carries one out; so a
//! test decides when and in which order they complete. Volumes may be shared between threads.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hdcs_core::base::buf::{BufMut, Pool};
use hdcs_core::base::error::RequestError;
use hdcs_core::base::io::{
    Extent, ExtentKind, ExtentState, Reply, Request, RequestId, SectorRange,
};
use hdcs_core::base::limits::{BLOCK_SECTORS, SECTOR_BYTES};
use hdcs_core::node::scrub::Scrubbed;

use super::{Allowance, Export, Host, Unopened, VolumeNumber};

/// A volume in memory.
#[derive(Debug)]
pub struct MemoryVolume {
    export: Export,
    content: Mutex<Content>,
}

#[derive(Debug)]
struct Content {
    bytes: Vec<u8>,
    /// What each 4 KiB block is.
    blocks: Vec<Block>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Block {
    allocated: bool,
    dirty: bool,
    zero: bool,
}

impl MemoryVolume {
    /// A volume that reads as zeroes.
    pub fn new(export: Export) -> Arc<Self> {
        let bytes = usize::try_from(export.bytes).expect("a volume that fits memory");
        let blocks = bytes.div_ceil(BLOCK_SECTORS as usize * SECTOR_BYTES);
        let content = Content {
            bytes: vec![0; bytes],
            blocks: vec![Block::default(); blocks],
        };
        Arc::new(Self {
            export,
            content: Mutex::new(content),
        })
    }

    /// A copy of its content.
    pub fn bytes(&self) -> Vec<u8> {
        self.content().bytes.clone()
    }

    fn content(&self) -> MutexGuard<'_, Content> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Content {
    fn at(&mut self, range: SectorRange) -> Result<&mut [u8], RequestError> {
        let start = range.byte_offset() as usize;
        let bytes = self.bytes.get_mut(start..start + range.bytes());
        bytes.ok_or(RequestError::BadRange)
    }

    fn mark(&mut self, range: SectorRange, block: Block) {
        let first = range.first_block() as usize;
        self.blocks[first..first + range.block_count() as usize].fill(block);
    }

    fn extents(&self, range: SectorRange, kind: ExtentKind) -> Vec<Extent> {
        let mut extents: Vec<Extent> = Vec::new();
        for block in range.first_block()..range.first_block() + range.block_count() {
            let Block {
                allocated,
                dirty,
                zero,
            } = self.blocks[block as usize];
            let state = match kind {
                ExtentKind::Allocation if !allocated => ExtentState::Hole,
                ExtentKind::Allocation if zero => ExtentState::Zero,
                ExtentKind::Allocation => ExtentState::Data,
                ExtentKind::Cache if dirty => ExtentState::Dirty,
                ExtentKind::Cache if allocated => ExtentState::Clean,
                ExtentKind::Cache => ExtentState::Cold,
            };
            let run = SectorRange::new(block * BLOCK_SECTORS, BLOCK_SECTORS).intersect(range);
            match extents.last_mut() {
                Some(last) if last.state == state => last.range.count += run.count,
                _ => extents.push(Extent { range: run, state }),
            }
        }
        extents
    }
}

/// A host of volumes in memory.
#[derive(Debug)]
pub struct MemoryHost {
    pool: Arc<Pool>,
    volumes: Vec<Arc<MemoryVolume>>,
    /// Requests that wait to be performed.
    pub submitted: Vec<(VolumeNumber, RequestId, Request)>,
    /// Volumes that are not open, and why.
    pub not_open: Vec<(String, Unopened)>,
    /// What its session may do. The work of requests is not counted.
    pub allowance: Allowance,
    /// Work that was done without a request.
    pub charged: usize,
}

impl MemoryHost {
    /// A host with so many bytes of buffers.
    pub fn new(pool_bytes: usize, volumes: Vec<Arc<MemoryVolume>>) -> Self {
        Self {
            pool: Pool::new(pool_bytes),
            volumes,
            submitted: Vec::new(),
            not_open: Vec::new(),
            allowance: Allowance::WHOLE,
            charged: 0,
        }
    }

    /// Where its buffers come from.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Carry out the request at `index` of [`Self::submitted`].
    pub fn perform(&mut self, index: usize) -> (RequestId, Result<Reply, RequestError>) {
        let (number, id, request) = self.submitted.swap_remove(index);
        let find = |volume: &&Arc<MemoryVolume>| volume.export.number == number;
        let volume = self.volumes.iter().find(find);
        let volume = volume.expect("a session submits to a volume that it was given");
        (id, self.carry_out(&mut volume.content(), request))
    }

    fn carry_out(&self, content: &mut Content, request: Request) -> Result<Reply, RequestError> {
        match request {
            Request::Read { range } => {
                let buf = self.pool.alloc(range.bytes());
                let mut buf = buf.ok_or(RequestError::NoBuffers)?;
                buf.copy_from_slice(content.at(range)?);
                return Ok(Reply::Data(buf.freeze()));
            }
            Request::Write { range, data, .. } => {
                content.at(range)?.copy_from_slice(&data);
                let written = Block {
                    allocated: true,
                    dirty: true,
                    zero: false,
                };
                content.mark(range, written);
            }
            Request::WriteZeroes { range, no_hole, .. } => {
                content.at(range)?.fill(0);
                let zeroed = Block {
                    allocated: true,
                    dirty: true,
                    zero: no_hole,
                };
                content.mark(range, zeroed);
            }
            Request::Discard { range, .. } => {
                content.at(range)?.fill(0);
                let whole = SectorRange::between(
                    range.start.next_multiple_of(BLOCK_SECTORS),
                    range.end() / BLOCK_SECTORS * BLOCK_SECTORS,
                );
                content.mark(whole, Block::default());
            }
            Request::Flush => content
                .blocks
                .iter_mut()
                .for_each(|block| block.dirty = false),
            Request::Promote { range } | Request::Evict { range } => {
                content.at(range)?;
            }
            Request::Scrub { .. } => return Ok(Reply::Scrubbed(Scrubbed::default())),
            Request::Extents { range, kind } => {
                content.at(range)?;
                return Ok(Reply::Extents(content.extents(range, kind)));
            }
        }
        Ok(Reply::Done)
    }
}

impl Host for MemoryHost {
    fn exports(&self) -> Vec<Export> {
        self.volumes
            .iter()
            .map(|volume| volume.export.clone())
            .collect()
    }

    fn export(&self, name: &str) -> Option<Export> {
        self.exports()
            .into_iter()
            .find(|export| export.name == name)
    }

    fn why_not(&self, name: &str) -> Option<Unopened> {
        let found = self.not_open.iter().find(|(found, _)| found == name);
        found.map(|(_, unopened)| unopened.clone())
    }

    fn allowance(&self) -> Allowance {
        self.allowance
    }

    fn alloc(&mut self, range: SectorRange) -> Option<BufMut> {
        self.pool.alloc_for(range)
    }

    fn charge(&mut self, work: usize) {
        self.charged += work;
        self.allowance.work = self.allowance.work.saturating_sub(work);
    }

    fn volumes(&self) -> usize {
        self.volumes.len()
    }

    fn submit(&mut self, volume: VolumeNumber, id: RequestId, request: Request) {
        self.submitted.push((volume, id, request));
    }
}
