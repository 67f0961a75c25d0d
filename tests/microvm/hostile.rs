//! Guests that are hostile or hung, and a host without room: each is found and ended, and the daemon serves others.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::images::describe_anew;
use super::{Machines, NEW_LAB, ask, image, images, status};
use crate::support::{Host, User, until};

/// The first process of a hostile guest, in Python. It serves until a worker is started, whose kernel's name says what
/// it does then.
const GUEST: &str = r#"
import json, os, struct, time

def port(name):
    for entry in os.listdir('/sys/class/virtio-ports'):
        if open('/sys/class/virtio-ports/%s/name' % entry).read().strip() == name:
            return os.open('/dev/' + entry, os.O_RDWR)

def read(port, count):
    data = b''
    while len(data) < count:
        piece = os.read(port, count - len(data))
        if not piece:
            time.sleep(0.02)
        data += piece
    return data

def greet(port):
    seen = b''
    while len(seen) < 32 or seen[:16] != b'ryokan-machine-1':
        seen = (seen + read(port, 1))[-32:]
    os.write(port, b'ryokan-ready-001' + seen[16:])

def answer(port, reply):
    text = json.dumps(reply).encode()
    os.write(port, struct.pack('<II', len(text), 0) + text)

def flood(port, bytes):
    while True:
        os.write(port, bytes)

control, link, events = [port('ryokan.' + name) for name in ('control', 'link', 'events')]
greet(control)
while True:
    size, body = struct.unpack('<II', read(control, 8))
    request, body = json.loads(read(control, size)), read(control, body)
    name = request if isinstance(request, str) else next(iter(request))
    if name == 'start':
        break
    boot_id = open('/proc/sys/kernel/random/boot_id').read().strip()
    answer(control, {
        'seed': lambda: {'seeded': {'boot_id': boot_id, 'now_ns': request['seed']['now_ns']}},
        'list': lambda: {'entries': {'entries': [], 'more': False}},
    }.get(name, lambda: 'done')())
if b'"oversize"' in body:
    flood(control, b'\xff' * 65536)
if b'"junk"' in body:
    flood(control, struct.pack('<II', 1000, 1000) + b'{' * 2000)
answer(control, {'started': {'ready': {}}})
if b'"frames"' in body:
    greet(link)
    flood(link, b'\xff' * 65536)
flood(events, b'R' * 65536)
"#;

/// What starts it, in place of the initial file system's first program.
const INIT: &str = r#"#!/bin/busybox sh
/bin/busybox mount -t devtmpfs none /dev
while read -r module; do /bin/busybox insmod "/modules/$module.ko"; done </modules/order
/bin/busybox mount -t erofs -o ro /dev/vda /root
for kind in proc sysfs; do /bin/busybox mount -t $kind none /root/${kind%fs}; done
/bin/busybox mount -t tmpfs none /root/tmp
/bin/busybox cp /guest.py /root/tmp/guest.py
/bin/busybox mount --move /dev /root/dev
exec /bin/busybox switch_root /root /usr/bin/python3 -S /tmp/guest.py
"#;

impl Machines {
    /// Gives this host an image with that guest, and only it.
    fn make_hostile(&self, user: User) {
        let (folder, from) = (self.data().join("images"), image());
        fs::remove_file(&folder).expect("the link is removed");
        fs::create_dir(&folder).expect("a folder");
        let to = self.copy_image(&images().join(&from), &"d".repeat(40), user);
        let added = self.path("added");
        fs::create_dir(&added).expect("a folder");
        for (name, text) in [("init", INIT), ("guest.py", GUEST)] {
            fs::write(added.join(name), text).expect("written");
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
            fs::set_permissions(added.join(name), mode).expect("executable");
        }
        // The host kernel unpacks one archive after the other.
        let mut pack = Command::new("sh");
        pack.args(["-c", "printf 'init\\nguest.py\\n' | cpio --quiet -o -H newc >>\"$0\""]).arg(to.join("initrd.cpio"));
        assert!(pack.current_dir(&added).status().expect("it runs").success());
        describe_anew(&to, "initrd.cpio");
    }

