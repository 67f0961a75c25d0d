//! Tables over [`Paths::resolve`]: no test reads or changes the process's own environment.

use super::*;

const OURS: DirStat = DirStat { uid: 1000, mode: 0o700, is_dir: true };

fn resolve(env: &[(&str, &str)], mode: Mode, dirs: &[(&str, DirStat)]) -> Result<Paths, PathsError> {
    let lookup = |name: &str| env.iter().find(|(n, _)| *n == name).map(|(_, value)| OsString::from(value));
    let stat = |path: &Path| dirs.iter().find(|(p, _)| Path::new(p) == path).map(|(_, found)| *found);
    Paths::resolve(lookup, 1000, mode, stat)
}

fn message(result: Result<Paths, PathsError>) -> String {
    result.expect_err("the case must be refused").to_string()
}

#[test]
fn user_default_paths() {
    let paths = resolve(&[("HOME", "/home/amy")], Mode::User, &[("/run/user/1000", OURS)]).expect("valid");
    let kernel = KernelId::from_bytes([7; 16]);
    let name: KernelName = "demo".parse().expect("valid name");
    let id = "07".repeat(16);
    for (got, want) in [
        (paths.control_socket(), "/run/user/1000/ryokan/ryokand.sock".to_owned()),
        (paths.kernel_socket(&name), "/run/user/1000/ryokan/kernels/demo.sock".to_owned()),
        (paths.worker_socket(WorkerId::from_bytes([7; 16])), format!("/run/user/1000/ryokan/workers/{id}.sock")),
        (paths.config_file(), "/home/amy/.config/ryokan/config.toml".to_owned()),
        (paths.catalog(), "/home/amy/.local/share/ryokan/catalog.db".to_owned()),
        (paths.state_db(kernel), format!("/home/amy/.local/share/ryokan/kernels/{id}/state.db")),
        (paths.engine_db(kernel), format!("/home/amy/.local/share/ryokan/kernels/{id}/engine.db")),
        (paths.store(), "/home/amy/.local/share/ryokan/store".to_owned()),
        (paths.images(), "/home/amy/.local/share/ryokan/images".to_owned()),
        (paths.templates(), "/home/amy/.local/share/ryokan/templates".to_owned()),
    ] {
        assert_eq!(got, PathBuf::from(want));
    }
    assert_eq!((paths.socket_mode(), paths.runtime_dir_mode()), (0o600, 0o700));
}

#[test]
fn relative_xdg_paths_ignored() {
    let env = [
        ("HOME", "/home/amy"),
        ("XDG_RUNTIME_DIR", "/x/run"),
        ("XDG_CONFIG_HOME", "/x/config"),
        ("XDG_DATA_HOME", "/x/data"),
    ];
    let paths = resolve(&env, Mode::User, &[("/x/run", OURS)]).expect("valid");
    assert_eq!(paths.own_dirs(), ["/x/run/ryokan", "/x/config/ryokan", "/x/data/ryokan"].map(Path::new));

    for odd in ["", "relative/dir", "./x"] {
        let env = [("HOME", "/h"), ("XDG_RUNTIME_DIR", odd), ("XDG_CONFIG_HOME", odd), ("XDG_DATA_HOME", odd)];
        let paths = resolve(&env, Mode::User, &[("/run/user/1000", OURS)]).expect("valid");
        assert_eq!(
            paths.own_dirs(),
            ["/run/user/1000/ryokan", "/h/.config/ryokan", "/h/.local/share/ryokan"].map(Path::new)
        );
    }
}

/// Without a runtime directory, a private one in `/tmp`, which no other user may have made.
#[test]
fn runtime_falls_back_to_tmp() {
    let home = [("HOME", "/home/amy")];
    let tmp = ("/tmp", DirStat { uid: 0, mode: 0o1777, is_dir: true });
    let paths = resolve(&home, Mode::User, &[tmp]).expect("valid");
    assert_eq!(paths.control_socket(), Path::new("/tmp/ryokan-1000/ryokand.sock"));
    let own = DirStat { mode: 0o700, ..OURS };
    assert_eq!(resolve(&home, Mode::User, &[tmp, ("/tmp/ryokan-1000", own)]).expect("valid"), paths);
    for found in [
        DirStat { uid: 7, ..own },
        DirStat { mode: 0o755, ..own },
        DirStat { mode: 0o770, ..own },
        DirStat { is_dir: false, ..own },
    ] {
        let text = message(resolve(&home, Mode::User, &[tmp, ("/tmp/ryokan-1000", found)]));
        assert!(text.contains("/tmp/ryokan-1000") && text.contains("set XDG_RUNTIME_DIR to"), "{text}");
    }
    for open in [DirStat { mode: 0o777, ..tmp.1 }, DirStat { uid: 7, ..tmp.1 }] {
        assert!(message(resolve(&home, Mode::User, &[("/tmp", open)])).contains("sticky"));
    }
}

