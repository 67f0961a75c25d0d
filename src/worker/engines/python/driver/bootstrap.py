# The text given to `python3 -I -c`: reads the driver's modules from fd 4, installs them as the in-memory package `_ryokan` and
# starts it. First comes the length of the compiled driver (8 bytes, little-endian; 0: none) and the compiled driver as
# compile.py made it, then the sources as one JSON object {"module name": "source"}. A module is loaded, or where the
# compiled driver is of another interpreter compiled, only when it is imported.
import os, sys


def bootstrap():
    from _frozen_importlib import ModuleSpec

    pieces = []
    while True:
        piece = os.read(4, 1 << 20)
        if not piece:
            break
        pieces.append(piece)
    os.close(4)
    whole = b"".join(pieces)
    end = 8 + int.from_bytes(whole[:8], "little")
    codes = _compiled(whole[8:end])
    sources = None if codes else _sources(whole[end:].decode())

    class Driver:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "_ryokan":
                return ModuleSpec(name, Driver, origin="ryokan", is_package=True)
            if name.startswith("_ryokan.") and name[8:] in (codes or sources):
                return ModuleSpec(name, Driver, origin="ryokan")
            return None

        @staticmethod
        def create_module(spec):
            return None

        @staticmethod
        def exec_module(module):
            name = module.__name__[8:]
            if not name:
                return
            if codes:
                import marshal

                code = marshal.loads(codes[name])
            else:
                code = compile(sources[name], "<ryokan/" + name + ".py>", "exec", dont_inherit=True, optimize=2)
            exec(code, module.__dict__)

    sys.meta_path.insert(0, Driver)
    from _ryokan import main

    return main.start


def _compiled(data):
    """Module names and marshalled code; `None` if this interpreter cannot use them."""
    if not data:
        return None
    try:
        from _frozen_importlib_external import MAGIC_NUMBER
        import marshal

        if data.startswith(MAGIC_NUMBER):
            return marshal.loads(data[len(MAGIC_NUMBER) :])
    except (ImportError, ValueError, EOFError, TypeError):
        pass
    return None


def _sources(text):
    try:
        import _json

        class Plain:  # What the C scanner needs of a decoder; importing `json` costs 5 ms for its regular expressions
            strict, parse_float, parse_int, parse_constant = True, float, int, float
            object_hook = object_pairs_hook = None
            memo = {}

        return _json.make_scanner(Plain)(text, 0)[0]
    except (ImportError, AttributeError):
        import json

        return json.loads(text)


bootstrap()()
