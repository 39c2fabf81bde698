//! How many spans a second two links exchange, and what of the processor each side takes: over a unix socket, TCP over
//! loopback, and TLS over that. Each end has a thread of its own, which waits in `poll` when nothing can be moved; what is
//! counted is the processor's time of each thread, with all system calls.
//!
//! ```text
//! cargo run --release -p hdcs-messenger --example messenger_speed
//! ```

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use hdcs_core::base::buf::{Buf, Pool};
use hdcs_core::base::io::Nanos;
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::wire::Purpose;
use hdcs_messenger::conformance::{CLUSTER, Carrier, End, ONE, TWO, config, known};
use hdcs_messenger::event::Event;
use hdcs_messenger::link::Link;
use hdcs_messenger::streams::{Marks, Progress};
use hdcs_messenger::tls::{Credentials, Files, Tls, certificate_name};
use hdcs_messenger::transport::Plain;

/// How long each row is measured.
const ROW: Duration = Duration::from_millis(1000);
/// Bytes that the receiver lets come ahead of what it has acknowledged.
const WINDOW_BYTES: u64 = 8 << 20;

/// A socket that waits for a moment instead of spinning.
struct Socket<S> {
    socket: S,
    fd: RawFd,
}

impl<S: Read + Write + AsRawFd> Socket<S> {
    fn new(socket: S) -> Self {
        let fd = socket.as_raw_fd();
        Self { socket, fd }
    }
}

impl<S: Read + Write> Carrier for Socket<S> {
    fn send(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.socket.write_vectored(slices)
    }

    fn receive(&mut self, places: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.socket.read_vectored(places)
    }

    fn close(&mut self) {
        // SAFETY: the descriptor is open as long as this.
        unsafe { libc::shutdown(self.fd, libc::SHUT_RDWR) };
    }

