//! The table of allowed and refused calls, with reasons. Calls without an entry do not exist
//! inside.

use libc::*;

use super::Decision::{Allow, Fail};
use super::arguments as arg;
use super::{Conditions, Rule};

// Missing in the `libc` crate on some architectures. From 424 on, numbers are the same everywhere.
const SYS_CACHESTAT: c_long = 451;
const SYS_FCHMODAT2: c_long = 452;
const SYS_MAP_SHADOW_STACK: c_long = 453;
const SYS_FUTEX_WAKE: c_long = 454;
const SYS_FUTEX_WAIT: c_long = 455;
const SYS_FUTEX_REQUEUE: c_long = 456;
const SYS_SETXATTRAT: c_long = 463;
const SYS_GETXATTRAT: c_long = 464;
const SYS_LISTXATTRAT: c_long = 465;
const SYS_REMOVEXATTRAT: c_long = 466;
const SYS_OPEN_TREE_ATTR: c_long = 467;

/// Rules for calls that share decision and reason.
macro_rules! table {
    ($($decision:expr, $why:literal: $($name:ident)*;)*) => {
        &[$($($crate::sandbox::seccomp::Rule {
            number: $name as u32,
            name: stringify!($name),
            decision: $decision,
            why: $why,
        },)*)*]
    };
}
pub(super) use table;

