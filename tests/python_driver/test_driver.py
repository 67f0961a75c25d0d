"""The python engine's driver, as init sees it: one class for each part of docs/engine-contract.md.

Run: /usr/bin/python3 -m unittest discover -s tests/python_driver        (RYOKAN_TEST_PYTHON names another interpreter)
"""
import base64
import json
import os
import signal
import struct
import sys
import threading
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from engine import Engine, compiled_driver, driver_image, Result, as_value  # noqa: E402


class Case(unittest.TestCase):
    """A fresh engine for each class: tests of a class share it and use names of their own."""

    @classmethod
    def setUpClass(cls):
        cls.engine = Engine()
        cls.addClassCleanup(cls.engine.__exit__)

    def run_ok(self, code, **more):
        result = self.engine.run(code, **more)
        self.assertEqual(result.end["status"], "done", result.err.decode())
        return result

    def value_of(self, code, **more):
        return self.run_ok(code, **more).value


class Own(unittest.TestCase):
    """An engine for each test."""

    def setUp(self):
        self.engine = Engine()
        self.addCleanup(self.engine.__exit__)

    run_ok = Case.run_ok
    value_of = Case.value_of

    def restored(self, *codes):
        """Runs codes, loads the saved state into a new engine and continues with it."""
        for code in codes:
            self.run_ok(code)
        other = self.engine.reload()
        self.addCleanup(other.__exit__)
        self.assertEqual(other.load_reply["missed"], [])
        self.engine = other
        return other


class Start(Own):
    def test_ready_frame_has_python_version(self):
        version = self.value_of("import sys; '%d.%d.%d' % sys.version_info[:3]")
        self.assertEqual(
            self.engine.ready, {"ev": "ready", "engine": "python", "version": version, "interrupt": "signal"}
        )

    def test_prepared_engine_enters_with_new_numbers(self):
        with Engine() as engine:
            self.assertEqual(engine.ask("preload", modules=[])["missed"], [])
            engine.run("import os, random; random.seed(1)")
            self.assertTrue(engine.ask("enter", env=[["RYOKAN_KERNEL", "lab"]])["ok"])
            code = "[os.environ['RYOKAN_KERNEL'], random.random() == random.Random(1).random()]"
            self.assertEqual(engine.run(code).value, ["lab", False])
            self.assertNotIn("env/RYOKAN_KERNEL", engine.saved)
            os.rmdir(engine.cwd)
            self.assertFalse(engine.ask("enter", env=[])["ok"])

    def test_namespace_is_main_module(self):
        self.assertEqual(self.engine.ask("vars")["vars"], [])
        self.assertIs(self.value_of("import sys; __name__ == '__main__' and sys.modules['__main__'].__dict__ is globals()"), True)

    def test_only_contract_descriptors_are_open(self):
        fds = self.value_of("import os; sorted(int(f) for f in os.listdir('/proc/self/fd'))")
        self.assertEqual(fds[:3], [0, 1, 2])
        self.assertTrue(all(fd >= 100 for fd in fds[3:-1]) or all(fd >= 100 for fd in fds[4:]), fds)
        with self.subTest("children get none of them"):
            out = self.run_ok("import subprocess; subprocess.run('ls /proc/self/fd', shell=True)").out
            self.assertTrue(all(int(fd) < 10 for fd in out.split()), out)

    def test_working_directory_is_importable(self):
        with open(os.path.join(self.engine.cwd, "mine.py"), "w") as file:
            file.write("answer = 42\n")
        self.assertEqual(self.value_of("import mine; mine.answer"), 42)

    def test_driver_starts_from_sources(self):
        compiled = compiled_driver()
        for useless in (b"", b"other" + compiled, compiled[:-100]):
            with Engine(image=driver_image(useless)) as engine:
                self.assertEqual(engine.run("2 + 2").value, 4)
                self.assertIn(b"ZeroDivisionError", engine.run("1 / 0").err)

    def test_modules_cannot_shadow_driver(self):
        for name in ("traceback", "linecache", "tokenize", "select", "json"):
            with open(os.path.join(self.engine.cwd, name + ".py"), "w") as file:
                file.write("raise SystemExit(9)\n")
        result = self.engine.run("1/0")
        self.assertEqual((result.end["status"], result.end["err"]), ("failed", "ZeroDivisionError: division by zero"))
        self.assertIn(b"line 1, in <module>", result.err)

    def test_eof_ends_with_0(self):
        self.engine.sock.shutdown(2)
        self.assertEqual(self.engine.wait(), 0)

    def test_shutdown_ends_jobs_and_threads(self):
        pid = self.value_of("import subprocess; p = subprocess.Popen(['sleep', '100']); p.pid")
        self.run_ok("import atexit, threading, time\natexit.register(lambda: time.sleep(600))\nthreading.Thread(target=lambda: time.sleep(600)).start()")
        self.engine.send({"op": "shutdown"})
        self.assertEqual(self.engine.wait(), 0)
        until = time.monotonic() + 60
        with self.assertRaises(ProcessLookupError):
            while time.monotonic() < until:
                os.kill(pid, 0)
                time.sleep(0.01)

    def test_malformed_frames_exit_with_message(self):
        for name, data in {
            "lengths": struct.pack("<II", 1 << 31, 0),
            "tail": struct.pack("<II", 2, 2 << 20) + b"{}",
            "json": struct.pack("<II", 3, 0) + b"{x}",
            "list": struct.pack("<II", 2, 0) + b"[]",
            "trailing": struct.pack("<II", 5, 0) + b'{} {}',
            "request": struct.pack("<II", 14, 0) + b'{"op":"dance"}',
            "field": struct.pack("<II", 22, 0) + b'{"op":"get","name":"x"}'[:22],
        }.items():
            with self.subTest(name), Engine() as engine:
                engine.sock.sendall(data)
                self.assertEqual(engine.wait(), 70)
                result = Result()
                engine.drain(result)
                self.assertIn(b"malformed frame", result.err)

    def test_truncated_frame_is_malformed(self):
        self.engine.sock.sendall(struct.pack("<II", 100, 0) + b"{")
        self.engine.sock.shutdown(1)
        self.assertEqual(self.engine.wait(), 70)

    def test_fragmented_and_batched_frames(self):
        frames = []
        for number in (1, 2):
            body = json.dumps({"op": "exec", "id": number, "exec": number, "code": f"{number} + 1", "env": [], "stdin": False})
            frames.append(struct.pack("<II", len(body), 0) + body.encode())
        for byte in frames[0]:
            self.engine.sock.sendall(bytes([byte]))
        self.assertEqual(self.engine.finish().value, 2)
        self.engine.sock.sendall(frames[0] + frames[1])
        self.assertEqual(self.engine.finish().value, 2)
        self.assertEqual(self.engine.finish().value, 3)


