//! The version of Firecracker, and which ones can be used.

use std::fmt;
use std::path::{Path, PathBuf};

use super::PROGRAM;
use crate::core::error::{Error, Result};
use crate::isolation::microvm::qemu::find_program;

/// The first version that restores a machine's clock and its vsock.
const MINIMUM: Version = Version { major: 1, minor: 16, patch: 1 };
/// A version after whose restores no vsock connection is made.
const BROKEN: Version = Version { major: 1, minor: 16, patch: 0 };
/// What to do about it.
const HINT: &str =
    "install Firecracker 1.16.1 or later and name its path in microvm.firecracker, or set microvm.vmm to \"qemu\"";

/// A version of Firecracker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::isolation::microvm) struct Version {
    major: u32,
    minor: u32,
    patch: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

impl Version {
    /// The version in text such as `1.16.1` or `v1.17.0-dev`.
    pub(super) fn parse(text: &str) -> Option<Version> {
        let text = text.trim().trim_start_matches('v');
        let mut numbers = text.split(['-', '+']).next()?.split('.').map(str::parse::<u32>);
        let mut next = || numbers.next()?.ok();
        let version = Version { major: next()?, minor: next()?, patch: next()? };
        numbers.next().is_none().then_some(version)
    }

    /// Whether this version can be used.
    ///
    /// # Errors
    /// `unsupported` with the reason `firecracker`.
    pub(super) fn check(self) -> Result<()> {
        let why = if self == BROKEN {
            format!("Firecracker {self} makes no connection to a restored machine")
        } else if self < MINIMUM {
            format!("Firecracker {self} is older than {MINIMUM}")
        } else {
            return Ok(());
        };
        Err(Error::unsupported(why).reason("firecracker").hint(HINT))
    }
}

/// The usable version in what the program prints.
///
/// # Errors
/// As [`Version::check`].
pub(in crate::isolation::microvm) fn printed(text: &str) -> Result<Version> {
    let line: String = text.lines().next().unwrap_or_default().chars().take(200).collect();
    let version = line.strip_prefix("Firecracker ").and_then(Version::parse).ok_or_else(|| {
        Error::unsupported(format!("the program of microvm.firecracker does not say Firecracker's version: {line:?}"))
            .reason("firecracker")
            .hint(HINT)
    })?;
    version.check().map(|()| version)
}

/// The path of Firecracker: the configured one, or where a shell would find it.
///
/// # Errors
/// `unsupported` with the reason `firecracker`.
pub(in crate::isolation::microvm) fn program(configured: Option<&Path>) -> Result<PathBuf> {
    let (found, missing) = match configured {
        Some(path) => (path.is_file().then(|| path.to_owned()), format!("there is no {}", path.display())),
        None => (find_program(PROGRAM), String::from("Firecracker is not installed")),
    };
    found.ok_or_else(|| Error::unsupported(missing).reason("firecracker").hint(HINT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unusable_versions_are_refused() {
        for usable in ["Firecracker v1.16.1\n\nmore", "Firecracker v1.17.0-dev\n", "Firecracker v2.0.0+x"] {
            assert!(printed(usable).is_ok(), "{usable}");
        }
        let refused = [
            ("Firecracker v1.16.0\n", "no connection to a restored machine"),
            ("Firecracker v1.15.9\n", "older than 1.16.1"),
            ("Firecracker v0.25.0\n", "older than 1.16.1"),
            ("Firecracker v1.16\n", "does not say"),
            ("Firecracker v1.16.1.2\n", "does not say"),
            ("GNU bash, version 5.2\n", "does not say"),
            ("", "does not say"),
        ];
        for (text, why) in refused {
            let error = printed(text).expect_err(text);
            assert!(error.message.contains(why), "{text:?}: {error}");
            assert_eq!((error.code.name(), error.reason.as_str()), ("unsupported", "firecracker"));
            assert!(error.hint.contains("microvm.firecracker"), "{error:?}");
        }
        assert_eq!(printed("Firecracker v1.16.1").expect("usable").to_string(), "1.16.1");
    }

    #[test]
    fn missing_program_is_named() {
        let error = program(Some(Path::new("/nowhere/fc"))).expect_err("it is missing");
        assert!(error.message.contains("/nowhere/fc") && error.hint.contains("microvm.vmm"), "{error:?}");
    }
}
