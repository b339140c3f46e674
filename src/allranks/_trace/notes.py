"""Lines about the job that a rank has found out, for other processes of its host: `allranks top` shows them.

The process keeps them in a memory file, which processes of the same user find by its name in /proc/PID/fd.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from allranks._base.forks import Descriptor
from allranks._trace.kernel import memory_files

__all__ = ["Notes", "notes_of"]

_NAME = "allranks-notes"
_LARGEST = 1 << 16  # bytes


class Notes:
    """The lines of this process."""

    def __init__(self) -> None:
        self._file: Descriptor | None = None

    def write(self, lines: Sequence[str]) -> None:
        """Replace the lines.

        Raises:
            OSError: The system provides no memory file.
        """
        if self._file is None:
            if not lines:
                return
            self._file = Descriptor.of(lambda: os.memfd_create(_NAME, os.MFD_CLOEXEC))
        data = "\n".join(lines).encode()[:_LARGEST]
        # A reader between the two calls sees old lines after the new ones, once.
        os.pwrite(self._file.fileno(), data, 0)
        os.ftruncate(self._file.fileno(), len(data))


def notes_of(pid: int) -> tuple[str, ...]:
    """Return the lines of a process of this host. Empty if it has none, has exited, or belongs to another user."""
    try:
        for path in memory_files(pid, _NAME):
            with open(path, "rb") as file:
                return tuple(file.read(_LARGEST).decode(errors="replace").splitlines())
    except OSError:
        pass
    return ()
