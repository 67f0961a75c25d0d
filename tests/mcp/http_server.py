"""A small MCP server over streamable HTTP, for tests. Writes its port to the file named by its argument.

Answers calls of `echo` with plain JSON, of `stream` with a stream of events, of `big` with as many bytes as asked for,
of `headers` with the request's headers, of `broken` with status 500. GET is refused: the server has no stream of
its own.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOOLS = ["echo", "stream", "big", "bigstream", "headers", "broken", "slow"]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def reply(self, status, body=b"", kind="application/json", **headers):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.reply(405)

    def do_DELETE(self):
        self.reply(200)

    def do_POST(self):
        if self.path == "/moved":
            return self.reply(307, Location="/mcp")
        if self.path == "/away":
            return self.reply(307, Location=f"http://localhost:{self.server.server_port}/mcp")
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        method, ident, params = message.get("method"), message.get("id"), message.get("params") or {}
        if ident is None:
            return self.reply(202)
        result, session = {}, {}
        if method == "initialize":
            info = {"name": "test", "version": "1"}
            result = {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": info}
            session = {"Mcp_Session_Id": "s1"}
        elif self.headers.get("Mcp-Session-Id") != "s1":
            return self.reply(404)
        elif method == "tools/list":
            result = {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in TOOLS]}
        elif method == "tools/call":
            name, args = params["name"], params.get("arguments") or {}
            if name == "broken":
                return self.reply(500, b"oh no", "text/plain")
            if name == "slow":
                import time

                time.sleep(60)
            value = dict(self.headers) if name == "headers" else args
            text = "x" * int(args["bytes"]) if name.startswith("big") else json.dumps(args)
            result = {"content": [{"type": "text", "text": text}]}
            if not name.startswith("big"):
                result["structuredContent"] = value
        body = json.dumps({"jsonrpc": "2.0", "id": ident, "result": result}).encode()
        if method == "tools/call" and params["name"] in ("stream", "bigstream"):
            note = b'event: message\ndata: {"jsonrpc":"2.0","method":"notifications/message","params":{}}\n\n'
            return self.reply(200, note + b"event: message\ndata: " + body + b"\n\n", "text/event-stream")
        self.reply(200, body, **session)


class Quiet(ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        """A client that disconnects is not reported."""


server = Quiet(("127.0.0.1", 0), Handler)
server.daemon_threads = True
with open(sys.argv[1], "w") as file:
    file.write(f"{server.server_port}\n")
server.serve_forever()
