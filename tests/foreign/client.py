"""A client built on the schema file alone: calls every method of every interface and checks the results.

client.py CONTROL_SOCKET KERNEL_SOCKETS FOLDER: the last is a folder of the host to mount.
The daemon allows an MCP server `s` (tests/mcp/server.py ok).
"""

import asyncio
import json
import pathlib
import sys
import traceback

import capnp

capnp.remove_import_hook()
ryokan = capnp.load("schema/ryokan.capnp", imports=["schema"])

# Interfaces that the client implements; the next list is called by it.
OURS = ["OutputCallback", "KernelInfoSink", "EventSink", "JournalSink", "CheckpointSink", "DifferenceSink", "GcSink", "VerifySink", "AuditSink",
        "DecisionSink", "ArtifactSink", "PatchSink"]
THEIRS = ["Host", "Kernel", "Execution", "BlobReader", "BlobWriter", "BundleReader", "BundleWriter", "Lease", "Port",
          "PortStream", "Provenance"]
# Called by the Python package's tests (files) and by tests/freeze, tests/teleport and tests/microvm.
ELSEWHERE = ["Process", "Files", "FileReader", "FileWriter", "FileInfoSink", "FileEventSink", "Groups", "Images", "HandoverStream", "TeleportSink"]
SERVER = str(pathlib.Path("tests/mcp/server.py").absolute())
called = set()


def methods(interface):
    return set(getattr(ryokan, interface).schema.method_names)


def call(interface, capability, method, *args, **kwargs):
    """Calls a method and records it."""
    assert method in methods(interface), f"{interface} has no {method}"
    called.add((interface, method))
    return getattr(capability, method)(*args, **kwargs)


class Caller:
    """One capability: attributes are its methods, recorded when called."""

    def __init__(self, interface, capability):
        self.interface, self.cap = interface, capability

    def __getattr__(self, method):
        return lambda *args, **kwargs: call(self.interface, self.cap, method, *args, **kwargs)


async def refused(promise, code, reason=None):
    """The call must fail with that code of the schema's `ErrorCode`; returns the error's fields."""
    try:
        answer = await promise
    except capnp.KjException as error:
        lines = [line for line in str(error).splitlines() if "ryokan:" in line]
        assert lines, f"no machine-readable error in {error}"
        told = json.JSONDecoder().raw_decode(lines[0].split("ryokan:", 1)[1])[0]
        assert set(told) <= set(ryokan.Error.schema.fieldnames), told
        assert told["code"] in ryokan.ErrorCode.schema.enumerants, told
        assert told["code"] == code, f"{told}, not {code}"
        assert reason is None or told["reason"] == reason, told
        assert told["message"]
        return told
    raise AssertionError(f"expected {code}, got {answer}")


async def eventually(what, holds):
    for _ in range(3600):
        if holds():
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"timed out waiting for: {what}")


class Output(ryokan.OutputCallback.Server):
    def __init__(self):
        self.stdout, self.stderr, self.displays, self.structured = b"", b"", [], []
        self.codes, self.ids, self.truncated = [], set(), 0

    async def onOutput(self, execId, event, **_):
        called.add(("OutputCallback", "onOutput"))
        self.ids.add(execId)
        kind = event.which()
        assert not self.codes, f"{kind} after the last event"
        if kind == "stdout":
            self.stdout += event.stdout
        elif kind == "stderr":
            self.stderr += event.stderr
        elif kind == "exitCode":
            self.codes.append(event.exitCode)
        elif kind == "display":
            self.displays.append((event.display.mime, bytes(event.display.data)))
        elif kind == "structured":
            self.structured.append(event.structured.to_dict())
        elif kind == "truncated":
            self.truncated += event.truncated


class Infos(ryokan.KernelInfoSink.Server):
    def __init__(self):
        self.infos = []

    async def next(self, info, **_):
        called.add(("KernelInfoSink", "next"))
        self.infos.append(info.to_dict())


class Checkpoints(ryokan.CheckpointSink.Server):
    def __init__(self):
        self.checkpoints = []

    async def next(self, checkpoint, **_):
        called.add(("CheckpointSink", "next"))
        self.checkpoints.append(checkpoint.to_dict())


class Garbage(ryokan.GcSink.Server):
    def __init__(self):
        self.items = []

    async def next(self, item, **_):
        called.add(("GcSink", "next"))
        self.items.append(item.to_dict())


class Found(ryokan.VerifySink.Server):
    def __init__(self):
        self.damages, self.packs = [], 0

    async def progress(self, packs, ofPacks, bytes, **_):
        called.add(("VerifySink", "progress"))
        self.packs = packs

    async def damage(self, damage, **_):
        called.add(("VerifySink", "damage"))
        self.damages.append(damage.to_dict())


class Lines(ryokan.AuditSink.Server):
    def __init__(self):
        self.lines = []

    async def next(self, line, **_):
        called.add(("AuditSink", "next"))
        self.lines.append(line.to_dict())


class Differences(ryokan.DifferenceSink.Server):
    def __init__(self):
        self.differences = []

    async def next(self, difference, **_):
        called.add(("DifferenceSink", "next"))
        self.differences.append(difference.to_dict())


