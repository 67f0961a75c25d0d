"""Forked snapshots of the engine: made by `keep`, suspended until `wake`."""
import os
import signal
import socket
import time
import unittest

from engine import Engine, Result


# As on hosts and interpreters where a fork can only be a child.
NOT_AS_SIBLING = "from _ryokan import fork_sibling; fork_sibling._calls = ()"


class Copy(Engine):
    """The other end of a snapshot's control socket."""

    def __init__(self, engine, ours):
        self.__dict__.update(engine.__dict__)
        self.sock, self.buffer, self.parts, self.events = ours, bytearray(), {}, []
        self.spoke, _ = self.frame(Result())

    def wake(self):
        return self.ask("wake")


def keep(engine):
    """The engine's answer, and the snapshot, if there is one."""
    ours, theirs = socket.socketpair()
    engine.number += 1
    engine.send({"op": "keep", "id": engine.number}, fds=[theirs.fileno()])
    theirs.close()
    result = Result()
    while (reply := engine.frame(result)[0])["ev"] != "reply":
        result.events.append(reply)
    if not reply["ok"]:
        ours.close()
        return reply, None
    return reply, Copy(engine, ours)


def value(engine, code):
    result = engine.run(code)
    assert result.end["status"] == "done", (result.end, result.err)
    return result.value


