"""Kills the ranks' process groups when the launcher itself is killed.

The kernel kills a rank with its launcher (PR_SET_PDEATHSIG), but not the rank's own children: the python inside ``--
bash -c 'python train.py'``, data loader workers, an ``ssh``. Therefore a small process, forked before torch is
imported, holds one end of a pipe. When it reads the end of file, no other process is left to clean up.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

from allranks.launch.ranks.terminal import Terminal

__all__ = ["Guard"]


class Guard:
    """A process that outlives the launcher by a moment.

    Args:
        terminal: the terminal, which the launcher may have lent to a group; the guard then reclaims it.

    Attributes:
        fd: the launcher's end of the pipe; a forked rank must close it, after ``protect``.
        pid: the guard's process.
    """

    def __init__(self, terminal: Terminal | None = None) -> None:
        read_fd, self.fd = os.pipe()
        # Before the fork, so that no signal to all processes stops the guard. SLURM signals each process of a step.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self.fd)
                _watch(read_fd, terminal)
            # The guard is a copy of the launcher and must never continue with its code.
            finally:
                os._exit(0)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(read_fd)

    def protect(self, pid: int) -> None:
        """Add a process group, which must exist when the caller closes ``fd``.

        If the guard itself was killed, the job continues without it, and a line on stderr reports this.
        """
        try:
            os.write(self.fd, b"%d\n" % pid)
        except BrokenPipeError:
            print(
                f"allranks: the launcher's guard (pid {self.pid}) was killed. If the launcher is killed too, processes"
                f" that process {pid} has started may continue.\n  Find them with `allranks doctor`.",
                file=sys.stderr,
                flush=True,
            )

    def forget(self, pid: int) -> None:
        """Remove a process group that no longer exists. Call it before the rank is reaped: the number may be reused."""
        # If the guard was killed, ``protect`` has reported it.
        with contextlib.suppress(BrokenPipeError):
            os.write(self.fd, b"-%d\n" % pid)

    def dismiss(self) -> None:
        """Kill the guard. Call it before the ranks are reaped, because a free pid may be reused."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.fd)


def _watch(read_fd: int, terminal: Terminal | None) -> None:
    if terminal is None:
        os.setsid()
    else:
        os.setpgid(0, 0)  # only a process of the terminal's session may change its foreground group
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2)[terminal is not None :]:  # a reader of the launcher's output must not wait for the guard
        os.dup2(null, fd)
    with open(read_fd, "rb") as pipe:
        # Returns at the end of file: no process holds the write end any more.
        numbers = [int(line) for line in pipe]
    # A number may be protected again after it was forgotten, so the messages count in their order.
    groups: dict[int, None] = {}
    for number in numbers:
        if number > 0:
            groups[number] = None
        else:
            groups.pop(-number, None)
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        if terminal is not None:
            terminal.reclaim(group, restore=True)
