# An engine for tests: keeps docs/engine-contract.md, and runs Python code that may break it.
# argv[1]: Python code that runs before `ready` is sent. The control socket is fd 0.
import array, json, os, signal, socket, struct, sys, time

ctl = socket.socket(fileno=os.dup(0))
os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
buffer, fds = b"", []
variables, entries = {}, {}


def send(frame, tail=b""):
    body = json.dumps(frame).encode()
    ctl.sendall(struct.pack("<II", len(body), len(tail)) + body + tail)


def raw(data):
    ctl.sendall(data)


def receive():
    global buffer
    while True:
        if len(buffer) >= 8:
            a, b = struct.unpack("<II", buffer[:8])
            if len(buffer) >= 8 + a + b:
                frame, tail = json.loads(buffer[8 : 8 + a]), buffer[8 + a : 8 + a + b]
                buffer = buffer[8 + a + b :]
                return frame, tail
        data, ancillary, _, _ = ctl.recvmsg(1 << 20, socket.CMSG_SPACE(16))
        for _, _, passed in ancillary:
            got = array.array("i")
            got.frombytes(passed)
            fds.extend(got)
        if not data:
            sys.exit(0)
        buffer += data


def out(data):
    data = memoryview(data)
    while data:
        data = data[os.write(1, data) :]


def err(data):
    os.write(2, data)


def put(key, body, **meta):
    entries[key] = (meta, body)
    pieces = [body[i : i + (1 << 20)] for i in range(0, len(body), 1 << 20)] or [b""]
    for i, piece in enumerate(pieces):
        send({"ev": "put", "key": key, "meta": meta, "more": i + 1 < len(pieces)}, piece)


def tool(name, args, call=1):
    send({"ev": "tool_call", "call": call, "exec": current, "name": name, "args": args})
    while True:
        frame, _ = receive()
        if frame["op"] == "tool_result":
            return frame


def reply(frame, **fields):
    send({"ev": "reply", "id": frame["id"], "ok": True, **fields})


def fail(frame, code, message):
    send({"ev": "reply", "id": frame["id"], "ok": False, "code": code, "message": message})


class Silent(Exception):
    """No `end` is sent."""


def run(frame):
    global current
    current = frame["exec"]
    scope = dict(globals())
    scope["frame"] = frame
    if frame.get("stdin"):
        os.dup2(fds[-1], 0)
        os.close(fds.pop())
    end = {"ev": "end", "id": frame["id"], "exec": current, "status": "done", "code": 0}
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if frame["op"] == "call":
            end["value"] = frame["args"]
        else:
            exec(frame["code"], scope)
        if "value" in scope:
            end["value"] = scope["value"]
    except KeyboardInterrupt:
        end.update(status="interrupted", code=130)
    except Silent:
        return
    except SystemExit:
        raise
    except BaseException as error:
        end.update(status="failed", code=1, err=repr(error))
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if frame.get("stdin"):
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    send(end)


def main():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    loaded, partial = {}, {}
    exec(sys.argv[1], globals())
    send({"ev": "ready", "engine": "python", "version": "fake 1", "interrupt": "signal"})
    while True:
        frame, tail = receive()
        op = frame["op"]
        if op in ("exec", "call"):
            run(frame)
        elif op == "get":
            name = frame["name"]
            if "var/" + name in entries:
                reply(frame, value=entries["var/" + name][1].decode())
            else:
                fail(frame, "notFound", f"no {name}")
        elif op == "set":
            put("var/" + frame["name"], json.dumps(frame["value"]).encode(), type="str")
            reply(frame)
        elif op == "vars":
            reply(frame, vars=[{"name": k[4:], "type": "str", "summary": ""} for k in sorted(entries)])
        elif op == "tools":
            reply(frame, tools=[{"name": "t", "description": "d", "source": "user", "schema": {"a": 1}}])
        elif op == "complete":
            reply(frame, start=frame["cursor"], matches=["a", "b"])
        elif op == "check":
            reply(frame, status="incomplete", indent="  ")
        elif op == "save":
            for key, (meta, body) in list(entries.items()):
                put(key, body, **meta)
            reply(frame)
        elif op == "load":
            entries.clear()
        elif op == "entry":
            body = partial.pop(frame["key"], b"") + tail
            if frame.get("more"):
                partial[frame["key"]] = body
            else:
                entries[frame["key"]] = (frame.get("meta", {}), body)
        elif op == "loaded":
            if "var/poison" in entries:
                fail(frame, "corrupt", "poison")
            elif "var/deadly" in entries:
                os._exit(9)
            else:
                missed = [k for k in entries if k.startswith("odd/")]
                reply(frame, missed=[{"key": k, "type": "odd", "reason": "cannot"} for k in missed])
        elif op == "shutdown":
            sys.exit(0)


main()
