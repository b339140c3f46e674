"""Real ranks for tests: ``run_ranks(4, fn)`` runs ``fn`` in four processes that form a group.

A hanging test is hard to diagnose. A hang therefore ends in an error with every rank's stack, and a failure is reported
for the rank that caused it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from multiprocessing import connection
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle

from allranks._base import pickling
from allranks._base.errors import PeerLostError, RankError, TimeoutError
from allranks._base.forks import separate_from_siblings
from allranks._store import StoreServer

__all__ = ["RankError", "run_ranks"]

R = TypeVar("R")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PRELOADED = [
    "torch",
    "allranks._api.world",
    "allranks._engines.native.engine",
]  # by the process from which ranks are forked


def run_ranks(
    n: int,
    fn: Callable[..., R],
    *args: Any,
    timeout_s: float = 60.0,
    init: bool = True,
    env: Mapping[str, str] | None = None,
    may_die: Collection[int] = (),
) -> list[R | None]:
    """Run ``fn(*args)`` on ``n`` ranks, each in its own process on this host.

    Args:
        n: Number of ranks.
        fn: Called on every rank. It may be a local function or a lambda (cloudpickle).
        timeout_s: Limit in seconds. After it, every rank's stack is reported, and all ranks are killed.
        init: Call ``init_process_group()`` before and ``destroy_process_group()`` after ``fn``.
        env: Additional environment variables for the ranks.
        may_die: Ranks whose death by a signal is part of the test. Their result is None.

    Returns:
        The results of ``fn``, by rank.

    Raises:
        RankError: A rank raised or died. If several did, the first one whose failure is not a consequence of another.
            ``__cause__`` is its exception if it can be pickled.
        TimeoutError: The ranks did not finish in time.

    Cost:
        about 20 ms for each rank, and 1 s once, for the process from which they are forked.
    """
    # A fork of the test process itself would copy locks that its other threads may hold.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    payload = pickling.dumps((fn, args))
    with tempfile.TemporaryDirectory(prefix="allranks-test-") as folder, contextlib.ExitStack() as stack:
        server = StoreServer.unix()
        server.start()
        stack.callback(server.close)
        pipes: dict[connection.Connection, int] = {}
        processes = []
        for rank in range(n):
            receiver, sender = context.Pipe(duplex=False)
            stack.callback(receiver.close)
            environ = {
                "RANK": str(rank),
                "WORLD_SIZE": str(n),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(n),
                "ALLRANKS_STORE": server.address,
                **(env or {}),
            }
            stacks = str(Path(folder) / f"stacks-{rank}")
            process = context.Process(
                target=_rank_main, args=(payload, environ, sender, stacks, init, timeout_s, sys.path), daemon=False
            )
            process.start()
            # While the parent has this end open, the exit of the rank is not visible as the end of the pipe.
            sender.close()
            pipes[receiver] = rank
            processes.append(process)
        stack.callback(_stop, processes)
        return _collect(pipes, processes, timeout_s, may_die, Path(folder))


def _collect(
    pipes: dict[connection.Connection, int],
    processes: list[mp.context.ForkServerProcess],
    timeout_s: float,
    may_die: Collection[int],
    folder: Path,
) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    failures: list[tuple[int, BaseException | None, str]] = []
    open_pipes = dict(pipes)
    while open_pipes:
        # A child process of a dead rank may still hold its pipe open, so wait for the exit of the rank, too.
        ends = [processes[rank].sentinel for rank in open_pipes.values()]
        ready = connection.wait([*open_pipes, *ends], timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(_hang_report(pipes, open_pipes, processes, timeout_s, folder))
        for pipe in [pipe for pipe in open_pipes if pipe in ready or processes[open_pipes[pipe]].sentinel in ready]:
            rank = open_pipes.pop(pipe)
            try:
                if not pipe.poll():
                    raise EOFError
                ok, value, text = cloudpickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join(5)  # the pipe may close before the exit code is available
                if rank in may_die:
                    results[rank] = None
                else:
                    failures.append((rank, None, f"exited with code {processes[rank].exitcode}"))
                continue
            if ok:
                results[rank] = value
            else:
                failures.append((rank, value, text))
        if any(not isinstance(error, PeerLostError) for _, error, _ in failures):
            break  # the other ranks cannot continue without the failed rank
    if failures:
        # A PeerLostError is the consequence of another rank's failure, so any other error comes first.
        failures.sort(key=lambda failure: isinstance(failure[1], PeerLostError))
        rank, error, text = failures[0]
        raise RankError(f"rank {rank} of {len(processes)} failed:\n{text}", rank) from error
    return [results[rank] for rank in range(len(processes))]


def _hang_report(
    pipes: dict[connection.Connection, int],
    open_pipes: dict[connection.Connection, int],
    processes: list[mp.context.ForkServerProcess],
    timeout_s: float,
    folder: Path,
) -> str:
    hanging = sorted(open_pipes.values())
    for rank in hanging:
        pid = processes[rank].pid
        if pid is not None and processes[rank].is_alive():
            os.kill(pid, signal.SIGUSR1)
    time.sleep(0.5)  # the signal handler writes the stacks immediately, regardless of the thread's activity
    lines = [
        f"{len(hanging)} of {len(pipes)} ranks have not finished after {timeout_s:g} s.",
        "  If they need more time, raise timeout_s=. The stacks of these ranks:",
    ]
    for rank in hanging:
        stacks = folder / f"stacks-{rank}"
        lines.append(f"--- rank {rank}\n{stacks.read_text() if stacks.exists() else '(no stack)'}")
    return "\n".join(lines)


def _stop(processes: list[mp.context.ForkServerProcess]) -> None:
    for process in processes:
        # Seconds in which a rank that has sent its result can exit normally.
        process.join(0.2 if process.exitcode is None else None)
        if process.exitcode is None:
            process.kill()
            process.join()
        process.close()


def _rank_main(
    payload: bytes,
    environ: dict[str, str],
    sender: connection.Connection,
    stacks: str,
    init: bool,
    timeout_s: float,
    path: list[str],
) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # multiprocessing's fork server ignores Ctrl-C
    separate_from_siblings()  # the fork server has imported torch once for all ranks
    # A child of the fork server has the environment of the moment in which that server started.
    os.environ.update(environ)
    sys.path[:] = path
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        try:
            answer = (True, _call(payload, init, timeout_s), "")
        except BaseException as error:  # noqa: BLE001 - the parent raises any exception
            answer = (False, error, traceback.format_exc())
        try:
            data = pickling.dumps(answer)
            cloudpickle.loads(data)  # the parent must be able to unpickle it, too
        except Exception:  # noqa: BLE001 - an exception (or a result) that cannot be pickled
            text = answer[2] or f"the result cannot be pickled: {answer[1]!r}"
            data = pickling.dumps((False, None, text))
        sender.send_bytes(data)
        sender.close()
        faulthandler.unregister(signal.SIGUSR1)


def _call(payload: bytes, init: bool, timeout_s: float) -> Any:
    import torch

    from allranks._api import world

    torch.set_num_threads(1)
    fn, args = cloudpickle.loads(payload)
    if not init:
        return fn(*args)
    world.init_process_group(timeout=timeout_s)
    try:
        return fn(*args)
    finally:
        if world.is_initialized():
            world.destroy_process_group()