#[test]
fn home_is_needed_only_for_defaults() {
    let run = [("/run/user/1000", OURS)];
    for env in [&[][..], &[("HOME", "")], &[("HOME", "home")], &[("XDG_DATA_HOME", "/d")]] {
        assert!(matches!(resolve(env, Mode::User, &run), Err(PathsError::NoHome)), "{env:?}");
    }
    assert!(resolve(&[("XDG_DATA_HOME", "/d"), ("XDG_CONFIG_HOME", "/c")], Mode::User, &run).is_ok());
}

#[test]
fn foreign_runtime_dir_is_refused() {
    let home = ("HOME", "/home/amy");
    let named = [home, ("XDG_RUNTIME_DIR", "/x")];
    for (found, why) in [
        (DirStat { uid: 0, ..OURS }, "belongs to uid 0, not to uid 1000"),
        (DirStat { mode: 0o770, ..OURS }, "can be written to by others (mode 0770)"),
        (DirStat { mode: 0o1777, ..OURS }, "can be written to by others (mode 1777)"),
        (DirStat { is_dir: false, ..OURS }, "is not a directory"),
    ] {
        let text = message(resolve(&named, Mode::User, &[("/x", found)]));
        assert!(text.contains("XDG_RUNTIME_DIR") && text.contains(why), "{text}");
        let text = message(resolve(&named, Mode::User, &[("/x", OURS), ("/x/ryokan", found)]));
        assert!(text.contains("/x/ryokan") && text.contains(why), "{text}");
        let text = message(resolve(&[home], Mode::User, &[("/run/user/1000", found)]));
        assert!(text.contains("XDG_RUNTIME_DIR is not set") && text.contains("/run/user/1000"), "{text}");
    }
    let text = message(resolve(&named, Mode::User, &[]));
    assert!(text.contains("XDG_RUNTIME_DIR \"/x\" does not exist"), "{text}");
    assert!(resolve(&named, Mode::User, &[("/x", DirStat { mode: 0o755, ..OURS })]).is_ok());
}

#[test]
fn system_mode_needs_no_environment() {
    let root = DirStat { uid: 0, mode: 0o755, is_dir: true };
    let paths = resolve(&[], Mode::System, &[("/run/ryokan", root)]).expect("valid");
    assert_eq!(paths.own_dirs(), ["/run/ryokan", "/etc/ryokan", "/var/lib/ryokan"].map(Path::new));
    assert_eq!((paths.socket_mode(), paths.runtime_dir_mode()), (0o666, 0o755));
    let text = message(resolve(&[], Mode::System, &[("/run/ryokan", DirStat { mode: 0o777, ..root })]));
    assert!(text.contains("/run/ryokan"), "{text}");
}

#[test]
fn socket_paths_are_bounded() {
    let with = |length: usize| {
        let run = format!("/{}", "r".repeat(length - 1));
        resolve(&[("HOME", "/h"), ("XDG_RUNTIME_DIR", &run)], Mode::User, &[(&run, OURS)])
    };
    // "/ryokan/kernels/" and 64 bytes of name and ".sock" leave 22 of 107.
    assert!(with(22).is_ok());
    assert!(matches!(with(23), Err(PathsError::TooLong { need: 108, .. })));
}

#[test]
fn prepare_makes_private_dirs() {
    let base = tempfile::tempdir().expect("a temporary directory");
    let dir = base.path().join("r");
    let uid = nix::unistd::geteuid().as_raw();
    let paths = Paths {
        mode: Mode::User,
        runtime: dir.join("run/ryokan"),
        config: dir.join("config/ryokan"),
        data: dir.join("data/ryokan"),
    };
    for _ in 0..2 {
        paths.prepare(uid).expect("prepared, also a second time");
    }
    for path in [paths.runtime_dir(), &paths.kernels_runtime(), &paths.workers_runtime(), paths.data_dir()] {
        assert_eq!(DirStat::of(path).map(|found| (found.is_dir, found.mode)), Some((true, 0o700)), "{path:?}");
    }
    assert!(!dir.join("config").exists(), "the configuration is the user's to make");
    assert!(matches!(paths.prepare(uid + 1), Err(PathsError::UnsafeDir { .. })));
    let target = dir.join("target");
    std::fs::create_dir(&target).expect("a directory");
    std::fs::remove_dir(paths.workers_runtime()).expect("empty");
    std::os::unix::fs::symlink(&target, paths.workers_runtime()).expect("a link");
    assert!(matches!(paths.prepare(uid), Err(PathsError::UnsafeDir { .. })));
}
