"""Files that a fork has changed, taken into the kernel from which it was forked: the rules of `ryokan take`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from . import _files, types
from .errors import ConflictError, InvalidArgumentError, NotFoundError, UnsupportedError

if TYPE_CHECKING:
    from ._kernel import Kernel

_NAMED = 5
"""Files that an error names."""
_MODE_BITS = 0o1777


async def take(kernel: Kernel, fork: Kernel, paths: Iterable[_files.Path], force: bool) -> types.Taken:
    origin = (await fork.info()).origin
    if origin.kernel != kernel.id:
        raise InvalidArgumentError(
            f"{fork.name} is not a fork of {kernel.name}", "copy its files with `files.read` and `files.write`"
        )
    try:
        changes = await _files_since(kernel, origin.checkpoint, fork)
    except NotFoundError as error:
        raise NotFoundError(error.message, "its fork point was removed", error.reason) from None
    wanted = [os.fsdecode(path) for path in paths]
    for path in wanted:
        if ".." in PurePosixPath(path).parts:
            raise InvalidArgumentError(f"{path} contains ..", "name files or directories of the workspace without it")
        if not any(_is_beneath(name, path) for change in changes for name in _names(change)):
            await _refuse_unknown(path, kernel, fork)
    changes = [part for change in changes if (part := _selected(change, wanted))]
    # What the kernel has already, as after an earlier take, is neither taken nor a conflict.
    apart = {name for one in await _files_since(kernel, "", fork) if _is_taken(one) for name in _names(one)}
    changes = [change for change in changes if apart.intersection(_names(change))]
    for change in changes:
        if "\N{REPLACEMENT CHARACTER}" in change.name:
            raise UnsupportedError(f"the name of {change.name} is not UTF-8")
    if not changes:
        return types.Taken(None, [])
    if not force:
        await _refuse_changed_here(kernel, origin.checkpoint, changes)
    safety = await kernel.checkpoint(f"before take from {fork.name}")
    skipped = await _apply(kernel.files, fork.files, changes)
    return types.Taken(safety, [change for change in changes if change.name not in skipped], skipped)


async def _files_since(kernel: Kernel, point: str, other: Kernel | None = None) -> list[types.Difference]:
    # The workspace itself is nothing to copy.
    return [one for one in await kernel.diff(point, other=other) if one.area == "file" and one.name != "."]


def _selected(change: types.Difference, wanted: list[str]) -> types.Difference | None:
    """The part of a change that is in the requested files and directories; all of it if none are named."""

    def is_named(name: str) -> bool:
        return not wanted or any(_is_beneath(name, path) for path in wanted)

    if change.change != "renamed":
        return change if is_named(change.name) and _is_taken(change) else None
    before, after = is_named(change.before), is_named(change.name)
    if before and after:
        return change
    if before:
        return types.Difference("file", "removed", change.before, "", "")
    return types.Difference("file", "added", change.name, "", "") if after else None


def _is_beneath(name: str, requested: str) -> bool:
    path = PurePosixPath(requested)
    if path.is_relative_to(_files.WORKSPACE):
        path = path.relative_to(_files.WORKSPACE)
    return bool(requested) and PurePosixPath(name).is_relative_to(path)


async def _refuse_unknown(path: str, *kernels: Kernel) -> None:
    for kernel in kernels:
        try:
            await kernel.files.stat(path, follow=False)
            return
        except NotFoundError:
            continue
    raise NotFoundError(f"neither kernel has {path}", "name files or directories of the workspace")


def _is_taken(change: types.Difference) -> bool:
    """Whether a change is one to take: not of owner, links or time alone."""
    return change.change != "changed" or bool({"content", "kind", "mode"} & {*change.what})


def _names(change: types.Difference) -> Iterator[str]:
    yield change.name
    if change.change == "renamed":
        yield change.before


async def _refuse_changed_here(kernel: Kernel, point: str, changes: list[types.Difference]) -> None:
    here = {name for one in await _files_since(kernel, point) if _is_taken(one) for name in _names(one)}
    both = sorted({name for one in changes for name in _conflicts(one, here)})
    if both:
        more = f" and {len(both) - _NAMED} more" if len(both) > _NAMED else ""
        hint = "name other paths, or take the fork's with `force`"
        raise ConflictError(f"{kernel.name} changed {', '.join(both[:_NAMED])}{more}, too", hint, "changed_here")


def _conflicts(change: types.Difference, here: set[str]) -> set[str]:
    """The paths changed here that a change replaces or removes; with a directory everything in it."""
    if change.change in ("added", "changed") and "kind" not in change.what:
        return here & {change.name}
    return {path for path in here for name in _names(change) if PurePosixPath(path).is_relative_to(name)}


async def _apply(to: _files.Files, source: _files.Files, changes: list[types.Difference]) -> list[str]:
    """Removals first, so that a file can take a directory's place. Returns what is neither file, directory nor link."""
    skipped = []
    for change in changes:
        gone = {"removed": change.name, "renamed": change.before}.get(change.change)
        if change.change == "changed" and "kind" in change.what:
            gone = change.name
        if gone is not None:
            try:
                await to.remove(gone, recursive=True)
            except NotFoundError:
                continue
    directories = []
    for change in changes:
        if change.change == "removed":
            continue
        info = await source.stat(change.name, follow=False)
        if info.kind == "directory":
            await to.make_dir(change.name, mode=info.mode & _MODE_BITS | 0o700)
            directories.append((change.name, info))
        elif info.kind == "symlink":
            target = os.fsencode(info.target)
            await to._call("makeLink", _files.encoded(change.name), target, _attributes(info), True, 0)
        elif info.kind == "file":
            writing = await to._create(change.name, _attributes(info))
            try:
                async for piece in await source.read(change.name, "stream"):
                    await writing.write(piece)
                await writing.finish()
            finally:
                writing.end()
        else:
            skipped.append(change.name)
    # Mode and time last, the inner directories first: each entry changes the time.
    for name, info in reversed(directories):
        await to._call("setAttributes", _files.encoded(name), _attributes(info), 0)
    return skipped


def _attributes(info: types.FileInfo) -> dict[str, Any]:
    return {"mode": info.mode & _MODE_BITS, "setModified": True, "modifiedNs": info.modified_ns}
