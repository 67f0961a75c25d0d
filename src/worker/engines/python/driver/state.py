"""Saving: after an execution, the entries whose bytes changed, and the list of what cannot be saved.

Owns a record for each entry: what was sent last, and whether the value can have changed without its name being touched
(see privacy). Looks only at what the execution can have changed (see effects). Never raises.

    body = 0x01 (format), tag, payload     tags: p pickle, b bytes, s text, c class source, d defining statement,
                                           i import, v setting, G group {key: object}, R member of the group at a key
"""
import _pickle
import io
import sys
from _blake2 import blake2b
from types import FunctionType, ModuleType

from _ryokan import brief, definitions, effects as effects_of, functions, gate, jobs, privacy, run, settings, streams, wire

FORMAT = b"\x01"
IMMUTABLE, PRIVATE, OPEN = privacy.IMMUTABLE, privacy.PRIVATE, privacy.OPEN
_CHUNK = wire.TAIL_MAX
_NAME_MAX = 256
# Sharing these is not observable, or they are saved by reference.
_UNSHARED = frozenset(
    (str, bytes, tuple, frozenset, int, float, complex, range, type, ModuleType, type(len), type(None))
)
_ATOMS = frozenset((int, float, bool, complex, type(None)))
_BY_STATEMENT = ("TypeVar", "ParamSpec", "TypeVarTuple", "NewType")

records = {}
imported = set()
_settings_sent = {}
_missed = {}
_missed_sent = []
# Threads that ran at the end of the last execution may have changed things since, and be gone.
_threads_ran = False


class Record:
    """What is known of one saved or missed entry. `identity` is the object's id: no reference is kept."""

    __slots__ = ("key", "digest", "identity", "privacy", "grouped")


class _Item:
    """One entry on its way."""

    __slots__ = ("slot", "key", "obj", "parts", "memo", "missed", "privacy", "grouped")

    def __init__(self, slot, key, obj):
        self.slot, self.key, self.obj = slot, key, obj
        self.parts = self.memo = self.missed = None
        self.privacy, self.grouped = OPEN, False


def is_hidden(name, obj):
    """Names that are nobody's state."""
    return type(name) is not str or name.startswith("__") and name.endswith("__") or run.is_history(name)


def forget():
    global _missed_sent
    records.clear()
    _missed.clear()
    imported.clear()
    _settings_sent.clear()
    _missed_sent = []


def after(effects):
    """Posts what an execution changed."""
    global _threads_ran
    threads = _threads_ran or jobs.any_threads()
    if threads:
        _threads_ran = jobs.any_threads()
        if effects.trivial:
            effects = effects_of.of_call()
    elif effects.trivial:
        return
    imported.update(effects.imports)
    harmless = effects.harmless and not threads
    if harmless and any(getattr(records.get(name), "grouped", False) for name in effects.stored):
        harmless = False
    _update(effects, harmless, False, False)


def everything(resend):
    """Posts every entry (`resend`), or takes the present state for the saved one, as after a load."""
    _update(None, False, resend, not resend)


def _update(effects, harmless, resend, adopt):
    _, error = gate.guard(_prepare, effects, harmless)
    items = _prepared
    if error is None and len(items) > 1:
        _group(items)
    for item in items:
        if item.parts is not None or item.missed is not None:
            _finish(item, resend, adopt)
    _drop_gone(effects.stored if harmless else None, adopt)
    if not harmless:
        _settings(resend, adopt)
    _tell_missed(adopt)
    items.clear()


_prepared = []


def _prepare(effects, harmless):
    """Finds what to look at, and encodes it."""
    _prepared.clear()
    with streams.Silence():
        for slot, key, attributes in _candidates(effects, harmless):
            item = _Item(slot, key, attributes)
            _prepared.append(item)
            try:
                _encode(item)
            except BaseException as error:  # __reduce__ is anyone's code: it may exit, and be interrupted
                item.parts = item.memo = None
                item.missed = reason(error)


def _candidates(effects, harmless):
    """[(slot, key, attributes of a class)]: no reference to an object, because references are going to be counted."""
    space = run.namespace
    names = effects.stored if harmless else list(space)
    found = []
    for name in names:
        if name not in space:
            continue
        obj = space[name]
        if is_hidden(name, obj):
            continue
        record = records.get(name)
        if record is not None and effects is not None and not effects.everything and record.identity == id(obj):
            if record.privacy == IMMUTABLE and name not in effects.stored:
                continue
            if record.privacy == PRIVATE and name not in effects.touched:
                continue
        if isinstance(obj, type) and obj.__module__ == "__main__" and obj.__qualname__ == name:
            # First, because saving an instance asks whether its class is known.
            known = definitions.class_source(name, obj) is not None
            found.append((name, "class/" + name, None))
            attributes = _attributes(obj) if known else None
            if attributes:
                found.append((name + "\0", "classattr/" + name, attributes))
        else:
            found.append((name, _key(name, obj), None))
    return found


