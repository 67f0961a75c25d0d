//! Starting, refusing, reporting; live mounts; what root has to give up.

use serde_json::{Value, json};

use super::{Ran, Starter, worker};

fn report(ran: &Ran) -> Value {
    serde_json::from_str(&ran.out()).unwrap_or_else(|error| panic!("{error}: {} {}", ran.out(), ran.err()))
}

#[test]
fn every_layer_is_reported_and_enforced() {
    for starter in Starter::fresh() {
        let ran = starter.probe(&["--json"], &["/bin/echo", "hi"]);
        let report = report(&ran);
        assert_eq!((&report["status"], &report["stdout"]), (&json!(0), &json!("hi\n")), "{report}");
        let layers = report["report"]["layers"].as_array().expect("layers");
        for layer in ryokan::sandbox::Layer::ALL {
            let root_only = matches!(layer.name(), "run-as" | "id-map") && starter == Starter::Ordinary;
            let found = layers.iter().find(|each| each["layer"] == layer.name());
            assert!(
                root_only || found.is_some_and(|each| each["status"]["enforced"].is_object()),
                "{layer}: {found:?}"
            );
        }
    }
}

#[test]
fn exit_statuses_forwarded() {
    for starter in Starter::fresh() {
        for status in [0, 1, 42, 255] {
            assert_eq!(starter.shell(&format!("exit {status}")).code(), status);
        }
        assert_eq!(starter.shell("kill -9 $$").code(), 137);
        assert_eq!(starter.shell("kill -SEGV $$").code(), 139);
        starter.probe(&[], &["/usr/bin/no-such-program"]).is_refused("no-such-program");
        starter
            .probe(&[], &["/bin/sh", "-c", "head -c 3000000 /dev/zero | wc -c; head -c 3000000 /dev/zero >&2"])
            .prints("3000000");
    }
}

#[test]
fn kernels_never_run_as_root() {
    if !nix::unistd::Uid::effective().is_root() {
        return;
    }
    let starter = Starter::Own;
    let home = starter.home();
    home.shell(json!({"run_as": null}), "id").is_refused("kernels never run as root");
    for run_as in [json!({"uid": 0, "gid": 5, "map_root": false}), json!({"uid": 5, "gid": 0, "map_root": true})] {
        home.shell(json!({"run_as": run_as}), "id").is_refused("kernels never run as root");
    }
    // Seen from the host, the process is that user's.
    let script = "/usr/bin/python3 -c \"print(open('/proc/self/uid_map').read().split())\"";
    home.shell(json!({}), script).prints("['1000', '65534', '1']");
}

#[test]
fn root_kernel_file_ownership() {
    use std::os::unix::fs::MetadataExt;
    if !nix::unistd::Uid::effective().is_root() {
        return;
    }
    let home = Starter::Own.home();
    home.shell(json!({}), "echo x > mine; stat -c %u mine note; cat note").prints("1000\n1000\nnote of mine");
    let owner =
        |file: &str| std::fs::metadata(home.path("data/mine/workspace").join(file)).map(|found| found.uid()).ok();
    assert_eq!((owner("mine"), owner("note")), (Some(0), Some(0)));
    // Another user's file in the same folder keeps its owner.
    std::fs::write(home.path("data/mine/workspace/theirs"), "x").expect("written");
    std::os::unix::fs::chown(home.path("data/mine/workspace/theirs"), Some(1234), Some(1234)).expect("given away");
    home.shell(json!({}), "echo y > theirs").fails_with("ermission denied");
}

#[test]
fn paths_opened_as_kernel_user() {
    if !nix::unistd::Uid::effective().is_root() {
        return;
    }
    let home = Starter::Own.home();
    let closed = home.path("given");
    std::fs::set_permissions(&closed, std::os::unix::fs::PermissionsExt::from_mode(0o700)).expect("closed");
    let plan = |map_root: bool| {
        json!({
            "run_as": {"uid": 65534, "gid": 65534, "map_root": map_root},
            "mounts": [{"inside": "/given", "source": &closed, "writable": true}],
        })
    };
    home.shell(plan(true), "cat /given/file && touch /given/new").prints("given");
    home.shell(plan(false), "cat /given/file").fails_with("Permission denied");
}

