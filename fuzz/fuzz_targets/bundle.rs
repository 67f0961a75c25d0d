//! A kernel's file as somebody brings it: as it comes, and as records behind a right frame, compression and digest.
#![no_main]

#[path = "../inputs/bundle.rs"]
mod bundle;

libfuzzer_sys::fuzz_target!(|data: &[u8]| bundle::run(data));
