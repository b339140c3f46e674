"""The native engine: passes tensors to the core.

The core (core/) transfers bytes, and depends neither on Python nor on torch. This file checks tensors and keeps them
alive while the core uses them. `operands` copies tensors that are not contiguous or not in host memory. `connect`
connects the ranks, and `errors` contains the texts of failures.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from allranks import _core
from allranks._base.errors import (
    AllranksError,
    JoinError,
    NotInitializedError,
    UsageError,
)
from allranks._base.forks import Socket, forks, guard, refusal
from allranks._base.timeouts import seconds_of
from allranks._call.callsite import NOWHERE, line_of, site, stack_hash, where
from allranks._call.debug import DebugLevel, get_debug_level
from allranks._call.futures import End
from allranks._call.types import PremulSum, ReduceOp, Stats
from allranks._call.work import Work
from allranks._cluster.env import read_int
from allranks._cluster.host import cpus_of
from allranks._engines.base import Engine, Parent, never, not_begun
from allranks._engines.checks import (
    CODES,
    check_has_elements,
    check_own_piece,
    check_pieces,
    check_same_dtype,
    check_storage,
    check_tensor,
    factor_of,
    not_reduced,
    not_taken,
)
from allranks._engines.native.connect import (
    GroupMemory,
    HostConnections,
    confirm,
    connect,
)
from allranks._engines.native.errors import explain
from allranks._engines.native.shared_memory import SharedMemory
from allranks._engines.native.tuning import read_topology, read_tuning
from allranks._engines.native.window import NativeWindow
from allranks._engines.operands import Operands, OperandsWork
from allranks._engines.spec import Exchange

if TYPE_CHECKING:
    from allranks._rendezvous.rendezvous import Member

__all__ = ["NativeEngine", "TcpEngine", "work_of"]

# How a waiting rank polls before it sleeps (core/channel/shm.cc, docs/decisions/132). It spins first, unless there are
# more ranks than CPUs. Then it yields its CPU repeatedly. The longer it does, the less the wake-ups of other ranks
# disturb ranks that compute. (4 ranks on 2 CPUs, 0.4 ms of computation between calls: 1,330 rounds/s with 0.1 ms, 1,600
# with 1 ms.) If there are more compute threads than CPUs, other threads use the yielded time, and a longer time costs
# nothing.
_SPIN_US = 1.0
_YIELD_US = 1_000.0
_CROWDED_YIELD_US = 10_000.0
# The progress thread would take the CPU from the computation that its calls are to overlap with (docs/decisions/132).
_PROGRESS_YIELD_US = 100.0
# If very many ranks share a CPU, each of them would run several times before the last one arrives. They sleep
# immediately instead. (64 ranks on 2 CPUs, 4 B: 1,064 us with yielding, 356 us with sleeping. 16 ranks: 59 and 83 us.
# See docs/decisions/110.)
_MANY_ON_A_CPU = 12

# Pending works are checked for an end when there are this many, and then when their number has doubled since the last
# check. The cost per call is therefore constant.
_MANY_PENDING = 64

# Keeps the texts of call sites by instruction, so that an asynchronous call does not format one (docs/decisions/126).
_SITES = _core.Sites(line_of, NOWHERE, [])
_GROUPS = 2  # stack frames above NativeEngine._begin: the group's method is the first one, and its caller is next

# Bytes. The share of one pipe is limited to 16 KiB..2 MiB.
# The pipes for send and recv, one to each other rank, share this number of bytes of a rank's segment.
_PIPES_BYTES = 2 << 20
_PIPE_BYTES = (16 << 10, 2 << 20)

# Default and maximum of the MiB of another rank's messages that a rank keeps before a recv requests them. See
# core/p2p/point_to_point.h.
_EAGER_MIB = (8, 1 << 20)

_on_host = partial(Operands, on_host=True)

# The core calls `where` for the call site only when it needs one, because finding it takes some microseconds.
_core.set_where(where)
# The fast path accepts exactly these types: a subclass may have no memory of its own, or intercept operators.
_core.set_ordinary([Tensor, torch.nn.Parameter], ReduceOp)


class NativeEngine(Engine):
    """Collectives and messages: shared memory within a host, TCP between hosts; for tensors on any device."""

    name = "native"
    shares_memory = True
    """Whether ranks of one host share memory."""

    _short: _core.Now | None = None

    forks: int
    """The fork count of this process when the engine was created."""

    def __init__(
        self,
        rank: int,
        members: Sequence[Member],
        exchange: Exchange,
        group_name: str,
        timeout_s: float,
        parent: Parent | None = None,
    ) -> None:
        connect_s: float = getattr(exchange, "connect_s", timeout_s)
        self.rank = rank
        self.members = members
        self.group_name = group_name
        # Works whose tensors the core may still use, although the caller may have dropped all of them. A work is added
        # before the core receives its tensors, so that an exception in between cannot release a tensor.
        self._pending: set[NativeWork | _core.Started] = set()
        self._many = _MANY_PENDING
        self.timeout_s = timeout_s
        self.forks = forks()
        # In debug mode, the ranks compare call sites. The fast path is then not installed, because it does not hash the
        # call stack.
        self._debug = get_debug_level() is DebugLevel.DETAIL
        # The tcp engine treats each rank as a host of its own.
        hosts = [member.machine if self.shares_memory else str(r) for r, member in enumerate(members)]
        host_of = [hosts.index(host) for host in hosts]
        self._spans_hosts = len(set(host_of)) > 1
        self._host_of = host_of
        self._windows = 0  # windows that were created
        self._closed = False
        size = host_of.count(host_of[rank])
        sizes = _sizes(size, len(members), self._spans_hosts)
        local_rank = host_of[:rank].count(host_of[rank])
        shared = None
        if parent is not None:  # if the parent is closed, the exchange raises
            # Groups share the parent's liveness sockets, so a new group needs no descriptors of its own
            # (docs/decisions/079).
            shared = parent.engine.liveness([parent.ranks[r] for r, host in enumerate(hosts) if host == hosts[rank]])
        memory = GroupMemory(
            lambda: _core.create_segment(local_rank, size, sizes), lambda: _core.create_segments(size, sizes)
        )
        made = connect(rank, members, host_of, exchange, memory, connect_s, group_name, has_liveness=shared is not None)
        self._peers = made.peers
        self._trouble_with = made.peers.trouble_with if made.peers is not None else _no_trouble
        if made.peers is not None:
            made.peers.windows.timeout_s = timeout_s
        try:
            self.comm = _make_comm(rank, members, host_of, sizes, made, shared, timeout_s)
        except BaseException as error:
            for socket in made.liveness:
                if socket is not None:
                    socket.close()  # otherwise the other ranks would wait for this rank
            if made.peers is not None:
                made.peers.close()
            if isinstance(error, _core.Failure):
                words = explain(
                    error, "", group=group_name, rank=rank, members=members, last_calls=[], trouble_with=_no_trouble
                )
                raise JoinError(f"group '{group_name}' (rank {rank}) could not be created: {words}") from None
            raise
        if shared is not None:
            # A rank that fails now does not close the shared sockets, so the others would not detect the failure.
            try:
                confirm(rank, made, connect_s)
            except BaseException:
                self.close()
                raise

        if not self._debug:
            self._short = self._make_now()
            self.now = self._short.function
            self.begin = self._begin

    def _make_now(self) -> _core.Now:
        comm = self.comm  # not self: a call outlives the engine if the group is destroyed during the call
        trouble_with, rank, members, group_name = self._trouble_with, self.rank, self.members, self.group_name

        def explain_now(failure: _core.Failure, verb: str) -> AllranksError:
            calls = comm.last_calls()
            return explain(
                failure, verb, group=group_name, rank=rank, members=members, last_calls=calls, trouble_with=trouble_with
            )

        return _core.Now(self.comm, explain_now, self._pending, partial(_tidy, self._pending))

    # --- verbs ---

    def all_reduce(self, tensor: Tensor, op: ReduceOp | PremulSum, async_op: bool) -> Work | None:
        _, op, factor = self._check_reduced(tensor, op, "all_reduce")
        operands = _on_host("all_reduce", factor)
        work = operands.update(tensor)
        return self._call(operands, async_op, self.comm.all_reduce, *self._about(work), op)

    def reduce(self, tensor: Tensor, root: int, op: ReduceOp | PremulSum, async_op: bool) -> Work | None:
        _, op, factor = self._check_reduced(tensor, op, "reduce")
        operands = _on_host("reduce", factor)
        work = operands.update(tensor) if root == self.rank else operands.read(tensor)
        return self._call(operands, async_op, self.comm.reduce, *self._about(work), op, root)

    def broadcast(self, tensor: Tensor, root: int, async_op: bool) -> Work | None:
        self._check(tensor, "broadcast")
        operands = _on_host("broadcast")
        work = operands.read(tensor) if root == self.rank else operands.write(tensor)
        return self._call(operands, async_op, self.comm.broadcast, *self._about(work), root)

    def all_gather(self, outputs: Sequence[Tensor] | Tensor, tensor: Tensor, async_op: bool) -> Work | None:
        if (
            isinstance(outputs, (list, tuple))
            and len(outputs) == len(self.members)
            and all(isinstance(output, Tensor) for output in outputs)
            and len({output.numel() for output in outputs}) > 1
        ):
            check_own_piece("all_gather", outputs[self.rank], tensor, self.rank)
            # Tensors of different sizes are exchanged as in an all_to_all.
            return self._exchange("all_gather", outputs, [tensor] * len(self.members), async_op)
        self._check(tensor, "all_gather")
        operands = _on_host("all_gather")
        results = self._pieces(outputs, tensor, operands.write_each, "all_gather")
        work = operands.read(tensor, results)
        return self._call(operands, async_op, self.comm.all_gather, *self._about(work), self._places(results, work))

    def gather(self, tensor: Tensor, outputs: Sequence[Tensor] | None, root: int, async_op: bool) -> Work | None:
        self._check(tensor, "gather")
        operands = _on_host("gather")
        work = operands.read(tensor)
        results = [] if outputs is None else self._pieces(outputs, tensor, operands.write_each, "gather")
        outs = self._places(results, work)
        return self._call(operands, async_op, self.comm.gather, *self._about(work), outs, root)

    def scatter(self, tensor: Tensor, inputs: Sequence[Tensor] | None, root: int, async_op: bool) -> Work | None:
        self._check(tensor, "scatter")
        operands = _on_host("scatter")
        given = [] if inputs is None else self._pieces(inputs, tensor, operands.read_each, "scatter")
        work = operands.write(tensor)
        ins = self._places(given, work)
        return self._call(operands, async_op, self.comm.scatter, *self._about(work), ins, root)

    def reduce_scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor] | Tensor, op: ReduceOp | PremulSum, async_op: bool
    ) -> Work | None:
        _, op, factor = self._check_reduced(tensor, op, "reduce_scatter")
        operands = _on_host("reduce_scatter", factor)
        work = operands.write(tensor)
        given = self._pieces(inputs, tensor, partial(operands.read_each, results=(work,)), "reduce_scatter")
        ins = self._places(given, work)
        return self._call(operands, async_op, self.comm.reduce_scatter, *self._about(work), ins, op)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], async_op: bool) -> Work | None:
        return self._exchange("all_to_all", outputs, inputs, async_op)

    def _exchange(self, verb: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], async_op: bool) -> Work | None:
        code = self._check(inputs[0], verb)
        for tensor in (*inputs, *outputs):
            self._check(tensor, verb)
            check_same_dtype(verb, inputs[0], tensor)
        operands = _on_host(verb)
        ins, outs = operands.exchange(inputs, outputs, self.rank)
        return self._call(
            operands,
            async_op,
            self.comm.all_to_all,
            code,
            self._mark(None),
            [tensor.data_ptr() for tensor in ins],
            [tensor.nbytes for tensor in ins],
            [tensor.data_ptr() for tensor in outs],
            [tensor.nbytes for tensor in outs],
        )

    def barrier(self, async_op: bool) -> Work | None:
        return self._call(_on_host("barrier"), async_op, self.comm.barrier, self._mark(None))

    def send(self, tensor: Tensor, to: int, tag: int, async_op: bool) -> Work | None:
        if not async_op:
            try:
                # The fast path reads the tensor in C++. It returns False, without any effect, for an unusual tensor.
                if self.comm.send_now(tensor, to, tag):
                    return None
            except _core.Failure as failure:
                raise self.explain(failure, "send") from None
        code = self._check(tensor, "send")
        operands = _on_host("send")
        work = operands.read(tensor)
        about = work.data_ptr(), work.numel(), code, to, tag
        if async_op:
            return self._started(operands, self.comm.send, *about, True)
        try:
            self.comm.send(*about, False)
        except _core.Failure as failure:
            raise self.explain(failure, "send") from None
        return None

    def recv(self, tensor: Tensor, source: int, tag: int) -> int:
        try:
            sender = self.comm.recv_now(tensor, source, tag)
        except _core.Failure as failure:
            raise self.explain(failure, "recv") from None
        if sender >= 0:
            return sender
        code, operands = self._check(tensor, "recv"), _on_host("recv")
        work = operands.write(tensor)
        try:
            sender = self.comm.recv(work.data_ptr(), work.numel(), code, source, tag)
        except _core.Failure as failure:
            raise self.explain(failure, "recv") from None
        operands.finish()
        return sender

    def irecv(self, tensor: Tensor, source: int, tag: int) -> Work:
        code, operands = self._check(tensor, "recv"), _on_host("recv")
        work = operands.write(tensor)
        return self._started(operands, self.comm.start_recv, work.data_ptr(), work.numel(), code, source, tag)

    # --- other methods of an engine ---

    def empty_shared(self, nbytes: int) -> Tensor:
        memory = None
        if len(self.members) > 1:
            memory = SharedMemory(self, self._host_of).empty_shared(nbytes)
        return super().empty_shared(nbytes) if memory is None else memory

    def open_window(self) -> NativeWindow:
        self._windows += 1
        memory = SharedMemory(self, self._host_of)
        connections = self._peers.windows if self._peers is not None else None
        return NativeWindow(self, memory, len(self.members), connections, self._windows)

    def check_open(self) -> None:
        """Raise if the group is closed, or belongs to the parent process."""
        if self._closed:
            raise NotInitializedError(f"window: group '{self.group_name}' was destroyed.")
        if self.forks != forks():
            raise refusal(f"window on group '{self.group_name}': the group")

    def last_numbers(self) -> Sequence[int] | None:
        return [number for number, _ in self.comm.last_calls()]

    def record_in(self, recorder: _core.Recorder, group: int) -> bool:
        self.comm.record_in(recorder, group)
        return True

    def lost(self) -> Sequence[int]:
        return self.comm.lost()

    def find_gone(self, ranks: Sequence[int]) -> Sequence[int]:
        return () if self._peers is None else self._peers.find_gone(ranks)

    def set_timeout(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.comm.set_timeout(timeout_s)
        if self._peers is not None:
            self._peers.windows.timeout_s = timeout_s

    def abort(self) -> None:
        self.comm.abort()

    def liveness(self, ranks: Sequence[int]) -> _core.Liveness | None:
        return self.comm.liveness(list(ranks))

    def stats(self) -> Stats:
        return Stats(*self.comm.stats())

    def close(self) -> None:
        self._closed = True
        self.comm.close()
        # After the core: until here, its calls may still request connections from the server.
        if self._peers is not None:
            self._peers.close()
            self._peers = None
        # The fast path holds the communicator, so the next call must reach the checks of the ordinary path.
        self.now, self.begin, self._short = never, not_begun, None
        # The core has ended all calls, so it uses no tensor any more.
        self._pending.clear()

    def abandon(self) -> None:
        # Only the fast path is removed. The core closes its descriptors in the child itself (core/base/forks.h).
        self.now, self.begin, self._short = never, not_begun, None

    def explain(self, failure: _core.Failure, verb: str, goes_on: bool = False) -> AllranksError:
        """Return the error, with the names of ranks, for the facts that the core reports."""
        return explain(
            failure,
            verb,
            group=self.group_name,
            rank=self.rank,
            members=self.members,
            last_calls=self.comm.last_calls(),
            trouble_with=self._trouble_with,
            goes_on=goes_on,
        )

    # --- tensors ---

    def _check(self, tensor: Tensor, verb: str) -> int:
        """Return the core's code of the dtype. Raise if the elements of the tensor are not accessible."""
        check_tensor(verb, tensor)
        check_has_elements(verb, tensor, self.group_name, self.rank)
        code = CODES.get(tensor.dtype)
        if code is None or tensor.layout is not torch.strided:
            raise not_taken(verb, tensor)
        # Such a subclass passes `is_cpu`, but its address is 0, which the core would dereference.
        if (
            type(tensor) not in (Tensor, torch.nn.Parameter)
            and tensor.is_cpu
            and tensor.numel()
            and not tensor.data_ptr()
        ):
            raise UsageError(
                f"{verb}: a {type(tensor).__name__} has no memory of its own.\n  Pass the tensor in it: "
                "DTensor.to_local(), AsyncCollectiveTensor.wait()."
            )
        check_storage(verb, tensor)
        return code

    def _check_reduced(
        self, tensor: Tensor, op: ReduceOp | PremulSum, verb: str
    ) -> tuple[int, ReduceOp, float | Tensor | None]:
        """Return the core's codes of dtype and op, and the factor by which the operand is multiplied first."""
        code = self._check(tensor, verb)
        factor = factor_of(verb, op)
        op = ReduceOp.PREMUL_SUM if isinstance(op, PremulSum) else op
        if not _core.reduces(code, op):
            raise not_reduced(verb, tensor, op, lambda each: _core.reduces(code, each))
        return code, op, factor

    def _mark(self, tensor: Tensor | None) -> int:
        """Return a hash of the shape, and in debug mode of the call site, which the ranks compare, too."""
        # The shape is compared in debug mode only: programs may pass equal counts in different shapes
        # (docs/decisions/015).
        shape = 0 if tensor is None else _core.shape_hash(list(tensor.shape), self._debug)
        return shape | stack_hash() << 32 if self._debug else shape

    def _about(self, tensor: Tensor) -> tuple[int, int, int, int]:
        return tensor.data_ptr(), tensor.numel(), CODES[tensor.dtype], self._mark(tensor)

    def _pieces(
        self,
        pieces: Sequence[Tensor] | Tensor,
        like: Tensor,
        use: Callable[[Sequence[Tensor]], list[Tensor]],
        verb: str,
    ) -> list[Tensor]:
        """Return the tensors that the core uses for one tensor per rank, each like ``like``.

        The argument is a list, or one tensor that holds the tensors of all ranks in order.

        Returns:
            One tensor per rank, or the single tensor.
        """
        check_pieces(verb, pieces, like, len(self.members), self._check)
        return use((pieces,) if isinstance(pieces, Tensor) else pieces)

    def _places(self, used: Sequence[Tensor], like: Tensor) -> list[int]:
        """Return the address of each rank's part of these tensors. Empty if there are none."""
        if len(used) != 1:
            return [piece.data_ptr() for piece in used]
        first = used[0].data_ptr()
        return [first + rank * like.nbytes for rank in range(len(self.members))]

    # --- calls ---

    def _call(
        self, operands: Operands, async_op: bool, method: Callable[..., _core.Request | None], *args: Any
    ) -> Work | None:
        if async_op:
            # The call may fail when its frames are gone, so the call site is determined now.
            return self._started(operands, method, *args, site())
        try:
            method(*args, None)
        except _core.Failure as failure:
            raise self.explain(failure, operands.verb) from None
        operands.finish()
        return None

    def _started(self, operands: Operands, method: Callable[..., _core.Request | None], *args: Any) -> NativeWork:
        work = NativeWork(self, operands)
        try:
            self._enter(work, method, *args)
        except _core.Failure as failure:
            raise self.explain(failure, operands.verb) from None
        return work

    def _begin(
        self, verb: str, tensor: object, pieces: object = None, op: object = None, root: object = -1, /
    ) -> Work | None:
        """See base.Begin."""
        short = self._short
        if short is None:  # closed during the call
            return None
        started = short.start(verb, tensor, pieces, op, root, _SITES, _GROUPS)
        return None if started is None else PlainWork(started)

    def prepare(
        self, verb: str, tensor: object, pieces: object = None, op: object = None, root: object = -1
    ) -> Callable[[], bool] | None:
        return None if self._short is None else self._short.prepare(verb, tensor, pieces, op, root)

    def _enter(self, work: NativeWork, method: Callable[..., _core.Request | None], *args: Any) -> None:
        """Start a call, and keep its work alive until it has ended."""
        # Without this check, works that are never waited for would keep their tensors until the group is closed.
        if len(self._pending) > self._many:
            self._many = _tidy(self._pending)
        self._pending.add(work)
        # Before the core receives the tensors: see `_pending`.
        try:
            work.request = method(*args)
        except BaseException:
            # The call was not begun, so no thread would remove the work later.
            self._pending.discard(work)
            raise

    def wait(self, work: NativeWork, timeout_s: float) -> None:
        """Block until the core no longer uses the work's tensors. Raises its error."""
        assert isinstance(work.request, _core.Request)
        try:
            self.comm.wait(work.request, timeout_s)
        except BaseException as error:
            # A wait that timed out or was interrupted leaves the call running: the core still uses the tensors.
            done = work.done()
            if done:
                self._pending.discard(work)
            if not isinstance(error, _core.Failure):
                raise
            raise self.explain(error, work.verb, not done) from None
        self._pending.discard(work)


