"""Saving and loading: the entries sent, and the state restored.

Run: /usr/bin/python3 -m unittest discover -s tests/python_driver
"""
import os
import sys
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from engine import Engine  # noqa: E402
from test_driver import Own  # noqa: E402


def of_another_version(saved):
    """The entries as an interpreter with another magic number makes them."""
    with Engine() as engine:
        magic = bytes(engine.run("import importlib.util; list(importlib.util.MAGIC_NUMBER)").value)
    return {key: (meta, body.replace(magic, b"\x01\x02\r\n")) for key, (meta, body) in saved.items()}


class Saving(Own):
    def missed(self):
        return {each["key"]: each for each in self.engine.missed}

    def test_only_changed_variables_sent(self):
        self.assertEqual(self.run_ok("a = 1; b = [1]; s = 'text'").keys, ["var/a", "var/b", "var/s"])
        for code in ("1 + 1", "b", "a", "c = None; del c", "b.append(2); b.pop();", "for _i in (): pass", "x = a\ndel x"):
            self.assertEqual(self.run_ok(code).keys, [], code)
        self.assertEqual(self.run_ok("b.append(3)").keys, ["var/b"])
        self.assertEqual(self.run_ok("a += 1").keys, ["var/a"])
        self.assertEqual(self.run_ok("a += 0").keys, [])

    def test_deleted_variables_sent(self):
        self.run_ok("a = 1; b = {}")
        result = self.run_ok("del a; b = len")
        self.assertEqual(sorted(frame["key"] for frame, _ in result.of("del")), ["var/a", "var/b"])
        self.assertEqual(result.keys, ["import/b"])

    def test_every_python_mutation_detected(self):
        self.run_ok(
            "big = list(range(100000)); al = big\ndef touch(): big.append(1)\n"
            "class K:\n    def go(self): d['in'][0].append(1)\nk = K()"
        )
        for code, key in (
            ("touch()", "var/al"),
            ("k.go()", "var/d"),
            ("bound(5)", "var/d"),
            ("d['in'][0] = 5", "var/d"),
            ("for each in [1]: d[each] = 1", "var/d"),
            ("al[0] = 'first'", "var/al"),
            ("del al", "var/big"),
            ("big[5:7] = []", "var/big"),
            ("import sys; sys.modules['__main__'].d['y'] = 1", "var/d"),
            ("globals()['d']['z'] = 1", "var/d"),
            ("exec('d.clear()')", "var/d"),
        ):
            with self.subTest(code):
                if key == "var/d":
                    self.run_ok("d = {'in': [[]]}; bound = d['in'].append")
                self.assertIn(key, self.run_ok(code).keys)

    def test_bytearray_view_mutation(self):
        self.run_ok("data = bytearray(10); view = memoryview(data)")
        self.assertIn("var/view", self.missed())
        self.run_ok("x = 1")
        self.assertEqual(self.run_ok("view[3] = 7").keys, ["var/data"])

    def test_mutation_through_hidden_alias(self):
        for made, change in (
            ("it = iter(x)", "it.__reduce__()[1][0].append(1)"),
            ("import functools; p = functools.partial(list.append, x)", "p(1)"),
            ("g = (lambda l: (l.append(1) for _i in range(9)))(x)", "next(g);"),
            ("class H: held = x", "H.held.append(1)"),
            ("class H:\n    pass\nh = H(); h.held = x", "h.held.append(1)"),
            ("y = (1, x)", "y[1].append(1)"),
            ("def f(s=x): s.append(1)", "f()"),
            ("def f(s):\n    def g(): s.append(1)\n    return g\ng = f(x)", "g()"),
            ("x", "_.append(1)"),
        ):
            with self.subTest(made):
                self.run_ok("x = [1, 2]\n" + made)
                if made != "x":
                    self.run_ok("1")
                    self.run_ok("other = 2")
                self.run_ok(change)
                with self.engine.reload() as other:
                    self.assertEqual(other.run("x").value, [1, 2, 1])
                self.run_ok("x = p = g = it = H = h = y = f = None")

    def test_thread_mutation_detected(self):
        self.run_ok(
            "import threading, time\nlog = []\ndef work():\n    while True:\n        log.append(0); time.sleep(0.02)\n"
            "threading.Thread(target=work, daemon=True).start()"
        )
        time.sleep(1)
        self.assertIn("var/log", self.run_ok("1 + 1").keys)

    def test_missed_values_listed(self):
        result = self.run_ok(
            "g = (i for i in ()); import threading; l = threading.Lock(); c = [1, l]; f = open('/dev/null')"
        )
        missed = {each["key"]: each for each in result.of("missed")[-1][0]["entries"]}
        self.assertEqual(sorted(missed), ["var/c", "var/f", "var/g", "var/l"])
        self.assertEqual((missed["var/g"]["type"], missed["var/c"]["type"]), ("generator", "list"))
        self.assertIn("lock", missed["var/c"]["reason"])
        self.assertEqual(self.run_ok("1").of("missed"), [])
        self.assertEqual(self.run_ok("y = 2").of("missed"), [])
        result = self.run_ok("del g, l; c = [1]")
        self.assertEqual([each["key"] for each in result.of("missed")[-1][0]["entries"]], ["var/f"])
        self.assertEqual(result.keys, ["var/c"])

    def test_newly_unsavable_value_deleted(self):
        self.run_ok("c = [1]")
        result = self.run_ok("c.append((i for i in ()))")
        self.assertEqual([frame["key"] for frame, _ in result.of("del")], ["var/c"])
        self.assertEqual(list(self.missed()), ["var/c"])

    def test_misbehaving_reduce(self):
        for what, said in (
            ("raise ZeroDivisionError('oops')", "ZeroDivisionError: oops"),
            ("raise SystemExit(3)", "SystemExit"),
            ("raise KeyboardInterrupt", "interrupted"),
            ("print('printed'); raise TypeError('no')", "no"),
            ("return 5", ""),
            ("return self.__reduce__()", "deep"),
        ):
            with self.subTest(what):
                result = self.run_ok(f"class R:\n    def __reduce__(self): {what}\nr = R()")
                self.assertEqual(result.out, b"")
                self.assertEqual(list(self.missed()), ["var/r"])
                self.assertIn(said, self.engine.missed[0]["reason"])
        result = self.run_ok("class R:\n    def __reduce__(self):\n        print('noise'); return (int, ())\nr = R()")
        self.assertEqual((result.out, self.engine.missed), (b"", []))

    def test_variable_metadata(self):
        self.run_ok("a = [1, 2]; s = 'x' * 1000")
        self.assertEqual(self.engine.saved["var/a"][0], {"type": "list", "summary": "[1, 2]"})
        self.assertLessEqual(len(self.engine.saved["var/s"][0]["summary"]), 200)
        self.assertEqual(self.engine.saved["var/a"][1][:1], b"\x01")

    def test_large_values_come_in_chunks(self):
        result = self.run_ok("import random; big = random.Random(1).randbytes(3_500_000)")
        chunks = [(frame, tail) for frame, tail in result.of("put") if frame["key"] == "var/big"]
        self.assertEqual([frame["more"] for frame, _ in chunks], [True, True, True, False])
        self.assertTrue(all(len(tail) <= 1 << 20 for _, tail in chunks))
        self.assertEqual(len(self.engine.saved["var/big"][1]), 3_500_002)
        with self.engine.reload() as other:
            self.assertIs(other.run("big == __import__('random').Random(1).randbytes(3_500_000)").value, True)

    def test_save_sends_everything(self):
        self.run_ok("a = 1; b = [2]; c = b\ndef f(): pass\nclass C: x = 1")
        self.run_ok("import os; os.chdir('/')")
        first = dict(self.engine.saved)
        self.engine.saved.clear()
        self.assertTrue(self.engine.ask("save")["ok"])
        self.assertEqual(sorted(self.engine.saved), sorted(first))
        self.assertEqual(self.engine.saved, first)

    def test_untouched_large_values_cost_nothing(self):
        self.run_ok("big = list(range(10**6)); data = bytes(10**8)", timeout=180)
        for code in ("1 + 1", "y = 2", "z = [y] * 3", "import os; os.getpid()", "s = sum(range(10))"):
            self.run_ok(code)
            # The quickest of many, because the machine does other things too.
            times = [1.0]
            while min(times) >= 0.02 and len(times) < 200:
                begun = time.perf_counter()
                self.run_ok(code)
                times.append(time.perf_counter() - begun)
            self.assertLess(min(times), 0.02, code)

    def test_failed_and_interrupted_saved(self):
        self.assertEqual(self.engine.run("a = 1\n1/0").keys, ["var/a"])
        self.engine.begin("b = 1\nprint('loops')\nwhile True: pass")
        result = self.engine.first_output()
        self.engine.interrupt()
        self.assertEqual(self.engine.finish(result).keys, ["var/b"])

    def test_non_identifier_names(self):
        self.run_ok("globals()['not an identifier'] = 1; globals()['\\ud800'] = 2; globals()[5] = 3; globals()['x' * 500] = 4; ok = 5")
        self.assertIn("var/not an identifier", self.engine.saved)
        self.assertIn("var/ok", self.engine.saved)
        self.assertEqual(len(self.engine.missed), 2)
        self.assertTrue(self.engine.ask("vars")["ok"])
        self.assertTrue(self.engine.ask("complete", code="o", cursor=1)["ok"])
        self.assertTrue(self.engine.ask("tools")["ok"])


