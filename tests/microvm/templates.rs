//! Templates that are rebuilt beside their use: machines of the old one go on, and there is always one.

use std::fs;

use serde_json::json;

use super::warm::is_restored;
use super::{Machines, NEW_LAB, has_open, image};
use crate::support::{Host, User, until};

/// A pool, and templates that are rebuilt an hour after they were made.
const REFRESH: &str = "[pool]\npool_size = 1\nmin_idle = 1\n\
                       [microvm]\ntemplate_max_age = \"1h\"\ntemplate_refresh_interval = \"2s\"\n";

/// The same without a pool.
const ALONE: &str = "[microvm]\ntemplate_max_age = \"1h\"\ntemplate_refresh_interval = \"2s\"\n";

impl Machines {
    /// A host whose template counts as old, not started.
    fn with_old_template(config: &str) -> Machines {
        let host = Machines::with_template(User::Own, config);
        host.describe(|about| _ = about.insert("created_at_ms".into(), json!(1)));
        host
    }

    fn has_event(&self, kind: &str) -> bool {
        self.ok(&["events", "--json"]).contains(kind)
    }
}

#[test]
fn template_is_rebuilt_beside_use() {
    use ryokan::sys::fault;

    let mut host = Machines::with_old_template(REFRESH);
    let (old, hold) = (host.description(), host.path("hold"));
    fs::write(&hold, b"").expect("written");
    host.env(fault::HOLD, hold.to_str().expect("a path"));
    // The new one takes the name when this test says so.
    host.env(fault::VARIABLE, "machine.template.exchange.rename=hold");
    host.launch();
    host.ok(&NEW_LAB);
    // From its first machine on the old template is in use, and so it is rebuilt.
    assert_eq!(host.run("lab", "g = (n for n in range(9)); next(g)"), "0", "{}", host.log());
    until("another template in the making", || !host.leftovers().is_empty());
    let lab = host.machines();
    assert!(lab.iter().all(|pid| is_restored(*pid)), "{}", host.log());
    let warm = host.await_restored();
    host.ok(&["new", "second", "--isolation", "microvm", "--engine", "python"]);
    assert_eq!(host.run("second", "h = (n for n in range(9)); next(h)"), "0", "{}", host.log());
    assert!(host.machines().contains(&warm), "it has the warm machine\n{}", host.log());
    host.ok(&["suspend", "second", "--release"]);
    until("the machine's end", || !Host::is_alive(warm));
    assert!(!host.has_event("template_refreshed"), "{}", host.log());
    assert_eq!(host.description()["id"], old["id"], "the old one has its name until the new one is complete");
    fs::remove_file(hold).expect("removed");
    until("another template", || host.has_event("template_refreshed"));
    let new = host.description();
    assert_eq!((&new["replaces"], &new["made_from"]), (&old["id"], &json!("fresh_boot")), "{new}");
    assert!(new["id"] != old["id"] && new["created_at_ms"].as_i64() > Some(1_700_000_000_000), "{new}");
    assert!(host.leftovers().is_empty(), "{:?}", host.leftovers());
    // Machines of the old one go on, and are copied by their changed pages.
    assert_eq!(host.run("lab", "print(next(g))"), "1", "{}", host.log());
    host.ok(&["fork", "lab", "copy"]);
    assert_eq!(host.run("copy", "print(next(g))"), "2", "{}", host.log());
    // Suspended before or after that, they need the old one's memory only.
    assert_eq!(host.run("second", "print(next(h))"), "1", "{}", host.log());
    host.ok(&["suspend", "lab", "--release"]);
    assert_eq!(host.run("lab", "print(next(g))"), "2", "{}", host.log());
    assert_eq!(host.counted("machine_saved_whole"), 0, "{}", host.log());
    assert!(!host.has_event("suspend_lost"), "{}", host.log());
    // An idle machine is of either template; the one after it is of the new one, whose memory has the old one's name.
    host.await_restored();
    host.ok(&["rm", "lab", "copy", "--yes"]);
    host.ok(&["new", "third", "--isolation", "microvm", "--engine", "python"]);
    assert_eq!(host.run("third", "print(3)"), "3", "{}", host.log());
    until("a machine of the new template", || {
        host.parked().into_iter().any(|pid| is_restored(pid) && has_open(pid, "ram"))
    });
    let counted = ["cold_boot", "template_built", "template_refreshed", "template_refresh_failed"];
    assert_eq!(counted.map(|event| host.counted(event)), [0, 0, 1, 0], "{}", host.log());
    assert!(!host.has_event("machine_copied_whole"), "{}", host.log());
}