    /// Begins an execution.
    pub(super) fn begin(&self, kernel: &str, code: &str) -> std::process::Child {
        let mut command = self.command("ryokan");
        command.args(["--no-autostart", "exec", kernel, code]).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it runs")
    }

    /// Runs code in a kernel without a machine, which takes little time.
    fn serves_others(&self) {
        std::thread::sleep(Duration::from_millis(500));
        let began = Instant::now();
        assert_eq!(self.run("plain", "echo here"), "here");
        // As long as a silent guest may take.
        assert!(began.elapsed() < ryokan::core::limits::VM_SILENCE, "{:?}", began.elapsed());
    }

    /// Whether an event of a kernel's crash has that reason.
    fn has_crashed(&self, kernel: &str, reason: &str) -> bool {
        let events = self.ok(&["events", kernel, "--json"]);
        events.contains("kernel_crashed") && events.contains(reason)
    }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn hostile_guests_are_ended() {
    let mut host = Machines::prepare(User::Own, "");
    host.make_hostile(User::Own);
    host.launch();
    host.ok(&["new", "plain"]);
    host.serves_others();
    let daemon = u32::try_from(host.pid()).expect("a process");
    let memory = || status(daemon, "VmHWM").trim_end_matches(" kB").trim().parse::<u64>().expect("a size") / 1024;
    let before = memory();
    let hostile = [
        ("oversize", "the guest's answer is invalid"),
        ("junk", "the guest's answer is invalid"),
        ("frames", "the worker"),
        ("states", "did not answer"),
    ];
    for (kernel, _) in hostile {
        host.ok(&["new", kernel, "--isolation", "microvm"]);
    }
    let running = hostile.map(|(kernel, _)| host.begin(kernel, "echo inside"));
    for (kernel, why) in hostile {
        until(kernel, || {
            host.serves_others();
            host.has_crashed(kernel, why)
        });
    }
    host.ok(&["rm", "states", "frames", "--yes"]);
    for (child, (kernel, why)) in running.into_iter().zip(hostile) {
        let output = child.wait_with_output().expect("it ends");
        assert!(!output.status.success(), "{kernel}: {output:?}");
        assert!(!["oversize", "junk"].contains(&kernel) || said(&output).contains(why), "{kernel}: {output:?}");
    }
    let grown = memory() - before;
    assert!(grown < 96, "the daemon grew by {grown} MiB");
    host.ok(&["rm", "oversize", "junk", "--yes"]);
    until("the machines' end", || host.all().is_empty());
    host.serves_others();
}

#[test]
fn hung_guests_are_found() {
    let host = Machines::start(User::Own);
    host.ok(&["new", "plain"]);
    host.ok(&NEW_LAB);
    host.run("lab", "x = 41; open('f', 'w').write('kept')");
    let lab = host.machines();
    host.ok(&["new", "other", "--isolation", "microvm", "--engine", "python"]);
    host.run("other", "x = 1");
    let other = host.machines().into_iter().find(|pid| !lab.contains(pid)).expect("its machine");
    // The processors of one stand still during an execution; the whole monitor of the other one while it is idle.
    let running = host.begin("lab", "import time; time.sleep(1000)");
    until("an execution", || host.ok(&["show", "lab", "--json"]).contains("busy"));
    assert!(ask(lab[0], r#"{"execute": "stop"}"#).is_some_and(|answer| answer.contains("return")));
    kill(Pid::from_raw(other.cast_signed()), Signal::SIGSTOP).expect("stopped");
    for (kernel, machine) in [("lab", lab[0]), ("other", other)] {
        until("the machine's end", || {
            host.serves_others();
            !Host::is_alive(machine)
        });
        until("its event", || host.has_crashed(kernel, "did not respond"));
    }
    let output = running.wait_with_output().expect("it ends");
    assert!(!output.status.success() && said(&output).contains("did not respond"), "{output:?}");
    assert_eq!(host.run("lab", "print(x + 1, open('f').read())"), "42 kept", "{}", host.log());
    assert_eq!(host.run("other", "print(x)"), "1", "{}", host.log());
}

/// A small file system in place of the data directory. Needs root.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn of(host: &Machines) -> SmallDisk {
        let options = Some("size=64m,mode=700");
        mount(Some("tmpfs"), &host.data(), Some("tmpfs"), MsFlags::empty(), options).expect("root may");
        std::os::unix::fs::symlink(images(), host.data().join("images")).expect("a link");
        SmallDisk(host.data())
    }

    fn enlarge(&self) {
        let options = Some("size=4g,mode=700");
        mount(Some("tmpfs"), &self.0, None::<&str>, MsFlags::MS_REMOUNT, options).expect("root may");
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
    }
}

#[test]
fn full_disk_leaves_nothing_half() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("ignored: only root may mount");
        return;
    }
    let mut host = Machines::prepare(User::Own, "[defaults]\nengine = \"python\"\n");
    let disk = SmallDisk::of(&host);
    host.launch();
    // A machine's memory is larger than the disk.
    let output = host.cli(&["images", "rotate", &image()]);
    assert!(!output.status.success() && said(&output).contains("does not become current"), "{output:?}");
    let left = fs::read_dir(host.data().join("templates")).expect("a folder").count();
    assert_eq!(left, 0, "{}", host.log());
    host.ok(&NEW_LAB);
    host.run("lab", "g = (n for n in range(9)); next(g); saved = 42; open('f', 'w').write('kept')");
    let machine = host.machines();
    let output = host.cli(&["suspend", "lab", "--release"]);
    assert!(!output.status.success(), "{output:?}");
    let kernel = fs::read_dir(host.data().join("kernels")).expect("a folder").flatten();
    let files = kernel.flat_map(|kernel| fs::read_dir(kernel.path()).expect("a folder").flatten());
    let half: Vec<_> =
        files.map(|file| file.file_name()).filter(|name| name.to_string_lossy().contains("suspended")).collect();
    assert!(half.is_empty(), "{half:?}");
    assert_eq!(host.run("lab", "print(next(g), saved, open('f').read())"), "1 42 kept", "{}", host.log());
    assert_eq!(host.machines(), machine, "it went on\n{}", host.log());
    // A guest that writes more than the host has room for stands still, and continues with what it has.
    let code =
        "import os; f = open('big', 'wb'); [f.write(os.urandom(1 << 20)) for _ in range(96)]; f.flush(); os.fsync(f)";
    let running = host.begin("lab", code);
    // There is no room for its event yet.
    until("the full disk", || host.log().contains("stands still until there is room"));
    let status = ask(machine[0], r#"{"execute": "query-status"}"#);
    assert!(status.as_ref().is_some_and(|status| status.contains("io-error")), "{status:?}");
    // For longer than a silent guest may take.
    std::thread::sleep(ryokan::core::limits::VM_SILENCE + Duration::from_secs(20));
    let refused = host.cli(&["cp", "lab:f", "-"]);
    assert!(!refused.status.success() && said(&refused).contains("disk is full"), "{refused:?}");
    disk.enlarge();
    let output = running.wait_with_output().expect("it ends");
    assert!(output.status.success(), "{output:?}\n{}", host.log());
    until("its event", || host.ok(&["events", "--json"]).contains("\"disk_full\""));
    assert_eq!(host.run("lab", "print(next(g), os.path.getsize('big') >> 20)"), "2 96", "{}", host.log());
    assert_eq!(host.machines(), machine, "{}", host.log());
    assert!(!host.has_crashed("lab", ""), "{}", host.log());
    // What prevented the template is over, and it is built without a wait.
    host.ok(&["images", "rotate", &image()]);
}
