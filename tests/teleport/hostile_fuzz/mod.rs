//! A source and an author of files that send anything: a real move and a real file, changed from a seed.
//!
//! After each case the daemon answers, lists no kernel and no handover, and has no files of either; its memory stays
//! bounded, nothing outside its data changes, and its store verifies.
//!
//! `RYOKAN_FUZZ_PEER=N` runs N fresh seeds more, `RYOKAN_FUZZ_PEER_SEED=N` replays one.

pub(super) mod objects;
mod peer;
mod target;

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use ryokan::core::checkpoint::{StatePart, StateParts};
use ryokan::core::ids::Digest;
use ryokan::core::info::KernelFilter;

use super::*;
use crate::support::{Random, eventually};
use objects::{Objects, PATH_TRICKS};
use peer::{Peer, Transcript};

/// Time for the fixed seeds of one test.
const TIME: Duration = Duration::from_secs(16);
/// Fixed seeds.
const SEEDS: u64 = 120;
/// Growth of the daemon's memory at any moment, KiB.
const MEMORY: u64 = 256 << 10;

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable}={text} is not a number")))
}

/// Runs fixed seeds within a time, but no fewer than `least`, and fresh ones if the environment asks for them; returns
/// the number of cases.
fn seeds(least: u64, mut case: impl FnMut(u64)) -> u64 {
    if let Some(seed) = number("RYOKAN_FUZZ_PEER_SEED") {
        case(seed);
        return SEEDS;
    }
    let begun = Instant::now();
    let mut fixed = 0;
    while fixed < SEEDS && (fixed < least || begun.elapsed() < TIME) {
        fixed += 1;
        case(fixed);
    }
    if let Some(more) = number("RYOKAN_FUZZ_PEER") {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        let first = now.as_nanos() as u64 >> 8;
        (first..first + more).for_each(case);
    }
    fixed
}

/// A daemon under attack.
struct Victim {
    host: Host,
    peak: u64,
    outside: BTreeSet<String>,
}

/// The largest memory that a process has had, KiB.
fn peak(pid: i32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse().ok()).expect("the daemon lives")
}

/// Every path that no case may change: all but the daemon's own data and sockets.
fn outside(host: &Host) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut folders = vec![host.path("")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.starts_with(host.data()) || path.starts_with(host.path("run")) || path.ends_with("daemon.log") {
                continue;
            }
            found.insert(path.display().to_string());
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                folders.push(path);
            }
        }
    }
    // What a path upwards would name.
    for place in ["/tmp/a", "/etc/passw", "/tmp/athtrick1"] {
        if Path::new(place).exists() {
            found.insert(place.into());
        }
    }
    found
}

impl Victim {
    fn new() -> Victim {
        let host = Host::start();
        std::fs::write(host.path("bundle"), b"").unwrap();
        let (peak, outside) = (peak(host.pid()), outside(&host));
        Victim { host, peak, outside }
    }

    /// The daemon is as it was; prepared kernels are aborted first, as an honest source would.
    fn check(&self, what: &str) {
        self.host.with(async |client| {
            // The last step of a peer that has gone may still be under way.
            eventually(&format!("{what}: nothing is prepared"), async || {
                let prepared = client.handovers().await.unwrap_or_else(|error| panic!("{what}: {error}"));
                for one in &prepared {
                    peer::abort(&self.host, &one.id.to_string());
                }
                prepared.is_empty() && left_over(&self.host).is_empty()
            })
            .await;
            let kernels = client.list_kernels(&KernelFilter::default()).await.expect("an answer");
            assert_eq!(kernels.len(), 0, "{what}: a kernel lives");
        });
        let now = peak(self.host.pid());
        assert!(now < self.peak + MEMORY, "{what}: memory grew from {} to {now} KiB", self.peak);
        assert_eq!(outside(&self.host), self.outside, "{what}: a file outside the data");
        assert!(!self.host.log().contains("panicked"), "{what}: {}", self.host.log());
    }