class Execution(Case):
    def test_last_expression_is_value_and_text(self):
        result = self.run_ok("a_1 = 3\na_1 * 2")
        self.assertEqual(result.end["value"], {"i": "6"})
        node = result.end["output"]["root"][0]
        self.assertEqual(node, {"name": "", "type": "text", "text": "6", "cells": [], "children": []})

    def test_statements_have_no_value(self):
        for code in ("x_1 = 1", "None", "5;", "5 ; # five", "", "# nothing", "x_1 = 2\nx_1;"):
            with self.subTest(code):
                end = self.run_ok(code).end
                self.assertNotIn("value", end)
                self.assertNotIn("output", end)
        self.assertEqual(self.value_of("'a;'"), "a;")
        self.assertEqual(self.value_of("(1,\n 2) # a;"), [1, 2])

    def test_underscore_result_history(self):
        self.run_ok("'one'")
        self.run_ok("'two'")
        self.run_ok("'three'")
        self.assertEqual(self.value_of("[_, __, ___]"), ["three", "two", "one"])

    def test_user_underscore_kept(self):
        with Engine() as engine:
            engine.run("_ = 'mine'")
            engine.run("5")
            self.assertEqual(engine.run("_").value, "mine")

    def test_repr_is_bounded(self):
        for code in ("'x' * 10**6", "[1] * 10**6", "{i: 'é' * 50 for i in range(10**5)}"):
            with self.subTest(code):
                text = self.run_ok(code).text
                self.assertLessEqual(len(text.encode()), 65536)
                self.assertTrue(text.endswith(("…", "]", "}")))
                self.assertGreater(len(text.encode()), 50000)

    def test_builtin_repr_matches_python(self):
        for code in ("[1, 'a', (2,), {}, {1: [2, {3}]}, set(), frozenset({1}), (), b'x', 1.5, None]", "{'a': {'b': ()}}"):
            self.assertEqual(self.run_ok(code).text, repr(eval(code)))

    def test_exception_reports_traceback(self):
        result = self.engine.run("def f_1():\n    raise ValueError('no\\nway')\nf_1()")
        self.assertEqual((result.end["status"], result.end["code"]), ("failed", 1))
        self.assertEqual(result.end["err"], "ValueError: no way")
        text = result.err.decode()
        self.assertIn("    raise ValueError('no\\nway')\n", text)
        self.assertRegex(text, r'File "<exec \d+>", line 3, in <module>')
        self.assertNotIn("ryokan/", text)

    def test_traceback_shows_earlier_source(self):
        self.run_ok("def f_2():\n    return 1 / 0  # here")
        self.assertIn("1 / 0  # here", self.engine.run("f_2()").err.decode())

    def test_chained_exception_frames(self):
        code = "try:\n    int('x')\nexcept ValueError as e:\n    raise KeyError('k') from e"
        text = self.engine.run(code).err.decode()
        self.assertIn("direct cause", text)
        self.assertNotIn("ryokan/", text)
        text = self.engine.run("try:\n    tools.nowhere\nexcept Exception:\n    1/0").err.decode()
        self.assertNotIn("ryokan/", text)

    def test_syntax_errors_are_refused(self):
        for code in ("x =", "for", "  1", "'\0'", "def f(:\n", "return", "await", "(" * 300 + ")" * 300, "a\nb c"):
            with self.subTest(code[:10]):
                result = self.engine.run("ran_1 = True\n" + code if code not in ("  1",) else code)
                self.assertEqual((result.end["status"], result.end["code"]), ("refused", 1), result.end)
                self.assertTrue(result.err)
        self.assertEqual(self.engine.ask("get", name="ran_1")["code"], "notFound")

    def test_syntax_error_in_exec_fails(self):
        self.assertEqual(self.engine.run("exec('x =')").end["status"], "failed")

    def test_system_exit(self):
        for code, status, number in (
            ("raise SystemExit", "done", 0),
            ("import sys; sys.exit(0)", "done", 0),
            ("import sys; sys.exit(3)", "failed", 3),
            ("exit(4)", "failed", 4),
            ("import sys; sys.exit('gone')", "failed", 1),
            ("raise SystemExit(-1)", "failed", -1),
            ("raise SystemExit(1 << 40 | 7)", "failed", 7),
        ):
            with self.subTest(code):
                result = self.engine.run(code)
                self.assertEqual((result.end["status"], result.end["code"]), (status, number))
        self.assertEqual(self.engine.run("import sys; sys.exit('gone')").err, b"gone\n")

    def test_deep_recursion(self):
        result = self.engine.run("def f_3(n): return f_3(n + 1)\nf_3(0)")
        self.assertTrue(result.end["err"].startswith("RecursionError"))
        self.assertLess(len(result.err), 70000)
        result = self.engine.run("class R_1:\n    def __repr__(self): return repr(self)\nR_1()")
        self.assertEqual(result.end["status"], "done")
        self.assertIn("RecursionError", result.text)

    def test_memory_error(self):
        self.assertTrue(self.engine.run("'x' * (1 << 62)").end["err"].startswith("MemoryError"))
        self.assertEqual(self.value_of("1 + 1"), 2)

    def test_unprintable_exceptions(self):
        code = "class E_1(Exception):\n    def __str__(self): raise ZeroDivisionError\n    __repr__ = __str__\nraise E_1"
        result = self.engine.run(code)
        self.assertEqual(result.end["status"], "failed")
        self.assertIn("E_1", result.end["err"])
        code = "class E_2(Exception):\n    def __str__(self): raise SystemExit(9)\nraise E_2"
        result = self.engine.run(code)
        self.assertEqual((result.end["status"], result.end["code"]), ("failed", 1))

    def test_repr_that_raises_or_exits(self):
        for what in ("1/0", "raise SystemExit(3)", "return 5"):
            result = self.engine.run(f"class R_2:\n    def __repr__(self): {what}\nR_2()")
            self.assertEqual(result.end["status"], "done")
            self.assertIn("R_2", result.text)

    def test_huge_messages_are_bounded(self):
        result = self.engine.run("raise ValueError('x' * 10**7)")
        self.assertLessEqual(len(result.end["err"]), 1000)
        self.assertLess(len(result.err), 70000)

    def test_top_level_await_on_one_loop(self):
        self.run_ok("import asyncio\nloop_1 = asyncio.get_running_loop() if False else None\nq_1 = asyncio.Queue()\nawait q_1.put(5)")
        self.assertEqual(self.value_of("await q_1.get()"), 5)
        self.run_ok("async def tick_1():\n    await asyncio.sleep(0.01)\n    return 'ticked'\nt_1 = asyncio.ensure_future(tick_1()) if False else None")
        self.assertEqual(self.value_of("await tick_1()"), "ticked")
        self.run_ok("l_1 = []\nasync def f_4():\n    l_1.append(asyncio.get_running_loop())\nawait f_4()")
        self.assertIs(self.value_of("await f_4()\nl_1[0] is l_1[1]"), True)
        self.assertEqual(self.value_of("asyncio.run(tick_1())"), "ticked")
        self.assertEqual(self.value_of("[x async for x in (i async for i in _agen())] if False else 7"), 7)
        self.assertEqual(self.value_of("await tick_1()"), "ticked")

    def test_await_failure_has_user_frames_only(self):
        text = self.engine.run("async def g_1():\n    1/0\nawait g_1()").err.decode()
        self.assertIn("in g_1", text)
        self.assertNotIn("asyncio/", text)
        self.assertNotIn("ryokan/", text)

    def test_future_flags_persist(self):
        with Engine() as engine:
            engine.run("from __future__ import annotations")
            result = engine.run("def f(a: nowhere): pass\nf.__annotations__['a']")
            self.assertEqual(result.value, "nowhere")

    def test_annotations_and_docstrings(self):
        self.run_ok("ann_1: int = 5")
        self.assertEqual(self.value_of("ann_1"), 5)
        self.assertEqual(self.value_of("'just text'"), "just text")

    def test_globals_and_comprehensions(self):
        self.run_ok("def set_1():\n    global made_1\n    made_1 = [i * 2 for i in range(3)]\nset_1()")
        self.assertEqual(self.value_of("made_1"), [0, 2, 4])

    def test_linecache_serves_inspect(self):
        self.run_ok("def src_1(a):\n    return a  # inner")
        self.assertIn("# inner", self.value_of("import inspect; inspect.getsource(src_1)"))

    def test_python_execution_environment(self):
        self.run_ok("import os; os.environ['KEEP_1'] = 'old'")
        code = "os.environ['A_1'] + os.environ['KEEP_1'] + os.popen('echo $A_1').read()"
        self.assertEqual(self.value_of(code, env=[("A_1", "x"), ("KEEP_1", "new")]), "xnewx\n")
        self.assertEqual(self.value_of("os.environ.get('A_1', 'none') + os.environ['KEEP_1']"), "noneold")
        self.run_ok("os.environ['A_2'] = 'by code'", env=[("A_2", "given")])
        self.assertEqual(self.value_of("os.environ['A_2']"), "by code")

    def test_signal_handlers_reset(self):
        self.run_ok("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)")
        self.engine.begin("import time; time.sleep(600)")
        self.engine.interrupt()
        self.assertEqual(self.engine.finish().end["status"], "interrupted")


