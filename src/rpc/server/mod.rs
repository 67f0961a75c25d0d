//! The daemon's side of the public interface: one server object for each capability that a client holds.
//!
//! Owns rights: every method checks its right before anything else. Never decides about kernels: the supervisor does.

mod audited;
mod blob;
mod checkpoint;
mod execution;
mod fork;
mod host;
mod kernel;
mod lease;
mod listen;
mod portable;
mod sinks;
mod telling;
mod upkeep;
mod workflow;

use std::cell::RefCell;
use std::rc::Rc;

use capnp_rpc::CapabilityServerSet;

use self::kernel::KernelServer;
use super::schema::ryokan_capnp as wire;
use crate::core::error::{Error, Result};
use crate::core::rights::{Right, Rights};
use crate::supervisor::command::Actor;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::supervisor::Supervisor;

pub use self::listen::{Listening, Published, ServeConfig, raise_open_files, serve};

/// What the server objects of one connection share.
pub(super) struct Connection {
    supervisor: Supervisor,
    published: Rc<Published>,
    uid: u32,
    config: Rc<ServeConfig>,
    /// The kernels that were handed out here: so that one can be given back as an argument.
    kernels: RefCell<CapabilityServerSet<KernelServer, wire::kernel::Client>>,
    /// The kernels that go when this connection does.
    ephemeral: RefCell<Ephemeral>,
}

/// What becomes of kernels that were made to go with a connection.
enum Ephemeral {
    /// It is there: they live.
    Held(Vec<(Rc<Kernel>, Actor)>),
    /// It has ended: one whose making ends only now goes at once.
    Ended,
}

impl Connection {
    fn new(supervisor: Supervisor, published: Rc<Published>, uid: u32, config: Rc<ServeConfig>) -> Rc<Self> {
        let kernels = RefCell::new(CapabilityServerSet::new());
        Rc::new(Connection {
            supervisor,
            published,
            uid,
            config,
            kernels,
            ephemeral: RefCell::new(Ephemeral::Held(Vec::new())),
        })
    }

    /// Removes the kernel when the connection ends.
    fn hold(&self, kernel: &Rc<Kernel>, actor: Actor) {
        // Its key may have found a kernel that was made to stay.
        if !kernel.spec.ephemeral {
            return;
        }
        let ended = match &mut *self.ephemeral.borrow_mut() {
            Ephemeral::Held(held) => {
                held.push((Rc::clone(kernel), actor.clone()));
                false
            }
            Ephemeral::Ended => true,
        };
        if ended {
            self.let_go(Rc::clone(kernel), actor);
        }
    }

    /// The connection has ended, however it did.
    fn end(&self) {
        if let Ephemeral::Held(held) = self.ephemeral.replace(Ephemeral::Ended) {
            for (kernel, actor) in held {
                self.let_go(kernel, actor);
            }
        }
    }

    fn let_go(&self, kernel: Rc<Kernel>, actor: Actor) {
        let supervisor = self.supervisor.clone();
        tokio::task::spawn_local(async move { supervisor.let_go(&kernel, actor).await });
    }

    fn kernel_client(self: &Rc<Self>, kernel: &Rc<Kernel>, rights: Rights, actor: Actor) -> wire::kernel::Client {
        let server = KernelServer { connection: Rc::clone(self), kernel: Rc::clone(kernel), rights, actor };
        self.kernels.borrow_mut().new_client(server)
    }

    /// The kernel behind a capability that came from this connection.
    async fn local(&self, client: &wire::kernel::Client) -> Option<Rc<KernelServer>> {
        let resolved = capnp::capability::get_resolved_cap(client.clone()).await;
        self.kernels.borrow().get_local_server_of_resolved(&resolved)
    }
}

/// Refuses what the capability does not allow.
fn require(rights: Rights, right: Right) -> Result<()> {
    if rights.has(right) {
        return Ok(());
    }
    Err(Error::refused(format!("this capability does not have the right {}", right.name()))
        .reason("rights")
        .hint("ask whoever handed it out for one that has"))
}
