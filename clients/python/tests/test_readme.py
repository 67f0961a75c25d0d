"""The examples of the documents print what their comments say, in both faces."""

import ast
import asyncio
import contextlib
import inspect
import io
import re
import sys
import types
import unittest
import unittest.mock
from pathlib import Path

import ryokan
from ryokan import aio

from support import DaemonTest

PACKAGE = Path(__file__).parents[1]


def examples(document, about):
    """The examples that use the package, with their line numbers."""
    text = document.read_text()
    for found in re.finditer(r"```python\n(.*?)```", text, re.DOTALL):
        if about in found[1]:
            yield text.count("\n", 0, found.start()) + 1, found[1]


def expected_output(example):
    """The comments behind `print`, and those that continue them."""
    lines, continues = [], False
    for line in example.splitlines():
        behind = re.search(r"print\(.*\)\s+# (.*)", line)
        alone = re.fullmatch(r"\s*# (.*)", line)
        if behind or (alone and continues):
            lines.append((behind or alone)[1])
        continues = bool(behind or (alone and continues))
    return lines


class Asynchronous(ast.NodeTransformer):
    """An example of the synchronous face as one of the asynchronous: `await`, `async with`, `async for`."""

    def visit_Lambda(self, node):
        return node

    def visit_Call(self, node):
        self.generic_visit(node)
        return ast.Await(ast.Call(_name("call"), [node.func, *node.args], node.keywords))

    def visit_With(self, node):
        for item in node.items:
            # The object that a call returns opens itself.
            if isinstance(item.context_expr, ast.Call):
                self.generic_visit(item.context_expr)
            item.context_expr = ast.Call(_name("opened"), [item.context_expr], [])
        node.body = [self.visit(statement) for statement in node.body]
        return ast.AsyncWith(node.items, node.body)

    def visit_For(self, node):
        self.generic_visit(node)
        return ast.AsyncFor(node.target, ast.Call(_name("each"), [node.iter], []), node.body, node.orelse)


def _name(name):
    return ast.Name(name, ast.Load())


async def call(function, *args, **kwargs):
    if getattr(function, "__module__", "") == "http.client":
        # It blocks, and the event loop has to serve its port.
        return await asyncio.to_thread(function, *args, **kwargs)
    result = function(*args, **kwargs)
    return await result if inspect.isawaitable(result) else result


@contextlib.asynccontextmanager
async def opened(manager):
    if hasattr(manager, "__aenter__"):
        async with manager as value:
            yield value
    else:
        with manager as value:
            yield value


async def each(items):
    if hasattr(items, "__aiter__"):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


def asynchronous(example, name):
    """A function that runs an example with `ryokan.aio`."""
    tree = Asynchronous().visit(ast.parse(example, name))
    main = ast.parse("async def main(): pass")
    main.body[0].body = tree.body
    names = {"call": call, "opened": opened, "each": each}
    exec(compile(ast.fix_missing_locations(main), name, "exec"), names)
    return names["main"]


class Both(types.ModuleType):
    """`ryokan` for an asynchronous example."""

    def __getattr__(self, name):
        return getattr(aio, name, None) or getattr(ryokan, name)


class ReadmeTest(DaemonTest):
    def run_examples(self, document, about, faces):
        count = 0
        for number, example in examples(document, about):
            for face in faces if "asyncio" not in example else ["ryokan"]:
                with self.subTest(line=number, face=face):
                    output, name = io.StringIO(), f"{document}:{number}"
                    with contextlib.redirect_stdout(output):
                        if face == "ryokan":
                            exec(compile(example, name, "exec"), {"__name__": "__main__"})
                        else:
                            with unittest.mock.patch.dict(sys.modules, {"ryokan": Both("ryokan")}):
                                asyncio.run(asynchronous(example, name)())
                    self.assertEqual(output.getvalue().splitlines(), expected_output(example))
                count += 1
        return count

    def test_package_examples(self):
        # All but the one of asyncio in both faces.
        self.assertEqual(self.run_examples(PACKAGE / "README.md", "ryokan", ["ryokan", "ryokan.aio"]), 2 * 14 + 1)

    def test_repository_example(self):
        document = PACKAGE.parents[1] / "README.md"
        if not document.exists():
            self.skipTest("not in a checkout")
        self.assertEqual(self.run_examples(document, "import ryokan", ["ryokan", "ryokan.aio"]), 2)


if __name__ == "__main__":
    unittest.main()
