"""Groups: entries that share a mutable object are saved together, so that they share it after a load.

Finds the sharing in the memos that pickling leaves: two values whose memos hold the same mutable object.
"""
import sys
from _blake2 import blake2b
from types import FunctionType, ModuleType

from _ryokan import entries, functions, gate, streams, wire

# Sharing these is not observable, or they are saved by reference.
_UNSHARED = frozenset(
    (str, bytes, tuple, frozenset, int, float, complex, range, type, ModuleType, type(len), type(None))
)


def join(items):
    """Entries that share a mutable object become one group: the first contains all, the others refer to it."""
    owner, parent = {}, {}

    def root(item):
        while parent.get(item, item) is not item:
            item = parent[item]
        return item

    for item in items:
        for key, (_, obj) in (item.memo or {}).items():
            if type(obj) in _UNSHARED or isinstance(obj, type) or _is_constant(obj):
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


def _is_constant(obj):
    """Enum members, numpy's dtypes and imported functions: unique objects before and after a load."""
    if type(obj) is FunctionType and functions.importable(obj) is not None:
        return True
    enum, numpy = sys.modules.get("enum"), sys.modules.get("numpy")
    if enum is not None and isinstance(obj, enum.Enum):
        return True
    return numpy is not None and isinstance(obj, getattr(numpy, "dtype", ()))


def _join(members):
    members.sort(key=lambda item: item.key)
    dumped, error = gate.guard(_dump, {item.key: item.obj for item in members})
    for item in members:
        if error is not None:
            item.parts, item.missed = None, entries.reason(error)
    if error is not None:
        return
    leader, body = members[0], dumped[0]
    digest = blake2b(body, digest_size=16).hexdigest()
    leader.parts, leader.grouped = (b"G", body), True
    for item in members[1:]:
        item.parts, item.grouped = (b"R", wire.dumps([leader.key, digest]).encode()), True


def _dump(obj):
    with streams.Silence():
        return entries.dump(obj)
