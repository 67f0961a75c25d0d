//! The host's resources that an imported file requests. Pure.
//!
//! A file is as trustworthy as its author, so an import grants none of them unless the client names
//! it.

use std::collections::HashSet;
use std::fmt;

use serde::Serialize;

use crate::core::checkpoint::Manifest;
use crate::core::info::McpTransport;
use crate::core::limits;
use crate::core::spec::Net;

/// What a resource of the host is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ResourceKind {
    /// A host path, visible under the same path from the kernel's creation.
    Path,
    /// A host path that was mounted later.
    Mount,
    /// The host's network.
    Net,
    /// An MCP server.
    Mcp,
    /// A sandbox layer that the kernel may lack.
    Layer,
}

impl ResourceKind {
    /// All kinds.
    const ALL: [ResourceKind; 5] =
        [ResourceKind::Path, ResourceKind::Mount, ResourceKind::Net, ResourceKind::Mcp, ResourceKind::Layer];

    /// The name.
    pub const fn name(self) -> &'static str {
        match self {
            ResourceKind::Path => "path",
            ResourceKind::Mount => "mount",
            ResourceKind::Net => "net",
            ResourceKind::Mcp => "mcp",
            ResourceKind::Layer => "layer",
        }
    }

    /// The kind with this name.
    pub fn from_name(name: &str) -> Option<ResourceKind> {
        ResourceKind::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

/// A resource of the host that a file requests.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct HostResource {
    /// What it is.
    pub kind: ResourceKind,
    /// Its path inside, `host` for the network, the server's or layer's name.
    pub name: String,
    /// The host path; a server's command line or URL; otherwise empty.
    pub source: String,
    /// Whether the kernel could write to the host path.
    pub writable: bool,
}

impl fmt::Display for HostResource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let access = if self.writable { "rw" } else { "ro" };
        match self.kind {
            ResourceKind::Path => write!(f, "path {} ({access})", self.source),
            ResourceKind::Mount => write!(f, "mount {} at {} ({access})", self.source, self.name),
            ResourceKind::Net => write!(f, "net {}", self.name),
            ResourceKind::Mcp => write!(f, "mcp {}: {}", self.name, self.source),
            ResourceKind::Layer => write!(f, "without sandbox layer {}", self.name),
        }
    }
}

/// Cuts text that a crafted file may have made long.
fn bounded(text: &str) -> String {
    text[..text.floor_char_boundary(limits::PATH_BYTES)].to_owned()
}

fn host_path(kind: ResourceKind, inside: &str, source: &str, writable: bool) -> HostResource {
    HostResource { kind, name: bounded(inside), source: bounded(source), writable }
}

fn named(kind: ResourceKind, name: &str) -> HostResource {
    HostResource { kind, name: bounded(name), source: String::new(), writable: false }
}

fn server(name: &str, transport: &McpTransport) -> HostResource {
    let source = match transport {
        McpTransport::Stdio { command, args, .. } => {
            [command].into_iter().chain(args).map(String::as_str).collect::<Vec<_>>().join(" ")
        }
        McpTransport::Http { url, .. } => url.clone(),
    };
    HostResource { source: bounded(&source), ..named(ResourceKind::Mcp, name) }
}

/// Returns the resources that any of the checkpoints requests, each once, in order, up to
/// [`limits::BUNDLE_HOST_RESOURCES`]. Further resources are not listed, so they cannot be granted.
pub fn requested(manifests: &[Manifest]) -> Vec<HostResource> {
    let mut found = HashSet::new();
    for manifest in manifests {
        visit(&mut manifest.clone(), |resource| {
            found.insert(resource);
            true
        });
    }
    let mut found: Vec<_> = found.into_iter().collect();
    found.sort();
    found.truncate(limits::BUNDLE_HOST_RESOURCES);
    found
}

/// Removes every resource from a checkpoint that is not granted.
pub fn keep_granted(manifest: &mut Manifest, granted: &HashSet<HostResource>) {
    visit(manifest, |resource| granted.contains(&resource));
}

/// Passes every resource of a checkpoint to `keep` and removes those for which it returns false.
fn visit(manifest: &mut Manifest, mut keep: impl FnMut(HostResource) -> bool) {
    let spec = &mut manifest.spec;
    spec.paths.retain(|path| {
        let at = path.path.to_string_lossy();
        keep(host_path(ResourceKind::Path, &at, &at, path.writable))
    });
    spec.drop_unseen_venv();
    manifest.mounts.retain(|given| {
        let mount = &given.mount;
        keep(host_path(ResourceKind::Mount, &mount.path, &mount.source, mount.writable))
    });
    if spec.net != Net::None && !keep(named(ResourceKind::Net, spec.net.name())) {
        spec.net = Net::None;
    }
    spec.degraded.retain(|layer| keep(named(ResourceKind::Layer, layer)));
    manifest.mcp.retain(|part| keep(server(&part.name, &part.transport)));
    let mcp = &manifest.mcp;
    manifest.tools.retain(|tool| mcp.iter().any(|part| part.name == tool.source));
}
