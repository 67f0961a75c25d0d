//! The accelerator of this host's machines: chosen once, given up for a while if a machine does not boot with it.
//!
//! ```text
//!  auto ── measured, fast enough ─▶ KVM ── a machine does not boot in time ─▶ software emulation
//!     │           └◀──────────── measured again after a while ─────────────────────┤
//!     └── absent, slow, forbidden ───────────────────────────────────────────────┘
//! ```
//!
//! A machine may fail to boot because its monitor was killed, or for want of memory: hence the further try.

use std::cell::RefCell;
use std::path::PathBuf;
use std::time::Instant;

use crate::core::accelerator::Accelerator;
use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::sandbox;

/// What runs a machine's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Chosen {
    Kvm,
    Tcg,
}

/// What is not used for a while, because a machine did not boot with it.
#[derive(Default)]
pub(super) struct GivenUp {
    /// How often that happened.
    times: u32,
    /// Until when it is not used, and why.
    pub until: Option<(Instant, String)>,
}

impl GivenUp {
    /// Notes that a machine did not boot with it.
    pub(super) fn note(&mut self, why: String, now: Instant) {
        let wait = limits::VM_GIVEN_UP.saturating_mul(1 << self.times.min(16)).min(limits::VM_GIVEN_UP_MAX);
        self.times = self.times.saturating_add(1);
        self.until = Some((now + wait, why));
    }

    /// Why it is not used now.
    pub(super) fn why(&self, now: Instant) -> Option<&str> {
        self.until.as_ref().filter(|(until, _)| now < *until).map(|(_, why)| why.as_str())
    }
}

/// The choice of a host.
pub(super) struct Accelerators {
    wanted: Accelerator,
    worker: PathBuf,
    /// What was found; `Err` says why KVM does not serve.
    found: RefCell<Option<std::result::Result<(), String>>>,
    given_up: RefCell<GivenUp>,
    /// One measurement at a time.
    turn: tokio::sync::Mutex<()>,
}

impl Accelerators {
    pub(super) fn new(wanted: Accelerator, worker: PathBuf) -> Accelerators {
        let (found, given_up) = (RefCell::default(), RefCell::default());
        Accelerators { wanted, worker, found, given_up, turn: tokio::sync::Mutex::default() }
    }

    /// The accelerator of the next machine. Measures KVM at the first call.
    ///
    /// # Errors
    /// `unsupported` if only KVM is wanted and it does not serve.
    pub(super) async fn choose(&self) -> Result<Chosen> {
        match (self.kvm().await?, self.wanted) {
            (Ok(()), _) => Ok(Chosen::Kvm),
            (Err(_), Accelerator::Auto | Accelerator::Tcg) => Ok(Chosen::Tcg),
            (Err(why), Accelerator::Kvm) => Err(Error::unsupported(format!("KVM does not serve on this host: {why}"))
                .reason("kvm")
                .hint("set microvm.accelerator to \"auto\" in the daemon's configuration")),
        }
    }

    /// Whether KVM may run machines and serves; the inner error says why not. Measures at the first call.
    ///
    /// # Errors
    /// `internal`.
    pub(super) async fn kvm(&self) -> Result<std::result::Result<(), String>> {
        if self.wanted == Accelerator::Tcg {
            return Ok(Err(String::from("microvm.accelerator is \"tcg\"")));
        }
        let _turn = self.turn.lock().await;
        if let Some(why) = self.given_up.borrow().why(Instant::now()) {
            return Ok(Err(why.to_owned()));
        }
        let known = self.found.borrow().clone();
        Ok(match known {
            Some(found) => found,
            None => {
                let worker = self.worker.clone();
                let measured = tokio::task::spawn_blocking(move || sandbox::kvm::speed(&worker)).await;
                let measured = measured.map_err(|error| Error::internal(error.to_string()))?;
                tracing::info!(?measured, "KVM was measured");
                self.found.replace(Some(measured.clone().map(drop)));
                measured.map(drop)
            }
        })
    }

