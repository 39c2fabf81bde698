//! State machines of the core over memory, for tests: every action is performed at once and in order, or fails as a
//! test asks for it. What happens under faults, reordering and power cuts is the simulator's. Beside them, documents of
//! which a section is generated from code.

pub mod bucket;
pub mod cache;
pub mod copies;
pub mod documents;
pub mod home;
pub mod lz4;
pub mod pace;
pub mod volume;
