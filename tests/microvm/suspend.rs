//! Suspended machines: memory is kept, the guest stands still, and what a stop keeps does not depend on it.

use std::time::{Duration, SystemTime};

use nix::sys::signal::Signal;

use super::{COUNTER, Machines, ask, users};
use crate::support::{Host, User, until};

/// A generator is in memory only; the number is saved, too.
const MEMORY: &str = "g = (n for n in range(100)); next(g); saved = 42; open('f', 'w').write('kept')";
/// The guest's clock.
const TIME: &str = "import time; print(int(time.time()))";

fn state(host: &Host) -> String {
    let shown: serde_json::Value = serde_json::from_str(&host.ok(&["show", "lab", "--json"])).expect("JSON");
    shown["state"].as_str().expect("a state").to_owned()
}

/// A kernel with a value in memory, and its machine.
fn kernel(host: &Machines) -> u32 {
    host.ok(&["new", "lab", "--isolation", "microvm", "--engine", "python"]);
    host.run("lab", MEMORY);
    machine(host)
}

fn machine(host: &Machines) -> u32 {
    match host.machines()[..] {
        [machine] => machine,
        ref other => panic!("one machine, not {other:?}\n{}", host.log()),
    }
}

fn is_paused(machine: u32) -> bool {
    ask(machine, r#"{"execute": "query-status"}"#).is_some_and(|status| status.contains("\"paused\""))
}

#[test]
fn suspended_machine_keeps_memory() {
    for user in users() {
        let host = Machines::start(user);
        let machine = kernel(&host);
        host.ok(&["spawn", "lab", "-d", "--", "sh", "-c", "while :; do date >> ticks; sleep 0.1; done"]);
        until("the program's first line", || host.cli(&["cp", "lab:ticks", "-"]).stdout.contains(&b'\n'));
        assert_eq!(host.ok(&["suspend", "lab"]), "lab is suspended\n");
        assert!(is_paused(machine), "{user:?}");
        assert_eq!(state(&host), "suspended", "a listing does not ask the guest");
        let used = cpu(machine);
        // Files are read, and nothing is changed by it.
        assert_eq!(host.ok(&["cp", "lab:f", "-"]), "kept", "{user:?}");
        let before = host.ok(&["cp", "lab:ticks", "-"]);
        std::thread::sleep(Duration::from_secs(3));
        assert_eq!(host.ok(&["cp", "lab:ticks", "-"]), before, "{user:?}: a suspended process wrote");
        assert!(cpu(machine) <= used + 10, "{user:?}: a suspended machine used the processor");
        assert!(!host.cli(&["kill", "lab", "2", "-s", "TERM"]).status.success(), "the guest does not answer");
        assert_eq!(host.ok(&["resume", "lab"]), "lab is ready\n");
        assert!(!is_paused(machine));
        assert_eq!(host.run("lab", "print(next(g), saved)"), "1 42", "{user:?}\n{}", host.log());
        let now = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970").as_secs();
        let before = now();
        let clock: u64 = host.run("lab", TIME).parse().expect("a time");
        let clocks = before - 2..now() + 3;
        assert!(clocks.contains(&clock), "{user:?}: the guest's clock is {clock}, not of {clocks:?}");
        // The use of a suspended kernel resumes it, and it stops as any other.
        host.ok(&["suspend", "lab"]);
        host.ok(&["checkpoint", "lab", "-m", "one"]);
        assert_eq!(host.run("lab", "print(next(g))"), "2");
        host.ok(&["suspend", "lab"]);
        host.ok(&["stop", "lab"]);
        assert_eq!(host.run("lab", "print(saved, open('f').read())"), "42 kept", "{user:?}\n{}", host.log());
    }
}

/// Processor time of a process, clock ticks.
fn cpu(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it runs");
    let fields: Vec<u64> =
        text.rsplit(')').next().expect("fields").split_whitespace().map(|field| field.parse().unwrap_or(0)).collect();
    fields[11] + fields[12]
}

#[test]
fn next_daemon_adopts_suspended_machine() {
    for user in users() {
        let mut host = Machines::start(user);
        let machine = kernel(&host);
        host.ok(&["suspend", "lab"]);
        host.kill();
        assert!(is_paused(machine));
        host.launch();
        assert_eq!(state(&host), "suspended", "{}", host.log());
        until("the adopted machine's pause", || is_paused(machine));
        assert_eq!(host.run("lab", "print(next(g))"), "1", "{user:?}\n{}", host.log());
        assert_eq!(self::machine(&host), machine, "{user:?}");
        // An orderly stop keeps the memory of machines, suspended or not; running code is interrupted.
        for (n, was) in [(2, "suspended"), (3, "ready"), (4, "busy")] {
            let running = (was == "busy").then(|| {
                let mut command = host.command("ryokan");
                command.args(["--no-autostart", "exec", "lab", "import time; time.sleep(600)"]);
                command.spawn().expect("it runs")
            });
            if was == "suspended" {
                host.ok(&["suspend", "lab"]);
            }
            until("its state", || state(&host) == was);
            host.signal(Signal::SIGTERM);
            host.wait();
            if let Some(mut interrupted) = running {
                assert!(!interrupted.wait().expect("it ends").success());
            }
            until("the end of the machine", || host.machines().is_empty());
            host.launch();
            if was != "suspended" {
                // What ran continues without a request.
                until("the kernel is resumed", || state(&host) == "ready");
            }
            // On a slow host an engine may not take the interrupt in time: then it was ended, with its saved state.
            let is_lost = was == "busy" && host.ok(&["journal", "lab"]).contains("did not respond");
            let (code, kept) = match is_lost {
                true => ("print(saved, open('f').read())", String::from("42 kept")),
                false => ("print(next(g), saved, open('f').read())", format!("{n} 42 kept")),
            };
            assert_eq!(host.run("lab", code), kept, "{user:?}\n{}", host.log());
        }
        assert!(
            !host.ok(&["events", "--json"]).contains("machine_saved_whole"),
            "{user:?}: only what changed is written"
        );
    }
}

#[test]
fn killed_suspend_of_machine_is_recovered() {
    use ryokan::sys::fault;

    let mut host = Machines::start(User::Own);
    let machine = kernel(&host);
    let points = [
        ("suspend", "kernel.worker.suspend", "ready"),
        ("suspend", "catalog.kernel.update.before_commit", "suspended"),
        ("resume", "kernel.worker.resume", "suspended"),
    ];
    for (at, (command, point, found)) in points.into_iter().enumerate() {
        if command == "resume" {
            host.ok(&["suspend", "lab"]);
        }
        host.kill();
        host.env(fault::VARIABLE, &format!("{point}=kill"));
        host.launch();
        host.cli(&[command, "lab"]);
        assert!(host.ends(), "{point} was not reached\n{}", host.log());
        host.kill();
        host.env(fault::VARIABLE, "");
        host.launch();
        assert_eq!(state(&host), found, "{point}");
        assert_eq!(host.run("lab", "print(next(g))"), (at + 1).to_string(), "{point}\n{}", host.log());
        assert_eq!(self::machine(&host), machine, "{point}");
    }
    // Its memory is in the kernel's folder, or the machine has it still.
    let released = [
        (false, "machine.suspend.saved"),
        (false, "machine.suspend.seal.rename"),
        (true, "machine.resume.pages"),
        (true, "machine.suspend.forget.unlink"),
    ];
    for (at, (is_saved, point)) in released.into_iter().enumerate() {
        host.kill();
        host.env(fault::VARIABLE, &format!("{point}=kill"));
        host.launch();
        match is_saved {
            false => drop(host.cli(&["suspend", "lab", "--release"])),
            true => {
                release(&host);
                host.cli(&["exec", "lab", "1"]);
            }
        }
        assert!(host.ends(), "{point} was not reached\n{}", host.log());
        host.kill();
        host.env(fault::VARIABLE, "");
        host.launch();
        let next = (points.len() + at + 1).to_string();
        assert_eq!(host.run("lab", "print(next(g))"), next, "{point}\n{}", host.log());
        assert_eq!(host.machines().len(), 1, "{point}");
        assert_eq!(kept(&host), ["machine.base"], "{point}: nothing is left of the saved memory");
    }
    // A machine that cannot be saved continues.
    host.kill();
    host.env(fault::VARIABLE, "machine.suspend.saved=eio");
    host.launch();
    assert!(!host.cli(&["suspend", "lab", "--release"]).status.success());
    assert_eq!(kept(&host), ["machine.base"]);
    let next = points.len() + released.len() + 1;
    assert_eq!(host.run("lab", "print(next(g))"), next.to_string(), "{}", host.log());
    let events = host.ok(&["events", "--json"]);
    assert!(!events.contains("suspend_lost") && !events.contains("machine_saved_whole"), "{events}");
    dead_machine_is_stopped(&mut host);
}

/// A suspended machine whose monitor ends leaves a stopped kernel, with a daemon or without.
fn dead_machine_is_stopped(host: &mut Machines) {
    host.ok(&["suspend", "lab"]);
    host.kill_machines();
    until("the kernel is stopped", || state(host) == "stopped");
    assert_eq!(host.cli(&["resume", "lab"]).status.code(), Some(4));
    assert_eq!(host.run("lab", "print(saved, open('f').read())"), "42 kept", "{}", host.log());
    host.ok(&["suspend", "lab"]);
    host.kill();
    host.kill_machines();
    host.launch();
    assert_eq!(state(host), "stopped", "{}", host.log());
    assert_eq!(host.run("lab", "print(saved, open('f').read())"), "42 kept", "{}", host.log());
}

#[test]
fn uncertain_memory_is_saved_whole() {
    let mut host = Machines::start(User::Own);
    kernel(&host);
    let arm = |host: &mut Machines, fault: &str| {
        host.kill();
        host.env(ryokan::sys::fault::VARIABLE, fault);
        host.launch();
    };
    // A host that lacks something for a moment keeps what is saved.
    release(&host);
    arm(&mut host, "machine.resume.pages=emfile");
    assert!(!host.cli(&["exec", "lab", "1"]).status.success(), "{}", host.log());
    assert!(kept(&host).contains(&String::from("suspended.json")), "{:?}", kept(&host));
    assert_eq!(host.run("lab", "print(next(g))"), "1", "{}", host.log());
    assert!(!host.ok(&["events", "--json"]).contains("suspend_lost"), "{}", host.log());
    // What was being saved when daemon and machine ended is removed by the next start.
    arm(&mut host, "machine.suspend.saved=kill");
    host.cli(&["suspend", "lab", "--release"]);
    assert!(host.ends(), "{}", host.log());
    host.kill_machines();
    assert!(kept(&host).contains(&String::from("suspended.pages")), "{:?}", kept(&host));
    arm(&mut host, "");
    assert_eq!(host.run("lab", "print(saved, open('f').read())"), "42 kept", "{}", host.log());
    assert!(!kept(&host).iter().any(|name| name.starts_with("suspended.")), "{:?}", kept(&host));
    host.run("lab", MEMORY);
    host.run("lab", COUNTER);
    // Its pages and devices are saved already; the same machine is saved again.
    arm(&mut host, "machine.suspend.compare=eio");
    release(&host);
    assert_eq!(kept_names(&host), ["suspended.json", "suspended.state"]);
    let events = host.ok(&["events", "--json"]);
    assert!(events.contains("machine_saved_whole") && events.contains("changed while it stood still"), "{events}");
    assert_eq!(host.run("lab", "print(next(g), open('f').read())"), "1 kept", "{}", host.log());
    assert_eq!(host.run("lab", COUNTS), "True", "the thread goes on");
}

/// The files of saved and running machines in the folder of the only kernel.
fn kept(host: &Machines) -> Vec<String> {
    let folder = saved(host, "disk.ext4").with_file_name("");
    let names = std::fs::read_dir(folder).expect("a folder").flatten();
    let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with("suspended.") || name.starts_with("machine.")).collect()
}

