//! What runs this host's machines: QEMU or Firecracker, chosen for each machine by configuration and ability.
//!
//! ```text
//!  auto ── KVM serves, a usable Firecracker is found, the image knows vsock ─▶ Firecracker with KVM
//!     └── else ─▶ QEMU with KVM or software emulation
//! ```

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime};

use super::accelerator::{Accelerators, Chosen, GivenUp};
use super::image::Image;
use super::template::Kind;
use super::{firecracker, qemu};
use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::core::vmm::WantedVmm;

/// A virtual machine monitor.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Vmm {
    #[default]
    Qemu,
    Firecracker,
}

/// What runs a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Choice {
    pub vmm: Vmm,
    pub accelerator: Chosen,
    /// Name and version of the monitor.
    pub version: String,
}

/// The settings of the choice.
pub(super) struct VmmSettings {
    pub wanted: WantedVmm,
    /// The path of Firecracker; `None`: where a shell would find it.
    pub firecracker: Option<PathBuf>,
    /// Uid and gid of the monitor, in a daemon that is root.
    pub account: Option<(u32, u32)>,
}

/// The monitors of a host.
pub(super) struct Vmms {
    settings: VmmSettings,
    accelerators: Accelerators,
    /// Why `auto` does not choose Firecracker for a while.
    given_up: RefCell<GivenUp>,
    /// Versions, and when the programs' files were changed.
    known: RefCell<Vec<(PathBuf, SystemTime, Result<String>)>>,
}

impl Vmms {
    pub(super) fn new(settings: VmmSettings, accelerators: Accelerators) -> Rc<Vmms> {
        Rc::new(Vmms { settings, accelerators, given_up: RefCell::default(), known: RefCell::default() })
    }

    /// Whether a monitor is installed. Starts nothing.
    ///
    /// # Errors
    /// `unsupported`.
    pub(super) fn check(&self) -> Result<()> {
        match self.settings.wanted {
            WantedVmm::Qemu => qemu::program().map(drop),
            WantedVmm::Firecracker => self.program(Vmm::Firecracker).map(drop),
            WantedVmm::Auto => {
                qemu::program().or_else(|error| self.program(Vmm::Firecracker).map_err(|_| error)).map(drop)
            }
        }
    }

    /// The program.
    ///
    /// # Errors
    /// `unsupported`.
    pub(super) fn program(&self, vmm: Vmm) -> Result<PathBuf> {
        match vmm {
            Vmm::Qemu => qemu::program(),
            Vmm::Firecracker => firecracker::program(self.settings.firecracker.as_deref()),
        }
    }

    /// What runs the next machine of that image.
    ///
    /// # Errors
    /// `unsupported` if what is wanted cannot run it.
    pub(super) async fn choose(&self, image: &Image) -> Result<Choice> {
        match self.settings.wanted {
            WantedVmm::Qemu => self.qemu().await,
            WantedVmm::Firecracker => self.firecracker(image).await,
            WantedVmm::Auto if self.given_up.borrow().why(Instant::now()).is_some() => self.qemu().await,
            WantedVmm::Auto => match self.firecracker(image).await {
                Ok(choice) => Ok(choice),
                Err(error) => {
                    tracing::debug!(%error, "QEMU runs the next virtual machine");
                    self.qemu().await
                }
            },
        }
    }

    async fn qemu(&self) -> Result<Choice> {
        let accelerator = self.accelerators.choose().await?;
        Ok(Choice { vmm: Vmm::Qemu, accelerator, version: self.version(Vmm::Qemu).await? })
    }

    async fn firecracker(&self, image: &Image) -> Result<Choice> {
        let version = self.version(Vmm::Firecracker).await?;
        firecracker::group(self.settings.account)?;
        if !image.has_vsock {
            return Err(Error::unsupported(format!(
                "image {} has no vsock, by which Firecracker is reached",
                image.version
            ))
            .reason("image")
            .hint("build the image again: scripts/build-image"));
        }
        if let Err(why) = self.accelerators.kvm().await? {
            return Err(Error::unsupported(format!("Firecracker needs KVM, which does not serve on this host: {why}"))
                .reason("kvm")
                .hint("set microvm.vmm to \"auto\" in the daemon's configuration"));
        }
        Ok(Choice { vmm: Vmm::Firecracker, accelerator: Chosen::Kvm, version })
    }

