"""gloo and nccl: the engines inside torch, driven through their common interface.

They receive flat tensors (`flat`). torch's failures become allranks's errors.

Behavior of gloo found with torch 2.13, and the countermeasures:

- A receive that times out closes the group's connections. A thread therefore waits for messages (`_GlooMessage`).
  `_end_gloo` uses such a receive to end pending calls, because no other call does this (`abort` has no effect).
- The destructor of its group waits for running collectives while it holds the GIL. All of them are ended before.
- A collective with other sizes on another rank terminates the process.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as c10d
from torch import Tensor

from allranks._base.errors import (
    AbortedError,
    AllranksError,
    JoinError,
    PeerLostError,
    TimeoutError,
    UsageError,
    rank_list,
)
from allranks._base.forks import leak
from allranks._base.threads import Daemon
from allranks._call.types import ReduceOp
from allranks._cluster.network import interface_of
from allranks._engines.c10d.store import GroupStore
from allranks._engines.flat import ON_BITS, ON_BOOLS, ON_NUMBERS, FlatEngine, Progress
from allranks._engines.flat_calls import UNKNOWN_CAUSE
from allranks._engines.presence import Presence
from allranks._engines.spec import Exchange

if TYPE_CHECKING:
    from allranks._rendezvous.rendezvous import Member

__all__ = ["DTYPES", "C10dEngine", "reduces"]

# torch's type annotations do not cover most of what this module uses.
_torch: Any = c10d
_cuda: Any = torch.cuda

_SHORTEST_S = 0.001  # seconds; torch treats a shorter timeout as no limit
_ENDING_S = 2.0  # seconds in which calls may end when the group is closed
# nccl connects in the first call. If the first rank left before, a slower rank dialed its store for 60 s.
_LINGER_S = 5.0  # seconds for which the first rank, to whose store the others connect, waits for them when it leaves
_HANG_UP_TAG = (1 << 31) - 1  # tag of the receives whose only purpose is to time out

_CONNECT_ADVICE = {
    "gloo": "Check the end of the output of the other ranks. If all of them run, set GLOO_SOCKET_IFNAME to an interface"
    " through which they reach each other.",
    "nccl": "Set NCCL_DEBUG=INFO to print nccl's own log.",
}
# nccl's error if two ranks use one GPU: before version 2.30, and since.
_SHARED_GPU = ("Duplicate GPU", "using the same GPU")
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
DTYPES = (*_FLOATS, *_INTEGERS, torch.bool, torch.complex64, torch.complex128)
"""The dtypes that can be reduced. Any dtype can be transferred."""


class C10dEngine(FlatEngine):
    """Collectives and messages of one of torch's own backends."""

    def __init__(
        self, name: str, rank: int, members: Sequence[Member], exchange: Exchange, group_name: str, timeout_s: float
    ) -> None:
        super().__init__(name, rank, members, group_name, timeout_s)
        self.device = "cpu" if name == "gloo" else "cuda"
        self.averages_integers = self.queues = name == "nccl"
        self._backend: Any = None
        self._died: Sequence[int] = ()  # as known when the engine was closed
        self._aborted = False
        self._store = GroupStore.among(rank, members, exchange, timeout_s)
        try:
            self._presence = Presence(rank, members, self._store.secret)
            make = _gloo if name == "gloo" else _nccl
            self._backend = make(self._store, rank, members, timedelta(seconds=timeout_s))
            if name == "gloo":
                # No rank continues before all are connected, so gloo's store can be closed then. nccl connects in the
                # first call.
                self.barrier(False)
                self._store.close()
        except RuntimeError as error:
            self.close()
            raise JoinError(
                f"{name} on group '{group_name}' (rank {rank} of {len(members)}): the ranks could not connect: "
                f"{_first_line(error)}\n  {_CONNECT_ADVICE[name]}"
            ) from error

    def reduces(self, dtype: torch.dtype, op: ReduceOp) -> bool:
        return reduces(self.name, dtype, op)

    def begin_all_reduce(self, flat: Tensor, op: ReduceOp) -> Progress:
        options = _torch.AllreduceOptions()
        options.reduceOp = _op(op)
        return self._collective(self._live.allreduce([flat], options))

    def begin_reduce(self, flat: Tensor, root: int, op: ReduceOp) -> Progress:
        options = _torch.ReduceOptions()
        options.reduceOp = _op(op)
        options.rootRank = root
        # gloo leaves partial sums in the tensors of the other ranks, so they pass a copy.
        return self._collective(self._live.reduce([flat if root == self.rank else flat.clone()], options))

    def begin_broadcast(self, flat: Tensor, root: int) -> Progress:
        options = _torch.BroadcastOptions()
        options.rootRank = root
        return self._collective(self._live.broadcast([flat], options))

    def begin_all_gather(self, into: Tensor, given: Tensor) -> Progress:
        return self._collective(self._live._allgather_base(into, given))

    def begin_gather(self, into: Tensor | None, given: Tensor, root: int) -> Progress:
        options = _torch.GatherOptions()
        options.rootRank = root
        return self._collective(self._live.gather([] if into is None else [self._cut(into)], [given], options))

    def begin_scatter(self, into: Tensor, given: Tensor | None, root: int) -> Progress:
        options = _torch.ScatterOptions()
        options.rootRank = root
        return self._collective(self._live.scatter([into], [] if given is None else [self._cut(given)], options))

    def begin_reduce_scatter(self, into: Tensor, given: Tensor, op: ReduceOp) -> Progress:
        options = _torch.ReduceScatterOptions()
        options.reduceOp = _op(op)
        return self._collective(self._live._reduce_scatter_base(into, given, options))

    def begin_all_to_all(self, into: Tensor, given: Tensor, gets: list[int], gives: list[int]) -> Progress:
        return self._collective(self._live.alltoall_base(into, given, gets, gives))

    def begin_barrier(self) -> Progress:
        options = _torch.BarrierOptions()
        if self.device == "cuda":
            # Otherwise nccl guesses the device of a barrier from the rank.
            options.device = torch.device("cuda", torch.cuda.current_device())
        return self._collective(self._live.barrier(options))

    def begin_send(self, given: Tensor, to: int, tag: int) -> Progress:
        return self._message(self._live.send([given], to, tag), to)

    def begin_recv(self, into: Tensor, source: int, tag: int) -> Progress:
        if source >= 0:
            return self._message(self._live.recv([into], source, tag), source)
        if self.device == "cuda":
            raise UsageError(f"recv on group '{self.group_name}': nccl requires the rank of the sender.\n  Pass src=.")
        return self._message(self._live.recv_anysource([into], tag), source)

    @property
    def _live(self) -> Any:
        """torch's backend. If the group has been closed: raise an error that ``explain`` translates."""
        if self._backend is None:
            raise RuntimeError("the group was closed")
        return self._backend

    def lost(self) -> Sequence[int]:
        if self._presence is not None:
            # 0 s: no wait, because the result is polled.
            self._died = self._presence.gone(0.0)[0]
        return self._died

    def set_timeout(self, timeout_s: float) -> None:
        super().set_timeout(timeout_s)
        self._backend._set_default_timeout(timedelta(seconds=timeout_s))

    def abort(self) -> None:
        self.lost()  # the presence socket closes with the engine, so keep its last result
        self._aborted = True
        if self._backend is not None and self.device == "cpu" and len(self.members) > 1:
            self._hang_up(self._backend)
        self.close()

    def close(self) -> None:
        # Before everything else, so that a concurrent call raises instead of using a backend that is being destroyed.
        backend, self._backend = self._backend, None
        if self._presence is not None:
            # The other ranks must learn that this rank leaves before its connections close, or they would report a
            # death.
            self._presence.leave()
            self._presence = None
        if backend is not None:
            (self._end_nccl if self.device == "cuda" else self._end_gloo)(backend)
        # With gloo, all ranks have connected before any rank continues, so no rank still needs the store.
        self._store.close(0.0 if backend is None or self._aborted or self.name == "gloo" else _LINGER_S)

    def abandon(self) -> None:
        if self._backend is not None:
            leak(self._backend)  # its destructor would wait for threads that exist only in the parent
            self._backend = None
        self._store.close()
        if self._presence is not None:
            self._presence.close()

    def _cut(self, flat: Tensor) -> list[Tensor]:
        size = len(self.members)
        return list(torch.split(flat, flat.numel() // size)) if flat.numel() else [flat] * size

    def _collective(self, handle: Any) -> Progress:
        return (_OnStream if self.device == "cuda" else _Collective)(handle)

    def _message(self, handle: Any, peer: int) -> Progress:
        return (_OnStream if self.device == "cuda" else _GlooMessage)(handle, peer)

    def explain(self, error: BaseException, verb: str) -> NoReturn:
        """Raise allranks's error for torch's error."""
        here, text = self.here(verb), _first_line(error)
        if self._aborted:
            raise AbortedError(
                f"{here}: this rank has called abort() on the group.\n"
                "  Call shrink() to continue with a new group; no other call is possible.",
                self.rank,
            ) from error
        if self._backend is None:
            raise AllranksError(
                f"{here}: the group was destroyed while the call was pending.\n"
                "  Wait for all pending calls before destroy_process_group()."
            ) from error
        # gloo reports a broken connection, but not of which rank. The presence sockets show which rank died or left.
        died, left = ([], {}) if self._presence is None else self._presence.gone()
        # Checked before the text: a lost rank may also appear as a timeout.
        if died or left:
            fates = [f"{self._who(rank)} died" for rank in died]
            fates += [f"{self._who(rank)} has left the group" for rank in left]
            gone = [*died, *left]
            raise PeerLostError(
                f"{here}: {', '.join(fates)}.\n  {self.name}: {text}\n"
                f"  Check the end of the output of {rank_list(sorted(gone))}.",
                gone[0],
            ) from error
        # nccl detects two ranks on one GPU in the first call only.
        if any(cause in str(error) for cause in _SHARED_GPU):
            raise UsageError(
                f"{here}: two ranks use the same GPU, but nccl requires one GPU per rank.\n  Call "
                "torch.cuda.set_device(LOCAL_RANK) before init_process_group, or use the native engine, in which ranks "
                'can share a GPU: init_process_group("native").'
            ) from error
        if "timed out" in text.lower() or "timeout" in text.lower():
            raise TimeoutError(
                f"{here}: a rank did not call within {self.timeout_s:g} s, or another rank timed out. "
                f"{self.name} does not report which, and the group cannot be used any more.\n  {self.name}: {text}\n"
                "  Set a longer timeout with init_process_group(timeout=...)."
            ) from error
        raise AllranksError(f"{here}: {self.name}: {text}{UNKNOWN_CAUSE}") from error

    def _end_gloo(self, backend: Any) -> None:
        pending = [work for work in tuple(self._pending) if not work.done()]
        if pending:
            self._hang_up(backend)
        if not _within(_ENDING_S, lambda: all(work.done() for work in pending)):
            leak(backend)  # its destructor would wait for as long as these calls take

    def _hang_up(self, backend: Any) -> None:
        """End all pending calls of gloo, on this rank and on the others, by a receive that times out."""
        nothing = [torch.empty(0, dtype=torch.uint8, device="cpu")]
        for other in range(len(self.members)):  # one of them may be dead, and then has no call to end
            with contextlib.suppress(RuntimeError):  # the receive has timed out
                while other != self.rank:  # a message with this tag may have arrived; then receive again
                    backend.recv(nothing, other, _HANG_UP_TAG).wait(timedelta(seconds=_SHORTEST_S))

    def _end_nccl(self, backend: Any) -> None:
        # Kernels that wait for a lost rank never end. Without CUDA, no call was made, and an event would initialize
        # CUDA.
        if _cuda.is_initialized() and not self._aborted:
            waited_for = _cuda.Event()
            waited_for.record()  # the current stream waits for the calls for which the program has waited
            _within(_ENDING_S, lambda: waited_for.query() and all(work.done() for work in tuple(self._pending)))
        # Last: it ends the kernels that are still running, on this rank only (docs/decisions/118).
        backend.abort()


class _WorkHandle(Progress):
    """torch's handle of a call."""

    def __init__(self, handle: Any, peer: int = -1) -> None:
        self.handle = handle
        self._peer = peer

    def done(self) -> bool:
        return bool(self.handle.is_completed())

    def source(self) -> int:
        return self._peer if self._peer >= 0 else int(self.handle._source_rank())


class _Collective(_WorkHandle):
    """A collective of gloo."""

    def wait(self, seconds: float) -> bool:
        try:
            self.handle.wait(timedelta(seconds=max(seconds, _SHORTEST_S)))
        # gloo reports an expired wait and a failed call by the same exception.
        except RuntimeError:
            if not self.done():
                return False
            self.handle.wait()  # it ended during the wait, or this raises its error
        return True


class _OnStream(_WorkHandle):
    """A call of nccl. Waiting for it makes the current stream wait."""

    def wait(self, seconds: float) -> bool:
        self.handle.wait()
        return True


class _GlooMessage(_WorkHandle):
    """A message of gloo. gloo detects its end only while a thread waits, so a thread of its own waits for it."""

    asked_cheaply = False

    def __init__(self, handle: Any, peer: int) -> None:
        super().__init__(handle, peer)
        self._ended = threading.Event()
        self._error: RuntimeError | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def done(self) -> bool:
        return self._ended.is_set() or self._watched().wait(0.0)

    def wait(self, seconds: float) -> bool:
        if not self._watched().wait(seconds):
            return False
        if self._error is not None:
            raise self._error
        return True

    def _watched(self) -> threading.Event:
        # Only one thread may wait: gloo detects the end of a message in the wait itself.
        with self._lock:
            if self._thread is None:
                self._thread = Daemon(target=self._watch, name="allranks-message")
                self._thread.start()
        return self._ended

    def _watch(self) -> None:
        try:
            # Without a timeout: an expired receive of gloo closes all connections of the group.
            self.handle.wait()
        except RuntimeError as error:
            self._error = error
        # Last: it publishes the error to the waiting threads.
        self._ended.set()


def reduces(engine: str, dtype: torch.dtype, op: ReduceOp) -> bool:
    """Return whether an engine implements a reduce op for a dtype."""
    if dtype not in DTYPES:
        return False
    if dtype.is_complex:
        return op in (ReduceOp.SUM, ReduceOp.AVG)
    if dtype is torch.bool:
        return op in ON_BOOLS and (engine == "gloo" or op not in ON_BITS)
    if op is ReduceOp.AVG:
        return True
    return op in ON_NUMBERS or (dtype in _INTEGERS and engine == "gloo" and op in ON_BITS)


def _gloo(store: GroupStore, rank: int, members: Sequence[Member], timeout: timedelta) -> Any:
    backend = _torch.ProcessGroupGloo
    # The host name may resolve to an interface that does not even reach the host itself.
    alone = len({member.machine for member in members}) == 1
    mine = members[rank].addresses
    # The user's variable first, as in torch. On one host, the loopback interface always exists.
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or ("lo" if alone else interface_of(mine[0]) if mine else "")
    options = backend._Options()
    options._timeout = timeout
    options._devices = [backend.create_device(interface=interface) if interface else backend.create_default_device()]
    return backend(store, rank, len(members), options)


def _nccl(store: GroupStore, rank: int, members: Sequence[Member], timeout: timedelta) -> Any:
    backend = _torch.ProcessGroupNCCL
    options = backend.Options()
    options._timeout = timeout
    return backend(store, rank, len(members), options)


def _op(op: ReduceOp) -> Any:
    return getattr(_torch.ReduceOp, op.name)


def _first_line(error: BaseException) -> str:
    """Return the text of torch's error, without the location in torch's source."""
    return re.sub(r"^\[\S+:\d+\] ", "", str(error).partition("\n")[0]).partition(" This is typically")[0]


def _within(seconds: float, done: Callable[[], bool]) -> bool:
    """Wait for at most this time until a condition is true. Return whether it is."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True
