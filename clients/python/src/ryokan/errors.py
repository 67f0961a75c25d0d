"""Errors: one class for each `ErrorCode` of the interface, and one for failed code."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .types import ErrorText, Result


class RyokanError(Exception):
    """A refused or failed request.

    `message` says what happened to what and why, `hint` what to do next (may be empty), `reason`
    names the rule that refused the request (may be empty), `code` is the name of the `ErrorCode`.
    """

    code = "internal"

    def __init__(self, message: str, hint: str = "", reason: str = "") -> None:
        super().__init__(message, hint, reason)
        self.message = message
        self.hint = hint
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.message} (hint: {self.hint})" if self.hint else self.message


class InvalidArgumentError(RyokanError):
    """The request is invalid in every state."""

    code = "invalidArgument"


class NotFoundError(RyokanError):
    """The named thing does not exist, or is not visible to the client."""

    code = "notFound"


class AlreadyExistsError(RyokanError):
    """The name or key is in use."""

    code = "alreadyExists"


class ConflictError(RyokanError):
    """The kernel's version differs from the expected one, or its state does not allow the request."""

    code = "conflict"


class RefusedError(RyokanError):
    """A right, a policy or a rule forbids the request."""

    code = "refused"


class BusyError(RyokanError):
    """A limit is reached; the same call may succeed later."""

    code = "busy"


class UnsupportedError(RyokanError):
    """This host lacks a required feature; the hint names it."""

    code = "unsupported"


class DepartedError(RyokanError):
    """The kernel moved to another host."""

    code = "departed"


class LostError(RyokanError):
    """The worker ended during the call."""

    code = "lost"


class CorruptError(RyokanError):
    """Stored data failed its verification."""

    code = "corrupt"


class DeadlineError(RyokanError):
    """The deadline expired."""

    code = "deadline"


class UnavailableError(RyokanError):
    """The daemon is not there, is stopping, or the connection to it was lost."""

    code = "unavailable"


class InternalError(RyokanError):
    """A fault of ryokan itself."""

    code = "internal"


class ExecutionError(Exception):
    """Code that did not end well; raised by `Result.check`."""

    def __init__(self, result: Result) -> None:
        super().__init__(result)
        self.result = result

    def __str__(self) -> str:
        result = self.result
        lines = (result.error or result.stderr).strip().splitlines()
        detail = f": {lines[-1]}" if lines else ""
        return f"execution {result.execution_id} {result.status} with code {result.exit_code}{detail}"

    @property
    def stdout(self) -> str:
        """Standard output as text."""
        return self.result.stdout

    @property
    def stderr(self) -> str:
        """Standard error as text."""
        return self.result.stderr

    @property
    def exit_code(self) -> int:
        """The program's exit code."""
        return self.result.exit_code

    @property
    def error(self) -> ErrorText:
        """Why it did not end well; may be empty."""
        return self.result.error


CommandExitException = ExecutionError
"""The same, under E2B's name."""


BY_CODE: dict[str, type[RyokanError]] = {
    cls.code: cls
    for cls in (
        InvalidArgumentError,
        NotFoundError,
        AlreadyExistsError,
        ConflictError,
        RefusedError,
        BusyError,
        UnsupportedError,
        DepartedError,
        LostError,
        CorruptError,
        DeadlineError,
        UnavailableError,
        InternalError,
    )
}

AFTER_A_LOSS = "the daemon stopped or restarted; durable kernels continue, ephemeral ones are removed: connect again"


def from_exception(kind: str, text: str) -> RyokanError:
    """The error of a Cap'n Proto exception: its `ryokan:` line, else by its kind."""
    _, found, line = text.partition("ryokan:{")
    if found:
        try:
            fields = json.JSONDecoder().raw_decode("{" + line)[0]
            return made(fields["code"], fields["message"], fields.get("hint", ""), fields.get("reason", ""))
        except (ValueError, KeyError, TypeError):
            pass
    text = text.removeprefix("remote exception: ").strip() or kind.lower()
    if kind == "DISCONNECTED":
        return UnavailableError(f"the connection to ryokand was lost: {text}", AFTER_A_LOSS)
    if kind == "OVERLOADED":
        return BusyError(text)
    if kind == "UNIMPLEMENTED":
        return UnsupportedError(f"the daemon does not know this call: {text}", "update ryokand")
    return InternalError(text)


def made(code: str, message: str, hint: str, reason: str) -> RyokanError:
    """An error with this code."""
    return BY_CODE.get(code, InternalError)(message, hint, reason)
