//! The table's part for x86_64 alone: mostly calls replaced by later ones.

use libc::*;

use super::Decision::Allow;
use super::Rule;
use super::arguments as arg;
use super::rules::table;

/// The rules.
pub(super) const LEGACY: &[Rule] = table! {
    Allow, "older forms of calls that are allowed":
        SYS_stat SYS_lstat SYS_access SYS_readlink SYS_rename SYS_mkdir SYS_rmdir SYS_link SYS_unlink SYS_symlink
        SYS_chown SYS_lchown SYS_utime SYS_utimes SYS_futimesat SYS_getdents SYS_poll SYS_select SYS_pipe SYS_dup2
        SYS_epoll_create SYS_epoll_wait SYS_eventfd SYS_signalfd SYS_inotify_init SYS_alarm SYS_pause SYS_time
        SYS_getpgrp SYS_fork SYS_vfork;
    Allow, "thread-local storage and the like of the process itself":
        SYS_arch_prctl;
    arg::OPEN, "opening; what is created has no set-user-id bits":
        SYS_open;
    arg::MODE_1, "modes without set-user-id bits":
        SYS_chmod SYS_creat;
    arg::MKNOD, "files, pipes and sockets by name; no devices":
        SYS_mknod;
    arg::REFUSED, "the host's ports and segment tables":
        SYS_iopl SYS_ioperm SYS_modify_ldt;
    arg::REFUSED, "host kernel code of others' making":
        SYS_kexec_file_load;
};
