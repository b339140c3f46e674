"""Commands that run on a controlling terminal, with simulated keys and captured output."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping

from support.launcher_process import Launcher
from support.marked import wait_for

_UNSEEN = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\r")


def on_terminal(code: str, environ: Mapping[str, str]) -> str:
    """Return the output of a program on a terminal of 80 columns."""
    pid, fd = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, "-c", code], {**os.environ, **environ})
    seen = b""
    while True:
        try:
            part = os.read(fd, 1 << 16)
        except OSError:  # EIO: the program has exited
            break
        seen += part
    os.close(fd)
    assert os.waitpid(pid, 0)[1] == 0, seen.decode()
    return seen.decode()


class Console:
    """A command in a new session whose controlling terminal is this console.

    Args:
        launcher: registers the process, so that the test checks for remaining processes.
        words: the command.
        environ: additional variables.
    """

    def __init__(self, launcher: Launcher, *words: str, environ: dict[str, str] | None = None) -> None:
        self._fd, slave = pty.openpty()
        self._unread = b""
        self.text = b""
        self.resize(24, 80)
        self.process = subprocess.Popen(
            words,
            cwd=launcher.folder,
            env=launcher.environ() | {"TERM": "xterm", "PS1": "$ ", "NO_COLOR": "1"} | (environ or {}),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_control,
        )
        launcher.started.append(self.process)
        os.close(slave)

    def resize(self, rows: int, columns: int) -> None:
        """Change the size of the window."""
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: str) -> None:
        """Send keys."""
        os.write(self._fd, keys.encode())

    def expect(self, *pattern: str) -> str:
        """Read until each of the patterns has matched, in this order; return the last match."""
        found = ""
        for each in pattern:
            wanted = re.compile(each.encode(), re.MULTILINE)
            while (match := wanted.search(self._unread)) is None:
                assert self._read(), f"{each!r} is missing in {self.text.decode()!r}"
            self._unread = self._unread[match.end() :]
            found = match.group().decode()
        return found

    def wait_for_foreground(self) -> None:
        """Wait until the shell has given the terminal to a job. Before that, the shell receives the keys."""
        wait_for(lambda: os.tcgetpgrp(self._fd) != self.process.pid)

    def end(self) -> tuple[int, str]:
        """Read until the terminal is closed. Return the exit code and the output without colors and returns."""
        while self._read():
            pass
        os.close(self._fd)
        return self.process.wait(20), self.text.decode()

    def _read(self) -> bytes:
        try:
            data = os.read(self._fd, 4096)
        except OSError:  # EIO: all processes have closed the terminal
            data = b""
        self.text = _UNSEEN.sub(b"", self.text + data)
        self._unread = _UNSEEN.sub(b"", self._unread + data)
        return data


def _control() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
