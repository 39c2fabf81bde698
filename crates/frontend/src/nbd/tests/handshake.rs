//! Every option, and every way to get one wrong.

use super::*;
use crate::nbd::protocol::{info, transmission_flag as flag};

/// An option, its queries, and the contexts that answer them.
type MetaCase = (u32, &'static [&'static str], &'static [(u32, &'static str)]);

/// Size and flags of the `EXPORT` information among the replies.
fn export_info(replies: &[(u32, Vec<u8>)]) -> (u64, u16) {
    let data = replies
        .iter()
        .find(|(kind, data)| *kind == option_reply::INFO && data[..2] == info::EXPORT.to_be_bytes())
        .map(|(_, data)| data)
        .unwrap();
    assert_eq!(data.len(), 12);
    (
        u64::from_be_bytes(data[2..10].try_into().unwrap()),
        u16::from_be_bytes(data[10..].try_into().unwrap()),
    )
}

#[test]
fn client_flags_unknown_close() {
    let mut wire = Wire::new(NbdConfig::default(), 1);
    wire.greet(0b111);
    wire.settle();
    assert!(wire.closed && wire.inbound.is_empty());
}

#[test]
fn export_name_with_and_without_zeroes() {
    for (client_flags, padding) in [(0b11, 0), (0b01, 124), (0b00, 124)] {
        let mut wire = Wire::new(NbdConfig::default(), 2);
        wire.greet(client_flags);
        wire.send_option(option::EXPORT_NAME, b"disk");
        assert_eq!(wire.u64(), DISK_BYTES);
        let flags = wire.u16();
        assert_eq!(flags & flag::HAS_FLAGS, 1);
        assert_eq!(flags & flag::SEND_DF, 0);
        assert_eq!(wire.take(padding), vec![0; padding]);
        assert_eq!(wire.read(0, 512), Ok(vec![0; 512]));
    }
}

#[test]
fn export_name_that_is_wrong_closes() {
    let names = [
        b"nothing".to_vec(),
        b"".to_vec(),
        b"\xff\xfe".to_vec(),
        vec![b'x'; 5000],
        vec![b'x'; 20_000],
    ];
    for name in names {
        let mut wire = Wire::greeted(3);
        wire.send_option(option::EXPORT_NAME, &name);
        assert!(wire.closed && wire.inbound.is_empty());
    }
}

#[test]
fn not_fixed_newstyle_allows_export_name_only() {
    let mut wire = Wire::new(NbdConfig::default(), 4);
    wire.greet(0);
    wire.send_option(option::LIST, &[]);
    assert!(wire.closed && wire.inbound.is_empty());
}

#[test]
fn abort_is_acknowledged_and_closes() {
    let mut wire = Wire::greeted(5);
    wire.send_option(option::ABORT, &[]);
    assert_eq!(wire.option_replies(option::ABORT), [ack()]);
    assert!(wire.closed);
}

#[test]
fn list_names_every_export() {
    let mut wire = Wire::greeted(6);
    wire.send_option(option::LIST, &[]);
    let server = |name| (option_reply::SERVER, string(name));
    let expected = [server("disk"), server("frozen"), ack()];
    assert_eq!(wire.option_replies(option::LIST), expected);
    let error = wire.option_error(option::LIST, b"x");
    assert_eq!(error, option_reply::ERR_INVALID);
}

#[test]
fn info_tells_what_is_asked_and_the_constraints() {
    let mut wire = Wire::greeted(7);
    let kinds = [info::NAME, info::DESCRIPTION, 999];
    wire.send_option(option::INFO, &info_query("disk", &kinds));
    let replies = wire.option_replies(option::INFO);
    let (bytes, flags) = export_info(&replies);
    let expected = flag::HAS_FLAGS
        | flag::SEND_FLUSH
        | flag::SEND_FUA
        | flag::SEND_TRIM
        | flag::SEND_WRITE_ZEROES
        | flag::SEND_CACHE
        | flag::CAN_MULTI_CONN;
    assert_eq!((bytes, flags), (DISK_BYTES, expected));
    let info = |kind: u16, data: &[u8]| {
        let data = [&kind.to_be_bytes()[..], data].concat();
        (option_reply::INFO, data)
    };
    assert!(replies.contains(&info(info::NAME, b"disk")));
    assert!(replies.contains(&info(info::DESCRIPTION, b"HDCS volume disk")));
    let sizes = [512u32, 4096, 32 << 20].map(u32::to_be_bytes);
    assert!(replies.contains(&info(info::BLOCK_SIZE, sizes.as_flattened())));
    assert_eq!(replies.last(), Some(&ack()));
    assert_eq!(replies.len(), 5);
    assert!(wire.session.opened().is_none());
}

