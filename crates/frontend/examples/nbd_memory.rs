//! A small blocking NBD server with volumes in memory, to try real clients against the session
//! without a node. Usage:
//!
//! ```text
//! nbd_memory --data DIR [--tcp ADDRESS] [--tls CERT KEY [CLIENT_CA]] [--require-tls]
//! ```
//!
//! It listens on `DIR/nbd.sock`, prints one line when it is ready, and reads commands from its
//! standard input: `create NAME BYTES` makes a volume (answered by a line `ok`), the end of the
//! input ends the program. One thread serves one connection; what is submitted is performed at
//! once, newest first, so that replies come out of order.

use std::error::Error;
use std::io::{BufRead, IoSlice, Read, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread;

use hdcs_frontend::access::Allow;
use hdcs_frontend::memory::{MemoryHost, MemoryVolume};
use hdcs_frontend::nbd::{NbdConfig, NbdSession, tls};
use hdcs_frontend::{Chunk, Export, Receive, Session, VolumeNumber};

/// Buffers of one connection: the most that a session has in flight at once.
const POOL_BYTES: usize = 50 << 20;

type Volumes = Arc<Mutex<Vec<Arc<MemoryVolume>>>>;

fn main() -> Result<(), Box<dyn Error>> {
    let mut data = None;
    let mut tcp = None;
    let mut config = NbdConfig::default();
    let mut arguments = std::env::args().skip(1).peekable();
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next_if(|next| !next.starts_with("--"));
        match argument.as_str() {
            "--data" => data = value().map(PathBuf::from),
            "--tcp" => tcp = value(),
            "--require-tls" => config.require_tls = true,
            "--tls" => {
                let (certificate, key) =
                    value().zip(value()).ok_or("--tls CERT KEY [CLIENT_CA]")?;
                let authority = value();
                let files = tls::Files {
                    certificate: certificate.into(),
                    key: key.into(),
                    client_authority: authority.map(PathBuf::from),
                    client_revocations: None,
                };
                config.tls = Some(tls::load(&files)?.config);
            }
            other => return Err(format!("unknown argument {other}").into()),
        }
    }
    let data = data.ok_or("--data DIR is missing")?;
    let volumes = Volumes::default();
    let listener = UnixListener::bind(data.join("nbd.sock"))?;
    let (plain, shared) = (NbdConfig::default(), Arc::clone(&volumes));
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let (config, volumes) = (plain.clone(), Arc::clone(&shared));
            thread::spawn(move || serve(&stream, &stream, config, &volumes));
        }
    });
    let mut ready = format!("ready on {}", data.join("nbd.sock").display());
    if let Some(address) = tcp {
        let listener = TcpListener::bind(address)?;
        ready = format!("{ready} and {}", listener.local_addr()?);
        let shared = Arc::clone(&volumes);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (config, volumes) = (config.clone(), Arc::clone(&shared));
                thread::spawn(move || {
                    stream.set_nodelay(true)?;
                    serve(&stream, &stream, config, &volumes)
                });
            }
        });
    }
    println!("{ready}");
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let ["create", name, bytes] = words[..] else {
            return Err(format!("unknown command `{line}`; `create NAME BYTES` is known").into());
        };
        let mut volumes = volumes.lock().map_err(|_| "a connection panicked")?;
        let number = VolumeNumber(volumes.len() as u32 + 1);
        volumes.push(MemoryVolume::new(Export {
            opening: hdcs_frontend::OpeningId::default(),
            number,
            name: name.to_owned(),
            bytes: bytes.parse()?,
            read_only: false,
            discards: true,
            allow: Allow::any(),
        }));
        println!("ok");
    }
    Ok(())
}

fn serve<R: Read, W: Write>(
    mut reader: R,
    mut writer: W,
    config: NbdConfig,
    volumes: &Volumes,
) -> std::io::Result<()> {
    let volumes = volumes.lock().map(|volumes| volumes.clone());
    let mut host = MemoryHost::new(POOL_BYTES, volumes.unwrap_or_default());
    let mut session = NbdSession::new(config);
    loop {
        let closing = matches!(session.receive(&mut host), Receive::Close);
        while let Some(newest) = host.submitted.len().checked_sub(1) {
            let (id, result) = host.perform(newest);
            session.completed(id, result);
        }
        let sent = send(&mut session, &mut writer)?;
        if closing {
            return Ok(());
        }
        // What was sent may have made room for requests that wait in the session.
        if !sent
            && let Receive::Into(place) | Receive::IntoBoth(place, _) = session.receive(&mut host)
        {
            let bytes = reader.read(place)?;
            session.received(bytes, &mut host);
        }
    }
}

/// Send all that is ready, many chunks at once; whether there was any.
fn send<W: Write>(session: &mut NbdSession, writer: &mut W) -> std::io::Result<bool> {
    let mut sent = false;
    loop {
        let output = session.output();
        let chunks: Vec<Chunk> = output.drain(..output.len().min(64)).collect();
        if chunks.is_empty() {
            return Ok(sent);
        }
        sent = true;
        let mut slices: Vec<IoSlice<'_>> = chunks
            .iter()
            .map(|chunk| match chunk {
                Chunk::Bytes(bytes) => IoSlice::new(bytes),
                Chunk::Data(data) => IoSlice::new(data),
            })
            .collect();
        let mut rest = &mut slices[..];
        while !rest.is_empty() {
            let written = writer.write_vectored(rest)?;
            IoSlice::advance_slices(&mut rest, written);
        }
    }
}
