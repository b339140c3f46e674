"""Failing system calls of a save, in the process that enters the block, for the files that a condition selects.

``FAILURES`` contains the errors that a disk or a file server can return in each step of saving a checkpoint.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import pytest

from allranks.checkpoint import parts


def fails(error: int, when: Callable[..., bool], real: Callable[..., Any], after: bool = False) -> Callable[..., Any]:
    """Wrap a call so that it fails for some arguments; with ``after``, it fails after it has taken effect."""

    def call(*arguments: Any, **more: Any) -> Any:
        is_due = when(*arguments, **more)
        if is_due and not after:
            raise OSError(error, os.strerror(error))
        result = real(*arguments, **more)
        if is_due:
            raise OSError(error, os.strerror(error))
        return result

    return call


@contextlib.contextmanager
def failing(where: Any, name: str, error: int, when: Callable[..., bool], after: bool = False) -> Iterator[None]:
    """Make a call fail inside the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, fails(error, when, getattr(where, name), after), raising=False)
        yield


@contextlib.contextmanager
def failing_close(error: int, when: Callable[..., bool]) -> Iterator[None]:
    """Make closing of written files fail inside the block.

    A network file system behaves like this if the server detects only then that it has no space.
    """

    class Unclosable(io.FileIO):
        def close(self) -> None:
            if not self.closed:
                super().close()
                raise OSError(error, os.strerror(error))

    real = builtins.open

    def opened(path: Any, mode: str = "r", *arguments: Any, **more: Any) -> Any:
        return Unclosable(path, mode) if when(path, mode) else real(path, mode, *arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "open", opened)
        yield


class Failure(NamedTuple):
    """A failing call.

    Attributes:
        error: the errno value.
        is_of_the_first: only rank 0 makes this call if all ranks share one folder.
        inject: context manager in which the call fails.
    """

    error: int
    is_of_the_first: bool
    inject: Callable[[], AbstractContextManager[None]]


def _is_part(path: Any, *_: Any, **__: Any) -> bool:
    return str(path).endswith(".safetensors")


def _is_manifest(path: Any, *_: Any, **__: Any) -> bool:
    return str(path).endswith("manifest.json")


def _always(*_: Any, **__: Any) -> bool:
    return True


def _call(
    where: Any, name: str, error: int, when: Callable[..., bool] = _always, is_of_the_first: bool = False
) -> Failure:
    return Failure(error, is_of_the_first, lambda: failing(where, name, error, when))


FAILURES = {
    "open of a part": _call(builtins, "open", errno.EIO, _is_part),
    "open of the manifest": _call(builtins, "open", errno.EACCES, _is_manifest, True),
    "quota": _call(parts, "_reserve", errno.EDQUOT),
    "write": _call(os, "write", errno.ENOSPC),
    "fsync": _call(os, "fsync", errno.EIO),
    "close of a part": Failure(errno.EDQUOT, False, lambda: failing_close(errno.EDQUOT, _is_part)),
    "close of the manifest": Failure(errno.EIO, True, lambda: failing_close(errno.EIO, _is_manifest)),
    "scandir": _call(os, "scandir", errno.EIO, _always, True),
    "rename": _call(os, "rename", errno.EPERM, _always, True),
}
