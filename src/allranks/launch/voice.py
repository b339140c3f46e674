"""How the launcher itself speaks: whole lines that begin with the command which was typed, on stderr.

How much is said is the user's choice. What must be said is the cause of a failure, and what became of the job; a remark
is left out with ``-q``; with ``-v`` the launcher tells what it does as it does it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

__all__ = ["Voice"]


def _to_stderr(line: bytes) -> None:
    print(line.decode(errors="replace"), file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Voice:
    """The launcher's voice.

    Attributes:
        name: of the command.
        quiet: leave out what need not be said.
        verbose: tell everything.
        put: takes the lines.
        began: when the command began (``time.monotonic``).
    """

    name: str = "allranks run"
    quiet: bool = False
    verbose: bool = False
    put: Callable[[bytes], object] = field(default=_to_stderr, repr=False, compare=False)
    began: float = field(default_factory=time.monotonic, repr=False, compare=False)

    def through(self, put: Callable[[bytes], object]) -> Voice:
        """The same voice, where something else takes the lines: while ranks write, their screen does."""
        return replace(self, put=put)

    def line(self, text: str) -> str:
        """A line as it is said."""
        return f"{self.name}: {text}"

    def say(self, text: str) -> None:
        """Says what must be said."""
        self.put(self.line(text).encode())

    def remark(self, text: str) -> None:
        """Says what is good to know."""
        if not self.quiet:
            self.say(text)

    def tell(self, text: str) -> None:
        """Says what the launcher does, and how many seconds after the command began."""
        if self.verbose:
            self.say(f"{time.monotonic() - self.began:.2f} s: {text}")
