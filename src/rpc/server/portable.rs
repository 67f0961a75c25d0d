//! Export and import of kernels and groups, in chunks at the client's pace.

use std::rc::Rc;

use capnp_rpc::new_client;
use tokio::sync::Mutex;

use super::Connection;
use super::groups::{freeze_info, group_info};
use super::kernel::KernelServer;
use crate::core::error::{Error, Result};
use crate::core::freeze::lock::Lock;
use crate::core::freeze::portable::{GroupArrival, PackedGroup, former_place};
use crate::core::freeze::{Freeze, FreezeInfo, MemberInfo, Part};
use crate::core::limits;
use crate::core::rights::Rights;
use crate::core::signature::UNTRUSTED_SEALER;
use crate::rpc::convert::groups::{write_freeze, write_group, write_packed_group};
use crate::rpc::convert::info::write_kernel_info;
use crate::rpc::convert::listing::{read_host_resources, write_host_resources};
use crate::rpc::convert::provenance::write_signer;
use crate::rpc::convert::{read_data, read_pairs, read_text_list, to_capnp, write_text_list};
use crate::rpc::schema::ryokan_capnp::{bundle_reader, bundle_writer, host_resource, kernel};
use crate::supervisor::freeze;
use crate::supervisor::kernel::command::Actor;
use crate::supervisor::registry::bundle_io::{self, Export, Import, Imported};

impl KernelServer {
    pub(super) async fn export_file(
        &self,
        params: kernel::ExportParams,
        mut results: kernel::ExportResults,
    ) -> capnp::Result<()> {
        let references = read_text_list(params.get()?.get_refs(), "checkpoints", limits::BUNDLE_CHECKPOINTS);
        let references = references.map_err(to_capnp)?;
        let export = bundle_io::export(&self.connection.supervisor, &self.kernel, &references, &self.actor)
            .await
            .map_err(to_capnp)?;
        results.get().set_file(new_client(BundleReaderServer::new(export)));
        Ok(())
    }
}

/// A file being exported.
pub(super) struct BundleReaderServer {
    /// One call reads at a time; others wait.
    export: Mutex<Export>,
}

impl BundleReaderServer {
    pub(super) fn new(export: Export) -> BundleReaderServer {
        BundleReaderServer { export: Mutex::new(export) }
    }
}

impl bundle_reader::Server for BundleReaderServer {
    async fn read(
        self: Rc<Self>,
        _params: bundle_reader::ReadParams,
        mut results: bundle_reader::ReadResults,
    ) -> capnp::Result<()> {
        let mut export = self.export.lock().await;
        let mut results = results.get();
        if let Some(piece) = export.pieces.recv().await {
            results.set_data(&piece);
            return Ok(());
        }
        let over = || Error::conflict("this file was read to its end");
        let done = export.done.take().ok_or_else(|| to_capnp(over()))?;
        let (digest, bytes) = done.await.unwrap_or_else(|_| Err(over())).map_err(to_capnp)?;
        results.set_end(true);
        results.set_digest(digest.to_string());
        results.set_bytes(bytes);
        Ok(())
    }
}

/// A file being imported.
pub(super) struct BundleWriterServer {
    pub connection: Rc<Connection>,
    pub actor: Actor,
    pub name: String,
    pub without_host: bool,
    /// One call writes at a time; others wait.
    pub import: Mutex<Option<Import>>,
}

impl bundle_writer::Server for BundleWriterServer {
    async fn write(self: Rc<Self>, params: bundle_writer::WriteParams) -> capnp::Result<()> {
        let data = read_data(params.get()?.get_data(), "data", limits::CHUNK_BYTES).map_err(to_capnp)?;
        match &mut *self.import.lock().await {
            Some(import) => self.audited(import.write(data).await).await,
            None => Err(to_capnp(over())),
        }
    }

    async fn finish(
        self: Rc<Self>,
        params: bundle_writer::FinishParams,
        mut results: bundle_writer::FinishResults,
    ) -> capnp::Result<()> {
        let supervisor = &self.connection.supervisor;
        let imported = match self.create(params.get()?.get_grant()).await {
            Ok(imported) => imported,
            Err(error) => {
                supervisor.host().audit_refusal(&self.actor, "kernel.import", None, &error).await;
                return Err(to_capnp(error));
            }
        };
        let made = &imported.kernel;
        let mut results = results.get();
        write_kernel_info(results.reborrow().init_info(), &made.info_without_usage(), Rights::ALL).map_err(to_capnp)?;
        results.set_kernel(self.connection.kernel_client(made, Rights::ALL, self.actor.clone()));
        let granted = results.reborrow().init_granted(imported.granted.len() as u32);
        write_host_resources(granted, &imported.granted);
        write_host_resources(results.init_withheld(imported.withheld.len() as u32), &imported.withheld);
        Ok(())
    }

