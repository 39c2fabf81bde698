//! The head of a frame: encoded, decoded, and checked against everything that does not depend on what came before.
//!
//! Checked in this order: magic, checksum, version, number in its direction, kind, lengths, fields. Nothing of a frame is
//! used before that, and no memory is taken for what it announces.

use hdcs_core::format::block_checksum;
use hdcs_core::wire::{
    FRAME_BY_OPENER, FRAME_HEADER_BYTES, FRAME_MAGIC, FRAME_URGENT, FrameHeader, HANDSHAKE_VERSION,
    Kind, META_CHECKSUM_BYTES, PayloadChecksum, Purpose,
};
use zerocopy::{FromBytes, IntoBytes};

use hdcs_core::base::buf::Buf;

use crate::error::FrameError;

/// How a record of TLS begins that has a part of a handshake.
const TLS_HANDSHAKE: [u8; 2] = [0x16, 3];

/// Where the checksum of a header is; it covers all before.
const CHECKSUM_OFFSET: usize = FRAME_HEADER_BYTES - size_of::<u32>();

/// What a frame says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// What it is.
    pub kind: Kind,
    /// See [`FrameHeader`], here and below.
    pub flags: u8,
    /// What is asked, how it ended, or why.
    pub code: u16,
    /// Which stream.
    pub stream: u32,
    /// Of which epoch.
    pub epoch: u64,
    /// A position, or bytes granted.
    pub position: u64,
    /// A request, a time, or a position.
    pub number: u64,
    /// Room for an answer's payload.
    pub room_bytes: u32,
    /// Bytes of meta.
    pub meta_bytes: u16,
    /// Bytes of payload.
    pub payload_bytes: u32,
    /// CRC-64/NVME of that.
    pub payload_checksum: u64,
}

impl Head {
    /// A frame of a kind with nothing in it.
    pub const fn new(kind: Kind) -> Self {
        Self {
            kind,
            flags: 0,
            code: 0,
            stream: 0,
            epoch: 0,
            position: 0,
            number: 0,
            room_bytes: 0,
            meta_bytes: 0,
            payload_bytes: 0,
            payload_checksum: 0,
        }
    }

    /// Bytes of header and meta on the wire.
    pub fn front_bytes(&self) -> usize {
        FRAME_HEADER_BYTES + meta_on_wire(usize::from(self.meta_bytes))
    }

    /// The header on the wire, as the `sequence`-th frame of its direction.
    pub fn encode(&self, version: u16, sequence: u32) -> [u8; FRAME_HEADER_BYTES] {
        let mut header = FrameHeader {
            magic: FRAME_MAGIC,
            version: version.into(),
            kind: self.kind.code(),
            flags: self.flags,
            payload_bytes: self.payload_bytes.into(),
            room_bytes: self.room_bytes.into(),
            epoch: self.epoch.into(),
            position: self.position.into(),
            number: self.number.into(),
            payload_checksum: self.payload_checksum.into(),
            stream: self.stream.into(),
            code: self.code.into(),
            meta_bytes: self.meta_bytes.into(),
            sequence: sequence.into(),
            checksum: 0.into(),
        };
        header.checksum = block_checksum(&header.as_bytes()[..CHECKSUM_OFFSET]).into();
        zerocopy::transmute!(header)
    }

    /// The head of the frame that begins with these bytes, which is to be the `sequence`-th of its direction. `agreed` is
    /// the version once there is one, `purpose` that of the connection once it is known.
    pub fn decode(
        bytes: &[u8; FRAME_HEADER_BYTES],
        agreed: Option<u16>,
        purpose: Option<Purpose>,
        sequence: u32,
    ) -> Result<Self, FrameError> {
        if bytes[..FRAME_MAGIC.len()] != FRAME_MAGIC {
            let is_tls = bytes[..TLS_HANDSHAKE.len()] == TLS_HANDSHAKE;
            return Err(if is_tls {
                FrameError::Tls
            } else {
                FrameError::Magic
            });
        }
        let header = FrameHeader::ref_from_bytes(bytes).map_err(|_| FrameError::Magic)?;
        if header.checksum.get() != block_checksum(&bytes[..CHECKSUM_OFFSET]) {
            return Err(FrameError::HeaderChecksum);
        }
        // A kind that is not known has the version that was agreed on, if any.
        let kind = Kind::from_code(header.kind);
        let expected = match (kind, agreed) {
            (Some(kind), Some(agreed)) if !kind.is_handshake() => agreed,
            (None, Some(agreed)) => agreed,
            _ => HANDSHAKE_VERSION,
        };
        let found = header.version.get();
        if found != expected {
            return Err(FrameError::Version { found, expected });
        }
        if header.sequence.get() != sequence {
            let found = header.sequence.get();
            return Err(FrameError::Sequence { found });
        }
        let kind = kind.ok_or(FrameError::Kind(header.kind))?;
        let head = Self {
            kind,
            flags: header.flags,
            code: header.code.get(),
            stream: header.stream.get(),
            epoch: header.epoch.get(),
            position: header.position.get(),
            number: header.number.get(),
            room_bytes: header.room_bytes.get(),
            meta_bytes: header.meta_bytes.get(),
            payload_bytes: header.payload_bytes.get(),
            payload_checksum: header.payload_checksum.get(),
        };
        head.check(purpose)?;
        Ok(head)
    }

