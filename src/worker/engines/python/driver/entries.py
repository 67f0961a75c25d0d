"""Entries: the kind of a variable's entry, and its encoding.

    body = 0x01 (format), tag, payload     tags: p pickle, b bytes, s text, c class source, d defining statement,
                                           i import, v setting, G group {key: object}, R member of the group at a key

Raises if an object cannot be saved; the caller lists it as missed.
"""
import _pickle
import io
import sys
from _blake2 import blake2b
from types import FunctionType, ModuleType

from _ryokan import aliasing, brief, definitions, functions, gate, run, wire

FORMAT = b"\x01"
_NAME_MAX = 256
_ATOMS = frozenset((int, float, bool, complex, type(None)))
_BY_STATEMENT = ("TypeVar", "ParamSpec", "TypeVarTuple", "NewType")

# Dotted names imported by code: a package's entry restores its submodules, too.
imported = set()


class Item:
    """An entry being encoded."""

    __slots__ = ("slot", "key", "obj", "parts", "memo", "missed", "aliasing", "grouped")

    def __init__(self, slot, key, obj):
        self.slot, self.key, self.obj = slot, key, obj
        self.parts = self.memo = self.missed = None
        self.aliasing, self.grouped = aliasing.ALIASED, False


def key_of(name, obj):
    kind = type(obj)
    if kind is ModuleType or isinstance(obj, ModuleType):
        return "import/" + name
    if kind is FunctionType and functions.importable(obj) is None:
        return "fn/" + name
    if (kind is FunctionType or isinstance(obj, type) or kind is type(len)) and functions.importable(obj) is not None:
        return "import/" + name
    return "var/" + name


def attributes_of(kind):
    """A class's plain attributes, which code may have changed since the definition."""
    if isinstance(kind, type(sys.modules["enum"].Enum) if "enum" in sys.modules else ()):
        return None
    found = {}
    for name, obj in list(vars(kind).items()):
        if name.startswith("__") and name.endswith("__") or name == "_abc_impl" or hasattr(type(obj), "__get__"):
            continue
        if name.startswith("_") and issubclass(kind, tuple) or hasattr(type(obj), "__set__"):
            continue
        try:
            dump(obj)
        except Exception:  # running the source rebuilds it
            continue
        found[name] = obj
    return found


def encode(item):
    key = item.key
    if len(item.slot.encode("utf-8", "surrogatepass")) > _NAME_MAX or not _is_utf8(item.slot):
        item.key = "var/" + ascii(item.slot)[:80]
        raise ValueError("the name is too long or not text")
    kind = type(run.namespace[item.slot]) if item.obj is None else None
    if kind in _ATOMS:
        item.obj = run.namespace[item.slot]
        item.parts, item.aliasing = (b"p", _pickle.dumps(item.obj, 5)), aliasing.IMMUTABLE
        return
    if item.obj is None:
        item.aliasing = aliasing.of(run.namespace, item.slot)
        item.obj = run.namespace[item.slot]
    obj = item.obj
    kind = type(obj)
    if kind is str:
        item.parts, item.aliasing = (b"s", obj.encode("utf-8", "surrogatepass")), aliasing.IMMUTABLE
    elif kind is bytes:
        item.parts, item.aliasing = (b"b", obj), aliasing.IMMUTABLE
    elif key.startswith("class/"):
        item.parts, item.aliasing = (b"c", _class_body(item.slot, obj)), aliasing.ALIASED
    elif key.startswith("import/"):
        item.parts, item.aliasing = (b"i", _import_body(obj)), aliasing.UNALIASED
    elif kind.__module__ == "typing" and kind.__name__ in _BY_STATEMENT:
        item.parts, item.aliasing = (b"d", _statement_body(item.slot)), aliasing.UNALIASED
    else:
        body, memo = dump(obj)
        item.parts = (b"p", body)
        if item.aliasing == aliasing.ALIASED:
            item.memo = memo.copy()


def dump(obj):
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


def digest_of(parts):
    made = blake2b(parts[0], digest_size=16)
    made.update(parts[1])
    return made.digest()


def reason(error, doing="saving"):
    """The reason for a missed entry, for people."""
    if isinstance(error, KeyboardInterrupt):
        return f"interrupted while {doing} it"
    if isinstance(error, RecursionError):
        return "nested too deep"
    described, late = gate.guard(str, error)
    text = described if late is None and described else type(error).__name__
    if not isinstance(error, (TypeError, ValueError, AttributeError, _pickle.PicklingError)):
        text = f"{doing} it raised {type(error).__name__}: {text}"
    return brief.cut(" ".join(text.split()), 400)
