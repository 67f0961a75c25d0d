"""The engine's process: start, main loop, end.

One thread. Frames are read here between executions (dynamic tools read while one runs). Imports little before `ready`, because a
worker waits for it; the rest loads while init reads that.
"""
import os
import sys

from _ryokan import gate, streams, wire

_STATUS_MALFORMED = 70


def start():
    """Takes over the process and serves until the socket ends."""
    gate.install()
    wire.open_socket()
    streams.install()
    os.environ.setdefault("MPLBACKEND", "agg")
    space = sys.modules["__main__"].__dict__
    for name in [name for name in space if not (name.startswith("__") and name.endswith("__"))]:
        del space[name]
    space["__doc__"] = None
    sys.argv[:] = [""]
    sys.path.insert(0, "")
    version = "%d.%d.%d" % sys.version_info[:3]
    wire.send({"ev": "ready", "engine": "python", "version": version, "interrupt": "signal"})
    try:
        _serve(_prepare())
    except wire.Gone:
        leave(0)
    except wire.Malformed as error:
        streams.write_err(f"ryokan python engine: malformed frame: {error}\n")
        os._exit(_STATUS_MALFORMED)


def _prepare():
    """Loads the other modules and installs the builtins. Returns the request handlers."""
    global jobs
    import builtins

    from _ryokan import answers, dynamic, execute, jobs, rich, settings, shell

    for name, obj in (
        ("display", rich.display),
        ("tools", dynamic.tools),
        ("ToolError", dynamic.ToolError),
        ("StdinNotGiven", streams.StdinNotGiven),
    ):
        setattr(builtins, name, obj)
    settings.install()
    shell.install()
    os.register_at_fork(after_in_child=execute.in_child)
    import gc

    gc.collect()
    gc.freeze()  # collections skip the driver
    return {
        "exec": execute.execute,
        "call": execute.call,
        "shutdown": lambda frame, tail: leave(0),
        **answers.HANDLERS,
    }


def _serve(handlers):
    while True:
        if jobs.known() and not wire.buffered():
            _watch_jobs()
        gate.between()
        frame, tail = wire.receive()
        op = frame.get("op")
        handler = handlers.get(op) if type(op) is str else None
        if handler is None:
            raise wire.Malformed(f"unknown request {str(op)[:60]!r}")
        handler(frame, tail)


def _watch_jobs():
    """Waits for a request; meanwhile reports ended background jobs."""
    import select

    poll = select.poll()
    poll.register(wire.fileno(), select.POLLIN)
    while jobs.known() and not poll.poll(250):
        jobs.report()
        wire.flush()


def leave(status):
    """Ends background jobs and the process, regardless of threads and exit handlers."""
    import _signal

    _signal.signal(_signal.SIGALRM, lambda *_: os._exit(status))
    _signal.setitimer(_signal.ITIMER_REAL, 1.6)
    try:
        jobs.end_all()
        atexit = sys.modules.get("atexit")
        if atexit is not None:
            _signal.setitimer(_signal.ITIMER_REAL, 0.4)
            atexit._run_exitfuncs()
        streams.flush()
    except BaseException:
        pass
    os._exit(status)
