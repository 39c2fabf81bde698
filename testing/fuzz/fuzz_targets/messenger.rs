//! libFuzzer's entry to [`hdcs_fuzz::messenger`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hdcs_fuzz::messenger(data));
