//! The host's abilities, tested by use where that is cheap and harmless. For `ryokan doctor` and
//! the daemon's `info`.
//!
//! The sandbox is tested as a whole by the worker's own `probe`, in a process of its own: exactly
//! what a kernel would get.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::unistd::{AccessFlags, Uid, access};

use super::daemon_side::Unfound;
use super::layer::{SandboxError, SandboxReport};
use crate::core::engine::EngineName;
use crate::core::info::Ability;

/// Every ability except the file system's, in `doctor`'s order. `worker` is the worker's binary;
/// `interpreters` are those of engines that are host programs.
pub fn abilities(
    worker: &Path,
    interpreters: &BTreeMap<EngineName, PathBuf>,
    system_paths: &[PathBuf],
) -> Vec<Ability> {
    let mut found = vec![user_namespaces(), landlock(), seccomp(), sandbox(worker), cgroup(), idmapped_mounts()];
    found.extend([kvm(worker), tool("qemu", qemu_name(), "microVMs with QEMU", "qemu-system-x86 (or -arm)")]);
    found.push(tool("firecracker", "firecracker", "microVMs with Firecracker", "firecracker, from its releases"));
    found.push(overlayfs());
    found.push(tool("criu", "criu", "memory of process kernels in snapshots", "criu 4.0 or later"));
    found.extend(interpreters.iter().map(|(engine, command)| interpreter(*engine, command, system_paths)));
    found.push(tool("ssh", "ssh", "teleport over ssh", "openssh-client"));
    found
}

fn present(name: &str, required: bool, detail: impl Into<String>) -> Ability {
    Ability { name: name.into(), present: true, required, detail: detail.into(), hint: String::new() }
}

fn missing(name: &str, required: bool, detail: impl Into<String>, hint: impl Into<String>) -> Ability {
    Ability { name: name.into(), present: false, required, detail: detail.into(), hint: hint.into() }
}

