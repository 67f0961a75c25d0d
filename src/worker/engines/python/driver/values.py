"""Values: Python objects to the tagged JSON form of docs/engine-contract.md and back.

No type is lost: an object without a value form becomes an opaque value with a short repr. Never calls user code except
`__repr__` for that, and numpy's own conversions.
"""
import sys
from binascii import a2b_base64, b2a_base64

from _ryokan import brief

DEPTH_MAX = 95  # the core refuses 100
BYTES_MAX = 8 << 20
_REPR_MAX = 4096
_INT64 = 1 << 63
# Decimal digits of an integer take quadratic time.
_INT_BITS_MAX = 400_000


class TooLarge(ValueError):
    """The value's JSON form exceeds its limit."""


class BadValue(ValueError):
    """The JSON is no valid value."""


class Blob:
    """A reference to a stored blob in a value."""

    __module__ = "ryokan"

    def __init__(self, id, size, content_type, hash):
        self.id, self.size, self.content_type, self.hash = id, size, content_type, hash

    def __repr__(self):
        return f"<blob {self.id or self.hash[:12]}, {self.size} bytes>"

    def __reduce__(self):
        return _blob, (self.id, self.size, self.content_type, self.hash)


def _blob(*fields):
    return Blob(*fields)


class Opaque:
    """An object of another engine without a value form: only its type's name and repr."""

    __module__ = "ryokan"

    def __init__(self, type, repr):
        self.type, self.repr = type, repr

    def __repr__(self):
        return f"<opaque {self.type}: {self.repr}>"

    def __reduce__(self):
        return _opaque, (self.type, self.repr)


def _opaque(*fields):
    return Opaque(*fields)


def int_digits(number):
    """Decimal digits beyond the interpreter's own conversion limit."""
    try:
        return str(number)
    except ValueError:
        was = sys.get_int_max_str_digits()
        sys.set_int_max_str_digits(0)
        try:
            return str(number)
        finally:
            sys.set_int_max_str_digits(was)


def opaque(obj):
    return {"O": {"type": brief.type_name(type(obj)), "repr": brief.text(obj, _REPR_MAX - 4)}}


def encode(obj, budget=BYTES_MAX):
    """The tagged form. Raises TooLarge as soon as it exceeds `budget` bytes."""
    kind = type(obj)
    if kind is int and -_INT64 <= obj < _INT64:
        return {"i": str(obj)}
    if obj is None or kind is bool:
        return obj
    return _Encoder(budget).value(obj, 1)


def encode_or_opaque(obj):
    """As `encode`, but an oversized value becomes opaque: for the result of an execution."""
    try:
        return encode(obj)
    except TooLarge:
        return opaque(obj)


