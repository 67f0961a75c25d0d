"""Starts the node driver as init does, and speaks the engine contract with it. Every wait has a deadline.

tests/python_driver/engine.py speaks the protocol; this file holds the differences: the start of node, and interrupts, which are
frames.
"""
import functools
import importlib.util
import json
import os
import shutil
import socket
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
DRIVER = os.path.join(HERE, "..", "..", "src", "worker", "engines", "node", "driver")
NODE = os.environ.get("RYOKAN_TEST_NODE") or shutil.which("node") or "/usr/bin/node"
# The daemon's options for node; see the Rust side.
FLAGS = ["--no-force-async-hooks-checks", "--expose-internals", "--v8-pool-size=1"]


def _load_base():
    path = os.path.join(HERE, "..", "python_driver", "engine.py")
    spec = importlib.util.spec_from_file_location("ryokan_python_engine", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


base = _load_base()
DEADLINE_S, Result, as_value = base.DEADLINE_S, base.Result, base.as_value


@functools.cache
def driver_modules():
    modules = {}
    for name in sorted(os.listdir(DRIVER)):
        if name.endswith(".js") and name != "bootstrap.js":
            with open(os.path.join(DRIVER, name), encoding="utf-8") as file:
                modules[name[:-3]] = file.read()
    return json.dumps(modules).encode()


@functools.cache
def bootstrap():
    with open(os.path.join(DRIVER, "bootstrap.js"), encoding="utf-8") as file:
        return file.read()


def driver_image(reserved=b""):
    """The data that the engine reads from descriptor 4."""
    return len(reserved).to_bytes(8, "little") + reserved + driver_modules()


class Engine(base.Engine):
    def __init__(self, node=NODE, state=None, image=None, flags=FLAGS, files=None, env=None):
        self.cwd = tempfile.mkdtemp(prefix="ryokan-node-driver-")
        for name, text in (files or {}).items():
            self.write(name, text)
        ours, theirs = socket.socketpair()
        out_r, out_w = os.pipe()
        err_r, err_w = os.pipe()
        source = os.memfd_create("driver")
        os.write(source, image or driver_image())
        os.lseek(source, 0, os.SEEK_SET)
        null = os.open("/dev/null", os.O_RDONLY)
        env = {"HOME": self.cwd, "PATH": os.environ["PATH"], "LANG": "C.UTF-8", "TMPDIR": "/tmp", "USER": "guest", **(env or {})}
        self.started = time.perf_counter()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                wanted = [null, out_w, err_w, theirs.fileno(), source]
                safe = [os.dup2(fd, 50 + at, False) for at, fd in enumerate(wanted)]
                for at, fd in enumerate(safe):
                    os.dup2(fd, at, True)
                os.closerange(5, 4096)
                os.chdir(self.cwd)
                os.execve(node, [node, *flags, "-e", bootstrap()], env)
            finally:
                os._exit(99)
        for fd in (null, out_w, err_w, source):
            os.close(fd)
        theirs.close()
        self.sock, self.out_fd, self.err_fd = ours, out_r, err_r
        self.buffer, self.status, self.saved, self.number = bytearray(), None, {}, 0
        self.parts, self.missed = {}, []
        self.ready, _ = self.frame(Result())
        self.start_ms = (time.perf_counter() - self.started) * 1000
        if state is not None:
            self.load_reply = self.load(state)

    def __exit__(self, *_):
        super().__exit__()
        shutil.rmtree(self.cwd, ignore_errors=True)

    def write(self, name, text):
        """A file in the working directory."""
        path = os.path.join(self.cwd, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)

    def reload(self, **more):
        """A new engine with this one's saved state."""
        return Engine(state=self.saved, **more)

    def interrupt(self, after_s=0.3, exec_id=None):
        time.sleep(after_s)
        self.send({"op": "interrupt", "exec": self.number if exec_id is None else exec_id})
