//! A client's changes of a live machine's files, one request at a time. Blocks.
//!
//! The guest applies each as this host would for a process; the mirror follows with the next pull. What the guest answers
//! is data of an untrusted system: errors are made here, from the reason that it names.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::client::{Client, unexpected};
use super::guest_error;
use super::machine::{Machine, Phase, lock};
use super::seed::{self, Renewal};
use crate::core::error::{DISK_FULL, Error, ErrorCode, Result};
use crate::core::files::{FILE_MODE_BITS, FileChange, FileError, FileInfo, FileKind, FilePath, Placement};
use crate::core::limits;
use crate::link::machine::{BODY_BYTES, FILES_LEVEL, FileRequest, Reply, Request};

/// The numbers of files that are being written, or of watches.
#[derive(Default)]
pub(super) struct Numbers {
    next: AtomicU64,
    /// Those that the guest may discard.
    abandoned: Mutex<Vec<u64>>,
}

impl Numbers {
    /// A number that no other one of this machine has.
    pub(super) fn begin(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Has the guest discard it with the next request.
    pub(super) fn abandon(&self, number: u64) {
        lock(&self.abandoned).push(number);
    }

    /// The next one that the guest has to discard.
    pub(super) fn next_abandoned(&self) -> Option<u64> {
        lock(&self.abandoned).pop()
    }
}

/// A file that is being written into a guest.
#[derive(Debug, Clone, Copy)]
pub(super) struct Upload {
    /// Its number.
    pub number: u64,
    /// The bytes that the guest has.
    pub bytes: u64,
    /// The most bytes that it may have.
    pub most_bytes: u64,
}

/// Reason of an error: a machine started or ended while a file was written.
pub(super) const MOVED: &str = "moved";

/// Why the files of a stopped machine do not change.
pub(super) fn suspended() -> Error {
    Error::busy("the kernel is suspended").reason("suspended").hint("resume it first")
}

/// Why a file was not written.
pub(super) fn moved() -> Error {
    Error::busy("the kernel's virtual machine started or ended while the file was written")
        .reason(MOVED)
        .hint("write the file again")
}

impl Machine {
    /// Checks that the guest applies changes, and discards abandoned files there.
    ///
    /// # Errors
    /// As [`Self::append`].
    pub(super) fn check_changes(&self) -> Result<()> {
        self.changing(limits::VM_CALL, |_| Ok(()))
    }

    /// Appends to a file without a name.
    ///
    /// # Errors
    /// Those of writing; `busy` if the machine is stopped or its worker has ended, `unsupported` for a guest of an earlier
    /// build, `deadline` and `unavailable` for one that does not answer.
    pub(super) fn append(&self, upload: &mut Upload, data: &[u8]) -> Result<()> {
        for piece in data.chunks(BODY_BYTES) {
            let Upload { number, bytes, most_bytes } = *upload;
            let request = FileRequest::Append { upload: number, offset: bytes, most_bytes };
            self.changing(limits::VM_CALL, |client| match ask(client, request, piece)? {
                Reply::Done => Ok(()),
                Reply::Failed(error) => Err(of_guest(&error, &["the file"])),
                _ => Err(unexpected()),
            })?;
            upload.bytes += piece.len() as u64;
        }
        Ok(())
    }

    /// Makes a file appear, complete.
    ///
    /// # Errors
    /// As [`Self::append`], and a [`FileError`].
    pub(super) fn place(&self, upload: Upload, place: &Placement) -> Result<FileInfo> {
        let (number, bytes) = (upload.number, upload.bytes);
        let request = FileRequest::Place { upload: number, bytes, place: place.clone() };
        self.changing(limits::VM_CALL, |client| match ask(client, request, &[])? {
            Reply::Placed { mode, modified_ns } => Ok(FileInfo {
                name: place.path.split().map(|(_, name)| name.to_vec()).unwrap_or_default(),
                kind: FileKind::File,
                bytes,
                mode: mode & FILE_MODE_BITS,
                modified_ns,
                target: Vec::new(),
            }),
            Reply::Failed(error) => Err(of_guest(&error, &[&place.path.shown()])),
            _ => Err(unexpected()),
        })
    }

