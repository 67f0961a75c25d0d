//! Kernels in virtual machines: real QEMU with software emulation, and one image built for all tests.

mod crashes;
mod engines;
mod files;
mod fork;
mod hostile;
mod images;
mod lifecycle;
mod memory;
mod refusals;
mod regressions;
mod surface;
mod suspend;
mod teleport;
mod templates;
mod warm;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};

use crate::support::{self, Host, UNPRIVILEGED, User};

/// A kernel in a virtual machine with Python, of which each host has a template.
const NEW_LAB: [&str; 6] = ["new", "lab", "--isolation", "microvm", "--engine", "python"];

/// In memory only: a thread that counts.
const COUNTER: &str = "
import threading, time
count = 0
def work():
    global count
    while True:
        count += 1
        time.sleep(0.05)
threading.Thread(target=work, daemon=True).start()
";

/// The unprivileged user; with `RYOKAN_TEST_ALL` (`scripts/check --all`) also root.
///
/// A boot under software emulation takes seconds of a processor, and the user's case has all the layers of root's.
fn users() -> Vec<User> {
    let mut users = support::users();
    if std::env::var_os("RYOKAN_TEST_ALL").is_none() {
        users.drain(..users.len() - 1);
    }
    users
}

/// A folder that stays from one run of this checkout's tests to the next, below one that other users can enter.
fn kept(name: &str) -> PathBuf {
    use std::hash::{DefaultHasher, Hash as _, Hasher as _};
    let mut hasher = DefaultHasher::new();
    env!("CARGO_MANIFEST_DIR").hash(&mut hasher);
    let (user, checkout) = (nix::unistd::geteuid(), hasher.finish());
    std::env::temp_dir().join(format!("ryokan-test-{name}-{user}-{checkout:016x}"))
}

/// The folder of images with the worker of this build. Built once; the packages are kept in a cache.
fn images() -> &'static Path {
    static IMAGES: OnceLock<PathBuf> = OnceLock::new();
    IMAGES.get_or_init(|| {
        let worker = env!("CARGO_BIN_EXE_ryokan-worker");
        let out = kept("images");
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/build-image");
        let built = Command::new(script).args(["--worker", worker, "--out"]).arg(&out).output().expect("it runs");
        assert!(built.status.success(), "no image:\n{}", String::from_utf8_lossy(&built.stderr));
        let built = PathBuf::from(String::from_utf8(built.stdout).expect("a path").trim());
        // Images of former builds serve no other test.
        for entry in fs::read_dir(&out).expect("a folder").flatten().filter(|entry| entry.path() != built) {
            let _ = fs::remove_dir_all(entry.path());
        }
        out
    })
}

/// The version of the image.
fn image() -> String {
    let mut images = fs::read_dir(images()).expect("images").flatten();
    let built = images.find(|entry| entry.path().join("image.json").exists()).expect("an image");
    built.file_name().to_string_lossy().into_owned()
}

/// The folder of a finished template of machines with Python of that user's daemons. Built once, by such a daemon.
fn template(user: User) -> &'static Path {
    static OWN: OnceLock<PathBuf> = OnceLock::new();
    static UNPRIVILEGED: OnceLock<PathBuf> = OnceLock::new();
    let template = if user == User::Own { &OWN } else { &UNPRIVILEGED };
    template.get_or_init(|| {
        let folder = kept("templates").join(format!("{user:?}"));
        let finished = |folder: &Path| -> Vec<PathBuf> {
            let all = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
            all.filter(|path| path.join("template.json").exists()).collect()
        };
        let mut host = Machines::prepare(user, "[defaults]\nengine = \"python\"\n");
        let former = finished(&folder);
        former.iter().for_each(|template| host.give_template(template, user));
        host.launch();
        host.ok(&["images", "rotate", &image()]);
        // The former one may be of another image or QEMU.
        let fresh = |path: &PathBuf| former.iter().all(|former| former.file_name() != path.file_name());
        if let Some(built) = finished(&host.data().join("templates")).into_iter().find(fresh) {
            let _ = fs::remove_dir_all(&folder);
            link(&built, &folder.join(built.file_name().expect("a name")));
        }
        finished(&folder).pop().expect("a template")
    })
}

