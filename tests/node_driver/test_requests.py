"""The node engine's requests and features of executions: values, calls, tools, rich forms, completion, jobs.

Run: python3 -B -m unittest discover -s tests/node_driver
"""
import base64
import os
import sys
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from engine import Engine, Result, as_value  # noqa: E402
from test_driver import Case, Own  # noqa: E402


class Values(Case):
    TABLE = (
        ("null", None),
        ("true", True),
        ("42", {"i": "42"}),
        ("-(2 ** 53 - 1)", {"i": str(-(2**53 - 1))}),
        ("2 ** 53", {"f": str(2**53)}),
        ("-5n", {"i": "-5"}),
        ("2n ** 63n", {"I": str(1 << 63)}),
        ("-(10n ** 40n)", {"I": "-1" + "0" * 40}),
        ("1.5", {"f": "1.5"}),
        ("NaN", {"f": "NaN"}),
        ("-Infinity", {"f": "-inf"}),
        ("-0", {"f": "-0.0"}),
        ("1e300", {"f": "1e+300"}),
        ("'é\\u{1f600}'", "é\U0001f600"),
        ("[1, [2]]", [{"i": "1"}, [{"i": "2"}]]),
        ("({b: 1, a: null})", {"o": [["b", {"i": "1"}], ["a", None]]}),
        ("Object.assign(Object.create(null), {x: 'y'})", {"o": [["x", "y"]]}),
        ("Buffer.from([0, 255])", {"x": "AP8="}),
        ("new Uint8Array([104, 105]).buffer", {"x": "aGk="}),
        ("new Float32Array([1, 2.5])", [{"i": "1"}, {"f": "2.5"}]),
    )

    def test_get_encodes_values(self):
        for code, form in self.TABLE:
            with self.subTest(code):
                self.run_ok(f"var v_1 = {code}")
                self.assertEqual(self.engine.ask("get", name="v_1")["value"], form)

    def test_value_round_trip(self):
        for code, form in self.TABLE:
            with self.subTest(code):
                self.assertTrue(self.engine.ask("set", name="v_2", value=form)["ok"])
                self.assertEqual(self.engine.ask("get", name="v_2")["value"], form)

    def test_types_after_set(self):
        self.engine.ask("set", name="v_3", value={"o": [["i", {"i": "1"}], ["n", {"i": str(2**60)}], ["f", {"f": "1.5"}], ["x", {"x": "aGk="}], ["l", []], ["__proto__", {"i": "5"}]]})
        code = "[typeof v_3.i, typeof v_3.n, v_3.f, Buffer.isBuffer(v_3.x), v_3.l instanceof Array, v_3 instanceof Object, Object.keys(v_3).includes('__proto__')]"
        self.assertEqual(self.value_of(code), ["number", "bigint", 1.5, True, True, True, True])

    def test_opaque_values(self):
        for code, type_name, text in (
            ("undefined", "undefined", "undefined"),
            ("new Map([[1, 2]])", "Map", "Map(1) {1 => 2}"),
            ("new Date(0)", "Date", "1970-01-01T00:00:00.000Z"),
            ("/a\\/b/gi", "RegExp", "/a\\/b/gi"),
            ("Symbol('s')", "symbol", "Symbol(s)"),
            ("function named() {}", "function", "[Function: named]"),
            ("class Foo {}", "class", "[class: Foo]"),
            ("new (class Foo { x = 1 })()", "Foo", "Foo {x: 1}"),
            ("new RangeError('r')", "RangeError", "[RangeError: r]"),
            ("'\\ud800'", "string", '"\\ud800"'),
            ("10n ** 200000n", "bigint", "[large BigInt]"),
            ("new Proxy([], {})", "Proxy", "[Proxy]"),
        ):
            with self.subTest(code):
                self.run_ok(f"var v_4 = {code}")
                self.assertEqual(self.engine.ask("get", name="v_4")["value"], {"O": {"type": type_name, "repr": text}})
        self.run_ok("var v_4 = new Map([['k', 'é'.repeat(10000)]])")
        self.assertLessEqual(len(self.engine.ask("get", name="v_4")["value"]["O"]["repr"].encode()), 4096)

    def test_getters_are_named(self):
        self.run_ok("var v_5 = {get x() { throw 1 }, y: 1}")
        self.assertEqual(self.engine.ask("get", name="v_5")["value"], {"o": [["x", {"O": {"type": "getter", "repr": "[Getter]"}}], ["y", {"i": "1"}]]})

    def test_cycles_and_depth_become_opaque(self):
        self.run_ok("var v_6 = [1]; v_6.push(v_6)")
        value = self.engine.ask("get", name="v_6")["value"]
        self.assertEqual((value[0], value[1]["O"]["type"]), ({"i": "1"}, "Array"))
        self.run_ok("var v_7 = []; for (let i = 0; i < 500; i++) v_7 = [v_7]")
        value, depth = self.engine.ask("get", name="v_7")["value"], 0
        while isinstance(value, list):
            value, depth = value[0], depth + 1
        self.assertTrue(80 <= depth <= 96, depth)
        self.run_ok("var v_8 = [0], v_9 = [v_8, v_8]")
        self.assertEqual(as_value(self.engine.ask("get", name="v_9")["value"]), [[0], [0]])

    def test_too_large_value_refused(self):
        self.run_ok("var v_10 = 'x'.repeat(9 << 20)")
        reply = self.engine.ask("get", name="v_10")
        self.assertEqual((reply["ok"], reply["code"]), (False, "invalidArgument"))
        self.assertIn("blob", reply["hint"])
        self.assertEqual(self.run_ok("v_10").end["value"]["O"]["type"], "string")

    def test_not_found_and_bad_values(self):
        for name in ("never_1", "Math", "process", "require", "toString", 5):
            self.assertEqual(self.engine.ask("get", name=name)["code"], "notFound", name)
        for bad in ({"i": "x"}, {"q": 1}, {"i": "1", "f": "2"}, 5, {"x": "?"}, {"o": [["a"]]}, {"b": {}}, {"f": "0x1"}, {"O": {"type": "t"}}):
            self.assertEqual(self.engine.ask("set", name="v_11", value=bad)["code"], "invalidArgument", bad)
        for name in ("1x", "for", "a.b", "", "await", "undefined", "x; process.exit()"):
            self.assertEqual(self.engine.ask("set", name=name, value=None)["code"], "invalidArgument", name)

    def test_set_is_saved_before_reply(self):
        self.engine.ask("set", name="v_12", value={"i": "5"})
        self.assertEqual([frame["key"] for frame, _ in self.engine.before.of("put")], ["var/v_12"])
        self.run_ok("v_12 += 1; let v_13 = 1; const v_14 = 2; var v_15 = 3; globalThis.v_16 = 4")
        for at in range(12, 17):
            self.assertTrue(self.engine.ask("set", name=f"v_{at}", value={"i": str(at)})["ok"])
        self.assertEqual(self.value_of("[v_12, v_13, v_14, v_15, v_16]"), [12, 13, 14, 15, 16])
        self.assertEqual(self.engine.run("v_14 = 0").end["status"], "failed")

    def test_blob_and_opaque_round_trip(self):
        blob = {"b": {"id": "d", "size": "3", "contentType": "text/plain", "hash": "0" * 64}}
        for form in (blob, {"O": {"type": "t", "repr": "r"}}):
            self.engine.ask("set", name="v_17", value=form)
            self.assertEqual(self.engine.ask("get", name="v_17")["value"], form)
            with self.engine.reload() as other:
                self.assertEqual(other.ask("get", name="v_17")["value"], form)

    def test_vars_lists_user_variables(self):
        with Engine() as engine:
            engine.run("const fs = require('fs'); let a = [1], b = 'x'.repeat(1000); function f() {} class K {} const k = new K(); var v; 5")
            listed = {each["name"]: each for each in engine.ask("vars")["vars"]}
            self.assertEqual(sorted(listed), ["K", "a", "b", "f", "k", "v"])
            self.assertEqual((listed["a"]["type"], listed["a"]["summary"]), ("Array", "[1]"))
            self.assertEqual((listed["k"]["type"], listed["f"]["type"], listed["K"]["type"]), ("K", "function", "class"))
            self.assertLessEqual(len(listed["b"]["summary"]), 200)


