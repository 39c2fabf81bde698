//! The ring with files, pipes and sockets that behave badly.

use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

use hdcs_core::base::buf::Pool;
use hdcs_core::base::error::IoError;

use super::*;
use crate::worker::{Job, JobOutput};

const OWNER: Owner = Owner::Volume(3);

fn ring(entries: u32, submit: Submit, defer_taskrun: bool) -> Ring {
    Ring::new(RingConfig {
        entries,
        submit,
        defer_taskrun,
        ..RingConfig::default()
    })
    .unwrap()
}

/// Turn until `count` operations have ended.
fn ended(ring: &mut Ring, count: usize) -> Vec<Finished> {
    let mut all = Vec::new();
    for _ in 0..10_000 {
        ring.submit_and_wait(Some(Duration::from_millis(10)))
            .unwrap();
        ring.reap(&mut all);
        all.retain(|one| !matches!(one.outcome, Outcome::Woken));
        if all.len() >= count {
            return all;
        }
    }
    panic!("{} of {count} ended", all.len());
}

#[test]
fn ring_tells_when_something_can_be_read() {
    let mut ring = ring(4, Submit::Batch, false);
    let (here, mut there) = UnixStream::pair().unwrap();
    ring.readable(OWNER, Token(7), here.as_raw_fd());
    ring.submit_and_wait(Some(Duration::from_millis(1)))
        .unwrap();
    let mut early = Vec::new();
    ring.reap(&mut early);
    assert!(early.is_empty(), "{early:?}");
    there.write_all(b"x").unwrap();
    let ended = ended(&mut ring, 1);
    assert_eq!((ended[0].owner, ended[0].token), (OWNER, Token(7)));
    assert!(matches!(ended[0].outcome, Outcome::Readable(Ok(()))));
    assert_eq!(ring.running(), 0);
    // A ring that is dropped while it waits for nothing does not hang.
    ring.readable(OWNER, Token(8), here.as_raw_fd());
    ring.submit_and_wait(Some(Duration::ZERO)).unwrap();
    ring.readable(OWNER, Token(9), here.as_raw_fd());
}

#[test]
fn ring_connects_and_says_if_it_cannot() {
    use std::net::TcpListener;

    let mut ring = ring(4, Submit::Batch, false);
    let mut connect = |address: SocketAddr| {
        let family = match address {
            SocketAddr::V4(_) => libc::AF_INET,
            SocketAddr::V6(_) => libc::AF_INET6,
        };
        // SAFETY: a system call without memory, and a descriptor that it has just made.
        let socket = unsafe {
            let socket = libc::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0);
            OwnedFd::from_raw_fd(socket)
        };
        ring.connect(OWNER, socket.as_raw_fd(), address);
        let ended = ended(&mut ring, 1).pop().unwrap();
        match ended.outcome {
            Outcome::Connected(result) => result,
            other => panic!("{other:?}"),
        }
    };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    assert_eq!(connect(address), Ok(()));
    drop(listener);
    assert_eq!(connect(address), Err(Errno(libc::ECONNREFUSED)));
    // A machine without this protocol has none that listens.
    if let Ok(listener) = TcpListener::bind("[::1]:0") {
        assert_eq!(connect(listener.local_addr().unwrap()), Ok(()));
    }
}

#[test]
fn ring_counts_calls_and_completions() {
    let mut ring = ring(4, Submit::Batch, false);
    let before = ring.counts();
    let (here, mut there) = UnixStream::pair().unwrap();
    there.write_all(b"xy").unwrap();
    ring.readable(OWNER, Token(1), here.as_raw_fd());
    ring.readable(OWNER, Token(2), here.as_raw_fd());
    ended(&mut ring, 2);
    let counts = ring.counts();
    assert!(counts.enters > before.enters);
    assert_eq!(counts.completions - before.completions, 2);
    // With nothing to hand over and nothing to wait for, the kernel is not called.
    ring.submit_and_wait(Some(Duration::ZERO)).unwrap();
    assert_eq!(ring.counts(), counts);
}

