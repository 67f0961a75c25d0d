//! Checkpoints whose parts of a virtual machine lie: each is refused with its own error, in a file and from another
//! host.

use std::collections::HashSet;

use super::tests::World;
use super::*;
use crate::core::checkpoint::{ImagePart, MachinePart, Manifest};
use crate::core::limits;
use crate::core::snapshot::Machine;

const PAGE: usize = 4096;
const RAM: u64 = 1 << 20;

/// A list of pieces, each with its number, its pages and its address, that says it has `count` of them.
fn counted(bytes: u64, count: u32, pieces: &[(u32, u8, Digest)]) -> Vec<u8> {
    let mut list = b"RYOKANIM".to_vec();
    list.extend(1u32.to_le_bytes());
    list.extend(count.to_le_bytes());
    list.extend(bytes.to_le_bytes());
    for (at, pages, digest) in pieces {
        list.extend(at.to_le_bytes());
        list.push(*pages);
        list.extend(digest.as_bytes());
    }
    list
}

fn list(bytes: u64, pieces: &[(u32, u8, Digest)]) -> Vec<u8> {
    counted(bytes, pieces.len() as u32, pieces)
}

fn put(world: &World, bytes: &[u8]) -> Digest {
    world.store.put(bytes).expect("stored")
}

/// A page that is not zero.
fn page(world: &World) -> Digest {
    put(world, &[7; PAGE])
}

fn image(world: &World, list: &[u8]) -> ImagePart {
    ImagePart { list: put(world, list), bytes: PAGE as u64 }
}

/// A machine that is what it says.
fn honest(world: &World) -> MachinePart {
    let one = [(0, 1, page(world))];
    MachinePart {
        machine: Machine {
            vmm: "QEMU 10".into(),
            build: "a".into(),
            machine_type: "q35".into(),
            cpu_model: "max".into(),
            ram_bytes: RAM,
            processors: 1,
        },
        description: put(world, b"{}"),
        state: put(world, b"state"),
        state_bytes: 5,
        memory: image(world, &list(RAM, &one)),
        disk: image(world, &list(2 * RAM, &one)),
    }
}

/// The error for a checkpoint with this machine; `changed` replaces the manifest's text, `gone` was not sent.
fn refusal(
    world: &World,
    part: MachinePart,
    changed: impl FnOnce(String) -> String,
    gone: Option<Digest>,
) -> Option<String> {
    let mut head = world.head.clone();
    let sealed = world.store.get(head.checkpoints[0].manifest, u64::MAX).expect("there");
    let mut manifest = Manifest::decode(&sealed).expect("decodes");
    manifest.machine = Some(part);
    manifest.kind = Manifest::kind_with(manifest.machine.as_ref());
    let text = String::from_utf8(manifest.encode().expect("encodes")).expect("text");
    head.checkpoints[0].manifest = put(world, changed(text).as_bytes());
    let objects = world.store.objects().map(|object| object.expect("readable").0);
    let held: HashSet<Digest> = objects.filter(|digest| Some(*digest) != gone).collect();
    verify(&world.store, &head, held).err().map(|error| error.to_string())
}

#[test]
fn lying_machines_are_refused() {
    let world = World::new();
    let piece = page(&world);
    let refused = |change: &dyn Fn(&mut MachinePart)| {
        let mut part = honest(&world);
        change(&mut part);
        refusal(&world, part, |text| text, None)
    };
    assert_eq!(refused(&|_| {}), None, "an honest one is taken");
    let memory = |list: Vec<u8>| refused(&|part| part.memory = image(&world, &list));
    let disk = |list: Vec<u8>| refused(&|part| part.disk = image(&world, &list));
    let one = [(0, 1, piece)];
    let past = (RAM / (8 * PAGE as u64)) as u32;
    let large = vec![b' '; limits::VM_TEMPLATE_JSON_BYTES as usize + 1];
    let cases = [
        ("memory of another machine", memory(list(RAM / 2, &one)), "its memory has another size"),
        ("memory that says less", refused(&|part| part.memory.bytes -= 1), "its memory has another size"),
        ("a disk that says more", refused(&|part| part.disk.bytes += 1), "its disk has another size"),
        ("a disk beyond all limits", disk(list(limits::VM_DISK_MAX_BYTES + 1, &one)), "its disk has another size"),
        ("overlapping pieces", memory(list(RAM, &[one[0], one[0]])), "its pieces are not in order"),
        ("pieces backwards", disk(list(2 * RAM, &[(1, 1, piece), one[0]])), "its pieces are not in order"),
        ("a piece beyond the end", memory(list(RAM, &[(past, 1, piece)])), "its pieces are not in order"),
        ("a piece without pages", memory(list(RAM, &[(0, 0, piece)])), "a piece without pages"),
        ("a page beyond the end", disk(list(PAGE as u64, &[(0, 2, piece)])), "beyond the end"),
        ("a bomb of pieces", memory(counted(RAM, u32::MAX, &one)), "another length than it says"),
        ("pages that are not there", memory(list(RAM, &[(0, 255, piece)])), "of its memory has another size"),
        ("no list", disk(b"a disk image, as a guest writes it".to_vec()), "does not begin as one"),
        ("state of another size", refused(&|part| part.state_bytes += 1), "state has another size"),
        ("a large description", refused(&|part| part.description = put(&world, &large)), "description is too large"),
    ];
    for (what, said, named) in cases {
        let said = said.unwrap_or_else(|| panic!("{what} was taken"));
        assert!(said.contains(named), "{what}: {said}");
    }
}

#[test]
fn absent_machine_parts_are_refused() {
    let world = World::new();
    let part = honest(&world);
    let all = [part.description, part.state, part.memory.list, part.disk.list, page(&world)];
    for gone in all {
        let said = refusal(&world, honest(&world), |text| text, Some(gone));
        let said = said.expect("it was not sent");
        assert!(said.contains(&gone.to_string()) && said.contains("is not in it"), "{said}");
    }
    for foreign in ["x86_64 avx512", "../x86_64", ""] {
        let marked = |text: String| text.replacen("\"arch\":\"x\"", &format!("\"arch\":\"{foreign}\""), 1);
        let said = refusal(&world, honest(&world), marked, None).expect("no name of an architecture");
        assert!(said.contains("an architecture is a name"), "{foreign:?}: {said}");
    }
    // The kind and the parts belong together; memory that stays on its host has no name here.
    for (kind, named) in [("checkpoint", "its parts are not"), ("suspend", "kind \"suspend\"")] {
        let marked = |text: String| text.replacen("\"kind\":\"teleport\"", &format!("\"kind\":\"{kind}\""), 1);
        let said = refusal(&world, honest(&world), marked, None).expect("another kind");
        assert!(said.contains(named), "{kind}: {said}");
    }
}
