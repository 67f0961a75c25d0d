"""Frames on the control socket: the framing of docs/engine-contract.md.

Owns the socket, the receive buffer and the descriptors that come along. Does not interpret frames. A frame is sent
and received whole: interrupts wait (see gate).
"""
import _socket
import os
from _thread import allocate_lock

from _ryokan import gate

JSON_MAX = 16 << 20
TAIL_MAX = 1 << 20
# A descriptor number that user code does not meet by accident.
_FD_MIN = 100

_sock = None
_buffer = bytearray()
# Reused: a fresh buffer for each call would make the allocator ask the kernel for memory each time.
_landing = memoryview(bytearray(1 << 17))
_posted = []
_posted_bytes = 0
_lock = allocate_lock()
descriptors = []


class Malformed(Exception):
    """The peer broke the framing: the next frame cannot be found."""


class Gone(Exception):
    """The peer closed the socket, or this is a forked child that must not send."""


def _codec():
    """JSON from the C accelerator alone: importing `json` would load `re` and `enum`, 5 ms of start."""
    try:
        import _json

        class Plain:
            strict, parse_float, parse_int, parse_constant = False, float, int, float
            object_hook = object_pairs_hook = None
            memo = {}

        def refuse(obj):
            raise TypeError(f"{type(obj).__name__} is not JSON")

        scan = _json.make_scanner(Plain)
        quote = getattr(_json, "encode_basestring", None) or _json.encode_basestring_ascii
        pieces = _json.make_encoder(None, refuse, quote, None, ":", ",", False, False, True)
        pieces({"a": [1, None, "b"]}, 0)
        return (lambda text: scan(text, 0)), (lambda obj: "".join(pieces(obj, 0))), quote
    except (ImportError, AttributeError, TypeError):
        import json

        decoder, encoder = json.JSONDecoder(strict=False), json.JSONEncoder(ensure_ascii=False)
        return (lambda text: decoder.raw_decode(text)), encoder.encode, json.dumps


scan, dumps, quote = _codec()


def open_socket():
    """Moves fd 3 out of user code's way."""
    global _sock
    import fcntl

    moved = fcntl.fcntl(3, fcntl.F_DUPFD_CLOEXEC, _FD_MIN)
    os.close(3)
    _sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, fileno=moved)


def fileno():
    """The socket's descriptor."""
    return _sock.fileno()


def alive():
    """Whether this process may send."""
    return _sock is not None


def forget():
    """In a forked child: the socket belongs to the parent."""
    global _sock, _lock, _posted_bytes
    if _sock is not None:
        _sock.close()
    _sock = None
    _lock = allocate_lock()
    _buffer.clear()
    _posted.clear()
    _posted_bytes = 0
    descriptors.clear()


def adopt(fd):
    """In a snapshot: replaces the engine's socket by its own."""
    global _sock
    import fcntl

    forget()
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FD_MIN)
    os.close(fd)
    _sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, fileno=moved)


def _encode(frame, tail):
    text = dumps(frame) if type(frame) is dict else frame
    body = text.encode("utf-8", "replace")  # a lone surrogate is not UTF-8
    if len(body) > JSON_MAX or len(tail) > TAIL_MAX:
        raise ValueError(f"frame of {len(body)} + {len(tail)} bytes breaks the limits")
    return len(body).to_bytes(4, "little") + len(tail).to_bytes(4, "little") + body + tail


def post(frame, tail=b""):
    """Queues a frame; `send` and `flush` send queued frames first. For the main thread only."""
    global _posted_bytes
    piece = _encode(frame, tail)
    _posted.append(piece)
    _posted_bytes += len(piece)
    if _posted_bytes > 1 << 18:
        flush()


def flush():
    """Sends the queued frames."""
    global _posted_bytes
    if _posted:
        whole = b"".join(_posted) if len(_posted) > 1 else _posted[0]
        _posted.clear()
        _posted_bytes = 0
        _send(whole)


def send(frame, tail=b""):
    """Sends one frame now (a dict or its JSON text)."""
    piece = _encode(frame, tail)
    if _posted and gate.get_ident() == gate.main_thread:
        _posted.append(piece)
        flush()
    else:
        _send(piece)


def _send(whole):
    gate.hold()
    try:
        with _lock:
            if _sock is None:
                raise Gone("a forked child cannot speak to the service")
            _sock.sendall(whole)
    finally:
        gate.release()


def buffered():
    """Whether a whole frame may have arrived."""
    return len(_buffer) >= 8


def receive():
    """The next frame: (dict, tail). Blocks; call with the gate closed or held."""
    while len(_buffer) < 8:
        _fill()
    json_len = int.from_bytes(_buffer[:4], "little")
    tail_len = int.from_bytes(_buffer[4:8], "little")
    if json_len > JSON_MAX or tail_len > TAIL_MAX:
        raise Malformed(f"frame of {json_len} + {tail_len} bytes breaks the limits")
    end = 8 + json_len + tail_len
    while len(_buffer) < end:
        _fill()
    try:
        text = _buffer[8 : 8 + json_len].decode()
        frame, stop = scan(text)
    except (ValueError, StopIteration, RecursionError, SystemError) as error:
        # SystemError: the accelerator raises it when `json.decoder`, which defines its exception, is not loaded.
        raise Malformed(f"not a JSON object: {error}") from None
    if type(frame) is not dict or text[stop:].strip():
        raise Malformed("not one JSON object")
    tail = bytes(_buffer[8 + json_len : end])
    del _buffer[:end]
    return frame, tail


def _has_unread():
    """For an interrupt that arrives while nothing runs."""
    if _buffer:
        return True
    try:
        return bool(_sock.recv(1, _socket.MSG_PEEK | _socket.MSG_DONTWAIT))
    except OSError:
        return False


gate.has_unread = _has_unread


def _fill():
    # Until the flag is set the bytes stay unread, so an interrupt for the next frame cannot count as late.
    _sock.recv(1, _socket.MSG_PEEK)
    gate.received = True
    size, ancillary, _flags, _peer = _sock.recvmsg_into([_landing], 128, _socket.MSG_CMSG_CLOEXEC)
    for level, kind, raw in ancillary:
        if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
            for at in range(0, len(raw) - 3, 4):
                descriptors.append(int.from_bytes(raw[at : at + 4], "little"))
    if not size:
        if _buffer:
            raise Malformed("the control socket ended inside a frame")
        raise Gone("the control socket is closed")
    _buffer.extend(_landing[:size])


def number(frame, name):
    """A field that must be an integer."""
    found = frame.get(name)
    if type(found) is not int:
        raise Malformed(f"{name} is no number")
    return found


def close_descriptors():
    """Closes received descriptors that were not used."""
    while descriptors:
        os.close(descriptors.pop())
