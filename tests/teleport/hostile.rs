//! A source that sends anything: the target refuses it and keeps nothing.

use std::io::{Read as _, Write as _};
use std::process::Stdio;

use ryokan::catalog::StateHandle;

use super::*;

/// One frame.
fn frame(kind: u8, bytes: &[u8]) -> Vec<u8> {
    let mut frame = vec![kind];
    frame.extend((bytes.len() as u32).to_le_bytes());
    frame.extend(bytes);
    frame
}

fn hello() -> Vec<u8> {
    let host = "00".repeat(16);
    frame(1, format!(r#"{{"message":"hello","protocol":"ryokan-handover","version":1,"host":"{host}"}}"#).as_bytes())
}

fn offer(spec: &Value, name: &str, epoch: u64) -> Vec<u8> {
    let mut spec = spec.clone();
    spec["name"] = name.into();
    let offer = serde_json::json!({
        "message": "offer", "handover": "11".repeat(16), "kernel": "22".repeat(16), "epoch": epoch, "spec": spec,
        "resources": [], "allow_missing": false, "format": StateHandle::history_format(), "bytes": 0,
    });
    frame(1, offer.to_string().as_bytes())
}

/// What the target answers to these bytes.
fn answer(target: &Host, bytes: &[u8]) -> String {
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
    let spec =
        serde_json::to_value(ryokan::core::spec::KernelSpec::new("k".parse().unwrap(), EngineName::Kaish)).unwrap();
    let accepted = answer(&target, &[hello(), offer(&spec, "k", 1)].concat());
    assert!(accepted.contains("\"accept\""), "the frames of this test are understood: {accepted}");
    let digest = [7; 32];
    let object = [&digest[..], &4u64.to_le_bytes()].concat();
    let asked = [hello(), offer(&spec, "k", 1), frame(2, &digest)].concat();
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
        ("another protocol", frame(1, br#"{"message":"hello","protocol":"x","version":1,"host":"00"}"#)),
        ("a frame of 4 GiB", [hello(), long].concat()),
        ("an unknown kind", [hello(), frame(9, b"x")].concat()),
        ("objects before an offer", [hello(), frame(2, &digest)].concat()),
        ("a path as a name", [hello(), offer(&spec, "../../etc", 1)].concat()),
        ("a seal without objects", [hello(), offer(&spec, "k", 1), seal.clone()].concat()),
        ("a seal before an offer", [hello(), seal].concat()),
        ("an object that was not asked for", [hello(), offer(&spec, "k", 1), frame(4, &object)].concat()),
        (
            "an object with other bytes",
            [&asked[..], &frame(4, &object), &frame(5, b"abcd"), &frame(1, br#"{"message":"flush","objects":1}"#)]
                .concat(),
        ),
        ("an object longer than it says", [&asked[..], &frame(4, &object), &frame(5, b"abcde")].concat()),
        ("an object of 16 EiB", [&asked[..], &frame(4, &[&digest[..], &u64::MAX.to_le_bytes()].concat())].concat()),
        ("a piece of no object", [&asked[..], &frame(5, b"abcd")].concat()),
        ("a damaged piece", [&asked[..], &frame(4, &object), &frame(6, b"abcd")].concat()),
        ("a round that is incomplete", [&asked[..], &frame(1, br#"{"message":"flush","objects":1}"#)].concat()),
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
