//! The interleaving of an execution's two streams, as the journal keeps it.
#![no_main]

#[path = "../inputs/runs.rs"]
mod runs;

libfuzzer_sys::fuzz_target!(|data: &[u8]| runs::run(data));