class Streams(Case):
    def test_output_keeps_order(self):
        result = self.run_ok("import sys, os\nprint('a')\nsys.stderr.write('e')\nos.write(1, b'b')\nsys.stdout.buffer.write(b'c')\nprint('d', end='');")
        self.assertEqual((result.out, result.err), (b"a\nbcd", b"e"))

    def test_output_is_live(self):
        for end in ("'\\n'", "''"):
            self.engine.begin(f"import os, time\nprint('now', end={end})\nwhile not os.path.exists('go'): time.sleep(0.01)\nos.remove('go')")
            result = self.engine.first_output()
            self.assertEqual(result.out.strip(), b"now")
            self.engine.go()
            self.engine.finish(result)

    def test_unencodable_text_escaped(self):
        self.assertEqual(self.run_ok("print('\\ud800é\\0')").out, "\\ud800é\0\n".encode())

    def test_replaced_streams_restored(self):
        for code in (
            "import sys; sys.stdout.close()",
            "import sys; sys.stdout = None",
            "import sys, io; sys.stdout = sys.stderr = io.StringIO()",
            "import sys; sys.stdout.buffer.close()",
            "import sys; sys.stdout.detach()",
            "import os; os.close(1); os.close(2)",
            "import os; os.dup2(os.open('/dev/null', 1), 1)",
            "import sys; del sys.stdout, sys.stdin",
            "import sys; sys.stdin.close()",
        ):
            with self.subTest(code):
                self.engine.run(code)
                self.assertEqual(self.run_ok("print('here')").out, b"here\n")
                self.assertEqual(self.engine.run("1/0").end["status"], "failed")

    def test_large_output_is_complete(self):
        out = self.run_ok("import sys; sys.stdout.write('x' * (64 << 20) + 'end');").out
        self.assertEqual((len(out), out[-4:]), ((64 << 20) + 3, b"xend"))

    def test_many_prints(self):
        out = self.run_ok("for i in range(100000): print(i)").out
        self.assertEqual(out, b"".join(b"%d\n" % i for i in range(100000)))

    def test_signal_does_not_lose_output(self):
        code = (
            "import signal, sys\nsignal.signal(signal.SIGALRM, lambda *_: None)\n"
            "signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)\n"
            "for i in range(20): sys.stdout.write('y' * 1000000)\nsignal.setitimer(signal.ITIMER_REAL, 0)"
        )
        self.assertEqual(len(self.run_ok(code).out), 20_000_000)

    def test_threads_run_between_executions(self):
        self.run_ok(
            "import threading, time\nlog_1 = []\nends_1 = False\ndef work_1():\n    while not ends_1:\n        log_1.append(0)\n        time.sleep(0.01)\n"
            "threading.Thread(target=work_1, daemon=True).start()"
        )
        self.engine.grows("len(log_1)", 5)
        self.run_ok("ends_1 = True")