class Decisions(ryokan.DecisionSink.Server):
    def __init__(self):
        self.decisions = []

    async def next(self, decision, **_):
        called.add(("DecisionSink", "next"))
        self.decisions.append(decision.to_dict())


class Artifacts(ryokan.ArtifactSink.Server):
    def __init__(self):
        self.artifacts = []

    async def next(self, artifact, **_):
        called.add(("ArtifactSink", "next"))
        self.artifacts.append(artifact.to_dict())


class Patches(ryokan.PatchSink.Server):
    def __init__(self):
        self.patches = []

    async def next(self, patch, **_):
        called.add(("PatchSink", "next"))
        self.patches.append((bytes(patch.path), str(patch.deed), patch.note, bytes(patch.text), patch.more))


class Events(ryokan.EventSink.Server):
    def __init__(self):
        self.events = []
        self.caught_up = 0

    async def event(self, event, **_):
        called.add(("EventSink", "event"))
        assert not self.caught_up or event.sequence > self.caught_up
        self.events.append(event.to_dict())

    async def caughtUp(self, **_):
        called.add(("EventSink", "caughtUp"))
        self.caught_up = self.events[-1]["sequence"] if self.events else 0

    def kinds(self):
        return [event["kind"] for event in self.events]


class Journal(ryokan.JournalSink.Server):
    def __init__(self):
        self.entries = []

    async def entry(self, entry, **_):
        called.add(("JournalSink", "entry"))
        self.entries.append(entry.to_dict())


async def connect(path):
    stream = await capnp.AsyncIoStream.create_unix_connection(path=str(path))
    return capnp.TwoPartyClient(stream)


async def result_of(kernel, exec_id):
    execution = Caller("Execution", (await kernel.execution(exec_id)).execution)
    return (await execution.result()).result


async def out(kernel, code):
    """Runs code that must succeed; its output."""
    result = await result_of(kernel, (await kernel.execute(code)).execId)
    assert result.ok and str(result.status) == "done" and result.code == 0, f"{code!r}: {result}"
    return bytes(result.stdout).decode()


async def the_host(host):
    await refused(host.ping(), "refused")  # `hello` comes first.
    await refused(host.hello(0, "foreign"), "unsupported")
    hello = await host.hello(ryokan.wireVersion, "foreign 1.0")
    assert hello.wireVersion == ryokan.wireVersion and hello.host.id and "kaish" in hello.host.engines
    ping = await host.ping()
    assert ping.hostId == hello.host.id and ping.serverTimeMs > 1_600_000_000_000
    abilities = (await host.abilities()).abilities
    assert len(abilities) > 3 and all(ability.name for ability in abilities)
    pools = (await host.pools()).pools
    assert all(pool.engine in ("kaish", "python") for pool in pools)
    await refused(host.openKernel("nobody"), "notFound")
    await refused(host.createKernel({"name": "../up"}, ""), "invalidArgument")
    await refused(host.createKernel({"name": "shell", "engine": "perl"}, ""), "invalidArgument")
    sink = Events()
    subscription = (await host.events(0, sink)).subscription
    made = await host.createKernel({"name": "shell", "engine": "kaish", "labels": [{"key": "a", "value": "b"}]}, "once")
    again = await host.createKernel({"name": "shell", "engine": "kaish", "labels": [{"key": "a", "value": "b"}]}, "once")
    assert made.info.id == again.info.id and made.info.spec.name == "shell" and made.info.state == "created"
    await refused(host.createKernel({"name": "shell", "engine": "kaish"}, ""), "alreadyExists")
    python = await host.createKernel({"name": "py", "engine": "python"}, "")
    opened = await host.openKernel(made.info.id)
    assert opened.info.id == made.info.id
    every, labelled, none = Infos(), Infos(), Infos()
    await host.listKernels({}, every)
    await host.listKernels({"labels": [{"key": "a", "value": "b"}]}, labelled)
    await host.listKernels({"prefix": "zz"}, none)
    await eventually("the list", lambda: len(every.infos) == 2 and labelled.infos)
    assert [info["spec"]["name"] for info in every.infos] == ["py", "shell"], every.infos
    assert [info["spec"]["name"] for info in labelled.infos] == ["shell"] and not none.infos
    await eventually("events", lambda: len(sink.events) >= 3)
    assert [e["sequence"] for e in sink.events] == sorted(e["sequence"] for e in sink.events)
    del subscription
    # Pipelined: one round trip.
    pipelined = host.createKernel({"name": "piped", "engine": "kaish"}, "")
    started = await Caller("Kernel", pipelined.kernel).execute("echo piped")
    assert started.execId > 0
    await refused(host.removeKernel("piped", 77), "conflict")
    await host.removeKernel("piped", 0)
    await refused(host.openKernel("piped"), "notFound")
    return Caller("Kernel", made.kernel), Caller("Kernel", python.kernel)


