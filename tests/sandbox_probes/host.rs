//! Processes, network and names of the host.

use serde_json::json;

use super::{Pair, Starter, run_pairs};

/// Python scripts; the harmless side ends with 0.
const PAIRS: &[Pair] = &[
    Pair {
        what: "processes of the host",
        harmless: "assert os.getpid() < 100 and os.path.exists(f'/proc/{os.getpid()}')",
        malicious: "sys.exit(str([p for p in os.listdir('/proc') if p.isdigit() and int(p) > 50] or 'none seen'))",
        says: "none seen",
    },
    Pair {
        what: "signals to init",
        harmless: "os.kill(os.getpid(), 0)",
        malicious: "os.kill(1, 9)",
        says: "PermissionError",
    },
    Pair {
        what: "signals to everybody",
        harmless: "import signal, subprocess as s; p = s.Popen(['sleep', '9']); p.terminate(); assert p.wait() == -15",
        malicious: "import signal; signal.signal(15, signal.SIG_IGN); os.kill(-1, 15)",
        says: "ProcessLookupError",
    },
    Pair {
        what: "the network",
        harmless: "import socket as s; l = s.create_server(('127.0.0.1', 0)); s.create_connection(l.getsockname()).close()",
        malicious: "import socket as s; s.create_connection(('1.1.1.1', 53), 3)",
        says: "Network is unreachable",
    },
    Pair {
        what: "the network over IPv6",
        harmless: "import socket as s; l = s.create_server(('::1', 0), family=s.AF_INET6)",
        malicious: "import socket as s; s.create_connection(('2606:4700:4700::1111', 53), 3)",
        says: "unreachable",
    },
    Pair {
        what: "names of the network",
        harmless: "import socket as s; assert s.gethostbyname('localhost') == '127.0.0.1'",
        malicious: "import socket as s; s.gethostbyname('example.com')",
        says: "gaierror",
    },
    Pair {
        what: "interfaces",
        harmless: "import socket as s; assert [n for _, n in s.if_nameindex()] == ['lo']",
        malicious: "import socket as s; s.socket(s.AF_NETLINK, s.SOCK_RAW, 2)",
        says: "Protocol not supported",
    },
    Pair {
        what: "raw packets",
        harmless: "import socket as s; s.socket(s.AF_INET, s.SOCK_DGRAM)",
        malicious: "import socket as s; s.socket(s.AF_INET, s.SOCK_RAW, s.IPPROTO_ICMP)",
        says: "PermissionError",
    },
    Pair {
        what: "packets below IP",
        harmless: "import socket as s; s.socket(s.AF_UNIX, s.SOCK_SEQPACKET)",
        malicious: "import socket as s; s.socket(s.AF_PACKET, s.SOCK_RAW)",
        says: "Address family not supported",
    },
    Pair {
        what: "sockets of virtual machines",
        harmless: "import socket as s; s.socketpair()",
        malicious: "import socket as s; s.socket(s.AF_VSOCK, s.SOCK_STREAM)",
        says: "Address family not supported",
    },
    Pair {
        what: "crypto sockets",
        harmless: "import socket as s; s.socket(s.AF_INET6, s.SOCK_STREAM)",
        malicious: "import socket as s; s.socket(s.AF_ALG, s.SOCK_SEQPACKET)",
        says: "Address family not supported",
    },
    Pair {
        what: "the host's name",
        harmless: "import socket as s; assert s.gethostname() == 'kernel'",
        malicious: "import socket as s; s.sethostname('x')",
        says: "PermissionError",
    },
    Pair {
        what: "being another user",
        harmless: "os.setuid(1000); os.setgid(1000)",
        malicious: "os.setuid(0)",
        says: "Invalid argument",
    },
    Pair {
        what: "other groups",
        harmless: "assert os.getgid() == 1000",
        malicious: "os.setgroups([0])",
        says: "PermissionError",
    },
    Pair {
        what: "raising limits",
        harmless: "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (64, 64)); assert r.getrlimit(r.RLIMIT_CORE) <= (1, 1)",
        malicious: "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (1 << 19, 1 << 19))",
        says: "",
    },
    Pair { what: "raising priority", harmless: "os.nice(5)", malicious: "os.nice(-5)", says: "PermissionError" },
    Pair {
        what: "real-time priority",
        harmless: "os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))",
        malicious: "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))",
        says: "PermissionError",
    },
    Pair {
        what: "more processors",
        harmless: "assert len(os.sched_getaffinity(0)) == 1",
        malicious: "os.sched_setaffinity(0, range(os.cpu_count()))",
        says: "PermissionError",
    },
    Pair {
        what: "typing into a terminal",
        harmless: "import pty, fcntl, termios as t; m, s = os.openpty(); fcntl.ioctl(s, t.TIOCGWINSZ, b'........')",
        malicious: "import pty, fcntl, termios as t; m, s = os.openpty(); fcntl.ioctl(s, t.TIOCSTI, b'x')",
        says: "PermissionError",
    },
    Pair {
        what: "looking into a child",
        harmless: "p = os.fork()\nif p == 0: os._exit(3)\nassert os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]) == 3",
        malicious: "libc.ptrace(0, 0, 0, 0) == -1 and sys.exit(errno.errorcode[ctypes.get_errno()])",
        says: "EPERM",
    },
];

