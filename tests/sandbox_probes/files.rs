//! Files and mounts: the content of the tree, and no way beyond it.

use serde_json::json;

use super::{Pair, Starter, run_pairs};

const PAIRS: &[Pair] = &[
    Pair { what: "root's home", harmless: "ls /usr/bin > /dev/null", malicious: "ls /root", says: "No such file" },
    Pair {
        what: "the host's passwords",
        harmless: "grep -q guest /etc/passwd && [ $(wc -l < /etc/passwd) = 3 ]",
        malicious: "cat /etc/shadow",
        says: "No such file",
    },
    Pair {
        what: "the host's settings",
        harmless: "cat /etc/hosts > /dev/null",
        malicious: "cat /etc/sudoers /etc/fstab /etc/machine-id",
        says: "No such file",
    },
    Pair {
        what: "homes of others",
        harmless: "ls $HOME && [ $HOME = /workspace ]",
        malicious: "ls /home",
        says: "No such file",
    },
    Pair {
        what: "writing to the system's programs",
        harmless: "cp /usr/bin/true /workspace/t && /workspace/t",
        malicious: "cp /usr/bin/false /usr/bin/true",
        says: "Read-only file system",
    },
    Pair {
        what: "new programs for everybody",
        harmless: "echo x > /tmp/ls",
        malicious: "echo x > /usr/local/bin/ls",
        says: "Read-only file system",
    },
    Pair {
        what: "writing to /etc",
        harmless: "touch /workspace/passwd",
        malicious: "echo root2::0:0::/:/bin/sh >> /etc/passwd",
        says: "Read-only file system",
    },
    Pair {
        what: "new folders in the root",
        harmless: "mkdir /workspace/new",
        malicious: "mkdir /new",
        says: "Read-only file system",
    },
    Pair {
        what: "dot-dot above the root",
        harmless: "cat /workspace/../etc/hostname",
        malicious: "cat /workspace/../../../../../../root/.profile",
        says: "No such file",
    },
    Pair {
        what: "symbolic links out",
        harmless: "ln -s /etc/hostname l && cat l",
        malicious: "ln -s /root l && ls l/",
        says: "No such file",
    },
    Pair {
        what: "hard links across mounts",
        harmless: "touch a && ln a b",
        malicious: "ln /usr/bin/su su",
        says: "nvalid cross-device link",
    },
    Pair {
        what: "the root of a process",
        harmless: "ls /proc/self/root/usr > /dev/null",
        malicious: "ls /proc/self/root/root",
        says: "No such file",
    },
    Pair {
        what: "the working directory of a process",
        harmless: "ls /proc/self/cwd",
        malicious: "ls /proc/self/cwd/../../data",
        says: "No such file",
    },
    Pair {
        what: "init's files",
        harmless: "ls /proc/self/fd > /dev/null",
        malicious: "ls /proc/1/fd",
        says: "No such file",
    },
    Pair {
        what: "init's root",
        harmless: "ls /proc/$$/root/ > /dev/null",
        malicious: "ls /proc/1/root/",
        says: "No such file",
    },
    Pair {
        what: "init's memory and environment",
        harmless: "head -c1 /proc/self/environ > /dev/null",
        malicious: "cat /proc/1/environ /proc/1/maps",
        says: "No such file",
    },
    Pair {
        what: "the host kernel's settings",
        harmless: "cat /proc/sys/kernel/osrelease > /dev/null",
        malicious: "echo x > /proc/sys/kernel/hostname",
        says: "Read-only file system",
    },
    Pair {
        what: "the host kernel's switches",
        harmless: "cat /proc/meminfo > /dev/null",
        malicious: "echo 1 > /proc/sys/vm/drop_caches",
        says: "Read-only file system",
    },
    Pair {
        what: "the host kernel's memory and symbols",
        harmless: "[ ! -s /proc/kallsyms ]",
        malicious: "head -c1 /proc/kcore",
        says: "",
    },
    Pair { what: "sysfs", harmless: "[ ! -e /sys ]", malicious: "cat /sys/kernel/uevent_helper", says: "No such file" },
    Pair {
        what: "the disk under the files",
        harmless: "head -c4 /dev/zero | wc -c | grep -q 4",
        malicious: "head -c1 /dev/vda",
        says: "No such file",
    },
    Pair { what: "device nodes", harmless: "mkfifo p && [ -p p ]", malicious: "mknod d c 1 3", says: "not permitted" },
    Pair {
        what: "block device nodes",
        harmless: "mknod p p && [ -p p ]",
        malicious: "mknod d b 254 0",
        says: "not permitted",
    },
    Pair {
        what: "set-user-id programs",
        harmless: "cp /usr/bin/id i && chmod 755 i && [ $(./i -u) = 1000 ]",
        malicious: "cp /usr/bin/id i && chmod 4755 i",
        says: "not permitted",
    },
    Pair {
        what: "set-group-id programs",
        harmless: "touch i && chmod 1777 /workspace && chmod 600 i",
        malicious: "touch i && chmod g+s i",
        says: "not permitted",
    },
    Pair {
        what: "owners",
        harmless: "touch o && chown 1000:1000 o",
        malicious: "touch o && chown 0:0 o",
        says: "Invalid argument",
    },
    Pair {
        what: "mounting",
        harmless: "mount > /dev/null",
        malicious: "mount -t tmpfs none /tmp",
        says: "must be superuser",
    },
    Pair { what: "unmounting what covers", harmless: "ls /proc/fs", malicious: "umount /proc/fs", says: "" },
    Pair { what: "writable again", harmless: "touch /tmp/x", malicious: "mount -o remount,rw,bind /usr", says: "" },
    Pair {
        what: "another root",
        harmless: "cd / && pwd",
        malicious: "chroot /tmp /bin/true || exit 1",
        says: "not permitted",
    },
    Pair {
        what: "privileged attributes",
        harmless: "/usr/bin/python3 -c \"import os; open('f','w'); os.setxattr('f','user.a',b'1')\"",
        malicious: "/usr/bin/python3 -c \"import os; open('f','w'); os.setxattr('f','security.capability',bytes.fromhex('0100000200ffffff00000000ffffffff00000000'))\"",
        says: "not permitted",
    },
];