async def executions(kernel):
    assert await out(kernel, "x=5; echo $x") == "5\n"
    callback = Output()
    exec_id = (await kernel.executeStreaming("echo out; echo err >&2; exit 4", callback)).execId
    await eventually("the last event", lambda: callback.codes)
    assert (callback.stdout, callback.stderr, callback.codes, callback.ids) == (b"out\n", b"err\n", [4], {exec_id})
    failed = await result_of(kernel, exec_id)
    assert (str(failed.status), failed.code, failed.ok, failed.execId) == ("failed", 4, False, exec_id)
    ran = await kernel.run({"code": "cat", "stdin": b"first ", "stdinOpen": True, "env": [{"key": "A", "value": "b"}]})
    execution = Caller("Execution", ran.execution)
    await execution.stdin(b"second ")
    await execution.stdin(b"third")
    await execution.closeStdin()
    result = (await execution.result()).result
    assert bytes(result.stdout) == b"first second third" and result.durationUs > 0
    replay = Output()
    await execution.output(6, replay)
    # Received messages are handled by separate tasks.
    await eventually("the last event", lambda: replay.codes)
    assert replay.stdout == b"second third" and replay.codes == [0], (replay.stdout, replay.codes)
    same = await kernel.run({"code": "echo once", "key": "k"})
    assert (await kernel.run({"code": "echo once", "key": "k"})).execId == same.execId
    await Caller("Execution", same.execution).result()
    whole = (await kernel.runToEnd({"code": "echo whole; exit_code_is_no_command_of_ours"})).result
    assert (bytes(whole.stdout), whole.ok, str(whole.status)) == (b"whole\n", False, "failed"), whole
    again = (await kernel.runToEnd({"code": "echo once", "key": "k"})).result
    assert again.execId == same.execId, "a key is an execution's, however it is asked for"
    late = await kernel.run({"code": "sleep 30", "timeoutMs": 200})
    assert str((await Caller("Execution", late.execution).result()).result.status) == "timeout"
    for stop in ["interrupt", "cancel"]:
        ran = await kernel.run({"code": "sleep 30"})
        execution = Caller("Execution", ran.execution)
        await (kernel.interrupt(ran.execId) if stop == "interrupt" else execution.cancel())
        result = (await execution.result()).result
        assert str(result.status) == "interrupted", result
    await refused(kernel.interrupt(999_999), "notFound")
    await refused(kernel.execution(999_999), "notFound")
    await refused(kernel.run({"code": "echo", "expectedVersion": 1}), "conflict")
    stale = await kernel.check("if true; then")
    assert str(stale.status) == "incomplete"
    assert str((await kernel.check("echo whole")).status) == "complete"
    completion = await kernel.complete("ech", 3)
    assert completion.start == 0 and "echo" in completion.matches, completion
    assert list((await kernel.jobs()).jobs) == []
    await out(kernel, "sleep 20 &")
    jobs = (await kernel.jobs()).jobs
    assert len(jobs) == 1 and "sleep" in jobs[0].command, jobs


VALUES = [
    {"null": None},
    {"bool": True},
    {"int": -(2**63)},
    {"float": 1.5},
    {"string": "é\n"},
    {"bytes": b"\x00\xff"},
    {"array": [{"int": 1}, {"string": "1"}, {"null": None}]},
    {"object": [{"key": "b", "value": {"int": 1}}, {"key": "a", "value": {"array": []}}]},
]


async def variables(shell, python):
    for kernel in [shell, python]:
        for value in VALUES:
            await kernel.setVar("v", value, 0)
            got = (await kernel.getVar("v")).value
            expected = ryokan.Value.new_message(**value).to_dict()
            assert got.to_dict() == expected, f"{got.to_dict()}, not {expected}"
    await python.setVar("big", {"bigInt": "1" + "0" * 40}, 0)
    assert (await python.getVar("big")).value.bigInt == "1" + "0" * 40
    assert await out(python, "print(big == 10**40, v)") == "True {'b': 1, 'a': []}\n"
    assert {"v", "big"} <= set((await python.listVars()).names)
    described = {var.name: var for var in (await python.describeVars()).vars}
    assert described["big"].type == "int", described
    await refused(python.getVar("nowhere"), "notFound")
    await refused(python.setVar("v", {"int": 1}, 1), "conflict")
    await refused(python.setVar("not a name", {"int": 1}, 0), "invalidArgument")


async def of_python(python):
    ran = await python.run({"code": "20 + 22"})
    result = (await Caller("Execution", ran.execution).result()).result
    assert result.hasData and result.data.int == 42, result
    nothing = await python.run({"code": "x = None"})
    assert not (await Caller("Execution", nothing.execution).result()).result.hasData
    await out(python, "kept = [1, 2]\nimport threading\nlock = threading.Lock()")
    missed = []
    for _ in range(3600):
        missed = (await python.missed()).missed
        if missed:
            break
        await asyncio.sleep(0.05)
    assert [entry.key for entry in missed] == ["var/lock"] and missed[0].reason, missed
    taken = await python.snapshot()
    assert [entry.key for entry in taken.missed] == ["var/lock"] and len(taken.data) > 0
    await out(python, "kept = 'gone'")
    await python.restore(taken.data, 0)
    assert await out(python, "print(kept)") == "[1, 2]\n"
    await refused(python.restore(b"no snapshot", 0), "invalidArgument")
    assert await out(python, "print(kept)") == "[1, 2]\n"


