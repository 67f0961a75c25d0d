"""The distribution: its types hold, it builds from a source distribution, and has the repository's schema."""

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import unittest
import zipfile
from pathlib import Path

import ryokan

PACKAGE = Path(__file__).parents[1]
REPOSITORY = PACKAGE.parents[1]


def run(*command, **options):
    """Runs a module of this interpreter; its output if it fails."""
    ran = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, **options)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def build(directory, target, source):
    # Without a virtual environment of its own, which needs the network.
    run("build", "--no-isolation", f"--{target}", "--outdir", str(directory), str(source))
    (built,) = Path(directory).glob("*.tar.gz" if target == "sdist" else "*.whl")
    return built


@unittest.skipUnless(importlib.util.find_spec("mypy"), "needs mypy")
class TypesTest(unittest.TestCase):
    def test_types_hold(self):
        with tempfile.TemporaryDirectory() as cache:
            # Also the types of what a user writes: each `type: ignore` there is an error that must be found.
            environment = {**os.environ, "MYPYPATH": "src"}
            files = ["src", "tests/typed_use.py"]
            run("mypy", "--cache-dir", cache, "--enable-error-code", "ignore-without-code", *files,
                cwd=PACKAGE, env=environment)  # fmt: skip


@unittest.skipUnless((REPOSITORY / "schema/ryokan.capnp").exists(), "not in a checkout")
class PackageTest(unittest.TestCase):
    def test_version_is_repositorys(self):
        cargo = (REPOSITORY / "Cargo.toml").read_text()
        self.assertEqual(re.findall(r'^version = "(.*)"', cargo, re.MULTILINE), [ryokan.__version__])

    @unittest.skipUnless(importlib.util.find_spec("uv"), "needs uv and hatchling")
    def test_uv_builds_same_distributions(self):
        schema = (REPOSITORY / "schema/ryokan.capnp").read_bytes()
        with tempfile.TemporaryDirectory() as directory:
            # The source distribution, and from it the wheel, with the backend of this environment.
            options = ["--offline", "--no-cache", "--no-config", "--no-build-isolation"]
            run("uv", "build", *options, "--python", sys.executable, "--out-dir", directory, str(PACKAGE))
            (wheel,) = Path(directory).glob("*.whl")
            (sdist,) = Path(directory).glob("*.tar.gz")
            self.assertEqual({sdist.name, wheel.name}, {path.name for path in Path(directory).glob("ryokan-*")})
            with zipfile.ZipFile(wheel) as opened:
                self.assertEqual(opened.read("ryokan/ryokan.capnp"), schema)
                built_by_uv = sorted(opened.namelist())
            with tarfile.open(sdist) as opened:
                opened.extractall(directory, filter="data")
            unpacked = Path(directory) / sdist.name.removesuffix(".tar.gz")
            self.assertEqual((unpacked / "src/ryokan/ryokan.capnp").read_bytes(), schema)
            if importlib.util.find_spec("build"):
                with zipfile.ZipFile(build(Path(directory) / "by-build", "wheel", unpacked)) as opened:
                    self.assertEqual(built_by_uv, sorted(opened.namelist()))

    @unittest.skipUnless(importlib.util.find_spec("build"), "needs build and hatchling")
    def test_distributions_have_schema(self):
        schema = (REPOSITORY / "schema/ryokan.capnp").read_bytes()
        with tempfile.TemporaryDirectory() as directory:
            with tarfile.open(build(directory, "sdist", PACKAGE)) as archive:
                archive.extractall(directory, filter="data")
            (unpacked,) = (path for path in Path(directory).iterdir() if path.is_dir())
            self.assertEqual((unpacked / "src/ryokan/ryokan.capnp").read_bytes(), schema)
            # From the source distribution, as `python -m build` does, and from the checkout.
            for name, source in [("unpacked", unpacked), ("checkout", PACKAGE)]:
                with zipfile.ZipFile(build(Path(directory) / name, "wheel", source)) as wheel:
                    self.assertEqual(wheel.read("ryokan/ryokan.capnp"), schema, name)
                    wheel.extractall(Path(directory) / name)
            names = wheel.namelist()
            self.assertIn("ryokan/py.typed", names)
            installed = Path(directory) / "unpacked"
            self.assertTrue(list(installed.glob("*.dist-info/licenses/LICENSE-MIT")))
            code = "import ryokan._wire as wire; print(wire.__file__, wire.schema.__file__)"
            ran = subprocess.run(
                [sys.executable, "-c", code],
                env={"PYTHONPATH": str(installed)},
                capture_output=True,
                text=True,
                check=True,
            )
            self.assertEqual(ran.stdout.split(), [str(installed / f"ryokan/{n}") for n in ("_wire.py", "ryokan.capnp")])


if __name__ == "__main__":
    unittest.main()