class _Encoder:
    def __init__(self, budget):
        self.left = budget
        self.path = set()

    def spend(self, size):
        self.left -= size
        if self.left < 0:
            raise TooLarge

    def value(self, obj, depth):
        kind = type(obj)
        if kind is str:
            return self.text(obj)
        if kind is int:
            return self.integer(obj)
        self.spend(5)
        if obj is None or kind is bool:
            return obj
        if kind is float:
            self.spend(20)
            return {"f": "NaN" if obj != obj else repr(obj)}
        if isinstance(obj, (list, tuple)) and self.plain(kind):
            return self.within(self.array, obj, depth)
        if isinstance(obj, dict) and self.plain(kind):
            return self.within(self.object, obj, depth)
        if kind in (bytes, bytearray, memoryview):
            return self.raw(obj)
        if isinstance(obj, int) and self.plain(kind):
            return self.integer(int(obj))
        if kind is Blob:
            fields = {"id": obj.id, "size": str(obj.size), "contentType": obj.content_type, "hash": obj.hash}
            return {"b": fields}
        if kind is Opaque:
            return {"O": {"type": obj.type, "repr": obj.repr}}
        plain = self.numpy(obj)
        if plain is not obj:
            return self.value(plain, depth)
        return self.opaque(obj)

    @staticmethod
    def plain(kind):
        """Whether dropping the subclass is harmless: named tuples, OrderedDict, Counter and similar become values; enums
        and user classes stay opaque, except named tuples."""
        return kind.__module__ in ("builtins", "collections") or hasattr(kind, "_fields") and issubclass(kind, tuple)

    def text(self, obj):
        size = len(obj)
        self.spend(size + 3)
        if not obj.isascii():
            try:
                self.spend(len(obj.encode()) - size)
            except UnicodeEncodeError:
                return {"O": {"type": "str", "repr": brief.cut(ascii(obj[:_REPR_MAX]), _REPR_MAX - 4)}}
        return obj

    def integer(self, obj):
        if -_INT64 <= obj < _INT64:
            digits = str(obj)
            self.spend(len(digits) + 9)
            return {"i": digits}
        if obj.bit_length() > _INT_BITS_MAX:
            return self.opaque(obj)
        digits = int_digits(obj)
        self.spend(len(digits) + 9)
        return {"I": digits}

    def raw(self, obj):
        size = obj.nbytes if type(obj) is memoryview else len(obj)
        self.spend(size * 4 // 3 + 9)
        return {"x": b2a_base64(obj, newline=False).decode()}

    def opaque(self, obj):
        form = opaque(obj)
        self.spend(len(form["O"]["repr"]) + 40)
        return form

    def within(self, encode, obj, depth):
        key = id(obj)
        if key in self.path or depth > DEPTH_MAX:
            return self.opaque(obj)
        self.spend(len(obj) * 5)
        self.left += len(obj) * 5  # each element is counted itself; this only stops early
        self.path.add(key)
        try:
            return encode(obj, depth + 1)
        finally:
            self.path.discard(key)

    def array(self, obj, depth):
        return [self.value(item, depth) for item in obj]

    def object(self, obj, depth):
        pairs = []
        for key, item in obj.items():
            if type(key) is not str or not _is_utf8(key):
                return self.opaque(obj)
            self.spend(len(key) + 6)
            pairs.append([key, self.value(item, depth)])
        return {"o": pairs}

    @staticmethod
    def numpy(obj):
        """numpy's scalars and arrays as plain objects; others unchanged."""
        numpy = sys.modules.get("numpy")
        try:
            if numpy is not None and isinstance(obj, (numpy.generic, numpy.ndarray)):
                if isinstance(obj, numpy.ndarray):
                    if obj.dtype.kind in "biufSU" and obj.size * 5 <= BYTES_MAX:
                        return obj.tolist()
                    if obj.size * 5 > BYTES_MAX:
                        raise TooLarge
                elif obj.dtype.kind in "biufSU":
                    plain = obj.item()
                    return plain if type(plain) in (bool, int, float, str, bytes) else obj
        except AttributeError:
            pass
        return obj


def _is_utf8(text):
    if text.isascii():
        return True
    try:
        text.encode()
        return True
    except UnicodeEncodeError:
        return False


def decode(form, depth=0):
    """The object of a tagged form. Raises BadValue."""
    kind = type(form)
    if form is None or kind is bool or kind is str:
        return form
    if depth > DEPTH_MAX + 5:
        raise BadValue("value nested too deep")
    if kind is list:
        return [decode(item, depth + 1) for item in form]
    if kind is not dict or len(form) != 1:
        raise BadValue("not a tagged value")
    ((tag, content),) = form.items()
    try:
        if tag == "i":
            return int(content)
        if tag == "f":
            return float(content)
        if tag == "o":
            return {key: decode(item, depth + 1) for key, item in content}
        if tag == "x":
            data = a2b_base64(content)
            if b2a_base64(data, newline=False).decode() != content:
                raise ValueError
            return data
        if tag == "I":
            return _big(content)
        if tag == "b":
            return Blob(content["id"], int(content["size"]), content["contentType"], content["hash"])
        if tag == "O":
            return Opaque(content["type"], content["repr"])
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, BadValue):
            raise
        raise BadValue(f"malformed content of value tag {tag!r}") from None
    raise BadValue(f"unknown value tag {tag!r}")


def _big(digits):
    try:
        return int(digits)
    except ValueError:
        if not digits.lstrip("-").isdigit() or not hasattr(sys, "set_int_max_str_digits"):
            raise
        was = sys.get_int_max_str_digits()
        sys.set_int_max_str_digits(0)
        try:
            return int(digits)
        finally:
            sys.set_int_max_str_digits(was)