    fn end(self) {
        self.host.ok(&["verify"]);
        self.host.ok(&["gc"]);
        self.host.ok(&["verify"]);
    }
}

/// A host whose kernel has files, a checkpoint, output and a file whose name is replaced.
fn source() -> Host {
    let here = Host::start();
    set_up(&here, "demo");
    here.ok(&["exec", "demo", "mkdir dirtrick00; echo trick > dirtrick00/pathtrick1"]);
    here
}

#[test]
fn hostile_peers_change_nothing() {
    let (here, scratch) = (source(), Host::start());
    let transcript = Transcript::record(&here, &scratch);
    drop(scratch);
    let victim = Victim::new();
    let honest = Peer::honest(&victim.host, &transcript);
    assert!(honest.is_prepared(), "the transcript is understood: {:?}", honest.last());
    victim.check("an honest source that goes away");
    let mut prepared = 0;
    let cases = seeds(20, |seed| {
        let mut random = Random(seed);
        let peer = Peer::hostile(&victim.host, &transcript, &mut random);
        prepared += u64::from(peer.is_prepared());
        victim.check(&format!("seed {seed}: {}", peer.what()));
        if seed % 20 == 0 {
            victim.host.ok(&["verify"]);
        }
    });
    eprintln!("{cases} cases, {prepared} of them prepared a kernel");
    assert!(prepared < cases, "every changed move was accepted");
    assert!(Peer::honest(&victim.host, &transcript).is_prepared(), "it serves as before");
    victim.check("an honest source");
    victim.end();
}

/// The refusal of rewritten objects, whose addresses the pages of the history do not name.
const ADDRESSES: &str = "its checkpoints are not those that were described";

/// Names that lead out of a folder, in a tree whose addresses are all right.
#[test]
fn path_tricks_are_refused() {
    let (here, scratch) = (source(), Host::start());
    let transcript = Transcript::record(&here, &scratch).without_excerpt();
    let victim = Victim::new();
    assert!(Peer::honest(&victim.host, &transcript).is_prepared(), "an older source sends none");
    victim.check("an older source");
    for trick in PATH_TRICKS {
        let mut changed = transcript.clone();
        let renamed = changed.objects.rename(b"pathtrick1", trick);
        assert!(renamed > 0, "no object names the file");
        let peer = Peer::honest(&victim.host, &changed);
        let name = String::from_utf8_lossy(trick);
        assert!(!peer.is_prepared(), "{name:?} was accepted");
        assert!(!peer.last().contains(ADDRESSES), "{name:?} is refused for another reason: {}", peer.last());
        victim.check(&String::from_utf8_lossy(trick));
    }
    // The way by which the names are replaced is right: only the history names the manifest of before.
    let mut changed = transcript.clone();
    changed.objects.rename(b"pathtrick1", b"pathtrick2");
    let peer = Peer::honest(&victim.host, &changed);
    assert!(peer.last().contains(ADDRESSES), "another name is as good: {}", peer.last());
    victim.check("another name");
    victim.end();
}

/// A line of the audit log that the source changed, with addresses that are all right.
#[test]
fn changed_audit_excerpt_is_refused() {
    let (here, scratch) = (source(), Host::start());
    let transcript = Transcript::record(&here, &scratch);
    let victim = Victim::new();
    let of_log = |bytes: &[u8]| bytes.windows(17).any(|window| window == b"\"lines\":[{\"before");
    let (at, bytes) = transcript.objects.all().find(|(_, bytes)| of_log(bytes)).expect("an excerpt");
    let text = String::from_utf8(bytes.clone()).expect("JSON");
    assert!(text.contains("kernel.create"), "{text}");
    let mut changed = transcript.clone();
    changed.objects.replace(*at, text.replace("kernel.create", "kernel.made").into_bytes(), &mut Vec::new());
    let peer = Peer::honest(&victim.host, &changed);
    assert!(!peer.is_prepared() && peer.last().contains("excerpt of the audit log"), "{}", peer.last());
    victim.check("a changed line");
    victim.end();
}

