//! libFuzzer's entry to [`hdcs_fuzz::clients`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hdcs_fuzz::clients(data));
