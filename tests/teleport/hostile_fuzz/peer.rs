//! A source that repeats a recorded move, honestly or with one change.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use super::super::hostile::{answer, frame, hello};
use super::objects::{Address, Objects, mutated};
use super::*;

/// Largest piece of a chunk, bytes.
const PIECE: usize = 256 << 10;
/// Objects up to this size have one chunk, bytes.
const UNCHUNKED: usize = 512 << 10;
/// Time for an answer, after which a hostile peer goes away: the target may wait for it, too.
const ANSWER: Duration = Duration::from_secs(5);
/// The same for an honest one.
const HONEST_ANSWER: Duration = Duration::from_secs(180);

/// The body of a chunk's frame.
fn chunk(address: &Address, length: usize, stored: usize, form: u8) -> Vec<u8> {
    [&address[..], &(length as u32).to_le_bytes(), &(stored as u32).to_le_bytes(), &[form]].concat()
}

/// A chunk of 256 KiB that decodes to `length` bytes of zeros.
fn bomb(length: usize) -> Vec<u8> {
    let packed = zstd::bulk::compress(&vec![0; length], 1).unwrap();
    let address = blake3::hash(&vec![0; PIECE]);
    [frame(5, &chunk(address.as_bytes(), PIECE, packed.len(), 1)), frame(6, &packed)].concat()
}

/// A recorded move.
#[derive(Clone)]
pub struct Transcript {
    hello: Vec<u8>,
    offer: Vec<u8>,
    /// The commit, as JSON.
    pub commit: Value,
    pub objects: Objects,
    /// Lists of engine state that are previewed before the seal.
    pub previews: Vec<Address>,
}

impl Transcript {
    /// Moves the kernel `demo`, and records what the source sends.
    pub fn record(source: &Host, target: &Host) -> Transcript {
        let file = target.path("transcript");
        let way = to(target).replacen("exec:exec ", &format!("exec:tee {} | ", file.display()), 1);
        source.ok(&["teleport", "demo", "--to", &way]);
        let bytes = std::fs::read(&file).unwrap();
        let (mut at, mut messages, mut objects) = (0, Vec::new(), Objects::default());
        let mut current: Option<(usize, Vec<u8>)> = None;
        let mut chunks: BTreeMap<Address, Vec<u8>> = BTreeMap::new();
        // The chunk whose pieces follow: address, length, stored length, form, bytes.
        let mut packed: Option<(Address, usize, usize, u8, Vec<u8>)> = None;
        while at < bytes.len() {
            let length = u32::from_le_bytes(bytes[at + 1..at + 5].try_into().unwrap()) as usize;
            let body = &bytes[at + 5..at + 5 + length];
            match bytes[at] {
                1 => messages.push(body.to_vec()),
                8 => messages.push(body[8..].to_vec()),
                4 => {
                    let size = u64::from_le_bytes(body[32..40].try_into().unwrap()) as usize;
                    current = Some((size, Vec::new()));
                }
                5 => {
                    let number = |at: usize| u32::from_le_bytes(body[at..at + 4].try_into().unwrap()) as usize;
                    let address: Address = body[..32].try_into().unwrap();
                    match body[40] {
                        2 => current.as_mut().expect("an object").1.extend(&chunks[&address]),
                        form => packed = Some((address, number(32), number(36), form, Vec::new())),
                    }
                }
                6 => packed.as_mut().expect("a chunk").4.extend(body),
                _ => {}
            }
            if let Some((address, length, _, form, bytes)) = packed.take_if(|chunk| chunk.2 == chunk.4.len()) {
                let plain = if form == 0 { bytes } else { zstd::bulk::decompress(&bytes, length).unwrap() };
                current.as_mut().expect("an object").1.extend(&plain);
                chunks.insert(address, plain);
            }
            if let Some((_, bytes)) = current.take_if(|(size, bytes)| *size == bytes.len()) {
                objects.add(bytes);
            }
            at += 5 + length;
        }
        let named = |name: &str| {
            let found = |message: &&Vec<u8>| serde_json::from_slice::<Value>(message).unwrap()["message"] == name;
            messages.iter().find(found).unwrap_or_else(|| panic!("no {name} was sent")).clone()
        };
        let seal: Value = serde_json::from_slice(&named("seal")).unwrap();
        objects.root = *blake3::Hash::from_hex(seal["description"].as_str().unwrap()).unwrap().as_bytes();
        let commit = serde_json::from_slice(&named("commit")).unwrap();
        Transcript { hello: named("hello"), offer: named("offer"), commit, objects, previews: Vec::new() }
    }
}

