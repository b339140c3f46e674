"""Files that a user has named. A path may be a device, a pipe, or a link, and the data may be endless."""

from __future__ import annotations

import errno
import os
from pathlib import Path

__all__ = ["LIMIT", "plain_file", "read_bytes", "read_text"]

LIMIT = 16 << 20
"""Limit in bytes of a file with settings, hosts or addresses. Real files are far smaller; /dev/zero is endless."""


def plain_file(path: str | os.PathLike[str]) -> Path:
    """Follow links, and return the path of the file that a new file may replace.

    Raises:
        OSError: The path exists but is not a plain file. Without the check, root would replace even /dev/null.
    """
    final = os.path.realpath(path)
    if os.path.lexists(final) and not os.path.isfile(final):
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
    return Path(final)


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Read a small file, which may be a pipe (``<(command)`` of a shell).

    Raises:
        OSError: The file cannot be read, or is longer than ``LIMIT``.
    """
    with open(path, "rb") as file:
        # One byte more than the limit detects a longer file. The size of a pipe is unknown.
        content = file.read(LIMIT + 1)
    if len(content) > LIMIT:
        raise OSError(errno.EFBIG, f"it is longer than {LIMIT >> 20} MiB", os.fspath(path))
    return content


def read_text(path: str | os.PathLike[str]) -> str:
    """Read a small UTF-8 file. See ``read_bytes``.

    Raises:
        OSError: See ``read_bytes``.
        UnicodeDecodeError: The content is not UTF-8.
    """
    return read_bytes(path).decode()
