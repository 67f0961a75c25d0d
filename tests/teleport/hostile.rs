//! A source that sends anything: the target refuses it and keeps nothing.

use std::io::{Read as _, Write as _};
use std::process::Stdio;

use ryokan::catalog::StateHandle;

use super::*;

fn sha256(bytes: &[u8]) -> Vec<u8> {
    ring::digest::digest(&ring::digest::SHA256, bytes).as_ref().to_vec()
}

/// One frame. Kind 1 is any message: all but the greeting have a check, and kind 8.
pub(super) fn frame(kind: u8, bytes: &[u8]) -> Vec<u8> {
    let is_checked = kind == 1 && !bytes.starts_with(br#"{"message":"hello""#);
    let checked = [&sha256(bytes)[..8], bytes].concat();
    let (kind, bytes) = if is_checked { (8, &checked[..]) } else { (kind, bytes) };
    [&[kind][..], &(bytes.len() as u32).to_le_bytes(), bytes].concat()
}

pub(super) fn hello() -> Vec<u8> {
    let check = u32::from_le_bytes(sha256(&[0; 16])[..4].try_into().unwrap());
    let (host, named) = ("00".repeat(16), r#""message":"hello","protocol":"ryokan-handover""#);
    frame(1, format!(r#"{{{named},"version":3,"host":"{host}","check":{check}}}"#).as_bytes())
}

/// The specification that most tests offer.
fn default_spec() -> Value {
    serde_json::to_value(ryokan::core::spec::KernelSpec::new("k".parse().unwrap(), EngineName::Kaish)).unwrap()
}

fn offer(spec: &Value, name: &str, epoch: u64) -> Vec<u8> {
    sized_offer(spec, name, epoch, 0)
}

fn sized_offer(spec: &Value, name: &str, epoch: u64, bytes: u64) -> Vec<u8> {
    let mut spec = spec.clone();
    spec["name"] = name.into();
    let offer = serde_json::json!({
        "message": "offer", "handover": "11".repeat(16), "kernel": "22".repeat(16), "epoch": epoch, "spec": spec,
        "resources": [], "allow_missing": false, "format": StateHandle::history_format(), "bytes": bytes,
    });
    frame(1, offer.to_string().as_bytes())
}

/// The content of a message, after its head and its check.
fn json(message: &[u8]) -> Value {
    serde_json::from_slice(&message[13..]).unwrap()
}

/// What the target answers to these bytes.
pub(super) fn answer(target: &Host, bytes: &[u8]) -> String {
    let mut command = target.command("ryokan");
    command.args(["--no-autostart", "pipe"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut pipe = command.spawn().unwrap();
    let mut to = pipe.stdin.take().unwrap();
    // The target may close first.
    let _ = to.write_all(bytes);
    drop(to);
    let mut said = Vec::new();
    pipe.stdout.take().unwrap().read_to_end(&mut said).unwrap();
    pipe.wait().unwrap();
    String::from_utf8_lossy(&said).into_owned()
}

#[test]
fn hostile_source_is_refused() {
    let target = Host::start();
    let spec = default_spec();
    let accepted = answer(&target, &[hello(), offer(&spec, "k", 1)].concat());
    assert!(accepted.contains("\"accept\""), "the frames of this test are understood: {accepted}");
    let digest = [7; 32];
    let object = [&digest[..], &4u64.to_le_bytes()].concat();
    let asked = [hello(), offer(&spec, "k", 1), frame(2, &digest)].concat();
    let (raw, flush) = (chunk(&digest, 4, 4, 0), frame(1, br#"{"message":"flush","objects":1}"#));
    let mut long = vec![1];
    long.extend(u32::MAX.to_le_bytes());
    let seal = frame(1, format!(r#"{{"message":"seal","description":"{}"}}"#, "33".repeat(32)).as_bytes());
    let unknown = |message: &str| {
        let fields = format!(
            r#"{{"message":"{message}","handover":"{}","kernel":"{}","epoch":1}}"#,
            "44".repeat(16),
            "55".repeat(16)
        );
        frame(1, fields.as_bytes())
    };
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("garbage", b"GET / HTTP/1.1\r\n\r\n".to_vec()),
        ("an older version", String::from_utf8(hello()).unwrap().replace(":3,", ":1,").into_bytes()),
        ("another protocol", frame(1, br#"{"message":"hello","protocol":"x","version":3,"host":"00"}"#)),
        ("a frame of 4 GiB", [hello(), long].concat()),
        ("an unknown kind", [hello(), frame(9, b"x")].concat()),
        ("objects before an offer", [hello(), frame(2, &digest)].concat()),
        ("a path as a name", [hello(), offer(&spec, "../../etc", 1)].concat()),
        ("a seal without objects", [hello(), offer(&spec, "k", 1), seal.clone()].concat()),
        ("a seal before an offer", [hello(), seal].concat()),
        ("an object that was not asked for", [hello(), offer(&spec, "k", 1), frame(4, &object)].concat()),
        ("an object with other bytes", [&asked[..], &frame(4, &object), &raw, &frame(6, b"abcd"), &flush].concat()),
        ("an object longer than it says", [&asked[..], &frame(4, &object), &raw, &frame(6, b"abcde")].concat()),
        ("a chunk longer than its object", [&asked[..], &frame(4, &object), &chunk(&digest, 5, 5, 0)].concat()),
        ("a chunk that it has not sent", [&asked[..], &frame(4, &object), &chunk(&digest, 4, 0, 2), &flush].concat()),
        ("a chunk of an unknown form", [&asked[..], &frame(4, &object), &chunk(&digest, 4, 4, 3)].concat()),
        ("an object of 16 EiB", [&asked[..], &frame(4, &[&digest[..], &u64::MAX.to_le_bytes()].concat())].concat()),
        ("a chunk of 4 GiB", {
            let large = [&digest[..], &(4u64 << 30).to_le_bytes()].concat();
            [&asked[..], &frame(4, &large), &chunk(&digest, u32::MAX, u32::MAX, 0), &frame(6, b"abcd")].concat()
        }),
        ("a message without its check", [&hello()[..], &[1], &offer(&spec, "k", 1)[1..]].concat()),
        ("a message that was changed", {
            let mut changed = [hello(), offer(&spec, "k", 1)].concat();
            let epoch = changed.windows(9).position(|bytes| bytes == br#""epoch":1"#).unwrap();
            changed[epoch + 8] = b'2';
            changed
        }),
        ("a greeting of another host", String::from_utf8(hello()).unwrap().replace("00", "01").into_bytes()),
        ("a piece of no object", [&asked[..], &frame(6, b"abcd")].concat()),
        (
            "a damaged piece",
            [&asked[..], &frame(4, &object), &chunk(&digest, 4, 3, 1), &frame(6, b"abc"), &flush].concat(),
        ),
        ("a round that is incomplete", [&asked[..], &flush].concat()),
        ("chunks before an offer", [hello(), frame(7, &digest)].concat()),
        ("a commit of an unknown handover", [hello(), unknown("commit")].concat()),
    ];
    for (what, bytes) in cases {
        let said = answer(&target, &bytes);
        assert!(said.contains("\"refused\""), "{what}: {said}");
    }
    assert!(
        answer(&target, &[hello(), unknown("abort")].concat()).contains("\"aborted\""),
        "there is nothing to abort"
    );
    assert_eq!((target.ok(&["ls", "--quiet"]), handovers(&target)), (String::new(), Vec::new()));
    assert_eq!(target.data().join("kernels").read_dir().unwrap().count(), 0, "nothing is left");
}

/// The frame of a chunk.
fn chunk(digest: &[u8; 32], length: u32, stored: u32, form: u8) -> Vec<u8> {
    frame(5, &[&digest[..], &length.to_le_bytes(), &stored.to_le_bytes(), &[form]].concat())
}

/// An object of one chunk with its frames, and its address.
fn object(bytes: &[u8]) -> ([u8; 32], Vec<u8>) {
    let (digest, length) = (*blake3::hash(bytes).as_bytes(), bytes.len() as u32);
    let head = [&digest[..], &(bytes.len() as u64).to_le_bytes()].concat();
    (digest, [frame(4, &head), chunk(&digest, length, length, 0), frame(6, bytes)].concat())
}

/// The target's answer to an offer of a kernel with Python in a machine with its memory.
pub(crate) fn machine_offer(target: &Host, machine: &Value, or_checkpoint: bool) -> String {
    let mut spec = default_spec();
    spec["isolation"] = "microvm".into();
    spec["engine"] = "python".into();
    let mut offer: Value = json(&offer(&spec, "offered", 1));
    offer["kind"] = "teleport".into();
    offer["or_checkpoint"] = or_checkpoint.into();
    offer["machine"] = machine.clone();
    answer(target, &[hello(), frame(1, offer.to_string().as_bytes())].concat())
}

#[test]
fn unacceptable_offers_name_their_rule() {
    let target = Host::start();
    let spec = default_spec();
    let mut machine = spec.clone();
    machine["isolation"] = "microvm".into();
    for (bytes, code, reason) in [
        (offer(&spec, "k", i64::MAX as u64), "refused", "epoch"),
        (offer(&spec, "k", u64::MAX), "refused", "epoch"),
        (offer(&machine, "k", 1), "unsupported", "image"),
    ] {
        let said = answer(&target, &[hello(), bytes].concat());
        let (code, reason) = (format!(r#""code":"{code}""#), format!(r#""reason":"{reason}""#));
        assert!(said.contains(&code) && said.contains(&reason), "{said}");
    }
    let mut machine: Value = json(&offer(&spec, "k", 1));
    machine["machine"] = serde_json::json!({
        "architecture": "x86_64", "base_image_version": "", "host": "00".repeat(16),
        "content": { "memory_bytes": 1, "disk_bytes": 1, "machine": {
            "vmm": "", "build": "", "machine_type": "", "cpu_model": "", "ram_bytes": 1, "processors": 1,
        } },
    });
    assert!(answer(&target, &[hello(), frame(1, machine.to_string().as_bytes())].concat()).contains("\"accept\""));
    for (at, rule) in [
        ("/machine/base_image_version", "base_image_version has at most 64 characters"),
        ("/machine/content/machine/cpu_model", "each text of a machine has at most 1024 characters"),
    ] {
        let mut long = machine.clone();
        *long.pointer_mut(at).unwrap() = "x".repeat(1025).into();
        let said = answer(&target, &[hello(), frame(1, long.to_string().as_bytes())].concat());
        assert!(said.contains("\"refused\"") && said.contains(rule), "{at}: {said}");
    }
    let text = String::from_utf8(offer(&spec, "k", 1).split_off(13)).unwrap();
    let stays = text.replacen('{', r#"{"kind":"suspend","#, 1);
    let said = answer(&target, &[hello(), frame(1, stays.as_bytes())].concat());
    assert!(said.contains("\"refused\"") && said.contains("valid only on the host that took it"), "{said}");
    let accepted = answer(&target, &[hello(), offer(&spec, "k", i64::MAX as u64 - 1)].concat());
    assert!(accepted.contains("\"accept\""), "{accepted}");
}

/// The target takes a kernel only without what its source named.
#[test]
fn target_checks_named_things() {
    let target = Host::start();
    let mut spec = default_spec();
    spec["net"] = "host".into();
    let said = |allow_missing: bool, allowed: &[&str]| {
        let mut changed: Value = json(&offer(&spec, "k", 1));
        changed["allow_missing"] = allow_missing.into();
        changed["allowed"] = serde_json::json!(allowed);
        answer(&target, &[hello(), frame(1, changed.to_string().as_bytes())].concat())
    };
    for (allow_missing, allowed) in [(false, &[] as &[&str]), (false, &["network"]), (true, &["mcp", "paths"])] {
        let said = said(allow_missing, allowed);
        assert!(said.contains(r#""reason":"missing""#) && said.contains("network host"), "{allowed:?}: {said}");
    }
    let unknown = said(true, &["everything"]);
    assert!(unknown.contains(r#""reason":"missing_kind""#), "{unknown}");
    for allowed in [&[] as &[&str], &["network"]] {
        let accepted = said(true, allowed);
        assert!(accepted.contains("\"accept\""), "{allowed:?}: {accepted}");
    }
}

/// A page is counted once, but would be imported as often as it is named.
#[test]
fn repeated_pages_are_refused() {
    use ryokan::core::ids::{CheckpointId, Digest, HostId, KernelId};
    let target = Host::start();
    let (page, page_frames) = object(b"a page");
    let head = ryokan::bundle::Head {
        ryokan: String::new(),
        at_ms: 0,
        host: HostId::from_bytes([0; 16]),
        kernel: KernelId::from_bytes([0x22; 16]),
        name: "k".into(),
        generation: 0,
        begin: CheckpointId::from_bytes([1; 16]),
        checkpoints: Vec::new(),
        blobs: Vec::new(),
        decisions: Vec::new(),
        epoch: None,
        journal: None,
        audit: None,
    };
    let page = Digest::from_bytes(page);
    let said = |history: Vec<Digest>| {
        let spec = serde_json::from_value(default_spec()).unwrap();
        let seal =
            ryokan::teleport::Seal { head: head.clone(), spec, history, created_at_ms: 0, audit: None, left_behind: 0 };
        let (description, frames) = object(&serde_json::to_vec(&seal).unwrap());
        let seal = serde_json::json!({ "message": "seal", "description": Digest::from_bytes(description) });
        let question = [*page.as_bytes(), description].concat();
        let flush = frame(1, br#"{"message":"flush","objects":2}"#);
        let seal = frame(1, seal.to_string().as_bytes());
        answer(
            &target,
            &[hello(), offer(&default_spec(), "k", 1), frame(2, &question), page_frames.clone(), frames, flush, seal]
                .concat(),
        )
    };
    assert!(said(vec![page, page]).contains("is repeated"));
    let once = said(vec![page]);
    assert!(once.contains("\"refused\"") && !once.contains("is repeated"), "{once}");
}

/// A session that stays open.
struct Session {
    pipe: std::process::Child,
    to: std::process::ChildStdin,
    from: std::process::ChildStdout,
}

impl Session {
    fn open(target: &Host, id: u8) -> Session {
        let (session, said) = Session::offered(target, id, 0);
        assert!(said.contains("\"accept\""), "{said}");
        session
    }

    /// Offers a kernel with that many bytes; returns also what the target answers.
    fn offered(target: &Host, id: u8, bytes: u64) -> (Session, String) {
        let mut command = target.command("ryokan");
        command.args(["--no-autostart", "pipe"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut pipe = command.spawn().unwrap();
        let (to, from) = (pipe.stdin.take().unwrap(), pipe.stdout.take().unwrap());
        let mut session = Session { pipe, to, from };
        let offer = String::from_utf8(sized_offer(&default_spec(), "k", 1, bytes).split_off(13)).unwrap();
        let offer = offer.replace(&"11".repeat(16), &format!("{id:02x}").repeat(16));
        session.send(&[hello(), frame(1, offer.as_bytes())].concat());
        assert!(session.receive().1.contains("hello"));
        let said = session.receive().1;
        (session, said)
    }

    fn send(&mut self, bytes: &[u8]) {
        self.to.write_all(bytes).unwrap();
    }

    fn receive(&mut self) -> (Vec<u8>, String) {
        let mut head = [0; 5];
        self.from.read_exact(&mut head).unwrap();
        let mut bytes = vec![0; u32::from_le_bytes([head[1], head[2], head[3], head[4]]) as usize];
        self.from.read_exact(&mut bytes).unwrap();
        let text = String::from_utf8_lossy(&bytes).into_owned();
        (bytes, text)
    }

    fn lacks(&mut self, digest: &[u8; 32]) -> bool {
        self.send(&frame(2, digest));
        self.receive().0 == [1]
    }

    fn close(mut self) {
        drop(self.to);
        self.pipe.wait().unwrap();
    }
}

#[test]
fn collection_spares_arriving_objects() {
    let mut target = Host::prepare(User::Own);
    target.configure("[upkeep]\ngrace = \"0s\"\ninterval = \"never\"\n");
    target.launch();
    let (digest, frames) = object(b"arrives before its kernel");
    let mut session = Session::open(&target, 1);
    assert!(session.lacks(&digest));
    session.send(&[frames, frame(1, br#"{"message":"flush","objects":1}"#)].concat());
    assert!(session.receive().1.contains("flushed"));
    target.ok(&["gc"]);
    let mut other = Session::open(&target, 2);
    assert!(!other.lacks(&digest), "it is kept while its session lasts");
    session.close();
    other.close();
    // Without a session, nothing keeps it.
    crate::support::until("it is removed", || {
        target.ok(&["gc"]);
        let mut later = Session::open(&target, 3);
        let lacks = later.lacks(&digest);
        later.close();
        lacks
    });
}

/// Bytes that are free where a host keeps its data.
fn free_bytes(host: &Host) -> u64 {
    let found = nix::sys::statvfs::statvfs(&host.data()).unwrap();
    found.blocks_available() * found.fragment_size()
}

#[test]
fn arriving_kernels_share_the_room() {
    let target = Host::start();
    let refused = |said: &str| said.contains("\"refused\"") && said.contains("\"handover_size\"");
    let (huge, said) = Session::offered(&target, 1, u64::MAX);
    assert!(refused(&said), "{said}");
    huge.close();
    let most = free_bytes(&target) / 4 * 3;
    let (first, said) = Session::offered(&target, 2, most);
    assert!(said.contains("\"accept\""), "{said}");
    let (second, said) = Session::offered(&target, 3, most);
    assert!(refused(&said), "both have no room together: {said}");
    second.close();
    first.close();
    crate::support::until("the room of the first one is free", || {
        let (third, said) = Session::offered(&target, 4, most);
        third.close();
        said.contains("\"accept\"")
    });
}

/// A source that sends nothing keeps place and room only until another kernel needs them.
#[test]
fn silent_sessions_are_evicted() {
    let mut target = Host::prepare(User::Own);
    target.configure("[teleport]\nstall_timeout = \"1s\"\n");
    target.launch();
    let most = free_bytes(&target) / 4 * 3;
    let silent: Vec<Session> = (1..=ryokan::core::limits::HANDOVERS_CONCURRENT as u8)
        .map(|id| {
            let (session, said) = Session::offered(&target, id, if id == 1 { most } else { 0 });
            assert!(said.contains("\"accept\""), "{id}: {said}");
            session
        })
        .collect();
    crate::support::until("the eviction of a session", || {
        let (next, said) = Session::offered(&target, 99, most);
        next.close();
        said.contains("\"accept\"")
    });
    silent.into_iter().for_each(Session::close);
}
