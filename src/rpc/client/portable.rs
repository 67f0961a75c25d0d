//! Kernels as files.

use std::rc::Rc;

use super::connection::{Link, answer, fields};
use super::host::HostClient;
use super::kernel::KernelClient;
use super::state::read_digest;
use crate::core::error::Result;
use crate::core::ids::Digest;
use crate::core::info::KernelInfo;
use crate::core::limits;
use crate::rpc::convert::{info, read_data};
use crate::rpc::schema::ryokan_capnp as wire;

/// A kernel's file, read in pieces. Dropped before its end, it is not written to its end.
pub struct BundleDownload {
    cap: wire::bundle_reader::Client,
    link: Rc<Link>,
    end: Option<(Digest, u64)>,
}

impl BundleDownload {
    /// The next piece; `None` at the end.
    ///
    /// # Errors
    /// The daemon's: what was read so far is no whole file.
    pub async fn next(&mut self) -> Result<Option<Vec<u8>>> {
        if self.end.is_some() {
            return Ok(None);
        }
        let response = self.link.wait(self.cap.read_request().send().promise).await?;
        let response = fields(response.get())?;
        if response.get_end() {
            self.end = Some((answer(read_digest(response.get_digest()))?, response.get_bytes()));
            return Ok(None);
        }
        answer(read_data(response.get_data(), "piece of a file", limits::CHUNK_BYTES)).map(Some)
    }

    /// Digest and length of the whole, once it was read to its end.
    pub fn end(&self) -> Option<(Digest, u64)> {
        self.end
    }
}

/// A kernel's file, given in pieces. Dropped without [`BundleUpload::finish`], nothing comes of it.
pub struct BundleUpload {
    cap: wire::bundle_writer::Client,
    link: Rc<Link>,
}

impl BundleUpload {
    /// Gives more of it; returns when the daemon is ready for more.
    ///
    /// # Errors
    /// The daemon's: what is wrong with the file.
    pub async fn write(&mut self, data: &[u8]) -> Result<()> {
        for chunk in data.chunks(limits::CHUNK_BYTES) {
            let mut request = self.cap.write_request();
            request.get().set_data(chunk);
            self.link.wait(request.send()).await?;
        }
        Ok(())
    }

    /// Makes a kernel of it.
    ///
    /// # Errors
    /// The daemon's; nothing is visible then.
    pub async fn finish(self) -> Result<(KernelClient, KernelInfo)> {
        let response = self.link.wait(self.cap.finish_request().send().promise).await?;
        let response = fields(response.get())?;
        let (info, _) = answer(info::read_kernel_info(fields(response.get_info())?))?;
        Ok((KernelClient::new(fields(response.get_kernel())?, self.link.clone()), info))
    }
}

impl KernelClient {
    /// Writes the kernel and these of its checkpoints as a file; none named: all, and a new one of what is now.
    ///
    /// # Errors
    /// The daemon's.
    pub async fn export(&self, references: &[String]) -> Result<BundleDownload> {
        let mut request = self.cap.export_request();
        let mut list = request.get().init_refs(references.len() as u32);
        for (i, reference) in references.iter().enumerate() {
            list.set(i as u32, reference);
        }
        let response = self.link.wait(request.send().promise).await?;
        let cap = fields(fields(response.get())?.get_file())?;
        Ok(BundleDownload { cap, link: self.link.clone(), end: None })
    }
}

impl HostClient {
    /// Begins to make a kernel of a file; `name` empty: as it was called. `without_host`: without mounts, paths and MCP servers.
    ///
    /// # Errors
    /// The daemon's.
    pub async fn import_kernel(&self, name: &str, without_host: bool) -> Result<BundleUpload> {
        let mut request = self.cap.import_kernel_request();
        request.get().set_name(name);
        request.get().set_without_host(without_host);
        let response = self.link.call(request.send().promise).await?;
        Ok(BundleUpload { cap: fields(fields(response.get())?.get_file())?, link: self.link.clone() })
    }
}