#[test]
fn info_of_a_read_only_export_offers_no_writes() {
    let mut wire = Wire::greeted(8);
    wire.send_option(option::STRUCTURED_REPLY, &[]);
    wire.option_replies(option::STRUCTURED_REPLY);
    wire.send_option(option::INFO, &info_query("frozen", &[]));
    let (_, flags) = export_info(&wire.option_replies(option::INFO));
    assert_eq!(flags & flag::READ_ONLY, flag::READ_ONLY);
    assert_eq!(flags & flag::SEND_DF, flag::SEND_DF);
    assert_eq!(flags & (flag::SEND_TRIM | flag::SEND_WRITE_ZEROES), 0);
}

#[test]
fn info_and_go_malformed_are_refused_and_the_handshake_goes_on() {
    let mut wire = Wire::greeted(9);
    let mut trailing = info_query("disk", &[]);
    trailing.push(0);
    let mut lying = info_query("disk", &[]);
    lying[3] = 200;
    let mut huge = info_query("disk", &[]);
    huge[0] = 0xff;
    let mut not_text = info_query("disk", &[]);
    not_text[4] = 0xff;
    let long = info_query(&"x".repeat(4097), &[]);
    let short = info_query("disk", &[3])[..10].to_vec();
    let malformed = [
        trailing,
        lying,
        huge,
        not_text,
        long,
        short,
        vec![],
        vec![0; 3],
    ];
    for kind in [option::INFO, option::GO] {
        for data in &malformed {
            assert_eq!(wire.option_error(kind, data), option_reply::ERR_INVALID);
        }
        let error = wire.option_error(kind, &info_query("nothing", &[]));
        assert_eq!(error, option_reply::ERR_UNKNOWN);
    }
    wire.go("disk");
}

#[test]
fn export_that_is_not_open_is_refused_with_the_reason() {
    let mut wire = Wire::greeted(8);
    // Longer than a reply may be, and cut within a character.
    let why = format!("x{}", "µ".repeat(4000));
    let allow = Allow::default();
    let away = Unopened { why, allow };
    wire.host.not_open.push(("away".to_owned(), away));
    wire.send_option(option::GO, &info_query("away", &[]));
    let replies = wire.option_replies(option::GO);
    let [(option_reply::ERR_UNKNOWN, message)] = &replies[..] else {
        panic!("{replies:?}");
    };
    let message = str::from_utf8(message).unwrap();
    assert!(
        message.starts_with("volume away is not open: xµ"),
        "{message}"
    );
    assert!(message.len() < 4096);
    wire.go("disk");
}

#[test]
fn unknown_options_are_unsupported() {
    let mut wire = Wire::greeted(10);
    // PEEK_EXPORT, EXTENDED_HEADERS, and what nobody has defined.
    for kind in [0, 4, 11, 12, 0xffff_ffff] {
        for data in [&b""[..], b"data"] {
            assert_eq!(wire.option_error(kind, data), option_reply::ERR_UNSUP);
        }
    }
    wire.go("disk");
}

#[test]
fn options_too_long_are_skipped_or_close() {
    let mut wire = Wire::greeted(11);
    for bytes in [16_385, 1 << 20] {
        let error = wire.option_error(option::GO, &vec![0; bytes]);
        assert_eq!(error, option_reply::ERR_TOO_BIG);
    }
    let mut head = option_bytes(option::LIST, &[]);
    head[12..].copy_from_slice(&u32::MAX.to_be_bytes());
    wire.send(&head);
    wire.settle();
    assert!(wire.closed);
}

#[test]
fn bytes_that_are_no_option_close() {
    let mut wire = Wire::greeted(12);
    wire.send(b"GET / HTTP/1.1\r\n\r\n");
    wire.settle();
    assert!(wire.closed && wire.inbound.is_empty());
}

#[test]
fn options_without_end_close() {
    let mut wire = Wire::greeted(13);
    for _ in 0..5000 {
        wire.send(&option_bytes(99, &[]));
        wire.collect();
    }
    assert!(wire.closed);
}

