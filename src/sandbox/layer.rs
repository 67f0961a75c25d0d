//! The layers of the sandbox by name, the status of each, and the error that names a layer. Pure.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::core::error::{Error, ErrorCode};

macro_rules! layers {
    ($($layer:ident $name:literal $degradable:literal $hint:literal;)*) => {
        /// One layer of the sandbox.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(rename_all = "kebab-case")]
        #[allow(missing_docs, reason = "the name and the hint beside each say what it is")]
        pub enum Layer { $($layer,)* }

        impl Layer {
            /// Every layer in build order.
            pub const ALL: &[Layer] = &[$(Layer::$layer,)*];

            /// The layer's name for people.
            pub const fn name(self) -> &'static str {
                match self { $(Layer::$layer => $name,)* }
            }

            /// Whether an owner may waive it. The others are essential.
            pub const fn can_be_degraded(self) -> bool {
                match self { $(Layer::$layer => $degradable,)* }
            }

            /// A hint for a host that lacks it.
            pub const fn hint(self) -> &'static str {
                match self { $(Layer::$layer => $hint,)* }
            }
        }
    };
}

layers! {
    RunAs "run-as" false "a daemon that runs as root needs an unprivileged user for kernels: set `sandbox.worker_user` in the configuration";
    IdMap "id-map" false "the file system cannot map owners: put the folder on ext4, XFS, Btrfs or tmpfs, or give it to the user that kernels run as";
    UserNs "user-ns" false "allow user namespaces: `sysctl user.max_user_namespaces=15000`; on Ubuntu install ryokan's AppArmor profile or set `kernel.apparmor_restrict_unprivileged_userns=0`; in a container allow `unshare` and `clone` in its seccomp profile";
    MountNs "mount-ns" false "allow mount namespaces: `sysctl user.max_mnt_namespaces=15000`";
    PidNs "pid-ns" false "allow PID namespaces: `sysctl user.max_pid_namespaces=15000`; in a container run it with an unmasked /proc (`--security-opt systempaths=unconfined`)";
    NetNs "net-ns" true "allow network namespaces: `sysctl user.max_net_namespaces=15000`, or give the kernel the host's network";
    IpcNs "ipc-ns" true "allow IPC namespaces: `sysctl user.max_ipc_namespaces=15000`";
    UtsNs "uts-ns" true "allow UTS namespaces: `sysctl user.max_uts_namespaces=15000`";
    CgroupNs "cgroup-ns" true "allow cgroup namespaces: `sysctl user.max_cgroup_namespaces=15000`";
    Keyring "keyring" true "the host kernel lacks keyrings (CONFIG_KEYS) or refuses them";
    PivotRoot "pivot-root" false "the kernel's tree could not be built: see the cause";
    Rlimits "rlimits" true "the daemon's own limits are below what the kernel asks for: raise them (`LimitNOFILE=`, `LimitNPROC=`) or lower the kernel's";
    Memory "memory" true "delegate the memory controller of cgroup v2 to the daemon (`Delegate=yes`)";
    Cpu "cpu" true "delegate the cpu controller of cgroup v2 to the daemon (`Delegate=yes`)";
    Pids "pids" true "delegate the pids controller of cgroup v2 to the daemon (`Delegate=yes`)";
    Capabilities "capabilities" false "capabilities could not be dropped: see the cause";
    NoNewPrivs "no-new-privs" false "the host kernel refuses no_new_privs";
    Landlock "landlock" true "boot a host kernel (5.13 or later) with CONFIG_SECURITY_LANDLOCK and `landlock` in its `lsm=` list";
    LandlockScope "landlock-scope" true "scoping of abstract sockets and signals needs a host kernel 6.12 or later; without it, use `--net none`";
    Seccomp "seccomp" true "boot a host kernel with CONFIG_SECCOMP_FILTER";
    Descriptors "descriptors" false "a descriptor of the host is open in the engine: this is a fault of ryokan's, please report it";
}

impl fmt::Display for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A text that names no waivable layer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no layer {0:?} can be left out; these can: {list}", list = degradable())]
pub struct UnknownLayer(String);

fn degradable() -> String {
    Layer::ALL.iter().filter(|l| l.can_be_degraded()).map(|l| l.name()).collect::<Vec<_>>().join(", ")
}

impl FromStr for Layer {
    type Err = UnknownLayer;
    /// Parses the name of a waivable layer.
    fn from_str(text: &str) -> Result<Self, UnknownLayer> {
        Layer::ALL
            .iter()
            .copied()
            .find(|layer| layer.name() == text && layer.can_be_degraded())
            .ok_or_else(|| UnknownLayer(text.chars().take(40).collect()))
    }
}