fn setting(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// The host's settings for user namespaces. The sandbox test finds out whether they work.
fn user_namespaces() -> Ability {
    const NAME: &str = "user namespaces";
    let refused = |detail: &str, hint: &str| missing(NAME, true, detail, hint);
    if setting("/proc/sys/user/max_user_namespaces").as_deref() == Some("0") {
        return refused("user.max_user_namespaces is 0", "sudo sysctl -w user.max_user_namespaces=15000");
    }
    let root = Uid::effective().is_root();
    if !root && setting("/proc/sys/kernel/unprivileged_userns_clone").as_deref() == Some("0") {
        return refused("kernel.unprivileged_userns_clone is 0", "sudo sysctl -w kernel.unprivileged_userns_clone=1");
    }
    if !root && setting("/proc/sys/kernel/apparmor_restrict_unprivileged_userns").as_deref() == Some("1") {
        let profiled = setting("/proc/self/attr/apparmor/current").is_some_and(|label| label.starts_with("ryokan"));
        if !profiled {
            return refused(
                "AppArmor removes all rights in new user namespaces (Ubuntu 23.10 and later)",
                "install ryokan's AppArmor profile (it grants `userns,`), or: sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
            );
        }
    }
    if !Path::new("/proc/self/ns/user").exists() {
        return refused("the host kernel has none", "boot a host kernel with CONFIG_USER_NS");
    }
    present(NAME, true, format!("at most {}", setting("/proc/sys/user/max_user_namespaces").unwrap_or_default()))
}

fn landlock() -> Ability {
    match crate::sys::landlock::abi() {
        Ok(abi) if abi >= 6 => present("landlock", true, format!("ABI {abi}, with scopes")),
        Ok(abi) => {
            present("landlock", true, format!("ABI {abi}, without scopes: kernels with the host's network need 6"))
        }
        Err(error) => missing("landlock", true, error.to_string(), super::Layer::Landlock.hint()),
    }
}

fn seccomp() -> Ability {
    let actions = setting("/proc/sys/kernel/seccomp/actions_avail").unwrap_or_default();
    if actions.split_whitespace().any(|action| action == "kill_process") {
        present("seccomp", true, "filters that can end a process")
    } else {
        missing("seccomp", true, "no filters", super::Layer::Seccomp.hint())
    }
}

/// Builds the whole sandbox once, around `/bin/true`.
fn sandbox(worker: &Path) -> Ability {
    const NAME: &str = "sandbox";
    #[derive(serde::Deserialize)]
    struct Answer {
        report: Option<SandboxReport>,
        error: Option<SandboxError>,
        status: i32,
    }
    let output = Command::new(worker).args(["probe", "--json", "--", "/bin/true"]).stdin(Stdio::null()).output();
    let output = match output {
        Ok(output) => output,
        Err(error) => {
            let detail = format!("cannot run {}: {error}", worker.display());
            return missing(NAME, true, detail, "install ryokan-worker beside ryokand");
        }
    };
    match serde_json::from_slice::<Answer>(&output.stdout) {
        Ok(Answer { report: Some(report), status: 0, .. }) => {
            present(NAME, true, format!("{} layers in force", report.layers.len()))
        }
        Ok(Answer { error: Some(error), .. }) => missing(NAME, true, error.to_string(), error.hint),
        Ok(Answer { status, .. }) => {
            missing(NAME, true, format!("/bin/true ended with {status}"), "is there a /bin/true on this host?")
        }
        Err(_) => {
            let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            missing(NAME, true, format!("the probe failed: {said}"), "run `ryokan-worker probe --report -- /bin/true`")
        }
    }
}

/// The cgroup v2 folder of this process, if the host has cgroup v2.
pub fn own_cgroup() -> Option<PathBuf> {
    let membership = setting("/proc/self/cgroup")?;
    let path = membership.lines().find_map(|line| line.strip_prefix("0::"))?.trim_start_matches('/').to_owned();
    let mounts = setting("/proc/self/mounts")?;
    let mount = mounts.lines().find_map(|line| {
        let mut words = line.split(' ');
        let place = words.nth(1)?;
        (words.next()? == "cgroup2").then(|| PathBuf::from(place))
    })?;
    Some(mount.join(path))
}

fn cgroup() -> Ability {
    const NAME: &str = "cgroup v2";
    let Some(own) = own_cgroup() else {
        return missing(
            NAME,
            false,
            "not mounted",
            "boot with systemd.unified_cgroup_hierarchy=1; until then rlimits and a watchdog limit kernels",
        );
    };
    let controllers = setting(&own.join("cgroup.controllers").to_string_lossy()).unwrap_or_default();
    let has = |name: &str| controllers.split_whitespace().any(|controller| controller == name);
    let lacking: Vec<&str> = ["memory", "pids", "cpu"].into_iter().filter(|name| !has(name)).collect();
    let writable = access(&own.join("cgroup.procs"), AccessFlags::W_OK).is_ok();
    match (lacking.as_slice(), writable) {
        ([], true) => present(NAME, false, format!("memory, pids, cpu delegated at {}", own.display())),
        ([], false) => missing(NAME, false, "not delegated to ryokan", "run ryokand under systemd with Delegate=yes"),
        (lacking, _) => missing(
            NAME,
            false,
            format!("without {}", lacking.join(", ")),
            "run ryokand under systemd with Delegate=yes, on a host with the unified hierarchy; until then rlimits and a watchdog limit kernels",
        ),
    }
}

fn idmapped_mounts() -> Ability {
    const NAME: &str = "id-mapped mounts";
    if !Uid::effective().is_root() {
        return present(NAME, false, "not needed: ryokan is not root");
    }
    let release = setting("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split(['.', '-']).map(|number| number.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version >= (5, 12) {
        present(NAME, true, format!("host kernel {release}; `sandbox` tries it"))
    } else {
        missing(
            NAME,
            true,
            format!("host kernel {release}"),
            "boot a host kernel 5.12 or later, or run ryokand as an ordinary user",
        )
    }
}

fn kvm(worker: &Path) -> Ability {
    const NAME: &str = "kvm";
    match access("/dev/kvm", AccessFlags::R_OK | AccessFlags::W_OK) {
        Ok(()) => match super::kvm::speed(worker) {
            Ok(time) => present(NAME, false, format!("/dev/kvm, a guest's loop in {time:.1?}")),
            Err(why) => missing(NAME, false, why, "nothing: virtual machines use software emulation, and are slower"),
        },
        Err(nix::errno::Errno::EACCES) => missing(
            NAME,
            false,
            "no permission to open /dev/kvm",
            "add yourself to its group: sudo usermod -aG kvm $USER",
        ),
        Err(error) => missing(
            NAME,
            false,
            format!("/dev/kvm: {error}"),
            "enable virtualisation in the firmware (or nested virtualisation); process isolation works without it",
        ),
    }
}

const fn qemu_name() -> &'static str {
    if cfg!(target_arch = "aarch64") { "qemu-system-aarch64" } else { "qemu-system-x86_64" }
}