    /// Applies a change.
    ///
    /// # Errors
    /// As [`Self::place`].
    pub(super) fn change(&self, change: &FileChange) -> Result<()> {
        let paths: Vec<String> = change.paths().into_iter().map(|(path, _)| FilePath::shown(path)).collect();
        let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
        let request = FileRequest::Change { change: change.clone() };
        self.changing(limits::VM_CALL, |client| match ask(client, request, &[])? {
            Reply::Done => Ok(()),
            Reply::Failed(error) => Err(of_guest(&error, &paths)),
            _ => Err(unexpected()),
        })
    }

    /// Uses the connection for a change, in the phase in which there are changes; takes at most `within` once the
    /// connection is acquired.
    fn changing<T>(&self, within: Duration, act: impl FnOnce(&mut Client) -> Result<T>) -> Result<T> {
        let mut client = self.client_within(Some(within));
        match self.phase() {
            Phase::Open => {}
            Phase::Stopping | Phase::Parked => return Err(suspended()),
            Phase::Over => return Err(moved()),
        }
        check_level(&mut client, FILES_LEVEL, "do not change from here")?;
        while let Some(upload) = self.uploads.next_abandoned() {
            match ask(&mut client, FileRequest::Discard { upload }, &[])? {
                Reply::Done => {}
                _ => return Err(unexpected()),
            }
        }
        act(&mut client)
    }
}

fn ask(client: &mut Client, request: FileRequest, body: &[u8]) -> Result<Reply> {
    Ok(client.ask(&Request::Files(request), body, limits::VM_CALL)?.0)
}

/// Refuses a guest that does not know these requests: it would not answer. One that a former daemon started reports it
/// when its clock is set.
pub(super) fn check_level(client: &mut Client, needed: u32, otherwise: &str) -> Result<()> {
    if client.level().is_none() {
        seed::seed(client, "", Renewal::Keep)?;
    }
    match client.level() {
        Some(level) if level >= needed => Ok(()),
        _ => Err(Error::unsupported(format!(
            "files in a virtual machine with an image of an earlier version {otherwise}"
        ))
        .reason("image_version")
        .hint("stop the kernel, build an image with `ryokan images build`, and start it again")),
    }
}

/// The error for a guest's: its reason is trusted as far as it is one of changes, its words are not.
pub(super) fn of_guest(error: &Error, paths: &[&str]) -> Error {
    let named = paths.iter().filter(|path| error.message.starts_with(**path)).max_by_key(|path| path.len());
    let path = named.or(paths.first()).copied().unwrap_or_default();
    if let Some(reason) = FileError::from_reason(&error.reason) {
        return reason.on(path);
    }
    if error.reason == DISK_FULL {
        return Error::busy(format!("the virtual machine's disk has no room for {path}"))
            .reason(DISK_FULL)
            .hint("remove files of the kernel, then try again");
    }
    let error = guest_error::of_guest(error);
    match error.code {
        ErrorCode::Busy | ErrorCode::InvalidArgument => error.hint("try again"),
        _ => Error::internal(format!("{path}: in the guest: {}", error.message)),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::io::{self, Read as _, Write as _};
    use std::os::unix::net::UnixListener;
    use std::path::Path;
    use std::sync::Arc;
    use std::thread::JoinHandle;
    use std::time::Instant;

    use super::super::machine::tests::machine;
    use super::*;
    use crate::core::files::FileAttributes;
    use crate::link::machine::{self, HELLO_BYTES, LEVEL};

    /// Serves a machine's control port: seeds unless it is renewed, else gives these answers. Returns the requests.
    fn guest(dir: &Path, level: u32, answers: Vec<Reply>) -> io::Result<JoinHandle<io::Result<Vec<Request>>>> {
        guest_with(dir, level, answers.into_iter().map(|reply| (reply, Vec::new())).collect())
    }

    /// As [`guest`], with the bodies of the answers.
    pub fn guest_with(
        dir: &Path,
        level: u32,
        answers: Vec<(Reply, Vec<u8>)>,
    ) -> io::Result<JoinHandle<io::Result<Vec<Request>>>> {
        let listener = UnixListener::bind(dir.join("worker.control"))?;
        Ok(std::thread::spawn(move || {
            let (mut stream, _) = listener.accept()?;
            let (mut bytes, mut requests) = ([0; HELLO_BYTES], Vec::new());
            stream.read_exact(&mut bytes)?;
            stream.write_all(&machine::ready(machine::nonce_of(&bytes).ok_or(io::ErrorKind::InvalidData)?))?;
            let mut answers = answers.into_iter();
            while let Ok((request, _)) = machine::read::<Request>(&mut stream) {
                let boot_id = String::from("0b3f8d4e-5c1e-4d9a-9f4e-2f8b7c6d5e4a");
                let answer = match &request {
                    Request::Seed { now_ns, renew: false, .. } => {
                        Some((Reply::Seeded { boot_id, now_ns: *now_ns, level }, Vec::new()))
                    }
                    _ => answers.next(),
                };
                requests.push(request);
                // Without an answer it hangs.
                if let Some((answer, body)) = answer {
                    machine::write(&mut stream, &answer, &body)?;
                }
            }
            Ok(requests)
        }))
    }

    fn path(text: &str) -> FilePath {
        FilePath::parse(text.as_bytes()).expect("a path")
    }

    fn renaming() -> FileChange {
        FileChange::Rename { from: path("a"), to: path("a/b"), replace: false }
    }

    #[test]
    fn earlier_guest_is_unsupported() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let machine = machine(folder.path());
        let guest = guest(folder.path(), 0, Vec::new())?;
        let refused = machine.change(&renaming()).expect_err("its guest does not know it");
        assert_eq!((refused.code, refused.reason.as_str()), (ErrorCode::Unsupported, "image_version"));
        assert!(refused.hint.contains("ryokan images build"), "{refused:?}");
        machine.client().end();
        let requests = guest.join().expect("it ends")?;
        assert!(matches!(requests[..], [Request::Seed { renew: false, .. }]), "{requests:?}");
        Ok(())
    }

    #[test]
    fn hostile_answers_become_errors() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let machine = machine(folder.path());
        let failed = |code, message: &str, reason: &str| Reply::Failed(Error::new(code, message).reason(reason));
        let long = format!("\u{1b}[2J{}", "x".repeat(1 << 20));
        let answers = vec![
            failed(ErrorCode::Departed, "lies", "exists"),
            failed(ErrorCode::Internal, "/workspace/a/b lies", "not_empty"),
            failed(ErrorCode::Lost, &long, "worker"),
            failed(ErrorCode::Busy, "no room", DISK_FULL),
            Reply::Placed { mode: 0, modified_ns: 0 },
            Reply::Gone,
            Reply::Placed { mode: 0o107_777, modified_ns: i64::MIN },
        ];
        let guest = guest(folder.path(), LEVEL, answers)?;
        let change = || machine.change(&renaming()).expect_err("it failed");
        assert_eq!(change(), FileError::Exists.on("/workspace/a"));
        assert_eq!(change(), FileError::NotEmpty.on("/workspace/a/b"));
        let lost = change();
        assert_eq!((lost.code, lost.reason.as_str()), (ErrorCode::Internal, ""));
        assert!(lost.message.len() < 300 && !lost.message.contains('\u{1b}'), "{lost:?}");
        assert_eq!((change().code, change().code), (ErrorCode::Busy, ErrorCode::Unavailable));
        let mut upload = Upload { number: machine.uploads.begin(), bytes: 0, most_bytes: 9 };
        assert_eq!(machine.append(&mut upload, b"abc").err().map(|error| error.code), Some(ErrorCode::Unavailable));
        assert_eq!(upload.bytes, 0, "it is not there");
        let place = Placement { path: path("d/f"), attributes: FileAttributes::default(), parents: true };
        let info = machine.place(upload, &place).expect("placed");
        assert_eq!((info.name.as_slice(), info.mode, info.bytes, info.kind), (&b"f"[..], 0o1777, 0, FileKind::File));
        machine.client().end();
        guest.join().expect("it ends").map(drop)
    }

