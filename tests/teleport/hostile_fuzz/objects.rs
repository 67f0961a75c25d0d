//! Objects with right addresses and wrong contents, and files that are made of them.

use std::collections::BTreeMap;

use crate::support::Random;

pub type Address = [u8; 32];

/// Names of ten bytes in place of `pathtrick1`.
pub const PATH_TRICKS: [&[u8; 10]; 6] =
    [b"../../../a", b"/etc/passw", b"a/../../bb", b"\0athtrick1", b"./././././", b"..\0\0\0\0\0\0\0\0"];

/// Objects by address, and the one that leads to the others.
#[derive(Clone, Default)]
pub struct Objects {
    by_address: BTreeMap<Address, Vec<u8>>,
    /// The description of the kernel, if it is one of them.
    pub root: Address,
}

fn replaced(bytes: &[u8], from: &[u8], to: &[u8]) -> Option<Vec<u8>> {
    let at = bytes.windows(from.len()).position(|window| window == from)?;
    let mut changed = [&bytes[..at], to].concat();
    let rest = &bytes[at + from.len()..];
    changed.extend(replaced(rest, from, to).unwrap_or_else(|| rest.to_vec()));
    Some(changed)
}

/// Replaces an address, raw and as hexadecimal text.
fn with_address(bytes: &[u8], from: &Address, to: &Address) -> Option<Vec<u8>> {
    let hex = |address: &Address| blake3::Hash::from_bytes(*address).to_hex().to_string();
    let raw = replaced(bytes, from, to);
    let text = replaced(raw.as_deref().unwrap_or(bytes), hex(from).as_bytes(), hex(to).as_bytes());
    text.or(raw)
}

impl Objects {
    /// Adds an object; returns its address.
    pub fn add(&mut self, bytes: Vec<u8>) -> Address {
        let address = *blake3::hash(&bytes).as_bytes();
        self.by_address.insert(address, bytes);
        address
    }

    /// Takes out what is too large to name others, a memory's pieces: a replacement searches all objects.
    pub fn without_large(&mut self) -> Vec<Vec<u8>> {
        let large = |_: &Address, bytes: &mut Vec<u8>| bytes.len() > 32 << 10;
        self.by_address.extract_if(.., large).map(|(_, bytes)| bytes).collect()
    }

    pub fn all(&self) -> impl Iterator<Item = (&Address, &Vec<u8>)> {
        self.by_address.iter()
    }

    /// Gives an object other bytes, and everything that names it, `beside` too, its new address.
    pub fn replace(&mut self, address: Address, bytes: Vec<u8>, beside: &mut Vec<u8>) {
        let mut waiting = vec![(address, bytes)];
        while let Some((old, bytes)) = waiting.pop() {
            if self.by_address.remove(&old).is_none() {
                continue;
            }
            let new = self.add(bytes);
            if self.root == old {
                self.root = new;
            }
            if let Some(changed) = with_address(beside, &old, &new) {
                *beside = changed;
            }
            // Several changes of one parent follow each other.
            for waits in &mut waiting {
                if let Some(changed) = with_address(&waits.1, &old, &new) {
                    waits.1 = changed;
                }
            }
            let named = self.by_address.iter().filter_map(|(at, bytes)| Some((*at, with_address(bytes, &old, &new)?)));
            for (at, changed) in named.collect::<Vec<_>>() {
                match waiting.iter_mut().find(|(waits, _)| *waits == at) {
                    Some(_) => {}
                    None => waiting.push((at, changed)),
                }
            }
        }
    }

    /// Replaces a text of the same length in every object; returns the number of objects.
    pub fn rename(&mut self, from: &[u8], to: &[u8]) -> usize {
        self.rename_beside(from, to, &mut Vec::new())
    }

