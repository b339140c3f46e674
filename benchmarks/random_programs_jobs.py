"""Run many short jobs of ``allranks run``, each forked from one process that has imported torch and allranks.

A fresh launcher spends most of its time on the import of torch. Here a server process imports it once and forks for
every job. The fork calls the entry point of the ``allranks`` command: launcher, agent, template of replacement
processes and ranks are the real ones. There are two differences to a job that a shell starts. The imports are already
done. Each process exits after the functions registered with atexit, without finalizing the interpreter, which takes
0.3 s with torch.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["Done", "Jobs"]

# Modules that launchers and ranks of the programs import. A module that no longer exists only costs time.
_IMPORTED = (
    "torch", "numpy", "sympy", "torch._dynamo", "torch.optim.swa_utils", "torch.distributed.device_mesh",
    "torch.distributed.fsdp", "torch.profiler._cupti_monitor", "multiprocessing.popen_fork", "multiprocessing.queues",
    "multiprocessing.synchronize",
    "allranks", "allranks.__main__", "allranks._api.world", "allranks._api.groups", "allranks._engines.native.engine",
    "allranks._engines.c10d.store", "allranks._plugin.adapt", "allranks._plugin.calls", "allranks._plugin.creation",
    "allranks._plugin.group", "allranks._plugin.operators", "allranks._plugin.torch_group", "allranks._plugin.work",
    "allranks.checkpoint", "allranks.data", "allranks.launch.cli", "allranks.launch.jobs.job", "allranks.nn.parallel",
    "allranks.resilience",
)  # fmt: skip


@dataclass(frozen=True)
class Done:
    """A finished job.

    Attributes:
        code: exit code of the launcher; None if the job exceeded the time limit.
        out: its stdout.
        err: its stderr.
        seconds: wall-clock time.
        cpu_s: CPU time of the launcher and its ranks.
    """

    code: int | None
    out: str
    err: str
    seconds: float
    cpu_s: float


class Jobs:
    """The caller's side: a server process that forks jobs. Threads may start jobs at the same time.

    Use it as a context manager. The server exits when its stdin is closed.
    """

    def __enter__(self) -> Jobs:
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},  # read when torch is imported
        )
        self._pending: dict[int, Future[dict[str, Any]]] = {}
        self._number = 0
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()
        self._reader.join()

    def run(self, words: Sequence[str], folder: Path, more: Mapping[str, str], timeout: float) -> Done:
        """Run ``allranks`` with these arguments, and wait until it exits.

        Args:
            words: the arguments.
            folder: working directory of the job. Files with its output are written there.
            more: environment variables, added to those of this process.
            timeout: seconds until the launcher is killed; its ranks terminate with it.
        """
        environ = os.environ | dict(more)
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            number, self._number = self._number, self._number + 1
            self._pending[number] = future
            assert self._server.stdin is not None
            request = {"number": number, "words": list(words), "folder": str(folder), "timeout": timeout}
            self._server.stdin.write(json.dumps({**request, "environ": environ}) + "\n")
            self._server.stdin.flush()
        answer = future.result()
        out, err = ((folder / name).read_text(errors="replace") for name in ("stdout", "stderr"))
        return Done(answer["code"], out, err, answer["seconds"], answer["cpu_s"])

    def _read(self) -> None:
        assert self._server.stdout is not None
        with self._server.stdout as lines:
            for line in lines:
                answer = json.loads(line)
                with self._lock:
                    future = self._pending.pop(answer["number"])
                future.set_result(answer)
        with self._lock:
            for future in self._pending.values():
                future.set_exception(RuntimeError("the server of jobs has ended"))


# --- the server ---


@dataclass
class _Job:
    number: int
    pid: int
    pidfd: int
    began: float
    until: float
    late: bool = False


def _serve() -> tuple[dict[str, Any] | None, int]:
    """Fork a process for each request. Return the request in the forked process, and None when stdin is closed."""
    jobs: dict[int, _Job] = {}
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    rest, is_open = b"", True
    while is_open or jobs:
        waits = min((job.until for job in jobs.values() if not job.late), default=float("inf")) - time.monotonic()
        ready = selector.select(None if waits == float("inf") else max(0.0, waits))
        for key, _ in ready:
            if key.fd == 0:
                data = os.read(0, 1 << 16)
                is_open = bool(data)
                if not is_open:
                    selector.unregister(0)
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    request = json.loads(line)
                    pid = os.fork()
                    if pid == 0:
                        for job in jobs.values():
                            os.close(job.pidfd)
                        selector.close()
                        return request, 1
                    now = time.monotonic()
                    job = _Job(request["number"], pid, os.pidfd_open(pid), now, now + request["timeout"])
                    jobs[job.pidfd] = job
                    selector.register(job.pidfd, selectors.EVENT_READ)
            else:
                job = jobs.pop(key.fd)
                selector.unregister(key.fd)
                os.close(key.fd)
                _, status, usage = os.wait4(job.pid, 0)
                code = None if job.late else os.waitstatus_to_exitcode(status)
                answer = {"number": job.number, "code": code, "cpu_s": usage.ru_utime + usage.ru_stime}
                sys.stdout.write(json.dumps({**answer, "seconds": time.monotonic() - job.began}) + "\n")
                sys.stdout.flush()
        for job in jobs.values():
            if not job.late and time.monotonic() >= job.until:
                job.late = True
                os.kill(job.pid, signal.SIGKILL)
    return None, 0


def _become_launcher(request: Mapping[str, Any]) -> NoReturn:
    """Run ``allranks`` in this process. Ranks that it forks return here, too."""
    os.setsid()
    os.chdir(request["folder"])
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for number, name in enumerate(("stdout", "stderr"), 1):
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.argv = sys.orig_argv = ["allranks", *request["words"]]
    from allranks.__main__ import main

    code = 1
    try:
        code = main(request["words"])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:  # noqa: BLE001 - the interpreter does the same with an uncaught exception
        sys.excepthook(type(error), error, error.__traceback__)
    _end(code)


def _end(code: int) -> NoReturn:
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code & 0xFF)


def _main() -> None:
    gc.disable()
    for name in _IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    request, _ = _serve()
    if request is not None:
        _become_launcher(request)


if __name__ == "__main__":
    _main()