    #[test]
    fn hostile_errors_are_not_acted_on() -> io::Result<()> {
        use crate::isolation::microvm::document::started;
        use crate::link::bootstrap::ReportLine;

        let folder = tempfile::tempdir()?;
        std::fs::create_dir(folder.path().join("workspace"))?;
        let machine = machine(folder.path());
        let hostile =
            |code| Error::new(code, format!("\u{1b}{}", "x".repeat(1 << 20))).reason(DISK_FULL).hint("run this");
        let failed = |code| Reply::Failed(hostile(code));
        let answers = vec![failed(ErrorCode::Busy), failed(ErrorCode::Departed), failed(ErrorCode::Unsupported)];
        let guest = guest(folder.path(), LEVEL, answers)?;
        let seed = seed::seed(&mut machine.client(), "", Renewal::Renew).map(drop);
        let start = started(Reply::Started(ReportLine::Failed(hostile(ErrorCode::Unsupported))));
        let internal = ErrorCode::Internal;
        for (done, code) in
            [(seed, ErrorCode::Busy), (machine.pull(), internal), (machine.push(), internal), (start, internal)]
        {
            let error = done.expect_err("it failed");
            assert_eq!((error.code, &*error.reason, &*error.hint), (code, "", ""), "{error:?}");
            assert!(error.message.len() < 300 && !error.message.contains('\u{1b}'), "{error:?}");
        }
        machine.client().end();
        guest.join().expect("it ends").map(drop)
    }

