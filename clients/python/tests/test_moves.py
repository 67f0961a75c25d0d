"""Moves between two daemons, through both faces."""

import asyncio
import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import ryokan
from ryokan import aio, errors

from support import XDG, DaemonTest


class MovesTest(DaemonTest):
    """The other host is a second daemon, with directories of its own."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.other = Path(tempfile.mkdtemp(prefix="ryk", dir="/tmp"))
        cls.addClassCleanup(shutil.rmtree, cls.other, ignore_errors=True)
        cls.other.chmod(0o755)
        places = {"PATH": os.environ["PATH"]}
        for variable, name in XDG.items():
            (cls.other / name).mkdir(mode=0o700)
            places[variable] = str(cls.other / name)
        shutil.copytree(cls.root / "config", cls.other / "config", dirs_exist_ok=True)
        with open(cls.other / "log", "wb") as log:
            daemon = subprocess.Popen(["ryokand"], env=places, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        cls.addClassCleanup(cls.end, daemon)
        socket = cls.other / "run/ryokan/ryokand.sock"
        cls.there = cls.connected(socket)
        cls.addClassCleanup(cls.there.close)
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in places.items())
        cls.to = f"exec:exec env -i {variables} ryokan --no-autostart pipe"
        cls.host = ryokan.Host.connect()
        cls.addClassCleanup(cls.host.close)

    @classmethod
    def connected(cls, socket):
        deadline = time.monotonic() + 180
        while True:
            try:
                return ryokan.Host.connect(socket)
            except errors.UnavailableError:
                # Until it has bound its socket.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    @staticmethod
    def end(daemon):
        daemon.send_signal(signal.SIGINT)
        daemon.wait(180)

    def test_kernel_moves_with_report(self):
        kernel = self.host.create("mover", engine="python")
        kernel.run_code("x = 41")
        kernel.files.write("data", os.urandom(1 << 20))
        kernel.checkpoint("old")
        kernel.checkpoint("new")
        progress = []
        report = kernel.teleport(self.to, kind="checkpoint", since="new", on_progress=progress.append)
        self.assertEqual(report.host, self.there.info.id)
        self.assertEqual((report.kind, report.missing, report.acknowledged), ("checkpoint", ["1 older checkpoint"], True))
        self.assertGreater(report.sent_bytes, 1 << 20)
        self.assertGreater(report.wire_bytes, 1 << 20)
        self.assertGreaterEqual(report.elapsed, report.pause)
        self.assertTrue(progress and all(one.phase for one in progress), progress)
        moved = self.there.get("mover")
        self.assertEqual(moved.run_code("x + 1").value, 42)
        self.assertNotIn("old", [one.name for one in moved.log()])
        (received,) = [one for one in self.there.handovers() if one.name == "mover"]
        self.assertEqual((received.id, received.state, received.epoch), (report.handover, "live", report.epoch))
        self.assertEqual(received.kernel, kernel.id)
        with self.assertRaises(errors.DepartedError):
            kernel.run_code("x")

    def test_refused_move_leaves_kernel(self):
        kernel = self.host.create("stays", engine="python", net="host")
        kernel.run_code("x = 1")
        with self.assertRaises(errors.RefusedError):
            kernel.teleport(self.to)
        with self.assertRaises(errors.RyokanError):
            kernel.teleport("exec:false")
        with self.assertRaises(errors.InvalidArgumentError):
            kernel.teleport("nowhere")

        def stop(progress):
            raise KeyError(progress.phase)

        with self.assertRaises(KeyError):
            kernel.teleport(self.to, allow_missing=True, on_progress=stop)
        with self.assertRaises(errors.RefusedError) as caught:
            kernel.attenuate(["read", "execute"], "less").teleport(self.to, allow_missing=True)
        self.assertIn("teleport", caught.exception.message)
        with ryokan.PublishedKernel.open(kernel.publish(["read", "teleport"], "window")) as window:
            with self.assertRaises(errors.UnsupportedError):
                window.teleport(self.to)
        self.assertEqual(kernel.run_code("x").value, 1)
        report = kernel.teleport(self.to, allow_missing=True)
        self.assertTrue(report.missing)
        self.assertEqual(self.there.get("stays").get_var("x"), 1)

    def test_group_moves_as_one(self):
        kernel = self.host.create("member", engine="bash")
        kernel.run_code("x=7")
        notes = self.root / "notes"
        notes.mkdir()
        (notes / "plan").write_text("first")
        self.host.groups.new("shop")
        self.host.groups.add("shop", "kernel", "member")
        self.host.groups.add("shop", "directory", str(notes))
        place = self.other / "plans"
        progress = []
        with self.assertRaises(errors.RefusedError):
            self.host.groups.teleport("shop", self.to)
        with self.assertRaises(errors.RefusedError):
            self.host.groups.teleport("shop", self.to, places={"notes": str(place)})
        keys = json.loads(subprocess.check_output(["ryokan", "--json", "trust", "list"]))
        (key,) = [one["key"] for one in keys if one["standing"] == "own"]
        subprocess.check_call([*shlex.split(self.to.removeprefix("exec:exec "))[:-2], "trust", "add", "here", key])
        places = {"notes": str(place)}
        report = self.host.groups.teleport("shop", self.to, places=places, on_progress=progress.append)
        self.assertTrue(report.acknowledged and report.stays and progress)
        self.assertEqual(self.there.get("member").run_code("echo $x").stdout, "7\n")
        self.assertEqual((place / "plan").read_text(), "first")
        self.assertEqual([one.name for one in self.there.groups.list()], ["shop"])
        with self.assertRaises(errors.NotFoundError):
            self.host.groups.abort_teleport("shop")

    def test_abort_ends_move(self):
        async def use():
            async with aio.Host.connect() as host:
                kernel = await host.create("aborted", engine="bash")
                await kernel.run_code("x=1")
                with self.assertRaises(errors.NotFoundError):
                    await kernel.abort_teleport()
                for end in ("abort", "cancel"):
                    # The other end never answers.
                    moving = asyncio.ensure_future(kernel.teleport("exec:exec sleep 600"))
                    while not [one for one in await host.handovers() if one.name == "aborted"]:
                        self.assertFalse(moving.done())
                        await asyncio.sleep(0.01)
                    (one,) = [one for one in await host.handovers() if one.name == "aborted"]
                    self.assertIn(one.state, ("moving", "aborting"))
                    if end == "abort":
                        await kernel.abort_teleport()
                        with self.assertRaises(errors.RyokanError):
                            await asyncio.wait_for(moving, 180)
                    else:
                        moving.cancel()
                        with self.assertRaises(asyncio.CancelledError):
                            await moving
                    while [one for one in await host.handovers() if one.name == "aborted"]:
                        await asyncio.sleep(0.01)
                return (await kernel.run_code("echo $x")).stdout

        self.assertEqual(asyncio.run(asyncio.wait_for(use(), 300)), "1\n")