/// The description and the rows of the history must agree on each checkpoint, and on the number of others.
#[test]
fn history_matches_its_description() {
    let (here, scratch) = (source(), Host::start());
    for n in ["1", "2", "3"] {
        here.ok(&["exec", "demo", &format!("y={n}")]);
        here.ok(&["checkpoint", "demo"]);
    }
    let transcript = Transcript::record(&here, &scratch);
    let victim = Victim::new();
    let described = |omits: bool, left: u64| {
        transcript.clone().described(|seal| {
            seal["left_behind"] = left.into();
            let begin = seal["head"]["begin"].clone();
            let checkpoints = seal["head"]["checkpoints"].as_array_mut().expect("checkpoints");
            let other = checkpoints.iter().position(|one| one["id"] != begin).expect("another one");
            if omits {
                checkpoints.remove(other);
            }
        })
    };
    for (changed, why) in
        [(described(false, 1), "one more"), (described(true, 0), "one less"), (described(true, 2), "two less")]
    {
        let peer = Peer::honest(&victim.host, &changed);
        assert!(!peer.is_prepared() && peer.last().contains(ADDRESSES), "{why}: {}", peer.last());
        victim.check(why);
    }
    let left = described(true, 1);
    assert!(Peer::honest(&victim.host, &left).is_prepared(), "it is left behind");
    victim.check("one left behind");
    victim.end();
}

/// The engine state of the arrived kernel is that of its last checkpoint, whatever was sent ahead of it.
#[test]
fn previewed_state_does_not_stay() {
    let (here, scratch) = (source(), Host::start());
    let transcript = Transcript::record(&here, &scratch);
    let victim = Victim::new();
    let body = |objects: &mut Objects| Digest::from_bytes(objects.add(b"planted".to_vec()));
    let previewed = |bytes: u64, times: usize, body: &dyn Fn(&mut Objects) -> Digest| {
        let mut changed = transcript.clone();
        let body = body(&mut changed.objects);
        let part = |key: &str| StatePart { key: key.into(), meta: serde_json::json!({}), body, bytes };
        let list = StateParts { entries: vec![part("var/planted"), part("var/x")] }.encode().expect("a list");
        let list = changed.objects.add(list);
        changed.previews = vec![list; times];
        changed
    };
    // A list that cannot be written ahead is none: its bodies are not here, or of another size.
    for (what, changed) in
        [("no body", previewed(7, 1, &|_| Digest::from_bytes([9; 32]))), ("another size", previewed(8, 1, &body))]
    {
        let peer = Peer::honest(&victim.host, &changed);
        assert!(peer.is_prepared(), "{what}: {}", peer.last());
        victim.check(what);
    }
    let most = ryokan::core::limits::HANDOVER_ROUNDS as usize;
    let endless = previewed(7, most + 1, &body);
    let peer = Peer::honest(&victim.host, &endless);
    assert!(!peer.is_prepared() && peer.last().contains("out of order"), "{}", peer.last());
    victim.check("previews without an end");
    assert!(!victim.host.log().contains("in the pause"), "{}", victim.host.log());
    let planted = previewed(7, most, &body);
    let peer = Peer::honest(&victim.host, &planted);
    assert!(peer.is_prepared(), "{}", peer.last());
    assert!(victim.host.log().contains("in the pause"), "what was written ahead was used: {}", victim.host.log());
    let said = peer::decide(&victim.host, &transcript.commit);
    assert!(said.contains("\"live\""), "{said}");
    let variables = victim.host.ok(&["vars", "demo"]);
    assert!(!variables.contains("planted"), "{variables}");
    assert_eq!(victim.host.ok(&["exec", "demo", VIEW]), "2 two deep\n");
    victim.end();
}