class Input(Case):
    def fds(self):
        return self.value_of("import os; len(os.listdir('/proc/self/fd'))")

    def test_input_without_stdin_has_hint(self):
        for code in ("input()", "input('name? ')", "import sys; sys.stdin.readline()", "import sys\nfor line in sys.stdin: pass"):
            result = self.engine.run(code)
            self.assertEqual(result.end["status"], "failed")
            self.assertIn("was given no standard input; pass", result.end["err"])
        self.assertIs(self.value_of("issubclass(StdinNotGiven, RuntimeError)"), True)
        self.assertEqual(self.value_of("import os; os.read(0, 10)"), {"x": ""})

    def test_input_with_stdin(self):
        result = self.run_ok("a = input('? ')\nb = input()\n[a, b]", stdin="één\ntwo\n".encode())
        self.assertEqual((result.out, result.value), (b"? ", ["één", "two"]))

    def test_end_of_input(self):
        self.assertTrue(self.engine.run("input()", stdin=b"").end["err"].startswith("EOFError"))
        self.assertEqual(self.value_of("import sys; sys.stdin.read()", stdin=b"all of it"), "all of it")
        self.assertEqual(self.value_of("import sys; len(sys.stdin.buffer.read())", stdin=b"x" * 3_000_000), 3_000_000)

    def test_subprocess_inherits_stdin(self):
        self.assertEqual(self.run_ok("import subprocess; subprocess.run(['cat']);", stdin=b"through").out, b"through")
        self.assertEqual(self.run_ok("import subprocess; subprocess.run(['cat']);").out, b"")

    def test_stdin_reset_to_dev_null(self):
        before = self.fds()
        for _ in range(20):
            self.engine.run("input()", stdin=b"line\nmore")
            self.engine.run("x =", stdin=b"refused")
            self.engine.run("import sys; sys.stdin.close()", stdin=b"x")
        self.assertEqual(self.fds(), before)
        self.assertEqual(self.value_of("import os; os.readlink('/proc/self/fd/0')"), "/dev/null")

    def test_unrequested_descriptors_closed(self):
        before = self.fds()
        read, write = os.pipe()
        self.engine.number += 1
        number = self.engine.number
        self.engine.send({"op": "exec", "id": number, "exec": number, "code": "1", "env": [], "stdin": False}, fds=[read])
        os.close(read)
        self.engine.finish()
        self.assertEqual(self.fds(), before)
        with self.assertRaises(BrokenPipeError):
            os.write(write, b"x")
        os.close(write)


class Interrupts(Case):
    def interrupted(self, code, prints=False):
        """Interrupts code, after its first output if it prints; the code would run for longer than the deadline."""
        self.engine.begin(code)
        result = self.engine.first_output() if prints else Result()
        self.engine.interrupt(0.4)
        self.engine.finish(result)
        self.assertEqual((result.end["status"], result.end["code"]), ("interrupted", 130), result.err)
        return result

    def test_interrupt_of_blocking_calls(self):
        for code in (
            "while True: pass",
            "import time; time.sleep(600)",
            "import socket; a, b = socket.socketpair(); a.recv(1)",
            "import subprocess; subprocess.run(['sleep', '600'])",
            "import os; os.system('sleep 600')",
            "import threading; threading.Event().wait()",
            "import threading\nt = threading.Thread(target=__import__('time').sleep, args=(600,), daemon=True); t.start(); t.join()",
            "import asyncio; await asyncio.sleep(600)",
            "import os; r, w = os.pipe(); os.read(r, 1)",
            "import time\nclass S:\n    def __repr__(self): time.sleep(600)\nS()",
            "sum(i for i in iter(int, 1))",
        ):
            with self.subTest(code):
                self.interrupted(code)
        self.assertEqual(self.value_of("1 + 1"), 2)

    def test_interrupt_with_finalizers(self):
        code = "class D:\n    def __del__(self):\n        for i in range(100000): pass\nwhile True: D()"
        for _ in range(5):
            self.interrupted(code)
        self.assertIs(self.value_of("import sys; sys.gettrace() is None"), True)

    def test_interrupt_traceback(self):
        result = self.interrupted("import time\ndef nap():\n    print('naps')\n    time.sleep(600)\nnap()", prints=True)
        self.assertIn(b"in nap", result.err)
        self.assertEqual(result.end["err"], "KeyboardInterrupt")

    def test_interrupted_await_runs_finally(self):
        result = self.interrupted(
            "import asyncio\nasync def f():\n    try:\n        print('waits')\n        await asyncio.sleep(600)\n    finally:\n        print('cleaned')\nawait f()",
            prints=True,
        )
        self.assertEqual(result.out, b"waits\ncleaned\n")

    def test_interrupt_ignored_between_executions(self):
        # The driver may still release the memory of the previous execution; a signal handler runs
        # only after that.
        self.value_of("1 + 1")
        for _ in range(20):
            os.kill(self.engine.pid, signal.SIGINT)
        time.sleep(0.1)
        self.assertEqual(self.value_of("2 + 2"), 4)

    def test_interrupt_during_compilation(self):
        code = "x = [" + "1 + 2j * 3," * 200000 + "]\nimport time; time.sleep(600)"
        self.engine.begin(code)
        time.sleep(0.3)
        os.kill(self.engine.pid, signal.SIGINT)
        self.assertEqual(self.engine.finish().end["status"], "interrupted")

    def test_interrupt_before_code_is_read(self):
        for _ in range(5):
            os.kill(self.engine.pid, signal.SIGSTOP)
            self.engine.begin("import time; time.sleep(600)")
            os.kill(self.engine.pid, signal.SIGINT)
            os.kill(self.engine.pid, signal.SIGCONT)
            self.assertEqual(self.engine.finish().end["status"], "interrupted")
            self.assertEqual(self.value_of("2 + 2"), 4)

    def test_code_can_catch_interrupt(self):
        self.engine.begin("import time\ntry:\n    print('tries')\n    time.sleep(600)\nexcept KeyboardInterrupt:\n    caught = 'yes'\ncaught")
        self.engine.first_output()
        self.engine.interrupt()
        self.assertEqual(self.engine.finish().value, "yes")

    def test_signal_storm_keeps_frames_whole(self):
        """Interrupts at any moment: every execution ends exactly once, every frame is whole."""
        stop = threading.Event()

        def storm():
            while not stop.is_set():
                os.kill(self.engine.pid, signal.SIGINT)
                time.sleep(0.0007)

        code = "class H:\n    def _repr_html_(self): return 'h' * 50000\nfor i in range(20): display(H())\nz = list(range(2000))\nz[:3]"
        thread = threading.Thread(target=storm)
        thread.start()
        seen = set()
        try:
            for _ in range(150):
                result = self.engine.run(code)
                seen.add(result.end["status"])
                for frame, tail in result.of("display"):
                    if frame["mime"] == "text/html":
                        self.assertEqual(tail, b"h" * 50000)
        finally:
            stop.set()
            thread.join()
        self.assertLessEqual(seen, {"done", "interrupted"})
        self.assertIn("interrupted", seen)
        # The last interrupt may fall between two executions: it affects the next one, and only the
        # next one.
        self.assertIn(self.engine.run("1 + 1").end["status"], {"done", "interrupted"})
        self.assertEqual(self.value_of("3 + 3"), 6)

    def test_interrupt_of_hanging_save(self):
        self.engine.begin("import time\nclass Slow:\n    def __reduce__(self): time.sleep(600)\nslow = Slow()")
        self.engine.interrupt(3)
        result = self.engine.finish()
        self.assertEqual(result.end["status"], "done")
        self.assertIn("interrupted", self.engine.missed[-1]["reason"])
        self.run_ok("del slow")

    def test_interrupt_of_save_after_missed(self):
        """A variable that cannot be saved must not make the following ones uninterruptible."""
        self.engine.begin("import time\nclass Slow:\n    def __reduce__(self): time.sleep(600)\nlost = iter(int, 1)\nslow = Slow()")
        self.engine.interrupt(3)
        self.assertEqual(self.engine.finish().end["status"], "done")
        self.assertIn("interrupted", self.engine.missed[-1]["reason"])
        self.run_ok("del lost, slow")

    def test_children_can_be_interrupted(self):
        self.assertIs(self.value_of("import subprocess, sys; 'default_int_handler' in subprocess.run([sys.executable, '-c', 'import signal; print(signal.getsignal(2))'], capture_output=True, text=True).stdout"), True)