#[test]
fn killed_refresh_leaves_template() {
    use ryokan::sys::fault;

    let mut host = Machines::with_template(User::Own, ALONE);
    let folder = host.data().join("templates");
    fs::create_dir(folder.join("mine")).expect("a folder");
    fs::write(folder.join("mine/file"), b"text").expect("written");
    // Undated, as a former version wrote it.
    host.describe(|about| ["id", "created_at_ms", "made_from"].iter().for_each(|name| _ = about.remove(*name)));
    let old = host.description();
    // Killed while the new one boots, then when it is complete.
    let points = ["", "machine.template.exchange.rename"];
    for (round, point) in points.into_iter().enumerate() {
        host.env(fault::VARIABLE, &if point.is_empty() { String::new() } else { format!("{point}=kill") });
        host.launch();
        let name = format!("lab{round}");
        host.ok(&["new", &name, "--isolation", "microvm", "--engine", "python"]);
        // The rebuild begins before the kernel has answered.
        let running = host.begin(&name, "print(1)");
        let builder = if point.is_empty() {
            until("a template's machine", || host.builder().is_some());
            let builder = host.builder();
            host.kill();
            builder
        } else {
            let daemon = u32::try_from(host.pid()).expect("a process");
            until(point, || !Host::is_alive(daemon));
            host.kill();
            None
        };
        let _ = running.wait_with_output().expect("it ends");
        assert_eq!(host.description(), old, "{point}");
        assert!(!host.leftovers().is_empty(), "{point}");
        host.env(fault::VARIABLE, "");
        host.configure("[microvm]\ntemplate_max_age = \"never\"\n");
        host.launch();
        assert!(host.leftovers().is_empty(), "{point}: {:?}", host.leftovers());
        assert_eq!(host.description(), old, "{point}");
        assert!(folder.join("mine/file").exists(), "{point}");
        until("the machine's end", || builder.is_none_or(|pid| !Host::is_alive(pid)));
        assert_eq!(host.run(&name, "print(1)"), "1", "{point}: {}", host.log());
        assert!(host.machines().into_iter().any(is_restored), "{point}: the old one is used\n{}", host.log());
        host.ok(&["rm", &name, "--yes"]);
        if point.is_empty() {
            host.kill();
            host.configure(ALONE);
        }
    }
    let events = host.ok(&["events", "--json"]);
    assert!(events.contains("templates_skipped") && events.contains("mine: "), "{events}");
    assert!(!events.contains("template_damaged") && !events.contains("cold_boot"), "{events}");
}

#[test]
fn whole_copy_is_visible() {
    use ryokan::sys::fault;

    let mut host = Machines::with_template(User::Own, "");
    host.env(fault::VARIABLE, "machine.copy.pages=eio");
    host.launch();
    host.ok(&NEW_LAB);
    host.run("lab", "g = (n for n in range(9)); next(g)");
    host.ok(&["fork", "lab", "copy"]);
    assert_eq!(host.run("copy", "print(next(g))"), "1", "{}", host.log());
    let events = host.ok(&["events", "lab", "--json"]);
    assert!(events.contains("machine_copied_whole") && events.contains("Input/output error"), "{events}");
    assert_eq!(host.counted("machine_copied_whole"), 1);
    // The next one is copied by its pages.
    host.ok(&["fork", "lab", "next"]);
    assert_eq!(host.run("next", "print(next(g))"), "1", "{}", host.log());
    assert_eq!(host.counted("machine_copied_whole"), 1);
}

/// The self-test of a template, without which machines are copied as a whole.
#[test]
fn unproved_template_is_visible() {
    use ryokan::sys::fault;

    let mut host = Machines::prepare(User::Own, "[defaults]\nengine = \"python\"\n");
    host.env(fault::VARIABLE, "machine.template.proof=eio");
    host.launch();
    host.ok(&["images", "rotate", &image()]);
    let events = host.ok(&["events", "--json"]);
    assert!(events.contains("copies_by_stream") && events.contains("Input/output error"), "{events}");
    host.ok(&NEW_LAB);
    host.run("lab", "g = (n for n in range(9)); next(g)");
    host.ok(&["fork", "lab", "copy"]);
    assert_eq!(host.run("copy", "print(next(g))"), "1", "{}", host.log());
    assert!(host.has_event("machine_copied_whole"), "{}", host.log());
    assert_eq!(host.counted("cold_boot"), 0, "{}", host.log());
}
