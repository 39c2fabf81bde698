//! Encryption at rest: what a volume's data is encrypted with on its log, in the SSD tier, and in objects.
//!
//! ```text
//! key file or command ──► key-encryption key ──wraps (AES-256-GCM)──► data key, random, of the volume
//!                                                        HKDF-SHA-512 │
//!                           log ◄──────── local store ◄──────── SSD tier ◄───┴──► objects     AES-256-XTS each
//! ```
//!
//! Invariants:
//! 1. The data key is on a medium only wrapped: in a file beside the volume's catalogue entry, and for a volume
//!    over objects beside them, too.
//! 2. Plain keys are in memory that is wiped when it is dropped, and that no core dump shows
//!    ([`source::keep_from_dumps`]). They are in no log line, no answer and no argument.
//! 3. Each medium has a key of its own, and a tweak that names the place: the block and the log; the sector of the
//!    volume and the local store; the block of the volume, or the stored block of a compressed line; the object's
//!    volume, its number and the slot, or the frame of slots.
//!
//!
//! XTS does not find changed bytes. In the log and in objects the checksums do, which are encrypted with what they
//! protect. The superblocks of logs and local stores, and the map and the sectors of local stores carry tags
//! ([`mac::Mac`]) under keys of their own, beside checksums that need no key.
//!
//! Failure: without the right key a volume does not open, which changes nothing.
//! docs/decisions/2026-11-21-encryption.md and 2026-11-24-keyed-tags.md have the reasons.

pub mod mac;
pub mod source;
pub mod wrapped;
pub mod xts;

use std::sync::Arc;

use hdcs_core::base::cipher::{Authenticator, BlockCipher, KeyedCipher, TAG_BYTES};
use hdcs_core::base::limits::{BLOCK_BYTES, SECTOR_BYTES};
use hdcs_core::format::LogSuperblock;
use hdcs_core::objects::format::SLOT_BYTES;
use hdcs_core::objects::frames::{Part, Unit};
use mac::Mac;
use ring::hkdf;
use serde::{Deserialize, Serialize};
use source::{KeyError, KeySource};
use uuid::Uuid;
use wrapped::WrappedKey;
use xts::{KEY_BYTES, Xts};
use zerocopy::IntoBytes;
use zeroize::Zeroizing;

/// How a volume is encrypted, as a file beside its catalogue entry says it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Encryption {
    /// Where the key-encryption key comes from.
    pub source: KeySource,
    /// The data key, wrapped with it.
    pub key: Box<WrappedKey>,
}

impl Encryption {
    /// A new data key.
    pub fn new(source: KeySource) -> Result<Self, KeyError> {
        let key = Box::new(WrappedKey::new(&source.read()?)?);
        Ok(Self { source, key })
    }

    /// Get the key-encryption key and unwrap the data key. Blocks for as long as a command may take.
    pub fn unlock(&self) -> Result<Unlocked, KeyError> {
        let data_key = self.key.unwrap(&self.source.read()?, &self.source)?;
        Ok(Unlocked {
            log: Arc::new(Xts::new(&data_key.derive(b"log"))),
            log_superblocks: Arc::new(Mac::new(&data_key.derive(b"log superblocks"), BLOCK_BYTES)),
            cache: Arc::new(CacheCipher(Xts::new(&data_key.derive(b"cache")))),
            home: Arc::new(Xts::new(&data_key.derive(b"home"))),
            home_map: Arc::new(Mac::new(&data_key.derive(b"home map"), BLOCK_BYTES)),
            home_sectors: Arc::new(Mac::new(&data_key.derive(b"home sectors"), SECTOR_BYTES)),
            objects: ObjectKey {
                cipher: Arc::new(Xts::new(&data_key.derive(b"objects"))),
                wrapped: (*self.key).clone(),
            },
        })
    }

    /// What decrypts the ring of the log with this superblock; `None`: it is plain.
    pub fn of_log(
        this: Option<&Self>,
        superblock: &LogSuperblock,
    ) -> Result<Option<LogCipher>, NoCipher> {
        let needs = Uuid::from_bytes(superblock.data_key);
        if needs.is_nil() {
            return Ok(None);
        }
        let Some(this) = this else {
            return Err(NoCipher::Keyless(format!(
                "it is encrypted with data key {needs}, which is wrapped in its volume's directory: \
                 name the volume or the data directory"
            )));
        };
        if this.key.id() != needs {
            let has = this.key.id();
            return Err(NoCipher::Wrong(format!(
                "it is encrypted with data key {needs}, and the volume's is {has}"
            )));
        }
        let unlocked = this.unlock().map_err(|error| {
            let why = error.to_string();
            if error.is_keyless() {
                NoCipher::Keyless(why)
            } else {
                NoCipher::Wrong(why)
            }
        })?;
        Ok(Some(unlocked.log(superblock.log.get())))
    }

