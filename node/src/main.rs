//! The HDCS program.

fn main() {}
