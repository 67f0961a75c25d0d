//! The byte stream between init and engine, cut anywhere: both directions.
#![no_main]

#[path = "../inputs/frames.rs"]
mod frames;

libfuzzer_sys::fuzz_target!(|data: &[u8]| frames::run(data));
