"""Figures of the driver: start, latency, output. Not a test: prints what it measures, beside an echo over the same socket
pair, because machines differ.

Run: /usr/bin/python3 tests/python_driver/measure.py
"""
import json
import os
import socket
import struct
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from engine import Engine, Result, compiled_driver, driver_image  # noqa: E402


def spread(times, unit=1e6):
    times = sorted(times)
    return "min %.0f  p50 %.0f  p90 %.0f" % tuple(times[int(len(times) * at)] * unit for at in (0, 0.5, 0.9))


def latency(sock, code, count=2000, warm=100):
    times = []
    for number in range(count + warm):
        body = json.dumps({"op": "exec", "id": number, "exec": number, "code": code, "env": [], "stdin": False}).encode()
        data = struct.pack("<II", len(body), 0) + body
        begun = time.perf_counter()
        sock.send(data)  # and small buffers here: a large one costs this side a mapping for each answer
        answer = sock.recv(1 << 14)
        while b'"ev":"end"' not in answer:
            answer += sock.recv(1 << 14)
        times.append(time.perf_counter() - begun)
    return spread(times[warm:]) + " us"


def echo():
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        while theirs.recv(65536):
            theirs.send(b'"ev":"end"' * 20)
        os._exit(0)
    print("echo in Python         ", latency(ours, "1+1"))
    theirs.close()
    ours.close()
    os.waitpid(pid, 0)


def main():
    image, times = driver_image(compiled_driver()), []
    for _ in range(20):
        with Engine(image=image) as engine:
            times.append(engine.start_ms / 1000)
    print("start to ready         ", spread(times, 1e3), "ms")
    echo()
    with Engine() as engine:
        for code in ("1+1", "x=1", "x", "l=[1]", "import os; os.getpid()"):
            print(f"{code:<23}", latency(engine.sock, code))
        engine.run("big = list(range(10**6))")
        print("with a list of 1e6: 1+1", latency(engine.sock, "1+1"))
        print("                    y=2", latency(engine.sock, "y=2"))
        print("               len(big)", latency(engine.sock, "len(big)", 10, 2))
        engine.run("data = b'x' * 10**8")
        print("with 100 MB bytes:  1+1", latency(engine.sock, "1+1"))
        print("                    y=2", latency(engine.sock, "y=2"))
        print("              len(data)", latency(engine.sock, "len(data)", 200, 10))
    with Engine() as engine:
        begun = time.perf_counter()
        result = engine.run("import sys; sys.stdout.write('x' * (256 << 20));", timeout=60)
        print("one large write         %.0f MB/s" % (len(result.out) / 1048576 / (time.perf_counter() - begun)))
        begun = time.perf_counter()
        engine.run("for i in range(300000): print(i)", timeout=60)
        print("many prints             %.2f us each" % ((time.perf_counter() - begun) / 0.3))


if __name__ == "__main__":
    main()