async def files(kernel, other, folder):
    (folder / "seen").write_text("from the host")
    await kernel.mount("/given", str(folder), True, 0)
    assert await out(kernel, "cat /given/seen; echo back > /given/back") == "from the host"
    assert (folder / "back").read_text() == "back\n"
    mounts = [mount.to_dict() for mount in (await kernel.listMounts()).mounts]
    assert {"path": "/given", "source": str(folder), "writable": True} in mounts, mounts
    await refused(kernel.mount("/proc/x", str(folder), False, 0), "invalidArgument")
    await refused(kernel.mount("/gone", str(folder / "nothing"), False, 0), "notFound")
    await kernel.unmount("/given", 0)
    assert not (await kernel.listMounts()).mounts
    # Blobs: whole, and in pieces; readable only by kernels with a reference to them.
    small = (await kernel.writeBlob(b"small")).hash
    assert len(small) == 64 and (await kernel.readBlob(small)).data == b"small"
    writer = Caller("BlobWriter", (await kernel.newBlob()).blob)
    piece = bytes(range(256)) * 1024
    for _ in range(8):
        await writer.write(piece)
    done = await writer.finish()
    assert done.bytes == 8 * len(piece)
    await refused(other.readBlob(done.hash), "notFound")
    await refused(other.openBlob(done.hash), "notFound")
    await kernel.grantBlob(done.hash, other.cap)
    reader = Caller("BlobReader", (await other.openBlob(done.hash)).blob)
    assert (await reader.size()).bytes == done.bytes
    got, end = b"", False
    while not end:
        read = await reader.read(len(got), 1 << 20)
        assert read.end or len(read.data) > 0, "no progress"
        got, end = got + read.data, read.end
    assert got == piece * 8
    await refused(kernel.readBlob("zz"), "invalidArgument")


async def tools(kernel, typed):
    names = {tool.name for tool in (await kernel.listTools()).tools}
    assert "echo" in names, names
    positional = (await kernel.callTool("echo", {"array": [{"string": "by"}, {"string": "tool"}]})).result
    assert positional.ok and bytes(positional.stdout) == b"by tool\n", positional
    await refused(kernel.registerMcp("other", {"stdio": {"command": "/bin/sh"}}, 0), "refused")
    await kernel.registerMcp("s", {"stdio": {"command": "python3", "args": [SERVER, "ok"]}}, 0)
    servers = []
    for _ in range(3600):
        servers = (await kernel.listMcpServers()).servers
        if servers[0].tools:
            break
        await asyncio.sleep(0.05)
    assert [server.name for server in servers] == ["s"] and servers[0].tools > 3, servers
    offered = [tool for tool in (await kernel.listTools()).tools if tool.source.startswith("mcp") and tool.name.endswith("add")]
    assert len(offered) == 1 and "number" in offered[0].schemaJson, [t.name for t in (await kernel.listTools()).tools]
    args = {"object": [{"key": "a", "value": {"int": 2}}, {"key": "b", "value": {"int": 3}}]}
    assert (await kernel.callTool(offered[0].name, args)).result.ok
    # Numbers stay numbers on their way to the server.
    await typed.registerMcp("s", {"stdio": {"command": "python3", "args": [SERVER, "ok"]}}, 0)
    for _ in range(3600):
        if (await typed.listMcpServers()).servers[0].tools:
            break
        await asyncio.sleep(0.05)
    assert "5" in await out(typed, "print(tools.s.add(a=2, b=3))")
    await typed.unregisterMcp("s", 0)
    await kernel.unregisterMcp("s", 0)
    assert not (await kernel.listMcpServers()).servers
    await refused(kernel.unregisterMcp("s", 0), "notFound")


async def holding(host, shell, kernels, folder):
    # Attenuated rights, in a capability and on a socket.
    weak = Caller("Kernel", (await shell.attenuate(["read"], "reader")).kernel)
    assert [str(right) for right in (await weak.info()).info.rights] == ["read"]
    await refused(weak.execute("echo no"), "refused", "rights")
    path = (await shell.publish(["read", "execute"], "window")).path
    assert path == str(kernels / "window.sock")
    window = Caller("Kernel", (await connect(path)).bootstrap().cast_as(ryokan.Kernel))
    assert await out(window, "echo through") == "through\n"
    await refused(window.remove(0), "refused", "rights")
    await shell.unpublish("window")
    assert not pathlib.Path(path).exists()
    await refused(shell.unpublish("window"), "notFound")
    own = Caller("Kernel", (await connect(kernels / "shell.sock")).bootstrap().cast_as(ryokan.Kernel))
    assert (await own.info()).info.spec.name == "shell"
    version = (await shell.info()).info.version
    assert (await host.renameKernel("shell", "renamed", version)).version == version + 1
    assert (await own.info()).info.spec.name == "renamed" and (kernels / "renamed.sock").exists()
    await refused(host.renameKernel("renamed", "py", 0), "alreadyExists")
    await host.renameKernel("renamed", "shell", 0)
    assert not (kernels / "renamed.sock").exists()
    updated = await host.updateKernel("shell", {"pids": 99, "idleTimeoutMs": 60_000}, 0)
    assert list(updated.atNextStart) == list((await own.info()).info.atNextStart) == ["pids 256 -> 99"]
    await refused(host.updateKernel("shell", {"removePaths": ["/absent"]}, 0), "notFound")
    # A lease, resumed by its token, excludes others.
    held = await shell.lease("me", 60_000, b"")
    lease = Caller("Lease", held.lease)
    mine = Caller("Kernel", (await lease.kernel()).kernel)
    assert await out(mine, "echo mine") == "mine\n"
    await refused(shell.execute("echo no"), "busy", "lease")
    assert (await lease.renew(120_000)).expiresAtMs > held.expiresAtMs
    again = await shell.lease("me", 60_000, held.token)
    assert again.token == held.token
    await lease.release()
    assert await out(shell, "echo free") == "free\n"


