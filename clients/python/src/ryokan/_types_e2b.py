"""Types under the names of E2B's SDK."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class FilesystemEventType(str, Enum):
    """What happened to a file."""

    CREATE = "create"
    """Also when it was moved here."""
    WRITE = "write"
    REMOVE = "remove"
    """Also when it was moved away."""
    CHMOD = "chmod"
    """Mode, owner or times changed."""
    RENAME = "rename"
    """Of E2B only: here it is `REMOVE` of the former name and `CREATE` of the new one."""


@dataclass(frozen=True)
class FilesystemEvent:
    """Something that happened to a file of a watched directory."""

    name: str
    """Relative to the watched directory."""
    type: FilesystemEventType
