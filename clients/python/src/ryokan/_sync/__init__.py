"""The synchronous face: the names of `ryokan.aio`, for any thread.

Callbacks are called in the thread that called `run_code` or `wait`.
"""

from .commands import CommandHandle, Commands, Pty
from .events import Events
from .files import Files
from .forward import Forward
from .host import Host
from .kernel import Kernel, PublishedKernel
from .sandbox import Sandbox

__all__ = [
    "CommandHandle",
    "Commands",
    "Events",
    "Files",
    "Forward",
    "Host",
    "Kernel",
    "Pty",
    "PublishedKernel",
    "Sandbox",
]