#[test]
fn ring_takes_more_operations_than_it_has_places() {
    let pool = Pool::new(16 << 20);
    for (submit, defer) in [
        (Submit::Batch, false),
        (Submit::Each, false),
        (Submit::Batch, true),
    ] {
        let mut ring = ring(4, submit, defer);
        let file = tempfile::tempfile().unwrap();
        let fd = file.as_raw_fd();
        for at in 0..1000u64 {
            let mut buf = pool.alloc(4096).unwrap();
            buf.fill(at as u8);
            let durable = (at % 100 == 0).then_some(Durability::Fdatasync);
            ring.write(OWNER, Token(at), fd, at * 4096, vec![buf.freeze()], durable);
        }
        let mut tokens: Vec<u64> = ended(&mut ring, 1000)
            .iter()
            .map(|one| {
                assert!(matches!(one.outcome, Outcome::Device(Ok(Done::Written))));
                assert_eq!(one.owner, OWNER);
                one.token.0
            })
            .collect();
        tokens.sort_unstable();
        assert!(tokens.into_iter().eq(0..1000));
        assert_eq!(ring.running(), 0);
        for at in [0, 999] {
            ring.read(OWNER, Token(at), fd, at * 4096, pool.alloc(4096).unwrap());
            let [
                Finished {
                    outcome: Outcome::Device(Ok(Done::Read(buf))),
                    ..
                },
            ] = &ended(&mut ring, 1)[..]
            else {
                panic!("a read failed");
            };
            assert!(buf.iter().all(|&byte| byte == at as u8));
        }
    }
    assert_eq!(pool.free_bytes(), pool.total_bytes());
}

/// The first of many are answered before the last of them are looked at.
#[test]
fn transfers_that_end_at_once_are_reaped_a_few_at_a_time() {
    let pool = Pool::new(1 << 20);
    let mut ring = ring(64, Submit::Batch, false);
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&[1; 4096]).unwrap();
    for at in 0..32 {
        let buf = pool.alloc(4096).unwrap();
        ring.read(OWNER, Token(at), file.as_raw_fd(), 0, buf);
    }
    let mut finished = Vec::new();
    let mut total = 0;
    for _ in 0..10_000 {
        ring.submit_and_wait(Some(Duration::from_millis(10)))
            .unwrap();
        ring.reap(&mut finished);
        assert!(finished.len() <= REAPED_TRANSFERS_MAX, "{finished:?}");
        total += finished.drain(..).count();
        if total == 32 {
            return;
        }
    }
    panic!("{total} of 32 ended");
}

/// Nothing more is queued in the turn, and the device has it already.
#[test]
fn queued_transfers_go_to_the_device_before_the_end_of_a_turn() {
    let pool = Pool::new(1 << 20);
    let mut ring = ring(64, Submit::Each, false);
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&[1; 4096]).unwrap();
    for at in 0..32 {
        let buf = pool.alloc(4096).unwrap();
        ring.read(OWNER, Token(at), file.as_raw_fd(), 0, buf);
    }
    let enters = ring.counts().enters;
    assert!(
        !ring.uring().submission().is_empty(),
        "more than go at once"
    );
    ring.submit_transfers();
    assert!(ring.uring().submission().is_empty());
    ring.submit_transfers();
    assert_eq!(ring.counts().enters, enters + 1, "there is nothing more");
    assert_eq!(ended(&mut ring, 32).len(), 32);
}

