//! The data key of a volume as it is on a medium: wrapped with a key-encryption key.
//!
//! AES-256-GCM, so unwrapping with another key, or what is damaged, fails and yields nothing. Each
//! wrapping has a random nonce; a data key is wrapped a few times in its life.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};
use serde::{Deserialize, Serialize};
use uuid::Uuid;
use zeroize::Zeroizing;

use super::DataKey;
use super::source::{KeyError, KeySource, WrappingKey};
use super::xts::KEY_BYTES;

/// What data is encrypted with; another value is another program's.
const CIPHER: &str = "aes-256-xts";
/// Bytes of the object that holds a wrapped key: fixed, so that it is got in one request.
pub const OBJECT_BYTES: usize = 1024;

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WrappedKey {
    /// What the data key is for.
    cipher: String,
    /// Which data key: clones have their parent's.
    id: Uuid,
    /// The fingerprint of the key that it is wrapped with.
    wrapped_with: String,
    nonce: String,
    key: String,
}

/// Random bytes.
fn random(bytes: &mut [u8]) -> Result<(), KeyError> {
    let filled = SystemRandom::new().fill(bytes);
    filled.map_err(|_| KeyError::Random)
}

impl WrappedKey {
    /// A new data key, wrapped.
    pub fn new(with: &WrappingKey) -> Result<Self, KeyError> {
        let mut key = Zeroizing::new([0; KEY_BYTES]);
        random(&mut *key)?;
        Self::wrap(Uuid::new_v4(), &DataKey(key), with)
    }

    /// The same data key with another wrapping.
    pub fn wrap_again(&self, key: &DataKey, with: &WrappingKey) -> Result<Self, KeyError> {
        Self::wrap(self.id, key, with)
    }

    fn wrap(id: Uuid, data_key: &DataKey, with: &WrappingKey) -> Result<Self, KeyError> {
        let mut nonce = [0; NONCE_LEN];
        random(&mut nonce)?;
        // Encrypted in place, so nothing plain is left behind.
        let mut sealed = data_key.0.to_vec();
        sealing_key(with)
            .seal_in_place_append_tag(
                Nonce::assume_unique_for_key(nonce),
                Aad::from(bound_to(id)),
                &mut sealed,
            )
            .expect("a data key is not too long");
        Ok(Self {
            cipher: CIPHER.to_owned(),
            id,
            wrapped_with: with.fingerprint(),
            nonce: BASE64_STANDARD.encode(nonce),
            key: BASE64_STANDARD.encode(sealed),
        })
    }

    /// The data key. `source` is where `with` comes from, for the error.
    pub fn unwrap(&self, with: &WrappingKey, source: &KeySource) -> Result<DataKey, KeyError> {
        if self.cipher != CIPHER {
            return Err(KeyError::Cipher(self.cipher.clone()));
        }
        let found = with.fingerprint();
        if found != self.wrapped_with {
            return Err(KeyError::Other {
                place: source.to_string(),
                found,
                needs: self.wrapped_with.clone(),
            });
        }
        let nonce = BASE64_STANDARD.decode(&self.nonce).ok();
        let nonce = nonce.and_then(|nonce| nonce.try_into().ok());
        let sealed = BASE64_STANDARD.decode(&self.key).ok();
        let (Some(nonce), Some(sealed)) = (nonce, sealed) else {
            return Err(KeyError::Damaged);
        };
        let mut sealed = Zeroizing::new(sealed);
        let nonce = Nonce::assume_unique_for_key(nonce);
        let opened =
            sealing_key(with).open_in_place(nonce, Aad::from(bound_to(self.id)), &mut sealed);
        let opened = opened.map_err(|_| KeyError::Damaged)?;
        let mut key = Zeroizing::new([0; KEY_BYTES]);
        if opened.len() != key.len() {
            return Err(KeyError::Damaged);
        }
        key.copy_from_slice(opened);
        Ok(DataKey(key))
    }

    /// Which data key it is.
    pub fn id(&self) -> Uuid {
        self.id
    }

    /// The fingerprint of the key that it is wrapped with.
    pub fn wrapped_with(&self) -> &str {
        &self.wrapped_with
    }

    /// As it lies beside objects.
    pub fn to_object(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec(self).expect("a wrapped key is JSON");
        assert!(bytes.len() <= OBJECT_BYTES, "a wrapped key is small");
        bytes.resize(OBJECT_BYTES, b' ');
        bytes
    }

    /// From what lies there.
    pub fn from_object(bytes: &[u8]) -> Result<Self, KeyError> {
        serde_json::from_slice(bytes).map_err(|_| KeyError::Damaged)
    }
}

fn sealing_key(with: &WrappingKey) -> LessSafeKey {
    let key = UnboundKey::new(&AES_256_GCM, with.bytes());
    LessSafeKey::new(key.expect("a key of 32 bytes"))
}

/// What a wrapping holds for besides the key.
fn bound_to(id: Uuid) -> Vec<u8> {
    [CIPHER.as_bytes(), id.as_bytes()].concat()
}
