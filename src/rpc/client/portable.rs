//! Export and import of kernels and groups as files.

use std::rc::Rc;

use super::connection::{Link, answer, fields};
use super::host::HostClient;
use super::kernel::KernelClient;
use super::state::read_digest;
use crate::core::error::{Error, Result};
use crate::core::freeze::portable::{GroupArrival, ImportedGroup, PackedGroup};
use crate::core::host_resource::HostResource;
use crate::core::ids::Digest;
use crate::core::info::KernelInfo;
use crate::core::limits;
use crate::core::signature::Signer;
use crate::rpc::convert::groups::{read_freeze, read_group, read_packed_group};
use crate::rpc::convert::listing::{read_host_resources, write_host_resources};
use crate::rpc::convert::provenance::read_signer;
use crate::rpc::convert::{info, read_data, read_text_list, write_pairs, write_text_list};
use crate::rpc::schema::ryokan_capnp as wire;

/// Reads a kernel's file in chunks. Dropping it early ends the export.
pub struct BundleDownload {
    cap: wire::bundle_reader::Client,
    link: Rc<Link>,
    end: Option<(Digest, u64)>,
}

impl BundleDownload {
    /// The next chunk; `None` at the end.
    ///
    /// # Errors
    /// The daemon's errors; the chunks read so far are then not a valid file.
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

    /// Digest and length of the whole file, once it was read to its end.
    pub fn end(&self) -> Option<(Digest, u64)> {
        self.end
    }
}

/// Writes a kernel's file in chunks. Without [`BundleUpload::finish`] no kernel is created.
pub struct BundleUpload {
    cap: wire::bundle_writer::Client,
    link: Rc<Link>,
}

impl BundleUpload {
    /// Sends more of the file; returns when the daemon is ready for more.
    ///
    /// # Errors
    /// The daemon's errors, among them defects of the file.
    pub async fn write(&mut self, data: &[u8]) -> Result<()> {
        for chunk in data.chunks(limits::CHUNK_BYTES) {
            let mut request = self.cap.write_request();
            request.get().set_data(chunk);
            self.link.wait(request.send()).await?;
        }
        Ok(())
    }

    /// Ends the file and returns what it requests of the host, and who signed it.
    ///
    /// # Errors
    /// The daemon's errors, among them defects of the file.
    pub async fn review(&self) -> Result<BundleReview> {
        let response = self.link.wait(self.cap.review_request().send().promise).await?;
        let response = fields(response.get())?;
        Ok(BundleReview {
            requested: answer(read_host_resources(response.get_requested()))?,
            signer: answer(read_signer(fields(response.get_signer())?))?,
            group: match response.has_group() {
                true => Some(answer(read_packed_group(fields(response.get_group())?))?),
                false => None,
            },
        })
    }

    /// Creates the group from the file, with the granted resources of the host. The name is that of the import.
    ///
    /// # Errors
    /// The daemon's errors; nothing is visible then.
    pub async fn finish_group(self, arrival: &GroupArrival) -> Result<ImportedGroup> {
        let mut request = self.cap.finish_group_request();
        let length = |length: usize| u32::try_from(length).map_err(|_| Error::invalid("too many members"));
        write_pairs(request.get().init_places(length(arrival.places.len())?), &arrival.places);
        write_text_list(request.get().init_left_out(length(arrival.left_out.len())?), &arrival.left_out);
        write_host_resources(request.get().init_grant(length(arrival.granted.len())?), &arrival.granted);
        let response = self.link.wait(request.send().promise).await?;
        let response = fields(response.get())?;
        Ok(ImportedGroup {
            group: answer(read_group(fields(response.get_group())?))?,
            freeze: answer(read_freeze(fields(response.get_freeze())?))?,
            left_out: answer(read_text_list(response.get_left_out(), "members", limits::VALUE_ITEMS))?,
            granted: answer(read_host_resources(response.get_granted()))?,
            withheld: answer(read_host_resources(response.get_withheld()))?,
        })
    }

    /// Creates the kernel from the file, with the granted resources of the host.
    ///
    /// # Errors
    /// The daemon's errors; nothing is visible then.
    pub async fn finish(self, grant: &[HostResource]) -> Result<ImportedKernel> {
        let mut request = self.cap.finish_request();
        write_host_resources(request.get().init_grant(grant.len() as u32), grant);
        let response = self.link.wait(request.send().promise).await?;
        let response = fields(response.get())?;
        let (info, _) = answer(info::read_kernel_info(fields(response.get_info())?))?;
        Ok(ImportedKernel {
            kernel: KernelClient::new(fields(response.get_kernel())?, self.link.clone()),
            info,
            granted: answer(read_host_resources(response.get_granted()))?,
            withheld: answer(read_host_resources(response.get_withheld()))?,
        })
    }
}

/// What a file requests, and who signed it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BundleReview {
    /// The resources of the host that it requests.
    pub requested: Vec<HostResource>,
    /// Its signer.
    pub signer: Signer,
    /// Its group; `None`: it is a kernel's.
    pub group: Option<PackedGroup>,
}

/// A kernel created from a file.
pub struct ImportedKernel {
    /// The kernel.
    pub kernel: KernelClient,
    /// Its description.
    pub info: KernelInfo,
    /// The resources of the host that it has.
    pub granted: Vec<HostResource>,
    /// The resources that the file requests and the kernel does not have.
    pub withheld: Vec<HostResource>,
}

impl KernelClient {
    /// Exports the kernel and the given checkpoints as a file.
    ///
    /// Without references: all checkpoints and a new one of the present state.
    ///
    /// # Errors
    /// The daemon's errors.
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
    /// Exports a freeze of a group as a file; with an empty `reference` the newest that a client took.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn export_group(&self, group: &str, reference: &str) -> Result<BundleDownload> {
        let mut request = self.groups_cap().await?.export_request();
        request.get().set_group(group);
        request.get().set_ref(reference);
        let response = self.link.wait(request.send().promise).await?;
        let cap = fields(fields(response.get())?.get_file())?;
        Ok(BundleDownload { cap, link: self.link.clone(), end: None })
    }

    /// Starts to create a kernel from a file.
    ///
    /// `name` empty: the name in the file.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn import_kernel(&self, name: &str) -> Result<BundleUpload> {
        let mut request = self.cap.import_kernel_request();
        request.get().set_name(name);
        let response = self.link.call(request.send().promise).await?;
        Ok(BundleUpload { cap: fields(fields(response.get())?.get_file())?, link: self.link.clone() })
    }
}
