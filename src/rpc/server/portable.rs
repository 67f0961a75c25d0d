//! Export and import of kernels, in chunks at the client's pace.

use std::rc::Rc;

use capnp_rpc::new_client;
use tokio::sync::Mutex;

use super::Connection;
use super::kernel::KernelServer;
use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::core::rights::Rights;
use crate::rpc::convert::info::write_kernel_info;
use crate::rpc::convert::listing::{read_host_resources, write_host_resources};
use crate::rpc::convert::provenance::write_signer;
use crate::rpc::convert::{read_data, read_text_list, to_capnp};
use crate::rpc::schema::ryokan_capnp::{bundle_reader, bundle_writer, host_resource, kernel};
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
        results.get().set_file(new_client(BundleReaderServer { export: Mutex::new(export) }));
        Ok(())
    }
}

/// A file being exported.
struct BundleReaderServer {
    /// One call reads at a time; others wait.
    export: Mutex<Export>,
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
            Some(import) => import.write(data).await.map_err(to_capnp),
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
        let review = import.review(&self.connection.supervisor, &self.actor).await.map_err(to_capnp)?;
        let requested = &review.requested;
        write_host_resources(results.get().init_requested(requested.len() as u32), requested);
        write_signer(results.get().init_signer(), &review.signer);
        Ok(())
    }
}

impl BundleWriterServer {
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

fn over() -> Error {
    Error::conflict("this import is over")
}
