//! The `/etc` of code inside: generated, with the host's entries that programs need and nothing
//! that identifies the host.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use nix::fcntl::{AT_FDCWD, OFlag, openat};
use nix::sys::stat::Mode;
use nix::unistd::symlinkat;

use super::layer::{Layer, SandboxError, failed};
use super::plan::{GUEST_ID, GUEST_NAME, SandboxPlan};
use super::tree::{folder, mount_point, relative};
use crate::core::spec::Net;
use crate::sys::mount::{NODEV, NOSUID, RDONLY, attach, change, clone_tree};

/// Files and links of the host that are copied if present.
const COPIED: &[&str] = &[
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/timezone",
    "/etc/mime.types",
    "/etc/inputrc",
    "/etc/magic",
    "/etc/protocols",
    "/etc/services",
    "/etc/ssl/openssl.cnf",
    "/etc/gai.conf",
    "/etc/debian_version",
    "/etc/os-release",
];
/// Further files where the network is the host's.
const COPIED_WITH_NET: &[&str] = &["/etc/resolv.conf"];
/// Folders of the host that are mounted read-only if present.
pub(super) const MOUNTED: &[&str] = &[
    "/etc/alternatives",
    "/etc/ssl/certs",
    "/etc/ca-certificates",
    "/etc/pki/tls/certs",
    "/etc/pki/ca-trust",
    "/etc/terminfo",
    "/etc/fonts",
    "/etc/python3",
    "/etc/python3.11",
    "/etc/perl",
];
/// Largest copied file.
const COPY_MAX: u64 = 1 << 20;

fn fail<E: std::fmt::Display>(what: impl std::fmt::Display) -> impl FnOnce(E) -> SandboxError {
    failed(Layer::PivotRoot, what)
}

/// The generated files that contain the host name.
pub(super) fn of_host_name(host: &str) -> [(&'static str, String); 2] {
    [
        ("/etc/hosts", format!("127.0.0.1 localhost {host}\n::1 localhost ip6-localhost\n")),
        ("/etc/hostname", format!("{host}\n")),
    ]
}

/// The generated files.
fn made_up(plan: &SandboxPlan) -> [(&'static str, String); 8] {
    let (id, guest, [hosts, hostname]) = (GUEST_ID, GUEST_NAME, of_host_name(&plan.hostname));
    let names = match plan.net {
        Net::None => "files",
        Net::Host => "files dns",
    };
    [
        (
            "/etc/passwd",
            format!(
                "root:x:0:0:root:/nonexistent:/usr/sbin/nologin\n\
                 {guest}:x:{id}:{id}:{guest}:/workspace:/bin/sh\n\
                 nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
            ),
        ),
        ("/etc/group", format!("root:x:0:\n{guest}:x:{id}:\nnogroup:x:65534:\n")),
        hosts,
        hostname,
        (
            "/etc/nsswitch.conf",
            format!("passwd: files\ngroup: files\nhosts: {names}\nservices: files\nprotocols: files\n"),
        ),
        ("/etc/host.conf", String::from("multi on\n")),
        ("/etc/shells", String::from("/bin/sh\n/bin/bash\n")),
        ("/etc/profile", String::from("# ryokan: the environment is the kernel's own.\n")),
    ]
}

/// Writes `/etc` and a few expected folders into the new root at `at`. The process still sees the
/// host's tree.
pub(super) fn write(plan: &SandboxPlan, at: BorrowedFd<'_>) -> Result<(), SandboxError> {
    folder(at, Path::new("/etc"))?;
    for (path, text) in made_up(plan) {
        create(at, Path::new(path), text.as_bytes())?;
    }
    let with_net: &[&str] = if plan.net == Net::Host { COPIED_WITH_NET } else { &[] };
    for path in COPIED.iter().chain(with_net).map(Path::new) {
        copy(at, path)?;
    }
    for path in MOUNTED.iter().map(Path::new) {
        if path.is_dir()
            && let Ok(tree) = clone_tree(AT_FDCWD, path, true)
        {
            change(tree.as_fd(), true, RDONLY | NOSUID | NODEV, 0)
                .map_err(fail(format_args!("cannot restrict {path:?}")))?;
            let target = mount_point(at, path, &tree)?;
            attach(tree.as_fd(), target.as_fd()).map_err(fail(format_args!("cannot mount {path:?}")))?;
        }
    }
    folder(at, Path::new("/run"))?;
    folder(at, Path::new("/var"))?;
    symlinkat("../tmp", at, "var/tmp").map_err(fail("cannot link /var/tmp"))?;
    symlinkat("../proc/self/mounts", at, "etc/mtab").map_err(fail("cannot link /etc/mtab"))
}

fn create(at: BorrowedFd<'_>, path: &Path, content: &[u8]) -> Result<(), SandboxError> {
    let above = folder(at, path.parent().unwrap_or(Path::new("/")))?;
    let flags = OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_WRONLY | OFlag::O_CLOEXEC;
    let file: OwnedFd = openat(&above, path.file_name().unwrap_or_default(), flags, Mode::from_bits_truncate(0o644))
        .map_err(fail(format_args!("cannot make {path:?}")))?;
    File::from(file).write_all(content).map_err(fail(format_args!("cannot write {path:?}")))
}

/// Copies a file, or a link into the system's own folders. A file that the user may not read is
/// skipped.
fn copy(at: BorrowedFd<'_>, path: &Path) -> Result<(), SandboxError> {
    if let Ok(target) = std::fs::read_link(path)
        && path.parent().is_some_and(|folder| folder.join(&target).starts_with("/usr"))
    {
        return symlinkat(target.as_path(), at, relative(path)).map_err(fail(format_args!("cannot link {path:?}")));
    }
    let mut content = Vec::new();
    let read = File::open(path).and_then(|file| {
        // One read, and a second that confirms the end.
        content.reserve(usize::try_from(file.metadata()?.len().min(COPY_MAX) + 1).unwrap_or(0));
        file.take(COPY_MAX + 1).read_to_end(&mut content)
    });
    match read {
        Ok(_) if content.len() as u64 <= COPY_MAX => create(at, path, &content),
        _ => Ok(()),
    }
}
