//! Idempotency keys of moves: a repeated request returns the report of the first move.
//!
//! The key is remembered just before the departure, without the end of the report, and again after it. A request that
//! finds the first form trusts it only if the kernel has departed by that very move.

use std::rc::Rc;

use serde::{Deserialize, Serialize};

use crate::catalog::IdempotencyKey;
use crate::core::error::{Error, Result};
use crate::core::ids::KernelId;
use crate::core::info::TeleportReport;
use crate::core::limits;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::Actor;
use crate::supervisor::registry::Supervisor;
use crate::supervisor::registry::idempotency::KeyLock;

/// What a key remembers.
#[derive(Debug, Serialize, Deserialize)]
struct Remembered {
    kernel: KernelId,
    to: String,
    /// Whether the report is whole.
    is_whole: bool,
    report: TeleportReport,
}

/// The key of a move that has not been made; held until the move ends.
pub(super) struct MoveKey {
    held: KeyLock,
    kernel: KernelId,
    to: String,
}

/// What is known of a key.
pub(super) enum Recalled {
    /// The move was made.
    Moved(Box<TeleportReport>),
    /// It was not, or has failed.
    New(MoveKey),
}

/// Waits for exclusive use of a key, and looks for its move.
///
/// # Errors
/// `conflict` (`key_used`) if the key moved another kernel, or to another host; the catalog's.
pub(super) async fn recall(
    supervisor: &Supervisor,
    kernel: &Kernel,
    to: &str,
    key: &str,
    actor: &Actor,
) -> Result<Recalled> {
    if key.len() > limits::KEY_BYTES {
        return Err(Error::invalid(format!("a key has at most {} bytes", limits::KEY_BYTES)));
    }
    let (known, held) = supervisor.recall_text(format!("teleport/{}", actor.uid), key).await?;
    let known = known.and_then(|text| serde_json::from_str::<Remembered>(&text).ok());
    let Some(Remembered { kernel: moved, to: there, is_whole, report }) = known else {
        return Ok(Recalled::New(MoveKey { held, kernel: kernel.id, to: to.to_owned() }));
    };
    if !is_whole && !kernel.has_departed(report.handover) {
        return Ok(Recalled::New(MoveKey { held, kernel: kernel.id, to: to.to_owned() }));
    }
    match moved == kernel.id && there == to {
        true => Ok(Recalled::Moved(Box::new(report))),
        false => Err(Error::conflict("this key was given with another move")
            .reason("key_used")
            .hint("take a new key for a new request")),
    }
}

impl MoveKey {
    /// Remembers the move.
    ///
    /// # Errors
    /// The catalog's.
    pub(super) async fn remember(&self, host: &Rc<Host>, report: TeleportReport, is_whole: bool) -> Result<()> {
        let (scope, key) = self.held.parts();
        let expires_at_ms = host.now_ms().saturating_add(limits::KEY_LIFETIME.as_millis() as i64);
        let remembered = Remembered { kernel: self.kernel, to: self.to.clone(), is_whole, report };
        let text = super::write(&remembered)?;
        host.making_room(async || {
            let key = IdempotencyKey { scope: scope.clone(), key: key.clone(), expires_at_ms };
            Ok(host.catalog.remember_key(key, text.clone()).await?)
        })
        .await
    }
}
