"""Tracebacks of user code, without the driver's frames, with source lines, bounded.

Owns the source texts of executions (in linecache, as `<exec 7>`). Never raises.
"""
import sys

TEXT_MAX = 64 << 10
_ERR_MAX = 1000
_SOURCES_BYTES = 32 << 20
_DRIVER = "<ryokan/"
# Frames of the event loop between the driver and awaited code.
_LOOP = ("/asyncio/",)

sources = {}
_sources_bytes = 0


def file_name(exec_id):
    return f"<exec {exec_id}>"


def remember(name, source):
    """Stores a source for tracebacks, inspect.getsource and saved definitions; evicts the oldest beyond the limit."""
    global _sources_bytes
    _sources_bytes += len(source) - len(sources.get(name, ""))
    sources[name] = source
    while _sources_bytes > _SOURCES_BYTES and len(sources) > 1:
        oldest = next(iter(sources))
        _sources_bytes -= len(sources.pop(oldest))
        cache = getattr(sys.modules.get("linecache"), "cache", None)
        if cache is not None:
            cache.pop(oldest, None)
    linecache = sys.modules.get("linecache")
    if hasattr(linecache, "cache"):  # an interrupted import leaves a part of it
        _enter(linecache, name, source)


def _enter(linecache, name, source):
    lines = source.splitlines(True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    linecache.cache[name] = (len(source), None, lines, name)


def warm():
    """Loads the modules for tracebacks, ignoring modules of the same name in the workspace."""
    if "traceback" not in sys.modules:
        was = list(sys.path)
        sys.path[:] = [path for path in was if path]
        try:
            import traceback  # noqa: F401 (with linecache)
        finally:
            sys.path[:] = was
    import linecache
    import traceback

    for name, source in sources.items():
        if name not in linecache.cache:
            _enter(linecache, name, source)
    return traceback


def user_part(tb):
    """The traceback without the driver's and the event loop's frames."""
    kept = []
    seen_user = False
    while tb is not None:
        name = tb.tb_frame.f_code.co_filename
        seen_user = seen_user or name.startswith("<exec ")
        if not name.startswith(_DRIVER) and (seen_user or not any(part in name for part in _LOOP)):
            kept.append(tb)
        tb = tb.tb_next
    if len(kept) > 400:
        kept = kept[:200] + kept[-200:]
    following = None
    for tb in reversed(kept):
        tb.tb_next = following
        following = tb
    return following


def _strip(error, seen):
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        try:
            error.__traceback__ = user_part(error.__traceback__)
        except Exception:
            return
        if error.__cause__ is not None:
            _strip(error.__cause__, seen)
        for inner in getattr(error, "exceptions", None) or () if "Group" in type(error).__name__ else ():
            if isinstance(inner, BaseException):
                _strip(inner, seen)
        error = error.__context__


def describe(error):
    """(text for stderr, last line)."""
    try:
        traceback = warm()
        _strip(error, set())
        last = "".join(traceback.format_exception_only(type(error), error))
        if isinstance(error, SyntaxError):
            last = last.strip().rsplit("\n", 1)[-1]
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except KeyboardInterrupt:
        raise
    except BaseException:  # user code may define __str__, __notes__ and __class__, and memory may be short
        text = last = _name(error) + "\n"
    last = " ".join(last.split())
    if len(last) > _ERR_MAX:
        last = last[: _ERR_MAX - 1] + "…"
    if len(text) > TEXT_MAX:
        text = text[: TEXT_MAX // 2] + "\n…\n" + text[-TEXT_MAX // 2 :]
    return text, last


def _name(error):
    try:
        return type(error).__name__
    except Exception:
        return "exception"