/// Saves a suspended machine, and waits for its end.
fn release(host: &Machines) {
    host.ok(&["suspend", "lab", "--release"]);
    // The next use does not meet a worker that ends.
    assert_eq!((state(host), host.machines()), ("stopped".into(), Vec::new()));
}

fn saved(host: &Machines, name: &str) -> std::path::PathBuf {
    let folder = std::fs::read_dir(host.data().join("kernels")).expect("a folder").flatten();
    folder.map(|folder| folder.path().join(name)).find(|path| path.exists()).expect("it is saved")
}

/// Bytes that were written of the only kernel's suspended machine.
fn written(host: &Machines) -> u64 {
    let state = saved(host, "suspended.state");
    let bytes = |name| state.with_file_name(name).metadata().map_or(0, |found| found.len());
    bytes("suspended.state") + bytes("suspended.pages") + bytes("suspended.memory")
}

/// Only the changed pages are saved: what is beneath them is the template's own file, which counts there.
fn is_saved_by_pages(host: &Machines, template: &std::path::Path) -> u64 {
    use std::os::unix::fs::MetadataExt as _;

    let base = saved(host, "suspended.base");
    let (kept, ram) = (base.metadata().expect("kept"), template.join("ram").metadata().expect("a template"));
    assert_eq!((kept.dev(), kept.ino()), (ram.dev(), ram.ino()), "it is no copy");
    let about = std::fs::read(base.with_file_name("suspended.json")).expect("read");
    let about: serde_json::Value = serde_json::from_slice(&about).expect("JSON");
    assert_eq!(about["memory"]["pages"]["base"]["template"]["id"], host.description()["id"], "{about}");
    assert_eq!(kept_names(host), ["suspended.base", "suspended.json", "suspended.pages", "suspended.state"]);
    let usage: serde_json::Value = serde_json::from_str(&host.ok(&["du", "lab", "--json"])).expect("JSON");
    let parts = usage["parts"].as_array().expect("parts").iter();
    let memory = parts.filter(|part| part["what"] == "machine memory").filter_map(|part| part["bytes"].as_u64()).sum();
    let bytes = written(host);
    assert!((bytes..bytes + (1 << 20)).contains(&memory), "{memory} of {bytes} bytes: {usage}");
    bytes
}

