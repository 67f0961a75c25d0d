//! `BlobReader` and `BlobWriter`: blobs of any size in chunks.

use std::cell::RefCell;
use std::rc::Rc;

use crate::core::error::Error;
use crate::core::ids::Digest;
use crate::core::limits;
use crate::rpc::convert::{read_data, to_capnp};
use crate::rpc::schema::ryokan_capnp::{blob_reader, blob_writer};
use crate::store::{StoreHandle, Writer};
use crate::supervisor::kernel::Kernel;

/// Reads one blob that the kernel may read.
pub(super) struct BlobReaderServer {
    pub store: StoreHandle,
    pub digest: Digest,
    pub size: u64,
}

impl blob_reader::Server for BlobReaderServer {
    async fn size(
        self: Rc<Self>,
        _params: blob_reader::SizeParams,
        mut results: blob_reader::SizeResults,
    ) -> capnp::Result<()> {
        results.get().set_bytes(self.size);
        Ok(())
    }

    async fn read(
        self: Rc<Self>,
        params: blob_reader::ReadParams,
        mut results: blob_reader::ReadResults,
    ) -> capnp::Result<()> {
        let params = params.get()?;
        let from = params.get_from();
        let most = match params.get_max_bytes() as usize {
            0 => limits::CHUNK_BYTES,
            asked => asked.min(limits::CHUNK_BYTES),
        };
        let data = self.store.get_range(self.digest, from, most).await.map_err(|error| to_capnp(error.into()))?;
        let mut results = results.get();
        results.set_end(from.saturating_add(data.len() as u64) >= self.size);
        results.set_data(&data);
        Ok(())
    }
}

/// Writes one blob; without `finish` nothing is stored.
pub(super) struct BlobWriterServer {
    pub store: StoreHandle,
    pub kernel: Rc<Kernel>,
    pub writer: RefCell<Option<Writer>>,
}

impl BlobWriterServer {
    fn take(&self) -> capnp::Result<Writer> {
        let writer = self.writer.borrow_mut().take();
        writer.ok_or_else(|| {
            to_capnp(Error::conflict("this blob is finished, or failed, or is being written by another call"))
        })
    }
}

impl blob_writer::Server for BlobWriterServer {
    async fn write(self: Rc<Self>, params: blob_writer::WriteParams) -> capnp::Result<()> {
        let data = read_data(params.get()?.get_data(), "data", limits::CHUNK_BYTES).map_err(to_capnp)?;
        let writer = self.take()?;
        let writer = self.store.write(writer, data).await.map_err(|error| to_capnp(error.into()))?;
        *self.writer.borrow_mut() = Some(writer);
        Ok(())
    }

    async fn finish(
        self: Rc<Self>,
        _params: blob_writer::FinishParams,
        mut results: blob_writer::FinishResults,
    ) -> capnp::Result<()> {
        let writer = self.take()?;
        // Keeps garbage collection away until a row references the blob.
        let _held = self.store.run(|store| Ok(store.guard())).await.map_err(|error| to_capnp(error.into()))?;
        let (digest, bytes) = self.store.finish(writer).await.map_err(|error| to_capnp(error.into()))?;
        self.kernel.grant(digest, crate::sys::clock::now_ms()).await.map_err(to_capnp)?;
        let mut results = results.get();
        results.set_hash(digest.to_string());
        results.set_bytes(bytes);
        Ok(())
    }
}
