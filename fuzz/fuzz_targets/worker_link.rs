//! What a worker says to its daemon: a worker that proves itself and then sends whatever its engine wrote.
#![no_main]

#[path = "../inputs/worker_link.rs"]
mod worker_link;

libfuzzer_sys::fuzz_target!(|data: &[u8]| worker_link::run(data));
