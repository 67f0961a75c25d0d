"""Files in and out of kernels: from file objects and iterators, and whole folders, through both faces."""

import asyncio
import gc
import io
import os
import socket
import stat
import tracemalloc
from pathlib import Path

import ryokan
from ryokan import aio, errors

from support import DaemonTest

MIB = 1 << 20


class CopiesTest(DaemonTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.host = ryokan.Host.connect()
        cls.addClassCleanup(cls.host.close)
        cls.kernel = cls.host.create("k", engine="bash")
        cls.files = cls.kernel.files
        cls.outside = cls.root / "home"

    def in_async_face(self, work):
        """Runs `work` with the files of the asynchronous face."""

        async def run():
            async with aio.Host.connect() as host:
                return await work((await host.get("k")).files)

        return asyncio.run(run())

    # --- sources of `write`

    def test_content_comes_from_anything(self):
        data = os.urandom(2 * MIB + 77)
        local = self.outside / "source"
        local.write_bytes(data)

        def generate():
            for at in range(0, len(data), 99_991):
                yield data[at : at + 99_991]

        sources = {
            "bytes": lambda: data,
            "bytearray": lambda: bytearray(data),
            "view": lambda: memoryview(data),
            "file": lambda: open(local, "rb"),
            "memory": lambda: io.BytesIO(data),
            "list": lambda: [b"", data[:MIB], b"", bytearray(data[MIB:])],
            "generator": generate,
        }
        for name, source in sources.items():
            with self.subTest(name):
                content = source()
                self.assertEqual(self.files.write("f", content).size, len(data))
                self.assertEqual(self.files.read("f", "bytes"), data)
                self.in_async_face(lambda files, source=source: files.write("f-async", source()))
                self.assertEqual(self.files.read("f-async", "bytes"), data)
                if hasattr(content, "close"):
                    content.close()
        self.files.write("text", io.StringIO("é\n"), mode=0o640)
        self.assertEqual((self.files.read("text"), self.files.stat("text").mode), ("é\n", 0o640))
        self.files.write_files([{"path": "a", "data": io.BytesIO(b"a")}, {"path": "b", "data": [b"b"]}])
        self.assertEqual((self.files.read("a"), self.files.read("b")), ("a", "b"))
        self.assertEqual(self.files.write("empty", iter([])).size, 0)
        gc.collect()

    def test_asynchronous_sources(self):
        data = os.urandom(MIB + 5)

        class Reader(io.BytesIO):
            async def read(self, size):
                return super().read(size)

        async def generate():
            for at in range(0, len(data), 1 << 18):
                await asyncio.sleep(0)
                yield data[at : at + (1 << 18)]

        for source in (Reader(data), generate()):
            self.in_async_face(lambda files, source=source: files.write("async", source))
            self.assertEqual(self.files.read("async", "bytes"), data)
        # From one kernel's file to another's, piece by piece.
        self.files.write("copy", self.files.read("async", "stream"))
        self.assertEqual(self.files.read("copy", "bytes"), data)

        async def copy(files):
            await files.write("copy-2", await files.read("copy", "stream"))
            return await files.read("copy-2", "bytes")

        self.assertEqual(self.in_async_face(copy), data)

    def test_failed_source_changes_nothing(self):
        self.files.write("kept", "before")

        def broken():
            yield bytes(2 * MIB)
            raise KeyError("the source")

        async def async_broken():
            yield bytes(2 * MIB)
            raise KeyError("the source")

        before = self.kernel.info().version
        held = self.files._files._connection.link.capabilities
        count = len(held)
        failures = []
        for path in ("kept", "folder/new"):
            # Not `assertRaises`, which clears the frames of the exception.
            try:
                self.files.write(path, broken())
            except KeyError as error:
                failures.append(error)
            for source in (broken, async_broken):
                with self.assertRaises(KeyError):
                    self.in_async_face(lambda files, path=path, source=source: files.write(path, source()))
        for wrong in (5, [5], ["x", 5], None, object(), self.outside):
            with self.subTest(wrong), self.assertRaises(TypeError):
                self.files.write("kept", wrong)
        with self.assertRaises(TypeError):
            self.in_async_face(lambda files: files.write("kept", 5))
        self.assertEqual(self.files.read("kept"), "before")
        self.assertFalse(self.files.exists("folder/new"))
        self.assertEqual(self.kernel.info().version, before)
        # The caught exceptions hold no unfinished file.
        self.assertEqual(len(failures), 2)
        self.assertEqual(len(held), count)

    def test_long_source_needs_little_memory(self):
        piece = bytes(MIB)
        tracemalloc.start()
        try:
            self.files.write("long", (piece for _ in range(48)))
            self.in_async_face(lambda files: files.write("long-2", (piece for _ in range(48))))
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        self.assertLess(most, 16 * MIB)
        self.assertEqual(self.files.stat("long").size, 48 * MIB)
        self.assertEqual(self.files.stat("long-2").size, 48 * MIB)

    # --- whole folders

    def folder(self, name):
        """A folder of this host with what is hard to copy."""
        top = self.outside / name
        (top / "inner/empty").mkdir(parents=True)
        (top / "inner/b\udcff").write_bytes(b"name of any bytes")
        (top / "run.sh").write_text("#!/bin/sh\n")
        (top / "run.sh").chmod(0o4750)
        (top / "large").write_bytes(os.urandom(2 * MIB + 3))
        (top / "link").symlink_to("run.sh")
        (top / "away").symlink_to(self.root)
        (top / "dangling").symlink_to("/absent")
        os.mkfifo(top / "pipe")
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(top / "socket"))
        os.utime(top / "run.sh", ns=(0, 1_000_000_001))
        os.utime(top / "link", ns=(0, 2_000_000_002), follow_symlinks=False)
        os.utime(top / "inner/empty", ns=(0, 3_000_000_003))
        (top / "inner").chmod(0o555)
        os.utime(top / "inner", ns=(0, 4_000_000_004))
        os.utime(top, ns=(0, 5_000_000_005))
        return top

    def tree(self, top):
        """Kind, mode, time and content of everything in a folder."""
        found = {}
        for path in [top, *top.rglob("*")]:
            attributes = path.lstat()
            kind, content = stat.S_IFMT(attributes.st_mode), None
            if kind == stat.S_IFLNK:
                content = os.readlink(path)
            elif kind == stat.S_IFREG:
                content = path.read_bytes()
            elif kind != stat.S_IFDIR:
                continue
            mode = 0 if kind == stat.S_IFLNK else attributes.st_mode & 0o777
            found[os.fsencode(path.relative_to(top))] = (kind, mode, attributes.st_mtime_ns, content)
        return found

    def test_folder_goes_in_and_out(self):
        top = self.folder("project")
        copied = self.files.upload(top)
        self.assertEqual((copied.files, copied.bytes), (6, 2 * MIB + 3 + 10 + 17))
        self.assertEqual(sorted(Path(one).name for one in copied.skipped), ["pipe", "socket"])
        self.assertEqual(self.files.stat("project").modified_ns, 5_000_000_005)
        self.assertEqual(self.files.stat("project/run.sh").mode, 0o750, "never setuid")
        back = self.files.download("project", self.outside / "back")
        self.assertEqual((back.files, back.bytes, back.skipped), (6, copied.bytes, []))
        self.assertEqual(self.tree(self.outside / "back"), self.tree(top))

        async def through_async_face(files):
            await files.upload(str(top), "again/")
            # Into an existing directory: under its own name.
            (self.outside / "into").mkdir()
            return await files.download("again", self.outside / "into")

        self.assertEqual(self.in_async_face(through_async_face).files, 6)
        self.assertEqual(self.tree(self.outside / "into/again"), self.tree(top))
        # A second time everything is there already. An existing destination receives it under its name.
        self.assertEqual(self.files.upload(os.fsencode(top)), copied)
        self.files.upload(top / ".", "project")
        self.assertEqual(self.files.stat("project/project/run.sh").size, 10)
        # Single files, also with other names.
        self.files.upload(top / "link", "through-link")
        self.assertEqual(self.files.stat("through-link", follow=False).kind, "file")
        self.files.download("project/run.sh", self.outside / "other.sh")
        self.assertEqual((self.outside / "other.sh").stat().st_mtime_ns, 1_000_000_001)
        self.files.download("/workspace", self.outside / "into")
        self.assertTrue((self.outside / "into/workspace/project/large").exists())

    def test_download_follows_no_link(self):
        self.files.write("evil/sub/file", "from the kernel")
        self.files.write("evil/plain", "from the kernel")
        precious = self.outside / "precious"
        precious.mkdir()
        (precious / "file").write_text("mine")
        target = self.outside / "dest/evil"
        target.mkdir(parents=True)
        (target / "sub").symlink_to(precious)
        with self.assertRaises(errors.ConflictError) as caught:
            self.files.download("evil", self.outside / "dest")
        self.assertEqual(caught.exception.reason, "not_directory")
        self.assertEqual((precious / "file").read_text(), "mine")
        # A link in the place of a file is replaced, and what it leads to stays.
        (target / "sub").unlink()
        (target / "plain").unlink(missing_ok=True)
        (target / "plain").symlink_to(precious / "file")
        self.files.download("evil", self.outside / "dest")
        self.assertEqual((precious / "file").read_text(), "mine")
        self.assertEqual((target / "plain").read_text(), "from the kernel")
        self.assertFalse((target / "plain").is_symlink())
        self.assertEqual(sorted(path.name for path in target.rglob("*")), ["file", "plain", "sub"])

    def test_copies_fail_with_types(self):
        self.files.write("there/file", "x")
        local = self.outside / "conflict"
        (local / "there/file").mkdir(parents=True)
        files_open = len(os.listdir("/proc/self/fd"))
        cases = [
            (FileNotFoundError, lambda files: files.upload(self.outside / "absent")),
            (errors.NotFoundError, lambda files: files.download("absent", local)),
            (FileNotFoundError, lambda files: files.download("there", self.outside / "absent/folder/x")),
            (errors.InvalidArgumentError, lambda files: files.download("there", self.outside / "new/..")),
            (errors.ConflictError, lambda files: files.download("there", local)),
            (errors.RyokanError, lambda files: files.upload(local / "there", "/workspace")),
            (errors.RefusedError, lambda files: files.upload(local, "/etc")),
        ]
        for number, (kind, work) in enumerate(cases):
            with self.subTest(number):
                with self.assertRaises(kind) as caught:
                    work(self.files)
                with self.assertRaises(kind):
                    self.in_async_face(work)
                if kind is FileNotFoundError:
                    self.assertIn(str(self.outside / "absent"), str(caught.exception))
        self.assertEqual(len(os.listdir("/proc/self/fd")), files_open, "every directory is closed")
        self.assertEqual(os.listdir(local / "there"), ["file"])
