//! Images: which one is current, which ones stay, and what uses them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use super::{Machines, give, image, images, pair, users};
use crate::support::{User, until};
use crate::teleport::{arm, state, teleport};

impl Machines {
    /// A host whose images are its own: one, which is the tests'.
    fn with_own_images(user: User) -> (Machines, String) {
        let (mut host, version) = (Machines::with_template(user, "[defaults]\nengine = \"python\"\n"), image());
        let folder = host.data().join("images");
        fs::remove_file(&folder).expect("the link is removed");
        fs::create_dir(&folder).expect("a folder");
        host.copy_image(&images().join(&version), &version, user);
        host.launch();
        (host, version)
    }

    /// Adds a copy of an image under another version.
    pub(super) fn copy_image(&self, from: &Path, version: &str, user: User) -> PathBuf {
        let to = self.data().join("images").join(version);
        fs::create_dir(&to).expect("a folder");
        for file in ["vmlinux", "initrd.cpio", "rootfs.erofs"] {
            fs::copy(from.join(file), to.join(file)).expect("copied");
        }
        let text = fs::read_to_string(from.join("image.json")).expect("a description");
        let was = from.file_name().expect("a name").to_string_lossy();
        fs::write(to.join("image.json"), text.replace(&*was, version)).expect("written");
        [&self.data().join("images"), &to].into_iter().for_each(|path| give(path, user));
        to
    }

    /// An image as `images` lists it.
    fn image(&self, version: &str) -> Value {
        let all: Value = serde_json::from_str(&self.ok(&["images", "--json"])).expect("JSON");
        let found = all.as_array().expect("a list").iter().find(|image| image["version"] == version);
        found.unwrap_or_else(|| panic!("{version} is not in {all}")).clone()
    }

    /// The engines that have a finished template of an image.
    fn engines_with_template(&self, version: &str) -> Vec<String> {
        let about = |file: PathBuf| serde_json::from_slice(&fs::read(file).expect("it is there")).expect("JSON");
        let all = self.templates().into_iter().map(about);
        let ours = all.filter(|about: &Value| about["kind"]["image"] == version);
        let mut engines: Vec<String> =
            ours.filter_map(|about| Some(about["kind"]["engine"].as_str()?.into())).collect();
        engines.sort();
        engines
    }

    fn kernels_of(&self, version: &str) -> Vec<String> {
        let image = self.image(version);
        image["kernels"].as_array().expect("a list").iter().filter_map(Value::as_str).map(str::to_owned).collect()
    }

