//! Decisions that depend on a call's arguments.

use super::Decision::{self, Allow, Fail, If};

const ALL: u32 = u32::MAX;
/// The decision of most refusals.
pub(super) const REFUSED: Decision = Fail(libc::EPERM);

/// `clone`: no new namespaces. (`clone3` hides its flags behind a pointer and does not exist here.)
pub(super) const CLONE: Decision = If {
    argument: 0,
    mask: (libc::CLONE_NEWNS
        | libc::CLONE_NEWCGROUP
        | libc::CLONE_NEWUTS
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUSER
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWNET) as u32,
    values: &[0],
    then: &Allow,
    otherwise: &REFUSED,
};

const IP_PROTOCOL: Decision = If {
    argument: 2,
    mask: ALL,
    values: &[0, libc::IPPROTO_TCP as u32, libc::IPPROTO_UDP as u32],
    then: &Allow,
    otherwise: &Fail(libc::EPROTONOSUPPORT),
};
const IP_TYPE: Decision = If {
    argument: 1,
    mask: 0xf,
    values: &[libc::SOCK_STREAM as u32, libc::SOCK_DGRAM as u32],
    then: &IP_PROTOCOL,
    otherwise: &REFUSED,
};
const NETLINK: Decision = If {
    argument: 2,
    mask: ALL,
    values: &[libc::NETLINK_ROUTE as u32],
    then: &Allow,
    otherwise: &Fail(libc::EPROTONOSUPPORT),
};
const IP_OR_NETLINK: Decision = If {
    argument: 0,
    mask: ALL,
    values: &[libc::AF_NETLINK as u32],
    then: &NETLINK,
    otherwise: &Fail(libc::EAFNOSUPPORT),
};
const NOT_UNIX: Decision = If {
    argument: 0,
    mask: ALL,
    values: &[libc::AF_INET as u32, libc::AF_INET6 as u32],
    then: &IP_TYPE,
    otherwise: &IP_OR_NETLINK,
};
/// `socket`: Unix, TCP, UDP, and netlink for interface queries. Every other family is unneeded host
/// kernel code that loads itself on demand.
pub(super) const SOCKET: Decision =
    If { argument: 0, mask: ALL, values: &[libc::AF_UNIX as u32], then: &Allow, otherwise: &NOT_UNIX };

const STREAM: Decision =
    If { argument: 1, mask: 0xf, values: &[libc::SOCK_STREAM as u32], then: &Allow, otherwise: &REFUSED };
/// `socket`: Unix stream sockets.
pub(super) const UNIX_STREAM: Decision =
    If { argument: 0, mask: ALL, values: &[libc::AF_UNIX as u32], then: &STREAM, otherwise: &REFUSED };
/// `tkill`: the first real-time signals of C libraries, which end a process that does not expect them, and nothing else.
pub(super) const THREAD_SIGNAL: Decision =
    If { argument: 1, mask: ALL, values: &[34, 35], then: &Allow, otherwise: &REFUSED };

/// Inserting characters into a terminal's input (and the console's selection), changing its line
/// discipline, capturing the console's output.
const TERMINAL_TRICKS: &[u32] =
    &[libc::TIOCSTI as u32, libc::TIOCLINUX as u32, libc::TIOCSETD as u32, libc::TIOCCONS as u32];
/// Cloning files is allowed. Btrfs's other calls (subvolumes above all) would leave data that
/// checkpoints do not see.
const BTRFS: Decision = If {
    argument: 1,
    mask: ALL,
    // FICLONE, FICLONERANGE, FIDEDUPERANGE.
    values: &[0x4004_9409, 0x4020_940d, 0xc018_9436],
    then: &Allow,
    otherwise: &REFUSED,
};
const NOT_TERMINAL: Decision = If { argument: 1, mask: 0xff00, values: &[0x9400], then: &BTRFS, otherwise: &Allow };
/// `ioctl`.
pub(super) const IOCTL: Decision =
    If { argument: 1, mask: ALL, values: TERMINAL_TRICKS, then: &REFUSED, otherwise: &NOT_TERMINAL };