async def history(host, shell):
    sink = Events()
    subscription = (await shell.events(0, sink)).subscription
    sequence = (await shell.message("user", "what a person said")).sequence
    journal, one = Journal(), Journal()
    await shell.journal(0, 0, journal)
    await shell.journal(sequence - 1, 1, one)
    await eventually("the journal", lambda: one.entries and journal.entries[-1]["sequence"] >= sequence)
    assert [entry["text"] for entry in one.entries] == ["user: what a person said"], one.entries
    assert one.entries[0]["kind"] == "message", one.entries
    texts = [entry["text"] for entry in journal.entries]
    assert "x=5; echo $x" in texts and "user: what a person said" in texts
    numbers = [entry["sequence"] for entry in journal.entries]
    assert numbers == sorted(set(numbers)) and numbers[-1] == sequence == (await shell.info()).info.version - 1
    await shell.stop(True)
    assert (await shell.info()).info.state == "stopped"
    await shell.start()
    assert (await shell.info()).info.state == "ready"
    await shell.suspend()
    assert (await shell.info()).info.state == "suspended"
    await shell.resume()
    await eventually("events of the kernel", lambda: len(sink.events) >= 2)
    del subscription
    await host.ping()
    await asyncio.sleep(0.3)
    before = len(sink.events)
    await shell.stop(False)
    await asyncio.sleep(0.3)
    assert len(sink.events) == before, "a dropped subscription still delivers"
    assert await out(shell, "echo $x") == "5\n"


async def checkpoints(shell):
    await out(shell, "kept=yes; echo one > file")
    first = (await shell.checkpoint({"name": "first", "description": "of many", "pinned": True})).checkpoint
    # The first checkpoint was taken when the kernel stopped.
    assert (first.name, first.number, str(first.type), first.pinned, first.isHead) == ("first", 2, "manual", True, True)
    await out(shell, "kept=no; rm file")
    await refused(shell.checkpoint({"name": "latest"}), "invalidArgument")
    await refused(shell.checkpoint({"kind": "teleport"}), "unsupported")
    await refused(shell.restoreCheckpoint("nothing", 0), "notFound")
    await refused(shell.restoreCheckpoint("first", 1), "conflict")
    done = (await shell.restoreCheckpoint(first.id[:12], 0)).restoration
    assert done.checkpoint.id == first.id and done.filesChanged >= 1, done
    assert await out(shell, "echo $kept; cat file") == "yes\none\n"
    assert (await shell.undo(0)).restoration.checkpoint.id == done.safety
    assert await out(shell, "echo $kept; ls") == "no\n"
    told = Differences()
    await shell.diff("first", "", told)
    await eventually("differences", lambda: len(told.differences) >= 3)
    files = [(one["deed"], one["name"]) for one in told.differences if one["area"] == "file"]
    assert files == [("removed", "file")], told.differences
    await shell.pinCheckpoint("first", False)
    found = (await shell.findCheckpoint("first")).checkpoint
    assert not found.pinned and found.restoredAtMs > 0 and not found.isHead
    sink = Checkpoints()
    await shell.checkpoints(0, sink)
    await eventually("all checkpoints", lambda: len(sink.checkpoints) == 4)
    assert [one["number"] for one in sink.checkpoints] == [4, 3, 2, 1]
    assert sink.checkpoints[-1]["parent"] == "" and sink.checkpoints[0]["type"] == "system"


