//! Fixtures for the tests of this directory.

use crate::core::engine::EngineName;
use crate::core::ids::{Epoch, HostId, KernelId};
use crate::core::info::{Event, HostInfo, KernelInfo, PoolInfo};
use crate::core::spec::KernelSpec;

pub const NOW_MS: i64 = 1_763_762_400_000;

/// A kernel with an id derived from its name.
pub fn kernel(name: &str, state: &str) -> KernelInfo {
    let id = blake3::hash(name.as_bytes());
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&id.as_bytes()[..16]);
    KernelInfo {
        id: KernelId::from_bytes(bytes),
        spec: KernelSpec::new(name.parse().expect("a name"), EngineName::Kaish),
        state: state.into(),
        state_reason: String::new(),
        version: 1,
        epoch: Epoch(1),
        checkpoints: 0,
        created_at_ms: NOW_MS - 86_400_000,
        last_used_at_ms: NOW_MS - 90_000,
        memory_bytes: 0,
        sandbox: vec![],
        uid: 1000,
        executions: 0,
        origin: Default::default(),
        thread_of: None,
        capture: "tracked".into(),
        at_next_start: Vec::new(),
        in_force: None,
        disk: None,
    }
}

/// An event, `sequence` milliseconds after [`NOW_MS`].
pub fn event(sequence: u64, kernel: &str, kind: &str, detail_json: &str) -> Event {
    Event {
        sequence,
        at_ms: NOW_MS + sequence as i64,
        kernel: kernel.into(),
        kind: kind.into(),
        detail_json: detail_json.into(),
    }
}

pub fn host() -> HostInfo {
    HostInfo {
        id: HostId::from_bytes([7; 16]),
        name: "mill".into(),
        version: "0.1.0".into(),
        arch: "x86_64".into(),
        engines: vec![EngineName::Kaish, EngineName::Python],
        pid: 7,
    }
}

pub fn pool(engine: &str, idle: u32, target: u32) -> PoolInfo {
    PoolInfo {
        engine: engine.into(),
        memory_bytes: 512 << 20,
        net: "none".into(),
        idle,
        target,
        creating: target.saturating_sub(idle),
        active: 2,
        taken: 5,
        missed: 1,
        ..PoolInfo::default()
    }
}
