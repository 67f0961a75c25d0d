"""Starts the driver as init does, and speaks the engine contract with it. Every wait has a deadline."""
import array
import functools
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
DRIVER = os.path.join(HERE, "..", "..", "src", "worker", "engines", "python", "driver")
PYTHON = os.environ.get("RYOKAN_TEST_PYTHON", "/usr/bin/python3")
DEADLINE_S = 180


def driver_modules():
    modules = {}
    for name in sorted(os.listdir(DRIVER)):
        if name.endswith(".py") and name not in ("bootstrap.py", "compile.py"):
            with open(os.path.join(DRIVER, name), encoding="utf-8") as file:
                modules[name[:-3]] = file.read()
    return json.dumps(modules).encode()


@functools.cache
def compiled_driver(python=PYTHON):
    """The compiled driver, as the daemon makes it."""
    with open(os.path.join(DRIVER, "compile.py"), encoding="utf-8") as file:
        arguments = [python, "-I", "-S", "-c", file.read()]
    return subprocess.run(arguments, input=driver_modules(), stdout=subprocess.PIPE, check=True).stdout


def driver_image(compiled):
    """The data that the engine reads from descriptor 4."""
    return len(compiled).to_bytes(8, "little") + compiled + driver_modules()


def bootstrap():
    with open(os.path.join(DRIVER, "bootstrap.py"), encoding="utf-8") as file:
        return file.read()


def as_value(form):
    """A tagged value as a Python object; opaque ones as their form."""
    if isinstance(form, dict):
        ((tag, content),) = form.items()
        if tag in ("i", "I"):
            return int(content)
        if tag == "f":
            return float(content)
        if tag == "o":
            return {key: as_value(item) for key, item in content}
        return form
    if isinstance(form, list):
        return [as_value(item) for item in form]
    return form


class Result:
    """One execution: its output, its events and its end."""

    def __init__(self):
        self.out, self.err = bytearray(), bytearray()
        self.events, self.end = [], None

    def of(self, kind):
        return [(frame, tail) for frame, tail in self.events if frame["ev"] == kind]

    @property
    def value(self):
        return as_value(self.end["value"])

    @property
    def text(self):
        return self.end["output"]["root"][0]["text"]

    @property
    def keys(self):
        return sorted({frame["key"] for frame, _ in self.of("put")})