class Loading(Own):
    def test_plain_values(self):
        self.restored(
            "v = [None, True, 1, 10**30, 1.5, 'é\\ud800', b'x', bytearray(b'y'), (1, [2]), {1: {2}}, frozenset({3}), 1j, range(3)]\n"
            "v.append(v); n = float('nan'); s = 'lone\\ud800'; y = b'bytes'; e = ''; z = b''"
        )
        check = (
            "v[13] is v and v[:13] == [None, True, 1, 10**30, 1.5, 'é\\ud800', b'x', bytearray(b'y'), (1, [2]), {1: {2}},"
            " frozenset({3}), 1j, range(3)] and n != n and s == 'lone\\ud800' and y == b'bytes' and e == '' and z == b''"
        )
        self.assertIs(self.value_of(check), True)

    def test_load_is_not_sent_back(self):
        self.restored(
            "a = [1, {'k': (1, 2)}]; b = 'text'; c = 5; import os, json\ndef f(x=[1]): return x\ng = lambda: f\n"
            "class C:\n    n = 1\n    def m(self): return self.n\no = C(); o2 = [o]; from math import sqrt"
        )
        for code in ("1 + 1", "z0 = 1; del z0", "a, b, c, f, g, C, o;", "import sys"):
            self.assertEqual([key for key in self.run_ok(code).keys if key != "import/sys"], [], code)

    def test_load_replaces_previous_state(self):
        self.run_ok("old = 1; import os; os.environ['OLD'] = '1'; os.chdir('/tmp')")
        self.engine.load({})
        self.assertEqual(self.engine.ask("vars")["vars"], [])
        self.assertIs(self.value_of("import os; 'OLD' in os.environ or os.getcwd() == '/tmp'"), False)

    def test_python_functions_restored(self):
        self.restored(
            "import functools\nbase = 10\ndef plain(a, b=2, *c, d=[4], **e) -> int:\n    'Doc.'\n    return a + b + base\nplain.mark = {'x': 1}",
            "fact = lambda n: 1 if n < 2 else n * fact(n - 1)",
            "def outer(n):\n    hits = []\n    def inner(x):\n        hits.append(x)\n        return n + len(hits)\n    return inner\nclosure = outer(5)\nclosure(1)",
            "def rec_outer():\n    def walk(n): return 0 if n == 0 else 1 + walk(n - 1)\n    return walk\nwalk = rec_outer()",
            "def gen(n):\n    for i in range(n): yield i * base\nasync def later(x): return x + base\nasync def agen():\n    yield 1",
            "def twice(f):\n    @functools.wraps(f)\n    def wrapper(*a): return 2 * f(*a)\n    return wrapper\n@twice\ndef deco(x): return x + 1",
            "@functools.lru_cache(maxsize=7)\ndef fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)",
            "from contextlib import contextmanager\n@contextmanager\ndef ctx():\n    yield 'in'",
            "part = functools.partial(plain, b=100); table = {'f': plain, 'g': [lambda x: x * base]}",
        )
        for code, expected in (
            (
                "[plain(1), plain.__doc__, plain.mark, plain.__annotations__ == {'return': int}, plain.__kwdefaults__]",
                [13, "Doc.", {"x": 1}, True, {"d": [4]}],
            ),
            ("fact(5)", 120),
            ("closure(2)", 7),
            ("walk(5)", 5),
            ("[list(gen(3)), await later(1), [x async for x in agen()]]", [[0, 10, 20], 11, [1]]),
            ("[deco(1), deco.__name__]", [4, "deco"]),
            ("[fib(20), fib.cache_info().maxsize]", [6765, 7]),
            ("with ctx() as c: pass\nc", "in"),
            ("[part(1), table['g'][0](2), table['f'] is plain]", [111, 20, True]),
            ("base = 20\nplain(1)", 23),
        ):
            with self.subTest(code):
                self.assertEqual(self.value_of(code), expected)

    def test_functions_share_cells(self):
        self.restored(
            "def make():\n    n = 0\n    def inc():\n        nonlocal n\n        n += 1\n    def get(): return n\n"
            "    return inc, get\ninc, get = make()\ninc()"
        )
        self.assertEqual(self.value_of("inc(); inc(); get()"), 3)

    def test_restored_functions_show_source(self):
        self.restored("# first\ndef broken():\n    return 1 / 0  # the line\n")
        self.assertIn("1 / 0  # the line", self.engine.run("broken()").err.decode())

    def test_other_version_uses_source(self):
        self.run_ok("k = 3\ndef mul(x):\n    def inner(y): return x * y * k\n    return inner\nthrice = mul(3); sq = lambda v: v * v")
        saved = of_another_version(self.engine.saved)
        self.assertNotEqual(saved, self.engine.saved)
        with Engine(state=saved) as other:
            self.assertEqual(other.load_reply["missed"], [])
            self.assertEqual(other.run("[mul(2)(5), thrice(4), sq(7)]").value, [30, 36, 49])

    def test_other_version_without_source(self):
        self.run_ok("exec('def blind(): return 1')")
        with Engine(state=of_another_version(self.engine.saved)) as other:
            (missed,) = other.load_reply["missed"]
            self.assertEqual(missed["key"], "fn/blind")
            self.assertIn("another Python version", missed["reason"])

    def test_python_classes_restored(self):
        self.restored(
            "import abc, dataclasses, enum, typing, collections",
            "class Base(abc.ABC):\n    count = 0\n    names = []\n    @abc.abstractmethod\n    def area(self): ...\n",
            "class Square(Base):\n    __slots__ = ('side',)\n    def __init__(self, side): self.side = side; Base.count += 1; Base.names.append(side)\n"
            "    def area(self): return self.side ** 2\nsq = Square(3)",
            "@dataclasses.dataclass(order=True)\nclass Point:\n    x: int\n    y: int = 5\n    tags: list = dataclasses.field(default_factory=list)\n"
            "p = Point(1)\np.tags.append('t')",
            "class Color(enum.Enum):\n    RED = 1\n    BLUE = 'b'\nred = Color.RED\nFlag = enum.Flag('Flag', 'A B'); ab = Flag.A | Flag.B",
            "class NT(typing.NamedTuple):\n    a: int\n    b: str = 'd'\nnt = NT(1)\nCT = collections.namedtuple('CT', 'u v'); ct = CT(1, [2])",
            "class Meta(type):\n    def __new__(m, n, b, d): d['made'] = n; return super().__new__(m, n, b, d)\nclass WithMeta(metaclass=Meta): pass\nwm = WithMeta()",
            "class Outer:\n    class Inner:\n        pass\ninner = Outer.Inner()",
            "if True:\n    class Indented:\n        text = '''a\n  b'''\n        def m(self): return super().__repr__()\nind = Indented()",
            "def helper(c):\n    c.helped = True\n    return c\n@helper\nclass Helped:\n    limit: int = 7\nHelped.limit = 8\nHelped.extra = [1]",
            "T = typing.TypeVar('T')\nclass G(typing.Generic[T]): pass\ng = G()",
            "Alias = Point\nclass Err(Exception): pass\ne = Err('m', 1)",
            "Made = type('Made', (), {'v': 3}); made = Made()",
        )
        for code, expected in (
            (
                "[sq.area(), Base.count, Base.names, type(sq) is Square, isinstance(sq, Base), Square.__slots__]",
                [9, 1, [3], True, True, ["side"]],
            ),
            ("[p == Point(1, 5, ['t']), p < Point(2), repr(p), type(p) is Point]", [True, True, "Point(x=1, y=5, tags=['t'])", True]),
            ("[red is Color.RED, Color('b').name, ab == Flag.A | Flag.B]", [True, "BLUE", True]),
            ("[nt, nt.b, type(nt) is NT, ct.v, type(ct) is CT]", [[1, "d"], "d", True, [2], True]),
            ("[wm.made, type(WithMeta) is Meta]", ["WithMeta", True]),
            ("type(inner) is Outer.Inner", True),
            ("[ind.text, 'Indented object' in ind.m()]", ["a\n  b", True]),
            ("[Helped.helped, Helped.limit, Helped.extra]", [True, 8, [1]]),
            ("[type(g) is G, Alias is Point, e.args, type(e) is Err]", [True, True, ["m", 1], True]),
            ("[made.v, type(made) is Made]", [3, True]),
        ):
            with self.subTest(code):
                self.assertEqual(self.value_of(code), expected)

    def test_redefined_class_instance(self):
        self.run_ok("class A:\n    def v(self): return 1\nold = A()")
        self.run_ok("class A:\n    def v(self): return 2\nnew = A()")
        self.assertEqual([each["key"] for each in self.engine.missed], ["var/old"])
        self.assertIn("no longer", self.engine.missed[0]["reason"])
        with self.engine.reload() as other:
            self.assertEqual(other.run("new.v()").value, 2)

    def test_local_classes_missed(self):
        self.run_ok("def f():\n    class L: pass\n    return L\nL = f(); l = L()")
        self.assertEqual({each["key"] for each in self.engine.missed}, {"var/L", "var/l"})
        self.assertIn("inside a function", self.engine.missed[0]["reason"])

    def test_shared_objects_restored(self):
        self.restored("a = [1]; b = a; c = {'a': a}; d = (a, a); e = [2]")
        self.assertEqual(self.value_of("[a is b, c['a'] is a, d[0] is a]"), [True] * 3)
        result = self.run_ok("b.append(5); d")
        self.assertTrue(result.keys)
        self.assertNotIn("var/e", result.keys)
        self.assertEqual(self.run_ok("del a; b").value, [1, 5])
        with self.engine.reload() as other:
            self.assertEqual(other.load_reply["missed"], [])
            self.assertEqual(other.run("[b, c['a'] is b]").value, [[1, 5], True])
        self.run_ok("b = 2")
        with self.engine.reload() as other:
            self.assertEqual(other.load_reply["missed"], [])
            self.assertEqual(other.run("[b, c['a'] is d[0]]").value, [2, True])
        self.run_ok("c = d = 3")
        with self.engine.reload() as other:
            self.assertEqual((other.load_reply["missed"], other.run("[b, c, d, e]").value), ([], [2, 3, 3, [2]]))

    def test_sharing_across_instances(self):
        self.restored(
            "store = []\nclass K:\n    pool = store\n    def __init__(self): self.mine = store\nk = K()\ndef f(s=store): return s"
        )
        self.assertEqual(self.value_of("[k.mine is store, K.pool is store, f() is store]"), [True] * 3)

    def test_imports_are_restored(self):
        self.restored(
            "import math, os.path as osp, xml.dom.minidom, json as j\nfrom collections import OrderedDict as OD\n"
            "from math import sqrt\nfrom os.path import join"
        )
        code = "[math.floor(1.5), osp.join('a', 'b'), xml.dom.minidom.__name__, j.dumps(1), OD(a=1), sqrt(4.0), join('c', 'd')]"
        self.assertEqual(self.value_of(code), [1, "a/b", "xml.dom.minidom", "1", {"a": 1}, 2.0, "c/d"])
        names = ("math", "osp", "xml", "j", "OD", "sqrt", "join")
        self.assertEqual({key for key in self.engine.saved if key.startswith("import/")}, {"import/" + n for n in names})

    def test_missing_workspace_modules(self):
        with open(os.path.join(self.engine.cwd, "own_mod.py"), "w") as file:
            file.write("class Thing:\n    pass\ndef act(): return 'acted'\n")
        self.run_ok("import own_mod; t = own_mod.Thing(); from own_mod import act; kept = 1")
        with self.engine.reload() as other:  # in another directory
            self.assertEqual({each["key"] for each in other.load_reply["missed"]}, {"import/own_mod", "var/t", "import/act"})
            self.assertIn("own_mod", other.load_reply["missed"][0]["reason"])
            self.assertEqual(other.run("kept").value, 1)

    def test_directory_environment_path_and_random(self):
        self.run_ok(
            "import os, sys, random\nos.chdir('/usr/lib'); os.environ['NEW'] = 'n'; del os.environ['USER']\n"
            "sys.path.append('/opt/mine'); random.seed(5)"
        )
        self.assertLessEqual({"cwd", "env/NEW", "env/USER", "sys/path", "random/python"}, set(self.engine.saved))
        state = dict(self.engine.saved)
        first = self.value_of("random.random()")
        with Engine(state=state) as other:
            self.assertEqual(other.run("import os; os.getcwd()").value, "/usr/lib")
            code = "import sys, random; [os.environ['NEW'], 'USER' in os.environ, sys.path[-1]]"
            self.assertEqual(other.run(code).value, ["n", False, "/opt/mine"])
            self.assertEqual(other.run("random.random()").value, first)
        self.run_ok("os.chdir('/'); os.environ['USER'] = 'guest'")
        self.assertNotIn("env/USER", self.engine.saved)

    def test_future_flags(self):
        self.restored("from __future__ import annotations")
        self.assertEqual(self.value_of("def f(a: nowhere): pass\nf.__annotations__['a']"), "nowhere")

    def test_bad_entry_keeps_others(self):
        self.run_ok("good = [1]\ndef f(): return good\nclass C: pass\nc = C()")
        saved = dict(self.engine.saved)
        bad_class = b'{"sequence":9,"file":"<exec 1>","first":1,"indented":false,"text":"class Bad(nowhere): pass","flags":0}'
        bad = {
            "var/empty": b"",
            "var/format": b"\x09p...",
            "var/tag": b"\x01?",
            "var/torn": b"\x01p\x80\x05]",
            "var/evil": b"\x01pcbuiltins\nexit\n(I3\ntR.",
            "var/lost": b'\x01R["var/gone","0"]',
            "import/absent": b'\x01i{"module":"no_such_module","also":[]}',
            "class/Bad": b"\x01c" + bad_class,
            "env/": b"\x01v\x80\x05K\x01.",
        }
        for key, body in bad.items():
            saved[key] = ({}, body)
        with Engine(state=saved) as other:
            missed = {each["key"]: each["reason"] for each in other.load_reply["missed"]}
            self.assertEqual(set(missed), set(bad))
            self.assertTrue(all(missed.values()), missed)
            self.assertEqual(other.run("[f(), type(c) is C]").value, [[1], True])
            self.assertEqual(other.run("print('out')").out, b"out\n")

    def test_mutual_class_dependencies(self):
        self.restored(
            "limit = [3]\ndef deco(c): return c",
            "class First: pass\nfirst = First()",
            "@deco\nclass Second(First):\n    peer = first\n    size = limit[0]\n    made = First()\n",
            "a_second = Second()",
        )
        self.assertEqual(self.value_of("[a_second.peer is first, Second.size, isinstance(a_second, First)]"), [True, 3, True])

    def test_changes_to_loaded_values_saved(self):
        self.restored("class A:\n    n = 1\na = A()\ndef f(): return A.n\nl = [1]\ndef g(): l.append(2)")
        self.run_ok("A.n = 2")
        self.assertIn("var/l", self.run_ok("g()").keys)
        with self.engine.reload() as other:
            self.assertEqual(other.run("[f(), a.n, type(a) is A, l]").value, [2, 2, True, [1, 2]])


if __name__ == "__main__":
    unittest.main()