/// Status of a layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LayerStatus {
    /// In force and verified.
    Enforced {
        /// Details.
        detail: String,
    },
    /// Waived by the owner, and unavailable.
    Degraded {
        /// Why the host lacks it.
        why: String,
    },
}

/// A layer with its status.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerReport {
    /// The layer.
    pub layer: Layer,
    /// Its status.
    pub status: LayerStatus,
}

impl fmt::Display for LayerReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.status {
            LayerStatus::Enforced { detail } => write!(f, "{}: {detail}", self.layer),
            LayerStatus::Degraded { why } => write!(f, "{}: DEGRADED, {why}", self.layer),
        }
    }
}

/// Every layer of one sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxReport {
    /// In build order.
    pub layers: Vec<LayerReport>,
}

impl SandboxReport {
    /// Records a layer as in force, replacing an earlier record.
    pub fn enforced(&mut self, layer: Layer, detail: impl Into<String>) {
        self.note(layer, LayerStatus::Enforced { detail: detail.into() });
    }

    /// Records a layer's status, replacing an earlier record.
    pub fn note(&mut self, layer: Layer, status: LayerStatus) {
        match self.layers.iter_mut().find(|report| report.layer == layer) {
            Some(report) => report.status = status,
            None => self.layers.push(LayerReport { layer, status }),
        }
    }

    /// The recorded status of a layer.
    pub fn status(&self, layer: Layer) -> Option<&LayerStatus> {
        self.layers.iter().find(|report| report.layer == layer).map(|report| &report.status)
    }

    /// One line per layer, as printed by `show`.
    pub fn lines(&self) -> Vec<String> {
        self.layers.iter().map(LayerReport::to_string).collect()
    }

    /// The waived layers that are missing.
    pub fn degraded(&self) -> impl Iterator<Item = Layer> + '_ {
        self.layers.iter().filter(|r| matches!(r.status, LayerStatus::Degraded { .. })).map(|r| r.layer)
    }
}

/// Why the sandbox could not be built: nothing untrusted has run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("sandbox layer {layer}: {cause}")]
pub struct SandboxError {
    /// The layer that failed.
    pub layer: Layer,
    /// The cause.
    pub cause: String,
    /// What to do next.
    pub hint: String,
}

impl SandboxError {
    /// An error with the layer's own hint.
    pub fn new(layer: Layer, cause: impl Into<String>) -> Self {
        SandboxError { layer, cause: cause.into(), hint: layer.hint().to_owned() }
    }

    /// Replaces the hint.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = hint.into();
        self
    }
}

impl From<SandboxError> for Error {
    fn from(error: SandboxError) -> Self {
        let reason = format!("sandbox-{}", error.layer);
        let code = match error.layer {
            // Usually an invalid path or user, which another request can correct.
            Layer::PivotRoot | Layer::RunAs | Layer::IdMap | Layer::Rlimits => ErrorCode::Refused,
            _ => ErrorCode::Unsupported,
        };
        Error::new(code, error.to_string()).hint(error.hint).reason(reason)
    }
}

/// Converts a failure into an error with its layer and the attempted step.
pub(crate) fn failed<E: fmt::Display>(layer: Layer, what: impl fmt::Display) -> impl FnOnce(E) -> SandboxError {
    move |error| SandboxError::new(layer, format!("{what}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_degradable_layers_parse() {
        for layer in Layer::ALL {
            assert_eq!(layer.name().parse::<Layer>().is_ok(), layer.can_be_degraded(), "{layer}");
            assert!(!layer.hint().is_empty());
        }
        for carried in [Layer::UserNs, Layer::PivotRoot, Layer::Capabilities, Layer::NoNewPrivs, Layer::RunAs] {
            assert!(!carried.can_be_degraded());
        }
        assert!("".parse::<Layer>().is_err());
    }

    #[test]
    fn layer_name_matches_serde() {
        for layer in Layer::ALL {
            assert_eq!(serde_json::to_string(layer).unwrap_or_default(), format!("\"{layer}\""));
        }
    }

    #[test]
    fn sandbox_report_lines() {
        let mut report = SandboxReport::default();
        report.enforced(Layer::Landlock, "abi 7, scoped");
        report.note(Layer::Seccomp, LayerStatus::Degraded { why: "not built in".into() });
        assert_eq!(report.lines(), ["landlock: abi 7, scoped", "seccomp: DEGRADED, not built in"]);
        report.enforced(Layer::Seccomp, "90 instructions");
        assert_eq!(report.degraded().count(), 0);
        assert_eq!(report.layers.len(), 2);
    }
}
