//! Each engine in a machine does what it does in processes.

use ryokan::core::engine::EngineName;
use ryokan::core::spec::Isolation;

use super::Machines;
use crate::engines::contract;
use crate::engines::dialect::Dialect;
use crate::support::{User, spec, until};

/// One machine at a time. What the contract's other tests do with files of the host, `files.rs` does through the guest.
#[test]
fn machines_keep_engine_contract() {
    let host = Machines::start(User::Own);
    for engine in EngineName::ALL {
        let d = &Dialect::of(engine);
        host.with(async |client| {
            let mut spec = spec("lab", engine);
            spec.isolation = Some(Isolation::Microvm);
            let (k, _) = client.create_kernel(&spec, "").await.expect("made");
            assert_eq!(k.info().await.expect("info").spec.isolation, Isolation::Microvm);
            contract::ends(&k, d).await;
            contract::inputs(&k, d).await;
            contract::values(&k, d).await;
            contract::edits(&k, d).await;
            contract::interrupts(&k, d).await;
            contract::state(&k, d).await;
        });
        copies_memory(&host, engine);
        host.ok(&["rm", "lab", "copy", "--yes"]);
        until("the machine's end", || host.machines().is_empty());
    }
    let of = |engine: &str| {
        let found = format!("\"engine\":\"{engine}\"");
        let is_one = |file: &std::path::PathBuf| {
            std::fs::read_to_string(file).is_ok_and(|text| text.replace(' ', "").contains(&found))
        };
        until("a template", || host.templates().iter().any(is_one));
    };
    of("node");
    // Both begin as the same shell.
    of("bash");
    let boots = host.counted_of("bash", "cold_boot");
    for name in ["one", "two"] {
        host.ok(&["new", name, "--isolation", "microvm", "--engine", "bash"]);
    }
    let drawn = |name: &str| host.run(name, "echo $RANDOM$RANDOM$RANDOM");
    assert_ne!(drawn("one"), drawn("two"));
    assert_eq!(host.counted_of("bash", "cold_boot"), boots, "{}", host.log());
}

/// A fork of the running machine has its memory, if the engine can seed its generators anew.
fn copies_memory(host: &Machines, engine: EngineName) {
    let (before, draw) = match engine {
        EngineName::Python => ("import random; random.seed(7); mine = iter([5])", "print(next(mine), random.random())"),
        EngineName::Bash => ("RANDOM=7; sleep 1000 & mine=$!", "kill -0 $mine && echo 5 $RANDOM$RANDOM$RANDOM"),
        EngineName::Kaish => ("sleep 1000 &", "echo 5 $(random --max 1000000000)"),
        EngineName::Node => ("mine = [5].values()", "console.log(5)"),
    };
    host.ok(&["exec", "lab", before]);
    let said = host.ok(&["fork", "lab", "copy"]);
    if engine == EngineName::Node {
        assert!(said.contains("without the machine's memory: this engine"), "{said}");
        let events = host.ok(&["events", "lab", "--json"]);
        return assert!(events.contains("\"kind\":\"checkpoint\"") && events.contains("this engine"), "{events}");
    }
    assert!(said.contains("copied with its memory"), "{engine}: {said}\n{}", host.log());
    let drawn = |kernel: &str| host.run(kernel, draw);
    let (lab, copy) = (drawn("lab"), drawn("copy"));
    assert!(lab.starts_with("5 ") && copy.starts_with("5 ") && lab != copy, "{engine}: {lab}, {copy}");
    let name = match engine {
        EngineName::Python => "import os; print(os.environ['RYOKAN_KERNEL'])",
        EngineName::Bash | EngineName::Kaish | EngineName::Node => "echo $RYOKAN_KERNEL",
    };
    assert_eq!(host.run("copy", name), "copy", "{engine}");
}
