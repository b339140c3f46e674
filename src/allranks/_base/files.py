"""Files that a user has named: a path may be a device, a pipe, or a link, and what it leads to may have no end."""

from __future__ import annotations

import errno
import os
from pathlib import Path

__all__ = ["LIMIT", "plain_file", "read_bytes", "read_text"]

LIMIT = 16 << 20
"""Bytes of a file with settings, hosts or addresses, at most: such a file is far smaller, and /dev/zero has no end."""


def plain_file(path: str | os.PathLike[str]) -> Path:
    """Follow links to the file that a new one may take the place of.

    Raises:
        OSError: something is there that is no plain file. Root would replace even /dev/null.
    """
    final = os.path.realpath(path)
    if os.path.lexists(final) and not os.path.isfile(final):
        raise OSError(errno.EINVAL, "it is not a plain file", os.fspath(path))
    return Path(final)


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Read a small file, which may be a pipe (``<(command)`` of a shell).

    Raises:
        OSError: it cannot be read, or is longer than ``LIMIT``.
    """
    with open(path, "rb") as file:
        content = file.read(LIMIT + 1)
    if len(content) > LIMIT:
        raise OSError(errno.EFBIG, f"it is longer than {LIMIT >> 20} MiB", os.fspath(path))
    return content


def read_text(path: str | os.PathLike[str]) -> str:
    """As ``read_bytes``, of UTF-8.

    Raises:
        OSError: see ``read_bytes``.
        UnicodeDecodeError: it is not UTF-8.
    """
    return read_bytes(path).decode()