def _tidy(pending: set[NativeWork | _core.Started]) -> int:
    """Remove ended calls from the pending ones. Return the number of calls at which to repeat this."""
    for done in [work for work in tuple(pending) if work.done()]:
        pending.discard(done)
    return max(_MANY_PENDING, 2 * len(pending))


def _sizes(size: int, ranks: int, spans_hosts: bool) -> _core.Sizes:
    """Return the sizes of a segment of one of ``size`` ranks of a host."""
    sizes = _core.Sizes()
    # Whole pages, because a pipe is allocated when it is first written (docs/decisions/077).
    sizes.pipe = min(max(_PIPES_BYTES // size // 4096 * 4096, _PIPE_BYTES[0]), _PIPE_BYTES[1])
    if spans_hosts:
        sizes.ranks = ranks
    return sizes


def _make_comm(
    rank: int,
    members: Sequence[Member],
    host_of: list[int],
    sizes: _core.Sizes,
    made: HostConnections,
    shared: _core.Liveness | None,
    timeout_s: float,
) -> _core.Comm:
    """Pass the connections to the core. ``shared``: the liveness sockets of the parent."""
    size = host_of.count(host_of[rank])
    # cpus_of counts the CPUs of all ranks of the host, so ranks that srun or mpirun has bound are not crowded.
    cpus = cpus_of(members[r].pid for r, host in enumerate(host_of) if host == host_of[rank])
    many = size > _MANY_ON_A_CPU * cpus
    crowded = size * torch.get_num_threads() > cpus
    polling = (_SPIN_US if size <= cpus else 0.0, 0.0 if many else _CROWDED_YIELD_US if crowded else _YIELD_US)
    # Each rank has two threads that poll: the caller's thread and the progress thread.
    progress_polling = (_SPIN_US if 2 * size <= cpus else 0.0, 0.0 if many else _PROGRESS_YIELD_US)
    eager_mib = read_int(os.environ, "ALLRANKS_MESSAGE_BUFFER", 0, _EAGER_MIB[1])
    eager = (_EAGER_MIB[0] if eager_mib is None else eager_mib) << 20
    tuning, topology = read_tuning(os.environ), read_topology(os.environ)
    near = [topology] if topology else []
    # No fork may happen while descriptors have no owner: the child would inherit them.
    with guard:
        heartbeats = _numbers(made.heartbeats)
        # The parent's sockets, if it has any: they also show the end of a process to this group.
        liveness = shared or _core.Liveness(_numbers(made.liveness))
        segments = [segment.detach() for segment in made.segments]
        if made.peers is None:
            return _core.Comm(
                rank, sizes, segments, liveness, timeout_s, polling, progress_polling, eager, tuning, *near
            )
        made.peers.comm = _core.Comm.across_hosts(
            rank, host_of, sizes, segments, liveness, heartbeats,
            made.peers.asking_pipe, made.peers.number, timeout_s, polling, progress_polling, eager, tuning, topology,
            made.fabric or _core.FabricChoice(),
        )  # fmt: skip
        return made.peers.comm


def _no_trouble(_: int) -> str | None:
    return None


def _numbers(sockets: Sequence[Socket | None]) -> list[int]:
    """Return the descriptors of sockets, -1 for None. The core takes ownership of them."""
    return [-1 if each is None else each.detach() for each in sockets]


class TcpEngine(NativeEngine):
    """The same engine over TCP between all ranks, including those of one host."""

    name = "tcp"
    shares_memory = False


class NativeWork(OperandsWork):
    """An asynchronous call on the native engine."""

    request: _core.Request | _core.Started | None = None  # None until the core has begun the call

    def __init__(self, engine: NativeEngine, operands: Operands) -> None:
        super().__init__(operands)
        self._engine = engine

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        if self._finished:
            return True
        if self._error is not None:
            raise self._error
        try:
            # -1: the wait has no limit of its own, so the timeout of the group applies.
            self._await(max(seconds_of(timeout), 0.0) if timeout else -1.0)
        except AllranksError as error:
            # An error of this wait alone, such as its timeout, is not kept: a later wait may succeed.
            if self.done():
                self._error = error
            raise
        self._finish()
        return True

    def _await(self, timeout_s: float) -> None:
        self._engine.wait(self, timeout_s)

    def source_rank(self) -> int:
        assert self.request is not None
        return self.request.source()

    def done(self) -> bool:
        """Return whether the core no longer uses the tensors."""
        return self.request is not None and self.request.done()

    def end(self, ticket: int) -> End:
        if self.request is None or self.done():
            # No notification would come any more for a call that has ended.
            return End.PAST
        self.request.watch(ticket)
        return End.NOTIFIED


class PlainWork(NativeWork):
    """A work whose tensors the core uses directly, so that no action remains when it has ended."""

    # Class attributes, so that the constructor, which runs in each asynchronous call, sets one attribute only.
    _error = None
    _finished = False

    request: _core.Started

    def __init__(self, started: _core.Started) -> None:
        self.request = started

    @property
    def _forks(self) -> int:  # type: ignore[override]
        return forks() - self.request.inherited

    @property
    def verb(self) -> str:  # type: ignore[override]
        return self.request.about[0]

    def _await(self, timeout_s: float) -> None:
        self.request.wait(timeout_s)

    def _finish(self) -> None:
        self._finished = True


def work_of(started: _core.Started, ranks: int) -> Work:
    """Return the Work of a call of this number of ranks that was begun without one, with its results."""
    work = PlainWork(started)
    verb, tensor, pieces = started.about
    match verb:
        case "all_gather" if not isinstance(pieces, Tensor):
            work.shown = pieces
        case "all_gather":
            work.shown = partial(pieces.chunk, ranks)
        case "all_to_all":
            work.shown = (pieces,)
        case "barrier":
            pass
        case _:
            work.shown = (tensor,)
    return work
