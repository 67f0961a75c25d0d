//! Messages of a worker to its daemon, from a worker that proves its identity and then sends
//! arbitrary engine output.
#![no_main]

#[path = "../inputs/worker_link.rs"]
mod worker_link;

libfuzzer_sys::fuzz_target!(|data: &[u8]| worker_link::run(data));
