"""Loading: builds the namespace from its entries.

Owns the entries while they come in. Sources and pickles may need each other in any order, so what fails is tried again
as long as something else succeeds. A bad entry does not affect the others.
"""
import _pickle
import importlib

from _ryokan import definitions, effects, entries, gate, run, settings, state, streams, wire

_entries = {}
_open_key = None
_deferred = {}
_ORDER = ("sys", "env", "cwd", "opt", "import", "class", "fn", "var", "classattr", "random")


class BadEntry(ValueError):
    """The entry's body is malformed."""


def begin():
    """Clears the current state."""
    space = run.namespace
    kept = ("__name__", "__doc__", "__package__", "__loader__", "__spec__", "__builtins__")
    for name in list(space):
        if name not in kept:
            del space[name]
    run.forget_history()
    definitions.forget()
    effects.forget()
    state.forget()
    settings.reset()
    _entries.clear()


def take(frame, tail):
    """One chunk of an entry."""
    global _open_key
    key = frame.get("key")
    if type(key) is not str:
        raise wire.Malformed("an entry without a key")
    if key != _open_key:
        _entries[key] = bytearray()
    _entries[key] += tail
    _open_key = key if frame.get("more") is True else None


def finish():
    """Builds the state. Returns the entries that could not be built, as the reply's `missed`."""

    def order(key):
        kind = key.split("/", 1)[0]
        return (_ORDER.index(kind) if kind in _ORDER else len(_ORDER), key)

    pending = sorted(_entries, key=order)
    failures = {}
    _sort_classes(pending)
    while pending:
        left = []
        for key in pending:
            _, error = gate.guard(_build, key)
            if error is not None:
                failures[key] = error
                left.append(key)
            elif len(_entries[key]) > 4096:  # built: only its tag is still needed
                _entries[key] = bytes(_entries[key][:2])
        if len(left) == len(pending) and not _untie(left):
            break
        pending = left
    missed = []
    _deferred.clear()
    for key in pending:
        kind = key.split("/", 1)[0]
        missed.append({"key": key, "type": kind, "reason": entries.reason(failures[key], "loading")})
    _entries.clear()
    state.everything(resend=False)
    return missed


def _untie(pending):
    """Builds a class whose source needs a value that needs the class: unbuilt names are placeholders meanwhile, and its
    attributes follow with the value. Removes it from `pending`; False if no class can be built."""
    space = run.namespace
    names = [key.split("/", 1)[1] for key in _entries if key.startswith(("var/", "fn/"))]
    for key in pending:
        if key.startswith("class/"):
            absent = [name for name in names if name not in space]
            space.update(dict.fromkeys(absent, _Pending()))
            _, error = gate.guard(_build, key)
            for name in absent:
                space.pop(name, None)
            if error is None:
                pending.remove(key)
                return True
    return False


class _Pending:
    """Stands in for a value that is not built yet."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_, **__):
        return self

    __getitem__ = __call__

    def __iter__(self):
        return iter(())


def _sort_classes(pending):
    """Classes in definition order: bases first."""

    def sequence(key):
        try:
            return wire.scan(bytes(_entries[key][2:]).decode())[0]["sequence"]
        except (ValueError, KeyError, TypeError, StopIteration):
            return 0

    classes = [at for at, key in enumerate(pending) if key.startswith("class/")]
    ordered = sorted((pending[at] for at in classes), key=sequence)
    for at, key in zip(classes, ordered):
        pending[at] = key


def _build(key):
    body = memoryview(_entries[key])
    if len(body) < 2 or bytes(body[:1]) != entries.FORMAT:
        raise BadEntry(f"unknown format {bytes(body[:1]).hex() or 'of an empty entry'}")
    with streams.Silence():
        _BUILDERS[chr(body[1])](key, body[2:])


def _put(key, obj):
    kind, _, name = key.partition("/")
    if kind == "classattr":
        if isinstance(run.namespace.get(name), type):
            _set_attributes(run.namespace[name], obj)
        else:
            _deferred[name] = obj  # its class comes later, and may need the rest of this group first
    else:
        run.namespace[name] = obj


def _set_attributes(kind, attributes):
    for name, obj in attributes.items():
        try:
            if name in vars(kind) and vars(kind)[name] is obj:
                continue
            setattr(kind, name, obj)
        except Exception:  # the class rejects the attribute: then code did not set it either
            continue


def _pickled(key, payload):
    _put(key, _pickle.loads(payload))


def _bytes(key, payload):
    _put(key, bytes(payload))


def _text(key, payload):
    _put(key, bytes(payload).decode("utf-8", "surrogatepass"))


def _form(payload):
    return wire.scan(bytes(payload).decode())[0]


def _class(key, payload):
    form = _form(payload)
    statement = definitions.Statement.of_form(form)
    name = key.partition("/")[2]
    kind = _run_statement(statement, name)
    definitions.restored(name, kind, int(form["sequence"]), statement)
    _set_attributes(kind, _deferred.pop(name, {}))


def _statement(key, payload):
    statement = definitions.Statement.of_form(_form(payload))
    name = key.partition("/")[2]
    _run_statement(statement, name)
    definitions.adopt(name, statement)


def _run_statement(statement, name):
    code = statement.compile()
    effects.of_program([code], run.namespace)
    exec(code, run.namespace)
    return run.namespace[name]


def _import(key, payload):
    form = _form(payload)
    obj = importlib.import_module(form["module"])
    for part in form["name"].split(".") if "name" in form else ():
        obj = getattr(obj, part)
    for inner in form.get("also", ()):
        entries.imported.add(inner)
        try:
            importlib.import_module(inner)
        except ImportError:
            continue
    _put(key, obj)


def _setting(key, payload):
    if not settings.is_setting(key):
        raise BadEntry("unknown setting")
    settings.apply(key, _pickle.loads(payload))


def _group(key, payload):
    for member, obj in _pickle.loads(payload).items():
        held = _entries.get(member)
        if member == key or held is not None and bytes(held[1:2]) == b"R" and _form(held[2:])[0] == key:
            _put(member, obj)


def _member(key, payload):
    leader = _entries.get(_form(payload)[0])
    if leader is None or bytes(leader[1:2]) != b"G":
        raise BadEntry("the entry that holds it is missing")


_BUILDERS = {
    "p": _pickled,
    "b": _bytes,
    "s": _text,
    "c": _class,
    "d": _statement,
    "i": _import,
    "v": _setting,
    "G": _group,
    "R": _member,
}
