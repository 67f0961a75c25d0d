//! The one test crate: a module for each behaviour. `tidy` fails on a folder that is not listed here.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod daemon;
mod embedded;
mod generated;
mod mcp;
mod session_suite;
mod support;
mod tidy;
mod worker;