/// Destage begins several in a turn: one call for all of them.
#[test]
fn writes_that_nobody_waits_for_go_to_the_device_together() {
    let pool = Pool::new(1 << 20);
    let mut ring = ring(64, Submit::Each, false);
    let file = tempfile::tempfile().unwrap();
    let fd = file.as_raw_fd();
    let block = || vec![pool.alloc(4096).unwrap().freeze()];
    let enters = ring.counts().enters;
    for at in 0..4 {
        ring.write(OWNER, Token(at), fd, at * 4096, block(), None);
    }
    assert_eq!(ring.counts().enters, enters);
    ring.submit_transfers();
    assert_eq!(ring.counts().enters, enters + 1);
    ring.write(OWNER, Token(4), fd, 0, block(), None);
    let way = DurableWay {
        call: Durability::Dsync,
        by_thread: false,
    };
    ring.write_urgently(OWNER, Token(5), fd, 4096, block(), way);
    assert_eq!(
        ring.counts().enters,
        enters + 2,
        "one of them is waited for"
    );
    assert!(ring.uring().submission().is_empty());
    assert_eq!(ended(&mut ring, 6).len(), 6);
}

#[test]
fn short_transfer_continues_until_it_is_whole() {
    let (reader, mut writer) = std::io::pipe().unwrap();
    let pool = Pool::new(1 << 20);
    let mut ring = ring(8, Submit::Batch, false);
    ring.read(
        OWNER,
        Token(1),
        reader.as_raw_fd(),
        0,
        pool.alloc(16384).unwrap(),
    );
    let mut finished = Vec::new();
    for piece in 0..4u8 {
        writer.write_all(&[piece; 4096]).unwrap();
        ring.submit_and_wait(Some(Duration::from_secs(5))).unwrap();
        ring.reap(&mut finished);
        assert_eq!(
            finished.len(),
            usize::from(piece == 3),
            "after piece {piece}"
        );
    }
    let Outcome::Device(Ok(Done::Read(buf))) = &finished[0].outcome else {
        panic!("{finished:?}");
    };
    assert!(
        buf.chunks(4096)
            .zip(0u8..)
            .all(|(piece, at)| piece == [at; 4096])
    );
}

#[test]
fn transfer_of_nothing_fails() {
    let pool = Pool::new(1 << 20);
    let mut ring = ring(8, Submit::Batch, false);
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&[1; 6000]).unwrap();
    // Wholly beyond the end, and partly.
    for (token, offset) in [(1, 8192), (2, 4096)] {
        let buf = pool.alloc(4096).unwrap();
        ring.read(OWNER, Token(token), file.as_raw_fd(), offset, buf);
        let finished = ended(&mut ring, 1);
        assert!(
            matches!(finished[0].outcome, Outcome::Device(Err(Errno(libc::EIO)))),
            "{finished:?}"
        );
    }
    assert_eq!(
        pool.free_bytes(),
        pool.total_bytes(),
        "its buffer is free again"
    );
}

#[test]
fn failure_tells_its_number() {
    let pool = Pool::new(1 << 20);
    let mut ring = ring(8, Submit::Batch, false);
    let full = std::fs::OpenOptions::new()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let data = vec![pool.alloc(4096).unwrap().freeze()];
    ring.write(OWNER, Token(1), full.as_raw_fd(), 0, data, None);
    let finished = ended(&mut ring, 1);
    assert!(matches!(
        finished[0].outcome,
        Outcome::Device(Err(Errno(libc::ENOSPC)))
    ));
    assert_eq!(IoError::from(Errno(libc::ENOSPC)), IoError::NoSpace);
    assert_eq!(IoError::from(Errno(libc::EIO)), IoError::Failed);
    assert_eq!(IoError::from(Errno(libc::ENODEV)), IoError::Unreachable);
}

#[test]
fn vectors_advance_over_whole_and_partial_ones() {
    let bytes = [0u8; 100];
    let vector = |start: usize, len| libc::iovec {
        iov_base: bytes[start..].as_ptr().cast_mut().cast(),
        iov_len: len,
    };
    let lengths = |vectors: &[libc::iovec]| -> Vec<usize> {
        vectors.iter().map(|vector| vector.iov_len).collect()
    };
    let mut vectors = vec![vector(0, 10), vector(50, 20), vector(80, 5)];
    advance(&mut vectors, 4);
    assert_eq!(lengths(&vectors), [6, 20, 5]);
    advance(&mut vectors, 6);
    assert_eq!(lengths(&vectors), [20, 5]);
    advance(&mut vectors, 21);
    assert_eq!(lengths(&vectors), [4]);
    assert_eq!(
        vectors[0].iov_base.cast_const().cast(),
        &raw const bytes[81]
    );
}

