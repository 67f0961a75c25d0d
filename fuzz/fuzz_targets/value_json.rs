//! A value's tagged JSON form, as engines write it, and plain JSON, as people type it.
#![no_main]

#[path = "../inputs/value_json.rs"]
mod value_json;

libfuzzer_sys::fuzz_target!(|data: &[u8]| value_json::run(data));