const PRCTL_ALLOWED: &[u32] = &[
    libc::PR_SET_PDEATHSIG as u32,
    libc::PR_GET_PDEATHSIG as u32,
    libc::PR_GET_DUMPABLE as u32,
    libc::PR_SET_DUMPABLE as u32,
    libc::PR_GET_KEEPCAPS as u32,
    libc::PR_GET_TIMING as u32,
    libc::PR_SET_NAME as u32,
    libc::PR_GET_NAME as u32,
    libc::PR_GET_SECCOMP as u32,
    libc::PR_SET_SECCOMP as u32,
    libc::PR_CAPBSET_READ as u32,
    libc::PR_GET_TSC as u32,
    libc::PR_GET_SECUREBITS as u32,
    libc::PR_SET_TIMERSLACK as u32,
    libc::PR_GET_TIMERSLACK as u32,
    libc::PR_SET_CHILD_SUBREAPER as u32,
    libc::PR_GET_CHILD_SUBREAPER as u32,
    libc::PR_SET_NO_NEW_PRIVS as u32,
    libc::PR_GET_NO_NEW_PRIVS as u32,
    libc::PR_GET_TID_ADDRESS as u32,
    libc::PR_SET_THP_DISABLE as u32,
    libc::PR_GET_THP_DISABLE as u32,
    libc::PR_CAP_AMBIENT as u32,
    // Vector lengths and pointer authentication of aarch64 affect only the process itself.
    50, // PR_SVE_SET_VL
    51, // PR_SVE_GET_VL
    54, // PR_PAC_RESET_KEYS
    55, // PR_SET_TAGGED_ADDR_CTRL
    56, // PR_GET_TAGGED_ADDR_CTRL
    libc::PR_GET_SPECULATION_CTRL as u32,
    libc::PR_SET_SPECULATION_CTRL as u32,
    libc::PR_SET_VMA as u32,
    65, // PR_SET_MDWE
    66, // PR_GET_MDWE
];
/// `prctl`: settings of the process itself, except securebits, its memory map, core scheduling and
/// machine checks.
pub(super) const PRCTL: Decision =
    If { argument: 0, mask: ALL, values: PRCTL_ALLOWED, then: &Allow, otherwise: &REFUSED };

/// `personality`: query, default, and no address randomisation. Not: readable pages becoming
/// executable, foreign system call tables.
pub(super) const PERSONALITY: Decision =
    If { argument: 0, mask: ALL, values: &[0, 0x0004_0000, u32::MAX], then: &Allow, otherwise: &REFUSED };

const SET_ID_BITS: u32 = 0o6000;
const fn without_set_id(argument: u8) -> Decision {
    If { argument, mask: SET_ID_BITS, values: &[0], then: &Allow, otherwise: &REFUSED }
}
/// The mode in argument 1 or 2, without set-user-id and set-group-id bits. They have no effect
/// inside, but written files may be in a host folder and belong to root there.
pub(super) const MODE_1: Decision = without_set_id(1);
pub(super) const MODE_2: Decision = without_set_id(2);
const MODE_3: Decision = without_set_id(3);

const O_TMPFILE_BIT: u32 = 0o20_000_000;
const CREATES: u32 = libc::O_CREAT as u32 | O_TMPFILE_BIT;
/// `open`: the mode counts only if it creates something.
#[cfg(target_arch = "x86_64")]
pub(super) const OPEN: Decision = If { argument: 1, mask: CREATES, values: &[0], then: &Allow, otherwise: &MODE_2 };
/// `openat`.
pub(super) const OPENAT: Decision = If { argument: 2, mask: CREATES, values: &[0], then: &Allow, otherwise: &MODE_3 };

const NODES: &[u32] = &[0, libc::S_IFREG, libc::S_IFIFO, libc::S_IFSOCK];
/// `mknod`: files, pipes, sockets; no devices.
#[cfg(target_arch = "x86_64")]
pub(super) const MKNOD: Decision =
    If { argument: 1, mask: libc::S_IFMT, values: NODES, then: &MODE_1, otherwise: &REFUSED };
/// `mknodat`.
pub(super) const MKNODAT: Decision =
    If { argument: 2, mask: libc::S_IFMT, values: NODES, then: &MODE_2, otherwise: &REFUSED };

/// `seccomp`: a process may confine itself further, but not hand decisions to a listener.
pub(super) const SECCOMP: Decision = If { argument: 1, mask: 1 << 3, values: &[0], then: &Allow, otherwise: &REFUSED };
