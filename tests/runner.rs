//! The one test program: a module for each behaviour. `tidy` fails on a folder that is not listed here.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

#[cfg(feature = "kaish")]
mod embedded;
mod generated;
mod session_suite;
#[cfg(feature = "kaish")]
mod worker;
