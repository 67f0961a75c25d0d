"""Whether a value can be reached only through its name.

A tree of plain containers whose parts are all referenced only from inside the tree cannot change unless code mentions
the name. Counts references; never runs user code, never keeps a reference.
"""
import sys
from sys import getrefcount

IMMUTABLE, UNALIASED, ALIASED = 0, 1, 2

LEAVES = frozenset(
    (type(None), bool, int, float, complex, str, bytes, range, type(...), type(NotImplemented))
)
_FROZEN = frozenset((tuple, frozenset))
_CONTAINERS = frozenset((list, dict, set, bytearray, tuple, frozenset))
_NODES_MAX = 20_000


def of(namespace, name):
    """IMMUTABLE, UNALIASED, or ALIASED if neither is known."""
    kind = type(namespace[name])
    if kind in LEAVES:
        return IMMUTABLE
    if kind in _FROZEN and _is_leaf(namespace[name]):
        return IMMUTABLE
    try:
        return UNALIASED if _walk(namespace, name) else ALIASED
    except RuntimeError:  # changed by another thread meanwhile
        return ALIASED


def _is_leaf(container):
    if not LEAVES.issuperset(map(type, container)):
        return all(
            type(item) in LEAVES or type(item) in _FROZEN and LEAVES.issuperset(map(type, item)) for item in container
        )
    return True


def _walk(namespace, name):
    nodes = [namespace[name]]
    edges = {id(nodes[0]): 1}
    at = 0
    while at < len(nodes):
        kind = type(nodes[at])
        if kind is dict:
            if not _children(nodes[at].keys(), nodes, edges) or not _children(nodes[at].values(), nodes, edges):
                return False
        elif kind in _CONTAINERS:
            if kind is not bytearray and not _children(nodes[at], nodes, edges):
                return False
        elif not _is_own_array(nodes[at]):
            return False
        at += 1
        if len(nodes) > _NODES_MAX:
            return False
    for at in range(len(nodes)):
        if getrefcount(nodes[at]) - edges[id(nodes[at])] != _EXTRA:
            return False
    return True


def _children(items, nodes, edges):
    """Collects the parts of `items` that are neither leaves nor frozen containers of leaves."""
    kinds = set(map(type, items))
    if kinds <= LEAVES:
        return True
    kinds -= LEAVES
    if not kinds <= _CONTAINERS and not all(kind.__name__ == "ndarray" for kind in kinds - _CONTAINERS):
        return False
    for item in items:
        kind = type(item)
        if kind in LEAVES or kind in _FROZEN and LEAVES.issuperset(map(type, item)):
            continue
        key = id(item)
        if key in edges:
            edges[key] += 1
        else:
            edges[key] = 1
            nodes.append(item)
            if len(nodes) > _NODES_MAX:
                return False
    return True


def _is_own_array(obj):
    numpy = sys.modules.get("numpy")
    if numpy is None or type(obj) is not getattr(numpy, "ndarray", None):
        return False
    return obj.base is None and not obj.dtype.hasobject and obj.flags.owndata


def _calibrate():
    """Measures the references that the walk itself adds: interpreters differ."""
    global _EXTRA
    for _EXTRA in range(-1, 6):
        if _walk({"probe": [[], {}]}, "probe"):
            return
    _EXTRA = -1000


_EXTRA = 1
_calibrate()
