//! A program's own code on huge pages: whoever comes to it after others had the processor has fewer translations to look up, which in a virtual
//! machine are dear, and what is forked finds all of it mapped.
//!
//! Files are mapped in pages of 4 KiB on most host kernels, so the code is copied to memory of huge pages, which is put in its place: what JavaScript
//! engines and browsers do. It costs that much memory once, for all forks together. Profilers and debuggers see code of no file.

use std::io;
use std::ops::Range;

use super::checked;

/// A huge page, bytes: that of x86-64, and of aarch64 where pages have 4 KiB.
const HUGE: usize = 2 << 20;
/// Programs with more code than this are left as they are: none of ours has so much.
const MOST: usize = 64 << 20;

/// Puts the code of this program, as far as it fills huge pages, on such; whether it is now. Not where the host kernel gives none, has larger ones, or
/// none is left. For a process of one thread, before it forks.
///
/// # Errors
/// What the host kernel refuses, as some do to make memory executable that was written to; the code is where it was then.
pub fn on_huge_pages() -> io::Result<bool> {
    if !host_has_huge_pages() {
        return Ok(false);
    }
    let this = on_huge_pages as fn() -> io::Result<bool>;
    let Some(code) = code_of_program(&std::fs::read_to_string("/proc/self/maps")?, this as usize) else {
        return Ok(false);
    };
    let whole = code.start.next_multiple_of(HUGE)..code.end / HUGE * HUGE;
    if whole.is_empty() || code.len() > MOST {
        return Ok(false);
    }
    replace(&whole, true)
}

/// Whether whoever asks for huge pages may have such of our size.
fn host_has_huge_pages() -> bool {
    let setting =
        |name| std::fs::read_to_string(format!("/sys/kernel/mm/transparent_hugepage/{name}")).unwrap_or_default();
    let enabled = setting("enabled");
    (enabled.contains("[always]") || enabled.contains("[madvise]"))
        && setting("hpage_pmd_size").trim().parse() == Ok(HUGE)
}

/// The mapping with rights to execute in which that address is.
fn code_of_program(maps: &str, address: usize) -> Option<Range<usize>> {
    maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (low, high) = range.split_once('-')?;
        let range = usize::from_str_radix(low, 16).ok()?..usize::from_str_radix(high, 16).ok()?;
        (rest.starts_with("r-xp") && range.contains(&address)).then_some(range)
    })
}

/// Bytes of the mapping that begins there which are on huge pages.
fn huge_bytes(smaps: &str, address: usize) -> Option<usize> {
    let begins = format!("{address:x}-");
    let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&begins)).skip(1);
    let kib = lines.find_map(|line| line.strip_prefix("AnonHugePages:"))?.trim().strip_suffix(" kB")?;
    kib.trim().parse::<usize>().ok()?.checked_mul(1024)
}

