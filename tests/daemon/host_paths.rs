//! Mounted host paths, and attempts to replace them.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use ryokan::core::engine::EngineName;
use ryokan::core::exec::ExecStatus;
use ryokan::core::spec::AllowedPath;
use ryokan::core::spec_update::SpecUpdate;

use crate::support::{Host, UNPRIVILEGED, User, eventually, kernel, out, run, spec, users};

#[test]
fn mount_source_rechecked() {
    let mut host = Host::prepare(crate::support::User::Own);
    let denied = host.path("denied");
    host.configure(&format!("[sandbox]\ndeny_paths = [{:?}]\n", denied.display().to_string()));
    host.launch();
    let given = host.path("given");
    for folder in [&given, &denied] {
        std::fs::create_dir(folder).unwrap();
        std::fs::write(folder.join("seen"), "seen").unwrap();
    }
    host.with(async |client| {
        let shell = kernel(&client, "k", EngineName::Kaish).await;
        shell.mount_at("/data", &given.display().to_string(), false, 0).await.expect("mounted");
        assert_eq!(out(&shell, "cat /data/seen").await, "seen");
        let attempt = async |what: &str| {
            shell.stop(false).await.expect("stops");
            let result = run(&shell, "cat /data/seen").await;
            assert_eq!(result.end.status, ExecStatus::Refused, "{what}: {result:?}");
            result.end.err
        };
        std::fs::rename(&given, host.path("aside")).unwrap();
        // Repeated failures do not count as crashes.
        for _ in 0..8 {
            let gone = attempt("gone").await;
            assert!(gone.contains("there is no") && gone.contains("ryokan unmount k /data"), "{gone}");
        }
        std::os::unix::fs::symlink(&denied, &given).unwrap();
        shell.start().await.ok();
        let forbidden = attempt("denied").await;
        assert!(forbidden.contains("may not be given"), "{forbidden}");
        std::fs::remove_file(&given).unwrap();
        std::fs::rename(host.path("aside"), &given).unwrap();
        assert_eq!(out(&shell, "cat /data/seen").await, "seen", "the path is back");
        // A forbidden path is refused at once, with or without a worker.
        for _ in 0..2 {
            let refused = shell.mount_at("/host", "/proc", false, 0).await.expect_err("refused");
            assert_eq!(refused.reason, "own_folder", "{refused:?}");
            shell.stop(false).await.expect("stops");
        }
    });
}

/// A directory that the host's user owns and that others may enter.
fn folder(user: User, path: &Path, seen: &str) {
    std::fs::create_dir_all(path).unwrap();
    std::fs::write(path.join("seen"), seen).unwrap();
    for made in [path, &path.join("seen")] {
        std::fs::set_permissions(made, std::fs::Permissions::from_mode(0o755)).unwrap();
        if user == User::Unprivileged {
            std::os::unix::fs::chown(made, Some(UNPRIVILEGED), Some(UNPRIVILEGED)).unwrap();
        }
    }
}

/// Code that may write to the parent directory of another kernel's mounted path replaces it with a
/// link.
#[test]
fn symlinked_mount_source_refused() {
    for user in users() {
        let host = Host::start_as(user);
        let [parent, secret, free] = ["parent", "secret", "free"].map(|name| host.path(name));
        for (path, seen) in [(&parent, ""), (&parent.join("mid"), ""), (&parent.join("mid/sub"), "given")] {
            folder(user, path, seen);
        }
        for (path, seen) in [(&secret, "secret"), (&secret.join("sub"), "secret"), (&free, "free")] {
            folder(user, path, seen);
        }
        let source = parent.join("mid/sub").display().to_string();
        let secret = secret.display();
        host.with(async |client| {
            let evil = kernel(&client, "evil", EngineName::Kaish).await;
            evil.mount_at("/parent", &parent.display().to_string(), true, 0).await.expect("mounted");
            let does = async |script: String| drop(out(&evil, &format!("/bin/sh -ec \"cd /parent; {script}\"")).await);
            let neighbour = kernel(&client, "neighbour", EngineName::Kaish).await;
            neighbour.mount_at("/free", &free.display().to_string(), false, 0).await.expect("mounted");
            let live = kernel(&client, "mounted", EngineName::Kaish).await;
            live.mount_at("/data", &source, false, 0).await.expect("mounted");
            let mut wanted = spec("born", EngineName::Kaish);
            wanted.paths = vec![AllowedPath::new(&source, false)];
            let (born, _) = client.create_kernel(&wanted, "").await.expect("made");
            for (victim, at) in [(&live, "/data"), (&born, source.as_str())] {
                let look = format!("cat {at}/seen");
                for (away, back) in [
                    (format!("mv mid/sub aside; ln -s {secret}/sub mid/sub"), "rm mid/sub; mv aside mid/sub"),
                    (format!("mv mid aside; ln -s {secret} mid"), "rm mid; mv aside mid"),
                ] {
                    for running in [false, true] {
                        let what = format!("{user:?} {at} {away} {running}");
                        victim.start().await.expect("starts");
                        assert_eq!(out(victim, &format!("x=kept; {look}")).await, "given", "{what}");
                        if !running {
                            victim.stop(false).await.expect("stops");
                        }
                        does(away.clone()).await;
                        if running {
                            assert_eq!(out(victim, &look).await, "given", "{what}: the mount stays");
                            victim.stop(false).await.expect("stops");
                        }
                        let refused = run(victim, &look).await;
                        assert_eq!(refused.end.status, ExecStatus::Refused, "{what}: {refused:?}");
                        assert!(refused.end.err.contains("leads elsewhere"), "{what}: {}", refused.end.err);
                        neighbour.stop(false).await.expect("stops");
                        assert_eq!(out(&neighbour, "cat /free/seen").await, "free", "{what}: other kernels continue");
                        does(back.into()).await;
                        victim.start().await.expect("starts again");
                        assert_eq!(out(victim, &format!("echo $x; {look}")).await, "kept\ngiven", "{what}");
                    }
                }
            }
        });
    }
}

