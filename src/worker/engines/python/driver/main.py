"""The engine's main loop: takes requests, answers them.

Owns the order of things: an execution's output is flushed, then its state changes are posted, then `end`. One thread;
frames are read here only between executions (dynamic tools read while one runs).
"""
import builtins
import os
import sys
import time

from _ryokan import brief, dynamic, gate, jobs, rich, run, streams, trace, values, wire

_LAZY = ("effects", "privacy", "definitions", "functions", "settings", "state")
_STATUS_MALFORMED = 70
_forked = False


def start():
    """Takes the process over and serves until the socket ends."""
    os.environ.setdefault("MPLBACKEND", "agg")
    gate.install()
    wire.open_socket()
    streams.install()
    os.register_at_fork(after_in_child=_in_child)
    space = run.namespace
    for name in [name for name in space if not (name.startswith("__") and name.endswith("__"))]:
        del space[name]
    space["__doc__"] = None
    sys.argv[:] = [""]
    sys.path.insert(0, "")
    for name, obj in (
        ("display", rich.display),
        ("tools", dynamic.tools),
        ("ToolError", dynamic.ToolError),
        ("StdinNotGiven", streams.StdinNotGiven),
    ):
        setattr(builtins, name, obj)
    version = "%d.%d.%d" % sys.version_info[:3]
    wire.send({"ev": "ready", "engine": "python", "version": version, "interrupt": "signal"})
    _warm()
    try:
        _serve()
    except wire.Gone:
        _leave(0)
    except wire.Malformed as error:
        streams.write_err(f"ryokan python engine: malformed frame: {error}\n")
        os._exit(_STATUS_MALFORMED)


def _in_child():
    """In a child of os.fork(): it runs on with user code, but never speaks and never serves."""
    global _forked
    _forked = True
    wire.forget()
    gate.after_fork()
    rich.current_exec = None


def _warm():
    """What an execution needs, loaded while init is busy with `ready`."""
    global effects, definitions, state, settings
    from _ryokan import effects, definitions, settings, state

    settings.install()
    import gc

    gc.collect()
    gc.freeze()


def _serve():
    while True:
        if jobs.known() and not wire.buffered():
            _watch_jobs()
        frame, tail = wire.receive()
        op = frame.get("op")
        if op == "exec":
            _exec(frame)
            continue
        handler = _HANDLERS.get(op) if type(op) is str else None
        if handler is None:
            raise wire.Malformed(f"unknown request {brief.line(op, 60)}")
        handler(frame, tail)


def _watch_jobs():
    """Waits for a request, telling meanwhile when background jobs end."""
    import select

    poll = select.poll()
    poll.register(wire.fileno(), select.POLLIN)
    while jobs.known() and not poll.poll(250):
        jobs.report()
        wire.flush()


def _number(frame, name):
    number = frame.get(name)
    if type(number) is not int:
        raise wire.Malformed(f"{name} is no number")
    return number


class _Setting:
    """What holds for one execution: environment, standard input, streams, the interrupt handler."""

    def __init__(self, frame):
        self.exec_id = _number(frame, "exec")
        self.env = frame.get("env") or ()
        self.has_input = frame.get("stdin") is True and bool(wire.descriptors)

    def __enter__(self):
        gate.install()
        streams.renew()
        if self.has_input:
            streams.give_input(wire.descriptors.pop(0))
        if wire.descriptors:
            wire.close_descriptors()
        if self.env:
            self.was = {}
            for name, value in self.env:
                try:
                    self.was[name] = os.environ.get(name)
                    os.environ[name] = value
                except ValueError:  # a NUL or `=` in the name
                    self.was.pop(name, None)
        rich.current_exec = self.exec_id

    def __exit__(self, *_):
        rich.current_exec = None
        if _forked:
            return
        gate.install()
        dynamic.settle()
        streams.flush()
        if self.has_input:
            streams.take_input()
        for name, value in self.env:
            if name in self.was and os.environ.get(name) == value:  # else the code set it: its change stays
                if self.was[name] is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = self.was[name]
        if sys.getrecursionlimit() < 500:
            sys.setrecursionlimit(500)


def _exec(frame):
    number, code = _number(frame, "id"), frame.get("code")
    if type(code) is not str:
        raise wire.Malformed("exec without code")
    happened = None
    with _Setting(frame) as _:
        exec_id = rich.current_exec
        name = trace.file_name(exec_id)
        trace.remember(name, code)
        program, error = gate.guard(run.compile_program, code, name)
        if error is None:
            codes = program.codes()
            happened = effects.of_program(codes, run.namespace)
            if not happened.trivial:
                nested = any(type(const) is _CODE for each in codes for const in each.co_consts)
                definitions.note(program.tree, name, run.future_flags, nested)
            outcome = run.perform(program)
        elif isinstance(error, KeyboardInterrupt):
            outcome = run.failure(error)
        else:
            outcome = run.refusal(error)
    error = program = None
    _end(number, exec_id, outcome, happened)


_CODE = type(_exec.__code__)


def _call(frame, tail):
    number, name = _number(frame, "id"), frame.get("name")
    happened = None
    with _Setting(frame):
        exec_id = rich.current_exec
        try:
            function = _resolve(name)
            args = values.decode(frame.get("args"))
            named = args if type(args) is dict else {}
            positional = args if type(args) is list else []
            if args is not None and type(args) not in (dict, list):
                raise LookupError("arguments are an object (named) or an array (positional)")
        except (LookupError, values.BadValue) as error:
            streams.write_err(f"{error.args[0]}\n")
            outcome = run.Outcome("refused", 1, str(error.args[0]))
        else:
            happened = effects.of_call()
            outcome = run.perform_call(function, positional, named)
            function = args = named = positional = None
    _end(number, exec_id, outcome, happened)


