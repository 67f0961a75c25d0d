//! `Files`: reads and changes of a kernel's files, in chunks at the client's pace.

use std::rc::Rc;

use capnp_rpc::new_client;
use tokio::sync::Mutex;

use super::kernel::KernelServer;
use crate::core::error::Result;
use crate::core::files::{FileChange, FileEvent, FileEventKind, Placement, WhileHeld};
use crate::core::limits;
use crate::core::rights::Right;
use crate::rpc::convert::files::{read_attributes, read_path, write_file_event, write_file_info};
use crate::rpc::convert::{read_data, to_capnp};
use crate::rpc::schema::ryokan_capnp::{file_reader, file_writer, files};
use crate::supervisor::checkpoint::{ClientFile, ClientFiles, ClientWrite};

/// A client's capability for a kernel's files.
pub(super) struct FilesServer {
    kernel: Rc<KernelServer>,
    files: Rc<ClientFiles>,
}

impl FilesServer {
    pub(super) fn new(kernel: &Rc<KernelServer>, no_wait: bool) -> FilesServer {
        let held = if no_wait { WhileHeld::Refuse } else { WhileHeld::Wait };
        let files = ClientFiles::new(kernel.host(), &kernel.kernel, kernel.actor.clone(), held);
        FilesServer { kernel: Rc::clone(kernel), files }
    }

    /// Applies a change; refusals are audited.
    async fn change(&self, change: Result<FileChange>, expected_version: u64) -> capnp::Result<()> {
        let changing = async { self.files.change(change?, expected_version).await };
        let changing = async { changing.await.map_err(to_capnp) };
        self.kernel.audited("kernel.files", Right::Write, changing).await
    }

    async fn begin(&self, params: files::WriteParams, mut results: files::WriteResults) -> capnp::Result<()> {
        let params = params.get()?;
        let place = Placement {
            path: read_path(params.get_path()).map_err(to_capnp)?,
            attributes: read_attributes(params.get_attributes()?).map_err(to_capnp)?,
            parents: params.get_parents(),
        };
        let write = self.files.begin_write(place, params.get_expected_version()).await.map_err(to_capnp)?;
        results.get().set_file(new_client(FileWriterServer(Mutex::new(write))));
        Ok(())
    }
}

impl files::Server for FilesServer {
    async fn stat(self: Rc<Self>, params: files::StatParams, mut results: files::StatResults) -> capnp::Result<()> {
        self.kernel.may(Right::Read)?;
        let params = params.get()?;
        let path = read_path(params.get_path()).map_err(to_capnp)?;
        let info = self.files.stat(path, params.get_follow()).await.map_err(to_capnp)?;
        write_file_info(results.get().init_info(), &info);
        Ok(())
    }

    async fn list(self: Rc<Self>, params: files::ListParams, _results: files::ListResults) -> capnp::Result<()> {
        self.kernel.may(Right::Read)?;
        let params = params.get()?;
        let (path, sink) = (read_path(params.get_path()).map_err(to_capnp)?, params.get_sink()?);
        let mut listing = self.files.list(path).await.map_err(to_capnp)?;
        loop {
            let page = listing.next_page().await.map_err(to_capnp)?;
            if page.is_empty() {
                return Ok(());
            }
            for info in &page {
                let mut request = sink.next_request();
                write_file_info(request.get().init_info(), info);
                request.send().await?;
            }
        }
    }

    async fn open(self: Rc<Self>, params: files::OpenParams, mut results: files::OpenResults) -> capnp::Result<()> {
        self.kernel.may(Right::Read)?;
        let path = read_path(params.get()?.get_path()).map_err(to_capnp)?;
        let (file, info) = self.files.open(path).await.map_err(to_capnp)?;
        let mut results = results.get();
        results.set_file(new_client(FileReaderServer(file)));
        write_file_info(results.init_info(), &info);
        Ok(())
    }

    async fn watch(self: Rc<Self>, params: files::WatchParams, _results: files::WatchResults) -> capnp::Result<()> {
        self.kernel.may(Right::Read)?;
        let params = params.get()?;
        let (path, sink) = (read_path(params.get_path()).map_err(to_capnp)?, params.get_sink()?);
        let mut watched = self.files.watch(path, params.get_recursive()).await.map_err(to_capnp)?;
        let mut events = vec![FileEvent { kind: FileEventKind::Ready, path: Vec::new() }];
        loop {
            for event in &events {
                let mut request = sink.next_request();
                write_file_event(request.get().init_event(), event);
                request.send().await?;
            }
            if events.iter().any(|event| event.kind == FileEventKind::Ended) {
                return Ok(());
            }
            tokio::time::sleep(limits::FILE_EVENT_PAUSE).await;
            events = watched.watch.next().await.map_err(to_capnp)?;
        }
    }

