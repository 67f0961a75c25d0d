"""The asynchronous face: the names of `ryokan` as coroutines, for asyncio.

Use each object in the event loop in which it was made.
"""

from ._commands import CommandHandle, Commands, Pty
from ._events import Events
from ._execution import DataTaker, Taker
from ._files import Files
from ._forward import Forward
from ._groups import Groups
from ._host import CLIENT, Host
from ._kernel import Kernel, Lease, PublishedKernel
from ._moves import ProgressTaker
from ._sandbox import Sandbox
from ._watch import Watch
from ._watch_dir import EventTaker, ExitTaker, WatchHandle

__all__ = [
    "CLIENT",
    "CommandHandle",
    "Commands",
    "DataTaker",
    "EventTaker",
    "Events",
    "ExitTaker",
    "Files",
    "Forward",
    "Groups",
    "Host",
    "Kernel",
    "Lease",
    "ProgressTaker",
    "Pty",
    "PublishedKernel",
    "Sandbox",
    "Taker",
    "Watch",
    "WatchHandle",
]
