"""A target that keeps to the protocol up to one step, and then does something else. It keeps nothing.

target.py STEP NUMBER LIE FILE BOMB: at the NUMBER-th STEP it tells LIE, and creates FILE; BOMB holds a compressed piece.
Before "prepared" it always refuses: a target that says so decides, by the protocol, that the source lets go.
"""

import hashlib
import json
import os
import sys
import time

STEP, NUMBER, LIE, FILE, BOMB = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5]
seen = {}


def send(kind, body):
    data = bytes([kind]) + len(body).to_bytes(4, "little") + body
    while data:
        data = data[os.write(1, data):]


def say(message, **fields):
    body = json.dumps({"message": message, **fields}).encode()
    send(8, hashlib.sha256(body).digest()[:8] + body)


def read(count):
    data = b""
    while len(data) < count:
        piece = os.read(0, count - len(data))
        if not piece:
            sys.exit(0)
        data += piece
    return data


def refuse(text="it takes nothing", reason="hostile"):
    say("refused", error={"code": "refused", "message": text, "hint": "", "reason": reason})


def accept(**fields):
    say("accept", **{"missing": [], "kind": "checkpoint", "why": "", **fields})


def lie(bits):
    """Tells the lie; returns if the protocol may go on."""
    open(FILE, "w").close()
    if LIE == "silence":
        while os.read(0, 65536):
            pass
        sys.exit(0)
    elif LIE == "close":
        sys.exit(0)
    elif LIE == "garbage":
        os.write(1, os.urandom(4096))
    elif LIE == "long_frame":
        os.write(1, b"\x01\xff\xff\xff\xff" + b" " * 4096)
    elif LIE == "long_text":
        refuse("x" * (3 << 20), "\u202e" * 10_000)
    elif LIE == "deep_json":
        send(1, b"[" * 1_000_000)
    elif LIE == "bomb":
        send(6, open(BOMB, "rb").read())
    elif LIE == "own_objects":
        send(4, bytes(32) + (1 << 63).to_bytes(8, "little"))
        send(6, bytes(262144))
    elif LIE == "own_question":
        send(2, bytes(32) * 100)
    elif LIE in ("prepared", "live", "aborted", "flushed", "previewed"):
        say(LIE)
    elif LIE == "endless_flushed":
        while True:
            say("flushed")
    elif LIE == "endless_working":
        while True:
            say("working")
            time.sleep(0.0002)
    elif LIE == "endless_pieces":
        while True:
            send(6, bytes(262144))
    elif LIE == "short_bitmap":
        send(3, bits[:-1])
        return
    elif LIE == "long_bitmap":
        send(3, bits + b"\xff")
        return
    elif LIE == "all_held":
        send(3, bytes(len(bits)))
        return
    elif LIE == "random_bitmap":
        send(3, os.urandom(len(bits)))
        return
    elif LIE == "other_kind":
        accept(kind="teleport")
        return
    elif LIE == "suspend_kind":
        accept(kind="suspend")
        return
    elif LIE == "no_kind":
        accept(kind="\u202e" * 1000)
    elif LIE == "many_missing":
        accept(missing=["m" * 100] * 30_000)
        return
    elif LIE == "long_reason":
        accept(why="\x1b[2J" * 500_000)
        return
    elif LIE == "refuses_epoch":
        refuse("epoch 9 of kernel demo has ended", "epoch")
    else:
        raise ValueError(LIE)
    # It reads on: what follows must not depend on a closed connection.
    while os.read(0, 65536):
        pass
    sys.exit(0)


def is_now(step, bits=b""):
    seen[step] = seen.get(step, 0) + 1
    if step == STEP and seen[step] == NUMBER:
        lie(bits)
        return True
    return False


if not is_now("hello"):
    check = int.from_bytes(hashlib.sha256(b"\x77" * 16).digest()[:4], "little")
    hello = {"message": "hello", "protocol": "ryokan-handover", "version": 3, "host": "77" * 16, "check": check}
    send(1, json.dumps(hello).encode())
while True:
    head = read(5)
    body = read(int.from_bytes(head[1:], "little"))
    if head[0] in (2, 7):
        count = len(body) // 32
        bits = bytearray((count + 7) // 8)
        for at in range(count):
            bits[at // 8] |= 1 << (at % 8)
        if not is_now("question" if head[0] == 2 else "chunks", bytes(bits)):
            send(3, bytes(bits))
    elif head[0] in (1, 8):
        message = json.loads(body if head[0] == 1 else body[8:])["message"]
        if message == "offer" and not is_now("offer"):
            accept()
        elif message == "flush" and not is_now("flush"):
            say("flushed")
        elif message in ("preview", "previewState") and not is_now(message):
            say("previewed")
        elif message == "seal" and not is_now("seal"):
            refuse()
        elif message == "abort" and not is_now("abort"):
            say("aborted")
        elif message == "commit":
            refuse("a commit without prepared", "order")