class Values(Case):
    TABLE = (
        ("None", None),
        ("True", True),
        ("42", {"i": "42"}),
        ("-(1 << 63)", {"i": str(-(1 << 63))}),
        ("1 << 63", {"I": str(1 << 63)}),
        ("-(10**40)", {"I": "-1" + "0" * 40}),
        ("1.5", {"f": "1.5"}),
        ("float('nan')", {"f": "NaN"}),
        ("-float('inf')", {"f": "-inf"}),
        ("-0.0", {"f": "-0.0"}),
        ("1e300", {"f": "1e+300"}),
        ("'é\\U0001f600'", "é\U0001f600"),
        ("[1, (2,)]", [{"i": "1"}, [{"i": "2"}]]),
        ("{'b': 1, 'a': None}", {"o": [["b", {"i": "1"}], ["a", None]]}),
        ("b'\\x00\\xff'", {"x": "AP8="}),
        ("bytearray(b'hi')", {"x": "aGk="}),
        ("__import__('collections').OrderedDict(a=1)", {"o": [["a", {"i": "1"}]]}),
    )

    def test_get_encodes_python_values(self):
        for code, form in self.TABLE:
            with self.subTest(code):
                self.run_ok(f"v_1 = {code}")
                self.assertEqual(self.engine.ask("get", name="v_1")["value"], form)

    def test_python_value_round_trip(self):
        for code, form in self.TABLE:
            with self.subTest(code):
                self.assertTrue(self.engine.ask("set", name="v_2", value=form)["ok"])
                self.assertEqual(self.engine.ask("get", name="v_2")["value"], form)

    def test_types_after_set(self):
        self.engine.ask("set", name="v_3", value={"o": [["i", {"i": "1"}], ["f", {"f": "1"}], ["x", {"x": "aGk="}]]})
        self.assertEqual(self.value_of("[type(v).__name__ for v in v_3.values()]"), ["int", "float", "bytes"])

    def test_opaque_python_values(self):
        for code, type_name in (
            ("object()", "object"),
            ("{1: 2}", "dict"),
            ("{1}", "set"),
            ("1j", "complex"),
            ("'\\ud800'", "str"),
            ("__import__('datetime').date(2020, 1, 2)", "datetime.date"),
            ("10 ** 200000", "int"),
            ("len", "builtin_function_or_method"),
        ):
            with self.subTest(code):
                self.run_ok(f"v_4 = {code}")
                value = self.engine.ask("get", name="v_4")["value"]
                self.assertEqual(value["O"]["type"], type_name)
                self.assertLessEqual(len(value["O"]["repr"].encode()), 4096)

    def test_cyclic_values_are_opaque(self):
        self.run_ok("v_5 = [1]; v_5.append(v_5)")
        value = self.engine.ask("get", name="v_5")["value"]
        self.assertEqual(value[0], {"i": "1"})
        self.assertEqual(value[1]["O"]["type"], "list")
        self.run_ok("v_6 = []\nfor _i in range(500): v_6 = [v_6]")
        value, depth = self.engine.ask("get", name="v_6")["value"], 0
        while isinstance(value, list):
            value, depth = value[0], depth + 1
        self.assertEqual(value["O"]["type"], "list")
        self.assertTrue(80 <= depth <= 96, depth)
        self.run_ok("v_7 = [0]; v_8 = [v_7, v_7]")
        self.assertEqual(as_value(self.engine.ask("get", name="v_8")["value"]), [[0], [0]])

    def test_oversized_value_refused(self):
        self.run_ok("v_9 = 'x' * (9 << 20)")
        reply = self.engine.ask("get", name="v_9")
        self.assertEqual((reply["ok"], reply["code"]), (False, "invalidArgument"))
        self.assertIn("blob", reply["hint"])
        self.assertEqual(self.run_ok("v_9").end["value"]["O"]["type"], "str")

    def test_long_integers(self):
        self.assertEqual(self.run_ok("10 ** 5000").end["value"], {"I": "1" + "0" * 5000})

    def test_not_found_and_bad_values(self):
        reply = self.engine.ask("get", name="never_1")
        self.assertEqual((reply["ok"], reply["code"]), (False, "notFound"))
        for bad in ({"i": "x"}, {"q": 1}, {"i": "1", "f": "2"}, 5, {"x": "?"}, {"o": [["a"]]}, {"b": {}}):
            self.assertEqual(self.engine.ask("set", name="v_10", value=bad)["code"], "invalidArgument", bad)
        for name in ("1x", "for", "__name__", "a.b", ""):
            self.assertEqual(self.engine.ask("set", name=name, value=None)["code"], "invalidArgument", name)

    def test_set_is_saved_before_answer(self):
        self.engine.ask("set", name="v_11", value={"i": "5"})
        self.assertEqual([frame["key"] for frame, _ in self.engine.before.of("put")], ["var/v_11"])

    def test_blob_references_round_trip(self):
        blob = {"b": {"id": "d", "size": "3", "contentType": "text/plain", "hash": "0" * 64}}
        for form in (blob, {"O": {"type": "t", "repr": "r"}}):
            self.engine.ask("set", name="v_12", value=form)
            self.assertEqual(self.engine.ask("get", name="v_12")["value"], form)
            self.assertIn("var/v_12", self.engine.saved)

    def test_vars_omits_modules(self):
        with Engine() as engine:
            engine.run("import math\nfrom os import path\na = [1]\nb = 'x' * 1000\ndef f(): pass\n5")
            listed = {each["name"]: each for each in engine.ask("vars")["vars"]}
            self.assertEqual(sorted(listed), ["a", "b", "f"])
            self.assertEqual((listed["a"]["type"], listed["a"]["summary"]), ("list", "[1]"))
            self.assertLessEqual(len(listed["b"]["summary"]), 200)

    def test_vars_survive_bad_repr(self):
        self.run_ok("class V_1:\n    def __repr__(self): raise SystemExit\nv_13 = V_1()")
        self.assertTrue(self.engine.ask("vars")["ok"])