class Calls(Case):
    def test_named_and_positional_arguments(self):
        self.run_ok("function add_1(a, b = 10) { console.log('adding'); return a + b }")
        result = self.engine.call("add_1", {"o": [["b", {"i": "2"}], ["a", {"i": "1"}]]})
        self.assertEqual((result.end["status"], result.value, result.out), ("done", 3, b"adding\n"))
        self.assertNotIn("output", result.end)
        self.assertEqual(self.engine.call("add_1", [{"i": "5"}]).value, 15)
        self.assertEqual(self.engine.call("add_1", {"o": [["a", {"i": "5"}]]}).value, 15)

    def test_object_argument(self):
        self.run_ok("const opts_1 = ({a, b: {c} = {c: 5}}) => [a, c]; function one_1(options) { return options.x } const none_1 = () => 'none'; function rest_1(...all) { return all.length }")
        self.assertEqual(self.engine.call("opts_1", {"o": [["a", {"i": "1"}]]}).value, [1, 5])
        self.assertEqual(self.engine.call("one_1", {"o": [["x", "y"]]}).value, "y")
        self.assertEqual(self.engine.call("none_1", {"o": []}).value, "none")
        self.assertEqual(self.engine.call("rest_1", [None, None]).value, 2)

    def test_unknown_parameters_are_refused(self):
        self.run_ok("function two_1(a, b) { return 1 }")
        result = self.engine.call("two_1", {"o": [["c", None]]})
        self.assertEqual(result.end["status"], "refused")
        self.assertIn("two_1 has no parameter c; it has: a, b", result.end["err"])

    def test_undefined_result_is_null(self):
        self.run_ok("function nothing_1() {}")
        self.assertIsNone(self.engine.call("nothing_1", None).end["value"])

    def test_members_modules_and_promises(self):
        self.assertEqual(self.engine.call("Math.sqrt", [{"f": "9"}]).end["value"], {"i": "3"})
        self.assertEqual(self.engine.call("path.basename", ["/a/b"]).value, "b")
        self.run_ok("const obj_1 = {n: 5, m() { return this.n }}; const later_1 = async (x) => { await new Promise((r) => setTimeout(r, 5)); return x }")
        self.assertEqual(self.engine.call("obj_1.m", []).value, 5)
        self.assertEqual(self.engine.call("later_1", ["v"]).value, "v")

    def test_unknown_and_failing_calls(self):
        self.run_ok("class Cls_1 {} let not_1 = 5; const rej_1 = async () => { throw new TypeError('rejected') }; function thr_1() { throw new Error('thrown') }; function ex_1() { process.exit(7) }")
        for name in ("nowhere_1", "nowhere_1.f", "Math.nothing", "", "not_1", "Cls_1", "__proto__", "not_1.x.y"):
            self.assertEqual(self.engine.call(name, None).end["status"], "refused", name)
        self.assertEqual(self.engine.call("thr_1", "x").end["status"], "refused")
        self.assertEqual(self.engine.call("thr_1", [{"q": 1}]).end["status"], "refused")
        for name, err in (("rej_1", "TypeError: rejected"), ("thr_1", "Error: thrown")):
            result = self.engine.call(name, [])
            self.assertEqual((result.end["status"], result.end["err"]), ("failed", err))
            self.assertNotIn(b"ryokan:", result.err)
        self.assertEqual(self.engine.call("ex_1", []).end["code"], 7)

    def test_call_can_be_interrupted(self):
        self.run_ok("function spin_1() { for (;;); } const wait_1 = async () => { await new Promise(() => {}) }")
        for name in ("spin_1", "wait_1"):
            self.engine.begin(None, op="call", name=name, args=[])
            self.engine.interrupt(0.2)
            self.assertEqual(self.engine.finish().end["status"], "interrupted")
        self.assertEqual(self.value_of("1 + 1"), 2)

    def test_call_saves_changes(self):
        self.run_ok("const kept_1 = []; function grow_1() { kept_1.push(kept_1.length) }")
        self.assertIn("var/kept_1", self.engine.call("grow_1", []).keys)

    def test_tools_listed_with_schema(self):
        self.run_ok(
            "/**\n * Does it.\n *\n * @param {string} a - what\n * @param {number} [b] how often\n */\nfunction tool_1(a, b = 2.5, c = [], ...rest) {}\n"
            "function _hidden_1() {} class NoTool_1 {} const fs_1 = require('fs'); const {readFileSync} = fs_1; const opts_2 = async ({x, y = 'z', ...more}) => {}; const bound_1 = tool_1.bind(1)"
        )
        listed = {each["name"]: each for each in self.engine.ask("tools")["tools"]}
        for name in ("_hidden_1", "NoTool_1", "readFileSync", "bound_1"):
            self.assertNotIn(name, listed)
        tool = listed["tool_1"]
        self.assertEqual((tool["description"], tool["source"]), ("Does it.", "user"))
        schema = tool["schema"]
        self.assertEqual(schema["required"], ["a"])
        self.assertEqual(schema["properties"]["a"], {"type": "string", "description": "what"})
        self.assertEqual(schema["properties"]["b"], {"type": "number", "description": "how often", "default": 2.5})
        self.assertEqual(schema["properties"]["c"], {"type": "array", "default": []})
        self.assertEqual(listed["opts_2"]["schema"], {"type": "object", "properties": {"x": {}, "y": {"type": "string", "default": "z"}}, "required": ["x"], "additionalProperties": True})
        with self.engine.reload() as other:
            again = {each["name"]: each for each in other.ask("tools")["tools"]}
            self.assertEqual(again["tool_1"], tool)


