//! The final verification before untrusted code runs: the host kernel's facts about the engine's
//! process.
//!
//! The judgement is pure; the rest reads.

use std::os::fd::RawFd;
use std::path::{Path, PathBuf};

use super::layer::{Layer, LayerStatus, SandboxError, SandboxReport};
use super::plan::{GUEST_ID, SandboxPlan};
use crate::sys::caps;

/// A process's facts, read from inside.
#[derive(Debug, Clone)]
pub(super) struct Seen {
    /// `/proc/self/status`.
    pub status: String,
    /// `/proc/self/mountinfo`.
    pub mounts: String,
    /// Open descriptors.
    pub descriptors: Vec<RawFd>,
    /// Securebits.
    pub securebits: u32,
}

/// Reads the host kernel's facts about this process.
///
/// # Errors
/// If `/proc` cannot be read.
pub(super) fn look() -> std::io::Result<Seen> {
    let mut descriptors = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd")? {
        descriptors.extend(entry?.file_name().to_string_lossy().parse::<RawFd>());
    }
    // The descriptor that read the listing is closed by now.
    descriptors.retain(|fd| std::fs::symlink_metadata(format!("/proc/self/fd/{fd}")).is_ok());
    descriptors.sort_unstable();
    Ok(Seen {
        status: std::fs::read_to_string("/proc/self/status")?,
        mounts: std::fs::read_to_string("/proc/self/mountinfo")?,
        descriptors,
        securebits: caps::securebits()?,
    })
}

/// A field of a `status` file.
pub(super) fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

/// Checks the facts against the plan; `expected` are the descriptors that may be open.
///
/// # Errors
/// The first layer that is not in force.
pub(super) fn judge(
    plan: &SandboxPlan,
    report: &SandboxReport,
    seen: &Seen,
    expected: &[RawFd],
) -> Result<(), SandboxError> {
    judge_status(report, &seen.status)?;
    if seen.securebits & caps::SECUREBITS_LOCKED != caps::SECUREBITS_LOCKED {
        return wrong(Layer::Capabilities, format!("securebits are {:#x}", seen.securebits));
    }
    if let Some(stray) = seen.descriptors.iter().find(|fd| !expected.contains(fd)) {
        return wrong(Layer::Descriptors, format!("descriptor {stray} is open"));
    }
    judge_mounts(plan, &seen.mounts)?;
    for layer in [Layer::Landlock, Layer::LandlockScope, Layer::Rlimits, Layer::Memory, Layer::Pids] {
        if report.status(layer).is_none() {
            return wrong(layer, "the layer was never set up");
        }
    }
    Ok(())
}

/// The checks that init repeats from outside the engine's process.
pub(super) fn judge_status(report: &SandboxReport, status: &str) -> Result<(), SandboxError> {
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        let none = field(status, set).and_then(|bits| u64::from_str_radix(bits, 16).ok()) == Some(0);
        if !none {
            return wrong(Layer::Capabilities, format!("{set} is {:?}", field(status, set)));
        }
    }
    if field(status, "NoNewPrivs") != Some("1") {
        return wrong(Layer::NoNewPrivs, "it is off");
    }
    let waived = matches!(report.status(Layer::Seccomp), Some(LayerStatus::Degraded { .. }));
    if !waived && field(status, "Seccomp") != Some("2") {
        return wrong(Layer::Seccomp, "no filter is in force");
    }
    let guest = GUEST_ID.to_string();
    for ids in ["Uid", "Gid"] {
        let all_guest = field(status, ids).is_some_and(|ids| ids.split_whitespace().all(|id| id == guest));
        if !all_guest {
            return wrong(Layer::UserNs, format!("{ids} is {:?}", field(status, ids)));
        }
    }
    Ok(())
}

fn wrong<T>(layer: Layer, cause: impl Into<String>) -> Result<T, SandboxError> {
    Err(SandboxError::new(layer, cause))
}

/// Checks that no mount honours set-user-id, only the five device files exist, and only planned
/// places are writable.
///
/// # Errors
/// The first violating mount.
pub(super) fn judge_mounts(plan: &SandboxPlan, mounts: &str) -> Result<(), SandboxError> {
    const DEVICES: [&str; 7] =
        ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/pts"];
    let mut root_seen = false;
    for line in mounts.lines() {
        let Some(mount) = Mount::parse(line) else {
            return wrong(Layer::PivotRoot, format!("cannot read the mount {line:?}"));
        };
        let place = mount.place.display();
        if !mount.has("nosuid") {
            return wrong(Layer::PivotRoot, format!("{place} honours set-user-id bits"));
        }
        // Covers of files are clones of /dev/null.
        let device = DEVICES.iter().any(|d| mount.place == Path::new(d)) || mount.root == Path::new("/null");
        if !mount.has("nodev") && !device {
            return wrong(Layer::PivotRoot, format!("{place} honours device nodes"));
        }
        if !mount.has("ro") && !plan.writable_at(&mount.place) {
            return wrong(Layer::PivotRoot, format!("{place} is writable"));
        }
        if mount.place == Path::new("/") {
            root_seen = true;
            if mount.kind != "tmpfs" || mount.root != Path::new("/") {
                return wrong(Layer::PivotRoot, format!("the root is {} of {}", mount.root.display(), mount.kind));
            }
        }
    }
    if !root_seen {
        return wrong(Layer::PivotRoot, "there is no root");
    }
    Ok(())
}

/// One line of `mountinfo`.
struct Mount<'a> {
    root: PathBuf,
    place: PathBuf,
    options: &'a str,
    kind: &'a str,
}