/// A link of the owner is resolved once, when the path is mounted. Later starts use the recorded
/// target.
#[test]
fn symlink_resolved_once_at_mount() {
    for user in users() {
        let mut host = Host::start_as(user);
        let [one, two, link] = ["one", "two", "link"].map(|name| host.path(name));
        folder(user, &one, "one");
        folder(user, &two, "two");
        std::os::unix::fs::symlink(&one, &link).unwrap();
        let source = link.display().to_string();
        for way in ["stopped", "live"] {
            host.with(async |client| {
                let shell = kernel(&client, way, EngineName::Kaish).await;
                if way == "live" {
                    shell.start().await.expect("starts");
                }
                shell.mount_at("/data", &source, false, 0).await.expect("mounted");
                assert_eq!(shell.mounts().await.expect("mounts")[0].source, source, "shown as requested");
                assert_eq!(out(&shell, "cat /data/seen").await, "one");
            });
        }
        host.restart();
        std::fs::remove_file(&link).unwrap();
        std::os::unix::fs::symlink(&two, &link).unwrap();
        host.with(async |client| {
            let (shell, _) = client.open_kernel("live").await.expect("there");
            assert_eq!(out(&shell, "cat /data/seen").await, "one", "the mount stays");
            shell.stop(false).await.expect("stops");
            let refused = run(&shell, "cat /data/seen").await;
            assert!(refused.end.err.contains("leads elsewhere"), "{}", refused.end.err);
            shell.unmount_at("/data", 0).await.expect("unmounted");
            shell.mount_at("/data", &source, false, 0).await.expect("mounted again");
            shell.start().await.expect("starts");
            assert_eq!(out(&shell, "cat /data/seen").await, "two");
        });
    }
}

#[test]
fn system_path_kept_while_running() {
    for user in users() {
        let mut host = Host::prepare(user);
        let system = host.path("system");
        folder(user, &system, "system");
        host.configure(&format!("[sandbox]\nsystem_paths = [{:?}]\n", system.display().to_string()));
        host.launch();
        let look = format!("cat {}/seen", system.display());
        host.with(async |client| {
            let shell = kernel(&client, "k", EngineName::Kaish).await;
            assert_eq!(out(&shell, &look).await, "system");
            let taken = shell.mount_at(&system.display().to_string(), "/usr", false, 0).await;
            assert!(taken.is_err(), "its place is taken");
            assert!(shell.mounts().await.expect("mounts").is_empty(), "the system path is no mount of the kernel");
        });
        host.kill();
        host.configure("");
        host.launch();
        host.with(async |client| {
            let (shell, info) = client.open_kernel("k").await.expect("there");
            assert_eq!(info.state, "ready", "the worker was adopted");
            assert_eq!(out(&shell, &look).await, "system", "the path of its start");
            shell.stop(false).await.expect("stops");
            assert_ne!(run(&shell, &look).await.end.code, 0, "no longer configured");
        });
    }
}