#[test]
fn unmappable_file_system_refused() {
    if !nix::unistd::Uid::effective().is_root() {
        return;
    }
    let home = Starter::Own.home();
    for folder in ["lower/workspace", "upper", "work", "merged"] {
        std::fs::create_dir_all(home.path(folder)).expect("made");
    }
    let [lower, upper, work, merged] = ["lower", "upper", "work", "merged"].map(|name| home.path(name));
    let options = format!("lowerdir={},upperdir={},workdir={}", lower.display(), upper.display(), work.display());
    let mounted =
        nix::mount::mount(Some("none"), &merged, Some("overlay"), nix::mount::MsFlags::empty(), Some(options.as_str()));
    if mounted.is_err() {
        eprintln!("ignored, because this host cannot mount overlayfs");
        return;
    }
    let ran = home.shell(json!({"kernel_dir": &merged}), "id");
    nix::mount::umount(&merged).expect("unmounted");
    ran.is_refused("cannot map owners");
    assert!(ran.err().contains("hint: "), "{}", ran.err());
}

#[test]
fn missing_layer_refused() {
    for starter in Starter::fresh() {
        let home = starter.home();
        // A host that allows fewer open files, or processes, than the kernel is promised.
        for (limit, words) in [("--nofile=200:200", "open files"), ("--nproc=200:200", "processes")] {
            let limited = |plan: &str| {
                let mut command = starter.command("prlimit");
                command.arg(limit).arg(worker()).args(["probe", "--json", "--plan", plan, "--", "/bin/true"]);
                Ran(command.output().expect("prlimit runs"))
            };
            let refused = report(&limited(&home.plan(json!({}))));
            assert_eq!(refused["error"]["layer"], "rlimits", "{refused}");
            assert!(refused["error"]["cause"].as_str().is_some_and(|cause| cause.contains(words)), "{refused}");
            let hint = refused["error"]["hint"].as_str().expect("a hint");
            assert!(hint.contains("LimitNOFILE") && hint.contains("LimitNPROC"), "{hint}");
            let agreed = report(&limited(&home.plan(json!({"degraded": ["rlimits"]}))));
            assert_eq!(agreed["status"], 0, "{agreed}");
            let layers = agreed["report"]["layers"].as_array().expect("layers");
            let rlimits = layers.iter().find(|each| each["layer"] == "rlimits").expect("reported");
            assert!(rlimits["status"]["degraded"]["why"].as_str().is_some_and(|why| why.contains("200")), "{rlimits}");
        }
        // Fractions of processors without a cgroup.
        let mut limits = serde_json::to_value(ryokan::core::spec::KernelLimits::default()).expect("JSON");
        limits["cpu_milli"] = 500.into();
        home.shell(json!({"limits": limits}), "true").is_refused("parts of a processor");
        home.shell(json!({"limits": limits, "degraded": ["cpu"]}), "nproc").prints("1");
        // What carries the rest cannot be left out, agreed or not.
        home.shell(json!({"degraded": ["capabilities"]}), "true").is_refused("never be left out");
    }
}

#[test]
fn nested_sandbox_refused() {
    // Inside, namespaces are refused: the error is that of a host that forbids them.
    let target = worker().parent().expect("a folder").to_owned();
    for starter in Starter::fresh() {
        let home = starter.home();
        let mounts = json!({"mounts": [{"inside": &target, "source": &target, "writable": false}]});
        let script = format!("{} probe -- /bin/true", worker().display());
        let ran = home.shell(mounts, &script);
        assert!(ran.err().contains("user-ns") && ran.err().contains("hint: "), "{}", ran.err());
    }
}

#[test]
fn missing_sources_reported() {
    for starter in Starter::fresh() {
        let home = starter.home();
        let none = home.path("none");
        let mounts = json!({"mounts": [{"inside": "/x", "source": &none, "writable": false}]});
        home.shell(mounts, "true").is_refused(&none.display().to_string());
        home.shell(json!({"kernel_dir": &none}), "true").is_refused(&none.display().to_string());
    }
}

#[test]
fn init_privileged_operations_work() {
    for starter in Starter::fresh() {
        let home = starter.home();
        if starter == Starter::Own {
            // Live mounts by path are opened as the kernel's user.
            let open = std::os::unix::fs::PermissionsExt::from_mode(0o777);
            std::fs::set_permissions(home.path("given"), open).expect("opened");
            let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
            std::fs::set_permissions(home.root.path(), open).expect("opened");
        }
        let given = home.path("given");
        let options = ["--plan", &home.plan(json!({})), "--exercise", given.to_str().expect("plain")];
        starter.probe(&options, &["/bin/true"]).prints("");
    }
}

