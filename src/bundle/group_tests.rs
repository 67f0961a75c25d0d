use super::tests::{World, sign};
use super::*;
use crate::core::checkpoint::Manifest;
use crate::core::error::Error;
use crate::core::freeze::refs::Head as GitHead;
use crate::core::freeze::{
    Captured, DatabasePart, DirectoryPart, FORMAT, FreezeManifest, KernelRevision, Part, RepositoryPart, SchemaRevision,
};
use crate::core::ids::{FreezeId, GroupId, PublicKey, Signature};
use crate::core::limits;
use crate::core::signature::{Signed, Subject};
use crate::store::Store;

/// Seals as a host does.
fn seal(digest: Digest) -> Signed {
    use ring::signature::{Ed25519KeyPair, KeyPair as _};
    let pair = Ed25519KeyPair::from_seed_unchecked(&[6; 32]).expect("a seed");
    let signature = pair.sign(&Subject::Freeze.statement(digest));
    Signed {
        key: PublicKey::from_bytes(pair.public_key().as_ref().try_into().expect("32 bytes")),
        signature: Signature::from_bytes(signature.as_ref().try_into().expect("64 bytes")),
    }
}

/// A store with a freeze of a kernel, a repository, a database and a directory in it.
struct GroupWorld {
    world: World,
    manifest: FreezeManifest,
    head: GroupHead,
}

impl GroupWorld {
    fn new() -> GroupWorld {
        let world = World::new();
        let store = &world.store;
        let kernel = world.head.clone();
        let sealed = kernel.checkpoints[0].manifest;
        let tree = Manifest::decode(&store.get(sealed, u64::MAX).expect("there")).expect("decodes").workspace.tree;
        let image = store.put(b"a database").expect("stored");
        let pack = store.put(b"a history").expect("stored");
        let commit = "ab".repeat(20).parse::<crate::core::freeze::refs::CommitId>().expect("an id");
        let repository = RepositoryPart {
            head: GitHead { commit: commit.clone(), branch: Some("main".into()) },
            index_tree: commit.clone(),
            work_tree: commit,
            changed: 0,
            untracked: 0,
            pack: None,
            dependencies: Vec::new(),
            submodules: Vec::new(),
            worktrees: Vec::new(),
            linked_to: None,
            left_out: Vec::new(),
            marks: Default::default(),
        };
        let revision = SchemaRevision { user_version: 1, schema: "x".into() };
        let database = DatabasePart::Whole { image, bytes: 10, revision, mode: 0o600, no_cow: false };
        let directory = DirectoryPart { tree: Some(tree), entries: 3, uid: 0, gid: 0 };
        let part = |name: &str, captured| Part {
            name: name.into(),
            captured,
            driver: String::new(),
            storage: Default::default(),
        };
        let agent = Captured::Kernel {
            kernel: kernel.kernel,
            kernel_name: "k".into(),
            checkpoint: kernel.begin,
            manifest: Some(sealed),
            repositories: Vec::new(),
            under_way: 0,
            revision: KernelRevision::default(),
        };
        let manifest = FreezeManifest {
            format: FORMAT,
            ryokan: "0".into(),
            id: FreezeId::from_bytes([7; 16]),
            group: GroupId::from_bytes([8; 16]),
            group_name: "shop".into(),
            at_ms: 1,
            configuration: String::new(),
            sections: None,
            changed: Vec::new(),
            origin: None,
            parts: vec![
                part("agent", agent),
                part("code", Captured::Repository { path: "/code".into(), part: repository }),
                part("data", Captured::Database { path: "/data".into(), part: database }),
                part("files", Captured::Directory { path: "/files".into(), part: directory }),
            ],
        };
        let mut made = GroupWorld {
            head: GroupHead {
                ryokan: "0".into(),
                at_ms: 1,
                host: HostId::from_bytes([3; 16]),
                freeze: Freeze {
                    id: manifest.id,
                    number: 1,
                    message: "m".into(),
                    kind: CheckpointType::Manual,
                    creator: "c".into(),
                    at_ms: 1,
                    restored_at_ms: None,
                    manifest: sealed,
                    signed: None,
                },
                kernels: vec![kernel],
                histories: vec![History { member: "code".into(), submodule: String::new(), pack }],
            },
            world,
            manifest,
        };
        made.seal();
        made
    }

