//! Ways out of the sandbox that the new path could have opened, each tried by a process.

use ryokan::core::engine::EngineName;
use ryokan::rpc::client::KernelClient;

use super::{bash, each_user, finish, program, says};
use crate::sandbox_probes::PRELUDE;
use crate::support::{kernel, out};

/// A program has each restriction of its kernel's engine, which is Python.
pub(crate) async fn confined(k: &KernelClient) {
    let code = "
import os
what = ('Cap', 'NoNew', 'Seccomp', 'Uid', 'Gid')
print([l for l in open('/proc/self/status') if l.startswith(what)])
print(open('/proc/self/limits').read())
print([os.readlink('/proc/self/ns/' + n) for n in sorted(os.listdir('/proc/self/ns'))])
print(os.sched_getaffinity(0), os.readlink('/proc/self/root'), os.getcwd())
print(sorted(l.split(' ', 4)[4] for l in open('/proc/self/mountinfo')))";
    let engine = out(k, code).await;
    let process = finish(k, &program(&["python3", "-c", code])).await;
    let process = String::from_utf8_lossy(&process.stdout).into_owned();
    for (engine, process) in engine.lines().zip(process.lines()) {
        assert_eq!(process, engine, "capabilities, limits, namespaces, processors, root or mounts");
    }
    assert_eq!(process.trim(), engine);
    assert!(engine.contains("CapBnd:\\t0000000000000000") && engine.contains("Seccomp:\\t2"), "{engine}");
}

#[test]
fn process_is_confined_as_engine() {
    each_user(|host| host.with(async |client| confined(&kernel(&client, "k", EngineName::Python).await).await));
}

#[test]
fn process_has_only_its_streams() {
    each_user(|host| {
        host.with(async |client| {
            let kernel = bash(&client, "k").await;
            let found = says(&kernel, "for f in /proc/self/fd/*; do [ -e $f ] && readlink $f; done; true").await;
            for target in found.lines() {
                assert!(
                    target.starts_with("pipe:") || target == "/dev/null" || target.starts_with("/proc/"),
                    "{found}"
                );
            }
        });
    });
}

/// Neither init, nor the supervisor, nor the engine can be seen, traced or opened; none can be killed.
pub(crate) async fn supervisor(kernel: &KernelClient) {
    let code = format!(
        "{PRELUDE}
own = os.getpid()
parent = os.getppid()
for pid in range(1, own + 50):
    if pid == own:
        continue
    visible = os.path.exists('/proc/%d' % pid)
    killed = name(sys_(62, pid, 9))
    traced = name(sys_(101, 16, pid, 0, 0))
    read = name(sys_(310, pid, 0, 0, 0, 0, 0))
    opened = name(sys_(257, -100, ctypes.c_char_p(b'/proc/%d/root' % pid), 0, 0))
    if visible or killed not in ('ESRCH', 'EPERM') or traced not in ('ESRCH', 'EPERM', 'ENOSYS'):
        print(pid, pid == parent, visible, killed, traced, read, opened)
print('parent', parent, name(sys_(62, parent, 9)))
"
    );
    let result = finish(kernel, &program(&["python3", "-c", &code])).await;
    let said = String::from_utf8_lossy(&result.stdout);
    // The host kernel scopes signals since Linux 6.12. Before, a process can end its own supervisor.
    let lines: Vec<&str> = said.lines().collect();
    assert!(matches!(lines.as_slice(), [only] if only.starts_with("parent") && only.ends_with("EPERM")), "{result:?}");
}

#[test]
fn supervisor_is_out_of_reach() {
    each_user(|host| {
        host.with(async |client| {
            let kernel = bash(&client, "k").await;
            out(&kernel, "kept=1; echo $kept").await;
            supervisor(&kernel).await;
            assert_eq!(out(&kernel, "echo $kept").await, "1");
        });
    });
}

#[test]
fn host_is_not_visible() {
    each_user(|host| {
        let secret = host.path("secret");
        std::fs::write(&secret, "of the host").expect("written");
        host.with(async |client| {
            let kernel = bash(&client, "k").await;
            let script = format!(
                "cat {secret} /proc/1/root{secret} /proc/self/root/../{secret} 2>/dev/null; ls /proc/1 2>/dev/null; ls {data} 2>/dev/null;
                 ln -s {secret} link; cat link 2>/dev/null; unshare -Ur true 2>/dev/null && echo namespace;
                 mount -t tmpfs x /tmp 2>/dev/null && echo mounted; echo end",
                secret = secret.display(),
                data = host.data().display(),
            );
            assert_eq!(says(&kernel, &script).await, "end");
        });
    });
}

#[test]
fn swapped_directory_leads_nowhere() {
    each_user(|host| {
        host.with(async |client| {
            let kernel = bash(&client, "k").await;
            out(&kernel, "ln -s / away; echo made").await;
            let mut request = super::script("pwd -P; ls");
            if let ryokan::core::exec::Work::Process(program) = &mut request.what {
                program.cwd = "/workspace/away".into();
            }
            let result = finish(&kernel, &request).await;
            let said = String::from_utf8_lossy(&result.stdout).into_owned();
            assert!(said.starts_with("/\n") && said.contains("workspace"), "the root inside: {said}");
            assert!(!said.contains("boot") && !said.contains("root\n"), "not that of the host: {said}");
        });
    });
}
