"""A small MCP server over standard input and output, for tests: honest, slow, broken and hostile.

server.py MODE [ARG]
  ok            every tool below
  mute          reads and never answers
  garbage       ok, with lines on stdout that are no messages
  flood         ok, with a megabyte on stderr before each answer
  pings         ok, with a thousand requests of its own before each answer to a call
  die           writes the reason to stderr and exits with code 3
  orphan FILE   ok, with a child that holds its pipes open; writes both process ids to FILE
  stubborn FILE ok, but continues when its input is closed and ignores SIGTERM; writes its process id to FILE
  deaf          ok until its first call, then reads no more
  pages         more than 512 tools, on pages of 100
  loop          a page that leads to itself
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time

MODE = sys.argv[1] if len(sys.argv) > 1 else "ok"
lock = threading.Lock()
cancelled = set()
extra = []


def send(message):
    with lock:
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        sys.stdout.flush()


def tool(name, **properties):
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"name": name, "description": f"the tool {name}", "inputSchema": schema}


def tools(cursor):
    if MODE == "pages":
        start = int(cursor or 0)
        page = {"tools": [tool(f"t{i}") for i in range(start, min(start + 100, 700))]}
        return page | ({"nextCursor": str(start + 100)} if start + 100 < 700 else {})
    if MODE == "loop":
        return {"tools": [tool("t" + str(time.monotonic_ns()))], "nextCursor": "again"}
    named = ["dense", "slow", "big", "endless", "fail", "crash", "grow", "env", "cancelled", "image", "ask", "odd", "error"]
    return {"tools": [tool("echo", value="string"), tool("add", a="number", b="number")] + [tool(n) for n in named] + extra}


def text(value, **more):
    return {"content": [{"type": "text", "text": value}], **more}


def call(ident, name, args):
    if name == "echo":
        return text(json.dumps(args), structuredContent=args)
    if name == "add":
        return text(str(args["a"] + args["b"]))
    if name == "slow":
        for _ in range(int(args.get("ms", 60_000)) // 10):
            if ident in cancelled:
                return None
            time.sleep(0.01)
        return text("late")
    if name == "big":
        return text("x" * int(args["bytes"]))
    if name == "dense":
        # As many JSON values as fit into a message: the most memory for the least text.
        body = ",".join(["[]"] * (8_000_000 // 3))
        with lock:
            sys.stdout.write('{"jsonrpc":"2.0","id":%d,"result":{"content":[],"structuredContent":[%s]}}\n' % (ident, body))
            sys.stdout.flush()
        return None
    if name == "endless":
        with lock:
            while True:
                sys.stdout.write("x" * 65536)
    if name == "fail":
        return text("this \x1b[31mwent wrong", isError=True)
    if name == "crash":
        print("I fall", file=sys.stderr, flush=True)
        os._exit(7)
    if name == "grow":
        extra.append(tool(f"grown{len(extra)}"))
        send({"method": "notifications/tools/list_changed"})
        return text("grown")
    if name == "env":
        return text("env", structuredContent=dict(os.environ))
    if name == "cancelled":
        return text("cancelled", structuredContent={"n": len(cancelled)})
    if name == "image":
        return {"content": [{"type": "image", "mimeType": "image/png", "data": "AAEC"}]}
    if name == "ask":
        send({"id": "mine", "method": "sampling/createMessage", "params": {"messages": [], "maxTokens": 1}})
        return text("asked")
    if name == "odd":
        return [1, 2, {"content": 5}]
    raise ValueError(f"no tool {name!r}")


def answer(ident, name, args):
    if MODE == "pings":
        for i in range(1000):
            send({"id": f"p{i}", "method": "ping"})
    if MODE == "flood":
        sys.stderr.write("noise " * 170_000)
        sys.stderr.flush()
    try:
        result = call(ident, name, args)
    except Exception as error:
        return send({"id": ident, "error": {"code": -32602, "message": str(error)}})
    if result is not None:
        send({"id": ident, "result": result})


def handle(message):
    method, ident, params = message.get("method"), message.get("id"), message.get("params") or {}
    if method == "initialize":
        info = {"name": "test", "version": "1"}
        capabilities = {"tools": {"listChanged": True}}
        version = params["protocolVersion"]
        send({"id": ident, "result": {"protocolVersion": version, "capabilities": capabilities, "serverInfo": info}})
    elif method == "tools/list":
        send({"id": ident, "result": tools(params.get("cursor"))})
    elif method == "tools/call":
        args = (ident, params["name"], params.get("arguments") or {})
        while MODE == "deaf":
            time.sleep(1)
        threading.Thread(target=answer, args=args, daemon=True).start()
    elif method == "notifications/cancelled":
        cancelled.add(params["requestId"])


def main():
    if MODE == "die":
        print("cannot find my data", file=sys.stderr)
        sys.exit(3)
    if MODE == "orphan":
        child = subprocess.Popen(["sleep", "1000"])
        with open(sys.argv[2], "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
    if MODE == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with open(sys.argv[2], "w") as file:
            file.write(f"{os.getpid()}")
    for line in sys.stdin:
        if MODE == "mute":
            continue
        if MODE == "garbage":
            with lock:
                sys.stdout.write('hello\n\n{"jsonrpc": \n[]\n\x00\xff\n42\n')
                if "initialize" not in line:
                    sys.stdout.write('{"jsonrpc":"2.0","id":999,"result":{}}\n')
                sys.stdout.write('{"jsonrpc":"2.0","method":"no/such","params":{"x":1}}\n')
        handle(json.loads(line))
    while MODE == "stubborn":
        time.sleep(1)


main()
