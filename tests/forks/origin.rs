//! Origin as the code inside sees it; no two children are alike.

use std::collections::BTreeSet;

use super::show;
use crate::support::{Host, users};

const ENGINES: [[&str; 2]; 2] = [
    ["kaish", "echo $RYOKAN_ORIGIN $RYOKAN_GENERATION; sh -c 'echo $RYOKAN_ORIGIN $RYOKAN_GENERATION'"],
    [
        "python",
        "import os, subprocess\nprint(os.environ['RYOKAN_ORIGIN'], os.environ['RYOKAN_GENERATION'], flush=True)\nsubprocess.run(['sh', '-c', 'echo $RYOKAN_ORIGIN $RYOKAN_GENERATION'])\nNone",
    ],
];

#[test]
fn code_sees_kernel_origin() {
    for user in users() {
        let host = Host::start_as(user);
        for [engine, tell] in ENGINES {
            let is = |kernel: &str, wanted: &str| {
                let reported = host.ok(&["exec", kernel, tell]);
                assert_eq!(reported, format!("{wanted}\n{wanted}\n"), "{user:?} {engine} {kernel}");
                let shown = show(&host, kernel);
                let shown = format!("{} {}", shown["origin"]["kind"].as_str().unwrap(), shown["generation"]);
                assert_eq!(shown, wanted, "{user:?} {engine} {kernel}");
            };
            let child = &format!("{engine}-child");
            host.ok(&["new", engine, "--engine", engine]);
            is(engine, "original 0");
            host.ok(&["checkpoint", engine, "-m", "one"]);
            let workers = host.workers();
            host.ok(&["restore", engine, "one", "--yes"]);
            is(engine, "restored 1");
            assert_eq!(host.workers(), workers, "{user:?} {engine}: the worker was kept");
            host.ok(&["fork", engine, child]);
            is(child, "forked 2");
            is(engine, "restored 1");
            host.ok(&["stop", engine]);
            is(engine, "restored 1");
            host.ok(&["undo", engine, "--yes"]);
            is(engine, "restored 2");
            host.ok(&["restore", child, "latest", "--yes"]);
            is(child, "restored 3");
            assert_eq!(show(&host, child)["origin"]["from"]["name"], engine, "the fork is not forgotten");
            assert!(host.ok(&["show", child]).contains(&format!("from {engine}")));
            for kernel in [engine, child] {
                host.ok(&["stop", kernel]);
            }
        }
    }
}

/// For every use of the parent's generators: seeded, used, or bound by name.
#[test]
fn forked_random_generators_diverge() {
    let host = Host::start();
    host.ok(&["new", "k", "--engine", "python"]);
    host.ok(&[
        "exec",
        "k",
        "import random, uuid, tempfile\nfrom random import random as draw\nrandom.seed(42); draw(); random.random()",
    ]);
    host.ok(&["fork", "k", "c", "--count", "3"]);
    let (mut drawn, mut shown) = (BTreeSet::new(), 0);
    for kernel in ["k", "c-1", "c-2", "c-3"] {
        let numbers = host.ok(&[
            "exec",
            kernel,
            "print(random.random(), draw(), uuid.uuid4(), tempfile.mktemp(), random.SystemRandom().random())",
        ]);
        for number in numbers.split_whitespace() {
            shown += 1;
            assert!(drawn.insert(number.to_owned()), "{kernel}: {number} was drawn before: {drawn:?}");
        }
        host.ok(&["stop", kernel]);
    }
    assert_eq!(shown, 20);
    // A generator in a variable of the parent is inherited as any other value.
    host.ok(&["exec", "k", "own = random.Random(7)"]);
    host.ok(&["fork", "k", "d", "--count", "2"]);
    let own = |kernel: &str| host.ok(&["exec", kernel, "print(own.random())"]);
    assert_eq!(own("d-1"), own("d-2"));
    host.ok(&["new", "shell"]);
    host.ok(&["fork", "shell", "s", "--count", "2"]);
    let name = |kernel: &str| host.ok(&["exec", kernel, "mktemp"]);
    assert_ne!(name("s-1"), name("s-2"));
}
