//! Freezes in files: what a freeze must be to live on another host, and where its members come to be there.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use super::{Captured, DatabasePart, Freeze, FreezeManifest, GroupInfo, MemberInfo};
use crate::core::host_resource::HostResource;
use crate::core::ids::{Digest, FreezeId, HostId};
use crate::core::limits;
use crate::core::name::KernelName;
use crate::core::signature::{Signed, Signer};

/// Where a freeze that came in a file was sealed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FreezeOrigin {
    /// The host that wrote the file.
    pub host: HostId,
    /// The freeze there.
    pub freeze: FreezeId,
    /// Its manifest, which is kept.
    pub manifest: Digest,
    /// The signature over that.
    pub signed: Option<Signed>,
    /// The digest of the file.
    pub file: Digest,
}

/// A group in a file, as clients see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PackedGroup {
    /// Its name.
    pub name: String,
    /// The freeze.
    pub freeze: super::FreezeInfo,
    /// Its members, with where they were.
    pub members: Vec<MemberInfo>,
    /// The host that sealed the freeze.
    pub sealer: Signer,
}

/// What a client asks of the import of a group.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GroupArrival {
    /// The name of the group; empty: that in the file.
    pub name: String,
    /// Members, with a kernel's new name or where another one comes to be.
    pub places: Vec<(String, String)>,
    /// Members that are not imported.
    pub left_out: Vec<String>,
    /// The granted resources of the host.
    pub granted: Vec<HostResource>,
    /// Whether its kernels are here already: they moved with it.
    pub moved: bool,
}

/// An imported group, as clients see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ImportedGroup {
    /// The group.
    pub group: GroupInfo,
    /// Its only freeze.
    pub freeze: super::FreezeInfo,
    /// Members of the file that are not in the group.
    pub left_out: Vec<String>,
    /// The resources of the host that its kernels have.
    pub granted: Vec<HostResource>,
    /// The resources that the file requests and its kernels do not have.
    pub withheld: Vec<HostResource>,
}

/// Checks that a freeze can be restored on another host: it holds whole states, and each kernel's manifest by address.
///
/// # Errors
/// What prevents it, in words.
pub fn check_portable(freeze: &Freeze, manifest: &FreezeManifest) -> Result<(), String> {
    let is_name = |name: &str| name.parse::<KernelName>().is_ok();
    if manifest.id != freeze.id {
        return Err("its manifest is another freeze's".into());
    }
    let texts = [&freeze.creator, &manifest.ryokan, &manifest.configuration].into_iter();
    let texts = texts.chain(manifest.sections.iter().flatten().flat_map(|(name, digest)| [name, digest]));
    let held =
        |part: &'_ super::Part| [&part.driver, &part.storage.version, &part.storage.file_system].map(Clone::clone);
    let held: Vec<String> = manifest.parts.iter().flat_map(held).collect();
    let texts = texts.chain(&held);

    if freeze.message.len() > limits::FREEZE_MESSAGE_BYTES
        || freeze.message.chars().any(char::is_control)
        || manifest.sections.as_ref().is_some_and(|sections| sections.len() > limits::CONFIGURATION_SECTIONS)
        || texts.into_iter().any(|text| text.len() > limits::PATH_BYTES || text.chars().any(char::is_control))
    {
        return Err("a text of it is longer than it may be, or has control characters".into());
    }
    if !is_name(&manifest.group_name) {
        return Err("the name of its group is no name".into());
    }
    if manifest.parts.is_empty() || manifest.parts.len() > limits::GROUP_MEMBERS {
        return Err(format!("{} members", manifest.parts.len()));
    }
    let (mut names, mut kernels, mut histories) = (HashSet::new(), HashSet::new(), 0);
    for part in &manifest.parts {
        let name = &part.name;
        if !is_name(name) || !names.insert(name) {
            return Err("the name of a member is no name, or there twice".into());
        }
        let absent = || Err(format!("member {name} was missing or damaged when the freeze was taken"));
        match &part.captured {
            Captured::Kernel { kernel, kernel_name, manifest, .. } => {
                if !is_name(kernel_name) || !kernels.insert(*kernel) {
                    return Err(format!("member {name} is no kernel of its own"));
                }
                if manifest.is_none() {
                    return Err(format!("the checkpoint of member {name} is not named by its content"));
                }
            }
            Captured::Database { part: DatabasePart::Whole { mode, .. }, .. } if mode & !0o777 != 0 => {
                return Err(format!("the mode of member {name} is out of range"));
            }
            Captured::Database { part: DatabasePart::Absent | DatabasePart::Damaged { .. }, .. } => return absent(),
            Captured::Repository { part, .. } => {
                part.check_submodules(0).map_err(|why| format!("member {name}: {why}"))?;
                histories += part.with_submodules().len();
            }
            Captured::Directory { part, .. } if part.tree.is_none() => return absent(),
            Captured::Postgres { part, .. } if part.image.is_none() => return absent(),
            Captured::Server { part, .. } if part.tree.is_none() => return absent(),
            Captured::Database { .. }
            | Captured::Directory { .. }
            | Captured::Postgres { .. }
            | Captured::Server { .. }
            | Captured::Command { .. } => {}
        }
    }
    match histories > limits::GROUP_HISTORIES {
        true => Err(format!("{histories} repositories and submodules")),
        false => Ok(()),
    }
}

