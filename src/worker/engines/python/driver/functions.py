"""Pickling what pickle refuses: functions of `__main__`, their code, cells, and objects built on them.

A function is saved as marshalled code with the interpreter's magic number, and as the source of the statement that
defined it, for another interpreter. Classes of `__main__` are saved by reference: state re-runs their source.
"""
import _pickle
import marshal
import sys
from types import CodeType, FunctionType, ModuleType

from _frozen_importlib_external import MAGIC_NUMBER
from _ryokan import definitions, effects

Cell = type((lambda x: lambda: x)(0).__closure__[0])
_main = sys.modules["__main__"]
_marshalled = {}


class Pickler(_pickle.Pickler):
    """Pickles by value what exists only in `__main__`."""

    def reducer_override(self, obj):
        kind = type(obj)
        reducer = _REDUCERS.get(kind)
        if reducer is not None:
            return reducer(obj)
        if isinstance(obj, type):
            return _class(obj)
        if kind.__name__ in _GENERATORS:
            for module, name in _SHARED_GENERATORS:
                if obj is getattr(sys.modules.get(module), name, None):
                    return _shared_generator, (module, name)
        if kind.__name__ == "_lru_cache_wrapper" and getattr(obj, "__module__", None) == "__main__":
            parameters = obj.cache_parameters()
            return _make_cached, (obj.__wrapped__, parameters["maxsize"], parameters["typed"])
        return NotImplemented


# The generators behind a module's functions, such as random.random. Saved by reference: their state is a setting.
_SHARED_GENERATORS = (("random", "_inst"), ("numpy.random.mtrand", "_rand"))
_GENERATORS = frozenset(("Random", "RandomState"))


def _shared_generator(module, name):
    import importlib

    return getattr(importlib.import_module(module), name)


def importable(obj):
    """(module, qualified name) if importing returns this very object, else None."""
    module = getattr(obj, "__module__", None)
    name = getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None)
    if type(module) is not str or type(name) is not str or module == "__main__" or module not in sys.modules:
        return None
    found = sys.modules[module]
    for part in name.split("."):
        try:
            found = found.__dict__[part]
        except (KeyError, AttributeError, TypeError):
            return None
    return (module, name) if found is obj else None


def _function(function):
    if importable(function) is not None:
        return NotImplemented
    space = function.__globals__
    module = space.get("__name__")
    if type(module) is not str or getattr(sys.modules.get(module), "__dict__", None) is not space:
        raise _pickle.PicklingError(f"function {function.__qualname__}: its globals are no module's")
    try:
        annotations = function.__annotations__
    except Exception:  # evaluated lazily since Python 3.14
        annotations = {}
    state = {
        "qualname": function.__qualname__,
        "module": function.__module__,
        "doc": function.__doc__,
        "defaults": function.__defaults__,
        "kwdefaults": function.__kwdefaults__,
        "annotations": annotations,
        "dict": function.__dict__,
    }
    made = (function.__code__, module, function.__name__, function.__closure__)
    return _make_function, made, state, None, None, _set_function


def _make_function(code, module, name, closure):
    import importlib

    space = _main.__dict__ if module == "__main__" else importlib.import_module(module).__dict__
    return FunctionType(code, space, name, None, closure)


def _set_function(function, state):
    function.__qualname__ = state["qualname"]
    function.__module__ = state["module"]
    function.__doc__ = state["doc"]
    function.__defaults__ = state["defaults"]
    function.__kwdefaults__ = state["kwdefaults"]
    if state["annotations"]:
        function.__annotations__ = state["annotations"]
    function.__dict__.update(state["dict"])


def _code(code):
    known = _marshalled.get(id(code))
    if known is None or known[0] is not code:
        if len(_marshalled) > 4096:
            _marshalled.clear()
        try:
            data = marshal.dumps(code, 2)  # without back references, which depend on other users of the constants
        except ValueError:
            data = marshal.dumps(code)
        known = _marshalled[id(code)] = (code, data)
    statement = definitions.containing(code.co_filename, code.co_firstlineno)
    form = None if statement is None or statement.text is None else tuple(statement.form().items())
    return _make_code, (MAGIC_NUMBER, known[1], code.co_name, code.co_firstlineno, form)


def _make_code(magic, data, name, line, form):
    statement = definitions.Statement.of_form(dict(form)) if form is not None else None
    if magic == MAGIC_NUMBER:
        code = marshal.loads(data)
    elif statement is None:
        raise _pickle.UnpicklingError(f"function {name} was saved by another Python version, and without its source")
    else:
        code = _find(statement.compile(), name, line)
        if code is None:
            raise _pickle.UnpicklingError(f"function {name} is not in its recorded source")
    effects.note(code)
    if statement is not None:
        definitions.adopt(None, statement)
    return code


def _find(code, name, line):
    """The code of a function inside compiled source: by name, and the nearest line."""
    found, at = None, [code]
    while at:
        for const in at.pop().co_consts:
            if type(const) is CodeType:
                at.append(const)
                if const.co_name == name:
                    if found is None or abs(const.co_firstlineno - line) < abs(found.co_firstlineno - line):
                        found = const
    return found


def _cell(cell):
    try:
        contents = (cell.cell_contents,)
    except ValueError:
        contents = ()
    return _make_cell, (), contents or False, None, None, _set_cell


def _make_cell():
    return Cell()


def _set_cell(cell, contents):
    if contents:
        cell.cell_contents = contents[0]


def _module(module):
    name = module.__name__
    if sys.modules.get(name) is not module:
        raise _pickle.PicklingError(f"module {name} cannot be imported by its name")
    return _make_module, (name,)


def _make_module(name):
    import importlib

    return importlib.import_module(name)


def _class(kind):
    if kind.__module__ != "__main__":
        return NotImplemented
    name = kind.__qualname__
    if "<locals>" in name:
        raise _pickle.PicklingError(f"class {name} is defined inside a function")
    top, *inner = name.split(".")
    found = outer = _main.__dict__.get(top)
    for part in inner:
        found = getattr(found, part, None)
    if found is not kind:
        raise _pickle.PicklingError(f"class {name} is no longer what __main__.{name} is")
    if not isinstance(outer, type) or not definitions.is_recorded(top, outer):
        raise _pickle.PicklingError(f"class {name}: the source of its definition is not known")
    return NotImplemented


def _make_cached(function, maxsize, typed):
    from functools import lru_cache

    return lru_cache(maxsize, typed)(function)


def _wrapped(kind):
    return lambda obj: (kind, (obj.__func__,))


def _property(obj):
    return property, (obj.fget, obj.fset, obj.fdel, obj.__doc__)


_REDUCERS = {
    FunctionType: _function,
    CodeType: _code,
    Cell: _cell,
    ModuleType: _module,
    staticmethod: _wrapped(staticmethod),
    classmethod: _wrapped(classmethod),
    property: _property,
    type: _class,
}
