//! Ends of daemon and machine at any moment: nothing acknowledged is lost, and nothing is left.

use super::Machines;
use crate::support::{User, until};

#[test]
fn machine_survives_daemon() {
    let mut host = Machines::start(User::Own);
    host.ok(&["new", "lab", "--isolation", "microvm", "--engine", "python"]);
    host.run("lab", "x = 41; open('f', 'w').write('kept')");
    let before = host.machines();
    host.restart();
    assert_eq!(host.run("lab", "x += 1; print(x, open('f').read())"), "42 kept");
    assert_eq!(host.machines(), before, "the machine was adopted");
    host.ok(&["checkpoint", "lab", "-m", "one"]);
    host.run("lab", "open('f', 'w').write('other')");
    host.ok(&["restore", "lab", "one", "--yes"]);
    assert_eq!(host.run("lab", "print(x, open('f').read())"), "42 kept");
    damaged_disk_is_put_aside(&mut host);
    host.ok(&["rm", "lab", "--yes"]);
    until("the machine's end", || host.machines().is_empty());
}

#[test]
fn killed_machine_loses_nothing_acknowledged() {
    let host = Machines::start(User::Own);
    host.ok(&["new", "lab", "--isolation", "microvm", "--engine", "python"]);
    host.run("lab", "x = 1; open('f', 'w').write('round' * 1000)");
    host.kill_machines();
    until("the machine's end", || host.machines().is_empty());
    // Code that is sent before the daemon knows of the end is lost, and reported so.
    until("the daemon's notice", || !host.ok(&["show", "lab", "--json"]).contains("ready"));
    assert_eq!(host.run("lab", "print(x, len(open('f').read()))"), "1 5000", "{}", host.log());
    let running = host.begin("lab", "import time; x = 2; time.sleep(1000)");
    until("an execution", || host.ok(&["show", "lab", "--json"]).contains("busy"));
    host.kill_machines();
    let output = running.wait_with_output().expect("it ends");
    assert!(!output.status.success() && String::from_utf8_lossy(&output.stderr).contains("killed"), "{output:?}");
    assert_eq!(host.run("lab", "print(x, len(open('f').read()))"), "1 5000", "{}", host.log());
    let seen = host.ok(&["checkpoint", "lab", "-m", "one"]);
    assert!(!seen.is_empty());
}

/// A restore does not need a disk that is damaged; its checkpoint was of 42 and a file that says "kept".
fn damaged_disk_is_put_aside(host: &mut Machines) {
    use std::os::unix::fs::FileExt as _;

    host.run("lab", "x = 2; open('f', 'w').write('two')");
    host.kill();
    host.kill_machines();
    until("the machine's end", || host.machines().is_empty());
    let folder = std::fs::read_dir(host.data().join("kernels")).expect("a folder").flatten().next().expect("a kernel");
    let disk = std::fs::File::options().write(true).open(folder.path().join("disk.ext4")).expect("the disk");
    disk.write_all_at(&vec![0; 1 << 20], 0).expect("damaged");
    drop(disk);
    host.launch();
    host.ok(&["restore", "lab", "one", "--yes"]);
    assert_eq!(host.run("lab", "print(x, open('f').read())"), "42 kept", "{}", host.log());
    assert!(folder.path().join("disk.lost.ext4").exists(), "the damaged disk is kept\n{}", host.log());
    let events = host.ok(&["events", "lab", "--json"]);
    assert!(events.contains("files_put_aside") && events.contains("disk.lost.ext4"), "{events}");
    host.ok(&["undo", "lab", "--yes"]);
    assert_eq!(host.run("lab", "print(open('f').read())"), "kept", "the mirror was the safety checkpoint");
}