class DynamicTools(Own):
    def setUp(self):
        super().setUp()
        listed = [{"name": "fs__read", "description": "Reads.", "schema": {"type": "object"}}, {"name": "web__get", "description": "", "schema": None}, {"name": "plain", "description": "", "schema": None}]
        self.engine.send({"op": "dynamic_tools", "tools": listed})

    def test_tool_call_and_result(self):
        def answer(frame):
            self.assertEqual((frame["name"], frame["args"], frame["exec"]), ("fs__read", {"o": [["path", "a"], ["n", {"i": "2"}]]}, self.engine.number))
            return {"ok": True, "value": {"o": [["size", {"i": "3"}]]}, "text": "three"}

        self.assertEqual(self.engine.run("await tools.fs.read({path: 'a', n: 2, none: undefined})", on_tool=answer).value, {"size": 3})
        text_only = lambda frame: {"ok": True, "value": None, "text": "just text"}  # noqa: E731
        self.assertEqual(self.engine.run("await tools['web__get']()", on_tool=text_only).value, "just text")
        self.assertEqual(self.engine.run("await tools.plain({})", on_tool=text_only).value, "just text")

    def test_tool_by_call_request(self):
        answer = lambda frame: {"ok": True, "value": frame["args"]}  # noqa: E731
        self.engine.begin(None, op="call", name="fs__read", args={"o": [["path", "p"]]})
        self.assertEqual(self.engine.finish(on_tool=answer).value, {"path": "p"})

    def test_tool_list_and_unknown_tools(self):
        self.assertEqual(self.value_of("tools.list().map((t) => t.name)"), ["fs__read", "web__get", "plain"])
        self.assertEqual(self.value_of("[Object.keys(tools), 'fs' in tools, Object.keys(tools.fs), 'write' in tools.fs]"), [["fs", "web", "list"], True, ["read"], False])
        for code, text in (("tools.nowhere", "there is no nowhere in tools"), ("tools.fs.write", "there are: read"), ("await tools.fs.read(1)", "named arguments"), ("await tools.fs.read({}, {})", "named arguments")):
            result = self.engine.run(code)
            self.assertEqual(result.end["status"], "failed", code)
            self.assertIn(text, result.end["err"])
            self.assertNotIn(b"ryokan:", result.err)
        self.assertEqual(self.run_ok("tools").end["status"], "done")
        self.assertEqual(self.run_ok("const mine = tools, read = tools.fs.read").end["status"], "done")

    def test_failure_is_tool_error(self):
        fail = lambda frame: {"ok": False, "message": "no such file"}  # noqa: E731
        result = self.engine.run("try { await tools.fs.read() } catch (e) { [e instanceof ToolError, e instanceof Error, e.message] }", on_tool=fail)
        self.assertEqual(result.value, [True, True, "no such file"])
        self.assertEqual(self.engine.run("await tools.fs.read()", on_tool=fail).end["err"], "ToolError: no such file")

    def test_concurrent_tool_calls(self):
        echo = lambda frame: {"ok": True, "value": frame["args"]["o"][0][1]}  # noqa: E731
        self.assertEqual(self.engine.run("await Promise.all(Array.from({length: 12}, (_, n) => tools.fs.read({n})))", on_tool=echo).value, list(range(12)))

    def test_late_tool_result_after_interrupt(self):
        self.engine.begin("await tools.fs.read()")
        frame, _ = self.engine.frame(Result())
        self.assertEqual(frame["ev"], "tool_call")
        self.engine.interrupt()
        self.assertEqual(self.engine.finish().end["status"], "interrupted")
        self.engine.send({"op": "tool_result", "call": frame["call"], "ok": True, "value": "late"})
        right = lambda frame: {"ok": True, "value": "right"}  # noqa: E731
        self.assertEqual(self.engine.run("await tools.fs.read()", on_tool=right).value, "right")

    def test_unanswered_tool_call(self):
        self.engine.run("var said = tools.fs.read().catch((e) => e.message); 0")
        self.assertIn("ended before", self.value_of("await said"))
        self.engine.run("var later = new Promise((r) => setTimeout(() => tools.fs.read().catch((e) => r(e.message)), 1000)); 0")
        time.sleep(2)
        self.assertIn("only while an execution runs", self.value_of("await later"))

    def test_tool_list_changes(self):
        self.engine.send({"op": "dynamic_tools", "tools": [{"name": "new__one", "description": "", "schema": None}]})
        self.assertEqual(self.value_of("Object.keys(tools)"), ["new", "list"])
        self.assertEqual(self.engine.run("tools.fs").end["status"], "failed")


