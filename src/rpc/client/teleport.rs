//! Moves of kernels between hosts.

use std::rc::Rc;

use capnp_rpc::new_client;

use super::connection::{Link, answer, fields};
use super::host::HostClient;
use crate::core::error::Result;
use crate::core::handover::{Allowed, MoveOptions};
use crate::core::ids::HandoverId;
use crate::core::info::{HandoverInfo, TeleportReport};
use crate::core::limits;
use crate::core::spec::Isolation;
use crate::rpc::convert::teleport::{read_handover, read_report};
use crate::rpc::convert::{read_data, read_text, write_pairs, write_text_list};
use crate::rpc::schema::ryokan_capnp as wire;

/// Receives the progress of a move: the phase, the bytes sent, and those that the other host had.
struct Sink<F>(F);

impl<F: Fn(&str, u64, u64) + 'static> wire::teleport_sink::Server for Sink<F> {
    async fn progress(self: Rc<Self>, params: wire::teleport_sink::ProgressParams) -> capnp::Result<()> {
        let params = params.get()?;
        if let Ok(phase) = read_text(params.get_phase(), "phase") {
            (self.0)(&phase, params.get_sent_bytes(), params.get_reused_bytes());
        }
        Ok(())
    }
}

/// The receiving end of the handover protocol at a daemon, as a byte stream.
#[derive(Clone)]
pub struct HandoverPipe {
    cap: wire::handover_stream::Client,
    link: Rc<Link>,
}

impl HandoverPipe {
    /// Sends bytes of the source; none: its stream has ended. They are sent now, in the order of the calls; the result
    /// waits for the daemon.
    ///
    /// # Errors
    /// `unavailable` once the daemon has ended the handover.
    pub fn write(&self, data: &[u8]) -> impl Future<Output = Result<()>> + use<> {
        let mut request = self.cap.write_request();
        request.get().set_data(data);
        let (sent, link) = (request.send().promise, self.link.clone());
        async move { link.wait(sent).await.map(drop) }
    }

    /// Waits for bytes of the daemon; none: its stream has ended. They are requested now; several calls get them in turn.
    ///
    /// # Errors
    /// The daemon's errors.
    pub fn read(&self) -> impl Future<Output = Result<Vec<u8>>> + use<> {
        let (sent, link) = (self.cap.read_request().send().promise, self.link.clone());
        async move {
            let response = link.wait(sent).await?;
            answer(read_data(fields(response.get())?.get_data(), "data", limits::CHUNK_BYTES))
        }
    }
}

impl HostClient {
    /// Moves a kernel to another host.
    ///
    /// # Errors
    /// Refusals of both hosts; the kernel continues here then.
    pub async fn teleport(
        &self,
        kernel: &str,
        to: &str,
        options: MoveOptions,
        progress: impl Fn(&str, u64, u64) + 'static,
    ) -> Result<TeleportReport> {
        self.teleport_to(kernel, to, (options, &[]), progress).await
    }

    /// As [`Self::teleport`], also of a group, with the places of its members on the other host.
    ///
    /// # Errors
    /// As [`Self::teleport`].
    pub async fn teleport_to(
        &self,
        kernel: &str,
        to: &str,
        (options, places): (MoveOptions, &[(String, String)]),
        progress: impl Fn(&str, u64, u64) + 'static,
    ) -> Result<TeleportReport> {
        let mut request = self.cap.teleport_request();
        let mut params = request.get();
        params.set_kernel(kernel);
        params.set_to(to);
        params.set_allow_missing(options.allow_missing == Allowed::All);
        let kinds: Vec<String> = options.allow_missing.names().into_iter().map(str::to_owned).collect();
        write_text_list(params.reborrow().init_missing(kinds.len() as u32), &kinds);
        params.set_kind(options.kind.name());
        params.set_limit_rate(options.limit_rate);
        params.set_isolation(options.isolation.map_or("", Isolation::name));
        params.set_since(options.since.as_deref().unwrap_or_default());
        params.set_key(&options.key);
        params.set_expected_version(options.expected_version);
        write_pairs(params.reborrow().init_places(places.len() as u32), places);
        params.set_sink(new_client(Sink(progress)));
        let response = self.link.wait(request.send().promise).await?;
        answer(read_report(fields(fields(response.get())?.get_report())?))
    }

    /// Cancels a move before its commit.
    ///
    /// # Errors
    /// `conflict` after it, `notFound`.
    pub async fn abort_teleport(&self, kernel: &str) -> Result<()> {
        let mut request = self.cap.abort_teleport_request();
        request.get().set_kernel(kernel);
        self.link.call(request.send().promise).await.map(drop)
    }

    /// Moves in progress, unacknowledged ones, and received kernels.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn handovers(&self) -> Result<Vec<HandoverInfo>> {
        let response = self.link.call(self.cap.handovers_request().send().promise).await?;
        let list = fields(fields(response.get())?.get_handovers())?;
        list.iter().map(|one| answer(read_handover(one))).collect()
    }

    /// Decides about a prepared kernel in place of its source.
    ///
    /// # Errors
    /// `notFound`, `conflict`.
    pub async fn resolve_handover(&self, id: HandoverId, live: bool) -> Result<()> {
        let mut request = self.cap.resolve_handover_request();
        request.get().set_id(id.to_string());
        request.get().set_live(live);
        self.link.wait(request.send().promise).await.map(drop)
    }

    /// Opens the receiving end of the handover protocol.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn handover_pipe(&self) -> Result<HandoverPipe> {
        let response = self.link.call(self.cap.handover_stream_request().send().promise).await?;
        Ok(HandoverPipe { cap: fields(fields(response.get())?.get_stream())?, link: self.link.clone() })
    }
}