    pub fn rename_beside(&mut self, from: &[u8], to: &[u8], beside: &mut Vec<u8>) -> usize {
        let mut count = 0;
        loop {
            // The journal names the file, too, as text; a tree holds the bare name.
            let found = self.by_address.iter().find_map(|(address, bytes)| {
                bytes.starts_with(b"ryt").then_some(())?;
                Some((*address, replaced(bytes, from, to)?))
            });
            let Some((address, bytes)) = found else { return count };
            self.replace(address, bytes, beside);
            count += 1;
        }
    }

    /// Changes one object from a seed; returns what was done.
    pub fn mutate(&mut self, random: &mut Random, beside: &mut Vec<u8>) -> String {
        let at = random.index(self.by_address.len());
        let Some((address, bytes)) = self.by_address.iter().nth(at).map(|(at, bytes)| (*at, bytes.clone())) else {
            return String::from("no object");
        };
        let begin = String::from_utf8_lossy(&bytes[..bytes.len().min(12)]).into_owned();
        let (how, changed) = mutated(bytes, random);
        self.replace(address, changed, beside);
        format!("an object that begins with {begin:?}: {how}")
    }
}

/// Changes bytes from a seed.
pub fn mutated(mut bytes: Vec<u8>, random: &mut Random) -> (&'static str, Vec<u8>) {
    if bytes.is_empty() {
        return ("filled", vec![0; 64]);
    }
    let at = random.index(bytes.len());
    match random.below(8) {
        0 => {
            bytes.truncate(at);
            ("cut off", bytes)
        }
        1 => {
            let piece = bytes[at..].to_vec();
            bytes.extend(piece);
            ("its end repeated", bytes)
        }
        2 => {
            let end = (at + 8).min(bytes.len());
            bytes[at..end].fill(0xff);
            ("eight bytes of ones", bytes)
        }
        3 => match changed_json(&bytes, random) {
            Some(changed) => ("a field of its JSON", changed),
            None => {
                bytes.splice(at..at, [0; 300]);
                ("300 zeros within", bytes)
            }
        },
        4 => match changed_number(&bytes, random) {
            Some(changed) => ("a number of its text", changed),
            None => {
                bytes.remove(at);
                ("one byte less", bytes)
            }
        },
        _ => {
            bytes[at] ^= 1 << random.below(8);
            ("one bit", bytes)
        }
    }
}

/// Replaces a field of a JSON document.
fn changed_json(bytes: &[u8], random: &mut Random) -> Option<Vec<u8>> {
    let mut document: serde_json::Value = serde_json::from_slice(bytes).ok()?;
    let deep = (0..100).fold(serde_json::Value::Null, |inner, _| serde_json::json!([inner]));
    let values = [
        serde_json::Value::Null,
        serde_json::json!(u64::MAX),
        serde_json::json!(-1),
        serde_json::json!(1e308),
        serde_json::json!("../../../../etc/passwd"),
        serde_json::json!("\u{0}\u{202e}"),
        serde_json::json!("x".repeat(1 << 20)),
        serde_json::json!([]),
        serde_json::json!({}),
        deep,
    ];
    let value = values[random.index(values.len())].clone();
    put(&mut document, value, random);
    serde_json::to_vec(&document).ok()
}

/// Puts a value somewhere into a document.
fn put(at: &mut serde_json::Value, value: serde_json::Value, random: &mut Random) {
    let stops = random.below(4) == 0;
    let count = match at {
        serde_json::Value::Object(fields) => fields.len(),
        serde_json::Value::Array(items) => items.len(),
        _ => 0,
    };
    if stops || count == 0 {
        *at = value;
        return;
    }
    let index = random.index(count);
    let child = match at {
        serde_json::Value::Object(fields) => fields.values_mut().nth(index),
        serde_json::Value::Array(items) => items.get_mut(index),
        _ => None,
    };
    put(child.expect("it has as many"), value, random);
}

