//! SQLite's own Unix file layer, except that paths are used unchanged.
//!
//! The original layer resolves symbolic links textually before opening. `/proc/self/fd/N/engine.db`
//! would become the directory's path on the host, which a worker's init may be unable to traverse
//! (a parent of another owner, another mount namespace). With the unchanged path the kernel follows
//! the descriptor. The file itself must still be no link: SQLite opens with `O_NOFOLLOW`.

#![allow(unsafe_code, reason = "registering a VFS is a C interface")]

use std::ffi::{CStr, c_char, c_int};
use std::sync::OnceLock;

use rusqlite::ffi;

const NAME: &CStr = c"ryokan";

/// The name of the layer, for opening databases; registered at the first call. `None` if SQLite
/// could not be initialised.
pub fn name() -> Option<&'static CStr> {
    static REGISTERED: OnceLock<bool> = OnceLock::new();
    REGISTERED.get_or_init(register).then_some(NAME)
}

fn register() -> bool {
    // SAFETY: `sqlite3_vfs_find` initialises SQLite and returns null or a pointer to a VFS that
    // lives as long as the process.
    let original = unsafe { ffi::sqlite3_vfs_find(c"unix".as_ptr()) };
    if original.is_null() {
        return false;
    }
    // SAFETY: not null (above), and the table of a registered VFS does not change while SQLite is initialised. The copy's
    // functions are the original's own; those of the Unix layer look at `pAppData` only, which is copied with it.
    let mut vfs = unsafe { std::ptr::read(original) };
    vfs.zName = NAME.as_ptr();
    vfs.pNext = std::ptr::null_mut();
    vfs.xFullPathname = Some(as_given);
    // SAFETY: leaked, so the pointer is valid for the rest of the process, as SQLite demands; 0: not the default VFS.
    unsafe { ffi::sqlite3_vfs_register(Box::into_raw(Box::new(vfs)), 0) == ffi::SQLITE_OK }
}

/// `xFullPathname`: copies an absolute path; refuses a relative one, which could change its meaning.
extern "C" fn as_given(_: *mut ffi::sqlite3_vfs, path: *const c_char, room: c_int, out: *mut c_char) -> c_int {
    // SAFETY: SQLite passes a NUL-terminated path.
    let bytes = unsafe { CStr::from_ptr(path) }.to_bytes_with_nul();
    let fits = usize::try_from(room).is_ok_and(|room| bytes.len() <= room);
    if !fits || bytes[0] != b'/' {
        return ffi::SQLITE_CANTOPEN;
    }
    // SAFETY: `out` has `room` bytes, at least as many as are copied, and does not overlap `path`.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), out, bytes.len()) };
    ffi::SQLITE_OK
}
