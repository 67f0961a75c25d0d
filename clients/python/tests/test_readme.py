"""The examples of the documents print what their comments say."""

import contextlib
import io
import re
import unittest
from pathlib import Path

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


class ReadmeTest(DaemonTest):
    def run_examples(self, document, about):
        count = 0
        for number, example in examples(document, about):
            with self.subTest(line=number):
                output = io.StringIO()
                with contextlib.redirect_stdout(output):
                    exec(compile(example, f"{document}:{number}", "exec"), {"__name__": "__main__"})
                self.assertEqual(output.getvalue().splitlines(), expected_output(example))
            count += 1
        return count

    def test_package_examples(self):
        self.assertEqual(self.run_examples(PACKAGE / "README.md", "ryokan"), 9)

    def test_repository_example(self):
        document = PACKAGE.parents[1] / "README.md"
        if not document.exists():
            self.skipTest("not in a checkout")
        self.assertEqual(self.run_examples(document, "import ryokan"), 1)


if __name__ == "__main__":
    unittest.main()
