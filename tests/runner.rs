//! The one test crate: a module for each behaviour. `tidy` fails on a folder that is not listed here.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod embedded;
mod generated;
mod licences;
mod mcp;
mod session_suite;
mod systemd;
mod tidy;