/// Mounts and unmounts that arrive while the worker starts reach that worker before any code.
#[test]
fn mounts_changed_while_starting() {
    for user in users() {
        let host = Host::start_as(user);
        let [revoked, replaced, added] = ["revoked", "replaced", "added"].map(|name| {
            let path = host.path(name);
            std::fs::create_dir(&path).unwrap();
            std::fs::write(path.join("seen"), name).unwrap();
            path.display().to_string()
        });
        host.with(async |client| {
            // The daemon makes its spawner for the first worker.
            assert_eq!(out(&kernel(&client, "first", EngineName::Kaish).await, "echo up").await, "up");
            // No warm worker fits, so the start needs the spawner.
            let mut odd = spec("k", EngineName::Kaish);
            odd.memory_bytes = Some(290 << 20);
            let shell = client.create_kernel(&odd, "").await.expect("made").0;
            shell.mount_at("/gone", &revoked, true, 0).await.expect("mounted");
            shell.mount_at("/other", &revoked, true, 0).await.expect("mounted");
            let spawner = Pid::from_raw(host.spawner().expect("a spawner") as i32);
            kill(spawner, Signal::SIGSTOP).expect("stopped");
            let change = async {
                eventually("it starts", || async { shell.info().await.expect("info").state == "starting" }).await;
                shell.unmount_at("/gone", 0).await.expect("unmounted");
                shell.unmount_at("/other", 0).await.expect("unmounted");
                shell.mount_at("/other", &replaced, false, 0).await.expect("mounted");
                shell.mount_at("/new", &added, false, 0).await.expect("mounted");
                kill(spawner, Signal::SIGCONT).expect("continued");
            };
            tokio::join!(shell.start(), change).0.expect("started");
            assert_eq!(out(&shell, "cat /other/seen /new/seen").await, "replacedadded");
            let gone = run(&shell, "cat /gone/seen").await;
            assert_ne!(gone.end.code, 0, "{gone:?}");
            let refused = run(&shell, "echo x > /other/file").await;
            assert_ne!(refused.end.code, 0, "read-only: {refused:?}");
        });
    }
}

/// Code of root's kernels has no rights of root on a host path, unless the configuration names it.
#[test]
fn root_files_need_named_mapping() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let mut host = Host::prepare(User::Own);
    let [plain, mapped] = ["plain", "mapped"].map(|name| host.path(name));
    host.configure(&format!("[sandbox]\nmap_owner = [{mapped:?}]\n"));
    host.launch();
    for at in [&plain, &mapped] {
        folder(User::Own, at, "seen");
        std::fs::write(at.join("secret"), "secret").unwrap();
        std::fs::set_permissions(at.join("secret"), std::fs::Permissions::from_mode(0o600)).unwrap();
    }
    host.with(async |client| {
        let mut wanted = spec("k", EngineName::Kaish);
        wanted.paths = vec![AllowedPath::new(&plain, true)];
        let refused = client.create_kernel(&wanted, "").await.err().expect("its user cannot write there");
        assert_eq!(refused.reason, "not_writable", "{refused:?}");
        assert!(refused.hint.contains("chown nobody") && refused.hint.contains(":ro"), "{refused:?}");
        wanted.paths = vec![AllowedPath::new(&plain, false)];
        let (born, _) = client.create_kernel(&wanted, "").await.expect("made");
        let update = |path: &Path| SpecUpdate { paths: vec![AllowedPath::new(path, true)], ..SpecUpdate::default() };
        let refused = client.update_kernel("k", &update(&plain), 0).await.expect_err("its user cannot write there");
        assert_eq!(refused.reason, "not_writable", "{refused:?}");
        client.update_kernel("k", &update(&mapped), 0).await.expect("its owner is mapped");
        let source = |at: &Path| at.display().to_string();
        for started in [false, true] {
            if started {
                born.mount_at("/plain", &source(&plain), true, 0).await.expect("mounted");
                born.mount_at("/mapped", &source(&mapped), true, 0).await.expect("mounted");
            }
            let at = if started { "/plain".into() } else { source(&plain) };
            assert_eq!(out(&born, &format!("cat {at}/seen")).await, "seen");
            for refused in [format!("cat {at}/secret"), format!("echo x > {at}/new"), format!("echo x > {at}/seen")] {
                assert_ne!(run(&born, &refused).await.end.code, 0, "{refused}");
            }
        }
        assert_eq!(out(&born, "cat /mapped/secret; echo new > /mapped/new").await, "secret");
        for system in ["/etc", "/usr/bin", "/", "/run"] {
            let refused = born.mount_at("/system", system, true, 0).await.expect_err("a system folder");
            assert_eq!(refused.reason, "deny_paths", "{system}: {refused:?}");
        }
    });
    let audit = host.ok(&["audit"]);
    let line = |action: &str, what: &str| audit.lines().any(|line| line.contains(action) && line.contains(what));
    assert!(line("kernel.mount", "\"owner_mapped\":true"), "{audit}");
    assert!(line("kernel.create", &format!("path {} (ro)", plain.display())), "{audit}");
}
