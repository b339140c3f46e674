"""gloo and nccl: the engines inside torch, driven through their common interface.

A call's tensors are made flat and contiguous first, and what is only moved travels as bytes: so every dtype and layout
that the native engine takes is taken here too, and each verb has one way. What an engine cannot reduce is an error
before anything is sent; docs/engines.md has the table. Failures are torch's, in our errors.

What gloo does by itself, found with torch 2.13, and what is done about it:

- A receive that times out closes the group's connections. Messages are therefore waited for in a thread (`_Message`),
  and `_end_gloo` uses such a receive to end what is pending, which nothing else does (`abort` does nothing).
- Its group's destructor waits for collectives that are under way, holding the GIL: all of them are ended before.
- A collective with other sizes on another rank ends the process. In debug mode the ranks compare their calls before.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
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

from allranks._debug import DebugLevel, get_debug_level
from allranks._engines.base import Engine
from allranks._engines.c10d_store import GroupStore
from allranks._engines.native_connect import Exchange
from allranks._engines.operands import Operands, OperandsWork
from allranks._engines.presence import Presence
from allranks._errors import (
    AllranksError,
    JoinError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    TimeoutError,
    UsageError,
    rank_list,
)
from allranks._types import PremulSum, ReduceOp, Stats
from allranks._work import Work, seconds_of

if TYPE_CHECKING:
    from allranks._rendezvous import Member

__all__ = ["DTYPES", "C10dEngine", "reduces"]

# torch's annotations know little of what is used here.
_torch: Any = c10d
_cuda: Any = torch.cuda

_SLICE_S = 0.1  # a wait in torch hears no signal: Ctrl-C is looked for so often
_SHORTEST_S = 0.001  # less is no limit to torch
_ENDING_S = 2.0  # how long calls may take to end when the group is left
_MANY_PENDING = 64  # finished works that nobody has waited for are looked for then
_SAID_BYTES = 80  # of a call, in debug mode
_HANG_UP_TAG = (1 << 31) - 1

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
DTYPES = (*_FLOATS, *_INTEGERS, torch.bool, torch.complex64, torch.complex128)
"""What can be reduced; moved is any dtype."""

_ON_NUMBERS = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
_ON_BITS = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
# bool is reduced as bytes of 0 and 1.
_ON_BOOLS = {
    ReduceOp.SUM: ReduceOp.MAX,
    ReduceOp.MAX: ReduceOp.MAX,
    ReduceOp.BOR: ReduceOp.MAX,
    ReduceOp.PRODUCT: ReduceOp.MIN,
    ReduceOp.MIN: ReduceOp.MIN,
    ReduceOp.BAND: ReduceOp.MIN,
    ReduceOp.BXOR: ReduceOp.BXOR,
}


class C10dEngine(Engine):
    """Collectives and messages of one of torch's own backends."""

    def __init__(
        self, name: str, rank: int, members: Sequence[Member], exchange: Exchange, group_name: str, timeout_s: float
    ) -> None:
        self.name = name
        self.device = "cpu" if name == "gloo" else "cuda"
        self._rank = rank
        self._members = members
        self._group_name = group_name
        self._timeout_s = timeout_s
        self._pending: set[C10dWork] = set()
        self._stats = Stats(0, 0, 0.0, 0)
        self._owner = os.getpid()
        self._debug = get_debug_level() is DebugLevel.DETAIL
        self._backend: Any = None
        self._presence: Presence | None = None
        self._store = GroupStore(rank, members, exchange, timeout_s)
        try:
            self._presence = Presence(rank, members, self._store.secret)
            make = _gloo if name == "gloo" else _nccl
            self._backend = make(self._store, rank, members, timedelta(seconds=timeout_s))
            if name == "gloo":
                # Nobody goes on before all are connected: then the store may go. nccl connects in the first call.
                self.barrier(False)
                self._store.close()
        except RuntimeError as error:
            self.close()
            raise JoinError(
                f"{name} on group '{group_name}' (rank {rank} of {len(members)}): the ranks could not connect: "
                f"{_first_line(error)}"
            ) from error

    # --- verbs ---

    def all_reduce(self, tensor: Tensor, op: ReduceOp | PremulSum, async_op: bool) -> Work | None:
        operands, operator = self._reducing(tensor, op, "all_reduce")
        flat = self._numbers(operands.update(tensor))
        options = _torch.AllreduceOptions()
        options.reduceOp = operator
        return self._call(operands, tensor.nbytes, async_op, "allreduce", [flat], options)

    def reduce(self, tensor: Tensor, root: int, op: ReduceOp | PremulSum, async_op: bool) -> Work | None:
        operands, operator = self._reducing(tensor, op, "reduce")
        # gloo leaves intermediate sums in the tensors of the other ranks.
        work = operands.update(tensor) if root == self._rank else operands.read(tensor).detach().clone()
        options = _torch.ReduceOptions()
        options.reduceOp = operator
        options.rootRank = root
        return self._call(operands, tensor.nbytes, async_op, "reduce", [self._numbers(work)], options)

    def broadcast(self, tensor: Tensor, root: int, async_op: bool) -> Work | None:
        self._check(tensor, "broadcast")
        operands = Operands("broadcast")
        work = operands.read(tensor) if root == self._rank else operands.write(tensor)
        options = _torch.BroadcastOptions()
        options.rootRank = root
        return self._call(operands, tensor.nbytes, async_op, "broadcast", [_bytes(work)], options)

    def all_gather(self, outputs: Sequence[Tensor] | Tensor, tensor: Tensor, async_op: bool) -> Work | None:
        if not isinstance(outputs, Tensor) and len({t.numel() for t in outputs if isinstance(t, Tensor)}) > 1:
            return self.all_to_all(outputs, [tensor] * len(self._members), async_op)  # pieces of uneven sizes
        self._check(tensor, "all_gather")
        operands = Operands("all_gather")
        given = _bytes(operands.read(tensor))
        into = _bytes(self._filled(operands, outputs, tensor))
        return self._call(operands, tensor.nbytes, async_op, "_allgather_base", into, given)

    def gather(self, tensor: Tensor, outputs: Sequence[Tensor] | None, root: int, async_op: bool) -> Work | None:
        self._check(tensor, "gather")
        operands = Operands("gather")
        given = _bytes(operands.read(tensor))
        pieces = [] if outputs is None else [self._cut(_bytes(self._filled(operands, outputs, tensor)))]
        options = _torch.GatherOptions()
        options.rootRank = root
        return self._call(operands, tensor.nbytes, async_op, "gather", pieces, [given], options)

    def scatter(self, tensor: Tensor, inputs: Sequence[Tensor] | None, root: int, async_op: bool) -> Work | None:
        self._check(tensor, "scatter")
        operands = Operands("scatter")
        pieces = [] if inputs is None else [self._cut(_bytes(self._joined(operands, inputs, tensor)))]
        into = _bytes(operands.write(tensor))
        options = _torch.ScatterOptions()
        options.rootRank = root
        return self._call(operands, tensor.nbytes, async_op, "scatter", [into], pieces, options)

    def reduce_scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor] | Tensor, op: ReduceOp | PremulSum, async_op: bool
    ) -> Work | None:
        operands, operator = self._reducing(tensor, op, "reduce_scatter")
        given = self._numbers(self._joined(operands, inputs, tensor))
        into = self._numbers(operands.write(tensor))
        options = _torch.ReduceScatterOptions()
        options.reduceOp = operator
        return self._call(operands, given.nbytes, async_op, "_reduce_scatter_base", into, given, options)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], async_op: bool) -> Work | None:
        for tensor in (*inputs, *outputs):
            self._check(tensor, "all_to_all")
            if tensor.dtype != inputs[0].dtype:
                raise UsageError(f"all_to_all: tensors of {inputs[0].dtype} and {tensor.dtype} together")
        if outputs[self._rank].numel() != inputs[self._rank].numel():
            raise UsageError(
                f"all_to_all: the tensor for this rank ({self._rank}) has {outputs[self._rank].numel()} elements, "
                f"what it gives has {inputs[self._rank].numel()}"
            )
        operands = Operands("all_to_all")
        given = torch.cat([_bytes(operands.read(tensor)) for tensor in inputs])
        sizes = [tensor.nbytes for tensor in outputs]
        into = given.new_empty(sum(sizes))
        for tensor, part in zip(outputs, torch.split(into, sizes), strict=True):
            operands.fill(tensor, part.view(tensor.dtype))
        arguments = into, given, sizes, [tensor.nbytes for tensor in inputs]
        return self._call(operands, given.nbytes, async_op, "alltoall_base", *arguments)

    def barrier(self, async_op: bool) -> Work | None:
        options = _torch.BarrierOptions()
        if self.device == "cuda":
            options.device = torch.device("cuda", torch.cuda.current_device())
        return self._call(Operands("barrier"), 0, async_op, "barrier", options)

    def send(self, tensor: Tensor, to: int, tag: int, async_op: bool) -> Work | None:
        self._check(tensor, "send")
        operands = Operands("send")
        given = _bytes(operands.read(tensor))
        return self._call(operands, tensor.nbytes, async_op, "send", [given], to, tag)

    def recv(self, tensor: Tensor, source: int, tag: int) -> int:
        work = self.irecv(tensor, source, tag)
        work.wait()
        return work.source_rank()

    def irecv(self, tensor: Tensor, source: int, tag: int) -> Work:
        self._check(tensor, "recv")
        if source < 0 and self.device == "cuda":
            raise UsageError(f"recv on group '{self._group_name}': nccl receives from a given rank only, not from any")
        operands = Operands("recv")
        into = _bytes(operands.write(tensor))
        if source < 0:
            return self._started(operands, tensor.nbytes, "recv_anysource", [into], tag)
        work = self._started(operands, tensor.nbytes, "recv", [into], source, tag)
        work.source = source
        return work

    def stats(self) -> Stats:
        return self._stats

    def close(self) -> None:
        backend, self._backend = self._backend, None
        if self._presence is not None:
            self._presence.leave()
            self._presence = None
        if backend is not None:
            (self._end_nccl if self.device == "cuda" else self._end_gloo)(backend)
        self._store.close()

    def abandon(self) -> None:
        if self._backend is not None:
            _leak(self._backend)  # its destructor would wait for the parent's threads
            self._backend = None
        self._store.close()
        if self._presence is not None:
            self._presence.close()

    # --- tensors ---

    def _check(self, tensor: Tensor, verb: str) -> None:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{verb}: expected a torch.Tensor, not {type(tensor).__name__}")
        if tensor.device.type != self.device:
            raise UsageError(
                f"{verb} on group '{self._group_name}' (rank {self._rank}): the tensor is on {tensor.device}, "
                f"but the {self.name} engine moves {self.device.upper()} tensors"
            )
        if tensor.layout is not torch.strided:
            raise UsageError(f"{verb}: cannot take a tensor of {tensor.dtype}, {tensor.layout}")

    def _reducing(self, tensor: Tensor, op: ReduceOp | PremulSum, verb: str) -> tuple[Operands, Any]:
        """The call's operands, and torch's reduce op."""
        self._check(tensor, verb)
        factor: float | Tensor | None = None
        if isinstance(op, PremulSum):
            factor, op = op.factor, ReduceOp.SUM
        elif op is ReduceOp.PREMUL_SUM:
            raise UsageError(f"{verb}: PREMUL_SUM needs its factor: op=premul_sum(factor)")
        if not reduces(self.name, tensor.dtype, op):
            raise UsageError(f"{verb} on the {self.name} engine does not support {op.name} of {tensor.dtype} tensors")
        if tensor.dtype is torch.bool:
            op = _ON_BOOLS[op]
        return Operands(verb, factor), getattr(_torch.ReduceOp, op.name)

    def _numbers(self, tensor: Tensor) -> Tensor:
        """What is reduced in place of ``tensor``: flat, bools as bytes, complex numbers as pairs."""
        flat = _flat(tensor)
        if flat.is_complex():
            return torch.view_as_real(flat).view(-1)
        return flat.view(torch.uint8) if flat.dtype is torch.bool else flat

    def _cut(self, flat: Tensor) -> list[Tensor]:
        size = len(self._members)
        return list(torch.split(flat, flat.numel() // size)) if flat.numel() else [flat] * size

    def _joined(self, operands: Operands, pieces: Sequence[Tensor] | Tensor, like: Tensor) -> Tensor:
        """One tensor with all pieces in turn, to be read."""
        self._check_pieces(pieces, like, operands.verb)
        if isinstance(pieces, Tensor):
            return operands.read(pieces).detach()
        return torch.cat([_flat(operands.read(piece)) for piece in pieces])

    def _filled(self, operands: Operands, pieces: Sequence[Tensor] | Tensor, like: Tensor) -> Tensor:
        """One tensor with room for all pieces in turn, to be written."""
        self._check_pieces(pieces, like, operands.verb)
        if isinstance(pieces, Tensor):
            return operands.write(pieces)
        whole = like.detach().new_empty(len(pieces), like.numel())
        for row, piece in zip(whole, pieces, strict=True):
            operands.fill(piece, row)
        return whole

    def _check_pieces(self, pieces: Sequence[Tensor] | Tensor, like: Tensor, verb: str) -> None:
        size = len(self._members)
        if isinstance(pieces, Tensor):
            self._check(pieces, verb)
            if pieces.dtype != like.dtype or pieces.numel() != size * like.numel():
                raise UsageError(
                    f"{verb}: expected {size} x {like.numel()} elements of {like.dtype} in one tensor, "
                    f"not {pieces.numel()} of {pieces.dtype}"
                )
            return
        if len(pieces) != size:
            raise UsageError(f"{verb}: expected a list of {size} tensors, one per rank, not {len(pieces)}")
        for rank, piece in enumerate(pieces):
            self._check(piece, verb)
            if piece.dtype != like.dtype or piece.numel() != like.numel():
                raise UsageError(
                    f"{verb}: expected {like.numel()} elements of {like.dtype} in the tensor for rank {rank}, "
                    f"not {piece.numel()} of {piece.dtype}"
                )

    # --- calls ---

    def _call(self, operands: Operands, nbytes: int, async_op: bool, method: str, *args: Any) -> Work | None:
        work = self._started(operands, nbytes, method, *args)
        if async_op:
            return work
        work.wait()
        return None

    def _started(self, operands: Operands, nbytes: int, method: str, *args: Any) -> C10dWork:
        if self._debug and operands.verb not in ("send", "recv"):
            self._compare(operands.verb, nbytes, args[-1])
        try:
            handle = getattr(self._backend, method)(*args)
        except RuntimeError as error:
            self.explain(error, operands.verb)
        if len(self._pending) > _MANY_PENDING:
            for other in tuple(self._pending):
                other.is_completed()
        work = C10dWork(self, operands, nbytes, self._progress(handle, operands.verb))
        self._pending.add(work)
        return work

    def _compare(self, verb: str, nbytes: int, options: Any) -> None:
        """Raises where the ranks are about to call different things."""
        said = verb if verb in ("all_to_all", "barrier") else f"{verb} of {nbytes} bytes"
        if hasattr(options, "reduceOp"):
            said += f", {options.reduceOp.op.name}"
        if hasattr(options, "rootRank"):
            said += f", root {options.rootRank}"
        mine = torch.tensor(list(said.encode().ljust(_SAID_BYTES)), dtype=torch.uint8, device=self.device)
        everyones = mine.new_empty(len(self._members), _SAID_BYTES)
        try:
            self._backend._allgather_base(everyones.view(-1), mine).wait()
        except RuntimeError as error:
            self.explain(error, verb)
        calls = [bytes(row).decode().rstrip() for row in everyones.tolist()]
        if len(set(calls)) > 1:
            ranks = {call: [rank for rank, other in enumerate(calls) if other == call] for call in calls}
            raise MismatchError(
                f"call on group '{self._group_name}': "
                + "; ".join(f"{rank_list(by)} called {call}" for call, by in ranks.items())
                + ". No tensor was changed."
            )

    def _progress(self, handle: Any, verb: str) -> _Progress:
        if self.device == "cuda":
            return _OnStream(handle)
        return _Message(handle) if verb in ("send", "recv") else _Collective(handle)

    def ended(self, work: C10dWork) -> None:
        """Called by a work when it has ended, well or not."""
        if work in self._pending:
            self._pending.discard(work)
            calls, nbytes, seconds, shared = self._stats
            took = time.monotonic() - work.began
            self._stats = Stats(calls + 1, nbytes + work.nbytes, seconds + took, shared)

    def check_process(self, verb: str) -> None:
        """Raises in a forked child, where nothing can be waited for."""
        if os.getpid() != self._owner:
            raise NotInitializedError(
                f"{verb} on group '{self._group_name}' is the parent process's; a forked child cannot wait for it"
            )

    def explain(self, error: BaseException, verb: str) -> NoReturn:
        """Raises our error for torch's."""
        here, text = self.here(verb), _first_line(error)
        if self._backend is None:
            raise AllranksError(f"{here}: the group was destroyed while the call was pending") from error
        died, left = ([], []) if self._presence is None else self._presence.gone()
        if died or left:
            said = [f"{self._who(rank)} died" for rank in died] + [f"{self._who(rank)} has left" for rank in left]
            raise PeerLostError(f"{here}: {', '.join(said)}.\n  {self.name}: {text}", (died + left)[0]) from error
        if "Duplicate GPU" in str(error):
            raise UsageError(
                f"{here}: two ranks of it are on one GPU, and nccl wants one for each. Choose with "
                "torch.cuda.set_device(LOCAL_RANK) before init_process_group, or let ranks share a GPU with the native "
                'engine: init_process_group("native")'
            ) from error
        if "timed out" in text.lower() or "timeout" in text.lower():
            raise TimeoutError(
                f"{here}: a rank did not call within {self._timeout_s:g} s, or another rank gave up after that time. "
                f"{self.name} does not say which, and the group cannot be used any more.\n  {self.name}: {text}\n"
                "  A longer timeout is given by init_process_group(timeout=...)"
            ) from error
        raise AllranksError(f"{here}: {self.name}: {text}") from error

    def here(self, verb: str) -> str:
        """How errors begin."""
        return f"{verb} on group '{self._group_name}' (rank {self._rank} of {len(self._members)})"

    def _who(self, rank: int) -> str:
        return f"rank {rank} ({self._members[rank].host}, pid {self._members[rank].pid})"

    def _end_gloo(self, backend: Any) -> None:
        pending = [work for work in tuple(self._pending) if not work.done()]
        if pending:
            # A receive that times out ends everything that is pending, here and on the other ranks.
            other = 1 if self._rank == 0 else 0
            nothing = [torch.empty(0, dtype=torch.uint8)]
            with contextlib.suppress(RuntimeError):  # the time is up
                while True:  # a message of that tag may have come
                    backend.recv(nothing, other, _HANG_UP_TAG).wait(timedelta(seconds=_SHORTEST_S))
        if not _within(_ENDING_S, lambda: all(work.done() for work in pending)):
            _leak(backend)  # its destructor would wait for as long as they take

    def _end_nccl(self, backend: Any) -> None:
        if _cuda.is_initialized():  # else nothing was called, and an event would start CUDA
            waited_for = _cuda.Event()
            waited_for.record()  # the current stream waits for the calls that were waited for
            _within(_ENDING_S, lambda: waited_for.query() and all(work.done() for work in tuple(self._pending)))
        backend.abort()


class _Progress(abc.ABC):
    """Whether a call of torch has ended."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def done(self) -> bool:
        return bool(self.handle.is_completed())

    @abc.abstractmethod
    def wait(self, seconds: float) -> bool:
        """Waits for so long; says whether the call has ended. Raises torch's error."""


class _Collective(_Progress):
    """A collective of gloo."""

    def wait(self, seconds: float) -> bool:
        try:
            self.handle.wait(timedelta(seconds=max(seconds, _SHORTEST_S)))
        except RuntimeError:
            if not self.done():
                return False
            self.handle.wait()  # it has ended meanwhile, or this is its error
        return True


class _OnStream(_Progress):
    """A call of nccl: to wait is to let the current stream wait."""

    def wait(self, seconds: float) -> bool:
        self.handle.wait()
        return True


class _Message(_Progress):
    """A message of gloo, which knows nothing of its end before somebody waits: a thread does."""

    def __init__(self, handle: Any) -> None:
        super().__init__(handle)
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
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="allranks-message", daemon=True)
                self._thread.start()
        return self._ended

    def _watch(self) -> None:
        try:
            self.handle.wait()
        except RuntimeError as error:
            self._error = error
        self._ended.set()


class C10dWork(OperandsWork):
    """An asynchronous call on one of torch's backends."""

    def __init__(self, engine: C10dEngine, operands: Operands, nbytes: int, progress: _Progress) -> None:
        super().__init__(operands)
        self.began = time.monotonic()
        self.nbytes = nbytes
        self.source = -1
        self._engine = engine
        self._progress = progress

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        if self._error is not None:
            raise self._error
        verb = self._operands.verb
        self._engine.check_process(verb)
        limit_s = seconds_of(timeout) if timeout else None
        deadline = None if limit_s is None else time.monotonic() + limit_s
        try:
            while not self._progress.wait(_SLICE_S if deadline is None else min(_SLICE_S, deadline - time.monotonic())):
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"{self._engine.here(verb)}: not complete after {limit_s:.1f} s.\n"
                        "  The call goes on: wait() may be called again."
                    )
        except TimeoutError:
            raise
        except RuntimeError as error:
            self._engine.ended(self)
            try:
                self._engine.explain(error, verb)
            except AllranksError as explained:
                self._error = explained
                raise
        self._finish()
        self._engine.ended(self)
        return True

    def source_rank(self) -> int:
        return self.source if self.source >= 0 else int(self._progress.handle._source_rank())

    def done(self) -> bool:
        """Whether torch no longer uses the tensors."""
        return self._progress.done()


