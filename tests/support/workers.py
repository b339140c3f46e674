"""Ranks that stay alive between tests and have both libraries initialized: torch.distributed on gloo, and allranks."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import allranks
from allranks.testing import run_ranks

CALL_TIMEOUT_S = 20
# Longer than the tests of a file take on a busy machine. The ranks exit with the process that requests answers.
LIFE_S = 1500


class Workers:
    """A set of ranks that answer requests. After a failure, the next request starts new ranks."""

    def __init__(
        self, ranks: int, answer: Callable[[Any, Any], Any], run: Callable[..., list[Any]] = run_ranks
    ) -> None:
        """Prepare the ranks, without starting them.

        Each rank runs ``answer(groups, request)``; ``groups`` is the dictionary that ``_serve`` creates once per rank.
        ``run`` is ``run_ranks``, or a function that starts the ranks in another way.
        """
        self._run = run
        self._ranks = ranks
        self._answer = answer
        self._connections: list[Connection] = []
        self._stack = contextlib.ExitStack()
        self._job: Future[Any] | None = None

    def ask(self, request: Any) -> list[Any]:
        """Return every rank's answer, by rank.

        Raises:
            AssertionError: a rank raised; contains the errors of all ranks.
        """
        if not self._connections:
            self._start()
        try:
            for connection in self._connections:
                connection.send(request)
            answers = [self._receive(connection) for connection in self._connections]
        except (EOFError, OSError):
            self.close()  # raises the error that terminated the rank
            raise
        wrong = [f"rank {rank}: {text}" for rank, (good, text) in enumerate(answers) if not good]
        if wrong:
            self.close()
        assert not wrong, "\n".join(wrong)
        return [value for _, value in answers]

    def close(self) -> None:
        """Stop the ranks. The next request starts new ones."""
        job, self._job = self._job, None
        for connection in self._connections:
            with contextlib.suppress(OSError):  # the rank has exited
                connection.send(None)
        self._connections = []
        try:
            if job is not None:
                job.result()
        finally:
            self._stack.close()

    def _start(self) -> None:
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="allranks-test-"))
        listener = self._stack.enter_context(Listener(str(Path(folder) / "requests"), "AF_UNIX"))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        pool = self._stack.enter_context(ThreadPoolExecutor(1))
        self._job = pool.submit(self._run, self._ranks, _serve, listener.address, port, self._answer, timeout_s=LIFE_S)
        self._job.add_done_callback(lambda _: _call_off(listener.address))
        arrived = {}
        while len(arrived) < self._ranks:
            connection = listener.accept()
            rank = connection.recv()
            if rank is None:
                self.close()  # raises the error that terminated the ranks
            arrived[rank] = connection
        self._connections = [arrived[rank] for rank in range(self._ranks)]

    def _receive(self, connection: Connection) -> Any:
        if not connection.poll(2 * CALL_TIMEOUT_S):
            raise EOFError("a rank did not send its result")
        return connection.recv()


def _call_off(address: str) -> None:
    """Notify the process that waits for the ranks to connect that the ranks have exited."""
    with contextlib.suppress(OSError):  # no process waits
        Client(address, "AF_UNIX").send(None)


def _serve(address: str, port: int, answer: Callable[[Any, Any], Any]) -> None:
    import torch.distributed as peer

    warnings.simplefilter("ignore")  # torch's warnings about its own names and about features in development
    rank, size = allranks.get_rank(), allranks.get_world_size()
    timeout = timedelta(seconds=CALL_TIMEOUT_S)
    peer.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, timeout=timeout)
    some = range(1, size)
    groups = {
        "peer": {"world": None, "some": peer.new_group(some, timeout=timeout)},
    }
    for engine in {"native": None, "tcp": None, "gloo": None, "mpi": None, allranks.get_backend(): None}:
        if engine == allranks.get_backend():
            groups[engine] = {"world": None, "some": allranks.new_group(some, timeout=timeout)}
        elif engine != "mpi":  # exists only in jobs of mpirun
            groups[engine] = {
                "world": allranks.new_group(timeout=timeout, backend=engine),
                "some": allranks.new_group(some, timeout=timeout, backend=engine),
            }
    with Client(address, "AF_UNIX") as connection:
        connection.send(rank)
        while (request := connection.recv()) is not None:
            try:
                said = (True, answer(groups, request))
            except Exception:  # noqa: BLE001 - any error is reported to the test
                said = (False, traceback.format_exc())
            connection.send(said)
    peer.destroy_process_group()
