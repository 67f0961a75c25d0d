"""Watches of files, files that do not wait, and leases."""

import asyncio
import gc
import threading
from unittest import mock

import ryokan
from ryokan import aio, errors, types

from support import DaemonTest, run_python

WATCHES = 16
"""More than a kernel can have at once."""


class WatchTest(DaemonTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.host = ryokan.Host.connect()
        cls.addClassCleanup(cls.host.close)
        cls.kernel = cls.host.create("k", engine="bash")
        cls.files = cls.kernel.files

    def test_changes_are_reported(self):
        self.files.make_dir("seen/below")
        with self.files.watch("seen", recursive=True) as watch:
            self.kernel.run_code("echo 1 > seen/below/f; chmod 600 seen/below/f; rm seen/below/f")
            kinds = []
            for event in watch:
                self.assertEqual(event.path, "below/f")
                kinds.append(event.kind)
                if event.kind == "removed":
                    break
            self.assertLess({"created", "closed", "changed"}, set(kinds))
            closing = threading.Timer(0.3, watch.close)
            closing.start()
            # Another thread ends the loop.
            for event in watch:
                self.assertIn(event.kind, ("removed", "changed", "closed"))
            closing.join()
        self.assertEqual(list(watch), [])

    def test_end_is_last_event(self):
        self.files.make_dir("short")
        watch = self.files.watch("short")
        with watch:
            self.files.remove("short", recursive=True)
            events = list(watch)
        self.assertEqual(events[-1].kind, "ended")
        self.assertIsInstance(events[-1], types.FileEvent)

    def test_overflow_is_visible(self):
        self.files.make_dir("full")
        self.kernel.run_code("mkdir crowd; for i in {1..5000}; do echo > crowd/$i; done").check()
        with self.files.watch("full", recursive=True) as watch:
            # A directory with more entries than are reported at once.
            self.kernel.run_code("mv crowd full/").check()
            for event in watch:
                self.assertNotEqual(event.kind, "ended")
                if event.kind == "overflow":
                    break
            self.assertEqual((event.kind, event.path), ("overflow", ""))

    def test_failures_are_raised(self):
        with self.assertRaises(errors.NotFoundError) as raised, self.files.watch("absent"):
            self.fail("there is nothing to watch")
        self.assertEqual(raised.exception.reason, "not_found")
        with self.assertRaises(errors.NotFoundError):
            next(self.files.watch("absent"))

    def test_closed_watches_are_ended(self):
        for _ in range(2 * WATCHES):
            with self.files.watch():
                pass
        # A dropped one, too.
        for _ in range(2 * WATCHES):
            watch = self.files.watch()
            watch._portal.run(watch._watch._begin())
            del watch
            gc.collect()
        with self.assertRaises(errors.BusyError) as raised:
            watches = []
            for _ in range(2 * WATCHES):
                watches.append(self.files.watch())
                watches[-1].__enter__()
        self.assertEqual(raised.exception.reason, "watches")
        for watch in watches:
            watch.close()

    def test_lost_connection_ends_watches(self):
        async def work():
            host = await aio.Host.connect()
            kernel = await host.get("k")
            async with kernel.files.watch() as watch:
                waiting = asyncio.ensure_future(watch.__anext__())
                await asyncio.sleep(0.2)
                await host.close()
                with self.assertRaises(errors.UnavailableError):
                    await asyncio.wait_for(waiting, 180)

        asyncio.run(work())

    def test_watch_beside_other_calls(self):
        async def work():
            async with aio.Host.connect() as host:
                files = (await host.get("k")).files
                await files.make_dir("both")
                async with files.watch("both") as watch:
                    seen = asyncio.ensure_future(watch.__anext__())
                    await files.write("both/f", "x")
                    event = await asyncio.wait_for(seen, 180)
                    self.assertEqual(event.path, "f")

        asyncio.run(work())

    # --- files that do not wait

    def test_no_wait_refuses_in_restores(self):
        kernel = self.host.create("held", engine="bash")
        kernel.files.write("f", "before")
        kernel.checkpoint("here")
        number = kernel.submit("sleep 600")
        restoring = threading.Thread(target=kernel.restore, args=["here"])
        restoring.start()
        reasons = set()
        # It waits for the code, and has the kernel meanwhile.
        while not reasons:
            try:
                kernel.files.no_wait.read("f")
            except errors.BusyError as error:
                reasons.add(error.reason)
        with self.assertRaises(errors.BusyError):
            kernel.files.no_wait.write("f", "hasty")
        writing = threading.Thread(target=kernel.files.write, args=["f", "after"])
        writing.start()
        kernel.interrupt(number)
        restoring.join()
        writing.join()
        self.assertEqual((reasons, kernel.files.read("f")), ({"restoring"}, "after"))
        kernel.remove()

    # --- leases

    def test_lease_excludes_others(self):
        kernel = self.host.create("leased", engine="bash")
        with kernel.lease("editor", 600) as lease:
            self.assertEqual(lease.kernel.run_code("echo mine").stdout, "mine\n")
            with self.assertRaises(errors.BusyError) as raised:
                kernel.run_code("echo no")
            self.assertEqual(raised.exception.reason, "lease")
            self.assertIn("editor", str(raised.exception))
            first = lease.expires_at
            lease.renew(1200)
            self.assertGreater(lease.expires_at, first)
            # The token resumes it from elsewhere.
            code = (
                "import ryokan, sys\n"
                "with ryokan.Host.connect(start=False) as host:\n"
                f"  lease = host.get('leased').lease('editor', 600, token={lease.token!r})\n"
                "  print(lease.kernel.run_code('echo same').stdout, end='')"
            )
            ran = run_python(code)
            self.assertEqual((ran.returncode, ran.stderr, ran.stdout), (0, "", "same\n"))
        self.assertEqual(kernel.run_code("echo free").stdout, "free\n")
        with self.assertRaises(errors.InvalidArgumentError):
            kernel.lease("editor", 0)

        async def work():
            async with aio.Host.connect() as host:
                same = await host.get("leased")
                async with same.lease("agent", 60) as lease:
                    with self.assertRaises(errors.BusyError):
                        await same.set_var("x", 1)
                    await lease.kernel.set_var("x", 1)
                await same.set_var("x", 2)

        asyncio.run(work())
        kernel.remove()

    def test_failed_lease_is_released(self):
        kernel = self.host.create("unlucky", engine="bash")

        async def work():
            async with aio.Host.connect() as host:
                same = await host.get("unlucky")
                usual = same._connection.call

                async def call(capability, method, *args, **options):
                    if method == "kernel":
                        raise errors.UnavailableError("no answer")
                    return await usual(capability, method, *args, **options)

                with mock.patch.object(same._connection, "call", call):
                    with self.assertRaises(errors.UnavailableError):
                        await same.lease("agent", 600)
                await same.set_var("x", 1)
                writer = await same.attenuate(["write"], "writer")
                async with writer.lease("writer", 600) as lease:
                    self.assertEqual(lease.kernel.name, "unlucky")
                    await lease.kernel.set_var("x", 2)

        asyncio.run(work())
        kernel.remove()

    # --- changes that wait

    def test_versions_count_after_waiting(self):
        kernel = self.host.create("versions", engine="bash")

        async def change(name):
            async with aio.Host.connect() as host:
                kernel = await host.get("versions")
                hasty = kernel.files.no_wait
                await kernel.run_code("head -c 16M /dev/urandom > data")
                # Each has its own files, whose first change makes a version.
                first, second = (await host.get("versions")).files, (await host.get("versions")).files
                await asyncio.gather(hasty.make_dir("d"), first.stat("."), second.stat("."))
                version = (await kernel.info()).version
                taking = asyncio.ensure_future(kernel.checkpoint(name))
                while not taking.done():
                    try:
                        await hasty.make_dir("d")
                    except errors.BusyError:
                        changes = first.make_dir("a"), second.make_dir(name, expected_version=version)
                        done = await asyncio.gather(*changes, return_exceptions=True)
                        await taking
                        self.assertIsNone(done[0])
                        self.assertIsInstance(done[1], errors.ConflictError)
                        self.assertFalse(await second.exists(name))
                        return True
                await taking
                return False

        self.assertTrue(any(asyncio.run(change(f"c{number}")) for number in range(50)))
        kernel.remove()
