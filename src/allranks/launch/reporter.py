"""The launcher's own lines: each begins with the command that was typed, and goes to stderr.

The user chooses how much is printed. The cause of a failure and the outcome of the job are always printed. Remarks are
left out with ``-q``. With ``-v`` the launcher prints each step with its time.
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
        name: of the command.
        quiet: leave out remarks.
        verbose: print details.
        put: takes the lines.
        began: when the command began (``time.monotonic``).
    """

    name: str = "allranks run"
    quiet: bool = False
    verbose: bool = False
    put: Callable[[bytes], object] = field(default=_to_stderr, repr=False, compare=False)
    began: float = field(default_factory=time.monotonic, repr=False, compare=False)

    def through(self, put: Callable[[bytes], object]) -> Reporter:
        """The same, with another destination: while ranks write, their screen takes the lines."""
        return replace(self, put=put)

    def line(self, text: str) -> str:
        """A line as it is printed."""
        return f"{self.name}: {text}"

    def report(self, text: str) -> None:
        """Prints what is essential."""
        self.put(self.line(text).encode())

    def remark(self, text: str) -> None:
        """Prints what is useful, unless -q was given."""
        if not self.quiet:
            self.report(text)

    def detail(self, text: str) -> None:
        """Prints a step of the launcher, and how many seconds after the command began; only with -v."""
        if self.verbose:
            self.report(f"{time.monotonic() - self.began:.2f} s: {text}")
