"""Figures of the node driver: start, latency, memory. Not a test: prints what it measures.

Run: python3 -B tests/node_driver/measure.py [node flags…]
"""
import json
import os
import struct
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from engine import FLAGS, NODE, Engine  # noqa: E402


def spread(times, unit):
    times = sorted(times)
    return "min %.1f  p50 %.1f  p90 %.1f" % tuple(times[int(len(times) * at)] * unit for at in (0, 0.5, 0.9))


def latency(engine, code, count=1000, warm=200):
    times = []
    for number in range(count + warm):
        body = json.dumps({"op": "exec", "id": number, "exec": number, "code": code, "env": [], "stdin": False}).encode()
        begun = time.perf_counter()
        engine.sock.send(struct.pack("<II", len(body), 0) + body)
        answer = engine.sock.recv(1 << 16)
        while b'"ev":"end"' not in answer:
            answer += engine.sock.recv(1 << 16)
        times.append(time.perf_counter() - begun)
    return spread(times[warm:], 1e6) + " us"


def memory(engine):
    with open(f"/proc/{engine.pid}/status", encoding="ascii") as file:
        found = dict(line.split(":", 1) for line in file)
    return ", ".join(f"{name} {found[name].strip()}" for name in ("VmSize", "VmData", "VmRSS", "RssAnon", "Threads"))


def main():
    flags = sys.argv[1:] or FLAGS
    print("load", os.getloadavg(), "flags", flags)
    times = []
    for _ in range(10):
        begun = time.perf_counter()
        subprocess.run([NODE, *flags, "-e", "0"], check=True)
        times.append(time.perf_counter() - begun)
    print("node -e 0, start to end     ", spread(times, 1e3), "ms")
    ready, first = [], []
    for _ in range(12):
        with Engine(flags=flags) as engine:
            ready.append(engine.start_ms / 1e3)
            engine.run("1")
            first.append(time.perf_counter() - engine.started)
    print("start to ready              ", spread(ready, 1e3), "ms")
    print("start to the first answer   ", spread(first, 1e3), "ms")
    with Engine(flags=flags) as engine:
        engine.run("1")
        time.sleep(0.3)
        print("idle                        ", memory(engine))
        for code in ("1+1", "void 0", "await 1", "x = 1"):
            print(f"{code:<28}", latency(engine, code))
        engine.run("for (let i = 0; i < 50; i++) globalThis['v' + i] = {i, list: [i, i]}")
        print("with 50 small variables: 1+1", latency(engine, "1+1"))
        engine.run("const text = 'x'.repeat(1e7)")
        print("and 10 MB of text:       1+1", latency(engine, "1+1", 50, 5))
        engine.run("const bytes = Buffer.alloc(1e7)")
        print("and 10 MB of bytes:      1+1", latency(engine, "1+1", 50, 5))
        engine.run("const many = Array.from({length: 1e5}, (_, i) => i)")
        print("and an array of 1e5:     1+1", latency(engine, "1+1", 50, 5))
        print("afterwards                  ", memory(engine))
    with Engine(flags=flags) as engine:
        begun = time.perf_counter()
        result = engine.run("process.stdout.write('x'.repeat(256 << 20)); 0", timeout=60)
        print("one large write              %.0f MB/s" % (len(result.out) / 1048576 / (time.perf_counter() - begun)))
        begun = time.perf_counter()
        engine.run("for (let i = 0; i < 100000; i++) console.log(i)", timeout=60)
        print("many lines                   %.2f us each" % ((time.perf_counter() - begun) / 0.1))


if __name__ == "__main__":
    main()