class Calls(Case):
    def test_call_by_name_or_position(self):
        self.run_ok("def add_1(a, b=10):\n    'Adds.'\n    print('adding')\n    return a + b")
        result = self.engine.call("add_1", {"o": [["a", {"i": "1"}], ["b", {"i": "2"}]]})
        self.assertEqual((result.end["status"], result.value, result.out), ("done", 3, b"adding\n"))
        self.assertEqual(self.engine.call("add_1", [{"i": "5"}]).value, 15)

    def test_none_is_call_result(self):
        self.run_ok("def nothing_1(): pass")
        self.assertIsNone(self.engine.call("nothing_1", None).end["value"])

    def test_module_functions_methods_and_coroutines(self):
        self.assertEqual(self.engine.call("math.sqrt", [{"f": "9"}]).end["value"], {"f": "3.0"})
        self.assertEqual(self.engine.call("os.path.basename", ["/a/b"]).value, "b")
        self.run_ok("import asyncio\nasync def later_1(x):\n    await asyncio.sleep(0)\n    return x")
        self.assertEqual(self.engine.call("later_1", ["v"]).value, "v")

    def test_unknown_or_failing_function(self):
        for name in ("nowhere_1", "nowhere_1.f", "math.nothing", "", "__name__"):
            self.assertEqual(self.engine.call(name, None).end["status"], "refused", name)
        self.assertEqual(self.engine.call("math.sqrt", ["x"]).end["status"], "failed")
        self.assertEqual(self.engine.call("math.sqrt", "x").end["status"], "refused")

    def test_call_saves_changed_values(self):
        self.run_ok("kept_1 = []\ndef grow_1(): kept_1.append(len(kept_1))")
        result = self.engine.call("grow_1", [])
        self.assertIn("var/kept_1", result.keys)

    def test_tools_listed_with_schema(self):
        self.run_ok(
            "import typing\ndef tool_1(a: int, b: 'float' = 2.5, *, c: typing.Optional[typing.List[str]] = None, d: typing.Literal['x', 'y'] = 'x', **rest):\n"
            "    '''Does it.\n\n    More.'''\ndef _hidden_1(): pass\ndef bad_1(a: 'nowhere'): pass"
        )
        listed = {each["name"]: each for each in self.engine.ask("tools")["tools"]}
        self.assertNotIn("_hidden_1", listed)
        self.assertIn("bad_1", listed)
        tool = listed["tool_1"]
        self.assertEqual((tool["description"], tool["source"]), ("Does it.", "user"))
        schema = tool["schema"]
        self.assertEqual(schema["required"], ["a"])
        self.assertEqual(schema["properties"]["a"], {"type": "integer"})
        self.assertEqual(schema["properties"]["b"], {"type": "number", "default": 2.5})
        self.assertEqual(schema["properties"]["c"]["anyOf"][0], {"type": "array", "items": {"type": "string"}})
        self.assertEqual(schema["properties"]["d"]["enum"], ["x", "y"])
        self.assertIs(schema["additionalProperties"], True)


