"""Run programs in processes forked from an interpreter that has imported torch.

The import of torch takes half of the time of many tests that start a program. ``run`` replaces ``subprocess.run`` for
a Python program. The process is forked from an interpreter that has imported torch, and no module of allranks. It then
sets the state of a fresh interpreter: arguments, environment, folder, ``sys.path``, ``__main__``, exit behavior.

There are three differences. /proc/PID shows another command line and environment. The output goes to files, not to
pipes. Variables that the interpreter or torch reads once, at startup, have already been read. Therefore an environment
with different values of such variables gets a fresh interpreter.

Tests of program startup and exit, and of events during the import of torch, use ``subprocess``. With
ALLRANKS_TEST_FRESH=1 all tests do.
"""

from __future__ import annotations

import array
import atexit
import functools
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO, NoReturn

__all__ = ["run"]

_IMPORTED = ("torch", "sympy", "torch._dynamo")  # the last two: for the first optimizer of a process
_READ_AT_START = ("PYTHONHASHSEED", "PYTHONWARNINGS", "OMP_", "MKL_", "KMP_", "TORCH_", "LD_")
_READ_BY_US = ("PYTHONPATH", "PYTHONUNBUFFERED")
_LARGEST = 1 << 17


def run(
    command: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a Python program until it exits, and capture its output.

    Args:
        command: ``sys.executable``, and a script, or ``-m`` and a module, or ``-c`` and a text, and arguments.
        cwd: its folder.
        env: its environment.
        timeout: in seconds.
        check: require exit code 0.

    Raises:
        subprocess.TimeoutExpired: the program exceeded the timeout and was killed.
        subprocess.CalledProcessError: the exit code is not 0, and ``check`` is true.
    """
    words, environ = list(map(str, command)), dict(os.environ if env is None else env)
    if "ALLRANKS_TEST_FRESH" in os.environ or _read_at_start(environ) != _read_at_start(os.environ):
        return subprocess.run(words, cwd=cwd, env=environ, timeout=timeout, capture_output=True, text=True, check=check)
    assert words[0] == sys.executable, words
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                fds = array.array("i", [theirs.fileno(), out.fileno(), err.fileno()])
                request = json.dumps([words[1:], str(cwd or Path.cwd()), environ]).encode()
                _server().sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            ours.settimeout(timeout)
            try:
                code = int(ours.recv(64))
            except TimeoutError:
                ours.send(b"kill")
                ours.settimeout(None)
                ours.recv(64)
                raise subprocess.TimeoutExpired(words, timeout or 0.0, _text(out), _text(err)) from None
        done = subprocess.CompletedProcess(words, code, _text(out), _text(err))
    if check:
        done.check_returncode()
    return done


def _read_at_start(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(_READ_AT_START)}


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


@functools.cache
def _server() -> socket.socket:
    """Return the socket to the process that forks. That process exits with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        environ = {name: value for name, value in os.environ.items() if name not in _READ_BY_US}
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ours


@dataclass
class _Program:
    words: list[str]
    folder: str
    environ: dict[str, str]

    def run(self, path: list[str]) -> NoReturn:
        """Do the work of a fresh interpreter; ``path`` contains the folders of installed packages."""
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environ)
        sys.orig_argv = [sys.executable, *self.words]
        kind, name = self.words[:2] if self.words[0] in ("-m", "-c") else ("", self.words[0])
        sys.argv = self.words[kind == "-m" :] if kind != "-c" else ["-c", *self.words[2:]]
        first = {"-m": self.folder, "-c": ""}.get(kind, os.path.dirname(os.path.realpath(name)))
        sys.path[:] = [first, *filter(None, self.environ.get("PYTHONPATH", "").split(os.pathsep)), *path]
        if self.environ.get("PYTHONUNBUFFERED"):
            sys.stdout = sys.__stdout__ = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
        sys.modules["__main__"] = main = ModuleType("__main__")
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()
        gc.enable()
        try:
            if kind == "-m":
                importlib.import_module("runpy")._run_module_as_main(name)
            elif kind == "-c":
                exec(compile(name, "<string>", "exec", dont_inherit=True), main.__dict__)
            else:
                main.__file__ = os.path.abspath(name)
                exec(compile(Path(name).read_bytes(), main.__file__, "exec", dont_inherit=True), main.__dict__)
        except Exception as error:  # noqa: BLE001 - the interpreter handles uncaught exceptions the same way
            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
                trace = trace.tb_next
            sys.excepthook(type(error), error.with_traceback(trace), trace)
            sys.exit(1)
        sys.exit()


def _serve(requests: socket.socket) -> _Program | None:
    """Fork for each request.

    Return the program in each forked process, and None in the server when the last client has closed the socket.
    """
    while True:
        data, fds, _, _ = socket.recv_fds(requests, _LARGEST, 3)
        if not data:
            return None
        if os.fork() == 0:
            requests.close()
            break
        for fd in fds:
            os.close(fd)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    answer = socket.socket(fileno=fds[0])
    if pid := os.fork():
        _keep(pid, answer)
    answer.close()
    for number, fd in enumerate(fds[1:], 1):
        os.dup2(fd, number)
        os.close(fd)
    return _Program(*json.loads(data))


def _keep(pid: int, answer: socket.socket) -> NoReturn:
    """Wait until a program exits, and send its exit code."""
    ended = os.pidfd_open(pid)
    # the client requests a kill after its timeout, or has exited
    if ended not in select.select([ended, answer], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        answer.send(b"%d" % code)
    finally:
        os._exit(0)


def _main() -> None:
    path = sys.path[1:]
    gc.disable()
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        program = _serve(requests)
    if program is not None:
        program.run(path)


if __name__ == "__main__":
    _main()