#[test]
fn options_wait_for_a_client_that_does_not_read() {
    let mut wire = Wire::greeted(14);
    let mut taken = 0;
    while let Receive::Into(place) = wire.session.receive(&mut wire.host) {
        let option = option_bytes(option::LIST, &[]);
        place[..option.len()].copy_from_slice(&option);
        wire.session.received(option.len(), &mut wire.host);
        taken += 1;
        assert!(taken < 2000, "replies grow without bound");
    }
    wire.collect();
    let receive = wire.session.receive(&mut wire.host);
    assert!(matches!(receive, Receive::Into(_)));
}

#[test]
fn structured_reply_takes_no_data() {
    let mut wire = Wire::greeted(15);
    let error = wire.option_error(option::STRUCTURED_REPLY, b"x");
    assert_eq!(error, option_reply::ERR_INVALID);
    let ack = wire.option_error(option::STRUCTURED_REPLY, &[]);
    assert_eq!(ack, option_reply::ACK);
}

#[test]
fn meta_contexts_need_structured_replies() {
    let mut wire = Wire::greeted(16);
    for kind in [option::LIST_META_CONTEXT, option::SET_META_CONTEXT] {
        let error = wire.option_error(kind, &meta_query("disk", &[]));
        assert_eq!(error, option_reply::ERR_INVALID);
    }
}

#[test]
fn meta_contexts_by_query() {
    const ALLOCATION: &str = "base:allocation";
    const CACHE: &str = "hdcs:cache";
    const BOTH: [(u32, &str); 2] = [(0, ALLOCATION), (0, CACHE)];
    let mut wire = Wire::greeted(17);
    wire.send_option(option::STRUCTURED_REPLY, &[]);
    wire.option_replies(option::STRUCTURED_REPLY);
    let list = option::LIST_META_CONTEXT;
    let set = option::SET_META_CONTEXT;
    let cases: [MetaCase; 10] = [
        (list, &[], &BOTH),
        (list, &["base:"], &[(0, ALLOCATION)]),
        (list, &["hdcs:"], &[(0, CACHE)]),
        (list, &["hdcs:", "base:", ALLOCATION], &BOTH),
        (list, &["qemu:dirty-bitmap:x", "base:allocat", ""], &[]),
        (set, &[], &[]),
        (set, &["base:", "hdcs:"], &[]),
        (set, &[CACHE, "x-unknown:y"], &[(2, CACHE)]),
        (set, &[CACHE, ALLOCATION], &[(1, ALLOCATION), (2, CACHE)]),
        (set, &[ALLOCATION], &[(1, ALLOCATION)]),
    ];
    for (kind, queries, expected) in cases {
        wire.send_option(kind, &meta_query("disk", queries));
        let mut replies: Vec<_> = expected
            .iter()
            .map(|(id, name)| {
                let data = [&id.to_be_bytes(), name.as_bytes()].concat();
                (option_reply::META_CONTEXT, data)
            })
            .collect();
        replies.push(ack());
        assert_eq!(wire.option_replies(kind), replies, "{queries:?}");
    }
    wire.go("disk");
    let answer = wire.request(command::BLOCK_STATUS, 0, 0, 4096, &[]);
    assert_eq!(answer.extents, [(1, vec![(4096, 3)])]);
}

#[test]
fn meta_contexts_malformed() {
    let mut wire = Wire::greeted(18);
    wire.send_option(option::STRUCTURED_REPLY, &[]);
    wire.option_replies(option::STRUCTURED_REPLY);
    let good = meta_query("disk", &["base:allocation"]);
    let mut trailing = good.clone();
    trailing.push(0);
    let mut many = good.clone();
    many[8..12].copy_from_slice(&u32::MAX.to_be_bytes());
    for kind in [option::LIST_META_CONTEXT, option::SET_META_CONTEXT] {
        for data in [&trailing, &many, &good[..20].to_vec(), &vec![]] {
            assert_eq!(wire.option_error(kind, data), option_reply::ERR_INVALID);
        }
        let error = wire.option_error(kind, &meta_query("nothing", &["base:allocation"]));
        assert_eq!(error, option_reply::ERR_UNKNOWN);
    }
}

#[test]
fn meta_contexts_of_another_export_do_not_count() {
    let mut wire = Wire::greeted(19);
    wire.send_option(option::STRUCTURED_REPLY, &[]);
    wire.send_option(
        option::SET_META_CONTEXT,
        &meta_query("frozen", &["base:allocation"]),
    );
    wire.inbound.clear();
    wire.go("disk");
    let answer = wire.request(command::BLOCK_STATUS, 0, 0, 4096, &[]);
    assert_eq!(answer.error(), 22);
}