def _key(name, obj):
    kind = type(obj)
    if kind is ModuleType or isinstance(obj, ModuleType):
        return "import/" + name
    if kind is FunctionType and functions.importable(obj) is None:
        return "fn/" + name
    if (kind is FunctionType or isinstance(obj, type) or kind is type(len)) and functions.importable(obj) is not None:
        return "import/" + name
    return "var/" + name


def _attributes(kind):
    """A class's plain attributes: what code may have changed since the definition."""
    if isinstance(kind, type(sys.modules["enum"].Enum) if "enum" in sys.modules else ()):
        return None
    found = {}
    for name, obj in list(vars(kind).items()):
        if name.startswith("__") and name.endswith("__") or name == "_abc_impl" or hasattr(type(obj), "__get__"):
            continue
        if name.startswith("_") and issubclass(kind, tuple) or hasattr(type(obj), "__set__"):
            continue
        try:
            _dump(obj)
        except Exception:  # running the source again makes it again
            continue
        found[name] = obj
    return found


def _encode(item):
    key = item.key
    if len(item.slot.encode("utf-8", "surrogatepass")) > _NAME_MAX or not _is_utf8(item.slot):
        item.key = "var/" + ascii(item.slot)[:80]
        raise ValueError("the name is too long or not text")
    kind = type(run.namespace[item.slot]) if item.obj is None else None
    if kind in _ATOMS:
        item.obj = run.namespace[item.slot]
        item.parts, item.privacy = (b"p", _pickle.dumps(item.obj, 5)), IMMUTABLE
        return
    if item.obj is None:
        item.privacy = privacy.of(run.namespace, item.slot)
        item.obj = run.namespace[item.slot]
    obj = item.obj
    kind = type(obj)
    if kind is str:
        item.parts, item.privacy = (b"s", obj.encode("utf-8", "surrogatepass")), IMMUTABLE
    elif kind is bytes:
        item.parts, item.privacy = (b"b", obj), IMMUTABLE
    elif key.startswith("class/"):
        item.parts, item.privacy = (b"c", _class_body(item.slot, obj)), OPEN
    elif key.startswith("import/"):
        item.parts, item.privacy = (b"i", _import_body(obj)), PRIVATE
    elif kind.__module__ == "typing" and kind.__name__ in _BY_STATEMENT:
        item.parts, item.privacy = (b"d", _statement_body(item.slot)), PRIVATE
    else:
        body, memo = _dump(obj)
        item.parts = (b"p", body)
        if item.privacy == OPEN:
            item.memo = memo.copy()


def _dump(obj):
    into = io.BytesIO()
    pickler = functions.Pickler(into, 5)
    pickler.dump(obj)
    return into.getbuffer(), pickler.memo


def _is_utf8(text):
    try:
        text.encode()
        return True
    except UnicodeEncodeError:
        return False


def _class_body(name, kind):
    known = definitions.class_source(name, kind)
    if known is None:
        raise ValueError("the source of its definition is not known")
    sequence, statement = known
    return wire.dumps({"sequence": sequence, **statement.form()}).encode("utf-8", "replace")


def _statement_body(name):
    statement = definitions.bound(name)
    if statement is None or statement.text is None:
        raise ValueError("the source of its definition is not known")
    return wire.dumps(statement.form()).encode("utf-8", "replace")


def _import_body(obj):
    if not isinstance(obj, ModuleType):
        module, name = functions.importable(obj)
        return wire.dumps({"module": module, "name": name}).encode()
    module = obj.__name__
    if sys.modules.get(module) is not obj:
        raise ValueError(f"module {module} cannot be imported by its name")
    inner = sorted(name for name in imported if name.startswith(module + ".") and name in sys.modules)
    return wire.dumps({"module": module, "also": inner}).encode()


def _group(items):
    """Entries that share a mutable object become one group: the first holds them all, the others name it."""
    owner, parent = {}, {}

    def root(item):
        while parent.get(item, item) is not item:
            item = parent[item]
        return item

    for item in items:
        for key, (_, obj) in (item.memo or {}).items():
            if type(obj) in _UNSHARED or isinstance(obj, type) or _is_enum_member(obj):
                continue
            first = owner.setdefault(key, item)
            if first is not item:
                parent[root(item)] = root(first)
    groups = {}
    for item in items:
        if parent:
            groups.setdefault(root(item), []).append(item)
    for members in groups.values():
        if len(members) > 1:
            _join(members)