    fn seal(&mut self) {
        let digest = self.world.store.put(&self.manifest.encode().expect("encodes")).expect("stored");
        (self.head.freeze.manifest, self.head.freeze.signed) = (digest, Some(seal(digest)));
    }

    fn file(&self) -> Vec<u8> {
        let mut file = Vec::new();
        write_group(&self.world.store, &self.head, sign, &mut file).expect("written");
        file
    }
}

fn read(store: &Store, file: &[u8]) -> Result<Bundle, BundleError> {
    super::read(store, file, |_| Ok(()))
}

fn read_group(store: &Store, file: &[u8]) -> Result<GroupContents, BundleError> {
    match read(store, file)? {
        Bundle::Group(contents) => Ok(*contents),
        Bundle::Kernel(_) => panic!("a kernel's file"),
    }
}

#[test]
fn group_file_holds_freeze() {
    let made = GroupWorld::new();
    let (file, elsewhere) = (made.file(), made.world.elsewhere());
    let contents = read_group(&elsewhere, &file).expect("read");
    assert_eq!((&contents.head, &contents.manifest), (&made.head, &made.manifest));
    assert_eq!(contents.kernels.len(), 1);
    for object in made.manifest.objects().into_iter().chain([made.head.histories[0].pack]) {
        assert_eq!(elsewhere.get(object, u64::MAX).ok(), made.world.store.get(object, u64::MAX).ok());
    }
    let bytes: u64 = contents.sizes.iter().map(|(_, bytes)| bytes).sum();
    assert!(bytes > 19, "{:?}", contents.sizes);
}

#[test]
fn altered_group_file_is_refused() {
    let made = GroupWorld::new();
    let (file, elsewhere) = (made.file(), made.world.elsewhere());
    let places = |step: usize| (0..file.len()).step_by(step).chain(file.len().saturating_sub(80)..file.len());
    for cut in (0..64).chain(places(97_001)) {
        let error = read_group(&elsewhere, &file[..cut]).err().unwrap_or_else(|| panic!("cut at {cut}"));
        assert!(matches!(error, BundleError::Truncated(_)), "cut at {cut}: {error}");
    }
    for at in (0..200).chain(places(61_001)) {
        let mut flipped = file.clone();
        flipped[at] ^= 1 << (at % 8);
        assert!(read(&elsewhere, &flipped[..]).is_err(), "flipped at {at}");
    }
    // A group's head where a kernel's belongs, and the reverse.
    for version in [VERSION, GROUP_VERSION] {
        let mut other = if version == VERSION { file.clone() } else { made.world.file() };
        other[8] = version as u8;
        let error = read(&elsewhere, &other[..]).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.contains("does not begin with its head"), "{version}: {error}");
    }
}

#[test]
fn unadmitted_group_stores_nothing() {
    let made = GroupWorld::new();
    let (file, elsewhere) = (made.file(), made.world.elsewhere());
    let refused = super::read(&elsewhere, &file[..], |head| {
        assert_eq!(head, &made.head);
        Err(Error::refused("by a stranger"))
    });
    assert!(matches!(refused, Err(BundleError::NotAdmitted(error)) if error.message == "by a stranger"));
    assert!(made.manifest.objects().into_iter().all(|object| !elsewhere.contains(object)));
}

