//! Moves of kernels between hosts.

use std::cell::Cell;
use std::rc::Rc;

use capnp_rpc::new_client;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, ReadHalf, WriteHalf};
use tokio::sync::Mutex;

use super::host::HostServer;
use crate::core::error::Error;
use crate::core::handover::{Allowed, MoveOptions};
use crate::core::limits;
use crate::core::snapshot::KindRequest;
use crate::rpc::convert::spec::read_optional_isolation;
use crate::rpc::convert::teleport::{write_handovers, write_report};
use crate::rpc::convert::{read_data, read_name, read_pairs, read_text, read_text_list, to_capnp};
use crate::rpc::schema::ryokan_capnp::{handover_stream, host, teleport_sink};
use crate::supervisor::freeze;
use crate::supervisor::registry::teleport::{self, Sent};

impl HostServer {
    pub(super) async fn move_kernel(
        &self,
        params: host::TeleportParams,
        mut results: host::TeleportResults,
    ) -> capnp::Result<()> {
        let actor = self.actor().map_err(to_capnp)?;
        let params = params.get()?;
        let name = read_name(params.get_kernel(), "kernel").map_err(to_capnp)?;
        let to = read_text(params.get_to(), "to").map_err(to_capnp)?;
        let supervisor = &self.connection.supervisor;
        let kernel = match supervisor.find(actor.uid, &name) {
            Err(_) if freeze::exists(supervisor, actor.uid, &name).await => None,
            found => Some(found.map_err(to_capnp)?),
        };
        let kind = read_text(params.get_kind(), "kind").map_err(to_capnp)?;
        let kind = KindRequest::for_move(&kind).map_err(|rule| to_capnp(rule.into()))?;
        let isolation = read_optional_isolation(params.get_isolation()).map_err(to_capnp)?;
        let limit_rate = params.get_limit_rate();
        let kinds = read_text_list(params.get_missing(), "missing", limits::VALUE_ITEMS).map_err(to_capnp)?;
        let kinds = kinds.iter().map(String::as_str);
        let allow_missing = Allowed::named(params.get_allow_missing(), kinds).map_err(to_capnp)?;
        let since = read_text(params.get_since(), "since").map_err(to_capnp)?;
        let since = (!since.is_empty()).then_some(since);
        let (key, expected_version) =
            (read_text(params.get_key(), "key").map_err(to_capnp)?, params.get_expected_version());
        let options = MoveOptions { allow_missing, kind, limit_rate, isolation, since, key, expected_version };
        let sink = params.get_sink()?;
        let is_reporting = Rc::new(Cell::new(false));
        let progress = move |phase: &'static str, sent| report(&sink, &is_reporting, phase, sent);
        let places = read_pairs(params.get_places(), "places", limits::GROUP_MEMBERS).map_err(to_capnp)?;
        let moved = match kernel {
            Some(_) if !places.is_empty() => {
                Err(Error::invalid(format!("{name} is a kernel, and only members of a group have places")))
            }
            Some(kernel) => teleport::teleport(supervisor, &kernel, &to, options, &actor, Box::new(progress)).await,
            None => freeze::teleport(supervisor, &name, &to, (options, places), &actor, Rc::new(progress)).await,
        };
        write_report(results.get().init_report(), &moved.map_err(to_capnp)?);
        Ok(())
    }

    pub(super) async fn abort_move(&self, params: host::AbortTeleportParams) -> capnp::Result<()> {
        let actor = self.actor().map_err(to_capnp)?;
        let name = read_name(params.get()?.get_kernel(), "kernel").map_err(to_capnp)?;
        let supervisor = &self.connection.supervisor;
        if let Ok(group) = freeze::find(supervisor, actor.uid, &name).await {
            return supervisor.abort_group_teleport(group.id, &name).await.map_err(to_capnp);
        }
        let kernel = supervisor.find(actor.uid, &name).map_err(to_capnp)?;
        supervisor.abort_teleport(&kernel).await.map_err(to_capnp)
    }

