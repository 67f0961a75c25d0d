"""Background jobs: child processes and non-daemon threads that outlive their execution.

Observes and reports them; ends them at shutdown. Costs one system call when there are none.
"""
import os
import sys
from _thread import _count

from _ryokan import brief, wire

_known = []
_threads_known = False


def any_threads():
    """Whether user threads run."""
    return _count() > 0


def report():
    """Posts a `jobs` event if the list changed, or whether threads run, daemon ones too."""
    global _known, _threads_known
    now, threads = _children() + _threads(), any_threads()
    if now != _known or threads != _threads_known:
        _known, _threads_known = now, threads
        wire.post({"ev": "jobs", "jobs": now, **({"threads": True} if threads else {})})


def forget():
    """Clears the list: the running processes were never this process's children."""
    global _known, _threads_known
    _known, _threads_known = [], False
    wire.post({"ev": "jobs", "jobs": []})


def known():
    """Whether any job ran at the last look."""
    return bool(_known)


def _children():
    if not _has_children():
        return []
    found = []
    for pid in _pids():
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                if file.read().rsplit(b")", 1)[1].split()[0] in (b"Z", b"X"):
                    continue
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                command = file.read(4096)
            if not command:
                # An exiting process loses its memory, and with it these two, a moment before it is a zombie.
                os.readlink(f"/proc/{pid}/exe")
        except (OSError, IndexError):
            continue
        text = command.rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace")
        found.append({"id": str(pid), "command": brief.cut(text, 200)})
    return found


def _has_children():
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return True
    except OSError:
        return False


def _pids():
    pids = set()
    try:
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/children", "rb") as file:
                pids.update(int(pid) for pid in file.read().split())
    except (OSError, ValueError):
        pids.update(_pids_by_parent())
    return sorted(pids)


def _pids_by_parent():
    """For host kernels without the `children` files."""
    own = str(os.getpid()).encode()
    try:
        listed = [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return
    for name in listed:
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                if file.read().rsplit(b")", 1)[1].split()[1] == own:
                    yield int(name)
        except (OSError, IndexError):
            continue


def _threads():
    threading = sys.modules.get("threading")
    if threading is None or not _count():
        return []
    main = threading.main_thread()
    return [
        {"id": f"thread-{thread.ident}", "command": brief.cut(f"thread {thread.name}", 200)}
        for thread in threading.enumerate()
        if thread is not main and not thread.daemon and thread.is_alive()
    ]


def end_all():
    """Terminates child processes; kills them after a second."""
    import time

    for number, patience_s in ((15, 1.0), (9, 0.2)):
        pids = [int(job["id"]) for job in _children()]
        for pid in pids:
            try:
                os.kill(pid, number)
            except OSError:
                pass
        until = time.monotonic() + patience_s
        while pids and time.monotonic() < until:
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except OSError:
                return
            time.sleep(0.01)