async def work(shell):
    """Steps, decisions, artifacts, and the effect of a restore on them."""
    begun = (await shell.beginStep("gather")).step
    assert (begun.index, begun.name, begun.completedAtMs) == (1, "gather", 0)
    await refused(shell.beginStep("more"), "conflict", "step_open")
    done = await shell.completeStep()
    assert done.step.completedAtMs > 0 and (str(done.checkpoint.type), done.checkpoint.step) == ("auto", 1)
    await refused(shell.completeStep(), "conflict", "no_step")
    handed = (await shell.handOver("writer", "your turn")).checkpoint
    assert handed.agent == "writer"
    workflow = (await shell.workflow()).workflow
    assert (workflow.agent, len(workflow.steps)) == ("writer", 1)
    opened = (await shell.openDecision("which way", "left", "once")).decision
    again = (await shell.openDecision("which way", "left", "once")).decision
    assert (opened.id, again.id, str(opened.state), opened.agent) == (1, 1, "open", "writer")
    locked = await shell.lockDecision(1)
    assert str(locked.decision.state) == "locked" and locked.decision.lockedAtMs > 0
    assert str(locked.checkpoint.type) == "auto"
    await refused(shell.lockDecision(1), "conflict", "decision_state")
    await refused(shell.lockDecision(7), "notFound")
    hash_ = (await shell.writeBlob(b"first")).hash
    await refused(shell.putArtifact("report", {"hash": "0" * 64}, "", ""), "notFound")
    first = (await shell.putArtifact("report", {"hash": hash_}, "text/plain", "put")).artifact
    assert (first.version, first.hash, first.bytes, first.contentType) == (1, hash_, 5, "text/plain")
    await out(shell, "echo second > report.txt")
    second = (await shell.putArtifact("report", {"path": b"report.txt"}, "text/plain", "")).artifact
    assert (second.version, second.bytes) == (2, 7)
    third = (await shell.revertArtifact("report", 1)).artifact
    assert (third.version, third.revertsTo, third.hash) == (3, 1, hash_)
    read = await shell.artifact("report", 2)
    blob = Caller("BlobReader", read.blob)
    assert (await blob.read(0, 100)).data == b"second\n" and read.artifact.version == 2
    every, versions = Artifacts(), Artifacts()
    await shell.artifacts("", every)
    await shell.artifacts("report", versions)
    await eventually("artifacts", lambda: len(every.artifacts) == 1 and len(versions.artifacts) == 3)
    superseded = (await shell.supersedeDecision(1)).decision
    assert str(superseded.state) == "superseded"
    await shell.openDecision("later", "", "")
    back = (await shell.restoreCheckpoint(handed.id, 0, True, True)).restoration
    assert (back.decisionsChanged, back.artifactsChanged) == (1, 1), back
    told = Decisions()
    await shell.decisions(told)
    await eventually("decisions", lambda: len(told.decisions) == 2)
    assert [one["state"] for one in told.decisions] == ["superseded", "superseded"], told.decisions
    await refused(shell.artifact("report", 0), "notFound", "withdrawn")
    await shell.undo(0)
    assert (await shell.artifact("report", 0)).artifact.hash == hash_
    # Differences of files as text.
    patches = Patches()
    await shell.diffText(handed.id, "", [b"report.txt"], patches)
    await eventually("patches", lambda: patches.patches)
    assert patches.patches == [(b"report.txt", "added", "", b"@@ -0,0 +1 @@\n+second\n", False)], patches.patches
    # A summary that replaces messages.
    said = (await shell.message("user", "a long story", "story")).sequence
    assert (await shell.message("user", "a long story", "story")).sequence == said
    await shell.checkpoint({"name": "short", "summary": "a story", "compact": [{"first": said, "last": said}]})
    seen, held = Journal(), Journal()
    await shell.journal(said - 1, 1, seen, True)
    await shell.journal(0, 0, held, False, "short")
    await eventually("the journal", lambda: seen.entries and held.entries)
    assert (seen.entries[0]["kind"], seen.entries[0]["text"]) == ("checkpoint", "[checkpoint] a story"), seen.entries
    assert [entry["sequence"] for entry in held.entries] == [said]


async def forks(host, shell):
    await out(shell, "forked=no; echo parent > own")
    done = await shell.fork({"name": "child", "count": 2, "waitMs": 30_000, "key": "foreign"})
    assert done.checkpoint.name == "fork to child", done.checkpoint
    assert [child.name for child in done.children] == ["child-1", "child-2"]
    for child in done.children:
        assert child.which() == "forked", child
        info = child.forked.info
        assert (info.origin.kind, info.origin.name, info.origin.checkpoint) == ("forked", "shell", done.checkpoint.id)
        own = Caller("Kernel", child.forked.kernel)
        assert await out(own, "cat own; echo $RYOKAN_ORIGIN") == "parent\nforked\n"
        await out(own, "echo child > own")
    assert await out(shell, "cat own") == "parent\n"
    other = await host.forkKernel("shell", {"name": "wide", "count": 1, "change": {"pids": 77}})
    assert other.children[0].forked.info.spec.pids == 77, other
    again = await shell.fork({"name": "child", "from": done.checkpoint.id, "count": 1})
    assert again.children[0].which() == "forked" and again.children[0].name == "child", again
    taken = await shell.fork({"name": "child", "from": done.checkpoint.id, "count": 1})
    assert taken.children[0].which() == "failed" and str(taken.children[0].failed.code) == "alreadyExists", taken
    await refused(shell.fork({"name": "child", "count": 0}), "invalidArgument")
    made = await shell.thread("thread", "python", "")
    assert made.info.threadOf == (await shell.info()).info.id and made.info.spec.engine == "python"
    assert await out(Caller("Kernel", made.kernel), "print(open('own').read())") == "parent\n\n"
    await refused(shell.remove(0, False), "conflict", "threads")
    await host.removeKernel("thread", 0)
    for name in ("child", "child-1", "child-2", "wide"):
        await host.removeKernel(name, 0)