/// Files whose signature is right and that say what cannot be.
#[test]
fn inconsistent_group_is_refused() {
    let refused = |change: &dyn Fn(&mut GroupWorld)| {
        let mut made = GroupWorld::new();
        change(&mut made);
        made.seal();
        let (file, elsewhere) = (made.file(), made.world.elsewhere());
        read_group(&elsewhere, &file).err().map(|error| error.to_string()).unwrap_or_default()
    };
    assert_eq!(refused(&|_| {}), "");
    assert!(refused(&|made| made.head.histories.clear()).contains("history"));
    assert!(refused(&|made| made.head.histories.push(made.head.histories[0].clone())).contains("history"));
    assert!(refused(&|made| made.head.histories[0].member = "data".into()).contains("history"));
    assert!(refused(&|made| made.head.histories[0].submodule = "lib".into()).contains("history"));
    assert!(refused(&|made| made.head.kernels.clear()).contains("other kernels"));
    assert!(refused(&|made| made.head.kernels[0].checkpoints.clear()).contains("one checkpoint"));
    let many = limits::GROUP_MEMBERS + 1;
    assert!(
        refused(&move |made| made.head.kernels = vec![made.head.kernels[0].clone(); many]).contains("more members")
    );
    let other = |made: &mut GroupWorld| {
        if let Captured::Kernel { manifest, .. } = &mut made.manifest.parts[0].captured {
            *manifest = Some(Digest::from_bytes([9; 32]));
        }
    };
    assert!(refused(&other).contains("another checkpoint"));
    let larger = |made: &mut GroupWorld| {
        if let Captured::Database { part: DatabasePart::Whole { bytes, .. }, .. } = &mut made.manifest.parts[2].captured
        {
            *bytes += 1;
        }
    };
    assert!(refused(&larger).contains("has not the 11 bytes"));
    assert!(refused(&|made| made.head.freeze.id = FreezeId::from_bytes([1; 16])).contains("another freeze"));
    assert!(refused(&|made| made.manifest.parts[1].name = "../x".into()).contains("no name"));
}

#[test]
fn foreign_seal_is_refused() {
    let mut made = GroupWorld::new();
    // Over another manifest.
    made.head.freeze.signed = Some(seal(Digest::from_bytes([1; 32])));
    let error = read_group(&made.world.elsewhere(), &made.file()).err();
    assert!(matches!(error, Some(BundleError::Signature)), "{error:?}");
    // Without a seal, its sealer is missing, as of freezes of earlier releases.
    made.head.freeze.signed = None;
    assert!(read_group(&made.world.elsewhere(), &made.file()).is_ok());
}

/// The file names objects of the store into which it is read.
#[test]
fn outside_parts_are_refused() {
    let made = GroupWorld::new();
    let with = |change: &dyn Fn(&mut FreezeManifest)| {
        let mut manifest = made.manifest.clone();
        change(&mut manifest);
        // Written with what its kernel and its repository need only.
        let (mut file, mut head) = (Vec::new(), made.head.clone());
        let bytes = manifest.encode().expect("encodes");
        let digest = made.world.store.put(&bytes).expect("stored");
        (head.freeze.manifest, head.freeze.signed) = (digest, Some(seal(digest)));
        let mut writing =
            super::write::Writing::begin(&made.world.store, (Record::Group, GROUP_VERSION), &head, sign, &mut file)
                .expect("begun");
        writing.object(digest).expect("written");
        writing.kernel(&head.kernels[0]).expect("written");
        writing.object(head.histories[0].pack).expect("written");
        writing.finish().expect("written");
        read_group(&made.world.store, &file).err().map(|error| error.to_string()).unwrap_or_default()
    };
    assert!(with(&|_| {}).contains("is not in it"), "the database");
    let secret = made.world.store.put(b"of another user").expect("stored");
    let origin = |manifest: &mut FreezeManifest| {
        manifest.parts.truncate(2);
        manifest.origin = Some(crate::core::freeze::portable::FreezeOrigin {
            host: HostId::from_bytes([3; 16]),
            freeze: FreezeId::from_bytes([3; 16]),
            manifest: secret,
            signed: None,
            file: secret,
        });
    };
    assert!(with(&origin).contains("is not in it"), "the origin");
    assert_eq!(with(&|manifest| manifest.parts.truncate(2)), "");
}