impl<'a> Mount<'a> {
    fn parse(line: &'a str) -> Option<Mount<'a>> {
        let (mount, file_system) = line.split_once(" - ")?;
        let mut words = mount.split(' ').skip(3);
        let (root, place, options) = (words.next()?, words.next()?, words.next()?);
        Some(Mount { root: plain(root), place: plain(place), options, kind: file_system.split(' ').next()? })
    }

    fn has(&self, option: &str) -> bool {
        self.options.split(',').any(|each| each == option)
    }
}

/// Decodes the octal form of blanks and backslashes.
fn plain(text: &str) -> PathBuf {
    use std::os::unix::ffi::OsStringExt;
    let bytes = text.as_bytes();
    let (mut out, mut i) = (Vec::with_capacity(bytes.len()), 0);
    while i < bytes.len() {
        let octal = (bytes[i] == b'\\').then(|| bytes.get(i + 1..i + 4)).flatten();
        match octal.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok()) {
            Some(byte) => {
                out.push(byte);
                i += 4;
            }
            None => {
                out.push(bytes[i]);
                i += 1;
            }
        }
    }
    PathBuf::from(std::ffi::OsString::from_vec(out))
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str = "Name:\tsh\nUid:\t1000\t1000\t1000\t1000\nGid:\t1000\t1000\t1000\t1000\nCapInh:\t0000000000000000\n\
        CapPrm:\t0000000000000000\nCapEff:\t0000000000000000\nCapBnd:\t0000000000000000\nCapAmb:\t0000000000000000\n\
        NoNewPrivs:\t1\nSeccomp:\t2\n";
    const MOUNTS: &str = "10 1 0:30 / / ro,nosuid,nodev - tmpfs none rw\n\
        11 10 8:1 /usr /usr ro,nosuid,nodev - ext4 /dev/vda rw\n\
        12 10 0:6 /null /dev/null ro,nosuid,noexec - devtmpfs devtmpfs rw\n\
        13 10 8:1 /k/workspace /workspace rw,nosuid,nodev - ext4 /dev/vda rw\n";

    fn seen() -> Seen {
        Seen {
            status: STATUS.into(),
            mounts: MOUNTS.into(),
            descriptors: vec![0, 1, 2, 3],
            securebits: caps::SECUREBITS_LOCKED,
        }
    }

    fn report() -> SandboxReport {
        let mut report = SandboxReport::default();
        for layer in Layer::ALL {
            report.enforced(*layer, "on");
        }
        report
    }

    fn verdict(change: impl FnOnce(&mut Seen)) -> Option<Layer> {
        let mut seen = seen();
        change(&mut seen);
        judge(&SandboxPlan::new("/k"), &report(), &seen, &[0, 1, 2, 3]).err().map(|error| error.layer)
    }

    #[test]
    fn complete_sandbox_passes() {
        assert_eq!(verdict(|_| ()), None);
    }

    #[test]
    fn missing_layers_are_detected() {
        let status = |from: &'static str, to: &'static str| move |s: &mut Seen| s.status = s.status.replace(from, to);
        let mounts =
            |from: &'static str, to: &'static str| move |s: &mut Seen| s.mounts = s.mounts.replacen(from, to, 1);
        for set in ["CapInh:\t0", "CapPrm:\t0", "CapEff:\t0", "CapBnd:\t0", "CapAmb:\t0"] {
            let leaky = format!("{}1", &set[..set.len() - 1]);
            assert_eq!(verdict(|s| s.status = s.status.replace(set, &leaky)), Some(Layer::Capabilities), "{set}");
        }
        assert_eq!(verdict(status("NoNewPrivs:\t1", "NoNewPrivs:\t0")), Some(Layer::NoNewPrivs));
        assert_eq!(verdict(status("Seccomp:\t2", "Seccomp:\t0")), Some(Layer::Seccomp));
        assert_eq!(verdict(status("Uid:\t1000", "Uid:\t0")), Some(Layer::UserNs));
        assert_eq!(verdict(status("Gid:\t1000", "Gid:\t0")), Some(Layer::UserNs));
        assert_eq!(verdict(|s| s.status.clear()), Some(Layer::Capabilities));
        assert_eq!(verdict(|s| s.securebits = 0), Some(Layer::Capabilities));
        assert_eq!(verdict(|s| s.descriptors.push(7)), Some(Layer::Descriptors));
        assert_eq!(verdict(mounts("ro,nosuid,nodev - tmpfs", "rw,nosuid,nodev - tmpfs")), Some(Layer::PivotRoot));
        assert_eq!(verdict(mounts("ro,nosuid,nodev - ext4", "ro,nodev - ext4")), Some(Layer::PivotRoot));
        assert_eq!(verdict(mounts("ro,nosuid,nodev - ext4", "ro,nosuid - ext4")), Some(Layer::PivotRoot));
        assert_eq!(verdict(mounts("/usr ro,", "/usr rw,")), Some(Layer::PivotRoot));
        assert_eq!(verdict(mounts("- tmpfs", "- ext4")), Some(Layer::PivotRoot));
        assert_eq!(verdict(|s| s.mounts.clear()), Some(Layer::PivotRoot));
    }

    #[test]
    fn waived_layer_passes() {
        let mut report = report();
        report.note(Layer::Seccomp, LayerStatus::Degraded { why: "asked for".into() });
        let status = STATUS.replace("Seccomp:\t2", "Seccomp:\t0");
        assert_eq!(judge_status(&report, &status), Ok(()));
    }

    #[test]
    fn mount_octal_escapes_decode() {
        assert_eq!(plain(r"/a\040b\134"), PathBuf::from(r"/a b\"));
        assert_eq!(plain(r"/a\09"), PathBuf::from(r"/a\09"));
    }
}