    /// What continues a saved machine: what it ran with, or the configured monitor, with which it is refused.
    ///
    /// # Errors
    /// `refused` with the reason `vmm_mismatch` if its monitor is no more.
    pub(super) async fn choose_again(&self, saved: &Kind) -> Result<Choice> {
        let vmm = match (self.settings.wanted, saved.vmm()) {
            (WantedVmm::Auto, vmm) => vmm,
            (WantedVmm::Qemu, _) => Vmm::Qemu,
            (WantedVmm::Firecracker, _) => Vmm::Firecracker,
        };
        let accelerator = if saved.uses_kvm() || vmm == Vmm::Firecracker { Chosen::Kvm } else { Chosen::Tcg };
        let version = self.version(vmm).await.map_err(|error| {
            Error::refused(format!("it was saved by {}: {}", saved.vmm, error.message))
                .reason("vmm_mismatch")
                .hint(error.hint)
        })?;
        Ok(Choice { vmm, accelerator, version })
    }

    /// Records that a machine of that kind did not boot. Returns the event if the next one may run with something else.
    pub(super) fn give_up(&self, kind: &Kind, why: &Error) -> Option<&'static str> {
        match (kind.vmm(), self.settings.wanted) {
            (Vmm::Firecracker, WantedVmm::Auto) => {
                self.given_up.borrow_mut().note(why.message.clone(), Instant::now());
                Some("firecracker_given_up")
            }
            (Vmm::Firecracker, WantedVmm::Qemu | WantedVmm::Firecracker) => None,
            (Vmm::Qemu, _) => (kind.uses_kvm() && self.accelerators.give_up(why)).then_some("kvm_given_up"),
        }
    }

    /// Name and version of a monitor. Asked again when its file changes.
    ///
    /// # Errors
    /// `unsupported`.
    pub(super) async fn version(&self, vmm: Vmm) -> Result<String> {
        let program = self.program(vmm)?;
        let failed = |error: std::io::Error| Error::unsupported(format!("{}: {error}", program.display()));
        let changed = program.metadata().and_then(|found| found.modified()).map_err(failed)?;
        let known = self.known.borrow().iter().find(|(path, at, _)| *path == program && *at == changed).cloned();
        if let Some((_, _, version)) = known {
            return version;
        }
        // Not kept: a busy host may be late.
        let printed = printed_version(&program).await?;
        let version = match vmm {
            Vmm::Qemu => qemu::printed(&printed),
            Vmm::Firecracker => firecracker::printed(&printed).map(|version| firecracker::name(&version.to_string())),
        };
        let mut known = self.known.borrow_mut();
        known.retain(|(path, ..)| *path != program);
        known.push((program, changed, version.clone()));
        version
    }
}

/// What a monitor prints for its version.
async fn printed_version(program: &Path) -> Result<String> {
    let failed = |error: std::io::Error| Error::unsupported(format!("{}: {error}", program.display()));
    let mut command = tokio::process::Command::new(program);
    command.arg("--version").env_clear().stdin(std::process::Stdio::null()).kill_on_drop(true);
    let said = tokio::time::timeout(limits::VM_CALL, command.output()).await;
    let said = said.map_err(|_| Error::deadline(format!("{} does not say its version", program.display())))?;
    Ok(String::from_utf8_lossy(&said.map_err(failed)?.stdout).into_owned())
}