#[test]
fn meta_contexts_set_that_fails_leaves_none() {
    let mut wire = Wire::greeted(20);
    wire.send_option(option::STRUCTURED_REPLY, &[]);
    let select = |name| meta_query(name, &["base:allocation"]);
    wire.send_option(option::SET_META_CONTEXT, &select("disk"));
    wire.send_option(option::SET_META_CONTEXT, &select("nothing"));
    wire.inbound.clear();
    wire.go("disk");
    let answer = wire.request(command::BLOCK_STATUS, 0, 0, 4096, &[]);
    assert_eq!(answer.error(), 22);
}

#[test]
fn starttls_without_certificates_is_refused() {
    let mut wire = Wire::greeted(21);
    let error = wire.option_error(option::STARTTLS, &[]);
    assert_eq!(error, option_reply::ERR_POLICY);
    let error = wire.option_error(option::STARTTLS, b"x");
    assert_eq!(error, option_reply::ERR_INVALID);
    wire.go("disk");
}

#[test]
fn tls_required_tells_nothing_in_the_clear() {
    let config = NbdConfig {
        require_tls: true,
        ..NbdConfig::default()
    };
    let mut wire = Wire::new(config.clone(), 22);
    wire.greet(0b11);
    for kind in [3, 6, 7, 8, 9, 10, 11, 99] {
        assert_eq!(wire.option_error(kind, &[]), option_reply::ERR_TLS_REQD);
    }
    wire.send_option(option::ABORT, &[]);
    assert_eq!(wire.option_replies(option::ABORT), [ack()]);
    let mut wire = Wire::new(config, 23);
    wire.greet(0b11);
    wire.send_option(option::EXPORT_NAME, b"disk");
    assert!(wire.closed && wire.inbound.is_empty());
}

#[test]
fn byte_by_byte_is_the_same() {
    let mut wire = Wire::new(NbdConfig::default(), 24);
    wire.feed_bytes_max = 1;
    wire.greet(0b11);
    wire.send_option(option::STRUCTURED_REPLY, &[]);
    wire.send_option(option::LIST, &[]);
    wire.inbound.clear();
    assert_eq!(wire.option_error(99, &[7; 300]), option_reply::ERR_UNSUP);
    wire.go("disk");
    assert_eq!(wire.write(512, &[5; 1536]), Ok(vec![]));
    assert_eq!(wire.read(1024, 1024), Ok(vec![5; 1024]));
}

#[test]
fn all_in_one_receive_is_the_same() {
    let mut wire = Wire::greeted(25);
    let bytes = [
        option_bytes(option::STRUCTURED_REPLY, &[]),
        option_bytes(option::GO, &info_query("disk", &[])),
        request_bytes(command::WRITE, 0, 1, 4096, 1024),
        vec![9; 1024],
        request_bytes(command::FLUSH, 0, 2, 0, 0),
    ]
    .concat();
    let Receive::Into(place) = wire.session.receive(&mut wire.host) else {
        panic!("a handshake takes bytes");
    };
    place[..bytes.len()].copy_from_slice(&bytes);
    wire.session.received(bytes.len(), &mut wire.host);
    assert_eq!(wire.session.in_flight(), 2);
    wire.settle();
    assert_eq!(wire.disk.bytes()[4096..5120], [9; 1024]);
}

#[test]
fn shut_down_during_the_handshake_closes() {
    let mut wire = Wire::greeted(26);
    wire.session.shut_down();
    wire.settle();
    assert!(wire.closed);
}

#[test]
fn peer_end_during_the_handshake_closes() {
    let mut wire = Wire::greeted(27);
    wire.send(&option_bytes(option::GO, b"disk")[..9]);
    wire.hang_up();
}

#[test]
fn options_wait_for_the_next_turn_when_the_work_of_this_one_is_done() {
    let mut wire = Wire::greeted(40);
    let lists: Vec<u8> = (0..64)
        .flat_map(|_| option_bytes(option::LIST, &[]))
        .collect();
    wire.host.allowance.work = 5;
    let Receive::Into(place) = wire.session.receive(&mut wire.host) else {
        panic!("an idle session takes bytes");
    };
    place[..lists.len()].copy_from_slice(&lists);
    wire.session.received(lists.len(), &mut wire.host);
    assert!(matches!(
        wire.session.receive(&mut wire.host),
        Receive::Wait
    ));
    // A list costs one at least.
    assert!((1..=5).contains(&wire.host.charged));
    wire.host.allowance.work = usize::MAX;
    wire.settle();
    assert!(wire.host.charged >= 64 && !wire.closed);
}