    /// The same data key, wrapped with the key of another source; that may also be the same key in
    /// another place, while the old place is gone.
    pub fn rotated(&self, source: KeySource) -> Result<Self, KeyError> {
        let new = source.read()?;
        let data_key = if new.fingerprint() == self.key.wrapped_with() {
            self.key.unwrap(&new, &source)?
        } else {
            self.key.unwrap(&self.source.read()?, &self.source)?
        };
        let key = Box::new(self.key.wrap_again(&data_key, &new)?);
        Ok(Self { source, key })
    }
}

/// Why a log cannot be decrypted, and what is needed.
#[derive(Debug, thiserror::Error)]
pub enum NoCipher {
    /// There is no key here, which says nothing against the log.
    #[error("{0}")]
    Keyless(String),
    /// Something is damaged, or does not belong together.
    #[error("{0}")]
    Wrong(String),
}

/// The key that everything else is derived from.
pub struct DataKey(Zeroizing<[u8; KEY_BYTES]>);

struct KeyBytes;

impl hkdf::KeyType for KeyBytes {
    fn len(&self) -> usize {
        KEY_BYTES
    }
}

impl DataKey {
    fn derive(&self, purpose: &[u8]) -> Zeroizing<[u8; KEY_BYTES]> {
        let mut key = Zeroizing::new([0; KEY_BYTES]);
        let salt = hkdf::Salt::new(hkdf::HKDF_SHA512, b"hdcs data key");
        let extracted = salt.extract(&*self.0);
        extracted
            .expand(&[purpose], KeyBytes)
            .and_then(|expanded| expanded.fill(&mut *key))
            .expect("HKDF gives a key of this length");
        key
    }
}

/// What encrypts the data of one volume.
#[derive(Clone, Debug)]
pub struct Unlocked {
    log: Arc<Xts>,
    log_superblocks: Arc<Mac>,
    home: Arc<Xts>,
    home_map: Arc<Mac>,
    home_sectors: Arc<Mac>,
    /// The SSD tier.
    pub cache: Arc<dyn BlockCipher>,
    /// Objects, if that is where its backend keeps it.
    pub objects: ObjectKey,
}

impl Unlocked {
    /// Note in the first block of a new log which key its ring needs, and authenticate it.
    pub fn mark(&self, superblock: &mut [u8; BLOCK_BYTES]) {
        let mut marked = LogSuperblock::parse(superblock).expect("a new log's superblock is good");
        marked.data_key = *self.objects.wrapped.id().as_bytes();
        marked.seal_with(Some(&self.log(marked.log.get())));
        superblock.copy_from_slice(marked.as_bytes());
    }

    /// What encrypts the log with this random number, and authenticates its superblocks.
    pub fn log(&self, number: u64) -> LogCipher {
        LogCipher {
            xts: Arc::clone(&self.log),
            superblocks: Arc::clone(&self.log_superblocks),
            number,
        }
    }

    /// What encrypts the data of the local store with this random number, by sectors of the volume, and authenticates
    /// it.
    pub fn home(&self, number: u64) -> Arc<dyn KeyedCipher> {
        Arc::new(LocalStoreCipher {
            xts: Arc::clone(&self.home),
            map: Arc::clone(&self.home_map),
            sectors: Arc::clone(&self.home_sectors),
            number,
        })
    }
}

/// Encrypts sectors for one local store. Its number tells it from a local store that was lost, and from those of
/// clones, which have the same key.
#[derive(Debug)]
struct LocalStoreCipher {
    xts: Arc<Xts>,
    map: Arc<Mac>,
    sectors: Arc<Mac>,
    number: u64,
}

impl LocalStoreCipher {
    fn tweak(&self, sector: u64) -> u128 {
        u128::from(self.number) << 64 | u128::from(sector)
    }
}

impl BlockCipher for LocalStoreCipher {
    fn encrypt(&self, number: u64, sector: &mut [u8]) {
        self.xts.encrypt(self.tweak(number), sector);
    }

    fn decrypt(&self, number: u64, sector: &mut [u8]) {
        self.xts.decrypt(self.tweak(number), sector);
    }
}

impl Authenticator for LocalStoreCipher {
    fn tag(&self, bytes: &[u8]) -> [u8; TAG_BYTES] {
        self.map.tag([self.number, 0], bytes)
    }
}

impl KeyedCipher for LocalStoreCipher {
    fn unit_tags(&self, first: u64, units: &[u8], tags: &mut [u32]) {
        self.sectors.short_tags([self.number, first], units, tags);
    }
}

/// Encrypts the ring of one log, and authenticates its superblocks.
#[derive(Clone, Debug)]
pub struct LogCipher {
    xts: Arc<Xts>,
    superblocks: Arc<Mac>,
    number: u64,
}

