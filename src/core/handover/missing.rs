//! What a kernel may be moved without: rights and things that belong to its host.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::core::error::Error;
use crate::core::spec::{KernelSpec, Net};
use crate::core::venv::is_in_workspace;

/// A kind of what belongs to a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Missing {
    /// Host paths of the specification.
    Paths,
    /// A virtual environment outside the workspace, or of another isolation.
    Venv,
    /// The network.
    Network,
    /// The permission to run without layers of the sandbox.
    Layers,
    /// Mounts added later.
    Mounts,
    /// MCP servers.
    Mcp,
    /// Background processes.
    Processes,
}

impl Missing {
    /// Every kind.
    pub const ALL: [Missing; 7] = [
        Missing::Paths,
        Missing::Venv,
        Missing::Network,
        Missing::Layers,
        Missing::Mounts,
        Missing::Mcp,
        Missing::Processes,
    ];

    /// The name.
    pub const fn name(self) -> &'static str {
        match self {
            Missing::Paths => "paths",
            Missing::Venv => "venv",
            Missing::Network => "network",
            Missing::Layers => "layers",
            Missing::Mounts => "mounts",
            Missing::Mcp => "mcp",
            Missing::Processes => "processes",
        }
    }

    /// What a specification names of its host.
    pub fn of_spec(spec: &KernelSpec) -> Vec<Left> {
        let paths =
            spec.paths.iter().map(|path| Left::new(Missing::Paths, format!("host path {}", path.path.display())));
        let venv = spec.venv.iter().filter(|venv| !is_in_workspace(venv));
        let venv = venv.map(|venv| Left::new(Missing::Venv, format!("virtual environment {}", venv.display())));
        let net = (spec.net != Net::None).then(|| Left::new(Missing::Network, format!("network {}", spec.net.name())));
        let layers = spec.degraded.iter();
        let layers = layers.map(|layer| Left::new(Missing::Layers, format!("permission to run without {layer}")));
        paths.chain(venv).chain(net).chain(layers).collect()
    }
}

/// Something that stays behind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Left {
    /// Its kind.
    pub kind: Missing,
    /// What it is, for people.
    pub text: String,
}

impl Left {
    /// Something of that kind.
    pub fn new(kind: Missing, text: String) -> Left {
        Left { kind, text }
    }
}

/// What a client allows a kernel to be moved without.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Allowed {
    /// Anything.
    All,
    /// These kinds only; empty: nothing.
    Only(BTreeSet<Missing>),
}

impl Default for Allowed {
    fn default() -> Allowed {
        Allowed::Only(BTreeSet::new())
    }
}

impl Allowed {
    /// Everything if `all`, otherwise the kinds with these names.
    ///
    /// # Errors
    /// `invalidArgument` for an unknown name.
    pub fn named<'a>(all: bool, names: impl IntoIterator<Item = &'a str>) -> Result<Allowed, Error> {
        let find = |name: &str| {
            Missing::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| {
                let known = Missing::ALL.map(Missing::name).join(", ");
                Error::invalid(format!(
                    "{:?} is nothing that can be missing",
                    name.chars().take(64).collect::<String>()
                ))
                .reason("missing_kind")
                .hint(format!("one of {known}"))
            })
        };
        let kinds = names.into_iter().map(find).collect::<Result<BTreeSet<Missing>, Error>>()?;
        Ok(if all { Allowed::All } else { Allowed::Only(kinds) })
    }

    /// Whether that kind may be missing.
    pub fn allows(&self, kind: Missing) -> bool {
        match self {
            Allowed::All => true,
            Allowed::Only(kinds) => kinds.contains(&kind),
        }
    }

    /// The names of the kinds; none for [`Allowed::All`].
    pub fn names(&self) -> Vec<&'static str> {
        match self {
            Allowed::All => Vec::new(),
            Allowed::Only(kinds) => kinds.iter().map(|kind| kind.name()).collect(),
        }
    }

    /// Refuses what is not allowed, by its name.
    ///
    /// # Errors
    /// `refused` with reason `missing`; `says` begins the message.
    pub fn check(&self, left: &[Left], says: &str) -> Result<(), Error> {
        let refused: Vec<&Left> = left.iter().filter(|one| !self.allows(one.kind)).collect();
        if refused.is_empty() {
            return Ok(());
        }
        let texts: Vec<&str> = refused.iter().map(|one| one.text.as_str()).collect();
        let kinds: BTreeSet<Missing> = refused.iter().map(|one| one.kind).collect();
        let options: Vec<String> = kinds.iter().map(|kind| format!("--allow-missing={}", kind.name())).collect();
        Err(Error::refused(format!("{says}: {}", texts.join(", ")))
            .reason("missing")
            .hint(format!("{} moves the kernel without them", options.join(" "))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_named_kinds_are_allowed() {
        let left = [Missing::Mounts, Missing::Mcp].map(|kind| Left::new(kind, format!("a {}", kind.name())));
        let said = |allowed: &Allowed| allowed.check(&left, "stay").map_err(|error| (error.message, error.hint));
        assert_eq!(said(&Allowed::All), Ok(()));
        assert_eq!(said(&Allowed::named(false, ["mounts", "mcp", "mcp"]).expect("known")), Ok(()));
        let one = Allowed::named(false, ["mcp"]).expect("known");
        let hint = "--allow-missing=mounts moves the kernel without them";
        assert_eq!(said(&one), Err(("stay: a mounts".into(), hint.into())));
        let both = "--allow-missing=mounts --allow-missing=mcp moves the kernel without them";
        assert_eq!(said(&Allowed::default()), Err(("stay: a mounts, a mcp".into(), both.into())));
        assert_eq!(Allowed::named(true, ["mcp"]), Ok(Allowed::All));
        for name in ["", "Mcp", "mounts,mcp", "all"] {
            assert_eq!(Allowed::named(false, [name]).expect_err(name).reason, "missing_kind");
        }
        for kind in Missing::ALL {
            assert_eq!(Allowed::named(false, [kind.name()]).expect("known").names(), [kind.name()]);
            assert_eq!(serde_json::to_string(&kind).expect("JSON"), format!("{:?}", kind.name()));
        }
    }
}