fn vector(place: &mut [u8]) -> libc::iovec {
    libc::iovec {
        iov_base: place.as_mut_ptr().cast(),
        iov_len: place.len(),
    }
}

#[test]
fn receive_goes_on_in_the_second_place() {
    let mut ring = ring(8, Submit::Batch, false);
    let (socket, mut peer) = UnixStream::pair().unwrap();
    let (mut first, mut second) = ([0u8; 6], [0u8; 8]);
    for sent in [1, 6, 11, 14] {
        let bytes: Vec<u8> = (1..=sent).collect();
        peer.write_all(&bytes).unwrap();
        let places = [vector(&mut first), vector(&mut second)];
        // SAFETY: both places outlive the operation, whose end is awaited.
        unsafe { ring.receive(Owner::Receive(1), socket.as_raw_fd(), places) };
        let finished = ended(&mut ring, 1);
        let Outcome::Count(Ok(count)) = finished[0].outcome else {
            panic!("{finished:?}");
        };
        assert_eq!(count, usize::from(sent));
        let received: Vec<u8> = first.into_iter().chain(second).take(count).collect();
        assert_eq!(received, bytes);
    }
}

#[test]
fn cancelled_receive_ends() {
    let mut ring = ring(8, Submit::Batch, false);
    let (socket, _peer) = UnixStream::pair().unwrap();
    let mut place = [0u8; 16];
    // SAFETY: `place` outlives the operation, whose end is awaited below.
    let key = unsafe {
        ring.receive(
            Owner::Receive(1),
            socket.as_raw_fd(),
            [vector(&mut place), vector(&mut [])],
        )
    };
    ring.submit_and_wait(Some(Duration::ZERO)).unwrap();
    ring.cancel(key);
    let finished = ended(&mut ring, 1);
    assert!(matches!(
        finished[0].outcome,
        Outcome::Count(Err(Errno(libc::ECANCELED)))
    ));
}

#[test]
fn dropped_ring_gives_buffers_back() {
    let pool = Pool::new(1 << 20);
    let (reader, _writer) = std::io::pipe().unwrap();
    let mut ring = ring(8, Submit::Batch, false);
    ring.read(
        OWNER,
        Token(1),
        reader.as_raw_fd(),
        0,
        pool.alloc(4096).unwrap(),
    );
    ring.submit_and_wait(Some(Duration::ZERO)).unwrap();
    assert!(pool.free_bytes() < pool.total_bytes());
    drop(ring);
    assert_eq!(pool.free_bytes(), pool.total_bytes());
}

#[test]
fn job_that_hangs_keeps_only_those_of_its_owner_waiting() {
    let mut ring = ring(8, Submit::Batch, false);
    let (go, hangs) = std::sync::mpsc::channel::<()>();
    let job = || -> Job { Box::new(|| JobOutput::Unit(Ok(()))) };
    let hung = move || {
        hangs.recv().unwrap();
        JobOutput::Unit(Ok(()))
    };
    ring.job(Owner::Backend(1), Token(1), Box::new(hung));
    ring.job(Owner::Backend(1), Token(2), job());
    ring.job(Owner::Backend(2), Token(3), job());
    assert_eq!(ended(&mut ring, 1)[0].token, Token(3));
    go.send(()).unwrap();
    let tokens: Vec<Token> = ended(&mut ring, 2).iter().map(|one| one.token).collect();
    assert_eq!(tokens, [Token(1), Token(2)]);
}

