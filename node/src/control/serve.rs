//! Life of the daemon.
