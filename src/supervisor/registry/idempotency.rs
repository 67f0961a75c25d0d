//! Idempotency keys of requests that create kernels: a repeated request returns the kernel of the first.
//!
//! The catalog remembers each key with its kernel. Until that is written, a request with the same key waits here: the
//! client may have lost the connection of its first request.

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

/// The keys in use.
#[derive(Debug, Default)]
pub(crate) struct Keys(RefCell<HashMap<Key, Weak<Mutex<()>>>>);

/// Exclusive use of a key, until dropped.
pub(crate) struct KeyLock {
    scope: String,
    key: String,
    _guard: OwnedMutexGuard<()>,
}

impl Keys {
    /// Waits for exclusive use of a key.
    async fn lock(&self, scope: String, key: &str) -> KeyLock {
        let mutex = {
            let mut used = self.0.borrow_mut();
            used.retain(|_, mutex| mutex.strong_count() > 0);
            let known = used.entry((scope.clone(), key.to_owned())).or_default();
            known.upgrade().unwrap_or_else(|| {
                let mutex = Arc::default();
                *known = Arc::downgrade(&mutex);
                mutex
            })
        };
        KeyLock { scope, key: key.to_owned(), _guard: mutex.lock_owned().await }
    }
}

impl KeyLock {
    /// Scope and key, as the catalog keeps them.
    pub(crate) fn parts(&self) -> Key {
        (self.scope.clone(), self.key.clone())
    }
}

impl Supervisor {
    /// Waits for exclusive use of a key, and returns the kernel created with it, if that is remembered and exists. The
    /// caller holds the lock until its new kernel exists.
    ///
    /// # Errors
    /// The catalog's.
    pub(crate) async fn recall(&self, scope: String, key: &str) -> Result<(Option<Rc<Kernel>>, KeyLock)> {
        let (known, key_lock) = self.recall_text(scope, key).await?;
        let id = known.and_then(|id| id.parse::<KernelId>().ok());
        Ok((id.and_then(|id| self.get(id)), key_lock))
    }

    /// Waits for exclusive use of a key, and returns what is remembered of it.
    ///
    /// # Errors
    /// The catalog's.
    pub(crate) async fn recall_text(&self, scope: String, key: &str) -> Result<(Option<String>, KeyLock)> {
        let host = self.host();
        let key_lock = self.registry.keys.lock(scope, key).await;
        let (scope, key) = key_lock.parts();
        Ok((host.catalog.recall_key(scope, key, host.now_ms()).await?, key_lock))
    }
}

/// Checks that the kernel of a key has the requested name and engine. Its other properties may have changed since.
///
/// # Errors
/// `conflict` (`key_used`).
pub(crate) fn made_as(kernel: Rc<Kernel>, name: &str, engine: EngineName) -> Result<Rc<Kernel>> {
    match kernel.spec().name.as_str() == name && kernel.spec().engine == engine {
        true => Ok(kernel),
        false => Err(key_used(&kernel)),
    }
}

/// The error for a key that created another kernel than the requested one.
pub(crate) fn key_used(made: &Kernel) -> Error {
    Error::conflict(format!("this key was given with another request: it made {}", made.spec().name))
        .reason("key_used")
        .hint("take a new key for a new request")
}
