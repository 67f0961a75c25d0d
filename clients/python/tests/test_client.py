"""Both faces against a daemon: results, values, output, errors."""

import asyncio
import gc
import inspect
import math
import multiprocessing
import threading
import time

import ryokan
from ryokan import aio, errors, types
from ryokan._wire import change_to_wire, fork_to_wire, schema, spec_to_wire

from support import DaemonTest, run_python


class ClientTest(DaemonTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.host = ryokan.Host.connect()
        cls.addClassCleanup(cls.host.close)
        cls.python = cls.host.create("python", engine="python")
        cls.shell = cls.host.create("shell", engine="bash")

    def test_faces_have_same_names(self):
        shown = {name: getattr(ryokan, name) for name in ryokan.__all__}
        classes = {name for name, one in shown.items() if getattr(one, "__module__", "").startswith("ryokan._sync")}
        in_aio = {name for name in aio.__all__ if inspect.isclass(getattr(aio, name))}
        self.assertEqual(classes, in_aio)
        self.assertGreaterEqual(classes, {"CommandHandle", "Commands", "Events", "Files", "Forward", "Host", "Kernel"})
        for name in classes:
            sync, both = getattr(ryokan, name), getattr(aio, name)
            public = {n for n in vars(both) if not n.startswith("_")}
            self.assertEqual(public, {n for n in vars(sync) if not n.startswith("_")}, name)
            for method in public:
                found = [getattr(face, method) for face in (sync, both)]
                self.assertEqual(*[isinstance(one, property) for one in found], f"{name}.{method}")
                called = [one.fget if isinstance(one, property) else one for one in found]
                given = [inspect.signature(one).parameters for one in called]
                # E2B's synchronous face takes no callbacks: it asks the handle for events.
                alone = {"on_event", "on_exit"} if method == "watch_dir" else set()
                parameters = [[(p.name, p.kind, p.default) for p in one.values() if p.name not in alone] for one in given]
                self.assertEqual(*parameters, f"{name}.{method}")
                for face in (sync, both):
                    self.assertTrue(getattr(face, method).__doc__ or method == "kill", f"{face}.{method}")

    def test_every_code_has_class(self):
        self.assertEqual(set(errors.BY_CODE), set(schema.ErrorCode.schema.enumerants))
        for code, cls in errors.BY_CODE.items():
            line = f'remote exception: ryokan:{{"code":"{code}","message":"m {{}}","hint":"h","reason":"r"}} (at x)'
            error = errors.from_exception("FAILED", line)
            self.assertIs(type(error), cls)
            self.assertEqual((error.message, error.hint, error.reason), ("m {}", "h", "r"))

    def test_foreign_exceptions_have_codes(self):
        for kind, code in [("DISCONNECTED", "unavailable"), ("OVERLOADED", "busy"), ("UNIMPLEMENTED", "unsupported")]:
            self.assertEqual(errors.from_exception(kind, "").code, code)
        for text in ["", "ryokan:{}", "ryokan:{", 'ryokan:{"code":1}']:
            self.assertEqual(errors.from_exception("FAILED", text).code, "internal", text)

    def test_options_reach_daemon(self):
        fields = set(schema.KernelSpec.schema.fieldnames)
        self.assertEqual(fields - set(spec_to_wire("n", {})), {"retention"})
        self.assertEqual(set(schema.KernelUpdate.schema.fieldnames), set(change_to_wire({})))
        self.assertEqual(set(schema.ForkRequest.schema.fieldnames), {*fork_to_wire("n", {}), "change"})
        labels = {"team": "é"}
        kernel = self.host.create(
            "limited", engine="python", memory_bytes=256 << 20, pids=50, idle_timeout=math.inf, labels=labels
        )
        self.assertEqual([info.name for info in self.host.list(labels=labels)], ["limited"])
        self.assertEqual(kernel.info().labels, labels)
        self.assertEqual(self.host.list(prefix="nothing"), [])
        kernel.remove()
        for wrong in [self.host.create, self.shell.fork, self.shell.commands.run]:
            with self.assertRaisesRegex(TypeError, "lifetime"):
                wrong("wrong", lifetime=3)

    def test_refusals_are_typed(self):
        for wrong, expected in [
            (lambda: self.host.get("absent"), errors.NotFoundError),
            (lambda: self.host.create("../up"), errors.InvalidArgumentError),
            (lambda: self.host.create("python"), errors.AlreadyExistsError),
            (lambda: self.python.set_var("v", 1, expected_version=1), errors.ConflictError),
            (lambda: self.python.set_var("v", {1, 2}), errors.InvalidArgumentError),
            (lambda: self.python.set_var("v", {1: 2}), errors.InvalidArgumentError),
            (lambda: self.python.set_var("v", "\ud800"), errors.InvalidArgumentError),
            (lambda: self.python.run_code("1", timeout=-1), errors.InvalidArgumentError),
            (lambda: self.python.run_code("1", output_limit=-1), errors.InvalidArgumentError),
            (lambda: self.python.restore("nothing"), errors.NotFoundError),
            (lambda: self.python.wait(10**6), errors.NotFoundError),
            (lambda: self.python.fork("shell"), errors.AlreadyExistsError),
        ]:
            with self.subTest(inspect.getsource(wrong) and str(expected)), self.assertRaises(expected) as raised:
                wrong()
            self.assertTrue(raised.exception.message)
        reader = self.python.attenuate(["read"], "reader")
        with self.assertRaises(errors.RefusedError) as raised:
            reader.run_code("1")
        self.assertEqual(raised.exception.reason, "rights")

    def test_values_round_trip(self):
        nested = None
        for _ in range(90):
            nested = [nested]
        for value in [
            None, True, -(2**63), 2**63, 10**300, -(10**40), 1.5, "é\n\0日本", b"\x00\xff", [1, "1", None],
            {"b": 1, "a": []}, nested,
        ]:  # fmt: skip
            self.python.set_var("v", value)
            self.assertEqual(self.python.get_var("v"), value)
            self.assertEqual(self.python.run_code("v").value, value)
        with self.assertRaisesRegex(errors.InvalidArgumentError, "100 levels"):
            self.python.set_var("v", [[[[[[[[[[nested]]]]]]]]]])
        self.python.run_code("import threading; lock = threading.Lock()")
        self.assertEqual(self.python.get_var("lock").type, "_thread.lock")
        self.assertIn("lock", [variable.name for variable in self.python.list_vars()])
        result = self.python.run_code("None")
        self.assertEqual((result.value, result.has_value, result.text), (None, False, None))

    def test_output_keeps_bytes(self):
        result = self.shell.run_code(r"printf '\xff\xc3\xa9'; printf 'é' >&2; exit 3")
        self.assertEqual((result.stdout_bytes, result.stdout), (b"\xff\xc3\xa9", "\ufffdé"))
        self.assertEqual((result.stderr, result.exit_code, result.ok), ("é", 3, False))
        out, err = [], []
        # A character that arrives in two pieces, and an incomplete one at the end.
        code = r"printf '\xc3'; sleep 0.1; printf '\xa9'; printf 'e\n' >&2; printf '\xe2\x82'"
        self.shell.run_code(code, on_stdout=out.append, on_stderr=err.append)
        self.assertEqual(("".join(out), "".join(err)), ("é\ufffd", "e\n"))
        self.assertEqual(self.shell.run_code("cat", stdin="é").stdout, "é")
        self.assertEqual(self.shell.run_code("echo $A", env={"A": "b"}).stdout, "b\n")

    def test_large_output(self):
        size = 5 << 20
        code = f"import sys; sys.stdout.write('0123456789abcdef' * {size // 16})"
        cut = self.python.run_code(code)
        self.assertEqual((len(cut.stdout_bytes), cut.truncated_bytes), (4 << 20, 1 << 20))
        self.assertEqual(cut.stdout_tail_bytes[-4:], b"cdef")
        self.assertGreater(len(cut.stdout_tail_bytes), 60 << 10)
        pieces = []
        whole = self.python.run_code(code, output_limit=8 << 20, on_stdout=pieces.append)
        self.assertEqual((whole.stdout, whole.truncated_bytes), ("0123456789abcdef" * (size // 16), 0))
        self.assertEqual("".join(pieces), whole.stdout)

    def test_displays_arrive(self):
        code = "class A:\n  def _repr_html_(self): return '<b>é'\n  def __repr__(self): return 'an A'\nA()"
        result = self.python.run_code(code)
        self.assertEqual([(shown.mime, shown.text) for shown in result.displays], [("text/html", "<b>é")])
        self.assertEqual((result.text, result.value), ("an A", types.Opaque("A", "an A")))

    def test_callback_thread_and_exception(self):
        threads = []
        self.python.run_code("print(1)", on_stdout=lambda _: threads.append(threading.current_thread()))
        self.assertEqual(set(threads), {threading.current_thread()})

        def wrong(text):
            # Calls inside a callback work, too.
            self.python.info()
            raise KeyError(text)

        started = time.monotonic()
        with self.assertRaises(KeyError):
            self.python.run_code("import time\nprint(1, flush=True)\ntime.sleep(600)", on_stdout=wrong)
        # The code was interrupted: the next execution does not wait for it.
        self.assertEqual(self.python.run_code("2").value, 2)
        self.assertLess(time.monotonic() - started, 300)

    def test_interrupt_from_thread(self):
        ended = []
        thread = threading.Thread(target=lambda: ended.append(self.python.run_code("import time; time.sleep(600)")))
        thread.start()
        while not ended and thread.is_alive():
            self.python.interrupt()
            thread.join(0.1)
        self.assertEqual(ended[0].status, "interrupted")

    def test_history(self):
        kernel = self.host.create("history", engine="python")
        kernel.run_code("x = 1; open('a', 'w').write('1')")
        first = kernel.checkpoint("first", pinned=True)
        self.assertEqual((first.kind, first.machine_bytes), ("checkpoint", 0))
        with self.assertRaisesRegex(errors.UnsupportedError, "isolation process"):
            kernel.checkpoint("memory", kind="teleport")
        with self.assertRaisesRegex(errors.RyokanError, "holds no memory"):
            kernel.restore("first", kind="teleport")
        kernel.run_code("x = 2; open('b', 'w').write('2')")
        changes = {(one.area, one.change, one.name) for one in kernel.diff("first")}
        self.assertLessEqual({("state", "changed", "var/x"), ("file", "added", "b")}, changes)
        back = kernel.restore("first")
        self.assertEqual((back.checkpoint.id, kernel.get_var("x")), (first.id, 1))
        kernel.undo()
        self.assertEqual(kernel.get_var("x"), 2)
        # The newest first; each restore and undo keeps what was there.
        self.assertEqual(kernel.log()[-1].name, "first")
        forks = kernel.fork("copy", count=2, ref="first")
        self.assertEqual([(fork.name, fork.get_var("x")) for fork in forks], [("copy-1", 1), ("copy-2", 1)])
        kernel.message("user", "hello")
        entry = kernel.journal()[-1]
        self.assertEqual((entry.kind, entry.text), ("message", "user: hello"))
        kernel.stop()
        self.assertEqual(kernel.info().state, "stopped")
        kernel.start()
        self.assertEqual(kernel.get_var("x"), 2)
        for one in [kernel, *forks]:
            one.remove()

    def test_mounts(self):
        folder = self.root / "home/given"
        folder.mkdir()
        folder.chmod(0o777)
        self.shell.mount("/given", str(folder), writable=True)
        self.shell.run_code("echo é > /given/file")
        self.assertEqual((folder / "file").read_text(), "é\n")
        self.assertEqual(self.shell.mounts(), [ryokan.Mount("/given", str(folder), True)])
        self.shell.unmount("/given")
        self.assertEqual(self.shell.mounts(), [])

    def test_commands(self):
        commands = self.shell.commands
        ran = commands.run("echo out; echo err >&2; exit 3")
        self.assertEqual((ran.stdout, ran.stderr, ran.exit_code, ran.status), ("out\n", "err\n", 3, "failed"))
        content = bytes(range(256)) * (10 << 10)
        self.assertEqual(commands.run(["cat"], stdin=content).stdout_bytes, content)
        self.assertEqual(commands.run(["printenv", "A"], env={"A": "b c"}).stdout, "b c\n")
        self.assertEqual(commands.run(["pwd"], cwd="/tmp").stdout, "/tmp\n")
        # A program that reads no input ends all the same.
        self.assertTrue(commands.run(["true"], stdin=content).ok)
        self.assertEqual(commands.run("sleep 600 & wait", timeout=0.2).status, "timeout")
        self.assertEqual((commands.run(["nothing"]).status, commands.run(["nothing"]).exit_code), ("refused", 127))
        heard = []

        def take(text):
            heard.append(text)
            (process,) = commands.list()
            self.assertEqual(process.argv[0], "sh")
            commands.kill(process.execution_id)

        self.assertEqual(commands.run("echo begun; sleep 600", on_stdout=take).ok, False)
        self.assertEqual((heard, commands.list()), (["begun\n"], []))

    def test_files(self):
        files = self.shell.files
        # Several chunks, and byte-exact.
        content = bytes(range(256)) * (10 << 10) + b"end"
        self.assertEqual(files.write("deep/er/big", content).size, len(content))
        self.assertEqual(files.read("/workspace/deep/er/big", "bytes"), content)
        self.assertEqual(self.shell.run_code("wc -c < deep/er/big").stdout.strip(), str(len(content)))
        files.write("deep/é", "text é\n")
        self.assertEqual((files.read("deep/é"), self.shell.run_code("cat deep/é").stdout), ("text é\n", "text é\n"))
        files.write(b"deep/\xff", b"")
        self.assertEqual([(one.name, one.kind) for one in files.list("deep")], [
            ("er", "directory"), ("é", "file"), ("\udcff", "file")
        ])  # fmt: skip
        self.shell.run_code("ln -s deep/é link")
        self.assertEqual(files.stat("link", follow=False).target, "deep/é")
        for wrong, code, reason in [
            (lambda: files.read("nothing"), "notFound", "not_found"),
            (lambda: files.read("deep"), None, "is_directory"),
            (lambda: files.read("../etc/passwd"), None, "outside"),
            (lambda: files.read("deep/er/big"), "invalidArgument", ""),
            (lambda: files.read("deep/er/big", "bytes", limit=100), "invalidArgument", "too_large"),
            (lambda: files.remove("deep"), None, "not_empty"),
            (lambda: files.rename("deep/é", "link"), None, "exists"),
        ]:
            with self.assertRaises(errors.RyokanError) as raised:
                wrong()
            self.assertEqual(raised.exception.reason, reason)
            self.assertEqual(raised.exception.code, code or raised.exception.code)
        files.make_dir("deep/new")
        files.remove("deep", recursive=True)
        self.assertFalse(files.exists("deep"))

    def test_dropped_kernels_are_released(self):
        held = self.host._host._connection.link.capabilities
        before = len(held)
        for _ in range(50):
            self.host.get("shell")
        gc.collect()
        self.host.ping()
        self.assertLessEqual(len(held), before + 1)

    def test_many_threads(self):
        results = []
        threads = [
            threading.Thread(
                target=lambda n=n: results.append((n, self.host.get("shell").run_code(f"echo {n}").stdout))
            )
            for n in range(20)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        self.assertEqual(sorted(results), [(n, f"{n}\n") for n in range(20)])

    def test_forked_process_is_told(self):
        context = multiprocessing.get_context("fork")
        outcomes = context.SimpleQueue()

        def child():
            try:
                self.host.ping()
            except errors.UnavailableError:
                with ryokan.Host.connect() as own:
                    outcomes.put(own.get("shell").run_code("echo child").stdout)

        process = context.Process(target=child)
        process.start()
        process.join(180)
        self.assertEqual((process.exitcode, outcomes.empty() or outcomes.get()), (0, "child\n"))
        self.assertTrue(self.host.ping())

    def test_async_face(self):
        async def work():
            async with aio.Host.connect(self.socket()) as host:
                shell = await host.get("shell")
                pieces = []

                async def slow(text):
                    await asyncio.sleep(0.05)
                    pieces.append(text)

                result = await shell.run_code("for i in 1 2 3; do echo $i; sleep 0.02; done", on_stdout=slow)
                self.assertEqual("".join(pieces), result.stdout)
                running = asyncio.ensure_future(shell.run_code("sleep 600"))
                while (await shell.info()).state != "busy":
                    await asyncio.sleep(0.05)
                with self.assertRaises(asyncio.TimeoutError):
                    await asyncio.wait_for(running, 0.3)
                self.assertEqual((await asyncio.wait_for(shell.run_code("echo next"), 180)).stdout, "next\n")
                self.assertEqual((await shell.journal())[-2].status, "interrupted")
            with self.assertRaises(errors.UnavailableError):
                await host.ping()
            # A second connection of the same loop, which stays open.
            await (await aio.Host.connect(self.socket())).ping()

        asyncio.run(work())

    def test_processes_end_cleanly(self):
        connect = f"ryokan.Host.connect({str(self.socket())!r})"
        run = ".get('shell').run_code('echo 1').stdout"
        for code in [
            f"import ryokan; host = {connect}; kernel = host.get('shell'); print(host{run}, end='')",
            f"import ryokan\nwith {connect} as host: print(host{run}, end='')",
            f"import asyncio\nfrom ryokan import aio as ryokan\nasync def main():\n  host = await {connect}\n"
            "  print((await (await host.get('shell')).run_code('echo 1')).stdout, end='')\nasyncio.run(main())",
        ]:
            ran = run_python(code)
            self.assertEqual((ran.returncode, ran.stdout, ran.stderr), (0, "1\n", ""), code)
