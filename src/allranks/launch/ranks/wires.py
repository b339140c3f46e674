"""The pipes and terminals between a rank and its agent.

One rank of a job may have the launcher's own stdin. A job's only rank may write to the launcher's terminal itself;
then full-screen programs work. Any other rank gets a terminal of its own where the user's terminal is what it finally
writes to, so that programs that ask ``isatty`` draw their progress bars; else a pipe. One channel carries stdout and
stderr together where the launcher's own two are the same file: then lines come in the order in which the rank wrote
them.
"""

from __future__ import annotations

import fcntl
import os
import resource
import struct
import termios
from dataclasses import dataclass

from allranks._base.errors import ConfigError
from allranks.launch.spec.stdio import Stdio

__all__ = ["Wires", "resize", "reserve_descriptors"]

_PER_RANK = 9  # stdout, stderr, status, stacks, pidfd, its connection to the store, up to three log files
_OWN = 64


@dataclass(frozen=True)
class Wires:
    """Both ends of everything between one rank and its agent.

    Attributes:
        out: the rank's stdout.
        err: the rank's stderr; may be the same number.
        status: where the rank writes its failure report.
        stacks: where the rank writes its threads' stacks.
        ears: the agent's ends, stream number -> descriptor.
        status_ear: the agent's end of ``status``.
        stacks_ear: the agent's end of ``stacks``.
        terminals: those of ``ears`` that are terminals.
    """

    out: int
    err: int
    status: int
    stacks: int
    ears: dict[int, int]
    status_ear: int
    stacks_ear: int
    terminals: tuple[int, ...]

    @classmethod
    def open(cls, stdio: Stdio) -> Wires:
        """Opens all. No end survives an exec."""
        status_ear, status = os.pipe()
        stacks_ear, stacks = os.pipe()
        ears: dict[int, int] = {}
        terminals: tuple[int, ...] = ()
        if stdio.out_direct:
            out = os.dup(1)
        else:
            ears[1], out = _channel(stdio.out_tty, stdio)
            terminals += (ears[1],) if stdio.out_tty else ()
        err = out
        if stdio.err_direct:
            err = os.dup(2)
        elif not stdio.merged:
            ears[2], err = _channel(stdio.err_tty, stdio)
            terminals += (ears[2],) if stdio.err_tty else ()
        for ear in (*ears.values(), status_ear, stacks_ear):
            os.set_blocking(ear, False)
        return cls(out, err, status, stacks, ears, status_ear, stacks_ear, terminals)

    def close_far(self) -> None:
        """The agent closes the rank's ends."""
        for fd in {self.out, self.err, self.status, self.stacks}:
            os.close(fd)

    def near(self) -> tuple[int, ...]:
        """The agent's ends."""
        return (*self.ears.values(), self.status_ear, self.stacks_ear)


def _channel(tty: bool, stdio: Stdio) -> tuple[int, int]:
    if not tty:
        return os.pipe()
    ear, mouth = os.openpty()
    attributes = termios.tcgetattr(mouth)
    attributes[1] &= ~termios.OPOST  # the user's own terminal turns \n into \r\n
    termios.tcsetattr(mouth, termios.TCSANOW, attributes)
    resize(ear, stdio.rows, stdio.columns)
    return ear, mouth


def resize(terminal: int, rows: int, columns: int) -> None:
    """Sets a terminal's size."""
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def reserve_descriptors(nproc: int) -> tuple[int, int]:
    """Makes room for the descriptors of ``nproc`` ranks.

    Returns:
        The limits before, for the ranks to go back to.

    Raises:
        ConfigError: the hard limit is too low.
    """
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = nproc * _PER_RANK + _OWN
    soft, hard = before
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ConfigError(f"{nproc} ranks need {needed} open files; the limit is {hard} (ulimit -Hn)")
    if soft != resource.RLIM_INFINITY and needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return before
