"""Forked snapshots: on init's request this process forks a copy of itself, which waits until init wakes it as the engine.

    engine ── fork ──▶ snapshot: its own control socket and descriptors (see snapshot_fds), waiting
       └── reply, once the snapshot is ready

A snapshot is a child of init, so no `wait` of the code sees it: forked as a sibling, or by an intermediate process that exits.

The engine waits meanwhile, so a snapshot shows a single moment. Any failure in a snapshot ends it: it returns into the
engine's loop only by being woken. Imported with the first request.
"""
import _signal
import os
import sys

from _ryokan import brief, execute, fork_sibling, gate, jobs, snapshot_fds, state, wire

_EVERY = _signal.valid_signals()
_TIMERS = (_signal.ITIMER_REAL, _signal.ITIMER_VIRTUAL, _signal.ITIMER_PROF)


def keep(frame, tail):
    """Forks a snapshot. Returns in the engine, and in the snapshot once it is the engine."""
    number = wire.number(frame, "id")
    if not wire.descriptors:
        raise wire.Malformed("a snapshot was requested without a socket")
    link = wire.descriptors.pop(0)
    why, engine = _in_the_way(), os.getpid()
    if why is None:
        try:
            why = _fork(number, link, engine)
        except BaseException as error:  # from a handler or hook of the code
            if os.getpid() != engine:
                os._exit(1)
            why = f"{type(error).__name__} while forking: {brief.cut(str(error), 200)}"
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
        return f"{threads} threads run, and a snapshot would have only one of them"
    return None


def _fork(number, link, engine):
    """`None`: the snapshot is ready; `_WOKEN`, in the snapshot: it is the engine; else the failure."""
    wire.flush()
    losses = _ForkLosses()
    told, tell = os.pipe()
    execute.copying = True
    try:
        copied = _split()
    except OSError as error:
        return f"cannot fork: {error.strerror}"
    finally:
        if os.getpid() == engine:
            execute.copying = False
            os.close(tell)
            # Wait until the snapshot has its own descriptors, or has ended.
            said = os.read(told, 256)
            os.close(told)
    if not copied:
        return None if said == b"!" else said.decode(errors="replace") or "it ended before it was ready"
    try:
        os.close(told)
        execute.copying = False
        _wait(number, link, tell, engine, losses)
    except BaseException as error:
        try:  # the engine waits for the reason; after the snapshot is ready nothing reads it
            os.write(tell, f"{type(error).__name__} before it was ready: {error}"[:200].encode(errors="replace"))
        except OSError:
            pass
        os._exit(1)
    return _WOKEN


def _split():
    """True in the snapshot, which is or becomes a child of this process's parent."""
    forked = fork_sibling.fork()
    if forked is not None:
        return forked == 0
    between = os.fork()
    if between:
        try:
            os.waitpid(between, 0)
        except ChildProcessError:  # the code has its children reaped elsewhere
            pass
        return False
    try:
        if os.fork() == 0:
            return True
    except BaseException:
        os._exit(1)
    os._exit(0)


class _ForkLosses:
    """State lost in a fork: `random` reseeds itself, and timers are not inherited."""

    def __init__(self):
        random = sys.modules.get("random")
        self.random = random.getstate() if hasattr(random, "getstate") else None
        self.timers = [(which, _signal.getitimer(which)) for which in _TIMERS]

    def restore_random(self):
        if self.random is not None:
            sys.modules["random"].setstate(self.random)

    def restart_timers(self):
        for which, (delay, interval) in self.timers:
            if delay or interval:
                _signal.setitimer(which, delay, interval)


def _wait(number, link, tell, engine, losses):
    """The snapshot's life until it is woken."""
    os.setpgid(0, 0)
    wire.adopt(link)
    gate.after_fork()
    losses.restore_random()
    snapshot_fds.detach({tell, wire.fileno()}, engine)
    mask = _signal.pthread_sigmask(_signal.SIG_BLOCK, _EVERY)
    wire.send({"ev": "reply", "id": number, "ok": True})
    os.write(tell, b"!")
    os.close(tell)
    frame, _ = wire.receive()  # the end of the socket ends this process
    if frame.get("op") != "wake":
        raise wire.Malformed("a request other than wake")
    missed = snapshot_fds.attach()
    # Signals sent to the waiting process were meant for the engine.
    while _signal.sigtimedwait(_EVERY, 0) is not None:
        pass
    losses.restart_timers()
    wire.send({"ev": "reply", "id": wire.number(frame, "id"), "ok": True, "missed": missed})
    jobs.forget()
    state.report_again()
    wire.flush()
    _signal.pthread_sigmask(_signal.SIG_SETMASK, mask)