class Rich(Case):
    def test_display_by_mime_type(self):
        result = self.run_ok("display('text/html', '<b>'); display('image/png', Buffer.from([1, 2])); display('application/json', {a: [1]}); display('image/jpeg', '/9g='); console.log('o')")
        self.assertEqual([(frame["mime"], frame["exec"], tail) for frame, tail in result.of("display")], [
            ("text/html", self.engine.number, b"<b>"), ("image/png", self.engine.number, b"\x01\x02"), ("application/json", self.engine.number, b'{"a":[1]}'), ("image/jpeg", self.engine.number, b"\xff\xd8")])

    def test_repr_methods(self):
        for method, mime, made, data in (
            ("_repr_html_", "text/html", "'<b>'", b"<b>"),
            ("_repr_markdown_", "text/markdown", "'*'", b"*"),
            ("_repr_svg_", "image/svg+xml", "'<svg>'", b"<svg>"),
            ("_repr_latex_", "text/latex", "'$x$'", b"$x$"),
            ("_repr_png_", "image/png", "Buffer.from('89504e47', 'hex')", b"\x89PNG"),
            ("_repr_jpeg_", "image/jpeg", repr(base64.b64encode(b"\xff\xd8").decode()), b"\xff\xd8"),
            ("_repr_json_", "application/json", "({a: 1})", b'{"a":1}'),
        ):
            with self.subTest(method):
                result = self.run_ok(f"new (class D {{ {method}() {{ return {made} }} }})()")
                self.assertEqual([(frame["mime"], tail) for frame, tail in result.of("display")], [(mime, data)])
                self.assertIn("D {}", result.text)

    def test_mimebundle_and_values(self):
        result = self.run_ok("({_repr_mimebundle_() { return {'text/html': 'h', 'text/plain': 'p', 'x/y': 'z'} }})")
        self.assertEqual({frame["mime"]: tail for frame, tail in result.of("display")}, {"text/html": b"h", "x/y": b"z"})
        result = self.run_ok("display({_repr_html_: () => 'h'}, 5, 'text')")
        self.assertEqual([frame["mime"] for frame, _ in result.of("display")], ["text/html"])
        self.assertEqual(result.out, b"5\ntext\n")

    def test_failing_repr_methods(self):
        result = self.run_ok("({_repr_html_() { null.x }, _repr_png_() { return 5 }, _repr_svg_() { return 's'.repeat(2 << 20) }, _repr_latex_() { return null }, _repr_markdown_() { return 'ok' }})")
        self.assertEqual([tail for _, tail in result.of("display")], [b"ok"])
        self.assertIn(b"TypeError", result.err)
        self.assertIn(b"2097152 bytes left out", result.err)

    def test_display_outside_execution(self):
        self.run_ok("setTimeout(() => display('text/html', 'late'), 1000); 0")
        time.sleep(2)
        self.assertIn(b"no execution runs", self.run_ok("0").err)