class Engine:
    def __init__(self, python=PYTHON, state=None, image=None):
        self.cwd = tempfile.mkdtemp(prefix="ryokan-driver-")
        ours, theirs = socket.socketpair()
        out_r, out_w = os.pipe()
        err_r, err_w = os.pipe()
        src_r, src_w = os.pipe()
        null = os.open("/dev/null", os.O_RDONLY)
        env = {"HOME": self.cwd, "PATH": os.environ["PATH"], "LANG": "C.UTF-8", "TMPDIR": "/tmp", "USER": "guest"}
        self.started = time.perf_counter()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                wanted = [null, out_w, err_w, theirs.fileno(), src_r]
                safe = [os.dup2(fd, 50 + at, False) for at, fd in enumerate(wanted)]
                for at, fd in enumerate(safe):
                    os.dup2(fd, at, True)
                os.closerange(5, 200)
                os.chdir(self.cwd)
                os.execve(python, [python, "-I", "-c", bootstrap()], env)
            finally:
                os._exit(99)
        for fd in (null, out_w, err_w, src_r):
            os.close(fd)
        theirs.close()
        self.sock, self.out_fd, self.err_fd = ours, out_r, err_r
        self.buffer, self.status, self.saved, self.number = bytearray(), None, {}, 0
        self.parts = {}
        self.missed = []
        view = memoryview(image or driver_image(compiled_driver(python)))
        while view:
            view = view[os.write(src_w, view) :]
        os.close(src_w)
        self.ready, _ = self.frame(Result())
        self.start_ms = (time.perf_counter() - self.started) * 1000
        if state is not None:
            self.load_reply = self.load(state)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.status is None:
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self.wait()
        self.sock.close()
        os.close(self.out_fd)
        os.close(self.err_fd)
        shutil.rmtree(self.cwd, ignore_errors=True)

    def wait(self, timeout=DEADLINE_S):
        """The exit status."""
        until = time.monotonic() + timeout
        while self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
            elif time.monotonic() > until:
                raise TimeoutError("the engine did not end")
            else:
                time.sleep(0.005)
        return self.status

    def send(self, frame, tail=b"", fds=()):
        body = json.dumps(frame).encode()
        data = struct.pack("<II", len(body), len(tail)) + body + tail
        if fds:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
            sent = self.sock.sendmsg([data], ancillary)
            data = data[sent:]
        if data:
            self.sock.sendall(data)

    def drain(self, result, wait_s=0.0):
        """Reads the available output of stdout and stderr."""
        poll = select.poll()
        for fd in (self.out_fd, self.err_fd):
            poll.register(fd, select.POLLIN)
        while True:
            ready = [fd for fd, what in poll.poll(wait_s * 1000) if what & select.POLLIN]
            if not ready:
                return
            for fd in ready:
                data = os.read(fd, 1 << 20)
                if fd == self.out_fd:
                    result.out += data
                else:
                    result.err += data

    def first_output(self, timeout=DEADLINE_S):
        """A result with the first output of the execution that runs."""
        result = Result()
        until = time.monotonic() + timeout
        while not result.out:
            if time.monotonic() > until:
                raise TimeoutError(f"no output; stderr: {result.err[-2000:]!r}")
            self.drain(result, 0.05)
        return result

    def frame(self, result, timeout=DEADLINE_S):
        """The next frame; output goes to `result` meanwhile."""
        until = time.monotonic() + timeout
        poll = select.poll()
        for fd in (self.out_fd, self.err_fd, self.sock.fileno()):
            poll.register(fd, select.POLLIN)
        while True:
            if len(self.buffer) >= 8:
                json_len, tail_len = struct.unpack("<II", self.buffer[:8])
                end = 8 + json_len + tail_len
                if len(self.buffer) >= end:
                    frame, tail = json.loads(self.buffer[8 : 8 + json_len]), bytes(self.buffer[8 + json_len : end])
                    del self.buffer[:end]
                    self.take(frame, tail)
                    return frame, tail
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no frame; stderr: {result.err[-2000:]!r}")
            for fd, what in poll.poll(left * 1000):
                if fd == self.sock.fileno():
                    data = self.sock.recv(1 << 22)
                    if not data:
                        raise EOFError(f"the engine hung up; stderr: {result.err[-2000:]!r}")
                    self.buffer += data
                elif what & select.POLLIN:
                    data = os.read(fd, 1 << 20)
                    if fd == self.out_fd:
                        result.out += data
                    else:
                        result.err += data
                else:
                    poll.unregister(fd)

    def take(self, frame, tail):
        """Keeps the entries that init would store."""
        kind = frame["ev"]
        if kind == "put":
            key = frame["key"]
            whole = self.parts.setdefault(key, bytearray())
            whole += tail
            if not frame["more"]:
                self.saved[key] = (frame["meta"], bytes(self.parts.pop(key)))
        elif kind == "del":
            del self.saved[frame["key"]]
        elif kind == "missed":
            self.missed = frame["entries"]

    def begin(self, code, env=(), stdin=None, op="exec", **more):
        self.number += 1
        frame = {"op": op, "id": self.number, "exec": self.number, "env": [list(pair) for pair in env]}
        if op == "exec":
            frame["code"] = code
        frame.update(more, stdin=stdin is not None)
        fds = []
        if stdin is not None:
            if isinstance(stdin, int):
                fds = [stdin]
            else:
                read, write = os.pipe()
                if os.fork() == 0:
                    os.close(read)
                    view = memoryview(stdin)
                    try:
                        while view:
                            view = view[os.write(write, view) :]
                    finally:
                        os._exit(0)
                os.close(write)
                fds = [read]
        self.send(frame, fds=fds)
        for fd in fds:
            os.close(fd)
        return self.number

    def finish(self, result=None, timeout=DEADLINE_S, on_tool=None):
        result = result or Result()
        until = time.monotonic() + timeout
        while True:
            frame, tail = self.frame(result, until - time.monotonic())
            if frame["ev"] == "end":
                result.end = frame
                break
            result.events.append((frame, tail))
            if frame["ev"] == "tool_call" and on_tool:
                self.send({"op": "tool_result", "call": frame["call"], **on_tool(frame)})
        self.drain(result)
        return result

    def run(self, code, timeout=DEADLINE_S, on_tool=None, **more):
        self.begin(code, **more)
        return self.finish(timeout=timeout, on_tool=on_tool)

    def grows(self, number, by):
        """Waits until a pause between two executions adds more than this to a number."""
        for _ in range(200):
            before = self.run(number).value
            time.sleep(0.3)
            if self.run(number).value > before + by:
                return
        raise TimeoutError(f"{number} does not grow between executions")

    def go(self):
        """Lets code continue that waits for this file in its working directory."""
        with open(os.path.join(self.cwd, "go"), "w"):
            pass

    def call(self, name, args, **more):
        self.begin(None, op="call", name=name, args=args, **more)
        return self.finish()

    def ask(self, op, timeout=DEADLINE_S, **fields):
        """A request that is answered with `reply`; events before it land in `self.before`."""
        self.number += 1
        self.send({"op": op, "id": self.number, **fields})
        self.before = Result()
        while True:
            frame, tail = self.frame(self.before, timeout)
            if frame["ev"] == "reply":
                assert frame["id"] == self.number, frame
                return frame
            self.before.events.append((frame, tail))

    def load(self, state):
        self.number += 1
        self.send({"op": "load", "id": self.number})
        for key, (meta, body) in state.items():
            pieces = [body[at : at + (1 << 20)] for at in range(0, len(body), 1 << 20)] or [b""]
            for at, piece in enumerate(pieces):
                self.send({"op": "entry", "key": key, "meta": meta, "more": at + 1 < len(pieces)}, piece)
        reply = self.ask("loaded")
        self.saved = dict(state)
        return reply

    def reload(self):
        """A new engine with this one's saved state."""
        return Engine(state=self.saved)

    def interrupt(self, after_s=0.3):
        time.sleep(after_s)
        os.kill(self.pid, signal.SIGINT)
