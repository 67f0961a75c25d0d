//! The handover protocol on a byte stream: frames, transfer of objects by digest, both ends, transports.
//!
//! ```text
//! source: Session ── wire ── transport (ssh, exec) ═══ ryokan pipe ─ rpc ── wire ── target::serve ─▶ TargetHost
//! ```
//! [`crate::core::handover`] decides; the supervisor records decisions and owns the kernels. Nothing that arrives is
//! trusted: each frame has a bound, each object is verified before it is stored under its address, and nothing is
//! visible before all of it is verified.

mod silence;
pub mod source;
mod storing;
pub mod target;
mod transfer;
pub mod transport;
mod wire;

pub use silence::Silence;
pub use transfer::{Progress, Received, Reuse, Sent};
pub use wire::{Accept, Offer, OfferedGroup, Seal, Wire, reframe};