    /// Removes an image, which is refused. Returns the reason.
    fn refused(&self, args: &[&str]) -> String {
        let output = self.cli(args);
        assert!(!output.status.success(), "{args:?}: {output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }
}

#[test]
fn rotated_image_serves_next_start() {
    for user in users() {
        let (mut host, first) = Machines::with_own_images(user);
        host.ok(&["new", "lab", "--isolation", "microvm", "--engine", "python"]);
        host.run("lab", "x = 41");
        for (name, engine, code) in [("asleep", "python", "n = iter(range(9)); next(n)"), ("sh", "bash", "s=1")] {
            host.ok(&["new", name, "--isolation", "microvm", "--engine", engine]);
            host.run(name, code);
        }
        host.ok(&["suspend", "asleep", "--release"]);
        host.ok(&["stop", "sh"]);
        let folder = host.data().join("images").join(&first);
        let second = "f".repeat(40);
        host.copy_image(&folder, &second, user);
        // A newer image is not current, and one that does not boot does not become so.
        assert_eq!(
            (host.image(&first)["is_current"].as_bool(), host.image(&second)["is_current"].as_bool()),
            (Some(true), Some(false))
        );
        let broken = host.copy_image(&folder, &"e".repeat(40), user);
        let kernel = broken.join("vmlinux");
        let size = fs::metadata(&kernel).expect("it is there").len();
        fs::write(&kernel, vec![0; usize::try_from(size).expect("it fits")]).expect("written");
        let why = host.refused(&["images", "rotate", "eee"]);
        assert!(why.contains("vmlinux is not what was built"), "{user:?}: {why}");
        describe_anew(&broken, "vmlinux");
        let why = host.refused(&["images", "rotate", "eee"]);
        assert!(why.contains("does not become current"), "{user:?}: {why}");
        host.ok(&["new", "other", "--isolation", "microvm", "--engine", "python"]);
        host.ok(&["new", "old", "--isolation", "microvm", "--engine", "python", "--image", &first[..10]]);
        let shown: Value = serde_json::from_str(&host.ok(&["show", "old", "--json"])).expect("JSON");
        assert_eq!(shown["image"], *first, "the whole version");
        assert_eq!(host.kernels_of(&first), ["asleep", "lab", "old", "other", "sh"], "{user:?}");
        let why = host.refused(&["images", "rm", &first, "--yes"]);
        assert!(why.contains("is used by asleep, lab, old, other, sh"), "{why}");
        host.ok(&["images", "rotate", "fff"]);
        assert_eq!(host.image(&second)["is_current"], true, "{user:?}\n{}", host.log());
        assert_eq!(host.engines_with_template(&second), ["bash", "python"], "{user:?}: those of its kernels");
        // Running and saved machines keep their image until their end; a kernel that names one keeps it for good.
        assert_eq!(
            (host.kernels_of(&first), host.kernels_of(&second)),
            (vec!["asleep".into(), "lab".into(), "old".into()], vec!["other".into(), "sh".into()])
        );
        assert_eq!(host.run("asleep", "print(next(n))"), "1", "{user:?}\n{}", host.log());
        host.restart();
        assert_eq!(host.image(&second)["is_current"], true);
        let known = host.kernels_of(&first);
        assert_eq!(known, ["asleep", "lab", "old"], "{user:?}: the adopted machines' image is known");
        host.ok(&["rm", "asleep", "sh", "--yes"]);
        host.ok(&["stop", "lab"]);
        assert_eq!(host.run("lab", "x += 1; print(x)"), "42", "{user:?}\n{}", host.log());
        assert_eq!(host.kernels_of(&second), ["lab", "other"]);
        assert_eq!(host.run("old", "print(1)"), "1");
        host.ok(&["rm", "old", "--yes"]);
        until("the machine's end", || host.machines().len() == 1);
        host.ok(&["images", "pin", &first[..12]]);
        assert!(host.refused(&["images", "rm", &first, "--yes"]).contains("is pinned"));
        host.ok(&["images", "unpin", &first]);
        host.ok(&["images", "rm", &first, "--yes"]);
        assert!(!folder.exists(), "{user:?}");
        assert!(host.refused(&["images", "rm", "fff", "--yes"]).contains("is used by lab, other"));
        let events = host.ok(&["events", "--json"]);
        assert!(events.contains("image_current") && events.contains("image_removed"), "{events}");
    }
}

/// The cache of the tests' images.
fn cache() -> PathBuf {
    let home = |name| std::env::var_os(name).map(PathBuf::from);
    home("XDG_CACHE_HOME").or_else(|| Some(home("HOME")?.join(".cache"))).expect("a home")
}

#[test]
fn rebuilt_image_is_identical() {
    let (first, folder) = (image(), tempfile::tempdir().expect("a folder"));
    let own = |name: &str| {
        let path = folder.path().join(name);
        fs::create_dir(&path).expect("a folder");
        path
    };
    let (home, other, out) = (own("home"), own("cache"), own("out"));
    // The same packages, and nothing that was made of them.
    for entry in fs::read_dir(cache().join("ryokan")).expect("a cache").flatten() {
        let to = other.join("ryokan").join(entry.file_name());
        fs::create_dir_all(&to).expect("a folder");
        for part in ["archives", "lists", "updated"] {
            let copied = Command::new("cp").arg("-a").arg(entry.path().join(part)).arg(&to).status();
            assert!(copied.expect("it runs").success(), "{part}");
        }
    }
    let build = |command: &mut Command| {
        command.env("HOME", &home).env("XDG_CACHE_HOME", &other).env("TZ", "Asia/Tokyo").env("PYTHONHASHSEED", "7");
        let built = command.output().expect("it runs");
        let said = String::from_utf8_lossy(&built.stderr).into_owned();
        assert!(built.status.success(), "{said}");
        let path = PathBuf::from(String::from_utf8(built.stdout).expect("a path").trim());
        (path.file_name().expect("a name").to_string_lossy().into_owned(), said)
    };
    // By a relative name, from its own folder, by a user with other habits.
    let (scripts, worker) =
        (Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts"), env!("CARGO_BIN_EXE_ryokan-worker"));
    let script = "umask 077; exec ./build-image --worker \"$0\" --out \"$1\"";
    let (version, said) = build(Command::new("sh").args(["-c", script, worker]).arg(&out).current_dir(&scripts));
    assert!(said.contains("fetching packages"), "everything is made anew: {said}");
    assert_eq!(version, first, "the same input gives the same image");
    // The command of a host without images, where a killed build left something, finds the base by its recipe.
    let (host, kept) = Machines::with_own_images(User::Own);
    let images = host.data().join("images");
    fs::remove_dir_all(images.join(&kept)).expect("removed");
    fs::create_dir(images.join(".new-4194305")).expect("a folder");
    assert!(host.ok(&["images"]).contains("no image"));
    let mut command = host.command("ryokan");
    let (again, said) = build(command.args(["--no-autostart", "images", "build", "--worker", worker]));
    assert!(!said.contains("fetching packages") && again.contains(&first), "{again}: {said}");
    assert!(!images.join(".new-4194305").exists(), "what was left is removed");
    assert!(host.ok(&["images"]).contains("current"));
}

#[test]
fn memory_checkpoint_keeps_image() {
    let (mut host, first) = Machines::with_own_images(User::Own);
    host.ok(&["new", "lab", "--isolation", "microvm", "--engine", "python"]);
    host.run("lab", "n = iter(range(9)); next(n)");
    host.ok(&["checkpoint", "lab", "--kind", "teleport", "-m", "one"]);
    let (folder, second) = (host.data().join("images").join(&first), "f".repeat(40));
    host.copy_image(&folder, &second, User::Own);
    host.ok(&["images", "rotate", "fff"]);
    host.ok(&["stop", "lab"]);
    assert!(host.kernels_of(&first).is_empty(), "its next start takes the other one");
    let why = host.refused(&["images", "rm", &first, "--yes"]);
    assert!(why.contains("checkpoints with memory: lab@"), "{why}");
    host.restart();
    host.ok(&["restore", "lab", "one", "--yes"]);
    assert_eq!(host.run("lab", "print(next(n))"), "1", "{}", host.log());
    host.ok(&["rm", "lab", "--yes"]);
    host.ok(&["images", "rm", &first, "--yes"]);
}

#[test]
fn arriving_memory_keeps_image() {
    let _pair = pair();
    let mut here = Machines::start(User::Own);
    let (there, first) = Machines::with_own_images(User::Own);
    there.copy_image(&there.data().join("images").join(&first), &"f".repeat(40), User::Own);
    here.ok(&["new", "lab", "--isolation", "microvm", "--engine", "python"]);
    here.run("lab", "n = iter(range(9)); next(n)");
    // The source is killed once it has decided: the target waits for the commit.
    arm(&mut here, "state.transition.commit.after_commit=kill");
    teleport(&here, "lab", &there, &["--kind", "teleport"]);
    assert!(here.ends_soon(), "{}", here.log());
    assert_eq!(there.image(&first)["is_current"], false);
    let why = there.refused(&["images", "rm", &first, "--yes"]);
    assert!(why.contains("is used by lab (arriving)"), "{why}");
    arm(&mut here, "");
    until("the kernel is there", || state(&there, "lab").is_some());
    assert_eq!(there.run("lab", "print(next(n))"), "1", "{}", there.log());
    assert!(there.refused(&["images", "rm", &first, "--yes"]).contains("is used by lab"));
}

/// A kernel has the image that it names from the check of its specification on, whatever becomes of the image.
#[test]
fn named_image_stays_from_creation() {
    use ryokan::sys::fault;

    let (mut host, first) = Machines::with_own_images(User::Own);
    let folder = host.data().join("images").join(&first);
    host.copy_image(&folder, &"f".repeat(40), User::Own);
    let (given, file, hold) = (host.given(User::Own), host.path("old.ryokan"), host.path("hold"));
    let (given, file) = (given.to_str().expect("text").to_owned(), file.to_str().expect("text").to_owned());
    let new = ["new", "old", "--isolation", "microvm", "--engine", "python", "--image"];
    host.ok(&[&new[..], &[first.as_str(), "--from-dir", given.as_str()]].concat());
    host.ok(&["export", "old", &file]);
    host.ok(&["rm", "old", "--yes"]);
    host.kill();
    fs::write(&hold, "").expect("written");
    host.env(fault::HOLD, hold.to_str().expect("text"));
    host.env(fault::VARIABLE, "workspace.checkout.file=hold");
    host.launch();
    let mut import = host.command("ryokan");
    let import = import.args(["--no-autostart", "import", &file]).stdout(std::process::Stdio::null()).spawn();
    until("the creation", || hold.with_extension("reached").exists());
    let why = host.refused(&["images", "rm", &first, "--yes"]);
    fs::remove_file(&hold).expect("removed");
    assert!(import.expect("it runs").wait().expect("it ends").success(), "{}", host.log());
    assert!(why.contains("is used by old"), "{why}");
    // As well if it cannot be used any more.
    let description = fs::read_to_string(folder.join("image.json")).expect("read");
    let mut about: Value = serde_json::from_str(&description).expect("JSON");
    about["build"] = "another".into();
    fs::write(folder.join("image.json"), about.to_string()).expect("written");
    assert_eq!(host.kernels_of(&first), ["old"]);
    assert!(host.refused(&["images", "rm", &first, "--yes"]).contains("is used by old"));
}

/// Names the present size and digest of an image's file in its description.
pub(super) fn describe_anew(image: &Path, name: &str) {
    let file = image.join("image.json");
    let mut about: Value = serde_json::from_slice(&fs::read(&file).expect("it is there")).expect("JSON");
    let summed = Command::new("sha256sum").arg(image.join(name)).output().expect("it runs");
    let digest = String::from_utf8(summed.stdout).expect("text").split(' ').next().expect("a digest").to_owned();
    about["files"][name]["bytes"] = fs::metadata(image.join(name)).expect("it is there").len().into();
    about["files"][name]["sha256"] = digest.into();
    fs::write(file, about.to_string()).expect("written");
}

/// Removes Node.js from an image's description.
fn without_node(image: &Path) {
    let file = image.join("image.json");
    let mut about: Value = serde_json::from_slice(&fs::read(&file).expect("it is there")).expect("JSON");
    about["engines"].as_object_mut().expect("an object").remove("node").expect("it had it");
    fs::write(file, about.to_string()).expect("written");
}

#[test]
fn missing_engine_names_build() {
    let (mut host, first) = Machines::with_own_images(User::Own);
    let listed = host.image(&first);
    assert_eq!(listed["engines"], serde_json::json!(["kaish", "python", "bash", "node"]));
    let version = listed["engine_versions"][3].as_str().expect("a version");
    assert!(version.starts_with(|c: char| c.is_ascii_digit()), "{listed}");
    assert!(host.ok(&["images"]).contains(&format!("node {version}")));
    host.ok(&["images", "rotate"]);
    let (folder, second) = (host.data().join("images").join(&first), "f".repeat(40));
    without_node(&host.copy_image(&folder, &second, User::Own));
    let output = host.cli(&["new", "web", "--isolation", "microvm", "--engine", "node", "--image", "fff"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(5), "{said}");
    assert!(said.contains(&format!("image {second} has no node")), "{said}");
    assert!(said.contains("ryokan images build --engines python,bash,node"), "{said}");
    // Nor does it become current while a kernel would need the engine.
    host.ok(&["new", "web", "--isolation", "microvm", "--engine", "node"]);
    let why = host.refused(&["images", "rotate", "fff"]);
    assert!(why.contains("lacks the engines of web (node)"), "{why}");
    host.ok(&["rm", "web", "--yes"]);
    // A default engine that the current image lacks does not keep it current.
    host.configure("[defaults]\nengine = \"node\"\n");
    host.restart();
    without_node(&folder);
    let why = host.refused(&["images", "rotate"]);
    assert!(why.contains(&format!("image {second} has no node")), "the newest one is checked: {why}");
    assert!(host.machines().is_empty());
}
