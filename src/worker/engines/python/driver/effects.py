"""Effects of compiled code: the names that it may change.

Only reads code objects. Answers are supersets: a name is *touched* if the code mentions it at all, in any role;
*stored* if the code binds or deletes it. Code of functions may run at any later time, so its names count for ever. Code
that can reach the whole namespace by other ways than names (`globals()`, frames, `exec`) makes everything touched from
then on.
"""
import sys
from types import CodeType

import opcode

_SIZE_MAX = 64 << 10


def _opcodes(names):
    return frozenset(opcode.opmap[name] for name in names.split() if name in opcode.opmap)


_STORES = _opcodes("STORE_NAME STORE_GLOBAL DELETE_NAME DELETE_GLOBAL")
_ATTRIBUTES = _opcodes("LOAD_ATTR STORE_ATTR DELETE_ATTR LOAD_METHOD IMPORT_FROM LOAD_SUPER_ATTR")
_NAMED = frozenset(opcode.hasname)
_EXTENDED = opcode.opmap["EXTENDED_ARG"]
_LOAD_GLOBAL = opcode.opmap["LOAD_GLOBAL"]
_LOAD_GLOBAL_SHIFT = 1 if sys.version_info >= (3, 11) else 0
_IMPORT = opcode.opmap["IMPORT_NAME"]

# As names these reach the namespace or create code that this module does not see.
_REACHING_NAMES = frozenset(
    "exec eval compile globals locals vars __import__ breakpoint __main__ __builtins__ builtins ctypes inspect runpy"
    " code cloudpickle dill pdb doctest".split()
)
# In any role these do.
_REACHING = frozenset(
    "__globals__ f_globals f_locals f_back _getframe _current_frames get_objects get_referrers get_referents modules"
    " settrace setprofile import_module __main__ __code__ FunctionType CodeType currentframe tb_frame gi_frame".split()
)
_SAFE_BUILTINS = frozenset(
    "len range int float str bool bytes repr abs min max sum sorted list dict set tuple frozenset enumerate zip map"
    " filter reversed round divmod pow ord chr hex bin oct format isinstance print any all iter next slice complex"
    " bytearray hash ascii open __name__ __annotations__".split()
)
_LEAVES = frozenset((type(None), bool, int, float, complex, str, bytes, range))

_ever_touched = set()
_ever_stored = set()
_reaching = False


class Effects:
    """The names that an execution may touch and store; `harmless`: of existing objects it reaches only what it stores;
    `trivial`: it changes nothing."""

    __slots__ = ("touched", "stored", "imports", "everything", "harmless", "trivial")


def forget():
    """After a load: the earlier functions are gone."""
    global _reaching
    _ever_touched.clear()
    _ever_stored.clear()
    _reaching = False


def note(code):
    """Code of a function from outside of any execution."""
    effects = _blank()
    _scan(code, effects, set(), True)
    _settle(effects)


def of_call():
    """A function of the namespace is called: assume the effects of all functions."""
    effects = _blank()
    _settle(effects)
    effects.harmless = False
    return effects


def of_program(codes, namespace):
    """Effects of a program before it runs."""
    for code in codes:
        if not _is_trivial(code):
            break
    else:
        return _TRIVIAL
    effects = _blank()
    loaded = set()
    for code in codes:
        _scan(code, effects, loaded, False)
    _settle(effects)
    effects.harmless = not effects.everything and not effects.imports and _harmless(loaded, namespace)
    return effects


def _blank():
    effects = Effects()
    effects.touched, effects.stored, effects.imports = set(), set(), set()
    effects.everything = effects.trivial = effects.harmless = False
    return effects


def _settle(effects):
    global _reaching
    if effects.everything:
        _reaching = True
    effects.everything = _reaching
    effects.touched |= _ever_touched
    effects.stored |= _ever_stored


def _is_trivial(code):
    if code.co_names:
        return False
    for const in code.co_consts:
        if type(const) is CodeType:
            return False
    return True


def _harmless(loaded, namespace):
    """Whether every name that the code reads is absent, a safe builtin or an immutable leaf."""
    for name in loaded:
        if name in namespace:
            if type(namespace[name]) not in _LEAVES:
                return False
        elif name not in _SAFE_BUILTINS and name in _builtins:
            kind = _builtins[name]
            if not (isinstance(kind, type) and issubclass(kind, BaseException)):
                return False
    return True


_builtins = sys.modules["builtins"].__dict__


def _scan(code, effects, loaded, nested):
    names = code.co_names
    effects.touched.update(names)
    if nested:
        _ever_touched.update(names)
    for const in code.co_consts:
        if type(const) is CodeType:
            _scan(const, effects, loaded, True)
        elif const == ("*",):
            effects.everything = True
    if not _REACHING.isdisjoint(names):
        effects.everything = True
    data = code.co_code
    if len(data) > _SIZE_MAX:
        effects.stored.update(names)
        effects.everything = True
        return
    stored = set()
    high = 0
    for at in range(0, len(data), 2):
        op = data[at]
        if op == _EXTENDED:
            high = (high | data[at + 1]) << 8
            continue
        if op in _NAMED and op not in _ATTRIBUTES:
            index = high | data[at + 1]
            if op == _LOAD_GLOBAL:
                index >>= _LOAD_GLOBAL_SHIFT
            if index < len(names):
                if op in _STORES:
                    stored.add(names[index])
                else:
                    loaded.add(names[index])
                    if op == _IMPORT:
                        effects.imports.add(names[index])
        high = 0
    if not _REACHING_NAMES.isdisjoint(loaded):
        effects.everything = True
    effects.stored |= stored
    if nested:
        _ever_stored.update(stored)


_TRIVIAL = _blank()
_TRIVIAL.trivial = _TRIVIAL.harmless = True
