"""Client for ryokan: durable, sandboxed code sessions with checkpoints, forks and undo.

`Host` and `Kernel` are synchronous and work in any thread; `ryokan.aio` has the same names as
coroutines. `Sandbox` is a kernel under the names of E2B's SDK.
"""

from . import aio, errors, types
from ._sync import (
    CommandHandle,
    Commands,
    Events,
    Files,
    Forward,
    Groups,
    Host,
    Kernel,
    Lease,
    Pty,
    PublishedKernel,
    Sandbox,
    Watch,
    WatchHandle,
)
from ._version import __version__
from .errors import CommandExitException, ExecutionError, RyokanError
from .types import FilesystemEvent, FilesystemEventType, Mount, PtySize, Result

__all__ = [
    "CommandExitException",
    "CommandHandle",
    "Commands",
    "Events",
    "ExecutionError",
    "Files",
    "FilesystemEvent",
    "FilesystemEventType",
    "Forward",
    "Groups",
    "Host",
    "Kernel",
    "Lease",
    "Mount",
    "Pty",
    "PtySize",
    "PublishedKernel",
    "Result",
    "RyokanError",
    "Sandbox",
    "Watch",
    "WatchHandle",
    "__version__",
    "aio",
    "errors",
    "types",
]
