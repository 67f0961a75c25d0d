//! The shipped units: valid for systemd, of bounded exposure, and consistent with the daemon.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use ryokan::core::limits;

/// Each kind of unit, the start of its `ExecStart=`, and its maximum exposure by `systemd-analyze
/// security`, in tenths.
///
/// A user's unit is judged as if root ran it, and cannot drop capabilities: its figure means less
/// than the system's.
const KINDS: [(&str, &str, u32); 2] =
    [("user", "%h/.local/bin/ryokand", 78), ("system", "/usr/local/bin/ryokand --system", 60)];
/// Keys that an older systemd does not know and ignores.
const NEW_KEYS: [&str; 1] = ["DelegateSubgroup"];

fn unit(kind: &str, name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("systemd").join(kind).join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The values of a key, in order.
fn values<'a>(unit: &'a str, key: &str) -> Vec<&'a str> {
    unit.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix('=')).collect()
}

fn value<'a>(unit: &'a str, key: &str) -> &'a str {
    match values(unit, key)[..] {
        [one] => one,
        ref others => panic!("{key} is there {} times", others.len()),
    }
}

fn analyze(arguments: &[&str], units: &[PathBuf], runtime: &Path) -> Output {
    Command::new("systemd-analyze")
        .args(arguments)
        .args(units)
        .env("XDG_RUNTIME_DIR", runtime)
        .env("LC_ALL", "C")
        .output()
        .expect("systemd-analyze runs; scripts/check installs it (Debian: systemd)")
}

/// The units of a kind with a program that exists, where `systemd-analyze` may read them.
fn staged(kind: &str, folder: &Path) -> Vec<PathBuf> {
    let program = folder.join("ryokand");
    fs::write(&program, "#!/bin/sh\n").unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let staged = ["ryokand.socket", "ryokand.service"].map(|name| {
        let text: Vec<String> = unit(kind, name)
            .lines()
            .map(|line| match line.strip_prefix("ExecStart=") {
                Some(command) => {
                    let arguments = command.split_once(' ').map_or("", |(_, arguments)| arguments);
                    format!("ExecStart={} {arguments}", program.display())
                }
                None => line.to_owned(),
            })
            .collect();
        let path = folder.join(name);
        fs::write(&path, text.join("\n") + "\n").unwrap();
        path
    });
    staged.to_vec()
}

#[test]
fn systemd_accepts_units() {
    for (kind, _, _) in KINDS {
        let folder = tempfile::tempdir().unwrap();
        let units = staged(kind, folder.path());
        let manager = if kind == "user" { "--user" } else { "--system" };
        let output = analyze(&["verify", "--man=no", manager], &units, folder.path());
        let said = String::from_utf8_lossy(&output.stderr);
        let ours = |line: &&str| line.contains("ryokand") && !NEW_KEYS.iter().any(|key| line.contains(key));
        let complaints: Vec<&str> = said.lines().filter(ours).collect();
        assert!(output.status.success() && complaints.is_empty(), "{kind}: {}\n{said}", output.status);
    }
}

#[test]
fn systemd_exposure_bounded() {
    for (kind, _, tenths) in KINDS {
        let folder = tempfile::tempdir().unwrap();
        let service = staged(kind, folder.path()).split_off(1);
        let threshold = format!("--threshold={tenths}");
        let output = analyze(&["security", "--no-pager", "--offline=true", &threshold], &service, folder.path());
        let said = String::from_utf8_lossy(&output.stdout);
        let verdict = said.lines().last().unwrap_or_default();
        assert!(output.status.success(), "{kind}: more than {tenths} tenths: {verdict}\n{said}");
    }
}