def _resolve(name):
    """A callable of `__main__`, or `module.function` of one that can be imported."""
    found = None
    if type(name) is str and name:
        first, *rest = name.split(".")
        found = run.namespace.get(first)
        if found is None and rest:
            import importlib

            found, _ = gate.guard(importlib.import_module, ".".join([first] + rest[:-1]))
            rest = rest[-1:]
        for part in rest:
            found, _ = gate.guard(getattr, found, part)
    if not callable(found):
        raise LookupError(f"there is no function {brief.line(name, 100)} to call; define it first, or use module.function")
    return found


def _end(number, exec_id, outcome, happened):
    if _forked:
        os._exit(outcome.code & 0xFF)
    if happened is not None:
        state.after(happened)
        if not happened.trivial or jobs.known():
            jobs.report()
    end = {
        "ev": "end",
        "id": number,
        "exec": exec_id,
        "status": outcome.status,
        "code": outcome.code,
        "err": outcome.err,
    }
    if outcome.has_value:
        end["value"] = outcome.value
    if outcome.text is not None:
        node = {"name": "", "type": "text", "text": outcome.text, "cells": [], "children": []}
        end["output"] = {"headers": [], "root": [node]}
    wire.send(end)


def _reply(number, **fields):
    wire.send({"ev": "reply", "id": number, "ok": True, **fields})


def _fail(number, code, message, hint=""):
    wire.send({"ev": "reply", "id": number, "ok": False, "code": code, "message": message, "hint": hint})


def _answer(number, function, *args):
    """Replies with what a function returns; a defect in it is an answer too, not an end."""
    gate.install()
    fields, error = gate.guard(function, *args)
    if error is None:
        _reply(number, **fields)
    else:
        _fail(number, "internal", brief.cut(f"{type(error).__name__}: {error}", 400))


def _interrupt(frame, tail):
    """Comes as a signal to this engine."""


def _get(frame, tail):
    number, name = _number(frame, "id"), frame.get("name")
    if type(name) is not str or name not in run.namespace:
        hint = "list the variables to see what there is"
        return _fail(number, "notFound", f"there is no variable {brief.line(name, 100)}", hint)
    value, error = gate.guard(values.encode, run.namespace[name])
    if isinstance(error, values.TooLarge):
        hint = "write it to a file or a blob and pass the reference, or get a part of it"
        return _fail(number, "invalidArgument", f"{name} is beyond {values.BYTES_MAX} bytes as a value", hint)
    if error is not None:
        return _fail(number, "internal", brief.cut(f"{type(error).__name__}: {error}", 400))
    _reply(number, value=value)


def _set(frame, tail):
    import keyword

    number, name = _number(frame, "id"), frame.get("name")
    if type(name) is not str or not name.isidentifier() or keyword.iskeyword(name) or name.startswith("__"):
        return _fail(number, "invalidArgument", f"{brief.line(name, 100)} is no variable name", "use letters, digits, _")
    try:
        run.namespace[name] = values.decode(frame.get("value"))
    except values.BadValue as error:
        return _fail(number, "invalidArgument", str(error))
    happened = effects.of_call()
    happened.touched.add(name)
    happened.stored.add(name)
    state.after(happened)
    _reply(number)


def _vars(frame, tail):
    _answer(_number(frame, "id"), _list_vars)


def _list_vars():
    listed = []
    for name, obj in sorted(run.namespace.items(), key=lambda item: str(item[0])):
        if not state.is_hidden(name, obj) and type(obj) is not type(sys):
            listed.append({"name": name, "type": brief.type_name(type(obj)), "summary": brief.line(obj)})
    return {"vars": listed}


def _tools(frame, tail):
    from _ryokan import schema

    _answer(_number(frame, "id"), lambda: {"tools": schema.tools_of(run.namespace)})


def _complete(frame, tail):
    from _ryokan import complete

    _answer(_number(frame, "id"), complete.complete, frame.get("code"), frame.get("cursor"))


def _check(frame, tail):
    from _ryokan import complete

    _answer(_number(frame, "id"), complete.check, frame.get("code"))


def _dynamic_tools(frame, tail):
    dynamic.announce(frame.get("tools") or ())


def _tool_result(frame, tail):
    dynamic.take(frame)


def _save(frame, tail):
    state.everything(resend=True)
    _reply(_number(frame, "id"))


def _load(frame, tail):
    from _ryokan import restore

    restore.begin()


def _entry(frame, tail):
    from _ryokan import restore

    restore.take(frame, tail)


def _loaded(frame, tail):
    from _ryokan import restore

    _reply(_number(frame, "id"), missed=restore.finish())


def _shutdown(frame, tail):
    _leave(0)


def _leave(status):
    """Ends background jobs and the process, whatever threads and exit handlers do."""
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


_HANDLERS = {
    "call": _call,
    "interrupt": _interrupt,
    "get": _get,
    "set": _set,
    "vars": _vars,
    "tools": _tools,
    "complete": _complete,
    "check": _check,
    "dynamic_tools": _dynamic_tools,
    "tool_result": _tool_result,
    "save": _save,
    "load": _load,
    "entry": _entry,
    "loaded": _loaded,
    "shutdown": _shutdown,
}
