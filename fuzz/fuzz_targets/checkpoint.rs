//! The parts of a checkpoint: manifest, list of engine state, objects of trees.
#![no_main]

#[path = "../inputs/checkpoint.rs"]
mod checkpoint;

libfuzzer_sys::fuzz_target!(|data: &[u8]| checkpoint::run(data));