    async fn write(self: Rc<Self>, params: files::WriteParams, results: files::WriteResults) -> capnp::Result<()> {
        self.kernel.audited("kernel.files", Right::Write, self.begin(params, results)).await
    }

    async fn make_dir(
        self: Rc<Self>,
        params: files::MakeDirParams,
        _results: files::MakeDirResults,
    ) -> capnp::Result<()> {
        let params = params.get()?;
        let (mode, parents) = (params.get_mode(), params.get_parents());
        let change = read_path(params.get_path()).map(|path| FileChange::MakeDir { path, mode, parents });
        self.change(change, params.get_expected_version()).await
    }

    async fn make_link(
        self: Rc<Self>,
        params: files::MakeLinkParams,
        _results: files::MakeLinkResults,
    ) -> capnp::Result<()> {
        let params = params.get()?;
        let modified = params.get_modified()?;
        let change = || {
            let (path, parents) = (read_path(params.get_path())?, params.get_parents());
            let at = Placement { path, attributes: read_attributes(modified)?, parents };
            let target = read_data(params.get_target(), "target of a link", limits::LINK_TARGET_BYTES)?;
            Ok(FileChange::MakeLink { at, target })
        };
        self.change(change(), params.get_expected_version()).await
    }

    async fn rename(self: Rc<Self>, params: files::RenameParams, _results: files::RenameResults) -> capnp::Result<()> {
        let params = params.get()?;
        let change = || {
            let (from, to) = (read_path(params.get_from())?, read_path(params.get_to())?);
            Ok(FileChange::Rename { from, to, replace: params.get_replace() })
        };
        self.change(change(), params.get_expected_version()).await
    }

    async fn remove(self: Rc<Self>, params: files::RemoveParams, _results: files::RemoveResults) -> capnp::Result<()> {
        let params = params.get()?;
        let recursive = params.get_recursive();
        let change = read_path(params.get_path()).map(|path| FileChange::Remove { path, recursive });
        self.change(change, params.get_expected_version()).await
    }

    async fn set_attributes(
        self: Rc<Self>,
        params: files::SetAttributesParams,
        _results: files::SetAttributesResults,
    ) -> capnp::Result<()> {
        let params = params.get()?;
        let attributes = params.get_attributes()?;
        let change = || {
            let path = read_path(params.get_path())?;
            Ok(FileChange::SetAttributes { path, attributes: read_attributes(attributes)? })
        };
        self.change(change(), params.get_expected_version()).await
    }
}

/// A file that a client reads.
struct FileReaderServer(ClientFile);

impl file_reader::Server for FileReaderServer {
    async fn read(
        self: Rc<Self>,
        params: file_reader::ReadParams,
        mut results: file_reader::ReadResults,
    ) -> capnp::Result<()> {
        let params = params.get()?;
        let most = match params.get_max_bytes() as usize {
            0 => limits::CHUNK_BYTES,
            asked => asked.min(limits::CHUNK_BYTES),
        };
        let data = self.0.file.read(params.get_from(), most).await.map_err(to_capnp)?;
        let mut results = results.get();
        results.set_end(data.len() < most);
        results.set_data(&data);
        Ok(())
    }
}

/// A file that a client writes. One call at a time; others wait.
struct FileWriterServer(Mutex<ClientWrite>);

impl file_writer::Server for FileWriterServer {
    async fn write(self: Rc<Self>, params: file_writer::WriteParams) -> capnp::Result<()> {
        let data = read_data(params.get()?.get_data(), "data", limits::CHUNK_BYTES).map_err(to_capnp)?;
        self.0.lock().await.write(data).await.map_err(to_capnp)
    }

    async fn finish(
        self: Rc<Self>,
        _params: file_writer::FinishParams,
        mut results: file_writer::FinishResults,
    ) -> capnp::Result<()> {
        let info = self.0.lock().await.finish().await.map_err(to_capnp)?;
        write_file_info(results.get().init_info(), &info);
        Ok(())
    }
}