#[test]
fn old_epochs_are_refused() {
    let (here, there) = (source(), Host::start());
    let transcript = Transcript::record(&here, &there);
    assert!(is_live(&there, "demo"));
    moved(&there, "demo", &here, &[]);
    here.ok(&["exec", "demo", "x=3"]);
    let replayed = Peer::honest(&there, &transcript);
    assert!(!replayed.is_prepared() && replayed.last().contains("\"epoch\""), "{:?}", replayed.last());
    // The commit of that time is acknowledged again, and changes nothing.
    peer::decide(&there, &transcript.commit);
    assert_eq!((is_live(&here, "demo"), is_live(&there, "demo")), (true, false));
    assert_eq!(here.ok(&["exec", "demo", "echo $x"]), "3\n");
    assert_eq!((left_over(&there), undecided(&there)), (Vec::new(), Vec::new()));
}

/// A commit decides about the kernel and epoch that it names.
#[test]
fn commit_names_what_was_prepared() {
    let (here, scratch) = (source(), Host::start());
    let transcript = Transcript::record(&here, &scratch);
    let victim = Victim::new();
    for (field, value) in [("epoch", 9.into()), ("kernel", Value::from("22".repeat(16)))] {
        assert!(Peer::honest(&victim.host, &transcript).is_prepared());
        let mut commit = transcript.commit.clone();
        commit[field] = value;
        let said = peer::decide(&victim.host, &commit);
        assert!(said.contains("\"refused\""), "{field}: {said}");
        victim.check(field);
    }
    victim.end();
}

#[test]
fn hostile_files_import_nothing() {
    let here = source();
    here.ok(&["checkpoint", "demo"]);
    let file = here.path("whole");
    here.ok(&["export", "demo", file.to_str().unwrap()]);
    let whole = std::fs::read(&file).unwrap();
    let victim = Victim::new();
    let at = victim.host.path("bundle");
    let import = |bytes: &[u8]| {
        std::fs::write(&at, bytes).unwrap();
        victim.host.cli(&["import", at.to_str().unwrap(), "--as", "brought"])
    };
    let remove = || drop(victim.host.ok(&["rm", "brought", "--yes"]));
    assert!(import(&whole).status.success());
    remove();
    let (head, records) = objects::open_bundle(&whole);
    // Without a change the parts give a file that is understood.
    let same = import(&objects::close_bundle(&head, &records));
    assert!(same.status.success(), "{}", String::from_utf8_lossy(&same.stderr));
    remove();
    for trick in PATH_TRICKS {
        let (mut head, mut changed) = (head.clone(), records.clone());
        assert!(changed.rename_beside(b"pathtrick1", trick, &mut head) > 0);
        assert!(!import(&objects::close_bundle(&head, &changed)).status.success(), "{trick:?}");
        victim.check("a path trick");
    }
    let cases = seeds(20, |seed| {
        let mut random = Random(seed);
        let (what, bytes) = objects::hostile_bundle(&whole, &head, &records, &mut random);
        if import(&bytes).status.success() {
            remove();
        }
        victim.check(&format!("seed {seed}: {what}"));
    });
    eprintln!("{cases} cases");
    victim.end();
}

/// The tests' own parts, which every case relies on.
#[test]
fn readdressed_objects_are_consistent() {
    let leaf = b"a leaf".to_vec();
    let address = *blake3::hash(&leaf).as_bytes();
    let middle = [&b"names "[..], &address].concat();
    let top = format!("{{\"middle\":\"{}\"}}", blake3::hash(&middle).to_hex()).into_bytes();
    let mut objects = Objects::default();
    let root = [leaf, middle, top].map(|bytes| objects.add(bytes))[2];
    objects.root = root;
    objects.replace(address, b"another leaf".to_vec(), &mut Vec::new());
    assert_ne!(objects.root, root);
    assert!(objects.all().all(|(digest, bytes)| *digest == *blake3::hash(bytes).as_bytes()));
    assert_eq!(objects.all().count(), 3);
}
