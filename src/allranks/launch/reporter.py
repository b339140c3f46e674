"""The launcher's own lines: each begins with the name of the command, and goes to stderr.

The user selects how much is printed. The cause of a failure and the outcome of the job are always printed. ``-q`` omits
remarks. With ``-v``, the launcher prints each step with its time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

__all__ = ["Reporter"]


def _to_stderr(line: bytes) -> None:
    print(line.decode(errors="replace"), file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Reporter:
    """Prints the launcher's own lines.

    Attributes:
        name: name of the command.
        quiet: omit remarks.
        verbose: print details.
        put: receives the lines.
        began: start time of the command (``time.monotonic``).
    """

    name: str = "allranks run"
    quiet: bool = False
    verbose: bool = False
    put: Callable[[bytes], object] = field(default=_to_stderr, repr=False, compare=False)
    began: float = field(default_factory=time.monotonic, repr=False, compare=False)

    def through(self, put: Callable[[bytes], object]) -> Reporter:
        """Return a copy with another destination: while ranks write, their screen receives the lines."""
        return replace(self, put=put)

    def line(self, text: str) -> str:
        """Return a line as it is printed."""
        return f"{self.name}: {text}"

    def report(self, text: str) -> None:
        """Print an essential line."""
        self.put(self.line(text).encode())

    def remark(self, text: str) -> None:
        """Print a useful line, unless -q was given."""
        if not self.quiet:
            self.report(text)

    def detail(self, text: str) -> None:
        """Print a step of the launcher, with the seconds since the command began; only with -v."""
        if self.verbose:
            self.report(f"{time.monotonic() - self.began:.2f} s: {text}")
