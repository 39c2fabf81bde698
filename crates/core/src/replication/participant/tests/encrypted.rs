//! Logs that are encrypted: members decrypt what they take, read back and give to others.

use super::*;
use crate::base::cipher::{BlockCipher, TAG_BYTES};

/// Adds the number of a block and its place to each byte.
#[derive(Debug)]
pub(super) struct Toy;

impl BlockCipher for Toy {
    fn encrypt(&self, number: u64, block: &mut [u8]) {
        for (place, byte) in block.iter_mut().enumerate() {
            *byte = byte.wrapping_add(number as u8 ^ 0x5a).rotate_left(3) ^ place as u8;
        }
    }

    fn decrypt(&self, number: u64, block: &mut [u8]) {
        for (place, byte) in block.iter_mut().enumerate() {
            *byte = (*byte ^ place as u8)
                .rotate_right(3)
                .wrapping_sub(number as u8 ^ 0x5a);
        }
    }
}

impl Authenticator for Toy {
    fn tag(&self, bytes: &[u8]) -> [u8; TAG_BYTES] {
        let sum = bytes.iter().fold(1_u64, |sum, byte| {
            (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
        });
        [sum.to_le_bytes(), [5; 8]]
            .concat()
            .try_into()
            .expect("sixteen bytes")
    }
}

/// Do something with each block of the ring among these, and its number.
pub(super) fn each_block(offset: u64, bytes: &mut [u8], call: impl Fn(u64, &mut [u8])) {
    let first = offset / BLOCK_BYTES as u64;
    for (number, block) in (first..).zip(bytes.chunks_exact_mut(BLOCK_BYTES)) {
        if number >= LOG_HEADER_BLOCKS {
            call(number, block);
        }
    }
}

#[test]
fn log_that_is_encrypted_is_the_same_everywhere_and_rot_of_it_goes_nowhere() {
    let mut net = Net::made(3, AckLevel::All, true).brought_up();
    net.write(Member(0), 1, 1);
    net.settle();
    net.kill(Member(2));
    net.pass(5_000);
    net.write(Member(0), 3, 2);
    net.settle();
    let ring = LOG_HEADER_BLOCKS as usize * BLOCK_BYTES;
    assert!(net.nodes[0].disk[ring..] == net.nodes[1].disk[ring..]);
    // What the last one lacks rots at the primary, in a block that is no head.
    let head = net.participant(Member(0)).replica.head();
    let at = net
        .participant(Member(0))
        .reads
        .offset_at(head.position - 1) as usize;
    net.nodes[0].disk[at] ^= 1;
    net.start(Member(2));
    // The other member has it whole, and gives it.
    net.settle();
    assert_eq!(net.record.config.members.count(), 3, "{:?}", net.record);
    for member in members(3) {
        assert_eq!(net.bytes(member), [1, 2]);
    }
    assert!(net.nodes[0].disk[ring..] == net.nodes[1].disk[ring..]);
}

#[test]
fn head_that_does_not_decrypt_to_the_span_is_not_taken() {
    let mut net = Net::made(3, AckLevel::All, true).brought_up();
    net.write(Member(0), 1, 1);
    net.settle();
    let before = net.nodes[1].disk.clone();
    // The span is the next one in all that is said of it, but its blocks are not encrypted.
    let (now, epoch) = (net.now, net.record.epoch);
    net.full.extend([1, 2].map(|to| (Member(0), Member(to))));
    net.write(Member(0), 1, 2);
    let (_, message, data) = net.participant(Member(0)).next_send(Member(1)).unwrap();
    let (message, data) = (message.clone(), data.to_vec());
    let Message::Append(span) = message else {
        panic!("{message:?}");
    };
    let mut offset = net.participant(Member(0)).reads.offset_of(&span);
    let mut clear = Vec::new();
    for part in &data {
        let mut buf = net.pool.alloc(part.len()).unwrap();
        buf.copy_from_slice(part);
        each_block(offset, &mut buf, |number, block| Toy.decrypt(number, block));
        offset += part.len() as u64;
        clear.push(buf.freeze());
    }
    let participant = net.participant(Member(1));
    participant.receive(now, Member(0), epoch, &message, clear);
    let acts = participant.take_acts();
    assert!(matches!(acts[..], [Act::Drop(Member(0))]), "{acts:?}");
    assert!(net.nodes[1].disk == before);
    // As it was sent it is taken.
    let participant = net.participant(Member(1));
    participant.receive(now, Member(0), epoch, &message, data);
    let acts = participant.take_acts();
    assert!(matches!(acts[..], [Act::Write { .. }]), "{acts:?}");
}
