"""A daemon of its own for the tests, in temporary directories."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

from ryokan import Host

XDG = {
    "XDG_RUNTIME_DIR": "run",
    "XDG_CONFIG_HOME": "config",
    "XDG_DATA_HOME": "data",
    "XDG_STATE_HOME": "state",
    "HOME": "home",
}


class DaemonTest(unittest.TestCase):
    """Every test class has its own directories; `daemon_starts` also a running daemon."""

    daemon_starts = True

    @classmethod
    def setUpClass(cls):
        # Short, for the paths of sockets; open, for workers of another user.
        cls.root = Path(tempfile.mkdtemp(prefix="ryk", dir="/tmp"))
        cls.addClassCleanup(shutil.rmtree, cls.root, ignore_errors=True)
        cls.root.chmod(0o755)
        cls.saved = dict(os.environ)
        cls.addClassCleanup(cls._reset)
        for variable, name in XDG.items():
            directory = cls.root / name
            directory.mkdir(mode=0o700)
            os.environ[variable] = str(directory)
        config = cls.root / "config/ryokan/config.toml"
        config.parent.mkdir()
        # A daemon that is root maps its own files only where the configuration says so.
        mapped = f'[sandbox]\nmap_owner = ["{cls.root}"]\n'
        config.write_text(f"[pool]\npool_size = 0\nmin_idle = 0\n{mapped}")
        cls.addClassCleanup(cls.end_daemon)
        if cls.daemon_starts:
            Host.connect().close()

    @classmethod
    def _reset(cls):
        os.environ.clear()
        os.environ.update(cls.saved)

    @classmethod
    def socket(cls):
        return cls.root / "run/ryokan/ryokand.sock"

    @classmethod
    def daemon_pids(cls):
        """Daemons of these directories."""
        wanted = f"XDG_RUNTIME_DIR={cls.root}/run".encode()
        pids = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and (entry / "comm").read_text() == "ryokand\n":
                    if wanted in (entry / "environ").read_bytes().split(b"\0"):
                        pids.append(int(entry.name))
            except OSError:
                continue
        return pids

    @classmethod
    def end_daemon(cls, number=signal.SIGTERM):
        pids = cls.daemon_pids()
        for pid in pids:
            os.kill(pid, number)
        deadline = time.monotonic() + 180
        while cls.daemon_pids() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not cls.daemon_pids(), "the daemon did not end"
        return pids


def run_python(code, **environment):
    """Runs code in a new interpreter, with every warning as an error."""
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", code]
    ran = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=180)
    # The development mode logs steps of the event loop that a busy host made slow.
    ran.stderr = re.sub(r"^Executing <.* took [0-9.]+ seconds\n", "", ran.stderr, flags=re.MULTILINE)
    return ran
