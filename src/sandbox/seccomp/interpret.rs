//! A BPF interpreter for tests, in place of the host kernel.

use seccompiler::sock_filter;

/// A call as the program sees it.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    pub arch: u32,
    pub number: u32,
    pub arguments: [u64; 6],
}

impl Call {
    fn word(&self, offset: u32) -> u32 {
        match offset {
            0 => self.number,
            4 => self.arch,
            16..=63 if offset.is_multiple_of(4) => {
                let argument = self.arguments[(offset as usize - 16) / 8];
                if offset.is_multiple_of(8) { argument as u32 } else { (argument >> 32) as u32 }
            }
            _ => panic!("read at {offset}"),
        }
    }
}

/// The program's return value and its number of executed instructions.
pub fn run(program: &[sock_filter], call: &Call) -> (u32, usize) {
    let (mut accumulator, mut at, mut steps) = (0u32, 0usize, 0usize);
    loop {
        steps += 1;
        let sock_filter { code, jt, jf, k } = program[at];
        at += 1;
        let mut branch = |taken: bool| at += usize::from(if taken { jt } else { jf });
        match code {
            0x20 => accumulator = call.word(k),
            0x54 => accumulator &= k,
            0x05 => at += k as usize,
            0x15 => branch(accumulator == k),
            0x35 => branch(accumulator >= k),
            0x06 => return (k, steps),
            _ => panic!("instruction {code:#x}"),
        }
    }
}
