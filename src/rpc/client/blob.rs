//! Chunked transfer of blobs that exceed one message.

use std::rc::Rc;

use super::connection::{Link, answer, fields};
use super::state::read_digest;
use crate::core::error::Result;
use crate::core::ids::Digest;
use crate::core::limits;
use crate::rpc::convert::read_data;
use crate::rpc::schema::ryokan_capnp as wire;

/// Reads a blob in chunks.
pub struct BlobDownload {
    cap: wire::blob_reader::Client,
    link: Rc<Link>,
    size: u64,
    read: u64,
}

impl BlobDownload {
    pub(super) async fn new(cap: wire::blob_reader::Client, link: Rc<Link>) -> Result<Self> {
        let response = link.call(cap.size_request().send().promise).await?;
        let size = fields(response.get())?.get_bytes();
        Ok(BlobDownload { cap, link, size, read: 0 })
    }

    /// Length in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The next chunk, at most [`limits::CHUNK_BYTES`]; `None` at the end.
    ///
    /// # Errors
    /// `corrupt`, and the daemon's errors.
    pub async fn next(&mut self) -> Result<Option<Vec<u8>>> {
        if self.read >= self.size {
            return Ok(None);
        }
        let mut request = self.cap.read_request();
        request.get().set_from(self.read);
        request.get().set_max_bytes(limits::CHUNK_BYTES as u32);
        let response = self.link.call(request.send().promise).await?;
        let part = answer(read_data(fields(response.get())?.get_data(), "part of a blob", limits::CHUNK_BYTES))?;
        self.read += part.len() as u64;
        Ok((!part.is_empty()).then_some(part))
    }
}

/// Writes a blob in chunks. Without [`BlobUpload::finish`] nothing is stored.
pub struct BlobUpload {
    cap: wire::blob_writer::Client,
    link: Rc<Link>,
}

impl BlobUpload {
    pub(super) fn new(cap: wire::blob_writer::Client, link: Rc<Link>) -> Self {
        BlobUpload { cap, link }
    }

    /// Appends data; returns when the daemon is ready for more.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn write(&mut self, data: &[u8]) -> Result<()> {
        for chunk in data.chunks(limits::CHUNK_BYTES) {
            let mut request = self.cap.write_request();
            request.get().set_data(chunk);
            self.link.call(request.send()).await?;
        }
        Ok(())
    }

    /// Seals the blob and returns its hash and length.
    ///
    /// # Errors
    /// The daemon's errors, also those of earlier writes.
    pub async fn finish(self) -> Result<(Digest, u64)> {
        let response = self.link.call(self.cap.finish_request().send().promise).await?;
        let response = fields(response.get())?;
        Ok((answer(read_digest(response.get_hash()))?, response.get_bytes()))
    }
}