    async fn review(
        self: Rc<Self>,
        _params: bundle_writer::ReviewParams,
        mut results: bundle_writer::ReviewResults,
    ) -> capnp::Result<()> {
        let mut import = self.import.lock().await;
        let import = import.as_mut().ok_or_else(|| to_capnp(over()))?;
        let supervisor = &self.connection.supervisor;
        let review = self.audited(import.review(supervisor, &self.actor).await).await?;
        let requested = &review.requested;
        write_host_resources(results.get().init_requested(requested.len() as u32), requested);
        write_signer(results.get().init_signer(), &review.signer);
        if review.is_group {
            let group = freeze::arriving(supervisor, import, &self.actor).await.map_err(to_capnp)?;
            write_packed_group(results.get().init_group(), &packed_group(group));
        }
        Ok(())
    }

    async fn finish_group(
        self: Rc<Self>,
        params: bundle_writer::FinishGroupParams,
        mut results: bundle_writer::FinishGroupResults,
    ) -> capnp::Result<()> {
        let supervisor = &self.connection.supervisor;
        let arrived = match self.create_group(params.get()?).await {
            Ok(arrived) => arrived,
            Err(error) => {
                supervisor.host().audit_refusal(&self.actor, "group.import", None, &error).await;
                return Err(to_capnp(error));
            }
        };
        let freeze::Arrived { group, freeze, left_out, granted, withheld } = arrived;
        let info = freeze_info(supervisor, &group.name, &freeze, group.head).await.map_err(to_capnp)?;
        let mut results = results.get();
        write_group(results.reborrow().init_group(), &group_info(supervisor, self.actor.uid, &group));
        write_freeze(results.reborrow().init_freeze(), &info);
        write_text_list(results.reborrow().init_left_out(left_out.len() as u32), &left_out);
        write_host_resources(results.reborrow().init_granted(granted.len() as u32), &granted);
        write_host_resources(results.init_withheld(withheld.len() as u32), &withheld);
        Ok(())
    }
}

impl BundleWriterServer {
    /// Records the refusal of a group by its seal, which comes before the client names what it wants.
    async fn audited<T>(&self, done: Result<T>) -> capnp::Result<T> {
        if let Err(error) = &done
            && error.reason == UNTRUSTED_SEALER
        {
            self.connection.supervisor.host().audit_refusal(&self.actor, "group.import", None, error).await;
        }
        done.map_err(to_capnp)
    }

    async fn create(
        &self,
        grant: capnp::Result<capnp::struct_list::Reader<'_, host_resource::Owned>>,
    ) -> Result<Imported> {
        let granted = read_host_resources(grant)?;
        if self.without_host && !granted.is_empty() {
            return Err(Error::invalid("the import began without resources of the host").reason("grant"));
        }
        let import = self.import.lock().await.take().ok_or_else(over)?;
        let name = (!self.name.is_empty()).then_some(self.name.as_str());
        import.finish(&self.connection.supervisor, name, granted, &self.actor).await
    }
}

impl BundleWriterServer {
    async fn create_group(&self, params: bundle_writer::finish_group_params::Reader<'_>) -> Result<freeze::Arrived> {
        let places = read_pairs(params.get_places(), "places", limits::GROUP_MEMBERS)?;
        let left_out = read_text_list(params.get_left_out(), "members", limits::GROUP_MEMBERS)?;
        let granted = read_host_resources(params.get_grant())?;
        let mut held = self.import.lock().await;
        let import = held.as_mut().ok_or_else(over)?;
        import.review(&self.connection.supervisor, &self.actor).await?;
        let arriving = freeze::arriving(&self.connection.supervisor, import, &self.actor).await?;
        let is_kernel = |name: &str| {
            arriving.manifest.parts.iter().any(|part| part.name == name && part.captured.kind() == "kernel")
        };
        if self.without_host && (!granted.is_empty() || places.iter().any(|(name, _)| !is_kernel(name))) {
            return Err(Error::invalid("the import began without resources of the host").reason("grant"));
        }
        let import = held.take().ok_or_else(over)?;
        let arrival = GroupArrival { name: self.name.clone(), places, left_out, granted, moved: false };
        freeze::import(&self.connection.supervisor, import, arrival, &self.actor).await
    }
}

/// The group of a file, with its lock.
fn packed_group(group: freeze::ArrivingGroup) -> PackedGroup {
    let freeze::ArrivingGroup { freeze, manifest, sealer } = group;
    let name = manifest.group_name.clone();
    let lock = Lock { configuration: manifest.configuration, ..Lock::of_group(&name, &manifest.parts) }.text();
    let member = |part: &Part| MemberInfo {
        name: part.name.clone(),
        kind: part.captured.kind().into(),
        target: former_place(&part.captured).to_owned(),
    };
    let Freeze { id, number, message, kind, creator, at_ms, .. } = freeze;
    let (id, restored_at_ms, is_head, cost, notes) = (id.to_string(), 0, false, None, Vec::new());
    PackedGroup {
        name,
        members: manifest.parts.iter().map(member).collect(),
        freeze: FreezeInfo { id, number, message, kind, creator, at_ms, restored_at_ms, is_head, lock, cost, notes },
        sealer,
    }
}

fn over() -> Error {
    Error::conflict("this import is over")
}
