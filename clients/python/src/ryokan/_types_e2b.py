"""Types under the names of E2B's SDK."""

from __future__ import annotations

from collections.abc import Mapping
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


@dataclass(frozen=True)
class Logs:
    """What code wrote, each stream in one piece or none."""

    stdout: list[str]
    stderr: list[str]


class ErrorText(str):
    """Why an execution did not end well, with the parts that E2B's error has.

    Empty, and so false, if it ended well, or if its engine said nothing.
    """

    traceback: str
    """The traceback; without one the text itself."""

    def __new__(cls, text: str, stderr: str = "") -> ErrorText:
        error = super().__new__(cls, text)
        begin = stderr.rfind("Traceback (most recent call last):")
        error.traceback = stderr[begin:].rstrip("\n") if begin >= 0 else text
        return error

    @property
    def name(self) -> str:
        """The exception's name; empty: there is none."""
        name = self.partition(": ")[0]
        return name if name and all(part.isidentifier() for part in name.split(".")) else ""

    @property
    def value(self) -> str:
        """What the exception says; without a name the whole text."""
        return self.removeprefix(self.name).removeprefix(": ")


_FORMATS = {
    "text": "text/plain",
    "html": "text/html",
    "markdown": "text/markdown",
    "svg": "image/svg+xml",
    "png": "image/png",
    "jpeg": "image/jpeg",
    "pdf": "application/pdf",
    "latex": "text/latex",
    "json": "application/json",
    "javascript": "application/javascript",
}


@dataclass(frozen=True)
class ShownResult:
    """One form of something that code showed, or the value of its last expression."""

    forms: Mapping[str, str]
    """By media type; those of images and PDF in base64."""
    is_main_result: bool

    def formats(self) -> list[str]:
        """The names of its forms, such as `png`; others are in `forms`."""
        return [name for name, mime in _FORMATS.items() if mime in self.forms]

    @property
    def text(self) -> str | None:
        """As plain text."""
        return self.forms.get(_FORMATS["text"])

    @property
    def html(self) -> str | None:
        """As HTML."""
        return self.forms.get(_FORMATS["html"])

    @property
    def markdown(self) -> str | None:
        """As Markdown."""
        return self.forms.get(_FORMATS["markdown"])

    @property
    def svg(self) -> str | None:
        """As SVG."""
        return self.forms.get(_FORMATS["svg"])

    @property
    def png(self) -> str | None:
        """As PNG, in base64."""
        return self.forms.get(_FORMATS["png"])

    @property
    def jpeg(self) -> str | None:
        """As JPEG, in base64."""
        return self.forms.get(_FORMATS["jpeg"])

    @property
    def pdf(self) -> str | None:
        """As PDF, in base64."""
        return self.forms.get(_FORMATS["pdf"])

    @property
    def latex(self) -> str | None:
        """As LaTeX."""
        return self.forms.get(_FORMATS["latex"])

    @property
    def json(self) -> str | None:
        """As JSON, not decoded."""
        return self.forms.get(_FORMATS["json"])

    @property
    def javascript(self) -> str | None:
        """As JavaScript."""
        return self.forms.get(_FORMATS["javascript"])
