//! Every small text that a person or a client gives: names, ids, quantities, paths, patterns.
#![no_main]

#[path = "../inputs/words.rs"]
mod words;

libfuzzer_sys::fuzz_target!(|text: &str| words::run(text));
