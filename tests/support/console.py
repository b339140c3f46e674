"""A command on a terminal that controls it, as one that a person has typed, and what is read there."""

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
    """What a program writes to a terminal of 80 columns."""
    pid, fd = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, "-c", code], {**os.environ, **environ})
    seen = b""
    while True:
        try:
            part = os.read(fd, 1 << 16)
        except OSError:  # it has ended
            break
        seen += part
    os.close(fd)
    assert os.waitpid(pid, 0)[1] == 0, seen.decode()
    return seen.decode()


class Console:
    """Starts a command in a session of its own, whose terminal is this one.

    Args:
        launcher: where processes are started, and looked for after the test.
        words: the command.
        environ: more variables.
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
        """Changes the window."""
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: str) -> None:
        """Types."""
        os.write(self._fd, keys.encode())

    def expect(self, *pattern: str) -> str:
        """Reads until each of the patterns has come, in this order; returns the last."""
        found = ""
        for each in pattern:
            wanted = re.compile(each.encode(), re.MULTILINE)
            while (match := wanted.search(self._unread)) is None:
                assert self._read(), f"no {each!r} in {self.text.decode()!r}"
            self._unread = self._unread[match.end() :]
            found = match.group().decode()
        return found

    def wait_for_foreground(self) -> None:
        """Waits until the shell has given the terminal to a job. Before that, keys are its own."""
        wait_for(lambda: os.tcgetpgrp(self._fd) != self.process.pid)

    def end(self) -> tuple[int, str]:
        """Reads to the end. Returns the exit code, and all that was shown, without colours and returns."""
        while self._read():
            pass
        os.close(self._fd)
        return self.process.wait(20), self.text.decode()

    def _read(self) -> bytes:
        try:
            data = os.read(self._fd, 4096)
        except OSError:  # EIO: all have closed it
            data = b""
        self.text = _UNSEEN.sub(b"", self.text + data)
        self._unread = _UNSEEN.sub(b"", self._unread + data)
        return data


def _control() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