impl LogCipher {
    fn units<'a>(
        &self,
        offset: u64,
        data: &'a mut [u8],
    ) -> impl Iterator<Item = (u128, &'a mut [u8])> {
        let first = offset / BLOCK_BYTES as u64;
        let number = u128::from(self.number) << 64;
        let tweaks = (first..).map(move |block| number | u128::from(block));
        tweaks.zip(data.chunks_exact_mut(BLOCK_BYTES))
    }

    /// Encrypt whole blocks for their place on the log's region.
    pub fn encrypt(&self, offset: u64, data: &mut [u8]) {
        for (tweak, block) in self.units(offset, data) {
            self.xts.encrypt(tweak, block);
        }
    }

    /// Decrypt whole blocks that were read from there.
    pub fn decrypt(&self, offset: u64, data: &mut [u8]) {
        for (tweak, block) in self.units(offset, data) {
            self.xts.decrypt(tweak, block);
        }
    }
}

/// The number of a block is its place on the log's region.
impl BlockCipher for LogCipher {
    fn encrypt(&self, number: u64, block: &mut [u8]) {
        Self::encrypt(self, number * BLOCK_BYTES as u64, block);
    }

    fn decrypt(&self, number: u64, block: &mut [u8]) {
        Self::decrypt(self, number * BLOCK_BYTES as u64, block);
    }
}

impl Authenticator for LogCipher {
    fn tag(&self, bytes: &[u8]) -> [u8; TAG_BYTES] {
        // The block has the number of its log.
        self.superblocks.tag([0; 2], bytes)
    }
}

/// Encrypts blocks for the SSD tier, each by its number in the volume: equal blocks in equal places
/// of clones, which have one key, are equal there too.
#[derive(Debug)]
struct CacheCipher(Xts);

impl BlockCipher for CacheCipher {
    fn encrypt(&self, number: u64, block: &mut [u8]) {
        self.0.encrypt(u128::from(number), block);
    }

    fn decrypt(&self, number: u64, block: &mut [u8]) {
        self.0.decrypt(u128::from(number), block);
    }
}

/// Encrypts the slots of data objects, and frames of slots that are compressed.
#[derive(Clone, Debug)]
pub struct ObjectKey {
    cipher: Arc<Xts>,
    /// What lies beside the objects.
    pub wrapped: WrappedKey,
}

impl ObjectKey {
    /// Clones go on counting where their parent does too: the writer tells them apart.
    fn object(writer: [u8; 16], number: u64) -> u128 {
        u128::from_le_bytes(writer) ^ (u128::from(number) << 64)
    }

    fn units(
        writer: [u8; 16],
        number: u64,
        offset: u64,
        slots: &mut [u8],
    ) -> impl Iterator<Item = (u128, &mut [u8])> {
        assert!(
            offset.is_multiple_of(SLOT_BYTES as u64) && slots.len().is_multiple_of(SLOT_BYTES),
            "whole slots"
        );
        let first = offset / SLOT_BYTES as u64;
        let object = Self::object(writer, number);
        let tweaks = (first..).map(move |slot| object ^ u128::from(slot));
        tweaks.zip(slots.chunks_exact_mut(SLOT_BYTES))
    }

    /// Encrypt slots that begin at `offset` in the object `number`, which the volume `writer` puts.
    pub fn encrypt(&self, writer: [u8; 16], number: u64, offset: u64, slots: &mut [u8]) {
        for (tweak, slot) in Self::units(writer, number, offset, slots) {
            self.cipher.encrypt(tweak, slot);
        }
    }

    /// Decrypt slots that were got from there.
    pub fn decrypt(&self, writer: [u8; 16], number: u64, offset: u64, slots: &mut [u8]) {
        for (tweak, slot) in Self::units(writer, number, offset, slots) {
            self.cipher.decrypt(tweak, slot);
        }
    }

    fn unit_tweak(writer: [u8; 16], number: u64, unit: Unit) -> u128 {
        let within = match unit {
            Unit::Slot(slot) => u64::from(slot),
            Unit::Frame(frame) => 1 << 32 | u64::from(frame),
        };
        Self::object(writer, number) ^ u128::from(within)
    }

    /// Encrypt stored bytes of a compressed object.
    pub fn encrypt_part(&self, writer: [u8; 16], number: u64, part: &Part, stored: &mut [u8]) {
        for (unit, range) in part.units() {
            let tweak = Self::unit_tweak(writer, number, unit);
            self.cipher.encrypt(tweak, &mut stored[range]);
        }
    }

    /// Decrypt them.
    pub fn decrypt_part(&self, writer: [u8; 16], number: u64, part: &Part, stored: &mut [u8]) {
        for (unit, range) in part.units() {
            let tweak = Self::unit_tweak(writer, number, unit);
            self.cipher.decrypt(tweak, &mut stored[range]);
        }
    }
}

#[cfg(test)]
mod tests;
