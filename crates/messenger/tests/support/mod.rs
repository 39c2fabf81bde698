//! Sockets for the tests of the messenger, and certificates of its two nodes.

// Each test uses a part of it.
#![allow(dead_code)]

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

use hdcs_messenger::conformance::{CLUSTER, Carrier, ONE, TWO};
use hdcs_messenger::tls::{Credentials, Files, Tls, certificate_name};
use tempfile::TempDir;

/// A socket that never waits.
pub enum Socket {
    /// Of the unix domain.
    Unix(UnixStream),
    /// Of TCP.
    Tcp(TcpStream),
}

/// Two ends of a unix socket.
pub fn unix() -> (Socket, Socket) {
    let (one, two) = UnixStream::pair().unwrap();
    for end in [&one, &two] {
        end.set_nonblocking(true).unwrap();
    }
    (Socket::Unix(one), Socket::Unix(two))
}

/// Two ends of a TCP connection over loopback.
pub fn tcp() -> (Socket, Socket) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (two, _) = listener.accept().unwrap();
    for end in [&one, &two] {
        end.set_nonblocking(true).unwrap();
        end.set_nodelay(true).unwrap();
    }
    (Socket::Tcp(one), Socket::Tcp(two))
}

impl Carrier for Socket {
    fn send(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Unix(socket) => socket.write_vectored(slices),
            Self::Tcp(socket) => socket.write_vectored(slices),
        }
    }

    fn receive(&mut self, places: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match self {
            Self::Unix(socket) => socket.read_vectored(places),
            Self::Tcp(socket) => socket.read_vectored(places),
        }
    }

    fn close(&mut self) {
        // It may be closed from the other end already.
        let _ = match self {
            Self::Unix(socket) => socket.shutdown(Shutdown::Both),
            Self::Tcp(socket) => socket.shutdown(Shutdown::Both),
        };
    }
}

/// Credentials of both nodes.
pub struct Certificates {
    one: Credentials,
    two: Credentials,
}

impl Certificates {
    /// Made by the script that the tests of all crates use.
    pub fn new() -> Self {
        let directory = TempDir::new().unwrap();
        let run = |arguments: &[&str]| {
            let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testenv/tls.sh");
            let command = Command::new(script)
                .arg(directory.path())
                .args(arguments)
                .output();
            let command = command.unwrap();
            assert!(command.status.success(), "{command:?}");
        };
        run(&[]);
        let load = |name: &str, node| {
            run(&[
                "node",
                name,
                &format!("DNS:{}", certificate_name(CLUSTER, node)),
            ]);
            let path = |file: &str| directory.path().join(name).join(file);
            Credentials::load(&Files {
                certificate: path("node-cert.pem"),
                key: path("node-key.pem"),
                authority: directory.path().join("ca-cert.pem"),
                revocations: None,
            })
        };
        Self {
            one: load("one", ONE).unwrap(),
            two: load("two", TWO).unwrap(),
        }
    }

    /// Both ends of TLS between the nodes.
    pub fn tls(&self) -> (Tls, Tls) {
        (
            self.one.connect(CLUSTER, TWO).unwrap(),
            self.two.accept().unwrap(),
        )
    }
}
