"""What a type checker must know of the package, from outside. The tests check it with mypy and do not run it."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

from typing_extensions import assert_type

import ryokan
from ryokan import aio, types


def synchronous(host: ryokan.Host) -> None:
    kernel = host.create("k", engine="python", memory_bytes=1 << 30)
    assert_type(kernel, ryokan.Kernel)
    host.create("k", engine=3)  # type: ignore[arg-type]
    host.create("k", lifetime=3)  # type: ignore[call-arg]
    assert_type(kernel.files.read("f"), str)
    assert_type(kernel.files.read("f", "bytes", offset=1, length=2), bytes)
    assert_type(kernel.files.read("f", "stream"), Iterator[bytes])
    kernel.files.read("f", "binary")  # type: ignore[call-overload]
    with open("f", "rb") as file, open("f") as text:
        kernel.files.write("f", file)
        kernel.files.write("f", text)
    kernel.files.write("f", [b"a", b"b"])
    kernel.files.write("f", kernel.files.read("f", "stream"))
    kernel.files.write("f", 3)  # type: ignore[arg-type]
    kernel.files.write("f", [3])  # type: ignore[list-item]
    assert_type(kernel.files.upload("f").skipped, list[str])
    kernel.files.write_files([{"path": "f"}])  # type: ignore[typeddict-item]
    assert_type(kernel.commands.run(["true"]), types.Result)
    assert_type(kernel.commands.run("true", background=True, stdin=True), ryokan.CommandHandle)
    assert_type(kernel.pty.create(ryokan.PtySize(1, 2)).wait(on_pty=print).exit_code, int)
    assert_type(kernel.fork("f", count=2), list[ryokan.Kernel])
    kernel.fork("f", memory_bytes=1)  # type: ignore[call-arg]
    assert_type(host.fork("k", "f", memory_bytes=1, count=2), list[ryokan.Kernel])
    assert_type(host.import_("f").kernel, ryokan.Kernel)
    assert_type([event.detail for event in host.events()], list[dict[str, Any]])
    with kernel.files.watch("d") as watch:
        assert_type([event.path for event in watch], list[str])
    assert_type(kernel.files.watch_dir("d").get_new_events()[0].type, ryokan.FilesystemEventType)
    assert_type(kernel.files.no_wait.read("f"), str)
    assert_type(kernel.teleport("ssh://h", on_progress=print).missing, list[str])
    assert_type([one.state for one in host.handovers()], list[str])
    assert_type(host.groups.freeze("g", wait=1).cost, types.FreezeCost | None)
    host.groups.freeze("g", wait="1")  # type: ignore[arg-type]
    assert_type([line.action for line in host.audit("k")], list[str])
    with kernel.lease("me", 1) as lease:
        assert_type(lease.kernel, ryokan.Kernel)
    kernel.diff(other="k")  # type: ignore[arg-type]
    assert_type(kernel.preview("r").changes, list[types.Difference])
    with ryokan.Sandbox.create() as sandbox, ryokan.PublishedKernel.open("s") as window:
        assert_type(sandbox, ryokan.Sandbox)
        assert_type(window, ryokan.PublishedKernel)
        assert_type(sandbox.get_host(1), str)
        assert_type(sandbox.run_code("1").error.name, str)
        assert_type(sandbox.run_code("1").results[0].png, str | None)
        ryokan.Sandbox.create(envs={"A": 1})  # type: ignore[dict-item]
        assert_type(sandbox.kill(), bool)
        assert_type(ryokan.Sandbox.kill("id"), bool)
        ryokan.Sandbox.kill()  # type: ignore[call-arg]
        assert_type(ryokan.Sandbox.list()[0].sandbox_id, str)


async def asynchronous(host: aio.Host) -> None:
    kernel = await host.create("k", engine="python")
    assert_type(kernel, aio.Kernel)
    assert_type(await kernel.files.read("f"), str)
    assert_type(await kernel.files.read("f", "stream"), AsyncIterator[bytes])
    await kernel.files.write("f", await kernel.files.read("f", "stream"))
    await kernel.files.write("f", kernel.files.read("f"))  # type: ignore[arg-type]
    assert_type(await kernel.commands.run("true"), types.Result)
    handle = await kernel.commands.run("true", background=True)
    assert_type(handle, aio.CommandHandle)
    assert_type(await handle.wait(on_stdout=print), types.Result)
    assert_type(await host.fork("k", "f", pids=3), list[aio.Kernel])
    assert_type((await host.import_("f")).kernel, aio.Kernel)
    async for event in kernel.events(follow=False):
        assert_type(event, types.Event)
    async with kernel.files.watch("d") as watch:
        async for change in watch:
            assert_type(change, types.FileEvent)
            change.kind == "wrote"  # type: ignore[comparison-overlap]
    assert_type(await host.groups.list(), list[types.Group])
    async with kernel.lease("me", 1) as lease:
        assert_type(lease.kernel, aio.Kernel)
    async with aio.Sandbox.create() as sandbox:
        assert_type(sandbox, aio.Sandbox)
        assert_type(await sandbox.kill(), bool)
    assert_type(await aio.Sandbox.kill("id"), bool)
    kernel.files.read("f").upper()  # type: ignore[attr-defined]
