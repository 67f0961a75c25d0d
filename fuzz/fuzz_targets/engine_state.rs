//! A snapshot of engine state from a client: raw, and behind a valid checksum.
#![no_main]

#[path = "../inputs/engine_state.rs"]
mod engine_state;

libfuzzer_sys::fuzz_target!(|data: &[u8]| engine_state::run(data));