def reduces(engine: str, dtype: torch.dtype, op: ReduceOp) -> bool:
    """Whether an engine has a reduce op for a dtype."""
    if dtype not in DTYPES:
        return False
    if dtype.is_complex:
        return op in (ReduceOp.SUM, ReduceOp.AVG)
    if dtype is torch.bool:
        return op in _ON_BOOLS and (engine == "gloo" or op not in _ON_BITS)
    if dtype in _FLOATS:
        return op in _ON_NUMBERS or op is ReduceOp.AVG
    return op in _ON_NUMBERS or (engine == "gloo" and op in _ON_BITS)


def _gloo(store: GroupStore, rank: int, members: Sequence[Member], timeout: timedelta) -> Any:
    backend = _torch.ProcessGroupGloo
    # What the host's name resolves to may be an interface that does not even reach the host itself.
    alone = len({member.boot_id for member in members}) == 1
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or ("lo" if alone else "")
    options = backend._Options()
    options._timeout = timeout
    options._devices = [backend.create_device(interface=interface) if interface else backend.create_default_device()]
    return backend(store, rank, len(members), options)


def _nccl(store: GroupStore, rank: int, members: Sequence[Member], timeout: timedelta) -> Any:
    backend = _torch.ProcessGroupNCCL
    options = backend.Options()
    options._timeout = timeout
    return backend(store, rank, len(members), options)


def _bytes(tensor: Tensor) -> Tensor:
    return _flat(tensor).view(torch.uint8)


def _flat(tensor: Tensor) -> Tensor:
    """A contiguous tensor in one dimension. A dimension of size 1 may have any stride, which view would keep."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _first_line(error: BaseException) -> str:
    """What torch says, without the place in its source."""
    return re.sub(r"^\[\S+:\d+\] ", "", str(error).partition("\n")[0]).partition(" This is typically")[0]


def _within(seconds: float, done: Callable[[], bool]) -> bool:
    """Waits for so long until something is done; says whether it is."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def _leak(backend: Any) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))