#[test]
fn tree_has_no_escape() {
    run_pairs(PAIRS, |starter, script| starter.shell(script));
}

#[test]
fn controls_succeed_outside_sandbox() {
    // The same malicious actions, without the sandbox: they must not fail for reasons of their own.
    for script in ["ls /home", "cat /etc/fstab", "ls /sys/kernel", "ls /proc/1"] {
        let done = std::process::Command::new("/bin/sh").args(["-c", script]).output().expect("sh runs");
        assert!(done.status.success(), "{script}");
    }
}

#[test]
fn sandbox_descriptors() {
    for starter in Starter::all() {
        // The fourth is the listing's own.
        starter.python("print(*sorted(int(f) for f in os.listdir('/proc/self/fd')))").prints("0 1 2 3 4");
        starter.python("print(*[f for f in range(4, 2000) if os.path.exists(f'/proc/self/fd/{f}')])").prints("");
    }
}

#[test]
fn other_kernels_unreachable() {
    for starter in Starter::all() {
        let home = starter.home();
        home.shell(json!({}), "cat /workspace/note").prints("note of mine");
        for path in ["data/mine/engine.db", "data/mine/state.db", "data/other/workspace/note", "data/other/engine.db"] {
            let script = format!("cat {}", home.path(path).display());
            home.shell(json!({}), &script).fails_with("No such file");
        }
        for script in ["cat /workspace/../engine.db", "cat ../engine.db", "cat /proc/self/cwd/../engine.db"] {
            home.shell(json!({}), script).fails_with("No such file");
        }
        // Not even through a mounted parent folder.
        let above = json!({"mounts": [{"inside": "/above", "source": home.path(""), "writable": true}]});
        home.shell(above.clone(), "cat /above/given/file; ls -A /above/data").prints("given");
        home.shell(above.clone(), "cat /above/data/mine/engine.db").fails_with("No such file");
        home.shell(above.clone(), "mv /above/data /above/data2").fails_with("busy");
        home.shell(above, "touch /above/data/x").fails_with("No such file");
        // A path inside them cannot be mounted at all.
        let within = json!({"mounts": [{"inside": "/x", "source": home.path("data/other"), "writable": false}]});
        home.shell(within, "true").is_refused("cannot be given");
        assert_eq!(std::fs::read_to_string(home.path("data/other/engine.db")).ok().as_deref(), Some("SECRET-other"));
    }
}

#[test]
fn mounts_honour_write_access() {
    for starter in Starter::all() {
        let home = starter.home();
        let given = home.path("given");
        let mounts = |writable: bool| json!({"mounts": [{"inside": &given, "source": &given, "writable": writable}]});
        let (read, write) = (format!("cat {}/file", given.display()), format!("echo new > {}/file2", given.display()));
        home.shell(mounts(false), &read).prints("given");
        home.shell(mounts(false), &write).fails_with("Read-only file system");
        home.shell(json!({}), &read).fails_with("No such file");
        home.shell(mounts(true), &write).prints("");
        assert_eq!(std::fs::read_to_string(given.join("file2")).ok().as_deref(), Some("new\n"));
        // What the kernel writes belongs to the folder's owner.
        let owner = |path: &std::path::Path| {
            use std::os::unix::fs::MetadataExt;
            std::fs::metadata(path).map(|found| found.uid()).ok()
        };
        assert_eq!(owner(&given), owner(&given.join("file2")));
        // A single file, and a mount inside another and inside the workspace.
        let file = json!({"mounts": [
            {"inside": "/one", "source": given.join("file"), "writable": false},
            {"inside": "/workspace/lib", "source": &given, "writable": false},
            {"inside": "/a", "source": &given, "writable": true},
            {"inside": "/a/sub", "source": home.path("given"), "writable": false},
        ]});
        home.shell(file.clone(), "cat /one /workspace/lib/file /a/file /a/sub/file").prints("givengivengivengiven");
        home.shell(file.clone(), "touch /a/sub/x").fails_with("Read-only file system");
        home.shell(file.clone(), "touch /workspace/lib/x").fails_with("Read-only file system");
        home.shell(file.clone(), "rm -rf /workspace/lib").fails_with("");
        home.shell(file, "touch /a/ok").prints("");
    }
}

