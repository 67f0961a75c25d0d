//! Journals and events, past and as they happen, against the fake.

use std::io::{BufRead, BufReader};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::command_line::{parts, ryokan};
use super::fake::Fake;

fn lines(fake: &Fake, args: &[&str]) -> Vec<serde_json::Value> {
    let (exit, stdout, stderr) = parts(ryokan(fake, args).output().unwrap());
    assert_eq!((exit, stderr.as_str()), (0, ""));
    stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn past_events_are_shown_once() {
    let fake = Fake::start();
    for args in [vec!["events", "--json"], vec!["events", "demo", "--json"]] {
        let sequences: Vec<u64> = lines(&fake, &args).iter().map(|e| e["sequence"].as_u64().unwrap()).collect();
        assert_eq!(sequences, [1, 2, 3]);
    }
    assert_eq!(lines(&fake, &["events", "--since", "2", "--json"]).len(), 1);
    for (most, expected) in [("0", vec![]), ("2", vec![2, 3]), ("9", vec![1, 2, 3])] {
        let shown = lines(&fake, &["events", "--tail", most, "--json"]);
        let sequences: Vec<u64> = shown.iter().map(|event| event["sequence"].as_u64().unwrap()).collect();
        assert_eq!(sequences, expected, "--tail {most}");
    }
}

#[test]
fn events_are_followed_until_ctrl_c() {
    let fake = Fake::start();
    let mut child = ryokan(&fake, &["events", "--follow"]).spawn().unwrap();
    let stdout = BufReader::new(child.stdout.take().unwrap());
    let shown: Vec<String> = stdout.lines().take(6).map(|line| line.unwrap()).collect();
    assert_eq!(shown[5], "    6  2023-11-14T22:13:20Z  kernel_started  demo");
    kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let mut newest = ryokan(&fake, &["events", "--follow", "--tail", "1"]).spawn().unwrap();
    let stdout = BufReader::new(newest.stdout.take().unwrap());
    let shown: Vec<String> = stdout.lines().take(2).map(|line| line.unwrap()).collect();
    assert!(shown[0].starts_with("    3 ") && shown[1].starts_with("    4 "), "{shown:?}");
    kill(Pid::from_raw(newest.id() as i32), Signal::SIGINT).unwrap();
    assert_eq!(newest.wait().unwrap().code(), Some(0));
}

#[test]
fn journal_follow_shows_new_entries() {
    let fake = Fake::start();
    parts(ryokan(&fake, &["exec", "demo", "say one"]).output().unwrap());
    let entries = lines(&fake, &["journal", "demo", "--json"]);
    assert_eq!((entries.len(), &entries[0]["text"]), (1, &"say one".into()));
    let mut waiting = ryokan(&fake, &["exec", "demo", "wait"]).spawn().unwrap();
    fake.log.wait_for("exec wait");
    let mut follower = ryokan(&fake, &["journal", "demo", "--follow"]).spawn().unwrap();
    let mut shown = BufReader::new(follower.stdout.take().unwrap()).lines().map(|line| line.unwrap());
    assert_eq!(shown.next().unwrap(), "    1  2023-11-14T22:13:20Z  #1 done (1 ms, 3 B) say one");
    assert_eq!(shown.next().unwrap(), "    2  2023-11-14T22:13:20Z  #2 running wait");
    kill(Pid::from_raw(waiting.id() as i32), Signal::SIGINT).unwrap();
    assert_eq!(waiting.wait().unwrap().code(), Some(130));
    // The end of a running execution is shown; ended ones are not repeated.
    assert_eq!(shown.next().unwrap(), "    2  2023-11-14T22:13:20Z  #2 interrupted 0 (1 ms, 3 B) wait");
    kill(Pid::from_raw(follower.id() as i32), Signal::SIGTERM).unwrap();
    assert_eq!(follower.wait().unwrap().code(), Some(143));
}
