//! A connection to a daemon.

use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use tokio::net::UnixStream;

use super::connection::{Link, answer, connect_stream, fields};
use super::feed::{Events, feed};
use super::kernel::KernelClient;
use crate::core::error::{Error, Result};
use crate::core::exec::{ExecRequest, ExecResult};
use crate::core::info::{Ability, HostInfo, KernelFilter, KernelInfo, PoolInfo};
use crate::core::limits;
use crate::core::spec_update::SpecUpdate;
use crate::rpc::convert::pool::read_pools;
use crate::rpc::convert::spec::{SpecRequest, write_spec_request, write_spec_update};
use crate::rpc::convert::{info, read_name, read_text_list};
use crate::rpc::schema::ryokan_capnp as wire;
use crate::sys::socket::peer;

type CreateRequest =
    capnp::capability::Request<wire::host::create_kernel_params::Owned, wire::host::create_kernel_results::Owned>;

/// A daemon after a completed `hello`.
pub struct HostClient {
    pub(super) cap: wire::host::Client,
    pub(super) link: Rc<Link>,
    info: HostInfo,
}

impl HostClient {
    /// Connects to a daemon's socket and says hello as `client`, a name such as `my-agent 1.2`.
    ///
    /// # Errors
    /// [`ErrorCode::Unavailable`](crate::core::error::ErrorCode::Unavailable) if no daemon answers
    /// within [`limits::CLIENT_HELLO`]; refusals of the daemon.
    pub async fn connect(socket: &Path, client: &str) -> Result<HostClient> {
        HostClient::connect_within(socket, client, limits::CLIENT_HELLO).await
    }

    /// As [`HostClient::connect`], to a server of this user or of root only: another user may have made the socket.
    ///
    /// # Errors
    /// As [`HostClient::connect`], and `refused` with the reason `foreign_server`.
    pub async fn connect_own(socket: &Path, client: &str) -> Result<HostClient> {
        let stream = connect_stream(socket, limits::CLIENT_HELLO).await?;
        let peer = peer(&stream).map_err(|e| Error::unavailable(format!("cannot tell whose server this is: {e}")))?;
        if peer.uid != 0 && peer.uid != nix::unistd::geteuid().as_raw() {
            return Err(Error::refused(format!("the server on {} runs as uid {}", socket.display(), peer.uid))
                .reason("foreign_server")
                .hint("remove that directory, or set XDG_RUNTIME_DIR to one of your own with mode 0700"));
        }
        HostClient::greet(stream, client, limits::CLIENT_HELLO).await
    }

    /// As [`HostClient::connect`], with another deadline.
    ///
    /// # Errors
    /// As [`HostClient::connect`].
    pub async fn connect_within(socket: &Path, client: &str, deadline: Duration) -> Result<HostClient> {
        HostClient::greet(connect_stream(socket, deadline).await?, client, deadline).await
    }

    /// Says hello on a connected stream.
    ///
    /// # Errors
    /// As [`HostClient::connect`].
    pub async fn greet(stream: UnixStream, client: &str, deadline: Duration) -> Result<HostClient> {
        let (link, cap) = Link::start::<wire::host::Client>(stream)?;
        let mut request = cap.hello_request();
        request.get().set_wire_version(wire::WIRE_VERSION);
        request.get().set_client(client);
        let greeted = tokio::time::timeout(deadline, link.wait(request.send().promise)).await;
        let response = greeted.map_err(|_| {
            Error::unavailable(format!("the daemon did not greet in {deadline:?}"))
                .hint("it is overloaded or hangs: see its log")
        })??;
        let info = answer(info::read_host_info(fields(fields(response.get())?.get_host())?))?;
        Ok(HostClient { cap, link, info })
    }

    /// The host's answer to `hello`.
    pub fn info(&self) -> &HostInfo {
        &self.info
    }

    /// Creates a kernel; its worker starts at first use.
    ///
    /// The same `key` within 24 hours returns the same kernel; empty: no key.
    ///
    /// # Errors
    /// Refusals of the daemon: `alreadyExists`, `invalidArgument`, `unsupported`, `refused`.
    pub async fn create_kernel(&self, spec: &SpecRequest, key: &str) -> Result<(KernelClient, KernelInfo)> {
        let request = self.create_request(spec, key)?;
        // Copying `fromDir` has no bound on its duration.
        let response = self.link.wait(request.send().promise).await?;
        let response = fields(response.get())?;
        let (info, _) = answer(info::read_kernel_info(fields(response.get_info())?))?;
        Ok((KernelClient::new(fields(response.get_kernel())?, self.link.clone()), info))
    }

    /// Creates a kernel and runs code in it, in one round trip.
    ///
    /// The execution is requested before the creation is answered. If the creation fails, nothing
    /// runs.
    ///
    /// # Errors
    /// As [`Self::create_kernel`]. The outcome of the execution is returned beside the kernel,
    /// which exists in any case.
    pub async fn create_and_run(
        &self,
        spec: &SpecRequest,
        key: &str,
        code: &ExecRequest,
    ) -> Result<(KernelClient, KernelInfo, Result<ExecResult>)> {
        code.check().map_err(|e| Error::invalid(e.to_string()))?;
        let creating = self.create_request(spec, key)?.send();
        let ahead = KernelClient::new(creating.pipeline.get_kernel(), self.link.clone());
        let (created, ran) = futures::join!(self.link.wait(creating.promise), ahead.run_to_end(code));
        let created = created?;
        let created = fields(created.get())?;
        let (info, _) = answer(info::read_kernel_info(fields(created.get_info())?))?;
        Ok((KernelClient::new(fields(created.get_kernel())?, self.link.clone()), info, ran))
    }

