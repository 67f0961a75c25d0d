"""Interrupts: decides when SIGINT becomes KeyboardInterrupt.

Owns the SIGINT handler. The gate is open only while user code runs; a frame that is being sent or received holds the
interrupt back until it is whole. Never raises while the gate is closed: an interrupt between executions is ignored.

    closed ──enter──▶ open ──SIGINT──▶ KeyboardInterrupt in user code
                       │ hold ──SIGINT──▶ pending ──release──▶ KeyboardInterrupt
"""
import _signal  # `signal` would load `enum`
from _thread import get_ident
from time import perf_counter

is_open = False
held = 0
pending = False
main_thread = get_ident()
_raised_at = 0.0
# Two interrupts within this time are one: the second would hit the code that handles the first.
_ONE_S = 0.001


def _on_sigint(signum, frame):
    global pending, _raised_at
    if not is_open:
        return
    if held:
        pending = True
        return
    now = perf_counter()
    if now - _raised_at < _ONE_S:
        return
    _raised_at = now
    raise KeyboardInterrupt


def install():
    """Puts the handler back, whatever user code did to it."""
    if _signal.getsignal(2) is not _on_sigint:
        _signal.signal(2, _on_sigint)


def guard(function, *args):
    """Runs user code with the gate open. Returns (result, None) or (None, exception): nothing gets past it."""
    global is_open, pending, held
    result, error = None, None
    try:
        try:
            pending = False
            held = 0
            is_open = True
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
    """Holds interrupts back; only the main thread gets any."""
    global held
    if get_ident() == main_thread:
        held += 1


def release():
    """Lets interrupts through again and raises the one that came meanwhile."""
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
