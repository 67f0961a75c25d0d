//! A snapshot of engine state as a client gives it back: as it comes, and behind a right checksum.
#![no_main]

#[path = "../inputs/engine_state.rs"]
mod engine_state;

libfuzzer_sys::fuzz_target!(|data: &[u8]| engine_state::run(data));
