//! Export and import of kernels, in chunks at the client's pace.

use std::rc::Rc;

use capnp_rpc::new_client;
use tokio::sync::Mutex;

use super::Connection;
use super::kernel::KernelServer;
use crate::core::error::Error;
use crate::core::limits;
use crate::core::rights::Rights;
use crate::rpc::convert::info::write_kernel_info;
use crate::rpc::convert::{read_data, read_text_list, to_capnp};
use crate::rpc::schema::ryokan_capnp::{bundle_reader, bundle_writer, kernel};
use crate::supervisor::kernel::command::Actor;
use crate::supervisor::registry::bundle_io::{self, Export, Import};

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
            None => Err(to_capnp(Error::conflict("this import is over"))),
        }
    }

    async fn finish(
        self: Rc<Self>,
        _params: bundle_writer::FinishParams,
        mut results: bundle_writer::FinishResults,
    ) -> capnp::Result<()> {
        let import = self.import.lock().await.take();
        let import = import.ok_or_else(|| to_capnp(Error::conflict("this import is over")))?;
        let name = (!self.name.is_empty()).then_some(self.name.as_str());
        let supervisor = &self.connection.supervisor;
        let made = match import.finish(supervisor, name, self.without_host, &self.actor).await {
            Ok(made) => made,
            Err(error) => {
                supervisor.host().audit_refusal(&self.actor, "kernel.import", None, &error).await;
                return Err(to_capnp(error));
            }
        };
        let mut results = results.get();
        write_kernel_info(results.reborrow().init_info(), &made.info_without_usage(), Rights::ALL).map_err(to_capnp)?;
        results.set_kernel(self.connection.kernel_client(&made, Rights::ALL, self.actor.clone()));
        Ok(())
    }
}