/// Where the content of a member was when it was captured: a kernel's name, a path, a configured name or a connection.
pub fn former_place(captured: &Captured) -> &str {
    match captured {
        Captured::Kernel { kernel_name, .. } => kernel_name,
        Captured::Repository { path, .. } | Captured::Database { path, .. } | Captured::Directory { path, .. } => path,
        Captured::Command { source, .. } => source,
        Captured::Postgres { connection, .. } => connection,
        Captured::Server { server, .. } => server,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::checkpoint::CheckpointType;
    use crate::core::freeze::{DirectoryPart, FORMAT, KernelRevision, Part, SchemaRevision};
    use crate::core::ids::{CheckpointId, GroupId, KernelId};

    fn freeze() -> (Freeze, FreezeManifest) {
        let (id, digest) = (FreezeId::from_bytes([1; 16]), Digest::from_bytes([2; 32]));
        let kernel = Captured::Kernel {
            kernel: KernelId::from_bytes([3; 16]),
            kernel_name: "agent".into(),
            checkpoint: CheckpointId::from_bytes([4; 16]),
            manifest: Some(digest),
            repositories: Vec::new(),
            under_way: 0,
            revision: KernelRevision::default(),
        };
        let revision = SchemaRevision { user_version: 1, schema: "x".into() };
        let part = DatabasePart::Whole { image: digest, bytes: 1, revision, mode: 0o600, no_cow: false };
        let database = Captured::Database { path: "/x".into(), part };
        let part = |name: &str, captured| Part {
            name: name.into(),
            captured,
            driver: String::new(),
            storage: Default::default(),
        };
        let manifest = FreezeManifest {
            format: FORMAT,
            ryokan: "0".into(),
            id,
            group: GroupId::from_bytes([5; 16]),
            group_name: "shop".into(),
            at_ms: 1,
            configuration: String::new(),
            sections: None,
            changed: Vec::new(),
            origin: None,
            parts: vec![part("agent", kernel), part("data", database)],
        };
        let freeze = Freeze {
            id,
            number: 1,
            message: "m".into(),
            kind: CheckpointType::Manual,
            creator: "c".into(),
            at_ms: 1,
            restored_at_ms: None,
            manifest: digest,
            signed: None,
        };
        (freeze, manifest)
    }

    #[test]
    fn odd_freezes_are_refused() {
        let refused = |change: &dyn Fn(&mut Freeze, &mut FreezeManifest)| {
            let (mut freeze, mut manifest) = freeze();
            change(&mut freeze, &mut manifest);
            check_portable(&freeze, &manifest).err().unwrap_or_default()
        };
        assert_eq!(refused(&|_, _| {}), "");
        assert!(refused(&|freeze, _| freeze.id = FreezeId::from_bytes([9; 16])).contains("another"));
        assert!(refused(&|freeze, _| freeze.message = "x".repeat(1000)).contains("longer"));
        assert!(refused(&|freeze, _| freeze.creator = "a\nb".into()).contains("control"));
        assert!(refused(&|freeze, _| freeze.message = "a\x1bb".into()).contains("control"));
        assert!(refused(&|_, manifest| manifest.group_name = "../x".into()).contains("no name"));
        assert!(refused(&|_, manifest| manifest.parts.clear()).contains("0 members"));
        assert!(refused(&|_, manifest| manifest.parts[1].name = "agent".into()).contains("twice"));
        assert!(refused(&|_, manifest| manifest.parts[1].name = "a/b".into()).contains("no name"));
        let again = |_: &mut Freeze, manifest: &mut FreezeManifest| {
            let part = Part { name: "again".into(), ..manifest.parts[0].clone() };
            manifest.parts.push(part);
        };
        assert!(refused(&again).contains("of its own"));
        let nameless = |_: &mut Freeze, manifest: &mut FreezeManifest| {
            if let Captured::Kernel { manifest, .. } = &mut manifest.parts[0].captured {
                *manifest = None;
            }
        };
        assert!(refused(&nameless).contains("by its content"));
        let data = |part: DatabasePart| {
            refused(&move |_, manifest| {
                manifest.parts[1].captured = Captured::Database { path: "/x".into(), part: part.clone() };
            })
        };
        let digest = Digest::from_bytes([2; 32]);
        assert!(data(DatabasePart::Absent).contains("missing"));
        assert!(data(DatabasePart::Damaged { files: vec![("/../../x".into(), digest, 0)] }).contains("damaged"));
        let revision = SchemaRevision { user_version: 1, schema: "x".into() };
        assert!(
            data(DatabasePart::Whole { image: digest, bytes: 1, revision, mode: 0o4755, no_cow: false })
                .contains("mode")
        );
        let empty = |_: &mut Freeze, manifest: &mut FreezeManifest| {
            manifest.parts[1].captured = Captured::Directory { path: "/x".into(), part: DirectoryPart::default() };
        };
        assert!(refused(&empty).contains("missing"));
    }
}
