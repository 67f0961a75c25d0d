"""Rich forms of objects: `_repr_html_` and others, as `display` frames.

Owns the `display` builtin. A form that fails is reported on stderr and left out; one beyond 1 MiB is named, not sent.
"""
import sys

from _ryokan import brief, streams, trace, wire

# The running execution, for frames that name it; None between executions and in forked children.
current_exec = None

_METHODS = (
    ("_repr_html_", "text/html"),
    ("_repr_markdown_", "text/markdown"),
    ("_repr_svg_", "image/svg+xml"),
    ("_repr_png_", "image/png"),
    ("_repr_jpeg_", "image/jpeg"),
    ("_repr_latex_", "text/latex"),
    ("_repr_json_", "application/json"),
)
_PLAIN = frozenset(
    (type(None), bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, type)
)
_INPUT = "application/vnd.ryokan.input+json"
_asked = 0
_BASE64 = ("image/png", "image/jpeg", "application/pdf")


def display(*objs, **_ignored):
    """Shows objects: their rich forms if any, else their repr on stdout."""
    for obj in objs:
        forms = _forms(obj) if current_exec is not None else {}
        if not forms:
            print(obj if type(obj) is str else brief.text(obj, 64 << 10))
            continue
        forms.setdefault("text/plain", brief.text(obj, 64 << 10))
        for mime, data in forms.items():
            _send(mime, data)


def ask():
    """Requests a line of input: a display for clients that ask a person."""
    global _asked
    _asked += 1
    _send(_INPUT, {"number": _asked})


def display_result(obj):
    """The rich forms of an execution's result; its repr is sent separately."""
    if type(obj) in _PLAIN:
        return
    for mime, data in _forms(obj).items():
        if mime != "text/plain":
            _send(mime, data)


def _forms(obj):
    """{mime: data} of the forms that the object's class offers."""
    kind = type(obj)
    if isinstance(obj, type) or kind in _PLAIN:
        return {}
    forms = {}
    bundle = getattr(kind, "_repr_mimebundle_", None)
    if bundle is not None:
        made = _try(bundle, obj)
        made = made[0] if type(made) is tuple and made else made
        if isinstance(made, dict):
            forms.update(made)
    for method, mime in _METHODS:
        offered = getattr(kind, method, None)
        if offered is not None and mime not in forms:
            made = _try(offered, obj)
            made = made[0] if type(made) is tuple and len(made) == 2 and type(made[1]) is dict else made
            if made is not None:
                forms[mime] = made
    if not forms and "matplotlib.figure" in sys.modules and hasattr(obj, "savefig"):
        made = _try(_figure, obj)
        if made is not None:
            forms["image/png"] = made
    return forms


def _figure(figure):
    import io

    into = io.BytesIO()
    figure.savefig(into, format="png", bbox_inches="tight")
    return into.getvalue()


def _try(method, obj):
    try:
        return method(obj)
    except NotImplementedError:
        return None
    except Exception as error:
        streams.write_err(trace.describe(error)[0])
        return None


def _send(mime, data):
    if type(mime) is not str or current_exec is None:
        return
    try:
        tail = _bytes(mime, data)
    except Exception as error:
        streams.write_err(f"display: {mime} left out: {error}\n")
        return
    if len(tail) > wire.TAIL_MAX:
        streams.write_err(f"display: {mime} of {len(tail)} bytes left out: at most {wire.TAIL_MAX}\n")
        return
    wire.send({"ev": "display", "exec": current_exec, "mime": mime[:200]}, tail)


def _bytes(mime, data):
    if isinstance(data, (bytes, bytearray, memoryview)):
        return bytes(data)
    if mime.endswith("json") and not isinstance(data, str):
        import json

        return json.dumps(data).encode()
    if mime in _BASE64 and isinstance(data, str):
        from binascii import a2b_base64

        return a2b_base64(data)
    if not isinstance(data, str):
        raise TypeError(f"{type(data).__name__} instead of text")
    return data.encode("utf-8", "backslashreplace")
