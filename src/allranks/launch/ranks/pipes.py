"""The pipes and terminals between a rank and its agent.

One rank of a job may have the launcher's own stdin. A job's only rank may write to the launcher's terminal itself, so
that full-screen programs work. Any other rank gets its own terminal if its output goes to the user's terminal: programs
that check ``isatty`` then draw their progress bars. Else it gets a pipe. If the launcher's stdout and stderr are the
same file, one channel carries both: the lines then arrive in the order in which the rank wrote them.
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

__all__ = ["Pipes", "resize", "reserve_descriptors"]

# Descriptors of a rank: stdout, stderr, status, stacks, pidfd, its record of calls, its connection to the store, and up
# to three log files.
_PER_RANK = 10
_OWN = 64  # descriptors of this process that do not depend on the number of ranks


@dataclass(frozen=True)
class Pipes:
    """Both ends of all channels between one rank and its agent.

    Attributes:
        out: the rank's stdout.
        err: the rank's stderr; may be the same number.
        status: the descriptor for the rank's failure report.
        stacks: the descriptor for the stacks of the rank's threads.
        read_fds: the agent's ends, stream number -> descriptor.
        status_read_fd: the agent's end of ``status``.
        stacks_read_fd: the agent's end of ``stacks``.
        terminals: the descriptors in ``read_fds`` that are terminals.
    """

    out: int
    err: int
    status: int
    stacks: int
    read_fds: dict[int, int]
    status_read_fd: int
    stacks_read_fd: int
    terminals: tuple[int, ...]

    @classmethod
    def open(cls, stdio: Stdio) -> Pipes:
        """Open all channels. No end survives an exec."""
        status_read_fd, status = os.pipe()
        stacks_read_fd, stacks = os.pipe()
        read_fds: dict[int, int] = {}
        terminals: tuple[int, ...] = ()
        if stdio.out_direct:
            out = os.dup(1)
        else:
            read_fds[1], out = _channel(stdio.out_tty, stdio)
            terminals += (read_fds[1],) if stdio.out_tty else ()
        err = out
        if stdio.err_direct:
            err = os.dup(2)
        elif not stdio.merged:
            read_fds[2], err = _channel(stdio.err_tty, stdio)
            terminals += (read_fds[2],) if stdio.err_tty else ()
        for read_fd in (*read_fds.values(), status_read_fd, stacks_read_fd):
            # The agent reads until a pipe is empty, for example after an exit, and must not block then.
            os.set_blocking(read_fd, False)
        return cls(out, err, status, stacks, read_fds, status_read_fd, stacks_read_fd, terminals)

    def close_rank_ends(self) -> None:
        """Close the rank's ends, in the agent."""
        for fd in {self.out, self.err, self.status, self.stacks}:
            os.close(fd)

    def own_fds(self) -> tuple[int, ...]:
        """Return the agent's ends."""
        return (*self.read_fds.values(), self.status_read_fd, self.stacks_read_fd)


def _channel(tty: bool, stdio: Stdio) -> tuple[int, int]:
    if not tty:
        return os.pipe()
    read_fd, write_fd = os.openpty()
    attributes = termios.tcgetattr(write_fd)
    attributes[1] &= ~termios.OPOST  # the user's own terminal turns \n into \r\n
    termios.tcsetattr(write_fd, termios.TCSANOW, attributes)
    resize(read_fd, stdio.rows, stdio.columns)
    return read_fd, write_fd


def resize(terminal: int, rows: int, columns: int) -> None:
    """Set the size of a terminal."""
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def reserve_descriptors(nproc: int) -> tuple[int, int]:
    """Raise the limit on open files for the descriptors of ``nproc`` ranks.

    Returns:
        The previous limits, which the ranks restore.

    Raises:
        ConfigError: the hard limit is too low.
    """
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = nproc * _PER_RANK + _OWN
    soft, hard = before
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ConfigError(
            f"{nproc} ranks need {needed} open files, but the limit is {hard} (ulimit -Hn).\n"
            "  Raise the hard limit, or start fewer ranks."
        )
    if soft != resource.RLIM_INFINITY and needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return before
