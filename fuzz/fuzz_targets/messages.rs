//! Cap'n Proto messages from any bytes, through the readers' limits: the first byte chooses the struct.
#![no_main]

#[path = "../inputs/messages.rs"]
mod messages;

libfuzzer_sys::fuzz_target!(|data: &[u8]| messages::run(data));
