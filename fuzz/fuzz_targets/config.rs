//! The configuration file, and the rules for paths in it.
#![no_main]

#[path = "../inputs/config.rs"]
mod config;

libfuzzer_sys::fuzz_target!(|text: &str| config::run(text));