/// The rules for all conditions and architectures.
const COMMON: &[Rule] = table! {
    Allow, "reading and writing what is open":
        SYS_read SYS_write SYS_pread64 SYS_pwrite64 SYS_readv SYS_writev SYS_preadv SYS_pwritev SYS_preadv2
        SYS_pwritev2 SYS_lseek SYS_sendfile SYS_splice SYS_tee SYS_vmsplice SYS_copy_file_range SYS_close
        SYS_close_range;
    Allow, "durability and space of open files":
        SYS_fsync SYS_fdatasync SYS_sync SYS_sync_file_range SYS_syncfs SYS_fallocate SYS_ftruncate SYS_truncate
        SYS_fadvise64 SYS_readahead SYS_flock;
    Allow, "names in the kernel's own tree: what they reach is the mounts' and Landlock's matter":
        SYS_faccessat SYS_faccessat2 SYS_newfstatat SYS_fstat SYS_statx SYS_statfs SYS_fstatfs SYS_getdents64
        SYS_getcwd SYS_chdir SYS_fchdir SYS_mkdirat SYS_unlinkat SYS_renameat SYS_renameat2 SYS_linkat SYS_symlinkat
        SYS_readlinkat SYS_utimensat SYS_umask SYS_fchownat SYS_fchown;
    Allow, "attributes of files; privileged ones need capabilities, which kernels lack":
        SYS_setxattr SYS_lsetxattr SYS_fsetxattr SYS_getxattr SYS_lgetxattr SYS_fgetxattr SYS_listxattr SYS_llistxattr
        SYS_flistxattr SYS_removexattr SYS_lremovexattr SYS_fremovexattr SYS_SETXATTRAT SYS_GETXATTRAT SYS_LISTXATTRAT
        SYS_REMOVEXATTRAT;
    arg::OPENAT, "opening; what is created has no set-user-id bits":
        SYS_openat;
    arg::MODE_1, "modes without set-user-id bits":
        SYS_fchmod;
    arg::MODE_2, "modes without set-user-id bits":
        SYS_fchmodat SYS_FCHMODAT2;
    arg::MKNODAT, "files, pipes and sockets by name; no devices":
        SYS_mknodat;
    Allow, "descriptors":
        SYS_dup SYS_dup3 SYS_fcntl SYS_pipe2 SYS_eventfd2 SYS_epoll_create1 SYS_epoll_ctl SYS_epoll_pwait
        SYS_epoll_pwait2 SYS_ppoll SYS_pselect6 SYS_signalfd4 SYS_timerfd_create SYS_timerfd_settime
        SYS_timerfd_gettime SYS_inotify_init1 SYS_inotify_add_watch SYS_inotify_rm_watch;
    arg::IOCTL, "devices are few, but terminals and file systems have calls of their own":
        SYS_ioctl;
    Allow, "the process's own memory; how much, the limits say":
        SYS_mmap SYS_munmap SYS_mprotect SYS_mremap SYS_msync SYS_mincore SYS_madvise SYS_brk SYS_mlock SYS_mlock2
        SYS_munlock SYS_mlockall SYS_munlockall SYS_pkey_alloc SYS_pkey_free SYS_pkey_mprotect SYS_membarrier SYS_rseq
        SYS_mseal SYS_CACHESTAT SYS_MAP_SHADOW_STACK SYS_get_mempolicy;
    Allow, "programs and threads":
        SYS_execve SYS_execveat SYS_exit SYS_exit_group SYS_wait4 SYS_waitid SYS_set_tid_address SYS_set_robust_list
        SYS_get_robust_list SYS_futex SYS_futex_waitv SYS_FUTEX_WAKE SYS_FUTEX_WAIT SYS_FUTEX_REQUEUE SYS_gettid
        SYS_getpid SYS_getppid SYS_restart_syscall SYS_sched_yield;
    arg::CLONE, "processes and threads, but no new namespaces":
        SYS_clone;
    Fail(libc::ENOSYS), "its flags lie behind a pointer, where no filter sees them; libraries fall back to clone":
        SYS_clone3;
    Allow, "signals; the PID namespace and Landlock bound whom they reach":
        SYS_rt_sigaction SYS_rt_sigprocmask SYS_rt_sigreturn SYS_rt_sigpending SYS_rt_sigtimedwait SYS_rt_sigqueueinfo
        SYS_rt_tgsigqueueinfo SYS_rt_sigsuspend SYS_sigaltstack SYS_kill SYS_tkill SYS_tgkill SYS_pidfd_open
        SYS_pidfd_send_signal;
    Allow, "sessions, groups of processes, priorities: lower only":
        SYS_setpgid SYS_getpgid SYS_getsid SYS_setsid SYS_setpriority SYS_getpriority SYS_ioprio_set SYS_ioprio_get
        SYS_sched_setparam SYS_sched_getparam SYS_sched_setscheduler SYS_sched_getscheduler SYS_sched_get_priority_max
        SYS_sched_get_priority_min SYS_sched_rr_get_interval SYS_sched_setattr SYS_sched_getattr SYS_sched_getaffinity
        SYS_getcpu;
    Allow, "who one is; there is one user inside and no capability to become another":
        SYS_getuid SYS_geteuid SYS_getgid SYS_getegid SYS_getresuid SYS_getresgid SYS_getgroups SYS_setuid SYS_setgid
        SYS_setreuid SYS_setregid SYS_setresuid SYS_setresgid SYS_setfsuid SYS_setfsgid SYS_setgroups SYS_capget
        SYS_capset;
    Allow, "limits and accounts: lower only":
        SYS_getrlimit SYS_setrlimit SYS_prlimit64 SYS_getrusage SYS_times SYS_sysinfo SYS_uname;
    Allow, "reading clocks and waiting":
        SYS_clock_gettime SYS_clock_getres SYS_clock_nanosleep SYS_nanosleep SYS_gettimeofday SYS_timer_create
        SYS_timer_settime SYS_timer_gettime SYS_timer_getoverrun SYS_timer_delete SYS_getitimer SYS_setitimer;
    Allow, "randomness":
        SYS_getrandom;
    arg::SOCKET, "Unix, TCP and UDP sockets, and netlink to ask about interfaces; no raw packets":
        SYS_socket;
    Allow, "pairs are Unix sockets only, the host kernel sees to that":
        SYS_socketpair;
    Allow, "sockets that exist; whom they reach, the network namespace says":
        SYS_bind SYS_listen SYS_accept SYS_accept4 SYS_connect SYS_getsockname SYS_getpeername SYS_sendto SYS_recvfrom
        SYS_sendmsg SYS_recvmsg SYS_sendmmsg SYS_recvmmsg SYS_shutdown SYS_setsockopt SYS_getsockopt;
    Allow, "POSIX message queues: bounded by a limit":
        SYS_mq_open SYS_mq_unlink SYS_mq_timedsend SYS_mq_timedreceive SYS_mq_notify SYS_mq_getsetattr;
    arg::PRCTL, "what a process may set of itself":
        SYS_prctl;
    arg::PERSONALITY, "ordinary, or without address randomisation":
        SYS_personality;
    arg::SECCOMP, "a process may confine itself further":
        SYS_seccomp;
    Allow, "a process may confine itself further":
        SYS_landlock_create_ruleset SYS_landlock_add_rule SYS_landlock_restrict_self;
    Fail(libc::ENOSYS), "its mode lies behind a pointer, and could have set-user-id bits; programs fall back to openat":
        SYS_openat2;
    arg::REFUSED, "looking into other processes, or taking their descriptors":
        SYS_ptrace SYS_process_vm_readv SYS_process_vm_writev SYS_kcmp SYS_pidfd_getfd SYS_process_madvise
        SYS_process_mrelease;
    arg::REFUSED, "other namespaces, other roots, other mounts":
        SYS_unshare SYS_setns SYS_chroot SYS_pivot_root SYS_mount SYS_umount2 SYS_open_tree SYS_OPEN_TREE_ATTR
        SYS_move_mount SYS_fsopen SYS_fsconfig SYS_fsmount SYS_fspick SYS_mount_setattr;
    arg::REFUSED, "files by handle pass by every mount":
        SYS_name_to_handle_at SYS_open_by_handle_at;
    arg::REFUSED, "host kernel code of others' making":
        SYS_bpf SYS_init_module SYS_finit_module SYS_delete_module SYS_kexec_load;
    arg::REFUSED, "large and young parts of the host kernel that have let many out":
        SYS_io_uring_setup SYS_io_uring_enter SYS_io_uring_register SYS_userfaultfd SYS_perf_event_open
        SYS_fanotify_init SYS_fanotify_mark SYS_memfd_secret;
    arg::REFUSED, "keys are the user's, not the kernel's":
        SYS_add_key SYS_request_key SYS_keyctl;
    arg::REFUSED, "the host's clocks":
        SYS_settimeofday SYS_clock_settime SYS_clock_adjtime SYS_adjtimex;
    arg::REFUSED, "the host's own settings, log, accounts, disks and power":
        SYS_sethostname SYS_setdomainname SYS_syslog SYS_acct SYS_reboot SYS_swapon SYS_swapoff SYS_quotactl
        SYS_quotactl_fd SYS_vhangup;
    arg::REFUSED, "memory on other processes' nodes and of other processes":
        SYS_move_pages SYS_migrate_pages SYS_mbind SYS_set_mempolicy SYS_set_mempolicy_home_node;
    Fail(libc::ENOSYS), "host-wide supply that one kernel could use up; programs fall back to threads":
        SYS_io_setup;
};

