"""Ports of kernels, and figures of the disk, through both faces."""

import asyncio
import contextlib
import os
import socket
import stat
import subprocess
import sys

import ryokan
from ryokan import aio, errors
from ryokan._loopback import peer_uid

from support import DaemonTest

# Echoes each connection until its end, in the background of the kernel.
ECHO = """
import socket, threading
def serve(port, up):
    listener = socket.create_server(("127.0.0.1", port))
    up.set()
    while True:
        peer, _ = listener.accept()
        def echo(peer=peer):
            with peer:
                while data := peer.recv(65536):
                    peer.sendall(data)
        threading.Thread(target=echo, daemon=True).start()
up = threading.Event()
threading.Thread(target=serve, args=(7000, up), daemon=True).start()
assert up.wait(60)
"""

# Connects as another user; prints what comes back.
STRANGER = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
host, port = sys.argv[1].split(":")
with socket.socket() as client:
    client.connect((host, int(port)))
    try:
        client.sendall(b"ping")
        print(client.recv(4))
    except OSError:
        print(b"")
"""


def connect_as(address, uid):
    command = [sys.executable, "-I", "-c", STRANGER, address, str(uid)]
    return subprocess.run(command, capture_output=True, text=True, timeout=180).stdout.strip()


class ForwardTest(DaemonTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.host = ryokan.Host.connect()
        cls.addClassCleanup(cls.host.close)
        cls.kernel = cls.host.create("echo", engine="python")
        cls.kernel.run_code(ECHO).check()

    def test_unix_socket_is_private(self):
        data = os.urandom(1 << 20)
        with self.kernel.forward(7000) as forward:
            path = forward.address
            self.assertEqual(stat.S_IMODE(os.stat(path).st_mode), 0o600)
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(180)
                client.connect(path)
                received = b""
                for at in range(0, len(data), 1 << 16):
                    client.sendall(data[at : at + (1 << 16)])
                    while len(received) < min(at + (1 << 16), len(data)):
                        received += client.recv(1 << 16)
                client.shutdown(socket.SHUT_WR)
                self.assertEqual(client.recv(1), b"", "the end of one direction reaches the other end")
        self.assertEqual(received, data)
        self.assertFalse(os.path.exists(os.path.dirname(path)))

    def test_closed_port_ends_connection(self):
        with self.kernel.forward(7001) as forward, socket.socket(socket.AF_UNIX) as client:
            client.settimeout(180)
            client.connect(forward.address)
            # A reset, or the end: nothing listens there.
            with contextlib.suppress(ConnectionResetError):
                self.assertEqual(client.recv(1), b"")

    def test_wrong_ports_are_refused(self):
        for listen in ["0.0.0.0:0", "localhost:1", "127.0.0.1:x", "/run/x", "unix:/absent/x"]:
            with self.subTest(listen), self.assertRaises(errors.InvalidArgumentError):
                self.kernel.forward(7000, listen=listen)
        with self.assertRaises(errors.InvalidArgumentError):
            self.kernel.forward(0)
        idle = self.host.create("idle", engine="bash")
        with self.assertRaises(errors.ConflictError):
            idle.forward(7000)

    def test_loopback_refuses_other_users(self):
        # Only root can connect as another user.
        uids, wanted = ((0, 65533), ["b'ping'", "b''"]) if os.geteuid() == 0 else ((os.geteuid(),), ["b'ping'"])

        async def use():
            async with aio.Host.connect() as host:
                kernel = await host.get("echo")
                async with kernel.forward(7000, listen="127.0.0.1:0") as forward:
                    return [await asyncio.to_thread(connect_as, forward.address, uid) for uid in uids]

        self.assertEqual(asyncio.run(use()), wanted)
        with self.kernel.forward(7000, listen="127.0.0.1:0") as forward:
            self.assertEqual([connect_as(forward.address, uid) for uid in uids], wanted)
        for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            with socket.socket(family) as listener:
                listener.bind((host, 0))
                listener.listen()
                client = socket.create_connection(listener.getsockname()[:2])
                served, peer = listener.accept()
                ends = served.getsockname(), peer
                self.assertEqual(peer_uid(*ends), os.geteuid())
                client.close()
                self.assertIsNone(peer_uid(*ends), "its program has closed it")
                served.close()

    def test_forward_ends_with_worker(self):
        async def use():
            async with aio.Host.connect() as host:
                kernel = await host.create("short", engine="python", ephemeral=True)
                await kernel.run_code(ECHO)
                async with kernel.forward(7000, listen="127.0.0.1:0") as forward:
                    address, port = forward.address.split(":")
                    reader, writer = await asyncio.open_connection(address, int(port))
                    writer.write(b"ping")
                    self.assertEqual(await reader.readexactly(4), b"ping")
                    await kernel.stop(force=True)
                    await asyncio.wait_for(forward.closed(), 180)
                    writer.close()
                    with self.assertRaises(OSError):
                        await asyncio.open_connection(address, int(port))

        asyncio.run(use())

    def test_disk_usage_adds_up(self):
        kernel = self.host.create("room", engine="bash")
        kernel.files.write("data", os.urandom(1 << 20))
        kernel.checkpoint("one")
        usage = self.host.du()
        self.assertIn("room", [disk.name for disk in usage.kernels])
        self.assertGreater(sum(part.bytes for part in usage.host), 1 << 20)
        (disk,) = self.host.du("room").kernels
        self.assertEqual([(one.name, one.why) for one in disk.each], [("one", "manual")])
        self.assertEqual(sum(part.bytes for part in disk.kept), disk.stored_bytes)
        self.assertEqual(
            sum(part.bytes for part in usage.store), next(part.bytes for part in usage.host if part.what == "objects")
        )
        self.assertGreaterEqual(disk.freed_bytes, 1 << 20)
        with self.assertRaises(errors.NotFoundError):
            self.host.du("absent")