#[test]
fn live_mounts_hide_protected_paths() {
    for starter in Starter::fresh() {
        let home = starter.home();
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(home.root.path(), open).expect("opened");
        let plan = home.plan(json!({}));
        let bind = format!("/live={}", home.root.path().display());
        let script = "i=0; while [ ! -e /live/given ] && [ $i -lt 4000 ]; do sleep 0.01; i=$((i+1)); done; sleep 0.1; \
                      cat /live/given/file; ls -A /live/data; cat /live/data/mine/engine.db";
        let ran = starter.probe(&["--plan", &plan, "--bind", &bind], &["/bin/sh", "-c", script]);
        ran.fails_with("No such file");
        assert_eq!(ran.out(), "given");
        let within = format!("/live={}", home.path("data/other").display());
        starter.probe(&["--plan", &plan, "--bind", &within], &["/bin/true"]).is_refused("");
    }
}

#[test]
fn cgroup_holds_and_kills_engine() {
    if !nix::unistd::Uid::effective().is_root() {
        return;
    }
    let mounts = std::fs::read_to_string("/proc/self/mounts").expect("readable");
    let mount = mounts.lines().find_map(|line| line.split(' ').nth(1).filter(|_| line.contains(" cgroup2 ")));
    let Some(base) = mount.map(|place| std::path::Path::new(place).join(format!("ryokan-t-{}", std::process::id())))
    else {
        eprintln!("ignored, because this host has no cgroup v2");
        return;
    };
    std::fs::create_dir(&base).expect("made");
    let home = Starter::Own.home();
    let plan = home.plan(json!({"cgroup": base.join("worker-x")}));
    // The engine is in the engine's cgroup, init in its own; a process tree ends with one write.
    let script = "grep 0:: /proc/self/cgroup; (setsid sleep 77 &); sleep 77";
    let ran = Starter::Own.probe(&["--timeout", "10", "--plan", &plan], &["/bin/sh", "-c", script]);
    let kernel = base.join("worker-x");
    assert!(kernel.is_dir(), "a cgroup for the kernel");
    let mut removed = ryokan::sandbox::cgroup::remove(&kernel);
    for _ in 0..3000 {
        if removed.is_ok() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
        removed = ryokan::sandbox::cgroup::remove(&kernel);
    }
    std::fs::remove_dir(&base).expect("removed");
    removed.expect("nothing was left in it");
    assert_eq!(ran.code(), 124, "{}", ran.err());
    assert!(ran.out().ends_with("/engine"), "{}", ran.out());
}

#[test]
fn unavailable_cgroup_reported() {
    for starter in Starter::fresh() {
        let home = starter.home();
        let plan = home.plan(json!({"cgroup": home.path("none").join("worker-x")}));
        let report = report(&starter.probe(&["--json", "--plan", &plan], &["/bin/true"]));
        let layers = report["report"]["layers"].as_array().expect("layers");
        let memory = layers.iter().find(|each| each["layer"] == "memory").expect("reported");
        assert!(memory.to_string().contains("no cgroup: "), "{memory}");
    }
}

#[test]
fn probe_leaves_no_files() {
    for starter in Starter::fresh() {
        let home = starter.home();
        let temporary = home.path("tmp");
        std::fs::create_dir(&temporary).expect("made");
        std::fs::set_permissions(&temporary, std::os::unix::fs::PermissionsExt::from_mode(0o777)).expect("opened");
        let leaves_nothing = |arguments: &[&str], status: i32| {
            let mut command = starter.command(worker());
            let output = command.env("TMPDIR", &temporary).arg("probe").args(arguments).output().expect("it runs");
            assert_eq!(output.status.code(), Some(status), "{}", String::from_utf8_lossy(&output.stderr));
            let left = std::fs::read_dir(&temporary).expect("listed").flatten().collect::<Vec<_>>();
            assert!(left.is_empty(), "{starter:?} {arguments:?}: {left:?}");
        };
        for way in [&[][..], &["--pooled"]] {
            leaves_nothing(&[way, &["--", "/bin/true"]].concat(), 0);
            leaves_nothing(&[way, &["--timeout", "0", "--", "/bin/sleep", "9"]].concat(), 124);
            // Refused before there is a sandbox.
            let plan = home.plan(json!({"kernel_dir": home.path("data/nobodys")}));
            leaves_nothing(&[way, &["--plan", &plan, "--", "/bin/true"]].concat(), 125);
        }
    }
}