    fn idle(&mut self) {
        let mut poll = libc::pollfd {
            fd: self.fd,
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one descriptor, which is open as long as this.
        unsafe { libc::poll(&raw mut poll, 1, 1) };
    }
}

/// Time of the processor that this thread has taken.
fn processor_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the place is good for a time.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn now(since: Instant) -> Nanos {
    Nanos(since.elapsed().as_nanos() as u64)
}

/// Send spans of so many bytes for a while; how many were acknowledged, in what time, and what that took.
fn send(mut end: End, pool: &Pool, bytes: usize) -> (u64, Duration, Duration) {
    let start = Instant::now();
    let blocks = (bytes / BLOCK_BYTES) as u64;
    let parts: Vec<Buf> = (0..bytes.div_ceil(1 << 20))
        .map(|part| {
            pool.alloc((bytes - (part << 20)).min(1 << 20))
                .expect("memory")
                .freeze()
        })
        .collect();
    let (mut stream, mut next, mut durable) = (None, 0, 0);
    let (mut began, mut took) = (None, Duration::ZERO);
    loop {
        let moved = end.turn(now(start));
        end.connection.tick(now(start));
        while let Some(event) = end.events.pop_front() {
            match event {
                Event::Opened { .. } => {
                    let deadline = now(start).plus(Nanos::from_millis(1000));
                    stream = end.connection.open_stream(1, 0, b"", deadline).ok();
                }
                Event::Acked { progress, .. } => {
                    if began.is_none() {
                        (began, took) = (Some(Instant::now()), processor_time());
                    }
                    durable = progress.durable;
                }
                Event::Ended(ended) => panic!("{ended}"),
                _ => {}
            }
        }
        if let Some(stream) = stream {
            while end
                .connection
                .append(stream, next, Marks::default(), &parts)
                .is_ok()
            {
                next += blocks;
            }
        }
        if let Some(began) = began
            && began.elapsed() > ROW
        {
            let took = processor_time().saturating_sub(took);
            end.connection.shut_down();
            while !end.is_closed() {
                end.turn(now(start));
            }
            return (durable / blocks, began.elapsed(), took);
        }
        if !moved {
            end.idle();
        }
    }
}

/// Take spans in until the other side ends; what that took of the processor.
fn receive(mut end: End) -> Duration {
    let start = Instant::now();
    let took = processor_time();
    loop {
        let moved = end.turn(now(start));
        end.connection.tick(now(start));
        end.connection.admit(Some(&known(ONE)));
        let mut reached = None;
        while let Some(event) = end.events.pop_front() {
            match event {
                Event::StreamAsked { stream, .. } => reached = Some((stream, 0)),
                Event::Span(span) => {
                    let bytes: usize = span.parts.iter().map(|part| part.len()).sum();
                    reached = Some((span.stream, span.position + (bytes / BLOCK_BYTES) as u64));
                }
                Event::Ended(_) => return processor_time().saturating_sub(took),
                _ => {}
            }
        }
        if let Some((stream, durable)) = reached {
            let limit = durable + WINDOW_BYTES / BLOCK_BYTES as u64;
            let progress = Progress {
                durable,
                tail: 0,
                limit,
            };
            // It may be over.
            let _ = end.connection.ack(stream, progress);
        }
        if !moved {
            end.idle();
        }
    }
}

fn credentials() -> io::Result<[Credentials; 2]> {
    let directory = tempfile::tempdir()?;
    let run = |arguments: &[&str]| {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testenv/tls.sh");
        let command = Command::new(script)
            .arg(directory.path())
            .args(arguments)
            .output();
        assert!(
            command.is_ok_and(|made| made.status.success()),
            "certificates"
        );
    };
    run(&[]);
    Ok([("one", ONE), ("two", TWO)].map(|(name, node)| {
        run(&[
            "node",
            name,
            &format!("DNS:{}", certificate_name(CLUSTER, node)),
        ]);
        let path = |file: &str| directory.path().join(name).join(file);
        let files = Files {
            certificate: path("node-cert.pem"),
            key: path("node-key.pem"),
            authority: directory.path().join("ca-cert.pem"),
            revocations: None,
        };
        Credentials::load(&files).expect("certificates that were just made")
    }))
}

fn row<S>(name: &str, bytes: usize, sockets: (S, S), tls: Option<(Tls, Tls)>)
where
    S: Read + Write + AsRawFd + Send + 'static,
{
    let pools = [Pool::new(16 << 20), Pool::new(64 << 20)];
    let one = Link::connect(
        config(ONE),
        known(TWO),
        Purpose::Spans,
        Arc::clone(&pools[0]),
        Nanos(0),
    );
    let two = Link::accept(config(TWO), Arc::clone(&pools[1]), Nanos(0));
    let (near, far) = (Socket::new(sockets.0), Socket::new(sockets.1));
    let (near_tls, far_tls) = tls.unzip();
    let receiver = thread::spawn(move || {
        receive(match far_tls {
            Some(tls) => End::new(two, tls, far),
            None => End::new(two, Plain, far),
        })
    });
    let one = match near_tls {
        Some(tls) => End::new(one, tls, near),
        None => End::new(one, Plain, near),
    };
    let (count, time, took) = send(one, &pools[0], bytes);
    let other = receiver.join().expect("the receiver ends");
    let each = |took: Duration| took.as_secs_f64() * 1e6 / count.max(1) as f64;
    let rate = count as f64 / time.as_secs_f64();
    println!(
        "| {name} | {} KiB | {rate:.0} | {:.2} | {:.2} | {:.2} |",
        bytes >> 10,
        rate * bytes as f64 / f64::from(1 << 30),
        each(took),
        each(other),
    );
}

fn main() -> io::Result<()> {
    println!("| transport | span | spans/s | GiB/s | sender, µs a span | receiver, µs a span |");
    println!("|---|---:|---:|---:|---:|---:|");
    let [one, two] = credentials()?;
    for bytes in [4 << 10, 8 << 10, 64 << 10, 256 << 10, 1 << 20] {
        let sockets = UnixStream::pair()?;
        for end in [&sockets.0, &sockets.1] {
            end.set_nonblocking(true)?;
        }
        row("unix", bytes, sockets, None);
        for with_tls in [false, true] {
            let listener = TcpListener::bind("127.0.0.1:0")?;
            let near = TcpStream::connect(listener.local_addr()?)?;
            let (far, _) = listener.accept()?;
            for end in [&near, &far] {
                end.set_nonblocking(true)?;
                end.set_nodelay(true)?;
            }
            let tls = || {
                let near = one.connect(CLUSTER, TWO).expect("a name");
                (near, two.accept().expect("a configuration"))
            };
            let name = if with_tls { "TLS" } else { "TCP" };
            row(name, bytes, (near, far), with_tls.then(tls));
        }
    }
    Ok(())
}
