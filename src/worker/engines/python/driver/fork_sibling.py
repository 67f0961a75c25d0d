"""A fork that is the child of this process's parent, in one step.

A fork copies page tables, and the end of a process gives them back: for 200 MB some milliseconds each. Without this a process in
between has to be made and ended as well. Where the interpreter or the machine is another, `fork` says that it cannot.

What the C library does beside a fork is not needed here: there is one thread, which holds no lock of the library's.
"""
import os

_CLONE_PARENT, _SETTID, _CLEARTID, _SIGCHLD = 0x8000, 0x1000000, 0x200000, 17
_GET_TID_ADDRESS = 40
# Number of `clone`, and at which place it takes the address of the thread's number.
_CLONE = {"x86_64": (56, 3), "aarch64": (220, 4)}

_calls = None


def fork():
    """As `os.fork`, but the child is this process's sibling. `None`: that cannot be done here; nothing was."""
    global _calls
    if _calls is None:
        _calls = _find()
    if not _calls:
        return None
    number, at, long, by_reference, syscall, prctl, before, in_parent, in_child = _calls
    address, zero = long(0), long(0)
    # Where the C library keeps the number of this thread: in the child it is another.
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
    """What `ctypes` would have, without its closures: those need memory that can be written and executed."""
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
