//! System calls by number: the filter in force, for real. The decisions themselves are tested in `sandbox::seccomp`.

use super::{Ran, Starter};

/// A call as Python source: number and arguments.
struct Call(libc::c_long, &'static str);

/// A harmless call that succeeds, a malicious one that fails so.
struct Row {
    what: &'static str,
    harmless: Call,
    malicious: Call,
    fails: &'static str,
    /// Whether an ordinary user's malicious call gets further outside the sandbox.
    control: bool,
}

const fn row(what: &'static str, harmless: Call, malicious: Call, fails: &'static str, control: bool) -> Row {
    Row { what, harmless, malicious, fails, control }
}

const GETPID: Call = Call(libc::SYS_getpid, "");
const NEWUSER: &str = "0x10000000 | 17, 0, 0, 0, 0";

const ROWS: &[Row] = &[
    row("new namespaces", Call(libc::SYS_getppid, ""), Call(libc::SYS_unshare, "0x10000000"), "EPERM", true),
    row("new mount namespaces", GETPID, Call(libc::SYS_unshare, "0x20000"), "EPERM", false),
    row("new namespaces by clone", GETPID, Call(libc::SYS_clone, NEWUSER), "EPERM", false),
    row("clone with hidden flags", GETPID, Call(libc::SYS_clone3, "0, 0"), "ENOSYS", true),
    row("joining namespaces", GETPID, Call(libc::SYS_setns, "0, 0"), "EPERM", true),
    row("changing the root", GETPID, Call(libc::SYS_pivot_root, "b'/tmp', b'/tmp'"), "EPERM", false),
    row("new file systems", GETPID, Call(libc::SYS_fsopen, "b'tmpfs', 0"), "EPERM", false),
    row(
        "cloning mounts",
        Call(libc::SYS_access, "b'/', 0"),
        Call(libc::SYS_open_tree, "-100, b'/', 0x80001"),
        "EPERM",
        false,
    ),
    row("moving mounts", GETPID, Call(libc::SYS_move_mount, "0, b'', 0, b'', 0"), "EPERM", false),
    row("mount attributes", GETPID, Call(libc::SYS_mount_setattr, "-100, b'/', 0, 0, 0"), "EPERM", true),
    row("files by handle", GETPID, Call(libc::SYS_open_by_handle_at, "-100, 0, 0"), "EPERM", false),
    row("handles of files", GETPID, Call(libc::SYS_name_to_handle_at, "-100, b'/', 0, 0, 0"), "EPERM", true),
    row(
        "opening with hidden modes",
        Call(libc::SYS_openat, "-100, b'/', 0"),
        Call(libc::SYS_openat2, "-100, b'/', 0, 0"),
        "ENOSYS",
        true,
    ),
    row(
        "set-user-id by open",
        Call(libc::SYS_openat, "-100, b'/tmp/o', 0o102, 0o644"),
        Call(libc::SYS_openat, "-100, b'/tmp/p', 0o102, 0o4755"),
        "EPERM",
        true,
    ),
    row(
        "set-user-id by nameless files",
        Call(libc::SYS_openat, "-100, b'/tmp', 0o20200002, 0o644"),
        Call(libc::SYS_openat, "-100, b'/tmp', 0o20200002, 0o4755"),
        "EPERM",
        true,
    ),
    row(
        "set-user-id by the newest chmod",
        Call(452, "-100, b'/workspace', 0o755, 0"),
        Call(452, "-100, b'/workspace', 0o4755, 0"),
        "EPERM",
        false,
    ),
    row("keys", GETPID, Call(libc::SYS_keyctl, "0, -3, 1"), "EPERM", true),
    row("new keys", GETPID, Call(libc::SYS_add_key, "b'user', b'x', b'y', 1, -2"), "EPERM", true),
    row("asking for keys", GETPID, Call(libc::SYS_request_key, "b'user', b'x', 0, 0"), "EPERM", true),
    row("programs in the host kernel", GETPID, Call(libc::SYS_bpf, "0, 0, 0"), "EPERM", false),
    row("performance counters", GETPID, Call(libc::SYS_perf_event_open, "0, 0, 0, 0, 0"), "EPERM", true),
    row("io_uring", Call(libc::SYS_epoll_create1, "0"), Call(libc::SYS_io_uring_setup, "1, 0"), "EPERM", true),
    row("io_uring, entering", GETPID, Call(libc::SYS_io_uring_enter, "0, 0, 0, 0, 0"), "EPERM", true),
    row("page faults of one's own", Call(libc::SYS_eventfd2, "0, 0"), Call(libc::SYS_userfaultfd, "1"), "EPERM", true),
    row("secret memory", GETPID, Call(libc::SYS_memfd_secret, "0"), "EPERM", false),
    row("another host kernel", GETPID, Call(libc::SYS_kexec_load, "0, 0, 0, 0"), "EPERM", false),
    row("modules", GETPID, Call(libc::SYS_init_module, "0, 0, b''"), "EPERM", false),
    row("modules from files", GETPID, Call(libc::SYS_finit_module, "0, b'', 0"), "EPERM", false),
    row("unloading modules", GETPID, Call(libc::SYS_delete_module, "b'x', 0"), "EPERM", false),
    row(
        "the host's clock",
        Call(libc::SYS_clock_gettime, "0, ctypes.create_string_buffer(16)"),
        Call(libc::SYS_clock_settime, "0, 0"),
        "EPERM",
        true,
    ),
    row("the host's clock, gently", GETPID, Call(libc::SYS_adjtimex, "0"), "EPERM", true),
    row("the host's power", GETPID, Call(libc::SYS_reboot, "0, 0, 0, 0"), "EPERM", false),
    row("the host's swap", GETPID, Call(libc::SYS_swapoff, "b'/x'"), "EPERM", false),
    row("the host's log", GETPID, Call(libc::SYS_syslog, "10, 0, 0"), "EPERM", false),
    row("the host's accounts", GETPID, Call(libc::SYS_acct, "0"), "EPERM", false),
    row("the host's quotas", GETPID, Call(libc::SYS_quotactl, "0, 0, 0, 0"), "EPERM", true),
    row("others' memory", GETPID, Call(libc::SYS_process_vm_readv, "os.getpid(), 0, 0, 0, 0, 0"), "EPERM", true),
    row(
        "others' descriptors",
        Call(libc::SYS_pidfd_open, "os.getpid(), 0"),
        Call(libc::SYS_pidfd_getfd, "0, 0, 0"),
        "EPERM",
        true,
    ),
    row("comparing with others", GETPID, Call(libc::SYS_kcmp, "os.getpid(), os.getpid(), 0, 0, 0"), "EPERM", true),
    row("moving others' memory", GETPID, Call(libc::SYS_move_pages, "0, 0, 0, 0, 0, 0"), "EPERM", true),
    row(
        "watching every file",
        Call(libc::SYS_inotify_init1, "0"),
        Call(libc::SYS_fanotify_init, "0, 0"),
        "EPERM",
        false,
    ),
    row("memory files that nothing counts", GETPID, Call(libc::SYS_memfd_create, "b'x', 0"), "ENOSYS", true),
    row("shared memory that nothing counts", GETPID, Call(libc::SYS_shmget, "0, 4096, 0o1600"), "ENOSYS", true),
    row("messages that nothing counts", GETPID, Call(libc::SYS_msgget, "0, 0o1600"), "ENOSYS", true),
    row("host-wide supplies", GETPID, Call(libc::SYS_io_setup, "1, ctypes.byref(ctypes.c_long(0))"), "ENOSYS", true),
    row(
        "executable by being readable",
        Call(libc::SYS_personality, "0xffffffff"),
        Call(libc::SYS_personality, "0x400000"),
        "EPERM",
        true,
    ),
    row("securebits", Call(libc::SYS_prctl, "27, 0, 0, 0, 0"), Call(libc::SYS_prctl, "28, 0, 0, 0, 0"), "EPERM", false),
    row(
        "one's own memory map",
        Call(libc::SYS_prctl, "15, b'name', 0, 0, 0"),
        Call(libc::SYS_prctl, "35, 1, 0, 0, 0"),
        "EPERM",
        false,
    ),
    row("a listener for calls", GETPID, Call(libc::SYS_seccomp, "1, 8, 0"), "EPERM", true),
    row("a call that nobody knows", GETPID, Call(1000, ""), "ENOSYS", false),
];

fn outcome(ran: &Ran) -> Vec<String> {
    ran.out().lines().map(str::to_owned).collect()
}

fn script(calls: impl Iterator<Item = &'static Call>) -> String {
    let one = |call: &Call| format!("print(name(sys_({}, {})), flush=True)\n", call.0, call.1);
    calls.map(one).collect()
}

#[test]
fn dangerous_calls_refused() {
    for starter in Starter::all() {
        let ran = starter.python(&script(ROWS.iter().map(|row| &row.harmless)));
        let harmless = outcome(&ran);
        assert_eq!(harmless.len(), ROWS.len(), "{}", ran.err());
        let ran = starter.python(&script(ROWS.iter().map(|row| &row.malicious)));
        let malicious = outcome(&ran);
        assert_eq!(malicious.len(), ROWS.len(), "{}", ran.err());
        for ((row, harmless), malicious) in ROWS.iter().zip(&harmless).zip(&malicious) {
            // A descriptor or a number is success too.
            let good = harmless == "OK" || harmless.parse::<i64>().is_ok_and(|n| n >= 0);
            assert!(good, "{starter:?}, harmless side of {:?}: {harmless}", row.what);
            assert_eq!(malicious, row.fails, "{starter:?}, malicious side of {:?}", row.what);
        }
    }
}

#[test]
fn control_calls_outside_sandbox() {
    if !Starter::all().contains(&Starter::Ordinary) {
        return;
    }
    for row in ROWS.iter().filter(|row| row.control) {
        let call = &row.malicious;
        let script = format!("{}print(name(sys_({}, {})))", super::PRELUDE, call.0, call.1);
        let mut command = Starter::Ordinary.command("/usr/bin/python3");
        let output = command.args(["-c", &script]).output().expect("python runs");
        let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        assert_ne!(said, row.fails, "{:?} is indistinguishable from the sandbox's refusal", row.what);
    }
}

#[test]
fn foreign_syscall_abi_is_fatal() {
    for starter in Starter::all() {
        // getpid by way of x32: a number of our own tables with bit 30 set.
        let ran = starter.python("print(sys_(0x40000000 + 39))");
        assert_eq!((ran.code(), ran.out().as_str()), (128 + 31, ""), "{}", ran.err());
        starter.python("print(sys_(39) > 0)").prints("True");
    }
}

#[test]
fn process_status_shows_every_layer() {
    let script = "
import re
s = dict(l.split(':', 1) for l in open('/proc/self/status').read().splitlines() if ':' in l)
print(*[s[k].strip() for k in ('CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb', 'NoNewPrivs', 'Seccomp')])
print(libc.prctl(27, 0, 0, 0, 0) & 0xef == 0xef)";
    let zero = "0000000000000000";
    for starter in Starter::all() {
        starter.python(script).prints(&format!("{zero} {zero} {zero} {zero} {zero} 1 2\nTrue"));
    }
}
