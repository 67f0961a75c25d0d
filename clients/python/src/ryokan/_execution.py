"""Executions: their requests, their output and their results."""

from __future__ import annotations

import codecs
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from . import _connection, _wire, types
from ._connection import Capability, Connection
from .errors import AFTER_A_LOSS, InvalidArgumentError, RyokanError, UnavailableError

Taker = Callable[[str], "Awaitable[None] | None"]
"""Receives pieces of output; a coroutine function is awaited, and slows the code."""
DataTaker = Callable[[bytes], "Awaitable[None] | None"]
"""The same for bytes, of a terminal."""

P = TypeVar("P")


class Following:
    """The result of an execution and, on the way, its output."""

    def __init__(self, connection: Connection, execution: Capability, output: Output | None) -> None:
        self._connection, self._output = connection, output
        self._result = connection.send(execution, "result")
        if output is not None:
            sink = _connection.Output(output.take)
            self._released = sink.released
            self._delivered = connection.send(execution, "output", output.offset, sink)

    async def result(self) -> types.Result:
        output = self._output
        if output is not None:
            try:
                await self._connection.answer(self._delivered, None)
                await self._connection.released(self._released)
            except RyokanError:
                # The exception of a callback ends the delivery.
                if output.error is None:
                    raise
            if output.error is not None:
                raise output.error
            if not output.ended:
                raise UnavailableError("not all output arrived", AFTER_A_LOSS)
            await output.end()
        answer = await self._connection.answer(self._result, None)
        return _wire.result(answer.result, output.displays if output is not None else [])


class Output:
    """Distributes output events: text to callbacks, displays to a list."""

    def __init__(
        self,
        on_stdout: Taker | None,
        on_stderr: Taker | None,
        on_data: DataTaker | None = None,
        offset: int = 0,
    ) -> None:
        self.takers = {"stdout": on_stdout, "stderr": on_stderr}
        decoder = codecs.getincrementaldecoder("utf-8")
        self.decoders = {name: decoder("replace") for name in self.takers}
        self.on_data, self.offset = on_data, offset
        self.displays: list[types.Display] = []
        self.ended = False
        self.error: BaseException | None = None

    async def take(self, event: Any) -> None:
        kind = event.which()
        if kind == "display":
            self.displays.append(types.Display(event.display.mime, bytes(event.display.data)))
        elif kind == "exitCode":
            self.ended = True
        elif kind == "truncated":
            self.offset += event.truncated
        elif kind in self.takers:
            data = bytes(getattr(event, kind))
            if self.on_data is not None and self.error is None:
                await self._call(self.on_data, data)
            await self._give(kind, data, False)
            self.offset += len(data)

    async def end(self) -> None:
        """Passes on an incomplete character at the end."""
        for kind in self.takers:
            await self._give(kind, b"", True)

    async def _give(self, kind: str, data: bytes, end: bool) -> None:
        taker = self.takers[kind]
        if taker is None or self.error is not None:
            return
        text = self.decoders[kind].decode(data, end)
        if text:
            await self._call(taker, text)

    async def _call(self, taker: Callable[[P], Awaitable[None] | None], piece: P) -> None:
        try:
            taken = taker(piece)
            if taken is not None:
                await taken
        except BaseException as error:
            self.error = error
            raise


def request(
    code: str,
    timeout: float | None,
    stdin: str | bytes,
    env: Mapping[str, str] | None,
    output_limit: int,
    key: str,
    expected_version: int,
) -> dict[str, Any]:
    if not isinstance(code, str):
        raise InvalidArgumentError(f"code is a str, not {type(code).__name__}")
    return {
        "code": code,
        "stdin": stdin.encode() if isinstance(stdin, str) else bytes(stdin),
        "env": _wire.pairs(env or {}),
        "timeoutMs": _wire.milliseconds(timeout, "timeout"),
        "outputLimitBytes": output_limit,
        "key": key,
        "expectedVersion": expected_version,
    }
