"""Completion, and whether a program is complete.

Never runs properties or other descriptors of user objects; lists modules without importing them.
"""
import builtins
import keyword
import sys
from types import FunctionType, MethodType, ModuleType

from _ryokan import run

MATCHES_MAX = 200
_modules_cache = (None, ())


def complete(code, cursor):
    """{"start": byte offset of the replaced text, "matches": […]}."""
    if type(code) is not str or type(cursor) is not int:
        raise ValueError("code and cursor are needed")
    before = code.encode("utf-8", "replace")[: max(cursor, 0)].decode("utf-8", "ignore")
    line = before.rsplit("\n", 1)[-1]
    word = _word(line)
    start = len(before.encode()) - len(word.encode())
    head = line[: len(line) - len(word)]
    found = _imports(head, word)
    if found is None:
        if head.endswith("."):
            found = _attributes(_chain(head[:-1]))
        else:
            found = _names()
    matches = sorted({name for name in found if name.startswith(word) and (word or not name.startswith("_"))})
    if not word.startswith("_"):
        matches = [name for name in matches if not name.startswith("_")]
    return {"start": start, "matches": matches[:MATCHES_MAX]}


def _word(line):
    at = len(line)
    while at and (line[at - 1].isalnum() or line[at - 1] == "_"):
        at -= 1
    return line[at:]


def _chain(head):
    """The dotted names at the end of `head`, or [] if it ends otherwise."""
    names = []
    while True:
        name = _word(head)
        if not name.isidentifier():
            return []
        names.append(name)
        head = head[: len(head) - len(name)]
        if not head.endswith("."):
            # The value of a call, an index or a literal is unknown.
            return names[::-1] if not head.endswith((")", "]", '"', "'")) else []
        head = head[:-1]


def _names():
    names = {name for name in run.namespace if type(name) is str and name.isidentifier()}
    return names | set(vars(builtins)) | set(keyword.kwlist)


def _attributes(chain):
    if not chain:
        return ()
    first, *rest = chain
    if first in run.namespace:
        obj = run.namespace[first]
    elif hasattr(builtins, first):
        obj = getattr(builtins, first)
    else:
        return ()
    for name in rest:
        found, obj = static(obj, name)
        if not found:
            return ()
    try:
        return [name for name in dir(obj) if type(name) is str]
    except Exception:  # user code may define __dir__
        return list(getattr(type(obj), "__dict__", ()))


def static(obj, name):
    """(found, attribute), without running user code."""
    if isinstance(obj, ModuleType):
        space = ModuleType.__getattribute__(obj, "__dict__")
        return name in space, space.get(name)
    kind = type(obj)
    found = _in_classes(kind, name)
    if found is not None and hasattr(type(found[0]), "__set__"):
        return _slot(obj, found[0])
    try:
        space = object.__getattribute__(obj, "__dict__")
        if isinstance(obj, type):
            own = _in_classes(obj, name)
            if own is not None:
                return _bound(own[0])
        elif name in space:
            return True, space[name]
    except Exception:
        pass
    if found is None:
        return False, None
    if isinstance(found[0], FunctionType):
        return True, MethodType(found[0], obj)
    return _bound(found[0])


def _slot(obj, descriptor):
    """Slots and attributes of C types read memory; any other may run code."""
    if type(descriptor).__name__ in ("member_descriptor", "getset_descriptor"):
        try:
            return True, descriptor.__get__(obj, type(obj))
        except Exception:
            return False, None
    return False, None


def _bound(attribute):
    if isinstance(attribute, (staticmethod, classmethod)):
        return True, attribute.__func__
    if hasattr(type(attribute), "__get__") and type(attribute).__name__ not in (
        "function",
        "builtin_function_or_method",
        "method_descriptor",
        "wrapper_descriptor",
        "classmethod_descriptor",
        "type",
    ):
        return False, None
    return True, attribute


def _in_classes(kind, name):
    for each in type.__getattribute__(kind, "__mro__"):
        space = type.__getattribute__(each, "__dict__")
        if name in space:
            return (space[name],)
    return None


def _imports(head, word):
    """Candidates inside an import statement, or None outside of one."""
    words = head.replace(",", " , ").split()
    if not words or words[0] not in ("import", "from"):
        return None
    if words[0] == "import":
        if len(words) > 1 and words[-1] not in (",",) and not head.endswith("."):
            return ["as"]
        package = words[-1][:-1] if head.endswith(".") else ""
        return _modules_in(package)
    if "import" in words[1:]:
        return _members(words[1])
    if len(words) == 1:
        return _modules_in("")
    if len(words) == 2 and head.endswith("."):
        return _modules_in(words[1][:-1])
    return ["import"]


def _modules_in(package):
    global _modules_cache
    import pkgutil

    if not package:
        key = tuple(path for path in sys.path if type(path) is str)
        if _modules_cache[0] != key:
            listed = {module.name for module in pkgutil.iter_modules()} | set(sys.builtin_module_names)
            listed |= set(getattr(sys, "stdlib_module_names", ()))
            _modules_cache = (key, listed)
            return listed
        return _modules_cache[1] | {module.name for module in pkgutil.iter_modules([""])}
    return {module.name for module in pkgutil.iter_modules(_package_path(package))}


def _package_path(package):
    loaded = sys.modules.get(package)
    if loaded is not None:
        return list(getattr(loaded, "__path__", ()))
    from importlib.machinery import PathFinder

    path = None
    for at, _ in enumerate(package.split(".")):
        spec = PathFinder.find_spec(".".join(package.split(".")[: at + 1]), path)
        if spec is None or spec.submodule_search_locations is None:
            return []
        path = list(spec.submodule_search_locations)
    return path


def _members(module):
    loaded = sys.modules.get(module)
    names = set(ModuleType.__getattribute__(loaded, "__dict__")) if isinstance(loaded, ModuleType) else set()
    return names | _modules_in(module)


def check(code):
    """{"status": "complete" | "incomplete" | "invalid", "indent"}, as for a prompt."""
    import codeop
    import warnings

    if type(code) is not str:
        raise ValueError("code is needed")
    compiler = codeop.CommandCompiler()
    compiler.compiler.flags |= 0x2000  # ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            whole = compiler(code, "<check>", "exec") is not None
        except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError):
            return {"status": "invalid"}
    lines = code.split("\n")
    if whole and not _in_block(lines):
        return {"status": "complete"}
    last = next((line for line in reversed(lines) if line.strip()), "")
    indent = last[: len(last) - len(last.lstrip())]
    if last.endswith("\\") or _in_text(lines):
        return {"status": "incomplete", "indent": ""}
    if last.split("#")[0].rstrip().endswith(":"):
        indent += "    "
    return {"status": "incomplete", "indent": indent}


def _in_text(lines):
    """Whether the last line ends inside a multi-line string, where blanks count."""
    try:
        compile("\n".join(lines), "<check>", "exec", 0x2000, True)
    except SyntaxError as error:
        return "triple-quoted" in str(error.msg)
    except (ValueError, OverflowError, MemoryError, RecursionError):
        pass
    return False


def _in_block(lines):
    """Whether the last line is still inside an indented block; an empty line ends it."""
    last = lines[-1]
    if not last.strip() or not last[0].isspace():
        return False
    body = _parse(lines)
    return bool(body) and hasattr(body[-1], "body") and body[-1].end_lineno >= len(lines)


def _parse(lines):
    try:
        return compile("\n".join(lines), "<check>", "exec", 0x2400, True).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return []