#[test]
fn jobs_and_wakes_of_other_threads_arrive() {
    let mut ring = ring(8, Submit::Batch, false);
    ring.job(
        OWNER,
        Token(9),
        Box::new(|| JobOutput::Unit(Err(Errno(libc::EIO)))),
    );
    let finished = ended(&mut ring, 1);
    assert_eq!(finished[0].token, Token(9));
    assert!(matches!(
        finished[0].outcome,
        Outcome::Job(JobOutput::Unit(Err(Errno(libc::EIO))))
    ));
    let waker = ring.waker();
    let waking = std::thread::spawn(move || waker.wake());
    let mut finished = Vec::new();
    for _ in 0..1000 {
        ring.submit_and_wait(Some(Duration::from_millis(10)))
            .unwrap();
        ring.reap(&mut finished);
        if finished
            .iter()
            .any(|one| matches!(one.outcome, Outcome::Woken))
        {
            waking.join().unwrap();
            return;
        }
    }
    panic!("never woken");
}

/// Writer threads make writes durable by either call; a failure is reported like the ring's own.
#[test]
fn ring_hands_urgent_writes_to_writers_if_they_are_to_have_them() {
    let pool = Pool::new(8 << 20);
    let config = RingConfig {
        writer_threads: 2,
        ..RingConfig::default()
    };
    let mut ring = Ring::new(config).unwrap();
    let file = tempfile::tempfile().unwrap();
    let read_only = std::fs::File::open("/dev/null").unwrap();
    for by_writers in [false, true] {
        for at in 0..64u64 {
            let mut buf = pool.alloc(8192).unwrap();
            buf.fill(at as u8 + 1);
            let buf = buf.freeze();
            // Two vectors, the second one not behind the first.
            let data = vec![buf.slice(4096..8192), buf.slice(0..4096)];
            let way = DurableWay {
                call: [Durability::Dsync, Durability::Fdatasync][at as usize % 2],
                by_thread: by_writers,
            };
            let fd = file.as_raw_fd();
            ring.write_urgently(OWNER, Token(at), fd, at * 8192, data, way);
        }
        let data = vec![pool.alloc(4096).unwrap().freeze()];
        let fd = read_only.as_raw_fd();
        let way = DurableWay {
            by_thread: by_writers,
            ..DurableWay::default()
        };
        ring.write_urgently(OWNER, Token(64), fd, 0, data, way);
        for one in ended(&mut ring, 65) {
            let failed = one.token == Token(64);
            match one.outcome {
                Outcome::Device(result) => assert_eq!(result.is_err(), failed, "{by_writers}"),
                other => panic!("{other:?}"),
            }
        }
        let mut content = vec![0; 64 * 8192];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut content, 0).unwrap();
        for at in 0..64usize {
            assert!(
                content[at * 8192..][..8192]
                    .iter()
                    .all(|&byte| byte == at as u8 + 1)
            );
        }
        file.set_len(0).unwrap();
    }
    assert_eq!(ring.running(), 0);
    drop(ring);
    assert_eq!(pool.free_bytes(), pool.total_bytes(), "buffers came back");
}

#[test]
fn ring_that_cannot_cancel_says_that_memory_is_in_use() {
    let mut ring = ring(4, Submit::Batch, false);
    let (here, _there) = UnixStream::pair().unwrap();
    let pool = Pool::new(1 << 20);
    ring.read(
        OWNER,
        Token(1),
        here.as_raw_fd(),
        0,
        pool.alloc(4096).unwrap(),
    );
    ring.submit_and_wait(Some(Duration::ZERO)).unwrap();
    // Every call of the kernel's fails from now on, as if the ring had been taken away.
    let other = std::fs::File::open("/dev/null").unwrap();
    let fd = ring.uring.as_ref().unwrap().as_raw_fd();
    // SAFETY: both are open descriptors; the ring's is its own.
    assert!(unsafe { libc::dup2(other.as_raw_fd(), fd) } >= 0);
    assert!(!ring.quiesce());
    drop(ring);
    assert_ne!(
        pool.free_bytes(),
        pool.total_bytes(),
        "the kernel may write to it still"
    );
}
