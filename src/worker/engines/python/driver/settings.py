"""State beside the namespace: working directory, import path, environment, compiler flags, random generator.

Each is a separate entry if it differs from the engine's initial settings.
"""
import os
import sys

from _ryokan import brief, run

_start = {}


def install():
    """Remembers the engine's initial settings."""
    _start["cwd"] = os.getcwd()
    _start["path"] = list(sys.path)
    _start["env"] = dict(os.environ)


def preload(modules):
    """Preloads modules into `sys.modules`, not into a namespace. Returns those that cannot be loaded."""
    import gc
    import importlib

    missed = []
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as error:
            missed.append({"key": name, "type": "module", "reason": brief.cut(f"{type(error).__name__}: {error}", 400)})
    gc.collect()
    gc.freeze()
    return {"missed": missed}


def bind(env):
    """Binds a warm engine: it enters the workspace and gets its kernel's variables."""
    os.chdir(_start["cwd"])
    os.environ.update(env)
    _start["path"] = list(sys.path)
    _start["env"] = dict(os.environ)
    _start.pop("data", None)


def reseed():
    """Seeds the generators in memory anew: the machine is a copy, and the original draws the same numbers."""
    random = sys.modules.get("random")
    if random is not None and hasattr(random, "seed"):
        random.seed(os.urandom(64))
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(list(os.urandom(64)))
    # OpenSSL's; without ssl and hashlib it is in use nowhere.
    openssl = sys.modules.get("_ssl")
    if openssl is not None:
        openssl.RAND_add(os.urandom(64), 64.0)


def rename(env):
    """Adopts the variables of the kernel that the copied engine belongs to now."""
    os.environ.update(env)
    _start["env"].update(env)
    _start.pop("data", None)


def reset():
    """Restores the initial settings, for a load."""
    try:
        os.chdir(_start["cwd"])
    except OSError:
        pass
    sys.path[:] = _start["path"]
    if dict(os.environ) != _start["env"]:
        os.environ.clear()
        os.environ.update(_start["env"])
    run.future_flags = 0


def current():
    """{key: (plain object, type)} of all differences from the initial settings."""
    found = {}
    try:
        cwd = os.getcwd()
        if cwd != _start["cwd"]:
            found["cwd"] = (cwd, "path")
    except OSError:  # the directory was removed
        pass
    if sys.path != _start["path"]:
        found["sys/path"] = ([[path for path in sys.path if type(path) is str], _start["path"]], "paths")
    if os.environ._data != _start_data():
        env, was = dict(os.environ), _start["env"]
        for name in env.keys() | was.keys():
            if env.get(name) != was.get(name):
                found["env/" + name] = (env.get(name), "text")
    if run.future_flags:
        found["opt/future"] = (run.future_flags, "flags")
    random = sys.modules.get("random")
    if random is not None and hasattr(random, "getstate"):
        found["random/python"] = (random.getstate(), "generator state")
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        found["random/numpy"] = (numpy_random.get_state(), "generator state")
    return found


def _start_data():
    if "data" not in _start:
        _start["data"] = {os.environ.encodekey(k): os.environ.encodevalue(v) for k, v in _start["env"].items()}
    return _start["data"]


def _path(saved):
    """The saved path; that of another interpreter or virtual environment with the present one's own entries."""
    if not (len(saved) == 2 and type(saved[0]) is list):  # an earlier release saved the path alone
        return saved
    path, start = saved
    if start == _start["path"]:
        return path
    own = [entry for entry in path if entry in start]
    merged = []
    for entry in path:
        if entry not in start:
            merged.append(entry)
        elif entry == own[0]:
            merged += _start["path"]
            own[0] = None
    return merged


def is_setting(key):
    return key in ("cwd", "sys/path", "opt/future") or key.startswith(("env/", "random/"))


def apply(key, value):
    """Restores one setting; raises on failure."""
    if key == "cwd":
        os.chdir(value)
    elif key == "sys/path":
        sys.path[:] = _path(value)
    elif key == "opt/future":
        run.future_flags = int(value)
    elif key == "random/python":
        import random

        random.setstate(value)
    elif key == "random/numpy":
        import numpy.random

        numpy.random.set_state(value)
    elif key.startswith("env/"):
        if value is None:
            os.environ.pop(key[4:], None)
        else:
            os.environ[key[4:]] = value
