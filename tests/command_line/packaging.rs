//! What a package holds: man pages, completions, units, and every file that its description names.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use crate::support::{Host, User};

#[test]
fn package_files_are_complete() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let host = Host::prepare(User::Own);
    let made =
        Command::new(root.join("scripts/package")).arg("--files").arg(host.path("bin")).output().expect("it runs");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let made = root.join("target/package");
    let exec = fs::read_to_string(made.join("man/ryokan-exec.1")).expect("a page");
    assert!(exec.contains(".TH ryokan-exec 1") && exec.contains("\\-\\-timeout"), "{exec}");
    let pages: BTreeSet<String> = fs::read_dir(made.join("man"))
        .expect("pages")
        .flatten()
        .filter_map(|e| e.file_name().into_string().ok())
        .collect();
    let helps = fs::read_dir(root.join("tests/cli/golden")).expect("goldens").flatten();
    let helps = helps.filter_map(|entry| entry.file_name().into_string().ok());
    let wanted: BTreeSet<String> =
        helps.filter_map(|name| Some(format!("{}.1", name.strip_prefix("help-")?.strip_suffix(".txt")?))).collect();
    assert_eq!(pages, wanted, "a page for each command");
    for kind in ["system", "user"] {
        let unit = fs::read_to_string(made.join("units").join(kind).join("ryokand.service")).expect("a unit");
        assert!(unit.contains("\nExecStart=/usr/bin/ryokand"), "{unit}");
        assert!(made.join("units").join(kind).join("ryokand.socket").exists());
    }
    let description = fs::read_to_string(root.join("Cargo.toml")).expect("read");
    let section = description.split("[package.metadata.deb]").nth(1).expect("a section");
    let assets = section.split_once("assets = [").and_then(|(_, rest)| rest.split_once("\n]")).expect("a list").0;
    let kernelspec = fs::read(made.join("share/jupyter/kernels/ryokan-python/kernel.json")).expect("a kernelspec");
    let kernelspec: serde_json::Value = serde_json::from_slice(&kernelspec).expect("JSON");
    assert_eq!((&kernelspec["argv"][0], &kernelspec["argv"][1]), (&"/usr/bin/ryokan".into(), &"jupyter".into()));

    // What `scripts/package --try` wants in a Debian, by name.
    let wanted = fs::read_to_string(root.join("scripts/package-try")).expect("read");
    let wanted = wanted.split_once("\nfiles='\n").and_then(|(_, rest)| rest.split_once("\n'\n")).expect("a list").0;
    let wanted: BTreeSet<&str> = wanted.lines().collect();
    let mut installed = BTreeSet::new();
    for asset in assets.lines().filter(|line| !line.trim().is_empty()) {
        let [source, to, mode] = asset.split('"').skip(1).step_by(2).collect::<Vec<_>>()[..] else {
            panic!("{asset}");
        };
        let names = installed_by(root, source, to);
        assert!(names.iter().any(|name| wanted.contains(name.as_str())), "none of {source} is looked for by name");
        assert_eq!(mode == "755", to == "usr/bin/", "{source}");
        installed.extend(names);
    }
    for name in &wanted {
        assert!(installed.contains(*name), "the package has no {name}");
    }
    let forgotten =
        installed.iter().filter(|name| !name.starts_with("usr/share/man/") && !wanted.contains(name.as_str()));
    assert_eq!(forgotten.collect::<Vec<_>>(), Vec::<&String>::new(), "they are looked for by name");
    let profile = fs::read_to_string(root.join("systemd/apparmor/ryokan-worker")).expect("a profile");
    assert!(profile.contains("/{usr/bin,"), "{profile}");
    assert!(section.contains(r#"conf-files = ["/etc/apparmor.d/ryokan-worker"]"#), "{section}");
}

/// The paths in a package of the files that `source` names. Each is there, except for programs.
fn installed_by(root: &Path, source: &str, to: &str) -> Vec<String> {
    let (folder, name) = source.rsplit_once('/').unwrap_or(("", source));
    let Some((begin, end)) = name.split_once('*') else {
        assert!(folder == "target/release" || root.join(source).is_file(), "{source}");
        return vec![if to.ends_with('/') { format!("{to}{name}") } else { to.to_owned() }];
    };
    let files = fs::read_dir(root.join(folder)).expect("a directory").flatten();
    let names = files.filter_map(|file| file.file_name().into_string().ok());
    names.filter(|name| name.starts_with(begin) && name.ends_with(end)).map(|name| format!("{to}{name}")).collect()
}

#[test]
fn schema_is_printed() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let schema = fs::read_to_string(root.join("schema/ryokan.capnp")).expect("read");
    assert_eq!(Host::prepare(User::Own).ok(&["schema"]), schema);
}
