//! What every layer is made of: buffers, inboxes, the vocabulary of I/O, errors, limits, ciphers and codecs.

pub mod buf;
pub mod cipher;
pub mod codec;
pub mod error;
pub mod inbox;
pub mod io;
pub mod limits;
pub mod work;