    #[test]
    fn hung_guest_ends_in_time() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let machine = machine(folder.path());
        let guest = guest(folder.path(), LEVEL, Vec::new())?;
        let (began, within) = (Instant::now(), Duration::from_millis(300));
        let asked = machine.changing(within, |client| ask(client, FileRequest::Change { change: renaming() }, &[]));
        assert_eq!(asked.err().map(|error| error.code), Some(ErrorCode::Deadline));
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
        machine.client().end();
        guest.join().expect("it ends").map(drop)
    }

    #[test]
    fn abandoned_file_is_discarded() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let machine = machine(folder.path());
        let guest = guest(folder.path(), LEVEL, vec![Reply::Done, Reply::Done, Reply::Done])?;
        let mut upload = Upload { number: machine.uploads.begin(), bytes: 0, most_bytes: 9 };
        machine.append(&mut upload, b"abc").expect("taken");
        machine.uploads.abandon(upload.number);
        machine.change(&renaming()).expect("applied");
        assert_ne!(machine.uploads.begin(), upload.number);
        machine.client().end();
        let requests = guest.join().expect("it ends")?;
        let [_, Request::Files(append), Request::Files(discard), Request::Files(change)] = &requests[..] else {
            panic!("{requests:?}")
        };
        assert!(matches!(append, FileRequest::Append { upload: 0, offset: 0, most_bytes: 9 }), "{append:?}");
        assert!(matches!(discard, FileRequest::Discard { upload: 0 }), "{discard:?}");
        assert!(matches!(change, FileRequest::Change { .. }), "{change:?}");
        Ok(())
    }

    #[test]
    fn stopped_machine_is_not_asked() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let (machine, listener) = (machine(folder.path()), UnixListener::bind(folder.path().join("worker.control"))?);
        let refused = |machine: &Arc<Machine>| machine.change(&renaming()).expect_err("refused").reason;
        machine.close_changes(Phase::Stopping);
        assert_eq!(refused(&machine), "suspended");
        machine.set_phase(Phase::Parked);
        assert_eq!(refused(&machine), "suspended");
        machine.close_changes(Phase::Over);
        machine.set_phase(Phase::Open);
        assert_eq!(refused(&machine), "moved", "a worker ends once");
        listener.set_nonblocking(true)?;
        assert!(listener.accept().is_err(), "it did not connect");
        Ok(())
    }
}
