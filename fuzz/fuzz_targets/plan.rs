//! The launch data of a worker's init: the sandbox plan and the document around it.
#![no_main]

#[path = "../inputs/plan.rs"]
mod plan;

libfuzzer_sys::fuzz_target!(|data: &[u8]| plan::run(data));
