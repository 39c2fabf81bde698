//! libFuzzer's entry to [`hdcs_fuzz::messages`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hdcs_fuzz::messages(data));
