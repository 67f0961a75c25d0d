//! A kernel's files: read, written and listed in chunks.

use std::rc::Rc;

use super::connection::{Link, answer, fields};
use super::feed::feed;
use super::kernel::KernelClient;
use crate::core::error::Result;
use crate::core::files::{FileAttributes, FileEvent, FileInfo, WhileHeld};
use crate::core::limits;
use crate::rpc::convert::files::{read_file_info, write_attributes};
use crate::rpc::convert::read_data;
use crate::rpc::schema::ryokan_capnp as wire;

/// A capability for the files of one kernel.
#[derive(Clone)]
pub struct FilesClient {
    cap: wire::files::Client,
    link: Rc<Link>,
}

impl KernelClient {
    /// The kernel's files; calls wait while a transition has them.
    ///
    /// # Errors
    /// `refused` without the rights `read` and `write`.
    pub async fn files(&self) -> Result<FilesClient> {
        self.files_with(WhileHeld::Wait).await
    }

    /// The kernel's files, with a choice of what calls do during a transition.
    ///
    /// # Errors
    /// As [`Self::files`].
    pub async fn files_with(&self, held: WhileHeld) -> Result<FilesClient> {
        let mut request = self.cap.files_request();
        request.get().set_no_wait(held == WhileHeld::Refuse);
        let response = self.link.call(request.send().promise).await?;
        Ok(FilesClient { cap: fields(fields(response.get())?.get_files())?, link: self.link.clone() })
    }
}

impl FilesClient {
    /// The attributes of a file; with `follow`, of what a link leads to.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn stat(&self, path: &[u8], follow: bool) -> Result<FileInfo> {
        let mut request = self.cap.stat_request();
        request.get().set_path(path);
        request.get().set_follow(follow);
        let response = self.link.call(request.send().promise).await?;
        answer(read_file_info(fields(fields(response.get())?.get_info())?))
    }

    /// The entries of a directory, sorted by name.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn list(&self, path: &[u8]) -> Result<Vec<FileInfo>> {
        let (inlet, entries) = feed::<FileInfo>();
        let mut request = self.cap.list_request();
        request.get().set_path(path);
        request.get().set_sink(capnp_rpc::new_client(inlet));
        let call = request.send().promise;
        let mut found = Vec::new();
        let take = async |info| {
            found.push(info);
            Ok(())
        };
        entries.pump(&self.link, async { self.link.wait(call).await.map(drop) }, take).await?;
        found.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(found)
    }

    /// Watches a directory, with `recursive` also those below it. Each event goes to `take`. Returns after
    /// [`FileEventKind::Ended`](crate::core::files::FileEventKind::Ended); dropping the call ends the watch.
    ///
    /// # Errors
    /// The daemon's errors, and those of `take`.
    pub async fn watch(
        &self,
        path: &[u8],
        recursive: bool,
        take: impl AsyncFnMut(FileEvent) -> Result<()>,
    ) -> Result<()> {
        let (inlet, events) = feed::<FileEvent>();
        let mut request = self.cap.watch_request();
        request.get().set_path(path);
        request.get().set_recursive(recursive);
        request.get().set_sink(capnp_rpc::new_client(inlet));
        let call = request.send().promise;
        events.pump(&self.link, async { self.link.wait(call).await.map(drop) }, take).await
    }

    /// Opens a file for reading.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn open(&self, path: &[u8]) -> Result<FileDownload> {
        let mut request = self.cap.open_request();
        request.get().set_path(path);
        let response = self.link.call(request.send().promise).await?;
        let response = fields(response.get())?;
        let info = answer(read_file_info(fields(response.get_info())?))?;
        Ok(FileDownload { cap: fields(response.get_file())?, link: self.link.clone(), info, at: 0, ended: false })
    }

    /// Reads a whole file.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn read(&self, path: &[u8]) -> Result<Vec<u8>> {
        let mut download = self.open(path).await?;
        let mut whole = Vec::new();
        while let Some(part) = download.next().await? {
            whole.extend(part);
        }
        Ok(whole)
    }

    /// Begins to write a file; missing directories on the way are made.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn create(&self, path: &[u8], attributes: FileAttributes) -> Result<FileUpload> {
        let mut request = self.cap.write_request();
        request.get().set_path(path);
        write_attributes(request.get().init_attributes(), attributes);
        let response = self.link.wait(request.send().promise).await?;
        Ok(FileUpload { cap: fields(fields(response.get())?.get_file())?, link: self.link.clone() })
    }

    /// Writes a whole file.
    ///
    /// # Errors
    /// The daemon's errors; nothing has changed then.
    pub async fn write(&self, path: &[u8], data: &[u8]) -> Result<FileInfo> {
        let mut upload = self.create(path, FileAttributes::default()).await?;
        upload.write(data).await?;
        upload.finish().await
    }

    /// Makes a directory and those on the way to it.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn make_dir(&self, path: &[u8], mode: u32) -> Result<()> {
        let mut request = self.cap.make_dir_request();
        request.get().set_path(path);
        request.get().set_mode(mode);
        self.link.wait(request.send().promise).await.map(drop)
    }

    /// Makes a symbolic link, or replaces a file or link by it.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn make_link(&self, path: &[u8], target: &[u8], attributes: FileAttributes) -> Result<()> {
        let mut request = self.cap.make_link_request();
        request.get().set_path(path);
        request.get().set_target(target);
        write_attributes(request.get().init_modified(), attributes);
        self.link.wait(request.send().promise).await.map(drop)
    }

    /// Renames a file or directory.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn rename(&self, from: &[u8], to: &[u8], replace: bool) -> Result<()> {
        let mut request = self.cap.rename_request();
        request.get().set_from(from);
        request.get().set_to(to);
        request.get().set_replace(replace);
        self.link.wait(request.send().promise).await.map(drop)
    }

    /// Removes a file or directory; with `recursive`, also its content.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn remove(&self, path: &[u8], recursive: bool) -> Result<()> {
        let mut request = self.cap.remove_request();
        request.get().set_path(path);
        request.get().set_recursive(recursive);
        self.link.wait(request.send().promise).await.map(drop)
    }

    /// Sets attributes of a file or directory.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn set_attributes(&self, path: &[u8], attributes: FileAttributes) -> Result<()> {
        let mut request = self.cap.set_attributes_request();
        request.get().set_path(path);
        write_attributes(request.get().init_attributes(), attributes);
        self.link.wait(request.send().promise).await.map(drop)
    }
}

