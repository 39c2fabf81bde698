//! What a log of records says of clients and their requests, part of docs/FORMATS.md by way of [`crate::format`].

use alloc::vec::Vec;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{Client, Clients, Kept};
use crate::base::error::FormatError;
use crate::base::limits::{
    CLIENT_RESULT_BYTES_MAX, CLIENT_RESULTS_MAX, CLIENTS_MAX, RECORD_BYTES_MAX,
};
use crate::format::{Field, Structure, on_disk, seal, verify};

/// First bytes of a record of clients.
pub const CLIENT_MAGIC: [u8; 8] = *b"HDCSCLNT";
/// The version of such records.
pub const CLIENT_VERSION: u16 = 1;
/// The largest effect of a request.
pub const EFFECT_BYTES_MAX: usize =
    RECORD_BYTES_MAX - size_of::<ClientRecordHeader>() - CLIENT_RESULT_BYTES_MAX;
/// What a checkpoint may hold at most beside the clients.
pub const CHECKPOINT_BYTES_MAX: usize = RECORD_BYTES_MAX
    - size_of::<ClientRecordHeader>()
    - CLIENTS_MAX
        * (size_of::<CheckpointClient>()
            + CLIENT_RESULTS_MAX * (size_of::<CheckpointResult>() + CLIENT_RESULT_BYTES_MAX));

const REGISTRATION: u8 = 1;
const REQUEST: u8 = 2;
const CHECKPOINT: u8 = 3;

on_disk! {
    /// The head of a record of clients.
    ClientRecordHeader: 48 bytes {
        /// `HDCSCLNT`.
        magic: [u8; 8],
        /// Format version, 1.
        version: U16,
        /// 1 registration, 2 request, 3 checkpoint.
        kind: u8,
        /// Zero.
        reserved: [u8; 5],
        /// CRC-64/NVME of the record with this field zero.
        checksum: U64,
        /// Number of the client. Checkpoint: the last one that was given.
        client: U64,
        /// Number of the request. Checkpoint: how many clients it has. Else 0.
        number: U64,
        /// Bytes of the result. Checkpoint: of the clients. Else 0.
        result_bytes: U32,
        /// Bytes of the effect. Checkpoint: of what it says beside the clients. Else 0.
        effect_bytes: U32,
    }
}

on_disk! {
    /// A client in a checkpoint; they are in the order of their last records.
    CheckpointClient: 16 bytes {
        /// Its number.
        client: U64,
        /// How many results follow.
        results: U32,
        /// Zero.
        reserved: [u8; 4],
    }
}

on_disk! {
    /// A result of a client, in the order of the numbers.
    CheckpointResult: 16 bytes {
        /// Number of the request.
        number: U64,
        /// Its bytes, which follow.
        bytes: U32,
        /// Zero.
        reserved: [u8; 4],
    }
}

/// A record of clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientRecord<'a> {
    /// A client gets this number.
    Registration {
        /// See there.
        client: u64,
    },
    /// A request has taken effect.
    Request {
        /// Whose.
        client: u64,
        /// Which of its requests.
        number: u64,
        /// What it is answered with, [`CLIENT_RESULT_BYTES_MAX`] at most.
        result: &'a [u8],
        /// What it has changed, [`EFFECT_BYTES_MAX`] at most.
        effect: &'a [u8],
    },
    /// All that the records before it say.
    Checkpoint {
        /// Of clients.
        clients: Clients,
        /// Of what they have changed, [`CHECKPOINT_BYTES_MAX`] at most; or where that is.
        state: &'a [u8],
    },
}

impl<'a> ClientRecord<'a> {
    /// The bytes of it.
    ///
    /// # Panics
    /// If a part is larger than it may be: who makes results and effects keeps to the bounds.
    pub fn encode(&self) -> Vec<u8> {
        const NOTHING: &[u8] = &[];
        let table;
        let (kind, client, number, result, effect) = match self {
            Self::Registration { client } => (REGISTRATION, *client, 0, NOTHING, NOTHING),
            Self::Request {
                client,
                number,
                result,
                effect,
            } => {
                assert!(
                    result.len() <= CLIENT_RESULT_BYTES_MAX && effect.len() <= EFFECT_BYTES_MAX
                );
                (REQUEST, *client, *number, *result, *effect)
            }
            Self::Checkpoint { clients, state } => {
                assert!(state.len() <= CHECKPOINT_BYTES_MAX);
                table = encode_clients(&clients.clients);
                let count = clients.clients.len() as u64;
                (CHECKPOINT, clients.last, count, table.as_slice(), *state)
            }
        };
        let header = ClientRecordHeader {
            magic: CLIENT_MAGIC,
            version: U16::new(CLIENT_VERSION),
            kind,
            reserved: [0; 5],
            checksum: U64::new(0),
            client: U64::new(client),
            number: U64::new(number),
            result_bytes: U32::new(result.len() as u32),
            effect_bytes: U32::new(effect.len() as u32),
        };
        let mut bytes = [header.as_bytes(), result, effect].concat();
        seal(&mut bytes);
        bytes
    }

