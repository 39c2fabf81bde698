//! What nodes say to one another, without I/O.
//!
//! ```text
//!  node ── requests, spans ──► Link ── chunks ──► Transport ── chunks ──► driver ──► socket
//!   ▲                           │ ▲                 (plain, TLS, faults)    │
//!   └───────── events ──────────┘ └─── places ───────────────────────────────┘
//! ```
//!
//! Two nodes have three connections, each a [`link::Link`] over a [`transport::Transport`] ([`connection::Connection`]): one
//! for spans of write logs, one for requests without data (heartbeats, promises), one for requests with data. What goes over
//! the wire is in `hdcs_core::wire`.
//!
//! | what | how it is bounded | who waits |
//! |---|---|---|
//! | spans | by position: the receiver says up to where; by bytes of the sender's queue | the sender is told "full", and reads its log again later |
//! | requests, answers | by bytes: what a request and its answer may take is granted before | the asker is told "full" |
//! | urgent requests | 32 at a time, short | nobody: they pass by the others |
//! | pings | one at a time | nobody |
//!
//! No thread, socket, clock or randomness is in here, but for what `faults.rs` draws from a seed. The driver performs I/O and
//! decides nothing.

pub mod conformance;
pub mod connection;
pub mod credit;
pub mod error;
pub mod event;
pub mod faults;
pub mod frame;
pub mod handshake;
mod intake;
pub mod link;
mod outbox;
mod requests;
pub mod streams;
pub mod tls;
pub mod transport;