    fn check(&self, purpose: Option<Purpose>) -> Result<(), FrameError> {
        let kind = self.kind;
        let within = |part, bytes: usize, min, max| {
            let length = FrameError::Length {
                kind,
                part,
                bytes,
                min,
                max,
            };
            if bytes < min || bytes > max {
                Err(length)
            } else {
                Ok(())
            }
        };
        let (min, max) = kind.meta_bytes();
        within("meta", usize::from(self.meta_bytes), min, max)?;
        // Before it is known what a connection is for, only a handshake passes, which has none.
        let payload_max = purpose.map_or(0, |purpose| kind.payload_bytes_max(purpose));
        within("payload", self.payload_bytes as usize, 0, payload_max)?;
        let room_max = match (kind, purpose) {
            (Kind::Request, Some(purpose)) => Kind::Answer.payload_bytes_max(purpose),
            _ => 0,
        };
        within("room", self.room_bytes as usize, 0, room_max)?;
        let flags = match kind {
            Kind::Request => FRAME_URGENT,
            Kind::Close => FRAME_BY_OPENER,
            _ => 0,
        };
        if self.flags & !flags != 0 {
            return Err(FrameError::Field("flags"));
        }
        if self.payload_bytes == 0 && self.payload_checksum != 0 {
            return Err(FrameError::Field("payload_checksum"));
        }
        Ok(())
    }
}

/// What a meta of so many bytes has on the wire.
pub const fn meta_on_wire(bytes: usize) -> usize {
    if bytes == 0 {
        0
    } else {
        bytes + META_CHECKSUM_BYTES
    }
}

/// The meta in its bytes on the wire, if its checksum matches.
pub fn checked_meta(wire: &[u8]) -> Result<&[u8], FrameError> {
    let Some((meta, checksum)) = wire.split_last_chunk::<META_CHECKSUM_BYTES>() else {
        return Ok(wire);
    };
    if u32::from_le_bytes(*checksum) != block_checksum(meta) {
        return Err(FrameError::MetaChecksum);
    }
    Ok(meta)
}

/// A frame that is to be sent.
#[derive(Clone, Debug)]
pub struct Frame {
    /// Its head.
    pub head: Head,
    /// Its meta.
    pub meta: Box<[u8]>,
    /// Its payload, from where it lies.
    pub parts: Vec<Buf>,
}

impl Frame {
    /// A frame of a head and what follows it; lengths and checksum are put into the head.
    pub fn new(mut head: Head, meta: Box<[u8]>, parts: Vec<Buf>) -> Self {
        head.meta_bytes = meta.len() as u16;
        head.payload_bytes = parts.iter().map(|part| part.len() as u32).sum();
        head.payload_checksum = 0;
        if head.payload_bytes > 0 {
            let mut checksum = PayloadChecksum::new();
            for part in &parts {
                checksum.update(part);
            }
            head.payload_checksum = checksum.value();
        }
        Self { head, meta, parts }
    }

    /// A frame that is a head alone.
    pub fn bare(head: Head) -> Self {
        Self::new(head, Box::default(), Vec::new())
    }

    /// A frame with a structure as its meta.
    pub fn with(head: Head, meta: &(impl IntoBytes + zerocopy::Immutable)) -> Self {
        Self::new(head, meta.as_bytes().into(), Vec::new())
    }

