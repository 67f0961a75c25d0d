use super::*;
use crate::core::checkpoint::{FORMAT, Manifest, McpPart, StatePart, StateParts, WorkspacePart};
use crate::core::engine::EngineName;
use crate::core::ids::{Epoch, PublicKey, Signature};
use crate::core::signature::{Signed, Subject};
use crate::core::spec::KernelSpec;
use crate::store::Store;
use crate::workspace::{Tracker, WorkspacePaths};

/// Signs as a host does.
pub(super) fn sign(digest: Digest) -> Signed {
    use ring::signature::{Ed25519KeyPair, KeyPair as _};
    let pair = Ed25519KeyPair::from_seed_unchecked(&[5; 32]).expect("a seed");
    let signature = pair.sign(&Subject::Export.statement(digest));
    Signed {
        key: PublicKey::from_bytes(pair.public_key().as_ref().try_into().expect("32 bytes")),
        signature: Signature::from_bytes(signature.as_ref().try_into().expect("64 bytes")),
    }
}

/// The signature's record over a head.
fn signature_of(json: &[u8]) -> Vec<u8> {
    let Signed { key, signature } = sign(Digest::from_bytes(*blake3::hash(json).as_bytes()));
    [&key.as_bytes()[..], signature.as_bytes()].concat()
}

/// Reads a kernel's file.
fn read(store: &Store, from: impl std::io::Read) -> Result<Contents, BundleError> {
    match super::read(store, from, |_| Ok(()))? {
        Bundle::Kernel(contents) => Ok(*contents),
        Bundle::Group(_) => panic!("a group's file"),
    }
}

/// A store with one checkpoint in it, and the head that speaks of it.
pub(super) struct World {
    dir: tempfile::TempDir,
    pub(super) store: Store,
    pub(super) head: Head,
}

impl World {
    pub(super) fn new() -> World {
        let dir = tempfile::tempdir().expect("a folder");
        let store = Store::open(&dir.path().join("store")).expect("opened");
        let workspace = dir.path().join("workspace");
        std::fs::create_dir_all(workspace.join("inner")).expect("made");
        std::fs::write(workspace.join("small"), "small").expect("written");
        // Not to be compressed away: more than one piece, and an object that is stored by itself.
        let noise: Vec<u8> =
            (0..600_000u64).flat_map(|n| blake3::hash(&n.to_le_bytes()).as_bytes()[..4].to_vec()).collect();
        std::fs::write(workspace.join("inner/large"), &noise).expect("written");
        let (staging, index) = (dir.path().join("staging"), dir.path().join("index"));
        let mut tracker = Tracker::open(WorkspacePaths { workspace, staging, index }).expect("opened");
        let captured = tracker.capture(&store).expect("captured");
        let body = store.put(b"a body of state").expect("stored");
        let parts = StateParts {
            entries: vec![StatePart { key: "var/x".into(), meta: serde_json::json!({}), body, bytes: 15 }],
        };
        let state = store.put(&parts.encode().expect("encodes")).expect("stored");
        let (kernel, id) = (KernelId::from_bytes([1; 16]), CheckpointId::from_bytes([2; 16]));
        let manifest = Manifest {
            format: FORMAT,
            kind: Manifest::kind_with(None),
            ryokan: "0".into(),
            arch: "x".parse().expect("a name"),
            base_image_version: String::new(),
            engine_version: String::new(),
            host: HostId::from_bytes([3; 16]),
            kernel,
            epoch: Epoch(1),
            id,
            parent: None,
            at_ms: 1,
            engine: EngineName::Kaish,
            spec: KernelSpec::new("k".parse().expect("a name"), EngineName::Kaish),
            journal: 1,
            state,
            workspace: WorkspacePart { tree: captured.tree.0, files: captured.entries },
            mounts: Vec::new(),
            mcp: Vec::<McpPart>::new(),
            work: Default::default(),
            tools: Vec::new(),
            missed: Vec::new(),
            audit: None,
            repositories: Vec::new(),
            dependencies: Vec::new(),
            databases: Vec::new(),
            machine: None,
        };
        let sealed = store.put(&manifest.encode().expect("encodes")).expect("stored");
        let packed = Packed {
            id,
            name: "one".into(),
            description: String::new(),
            summary: String::new(),
            kind: CheckpointType::Manual,
            creator: "me".into(),
            at_ms: 1,
            parent: None,
            pinned: false,
            manifest: sealed,
        };
        let blob = store.put(&vec![7; 3 << 20]).expect("stored");
        let head = Head {
            ryokan: "0".into(),
            at_ms: 1,
            host: HostId::from_bytes([3; 16]),
            kernel,
            name: "k".into(),
            generation: 0,
            begin: id,
            checkpoints: vec![packed],
            blobs: vec![blob],
            decisions: Vec::new(),
            epoch: None,
            journal: None,
            audit: None,
        };
        World { dir, store, head }
    }

