"""Interrupts: decides when SIGINT becomes KeyboardInterrupt.

Owns the SIGINT handler. The gate is open only while user code runs; a frame that is being sent or received holds the
interrupt back until it is whole. Never raises while the gate is closed: an interrupt between executions is ignored.

    closed ──arm──▶ armed ──guard──▶ open ──SIGINT──▶ KeyboardInterrupt in user code
       │ early        │ pending         │ hold ──SIGINT──▶ pending ──release──▶ KeyboardInterrupt

Closed: init interrupts an execution that it has sent. If a frame has arrived, the interrupt is for that one (early);
otherwise its execution has ended and it is ignored. Armed: an execution was accepted but its code does not run yet; an
interrupt takes effect as soon as the code starts.
"""
import _signal  # `signal` would load `enum`
import sys
from _thread import get_ident
from time import perf_counter

is_open = armed = False
early = False
received = False
_FOR_RECEIVED, _FOR_UNREAD = 1, 2


def has_unread():
    """Whether the control socket has unread bytes; set by `wire`."""
    return False


held = 0
pending = False
main_thread = get_ident()
_raised_at = 0.0
# Two interrupts within this time count as one: the second would hit the handler of the first.
_ONE_S = 0.001


def _on_sigint(signum, frame):
    global pending, early, _raised_at
    if not is_open:
        if armed:
            pending = True
        else:
            early = _FOR_UNREAD if has_unread() else _FOR_RECEIVED if received else False
        return
    if held:
        pending = True
        return
    now = perf_counter()
    if now - _raised_at < _ONE_S:
        return
    _raised_at = now
    raise KeyboardInterrupt


def _on_unraisable(unraisable):
    """Raises an interrupt again at the next line outside of a `__del__` or weak reference callback, where the
    interpreter swallows it."""
    if unraisable.exc_type is KeyboardInterrupt and is_open and get_ident() == main_thread and not sys.gettrace():
        sys._getframe(1).f_trace = _raise_again
        sys.settrace(_raise_again)
    else:
        sys.__unraisablehook__(unraisable)


def _raise_again(frame, event, argument):
    global pending, _raised_at
    sys.settrace(None)
    frame.f_trace = None
    if is_open and held:
        pending = True
    elif is_open:
        _raised_at = perf_counter()
        raise KeyboardInterrupt


def install():
    """Restores the signal handlers after user code changed them."""
    if _signal.getsignal(2) is not _on_sigint:
        _signal.signal(2, _on_sigint)
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _on_unraisable


def arm():
    """Starts an execution: interrupts are now meant for it."""
    global armed, pending, early
    armed = True
    pending, early = bool(early), False


def between():
    """A frame was handled, and with it an interrupt that arrived too late."""
    global early, received
    received = False
    if early is not _FOR_UNREAD:
        early = False


def disarm():
    """The execution's code has ended."""
    global armed, pending
    armed = pending = False
    if sys.gettrace() is _raise_again:
        sys.settrace(None)


def guard(function, *args):
    """Runs user code with the gate open. Returns (result, None) or (None, exception); catches everything."""
    global is_open, pending, held
    if is_open:  # nested, as in a failed save: the gate stays open for the code around it
        try:
            return function(*args), None
        except BaseException as caught:
            return None, caught
    result, error = None, None
    try:
        try:
            held = 0
            is_open = True
            if pending:
                pending = False
                raise KeyboardInterrupt
            result = function(*args)
            is_open = False
        except BaseException as caught:
            is_open = False
            error = caught
    except BaseException as caught:  # a second interrupt, between the first and the closing of the gate
        is_open = False
        error = caught
    return result, error


def hold():
    """Holds interrupts back; only the main thread receives any."""
    global held
    if get_ident() == main_thread:
        held += 1


def release():
    """Allows interrupts again and raises a pending one."""
    global held, pending, _raised_at
    if get_ident() == main_thread:
        held -= 1
        if pending and not held:
            pending = False
            if is_open:
                _raised_at = perf_counter()
                raise KeyboardInterrupt


def after_fork():
    """A child's only thread is its main one."""
    global main_thread, held
    main_thread = get_ident()
    held = 0
