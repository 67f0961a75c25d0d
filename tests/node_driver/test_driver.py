"""The node engine's driver, as init sees it: start, executions, streams, input, interrupts. One class for each part of
docs/engine-contract.md.

Run: python3 -B -m unittest discover -s tests/node_driver        (RYOKAN_TEST_NODE names another interpreter)
"""
import json
import os
import struct
import subprocess
import sys
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from engine import FLAGS, NODE, Engine, Result, as_value, bootstrap, driver_image  # noqa: E402


class Case(unittest.TestCase):
    """A fresh engine for each class: tests of a class share it and use names of their own."""

    FILES = None

    @classmethod
    def setUpClass(cls):
        cls.engine = Engine(files=cls.FILES)
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

    def restored(self, *codes, **more):
        """Runs codes, loads the saved state into a new engine and continues with it."""
        for code in codes:
            self.run_ok(code)
        self.assertEqual(self.engine.missed, [])
        other = self.engine.reload(**more)
        self.addCleanup(other.__exit__)
        self.assertEqual(other.load_reply["missed"], [])
        self.engine = other
        return other


class Start(Own):
    def test_ready_frame_has_node_version(self):
        version = subprocess.run([NODE, "--version"], capture_output=True, text=True, check=True).stdout.strip()[1:]
        self.assertEqual(self.engine.ready, {"ev": "ready", "engine": "node", "version": version, "interrupt": "frame"})

    def test_namespace_starts_empty(self):
        self.assertEqual(self.engine.ask("vars")["vars"], [])
        self.assertEqual(self.run_ok("1").keys, [])
        self.assertEqual(self.engine.missed, [])

    def test_bootstrap_fits_argument_limit(self):
        self.assertLess(len(bootstrap().encode()), 128 << 10)

    def test_reserved_image_bytes_skipped(self):
        with Engine(image=driver_image(b"some cache" * 100)) as engine:
            self.assertEqual(engine.run("2 + 2").value, 4)

    def test_child_descriptors(self):
        out = self.run_ok("require('child_process').execSync('ls /proc/self/fd', {stdio: ['inherit', 'inherit', 'inherit']});").out
        self.assertEqual(sorted(out.split()), [b"0", b"1", b"2", b"3"])  # 3 is the listing's own
        self.assertIs(self.value_of("require('fs').readdirSync('/proc/self/fd').some((fd) => { try { return /memfd/.test(require('fs').readlinkSync('/proc/self/fd/' + fd)) } catch { return false } })"), False)

    def test_process_hides_driver(self):
        self.assertEqual(self.value_of("process.execArgv"), [])
        self.engine.write("child.js", "console.log('forked', process.argv.length)")
        self.run_ok("const {once} = require('events'); const kid = require('child_process').fork('child.js', {stdio: 'inherit'}); await once(kid, 'exit')")
        self.assertIs(self.value_of("kid.exitCode === 0"), True)

    def test_eof_ends_with_0(self):
        self.engine.sock.shutdown(2)
        self.assertEqual(self.engine.wait(), 0)

    def test_shutdown_ignores_exit_handlers(self):
        pid = self.value_of("const p = require('child_process').spawn('sleep', ['100']); p.pid")
        self.run_ok("process.on('exit', () => { for (;;); }); setInterval(() => {}, 1000); process.on('SIGTERM', () => {}); 0")
        self.engine.send({"op": "shutdown"})
        self.assertEqual(self.engine.wait(), 0)
        self.assertIn(self.state_of(pid), ("Z", None))
        result = Result()
        self.engine.drain(result)
        self.assertEqual(result.err, b"")

    def test_shutdown_kills_stubborn_jobs(self):
        code = "const q = require('child_process').spawn('sh', ['-c', \"trap '' TERM; echo on; sleep 600\"]); await require('events').once(q.stdout, 'data'); q.pid"
        pid = self.value_of(code)
        self.engine.send({"op": "shutdown"})
        self.assertEqual(self.engine.wait(), 0)
        self.assertIn(self.state_of(pid), ("Z", None))

    @staticmethod
    def state_of(pid):
        try:
            with open(f"/proc/{pid}/stat", encoding="latin1") as file:
                return file.read().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return None

    def test_shutdown_while_code_runs(self):
        self.engine.begin("while (true);")
        time.sleep(0.2)
        self.engine.send({"op": "shutdown"})
        self.assertEqual(self.engine.wait(), 0)

    def test_malformed_frames_exit_with_70(self):
        for name, data in {
            "lengths": struct.pack("<II", 1 << 31, 0),
            "tail": struct.pack("<II", 2, 2 << 20) + b"{}",
            "json": struct.pack("<II", 3, 0) + b"{x}",
            "list": struct.pack("<II", 2, 0) + b"[]",
            "trailing": struct.pack("<II", 5, 0) + b"{} {}",
            "utf8": struct.pack("<II", 10, 0) + b'{"op":"\xff"}'[:10],
            "request": struct.pack("<II", 14, 0) + b'{"op":"dance"}',
            "inherited": struct.pack("<II", 17, 0) + b'{"op":"toString"}',
            "field": struct.pack("<II", 21, 0) + b'{"op":"get","name":1}',
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

    def test_split_and_batched_frames(self):
        frames = []
        for number in (1, 2, 3):
            code = "await new Promise((r) => setTimeout(r, 30)), 2" if number == 1 else f"{number} + 1"
            body = json.dumps({"op": "exec", "id": number, "exec": number, "code": code, "env": [], "stdin": False})
            frames.append(struct.pack("<II", len(body), 0) + body.encode())
        for byte in frames[0]:
            self.engine.sock.sendall(bytes([byte]))
        self.assertEqual(self.engine.finish().value, 2)
        self.engine.sock.sendall(b"".join(frames))
        self.assertEqual([self.engine.finish().value for _ in frames], [2, 3, 4])

    def test_bind_reenters_workspace(self):
        with Engine(env={"RYOKAN_KERNEL": "", "RYOKAN_ORIGIN": ""}) as engine:
            os.rename(engine.cwd, engine.cwd + "-old")
            os.mkdir(engine.cwd)
            engine.write("node_modules/mine/index.js", "module.exports = 'of the workspace'")
            reply = engine.ask("bind", env=[["RYOKAN_KERNEL", "k"], ["RYOKAN_ORIGIN", "original"]])
            self.assertIs(reply["ok"], True)
            self.assertEqual(engine.run("[process.env.RYOKAN_KERNEL, require('mine')]").value, ["k", "of the workspace"])
            self.assertEqual(engine.run("require('fs').readdirSync('.')").value, ["node_modules"])
            self.assertEqual(engine.saved, {}, "what bind brought is how the engine started")
            os.rmdir(engine.cwd + "-old")

    def test_failed_bind_reported(self):
        with Engine() as engine:
            os.rename(engine.cwd, engine.cwd + "-gone")
            self.assertIs(engine.ask("bind", env=[])["ok"], False)
            os.rename(engine.cwd + "-gone", engine.cwd)

    def test_unsupported_requests(self):
        for op in ("keep", "wake"):
            self.assertEqual(self.engine.ask(op)["code"], "unsupported")
        self.assertEqual(self.value_of("1 + 1"), 2)


class Execution(Case):
    FILES = {
        "node_modules/pkg/package.json": '{"name": "pkg", "main": "index.js"}',
        "node_modules/pkg/index.js": "exports.answer = 42; exports.helper = (x) => x + exports.answer;",
        "node_modules/esm/package.json": '{"name": "esm", "type": "module", "exports": "./index.mjs"}',
        "node_modules/esm/index.mjs": "export default 'd'; export const named = 'n'; export function call() { return named }",
        "local.mjs": "export const here = import.meta.url;",
        "data.json": '{"k": 1}',
        "inner/node_modules/deep/index.js": "module.exports = 'deep'",
        "inner/near.cjs": "module.exports = 'near'",
    }

    def test_last_expression_is_value_and_text(self):
        result = self.run_ok("let a_1 = 3\na_1 * 2")
        self.assertEqual(result.end["value"], {"i": "6"})
        node = result.end["output"]["root"][0]
        self.assertEqual(node, {"name": "", "type": "text", "text": "6", "cells": [], "children": []})

    def test_undefined_has_no_value(self):
        for code in ("let x_1 = 1", "undefined", "", "// nothing", "function f_0() {}", "var v_0 = 5", "void 5"):
            with self.subTest(code):
                end = self.run_ok(code).end
                self.assertNotIn("value", end)
                self.assertNotIn("output", end)
        self.assertIsNone(self.run_ok("null").end["value"])

    def test_underscore_holds_last_results(self):
        with Engine() as engine:
            for code in ("'one'", "'two'", "'three'"):
                engine.run(code)
            self.assertEqual(engine.run("[_, __, ___]").value, ["three", "two", "one"])
            self.assertEqual(engine.run("let q = 1").keys, ["var/q"])
            engine.run("let _ = 'mine'")
            engine.run("5")
            self.assertEqual(engine.run("_").value, "mine")
            self.assertIn("var/_", engine.saved)

    def test_declarations_can_be_repeated(self):
        for code in ("let d_1 = 1", "let d_1 = 2", "const d_2 = 1", "const d_2 = [2]", "class D_3 { v() { return 1 } }", "class D_3 { v() { return 3 } }",
                     "var d_4 = 1", "var d_4 = 4", "function d_5() { return 1 }", "function d_5() { return 5 }", "const {d_6, ...d_7} = {d_6: 6, x: 7}",
                     "const [d_8 = 8] = []"):
            self.run_ok(code)
        self.assertEqual(self.value_of("[d_1, d_2[0], new D_3().v(), d_4, d_5(), d_6, d_7.x, d_8]"), [2, 2, 3, 4, 5, 6, 7, 8])
        result = self.engine.run("d_2 = 5")
        self.assertEqual((result.end["status"], result.end["err"]), ("failed", "TypeError: Assignment to constant variable."))
        self.run_ok("let d_9 = (() => { try { throw 1 } catch { return 9 } })()")
        self.assertEqual(self.engine.run("let d_10 = missing_1").end["status"], "failed")
        self.assertEqual(self.value_of("let d_10 = 10; d_10"), 10)

    def test_changed_declaration_kind_refused(self):
        self.run_ok("let k_1 = 1; var k_2 = 2")
        for code in ("const k_1 = 2", "let k_2 = 1", "var k_1"):
            result = self.engine.run(code)
            self.assertEqual((result.end["status"], result.end["code"]), ("refused", 1))
            self.assertIn(b"declare it again in the same way", result.err)
        self.assertEqual(self.value_of("[k_1, k_2]"), [1, 2])

    def test_top_level_await(self):
        for code, value in (
            ("await 5", 5),
            ("await new Promise((r) => setTimeout(() => r('later'), 20))", "later"),
            ("let w_1 = 0; for await (const x of (async function* () { yield 1; yield 2 })()) w_1 += x; w_1", 3),
            ("const {w_2} = await ({w_2: 4}); w_2", 4),
            ("const w_3 = [await 1, await 2]; w_3", [1, 2]),
            ("if (await true) { 'yes' }", "yes"),
            ("const w_4 = async () => { await null; return 'fn' }; await w_4()", "fn"),
            ("await Promise.all([1, 2].map(async (x) => x * 2))", [2, 4]),
            ("(await 5) + (await 6)", 11),
            ("await (async () => { try { await Promise.reject(new Error('no')) } catch (e) { return e.message } })()", "no"),
            ("label: for (;;) { await 0; break label }", 0),
        ):
            with self.subTest(code):
                end = self.run_ok(code).end
                self.assertEqual(as_value(end["value"]) if "value" in end else None, value)
        self.assertEqual(self.value_of("w_2"), 4)

    def test_promise_is_not_awaited_implicitly(self):
        self.assertEqual(self.run_ok("new Promise(() => {})").text, "Promise { <pending> }")

    def test_braces_parse_as_object_literal(self):
        self.assertEqual(self.value_of("{a: 1, b: [2]}"), {"a": 1, "b": [2]})
        self.assertEqual(self.value_of("{ let z = 4; z * 2 }"), 8)
        self.assertEqual(self.value_of("{}"), {})

    def test_uncaught_error_reports_stack(self):
        result = self.engine.run("function f_1() {\n  throw new RangeError('no\\nway')\n}\nf_1()")
        self.assertEqual((result.end["status"], result.end["code"]), ("failed", 1))
        self.assertEqual(result.end["err"], "RangeError: no way")
        text = result.err.decode()
        self.assertIn("  throw new RangeError('no\\nway')\n        ^\n", text)
        self.assertRegex(text, r"at f_1 \(<exec:\d+>:2:9\)\n\s+at <exec:\d+>:4:1")
        for hidden in ("ryokan:", "node:internal", "node:inspector", "async_hooks"):
            self.assertNotIn(hidden, text)

    def test_error_cause_after_await(self):
        text = self.engine.run("await 1;\nthrow new Error('outer', {cause: new TypeError('inner')})").err.decode()
        self.assertIn("[cause]: TypeError: inner", text)
        self.assertIn(":2:7", text)
        self.assertNotIn("ryokan:", text)

    def test_thrown_non_errors(self):
        for code, err in (("throw 5", "5"), ("throw null", "null"), ("throw 'text'", "'text'"), ("throw undefined", "undefined"), ("throw {a: 1}", "{ a: 1 }"), ("throw Symbol('s')", "Symbol(s)")):
            with self.subTest(code):
                result = self.engine.run(code)
                self.assertEqual((result.end["status"], result.end["err"]), ("failed", err))
                self.assertIn(err.encode(), result.err)

    def test_unprintable_errors(self):
        for code in (
            "throw {get stack() { throw 1 }, toString() { throw 2 }, [Symbol.for('nodejs.util.inspect.custom')]() { throw 3 }}",
            "throw new Proxy({}, {get() { throw 1 }, getPrototypeOf() { throw 2 }, ownKeys() { throw 3 }})",
            "class E_1 extends Error { get message() { throw 1 } }\nthrow new E_1()",
            "throw new Error('x'.repeat(10 ** 7))",
        ):
            with self.subTest(code[:30]):
                result = self.engine.run(code)
                self.assertEqual(result.end["status"], "failed")
                self.assertLessEqual(len(result.end["err"]), 1000)
                self.assertLess(len(result.err), 70000)
        self.assertEqual(self.value_of("1 + 1"), 2)

    def test_syntax_errors_are_refused(self):
        for code in ("x =", "for", "let a b", "'open", "return 5", "({", "`${", "await =", "1 +* 2", "class { }", "let s_1; let s_1"):
            with self.subTest(code):
                result = self.engine.run("globalThis.ran_1 = true;\n" + code)
                self.assertEqual((result.end["status"], result.end["code"]), ("refused", 1), result.end)
                self.assertIn(b"SyntaxError", result.err)
                self.assertRegex(result.end["err"], "^SyntaxError: ")
        self.assertEqual(self.engine.ask("get", name="ran_1")["code"], "notFound")

    def test_syntax_error_shows_position(self):
        text = self.engine.run("let ok = 1\nlet bad = 1 +* 2").err.decode()
        self.assertRegex(text, r"<exec:\d+>:2\nlet bad = 1 \+\* 2\n {13}\^\nSyntaxError: Unexpected token '\*'")

    def test_runtime_syntax_error_fails(self):
        for code in ("JSON.parse('{')", "new Function('x =')", "eval('x =')"):
            self.assertEqual(self.engine.run(code).end["status"], "failed", code)

    def test_process_exit_ends_only_execution(self):
        for code, status, number in (
            ("process.exit()", "done", 0),
            ("process.exit(0)", "done", 0),
            ("process.exit(3); globalThis.after_1 = 1", "failed", 3),
            ("process.exitCode = 7; process.exit()", "failed", 7),
            ("try { process.exit(4) } finally { globalThis.after_1 = 1 }", "failed", 4),
            ("await 1; process.exit(5)", "failed", 5),
            ("setTimeout(() => process.exit(6), 10); await new Promise(() => {})", "failed", 6),
            ("process.exit('8')", "failed", 8),
            ("process.reallyExit(9)", "failed", 9),
            ("process.exit(-1)", "failed", -1),
        ):
            with self.subTest(code):
                result = self.engine.run(code)
                self.assertEqual((result.end["status"], result.end["code"]), (status, number))
        self.assertEqual(self.value_of("typeof after_1"), "undefined")

    def test_late_process_exit_ignored(self):
        self.run_ok("setTimeout(() => { process.exit(3) }, 1000); 0")
        time.sleep(2)
        self.assertEqual(self.value_of("1 + 1"), 2)

    def test_uncaught_async_errors(self):
        result = self.run_ok("setTimeout(() => { throw new Error('in a timer') }, 5); await new Promise((r) => setTimeout(r, 50)); 'on'")
        self.assertEqual(result.value, "on")
        self.assertIn(b"Uncaught", result.err)
        self.assertIn(b"in a timer", result.err)
        self.assertNotIn(b"ryokan:", result.err)
        result = self.run_ok("Promise.reject(new TypeError('nobody cares')); await new Promise((r) => setTimeout(r, 20)); 1")
        self.assertIn(b"nobody cares", result.err)
        first = self.run_ok("setTimeout(() => { throw new Error('between') }, 30); queueMicrotask(() => { throw new Error('micro') }); process.nextTick(() => { throw new Error('tick') }); 0")
        time.sleep(0.2)
        err = bytes(first.err + self.run_ok("0").err)
        for text in (b"between", b"micro", b"tick"):
            self.assertIn(text, err)

    def test_user_error_handlers_run_first(self):
        with Engine() as engine:
            engine.run("const seen = []; process.on('uncaughtException', (e) => seen.push(e.message)); setTimeout(() => { throw new Error('mine') }, 5); await new Promise((r) => setTimeout(r, 30))")
            result = engine.run("seen")
            self.assertEqual((result.value, result.err), (["mine"], b""))
            engine.run("process.on('unhandledRejection', (e) => seen.push('r' + e)); Promise.reject(1); await new Promise((r) => setTimeout(r, 20))")
            self.assertEqual(engine.run("seen").value, ["mine", "r1"])
            engine.run("process.removeAllListeners(); process.setUncaughtExceptionCaptureCallback(null); setTimeout(() => { throw new Error('later') }, 5); await new Promise((r) => setTimeout(r, 30))")
            self.assertEqual(engine.run("1 + 1").value, 2)

    def test_require_resolves_modules(self):
        self.assertEqual(self.value_of("require('pkg').answer"), 42)
        self.assertEqual(self.value_of("const {helper} = require('pkg'); helper(1)"), 43)
        self.assertEqual(self.value_of("require('./data.json').k + require('node:path').sep"), "1/")
        self.assertEqual(self.value_of("require.resolve('pkg')"), os.path.join(self.engine.cwd, "node_modules/pkg/index.js"))
        self.assertIs(self.value_of("require.resolve('pkg') in require.cache"), True)
        result = self.engine.run("require('nowhere')")
        self.assertRegex(result.end["err"], "Cannot find module 'nowhere'")
        self.assertNotIn(b"ryokan:", result.err)
        self.assertEqual(self.value_of("process.chdir('inner'); const dirs_1 = [require('deep'), require('./near.cjs')]; process.chdir('..'); dirs_1"), ["deep", "near"])

    def test_import_calls(self):
        self.assertEqual(self.value_of("(await import('fs')).readFileSync === require('fs').readFileSync"), True)
        self.assertEqual(self.value_of("const {default: m_1, named: m_2} = await import('esm'); [m_1, m_2]"), ["d", "n"])
        self.assertEqual(self.value_of("(await import('./local.mjs')).here"), "file://" + os.path.realpath(self.engine.cwd) + "/local.mjs")
        self.assertEqual(self.value_of("const later_1 = () => import('esm'); (await later_1()).call()"), "n")
        self.assertEqual(self.value_of("await import('pkg').then((m) => m.default.answer)"), 42)
        self.assertEqual(self.value_of("'import(1)' + `${'import'}` + /import/.source"), "import(1)importimport")
        self.assertEqual(self.value_of("process.chdir('inner'); const deep_1 = (await import('deep')).default; process.chdir('..'); deep_1"), "deep")
        result = self.engine.run("await import('nowhere')")
        self.assertEqual(result.end["status"], "failed")
        self.assertIn("nowhere", result.end["err"])

    def test_import_statements(self):
        code = "import d_11, {named as n_11, call} from 'esm'; import * as path_11 from 'path';\nimport {readFileSync} from 'node:fs'\nimport 'pkg'\nimport both, * as ns_11 from 'esm'\n[d_11, n_11, call(), path_11.sep, typeof readFileSync, both, ns_11.named]"
        self.assertEqual(self.value_of(code), ["d", "n", "n", "/", "function", "d", "n"])
        self.run_ok(code)  # again
        self.assertEqual(self.value_of("import {helper as h_11} from 'pkg'; h_11(1)"), 43)
        self.assertEqual(self.value_of("import {\n  named\n} from 'esm'\nnamed"), "n")
        result = self.engine.run("import {\n  absent\n} from 'esm'\nabsent")
        self.assertEqual(result.end["err"], "SyntaxError: The requested module 'esm' does not provide an export named 'absent'")
        result = self.engine.run("import {\n  named\n} from 'esm'\nthrow new Error('line')")
        self.assertIn(b":4:7", result.err)

    def test_module_only_syntax_refused(self):
        for code, hint in (("export const x_12 = 1", b"leave out `export`"), ("import.meta.url", b"require.resolve()")):
            result = self.engine.run(code)
            self.assertEqual(result.end["status"], "refused")
            self.assertIn(hint, result.err)

    def test_node_execution_environment(self):
        self.run_ok("process.env.KEEP_1 = 'old'")
        code = "process.env.A_1 + process.env.KEEP_1 + require('child_process').execSync('echo $A_1')"
        self.assertEqual(self.value_of(code, env=[("A_1", "x"), ("KEEP_1", "new")]), "xnewx\n")
        self.assertEqual(self.value_of("[process.env.A_1, process.env.KEEP_1].join()"), ",old")
        self.run_ok("process.env.A_2 = 'by code'", env=[("A_2", "given")])
        self.assertEqual(self.value_of("process.env.A_2"), "by code")

    def test_output_is_bounded(self):
        for code in ("'x'.repeat(10 ** 6)", "Array(10 ** 5).fill('é'.repeat(50))", "({a: 'é'.repeat(10 ** 6)})"):
            with self.subTest(code):
                text = self.run_ok(code).text
                self.assertLessEqual(len(text.encode()), 65536)
                self.assertGreater(len(text.encode()), 50000)

    def test_inspect_that_throws_or_exits(self):
        inspect = "[Symbol.for('nodejs.util.inspect.custom')]"
        result = self.run_ok(f"({{ {inspect}() {{ throw new Error('no') }} }})")
        self.assertIn("inspect failed", result.text)
        self.assertEqual(self.run_ok(f"({{ {inspect}() {{ return 'shown' }} }})").text, "shown")
        self.assertEqual(self.engine.run(f"({{ {inspect}() {{ process.exit(3) }} }})").end["code"], 3)

    def test_deep_recursion(self):
        result = self.engine.run("function deep_2() { return deep_2() + 1 }\ndeep_2()")
        self.assertEqual(result.end["err"], "RangeError: Maximum call stack size exceeded")
        self.assertLess(len(result.err), 70000)
        self.assertEqual(self.value_of("1 + 1"), 2)

    def test_strict_and_sloppy_mode(self):
        self.assertEqual(self.engine.run("'use strict'; undeclared_3 = 1").end["status"], "failed")
        self.assertEqual(self.value_of("undeclared_4 = 1; undeclared_4"), 1)
        self.assertIs(self.value_of("this === globalThis"), True)

    def test_timers_run_between_executions(self):
        self.run_ok("let ticks_1 = 0; const timer_1 = setInterval(() => { ticks_1++ }, 10); 0")
        self.engine.grows("ticks_1", 5)
        self.run_ok("clearInterval(timer_1)")


class Streams(Case):
    def test_output_order_across_streams(self):
        code = "console.log('a'); process.stderr.write('e'); require('fs').writeSync(1, 'b'); process.stdout.write(Buffer.from('c')); console.log('%s-%d', 'd', 5); console.error('f'); process.stdout.write('é', 'latin1')"
        result = self.run_ok(code)
        self.assertEqual((result.out, result.err), (b"a\nbcd-5\n\xe9", b"ef\n"))

    def test_child_output_keeps_order(self):
        result = self.run_ok("console.log(1); require('child_process').execSync('echo 2', {stdio: 'inherit'}); console.log(3)")
        self.assertEqual(result.out, b"1\n2\n3\n")

    def test_output_is_live(self):
        self.engine.begin("process.stdout.write('now'); while (!require('fs').existsSync('go')) await new Promise((r) => setTimeout(r, 10))")
        result = self.engine.first_output()
        self.assertEqual(result.out, b"now")
        self.engine.go()
        self.engine.finish(result)

    def test_lone_surrogates_printed(self):
        self.assertEqual(self.run_ok("console.log('\\ud800é\\0')").out, "\ufffdé\0\n".encode())

    def test_closed_streams_restored(self):
        for code in (
            "process.stdout.end()", "process.stdout.destroy()", "process.stdout.end('x'); process.stderr.end()", "console = null", "delete globalThis.console",
            "Object.defineProperty(process, 'stdout', {value: null, configurable: true})", "delete process.stdout; delete process.stdin",
            "process.stdin.destroy()", "globalThis.process = {}",
        ):
            with self.subTest(code):
                self.engine.run(code)
                self.assertEqual(self.run_ok("console.log('here')").out, b"here\n")
                self.assertEqual(self.engine.run("throw 1").end["status"], "failed")

    def test_stream_methods(self):
        code = "await new Promise((r) => process.stdout.write('w', r)); await require('stream/promises').pipeline(require('stream').Readable.from(['p', 'q']), process.stdout, {end: false}); [process.stdout.fd, process.stderr.fd, process.stdout.writable, process.stdout.isTTY === undefined]"
        result = self.run_ok(code)
        self.assertEqual((result.out, result.value), (b"wpq", [1, 2, True, True]))

    def test_large_output_is_complete(self):
        out = self.run_ok("process.stdout.write('x'.repeat(64 << 20) + 'end'); 0").out
        self.assertEqual((len(out), out[-4:]), ((64 << 20) + 3, b"xend"))

    def test_many_lines(self):
        out = self.run_ok("for (let i = 0; i < 50000; i++) console.log(i)").out
        self.assertEqual(out, b"".join(b"%d\n" % i for i in range(50000)))

    def test_nonblocking_output_pipe(self):
        """A child may make the pipe non-blocking: nothing is lost."""
        code = "const s_9 = new (require('net').Socket)({fd: 1, readable: false}); process.stdout.write('y'.repeat(5_000_000)); 0"
        self.assertEqual(len(self.run_ok(code).out), 5_000_000)

    def test_slow_reader_back_pressure(self):
        self.engine.begin("process.stdout.write('z'.repeat(10_000_000)); 0")
        time.sleep(0.5)
        self.assertEqual(self.engine.sock.recv(1, 0x40 | 0x2) if self._has_frame() else b"", b"")
        self.assertEqual(len(self.engine.finish().out), 10_000_000)

    def _has_frame(self):
        import select

        return bool(select.select([self.engine.sock], [], [], 0)[0])


class Input(Case):
    def fds(self):
        return self.value_of("require('fs').readdirSync('/proc/self/fd').length")

    def test_missing_stdin_is_empty(self):
        self.assertEqual(self.value_of("require('fs').readFileSync(0, 'utf8')"), "")
        self.assertEqual(self.value_of("let t_1 = ''; for await (const c of process.stdin) t_1 += c; t_1"), "")
        self.assertEqual(self.run_ok("require('child_process').execSync('cat', {stdio: 'inherit'}); 0").out, b"")
        self.assertEqual(self.value_of("require('fs').readlinkSync('/proc/self/fd/0')"), "/dev/null")

    def test_stdin_by_descriptor(self):
        self.assertEqual(self.value_of("require('fs').readFileSync(0, 'utf8')", stdin="één\ntwo\n".encode()), "één\ntwo\n")
        self.assertEqual(self.value_of("require('fs').readFileSync('/dev/stdin', 'utf8')", stdin=b"by path"), "by path")

    def test_stdin_by_stream(self):
        self.assertEqual(self.value_of("let t_2 = ''; process.stdin.setEncoding('utf8'); for await (const c of process.stdin) t_2 += c; t_2", stdin="één".encode()), "één")
        code = "const rl_1 = require('readline').createInterface({input: process.stdin}); const lines_1 = []; for await (const l of rl_1) lines_1.push(l); lines_1"
        self.assertEqual(self.value_of(code, stdin=b"a\nb\nc"), ["a", "b", "c"])
        self.assertEqual(self.value_of("let n_3 = 0; for await (const c of process.stdin) n_3 += c.length; n_3", stdin=b"x" * 3_000_000), 3_000_000)

    def test_stdin_is_per_execution(self):
        for text in ("first", "second"):
            self.assertEqual(self.value_of("let t_4 = ''; for await (const c of process.stdin) t_4 += c; t_4", stdin=text.encode()), text)
        self.assertEqual(self.value_of("let t_5 = ''; for await (const c of process.stdin) t_5 += c; t_5"), "")

    def test_empty_input(self):
        self.assertEqual(self.value_of("require('fs').readFileSync(0, 'utf8')", stdin=b""), "")

    def test_children_inherit_stdin(self):
        self.assertEqual(self.run_ok("require('child_process').execSync('cat', {stdio: 'inherit'}); 0", stdin=b"through").out, b"through")

    def test_call_with_stdin(self):
        self.run_ok("function reads_1() { return require('fs').readFileSync(0, 'utf8') }")
        self.assertEqual(self.engine.call("reads_1", [], stdin=b"called").value, "called")

    def test_stdin_descriptors_do_not_leak(self):
        self.run_ok("process.stdin; 0", stdin=b"x")
        before = self.fds()
        for _ in range(10):
            self.engine.run("require('fs').readSync(0, Buffer.alloc(2))", stdin=b"line\nmore")
            self.engine.run("x =", stdin=b"refused")
            self.engine.run("process.stdin.on('data', () => {}); 0", stdin=b"x" * 100)
            self.engine.run("throw 1", stdin=b"x")
            self.engine.run("require('fs').closeSync(0)", stdin=b"x")
        self.assertEqual(self.fds(), before)
        self.assertEqual(self.value_of("require('fs').readlinkSync('/proc/self/fd/0')"), "/dev/null")

    def test_interrupt_while_reading_stdin(self):
        read, write = os.pipe()
        self.engine.begin("for await (const c of process.stdin);", stdin=read)
        self.engine.interrupt()
        self.assertEqual(self.engine.finish().end["status"], "interrupted")
        os.close(write)
        self.assertEqual(self.value_of("require('fs').readlinkSync('/proc/self/fd/0')"), "/dev/null")

    def test_unexpected_descriptors_closed(self):
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
        self.engine.interrupt(0.3)
        self.engine.finish(result)
        self.assertEqual((result.end["status"], result.end["code"]), ("interrupted", 130), result.err)
        return result

    def test_interrupt_running_or_waiting(self):
        self.run_ok("let kept_1 = {still: 'here'}")
        for code in (
            "while (true);",
            "await new Promise(() => {})",
            "await new Promise((r) => setTimeout(r, 600000))",
            "await 1; for (;;);",
            "Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0)",
            "require('child_process').execSync('sleep 600')",
            "require('child_process').execSync('sleep 600; true')",
            "require('child_process').spawnSync('sh', ['-c', \"trap '' TERM; sleep 600; sleep 600\"])",
            "/(a+)+b/.test('a'.repeat(40))",
            "setTimeout(() => { for (;;); }, 5); await new Promise(() => {})",
            "setImmediate(() => { for (;;); }); await new Promise(() => {})",
            "process.nextTick(() => { for (;;); }); await new Promise(() => {})",
            "queueMicrotask(() => { for (;;); }); await new Promise(() => {})",
            "(function again() { queueMicrotask(again) })(); await new Promise(() => {})",
            "try { for (;;); } catch {} finally { for (;;); }",
            "for (;;) console.log('x'.repeat(100))",
            "for (;;) { try { null.x } catch {} }",
            "[3, 1, 2].sort(() => { for (;;); })",
            "JSON.stringify({toJSON() { for (;;); }})",
            "eval('for (;;);')",
            "({[Symbol.for('nodejs.util.inspect.custom')]() { for (;;); }})",
            "throw {[Symbol.for('nodejs.util.inspect.custom')]() { for (;;); }}",
            "({_repr_html_() { for (;;); }})",
            "for await (const x of {[Symbol.asyncIterator]: () => ({next: () => new Promise(() => {})})});",
            "await require('events').once(new (require('events'))(), 'never')",
        ):
            with self.subTest(code):
                self.interrupted(code)
                self.assertEqual(self.value_of("kept_1.still"), "here")

    def test_interrupted_changes_saved(self):
        self.assertIn("var/did_1", self.interrupted("let did_1 = [1]; console.log(1); while (true);", prints=True).keys)
        self.assertIn("var/did_2", self.interrupted("let did_2 = [1]; console.log(1); await new Promise(() => {})", prints=True).keys)

    def test_interrupted_loop_stops(self):
        self.interrupted("let turns_1 = 0; for (;;) { await new Promise((r) => setTimeout(r, 10)); if (turns_1++ === 4) console.log(1) }", prints=True)
        before = self.value_of("turns_1")
        self.assertGreater(before, 3)
        time.sleep(0.3)
        self.assertEqual(self.value_of("turns_1"), before)
        self.interrupted("let turns_2 = 0; const loop_2 = async () => { for (;;) { await null; await new Promise((r) => setTimeout(r, 10)); if (turns_2++ === 4) console.log(1) } }; await loop_2()", prints=True)
        before = self.value_of("turns_2")
        time.sleep(0.3)
        self.assertEqual(self.value_of("turns_2"), before)

    def test_interrupt_spares_background_code(self):
        self.run_ok("let beside_1 = 0; const other_1 = (async () => { for (;;) { await new Promise((r) => setTimeout(r, 10)); beside_1++ } })(); 0")
        self.interrupted("await new Promise(() => {})")
        self.interrupted("for (;;);")
        self.engine.grows("beside_1", 3)

    def test_interrupt_keeps_started_server(self):
        code = "const server_1 = require('http').createServer(async (q, s) => { await new Promise((r) => setTimeout(r, 5)); s.end('served') }).listen(0, '127.0.0.1'); await require('events').once(server_1, 'listening'); console.log(1); await new Promise(() => {})"
        self.interrupted(code, prints=True)
        got = "await new Promise((done) => require('http').get({port: server_1.address().port, host: '127.0.0.1'}, (r) => { let t = ''; r.on('data', (c) => t += c).on('end', () => done(t)) }))"
        self.assertEqual(self.value_of(got), "served")
        self.run_ok("server_1.close(); server_1.closeAllConnections?.(); 0")

    def test_repeated_interrupts(self):
        for at in range(15):
            self.engine.begin("await 0; while (true);" if at % 2 else "while (true);")
            self.engine.interrupt(0.02)
            self.assertEqual(self.engine.finish().end["status"], "interrupted")
            self.assertEqual(self.value_of(f"{at} + 1"), at + 1)

    def test_interrupted_code_collected(self):
        with Engine(flags=[*FLAGS, "--expose-gc"]) as engine:
            for code in ("await new Promise(() => {})", "await 1; for (;;);", "for (;;);", "for (;;) await new Promise((r) => setTimeout(r, 5))", "setTimeout(gc, 10); await new Promise(() => {})"):
                for _ in range(2):
                    engine.begin(code)
                    engine.interrupt(0.06)
                    self.assertEqual(engine.finish().end["status"], "interrupted")
                    self.assertEqual(engine.run("gc(); await new Promise((r) => setTimeout(r, 5)); gc(); 1").value, 1)

    def test_interrupt_in_async_storage(self):
        self.run_ok("const als_1 = new (require('async_hooks').AsyncLocalStorage)()")
        for code in ("als_1.run(1, async () => { await 1; for (;;); }); await new Promise(() => {})", "await als_1.run(1, async () => { await 1; for (;;); })", "await als_1.run(1, async () => { for (;;) await new Promise((r) => setTimeout(r, 5)) })"):
            self.interrupted(code)
            self.assertEqual(self.value_of("await als_1.run(5, async () => { await 1; return als_1.getStore() })"), 5)
        self.run_ok("als_1.disable()")

    def test_duplicate_interrupts(self):
        self.engine.begin("while (true);")
        for _ in range(3):
            self.engine.interrupt(0.02)
        self.assertEqual(self.engine.finish().end["status"], "interrupted")
        self.assertEqual(self.value_of("2 + 2"), 4)

    def test_interrupt_ignored_when_not_running(self):
        for number in (self.engine.number, 10 ** 6, self.engine.number + 1):
            self.engine.send({"op": "interrupt", "exec": number})
        time.sleep(0.5)
        self.assertEqual(self.value_of("2 + 2"), 4)
        self.engine.begin("await new Promise((r) => setTimeout(() => r('whole'), 600))")
        self.engine.interrupt(0.1, exec_id=self.engine.number - 1)
        self.assertEqual(self.engine.finish().value, "whole")

    def test_interrupt_hanging_background(self):
        self.run_ok("setTimeout(() => { for (;;); }, 1000); 0")
        time.sleep(2)
        self.engine.begin("'never begins'")
        self.engine.interrupt(0.1)
        self.assertEqual(self.engine.finish().end["status"], "interrupted")
        self.assertEqual(self.value_of("2 + 2"), 4)

    def test_interrupt_storm_keeps_frames_whole(self):
        """Interrupts at any moment: every execution ends exactly once, every frame is whole."""
        code = "for (let i = 0; i < 40; i++) display('text/html', 'h'.repeat(50000)); let z_1 = Array(2000).fill(1); await 0; for (let i = 0; i < 2e8; i++); z_1.length"
        seen = set()
        for at in range(60):
            self.engine.begin(code)
            time.sleep(0.002 * (at % 30))
            self.engine.send({"op": "interrupt", "exec": self.engine.number})
            result = self.engine.finish()
            self.assertEqual(result.end["exec"], self.engine.number)
            seen.add(result.end["status"])
            for _, tail in result.of("display"):
                self.assertEqual(tail, b"h" * 50000)
        self.assertLessEqual(seen, {"done", "interrupted"})
        self.assertIn("interrupted", seen)
        self.assertEqual(self.value_of("3 + 3"), 6)

    def test_interrupt_keeps_jobs_running(self):
        pid = self.value_of("const job_1 = require('child_process').spawn('sleep', ['600']); job_1.pid")
        self.interrupted("require('child_process').execSync('sleep 600')")
        os.kill(pid, 0)
        self.run_ok("job_1.kill(); 0")


class Robustness(Own):
    HOSTILE = (
        "JSON.stringify = JSON.parse = () => { throw 1 }",
        "for (const k of Object.getOwnPropertyNames(Array.prototype)) try { Array.prototype[k] = () => { throw 1 } } catch {}",
        "for (const K of [Map, Set, WeakMap, String, Function, RegExp, Uint8Array, Buffer]) for (const k of Object.getOwnPropertyNames(K.prototype)) if (k !== 'constructor' && k !== 'toString') try { K.prototype[k] = () => { throw 1 } } catch {}",
        "Object.prototype.value = Object.prototype.get = Object.prototype.then_ = Object.prototype.type = Object.prototype.op = 'polluted'",
        "Object.keys = Object.defineProperty = Object.getOwnPropertyDescriptor = Reflect.apply = Reflect.ownKeys = () => { throw 1 }",
        "Promise.prototype.then = () => { throw 1 }; Symbol.iterator; Array.prototype[Symbol.iterator] = () => { throw 1 }",
        "globalThis.process = undefined; globalThis.console = undefined; globalThis.Buffer = undefined; globalThis.require = undefined",
        "process.emit = process.on = process.cwd = process.chdir = () => { throw 1 }; process.env = {}",
        "require('fs').writeSync = require('fs').readSync = require('fs').openSync = require('fs').closeSync = () => { throw 1 }; require('fs').readFileSync = 5",
        "require('inspector').Session.prototype.post = () => { throw 1 }; require('vm').Script = 5; require('vm').Script.prototype; 0",
        "require('events').prototype.emit = () => { throw 1 }",
        "Error.prepareStackTrace = () => { throw 1 }; Error.stackTraceLimit = 0",
        "Atomics.wait = Atomics.load = () => { throw 1 }; globalThis.SharedArrayBuffer = 0; Math.max = Date.now = () => { throw 1 }",
        "require('util').inspect = () => { throw 1 }; require('util').types.isProxy = () => true",
        "setTimeout = setInterval = setImmediate = queueMicrotask = null; process.nextTick = null",
        "Object.freeze(globalThis.Object); delete globalThis.display; delete globalThis.tools",
    )

    def test_driver_survives_hostile_code(self):
        for code in self.HOSTILE:
            with self.subTest(code), Engine() as engine:
                engine.run("let kept = {a: [1, 2]}; function f(x) { return x }; class K { v = 1 }; let k = new K()")
                engine.run(code)
                self.assertEqual(engine.run("kept.a[1] + 1").value, 3)
                self.assertEqual(engine.run("let more = [{b: 2}]").keys[-1:], ["var/more"])
                self.assertEqual(engine.ask("get", name="kept")["value"], {"o": [["a", [{"i": "1"}, {"i": "2"}]]]})
                self.assertTrue(engine.ask("vars")["vars"])
                self.assertTrue(engine.ask("tools")["ok"])
                self.assertTrue(engine.ask("complete", code="ke", cursor=2)["matches"])
                self.assertEqual(engine.ask("check", code="f(")["status"], "incomplete")
                self.assertEqual(engine.call("f", [{"i": "7"}]).value, 7)
                self.assertEqual(engine.run("throw 5").end["status"], "failed")
                engine.begin("while (true);")
                engine.interrupt(0.1)
                self.assertEqual(engine.finish().end["status"], "interrupted")
                self.assertTrue(engine.ask("save")["ok"])
                with engine.reload() as other:
                    self.assertEqual(other.run("[kept.a[0], f(2), k.v, more[0].b]").value, [1, 2, 1, 2])

    def test_getters_and_proxies_not_invoked(self):
        code = (
            "let ran = 0; const trap = new Proxy({}, new Proxy({}, {get() { ran++ }}));\n"
            "const holder = {get x() { ran++; return 1 }, trap}; Object.defineProperty(globalThis, 'watched', {get() { ran++ }, enumerable: true, configurable: true});\n"
            "class Tag { get [Symbol.toStringTag]() { ran++; return 'T' } toJSON() { ran++ } valueOf() { ran++ } toString() { ran++ } }\n"
            "const tag = new Tag(); const inherits = Object.create(trap); const list = [holder, tag]; class WithStatic { static get s() { ran++ } }; ran = 0"
        )
        self.run_ok(code)
        for name in ("holder", "trap", "tag", "inherits", "list", "watched"):
            self.engine.ask("get", name=name)
        self.engine.ask("vars")
        self.engine.ask("save")
        self.engine.ask("tools")
        for text in ("holder.", "trap.", "tag.", "inherits.", "list.", "holder.x.", "trap.y.", "watched."):
            self.engine.ask("complete", code=text, cursor=len(text))
        self.assertEqual(self.value_of("ran"), 0)
        self.assertEqual(sorted(each["key"] for each in self.engine.missed), ["var/holder", "var/inherits", "var/list", "var/trap", "var/watched"])

    def test_failed_allocation(self):
        self.assertEqual(self.engine.run("'x'.repeat(2 ** 30)").end["status"], "failed")
        self.assertEqual(self.engine.run("new ArrayBuffer(2 ** 52)").end["status"], "failed")
        self.assertEqual(self.value_of("1 + 1"), 2)


if __name__ == "__main__":
    unittest.main()