    pub(super) fn file(&self) -> Vec<u8> {
        let mut file = Vec::new();
        let (_, bytes) = write(&self.store, &self.head, sign, &mut file).expect("written");
        assert_eq!(bytes, file.len() as u64);
        file
    }

    pub(super) fn elsewhere(&self) -> Store {
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let next = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Store::open(&self.dir.path().join(format!("elsewhere-{next}"))).expect("opened")
    }
}

#[test]
fn bundle_holds_named_objects() {
    let world = World::new();
    let file = world.file();
    let elsewhere = world.elsewhere();
    let contents = read(&elsewhere, &file[..]).expect("read");
    assert_eq!(contents.head, world.head);
    assert_eq!(contents.digest.as_bytes()[..], file[file.len() - 32..]);
    assert_eq!(contents.signed.1, Some(sign(contents.signed.0)));
    assert_eq!(contents.parts.entries.len(), 1);
    let [manifest] = &contents.manifests[..] else { panic!("one checkpoint") };
    let mut seen = crate::workspace::Seen::default();
    let tree = crate::workspace::TreeId(manifest.workspace.tree);
    crate::workspace::reach(&elsewhere, tree, &mut seen, &mut |object| {
        assert_eq!(elsewhere.get(object, u64::MAX).ok(), world.store.get(object, u64::MAX).ok());
        Ok(())
    })
    .expect("all of it is there");
    assert!(seen.count() > 3);
    assert_eq!(elsewhere.get(world.head.blobs[0], u64::MAX).expect("there"), vec![7; 3 << 20]);
}

#[test]
fn altered_bundle_is_refused() {
    let world = World::new();
    let file = world.file();
    let elsewhere = world.elsewhere();
    let places = |step: usize| (0..file.len()).step_by(step).chain(file.len().saturating_sub(80)..file.len());
    for cut in (0..64).chain(places(97_001)) {
        let error = read(&elsewhere, &file[..cut]).err().unwrap_or_else(|| panic!("cut at {cut}"));
        assert!(matches!(error, BundleError::Truncated(_)), "cut at {cut}: {error}");
    }
    for at in (0..200).chain(places(61_001)) {
        let mut flipped = file.clone();
        flipped[at] ^= 1 << (at % 8);
        assert!(read(&elsewhere, &flipped[..]).is_err(), "flipped at {at}");
    }
    let longer = [&file[..], b"x"].concat();
    assert!(matches!(read(&elsewhere, &longer[..]), Err(BundleError::Damaged(_))));
    assert!(matches!(read(&elsewhere, &b"something else"[..]), Err(BundleError::Foreign)));
    let mut newer = file.clone();
    newer[8] = 4;
    assert!(matches!(read(&elsewhere, &newer[..]), Err(BundleError::Version(4))));
}

