//! Frames of the handover protocol from another host.
#![no_main]

#[path = "../inputs/wire.rs"]
mod wire;

libfuzzer_sys::fuzz_target!(|data: &[u8]| wire::run(data));
