"""Programs in the background and on terminals, ranges of files, and what else a kernel offers."""

import asyncio
import contextlib
import math
import os
import subprocess
import threading
import time
from datetime import datetime, timezone

import ryokan
from ryokan import aio, errors, types

from support import DaemonTest, run_python


class EverydayTest(DaemonTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.host = ryokan.Host.connect()
        cls.addClassCleanup(cls.host.close)
        cls.shell = cls.host.create("shell", engine="bash")
        cls.python = cls.host.create("python", engine="python")

    # --- programs

    def test_background_program_has_handle(self):
        heard = []
        handle = self.shell.commands.run("echo begun; read line; echo $line; exit 3", background=True, stdin=True)
        self.assertEqual([one.pid for one in self.shell.commands.list()], [handle.pid])
        handle.send_stdin("é typed\n")
        ended = handle.wait(on_stdout=heard.append)
        self.assertEqual((ended.stdout, ended.exit_code), ("begun\né typed\n", 3))
        self.assertEqual(("".join(heard), handle.offset), (ended.stdout, len(ended.stdout_bytes)))
        self.assertFalse(handle.kill(), "it has ended")
        # Input that is given at once, and callbacks of `run`.
        heard.clear()
        handle = self.shell.commands.run(["cat"], background=True, stdin=b"given", on_stdout=heard.append)
        self.assertEqual((handle.wait().stdout, heard), ("given", ["given"]))
        counted = self.shell.commands.run(["wc", "-c"], background=True, stdin=True)
        self.shell.commands.send_stdin(counted.pid, bytes(3 << 20))
        self.shell.commands.close_stdin(counted.pid)
        self.assertEqual(counted.wait().stdout.strip(), str(3 << 20))
        with self.assertRaisesRegex(errors.InvalidArgumentError, "background"):
            self.shell.commands.run(["cat"], stdin=True)

    def test_detached_program_outlives_client(self):
        code = (
            "import ryokan\n"
            "with ryokan.Host.connect(start=False) as host:\n"
            "  commands = host.get('shell').commands\n"
            "  kept = commands.run('echo one; read line; echo two', background=True, stdin=True)\n"
            "  commands.run('sleep 4321', background=True, detached=False)\n"
            "  print(kept.pid)"
        )
        ran = run_python(code)
        self.assertEqual((ran.returncode, ran.stderr), (0, ""))
        handle = self.shell.commands.connect(int(ran.stdout), offset=4)
        deadline = time.monotonic() + 180
        while len(self.shell.commands.list()) > 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        self.assertEqual([one.execution_id for one in self.shell.commands.list()], [handle.execution_id])
        handle.send_stdin("\n")
        heard = []
        self.assertEqual(handle.wait(on_stdout=heard.append).stdout, "one\ntwo\n")
        self.assertEqual(heard, ["two\n"])
        # The whole output again, also long after its end.
        heard.clear()
        self.shell.wait(handle.execution_id, on_stdout=heard.append)
        self.shell.wait(handle.execution_id, offset=6, on_stdout=heard.append)
        self.assertEqual("".join(heard), "one\ntwo\no\n")
        with self.assertRaises(errors.NotFoundError):
            self.shell.commands.connect(10**6)

    def test_waiting_stops_and_program_continues(self):
        handle = self.shell.commands.run("for i in 1 2 3; do echo $i; read line; done", background=True, stdin=True)

        def stop(text):
            raise KeyError(text)

        with self.assertRaises(KeyError):
            handle.wait(on_stdout=stop)
        self.assertEqual(len(self.shell.commands.list()), 1)
        self.assertTrue(handle.kill())
        self.assertEqual(handle.wait().status, "interrupted")
        self.assertFalse(self.shell.commands.kill(handle.pid))

        async def work():
            async with aio.Host.connect() as host:
                commands = (await host.get("shell")).commands
                ran = await commands.run("sleep 600", background=True)
                with self.assertRaises(asyncio.TimeoutError):
                    await asyncio.wait_for(ran.wait(), 0.2)
                await ran.send_signal()
                self.assertEqual((await asyncio.wait_for(ran.wait(), 180)).exit_code, 143)

        asyncio.run(work())

    def test_terminal(self):
        shown = bytearray()
        terminal = self.shell.pty.create(ryokan.PtySize(11, 33), on_data=shown.extend)
        terminal.send_stdin("tty; stty size; echo $TERM\n")
        deadline = time.monotonic() + 180
        while b"33" not in self._output(terminal.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.shell.pty.resize(terminal.pid, ryokan.PtySize(rows=22, cols=44))
        self.shell.pty.send_stdin(terminal.pid, b"stty size; exit 5\n")
        ended = terminal.wait()
        self.assertEqual(ended.exit_code, 5)
        self.assertEqual(bytes(shown), ended.stdout_bytes)
        for part in [b"/dev/pts/", b"11 33", b"xterm-256color", b"22 44"]:
            self.assertIn(part, shown)
        again = bytearray()
        self.shell.pty.connect(terminal.pid, offset=len(shown) - 4, on_data=again.extend).wait()
        self.assertEqual(again, shown[-4:])
        other = self.shell.pty.create(command=["sleep", "600"])
        self.assertTrue(self.shell.pty.kill(other.pid))

    def _output(self, execution_id):
        pieces = bytearray()

        async def read():
            async with aio.Host.connect() as host:
                handle = await (await host.get("shell")).pty.connect(execution_id, on_data=pieces.extend)
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(handle.wait(), 0.3)

        asyncio.run(read())
        return bytes(pieces)

    # --- files

    def test_ranges_of_files(self):
        files, content = self.shell.files, os.urandom(3 << 20)
        files.write("big", content)
        for offset, length in [
            (0, 0),
            (0, 5),
            (7, (1 << 20) + 1),
            (1 << 20, None),
            (len(content) - 3, 10),
            (1 << 40, 1),
        ]:
            end = None if length is None else offset + length
            self.assertEqual(files.read("big", "bytes", offset=offset, length=length), content[offset:end], offset)
        self.assertEqual(files.read("big", "bytes", offset=5, length=10, limit=10), content[5:15])
        with self.assertRaisesRegex(errors.InvalidArgumentError, "more than 10 bytes"):
            files.read("big", "bytes", offset=5, length=11, limit=10)
        with self.assertRaisesRegex(errors.InvalidArgumentError, "range"):
            files.read("big", "bytes", offset=-1)
        pieces = list(files.read("big", "stream", offset=1, limit=1))
        self.assertGreater(len(pieces), 2)
        self.assertEqual(b"".join(pieces), content[1:])

        async def work():
            async with aio.Host.connect() as host:
                files = (await host.get("shell")).files
                return b"".join([piece async for piece in await files.read("big", "stream", length=9)])

        self.assertEqual(asyncio.run(work()), content[:9])

    def test_names_and_attributes_of_files(self):
        files = self.shell.files
        written = files.write_files([{"path": "w/a", "data": "é"}, {"path": "w/b", "data": b"\x00"}])
        self.assertEqual([one.size for one in written], [2, 1])
        self.assertEqual(files.get_info("w/a"), files.stat("w/a"))
        at = datetime(2001, 2, 3, 4, 5, 6, tzinfo=timezone.utc)
        files.set_attributes("w/a", mode=0o640, modified=at)
        self.assertEqual((files.stat("w/a").mode, files.stat("w/a").modified), (0o640, at))
        files.write("w/run", "#!/bin/sh\necho ran", mode=0o755)
        self.assertEqual(self.shell.commands.run(["./w/run"]).stdout, "ran\n")
        files.make_link("w/link", "a")
        self.assertEqual((files.stat("w/link", follow=False).target, files.read("w/link")), ("a", "é"))

    # --- history

    def test_preview_and_checkpoints(self):
        kernel = self.host.create("previewed", engine="python")
        kernel.run_code("x = 1; open('kept', 'w').write('1')")
        first = kernel.checkpoint("first")
        kernel.run_code("x = 2; open('new', 'w').write('2'); import threading; lock = threading.Lock()")
        running = kernel.commands.run(["sleep", "600"], background=True)
        before = kernel.preview("first")
        changes = {(one.area, one.change, one.name) for one in before.changes}
        self.assertLessEqual({("state", "changed", "var/x"), ("file", "removed", "new")}, changes)
        (x,) = [one for one in before.changes if one.name == "var/x"]
        self.assertIn("2", x.before)
        self.assertIn("1", x.after)
        self.assertEqual([job.command for job in before.ends], ["sleep 600"])
        self.assertIn("var/lock", [one.key for one in before.lost])
        self.assertEqual([job.id for job in kernel.jobs()], [f"process {running.pid}"])
        self.assertEqual(kernel.get_var("x"), 2, "a preview changes nothing")
        second = kernel.checkpoint("second")
        kernel.pin("first")
        self.assertTrue(kernel.find_checkpoint("first").pinned)
        kernel.unpin("first")
        self.assertFalse(kernel.find_checkpoint("first").pinned)
        with self.assertRaises(errors.ConflictError):
            kernel.remove_checkpoint(second.id)
        self.assertEqual(kernel.remove_checkpoint("first").id, first.id)
        with self.assertRaises(errors.NotFoundError):
            kernel.find_checkpoint(first.snapshot_id)
        kernel.remove()

    def test_differences_between_kernels(self):
        base = self.host.create("base", engine="python")
        base.files.write("text", "one\n")
        (child,) = base.fork("child")
        child.files.write("text", "two\n")
        child.files.write("other/more", "three\n")
        changes = {(one.change, one.name) for one in base.diff("", other=child) if one.area == "file"}
        self.assertLessEqual({("changed", "text"), ("added", "other/more")}, changes)
        patches = base.diff_text("", other=child)
        self.assertEqual({patch.path for patch in patches}, {"text", "other/more"})
        (patch,) = base.diff_text("", paths=["text"], other=child)
        self.assertIn(b"-one\n+two\n", patch.text)
        with ryokan.Host.connect() as elsewhere, self.assertRaisesRegex(errors.InvalidArgumentError, "one connection"):
            base.diff("", other=elsewhere.get("child"))
        # Variables, too; and the same through the other face.
        for one, value in ((base, 1), (child, 2)):
            one.run_code(f"x = {value}; only_{one.name} = 1")
        found = {(one.area, one.change, one.name) for one in base.diff("", other=child)}
        wanted = {("state", "changed", "var/x"), ("state", "added", "var/only_child"), ("file", "changed", "text")}
        self.assertLessEqual({*wanted, ("state", "removed", "var/only_base")}, found)

        async def compare():
            async with aio.Host.connect() as host:
                one, other = [await host.get(name) for name in ("base", "child")]
                differences = await one.diff("", other=other)
                (patch,) = await one.diff_text("", paths=["text"], other=other)
                return {(one.area, one.change, one.name) for one in differences}, patch.text

        again, text = asyncio.run(compare())
        self.assertEqual((again, text), (found, patch.text))
        # Parts of a large file arrive as one difference.
        base.checkpoint("small")
        base.files.write("large", "".join(f"{n:07}\n" for n in range(1 << 18)))
        large = [patch for patch in base.diff_text("small") if patch.path == "large"]
        self.assertEqual(len(large), 1)
        child.remove()
        base.remove()

    # --- the kernel itself

    def test_files_of_fork_are_taken(self):
        base = self.host.create("main", engine="bash")
        base.run_code("mkdir -p src old; echo 1 > src/a; echo keep > mine; echo gone > old/file; echo x > 'a b'")
        one, two = base.fork("try", count=2)
        work = "echo 2 > src/a; mkdir -p new/deep; echo n > new/deep/f; rm -r old; mv 'a b' moved; "
        two.run_code(work + "ln -s src/a link; chmod 600 src/a; touch -d 2001-02-03T04:05:06Z new/deep/f new").check()
        self.assertEqual(base.take(one), types.Taken(None, []))
        with self.assertRaisesRegex(errors.NotFoundError, "neither kernel has absent"):
            base.take(two, paths=["src", "absent"])
        with self.assertRaisesRegex(errors.InvalidArgumentError, "not a fork"):
            one.take(two)
        self.assertIn("src/a", [change.name for change in base.take(two, paths=["/workspace/src/"]).changes])
        self.assertEqual(base.run_code("cat src/a old/file").stdout, "2\ngone\n")
        base.run_code("echo 3 > mine; echo 4 > old/other")
        one.run_code("chmod 600 mine").check()
        with self.assertRaisesRegex(errors.ConflictError, "mine"):
            base.take(one)
        with self.assertRaisesRegex(errors.ConflictError, "old/other") as raised:
            base.take(two)
        self.assertEqual(raised.exception.reason, "changed_here")
        taken = base.take(two, force=True)
        look = "cat src/a new/deep/f moved; readlink link; ls; stat -c %a:%Y new/deep/f; stat -c %Y new; cat mine"
        wanted = "2\nn\nx\nsrc/a\nlink\nmine\nmoved\nnew\nsrc\n644:981173106\n981173106\n3\n"
        self.assertEqual(base.run_code(look).stdout, wanted)
        self.assertEqual(base.take(two), types.Taken(None, []))
        base.restore(taken.safety.id)
        self.assertEqual(base.run_code("cat old/other; ls").stdout, "4\na b\nmine\nold\nsrc\n")

        async def again():
            async with aio.Host.connect() as host:
                kernel, fork = [await host.get(name) for name in ("main", "try-2")]
                return await kernel.take(fork, paths=["moved"])

        self.assertIn("moved", [change.name for change in asyncio.run(again()).changes])
        for kernel in (one, two, base):
            kernel.remove()

    def test_update_rename_and_forks(self):
        kernel = self.host.create("before", engine="bash", memory_bytes=256 << 20)
        kernel.run_code("x=1")
        folder = self.root / "home/shared"
        folder.mkdir()
        paths = [ryokan.Mount(str(folder))]
        done = self.host.update("before", memory_bytes=300 << 20, idle_timeout=math.inf, paths=paths)
        self.assertTrue(done.at_next_start and all("memory" in what for what in done.at_next_start), done)
        info = kernel.info()
        self.assertEqual((info.limits.memory_bytes, info.limits.idle_timeout), (300 << 20, math.inf))
        self.assertEqual((info.at_next_start, [one.path for one in info.paths]), (done.at_next_start, [str(folder)]))
        self.host.update("before", remove_paths=[str(folder)])
        self.assertEqual(kernel.info().paths, [])
        version = self.host.rename("before", "after")
        self.assertEqual((kernel.info().name, kernel.info().version), ("after", version))
        with self.assertRaises(errors.NotFoundError):
            self.host.get("before")
        with self.assertRaises(errors.ConflictError):
            self.host.rename("after", "more", expected_version=version - 1)
        (child,) = self.host.fork("after", "leaner", memory_bytes=200 << 20, pids=40)
        self.assertEqual((child.info().limits.memory_bytes, child.info().limits.pids), (200 << 20, 40))
        self.assertEqual((child.run_code("echo $x").stdout, child.info().origin.kernel), ("1\n", kernel.id))
        side = kernel.thread("side", engine="python")
        side.run_code("open('beside', 'w').write('1')")
        self.assertTrue(kernel.files.exists("beside"))
        for one in [side, child, kernel]:
            one.remove()

    def test_virtual_environment(self):
        venv = self.root / "home/venv"
        subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", str(venv)], check=True)
        kernel = self.host.create("venv", venv=str(venv))
        info = kernel.info()
        self.assertEqual((info.engine, info.venv, info.paths), ("python", str(venv), [ryokan.Mount(str(venv))]))
        self.assertEqual(kernel.run_code("import sys; sys.prefix").value, str(venv))
        done = self.host.update("venv", venv="none")
        self.assertEqual((done.at_next_start, kernel.info().venv), ([f"venv {venv} -> none"], ""))
        kernel.remove()

    def test_suspend_and_archive(self):
        kernel = self.host.create("rests", engine="bash")
        with self.assertRaises(errors.ConflictError):
            kernel.suspend()
        kernel.run_code("x=1")
        kernel.suspend()
        self.assertEqual(kernel.info().state, "suspended")
        kernel.resume()
        self.assertNotEqual(kernel.info().state, "suspended")
        kernel.suspend()
        self.assertEqual(kernel.run_code("echo $x").stdout, "1\n")
        kept = kernel.archive()
        self.assertEqual((kernel.info().state, kernel.find_checkpoint("latest").id), ("archived", kept.id))
        with self.assertRaises(errors.RyokanError) as raised:
            kernel.run_code("1")
        self.assertEqual(raised.exception.reason, "archived")
        self.assertGreater(kernel.unarchive(), kept.version)
        self.assertEqual(kernel.run_code("echo $x").stdout, "1\n")
        kernel.remove()

    def test_kernel_travels_as_file(self):
        folder = self.root / "home/data"
        folder.mkdir()
        kernel = self.host.create("traveller", engine="bash", paths=[ryokan.Mount(str(folder), writable=True)])
        kernel.run_code("x=1; echo content > file")
        path = self.root / "traveller.ryokan"
        written = kernel.export(path)
        self.assertEqual(path.stat().st_size, written.size)
        self.assertEqual(len(written.digest), 64)
        with self.assertRaises(FileExistsError):
            kernel.export(path)
        review = self.host.review(path)
        self.assertEqual(
            [(one.kind, one.name, one.writable) for one in review.requested], [("path", str(folder), True)]
        )
        self.assertEqual(review.signer.standing, "own")
        arrived = self.host.import_(path, name="arrived")
        self.assertEqual((arrived.granted, arrived.withheld), ([], review.requested))
        self.assertEqual(arrived.kernel.run_code("cat file; echo $x").stdout, "content\n1\n")
        granted = self.host.import_(path, name="granted", grant=review.requested)
        self.assertEqual((granted.granted, granted.kernel.info().paths[0].path), (review.requested, str(folder)))
        with self.assertRaises(errors.RyokanError):
            self.host.import_(path, name="refused", grant=review.requested, without_host=True)
        # Cut files create nothing, and a failed export leaves nothing.
        path.write_bytes(path.read_bytes()[:-9])
        with self.assertRaises(errors.RyokanError):
            self.host.import_(path, name="cut")
        with self.assertRaises(errors.RyokanError):
            kernel.export(self.root / "nothing", refs=["absent"])
        self.assertFalse((self.root / "nothing").exists())
        self.assertEqual({info.name for info in self.host.list()} & {"refused", "cut"}, set())
        for one in [kernel, arrived.kernel, granted.kernel]:
            one.remove()

    def test_published_kernel_has_its_rights(self):
        path = self.shell.publish(["read"], "window")
        with ryokan.PublishedKernel.open(path) as window:
            self.assertEqual((window.name, window.info().rights), ("shell", ["read"]))
            self.assertEqual(window.log(), self.shell.log())
            with self.assertRaises(errors.RefusedError):
                window.run_code("1")
        self.shell.unpublish("window")
        with self.assertRaises(errors.UnavailableError):
            ryokan.PublishedKernel.open(path)

        async def work():
            async with aio.Host.connect() as host:
                path = await (await host.get("shell")).publish(["read", "execute"], "door")
                async with aio.PublishedKernel.open(path) as door:
                    self.assertEqual((await door.run_code("echo through")).stdout, "through\n")

        asyncio.run(work())

    # --- events

    def test_events_of_the_past_end(self):
        kernel = self.host.create("seen", engine="bash")
        kernel.run_code("true")
        events = list(kernel.events(follow=False))
        self.assertEqual({event.kernel for event in events}, {"seen"})
        self.assertEqual([event.sequence for event in events], sorted(event.sequence for event in events))
        self.assertIsInstance(events[0].detail, dict)
        self.assertIn(events[0], list(self.host.events(follow=False)))
        self.assertEqual(list(kernel.events(events[-1].sequence, follow=False)), [])
        kernel.remove()

    def test_events_are_followed(self):
        newest = max((event.sequence for event in self.host.events(follow=False)), default=0)
        with self.host.events(newest) as events:
            # More than the client keeps: the daemon waits for the reader.
            for number in range(30):
                self.host.create(f"many-{number}", engine="bash").remove()
            names = set()
            for event in events:
                names.add(event.kernel)
                if event.kernel == "many-29":
                    break
            self.assertLessEqual({f"many-{number}" for number in range(30)}, names)
            closing = threading.Timer(0.3, events.close)
            closing.start()
            # Another thread ends the loop.
            for _ in events:
                pass
            closing.join()
        self.assertEqual(list(events), [])

    def test_lost_connection_ends_events(self):
        async def work():
            host = await aio.Host.connect()
            newest = max([event.sequence async for event in host.events(follow=False)], default=0)
            events = host.events(newest)
            waiting = asyncio.ensure_future(events.__anext__())
            await asyncio.sleep(0.2)
            await host.close()
            with self.assertRaises(errors.UnavailableError):
                await asyncio.wait_for(waiting, 180)

        asyncio.run(work())

    # --- names of E2B

    def test_sandbox_has_names_of_e2b(self):
        sandbox = ryokan.Sandbox.create(labels={"for": "e2b"})
        self.assertEqual([one.sandbox_id for one in ryokan.Sandbox.list(labels={"for": "e2b"})], [sandbox.sandbox_id])
        sandbox.run_code("x = 1", envs={"A": "b"})
        self.assertEqual(sandbox.commands.run("echo $A", envs={"A": "c"}).stdout, "c\n")
        snapshot = sandbox.create_snapshot("good")
        self.assertTrue(sandbox.pause())
        self.assertEqual(sandbox.get_info().state, "suspended")
        sandbox.resume()
        self.assertEqual(sandbox.run_code("x").value, 1)
        sandbox.stop()
        self.assertFalse(sandbox.pause())
        (other,) = sandbox.fork("from-snapshot", ref=snapshot.snapshot_id)
        self.assertTrue(ryokan.Sandbox.kill("from-snapshot"))
        self.assertFalse(ryokan.Sandbox.kill(other.id))
        self.host.rename(sandbox.sandbox_id, "renamed")
        self.assertTrue(sandbox.is_running())
        self.assertTrue(ryokan.Sandbox.kill(sandbox.sandbox_id))
        self.assertFalse(sandbox.is_running())
        self.assertFalse(sandbox.kill())

        async def work():
            async with aio.Sandbox.create(engine="bash") as sandbox:
                self.assertEqual(type(await sandbox.get_info()), types.KernelInfo)
                self.assertIn(sandbox.sandbox_id, [one.id for one in await aio.Sandbox.list()])
            self.assertFalse(await aio.Sandbox.kill(sandbox.sandbox_id))

        asyncio.run(work())
