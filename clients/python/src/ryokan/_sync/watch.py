"""What happens to files of a directory, as an iterator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import aio, types
from .._portal import Portal

if TYPE_CHECKING:
    from typing_extensions import Self


class Watch:
    """What happens to files of a directory. An iterator that `close` or leaving `with` ends.

    It begins with `with`, or with the first event that is asked for; nothing is missed after that.
    An event may come twice. `overflow`: events are missing, so list the directory again. `ended`: the
    last event; the directory was removed or replaced, has more in it than is watched, or its virtual
    machine starts or ends.
    """

    def __init__(self, watch: aio.Watch, runner: Portal) -> None:
        self._watch, self._portal = watch, runner

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> types.FileEvent:
        event = self._portal.run(self._watch._next())
        if event is None:
            raise StopIteration
        return event

    def __enter__(self) -> Self:
        self._portal.run(self._watch._begin())
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the watch, also from another thread while an event is awaited."""
        self._portal.run(self._watch.close())


class WatchHandle:
    """A watch in the background, until `stop` or the end of the connection."""

    def __init__(self, handle: aio.WatchHandle, runner: Portal) -> None:
        self._handle, self._portal = handle, runner

    def get_new_events(self) -> list[types.FilesystemEvent]:
        """The events since the last call.

        Raises:
            ConflictError: the watch has ended; reason `overflow` if events are missing, or `ended` if the
                directory was removed or replaced.
        """
        return self._portal.run(self._handle.get_new_events())

    def stop(self) -> None:
        """Ends the watch."""
        self._portal.run(self._handle.stop())
