//! An untrusted bundle: raw, and as records with valid frame, compression and digest.
#![no_main]

#[path = "../inputs/bundle.rs"]
mod bundle;

libfuzzer_sys::fuzz_target!(|data: &[u8]| bundle::run(data));
