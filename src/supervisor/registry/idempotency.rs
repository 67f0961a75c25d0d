//! Idempotency keys of what makes kernels: a request that comes again gives what the first one made.
//!
//! The catalog remembers a key with the kernel that it made. Until that is written a request with the same key waits here: its client may
//! have lost the connection over which the first one came.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::{Arc, Weak};

use tokio::sync::{Mutex, OwnedMutexGuard};

use crate::core::engine::EngineName;
use crate::core::error::{Error, Result};
use crate::core::ids::KernelId;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::registry::Supervisor;

/// Scope and key.
type Key = (String, String);

/// The keys that are being used now.
#[derive(Debug, Default)]
pub(crate) struct Keys(RefCell<HashMap<Key, Weak<Mutex<()>>>>);

/// Nobody else uses the key until this is dropped.
pub(crate) struct KeyLock {
    scope: String,
    key: String,
    _turn: OwnedMutexGuard<()>,
}

impl Keys {
    /// Waits until nobody else uses the key.
    async fn turn(&self, scope: String, key: &str) -> KeyLock {
        let turn = {
            let mut used = self.0.borrow_mut();
            used.retain(|_, turn| turn.strong_count() > 0);
            let known = used.entry((scope.clone(), key.to_owned())).or_default();
            known.upgrade().unwrap_or_else(|| {
                let turn = Arc::default();
                *known = Arc::downgrade(&turn);
                turn
            })
        };
        KeyLock { scope, key: key.to_owned(), _turn: turn.lock_owned().await }
    }
}

impl KeyLock {
    /// Scope and key, as the catalog keeps them.
    pub(crate) fn parts(&self) -> Key {
        (self.scope.clone(), self.key.clone())
    }
}

impl Supervisor {
    /// Waits until nobody else uses the key, and gives the kernel that it has made, if it has, is remembered, and the kernel is there. Keep the
    /// turn until the kernel is there that is made with it.
    ///
    /// # Errors
    /// The catalog's.
    pub(crate) async fn recall(&self, scope: String, key: &str) -> Result<(Option<Rc<Kernel>>, KeyLock)> {
        let host = self.host();
        let turn = self.registry.keys.turn(scope, key).await;
        let (scope, key) = turn.parts();
        let known = host.catalog.recall_key(scope, key, host.now_ms()).await?;
        let id = known.and_then(|id| id.parse::<KernelId>().ok());
        Ok((id.and_then(|id| self.get(id)), turn))
    }
}

/// The kernel that a key has made, if it has the name and the engine that are asked for by the same key. The rest of what is asked for may
/// have changed since.
///
/// # Errors
/// `conflict` (`key_used`).
pub(crate) fn made_as(kernel: Rc<Kernel>, name: &str, engine: EngineName) -> Result<Rc<Kernel>> {
    match kernel.spec.name.as_str() == name && kernel.spec.engine == engine {
        true => Ok(kernel),
        false => Err(key_used(&kernel)),
    }
}

/// What is said of a key that has made another kernel than the one which is asked for.
pub(crate) fn key_used(made: &Kernel) -> Error {
    Error::conflict(format!("this key was given with another request: it made {}", made.spec.name))
        .reason("key_used")
        .hint("take a new key for a new request")
}