class Copies(unittest.TestCase):
    def test_copy_matches_engine(self):
        for prepare in ("", NOT_AS_SIBLING):
            self.copies_are_as_the_engine_was(prepare)

    def copies_are_as_the_engine_was(self, prepare):
        with Engine() as engine:
            engine.run(prepare)
            engine.run("import random; random.seed(5); g = iter(range(9)); l = [next(g)]; import os; pid = os.getpid()")
            reply, copy = keep(engine)
            self.assertEqual(copy.spoke, {"ev": "reply", "id": reply["id"], "ok": True})
            engine.run("random.random(); l.append(next(g))")
            self.assertEqual(value(engine, "(len(l), os.getpid() == pid)"), [2, True])
            woken = copy.wake()
            self.assertTrue(woken["ok"])
            # The harness passes one pipe end too many to the engine.
            self.assertLessEqual({missed["type"] for missed in woken["missed"]}, {"pipe"})
            self.assertEqual(value(copy, "(len(l), next(g), round(random.random(), 6), os.getpid() == pid)"), [1, 1, 0.622902, False])

    def test_copy_without_pipe_resize(self):
        with Engine() as engine:
            engine.run(
                "import fcntl, os, types\n"
                "from _ryokan import snapshot_fds\n"
                "def refusing(fd, what, *rest):\n"
                "    if what == fcntl.F_SETPIPE_SZ: raise PermissionError(1, 'Operation not permitted')\n"
                "    return fcntl.fcntl(fd, what, *rest)\n"
                "snapshot_fds.fcntl = types.SimpleNamespace(**{**vars(fcntl), 'fcntl': refusing})\n"
                "(r, w), (large, full), (as_is, _) = os.pipe(), os.pipe(), os.pipe()\n"
                "for writer in (w, full): fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 1 << 20)\n"
                "sent = os.write(w, b'few'), os.write(full, bytes(200_000))"
            )
            reply, copy = keep(engine)
            self.assertTrue(reply["ok"], reply)
            missed = {entry["key"]: entry["reason"] for entry in copy.wake()["missed"]}
            r, large, as_is = value(copy, "(r, large, as_is)")
            self.assertIn("not 1048576 as before", missed[f"descriptor/{r}"])
            self.assertIn("no pipe large enough", missed[f"descriptor/{large}"])
            self.assertNotIn(f"descriptor/{as_is}", missed)
            self.assertEqual(value(copy, "os.read(r, 9) == b'few'"), True)

    def test_copied_socket_pair_recognised(self):
        with Engine() as engine:
            engine.run(
                "import socket, types, _socket\n"
                "from _ryokan import snapshot_fds\n"
                "made = []\n"
                "def now_and_then(*kind):\n"
                "    made.append(1)\n"
                "    if len(made) > 2: return _socket.socketpair(*kind)\n"
                "    (one, two), (three, four) = _socket.socketpair(*kind), _socket.socketpair(*kind)\n"
                "    return one, four\n"
                "snapshot_fds._socket = types.SimpleNamespace(**{**vars(_socket), 'socketpair': now_and_then})\n"
                "one, other = socket.socketpair(); sent = one.send(b'waits')"
            )
            _, copy = keep(engine)
            woken = copy.wake()
            self.assertLessEqual({missed["type"] for missed in woken["missed"]}, {"pipe"}, woken)
            self.assertEqual(value(copy, "(other.recv(9) == b'waits', one.send(b'more'), other.recv(9) == b'more')"), [True, 4, True])

    def test_code_cannot_wait_for_copy(self):
        for prepare in ("", NOT_AS_SIBLING):
            self.no_wait_meets_a_copy(prepare)

    def no_wait_meets_a_copy(self, prepare):
        with Engine() as engine:
            engine.run(prepare)
            keep(engine)
            engine.run("import os\ntry: os.wait()\nexcept ChildProcessError: alone = True")
            self.assertTrue(value(engine, "alone"))
            engine.run("import subprocess; p = subprocess.Popen(['/bin/sleep', '600'])")
            reply, _ = keep(engine)
            self.assertTrue(reply["ok"])
            self.assertEqual(value(engine, "p.poll() is None"), True)
            engine.run("p.kill(); p.wait()")

    def test_threads_and_handlers_during_copy(self):
        with Engine() as engine:
            engine.run("import threading; e = threading.Event(); t = threading.Thread(target=e.wait); t.start()")
            reply, copy = keep(engine)
            self.assertIn("2 threads run", reply["message"])
            engine.run("e.set(); t.join()")
            # Signal handlers of the code that fail during the snapshot, or reap its child.
            engine.run("import signal, os\nsignal.signal(signal.SIGCHLD, lambda *_: os.wait())")
            reply, _ = keep(engine)
            self.assertIn(reply["ok"], (True, False))
            engine.run("signal.signal(signal.SIGCHLD, signal.SIG_IGN)")
            reply, copy = keep(engine)
            self.assertTrue(reply["ok"], reply)
            self.assertTrue(copy.wake()["ok"])
            self.assertEqual(value(copy, "1 + 1"), 2)

    def test_fork_hooks_send_no_frames(self):
        with Engine() as engine:
            engine.run("import os\nos.register_at_fork(after_in_child=lambda: 1 / 0, before=lambda: [].x)")
            reply, copy = keep(engine)
            self.assertTrue(reply["ok"])
            self.assertTrue(copy.wake()["ok"])
            self.assertEqual(value(copy, "2 * 3"), 6)
            self.assertEqual(value(engine, "2 * 4"), 8)
            # A child that the code forks later still does not speak the protocol.
            self.assertEqual(value(engine, "os.waitpid(os.fork() or os._exit(7), 0)[1] >> 8"), 7)

    def test_copy_ends_with_socket(self):
        with Engine() as engine:
            engine.run("import os")
            _, copy = keep(engine)
            (found,) = self._others(engine, engine.pid)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                os.kill(found, number)
            time.sleep(0.05)
            self.assertTrue(copy.wake()["ok"])
            self.assertEqual(value(copy, "os.getpid()"), found)
            _, another = keep(copy)
            another.sock.close()
            until = time.monotonic() + 180
            while self._others(engine, engine.pid, found):
                self.assertLess(time.monotonic(), until)
                time.sleep(0.01)
            os.kill(found, signal.SIGKILL)

    @staticmethod
    def _others(engine, *known):
        """Processes in the engine's folder: every engine has its own."""
        found = []
        for pid in os.listdir("/proc"):
            try:
                if pid.isdigit() and int(pid) not in known and os.readlink(f"/proc/{pid}/cwd") == engine.cwd:
                    found.append(int(pid))
            except OSError:
                continue
        return found


if __name__ == "__main__":
    unittest.main()
