"""Daemons that the client starts, that die, that do not answer."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path
from unittest import mock

import ryokan
from ryokan import _daemon, aio, errors

from support import DaemonTest, run_python


class SocketTest(unittest.TestCase):
    """The socket without a runtime directory, as in containers."""

    def setUp(self):
        self.root = Path(tempfile.mkdtemp(prefix="ryk", dir="/tmp"))
        self.addCleanup(shutil.rmtree, self.root)
        self.private = self.root / f"ryokan-{os.geteuid()}"
        for name, value in [("_RUN_USER", self.root / "none"), ("_TMP", self.root)]:
            patched = mock.patch.object(_daemon, name, value)
            patched.start()
            self.addCleanup(patched.stop)
        unset = mock.patch.dict(os.environ)
        unset.start()
        self.addCleanup(unset.stop)
        os.environ.pop("XDG_RUNTIME_DIR", None)

    def test_replaceable_directory_is_refused(self):
        with self.assertRaisesRegex(errors.UnavailableError, "no directory of root with the sticky bit"):
            _daemon.default_socket(False)

    @unittest.skipUnless(os.geteuid() == 0, "needs a directory of root")
    def test_private_directory_is_used(self):
        self.root.chmod(0o1777)
        self.assertEqual(_daemon.default_socket(False), self.private / "ryokand.sock")
        self.private.mkdir(0o700)
        self.assertEqual(_daemon.default_socket(False), self.private / "ryokand.sock")
        self.private.chmod(0o755)
        with self.assertRaisesRegex(errors.UnavailableError, r"is open to others \(mode 0755\)"):
            _daemon.default_socket(False)
        os.chown(self.private, 1, 1)
        with self.assertRaisesRegex(errors.UnavailableError, "belongs to uid 1"):
            _daemon.default_socket(False)


class SameSocketTest(unittest.TestCase):
    def test_command_line_has_the_same(self):
        # Paths of this host: both refuse them, or name the same socket.
        environment = {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"}
        code = "from ryokan import _daemon; print(_daemon.default_socket(False))"
        options = {"env": environment, "capture_output": True, "text": True, "timeout": 180}
        ours = subprocess.run([sys.executable, "-c", code], **options)
        status = ["ryokan", "daemon", "status", "--json"]
        theirs = subprocess.run(status, **options)
        socket_of = json.loads(theirs.stdout)["socket"] if theirs.stdout else ""
        self.assertEqual(ours.stdout.strip(), socket_of, theirs.stderr)


class StartTest(DaemonTest):
    daemon_starts = False

    def tearDown(self):
        self.end_daemon()

    def test_concurrent_clients_start_one(self):
        hosts = []
        threads = [threading.Thread(target=lambda: hosts.append(ryokan.Host.connect())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        self.assertEqual(len(hosts), 4)
        self.assertEqual(len(self.daemon_pids()), 1)
        for host in hosts:
            host.close()

    def test_started_daemon_outlives_client(self):
        code = "import ryokan\nwith ryokan.Host.connect() as host: host.create('kept', engine='bash')"
        ran = run_python(code)
        self.assertEqual((ran.returncode, ran.stderr), (0, ""))
        with ryokan.Host.connect(start=False) as host:
            host.get("kept").remove()

    def test_missing_program_is_named(self):
        ran = run_python("import ryokan\nryokan.Host.connect()", PATH="/nowhere")
        self.assertIn("UnavailableError", ran.stderr)
        self.assertIn("`ryokand` is not installed", ran.stderr)
        self.assertIn("in PATH", ran.stderr)

    def test_failed_start_shows_log(self):
        config = self.root / "config/ryokan/config.toml"
        before = config.read_text()
        self.addCleanup(config.write_text, before)
        config.write_text("nonsense = 1\n")
        with self.assertRaises(errors.UnavailableError) as raised:
            ryokan.Host.connect()
        self.assertIn("nonsense", raised.exception.message)
        self.assertIn("ryokand.log", raised.exception.hint)

    def test_no_start_unless_wanted(self):
        for options in [{"start": False}, {"socket": self.socket()}, {"socket": self.root / ("x" * 200) / "long.sock"}]:
            with self.assertRaises(errors.UnavailableError):
                ryokan.Host.connect(**options)
        self.assertEqual(self.daemon_pids(), [])

    def test_unsafe_runtime_directory(self):
        runtime = Path(os.environ["XDG_RUNTIME_DIR"])
        self.addCleanup(runtime.chmod, 0o700)
        runtime.chmod(0o777)
        with self.assertRaisesRegex(errors.UnavailableError, "can be written to by others"):
            ryokan.Host.connect()

    def test_silent_daemon_is_reported(self):
        path = self.root / "silent.sock"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            with self.assertRaises(errors.DeadlineError):
                ryokan.Host.connect(path, timeout=0.3)
        os.unlink(path)


class KilledTest(DaemonTest):
    def test_killed_daemon_fails_pending_calls(self):
        host = ryokan.Host.connect()
        python, shell = host.create("python", engine="python"), host.create("shell", engine="bash")
        python.run_code("import time")
        running = threading.Event()
        failures = {}

        def pending(name, call):
            try:
                failures[name] = call()
            except errors.RyokanError as error:
                failures[name] = error

        calls = {
            "plain": lambda: shell.run_code("sleep 600"),
            "stream": lambda: python.run_code(
                "print(1, flush=True); time.sleep(15); print(2)", on_stdout=lambda _: running.set()
            ),
            "checkpoint": lambda: python.checkpoint("waits"),
        }
        threads = [threading.Thread(target=pending, args=one) for one in calls.items()]
        threads[0].start()
        threads[1].start()
        self.assertTrue(running.wait(180))
        threads[2].start()
        time.sleep(0.3)
        self.end_daemon(signal.SIGKILL)
        for thread in threads:
            thread.join(180)
        self.assertEqual(
            {name: type(one) for name, one in failures.items()}, dict.fromkeys(calls, errors.UnavailableError)
        )
        for call in [host.ping, host.list, python.info, lambda: python.run_code("1"), lambda: host.get("python")]:
            with self.assertRaises(errors.UnavailableError):
                call()
        host.close()
        # The execution outlived the daemon, and the next one has its result.
        with ryokan.Host.connect() as again:
            kernel = again.get("python")
            (execution,) = [entry for entry in kernel.journal() if "print(1" in entry.text]
            self.assertEqual(kernel.wait(execution.execution_id).stdout, "1\n2\n")
            again.get("shell").remove()

    def test_killed_daemon_fails_async_calls(self):
        async def work():
            async with aio.Host.connect() as host:
                kernel = await host.create("async", engine="python")
                await kernel.start()
                tasks = [asyncio.ensure_future(kernel.run_code("import time; time.sleep(600)")) for _ in range(3)]
                await asyncio.sleep(0.5)
                self.end_daemon(signal.SIGKILL)
                outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 180)
                self.assertEqual([type(outcome) for outcome in outcomes], [errors.UnavailableError] * 3)
                with self.assertRaises(errors.UnavailableError):
                    await host.list()

        asyncio.run(work())
        # The next daemon ends the worker.
        with ryokan.Host.connect() as again:
            again.remove("async")