/// Memory that belongs to no process: only a memory cgroup accounts for it.
const UNCOUNTED_MEMORY: &[&str] = &["SYS_memfd_create", "SYS_shmget", "SYS_semget", "SYS_msgget"];

/// Objects that outlive their process, inside the IPC namespace.
const SHARED_OBJECTS: &[Rule] = table! {
    Allow, "shared memory and messages; the memory cgroup counts them":
        SYS_memfd_create SYS_shmget SYS_shmat SYS_shmdt SYS_shmctl SYS_semget SYS_semop SYS_semtimedop SYS_semctl
        SYS_msgget SYS_msgsnd SYS_msgrcv SYS_msgctl;
};

const AFFINITY_FREE: &[Rule] = table! {
    Allow, "processors are limited by the cgroup": SYS_sched_setaffinity;
};
const AFFINITY_FIXED: &[Rule] = table! {
    arg::REFUSED, "the affinity is the limit on processors": SYS_sched_setaffinity;
};

/// The table under these conditions.
pub(super) fn rules(conditions: Conditions) -> Vec<Rule> {
    let mut rules: Vec<Rule> = COMMON.to_vec();
    #[cfg(target_arch = "x86_64")]
    rules.extend_from_slice(super::rules_x86_64::LEGACY);
    rules.extend(SHARED_OBJECTS.iter().map(|rule| {
        if conditions.memory_cgroup || !UNCOUNTED_MEMORY.contains(&rule.name) {
            *rule
        } else {
            Rule { decision: Fail(ENOSYS), why: "no cgroup counts this memory: programs fall back to files", ..*rule }
        }
    }));
    rules.extend_from_slice(if conditions.affinity_is_limit { AFFINITY_FIXED } else { AFFINITY_FREE });
    rules
}

/// What a virtual machine monitor may not do beyond a kernel's code: its descriptors are all that it needs. Programs
/// end with its start: its own filter refuses them from then on. Without root its uid owns files that other machines use,
/// templates and images among them: it changes neither their rights nor their times, by name or by descriptor.
const NOT_MONITORS: &[&str] = &[
    "SYS_chmod",
    "SYS_fchmod",
    "SYS_fchmodat",
    "SYS_FCHMODAT2",
    "SYS_chown",
    "SYS_lchown",
    "SYS_fchown",
    "SYS_fchownat",
    "SYS_utime",
    "SYS_utimes",
    "SYS_futimesat",
    "SYS_utimensat",
    "SYS_setxattr",
    "SYS_lsetxattr",
    "SYS_fsetxattr",
    "SYS_SETXATTRAT",
    "SYS_removexattr",
    "SYS_lremovexattr",
    "SYS_fremovexattr",
    "SYS_REMOVEXATTRAT",
    "SYS_socket",
    "SYS_socketpair",
    "SYS_connect",
    "SYS_bind",
    "SYS_kill",
    "SYS_tkill",
    "SYS_rt_sigqueueinfo",
    "SYS_rt_tgsigqueueinfo",
    "SYS_pidfd_open",
    "SYS_pidfd_send_signal",
    "SYS_fork",
    "SYS_vfork",
];

/// What a monitor that listens may do nevertheless.
const LISTENERS: &[Rule] = table! {
    arg::UNIX_STREAM, "its sockets; where, Landlock says":
        SYS_socket;
    Allow, "its sockets; where, Landlock says":
        SYS_bind;
    Allow, "rings that its queues map twice; the limit of files bounds them":
        SYS_memfd_create;
    arg::THREAD_SIGNAL, "musl's way to signal the thread of a virtual processor":
        SYS_tkill;
};

/// The table for a virtual machine monitor.
pub(super) fn monitor_rules(listens: bool) -> Vec<Rule> {
    let conditions = Conditions { memory_cgroup: false, affinity_is_limit: true };
    let adapted = |rule: Rule| match LISTENERS.iter().find(|allowed| listens && allowed.name == rule.name) {
        Some(allowed) => *allowed,
        None if NOT_MONITORS.contains(&rule.name) => {
            Rule { decision: arg::REFUSED, why: "a monitor has what it needs", ..rule }
        }
        None => rule,
    };
    rules(conditions).into_iter().map(adapted).collect()
}