/// As [`kept`], in order.
fn kept_names(host: &Machines) -> Vec<String> {
    let mut names = kept(host);
    names.sort();
    names
}

#[test]
fn released_memory_comes_back() {
    for user in users() {
        let mut host = Machines::start(user);
        let template = host.templates()[0].with_file_name("");
        kernel(&host);
        host.run("lab", COUNTER);
        let boot_id = host.run("lab", BOOT_ID);
        host.ok(&["spawn", "lab", "-d", "--", "sleep", "1000"]);
        release(&host);
        let by_pages = is_saved_by_pages(&host, &template);
        host.restart();
        assert_eq!(host.run("lab", "print(next(g), open('f').read())"), "1 kept", "{user:?}\n{}", host.log());
        assert_eq!(host.run("lab", BOOT_ID), boot_id, "{user:?}: it was not booted");
        assert!(!saved(&host, "disk.ext4").with_file_name("suspended.json").exists());
        assert!(!host.ok(&["ps", "lab"]).contains("sleep"), "{user:?}");
        assert_eq!(host.run("lab", "import os; os.system('pgrep -c sleep'); print(saved)"), "0\n42", "{user:?}");
        assert_eq!(host.run("lab", COUNTS), "True", "{user:?}: the thread goes on");
        // Again, from the suspended and then the adopted machine.
        host.ok(&["suspend", "lab"]);
        release(&host);
        is_saved_by_pages(&host, &template);
        assert_eq!(host.run("lab", "print(next(g))"), "2", "{user:?}\n{}", host.log());
        host.restart();
        release(&host);
        let third = is_saved_by_pages(&host, &template);
        assert!(!host.ok(&["events", "lab", "--json"]).contains("machine_saved_whole"), "{user:?}");
        // The template may go meanwhile. Without one, all memory is written, visibly.
        let aside = host.path("aside");
        std::fs::rename(&template, &aside).expect("put aside");
        host.restart();
        assert_eq!(host.run("lab", "print(next(g), open('f').read())"), "3 kept", "{user:?}\n{}", host.log());
        assert_eq!(host.run("lab", BOOT_ID), boot_id, "{user:?}: it was not booted");
        release(&host);
        let whole = written(&host);
        eprintln!("{user:?}: {by_pages}, then {third} bytes by pages; {whole} bytes of all memory in use");
        assert!(third * 3 < whole, "{user:?}: {by_pages}, {third} and {whole} bytes");
        assert_eq!(kept_names(&host), ["suspended.json", "suspended.state"], "{user:?}");
        assert!(user != User::Own || host.counted("machine_saved_whole") == 1, "{}", host.log());
        std::fs::rename(&aside, &template).expect("back");
        assert_eq!(host.run("lab", "print(next(g))"), "4", "{user:?}\n{}", host.log());
        assert_eq!(host.run("lab", COUNTS), "True", "{user:?}: the thread goes on");
        let events = host.ok(&["events", "lab", "--json"]);
        assert!(events.contains("machine_saved_whole") && events.contains("its template"), "{user:?}: {events}");
        assert!(!events.contains("suspend_lost"), "{user:?}: {events}");
        host.ok(&["checkpoint", "lab", "-m", "one"]);
        host.ok(&["stop", "lab"]);
        assert_eq!(host.run("lab", "print(saved)"), "42");
    }
}

