//! Compares the decisions of the compiled program with the table.

use super::compile::{ARCH, RETURN_ALLOW, RETURN_ERRNO, RETURN_KILL, ranges};
use super::interpret::{Call, run};
use super::rules::rules;
use super::{Conditions, Decision, Rule, program};

const CONDITIONS: [Conditions; 4] = [
    Conditions { memory_cgroup: false, affinity_is_limit: false },
    Conditions { memory_cgroup: false, affinity_is_limit: true },
    Conditions { memory_cgroup: true, affinity_is_limit: false },
    Conditions { memory_cgroup: true, affinity_is_limit: true },
];
const HERE: Conditions = CONDITIONS[1];

/// The table's decision on a call: the specification of the program.
fn expected(decision: &Decision, arguments: &[u64; 6]) -> u32 {
    match decision {
        Decision::Allow => RETURN_ALLOW,
        Decision::Fail(errno) => RETURN_ERRNO | *errno as u32,
        Decision::Kill => RETURN_KILL,
        Decision::If { argument, mask, values, then, otherwise } => {
            let seen = arguments[usize::from(*argument)] as u32 & mask;
            expected(if values.contains(&seen) { then } else { otherwise }, arguments)
        }
    }
}

/// Every compared value, its neighbours, and values that differ only in ignored high bits.
fn interesting(decision: &Decision, found: &mut Vec<(usize, u64)>) {
    if let Decision::If { argument, mask, values, then, otherwise } = decision {
        for value in values.iter().copied().chain([0, 1, 3, *mask, u32::MAX, 0o4755, 0o2755, 0o755]) {
            for near in [value.wrapping_sub(1), value, value.wrapping_add(1), value | !*mask] {
                found.push((usize::from(*argument), u64::from(near)));
                found.push((usize::from(*argument), u64::from(near) | 0xdead_0000_0000_0000));
            }
        }
        interesting(then, found);
        interesting(otherwise, found);
    }
}

#[test]
fn seccomp_program_matches_table() {
    for conditions in CONDITIONS {
        let (table, program) = (rules(conditions), program(conditions));
        for rule in &table {
            let mut values = vec![(0, 0)];
            interesting(&rule.decision, &mut values);
            // Each value alone, and each pair of two arguments.
            for (first, a) in &values {
                for (second, b) in &values {
                    let mut arguments = [0; 6];
                    arguments[*first] = *a;
                    arguments[*second] = *b;
                    let (got, _) = run(program, &Call { arch: ARCH, number: rule.number, arguments });
                    assert_eq!(got, expected(&rule.decision, &arguments), "{} {arguments:x?}", rule.name);
                }
            }
        }
    }
}

#[test]
fn unlisted_calls_give_enosys() {
    let (table, program) = (rules(HERE), program(HERE));
    let edges = [1 << 16, 0x3fff_ffff, 0x8000_0000, 0xbfff_ffff, 0xffff_ffff];
    for number in (0..2000).chain(edges) {
        let (got, steps) = run(program, &Call { arch: ARCH, number, arguments: [0; 6] });
        match table.iter().find(|rule| rule.number == number) {
            Some(rule) => assert_eq!(got, expected(&rule.decision, &[0; 6]), "{}", rule.name),
            None => assert_eq!(got, RETURN_ERRNO | libc::ENOSYS as u32, "call {number:#x}"),
        }
        assert!(steps < 80, "call {number} took {steps} instructions");
    }
}

#[test]
fn foreign_abi_kills_process() {
    let program = program(HERE);
    let decide = |arch, number| run(program, &Call { arch, number, arguments: [0; 6] }).0;
    // i386, arm, and an invalid architecture.
    for arch in [0x4000_0003, 0x4000_0028, 0] {
        assert_eq!(decide(arch, 0), RETURN_KILL);
    }
    if cfg!(target_arch = "x86_64") {
        for number in [0x4000_0000, 0x4000_0000 + 39, 0x4000_0200, 0x7fff_ffff] {
            assert_eq!(decide(ARCH, number), RETURN_KILL, "{number:#x}");
        }
    }
}

#[test]
fn seccomp_rules_are_unique() {
    for conditions in CONDITIONS {
        let mut table = rules(conditions);
        table.sort_by_key(|rule| rule.number);
        for pair in table.windows(2) {
            assert_ne!(pair[0].number, pair[1].number, "{} and {}", pair[0].name, pair[1].name);
        }
        assert!(table.iter().all(|rule| rule.why.len() > 8));
    }
}

fn decision(name: &str, conditions: Conditions) -> Decision {
    let table: Vec<Rule> = rules(conditions);
    table.iter().find(|rule| rule.name == name).map_or(Decision::Fail(libc::ENOSYS), |rule| rule.decision)
}

#[test]
fn dangerous_syscalls_are_refused() {
    for name in [
        "SYS_mount",
        "SYS_umount2",
        "SYS_pivot_root",
        "SYS_chroot",
        "SYS_setns",
        "SYS_unshare",
        "SYS_ptrace",
        "SYS_process_vm_readv",
        "SYS_process_vm_writev",
        "SYS_bpf",
        "SYS_keyctl",
        "SYS_add_key",
        "SYS_request_key",
        "SYS_perf_event_open",
        "SYS_io_uring_setup",
        "SYS_io_uring_enter",
        "SYS_io_uring_register",
        "SYS_userfaultfd",
        "SYS_kexec_load",
        "SYS_init_module",
        "SYS_finit_module",
        "SYS_delete_module",
        "SYS_clock_settime",
        "SYS_settimeofday",
        "SYS_adjtimex",
        "SYS_clock_adjtime",
        "SYS_open_by_handle_at",
        "SYS_name_to_handle_at",
        "SYS_pidfd_getfd",
        "SYS_quotactl",
        "SYS_swapon",
        "SYS_reboot",
        "SYS_acct",
        "SYS_syslog",
        "SYS_fanotify_init",
        "SYS_vhangup",
        "SYS_process_madvise",
        "SYS_memfd_secret",
        "SYS_fsopen",
        "SYS_open_tree",
        "SYS_move_mount",
        "SYS_mount_setattr",
        "SYS_sched_setaffinity",
    ] {
        assert_eq!(decision(name, HERE), Decision::Fail(libc::EPERM), "{name}");
    }
    for name in ["SYS_clone3", "SYS_openat2", "SYS_io_setup", "SYS_lookup_dcookie", "SYS_nfsservctl", "SYS_uselib"] {
        assert_eq!(decision(name, HERE), Decision::Fail(libc::ENOSYS), "{name}");
    }
}

#[test]
fn uncounted_memory_is_blocked() {
    for name in ["SYS_memfd_create", "SYS_shmget", "SYS_semget", "SYS_msgget"] {
        assert_eq!(decision(name, CONDITIONS[0]), Decision::Fail(libc::ENOSYS), "{name}");
        assert_eq!(decision(name, CONDITIONS[2]), Decision::Allow, "{name}");
    }
    assert_eq!(decision("SYS_sched_setaffinity", CONDITIONS[0]), Decision::Allow);
}

#[test]
fn seccomp_program_is_small() {
    let table = rules(HERE);
    let size = program(HERE).len();
    assert!(size < 500, "{size} instructions for {} rules in {} ranges", table.len(), ranges(&table).len());
}
