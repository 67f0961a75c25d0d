"""The official conformance suite of the Model Context Protocol on `ryokan mcp serve`.

The suite speaks HTTP only and names fixtures of its own. The bridge here carries each HTTP session to a server on
standard streams, and translates those names in requests; the server's answers pass unchanged.

Arguments: the program `ryokan`, and the directory with the suite and Node.js.
"""
import base64
import os
import subprocess
import sys
import uuid
from pathlib import Path

import anyio
import uvicorn
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.server.streamable_http import StreamableHTTPServerTransport
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.message import SessionMessage

KERNEL = "fixtures"
PIXEL = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg==")
DISPLAY = "class Pixel:\n  def _repr_png_(self): return open('pixel.png', 'rb').read()\nPixel()"
# What the suite calls its fixtures, and the same of ryokan.
TOOLS = {
    "test_simple_text": "print('This is a simple text response for testing.', end='')",
    "test_image_content": DISPLAY,
    "test_error_handling": "raise ValueError('This tool intentionally returns an error for testing')",
}
RESOURCES = {
    "test://static-text": f"ryokan://{KERNEL}/files/static.txt",
    "test://static-binary": f"ryokan://{KERNEL}/files/pixel.png",
    "test://template/123/data": f"ryokan://{KERNEL}/files/template/123/data",
}




def translate(message):
    """Puts ryokan's names into a request of the suite."""
    method, params = getattr(message, "method", None), getattr(message, "params", None)
    if method == "tools/call" and params["name"] in TOOLS:
        message.params = {**params, "name": "execute", "arguments": {"kernel": KERNEL, "code": TOOLS[params["name"]]}}
    elif method == "resources/read" and params["uri"] in RESOURCES:
        message.params = {**params, "uri": RESOURCES[params["uri"]]}


class Bridge:
    """An HTTP endpoint; each session is a server of its own on standard streams."""

    def __init__(self, server, tasks):
        self.server, self.tasks, self.sessions = server, tasks, {}

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        names = [value.decode() for name, value in scope["headers"] if name == b"mcp-session-id"]
        session = self.sessions.get(names[0]) if names else await self.tasks.start(self.serve)
        if session is None:
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body"})
        else:
            await session.handle_request(scope, receive, send)

    async def serve(self, *, task_status):
        # Only this host may ask, as for every server of this transport.
        loopback = [f"{host}:*" for host in ("127.0.0.1", "localhost")]
        security = TransportSecuritySettings(allowed_hosts=loopback, allowed_origins=[f"http://{one}" for one in loopback])
        session = StreamableHTTPServerTransport(uuid.uuid4().hex, security_settings=security)
        self.sessions[session.mcp_session_id] = session
        async with stdio_client(self.server) as inner, session.connect() as outer, anyio.create_task_group() as pumps:
            pumps.start_soon(self.pump, inner[0], outer[1], lambda message: None)
            pumps.start_soon(self.pump, outer[0], inner[1], translate)
            task_status.started(session)

    async def pump(self, source, target, change):
        async for message in source:
            if isinstance(message, Exception):
                raise message
            change(message.message)
            await target.send(SessionMessage(message.message))


async def prepare(server):
    """A kernel with what the suite's fixtures contain."""
    async with Client(server, read_timeout_seconds=180) as client:
        for tool, arguments in [
            ("create_kernel", {"name": KERNEL, "engine": "python"}),
            ("write_file", {"kernel": KERNEL, "path": "static.txt", "content": "the content of a static text"}),
            ("write_file", {"kernel": KERNEL, "path": "template/123/data", "content": '{"id": "123"}'}),
            ("execute", {"kernel": KERNEL, "code": f"open('pixel.png', 'wb').write({PIXEL!r})"}),
        ]:
            result = await client.call_tool(tool, arguments)
            assert not result.is_error, result


async def run_suite(installed, port):
    suite = [f"{installed}/.bin/node", f"{installed}/@modelcontextprotocol/conformance/dist/index.js", "server"]
    suite += ["--url", f"http://127.0.0.1:{port}/mcp", "--suite", "all"]
    suite += ["--expected-failures", str(Path(__file__).with_name("conformance.yml"))]
    return await anyio.run_process(suite, check=False, stderr=subprocess.STDOUT)


async def main(program, installed):
    server = StdioServerParameters(command=program, args=["mcp", "serve"], env=dict(os.environ))
    await prepare(server)
    async with anyio.create_task_group() as tasks:
        config = uvicorn.Config(Bridge(server, tasks), port=0, log_level="error", lifespan="off")
        config.timeout_graceful_shutdown = 1
        http = uvicorn.Server(config)
        async with anyio.create_task_group() as serving:
            serving.start_soon(http.serve)
            while not http.started:
                await anyio.sleep(0.01)
            ran = await run_suite(installed, http.servers[0].sockets[0].getsockname()[1])
            http.should_exit = True
        # Ends every session.
        tasks.cancel_scope.cancel()
    said = ran.stdout.decode()
    print(said[said.find("=== SUMMARY") :] if "=== SUMMARY" in said else said)
    return ran.returncode


sys.exit(anyio.run(main, *sys.argv[1:]))