/// Links a folder's files, which are never written again, or copies them.
fn link(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a folder");
    for entry in fs::read_dir(from).expect("a folder").flatten() {
        let to = to.join(entry.file_name());
        fs::hard_link(entry.path(), &to).or_else(|_| fs::copy(entry.path(), &to).map(drop)).expect("linked");
    }
}

/// One of a few places of hosts with machines. Each machine takes a processor: more of them make every wait longer. A move
/// between two hosts uses one at a time, so that another test has a place beside it.
pub struct Place;

static PLACES: (Mutex<usize>, Condvar) = (Mutex::new(3), Condvar::new());

impl Place {
    pub fn take() -> Place {
        let (free, freed) = &PLACES;
        let free = free.lock().unwrap_or_else(PoisonError::into_inner);
        *freed.wait_while(free, |free| *free == 0).unwrap_or_else(PoisonError::into_inner) -= 1;
        Place
    }
}

/// Held by a test with two hosts at once: two such tests would each wait for the other's place.
fn pair() -> std::sync::MutexGuard<'static, ()> {
    static PAIR: Mutex<()> = Mutex::new(());
    PAIR.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Place {
    fn drop(&mut self) {
        *PLACES.0.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        PLACES.1.notify_one();
    }
}

/// A host with an image. Its machines are ended with it.
struct Machines(Host, #[allow(dead_code, reason = "held until the host's end")] Place);

impl std::ops::Deref for Machines {
    type Target = Host;

    fn deref(&self) -> &Host {
        &self.0
    }
}

impl std::ops::DerefMut for Machines {
    fn deref_mut(&mut self) -> &mut Host {
        &mut self.0
    }
}

impl Machines {
    /// Starts a host with a template.
    fn start(user: User) -> Machines {
        Machines::configured(user, "")
    }

    /// The same with a configuration.
    fn configured(user: User, config: &str) -> Machines {
        let mut host = Machines::with_template(user, config);
        host.launch();
        host
    }

    /// Starts a host without a template: its first machines boot.
    fn cold(user: User, config: &str) -> Machines {
        let mut host = Machines::prepare(user, config);
        host.launch();
        host
    }

    /// A host with a template, not started.
    fn with_template(user: User, config: &str) -> Machines {
        // Not from within the place: it takes one, too.
        let template = template(user);
        let host = Machines::prepare(user, config);
        host.give_template(template, user);
        host
    }

    /// A host with an image only, not started.
    fn prepare(user: User, config: &str) -> Machines {
        let (images, place) = (images(), Place::take());
        let host = Host::prepare(user);
        // The template of all tests is from an earlier run, maybe an old one.
        let no_refresh = "[microvm]\ntemplate_max_age = \"never\"\n";
        let config = if config.contains("[microvm]") { config.to_owned() } else { format!("{config}\n{no_refresh}") };
        host.configure(&config);
        fs::create_dir_all(host.data()).expect("a folder");
        std::os::unix::fs::symlink(images, host.data().join("images")).expect("a link");
        give(&host.data(), user);
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        fs::set_permissions(host.data(), mode).expect("closed");
        Machines(host, place)
    }

    fn give_template(&self, from: &Path, user: User) {
        let folder = self.data().join("templates");
        let to = folder.join(from.file_name().expect("a name"));
        link(from, &to);
        [&folder, &to].into_iter().for_each(|folder| give(folder, user));
    }

    /// The descriptions of this host's finished templates.
    fn templates(&self) -> Vec<PathBuf> {
        let folders = fs::read_dir(self.data().join("templates")).into_iter().flatten().flatten();
        let finished = folders.filter(|folder| !folder.file_name().to_string_lossy().starts_with('.'));
        finished.map(|folder| folder.path().join("template.json")).filter(|file| file.exists()).collect()
    }

    /// The description of this host's only template.
    fn description(&self) -> serde_json::Value {
        let all = self.templates();
        let [one] = &all[..] else { panic!("one template, not {all:?}\n{}", self.log()) };
        serde_json::from_slice(&fs::read(one).expect("it is there")).expect("JSON")
    }

    /// Changes the description of this host's only template, which other tests do not see.
    fn describe(&self, change: impl FnOnce(&mut serde_json::Map<String, serde_json::Value>)) {
        let (file, mut about) = (self.templates().pop().expect("a template"), self.description());
        change(about.as_object_mut().expect("an object"));
        fs::remove_file(&file).expect("removed");
        fs::write(file, about.to_string()).expect("written");
    }

    /// Entries of the folder of templates that have no finished template's name.
    fn leftovers(&self) -> Vec<String> {
        let entries = fs::read_dir(self.data().join("templates")).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).filter(|n| n.starts_with('.')).collect()
    }

    /// The process of a machine that boots for a template.
    fn builder(&self) -> Option<u32> {
        self.all().into_iter().find(|pid| words(*pid).iter().any(|word| word.contains("share=on")))
    }

    /// How often this daemon counted an event of Python's machines.
    fn counted(&self, event: &str) -> u64 {
        self.counted_of("python", event)
    }

    fn counted_of(&self, engine: &str, event: &str) -> u64 {
        let series = format!("ryokan_launch_events_total{{engine=\"{engine}\",event=\"{event}\"}} ");
        let text = crate::daemon::metrics::reported(self);
        let value = text.lines().find_map(|line| line.strip_prefix(&series)).map(|count| count.trim().parse::<f64>());
        value.map_or(0, |count| count.expect("a number") as u64)
    }

    /// The processes of this host's kernels' machines.
    fn machines(&self) -> Vec<u32> {
        self.all().into_iter().filter(|pid| has_open(*pid, "disk.ext4")).collect()
    }

    /// The processes of this host's machines that are stopped until a kernel has them.
    fn parked(&self) -> Vec<u32> {
        let is_parked = |pid: &u32| {
            has_open(*pid, "disk.new.ext4")
                && ask(*pid, r#"{"execute": "query-status"}"#).is_some_and(|status| status.contains("\"paused\""))
        };
        self.all().into_iter().filter(is_parked).collect()
    }

    /// The processes of all machines of this host.
    fn all(&self) -> Vec<u32> {
        let ours = format!("ryokan {}/", self.path("run").display());
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc").expect("it is mounted").flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
            let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            if String::from_utf8_lossy(&line).contains(&ours) && Host::is_alive(pid) {
                found.push(pid);
            }
        }
        found
    }

    /// Runs code in a kernel; returns its trimmed output.
    fn run(&self, kernel: &str, code: &str) -> String {
        self.ok(&["exec", kernel, code]).trim().to_owned()
    }

    fn kill_machines(&self) {
        for pid in self.all() {
            let _ = nix::sys::signal::kill(
                nix::unistd::Pid::from_raw(pid.cast_signed()),
                nix::sys::signal::Signal::SIGKILL,
            );
        }
    }
}