    /// Records that a machine with KVM did not boot; whether the next one may use software emulation. After a while KVM is
    /// measured again.
    pub(super) fn give_up(&self, why: &Error) -> bool {
        self.found.replace(None);
        let why = format!("a machine did not boot with it: {}", why.message);
        self.given_up.borrow_mut().note(why, Instant::now());
        self.wanted == Accelerator::Auto
    }
}

/// The host's processor with its features, which a machine with KVM uses.
pub(super) fn processor() -> String {
    processor_in(&std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default())
}

fn processor_in(text: &str) -> String {
    let field = |name: &str| {
        let line = text.lines().find(|line| line.split(':').next().is_some_and(|found| found.trim() == name));
        line.and_then(|line| line.split_once(':')).map(|(_, value)| value.trim()).unwrap_or_default()
    };
    let mut features: Vec<&str> =
        field("flags").split_whitespace().chain(field("Features").split_whitespace()).collect();
    features.sort_unstable();
    let digest = blake3::hash(features.join(" ").as_bytes()).to_hex();
    format!("{} with features {}", field("model name"), &digest[..16])
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::core::error::ErrorCode;

    fn with(wanted: Accelerator, prints: &str) -> (tempfile::TempDir, Accelerators) {
        let folder = tempfile::tempdir().expect("a folder");
        let worker = folder.path().join("worker");
        std::fs::write(&worker, format!("#!/bin/sh\n[ \"$1\" = probe-kvm ] && {prints}\n")).expect("written");
        std::fs::set_permissions(&worker, std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("executable");
        (folder, Accelerators::new(wanted, worker))
    }

    #[tokio::test]
    async fn only_fast_kvm_is_chosen() {
        for (prints, expected) in [("echo 300", Chosen::Kvm), ("echo 27000", Chosen::Tcg), ("exit 1", Chosen::Tcg)] {
            let (_folder, host) = with(Accelerator::Auto, prints);
            assert_eq!(host.choose().await.expect("chosen"), expected, "{prints}");
        }
        let (_folder, host) = with(Accelerator::Tcg, "echo 300");
        assert_eq!(host.choose().await.expect("chosen"), Chosen::Tcg);
        let (_folder, host) = with(Accelerator::Kvm, "echo 27000");
        let refused = host.choose().await.expect_err("refused");
        assert!(refused.code == ErrorCode::Unsupported && refused.message.contains("27.0ms"), "{refused}");
    }

    #[tokio::test]
    async fn unbootable_kvm_is_given_up() {
        let (_folder, host) = with(Accelerator::Auto, "echo 300");
        assert_eq!(host.choose().await.expect("chosen"), Chosen::Kvm);
        assert!(host.give_up(&Error::deadline("no answer")));
        assert_eq!(host.choose().await.expect("chosen"), Chosen::Tcg);
        host.given_up.borrow_mut().until = None;
        assert_eq!(host.choose().await.expect("chosen"), Chosen::Kvm, "it has a second try");
        let (_folder, host) = with(Accelerator::Kvm, "echo 300");
        assert!(!host.give_up(&Error::deadline("no answer")));
        assert!(host.choose().await.expect_err("refused").message.contains("no answer"));
    }

    #[test]
    fn tries_become_rarer() {
        let (mut given_up, now) = (GivenUp::default(), Instant::now());
        assert_eq!(given_up.why(now), None);
        for times in 0..40 {
            given_up.note(format!("failure {times}"), now);
            let wait = limits::VM_GIVEN_UP.saturating_mul(1 << times.min(16)).min(limits::VM_GIVEN_UP_MAX);
            let last = now + wait - Duration::from_millis(1);
            assert_eq!(given_up.why(last), Some(format!("failure {times}").as_str()));
            assert_eq!(given_up.why(now + wait), None, "{times}");
        }
    }

    #[test]
    fn processors_differ_by_features() {
        let text = |features: &str| format!("processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: {features}\n\n");
        let one = processor_in(&text("fpu sse avx"));
        assert!(one.starts_with("Some CPU with features "), "{one}");
        assert_eq!(one, processor_in(&text("avx fpu sse")));
        assert_ne!(one, processor_in(&text("fpu sse")));
    }
}
