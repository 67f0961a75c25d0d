"""The official Python client on `ryokan mcp serve`: every way in which that client opens a session."""
import asyncio
import json
import os
import sys

import mcp
from mcp import Client, StdioServerParameters


def text(result):
    return "".join(block.text for block in result.content if block.type == "text")


async def session(mode):
    server = StdioServerParameters(command=sys.argv[1], args=["mcp", "serve"], env=dict(os.environ))
    async with Client(server, mode=mode, read_timeout_seconds=180) as client:
        assert client.server_info.name == "ryokan" and "checkpoint" in client.instructions
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert {"execute", "checkpoint", "restore", "undo", "fork"} <= set(tools)
        assert all(tool.description and tool.input_schema["type"] == "object" for tool in tools.values())
        name = f"k-{mode.replace('.', '-')}"
        made = await client.call_tool("create_kernel", {"name": name, "engine": "python"})
        assert not made.is_error, text(made)
        run = await client.call_tool("execute", {"kernel": name, "code": "x = 6\nx * 7"})
        assert not run.is_error and text(run) == "42\n", run
        failed = await client.call_tool("execute", {"kernel": name, "code": "1 / 0"})
        assert failed.is_error and "ZeroDivisionError" in text(failed)
        # Calls at once are answered each for itself.
        codes = [client.call_tool("execute", {"kernel": name, "code": f"{n} + x"}) for n in range(8)]
        assert [text(result) for result in await asyncio.gather(*codes)] == [f"{n + 6}\n" for n in range(8)]
        resources = (await client.list_resources()).resources
        (journal,) = [resource.uri for resource in resources if name in str(resource.uri)]
        assert "x = 6" in (await client.read_resource(journal)).contents[0].text
        templates = (await client.list_resource_templates()).resource_templates
        assert templates, "files are a template"
        try:
            await client.read_resource("ryokan://nothing/journal")
            raise AssertionError("a resource that is not there")
        except mcp.MCPError as error:
            assert error.message, error
        try:
            await client.call_tool("no_such_tool", {})
            raise AssertionError("a tool that is not there")
        except mcp.MCPError as error:
            assert "no_such_tool" in error.message, error
        return client.protocol_version


async def main():
    versions = {mode: await session(mode) for mode in sys.argv[2:]}
    print(json.dumps(versions))


asyncio.run(main())
