//! A target that sends anything: the source keeps its one live kernel, and moves it to an honest target afterwards.

use std::process::{Child, Stdio};

use super::*;
use crate::teleport::seed::stayed;

/// Steps, and the lies that only their answers can tell.
const STEPS: [(&str, &[&str]); 9] = [
    ("hello", &[]),
    ("offer", &["other_kind", "suspend_kind", "no_kind", "many_missing", "long_reason", "refuses_epoch"]),
    ("question", &["short_bitmap", "long_bitmap", "all_held", "random_bitmap"]),
    ("chunks", &["short_bitmap", "long_bitmap", "all_held", "random_bitmap"]),
    ("flush", &["previewed"]),
    ("preview", &["flushed"]),
    ("previewState", &["flushed"]),
    ("seal", &["flushed", "refuses_epoch"]),
    ("abort", &["prepared", "live"]),
];

/// Lies of every step.
const LIES: [&str; 15] = [
    "silence",
    "close",
    "garbage",
    "long_frame",
    "long_text",
    "deep_json",
    "bomb",
    "own_objects",
    "own_question",
    "live",
    "aborted",
    "endless_flushed",
    "endless_working",
    "endless_pieces",
    "prepared",
];

/// A lie at the n-th step of its kind.
#[derive(Debug, Clone, Copy)]
struct Case {
    step: &'static str,
    number: u64,
    lie: &'static str,
}

fn random_case(random: &mut Random) -> Case {
    loop {
        let (step, own) = STEPS[random.index(STEPS.len())];
        let lie = match random.index(2) {
            0 if !own.is_empty() => own[random.index(own.len())],
            _ => LIES[random.index(LIES.len())],
        };
        // The rounds before the pause, and those in it.
        let number = if matches!(step, "question" | "flush") { 1 + random.below(4) } else { 1 };
        let is_honest = matches!((step, lie), ("seal", "prepared") | ("abort", "aborted"));
        // An abort is awaited for seconds.
        let is_slow = step == "abort" && (lie == "silence" || lie.starts_with("endless"));
        if !is_honest && !is_slow {
            return Case { step, number, lie };
        }
    }
}

/// Ends with its test.
struct Moving(Child);

impl Drop for Moving {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A source under attack.
struct Source {
    host: Host,
    peak: u64,
    count: u64,
}

impl Source {
    fn new() -> Source {
        let mut host = Host::prepare(User::Own);
        host.configure("[teleport]\nstall_timeout = \"3s\"\n");
        host.launch();
        host.ok(&["new", "demo", "--engine", "python"]);
        let fill =
            "import os; open('large', 'wb').write(os.urandom(3 << 20)); x = 1; g = iter(range(999)); r = next(g)";
        host.ok(&["exec", "demo", fill]);
        std::fs::write(host.path("target.py"), include_str!("target.py")).expect("written");
        std::fs::write(host.path("bomb"), zstd::bulk::compress(&vec![0; 64 << 20], 1).expect("packed"))
            .expect("written");
        let peak = peak(host.pid());
        Source { host, peak, count: 0 }
    }

    fn handovers(&self) -> Vec<Value> {
        handovers(&self.host)
    }

