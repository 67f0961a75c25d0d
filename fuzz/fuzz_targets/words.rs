//! Every short text from users and clients: names, ids, quantities, paths, patterns.
#![no_main]

#[path = "../inputs/words.rs"]
mod words;

libfuzzer_sys::fuzz_target!(|text: &str| words::run(text));
