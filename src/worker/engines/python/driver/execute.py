"""Executions: `exec` and `call`, from request to `end`.

Owns the context of an execution (environment, standard input, streams) and the order of its end: output is
flushed, then state changes are posted, then `end`.
"""
import os
import sys

from _ryokan import brief, definitions, dynamic, effects, gate, jobs, rich, run, state, streams, trace, values, wire

forked = False
# A snapshot is being forked (see snapshot): the child does not belong to the code.
copying = False
_CODE = type((lambda: 0).__code__)
# Statements with a variable, an expression with a result, and the end of the variable.
_REHEARSAL = ("rehearsed = [1, 'a']\nprint(rehearsed)", "1 + 1", "del rehearsed")


class _Setting:
    """The context of an execution: environment, standard input, streams, interrupt handler."""

    def __init__(self, frame):
        self.exec_id = wire.number(frame, "exec")
        self.env = frame.get("env") or ()
        self.has_input = frame.get("stdin") is True and bool(wire.descriptors)
        # Of a client that shows each request for input to a person.
        self.asks = any(name == "RYOKAN_INPUT" and value == "ask" for name, value in self.env)

    def __enter__(self):
        gate.install()
        gate.arm()
        streams.renew()
        if self.has_input:
            streams.give_input(wire.descriptors.pop(0), rich.ask if self.asks else None)
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
        gate.disarm()
        if forked:
            return
        gate.install()
        dynamic.settle()
        streams.flush()
        if self.has_input:
            streams.take_input()
        for name, value in self.env:
            if name in self.was and os.environ.get(name) == value:  # otherwise the code set it: its change stays
                if self.was[name] is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = self.was[name]
        if sys.getrecursionlimit() < 500:
            sys.setrecursionlimit(500)


def execute(frame, tail):
    """Runs code."""
    number, code = wire.number(frame, "id"), frame.get("code")
    if type(code) is not str:
        raise wire.Malformed("exec without code")
    happened = None
    with _Setting(frame):
        exec_id = rich.current_exec
        name = trace.file_name(exec_id)
        trace.remember(name, code)
        program, error = gate.guard(run.compile_program, code, name)
        if error is None:
            codes = program.codes()
            happened = effects.of_program(codes, run.namespace)
            if not happened.trivial and program.tree is not None:
                nested = any(type(const) is _CODE for each in codes for const in each.co_consts)
                definitions.note(program.tree, name, run.future_flags, nested)
            outcome = run.perform(program)
        elif isinstance(error, KeyboardInterrupt):
            outcome = run.failure(error)
        else:
            outcome = run.refusal(error)
    error = program = None
    _end(number, exec_id, outcome, happened)


def call(frame, tail):
    """Calls a function by name, without parsing."""
    number, name = wire.number(frame, "id"), frame.get("name")
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


def rehearse():
    """Takes the steps of an execution, so that their code is in memory. Leaves no trace."""
    with streams.Silence():
        for code in _REHEARSAL:
            program = run.compile_program(code, "<rehearsal>")
            happened = effects.of_program(program.codes(), run.namespace)
            run.perform(program)
            state.rehearse(happened)
    run.namespace.pop("_", None)
    run.forget_history()
    state.forget()


def _resolve(name):
    """A callable of `__main__`, an MCP tool, or `module.function` of an importable module."""
    found = None
    if type(name) is str and name:
        if name not in run.namespace and dynamic.announced(name):
            return dynamic.tools[name]
        first, *rest = name.split(".")
        found = run.namespace.get(first)
        if found is None and rest:
            import importlib

            found, _ = gate.guard(importlib.import_module, ".".join([first] + rest[:-1]))
            rest = rest[-1:]
        for part in rest:
            found, _ = gate.guard(getattr, found, part)
    if not callable(found):
        hint = "define it first, or use module.function"
        raise LookupError(f"there is no function {brief.line(name, 100)} to call; {hint}")
    return found


def _end(number, exec_id, outcome, happened):
    if forked:
        os._exit(outcome.code & 0xFF)
    if happened is not None:
        state.after(happened)
        if not happened.harmless or jobs.known():
            jobs.report()
    end = f'{{"ev":"end","id":{number},"exec":{exec_id},"status":"{outcome.status}","code":{outcome.code},"err":'
    end += wire.quote(outcome.err)
    if outcome.has_value:
        end += ',"value":' + wire.dumps(outcome.value)
    if outcome.text is not None:
        node = ',"output":{"headers":[],"root":[{"name":"","type":"text","text":%s,"cells":[],"children":[]}]}'
        end += node % wire.quote(outcome.text)
    wire.send(end + "}")


def in_child():
    """In a child of os.fork(): user code continues, but the child never sends or serves."""
    global forked
    if copying:
        return
    forked = True
    wire.forget()
    gate.after_fork()
    rich.current_exec = None