    /// Offers the kernel to a target that lies; returns whether the lie was reached.
    fn attacked(&mut self, case: Case) -> bool {
        let Case { step, number, lie } = case;
        let told = self.host.path("told");
        let _ = std::fs::remove_file(&told);
        let [program, told_path, bomb] =
            ["target.py", "told", "bomb"].map(|name| self.host.path(name).display().to_string());
        let way = format!("exec:exec /usr/bin/python3 {program} {step} {number} {lie} {told_path} {bomb}");
        // A change, so that there is something to send in the pause.
        self.count += 1;
        self.host.ok(&["exec", "demo", &format!("open('count', 'w').write('{}')", self.count)]);
        let mut command = self.host.command("ryokan");
        command.args(["--no-autostart", "teleport", "demo", "--to", &way]).stdin(Stdio::null());
        let mut moving = Moving(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts"));
        let begun = Instant::now();
        let (mut status, mut lied) = (None, None);
        while status.is_none() {
            assert!(begun.elapsed() < Duration::from_secs(300), "{case:?}: the move does not end");
            if lied.is_none() && told.exists() {
                lied = Some(Instant::now());
            }
            // A target may keep a kernel that runs waiting: a client ends that.
            let waits = lied.is_some_and(|lied| lied.elapsed() > Duration::from_millis(1_500));
            if waits || begun.elapsed() > Duration::from_secs(20) {
                self.host.cli(&["teleport", "demo", "--abort"]);
            }
            std::thread::sleep(Duration::from_millis(5));
            status = moving.0.try_wait().expect("a status");
        }
        assert!(!status.expect("it ended").success(), "{case:?}: the kernel moved to nowhere");
        told.exists()
    }

    /// The kernel lives here and is unchanged, and the daemon is as before.
    fn check(&self, what: &str) {
        assert_eq!(state(&self.host, "demo").as_deref().map(|state| state != "departed"), Some(true), "{what}");
        let see = self.host.ok(&["exec", "demo", "print(next(g), x, open('count').read(), os.path.getsize('large'))"]);
        assert_eq!(see, format!("{0} 1 {0} {1}\n", self.count, 3 << 20), "{what}: the same worker continues");
        for left in self.handovers() {
            assert_eq!(left["state"], "aborting", "{what}: {left}");
            self.host.ok(&["teleport", "--resolve", left["id"].as_str().expect("an id"), "--discard", "--yes"]);
        }
        let now = peak(self.host.pid());
        assert!(now < self.peak + MEMORY, "{what}: memory grew from {} to {now} KiB", self.peak);
        assert!(!self.host.log().contains("panicked"), "{what}: {}", self.host.log());
    }
}

#[test]
fn hostile_targets_keep_nothing() {
    let mut source = Source::new();
    // Each lie that decides something, once.
    let fixed = [
        ("question", 1, "short_bitmap"),
        ("question", 1, "long_bitmap"),
        ("question", 1, "all_held"),
        ("question", 2, "all_held"),
        ("chunks", 1, "all_held"),
        ("chunks", 1, "long_bitmap"),
        ("offer", 1, "prepared"),
        ("question", 1, "prepared"),
        ("preview", 1, "prepared"),
        ("previewState", 1, "prepared"),
        ("offer", 1, "other_kind"),
        ("offer", 1, "suspend_kind"),
        ("seal", 1, "live"),
        ("seal", 1, "silence"),
        ("seal", 1, "close"),
        ("question", 1, "silence"),
        ("abort", 1, "live"),
        ("abort", 1, "silence"),
    ];
    for (step, number, lie) in fixed {
        let case = Case { step, number, lie };
        assert!(source.attacked(case), "{case:?} was not reached");
        source.check(&format!("{case:?}"));
    }
    let mut reached = 0;
    let cases = seeds(5, |seed| {
        let case = random_case(&mut Random(seed));
        reached += u64::from(source.attacked(case));
        source.check(&format!("seed {seed}: {case:?}"));
    });
    eprintln!("{cases} cases, {reached} of them reached");
    assert!(reached > 0, "none of {cases} cases");
    source.host.ok(&["verify"]);
    // Nothing of what the others claimed to have is left out. A slow host may need longer for a step.
    source.host.kill();
    source.host.configure("");
    source.host.launch();
    let there = Host::start();
    let report = moved(&source.host, "demo", &there, &[]);
    assert!(report["sent_bytes"].as_u64() > Some(3 << 20), "{report}");
    stayed(&there, &source.host, "the honest move");
    let see = there.ok(&["exec", "demo", "import os; print(x, open('count').read(), os.path.getsize('large'))"]);
    assert_eq!(see, format!("1 {} {}\n", source.count, 3 << 20));
}
