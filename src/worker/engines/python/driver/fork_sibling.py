"""A fork whose child belongs to this process's parent, in one step.

A fork copies page tables, and a process's exit frees them: some milliseconds each for 200 MB. Otherwise an intermediate
process would have to be created and ended, too. On another interpreter or machine `fork` reports that it is unsupported.

The C library's own work around a fork is not needed: there is one thread, which holds none of the library's locks.
"""
import os

_CLONE_PARENT, _SETTID, _CLEARTID, _SIGCHLD = 0x8000, 0x1000000, 0x200000, 17
_GET_TID_ADDRESS = 40
# Number of `clone`, and the position of its argument for the thread id's address.
_CLONE = {"x86_64": (56, 3), "aarch64": (220, 4)}

_calls = None


def fork():
    """As `os.fork`, but the child is a sibling. `None`: not supported here, nothing happened."""
    global _calls
    if _calls is None:
        _calls = _find()
    if not _calls:
        return None
    number, at, long, by_reference, syscall, prctl, before, in_parent, in_child = _calls
    address, zero = long(0), long(0)
    # Where the C library stores this thread's id: the child's copy must hold its own.
    if prctl(long(_GET_TID_ADDRESS), by_reference(address), zero, zero, zero) != 0 or not address.value:
        return None
    arguments = [long(_CLONE_PARENT | _SETTID | _CLEARTID | _SIGCHLD), zero, zero, zero, zero]
    arguments[at] = address
    wanted = long(number)
    before()
    pid = syscall(wanted, *arguments)
    if pid == 0:
        in_child()
        return 0
    in_parent()
    return pid if pid > 0 else None


def _find():
    """The parts of `ctypes` without its closures, which need memory that is writable and executable."""
    try:
        import _ctypes

        number, at = _CLONE[os.uname().machine]

        class Long(_ctypes._SimpleCData):
            _type_ = "l"

        flags = _ctypes.FUNCFLAG_CDECL | _ctypes.FUNCFLAG_PYTHONAPI

        class Number(_ctypes.CFuncPtr):
            _flags_, _restype_ = flags, Long

        class Nothing(_ctypes.CFuncPtr):
            _flags_, _restype_ = flags, None

        library = _ctypes.dlopen(None, 0)
        numbers = [Number(_ctypes.dlsym(library, name)) for name in ("syscall", "prctl")]
        hooks = ("PyOS_BeforeFork", "PyOS_AfterFork_Parent", "PyOS_AfterFork_Child")
        nothings = [Nothing(_ctypes.dlsym(library, name)) for name in hooks]
        return (number, at, Long, _ctypes.byref, *numbers, *nothings)
    except Exception:
        return ()