    /// Header and meta on the wire.
    pub fn front(&self, version: u16, sequence: u32) -> smallvec::SmallVec<[u8; 128]> {
        let version = if self.head.kind.is_handshake() {
            HANDSHAKE_VERSION
        } else {
            version
        };
        let mut front = smallvec::SmallVec::with_capacity(self.head.front_bytes());
        front.extend_from_slice(&self.head.encode(version, sequence));
        if !self.meta.is_empty() {
            front.extend_from_slice(&self.meta);
            front.extend_from_slice(&block_checksum(&self.meta).to_le_bytes());
        }
        front
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn append() -> Head {
        Head {
            meta_bytes: 64,
            payload_bytes: 8192,
            payload_checksum: 77,
            stream: 3,
            epoch: 9,
            position: 1000,
            number: 990,
            ..Head::new(Kind::Append)
        }
    }

    fn decode(bytes: &[u8; FRAME_HEADER_BYTES]) -> Result<Head, FrameError> {
        Head::decode(bytes, Some(1), Some(Purpose::Spans), 5)
    }

    #[test]
    fn head_is_read_as_it_was_written() {
        assert_eq!(decode(&append().encode(1, 5)), Ok(append()));
    }

    #[test]
    fn beginning_of_tls_is_told_from_other_programs() {
        let mut bytes = [0; FRAME_HEADER_BYTES];
        assert_eq!(decode(&bytes), Err(FrameError::Magic));
        bytes[..5].copy_from_slice(&[0x16, 3, 1, 2, 0]);
        assert_eq!(decode(&bytes), Err(FrameError::Tls));
    }

    #[test]
    fn head_with_any_bit_changed_is_refused() {
        let good = append().encode(1, 5);
        for bit in 0..FRAME_HEADER_BYTES * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            let expected = if bit < 32 {
                FrameError::Magic
            } else {
                FrameError::HeaderChecksum
            };
            assert_eq!(decode(&bad), Err(expected), "bit {bit}");
        }
    }

    #[test]
    fn head_of_another_version_or_number_is_refused() {
        let other = append().encode(2, 5);
        let (found, expected) = (2, 1);
        assert_eq!(decode(&other), Err(FrameError::Version { found, expected }));
        let repeated = append().encode(1, 4);
        assert_eq!(decode(&repeated), Err(FrameError::Sequence { found: 4 }));
    }

    #[test]
    fn length_beyond_the_bound_of_its_kind_is_refused() {
        let purposes = [
            None,
            Some(Purpose::Spans),
            Some(Purpose::Requests),
            Some(Purpose::Bulk),
        ];
        for (kind, purpose) in Kind::ALL
            .into_iter()
            .flat_map(|kind| purposes.map(|one| (kind, one)))
        {
            let (meta_min, meta_max) = kind.meta_bytes();
            let payload_max = purpose.map_or(0, |purpose| kind.payload_bytes_max(purpose));
            let at = |meta_bytes: usize, payload_bytes: usize, room_bytes| {
                let head = Head {
                    meta_bytes: meta_bytes as u16,
                    payload_bytes: payload_bytes as u32,
                    room_bytes,
                    ..Head::new(kind)
                };
                let version = (!kind.is_handshake()).then_some(1);
                Head::decode(&head.encode(1, 0), version, purpose, 0)
            };
            assert!(at(meta_max, payload_max, 0).is_ok(), "{kind} {purpose:?}");
            let is_length = |result| matches!(result, Err(FrameError::Length { .. }));
            assert!(is_length(at(meta_max + 1, 0, 0)), "{kind}");
            assert!(is_length(at(meta_max, payload_max + 1, 0)), "{kind}");
            assert!(is_length(at(meta_max, 0, u32::MAX)), "{kind}");
            if meta_min > 0 {
                assert!(is_length(at(meta_min - 1, 0, 0)), "{kind}");
            }
        }
    }

    #[test]
    fn unknown_kinds_flags_and_checksums_of_nothing_are_refused() {
        let mut header = append().encode(1, 5);
        header[6] = 200;
        let checksum = block_checksum(&header[..CHECKSUM_OFFSET]).to_le_bytes();
        header[CHECKSUM_OFFSET..].copy_from_slice(&checksum);
        assert_eq!(decode(&header), Err(FrameError::Kind(200)));
        let flags = Head {
            flags: FRAME_URGENT,
            ..append()
        };
        assert_eq!(decode(&flags.encode(1, 5)), Err(FrameError::Field("flags")));
        let nothing = Head {
            payload_bytes: 0,
            ..append()
        };
        let expected = Err(FrameError::Field("payload_checksum"));
        assert_eq!(decode(&nothing.encode(1, 5)), expected);
    }

    #[test]
    fn meta_has_a_checksum_of_its_own() {
        let frame = Frame::new(
            Head::new(Kind::Request),
            (*b"what is asked").into(),
            Vec::new(),
        );
        let mut front = frame.front(1, 0);
        let meta = FRAME_HEADER_BYTES..;
        assert_eq!(
            checked_meta(&front[meta.clone()]),
            Ok(&b"what is asked"[..])
        );
        front[FRAME_HEADER_BYTES + 2] ^= 4;
        assert_eq!(checked_meta(&front[meta]), Err(FrameError::MetaChecksum));
    }
}
