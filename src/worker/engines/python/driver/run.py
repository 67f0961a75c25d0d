"""Running code: compile, run in `__main__`, name the result.

Owns the compiler flags that persist (`from __future__ import …`), the result history and the event loop. Never uses
the control socket: `perform` returns an Outcome, and main sends it.
"""
import _ast
import sys
import types

from _ryokan import brief, gate, rich, streams, trace, values

_AWAIT = 0x2000  # ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_ONLY_AST = 0x400  # ast.PyCF_ONLY_AST
_FUTURES = 0x1BE0000  # the bits listed in __future__, except the joke
_COROUTINE = 0x80  # inspect.CO_COROUTINE
_TEXT_MAX = 64 << 10

namespace = sys.modules["__main__"].__dict__
future_flags = 0
loop = None
_history = [None, None, None]


class Outcome:
    """How an execution ended; the fields are those of the `end` frame."""

    __slots__ = ("status", "code", "err", "value", "text", "has_value")

    def __init__(self, status="done", code=0, err=""):
        self.status, self.code, self.err = status, code, err
        self.value = self.text = None
        self.has_value = False


class Program:
    """A compiled source: the statements, and the last expression for the result."""

    __slots__ = ("tree", "body", "last")

    def codes(self):
        return [code for code in (self.body, self.last) if code is not None]


def compile_program(source, name):
    """Raises SyntaxError, ValueError, OverflowError, RecursionError, MemoryError."""
    global future_flags
    program = Program()
    program.tree = program.body = program.last = None
    flags = _AWAIT | future_flags
    if _is_short(source):
        try:
            program.last = compile(source, name, "eval", flags, True)
            return program
        except SyntaxError:  # the general path reports it better
            pass
    tree = compile(source, name, "exec", flags | _ONLY_AST, True)
    program.tree = tree
    statements = tree.body
    if statements and type(statements[-1]) is _ast.Expr and not _silenced(source, statements[-1]):
        expression = statements.pop()
        if statements:
            program.body = compile(tree, name, "exec", flags, True)
            flags |= program.body.co_flags & _FUTURES
        program.last = compile(_ast.Expression(expression.value), name, "eval", flags, True)
        statements.append(expression)
    elif statements:
        program.body = compile(tree, name, "exec", flags, True)
        flags |= program.body.co_flags & _FUTURES
    future_flags = flags & _FUTURES
    return program


def _is_short(source):
    """Whether the source looks like one expression: parsing it as such takes a third of the time."""
    if len(source) > 200 or not source or not source[0].isalnum() and source[0] not in "([{'\"-_":
        return False
    if "\n" in source or "=" in source or ";" in source or "\\" in source:
        return False
    return source.split(" ", 1)[0] not in _STATEMENTS


_STATEMENTS = frozenset(
    "import from del pass return raise global nonlocal assert for while if with try def class".split()
)


def _silenced(source, last):
    """Whether a `;` follows the last expression."""
    if ";" not in source:
        return False
    lines = source.encode("utf-8", "surrogatepass").splitlines()
    rest = lines[last.end_lineno - 1][last.end_col_offset :] + b" ".join(lines[last.end_lineno :])
    rest = rest.lstrip(b" \t)")
    return rest.startswith(b";")


def perform(program):
    """Runs a program in `__main__`."""
    outcome, error = gate.guard(_run, program.body, program.last)
    return outcome if error is None else failure(error)


def perform_call(function, args, kwargs):
    """Calls a function, and awaits its coroutine if it returns one."""
    outcome, error = gate.guard(_call, function, args, kwargs)
    return outcome if error is None else failure(error)


def _run(body, last):
    """User code runs from here on."""
    if body is not None:
        _eval(body)
    outcome = Outcome()
    value = _eval(last) if last is not None else None
    if value is not None:
        _remember(value)
        kind = type(value)
        if kind is not int and kind is not str:
            rich.display_result(value)
        outcome.value, outcome.has_value = values.encode_or_opaque(value), True
        outcome.text = brief.text(value, _TEXT_MAX)
    return outcome


def _eval(code):
    result = eval(code, namespace)
    return await_result(result) if code.co_flags & _COROUTINE else result


def _call(function, args, kwargs):
    result = function(*args, **kwargs)
    if isinstance(result, types.CoroutineType):
        result = await_result(result)
    outcome = Outcome()
    outcome.value, outcome.has_value = values.encode_or_opaque(result), True
    return outcome


def failure(error):
    """The outcome of an exception; its traceback goes to stderr. Loops in `__str__` can be interrupted."""
    gate.disarm()
    if isinstance(error, SystemExit):
        return _exit(error)
    try:
        trace.warm()  # with the gate closed: an interrupted import leaves half a module
    except Exception:
        pass  # `describe` works without
    described, late = gate.guard(trace.describe, error)
    if late is not None:
        described = (type(error).__name__ + "\n", type(error).__name__)
    text, last = described
    streams.write_err(text)
    if isinstance(error, KeyboardInterrupt):
        return Outcome("interrupted", 130, last)
    return Outcome("failed", 1, last)


def refusal(error):
    """The outcome of source that does not compile: nothing ran."""
    error.__traceback__ = error.__context__ = None
    text, last = trace.describe(error)
    streams.write_err(text)
    return Outcome("refused", 1, last)


def _exit(error):
    code = error.code
    if code is None:
        return Outcome()
    if not isinstance(code, int):
        text = brief.text(code, _TEXT_MAX) if type(code) is not str else code[:_TEXT_MAX]
        streams.write_err(text + "\n")
        return Outcome("failed", 1, brief.cut("SystemExit: " + " ".join(text.split()), 1000))
    code = int(code)
    if not -(1 << 31) <= code < 1 << 31:
        code &= 0xFF
    return Outcome("failed", code, f"SystemExit: {code}") if code else Outcome()


def _remember(value):
    """Updates `_`, `__` and `___`, unless the code uses `_` itself."""
    for at, name in enumerate(("_", "__", "___")):
        if name in namespace and namespace[name] is not _history[at]:
            return
    _history[:] = [value, namespace.get("_"), namespace.get("__")]
    for name, kept in zip(("_", "__", "___"), _history):
        if kept is not None:
            namespace[name] = kept


def forget_history():
    _history[:] = [None, None, None]


def is_history(name):
    """Whether the name belongs to the result history and is not used by the code itself."""
    at = ("_", "__", "___").index(name) if name in ("_", "__", "___") else None
    return at is not None and namespace.get(name) is _history[at]


def event_loop():
    """The kernel's event loop."""
    global loop
    import asyncio

    if loop is None or loop.is_closed():
        loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    return loop


def await_result(coroutine):
    """Runs a coroutine on the loop. An interrupt cancels it, so that its `finally` blocks run."""
    try:
        own = event_loop()
        task = own.create_task(coroutine)
    except BaseException:
        coroutine.close()
        raise
    try:
        return own.run_until_complete(task)
    except KeyboardInterrupt as interrupt:
        if not task.done():
            task.cancel()
            try:
                own.run_until_complete(task)
            except BaseException as stopped:
                if isinstance(stopped, KeyboardInterrupt):
                    raise
                raise interrupt.with_traceback(stopped.__traceback__) from None
        raise