/// Puts a copy of that memory, which holds code, in its place; `only_huge`: if most of the copy is on huge pages, for small ones of no file are worse than
/// what was: each fork copies their tables. Whether it did.
fn replace(code: &Range<usize>, only_huge: bool) -> io::Result<bool> {
    let len = code.len();
    let (rights, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: new memory, at an address of the host kernel's choice.
    let room = unsafe { libc::mmap(std::ptr::null_mut(), len + HUGE, rights, kind, -1, 0) };
    if room == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let copy = room.map_addr(|at| at.next_multiple_of(HUGE));
    let before = copy.addr() - room.addr();
    // SAFETY: all of it lies within the new memory, which nobody else knows. `code` is mapped and readable, and nobody writes to it.
    let ready = unsafe {
        libc::munmap(room, before);
        libc::munmap(copy.byte_add(len), HUGE - before);
        libc::madvise(copy, len, libc::MADV_HUGEPAGE);
        std::ptr::copy_nonoverlapping(code.start as *const u8, copy.cast(), len);
        checked(i64::from(libc::mprotect(copy, len, libc::PROT_READ | libc::PROT_EXEC)))
    };
    let is_worth_it = || {
        let smaps = if only_huge { std::fs::read_to_string("/proc/self/smaps")? } else { return Ok(true) };
        Ok(huge_bytes(&smaps, copy.addr()).is_some_and(|huge| huge > len / 2))
    };
    let moves = ready.and_then(|_| is_worth_it());
    if !matches!(moves, Ok(true)) {
        // SAFETY: as above; nobody has come to know it.
        unsafe { libc::munmap(copy, len) };
        return moves;
    }
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: the copy takes the place of the code in one step of the host kernel's, and each byte of it is as it was, those of this function too. What the
    // host kernel may refuse (its rules for executable memory, the number of mappings) it has refused before; short of memory for a page of tables in
    // the middle of it, it would leave a hole, in which this process would end, as it does wherever else memory lacks.
    match unsafe { libc::mremap(copy, len, len, flags, code.start as *mut libc::c_void) } {
        libc::MAP_FAILED => {
            let error = io::Error::last_os_error();
            // SAFETY: as above.
            unsafe { libc::munmap(copy, len) };
            Err(error)
        }
        _ => Ok(true),
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::wait::{WaitStatus, waitpid};

    use super::*;
    use crate::sys::namespace::{Forked, fork};
    use crate::sys::process::exit_now;

    #[test]
    fn the_code_of_a_program_is_where_its_functions_are() {
        let maps = "55e0000000-55e0600000 r--p 00000000 fd:00 1 /bin/x\n55e0600000-55e1600000 r-xp 00600000 fd:00 1 /bin/x\n\
                    7f0000000000-7f0000100000 r-xp 00000000 fd:00 2 /lib/y.so\n";
        assert_eq!(code_of_program(maps, 0x55_e070_0000), Some(0x55_e060_0000..0x55_e160_0000));
        assert_eq!(code_of_program(maps, 0x55_e010_0000), None, "data");
    }

    #[test]
    fn what_is_on_huge_pages_is_told_of_the_mapping_asked_for() {
        let smaps = "1000-2000 r-xp 0 0:0 0\nSize: 4 kB\nAnonHugePages:         0 kB\n\
                     400000-c00000 r-xp 0 0:0 0\nSize: 8192 kB\nAnonHugePages:      6144 kB\nTHPeligible: 1\n";
        assert_eq!(huge_bytes(smaps, 0x40_0000), Some(6 << 20));
        assert_eq!(huge_bytes(smaps, 0x1000), Some(0));
        assert_eq!(huge_bytes(smaps, 0x3000), None);
    }

    /// In a child of its own: all whole pages of the code of this very program, on huge ones or not.
    #[test]
    fn code_that_was_replaced_runs_on() {
        let maps = std::fs::read_to_string("/proc/self/maps").expect("readable");
        let code = code_of_program(&maps, code_that_was_replaced_runs_on as fn() as usize).expect("mapped");
        let whole = code.start.next_multiple_of(HUGE)..code.end / HUGE * HUGE;
        assert!(whole.len() >= HUGE);
        const REFUSED: i32 = 7;
        match fork().expect("forked") {
            Forked::Child => {
                let replaced = replace(&whole, false);
                if replaced.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied) {
                    exit_now(REFUSED);
                }
                let now = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
                let there = code_of_program(&now, whole.start).is_some_and(|there| there.len() >= whole.len());
                let of_no_file = now.lines().any(|line| {
                    line.starts_with(&format!("{:x}-", whole.start)) && line.split_ascii_whitespace().count() == 5
                });
                exit_now(i32::from(!(matches!(replaced, Ok(true)) && there && of_no_file)))
            }
            Forked::Parent(child) => match waitpid(child, None).expect("it is ours") {
                WaitStatus::Exited(_, REFUSED) => {
                    eprintln!("ignored, because this host lets nobody execute what was written");
                }
                ended => assert!(matches!(ended, WaitStatus::Exited(_, 0)), "{ended:?}"),
            },
        }
    }
}
