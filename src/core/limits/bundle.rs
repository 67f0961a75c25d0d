//! Limits of exported kernels.

use std::time::Duration;

/// One piece of a bundle, bytes.
pub const BUNDLE_PIECE_BYTES: usize = 256 << 10;
/// Pieces queued between client and reader or writer.
pub const BUNDLE_PIECES_QUEUED: usize = 4;
/// Deadline for one piece of an export or import; then the transfer fails.
pub const BUNDLE_PIECE_TIMEOUT: Duration = Duration::from_secs(60);
/// Header of a bundle, bytes.
pub const BUNDLE_HEADER_BYTES: usize = 64 << 20;
/// Manifests that the reader of a bundle holds, bytes.
pub const BUNDLE_MANIFESTS_BYTES: u64 = 512 << 20;
/// Checkpoints of one bundle.
pub const BUNDLE_CHECKPOINTS: usize = 10_000;
/// Objects of one bundle.
pub const BUNDLE_OBJECTS: u64 = 20_000_000;
/// Content of the objects of one bundle, bytes.
pub const BUNDLE_BYTES: u64 = 1 << 40;
/// Bundles written or read concurrently.
pub const BUNDLES_CONCURRENT: usize = 4;
/// Resources of the host that one bundle lists and that its import can grant.
pub const BUNDLE_HOST_RESOURCES: usize = 1000;