/// Reads a file in chunks.
pub struct FileDownload {
    cap: wire::file_reader::Client,
    link: Rc<Link>,
    info: FileInfo,
    at: u64,
    ended: bool,
}

impl FileDownload {
    /// The file's attributes when it was opened.
    pub fn info(&self) -> &FileInfo {
        &self.info
    }

    /// The next chunk; `None` at the end.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn next(&mut self) -> Result<Option<Vec<u8>>> {
        if self.ended {
            return Ok(None);
        }
        let part = self.range(self.at, limits::CHUNK_BYTES).await?;
        self.at += part.len() as u64;
        self.ended = part.len() < limits::CHUNK_BYTES;
        Ok((!part.is_empty()).then_some(part))
    }

    /// At most `most` bytes from byte `from`, and at most [`limits::CHUNK_BYTES`]; fewer at the end.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn range(&self, from: u64, most: usize) -> Result<Vec<u8>> {
        let most = most.min(limits::CHUNK_BYTES);
        if most == 0 {
            return Ok(Vec::new());
        }
        let mut request = self.cap.read_request();
        request.get().set_from(from);
        request.get().set_max_bytes(u32::try_from(most).unwrap_or(u32::MAX));
        let response = self.link.call(request.send().promise).await?;
        answer(read_data(fields(response.get())?.get_data(), "part of a file", limits::CHUNK_BYTES))
    }
}

/// Writes a file in chunks. Without [`FileUpload::finish`] nothing changes.
pub struct FileUpload {
    cap: wire::file_writer::Client,
    link: Rc<Link>,
}

impl FileUpload {
    /// Appends data; returns when the daemon is ready for more.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn write(&mut self, data: &[u8]) -> Result<()> {
        for chunk in data.chunks(limits::CHUNK_BYTES) {
            let mut request = self.cap.write_request();
            request.get().set_data(chunk);
            self.link.wait(request.send()).await?;
        }
        Ok(())
    }

    /// Makes the file appear, complete.
    ///
    /// # Errors
    /// The daemon's errors, also those of earlier writes.
    pub async fn finish(self) -> Result<FileInfo> {
        let response = self.link.wait(self.cap.finish_request().send().promise).await?;
        answer(read_file_info(fields(fields(response.get())?.get_info())?))
    }
}
