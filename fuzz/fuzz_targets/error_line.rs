//! The error inside the text of an exception, which any peer may have written.
#![no_main]

#[path = "../inputs/error_line.rs"]
mod error_line;

libfuzzer_sys::fuzz_target!(|text: &str| error_line::run(text));
