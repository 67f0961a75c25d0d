//! Cap'n Proto messages from any bytes, within the readers' limits. The first byte selects the
//! struct.
#![no_main]

#[path = "../inputs/messages.rs"]
mod messages;

libfuzzer_sys::fuzz_target!(|data: &[u8]| messages::run(data));
