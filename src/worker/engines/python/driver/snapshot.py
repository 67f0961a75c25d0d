"""Copies: at init's word this process forks a copy of itself. It stands still until init wakes it, and then is the engine.

    engine ── fork ──▶ copy: its own control socket, descriptors of its own (see held), then waits
       └── reply, once the copy stands

A copy is init's child, so that no `wait` of the code's meets it: forked as a sibling, or by a process in between that ends.

The engine does nothing meanwhile, so a copy is of one moment. Whatever goes wrong in a copy ends it: it never comes back
into the engine's loop but by being woken. Imported with the first request.
"""
import _signal
import os
import sys

from _ryokan import brief, execute, fork_sibling, gate, jobs, snapshot_fds, state, wire

_EVERY = _signal.valid_signals()
_TIMERS = (_signal.ITIMER_REAL, _signal.ITIMER_VIRTUAL, _signal.ITIMER_PROF)


def keep(frame, tail):
    """Makes a copy. Returns in the engine, and in the copy once it is the engine."""
    number = wire.number(frame, "id")
    if not wire.descriptors:
        raise wire.Malformed("a copy is wanted, but no socket for it came along")
    link = wire.descriptors.pop(0)
    why, engine = _in_the_way(), os.getpid()
    if why is None:
        try:
            why = _fork(number, link, engine)
        except BaseException as error:  # of a handler or a hook of the code's
            if os.getpid() != engine:
                os._exit(1)
            why = f"{type(error).__name__} while it was made: {brief.cut(str(error), 200)}"
    if why is _WOKEN:
        return
    os.close(link)
    if why is None:
        wire.send({"ev": "reply", "id": number, "ok": True})
    else:
        wire.send({"ev": "reply", "id": number, "ok": False, "code": "refused", "message": why})


_WOKEN = "woken"


def _in_the_way():
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"{threads} threads run, and a copy would have one of them only"
    return None


def _fork(number, link, engine):
    """`None`: the copy stands; `_WOKEN`, in the copy: it is the engine now; anything else: why there is none."""
    wire.flush()
    kept = _Kept()
    told, tell = os.pipe()
    execute.copying = True
    try:
        copied = _split()
    except OSError as error:
        return f"no process for it: {error.strerror}"
    finally:
        if os.getpid() == engine:
            execute.copying = False
            os.close(tell)
            # Nothing is done here before the copy's descriptors are its own; if it ends first, so does this.
            said = os.read(told, 256)
            os.close(told)
    if not copied:
        return None if said == b"!" else said.decode(errors="replace") or "it ended before it stood"
    try:
        os.close(told)
        execute.copying = False
        _stand(number, link, tell, engine, kept)
    except BaseException as error:
        try:  # while nobody relies on it yet, why; later nobody listens any more
            os.write(tell, f"{type(error).__name__} before it stood: {error}"[:200].encode(errors="replace"))
        except OSError:
            pass
        os._exit(1)
    return _WOKEN


def _split():
    """True in the copy. It is a child of this process's parent, or becomes one."""
    forked = fork_sibling.fork()
    if forked is not None:
        return forked == 0
    between = os.fork()
    if between:
        try:
            os.waitpid(between, 0)
        except ChildProcessError:  # the code has its children collected by others
            pass
        return False
    try:
        if os.fork() == 0:
            return True
    except BaseException:
        os._exit(1)
    os._exit(0)


class _Kept:
    """What a fork changes: `random` seeds itself again, and timers do not come along."""

    def __init__(self):
        random = sys.modules.get("random")
        self.random = random.getstate() if hasattr(random, "getstate") else None
        self.timers = [(which, _signal.getitimer(which)) for which in _TIMERS]

    def put_back(self):
        if self.random is not None:
            sys.modules["random"].setstate(self.random)

    def wind(self):
        for which, (delay, interval) in self.timers:
            if delay or interval:
                _signal.setitimer(which, delay, interval)


def _stand(number, link, tell, engine, kept):
    """The copy, until it is woken."""
    os.setpgid(0, 0)
    wire.adopt(link)
    gate.after_fork()
    kept.put_back()
    snapshot_fds.detach({tell, wire.fileno()}, engine)
    mask = _signal.pthread_sigmask(_signal.SIG_BLOCK, _EVERY)
    wire.send({"ev": "reply", "id": number, "ok": True})
    os.write(tell, b"!")
    os.close(tell)
    frame, _ = wire.receive()  # its end ends this process
    if frame.get("op") != "wake":
        raise wire.Malformed("something else than to wake")
    missed = snapshot_fds.attach()
    # Sent to a process that stood still: meant for nobody.
    while _signal.sigtimedwait(_EVERY, 0) is not None:
        pass
    kept.wind()
    wire.send({"ev": "reply", "id": wire.number(frame, "id"), "ok": True, "missed": missed})
    jobs.forget()
    state.tell_again()
    wire.flush()
    _signal.pthread_sigmask(_signal.SIG_SETMASK, mask)
