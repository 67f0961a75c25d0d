//! The daemon's side of the public interface: one server object for each capability of a client.
//!
//! Owns rights: every method checks its right before anything else. Decides nothing about kernels:
//! the supervisor does.

mod audited;
mod blob;
mod checkpoint;
mod execution;
mod files;
mod fork;
mod groups;
mod host;
mod images;
mod journal;
mod kernel;
mod lease;
mod listen;
mod portable;
mod ports;
mod processes;
mod provenance;
mod shown;
mod sinks;
mod teleport;
mod upkeep;
mod workflow;

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

use capnp_rpc::CapabilityServerSet;

use self::kernel::KernelServer;
use super::schema::ryokan_capnp as wire;
use crate::core::error::{Error, Result};
use crate::core::rights::{Right, Rights};
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::Actor;
use crate::supervisor::registry::Supervisor;

pub use self::listen::{Listening, Published, raise_open_files, serve};

/// After this many handed-out kernels, a connection drops its records of released ones.
const FORGET_EVERY: usize = 256;

/// State shared by the server objects of one connection.
pub(super) struct Connection {
    supervisor: Supervisor,
    published: Rc<Published>,
    uid: u32,
    /// The kernels handed out on this connection, which recognises them when passed back as
    /// arguments.
    kernels: RefCell<CapabilityServerSet<KernelServer, wire::kernel::Client>>,
    /// Number of kernels handed out since released ones were last dropped.
    handed_out: Cell<usize>,
    /// Number of open event subscriptions.
    subscriptions: Rc<Cell<usize>>,
    /// The kernels that end with this connection.
    ephemeral: RefCell<Ephemeral>,
}

/// The ephemeral kernels of a connection.
enum Ephemeral {
    /// The connection is open: they live.
    ReadPin(ReadPin<Kernel>),
    /// The connection has ended: a kernel whose creation completes only now is removed at once.
    Ended,
}

/// Weakly held objects and the actor of each.
struct ReadPin<T> {
    each: Vec<(Weak<T>, Actor)>,
    /// Size at which dropped objects are purged.
    forget_at: usize,
}

impl<T> ReadPin<T> {
    fn new() -> Self {
        ReadPin { each: Vec::new(), forget_at: FORGET_EVERY }
    }

    fn add(&mut self, held: &Rc<T>, actor: Actor) {
        if self.each.len() >= self.forget_at {
            self.each.retain(|(held, _)| held.strong_count() > 0);
            self.forget_at = FORGET_EVERY.max(2 * self.each.len());
        }
        self.each.push((Rc::downgrade(held), actor));
    }

    /// The objects that still exist.
    fn into_present(self) -> impl Iterator<Item = (Rc<T>, Actor)> {
        self.each.into_iter().filter_map(|(held, actor)| Some((held.upgrade()?, actor)))
    }
}

impl Connection {
    fn new(supervisor: Supervisor, published: Rc<Published>, uid: u32) -> Rc<Self> {
        let kernels = RefCell::new(CapabilityServerSet::new());
        Rc::new(Connection {
            supervisor,
            published,
            uid,
            kernels,
            handed_out: Cell::new(0),
            subscriptions: Rc::default(),
            ephemeral: RefCell::new(Ephemeral::ReadPin(ReadPin::new())),
        })
    }

    /// Removes the kernel when the connection ends.
    fn hold(&self, kernel: &Rc<Kernel>, actor: Actor) {
        // An idempotency key may have found a kernel that is not ephemeral.
        if !kernel.spec().ephemeral {
            return;
        }
        let ended = match &mut *self.ephemeral.borrow_mut() {
            Ephemeral::ReadPin(held) => {
                held.add(kernel, actor.clone());
                false
            }
            Ephemeral::Ended => true,
        };
        if ended {
            self.remove_ephemeral(Rc::clone(kernel), actor);
        }
    }

    /// Handles the end of the connection, whatever its cause.
    fn end(&self) {
        if let Ephemeral::ReadPin(held) = self.ephemeral.replace(Ephemeral::Ended) {
            for (kernel, actor) in held.into_present() {
                self.remove_ephemeral(kernel, actor);
            }
        }
    }

    fn remove_ephemeral(&self, kernel: Rc<Kernel>, actor: Actor) {
        let supervisor = self.supervisor.clone();
        tokio::task::spawn_local(async move { supervisor.remove_ephemeral(&kernel, actor).await });
    }

    fn kernel_client(self: &Rc<Self>, kernel: &Rc<Kernel>, rights: Rights, actor: Actor) -> wire::kernel::Client {
        let server = KernelServer { connection: Rc::clone(self), kernel: Rc::clone(kernel), rights, actor };
        let mut kernels = self.kernels.borrow_mut();
        self.handed_out.set((self.handed_out.get() + 1) % FORGET_EVERY);
        if self.handed_out.get() == 0 {
            // A long-lived client creates and removes kernels without limit.
            kernels.gc();
        }
        kernels.new_client(server)
    }

    /// The kernel behind a capability of this connection.
    async fn local(&self, client: &wire::kernel::Client) -> Option<Rc<KernelServer>> {
        let resolved = capnp::capability::get_resolved_cap(client.clone()).await;
        self.kernels.borrow().get_local_server_of_resolved(&resolved)
    }
}

/// Refuses a call for which the capability lacks the right.
fn require(rights: Rights, right: Right) -> Result<()> {
    if rights.has(right) {
        return Ok(());
    }
    Err(Error::refused(format!("this capability does not have the right {}", right.name()))
        .reason("rights")
        .hint("request one that has it from its owner"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_handles_are_forgotten() {
        let actor = || Actor { uid: 0, client: String::new(), lease: Vec::new() };
        let (stays, mut held) = (Rc::new(7), ReadPin::new());
        held.add(&stays, actor());
        let mut most = 0;
        for n in 0..10 * FORGET_EVERY {
            held.add(&Rc::new(n), actor());
            most = most.max(held.each.len());
        }
        assert!(most <= FORGET_EVERY, "{most} are remembered");
        let present: Vec<_> = held.into_present().map(|(held, _)| *held).collect();
        assert_eq!(present, [7]);
        // If no object is dropped, the search must not be repeated at each addition.
        let (all, mut held): (Vec<_>, _) = ((0..1000).map(Rc::new).collect(), ReadPin::new());
        all.iter().for_each(|each| held.add(each, actor()));
        assert!(held.forget_at >= 1000 && held.into_present().count() == 1000);
    }
}