class DynamicTools(Own):
    def setUp(self):
        super().setUp()
        listed = [{"name": "fs__read", "description": "Reads.", "schema": {"type": "object"}}, {"name": "web__get", "description": "", "schema": None}]
        self.engine.send({"op": "dynamic_tools", "tools": listed})

    def test_tool_call_round_trip(self):
        def answer(frame):
            self.assertEqual((frame["name"], frame["args"]), ("fs__read", {"o": [["path", "a"], ["n", {"i": "2"}]]}))
            return {"ok": True, "value": {"o": [["size", {"i": "3"}]]}, "text": "three"}

        self.assertEqual(self.engine.run("tools.fs.read(path='a', n=2)", on_tool=answer).value, {"size": 3})
        text_only = lambda frame: {"ok": True, "value": None, "text": "just text"}
        self.assertEqual(self.engine.run("tools['web__get']()", on_tool=text_only).value, "just text")

    def test_listed_and_unknown_tools(self):
        self.assertEqual(self.value_of("[t['name'] for t in tools.list()]"), ["fs__read", "web__get"])
        self.assertEqual(self.value_of("dir(tools)"), ["fs", "list", "web"])
        for code in ("tools.nowhere", "tools.fs.write", "tools['x']", "tools.fs.read(1)"):
            result = self.engine.run(code)
            self.assertEqual(result.end["status"], "failed")
            self.assertNotIn(b"ryokan/", result.err)

    def test_failure_raises_tool_error(self):
        fail = lambda frame: {"ok": False, "message": "no such file"}
        result = self.engine.run("try:\n    tools.fs.read()\nexcept ToolError as e:\n    said = str(e)\nsaid", on_tool=fail)
        self.assertEqual(result.value, "no such file")
        self.assertEqual(self.engine.run("tools.fs.read()", on_tool=fail).end["err"], "ToolError: no such file")

    def test_interrupted_tool_call_late_result(self):
        self.engine.begin("tools.fs.read()")
        frame, _ = self.engine.frame(Result())
        self.assertEqual(frame["ev"], "tool_call")
        self.engine.interrupt()
        self.assertEqual(self.engine.finish().end["status"], "interrupted")
        self.engine.send({"op": "tool_result", "call": frame["call"], "ok": True, "value": "late"})
        right = lambda frame: {"ok": True, "value": "right"}
        self.assertEqual(self.engine.run("tools.fs.read()", on_tool=right).value, "right")

    def test_late_tool_result_during_next_wait(self):
        self.engine.begin("tools.fs.read()")
        first, _ = self.engine.frame(Result())
        self.engine.interrupt()
        self.engine.finish()

        def answer(frame):
            self.engine.send({"op": "tool_result", "call": first["call"], "ok": True, "value": "late"})
            return {"ok": True, "value": "right"}

        self.assertEqual(self.engine.run("tools.fs.read()", on_tool=answer).value, "right")

    def test_tool_calls_from_threads(self):
        code = (
            "from concurrent.futures import ThreadPoolExecutor\n"
            "with ThreadPoolExecutor(4) as pool:\n    got = list(pool.map(lambda n: tools.fs.read(n=n), range(12)))\ngot"
        )
        echo = lambda frame: {"ok": True, "value": frame["args"]["o"][0][1]}
        self.assertEqual(self.engine.run(code, on_tool=echo).value, list(range(12)))

    def test_thread_outlives_execution(self):
        self.engine.begin(
            "import os, threading, time\nsaid = []\ndef work():\n    try:\n        tools.fs.read()\n    except ToolError as e:\n        said.append(str(e))\n"
            "t = threading.Thread(target=work); t.start()\nwhile not os.path.exists('go'): time.sleep(0.01)\nos.remove('go')"
        )
        while self.engine.frame(Result())[0]["ev"] != "tool_call":
            pass
        self.engine.go()
        self.engine.finish()
        self.assertIn("ended before", self.value_of("t.join(60); said[0]"))


class Rich(Case):
    def test_repr_method_mime_types(self):
        for method, mime, made, data in (
            ("_repr_html_", "text/html", "'<b>'", b"<b>"),
            ("_repr_markdown_", "text/markdown", "'*'", b"*"),
            ("_repr_svg_", "image/svg+xml", "'<svg>'", b"<svg>"),
            ("_repr_latex_", "text/latex", "'$x$'", b"$x$"),
            ("_repr_png_", "image/png", "b'\\x89PNG'", b"\x89PNG"),
            ("_repr_jpeg_", "image/jpeg", repr(base64.b64encode(b"\xff\xd8").decode()), b"\xff\xd8"),
            ("_repr_json_", "application/json", "{'a': 1}", b'{"a": 1}'),
        ):
            with self.subTest(method):
                result = self.run_ok(f"class D:\n    def {method}(self): return {made}\nD()")
                self.assertEqual([(f["mime"], f["exec"], tail) for f, tail in result.of("display")], [(mime, self.engine.number, data)])
                self.assertIn("D object", result.text)

    def test_mimebundle_display(self):
        result = self.run_ok("class D:\n    def _repr_mimebundle_(self, include=None, exclude=None): return {'text/html': 'h', 'text/plain': 'p', 'x/y': 'z'}, {}\nD()")
        self.assertEqual({f["mime"]: tail for f, tail in result.of("display")}, {"text/html": b"h", "x/y": b"z"})

    def test_display_multiple_values(self):
        result = self.run_ok("class D:\n    def _repr_html_(self): return 'h'\ndisplay(D(), 5, 'text')")
        self.assertEqual([f["mime"] for f, _ in result.of("display")], ["text/html", "text/plain"])
        self.assertEqual(result.out, b"5\ntext\n")

    def test_invalid_repr_results(self):
        result = self.run_ok("class D:\n    def _repr_html_(self): 1/0\n    def _repr_png_(self): return 5\n    def _repr_svg_(self): return 's' * (2 << 20)\n    def _repr_latex_(self): return None\n    def _repr_markdown_(self): return 'ok'\nD()")
        self.assertEqual([tail for _, tail in result.of("display")], [b"ok"])
        self.assertIn(b"ZeroDivisionError", result.err)
        self.assertIn(b"2097152 bytes left out", result.err)

    def test_class_object_not_displayed(self):
        result = self.run_ok("class D:\n    def _repr_html_(self): return 'h'\nD")
        self.assertEqual(result.of("display"), [])

    def test_matplotlib_backend(self):
        self.assertEqual(self.value_of("import os; os.environ['MPLBACKEND']"), "agg")


