"""Requests between executions: variables, tools, completion, state.

Every answer is a `reply` with the request's number. An error in user code on the way (a `__repr__`, a `__dir__`) becomes
an answer and never ends the engine.
"""
import keyword
import sys

from _ryokan import brief, dynamic, effects, execute, gate, run, settings, state, values, wire


def _reply(number, **fields):
    wire.send({"ev": "reply", "id": number, "ok": True, **fields})


def _fail(number, code, message, hint=""):
    wire.send({"ev": "reply", "id": number, "ok": False, "code": code, "message": message, "hint": hint})


def _answer(number, function, *args):
    """Replies with the function's result; an exception becomes a failed reply."""
    gate.install()
    fields, error = gate.guard(function, *args)
    if error is None:
        _reply(number, **fields)
    else:
        _fail(number, "internal", brief.cut(f"{type(error).__name__}: {error}", 400))


def interrupt_(frame, tail):
    """Does nothing: this engine is interrupted by a signal."""


def get_(frame, tail):
    number, name = wire.number(frame, "id"), frame.get("name")
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


def set_(frame, tail):
    number, name = wire.number(frame, "id"), frame.get("name")
    if type(name) is not str or not name.isidentifier() or keyword.iskeyword(name) or name.startswith("__"):
        hint = "use letters, digits and _, no keyword"
        return _fail(number, "invalidArgument", f"{brief.line(name, 100)} is no variable name", hint)
    try:
        run.namespace[name] = values.decode(frame.get("value"))
    except values.BadValue as error:
        return _fail(number, "invalidArgument", str(error))
    happened = effects.of_call()
    happened.touched.add(name)
    happened.stored.add(name)
    state.after(happened)
    _reply(number)


def vars_(frame, tail):
    _answer(wire.number(frame, "id"), _list_vars)


def _list_vars():
    listed = []
    for name, obj in sorted(run.namespace.items(), key=lambda item: str(item[0])):
        if not state.is_hidden(name, obj) and type(obj) is not type(sys):
            listed.append({"name": name, "type": brief.type_name(type(obj)), "summary": brief.line(obj)})
    return {"vars": listed}


def tools_(frame, tail):
    from _ryokan import schema

    _answer(wire.number(frame, "id"), lambda: {"tools": schema.tools_of(run.namespace)})


def complete_(frame, tail):
    from _ryokan import complete

    _answer(wire.number(frame, "id"), complete.complete, frame.get("code"), frame.get("cursor"))


def check_(frame, tail):
    from _ryokan import complete

    _answer(wire.number(frame, "id"), complete.check, frame.get("code"))


def dynamic_tools_(frame, tail):
    dynamic.announce(frame.get("tools") or ())


def tool_result_(frame, tail):
    dynamic.take(frame)


def save_(frame, tail):
    if frame.get("changed") is True:
        # Unchanged objects are not touched: even looking would unshare their memory with the snapshots.
        state.after(effects.of_call())
    else:
        state.everything(resend=True)
    _reply(wire.number(frame, "id"))


def load_(frame, tail):
    from _ryokan import restore

    restore.begin()


def entry_(frame, tail):
    from _ryokan import restore

    restore.take(frame, tail)


def loaded_(frame, tail):
    from _ryokan import restore

    _reply(wire.number(frame, "id"), missed=restore.finish())


def bind_(frame, tail):
    number = wire.number(frame, "id")
    try:
        settings.bind(frame.get("env") or ())
    except OSError as error:
        return _fail(number, "internal", f"cannot enter the workspace: {error}")
    _reply(number)


def enter_(frame, tail):
    _answer(wire.number(frame, "id"), _enter, frame.get("env") or ())


def _enter(env):
    settings.reseed()
    settings.bind(env)
    return {}


def reseed_(frame, tail):
    _answer(wire.number(frame, "id"), _reseed, frame.get("env") or ())


def _reseed(env):
    settings.reseed()
    settings.rename(env)
    return {}


def preload_(frame, tail):
    _answer(wire.number(frame, "id"), _prepare, frame.get("modules") or ())


def _prepare(modules):
    execute.rehearse()
    return settings.preload(modules)


def keep_(frame, tail):
    try:
        from _ryokan import snapshot
    except Exception as error:
        wire.close_descriptors()
        return _fail(wire.number(frame, "id"), "refused", brief.cut(f"{type(error).__name__}: {error}", 400))
    snapshot.keep(frame, tail)


HANDLERS = {
    "interrupt": interrupt_,
    "get": get_,
    "set": set_,
    "vars": vars_,
    "tools": tools_,
    "complete": complete_,
    "check": check_,
    "dynamic_tools": dynamic_tools_,
    "tool_result": tool_result_,
    "save": save_,
    "load": load_,
    "entry": entry_,
    "loaded": loaded_,
    "keep": keep_,
    "bind": bind_,
    "enter": enter_,
    "reseed": reseed_,
    "preload": preload_,
}
