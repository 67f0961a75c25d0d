//! The handshake of the private socket: each end proves that it knows the worker's secret without
//! revealing it.
//!
//! A proof is a keyed BLAKE3 hash over a role, both nonces and the identity, each length-prefixed.
//! A proof for one role, connection or worker is therefore invalid for any other.

use std::cell::RefCell;
use std::rc::Rc;

use crate::core::ids::{Epoch, KernelId, WorkerId};

/// Length of nonces, proofs and secrets.
pub const PROOF_BYTES: usize = 32;

/// The identity that both ends of the private socket know in advance.
#[derive(Clone, PartialEq, Eq)]
pub struct WorkerIdentity {
    /// The worker.
    pub worker: WorkerId,
    /// The kernel that it executes.
    pub kernel: KernelId,
    /// The ownership epoch at the start.
    pub epoch: Epoch,
    /// The build of the worker program, as recorded at its start.
    pub build: String,
    /// The secret; only the daemon and the worker's init know it.
    pub secret: [u8; PROOF_BYTES],
}

impl std::fmt::Debug for WorkerIdentity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WorkerIdentity")
            .field("worker", &self.worker)
            .field("kernel", &self.kernel)
            .field("epoch", &self.epoch)
            .field("build", &self.build)
            .finish_non_exhaustive()
    }
}

/// The identity of a worker, which changes when a warm worker gets its kernel, and in each copy of its machine.
#[derive(Debug, Clone)]
pub struct SharedIdentity(Rc<RefCell<Rc<WorkerIdentity>>>);

impl SharedIdentity {
    /// Wraps an identity.
    pub fn new(identity: WorkerIdentity) -> Self {
        SharedIdentity(Rc::new(RefCell::new(Rc::new(identity))))
    }

    /// The current identity.
    pub fn now(&self) -> Rc<WorkerIdentity> {
        Rc::clone(&self.0.borrow())
    }

    /// Makes the worker that kernel's worker.
    pub fn become_kernels(&self, kernel: KernelId, epoch: Epoch) {
        let bound = WorkerIdentity { kernel, epoch, ..WorkerIdentity::clone(&self.now()) };
        *self.0.borrow_mut() = Rc::new(bound);
    }

    /// Makes the worker another one: it is a copy, and proves nothing of the original any more.
    pub fn become_copy(&self, worker: WorkerId, secret: [u8; PROOF_BYTES]) {
        let copy = WorkerIdentity { worker, secret, ..WorkerIdentity::clone(&self.now()) };
        *self.0.borrow_mut() = Rc::new(copy);
    }
}

/// The prover's role.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The worker's init, in `challenge`.
    Worker,
    /// The daemon, in `attach`.
    Daemon,
    /// The daemon, on the descriptor socket.
    Descriptor,
}

impl Role {
    const fn label(self) -> &'static [u8] {
        match self {
            Role::Worker => b"worker",
            Role::Daemon => b"daemon",
            Role::Descriptor => b"descriptor",
        }
    }
}

impl WorkerIdentity {
    /// The proof of `role` over the two nonces of this exchange.
    pub fn proof(&self, role: Role, first: &[u8], second: &[u8]) -> [u8; PROOF_BYTES] {
        let mut hasher = blake3::Hasher::new_keyed(&self.secret);
        let epoch = self.epoch.0.to_le_bytes();
        let parts: [&[u8]; 7] = [
            role.label(),
            first,
            second,
            self.worker.as_bytes(),
            self.kernel.as_bytes(),
            &epoch,
            self.build.as_bytes(),
        ];
        for part in parts {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        *hasher.finalize().as_bytes()
    }

    /// Whether `proof` equals [`WorkerIdentity::proof`], in constant time.
    pub fn verify(&self, role: Role, first: &[u8], second: &[u8], proof: &[u8]) -> bool {
        let expected = blake3::Hash::from_bytes(self.proof(role, first, second));
        match <[u8; PROOF_BYTES]>::try_from(proof) {
            // `blake3::Hash` compares in constant time.
            Ok(given) => expected == blake3::Hash::from_bytes(given),
            Err(_) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity() -> WorkerIdentity {
        WorkerIdentity {
            worker: WorkerId::from_bytes([1; 16]),
            kernel: KernelId::from_bytes([2; 16]),
            epoch: Epoch(3),
            build: "b".into(),
            secret: [4; PROOF_BYTES],
        }
    }

    #[test]
    fn proof_is_bound_to_exchange() {
        let proof = identity().proof(Role::Worker, b"ab", b"c");
        assert!(identity().verify(Role::Worker, b"ab", b"c", &proof));
        assert!(!identity().verify(Role::Daemon, b"ab", b"c", &proof));
        assert!(!identity().verify(Role::Worker, b"a", b"bc", &proof));
        assert!(!identity().verify(Role::Worker, b"ab", b"c", &proof[..31]));
        assert!(!identity().verify(Role::Worker, b"ab", b"c", b""));
        let changes: [fn(&mut WorkerIdentity); 5] = [
            |i| i.worker = WorkerId::from_bytes([9; 16]),
            |i| i.kernel = KernelId::from_bytes([9; 16]),
            |i| i.epoch = Epoch(4),
            |i| i.build = "c".into(),
            |i| i.secret[31] ^= 1,
        ];
        for change in changes {
            let mut other = identity();
            change(&mut other);
            assert!(!other.verify(Role::Worker, b"ab", b"c", &proof), "{other:?}");
        }
    }

    #[test]
    fn debug_output_hides_secret() {
        assert!(!format!("{:?}", identity()).contains("secret"));
    }
}
