"""Names of E2B's SDK for what both have, through both faces."""

import asyncio
import http.client
import math
import time

import ryokan
from ryokan import FilesystemEventType, aio, errors, types

from support import DaemonTest

SERVE = """
import http.server, threading
server = http.server.HTTPServer(("127.0.0.1", PORT), http.server.SimpleHTTPRequestHandler)
threading.Thread(target=server.serve_forever, daemon=True).start()
"""


def fetch(address, path):
    client = http.client.HTTPConnection(address, timeout=180)
    try:
        client.request("GET", path)
        return client.getresponse().read()
    finally:
        client.close()


class E2bTest(DaemonTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.sandbox = ryokan.Sandbox.create("s", timeout=3600)
        cls.addClassCleanup(cls.sandbox.kill)

    def events_until(self, handle, done):
        """Events of a handle until one of them is `done`."""
        seen = []
        deadline = time.monotonic() + 180
        while not any(done(event) for event in seen):
            self.assertLess(time.monotonic(), deadline, seen)
            seen += handle.get_new_events()
            time.sleep(0.01)
        return seen

    def test_watch_dir_returns_events(self):
        files = self.sandbox.files
        files.make_dir("watched/inner")
        handle = files.watch_dir("watched")
        self.assertEqual(handle.get_new_events(), [])
        deep = files.watch_dir("watched", recursive=True)
        self.sandbox.commands.run("cd watched; echo 1 > a; chmod 600 a; echo 2 > inner/b; rm a").check()
        done = ryokan.FilesystemEvent("a", FilesystemEventType.REMOVE)
        seen = self.events_until(handle, done.__eq__)
        self.assertEqual({event.type for event in seen if event.name == "a"}, {*FilesystemEventType} - {"rename"})
        self.assertEqual([event for event in seen if "b" in event.name], [])
        below = self.events_until(deep, done.__eq__)
        self.assertIn(ryokan.FilesystemEvent("inner/b", FilesystemEventType.CREATE), below)
        handle.stop()
        with self.assertRaises(errors.ConflictError):
            handle.get_new_events()
        # It ends with its directory, after the events before that.
        files.remove("watched", recursive=True)
        with self.assertRaises(errors.ConflictError) as caught:
            self.events_until(deep, lambda event: False)
        self.assertEqual(caught.exception.reason, "ended")
        with self.assertRaises(errors.NotFoundError):
            files.watch_dir("absent")

    def test_watch_dir_calls_back(self):
        async def use():
            sandbox = await aio.Sandbox.connect("s")
            await sandbox.files.make_dir("called")
            seen, ended = asyncio.Queue(), asyncio.Queue()
            await sandbox.files.watch_dir("called", seen.put_nowait, ended.put)
            await sandbox.files.write("called/x", "1")
            while (await asyncio.wait_for(seen.get(), 180)).name != "x":
                pass
            await sandbox.files.remove("called", recursive=True)
            self.assertEqual((await asyncio.wait_for(ended.get(), 180)).reason, "ended")
            # An exception of the callback ends the watch.
            await sandbox.files.make_dir("called")
            await sandbox.files.watch_dir("called", lambda event: 1 / 0, ended.put)
            await sandbox.files.write("called/x", "1")
            self.assertIsInstance(await asyncio.wait_for(ended.get(), 180), ZeroDivisionError)
            handle = await sandbox.files.watch_dir("called")
            await sandbox.close()
            deadline = time.monotonic() + 180
            with self.assertRaises(errors.UnavailableError):
                while time.monotonic() < deadline:
                    await handle.get_new_events()
                    await asyncio.sleep(0.01)

        asyncio.run(use())

    def test_get_host_leads_to_port(self):
        self.sandbox.files.write("page.txt", "a page")
        self.sandbox.run_code(SERVE.replace("PORT", "8000")).check()
        address = self.sandbox.get_host(8000)
        self.assertRegex(address, r"^127\.0\.0\.1:\d+$")
        self.assertEqual(fetch(address, "/page.txt"), b"a page")
        self.assertEqual(self.sandbox.get_host(8000), address, "the same port stays open")
        # Its worker's end closes it; the next call opens it again, and starts a worker.
        self.sandbox.stop(force=True)
        self.assertRegex(self.sandbox.get_host(8000), r"^127\.0\.0\.1:\d+$")
        self.sandbox.run_code(SERVE.replace("PORT", "8000")).check()
        self.assertEqual(fetch(self.sandbox.get_host(8000), "/page.txt"), b"a page")

        async def use():
            async with aio.Sandbox.connect("s") as sandbox:
                addresses = await asyncio.gather(*[sandbox.get_host(8000) for _ in range(3)])
                self.assertEqual(len({*addresses}), 1)
                return await asyncio.to_thread(fetch, addresses[0], "/page.txt"), addresses[0]

        page, address = asyncio.run(use())
        self.assertEqual(page, b"a page")
        with self.assertRaises(OSError):
            fetch(address, "/page.txt")

    def test_host_network_needs_no_forward(self):
        with ryokan.Sandbox.create(net="host", engine="bash") as sandbox:
            self.assertEqual(sandbox.get_host(4242), "127.0.0.1:4242")

    def test_timeout_is_idle_timeout(self):
        self.assertEqual(self.sandbox.info().limits.idle_timeout, 3600)
        self.sandbox.set_timeout(120)
        self.assertEqual(self.sandbox.info().limits.idle_timeout, 120)

        async def use():
            async with aio.Sandbox.create(engine="bash", timeout=60) as sandbox:
                first = (await sandbox.info()).limits.idle_timeout
                await sandbox.set_timeout(math.inf)
                return first, (await sandbox.info()).limits.idle_timeout

        self.assertEqual(asyncio.run(use()), (60, math.inf))

    def test_metadata_and_envs(self):
        with ryokan.Sandbox.create(metadata={"job": "7"}, envs={"SHARED": "one", "OWN": "two"}) as sandbox:
            self.assertEqual(sandbox.get_info().metadata, {"job": "7"})
            self.assertIn(sandbox.sandbox_id, [one.sandbox_id for one in ryokan.Sandbox.list(labels={"job": "7"})])
            code = "import os; os.environ['SHARED'] + os.environ['OWN']"
            self.assertEqual(sandbox.run_code(code, envs={"OWN": "three"}).value, "onethree")
            self.assertEqual(sandbox.commands.run("echo $SHARED$OWN", envs={"OWN": "4"}).stdout, "one4\n")
            terminal = sandbox.pty.create(command="echo $SHARED$TERM")
            self.assertIn("onexterm", terminal.wait().stdout)
            with ryokan.Sandbox.connect(sandbox.sandbox_id) as same:
                self.assertEqual(same.commands.run("echo $SHARED").stdout, "\n")

    def test_results_have_parts(self):
        code = "class P:\n  def _repr_png_(self): return b'\\x89PNG'\ndisplay(P()); print('said'); 6 * 7"
        ran = self.sandbox.run_code(code)
        self.assertEqual((ran.logs.stdout, ran.logs.stderr), (["said\n"], []))
        shown, plain, main = ran.results
        self.assertEqual((shown.png, shown.formats(), shown.is_main_result), ("iVBORw==", ["png"], False))
        self.assertEqual((plain.text[:10], plain.formats()), ("<__main__.", ["text"]))
        self.assertEqual((main.text, main.is_main_result), ("42", True))
        self.assertFalse(ran.error)
        error = self.sandbox.run_code("def f():\n  1 / 0\nf()").error
        self.assertEqual((error.name, error.value), ("ZeroDivisionError", "division by zero"))
        self.assertTrue(error.traceback.startswith("Traceback") and "in f" in error.traceback, error.traceback)
        self.assertEqual(error, "ZeroDivisionError: division by zero")
        self.assertEqual((types.ErrorText("no such: x").name, types.ErrorText("KeyError").value), ("", ""))

    def test_failed_command_exception(self):
        with self.assertRaises(ryokan.CommandExitException) as caught:
            self.sandbox.commands.run("echo out; echo err >&2; exit 3").check()
        failed = caught.exception
        self.assertEqual((failed.stdout, failed.stderr, failed.exit_code), ("out\n", "err\n", 3))
        self.assertIsInstance(failed.error, str)
