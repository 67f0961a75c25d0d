//! One task per kernel, recovery at start-up, and what they share.

pub mod output;