/// A file that is as a whole what it says, made by somebody who wants something that is not his.
#[test]
fn outside_objects_are_refused() {
    let world = World::new();
    let secret = world.store.put(b"somebody else's").expect("stored");
    let with = |change: &dyn Fn(&mut Head)| {
        let mut head = world.head.clone();
        change(&mut head);
        let mut file = Vec::new();
        write_as_said(&world.store, &head, &[], &mut file);
        read(&world.store, &file[..]).err().map(|error| error.to_string()).unwrap_or_default()
    };
    // Everything is in this very store, and nothing in the file.
    assert!(with(&|_| {}).contains("is not in it"));
    let held = |digests: &[Digest], head: &Head| {
        let mut file = Vec::new();
        write_as_said(&world.store, head, digests, &mut file);
        read(&world.store, &file[..]).err().map(|error| error.to_string()).unwrap_or_default()
    };
    let manifest = world.head.checkpoints[0].manifest;
    assert!(held(&[manifest], &world.head).contains("is not in it"), "the list of state");
    let decoded = Manifest::decode(&world.store.get(manifest, u64::MAX).expect("there")).expect("decodes");
    let body = Digest::from_bytes(*blake3::hash(b"a body of state").as_bytes());
    let error = held(&[manifest, decoded.state, body], &world.head);
    assert!(error.contains("is not in it"), "the tree: {error}");
    let blobs = Head { blobs: vec![secret], ..world.head.clone() };
    let all: Vec<Digest> =
        world.store.objects().map(|object| object.expect("readable").0).filter(|d| *d != secret).collect();
    assert_eq!(held(&all, &world.head), "", "as it is it can be read");
    assert!(held(&all, &blobs).contains("is not in it"), "a blob");
}

#[test]
fn invalid_bundle_head_is_refused() {
    let world = World::new();
    let refused = |change: &dyn Fn(&mut Head)| {
        let mut head = world.head.clone();
        change(&mut head);
        let mut file = Vec::new();
        write_as_said(&world.store, &head, &[], &mut file);
        let error = read(&world.elsewhere(), &file[..]).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.contains("its head"), "{error}");
    };
    refused(&|head| head.checkpoints.clear());
    refused(&|head| head.begin = CheckpointId::from_bytes([9; 16]));
    refused(&|head| head.checkpoints.push(head.checkpoints[0].clone()));
    refused(&|head| head.checkpoints[0].name = "x".repeat(1000));
    refused(&|head| head.checkpoints[0].name = "line\nbreak".into());
    refused(&|head| head.name = "x".repeat(1000));
}

/// Objects and records that lie about themselves.
#[test]
fn malformed_records_are_refused() {
    let world = World::new();
    let read_records = |records: &dyn Fn(&mut dyn std::io::Write)| {
        let mut file = Vec::new();
        let pieces = frame::Pieces::begin(&mut file, VERSION).expect("begun");
        let mut to = zstd::stream::write::Encoder::new(pieces, 1).expect("begun");
        records(&mut to);
        to.finish().and_then(frame::Pieces::finish).expect("finished");
        read(&world.elsewhere(), &file[..]).err().map(|error| error.to_string()).unwrap_or_default()
    };
    let head = serde_json::to_vec(&world.head).expect("encodes");
    let record = |to: &mut dyn std::io::Write, kind: u8, length: u64, bytes: &[u8]| {
        to.write_all(&[kind]).and_then(|()| to.write_all(&length.to_le_bytes())).expect("written");
        to.write_all(bytes).expect("written");
    };
    let good = |to: &mut dyn std::io::Write| {
        record(to, 1, head.len() as u64, &head);
        record(to, 4, 96, &signature_of(&head));
    };
    assert!(read_records(&|to| record(to, 1, head.len() as u64, &head)).contains("ends within"));
    let unsigned = read_records(&|to| {
        record(to, 1, head.len() as u64, &head);
        record(to, 3, 8, &0u64.to_le_bytes());
    });
    assert!(unsigned.contains("not followed by a signature"), "{unsigned}");
    for change in [0, 40] {
        let mut signature = signature_of(&head);
        signature[change] ^= 1;
        let changed = read_records(&|to| {
            record(to, 1, head.len() as u64, &head);
            record(to, 4, 96, &signature);
        });
        assert!(changed.contains("signature does not fit"), "{change}: {changed}");
    }
    let twice = read_records(&|to| {
        good(to);
        record(to, 4, 96, &signature_of(&head));
    });
    assert!(twice.contains("another signature"), "{twice}");
    assert!(read_records(&|to| record(to, 2, 40, &[0; 40])).contains("does not begin with its head"));
    assert!(read_records(&|to| record(to, 1, u64::MAX, &head)).contains("more than"));
    assert!(read_records(&|to| record(to, 1, head.len() as u64 + 1, &head)).contains("ends within"));
    assert!(
        read_records(&|to| {
            good(to);
            record(to, 1, head.len() as u64, &head)
        })
        .contains("two heads")
    );
    assert!(
        read_records(&|to| {
            good(to);
            record(to, 9, 0, b"")
        })
        .contains("kind 9")
    );
    assert!(
        read_records(&|to| {
            good(to);
            record(to, 2, 31, &[0; 31])
        })
        .contains("without an address")
    );
    assert!(
        read_records(&|to| {
            good(to);
            record(to, 2, 40, &[0; 40])
        })
        .contains("what its address says")
    );
    assert!(
        read_records(&|to| {
            good(to);
            record(to, 2, u64::MAX, &[0; 40])
        })
        .contains("more than")
    );
    assert!(
        read_records(&|to| {
            good(to);
            record(to, 2, 32 + (2 << 20), &vec![0; 32 + (2 << 20)])
        })
        .contains("what its address says")
    );
    assert!(
        read_records(&|to| {
            good(to);
            record(to, 3, 8, &7u64.to_le_bytes())
        })
        .contains("as many objects")
    );
    assert!(
        read_records(&|to| {
            good(to);
            record(to, 3, 8, &0u64.to_le_bytes());
            good(to)
        })
        .contains("follows the last record")
    );
    assert!(read_records(&|to| good(to)).contains("ends within"));
}