impl Transcript {
    /// The same move of a source that sends no lines of its audit log, which name manifests, too.
    pub fn without_excerpt(self) -> Transcript {
        self.described(|seal| assert!(seal["audit"].take().is_string(), "it sends none"))
    }

    /// The same move with a changed description.
    pub fn described(mut self, change: impl FnOnce(&mut Value)) -> Transcript {
        let root = self.objects.root;
        let (_, seal) = self.objects.all().find(|(at, _)| **at == root).expect("the description");
        let mut seal: Value = serde_json::from_slice(seal).expect("JSON");
        change(&mut seal);
        self.objects.replace(root, serde_json::to_vec(&seal).expect("JSON"), &mut Vec::new());
        self
    }
}

/// The change of a hostile peer, at one frame.
#[derive(Debug, Clone, Copy)]
enum Change {
    Mutate,
    LongerThanSaid,
    ShorterThanSaid,
    Huge,
    OtherKind,
    Repeat,
    Omit,
    Swap,
    CutOff,
    Bomb,
    LargePiece,
    Foreign,
    Again,
}

const CHANGES: [Change; 13] = [
    Change::Mutate,
    Change::LongerThanSaid,
    Change::ShorterThanSaid,
    Change::Huge,
    Change::OtherKind,
    Change::Repeat,
    Change::Omit,
    Change::Swap,
    Change::CutOff,
    Change::Bomb,
    Change::LargePiece,
    Change::Foreign,
    Change::Again,
];

/// A session with the target.
pub struct Peer<'a> {
    process: Child,
    to: Option<ChildStdin>,
    from: mpsc::Receiver<(u8, Vec<u8>)>,
    transcript: &'a Transcript,
    sent: u64,
    change: Option<(u64, Change)>,
    random: Random,
    patience: Duration,
    what: String,
    /// Kept to follow the next frame.
    late: Option<Vec<u8>>,
    said: Vec<String>,
}

impl Drop for Peer<'_> {
    fn drop(&mut self) {
        drop(self.to.take());
        let _ = self.process.wait();
    }
}

