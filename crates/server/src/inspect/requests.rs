//! The requests of clients in a log of records.

use std::fs::File;
use std::os::unix::fs::FileExt;

use hdcs_backend::crypt::LogCipher;
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::log::clients::ClientRecord;
use hdcs_core::log::replay::Record;
use hdcs_core::log::write_log::WriteLog;
use serde::Serialize;

/// Requests of clients that are shown of a log at most.
const SHOWN_MAX: usize = 16;

/// A request of a client that took effect.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RequestSummary {
    /// Number of the client.
    pub client: u64,
    /// Number of the request.
    pub number: u64,
    /// Bytes of its result.
    pub result_bytes: usize,
    /// Bytes of its effect.
    pub effect_bytes: usize,
}

/// The last requests of clients among these records.
pub(super) fn last(
    file: &File,
    cipher: Option<&LogCipher>,
    log: &WriteLog,
    records: &[Record],
) -> Vec<RequestSummary> {
    let request = |record: &Record| {
        let start = usize::from(record.offset);
        let end = start + record.bytes as usize;
        let mut blocks = vec![0; end.next_multiple_of(BLOCK_BYTES)];
        let (offset, _) = log.locate(record.position);
        file.read_exact_at(&mut blocks, offset).ok()?;
        if let Some(cipher) = cipher {
            cipher.decrypt(offset, &mut blocks);
        }
        match ClientRecord::parse(&blocks[start..end]).ok()? {
            ClientRecord::Request {
                client,
                number,
                result,
                effect,
            } => Some(RequestSummary {
                client,
                number,
                result_bytes: result.len(),
                effect_bytes: effect.len(),
            }),
            ClientRecord::Registration { .. } | ClientRecord::Checkpoint { .. } => None,
        }
    };
    let last = records.iter().rev().filter_map(request);
    let mut requests: Vec<_> = last.take(SHOWN_MAX).collect();
    requests.reverse();
    requests
}

#[cfg(test)]
pub(super) fn example() -> (Vec<u8>, RequestSummary) {
    let record = ClientRecord::Request {
        client: 3,
        number: 7,
        result: &[1; 5],
        effect: &[2; 700],
    };
    let summary = RequestSummary {
        client: 3,
        number: 7,
        result_bytes: 5,
        effect_bytes: 700,
    };
    (record.encode(), summary)
}