/// Replaces a run of digits.
fn changed_number(bytes: &[u8], random: &mut Random) -> Option<Vec<u8>> {
    let from = random.index(bytes.len());
    let begin = from + bytes[from..].iter().position(u8::is_ascii_digit)?;
    let end = begin + bytes[begin..].iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(bytes.len() - begin);
    let numbers = ["0", "18446744073709551615", "9223372036854775807", "-1", "99999999999999999999", "1"];
    let number = numbers[random.index(numbers.len())];
    Some([&bytes[..begin], number.as_bytes(), &bytes[end..]].concat())
}

/// Head and objects of a file.
pub fn open_bundle(file: &[u8]) -> (Vec<u8>, Objects) {
    let (mut packed, mut at) = (Vec::new(), 12);
    loop {
        let length = u32::from_le_bytes(file[at..at + 4].try_into().unwrap()) as usize;
        if length == 0 {
            break;
        }
        packed.extend(&file[at + 4..at + 4 + length]);
        at += 4 + length;
    }
    let plain = zstd::stream::decode_all(&packed[..]).unwrap();
    let (mut head, mut objects, mut at) = (Vec::new(), Objects::default(), 0);
    while at < plain.len() {
        let length = u64::from_le_bytes(plain[at + 1..at + 9].try_into().unwrap()) as usize;
        let body = &plain[at + 9..at + 9 + length];
        match plain[at] {
            1 => head = body.to_vec(),
            2 => {
                objects.add(body[32..].to_vec());
            }
            _ => {}
        }
        at += 9 + length;
    }
    (head, objects)
}

/// A file of the first format, which has no signature.
pub fn close_bundle(head: &[u8], objects: &Objects) -> Vec<u8> {
    frame_bundle(&zstd::stream::encode_all(&plain_bundle(head, objects)[..], 1).unwrap())
}

fn plain_bundle(head: &[u8], objects: &Objects) -> Vec<u8> {
    let record = |kind: u8, body: &[u8]| [&[kind][..], &(body.len() as u64).to_le_bytes(), body].concat();
    let mut plain = record(1, head);
    for (address, bytes) in objects.all() {
        plain.extend(record(2, &[&address[..], bytes].concat()));
    }
    plain.extend(record(3, &(objects.all().count() as u64).to_le_bytes()));
    plain
}

fn frame_bundle(packed: &[u8]) -> Vec<u8> {
    let mut file = [&b"RYOKANBN"[..], &1u32.to_le_bytes()].concat();
    for piece in packed.chunks(256 << 10) {
        file.extend((piece.len() as u32).to_le_bytes());
        file.extend(piece);
    }
    file.extend(0u32.to_le_bytes());
    let digest = *blake3::hash(&file).as_bytes();
    file.extend(digest);
    file
}

/// A file that is changed from a seed, and what was done.
pub fn hostile_bundle(whole: &[u8], head: &[u8], objects: &Objects, random: &mut Random) -> (String, Vec<u8>) {
    let (mut head, mut objects) = (head.to_vec(), objects.clone());
    match random.below(8) {
        0 => {
            let (how, bytes) = mutated(whole.to_vec(), random);
            (format!("the file: {how}"), bytes)
        }
        1 => {
            let (how, plain) = mutated(plain_bundle(&head, &objects), random);
            (format!("the records: {how}"), frame_bundle(&zstd::stream::encode_all(&plain[..], 1).unwrap()))
        }
        2 => {
            let (how, head) = mutated(head, random);
            (format!("the head: {how}"), close_bundle(&head, &objects))
        }
        3 => {
            // One record of 1 GiB of zeros, which compresses to some 30 KiB.
            let mut plain = [&[2][..], &(1u64 << 30).to_le_bytes()].concat();
            plain.splice(0..0, [&[1][..], &(head.len() as u64).to_le_bytes(), &head].concat());
            plain.resize(plain.len() + (32 << 20), 0);
            (String::from("a bomb"), frame_bundle(&zstd::stream::encode_all(&plain[..], 1).unwrap()))
        }
        _ => {
            let how = objects.mutate(random, &mut head);
            (how, close_bundle(&head, &objects))
        }
    }
}
