//! `ryokan cp`.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::each_user;
use crate::support::{Host, Terminal, until};

/// A directory of the host's user.
fn folder(host: &Host, name: &str) -> PathBuf {
    let path = host.path("home").join(name);
    fs::create_dir(&path).expect("made");
    path
}

/// Gives everything in a host's home to its user.
fn give(host: &Host) {
    let owner = fs::metadata(host.path("home")).expect("there");
    let owner = format!("{}:{}", owner.uid(), owner.gid());
    let given = Command::new("chown").args(["-hR", &owner]).arg(host.path("home")).status().expect("run");
    assert!(given.success());
}

/// Kinds, modes, times in seconds and contents below a directory; the times of links only if asked for.
fn listing(path: &Path, has_link_times: bool) -> String {
    let mut find = Command::new("find");
    match has_link_times {
        true => find.args([".", "-printf", "%P %y %m %Ts %l\n"]),
        false => find.args([".", "-type", "l", "-printf", "%P %y %l\n", "-o", "-printf", "%P %y %m %Ts\n"]),
    };
    let find = find.current_dir(path).output();
    let mut lines: Vec<String> =
        String::from_utf8(find.expect("listed").stdout).expect("text").lines().map(str::to_owned).collect();
    lines.sort();
    lines.join("\n")
}

fn text(path: &Path) -> &str {
    path.to_str().expect("text")
}

/// A folder is copied into an empty workspace and out again, with modes, times and links. The mirror of a virtual machine
/// has no times of links.
pub(crate) fn folders(host: &Host, name: &str, has_link_times: bool) {
    let source = folder(host, "source");
    fs::create_dir_all(source.join("sub/empty")).expect("made");
    fs::write(source.join("sub/a b"), "text").expect("written");
    fs::write(source.join("tool"), vec![9; 2 << 20]).expect("written");
    fs::set_permissions(source.join("tool"), fs::Permissions::from_mode(0o751)).expect("set");
    fs::set_permissions(source.join("sub/empty"), fs::Permissions::from_mode(0o500)).expect("set");
    symlink("sub/a b", source.join("link")).expect("made");
    symlink("/etc/passwd", source.join("out")).expect("made");
    give(host);
    for name in ["tool", "sub/a b", "link", "out", "sub/empty", "sub", "."] {
        let path = source.join(name);
        assert!(
            Command::new("touch")
                .env("TZ", "UTC")
                .args(["-h", "-d", "2001-02-03 04:05:06"])
                .arg(path)
                .status()
                .expect("run")
                .success()
        );
    }
    let at = |path: &str| format!("{name}:{path}");
    let shell = |script: &str| host.ok(&["spawn", name, "--", "sh", "-c", script]);
    host.ok(&["cp", text(&source), &at("copy")]);
    assert_eq!(
        shell("cat copy/link; readlink copy/out; stat -c %a:%Y copy/tool copy/sub"),
        "text/etc/passwd\n751:981173106\n755:981173106\n"
    );
    let back = host.path("home").join("back");
    host.ok(&["cp", &at("copy"), text(&back)]);
    assert_eq!(listing(&back, has_link_times), listing(&source, has_link_times));
    assert_eq!(fs::read(back.join("tool")).expect("read"), vec![9; 2 << 20]);
    // Into an existing directory, under its own name; again, over what is there.
    host.ok(&["cp", text(&source), &at("")]);
    host.ok(&["cp", text(&source), &at("")]);
    assert_eq!(shell("ls"), "copy\nsource\n");
    host.ok(&["cp", &at("source/tool"), text(&back)]);
    fs::set_permissions(source.join("sub/empty"), fs::Permissions::from_mode(0o700)).expect("set");
    fs::set_permissions(back.join("sub/empty"), fs::Permissions::from_mode(0o700)).expect("set");
}

#[test]
fn folder_keeps_modes_and_times() {
    each_user(|host| {
        host.ok(&["new", "k", "--engine", "bash"]);
        folders(&host, "k", true);
    });
}

