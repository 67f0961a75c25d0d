"""Drives a kernel through the Python package, and reports times in milliseconds.

Arguments: the daemon's socket and the kernel's name. Reads lines `FACE WHAT COUNT` from standard input, FACE `sync` or
`aio`, and answers each with one JSON list of COUNT times.
"""

import asyncio
import json
import sys
import time

import ryokan
from ryokan import aio

CONTENT = bytes(range(256)) * 4


def works(kernel):
    """What is measured, by name; in the asynchronous face each returns a coroutine."""
    return {
        "run": lambda: kernel.run_code("1+1"),
        "write": lambda: kernel.files.write("file", CONTENT),
        "read": lambda: kernel.files.read("file", "bytes"),
        "program": lambda: kernel.commands.run(["/bin/true"]),
    }


def check(what, result):
    if what == "read":
        assert result == CONTENT, len(result)
    elif what == "write":
        assert result.size == len(CONTENT), result
    else:
        assert result.ok, result


def several(work, what, count):
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        result = work()
        times.append((time.perf_counter() - begun) * 1000)
        check(what, result)
    return times


async def several_async(work, what, count):
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        result = await work()
        times.append((time.perf_counter() - begun) * 1000)
        check(what, result)
    return times


def main(socket, name):
    loop = asyncio.new_event_loop()
    host = ryokan.Host.connect(socket)
    aio_host = loop.run_until_complete(aio.Host.connect(socket).open())
    in_sync = works(host.get(name))
    in_aio = works(loop.run_until_complete(aio_host.get(name)))
    print("ready", flush=True)
    for line in sys.stdin:
        face, what, count = line.split()
        if face == "sync":
            times = several(in_sync[what], what, int(count))
        else:
            times = loop.run_until_complete(several_async(in_aio[what], what, int(count)))
        print(json.dumps(times), flush=True)
    loop.run_until_complete(aio_host.close())
    host.close()
    loop.close()


main(*sys.argv[1:])