const COUNTS: &str = "a = count; time.sleep(1); print(count > a)";
const BOOT_ID: &str = "print(open('/proc/sys/kernel/random/boot_id').read().strip())";

#[test]
fn unusable_saved_memory_is_reported() {
    type Damage = (&'static str, fn(&Machines));
    fn overwrite(host: &Machines, name: &str) {
        let file = std::fs::File::options().write(true).open(saved(host, name)).expect("opened");
        let middle = file.metadata().expect("read").len() / 2;
        std::os::unix::fs::FileExt::write_all_at(&file, b"damage", middle).expect("written");
    }
    let damages: [Damage; 4] = [
        ("suspended.state is not what was written", |host| overwrite(host, "suspended.state")),
        ("suspended.pages is not what was written", |host| overwrite(host, "suspended.pages")),
        ("suspended.base is not the file", |host| {
            // Another file: its digest is compared.
            let (base, copy) = (saved(host, "suspended.base"), saved(host, "suspended.base").with_extension("copy"));
            std::fs::copy(&base, &copy).expect("copied");
            std::fs::set_permissions(&copy, std::os::unix::fs::PermissionsExt::from_mode(0o600)).expect("opened");
            std::fs::rename(copy, base).expect("exchanged");
            overwrite(host, "suspended.base");
        }),
        ("is damaged", |host| std::fs::write(saved(host, "suspended.json"), b"{").expect("written")),
    ];
    let host = Machines::start(User::Own);
    kernel(&host);
    for (why, damage) in damages {
        release(&host);
        damage(&host);
        // The state that was saved before, and the disk.
        assert_eq!(
            host.run("lab", "print(saved, open('f').read(), 'g' in globals())"),
            "42 kept False",
            "{}",
            host.log()
        );
        let events = host.ok(&["events", "--json"]);
        assert!(events.contains("suspend_lost") && events.contains(why), "{why}: {events}");
    }
    host.ok(&["new", "plain", "--engine", "python"]);
    host.run("plain", "g = 1");
    assert_eq!(host.cli(&["suspend", "plain", "--release"]).status.code(), Some(5));
    assert_eq!(host.run("plain", "print(g)"), "1");
}

#[test]
fn memory_awaits_its_monitor() {
    let host = Machines::start(User::Own);
    kernel(&host);
    release(&host);
    let was = |host: &Machines| std::fs::read_to_string(saved(host, "suspended.json")).expect("read");
    let exchange = |from, to| {
        let text = was(&host).replace(from, to);
        std::fs::write(saved(&host, "suspended.json"), text).expect("written");
    };
    let files = kept_names(&host);
    exchange("QEMU emulator version", "QEMU emulator of old");
    // Each use and each start is refused, with the cause and a way out.
    for args in [&["exec", "lab", "print(1)"][..], &["start", "lab"]] {
        let refused = host.cli(args);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success(), "{args:?}: {}", host.log());
        assert!(said.contains("cannot continue now: the snapshot's VMM is"), "{args:?}: {said}");
        assert!(said.contains("ryokan start lab --without-memory"), "{args:?}: {said}");
        assert_eq!((state(&host).as_str(), kept_names(&host)), ("stopped", files.clone()), "{args:?}");
    }
    assert!(host.machines().is_empty());
    exchange("QEMU emulator of old", "QEMU emulator version");
    assert_eq!(host.run("lab", "print(next(g), saved)"), "1 42", "{}", host.log());
    // A live worker keeps its memory.
    assert_eq!(host.cli(&["start", "lab", "--without-memory"]).status.code(), Some(4));
    release(&host);
    exchange("QEMU emulator version", "QEMU emulator of old");
    host.ok(&["start", "lab", "--without-memory"]);
    assert_eq!(host.run("lab", "print(saved, open('f').read(), 'g' in globals())"), "42 kept False", "{}", host.log());
    assert!(!kept(&host).iter().any(|name| name.starts_with("suspended.")), "{:?}", kept(&host));
    let events = host.ok(&["events", "--json"]);
    assert!(events.contains("memory_discarded") && !events.contains("suspend_lost"), "{events}");
}
