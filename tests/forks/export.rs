//! A kernel as a file: exported here, imported elsewhere.

use std::io::Write as _;
use std::process::Stdio;

use super::{folders, log, show};
use crate::support::{Host, users};
use ryokan::core::error::ErrorCode;

fn names(host: &Host, kernel: &str) -> Vec<String> {
    log(host, kernel).iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn export_import_keeps_checkpoints() {
    for user in users() {
        let (here, there) = (Host::start_as(user), Host::start_as(user));
        for (engine, set_up, change, view, large) in [
            (
                "kaish",
                "x=1; mkdir -p d/e; echo one > d/e/f; ln -s d/e/f l",
                "x=2; echo two > d/e/f",
                "echo $x; cat l",
                "/bin/sh -c 'seq 9000'",
            ),
            (
                "python",
                "import os\nx = 1; os.makedirs('d/e'); open('d/e/f', 'w').write('one\\n'); os.symlink('d/e/f', 'l')",
                "x = 2; open('d/e/f', 'w').write('two\\n')",
                "print(x); print(open('l').read(), end='')",
                "print('large ' * 9000)",
            ),
        ] {
            let file = here.path("home").join(format!("{engine}.ryokan"));
            let file = file.to_str().unwrap();
            here.ok(&["new", engine, "--engine", engine, "--memory", "300M"]);
            here.ok(&["exec", engine, set_up]);
            here.ok(&["checkpoint", engine, "-m", "one", "--description", "first"]);
            here.ok(&["exec", engine, change]);
            let output = here.ok(&["exec", engine, large]);
            let runs = here.ok(&["spawn", engine, "-d", "--", "sleep", "1000"]);
            here.ok(&["export", engine, file]);
            let refused = here.cli(&["export", engine, file]);
            assert_eq!(refused.status.code(), Some(2), "{user:?}: it is there already: {refused:?}");
            let bytes = std::fs::read(file).unwrap();
            let brought = there.path("home").join(format!("{engine}.ryokan"));
            std::fs::write(&brought, &bytes).unwrap();
            std::fs::set_permissions(&brought, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
            let brought = brought.to_str().unwrap();
            there.ok(&["import", brought]);
            assert_eq!(there.ok(&["exec", engine, view]), "2\ntwo\n", "{user:?}");
            assert_eq!(names(&there, engine), ["export", "one"], "{user:?}");
            // With the journal, and with output that is an object of its own; the next execution follows.
            let past = there.ok(&["journal", engine]);
            assert!(past.contains(&set_up[..9]) && past.contains("imported"), "{user:?}: {past}");
            assert_eq!(there.ok(&["exec", engine, "--attach", "3"]), output, "{user:?}");
            let ended = there.cli(&["exec", engine, "--attach", runs.trim()]);
            let said = String::from_utf8_lossy(&ended.stderr).into_owned();
            assert!(said.contains("it ran when its kernel was exported"), "{user:?}: {said}");
            assert_eq!(there.ok(&["exec", engine, "--attach", "5"]), "2\ntwo\n", "{user:?}");
            // And with the lines of the other host's audit log.
            let events = there.ok(&["events", engine, "--json"]);
            let excerpt = events.split_once("\"audit_excerpt\":\"").expect("an excerpt").1;
            assert!(there.ok(&["blob", "get", engine, &excerpt[..64]]).contains("\"lines\":[{"), "{user:?}: {events}");
            let reported = show(&there, engine);
            assert_eq!(reported["limits"]["memory_bytes"], 300 << 20, "{user:?}: {reported}");
            assert_eq!(reported["origin"]["kind"], "restored", "{user:?}: {reported}");
            assert_eq!(reported["origin"]["from"]["kernel"], show(&here, engine)["id"], "{user:?}");
            assert_ne!(reported["id"], show(&here, engine)["id"], "{user:?}: another kernel");
            there.ok(&["restore", engine, "one", "--yes"]);
            assert_eq!(there.ok(&["exec", engine, view]), "1\none\n", "{user:?}");
            there.ok(&["undo", engine, "--yes"]);
            assert_eq!(there.ok(&["exec", engine, view]), "2\ntwo\n", "{user:?}");
            // Again, under another name, and only one kernel.
            let taken = there.cli(&["import", brought]);
            assert_eq!(taken.status.code(), Some(4), "{user:?}: its name is taken");
            assert!(String::from_utf8_lossy(&taken.stderr).contains("--as"), "{user:?}: {taken:?}");
            there.ok(&["import", brought, "--as", "again"]);
            assert_eq!(there.ok(&["exec", "again", view]), "2\ntwo\n", "{user:?}");
            there.ok(&["rm", "again", "--yes"]);
            let piped = here.cli(&["export", engine, "-", "--checkpoint", "one"]);
            assert!(piped.status.success() && piped.stdout.len() < bytes.len(), "{user:?}");
            let mut importing = there.command("ryokan");
            let importing = importing.args(["--no-autostart", "import", "-", "--as", "piped"]);
            let mut importing = importing.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
            importing.stdin.take().unwrap().write_all(&piped.stdout).unwrap();
            assert!(importing.wait().unwrap().success(), "{user:?}");
            assert_eq!(names(&there, "piped"), ["one"], "{user:?}");
            let past = there.ok(&["journal", "piped"]);
            assert!(!past.contains(&set_up[..9]), "{user:?}: named checkpoints show no more: {past}");
            assert_eq!(there.ok(&["exec", "piped", view]), "1\none\n", "{user:?}");
            there.ok(&["rm", "piped", "--yes"]);
        }
    }
}

#[test]
fn truncated_import_leaves_nothing() {
    let (here, there) = (Host::start(), Host::start());
    here.ok(&["new", "k"]);
    here.ok(&["exec", "k", "x=1; echo one > f"]);
    let file = here.cli(&["export", "k", "-"]).stdout;
    let at = there.path("home").join("file");
    let import = |bytes: &[u8]| {
        std::fs::write(&at, bytes).unwrap();
        let refused = there.cli(&["import", at.to_str().unwrap()]);
        assert!(!refused.status.success(), "it was taken");
        assert_eq!((folders(&there), there.ok(&["ls", "--quiet"])), (0, String::new()), "something is left");
        String::from_utf8_lossy(&refused.stderr).into_owned()
    };
    assert!(import(&file[..file.len() / 2]).contains("not whole"));
    assert!(import(&file[..file.len() - 1]).contains("not whole"));
    assert!(import(b"").contains("not whole"));
    assert!(import(b"something else altogether").contains("no file of a kernel"));
    let mut flipped = file.clone();
    flipped[file.len() / 2] ^= 0x10;
    let said = import(&flipped);
    assert!(said.contains("damaged") || said.contains("not whole"), "{said}");
    std::fs::write(&at, &file).unwrap();
    there.ok(&["import", at.to_str().unwrap()]);
    assert_eq!(there.ok(&["exec", "k", "cat f"]), "one\n");
}

/// A file, of a kernel with a mount and the host's network.
fn file_with_mount(here: &Host, given: &std::path::Path) -> Vec<u8> {
    here.ok(&["new", "k", "--net", "host"]);
    here.ok(&["mount", "k", "/given", given.to_str().unwrap(), "--rw"]);
    here.cli(&["export", "k", "-"]).stdout
}

/// What the last line about an import in the audit log says.
fn audited_import(host: &Host) -> String {
    let lines = host.ok(&["audit", "--json"]);
    let lines = lines.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let mut imports = lines.filter(|line| line["action"].as_str().unwrap().starts_with("kernel.import"));
    imports.next_back().unwrap()["detail"].as_str().unwrap().to_owned()
}

#[test]
fn import_withholds_host_resources() {
    let (here, there) = (Host::start(), Host::start());
    let given = here.path("given");
    std::fs::create_dir(&given).unwrap();
    let at = there.path("home").join("file");
    std::fs::write(&at, file_with_mount(&here, &given)).unwrap();
    let file = at.to_str().unwrap();
    let said = there.ok(&["import", file]);
    let mount = format!("mount {} at /given (rw)", given.display());
    assert!(said.contains("withheld") && said.contains(&mount) && said.contains("net host"), "{said}");
    assert_eq!(there.ok(&["mounts", "k", "--json"]).trim(), "[]");
    assert_eq!(show(&there, "k")["net"], "none");
    there.ok(&["restore", "k", "latest", "--yes"]);
    assert_eq!(there.ok(&["mounts", "k", "--json"]).trim(), "[]", "a checkpoint has the mount");
    let line = audited_import(&there);
    assert!(line.contains("granted 0; withheld 2: ") && line.contains(&mount), "{line}");
    there.ok(&["rm", "k", "--yes"]);
    let reported: serde_json::Value = serde_json::from_str(&there.ok(&["import", file, "--json"])).unwrap();
    assert_eq!(reported["granted"], serde_json::json!([]));
    assert_eq!(reported["withheld"][0]["source"], given.to_str().unwrap(), "{reported}");
    assert_eq!(reported["withheld"][1]["kind"], "net", "{reported}");
}

#[test]
fn import_grants_named_resources() {
    let (here, there) = (Host::start(), Host::start());
    let given = here.path("given");
    std::fs::create_dir(&given).unwrap();
    let source = given.to_str().unwrap();
    let at = there.path("home").join("file");
    std::fs::write(&at, file_with_mount(&here, &given)).unwrap();
    let file = at.to_str().unwrap();
    for refused in [&["--with-host"][..], &["--allow-path", source], &["--mcp", "x"], &["--allow-degraded", "seccomp"]]
    {
        let refused = there.cli(&[&["import", file][..], refused].concat());
        assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    }
    assert_eq!(folders(&there), 0);
    there.ok(&["import", file, "--as", "some", "--allow-path", &format!("{source}:rw")]);
    assert!(there.ok(&["mounts", "some"]).contains("/given"));
    assert_eq!(show(&there, "some")["net"], "none");
    let line = audited_import(&there);
    assert!(line.contains("granted 1: mount ") && line.contains("withheld 1: net host"), "{line}");
    let all = there.cli(&["import", file, "--as", "all", "--with-host", "--yes"]);
    assert!(String::from_utf8_lossy(&all.stderr).contains(source), "it was not shown: {all:?}");
    assert_eq!(show(&there, "all")["net"], "host");
    assert!(there.ok(&["mounts", "all"]).contains("/given"));
    // What is granted must be allowed and there.
    std::fs::remove_dir(&given).unwrap();
    let refused = there.cli(&["import", file, "--as", "gone", "--with-host", "--yes"]);
    assert_eq!(refused.status.code(), Some(3), "{refused:?}");
    assert_eq!(folders(&there), 2);
}

/// The rule holds at the interface: what a file does not request cannot be granted with it.
#[test]
fn import_refuses_unrequested_grants() {
    let (here, there) = (Host::start(), Host::start());
    let given = here.path("given");
    std::fs::create_dir(&given).unwrap();
    let file = file_with_mount(&here, &given);
    there.with(async |client| {
        let upload = async || {
            let mut upload = client.import_kernel("").await.unwrap();
            upload.write(&file).await.unwrap();
            upload
        };
        let begun = upload().await;
        let review = begun.review().await.unwrap();
        assert_eq!(review, begun.review().await.unwrap());
        let mut wanted = review.requested;
        wanted[0].source = "/".into();
        let error = begun.finish(&wanted).await.err().unwrap();
        assert_eq!((error.code, error.reason.as_str()), (ErrorCode::InvalidArgument, "grant"));
        let made = upload().await.finish(&[]).await.unwrap();
        assert_eq!((made.granted.len(), made.withheld.len()), (0, 2));
        assert_eq!(made.kernel.mounts().await.unwrap(), []);
    });
}

/// Ctrl-C during an export leaves no file, complete or partial.
#[test]
fn interrupted_export_leaves_no_file() {
    let host = Host::start();
    let folder = host.path("home");
    host.ok(&["new", "k"]);
    host.ok(&["exec", "k", "/usr/bin/dd if=/dev/urandom of=large bs=1M count=80"]);
    host.ok(&["checkpoint", "k", "-m", "large"]);
    let files = || folder.read_dir().unwrap().flatten().map(|file| file.file_name()).collect::<Vec<_>>();
    let before = files();
    let file = folder.join("k.ryokan");
    let mut command = host.command("ryokan");
    let mut child = command.args(["--no-autostart", "export", "k"]).arg(&file).stdin(Stdio::null()).spawn().unwrap();
    let is_begun = || {
        files()
            .iter()
            .any(|name| !before.contains(name) && folder.join(name).metadata().is_ok_and(|file| file.len() > 0))
    };
    while !is_begun() {
        assert!(child.try_wait().unwrap().is_none(), "the export was still running");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(child.id() as i32), nix::sys::signal::Signal::SIGINT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_eq!(files(), before);
    host.ok(&["export", "k", file.to_str().unwrap()]);
}