impl<'a> Peer<'a> {
    fn open(target: &Host, transcript: &'a Transcript, change: Option<(u64, Change)>, random: Random) -> Peer<'a> {
        let mut command = target.command("ryokan");
        command.args(["--no-autostart", "pipe"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut process = command.spawn().unwrap();
        let (to, mut stdout) = (process.stdin.take(), process.stdout.take().unwrap());
        let (answers, from) = mpsc::channel();
        // Ends with the process.
        std::thread::spawn(move || {
            let mut head = [0; 5];
            while stdout.read_exact(&mut head).is_ok() {
                let mut bytes = vec![0; u32::from_le_bytes([head[1], head[2], head[3], head[4]]) as usize];
                if stdout.read_exact(&mut bytes).is_err() || answers.send((head[0], bytes)).is_err() {
                    return;
                }
            }
        });
        let what = format!("{change:?}");
        let (patience, late, said) = (ANSWER, None, Vec::new());
        Peer { process, to, from, transcript, sent: 0, change, random, patience, what, late, said }
    }

    /// Repeats the move up to its commit.
    pub fn honest(target: &Host, transcript: &'a Transcript) -> Peer<'a> {
        let mut peer = Peer::open(target, transcript, None, Random(0));
        peer.patience = HONEST_ANSWER;
        let _ = peer.run(&transcript.objects, 0);
        peer.finish()
    }

    /// Repeats the move with a change of its frames or of an object.
    pub fn hostile(target: &Host, transcript: &'a Transcript, random: &mut Random) -> Peer<'a> {
        let mut objects = transcript.objects.clone();
        let own = Random(random.below(u64::MAX));
        let mut peer = match random.below(3) {
            0 => {
                let what = objects.mutate(random, &mut Vec::new());
                let mut peer = Peer::open(target, transcript, None, own);
                peer.what = what;
                peer
            }
            1 => {
                // Near the begin, where the messages are.
                let change = (random.below(6), CHANGES[random.index(CHANGES.len())]);
                Peer::open(target, transcript, Some(change), own)
            }
            _ => {
                let change = (random.below(24), CHANGES[random.index(CHANGES.len())]);
                Peer::open(target, transcript, Some(change), own)
            }
        };
        let lies = random.below(6);
        let _ = peer.run(&objects, lies);
        peer.finish()
    }

    /// Closes the connection, so that the target ends the session.
    fn finish(mut self) -> Peer<'a> {
        drop(self.to.take());
        while let Ok(answer) = self.from.recv_timeout(self.patience) {
            self.note(&answer);
        }
        let _ = self.process.wait();
        self
    }

    pub fn is_prepared(&self) -> bool {
        self.said.iter().any(|said| said.contains(r#""message":"prepared""#))
    }

    /// The last message of the target.
    pub fn last(&self) -> &str {
        self.said.last().map_or("", String::as_str)
    }

    pub fn what(&self) -> &str {
        &self.what
    }

    fn note(&mut self, (kind, bytes): &(u8, Vec<u8>)) {
        if matches!(kind, 1 | 8) {
            self.said.push(String::from_utf8_lossy(bytes).into_owned());
        }
    }

    /// The next answer; `None` if the target refused, closed or did not answer.
    fn answer(&mut self) -> Option<(u8, Vec<u8>)> {
        let answer = self.from.recv_timeout(self.patience).ok()?;
        self.note(&answer);
        (!self.said.last().is_some_and(|said| said.contains("\"refused\""))).then_some(answer)
    }

    fn write(&mut self, bytes: &[u8]) -> Option<()> {
        self.to.as_mut()?.write_all(bytes).ok()
    }

    /// Sends a frame, changed if it is the one.
    fn send(&mut self, kind: u8, bytes: &[u8]) -> Option<()> {
        let honest = frame(kind, bytes);
        let is_changed = self.change.is_some_and(|(at, _)| at == self.sent);
        self.sent += 1;
        if let Some(late) = self.late.take() {
            self.write(&honest)?;
            return self.write(&late);
        }
        let Some((_, change)) = self.change.filter(|_| is_changed) else { return self.write(&honest) };
        match change {
            Change::Mutate => {
                let (how, changed) = mutated(bytes.to_vec(), &mut self.random);
                self.what = format!("frame {} of kind {kind}: {how}", self.sent - 1);
                self.write(&frame(kind, &changed))
            }
            Change::LongerThanSaid | Change::ShorterThanSaid => {
                let mut changed = honest;
                let by = 1 + self.random.below(40) as u32;
                let length = changed.len() as u32 - 5;
                let said =
                    if matches!(change, Change::LongerThanSaid) { length.saturating_sub(by) } else { length + by };
                changed[1..5].copy_from_slice(&said.to_le_bytes());
                self.write(&changed)
            }
            Change::Huge => {
                let mut changed = honest;
                changed[1..5].copy_from_slice(&u32::MAX.to_le_bytes());
                self.write(&changed)
            }
            Change::OtherKind => {
                let other = self.random.below(10) as u8;
                self.write(&frame(other, bytes))
            }
            Change::Repeat => {
                self.write(&honest)?;
                self.write(&honest)
            }
            Change::Omit => Some(()),
            Change::Swap => {
                self.late = Some(honest);
                Some(())
            }
            Change::CutOff => {
                let at = self.random.index(honest.len());
                self.write(&honest[..at])?;
                self.to = None;
                None
            }
            Change::Bomb => {
                self.write(&honest)?;
                self.write(&bomb(64 << 20))
            }
            Change::LargePiece => {
                self.write(&honest)?;
                self.write(&bomb(PIECE + 1))
            }
            Change::Foreign => {
                let mut commit = self.transcript.commit.clone();
                commit["epoch"] = (1 + self.random.below(3)).into();
                commit["handover"] = "44".repeat(16).into();
                self.write(&honest)?;
                self.write(&frame(1, commit.to_string().as_bytes()))
            }
            Change::Again => {
                let offer = self.transcript.offer.clone();
                self.write(&honest)?;
                self.write(&frame(1, &offer))
            }
        }
    }

    /// The move up to its seal; `lies` chooses a way to lie about objects.
    fn run(&mut self, objects: &Objects, lies: u64) -> Option<()> {
        let transcript = self.transcript;
        self.send(1, &transcript.hello)?;
        self.send(1, &transcript.offer)?;
        // The greeting, and the answer to the offer.
        self.answer()?;
        self.answer()?;
        // Two objects that only this session has.
        let own = self.random.below(u64::MAX).to_le_bytes();
        let extra = [own.repeat(40), own.repeat(90_000)];
        let extra = extra.map(|bytes| (*blake3::hash(&bytes).as_bytes(), bytes));
        let all: Vec<(Address, &Vec<u8>)> =
            extra.iter().map(|(at, bytes)| (*at, bytes)).chain(objects.all().map(|(at, bytes)| (*at, bytes))).collect();
        let asked: Vec<u8> = all.iter().flat_map(|(at, _)| *at).collect();
        self.send(2, &asked)?;
        let (_, bits) = self.answer()?;
        let lacks = |at: usize| bits.get(at / 8).is_some_and(|byte| byte >> (at % 8) & 1 == 1);
        let mut count = 0;
        for (_, (address, bytes)) in all.iter().enumerate().filter(|(at, _)| lacks(*at)) {
            count += 1;
            match lies {
                1 if count == 1 => continue,
                2 if count == 2 => self.object(address, bytes, bytes.len() as u64 + 1)?,
                3 if count == 2 => self.object(address, bytes, u64::MAX)?,
                4 if count == 1 => self.object(address, &vec![7; bytes.len()], bytes.len() as u64)?,
                _ => self.object(address, bytes, bytes.len() as u64)?,
            }
        }
        self.send(1, format!(r#"{{"message":"flush","objects":{count}}}"#).as_bytes())?;
        self.answer()?;
        for list in &transcript.previews {
            let list = blake3::Hash::from_bytes(*list).to_hex();
            self.send(1, format!(r#"{{"message":"previewState","list":"{list}"}}"#).as_bytes())?;
            self.answer()?;
        }
        let root = blake3::Hash::from_bytes(objects.root).to_hex();
        self.send(1, format!(r#"{{"message":"seal","description":"{root}"}}"#).as_bytes())?;
        self.answer()?;
        Some(())
    }

    fn object(&mut self, address: &Address, bytes: &[u8], size: u64) -> Option<()> {
        self.send(4, &[&address[..], &size.to_le_bytes()].concat())?;
        // Larger ones are cut elsewhere than a store does.
        let most = if bytes.len() > UNCHUNKED { PIECE } else { UNCHUNKED };
        for (at, plain) in bytes.chunks(most).enumerate() {
            let address = *blake3::hash(plain).as_bytes();
            let (form, stored) = match zstd::bulk::compress(plain, 1) {
                Ok(packed) if at % 2 == 1 && packed.len() < plain.len() => (1, packed),
                Ok(_) | Err(_) => (0, plain.to_vec()),
            };
            self.send(5, &chunk(&address, plain.len(), stored.len(), form))?;
            for piece in stored.chunks(PIECE) {
                self.send(6, piece)?;
            }
        }
        Some(())
    }
}

/// Sends a decision on a connection of its own; returns the answers.
pub fn decide(target: &Host, decision: &Value) -> String {
    let bytes = [hello(), frame(1, decision.to_string().as_bytes())].concat();
    answer(target, &bytes)
}

/// Aborts a handover, as its source does.
pub fn abort(target: &Host, handover: &str) {
    let said = decide(target, &serde_json::json!({ "message": "abort", "handover": handover }));
    assert!(said.contains("\"aborted\""), "{said}");
}