    /// The record that these bytes are, all of them.
    ///
    /// # Errors
    /// They are none.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, FormatError> {
        let (header, rest) =
            ClientRecordHeader::ref_from_prefix(bytes).map_err(|_| FormatError::Field("length"))?;
        verify(bytes, CLIENT_MAGIC, CLIENT_VERSION)?;
        let (client, number) = (header.client.get(), header.number.get());
        let result_bytes = header.result_bytes.get() as usize;
        check(header.reserved == [0; 5], "reserved")?;
        check(result_bytes <= rest.len(), "result_bytes")?;
        let (result, effect) = rest.split_at(result_bytes);
        check(
            header.effect_bytes.get() as usize == effect.len(),
            "effect_bytes",
        )?;
        match header.kind {
            REGISTRATION => {
                check(client > 0, "client")?;
                check(number == 0, "number")?;
                check(rest.is_empty(), "length")?;
                Ok(Self::Registration { client })
            }
            REQUEST => {
                check(client > 0, "client")?;
                check(number > 0, "number")?;
                check(result.len() <= CLIENT_RESULT_BYTES_MAX, "result_bytes")?;
                check(effect.len() <= EFFECT_BYTES_MAX, "effect_bytes")?;
                Ok(Self::Request {
                    client,
                    number,
                    result,
                    effect,
                })
            }
            CHECKPOINT => {
                check(effect.len() <= CHECKPOINT_BYTES_MAX, "effect_bytes")?;
                let clients = Clients {
                    last: client,
                    clients: parse_clients(result, number, client)?,
                };
                Ok(Self::Checkpoint {
                    clients,
                    state: effect,
                })
            }
            _ => Err(FormatError::Field("kind")),
        }
    }
}

fn encode_clients(clients: &[Client]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for client in clients {
        let head = CheckpointClient {
            client: U64::new(client.number),
            results: U32::new(client.results.len() as u32),
            reserved: [0; 4],
        };
        bytes.extend_from_slice(head.as_bytes());
        for kept in &client.results {
            let head = CheckpointResult {
                number: U64::new(kept.number),
                bytes: U32::new(kept.result.len() as u32),
                reserved: [0; 4],
            };
            bytes.extend_from_slice(head.as_bytes());
            bytes.extend_from_slice(&kept.result);
        }
    }
    bytes
}

/// So many clients, with numbers up to `last`.
fn parse_clients(mut bytes: &[u8], count: u64, last: u64) -> Result<Vec<Client>, FormatError> {
    check(count <= CLIENTS_MAX as u64, "number")?;
    let mut clients: Vec<Client> = Vec::with_capacity(count as usize);
    for _ in 0..count {
        let head: &CheckpointClient = take(&mut bytes)?;
        let client = head.client.get();
        let is_new = !clients.iter().any(|other| other.number == client);
        check((1..=last).contains(&client) && is_new, "client")?;
        check(head.reserved == [0; 4], "reserved")?;
        let results = parse_results(&mut bytes, head.results.get())?;
        clients.push(Client {
            number: client,
            at: 0,
            results,
        });
    }
    check(bytes.is_empty(), "result_bytes")?;
    Ok(clients)
}

fn parse_results(bytes: &mut &[u8], count: u32) -> Result<Vec<Kept>, FormatError> {
    check(count as usize <= CLIENT_RESULTS_MAX, "results")?;
    let mut results: Vec<Kept> = Vec::with_capacity(count as usize);
    for _ in 0..count {
        let head: &CheckpointResult = take(bytes)?;
        let number = head.number.get();
        let last = results.last().map_or(0, |last| last.number);
        let first = results.first().map_or(number, |first| first.number);
        let is_kept = number > last && number - first < CLIENT_RESULTS_MAX as u64;
        check(is_kept, "number")?;
        check(head.reserved == [0; 4], "reserved")?;
        let length = head.bytes.get() as usize;
        check(length <= CLIENT_RESULT_BYTES_MAX, "bytes")?;
        check(length <= bytes.len(), "bytes")?;
        let (result, rest) = bytes.split_at(length);
        *bytes = rest;
        results.push(Kept {
            number,
            at: 0,
            result: result.to_vec(),
        });
    }
    Ok(results)
}

/// Take a structure off the front.
fn take<'a, T>(bytes: &mut &'a [u8]) -> Result<&'a T, FormatError>
where
    T: FromBytes + KnownLayout + Immutable + Unaligned,
{
    let (found, rest) =
        T::ref_from_prefix(bytes).map_err(|_| FormatError::Field("result_bytes"))?;
    *bytes = rest;
    Ok(found)
}

const fn check(is_right: bool, field: &'static str) -> Result<(), FormatError> {
    if is_right {
        Ok(())
    } else {
        Err(FormatError::Field(field))
    }
}