/// Gives a path to the user of a host.
fn give(path: &Path, user: User) {
    if user == User::Unprivileged {
        std::os::unix::fs::chown(path, Some(UNPRIVILEGED), Some(UNPRIVILEGED)).expect("given");
    }
}

/// The words of a process's command line.
fn words(pid: u32) -> Vec<String> {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect()
}

/// A field of a process's status.
fn status(pid: u32, field: &str) -> String {
    let all = fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = all.lines().find_map(|line| line.strip_prefix(field)).expect("a field");
    line.trim_start_matches(':').trim().to_owned()
}

/// Whether the process has a file of that name open.
fn has_open(pid: u32, name: &str) -> bool {
    let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    files.filter_map(|file| fs::read_link(file.path()).ok()).any(|file| file.file_name().is_some_and(|n| n == name))
}

/// Asks a machine's monitor; `None` if it does not answer.
fn ask(pid: u32, command: &str) -> Option<String> {
    use std::io::{BufRead as _, Write as _};
    let name = words(pid).into_iter().skip_while(|word| word != "-name").nth(1)?;
    let socket = PathBuf::from(name.strip_prefix("ryokan ")?).with_extension("monitor");
    let mut stream = std::os::unix::net::UnixStream::connect(socket).ok()?;
    stream.set_read_timeout(Some(std::time::Duration::from_secs(60))).ok()?;
    let mut lines = std::io::BufReader::new(stream.try_clone().ok()?).lines();
    lines.next()?.ok()?;
    let mut answer = None;
    for command in ["{\"execute\": \"qmp_capabilities\"}", command] {
        writeln!(stream, "{command}").ok()?;
        answer = lines.by_ref().map_while(Result::ok).find(|line| !line.contains("\"event\""));
    }
    answer
}

impl Drop for Machines {
    fn drop(&mut self) {
        self.kill_machines();
    }
}