#[test]
fn host_is_unreachable() {
    run_pairs(PAIRS, |starter, script| starter.python(script));
}

#[test]
fn host_sockets_are_unreachable() {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
    let name = format!("ryokan-test-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).expect("a valid name");
    let listener = UnixListener::bind_addr(&address).expect("bound");
    // The control: it can be reached from outside the sandbox.
    UnixStream::connect_addr(&address).expect("reached from outside");
    let script = format!("import socket as s; s.socket(s.AF_UNIX).connect('\\0{name}')");
    let own = "import socket as s; l = s.socket(s.AF_UNIX); l.bind('\\0mine'); l.listen(); s.socket(s.AF_UNIX).connect('\\0mine')";
    for starter in Starter::all() {
        starter.python(own).prints("");
        starter.python(&script).fails_with("ConnectionRefusedError");
        // With the host's network Landlock separates them.
        let home = starter.home();
        let script = format!("/usr/bin/python3 -c \"{script}\"");
        home.shell(json!({"net": "host"}), &script).fails_with("PermissionError");
    }
    drop(listener);
}

#[test]
fn host_network_requires_request() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bound");
    let port = listener.local_addr().expect("bound").port();
    let script = format!("/usr/bin/python3 -c \"import socket as s; s.create_connection(('127.0.0.1', {port}), 3)\"");
    for starter in Starter::all() {
        let home = starter.home();
        home.shell(json!({"net": "host"}), &script).prints("");
        home.shell(json!({"net": "none"}), &script).fails_with("ConnectionRefusedError");
        let raw = "/usr/bin/python3 -c 'import socket as s; s.socket(s.AF_INET, s.SOCK_RAW, 1)'";
        home.shell(json!({"net": "host"}), raw).fails_with("PermissionError");
    }
}

#[test]
fn signals_do_not_reach_host() {
    let mut victim = std::process::Command::new("sleep").arg("3000").spawn().expect("started");
    let script = format!("os.kill({}, 9)", victim.id());
    for starter in Starter::all() {
        starter.python(&script).fails_with("ProcessLookupError");
    }
    assert_eq!(victim.try_wait().ok(), Some(None), "it still runs");
    victim.kill().expect("the control: outside it can be killed");
    victim.wait().expect("ended");
}

#[test]
fn kernels_cannot_see_each_other() {
    for starter in Starter::all() {
        let home = starter.home();
        let plan = home.plan(json!({}));
        let worker = super::worker();
        let mut command = starter.command(worker);
        command.args(["probe", "--timeout", "600", "--plan", &plan, "--", "/bin/sh", "-c"]);
        command.arg("touch ready; exec sleep 600");
        let mut first = command.spawn().expect("started");
        let ready = home.path("data/mine/workspace/ready");
        crate::support::until("the first kernel runs", || ready.exists());
        starter.shell("cat /proc/[0-9]*/comm | grep -c sleep").fails_with("0");
        starter.shell("ls /tmp /workspace").never_says("ready");
        first.kill().expect("killed");
        first.wait().expect("ended");
    }
}

impl super::Ran {
    /// The output does not contain this text, whatever the result.
    #[track_caller]
    fn never_says(&self, never: &str) {
        assert!(!self.out().contains(never), "{}", self.out());
    }
}
