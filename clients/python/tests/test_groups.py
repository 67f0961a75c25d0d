"""Groups, the audit log, and figures of the disk."""

import asyncio
import subprocess
import time
from pathlib import Path

import ryokan
from ryokan import aio, errors, types

from support import DaemonTest


class GroupsTest(DaemonTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.host = ryokan.Host.connect()
        cls.addClassCleanup(cls.host.close)

    def git(self, *args):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
        subprocess.run(["git", "-C", str(self.folder), *identity, *args], check=True, capture_output=True)

    def test_group_is_restored_as_one(self):
        self.folder = Path(self.root, "repository")
        self.folder.mkdir()
        self.git("init")
        (self.folder / "code").write_text("one\n")
        self.git("add", "code")
        self.git("commit", "-m", "first")
        kernel = self.host.create("api", engine="bash")
        kernel.files.write("plan", "first\n")
        groups = self.host.groups
        groups.new("shop")
        with self.assertRaises(errors.AlreadyExistsError):
            groups.new("shop")
        member = groups.add("shop", "kernel", "api")
        self.assertEqual(member, types.GroupMember("api", "kernel", "api"))
        groups.add("shop", "repository", str(self.folder), name="code")
        with self.assertRaises(errors.NotFoundError):
            groups.add("shop", "kernel", "absent")
        frozen = groups.freeze("shop", "release", wait=60)
        self.assertEqual((frozen.number, frozen.message, frozen.is_head), (1, "release", True))
        self.assertEqual({one.name for one in frozen.cost.members}, {"api", "code"})
        self.assertLessEqual(frozen.cost.pause, frozen.cost.total)
        self.assertIn("format = 1", frozen.lock)

        kernel.files.write("plan", "second\n")
        (self.folder / "code").write_text("two\n")
        found = groups.diff("shop")
        self.assertEqual(found.omitted, 0)
        changed = {(one.member, one.change, one.name) for one in found.differences if one.what == "file"}
        self.assertEqual(changed, {("api", "changed", "plan"), ("code", "changed", "code")})
        self.assertTrue(groups.check("shop"))
        restored = groups.restore("shop", "release", members=["api"])
        self.assertEqual(restored.freeze.id, frozen.id)
        self.assertEqual((kernel.files.read("plan"), (self.folder / "code").read_text()), ("first\n", "two\n"))
        groups.restore("shop", "1")
        self.assertEqual((self.folder / "code").read_text(), "one\n")
        groups.undo("shop", interrupt=True, wait=60)
        self.assertEqual((self.folder / "code").read_text(), "two\n")
        groups.remove_freeze("shop", "2")
        self.assertEqual([one.number for one in groups.log("shop")], [4, 3, 1])
        for wrong, ref in [(errors.NotFoundError, "2"), (errors.InvalidArgumentError, "")]:
            with self.assertRaises(wrong):
                groups.remove_freeze("shop", ref)
        self.assertIn("release", [one.message for one in groups.log("shop")])
        self.assertEqual(len(groups.log("shop", 1)), 1)
        self.assertIn('subject = "group"', groups.lock("shop"))
        with self.assertRaises(errors.InvalidArgumentError):
            groups.freeze("shop", wait=0)

        groups.configure("shop", on_failure="pause")
        self.assertEqual(groups.show("shop").on_failure, "pause")
        self.folder.rename(self.folder.with_name("away"))
        with self.assertRaises(errors.RyokanError):
            groups.freeze("shop")
        self.assertIn("code", groups.show("shop").paused)
        with self.assertRaises(errors.ConflictError):
            kernel.run_code("x=1")
        self.folder.with_name("away").rename(self.folder)
        groups.resume("shop")
        self.assertEqual(groups.show("shop").paused, "")
        kernel.run_code("x=1")
        groups.freeze("shop", on_failure="resume")

        async def work():
            async with aio.Host.connect() as host:
                (group,) = await host.groups.list()
                shown = await host.groups.show("shop")
                self.assertEqual((group.name, [one.name for one in shown.members]), ("shop", ["api", "code"]))
                self.assertGreaterEqual(shown.freezes, 3)
                await host.groups.remove("shop", "code")
                await host.groups.remove("shop")
                self.assertEqual(await host.groups.list(), [])

        asyncio.run(work())
        self.assertTrue(kernel.files.exists("plan"), "members stay")
        kernel.remove()

    def test_audit_log_is_read(self):
        kernel = self.host.create("audited", engine="bash")
        kernel.run_code("x=1")
        with kernel.lease("other", 600) as lease, self.assertRaises(errors.BusyError):
            self.assertIsNotNone(lease.expires_at)
            kernel.run_code("x=2")
        lines = self.host.audit("audited")
        self.assertEqual({line.kernel for line in lines}, {kernel.id})
        refused = [line for line in lines if line.outcome == "busy"]
        self.assertEqual([line.action for line in refused], ["kernel.run"])
        self.assertTrue(refused[0].client.startswith("ryokan-python") and refused[0].at is not None)
        self.assertEqual([line.sequence for line in lines], sorted(line.sequence for line in lines))
        self.assertEqual(self.host.audit("audited", lines[0].sequence, 1), lines[1:2])
        proof = self.host.verify_audit()
        self.assertEqual((proof.broken_at, proof.why), (0, ""))
        self.assertEqual(self.host.verify_audit(proof.head).broken_at, 0)
        kernel.remove()
        self.assertLess(lines[-1].sequence, self.host.audit(kernel.id)[-1].sequence, "also of a removed kernel")

        async def work():
            async with aio.Host.connect() as host:
                self.assertTrue(await host.audit(limit=0))
                self.assertEqual((await host.verify_audit()).broken_at, 0)

        asyncio.run(work())

    def test_kernels_have_disk_figures(self):
        kernel = self.host.create("large", engine="bash")
        kernel.files.write("data", bytes(range(256)) * 8192)
        deadline = time.monotonic() + 180
        while (disk := kernel.info().disk) is None or disk.workspace_bytes < 2 << 20:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)
        (used,) = self.host.du("large").kernels
        (listed,) = [one for one in self.host.list() if one.id == kernel.id]
        self.assertEqual(listed.disk.total_bytes, sum(part.bytes for part in used.parts) + used.freed_bytes)
        kernel.remove()