class Complete(Case):
    FILES = {"node_modules/leftpad/index.js": ""}

    def matches(self, code, cursor=None):
        reply = self.engine.ask("complete", code=code, cursor=len(code.encode()) if cursor is None else cursor)
        self.assertTrue(reply["ok"], reply)
        return reply["start"], reply["matches"]

    def test_complete_names(self):
        self.run_ok("let alpha_one = 1; const alpha_two = 2; var _alpha = 3")
        self.assertEqual(self.matches("x = alpha_"), (4, ["alpha_one", "alpha_two"]))
        self.assertEqual(self.matches("é = alpha_o\nmore", 12), (5, ["alpha_one"]))
        self.assertIn("function", self.matches("func")[1])
        self.assertIn("console", self.matches("cons")[1])
        self.assertIn("_alpha", self.matches("_al")[1])
        self.assertLessEqual(len(self.matches("")[1]), 200)
        self.assertNotIn("$mport", self.matches("$")[1])

    def test_complete_skips_getters(self):
        self.run_ok("let ran = 0; class P { inner = [1]; get prop() { ran++; return 'text' } method() {} static make() {} } const p = new P(); const txt = 'x'; const trap = new Proxy({}, {get() { ran++ }, ownKeys() { ran++; return [] }})")
        self.assertEqual(self.matches("p.inn"), (2, ["inner"]))
        self.assertEqual(self.matches("p.me"), (2, ["method"]))
        self.assertIn("prop", self.matches("p.pr")[1])
        self.assertEqual(self.matches("P.ma"), (2, ["make"]))
        self.assertEqual(self.matches("p.inner.pus"), (8, ["push"]))
        self.assertEqual(self.matches("p?.inn"), (3, ["inner"]))
        self.assertEqual(self.matches("p.prop.toUpp")[1], [])
        self.assertEqual(self.matches("trap.x")[1], [])
        self.assertEqual(self.matches("p.nope.x")[1], [])
        self.assertEqual(self.matches("f().app")[1], [])
        self.assertEqual(self.matches("txt.toUpperC"), (4, ["toUpperCase"]))
        self.assertEqual(self.matches("Math.sq"), (5, ["sqrt"]))
        self.assertIn("log", self.matches("console.lo")[1])
        self.assertIn("env", self.matches("process.en")[1])
        self.assertEqual(self.value_of("ran"), 0)

    def test_complete_module_names(self):
        self.assertEqual(self.matches("require('child"), (9, ["child_process"]))
        self.assertEqual(self.matches("import x from \"leftp"), (15, ["leftpad"]))
        self.assertIn("fs/promises", self.matches("await import('fs/")[1])

    def test_check_completeness(self):
        for code, status, indent in (
            ("x = 1", "complete", None),
            ("", "complete", None),
            ("await f()", "complete", None),
            ("for (const i of x) {\n}", "complete", None),
            ("import x from 'y'", "complete", None),
            ("{a: 1, b: 2}", "complete", None),
            ("const f = async () => {\n  await g()\n}", "complete", None),
            ("for (const i of x) {", "incomplete", "  "),
            ("for (const i of x) {\n  f(i)", "incomplete", "  "),
            ("if (a) {\n  if (b) {", "incomplete", "    "),
            ("f(1,", "incomplete", ""),
            ("const a = [", "incomplete", "  "),
            ("const f = () =>", "incomplete", "  "),
            ("`text", "incomplete", ""),
            ("if (a) {\n  x = `a {", "incomplete", ""),
            ("/* comment", "incomplete", ""),
            ("a +", "incomplete", ""),
            ("x = = 1", "invalid", None),
            ("f)", "invalid", None),
            ("'open", "invalid", None),
            ("let let = 1", "invalid", None),
        ):
            with self.subTest(code):
                reply = self.engine.ask("check", code=code)
                self.assertEqual((reply["status"], reply.get("indent")), (status, indent))