class Complete(Case):
    def matches(self, code, cursor=None):
        reply = self.engine.ask("complete", code=code, cursor=len(code.encode()) if cursor is None else cursor)
        self.assertTrue(reply["ok"], reply)
        return reply["start"], reply["matches"]

    def test_complete_python_names(self):
        self.run_ok("alpha_one = 1; alpha_two = 2; _alpha = 3")
        self.assertEqual(self.matches("x = alpha_"), (4, ["alpha_one", "alpha_two"]))
        self.assertEqual(self.matches("é = alpha_o\nmore", 12), (5, ["alpha_one"]))
        self.assertIn("lambda", self.matches("lam")[1])
        self.assertIn("print", self.matches("pri")[1])
        self.assertIn("_alpha", self.matches("_al")[1])
        self.assertLessEqual(len(self.matches("")[1]), 200)

    def test_complete_skips_properties(self):
        self.run_ok(
            "class P:\n    def __init__(self): self.inner = [1]\n    @property\n    def prop(self): ran.append(1); return 'text'\n"
            "    def __getattr__(self, name): name.startswith('__') or ran.append(2); raise AttributeError(name)\nran = []\np = P()"
        )
        self.assertEqual(self.matches("p.inn"), (2, ["inner"]))
        self.assertIn("prop", self.matches("p.pr")[1])
        self.assertEqual(self.matches("p.inner.app"), (8, ["append"]))
        self.assertEqual(self.matches("p.prop.upp")[1], [])
        self.assertEqual(self.matches("p.nope.x")[1], [])
        self.assertEqual(self.value_of("ran"), [])
        self.assertEqual(self.matches("f().app")[1], [])
        self.run_ok("import os")
        self.assertIn("join", self.matches("os.path.jo")[1])

    def test_complete_imports(self):
        self.assertEqual(self.matches("import jso"), (7, ["json"]))
        self.assertIn("decoder", self.matches("import json.dec")[1])
        self.assertIn("decoder", self.matches("from json import dec")[1])
        self.assertEqual(self.matches("from json imp"), (10, ["import"]))
        self.assertIs(self.value_of("import sys; 'wave' in sys.modules"), False)
        self.matches("from wave import op")
        self.assertIs(self.value_of("'wave' in sys.modules"), False)

    def test_check_code_completeness(self):
        for code, status, indent in (
            ("x = 1", "complete", None),
            ("", "complete", None),
            ("await f()", "complete", None),
            ("for i in x:\n    pass\n", "complete", None),
            ("for i in x:", "incomplete", "    "),
            ("for i in x:\n    f(i)", "incomplete", "    "),
            ("if a:\n    if b:", "incomplete", "        "),
            ("f(1,", "incomplete", ""),
            ("'''text", "incomplete", ""),
            ("x = '''a:\n   b:", "incomplete", ""),
            ("def f():\n    '''doc\n      more", "incomplete", ""),
            ("if a:\n    x = 1 + \\", "incomplete", ""),
            ("@dec", "incomplete", ""),
            ("x = = 1", "invalid", None),
            ("f)", "invalid", None),
            ("  x", "invalid", None),
        ):
            with self.subTest(code):
                reply = self.engine.ask("check", code=code)
                self.assertEqual((reply["status"], reply.get("indent")), (status, indent))


class Jobs(Own):
    def jobs(self, result):
        frames = result.of("jobs")
        return frames[-1][0]["jobs"] if frames else None

    def test_subprocesses_are_jobs(self):
        result = self.run_ok("import subprocess; p = subprocess.Popen(['sleep', '100'])")
        (job,) = self.jobs(result)
        self.assertEqual((job["id"], job["command"]), (str(self.value_of("p.pid")), "sleep 100"))
        self.assertIsNone(self.jobs(self.run_ok("y = 5")))
        self.assertEqual(self.jobs(self.run_ok("p.kill(); p.wait()")), [])

    def test_idle_job_end_reported(self):
        self.run_ok("import subprocess; p = subprocess.Popen(['sleep', '3'])")
        frame, _ = self.engine.frame(Result())
        if frame.get("jobs"):  # after a long execution, the start of the job is reported late
            frame, _ = self.engine.frame(Result())
        self.assertEqual(frame, {"ev": "jobs", "jobs": []})

    def test_threads_are_jobs(self):
        code = "import threading; e = threading.Event(); t = threading.Thread(target=e.wait, name='mine'); t.start()"
        (job,) = self.jobs(self.run_ok(code))
        self.assertEqual(job["command"], "thread mine")
        self.assertIsNone(self.jobs(self.run_ok("d = threading.Thread(target=e.wait, daemon=True); d.start()")))
        self.assertEqual(self.jobs(self.run_ok("e.set(); t.join()")), [])

    def test_finished_processes_are_not_jobs(self):
        self.assertIsNone(self.jobs(self.run_ok("import os; os.system('true')")))


class Forks(Own):
    def test_forked_child_leaves_driver_loop(self):
        result = self.run_ok("import os\nst = 0\npid = os.fork()\nif pid == 0:\n    print('child')\nelse:\n    st = os.waitpid(pid, 0)[1]\n    print('parent', st)\nst")
        self.assertEqual(sorted(result.out.split(b"\n")), [b"", b"child", b"parent 0"])
        self.assertEqual(self.value_of("1 + 1"), 2)

    def test_failing_child_exits_with_1(self):
        code = "import os\npid = os.fork()\nif pid == 0:\n    {}\nos.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])"
        self.assertEqual(self.value_of(code.format("1/0")), 1)
        self.assertEqual(self.value_of(code.format("raise SystemExit(7)")), 7)

    def test_forked_child_sends_no_frames(self):
        self.engine.send({"op": "dynamic_tools", "tools": [{"name": "a__b", "description": "", "schema": None}]})
        code = (
            "import os\nclass D:\n    def _repr_html_(self): return 'h'\npid = os.fork()\nif pid == 0:\n    display(D())\n"
            "    try: tools.a.b()\n    except ToolError: os._exit(5)\nos.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])"
        )
        result = self.run_ok(code)
        self.assertEqual((result.value, result.of("display"), result.of("tool_call")), (5, [], []))

    def test_forked_child_closes_socket(self):
        code = "import os\npid = os.fork()\nif pid == 0:\n    socks = [f for f in os.listdir('/proc/self/fd') if 'socket' in os.readlink('/proc/self/fd/' + f)] if True else 0\n    os._exit(len(socks))\nos.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])"
        self.assertEqual(self.value_of(code.replace("for f in os.listdir('/proc/self/fd') if", "for f in os.listdir('/proc/self/fd') if os.path.exists('/proc/self/fd/' + f) and")), 0)

    def test_multiprocessing_pool(self):
        code = "import multiprocessing as m\ndef sq(x): return x * x\nwith m.get_context('fork').Pool(2) as pool:\n    got = pool.map(sq, [1, 2, 3])\ngot"
        self.assertEqual(self.value_of(code), [1, 4, 9])


if __name__ == "__main__":
    unittest.main()
