//! The only test crate: one module per behaviour. `tidy` fails on a directory that is not listed
//! here.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod checkpoints;
mod cli;
mod command_line;
mod daemon;
mod embedded;
mod engines;
mod faults;
mod files;
mod foreign;
mod forks;
mod freeze;
mod fuzz_inputs;
mod generated;
mod licences;
mod mcp;
mod microvm;
mod node_driver;
mod pool;
mod processes;
mod python_driver;
mod sandbox_probes;
mod session_suite;
mod support;
mod suspend;
mod systemd;
mod teleport;
mod tidy;
mod upkeep;
mod worker;
mod workflow;
mod workspace;