/// Writes a file that holds these objects, whatever its head speaks of.
fn write_as_said(store: &Store, head: &Head, objects: &[Digest], to: &mut Vec<u8>) {
    use std::io::Write as _;
    let pieces = frame::Pieces::begin(to, VERSION).expect("begun");
    let mut to = zstd::stream::write::Encoder::new(pieces, 1).expect("begun");
    let json = serde_json::to_vec(head).expect("encodes");
    let mut record = |kind: u8, parts: &[&[u8]]| {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        to.write_all(&[kind]).and_then(|()| to.write_all(&(length as u64).to_le_bytes())).expect("written");
        parts.iter().for_each(|part| to.write_all(part).expect("written"));
    };
    record(1, &[&json]);
    record(4, &[&signature_of(&json)]);
    for digest in objects {
        record(2, &[digest.as_bytes(), &store.get(*digest, u64::MAX).expect("there")]);
    }
    record(3, &[&(objects.len() as u64).to_le_bytes()]);
    to.finish().and_then(frame::Pieces::finish).expect("finished");
}

/// Files of the first format have no signature; a changed head of the present one is no such file.
#[test]
fn unsigned_bundle_is_read() {
    let world = World::new();
    let signed = world.file();
    let mut to = Vec::new();
    let pieces = frame::Pieces::begin(&mut to, VERSION).expect("begun");
    let mut encoder = zstd::stream::write::Encoder::new(pieces, 1).expect("begun");
    let mut from = zstd::stream::read::Decoder::new(frame::Opened::begin(&signed[..]).expect("begun")).expect("begun");
    let mut records = Vec::new();
    std::io::Read::read_to_end(&mut from, &mut records).expect("read");
    let head = u64::from_le_bytes(records[1..9].try_into().expect("8 bytes")) as usize + 9;
    records.drain(head..head + 9 + 96);
    std::io::Write::write_all(&mut encoder, &records).expect("written");
    encoder.finish().and_then(frame::Pieces::finish).expect("finished");
    // The version is part of the digest.
    let first = |version: u8| {
        let mut file = to[..to.len() - 32].to_vec();
        file[8] = version;
        file.extend(blake3::hash(&file).as_bytes());
        file
    };
    assert_eq!(read(&world.elsewhere(), &first(1)[..]).expect("read").signed.1, None);
    let error = read(&world.elsewhere(), &first(2)[..]).err().expect("refused");
    assert!(error.to_string().contains("not followed by a signature"), "{error}");
}
