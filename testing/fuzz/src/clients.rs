//! Bytes of a log against the parser of records of clients, and the table that is made of them.
//!
//! Whatever the parser accepts encodes to the same bytes. Whatever the table makes of it can be written as a checkpoint, and
//! has the same answers after that was read.

use hdcs_core::base::limits::CLIENT_RESULTS_MAX;
use hdcs_core::format::seal;
use hdcs_core::log::clients::{
    Admission, CLIENT_MAGIC, ClientRecord, ClientRecordHeader, ClientTable,
};

/// The bytes as they are, and again with magic, version and checksum put right.
pub fn clients(data: &[u8]) {
    take(data);
    if data.len() >= size_of::<ClientRecordHeader>() {
        let mut sealed = data.to_vec();
        sealed[..8].copy_from_slice(&CLIENT_MAGIC);
        sealed[8..10].copy_from_slice(&[1, 0]);
        seal(&mut sealed);
        take(&sealed);
    }
}

fn take(data: &[u8]) {
    let Ok(record) = ClientRecord::parse(data) else {
        return;
    };
    assert_eq!(record.encode(), data);
    let mut table = ClientTable::new(0);
    for client in 1..4 {
        table.replayed(&ClientRecord::Registration { client }, client);
    }
    let counts = table.replayed(&record, 4);
    table.committed(9);
    table.check_invariants();
    let (client, number) = match record {
        ClientRecord::Registration { client } => (client, 1),
        ClientRecord::Request {
            client,
            number,
            result,
            ..
        } => {
            let admission = table.admit(client, number);
            assert_eq!(admission == Admission::Repeated(result), counts);
            assert!(!table.replayed(&record, 5), "it counts once");
            (client, number)
        }
        ClientRecord::Checkpoint { .. } => (1, 1),
    };
    let clients = table.clients().clone();
    let checkpoint = ClientRecord::Checkpoint {
        clients,
        state: &[],
    };
    let bytes = checkpoint.encode();
    let read = ClientRecord::parse(&bytes).expect("a table can be read");
    let mut other = ClientTable::new(7);
    assert!(other.replayed(&read, 8));
    other.committed(9);
    assert_eq!(other.next_client(), table.next_client());
    for number in number.saturating_sub(CLIENT_RESULTS_MAX as u64)..=number.saturating_add(1) {
        assert_eq!(other.admit(client, number), table.admit(client, number));
    }
}

/// A record of some kind.
pub fn clients_example(random: &mut fastrand::Rng) -> Vec<u8> {
    let mut table = ClientTable::new(0);
    for client in 1..random.u64(2..5) {
        table.replayed(&ClientRecord::Registration { client }, client);
    }
    let mut number = 0;
    for _ in 0..random.usize(..6) {
        number += random.u64(..3);
        let request = ClientRecord::Request {
            client: random.u64(1..4),
            number,
            result: &[7; 40][..random.usize(..40)],
            effect: &[],
        };
        table.replayed(&request, 9);
    }
    let record = match random.usize(..4) {
        0 => ClientRecord::Registration {
            client: random.u64(1..9),
        },
        1 => ClientRecord::Request {
            client: random.u64(1..5),
            number: random.u64(1..20),
            result: &[8; 40][..random.usize(..40)],
            effect: &[9; 40][..random.usize(..40)],
        },
        _ => ClientRecord::Checkpoint {
            clients: table.clients().clone(),
            state: &[9; 40][..random.usize(..40)],
        },
    };
    record.encode()
}
