"""A wire between source and target that fails once, at the first frame of one name in one direction.

usage: wire_faults.py {there,back} FRAME {cut,flip,stall} TOLD COMMAND

The file TOLD is written before the fault; if it exists already, everything is passed on.
"""

import os
import subprocess
import sys
import threading
import time

KINDS = {1: None, 2: "question", 3: "answer", 4: "object", 5: "chunk", 6: "piece", 7: "chunks"}


def name(kind, body):
    if kind not in (1, 8):
        return KINDS.get(kind, "unknown")
    # The tag comes first.
    return body.split(b'"message":"', 1)[-1].split(b'"', 1)[0].decode()


def flipped(kind, body):
    """One bit of the last digit of a message, which stays readable; else of the first byte."""
    digits = [at for at, byte in enumerate(body) if kind in (1, 8) and at >= 8 and chr(byte).isdigit()]
    at, bit = (digits[-1], 1) if digits else (0, 64)
    return body[:at] + bytes([body[at] ^ bit]) + body[at + 1 :]


def exactly(source, count):
    data = b""
    while len(data) < count:
        more = source.read(count - len(data))
        if not more:
            return None
        data += more
    return data


def main():
    side, wanted, fault, told, command = sys.argv[1:]
    target = subprocess.Popen(["/bin/sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def fails(own, kind, body):
        if own != side or name(kind, body) != wanted or os.path.exists(told):
            return False
        open(told, "w").close()
        return True

    def end():
        # Both directions end at once, as those of a process do.
        target.kill()
        os._exit(1)

    def pump(own, source, sink):
        while (head := exactly(source, 5)) is not None:
            body = exactly(source, int.from_bytes(head[1:], "little"))
            if body is None:
                break
            if fails(own, head[0], body):
                if fault == "cut":
                    sink.write((head + body)[: 5 + len(body) // 2])
                    sink.flush()
                    end()
                if fault == "stall":
                    time.sleep(600)
                body = flipped(head[0], body)
            try:
                sink.write(head + body)
                sink.flush()
            except OSError:
                break
        try:
            sink.close()
        except OSError:
            pass
        if own == "back":
            target.wait()
            os._exit(0)

    there = threading.Thread(target=pump, args=("there", sys.stdin.buffer, target.stdin), daemon=True)
    there.start()
    pump("back", target.stdout, sys.stdout.buffer)


main()
