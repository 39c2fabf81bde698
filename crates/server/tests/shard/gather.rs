//! Clients that send their requests one by one, and are not woken for by each.

use crate::client::{READ, WRITE, noise};
use crate::node::Node;

/// Requests that a client keeps unanswered: more than it takes to be held.
const DEPTH: u64 = 32;
const BLOCK: usize = 4096;

#[test]
fn gather_answers_all_that_is_sent_one_by_one() {
    let directory = tempfile::tempdir().unwrap();
    let node = Node::with_volume(directory.path(), "");
    let mut client = node.connect(1);
    let mut other = node.connect(1);
    for number in 0..1024 {
        if number >= DEPTH {
            assert_eq!(client.reply().unwrap().1, 0);
        }
        let data = noise(number, BLOCK);
        let offset = number * BLOCK as u64;
        client.send(WRITE, offset, BLOCK as u32, &data).unwrap();
    }
    // The log is written no more once these are answered: nothing but time lets the rest in.
    for _ in 0..DEPTH {
        assert_eq!(client.reply().unwrap().1, 0);
    }
    for number in 0..1024 {
        assert!(other.read(number * BLOCK as u64, BLOCK).unwrap() == noise(number, BLOCK));
    }
    node.stop(false);
}

#[test]
fn gather_ends_with_a_client_that_goes_away() {
    let directory = tempfile::tempdir().unwrap();
    let node = Node::with_volume(directory.path(), "");
    for round in 0..16 {
        let mut client = node.connect(1);
        for number in 0..DEPTH {
            let data = noise(round, BLOCK);
            let offset = number * BLOCK as u64;
            client.send(WRITE, offset, BLOCK as u32, &data).unwrap();
        }
        client.send(READ, 0, BLOCK as u32, &[]).unwrap();
    }
    node.until_shard("all have gone", |report| report.connections == 0);
    node.connect(1).write(0, &noise(99, BLOCK)).unwrap();
    assert_eq!(node.connect(1).read(0, BLOCK).unwrap(), noise(99, BLOCK));
    node.stop(false);
}
