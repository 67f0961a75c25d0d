"""Short texts of objects: a bounded repr, and type names.

Never raises, except for an interrupt; a failing `__repr__` is named. Reads no more of a big builtin container
than fits the limit.
"""
from itertools import islice

_DEPTH_MAX = 60


def type_name(kind):
    """`list`, `numpy.ndarray`, `Point`: with the module only where it is informative."""
    try:
        module, name = kind.__module__, kind.__qualname__
        if type(name) is not str or type(module) is not str:
            return "object"
        return name[:200] if module in ("builtins", "__main__") else f"{module}.{name}"[:200]
    except Exception:
        return "object"


def cut(text, limit):
    return text if len(text) <= limit else text[: max(limit - 1, 0)] + "…"


def text(obj, limit):
    """repr(obj), at most `limit` UTF-8 bytes and an ellipsis."""
    kind = type(obj)
    if kind is int or kind is float or obj is None or kind is bool:
        return cut(_leaf(obj, kind, limit), limit)
    pieces = []
    left = _build(obj, pieces, limit, set(), 0)
    whole = "".join(pieces)
    if left < 0 or len(whole) > limit:
        whole = cut(whole, limit)
    if not whole.isascii():
        data = whole.encode("utf-8", "backslashreplace")
        if len(data) > limit:
            data = data[: max(limit - 3, 0)] + "…".encode()
        whole = data.decode("utf-8", "ignore")
    return whole


def line(obj, limit=200):
    """One line of at most `limit` characters."""
    whole = text(obj, limit)
    if "\n" in whole or "\r" in whole:
        whole = " ".join(whole.split())
    return cut(whole, limit)


def _leaf(obj, kind, limit):
    try:
        if kind is str or kind is bytes or kind is bytearray:
            return repr(obj) if len(obj) <= limit else repr(obj[:limit])[:-1] + "…"
        if kind is int and obj.bit_length() > 14000:
            return f"<int of {obj.bit_length()} bits>"
        made = repr(obj)
        return made if type(made) is str else str.__str__(made)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # user code may define __repr__
        return f"<{type_name(kind)} object, repr failed: {type(error).__name__}>"


_BRACKETS = {list: "[]", tuple: "()", set: "{}", dict: "{}", frozenset: ("frozenset({", "})")}


def _build(obj, pieces, left, path, depth):
    """Appends to `pieces` and returns the remaining budget (negative: cut)."""
    kind = type(obj)
    if kind not in _BRACKETS or not obj:
        made = _leaf(obj, kind, left)
        pieces.append(made)
        return left - len(made)
    first, last = _BRACKETS[kind]
    key = id(obj)
    if key in path or depth > _DEPTH_MAX:
        pieces.append(first + "..." + last)
        return left - 5
    path.add(key)
    pieces.append(first)
    left -= len(first) + len(last)
    separator = ""
    try:
        for item in islice(obj.items() if kind is dict else obj, max(left, 0) + 1):
            if left < 0:
                break
            pieces.append(separator)
            left -= len(separator)
            separator = ", "
            if kind is dict:
                left = _build(item[0], pieces, left, path, depth + 1)
                pieces.append(": ")
                item = item[1]
                left -= 2
            left = _build(item, pieces, left, path, depth + 1)
    except RuntimeError:  # changed by another thread
        pieces.append("…")
        left = -1
    path.discard(key)
    pieces.append(",)" if kind is tuple and len(obj) == 1 else last)
    return left
