"""``torch.multiprocessing`` with a rendezvous: spawned processes can call ``init_process_group`` immediately.

``import allranks.multiprocessing as mp`` replaces ``import torch.multiprocessing as mp``. torch starts and monitors the
processes. This module adds a store server in the parent, and its address in the children, so no MASTER_ADDR, no port
and no file is needed. MASTER_ADDR and MASTER_PORT stay unchanged, for programs that use torch.distributed inside.

All other names are torch.multiprocessing's own (``Process``, ``Queue``, ``get_context``, ``set_start_method``, ...),
loaded on first use.

Source: torch/multiprocessing/spawn.py
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing.util
import os
import signal
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from allranks._cluster.outer_job import SEAL, begin_inner_job, belongs
from allranks._store import StoreServer

if TYPE_CHECKING:
    from multiprocessing import *  # noqa: F403

    from torch import multiprocessing as torchs
    from torch.multiprocessing import *  # noqa: F403
    from torch.multiprocessing.spawn import ProcessContext

__all__ = ["spawn", "start_processes"]
if TYPE_CHECKING:
    __all__ += multiprocessing.__all__
    __all__ += torchs.__all__  # names that a type checker accepts as public here

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def spawn(
    fn: Callable[..., object],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> ProcessContext | None:
    """Run ``fn(i, *args)`` in ``nprocs`` new processes, like ``torch.multiprocessing.spawn``.

    In ``fn``, ``init_process_group(rank=i, world_size=nprocs)``, or without arguments, joins the processes.

    Args:
        fn: A function that can be pickled.
        args: Its arguments after the process's number.
        nprocs: Number of processes.
        join: Wait for the processes.
        daemon: Make the processes daemonic.
        start_method: "spawn". Any other value is replaced by it, with a warning, as in torch.

    Returns:
        None if ``join`` is set. Otherwise a context whose ``join`` waits for the processes.

    Raises:
        torch.multiprocessing.ProcessRaisedException: A process raised. The exception contains its traceback.
        torch.multiprocessing.ProcessExitedException: A process exited with a nonzero code.
    """
    if start_method != "spawn":
        hint = "This method only supports start_method=spawn; for another, use start_processes"
        warnings.warn(f"{hint} (got: {start_method})", FutureWarning, stacklevel=2)
    return start_processes(fn, args, nprocs, join, daemon, "spawn")


def start_processes(
    fn: Callable[..., object],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> ProcessContext | None:
    """Run ``spawn`` with any start method. "fork" works in notebooks.

    See ``torch.multiprocessing.start_processes``.
    """
    from torch.multiprocessing.spawn import ProcessContext
    from torch.multiprocessing.spawn import start_processes as torch_start

    class Context(ProcessContext):
        """Closes the store when no process remains that could use it."""

        def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
            done = True
            try:
                done = bool(super().join(timeout, grace_period))
            finally:
                if done:
                    server.close()
                    if not any(process.is_alive() for process in self.processes):
                        clean()
            return done

    server = StoreServer.unix()
    try:
        parent = os.getpid() if start_method in ("spawn", "fork") else None
        nested = _is_rank()
        start = _RankEntry(fn, _environ(nprocs, server.address, nested), nested, parent)
        started = torch_start(  # type: ignore[no-untyped-call]
            start, args, nprocs, join=False, daemon=daemon, start_method=start_method
        )
        # Processes that outlive an interrupted join may still write their error files. multiprocessing joins them at
        # exit.
        clean = multiprocessing.util.Finalize(None, _unlink, (started.error_files,), exitpriority=-1)
        # After the fork, which must not happen while another thread may hold a lock.
        server.start()
    except BaseException:
        server.close()
        raise
    context = Context(started.processes, started.error_files)  # type: ignore[no-untyped-call]
    if not join:
        return context
    while not context.join():
        pass
    return None


class _RankEntry:
    """The entry function of a new process: sets its rank in the environment, then calls the user's function."""

    def __init__(self, fn: Callable[..., object], environ: dict[str, str], nested: bool, parent: int | None) -> None:
        self._fn = fn
        self._environ = environ
        self._nested = nested
        self._parent = parent  # None: a fork server, which exits with the process that it serves

    def __call__(self, number: int, *args: Any) -> None:
        # torch requests SIGINT at the parent's death, which nohup, cron and a shell's background jobs ignore.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
        if self._parent not in (None, os.getppid()):  # the parent died before the line above
            os._exit(1)
        if self._nested:
            begin_inner_job(os.environ)
            os.environ.pop("RANK", None)
        os.environ.update(self._environ)
        os.environ["LOCAL_RANK"] = str(number)
        os.environ.setdefault("RANK", str(number))
        self._fn(number, *args)


def _unlink(files: Sequence[str]) -> None:
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file)


def _is_rank() -> bool:
    """Return whether a launcher has started this process as a rank, so that its children form a nested job."""
    alone = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE") == "1"  # a single rank of torchrun
    return alone or (SEAL in os.environ and belongs(os.environ))


def _environ(nprocs: int, store: str, nested: bool) -> dict[str, str]:
    if nested:
        return {"LOCAL_WORLD_SIZE": str(nprocs), "WORLD_SIZE": str(nprocs), "ALLRANKS_STORE": store}
    environ = {"LOCAL_WORLD_SIZE": str(nprocs), "WORLD_SIZE": os.environ.get("WORLD_SIZE", str(nprocs))}
    # One host of several, started manually or by torchrun: its ranks connect to those of other hosts at MASTER_ADDR.
    wider = os.environ.get("WORLD_SIZE", "1") != "1" and "MASTER_ADDR" in os.environ
    if not wider or "ALLRANKS_STORE" in os.environ:
        environ["ALLRANKS_STORE"] = store
    return environ


def _load(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("torch.multiprocessing"), name)


if not TYPE_CHECKING:  # otherwise a type checker would accept every name
    __getattr__ = _load


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(importlib.import_module("torch.multiprocessing"))})
