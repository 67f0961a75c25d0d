//! Compiles rules into a BPF program that finds the rule by binary search.
//!
//! 330 rules compared in sequence would be 1,660 instructions for the host kernel to check, and
//! dozens per call. Adjacent rules with the same decision form one range, found by binary search.

use seccompiler::{BpfProgram, sock_filter};

use super::{Decision, Rule};

const LOAD: u16 = 0x20;
const AND: u16 = 0x54;
const JUMP: u16 = 0x05;
const JUMP_IF_EQUAL: u16 = 0x15;
const JUMP_IF_AT_LEAST: u16 = 0x35;
const RETURN: u16 = 0x06;

/// Offsets in `struct seccomp_data`.
const OFFSET_NUMBER: u32 = 0;
const OFFSET_ARCH: u32 = 4;
const OFFSET_ARGUMENTS: u32 = 16;

pub(super) const RETURN_ALLOW: u32 = 0x7fff_0000;
pub(super) const RETURN_ERRNO: u32 = 0x0005_0000;
pub(super) const RETURN_KILL: u32 = 0x8000_0000;

/// `AUDIT_ARCH_*` of this build: machine, 64 bits, little-endian.
#[cfg(target_arch = "x86_64")]
pub(super) const ARCH: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
pub(super) const ARCH: u32 = 0xc000_00b7;

/// Numbers of the x32 interface: x86_64's with bit 30 set.
#[cfg(target_arch = "x86_64")]
const FOREIGN_FIRST: u32 = 0x4000_0000;
#[cfg(target_arch = "x86_64")]
const FOREIGN_LAST: u32 = 0x7fff_ffff;

/// Consecutive numbers with one decision, from `first` to before the next range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Range {
    /// First number.
    pub first: u32,
    /// Their decision.
    pub decision: Decision,
}

const fn instruction(code: u16, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

/// The whole number line as ranges.
pub(super) fn ranges(rules: &[Rule]) -> Vec<Range> {
    let mut sorted: Vec<(u32, Decision)> = rules.iter().map(|rule| (rule.number, rule.decision)).collect();
    sorted.sort_by_key(|(number, _)| *number);
    let unknown = Decision::Fail(libc::ENOSYS);
    let mut ranges: Vec<Range> = Vec::new();
    let mut push = |first: u32, decision: Decision| {
        if ranges.last().is_none_or(|last: &Range| last.decision != decision) {
            ranges.push(Range { first, decision });
        }
    };
    let mut next = 0;
    for (number, decision) in sorted {
        if number > next {
            push(next, unknown);
        }
        push(number, decision);
        next = number + 1;
    }
    push(next, unknown);
    #[cfg(target_arch = "x86_64")]
    {
        assert!(next <= FOREIGN_FIRST, "no call of ours has a number of the x32 interface");
        push(FOREIGN_FIRST, Decision::Kill);
        push(FOREIGN_LAST + 1, unknown);
    }
    ranges
}

/// The program for these rules.
pub(super) fn compile(rules: &[Rule]) -> BpfProgram {
    let mut program = vec![
        instruction(LOAD, 0, 0, OFFSET_ARCH),
        instruction(JUMP_IF_EQUAL, 1, 0, ARCH),
        instruction(RETURN, 0, 0, RETURN_KILL),
        instruction(LOAD, 0, 0, OFFSET_NUMBER),
    ];
    program.extend(search(&ranges(rules)));
    program
}

/// A block that jumps to the decision of the range of the number in the accumulator. Every block
/// ends in returns, so blocks can be concatenated.
fn search(ranges: &[Range]) -> BpfProgram {
    match ranges {
        [] => decide(&Decision::Kill),
        [only] => decide(&only.decision),
        _ => {
            let (low, high) = ranges.split_at(ranges.len() / 2);
            let (below, at_least) = (search(low), search(high));
            let mut block = Vec::with_capacity(below.len() + at_least.len() + 2);
            match u8::try_from(below.len()) {
                Ok(over) => block.push(instruction(JUMP_IF_AT_LEAST, over, 0, high[0].first)),
                Err(_) => {
                    block.push(instruction(JUMP_IF_AT_LEAST, 0, 1, high[0].first));
                    block.push(instruction(JUMP, 0, 0, length(&below)));
                }
            }
            block.extend(below);
            block.extend(at_least);
            block
        }
    }
}

/// A block that executes a decision.
fn decide(decision: &Decision) -> BpfProgram {
    match decision {
        Decision::Allow => vec![instruction(RETURN, 0, 0, RETURN_ALLOW)],
        Decision::Fail(errno) => vec![instruction(RETURN, 0, 0, RETURN_ERRNO | *errno as u32)],
        Decision::Kill => vec![instruction(RETURN, 0, 0, RETURN_KILL)],
        Decision::If { argument, mask, values, then, otherwise } => {
            let (then, otherwise) = (decide(then), decide(otherwise));
            let mut block = vec![instruction(LOAD, 0, 0, OFFSET_ARGUMENTS + 8 * u32::from(*argument))];
            if *mask != u32::MAX {
                block.push(instruction(AND, 0, 0, *mask));
            }
            for (i, value) in values.iter().enumerate() {
                // Past the remaining comparisons and the jump behind them.
                let over = u8::try_from(values.len() - i).expect("no rule compares with more than 250 values");
                block.push(instruction(JUMP_IF_EQUAL, over, 0, *value));
            }
            block.push(instruction(JUMP, 0, 0, length(&then)));
            block.extend(then);
            block.extend(otherwise);
            block
        }
    }
}

fn length(block: &BpfProgram) -> u32 {
    u32::try_from(block.len()).expect("programs have at most 4096 instructions")
}
