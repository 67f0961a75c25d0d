//! Ports of a kernel's own loopback, for connections from outside.

use std::cell::Cell;
use std::rc::{Rc, Weak};

use super::command::Actor;
use crate::core::error::{Error, Result};
use crate::core::spec::Net;
use crate::link::host::{WorkerLink, WorkerPortStream};
use crate::supervisor::kernel::Kernel;

/// A port of the kernel's present worker.
pub struct KernelPort {
    kernel: Rc<Kernel>,
    link: Weak<WorkerLink>,
    port: u16,
}

/// A connection, which keeps the kernel from being idle.
pub struct KernelPortStream {
    /// Its bytes.
    pub bytes: WorkerPortStream,
    _use: InUse,
}

struct InUse(Rc<Cell<usize>>);

impl InUse {
    fn new(count: &Rc<Cell<usize>>) -> InUse {
        count.set(count.get() + 1);
        InUse(Rc::clone(count))
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl Kernel {
    /// Opens a port for connections.
    ///
    /// # Errors
    /// `conflict` without a worker, `unsupported` with the host's network, `busy` (leased).
    pub async fn open_port(self: &Rc<Self>, port: u16, actor: &Actor) -> Result<KernelPort> {
        if port == 0 {
            return Err(Error::invalid("port 0 is no port").hint("name a port from 1 to 65535"));
        }
        let spec = self.worker_spec();
        if spec.net == Net::Host {
            return Err(Error::unsupported(format!("kernel {} uses the host's network", spec.name))
                .reason("network")
                .hint(format!("connect to 127.0.0.1:{port} of this host")));
        }
        self.admit(actor, 0).await?;
        let link = self.link.borrow().as_ref().map(Rc::downgrade);
        let link = link.ok_or_else(|| {
            Error::conflict(format!("kernel {} has no worker, so nothing listens in it", spec.name))
                .reason("no_worker")
                .hint(format!("start the server in it, for example: ryokan spawn {} -d -- PROGRAM", spec.name))
        })?;
        Ok(KernelPort { kernel: Rc::clone(self), link, port })
    }
}

impl KernelPort {
    fn link(&self) -> Result<Rc<WorkerLink>> {
        let gone = || {
            let name = &self.kernel.spec().name;
            Error::lost(format!("the worker of kernel {name} has ended, and its ports with it")).reason("no_worker")
        };
        self.link.upgrade().ok_or_else(gone)
    }

    /// Connects.
    ///
    /// # Errors
    /// `notFound` if nothing listens, `busy` beyond the limit, `lost` after the worker's end.
    pub async fn connect(&self) -> Result<KernelPortStream> {
        let use_of_kernel = InUse::new(&self.kernel.connections);
        Ok(KernelPortStream { bytes: self.link()?.connect(self.port).await?, _use: use_of_kernel })
    }

    /// Returns when the worker has ended.
    pub async fn closed(&self) {
        let ended = self.link.upgrade().map(|link| link.ended());
        if let Some(ended) = ended {
            ended.await;
        }
    }
}
