//! The everyday surface of one machine, from outside and from inside: the tables of kernels without a machine.

use std::time::Duration;

use ryokan::core::engine::EngineName;
use ryokan::core::error::Error;
use ryokan::core::exec::ExecStatus;
use ryokan::core::ids::ExecId;
use ryokan::rpc::client::KernelClient;

use super::{Machines, NEW_LAB, users};
use crate::files::{during_transitions, hostile};
use crate::processes::{Inside, attach, escapes, finish, lifecycle, ports, program, streams, terminal};
use crate::support::{Host, until};

/// What a program could read or reach if it saw the guest's first process, the machine's devices or its channels.
const PROBE: &str = r"
import os, socket, stat
def content(path):
    try: return os.listdir(path)
    except NotADirectoryError: pass
    except OSError: return None
    try:
        with open(path, 'rb') as file: return file.read(1)
    except OSError: return None
devices = set(os.listdir('/dev')) - {'null', 'zero', 'full', 'random', 'urandom', 'tty', 'fd', 'stdin', 'stdout', 'stderr', 'pts', 'ptmx', 'shm'}
print('devices', sorted(devices))
for name in ('mem', 'fd', 'fdinfo', 'environ', 'maps', 'root', 'cwd', 'task'):
    if content('/proc/1/' + name): print('/proc/1/' + name)
for path in ('/data', '/run/ryokan', '/sys/class', '/proc/kcore', '/proc/kmsg', '/proc/cmdline', '/proc/kallsyms', '/proc/vmallocinfo'):
    if content(path): print(path)
for family in (socket.AF_VSOCK, socket.AF_PACKET):
    try: socket.socket(family, socket.SOCK_STREAM); print('socket', family)
    except OSError: pass
for kind, number in ((stat.S_IFBLK, os.makedev(254, 16)), (stat.S_IFCHR, os.makedev(1, 1))):
    try: os.mknod('/workspace/device', 0o600 | kind, number); print('device', number)
    except OSError: pass
print('end')";

/// Whether a program inside writes to that file.
fn grows(host: &Host, name: &str) -> bool {
    let size = || host.cli(&["cp", &format!("lab:{name}"), "-"]).stdout.len();
    let before = size();
    std::thread::sleep(Duration::from_millis(500));
    size() > before
}

#[test]
fn machine_has_everyday_surface() {
    for user in users() {
        let mut host = Machines::start(user);
        host.ok(&NEW_LAB);
        let folder = hostile::secret(&host);
        host.run("lab", "kept = 41; import os, time");
        let machine = host.machines();
        programs_are_confined(&host, &folder);
        hostile::assert_untouched(&folder);
        terminals(&host);
        lifecycle::killed_client(&host, "lab", "while :; do echo x >> ticks; sleep 0.1; done", || {
            grows(&host, "ticks")
        });
        daemon_is_killed(&mut host);
        assert_eq!(host.run("lab", "print(kept + 1)"), "42", "{user:?}: {}", host.log());
        assert_eq!(host.machines(), machine, "{user:?}: all of it was one machine\n{}", host.log());
        transitions(&host);
        ports::forwarding(&host, "lab");
        until("the machine's end", || host.machines().is_empty());
    }
}

fn inside(kernel: &KernelClient) -> Inside<'_> {
    Inside { kernel, engine: EngineName::Python }
}

fn programs_are_confined(host: &Machines, folder: &str) {
    host.with(async |client| {
        let (kernel, _) = client.open_kernel("lab").await.expect("opened");
        let files = kernel.files().await.expect("its files");
        terminal::output(&kernel).await;
        terminal::tricks(&kernel).await;
        streams::slow_reader(&inside(&kernel)).await;
        escapes::confined(&kernel).await;
        escapes::supervisor(&kernel).await;
        let probed = finish(&kernel, &program(&["python3", "-c", PROBE])).await;
        assert_eq!(String::from_utf8_lossy(&probed.stdout), "devices []\nend\n", "{probed:?}");
        ports::own_loopback(&client, &kernel).await;
        // Names outside of the workspace that lead back into it: on the host for reads, in the guest for changes.
        inside(&kernel).sh("mkdir other; printf outside > other/f").await;
        let targets =
            ["../".repeat(20) + folder, "/data/kernel/workspace/other".into(), "../../../workspace/other".into()];
        hostile::swaps(&kernel, &files, &targets).await;
        assert_eq!(inside(&kernel).sh("ls -A other; cat other/f").await, "f\noutside");
        inside(&kernel).sh("rm -rf ./*").await;
    });
}

fn terminals(host: &Host) {
    // A shell's job stays in the kernel.
    terminal::job_control(host, "lab", "sh -c 'until [ -e end ]; do sleep 0.1; done; echo over > over'");
    host.ok(&["spawn", "lab", "--", "touch", "end"]);
    until("its end", || host.cli(&["cp", "lab:over", "-"]).stdout == b"over\n");
    terminal::closes(host, "lab");
    attach::joined_terminal(host, "lab");
}

/// The next daemon finds the execution with all its output. A program beside it ends with its daemon, and is found so.
fn daemon_is_killed(host: &mut Machines) {
    let text = "printf 0123456789; while :; do echo x >> lost; sleep 0.1; done";
    let program = host.ok(&["spawn", "lab", "-d", "--", "sh", "-c", text]);
    let program = ExecId(program.trim().parse().expect("a number"));
    until("it runs", || grows(host, "lost"));
    let code = "print('0123456789', end='', flush=True)\nwhile not os.path.exists('now'): time.sleep(0.05)\nprint('abc', end='')";
    let exec = host.with(async |client| {
        let (kernel, _) = client.open_kernel("lab").await.expect("opened");
        let exec = kernel.submit(code).await.expect("it runs");
        let seen = kernel.execution(exec).await.expect("known");
        // Its first output ends the call.
        let arrives = seen.output(0, async |_| Err(Error::internal("seen")));
        assert_eq!(arrives.await.expect_err("ended").message, "seen");
        exec
    });
    host.restart();
    host.with(async |client| {
        let (kernel, _) = client.open_kernel("lab").await.expect("opened");
        let end = kernel.execution(program).await.expect("known").result().await.expect("a result").end;
        assert_eq!(end.status, ExecStatus::Lost, "{end:?}");
        assert!(kernel.processes().await.expect("listed").is_empty());
    });
    until("it ends inside", || !grows(host, "lost"));
    host.ok(&["cp", "/etc/hostname", "lab:now"]);
    assert_eq!(host.ok(&["exec", "lab", "--attach", &exec.to_string(), "--offset", "4"]), "456789abc");
    assert_eq!(host.ok(&["exec", "lab", "--attach", &exec.to_string()]), "0123456789abc");
}

fn transitions(host: &Machines) {
    host.with(async |client| {
        let (kernel, _) = client.open_kernel("lab").await.expect("opened");
        let files = kernel.files().await.expect("its files");
        during_transitions::restores(host, "lab", &inside(&kernel), &files).await;
        lifecycle::checkpoint_names(host, &kernel, "lab").await;
        lifecycle::ends_are_named(host, &kernel, "lab").await;
    });
    host.ok(&["unarchive", "lab"]);
}
