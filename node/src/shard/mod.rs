//! A shard: one thread with its own io_uring that owns volumes and their connections.
//!
//! Its loop: reap a batch of completions, step the state machines, poll them once, submit the
//! batch of their actions. Other threads reach it through [`ShardHandle`] alone.

pub mod command;
