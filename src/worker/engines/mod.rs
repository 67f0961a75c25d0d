//! The engines, one folder each; all keep `docs/engine-contract.md`.
