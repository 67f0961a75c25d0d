//! The engines, one folder each; all keep `docs/engine-contract.md`.

#[cfg(feature = "kaish")]
pub mod kaish;