def _is_enum_member(obj):
    enum = sys.modules.get("enum")
    return enum is not None and isinstance(obj, enum.Enum)


def _join(members):
    members.sort(key=lambda item: item.key)
    dumped, error = gate.guard(_dump_quietly, {item.key: item.obj for item in members})
    for item in members:
        if error is not None:
            item.parts, item.missed = None, reason(error)
    if error is not None:
        return
    leader, body = members[0], dumped[0]
    digest = blake2b(body, digest_size=16).hexdigest()
    leader.parts, leader.grouped = (b"G", body), True
    for item in members[1:]:
        item.parts, item.grouped = (b"R", wire.dumps([leader.key, digest]).encode()), True


def _dump_quietly(obj):
    with streams.Silence():
        return _dump(obj)


def reason(error, doing="saving"):
    """Why an entry is missed, for people."""
    if isinstance(error, KeyboardInterrupt):
        return f"interrupted while {doing} it"
    if isinstance(error, RecursionError):
        return "nested too deep"
    described, late = gate.guard(str, error)
    text = described if late is None and described else type(error).__name__
    if not isinstance(error, (TypeError, ValueError, AttributeError, _pickle.PicklingError)):
        text = f"{doing} it raised {type(error).__name__}: {text}"
    return brief.cut(" ".join(text.split()), 400)


def _finish(item, resend, adopt):
    """Posts the entry if its bytes changed, and keeps the record."""
    record = records.get(item.slot)
    if record is None:
        record = records[item.slot] = Record()
        record.key = record.digest = None
    if record.key != item.key and record.digest is not None:
        if not adopt:
            wire.post({"ev": "del", "key": record.key})
        record.digest = None
    record.key, record.privacy, record.grouped = item.key, item.privacy, item.grouped
    record.identity = id(item.obj)
    if item.missed is not None:
        record.privacy = PRIVATE  # tried again when touched
        if record.digest is not None:
            if not adopt:
                wire.post({"ev": "del", "key": item.key})
            record.digest = None
        _missed[item.slot] = {"key": item.key, "type": brief.type_name(type(item.obj)), "reason": item.missed}
        return
    _missed.pop(item.slot, None)
    digest = _digest(item.parts)
    if digest != record.digest or resend:
        record.digest = digest
        if not adopt:
            send(item.key, item.obj, item.parts)


def _digest(parts):
    made = blake2b(parts[0], digest_size=16)
    made.update(parts[1])
    return made.digest()


def send(key, obj, parts, type_name=None):
    """Posts an entry in chunks."""
    summary, error = gate.guard(brief.line, obj)
    meta = {"type": type_name or brief.type_name(type(obj)), "summary": summary if error is None else ""}
    tag, payload = parts
    head = FORMAT + tag
    view = memoryview(payload)
    first = _CHUNK - len(head)
    more = len(view) > first
    wire.post({"ev": "put", "key": key, "meta": meta, "more": more}, head + bytes(view[:first]))
    for at in range(first, len(view), _CHUNK):
        more = at + _CHUNK < len(view)
        wire.post({"ev": "put", "key": key, "meta": meta, "more": more}, bytes(view[at : at + _CHUNK]))


def _drop_gone(names, adopt):
    """Names that are gone: among `names`, or all."""
    space = run.namespace
    slots = list(records) if names is None else [slot for name in names for slot in (name, name + "\0")]
    for slot in slots:
        record = records.get(slot)
        name = slot.rstrip("\0")
        if record is None or name in space and slot == name and not is_hidden(name, space[name]):
            continue
        if slot != name and name in space and records[name].key.startswith("class/"):
            continue
        del records[slot]
        _missed.pop(slot, None)
        if record.digest is not None and not adopt:
            wire.post({"ev": "del", "key": record.key})


def _settings(resend, adopt):
    found, error = gate.guard(settings.current)
    if error is not None:
        return
    for key, (obj, kind) in found.items():
        known = _settings_sent.get(key)
        if known is not None and not resend and key != "random/numpy" and known[0] == obj:
            continue
        body = bytes(_dump(obj)[0])
        if known is None or known[1] != body or resend:
            _settings_sent[key] = (obj, body)  # `obj` is a copy: nobody changes it
            if not adopt:
                send(key, obj, (b"v", body), kind)
    for key in [key for key in _settings_sent if key not in found]:
        del _settings_sent[key]
        if not adopt:
            wire.post({"ev": "del", "key": key})


def _tell_missed(adopt):
    global _missed_sent
    if (_missed or _missed_sent) and not adopt:
        missed = list(_missed.values())
        if missed != _missed_sent:
            _missed_sent = missed
            wire.post({"ev": "missed", "entries": missed})