    pub(super) async fn list_handovers(&self, mut results: host::HandoversResults) -> capnp::Result<()> {
        let actor = self.actor().map_err(to_capnp)?;
        let found = self.connection.supervisor.handovers(actor.uid).await.map_err(to_capnp)?;
        write_handovers(results.get().init_handovers(found.len() as u32), &found);
        Ok(())
    }

    pub(super) async fn resolve(&self, params: host::ResolveHandoverParams) -> capnp::Result<()> {
        let actor = self.actor().map_err(to_capnp)?;
        let params = params.get()?;
        let id = read_text(params.get_id(), "id").map_err(to_capnp)?;
        let id =
            id.parse().map_err(|error: crate::core::ids::ParseIdError| to_capnp(Error::invalid(error.to_string())))?;
        let resolved = self.connection.supervisor.resolve_handover(id, params.get_live(), &actor).await;
        resolved.map_err(to_capnp)
    }

    pub(super) fn open_stream(&self, mut results: host::HandoverStreamResults) -> capnp::Result<()> {
        let actor = self.actor().map_err(to_capnp)?;
        let (ours, theirs) = tokio::io::duplex(limits::HANDOVER_PIECE_BYTES);
        let supervisor = self.connection.supervisor.clone();
        tokio::task::spawn_local(async move {
            let (read, write) = tokio::io::split(ours);
            // The error is logged there; the source learns it from the stream.
            let _ = teleport::serve(&supervisor, actor, read, write).await;
        });
        let (read, write) = tokio::io::split(theirs);
        let server = StreamServer { read: Mutex::new(read), write: Mutex::new(Some(write)) };
        results.get().set_stream(new_client(server));
        Ok(())
    }
}

/// Sends progress without waiting for the client: a slow one sees less of it.
fn report(sink: &teleport_sink::Client, is_reporting: &Rc<Cell<bool>>, phase: &str, sent: Sent) {
    if is_reporting.replace(true) {
        return;
    }
    let is_reporting = Rc::clone(is_reporting);
    let mut request = sink.progress_request();
    request.get().set_phase(phase);
    request.get().set_sent_bytes(sent.wire_bytes);
    request.get().set_reused_bytes(sent.reused_bytes);
    tokio::task::spawn_local(async move {
        let _ = request.send().await;
        is_reporting.set(false);
    });
}

/// The receiving end of a handover as a byte stream. Calls in flight take the locks in their order.
struct StreamServer {
    read: Mutex<ReadHalf<DuplexStream>>,
    write: Mutex<Option<WriteHalf<DuplexStream>>>,
}

impl handover_stream::Server for StreamServer {
    async fn write(
        self: Rc<Self>,
        params: handover_stream::WriteParams,
        _results: handover_stream::WriteResults,
    ) -> capnp::Result<()> {
        let data = read_data(params.get()?.get_data(), "data", limits::CHUNK_BYTES).map_err(to_capnp)?;
        let mut write = self.write.lock().await;
        let closed = || to_capnp(Error::unavailable("the handover has ended"));
        match (&mut *write, data.is_empty()) {
            (Some(stream), false) => stream.write_all(&data).await.map_err(|_| closed()),
            (Some(stream), true) => {
                // The receiver may have closed it before.
                let _ = stream.shutdown().await;
                *write = None;
                Ok(())
            }
            (None, _) => Err(closed()),
        }
    }

    async fn read(
        self: Rc<Self>,
        _params: handover_stream::ReadParams,
        mut results: handover_stream::ReadResults,
    ) -> capnp::Result<()> {
        let mut read = self.read.lock().await;
        let mut data = vec![0; limits::HANDOVER_PIECE_BYTES];
        let count = read.read(&mut data).await.unwrap_or(0);
        results.get().set_data(&data[..count]);
        Ok(())
    }
}
