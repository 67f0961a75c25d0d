//! The one test crate: a module for each behaviour.

mod sandbox_probes;