/// Finds a program in `PATH`.
fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|file| access(file, AccessFlags::X_OK).is_ok())
}

fn tool(name: &str, program: &str, what_for: &str, package: &str) -> Ability {
    match find(program) {
        Some(path) => with_version(name, &path, if program == "ssh" { "-V" } else { "--version" }),
        None => {
            let detail = format!("{program} is not in PATH; {what_for} need it");
            missing(name, false, detail, format!("install {package}"))
        }
    }
}

/// Finds an engine's interpreter as kernels see it, which may differ from the user's `PATH`.
fn interpreter(engine: EngineName, command: &Path, system_paths: &[PathBuf]) -> Ability {
    match super::find_program(command, system_paths) {
        Ok(path) => {
            let found = with_version(engine.name(), &path, "--version");
            match engine.too_old(found.detail.split_once('(').map_or("", |(_, said)| said)) {
                Some(why) => {
                    let hint = format!("install a newer one, or name it in engines.{engine}.command");
                    missing(engine.name(), false, format!("{}: {why}", path.display()), hint)
                }
                None => found,
            }
        }
        Err(why) => {
            let detail = match why {
                Unfound::Absent => format!("there is no {}", command.display()),
                Unfound::Hidden => format!("{} is not where kernels could see it", command.display()),
            };
            let hint = format!(
                "install {engine} below /usr, name another interpreter in engines.{engine}.command, or its folder in sandbox.system_paths"
            );
            missing(engine.name(), false, detail, hint)
        }
    }
}

fn with_version(name: &str, path: &Path, argument: &str) -> Ability {
    let output = Command::new(path).arg(argument).stdin(Stdio::null()).output();
    let said = output.map(|output| [output.stdout, output.stderr].concat()).unwrap_or_default();
    let line = String::from_utf8_lossy(&said).lines().next().unwrap_or("").chars().take(80).collect::<String>();
    present(name, false, format!("{} ({line})", path.display()))
}

fn overlayfs() -> Ability {
    let known =
        setting("/proc/filesystems").is_some_and(|list| list.lines().any(|line| line.trim_end().ends_with("overlay")));
    if known {
        present("overlayfs", false, "in the host kernel")
    } else {
        missing("overlayfs", false, "not in the host kernel, or its module is not loaded", "sudo modprobe overlay")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_ability_has_hint() {
        let interpreters = BTreeMap::from([(EngineName::Node, PathBuf::from("/usr/bin/no-such-node"))]);
        let found = abilities(Path::new("/nonexistent/worker"), &interpreters, &[]);
        let node = found.iter().find(|ability| ability.name == "node").expect("it is reported");
        assert!(!node.present && node.detail.contains("no-such-node") && node.hint.contains("engines.node.command"));
        for ability in found {
            assert!(!ability.detail.is_empty(), "{}", ability.name);
            assert_eq!(ability.present, ability.hint.is_empty(), "{ability:?}");
        }
    }

    #[test]
    fn sandbox_needs_worker() {
        let ability = sandbox(Path::new("/nonexistent/worker"));
        assert!(!ability.present && ability.required);
    }
}