    fn create_request(&self, spec: &SpecRequest, key: &str) -> Result<CreateRequest> {
        let mut request = self.cap.create_kernel_request();
        write_spec_request(request.get().init_spec(), spec)?;
        request.get().set_key(key);
        Ok(request)
    }

    /// Opens a kernel by name or id.
    ///
    /// # Errors
    /// `notFound`.
    pub async fn open_kernel(&self, name: &str) -> Result<(KernelClient, KernelInfo)> {
        let mut request = self.cap.open_kernel_request();
        request.get().set_name(name);
        let response = self.link.call(request.send().promise).await?;
        let response = fields(response.get())?;
        let (info, _) = answer(info::read_kernel_info(fields(response.get_info())?))?;
        Ok((KernelClient::new(fields(response.get_kernel())?, self.link.clone()), info))
    }

    /// Passes every kernel that matches `filter` to `each`, in order of name.
    ///
    /// # Errors
    /// The errors of the daemon and of `each`.
    pub async fn each_kernel(
        &self,
        filter: &KernelFilter,
        each: impl AsyncFnMut(KernelInfo) -> Result<()>,
    ) -> Result<()> {
        let (inlet, feed) = feed::<KernelInfo>();
        let mut request = self.cap.list_kernels_request();
        info::write_kernel_filter(request.get().init_filter(), filter);
        request.get().set_sink(capnp_rpc::new_client(inlet));
        let call = request.send().promise;
        feed.pump(&self.link, async { self.link.wait(call).await.map(drop) }, each).await
    }

    /// The kernels that match `filter`, in order of name.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn list_kernels(&self, filter: &KernelFilter) -> Result<Vec<KernelInfo>> {
        let mut kernels = Vec::new();
        let each = async |info| {
            kernels.push(info);
            Ok(())
        };
        self.each_kernel(filter, each).await?;
        Ok(kernels)
    }

    /// Removes a kernel by name or id; `expected_version` 0: any version.
    ///
    /// # Errors
    /// `notFound`, `conflict`.
    pub async fn remove_kernel(&self, name: &str, expected_version: u64) -> Result<()> {
        self.remove(name, expected_version, false).await
    }

    /// As [`Self::remove_kernel`], together with the threads in its workspace.
    ///
    /// # Errors
    /// As [`Self::remove_kernel`].
    pub async fn remove_with_threads(&self, name: &str, expected_version: u64) -> Result<()> {
        self.remove(name, expected_version, true).await
    }

    async fn remove(&self, name: &str, expected_version: u64, with_threads: bool) -> Result<()> {
        let mut request = self.cap.remove_kernel_request();
        request.get().set_name(name);
        request.get().set_expected_version(expected_version);
        request.get().set_with_threads(with_threads);
        self.link.wait(request.send().promise).await.map(drop)
    }

    /// Changes a kernel's name; returns its version.
    ///
    /// # Errors
    /// `notFound`, `alreadyExists`, `conflict`, `busy`, `refused`.
    pub async fn rename_kernel(&self, name: &str, to: &str, expected_version: u64) -> Result<u64> {
        let mut request = self.cap.rename_kernel_request();
        request.get().set_name(name);
        request.get().set_to(to);
        request.get().set_expected_version(expected_version);
        let response = self.link.wait(request.send().promise).await?;
        Ok(fields(response.get())?.get_version())
    }

    /// Changes a kernel's specification; returns its version, and what waits for its next start.
    ///
    /// # Errors
    /// `notFound`, `invalidArgument`, `conflict`, `busy`, `refused`, `unsupported`.
    pub async fn update_kernel(
        &self,
        name: &str,
        update: &SpecUpdate,
        expected_version: u64,
    ) -> Result<(u64, Vec<String>)> {
        let mut request = self.cap.update_kernel_request();
        request.get().set_name(name);
        request.get().set_expected_version(expected_version);
        write_spec_update(request.get().init_change(), update)?;
        let response = self.link.wait(request.send().promise).await?;
        let response = fields(response.get())?;
        let waiting = read_text_list(response.get_at_next_start(), "pending changes", limits::SPEC_CHANGES);
        Ok((response.get_version(), answer(waiting)?))
    }

    /// Subscribes to the events after sequence number `since`, past and future.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn events(&self, since: u64) -> Result<Events> {
        let (inlet, feed) = feed();
        let mut request = self.cap.events_request();
        request.get().set_since(since);
        request.get().set_sink(capnp_rpc::new_client(inlet));
        let response = self.link.call(request.send().promise).await?;
        let subscription = fields(fields(response.get())?.get_subscription())?;
        Ok(Events::new(feed, self.link.clone(), subscription))
    }

    /// The abilities of the host.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn abilities(&self) -> Result<Vec<Ability>> {
        let response = self.link.call(self.cap.abilities_request().send().promise).await?;
        answer(info::read_abilities(fields(response.get())?.get_abilities()))
    }

    /// The pools of warm workers.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn pools(&self) -> Result<Vec<PoolInfo>> {
        let response = self.link.call(self.cap.pools_request().send().promise).await?;
        answer(read_pools(fields(response.get())?.get_pools()))
    }

    /// The host's id and its clock in milliseconds since 1970.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn ping(&self) -> Result<(String, i64)> {
        let response = self.link.call(self.cap.ping_request().send().promise).await?;
        let response = fields(response.get())?;
        Ok((answer(read_name(response.get_host_id(), "host id"))?, response.get_server_time_ms()))
    }
}
