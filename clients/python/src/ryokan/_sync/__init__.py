"""The synchronous face: the names of `ryokan.aio`, for any thread.

Callbacks are called in the thread that called `run_code` or `wait`.
"""

from .commands import CommandHandle, Commands, Pty
from .events import Events
from .files import Files
from .forward import Forward
from .groups import Groups
from .host import Host
from .kernel import Kernel, Lease, PublishedKernel
from .sandbox import Sandbox
from .watch import Watch, WatchHandle

__all__ = [
    "CommandHandle",
    "Commands",
    "Events",
    "Files",
    "Forward",
    "Groups",
    "Host",
    "Kernel",
    "Lease",
    "Pty",
    "PublishedKernel",
    "Sandbox",
    "Watch",
    "WatchHandle",
]