/// As [`printed_version`], blocking.
fn printed_blocking(program: &Path) -> Result<String> {
    let failed = |error: std::io::Error| Error::unsupported(format!("{}: {error}", program.display()));
    let mut command = std::process::Command::new(program);
    command.arg("--version").env_clear().stdin(std::process::Stdio::null()).stdout(std::process::Stdio::piped());
    let mut child = command.stderr(std::process::Stdio::null()).spawn().map_err(failed)?;
    let until = Instant::now() + limits::VM_CALL;
    while child.try_wait().map_err(failed)?.is_none() {
        if Instant::now() > until {
            let _ = child.kill();
            let _ = child.wait();
            return Err(Error::deadline(format!("{} does not say its version", program.display())));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let said = child.wait_with_output().map_err(failed)?;
    Ok(String::from_utf8_lossy(&said.stdout).into_owned())
}

/// Which monitor would run machines here, for `doctor`. KVM is measured elsewhere. Blocks.
pub(super) fn describe(settings: &VmmSettings) -> Result<String> {
    let firecracker = || {
        let program = firecracker::program(settings.firecracker.as_deref())?;
        firecracker::group(settings.account)?;
        let version = firecracker::printed(&printed_blocking(&program)?)?;
        Ok::<_, Error>(format!("{} {version} where KVM serves", program.display()))
    };
    let qemu = || {
        let program = qemu::program()?;
        qemu::printed(&printed_blocking(&program)?)?;
        Ok::<_, Error>(program.display().to_string())
    };
    match settings.wanted {
        WantedVmm::Qemu => qemu(),
        WantedVmm::Firecracker => firecracker(),
        WantedVmm::Auto => match (firecracker(), qemu()) {
            (Ok(firecracker), Ok(qemu)) => Ok(format!("{firecracker}, else {qemu}")),
            (Ok(firecracker), Err(_)) => Ok(firecracker),
            (Err(why), Ok(qemu)) if settings.firecracker.is_some() => {
                Ok(format!("{qemu}; no Firecracker: {}", why.message))
            }
            (Err(_), qemu) => qemu,
        },
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::super::image;
    use super::super::image::tests::write_image;
    use super::super::template::tests::kind;
    use super::*;
    use crate::core::accelerator::Accelerator;
    use crate::core::error::ErrorCode;
    use crate::link::bootstrap::BUILD;

    /// The monitors of a host where KVM is not used.
    pub(in crate::isolation::microvm) fn vmms(wanted: WantedVmm, firecracker: Option<PathBuf>) -> Rc<Vmms> {
        let accelerators = Accelerators::new(Accelerator::Tcg, PathBuf::from("/nowhere"));
        Vmms::new(VmmSettings { wanted, firecracker, account: None }, accelerators)
    }

    fn program(folder: &Path, name: &str, says: &str) -> PathBuf {
        let path = folder.join(name);
        std::fs::write(&path, format!("#!/bin/sh\necho '{says}'\n")).expect("written");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("executable");
        path
    }

    /// A host with a Firecracker of that version and a loop of that many microseconds in a KVM guest.
    fn host(folder: &Path, wanted: WantedVmm, version: &str, micros: u32) -> Rc<Vmms> {
        let firecracker = Some(program(folder, "fc", &format!("Firecracker v{version}")));
        let worker = program(folder, "worker", &micros.to_string());
        Vmms::new(VmmSettings { wanted, firecracker, account: None }, Accelerators::new(Accelerator::Auto, worker))
    }

    fn image(folder: &Path) -> Image {
        write_image(folder, "abc", "abc", BUILD);
        image::find(folder, "").expect("an image")
    }

    #[tokio::test]
    async fn firecracker_needs_all_conditions() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut image = image(&folder.path().join("images"));
        let cases = [
            ("1.16.1", 300, true, None),
            ("1.16.0", 300, true, Some(("firecracker", "restored machine"))),
            ("1.12.0", 300, true, Some(("firecracker", "older"))),
            ("1.16.1", 27000, true, Some(("kvm", "27.0ms"))),
            ("1.16.1", 300, false, Some(("image", "no vsock"))),
        ];
        for (version, micros, has_vsock, why) in cases {
            image.has_vsock = has_vsock;
            let chosen = host(folder.path(), WantedVmm::Firecracker, version, micros).choose(&image).await;
            // Nothing else is used in silence.
            match (chosen, why) {
                (Ok(choice), None) => assert_eq!(choice.version, format!("Firecracker v{version}")),
                (Err(error), Some((reason, text))) => {
                    assert_eq!((error.code, error.reason.as_str()), (ErrorCode::Unsupported, reason), "{error}");
                    assert!(error.message.contains(text) && !error.hint.is_empty(), "{error:?}");
                }
                (chosen, why) => panic!("{version} {micros} {has_vsock}: {chosen:?}, expected {why:?}"),
            }
            if qemu::program().is_ok() {
                let auto = host(folder.path(), WantedVmm::Auto, version, micros).choose(&image).await.expect("chosen");
                let expected = if why.is_none() { Vmm::Firecracker } else { Vmm::Qemu };
                assert_eq!(auto.vmm, expected, "{version} {micros} {has_vsock}");
                let accelerator = if micros > 5000 { Chosen::Tcg } else { Chosen::Kvm };
                assert_eq!(auto.accelerator, accelerator, "{version} {micros} {has_vsock}");
            }
        }
    }

    #[tokio::test]
    async fn unbootable_firecracker_is_given_up() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut image = image(&folder.path().join("images"));
        image.has_vsock = true;
        let late = Error::deadline("no answer");
        let own = Kind { vmm: firecracker::name("1.16.1"), machine: firecracker::machine(), ..kind() };
        let forced = host(folder.path(), WantedVmm::Firecracker, "1.16.1", 300);
        assert_eq!(forced.give_up(&own, &late), None, "nothing else is used in silence");
        assert_eq!(forced.choose(&image).await.map(|choice| choice.vmm).ok(), Some(Vmm::Firecracker));
        let auto = host(folder.path(), WantedVmm::Auto, "1.16.1", 300);
        assert_eq!(auto.choose(&image).await.map(|choice| choice.vmm).ok(), Some(Vmm::Firecracker));
        assert_eq!(auto.give_up(&own, &late), Some("firecracker_given_up"));
        if qemu::program().is_err() {
            return;
        }
        // KVM stays, until a machine with QEMU does not boot with it either.
        let next = auto.choose(&image).await.expect("chosen");
        assert_eq!((next.vmm, next.accelerator), (Vmm::Qemu, Chosen::Kvm));
        auto.given_up.borrow_mut().until = None;
        assert_eq!(auto.choose(&image).await.map(|choice| choice.vmm).ok(), Some(Vmm::Firecracker), "a second try");
        assert_eq!(auto.give_up(&own, &late), Some("firecracker_given_up"));
        let with_kvm = Kind { machine: qemu::machine(Chosen::Kvm), ..kind() };
        assert_eq!(auto.give_up(&with_kvm, &late), Some("kvm_given_up"));
        assert_eq!(auto.choose(&image).await.map(|choice| choice.accelerator).ok(), Some(Chosen::Tcg));
        assert_eq!(auto.give_up(&Kind { machine: qemu::machine(Chosen::Tcg), ..kind() }, &late), None);
    }

    #[tokio::test]
    async fn forced_software_excludes_firecracker() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut image = image(folder.path());
        image.has_vsock = true;
        let firecracker = Some(program(folder.path(), "fc", "Firecracker v1.16.1"));
        let refused = vmms(WantedVmm::Firecracker, firecracker).choose(&image).await.expect_err("no KVM");
        assert!(refused.message.contains("microvm.accelerator is"), "{refused}");
    }

    #[tokio::test]
    async fn saved_machines_keep_monitor() {
        let folder = tempfile::tempdir().expect("a folder");
        let saved = Kind { vmm: firecracker::name("1.16.1"), machine: firecracker::machine(), ..kind() };
        let again = |wanted| {
            let host = host(folder.path(), wanted, "1.16.1", 27000);
            let saved = saved.clone();
            async move { host.choose_again(&saved).await }
        };
        for wanted in [WantedVmm::Auto, WantedVmm::Firecracker] {
            let choice = again(wanted).await.expect("chosen");
            assert_eq!(
                (choice.vmm, choice.accelerator, choice.version),
                (Vmm::Firecracker, Chosen::Kvm, saved.vmm.clone())
            );
        }
        if qemu::program().is_ok() {
            let other = again(WantedVmm::Qemu).await.expect("chosen");
            assert!(other.vmm == Vmm::Qemu && other.version != saved.vmm);
        }
        let gone = vmms(WantedVmm::Auto, Some(folder.path().join("none")));
        let refused = gone.choose_again(&saved).await.expect_err("it is gone");
        assert_eq!((refused.code, refused.reason.as_str()), (ErrorCode::Refused, "vmm_mismatch"));
    }
}
