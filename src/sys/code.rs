//! A program's own code on huge pages: whoever comes to it after others had the processor has fewer translations to look up, which in a virtual
//! machine are dear, and what is forked finds all of it mapped.
//!
//! Files are mapped in pages of 4 KiB on most host kernels, so the code is copied to memory of huge pages, which is put in its place: what JavaScript
//! engines and browsers do. It costs that much memory once, for all forks together. Profilers and debuggers see code of no file.

use std::io;
use std::ops::Range;

use super::checked;

/// A huge page, bytes: that of x86-64, and of aarch64 with small pages of 4 KiB. Where huge pages are larger, nothing is gained.
const HUGE: usize = 2 << 20;
/// Programs with more code than this are left as they are: those that are not optimised.
const MOST: usize = 32 << 20;

/// Puts the code of this program, as far as it fills huge pages, on such. Gives how many bytes that is: 0 where the host kernel gives none, and for
/// programs with very much code. For a process of one thread, before it forks.
///
/// # Errors
/// What the host kernel refuses; the code is where it was then.
pub fn on_huge_pages() -> io::Result<usize> {
    let given = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    if !given.contains("[always]") && !given.contains("[madvise]") {
        return Ok(0);
    }
    let this = on_huge_pages as fn() -> io::Result<usize>;
    let Some(code) = code_of_program(&std::fs::read_to_string("/proc/self/maps")?, this as usize) else {
        return Ok(0);
    };
    let whole = code.start.next_multiple_of(HUGE)..code.end / HUGE * HUGE;
    if whole.is_empty() || code.len() > MOST {
        return Ok(0);
    }
    replace(&whole)?;
    Ok(whole.len())
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

/// Puts a copy of that memory, which holds code, in its place.
fn replace(code: &Range<usize>) -> io::Result<()> {
    let len = code.len();
    let (rights, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: new memory, at an address of the host kernel's choice.
    let room = unsafe { libc::mmap(std::ptr::null_mut(), len + HUGE, rights, kind, -1, 0) };
    if room == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let copy = room.map_addr(|at| at.next_multiple_of(HUGE));
    let before = copy.addr() - room.addr();
    // SAFETY: all of it lies within the new memory, which nobody else knows. `code` is mapped and readable, and nobody writes to it. The copy takes its
    // place in one step of the host kernel's, and each byte of it is as it was, those of this function too.
    unsafe {
        libc::munmap(room, before);
        libc::munmap(copy.byte_add(len), HUGE - before);
        libc::madvise(copy, len, libc::MADV_HUGEPAGE);
        std::ptr::copy_nonoverlapping(code.start as *const u8, copy.cast(), len);
        let place = code.start as *mut libc::c_void;
        let moved = checked(i64::from(libc::mprotect(copy, len, libc::PROT_READ | libc::PROT_EXEC))).and_then(|_| {
            match libc::mremap(copy, len, len, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED, place) {
                libc::MAP_FAILED => Err(io::Error::last_os_error()),
                _ => Ok(()),
            }
        });
        if moved.is_err() {
            libc::munmap(copy, len);
        }
        moved
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_code_of_a_program_is_where_its_functions_are() {
        let maps = "55e0000000-55e0600000 r--p 00000000 fd:00 1 /bin/x\n55e0600000-55e1600000 r-xp 00600000 fd:00 1 /bin/x\n\
                    7f0000000000-7f0000100000 r-xp 00000000 fd:00 2 /lib/y.so\n";
        assert_eq!(code_of_program(maps, 0x55_e070_0000), Some(0x55_e060_0000..0x55_e160_0000));
        assert_eq!(code_of_program(maps, 0x55_e010_0000), None, "data");
    }

    /// In a child of its own: of all the code of this very program.
    #[test]
    fn code_that_was_replaced_runs_on() {
        let maps = std::fs::read_to_string("/proc/self/maps").expect("readable");
        let code = code_of_program(&maps, code_that_was_replaced_runs_on as fn() as usize).expect("mapped");
        let whole = code.start.next_multiple_of(HUGE)..code.end / HUGE * HUGE;
        assert!(whole.len() >= HUGE);
        match crate::sys::namespace::fork().expect("forked") {
            crate::sys::namespace::Forked::Child => {
                let replaced = replace(&whole).is_ok();
                let now = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
                let there = code_of_program(&now, whole.start).is_some_and(|there| there.len() >= whole.len());
                let of_no_file = now.lines().any(|line| {
                    line.starts_with(&format!("{:x}-", whole.start)) && line.split_ascii_whitespace().count() == 5
                });
                super::super::process::exit_now(i32::from(!(replaced && there && of_no_file)))
            }
            crate::sys::namespace::Forked::Parent(child) => {
                let ended = nix::sys::wait::waitpid(child, None).expect("it is ours");
                assert!(matches!(ended, nix::sys::wait::WaitStatus::Exited(_, 0)), "{ended:?}");
            }
        }
    }
}
