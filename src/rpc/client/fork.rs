//! Kernels created from a kernel: forks and threads.

use std::rc::Rc;
use std::time::Duration;

use super::connection::{Link, answer, fields};
use super::host::HostClient;
use super::kernel::KernelClient;
use crate::core::checkpoint::Checkpoint;
use crate::core::engine::EngineName;
use crate::core::error::Result;
use crate::core::fork::{ForkWay, Forking};
use crate::core::info::KernelInfo;
use crate::core::name::KernelName;
use crate::rpc::convert::checkpoint::read_checkpoint;
use crate::rpc::convert::fork::{read_error, write_fork_request};
use crate::rpc::convert::{info, read_name, read_text};
use crate::rpc::schema::ryokan_capnp::{fork_result, forked_kernel};

/// The outcome of a fork.
pub struct Forks {
    /// The fork point; `None` if no child had to be created.
    pub checkpoint: Option<Checkpoint>,
    /// Each requested child, by name.
    pub children: Vec<(String, Result<(KernelClient, KernelInfo)>)>,
    /// How the children began; `None` if none had to be created, or from an older daemon.
    pub way: Option<ForkWay>,
}

impl KernelClient {
    /// Forks the kernel. The failure of a child is that child's result.
    ///
    /// # Errors
    /// The daemon's errors, if no child could be created at all.
    pub async fn fork(&self, forking: &Forking) -> Result<Forks> {
        let mut call = self.cap.fork_request();
        write_fork_request(call.get().init_request(), forking)?;
        let response = self.link.wait(call.send().promise).await?;
        read_forks(fields(response.get())?, &self.link)
    }

    /// Creates a kernel with its own engine and state in this kernel's workspace.
    ///
    /// `engine` `None`: the same engine.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn thread(
        &self,
        name: &KernelName,
        engine: Option<EngineName>,
        key: &str,
    ) -> Result<(KernelClient, KernelInfo)> {
        let mut call = self.cap.thread_request();
        call.get().set_name(name.as_str());
        call.get().set_engine(engine.map_or("", |engine| engine.name()));
        call.get().set_key(key);
        let response = self.link.call(call.send().promise).await?;
        let response = fields(response.get())?;
        let (info, _) = answer(info::read_kernel_info(fields(response.get_info())?))?;
        Ok((KernelClient::new(fields(response.get_kernel())?, self.link.clone()), info))
    }
}

impl HostClient {
    /// Forks a kernel by name or id; the children may have another specification.
    ///
    /// # Errors
    /// As [`KernelClient::fork`]; `notFound`.
    pub async fn fork_kernel(&self, name: &str, forking: &Forking) -> Result<Forks> {
        let mut call = self.cap.fork_kernel_request();
        call.get().set_name(name);
        write_fork_request(call.get().init_request(), forking)?;
        let response = self.link.wait(call.send().promise).await?;
        read_forks(fields(response.get())?, &self.link)
    }
}

fn read_forks(response: fork_result::Reader<'_>, link: &Rc<Link>) -> Result<Forks> {
    let mut children = Vec::new();
    for child in fields(response.get_children())?.iter() {
        let name = answer(read_name(child.get_name(), "name of a kernel"))?;
        let made = match child.which().map_err(capnp::Error::from) {
            Ok(forked_kernel::Which::Forked(forked)) => {
                let (info, _) = answer(info::read_kernel_info(fields(forked.get_info())?))?;
                Ok((KernelClient::new(fields(forked.get_kernel())?, link.clone()), info))
            }
            Ok(forked_kernel::Which::Failed(error)) => Err(answer(read_error(fields(error)?))?),
            Err(error) => fields(Err(error))?,
        };
        children.push((name, made));
    }
    let point = match response.has_checkpoint() {
        true => Some(answer(read_checkpoint(fields(response.get_checkpoint())?))?.0),
        false => None,
    };
    let way = match &*answer(read_text(response.get_kind(), "kind of a fork"))? {
        "machine" => Some(ForkWay::Machine { pause: Duration::from_micros(response.get_pause_us()) }),
        "checkpoint" => {
            let reason = answer(read_text(response.get_reason(), "reason of a fork"))?;
            Some(ForkWay::Checkpoint { reason })
        }
        _ => None,
    };
    Ok(Forks { checkpoint: point, children, way })
}