class Jobs(Own):
    def jobs(self, result):
        frames = result.of("jobs")
        return frames[-1][0]["jobs"] if frames else None

    def test_child_processes_are_jobs(self):
        result = self.run_ok("const p = require('child_process').spawn('sleep', ['100'])")
        (job,) = self.jobs(result)
        self.assertEqual((job["id"], job["command"]), (str(self.value_of("p.pid")), "sleep 100"))
        kinds = [frame["ev"] for frame, _ in result.events]
        self.assertLess(kinds.index("missed"), kinds.index("jobs"))
        self.assertIsNone(self.jobs(self.run_ok("1 + 1")))
        self.assertEqual(self.jobs(self.run_ok("p.kill(); await require('events').once(p, 'exit'); 0")), [])

    def test_job_end_between_executions(self):
        self.run_ok("const p = require('child_process').exec('sleep 3', () => {}); 0")
        frame, _ = self.engine.frame(Result())
        self.assertEqual(frame, {"ev": "jobs", "jobs": []})

    def test_no_jobs_frame_without_jobs(self):
        self.assertIsNone(self.jobs(self.run_ok("require('child_process').execSync('true'); 0")))
        self.assertIsNone(self.jobs(self.run_ok("await new Promise((r) => require('child_process').exec('true', r))")))


if __name__ == "__main__":
    unittest.main()