#[test]
fn units_match_daemon_settings() {
    for (kind, command, _) in KINDS {
        let (service, socket) = (unit(kind, "ryokand.service"), unit(kind, "ryokand.socket"));
        assert_eq!(value(&service, "ExecStart"), command);
        // Readiness, watchdog and the difference between stop and restart: src/daemon/service.rs and run.rs.
        assert_eq!(value(&service, "Type"), "notify");
        assert_eq!(value(&service, "NotifyAccess"), "main");
        assert!(seconds(value(&service, "WatchdogSec")) >= 10, "{kind}");
        assert_eq!(value(&service, "KillMode"), "process", "workers survive the daemon");
        assert_eq!(value(&service, "Restart"), "on-failure");
        // A shutdown is a stop: kernels are saved within TimeoutStopSec, and the enabled service starts them again.
        assert!(values(&service, "ExecStop").is_empty() && values(&service, "DefaultDependencies").is_empty());
        assert_eq!(values(&service, "SendSIGKILL").len() + values(&service, "KillSignal").len(), 0, "{kind}");
        let target = if kind == "user" { "default.target" } else { "multi-user.target" };
        assert_eq!((value(&service, "WantedBy"), value(&service, "Also")), (target, "ryokand.socket"));
        let stop = seconds(value(&service, "TimeoutStopSec"));
        assert!(stop > limits::DAEMON_DRAIN.as_secs(), "{kind}: the drain needs {:?}", limits::DAEMON_DRAIN);
        // sandbox/daemon_side.rs divides these.
        assert_eq!(value(&service, "Delegate"), "cpu memory pids");
        assert_eq!(value(&service, "OOMPolicy"), "continue");
        let descriptors: usize = value(&service, "LimitNOFILE").parse().unwrap();
        assert!(descriptors > limits::KERNELS + limits::CLIENTS, "{kind}: a socket for each kernel and client");
        // daemon/paths.rs.
        let (listen, mode, folder) = match kind {
            "user" => ("%t/ryokan/ryokand.sock", "0600", "0700"),
            _ => ("/run/ryokan/ryokand.sock", "0666", "0755"),
        };
        assert_eq!(values(&socket, "ListenStream"), [listen]);
        assert_eq!((value(&socket, "SocketMode"), value(&socket, "DirectoryMode")), (mode, folder));
        // If it were removed with the service, the workers' sockets would be lost.
        assert!(values(&service, "RuntimeDirectory").is_empty(), "{kind}");
    }
}

/// The unit must not take away anything that a worker needs for its sandbox or allows its code.
#[test]
fn unit_options_keep_sandbox_layers() {
    let anywhere = [
        "RestrictNamespaces",
        "PrivateUsers",
        "ProtectHostname",
        "ProtectKernelTunables",
        "ProtectKernelLogs",
        "ProtectControlGroups",
        "ProtectHome",
        "PrivateTmp",
        "PrivateNetwork",
        "MemoryDenyWriteExecute",
        "DynamicUser",
        "RootDirectory",
    ];
    // A user's service manager creates a user namespace for these.
    let for_users = ["ProtectSystem", "ProtectProc", "PrivateDevices", "ProtectKernelModules", "CapabilityBoundingSet"];
    for (kind, _, _) in KINDS {
        let service = unit(kind, "ryokand.service");
        let forbidden = anywhere.iter().chain(if kind == "user" { &for_users[..] } else { &[] });
        for key in forbidden {
            assert!(values(&service, key).is_empty(), "{kind}: {key}=");
        }
        for group in ["@mount", "@keyring", "@privileged", "@resources", "@sandbox"] {
            let refused = values(&service, "SystemCallFilter").iter().any(|filter| filter.contains(group));
            assert!(!refused, "{kind}: SystemCallFilter={group}");
        }
    }
}

/// The installed profile is loaded without a report of errors, so its syntax is checked here.
#[test]
fn apparmor_profile_parses() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("systemd/apparmor/ryokan-worker");
    let profile = fs::read_to_string(path).expect("it is there");
    assert!(profile.contains("\n  userns,\n"), "it grants nothing");
    let parses = |profile: &str| {
        let file = tempfile::NamedTempFile::new().expect("a file");
        fs::write(file.path(), profile).expect("written");
        let mut parser = Command::new("/usr/sbin/apparmor_parser");
        let ran = parser.args(["--skip-kernel-load", "--skip-cache"]).arg(file.path()).output();
        ran.expect("apparmor_parser is missing: scripts/check installs it (Debian: apparmor)")
    };
    // A parser before release 4 knows neither.
    let older: Vec<&str> =
        profile.lines().filter(|line| !line.starts_with("abi ") && line.trim() != "userns,").collect();
    let (whole, rest) = (parses(&profile), parses(&older.join("\n")));
    let knows_userns = Path::new("/etc/apparmor.d/abi/4.0").exists();
    assert!(rest.status.success(), "{rest:?}");
    assert!(whole.status.success() || !knows_userns, "{whole:?}");
    assert!(!parses(&older.join("\n").replace('{', "(")).status.success(), "the parser accepts everything");
}

fn seconds(text: &str) -> u64 {
    let (number, factor) = match (text.strip_suffix("min"), text.strip_suffix('s')) {
        (Some(minutes), _) => (minutes, 60),
        (None, Some(seconds)) => (seconds, 1),
        (None, None) => (text, 1),
    };
    number.parse::<u64>().unwrap_or_else(|error| panic!("{text}: {error}")) * factor
}