#[test]
fn streams_and_conflicts() {
    let host = Host::start();
    host.ok(&["new", "k", "--engine", "bash"]);
    let input = host.path("home").join("input");
    fs::write(&input, "a\0b").expect("written");
    let mut sending = host.command("ryokan");
    sending.args(["--no-autostart", "cp", "-", "k:d/f"]).stdin(fs::File::open(&input).expect("opened"));
    assert!(sending.stdout(Stdio::null()).status().expect("run").success());
    assert_eq!(host.ok(&["cp", "k:d/f", "-"]), "a\0b");
    let code = |args: &[&str]| {
        let output = host.cli(args);
        (output.status.code().expect("a code"), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (folder, pipe) = (folder(&host, "folder"), host.path("home").join("pipe"));
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).expect("made");
    for (args, status, words) in [
        (vec!["cp", "k:d/f", text(&pipe)], 4, "not_a_file"),
        (vec!["cp", text(&pipe), "k:d"], 4, "not_a_file"),
        (vec!["cp", "k:none", "x"], 3, "not_found"),
        (vec!["cp", "k:d", "-"], 4, "is_directory"),
        (vec!["cp", text(&folder), "k:d/f"], 4, "not_directory"),
        (vec!["cp", "k:d", text(&input)], 4, "not_directory"),
        (vec!["cp", text(&input), "k:/etc/x"], 4, "outside"),
        (vec!["cp", "a", "b"], 2, "NAME:PATH"),
        (vec!["cp", "k:a", "k:b"], 2, "same kernel"),
    ] {
        let (got, stderr) = code(&args);
        assert_eq!(got, status, "{args:?}: {stderr}");
        assert!(stderr.contains(words), "{args:?}: {stderr}");
    }
    // The files of a folder precede its folders.
    host.ok(&["exec", "k", "mkdir -p x/sub; echo 1 > x/one; echo 2 > x/two"]);
    let held = host.path("home").join("x");
    fs::create_dir(&held).expect("made");
    fs::write(held.join("sub"), "").expect("written");
    let (status, stderr) = code(&["cp", "k:x", text(&host.path("home"))]);
    assert!(status == 4 && stderr.contains("2 whole files copied before it"), "{stderr}");
    assert_eq!(fs::read(&input).expect("read"), b"a\0b");
    assert!(std::os::unix::fs::FileTypeExt::is_fifo(&fs::metadata(&pipe).expect("there").file_type()));
}

/// A sparse file that no copy finishes before the test has seen its progress.
const LARGE: u64 = 8 << 30;

/// Ctrl-C within a large copy of either direction: no part is left, neither under the final name nor another.
#[test]
fn interrupted_copy_leaves_nothing() {
    let host = Host::start();
    host.ok(&["new", "k", "--engine", "bash", "--workspace", "20G"]);
    let (source, target) = (folder(&host, "source"), folder(&host, "target"));
    fs::write(source.join("a"), "whole").expect("written");
    fs::File::create(source.join("large")).and_then(|file| file.set_len(LARGE)).expect("made");
    host.ok(&["exec", "k", &format!("truncate -s {LARGE} large")]);
    let interrupted = |args: &[&str], progress: &str| {
        let mut copy = Terminal::start(&host, args);
        copy.wait_for(&format!("{progress} 16"));
        copy.press("\x03");
        copy.wait_for("interrupted: 0 whole files copied");
        copy.ended_with(130);
    };
    interrupted(&["cp", text(&source.join("large")), "k:copy"], "sent");
    // The daemon removes the part when the connection has ended.
    host.ok(&["exec", "k", "until [ \"$(ls -A)\" = large ]; do sleep 0.05; done"]);
    interrupted(&["cp", "k:large", text(&target)], "received");
    assert_eq!(fs::read_dir(&target).expect("listed").count(), 0);
    // An older file of that name stays as it was.
    fs::write(target.join("large"), "before").expect("written");
    interrupted(&["cp", "k:large", text(&target)], "received");
    assert_eq!(listing(&target, false).lines().count(), 2);
    assert_eq!(fs::read(target.join("large")).expect("read"), b"before");
}

/// A copy from a terminal's input ends at Ctrl-C while it waits for a line.
#[test]
fn interrupted_input_leaves_nothing() {
    let host = Host::start();
    host.ok(&["new", "k", "--engine", "bash"]);
    let mut copy = Terminal::start(&host, &["cp", "-", "k:typed"]);
    copy.press("a line\r");
    // Not before it is the terminal's: an earlier Ctrl-C would reach no process.
    until("another read of its input", || {
        let threads = fs::read_dir(format!("/proc/{}/task", copy.pid())).into_iter().flatten().flatten();
        let calls = threads.filter_map(|thread| fs::read_to_string(thread.path().join("syscall")).ok());
        calls.into_iter().any(|call| call.starts_with(&format!("{} 0x0 ", libc::SYS_read)))
    });
    copy.press("\x03");
    copy.ended_with(130);
    assert_eq!(host.ok(&["exec", "k", "ls -A"]), "");
}

#[test]
fn copy_shows_progress() {
    let host = Host::start();
    host.ok(&["new", "k", "--engine", "bash"]);
    let source = folder(&host, "source");
    fs::File::create(source.join("large")).and_then(|file| file.set_len(40 << 20)).expect("made");
    let source = source.join("large");
    for (args, what) in [([text(&source), "k:large"], "sent"), (["k:large", text(&source)], "received")] {
        let mut copy = Terminal::start(&host, &[&["cp"][..], &args].concat());
        for line in ["16", "32", "40 MiB"] {
            copy.wait_for(&format!("{what} {line}"));
        }
        copy.wait_for("copied 1 file (40 MiB)");
        copy.ended();
    }
    // A small one needs none, and neither does a script.
    fs::write(&source, "small").expect("written");
    let mut copy = Terminal::start(&host, &["cp", text(&source), "k:small"]);
    copy.wait_for("copied 1 file");
    copy.ended();
    assert!(!copy.shown().contains("sent"));
    let quiet = host.cli(&["cp", "k:large", text(&source)]);
    assert!(quiet.status.success() && quiet.stderr.is_empty(), "{quiet:?}");
}

/// A kernel replaces a link, which an earlier copy brought to the host, by a directory.
#[test]
fn copied_link_is_not_followed() {
    let host = Host::start();
    host.ok(&["new", "k", "--engine", "bash"]);
    let victim = folder(&host, "victim");
    let target = folder(&host, "target");
    host.ok(&["exec", "k", &format!("mkdir t; ln -s {} t/x", text(&victim))]);
    host.ok(&["cp", "k:t", text(&target)]);
    host.ok(&["exec", "k", "rm t/x; mkdir t/x; echo evil > t/x/f"]);
    let output = host.cli(&["cp", "k:t", text(&target)]);
    assert_eq!(output.status.code(), Some(4));
    assert!(String::from_utf8_lossy(&output.stderr).contains("not_directory"));
    assert_eq!(victim.read_dir().expect("listed").count(), 0);
}

/// A file named as the part of an earlier version: after its process.
#[test]
fn foreign_part_is_kept() {
    let host = Host::start();
    host.ok(&["new", "k", "--engine", "bash"]);
    host.ok(&["exec", "k", "echo new > f"]);
    let target = folder(&host, "target");
    let ryokan = host.command("ryokan");
    let mut shell = Command::new("sh");
    shell.args(["-c", "echo kept > .ryokan-$$; exec \"$0\" --no-autostart cp k:f ."]).arg(ryokan.get_program());
    shell.env_clear().envs(ryokan.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let copied = shell.current_dir(&target).output().expect("run");
    assert!(copied.status.success(), "{copied:?}");
    let names: Vec<_> = fs::read_dir(&target).expect("listed").flatten().map(|entry| entry.path()).collect();
    let part = names.iter().find(|path| !path.ends_with("f")).expect("not removed");
    assert_eq!(fs::read_to_string(part).expect("read"), "kept\n");
}

/// Another program swaps names in a folder for links and a pipe while the folder is copied into a kernel.
#[test]
fn swapped_names_are_not_followed() {
    use std::sync::mpsc;

    use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
    let host = Host::start();
    host.ok(&["new", "k", "--engine", "bash"]);
    let (source, aside, secret) = (folder(&host, "source"), folder(&host, "aside"), folder(&host, "secret"));
    fs::write(secret.join("f"), "of the host").expect("written");
    fs::create_dir(source.join("d")).expect("made");
    for name in ["d/f", "e", "p"] {
        fs::write(source.join(name), "mine").expect("written");
    }
    symlink(&secret, aside.join("d")).expect("made");
    symlink(secret.join("f"), aside.join("e")).expect("made");
    nix::unistd::mkfifo(&aside.join("p"), nix::sys::stat::Mode::S_IRWXU).expect("made");
    let copied = std::thread::scope(|scope| {
        let (stop, stopped) = mpsc::channel::<()>();
        scope.spawn({
            let (source, aside) = (&source, &aside);
            move || {
                let mut names = ["d", "e", "p"].iter().cycle();
                while stopped.try_recv() == Err(mpsc::TryRecvError::Empty) {
                    let (one, other) = names.next().map(|name| (source.join(name), aside.join(name))).expect("endless");
                    renameat2(AT_FDCWD, &one, AT_FDCWD, &other, RenameFlags::RENAME_EXCHANGE).expect("swapped");
                }
            }
        });
        let copies = (0..30).map(|i| host.cli(&["cp", text(&source), &format!("k:copy{i}")]));
        let copied = copies.filter(|copy| copy.status.success()).count();
        drop(stop);
        copied
    });
    assert!(copied > 0);
    assert_eq!(host.ok(&["exec", "k", "grep -rl 'of the host' . || true"]), "");
}

#[test]
fn folder_goes_to_other_kernel() {
    each_user(|host| {
        host.ok(&["new", "try", "--engine", "bash"]);
        host.ok(&["new", "main", "--engine", "bash"]);
        host.ok(&["exec", "try", "mkdir -p src/sub; echo one > src/sub/a; ln -s sub/a src/link; chmod 751 src/sub; head -c 3000000 /dev/zero > src/big; touch -d 2001-02-03T04:05:06Z src/sub/a src/sub"]);
        let list =
            "cd src; find . -printf '%P %y %m %l %s\\n' | grep -v 'sub d' | sort; stat -c '%a %Y' sub sub/a; cat link";
        host.ok(&["cp", "try:src", "main:"]);
        host.ok(&["cp", "try:src", "main:"]);
        assert_eq!(host.ok(&["exec", "main", list]), host.ok(&["exec", "try", list]));
        host.ok(&["cp", "try:src/sub/a", "main:b"]);
        assert_eq!(host.ok(&["exec", "main", "cd /workspace; cat b; ls"]), "one\nb\nsrc\n");
        assert_eq!(host.cli(&["cp", "try:none", "main:"]).status.code(), Some(3));
        let same = host.cli(&["cp", "try:src", "try:other"]);
        assert_eq!(same.status.code(), Some(2));
        host.ok(&["stop", "main"]);
        host.ok(&["cp", "try:src/big", "main:big"]);
        assert_eq!(host.ok(&["exec", "main", "stat -c %s /workspace/big"]), "3000000\n");
    });
}
