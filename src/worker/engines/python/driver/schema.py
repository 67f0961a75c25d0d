"""User functions as tools: name, description and a JSON schema of the arguments, from the signature.

Evaluates string annotations at most; calls nothing.
"""
from types import FunctionType

from _ryokan import brief, gate

_SIMPLE = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null", dict: "object"}
_ARRAYS = (list, tuple, set, frozenset)


def tools_of(namespace):
    """The functions of `__main__` that may be called by name; a leading underscore hides one."""
    listed = []
    for name, obj in sorted(namespace.items(), key=lambda item: str(item[0])):
        if type(name) is not str or name.startswith("_") or not _is_tool(obj):
            continue
        doc = (getattr(obj, "__doc__", None) or "").strip()
        described, error = gate.guard(schema_of, obj)
        listed.append(
            {
                "name": name,
                "description": brief.cut(doc.split("\n", 1)[0], 500),
                "source": "user",
                "schema": described if error is None else None,
            }
        )
    return listed


def _is_tool(obj):
    if type(obj) is FunctionType:
        return obj.__module__ == "__main__"
    return type(obj).__name__ == "_lru_cache_wrapper" and getattr(obj, "__module__", None) == "__main__"


def schema_of(function):
    """JSON schema of a function's named arguments."""
    import inspect
    import typing

    signature = inspect.signature(function)
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # an annotation that cannot be evaluated
        hints = getattr(function, "__annotations__", {})
    properties, required, more = {}, [], False
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            more = True
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue
        described = _type(hints.get(name), typing) if name in hints else {}
        if parameter.default is parameter.empty:
            required.append(name)
        elif _is_json(parameter.default):
            described = {**described, "default": parameter.default}
        properties[name] = described
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": more}


def _type(hint, typing, depth=0):
    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint]}
    if hint in _ARRAYS:
        return {"type": "array"}
    if depth > 8 or isinstance(hint, str):
        return {}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Union or type(hint).__name__ == "UnionType":
        return {"anyOf": [_type(each, typing, depth + 1) for each in arguments]}
    if origin is typing.Literal:
        return {"enum": [each for each in arguments if _is_json(each)]}
    if origin in _ARRAYS or getattr(origin, "__name__", "") in ("Sequence", "Iterable", "Collection"):
        items = [each for each in arguments if each is not ...]
        same = origin is not tuple or len(items) == 1
        return {"type": "array", "items": _type(items[0], typing, depth + 1)} if items and same else {"type": "array"}
    if origin is dict or getattr(origin, "__name__", "") == "Mapping":
        if len(arguments) == 2 and arguments[0] is str:
            return {"type": "object", "additionalProperties": _type(arguments[1], typing, depth + 1)}
        return {"type": "object"}
    if getattr(typing, "Annotated", None) is not None and hasattr(hint, "__metadata__"):
        described = _type(hint.__origin__, typing, depth + 1)
        texts = [each for each in hint.__metadata__ if isinstance(each, str)]
        return {**described, "description": texts[0]} if texts else described
    members = getattr(hint, "__members__", None)
    if isinstance(hint, type) and members is not None:
        return {"enum": [member.value for member in members.values() if _is_json(member.value)]}
    return {}


def _is_json(obj):
    kind = type(obj)
    if kind is float:
        return obj - obj == 0  # neither NaN nor infinite
    if kind is int:
        return -(1 << 63) <= obj < 1 << 63
    if kind in (list, tuple):
        return len(obj) < 100 and all(map(_is_json, obj))
    return obj is None or kind is bool or kind is str