#[test]
fn links_cannot_redirect_mounts() {
    for starter in Starter::all() {
        let home = starter.home();
        // An earlier run of the kernel's code leaves a link where a mount point is to be made.
        home.shell(json!({}), "ln -s /etc /workspace/lib && ln -s ../../other /workspace/up").prints("");
        let astray =
            json!({"mounts": [{"inside": "/workspace/lib/x", "source": home.path("given"), "writable": false}]});
        home.shell(astray, "true").is_refused("/workspace/lib/x");
        let up = json!({"mounts": [{"inside": "/workspace/up/x", "source": home.path("given"), "writable": false}]});
        home.shell(up, "true").is_refused("/workspace/up/x");
        assert!(!home.path("data/other/x").exists());
    }
}

#[test]
fn mounts_respect_permissions() {
    let starter = Starter::Ordinary;
    if !Starter::all().contains(&starter) {
        return;
    }
    let home = starter.home();
    let root = json!({"mounts": [{"inside": "/r", "source": "/root", "writable": true}]});
    home.shell(root, "ls /r").fails_with("Permission denied");
    // The whole host, as far as that user may look.
    let all = json!({"mounts": [{"inside": "/host", "source": "/", "writable": false}]});
    home.shell(all.clone(), "ls /host/usr > /dev/null && cat /host/etc/hostname > /dev/null").prints("");
    home.shell(all.clone(), "cat /host/etc/shadow").fails_with("Permission denied");
    home.shell(all.clone(), "ls /host/root").fails_with("Permission denied");
    home.shell(all.clone(), "ls /host/proc/1").fails_with("No such file");
    home.shell(all, "mkdir /host/tmp/$$.probe").fails_with("Read-only file system");
}

/// The path is swapped between the check, before the start, and the use: the target of the link is never visible.
#[test]
fn swapped_source_not_followed() {
    for starter in Starter::all() {
        let home = starter.home();
        std::fs::create_dir_all(home.path("secret/sub")).expect("made");
        for file in ["secret/file", "secret/sub/file"] {
            std::fs::write(home.path(file), "secret").expect("written");
        }
        std::fs::create_dir_all(home.path("way/sub")).expect("made");
        std::fs::write(home.path("way/sub/file"), "given").expect("written");
        home.own(home.root.path());
        // The kind of the mounted file, and the place of the link in its path.
        for (source, swapped) in [("way/sub", "way/sub"), ("way/sub", "way")] {
            let (place, aside) = (home.path(swapped), home.path("aside"));
            let target = home.path(if source == swapped { "secret/sub" } else { "secret" });
            let mounts = json!({"mounts": [{"inside": "/x", "source": home.path(source), "writable": false}]});
            let over = std::sync::atomic::AtomicBool::new(false);
            let (mut given, mut refused) = (0, 0);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while !over.load(std::sync::atomic::Ordering::Relaxed) {
                        std::fs::rename(&place, &aside).expect("away");
                        std::os::unix::fs::symlink(&target, &place).expect("a link");
                        std::thread::sleep(std::time::Duration::from_micros(500));
                        std::fs::remove_file(&place).expect("no link");
                        std::fs::rename(&aside, &place).expect("back");
                        std::thread::sleep(std::time::Duration::from_micros(500));
                    }
                });
                let mut tries = 0;
                while tries < 60 || (given == 0 || refused == 0) && tries < 600 {
                    tries += 1;
                    let ran = home.shell(mounts.clone(), "cat /x/file");
                    match (ran.code(), ran.out().as_str()) {
                        (0, "given") => given += 1,
                        (125, "") => refused += 1,
                        other => {
                            over.store(true, std::sync::atomic::Ordering::Relaxed);
                            panic!("{starter:?} {swapped}: {other:?} {}", ran.err());
                        }
                    }
                }
                over.store(true, std::sync::atomic::Ordering::Relaxed);
            });
            assert!(given > 0 && refused > 0, "{starter:?} {swapped}: {given} given, {refused} refused");
        }
    }
}
