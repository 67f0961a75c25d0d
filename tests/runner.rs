//! The one test program; each behaviour has a folder.

#[cfg(feature = "kaish")]
mod embedded;
mod session_suite;
