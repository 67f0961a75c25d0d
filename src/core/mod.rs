//! The pure core of ryokan: terms, states, values, limits and the decisions over them.
//!
//! Owns every type that more than one module uses. Never does I/O, never reads a clock, is never
//! async: the same input yields the same output, so everything here is tested by tables, properties
//! and simulation.

pub mod accelerator;
pub mod audit;
pub mod checkpoint;
pub mod diff;
pub mod durability;
pub mod engine;
pub mod error;
pub mod exec;
pub mod files;
pub mod fork;
pub mod freeze;
pub mod handover;
pub mod host_resource;
pub mod ids;
pub mod info;
pub mod kernel;
pub mod limits;
pub mod missed;
pub mod name;
pub mod nearest;
pub mod origin;
pub mod pattern;
pub mod pool;
pub mod quantity;
pub mod retention;
pub mod rights;
pub mod signature;
pub mod snapshot;
pub mod spec;
pub mod spec_update;
pub mod state;
pub mod upkeep;
pub mod usage;
pub mod value;
pub mod venv;
pub mod vmm;
pub mod workflow;
