//! Tests of the core from outside, through its public face; each folder is a layer of the core.

mod golden;

mod log {
    mod clients;
    mod compression;
    mod cut;
    mod end_mark;
    mod evidence;
    mod replay;
    mod space;
}

mod cache {
    mod cipher;
    mod golden;
    mod model;
    mod packed;
    mod read_cache;
    mod ties;
}

mod volume {
    mod basics;
    mod budget;
    mod failed_log;
    mod filling;
    mod fua;
    mod group_commit;
    mod health;
    mod heat;
    mod lease;
    mod narrow;
    mod pace;
    mod policy;
    mod promote_hits;
    mod ranges;
    mod resize;
    mod scrub;
    mod silent_log;
    mod ssd_hits;
}

mod local {
    mod basics;
    mod cipher;
    mod golden;
    mod lost_write;
    mod memory;
    mod resize;
}

mod objects {
    mod basics;
    mod compressed;
}

mod node {
    mod opening;
    mod qos;
    mod qos_shards;
    mod turns;
}