async def portable(host, shell):
    await out(shell, "carried=yes; echo carried > carried")
    file = Caller("BundleReader", (await shell.export(["latest"])).file)
    pieces = []
    while not (piece := await file.read()).end:
        pieces.append(piece.data)
    whole = b"".join(pieces)
    assert piece.bytes == len(whole) and len(piece.digest) == 64, piece
    cut = Caller("BundleWriter", (await host.importKernel("cut", False)).file)
    await cut.write(whole[: len(whole) // 2])
    await refused(cut.finish(), "corrupt")
    writer = Caller("BundleWriter", (await host.importKernel("carried", False)).file)
    await writer.write(whole)
    assert not (await writer.review()).requested, "the file names no resource of the host"
    await refused(writer.finishGroup([], [], []), "invalidArgument", "kernel")
    made = await writer.finish()
    assert (made.info.origin.kind, made.info.origin.name) == ("restored", "shell"), made.info.origin
    await refused(host.openKernel("cut"), "notFound")
    await host.removeKernel("carried", 0)


class Progress(ryokan.TeleportSink.Server):
    async def progress(self, phase, sentBytes, **_):
        pass


async def moves_and_groups(host, shell):
    assert not (await host.handovers()).handovers
    await refused(host.teleport("absent", "exec:true", False, Progress()), "notFound")
    await refused(host.abortTeleport("absent"), "notFound")
    await refused(host.resolveHandover("00" * 16, False), "notFound")
    stream = (await host.handoverStream()).stream
    await stream.write(b"no protocol")
    assert (await host.groups()).groups
    keys = Caller("Provenance", (await host.provenance()).provenance)
    own = (await keys.keys()).keys[0]
    assert (str(own.standing), len(own.key)) == ("own", 64), own
    assert (await keys.trust("peer", "ab" * 32)).key.name == "peer"
    await refused(keys.trust("peer", "no key"), "invalidArgument")
    await keys.distrust("peer")
    assert not (await keys.check("", "")).units
    assert (await host.images()).images
    spawned = await shell.spawn(dict(argv=["cat"], stdinOpen=True))
    listed = (await shell.processes()).processes
    assert [list(process.argv) for process in listed] == [["cat"]]
    await spawned.execution.stdin(b"bytes")
    await spawned.execution.closeStdin()
    assert (await spawned.execution.result()).result.stdout == b"bytes"
    spawned = await shell.spawn(dict(argv=["sleep", "60"], detached=True))
    while True:
        try:
            await shell.signalProcess(spawned.execId, 15)
            break
        except capnp.KjException:
            await asyncio.sleep(0.02)
    assert (await spawned.execution.result()).result.code == 143
    text = "until [ \"$(stty size)\" = \"7 8\" ]; do sleep 0.02; done; tty"
    spawned = await shell.spawn(dict(argv=["sh", "-c", text], rows=5, columns=6))
    resized = False
    while not resized:
        try:
            await shell.resizeTerminal(spawned.execId, 7, 8)
            resized = True
        except capnp.KjException:
            await asyncio.sleep(0.02)
    assert b"/dev/pts/" in (await spawned.execution.result()).result.stdout
    files = (await shell.files()).files
    assert files
    await ports(shell)


async def ports(shell):
    opened = Caller("Port", (await shell.openPort(8080)).port)
    await refused(opened.connect(), "notFound", "port_closed")
    server = "import socket; c = socket.create_server(('127.0.0.1', 8080)).accept()[0]; c.sendall(c.recv(9).upper())"
    spawned = await shell.spawn(dict(argv=["python3", "-c", server], detached=True))
    while True:
        try:
            stream = Caller("PortStream", (await opened.connect()).stream)
            break
        except capnp.KjException:
            await asyncio.sleep(0.02)
    await stream.write(b"text")
    assert (await stream.read()).data == b"TEXT" and (await stream.read()).data == b""
    assert (await spawned.execution.result()).result.code == 0
    closed = opened.closed()
    await shell.stop(True)
    await closed


async def archived(shell):
    await out(shell, "put=away; echo away > away")
    version = (await shell.info()).info.version
    await refused(shell.archive(version - 1), "conflict")
    held = await shell.archive(version)
    info = (await shell.info()).info
    assert (info.state, info.version) == ("archived", held.version), info
    await refused(shell.start(), "conflict", "archived")
    await refused(shell.removeCheckpoint(held.checkpoint.id, 0), "conflict", "in_use")
    back = await shell.unarchive(held.version)
    assert back.version > held.version
    await refused(shell.unarchive(0), "conflict", "not_archived")
    assert await out(shell, "echo $put $(cat away)") == "away away\n"


def flip(packs, needle):
    """Flips a bit of the first occurrence of these bytes in a pack."""
    for pack in packs.iterdir():
        content = bytearray(pack.read_bytes())
        at = content.find(needle)
        if at >= 0:
            content[at] ^= 1
            pack.write_bytes(content)
            return
    raise AssertionError(f"no pack has {needle}")


async def upkeep(host, shell, packs):
    version = (await shell.info()).info.version
    await shell.setRetention({"newest": 1, "keepForMs": 2**64 - 1}, version)
    kept = (await shell.info()).info.spec.retention
    assert (kept.newest, kept.keepForMs) == (1, 2**64 - 1), kept
    await refused(shell.setRetention({"keepForMs": 5}, 0), "invalidArgument")
    await refused(shell.removeCheckpoint("latest", 0), "conflict", "in_use")
    await shell.checkpoint({"name": "to go"})
    await shell.checkpoint({"name": "to stay"})
    assert (await shell.removeCheckpoint("to go", 0)).checkpoint.name == "to go"
    await refused(shell.findCheckpoint("to go"), "notFound")
    blob = (await shell.writeBlob(b"a blob that is damaged soon")).hash
    (kernel,) = (await host.diskUsage("shell")).usage.kernels
    assert len(kernel.each) == kernel.checkpoints and kernel.storedBytes >= kernel.freedBytes > 0, kernel
    parts = {part.what: part.bytes for part in (await host.diskUsage("")).usage.host}
    assert parts["kernels"] > 0 and parts["objects"] > 0, parts
    would = Garbage()
    report = (await host.gc(True, would)).report
    await eventually("every item", lambda: len(would.items) == report.objectsKept + report.objectsRemoved
                     + report.checkpointsKept + report.checkpointsRemoved)
    objects = {item["object"]["hash"]: item for item in would.items if "object" in item}
    assert objects[blob]["stays"] and "shell" in objects[blob]["why"], objects[blob]
    assert any("checkpoint" in item and item["why"] == "manual" for item in would.items)
    assert not (await host.gc(False, Garbage())).report.dryRun
    found = Found()
    report = (await host.verify(found)).report
    await eventually("progress", lambda: found.packs > 0)
    assert report.damaged == 0 and report.objects > 0 and not found.damages, found.damages
    flip(packs, b"a blob that is damaged soon")
    found = Found()
    assert (await host.verify(found)).report.damaged == 1
    await eventually("the damage", lambda: found.damages)
    (damage,) = found.damages
    assert (damage["what"], damage["name"]) == ("object", blob) and damage["affects"][0]["what"] == "blob", damage
    flip(packs, b"\x60 blob that is damaged soon")
    assert (await host.verify(Found())).report.damaged == 0
    log, own = Lines(), Lines()
    await host.audit("", 0, 0, log)
    await host.audit("shell", 0, 3, own)
    wanted = {("checkpoint.remove", "done"), ("checkpoint.remove", "conflict"), ("host.gc", "done")}
    # Lines arrive one by one, also after the call was answered.
    await eventually("lines", lambda: wanted <= {(line["action"], line["outcome"]) for line in log.lines})
    await eventually("three lines", lambda: len(own.lines) == 3)
    proof = await host.verifyAudit("")
    assert proof.brokenAt == 0, proof.why
    last = log.lines[-1]
    assert (await host.verifyAudit(f"{last['sequence']}:{last['hash']}")).brokenAt == 0
    assert (await host.verifyAudit(f"{last['sequence']}:{'0' * 64}")).brokenAt == last["sequence"]
    await refused(host.verifyAudit("nonsense"), "invalidArgument")


async def main():
    socket, kernels, folder = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
    client = await connect(socket)
    host = Caller("Host", client.bootstrap().cast_as(ryokan.Host))
    shell, python = await the_host(host)
    await executions(shell)
    await variables(shell, python)
    await of_python(python)
    await files(shell, python, folder)
    await tools(shell, python)
    await holding(host, shell, kernels, folder)
    await history(host, shell)
    await checkpoints(shell)
    await work(shell)
    await forks(host, shell)
    await portable(host, shell)
    await moves_and_groups(host, shell)
    await archived(shell)
    await upkeep(host, shell, kernels.parents[2] / "data" / "ryokan" / "store" / "packs")
    version = (await python.info()).info.version
    await refused(python.remove(version - 1), "conflict")
    await python.remove(version)
    await refused(host.openKernel("py"), "notFound")
    await host.removeKernel("shell", 0)
    empty = Infos()
    await host.listKernels({}, empty)
    assert not empty.infos
    wanted = {(interface, method) for interface in THEIRS + OURS for method in methods(interface)}
    missing = sorted(wanted - called)
    assert not missing, f"never called: {missing}"
    # Fails for interfaces that this file does not know.
    known = set(THEIRS + OURS + ELSEWHERE + ["Subscription"])
    text = pathlib.Path("schema/ryokan.capnp").read_text()
    interfaces = {line.split()[1] for line in text.splitlines() if line.startswith("interface ")}
    assert interfaces == known, interfaces ^ known
    assert len(methods("Host")) == 26 and len(methods("Kernel")) == 75
    print(f"called {len(wanted)} methods")


async def bounded():
    async with capnp.kj_loop():
        await asyncio.wait_for(main(), 400)


if __name__ == "__main__":
    try:
        asyncio.run(bounded())
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
