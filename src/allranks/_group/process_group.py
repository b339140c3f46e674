"""ProcessGroup: ranks that call collectives together. The object behind the public functions.

It makes each check that does not depend on the engine once, and passes the call on. Ranks are numbered within the group
here. The functions (`_api`) translate the ranks of the world.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, cast, overload

import msgspec

from allranks._base.errors import NotInitializedError, TimeoutError, UsageError
from allranks._base.forks import follow, forks, refusal
from allranks._base.integers import integer_of
from allranks._base.public import publish
from allranks._base.timeouts import seconds_of
from allranks._call.types import PremulSum, ReduceOp, Stats, as_reduce_op
from allranks._cluster.env import notice_seconds
from allranks._engines.base import Parent, never, not_begun
from allranks._group import reconfigure, survival
from allranks._group.plan import Plan
from allranks._rendezvous.rendezvous import this_member
from allranks._trace import memory
from allranks._trace.watcher import WatchedPeer, unwatch, watch

if TYPE_CHECKING:
    from datetime import timedelta

    from torch import Tensor

    from allranks._call.work import Work
    from allranks._engines.base import Engine
    from allranks._group.early import EarlyGroups
    from allranks._group.succession import Lineage
    from allranks._rendezvous.rendezvous import Member
    from allranks._rendezvous.succession import Decision

    Op: TypeAlias = ReduceOp | PremulSum

__all__ = ["ProcessGroup"]

_SHORTEST_S = 1e-6  # seconds; a wait of zero would mean the timeout of the group


class ProcessGroup:
    """A group of ranks and the rank of this process in it.

    Attributes:
        name: The name of the group in error messages.
        members: The members, by rank in this group. ``members[i].rank`` is the rank in the world.
        ranks: The ranks of the members in the world, by rank in this group.
        in_world_order: Whether every rank has the same number here and in the world.
        timeout_s: Seconds that a call waits for other ranks.
        before_close: Called before the group closes, unless it is lost. It stops everything that still needs the group.
        closing: Called when the group closes.
        lineage: Its group history. None if its ranks cannot decide on the next generation after a loss.
        entered: The decision by which this process joined ranks that were already in their training loop, else None.
        register: Called with each group that ``shrink`` creates from this one.
        early: The groups created before the training loop, if this is the world of an elastic job, else None.
        renewed: Called when the group has a new engine after a loss.
        is_world: Whether its ranks are those of the world.
        is_passing: Whether its owner creates a new group when this one is closed.
        now: The fast path of its engine (see ``Engine.now``).
        record_numbers: The numbers of the group in the record of this process's calls, one for each of its engines.
    """

    def __init__(self, engine: Engine, name: str, rank: int, members: Sequence[Member], timeout_s: float) -> None:
        self.name = name
        self.members = tuple(members)
        self.ranks = tuple(member.rank for member in members)
        self.timeout_s = timeout_s
        self.in_world_order = self.ranks == tuple(range(len(self.ranks)))
        self._rank = rank
        self._size = len(self.ranks)
        self._engine: Engine | None = engine
        self._plans: weakref.WeakSet[Plan] = weakref.WeakSet()
        self._shorten(engine)
        self.before_close: Callable[[], None] | None = None
        self.closing: Callable[[], None] | None = None
        self.lineage: Lineage | None = None
        self.entered: Decision | None = None
        self._ballot: Tensor | None = None
        self.is_world = self.is_passing = False
        self._place: reconfigure.Place | None = None
        self.register: Callable[[ProcessGroup], None] | None = None
        self.early: EarlyGroups | None = None
        self.renewed: Callable[[], None] | None = None
        self._closed_why = "was destroyed by destroy_process_group"
        self._forks = forks()
        self._record(engine, rank)
        follow(self)

    def __repr__(self) -> str:
        engine = self._engine.name if self._engine else "destroyed"
        return f"<ProcessGroup {self.name!r}: rank {self._rank} of {self._size}, {engine}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"process group '{self.name}' belongs to its process and cannot be pickled or copied: pass its ranks,"
            f" {list(self.ranks)}, and call new_group there"
        )

    def _record(self, engine: Engine, rank: int) -> None:
        """Register the group with the recorder. Each engine counts its own calls, so each is recorded as a group."""
        self._recorded: list[Callable[[], None]] = []
        self.record_numbers: list[int] = []
        me = self.members[rank]
        recorder = memory.recorder(me.rank, len(self.members), me.host)
        if recorder is None:
            return
        for device, part in engine.parts().items():
            name = f"{self.name} on {device}" if self._recorded else self.name
            number = recorder.add_group(name, part.name, rank, self.ranks)
            part.record_in(recorder, number)
            self.record_numbers.append(number)
            self._recorded.append(partial(recorder.close_group, number))
        machine = self.members[rank].machine
        watch(
            self,
            me.rank,
            lambda: [WatchedPeer(m.rank, m.pid, m.host, m.machine == machine) for m in self.members],
            notice_seconds(os.environ),
        )

    def last_numbers(self) -> Sequence[int] | None:
        """Return the number of the last collective that each rank has begun, as known here. None: unknown."""
        return self._engine.last_numbers() if self._engine is not None and not self.inherited else None

    def rank(self) -> int:
        """Return the rank of this process, 0 to size - 1."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._size

    @property
    def backend(self) -> str:
        """The name of the engine."""
        return self._existing().name

    @property
    def device(self) -> str:
        """The type of device whose tensors the group can always transfer."""
        return self._live().device

    @property
    def highest_tag(self) -> int:
        """The highest tag of a message that the group can send."""
        return self._live().highest_tag

    @overload
    def all_reduce(self, tensor: Tensor, op: Op = ..., async_op: Literal[False] = ...) -> None: ...
    @overload
    def all_reduce(self, tensor: Tensor, op: Op = ..., async_op: Literal[True] = ...) -> Work: ...
    @overload
    def all_reduce(self, tensor: Tensor, op: Op = ..., async_op: bool = ...) -> Work | None: ...
    def all_reduce(
        self, tensor: Tensor, op: ReduceOp | PremulSum = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """See :func:`allranks.all_reduce`."""
        if not async_op and self.now("all_reduce", tensor, None, op):
            return None
        work = self._begin("all_reduce", tensor, None, op) if async_op else None
        if work is not None:
            work.shown = (tensor,)
            return work
        engine = self._live()
        op = op if type(op) is ReduceOp else as_reduce_op(op)
        try:
            return _showing(engine.all_reduce(tensor, op, async_op), (tensor,))
        except UsageError:
            if not tensor.is_sparse:
                raise
        from allranks._group import sparse  # it combines dense calls, so it is not part of an engine

        return sparse.all_reduce(self, tensor, op, async_op)

    @overload
    def reduce(self, tensor: Tensor, dst: int, op: Op = ..., async_op: Literal[False] = ...) -> None: ...
    @overload
    def reduce(self, tensor: Tensor, dst: int, op: Op = ..., async_op: Literal[True] = ...) -> Work: ...
    @overload
    def reduce(self, tensor: Tensor, dst: int, op: Op = ..., async_op: bool = ...) -> Work | None: ...
    def reduce(
        self, tensor: Tensor, dst: int, op: ReduceOp | PremulSum = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """See :func:`allranks.reduce`."""
        if not async_op and self.now("reduce", tensor, None, op, dst):
            return None
        work = self._begin("reduce", tensor, None, op, dst) if async_op else None
        if work is None:
            work = self._live().reduce(tensor, self._member(dst, "dst"), as_reduce_op(op), async_op)
        return _showing(work, (tensor,))

    @overload
    def broadcast(self, tensor: Tensor, src: int, async_op: Literal[False] = ...) -> None: ...
    @overload
    def broadcast(self, tensor: Tensor, src: int, async_op: Literal[True] = ...) -> Work: ...
    @overload
    def broadcast(self, tensor: Tensor, src: int, async_op: bool = ...) -> Work | None: ...
    def broadcast(self, tensor: Tensor, src: int, async_op: bool = False) -> Work | None:
        """See :func:`allranks.broadcast`."""
        if not async_op and self.now("broadcast", tensor, None, None, src):
            return None
        work = self._begin("broadcast", tensor, None, None, src) if async_op else None
        if work is None:
            work = self._live().broadcast(tensor, self._member(src, "src"), async_op)
        return _showing(work, (tensor,))

    @overload
    def all_gather(
        self, outputs: Sequence[Tensor] | Tensor, tensor: Tensor, async_op: Literal[False] = ...
    ) -> None: ...
    @overload
    def all_gather(self, outputs: Sequence[Tensor] | Tensor, tensor: Tensor, async_op: Literal[True] = ...) -> Work: ...
    @overload
    def all_gather(self, outputs: Sequence[Tensor] | Tensor, tensor: Tensor, async_op: bool = ...) -> Work | None: ...
    def all_gather(self, outputs: Sequence[Tensor] | Tensor, tensor: Tensor, async_op: bool = False) -> Work | None:
        """See :func:`allranks.all_gather` (a list) and :func:`allranks.all_gather_single` (one tensor)."""
        if not async_op and self.now("all_gather", tensor, outputs):
            return None
        work = self._begin("all_gather", tensor, outputs) if async_op else None
        if work is None:
            work = self._live().all_gather(outputs, tensor, async_op)
        if isinstance(outputs, (list, tuple)):
            return _showing(work, outputs)
        whole = cast("Tensor", outputs)
        # The results have the form that gloo returns for CPU tensors and nccl for others.
        return _showing(work, partial(whole.chunk, self._size)) if whole.is_cpu else _showing(work, (whole,))

    @overload
    def gather(
        self, tensor: Tensor, outputs: Sequence[Tensor] | None, dst: int, async_op: Literal[False] = ...
    ) -> None: ...
    @overload
    def gather(
        self, tensor: Tensor, outputs: Sequence[Tensor] | None, dst: int, async_op: Literal[True] = ...
    ) -> Work: ...
    @overload
    def gather(
        self, tensor: Tensor, outputs: Sequence[Tensor] | None, dst: int, async_op: bool = ...
    ) -> Work | None: ...
    def gather(self, tensor: Tensor, outputs: Sequence[Tensor] | None, dst: int, async_op: bool = False) -> Work | None:
        """See :func:`allranks.gather`."""
        if not async_op and self.now("gather", tensor, outputs, None, dst):
            return None
        work = self._begin("gather", tensor, outputs, None, dst) if async_op else None
        if work is None:
            self._only_on(outputs, self._member(dst, "dst"), "gather_list", "dst")
            work = self._live().gather(tensor, outputs or None, dst, async_op)
        return _showing(work, outputs or ())

    @overload
    def scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor] | None, src: int, async_op: Literal[False] = ...
    ) -> None: ...
    @overload
    def scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor] | None, src: int, async_op: Literal[True] = ...
    ) -> Work: ...
    @overload
    def scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor] | None, src: int, async_op: bool = ...
    ) -> Work | None: ...
    def scatter(self, tensor: Tensor, inputs: Sequence[Tensor] | None, src: int, async_op: bool = False) -> Work | None:
        """See :func:`allranks.scatter`."""
        if not async_op and self.now("scatter", tensor, inputs, None, src):
            return None
        work = self._begin("scatter", tensor, inputs, None, src) if async_op else None
        if work is None:
            self._only_on(inputs, self._member(src, "src"), "scatter_list", "src")
            work = self._live().scatter(tensor, inputs or None, src, async_op)
        return _showing(work, (tensor,))

    @overload
    def reduce_scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor] | Tensor, op: Op = ..., async_op: Literal[False] = ...
    ) -> None: ...
    @overload
    def reduce_scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor] | Tensor, op: Op = ..., async_op: Literal[True] = ...
    ) -> Work: ...
    @overload
    def reduce_scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor] | Tensor, op: Op = ..., async_op: bool = ...
    ) -> Work | None: ...
    def reduce_scatter(
        self,
        tensor: Tensor,
        inputs: Sequence[Tensor] | Tensor,
        op: ReduceOp | PremulSum = ReduceOp.SUM,
        async_op: bool = False,
    ) -> Work | None:
        """See :func:`allranks.reduce_scatter` (a list) and :func:`allranks.reduce_scatter_single` (one tensor)."""
        if not async_op and self.now("reduce_scatter", tensor, inputs, op):
            return None
        work = self._begin("reduce_scatter", tensor, inputs, op) if async_op else None
        if work is None:
            work = self._live().reduce_scatter(tensor, inputs, as_reduce_op(op), async_op)
        return _showing(work, (tensor,))

    @overload
    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], async_op: Literal[False] = ...
    ) -> None: ...
    @overload
    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], async_op: Literal[True] = ...
    ) -> Work: ...
    @overload
    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], async_op: bool = ...) -> Work | None: ...
    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], async_op: bool = False) -> Work | None:
        """See :func:`allranks.all_to_all`."""
        for what, tensors in (("output", outputs), ("input", inputs)):
            if len(tensors) != self._size:
                raise UsageError(f"all_to_all: expected {self._size} {what} tensors, one per rank, not {len(tensors)}")
        return _showing(self._live().all_to_all(outputs, inputs, async_op), outputs)

    @overload
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = ...,
        input_split_sizes: Sequence[int] | None = ...,
        async_op: Literal[False] = ...,
    ) -> None: ...
    @overload
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = ...,
        input_split_sizes: Sequence[int] | None = ...,
        async_op: Literal[True] = ...,
    ) -> Work: ...
    @overload
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = ...,
        input_split_sizes: Sequence[int] | None = ...,
        async_op: bool = ...,
    ) -> Work | None: ...
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """See :func:`allranks.all_to_all_single`."""
        even = not output_split_sizes and not input_split_sizes
        if even and not async_op and self.now("all_to_all", input, output):
            return None
        work = self._begin("all_to_all", input, output) if even and async_op else None
        if work is None:
            outputs = self._split(output, output_split_sizes, "output")
            inputs = self._split(input, input_split_sizes, "input")
            work = self._live().all_to_all(outputs, inputs, async_op)
        return _showing(work, (output,))

    @overload
    def barrier(self, async_op: Literal[False] = ...) -> None: ...
    @overload
    def barrier(self, async_op: Literal[True] = ...) -> Work: ...
    @overload
    def barrier(self, async_op: bool = ...) -> Work | None: ...
    def barrier(self, async_op: bool = False) -> Work | None:
        """See :func:`allranks.barrier`."""
        if not async_op and self.now("barrier", None):
            return None
        work = self._begin("barrier", None) if async_op else None
        return self._live().barrier(async_op) if work is None else work

    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        """See :func:`allranks.monitored_barrier`."""
        work = self.barrier(True)
        assert work is not None
        try:
            work.wait(None if timeout is None else max(seconds_of(timeout), _SHORTEST_S))
        except TimeoutError as error:
            seconds = self.timeout_s if timeout is None else seconds_of(timeout)
            error.args = (f"{error}\n  {self._in_torchs_words(error.ranks, seconds, wait_all_ranks)}",)
            raise

    def plan(self, verb: str, *args: Any, **named: Any) -> Plan:
        """Prepare a call that is made many times on the same tensors, like MPI's persistent collectives.

        Args:
            verb: ``all_reduce``, ``reduce``, ``broadcast``, ``all_gather``, ``gather``, ``scatter``,
                ``reduce_scatter``, ``all_to_all``, ``all_to_all_single`` or ``barrier``.
            args: Positional arguments of this group's method of that name.
            named: Keyword arguments of that method, except ``async_op``.

        Returns:
            A plan: ``plan()`` makes the call, ``plan(async_op=True)`` starts it and returns a Work. The plan keeps the
            tensors, and looks up their memory in each call. For the other ranks it is the ordinary call: each of them
            may use a plan or not. The trace shows it like any other call.

        Raises:
            UsageError: The verb does not exist. Invalid tensors are reported by the plan's calls.
            TypeError: The method does not accept these arguments.

        Cost:
            For a small call on the native engine, about 0.2 us less than the method.

        Example:
            >>> import torch, allranks as dist
            >>> dist.init_process_group()
            >>> loss = torch.ones(1)
            >>> reduce_loss = dist.group.WORLD.plan("all_reduce", loss, op=dist.ReduceOp.AVG)
            >>> for _ in range(3):
            ...     reduce_loss()
            >>> loss.item()
            1.0
            >>> dist.destroy_process_group()
        """
        return Plan(self, verb, *args, **named)

    # Methods with the names of torch's own methods, for code that calls those. They take lists and return a Work.

    def allreduce(self, tensors: Sequence[Tensor] | Tensor, opts: Any = ReduceOp.SUM) -> Work:
        """``all_reduce`` of a tensor, or of a list of one tensor, with a reduce op or torch's AllreduceOptions."""
        work = self.all_reduce(_only(tensors, "allreduce"), getattr(opts, "reduceOp", opts), True)
        assert work is not None
        return work

    def allgather(
        self, output_tensors: Sequence[Sequence[Tensor]], input_tensors: Sequence[Tensor] | Tensor, opts: Any = None
    ) -> Work:
        """``all_gather`` of a tensor into a list, or with lists of one element each. ``opts`` has no effect here."""
        outputs: Any = (
            _only(output_tensors, "allgather") if isinstance(input_tensors, (list, tuple)) else output_tensors
        )
        work = self.all_gather(outputs, _only(input_tensors, "allgather"), True)
        assert work is not None
        return work

    def alltoall(self, output_tensors: Sequence[Tensor], input_tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """``all_to_all``. ``opts`` has no effect here."""
        work = self.all_to_all(output_tensors, input_tensors, True)
        assert work is not None
        return work

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """See :func:`allranks.send`."""
        self._live().send(tensor, self._other(dst, "dst"), _tag(tag), False)

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> int:
        """See :func:`allranks.recv`."""
        return self._live().recv(tensor, self._source(src), _tag(tag))

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        """See :func:`allranks.isend`."""
        work = self._live().send(tensor, self._other(dst, "dst"), _tag(tag), True)
        assert work is not None
        return work

    def irecv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Work:
        """See :func:`allranks.irecv`."""
        work = self._live().irecv(tensor, self._source(src), _tag(tag))
        work.shown = (tensor,)
        return work

    def empty_shared(self, nbytes: int) -> Tensor:
        """See :func:`allranks.empty_shared`. Returns bytes."""
        return self._live().empty_shared(nbytes)

    def stats(self) -> Stats:
        """See :class:`allranks.Stats`."""
        return self._live().stats()

    # After a loss. See docs/resilience.md.

    def failed_ranks(self) -> list[int]:
        """Return the ranks that this process has detected as lost: dead, unreachable, or no longer in the group.

        The ranks of one host detect a death within some milliseconds. Ranks of other hosts detect it when they make a
        call, or by the heartbeats between hosts. The result can differ between ranks. The results of ``agree`` and
        ``shrink`` cannot.

        Cost:
            One system call for each rank of this host.
        """
        return list(self._live().lost())

    def abort(self) -> None:
        """Abort all calls of the group, on every rank: the pending calls immediately, and all later calls.

        They raise AbortedError. Afterwards only ``shrink`` can be called on the group. On gloo, the other ranks detect
        that this rank has left. On nccl, only the calls of this rank end, so each rank must call it.

        Raises:
            UsageError: The engine does not support it (mpi).
        """
        self._live().abort()

    def agree(self, value: int = 1) -> int:
        """Return the minimum of all ranks' values. It is the same on every surviving rank, whatever ranks are lost.

        A rank that is lost before it has contributed its value counts as 0, unless a survivor already has the outcome.
        All ranks call it, in the same order as the group's collectives. Afterwards the group may be broken. Its next
        call then raises, and ``shrink`` creates a working group.

        Args:
            value: An integer of 64 bits, at least 0; or a bool.

        Raises:
            ExcludedError: The other ranks have continued without this rank.
            StoreLostError: The store on which the ranks decide is lost.
            UsageError: A rank is lost, and the ranks have no store that outlives them.

        Cost:
            An all_reduce of 8 bytes. After a loss, some round trips to the store.
        """
        return survival.agree(self, value)

    def shrink(self, ranks_to_exclude: Sequence[int] = (), timeout: timedelta | float | None = None) -> ProcessGroup:
        """Return the group of the remaining ranks. All of them call it. This group is closed.

        The ranks decide on the store of the rendezvous which ranks remain: those that no rank has detected as lost.
        There is one decision, even if more ranks are lost during the call. A rank that calls too late raises
        ExcludedError. The order of the ranks does not change.

        Args:
            ranks_to_exclude: Ranks of this group to exclude although they are alive. They must not call it.
            timeout: How long to wait for ranks that are not known to be lost, a timedelta or seconds. They are excluded
                afterwards. None: the timeout of the group's calls.

        Raises:
            ExcludedError: The other ranks have continued without this rank.
            StoreLostError: The store is lost, so the ranks cannot decide.
            UsageError: The ranks have no store that outlives them.

        Cost:
            Some round trips to the store, and the cost of creating a group.
        """
        return survival.shrink(self, ranks_to_exclude, None if timeout is None else seconds_of(timeout))

    def reconfigure_handle(self) -> str:
        """Return the handle of this process's part of the group, a text for the other processes of a reconfiguration.

        It does not change while the group exists in this process. From the first call on, a thread of this process
        serves the other processes. It listens on a socket of this host. If the job may span other hosts, it also
        listens on a TCP port, for processes that have the job's secret.

        Raises:
            ConfigError: Other hosts may take part, and there is no secret or no port.
        """
        self._live()
        if self._place is None:
            self._place = reconfigure.Place(self._rank)
        return self._place.handle

    def reconfigure(
        self, uuid: int, handles: Sequence[str] | AbstractSet[str], timeout: timedelta | float | None = None
    ) -> None:
        """Make the processes with these handles the members of the group, in this object.

        All of them call it, and no other process does. They may be members of this group, of another one, or of none.
        If it fails, the group is unchanged, and the next attempt needs another uuid. If it succeeds, pending calls of
        the group have ended with an error. Groups that were created from it do not change.

        Args:
            uuid: An integer that none of the processes has used before, the same on all.
            handles: The results of ``reconfigure_handle`` of all processes, the same on all: a list, in the order of
                the ranks; or a set, which is sorted by the ranks at the time when the handles were created.
            timeout: How long to wait for the others, a timedelta or seconds. None: the timeout of the group's calls.

        Raises:
            JoinError: Processes did not arrive, or have exited. The message names them.
            MismatchError: Another process passed other handles, or has a group on another engine.
            UsageError: The uuid was used before, or a handle is invalid, is a duplicate, or this process's own is
                missing.

        Cost:
            Some round trips to the store of the first handle, and the cost of creating a group.

        Example:
            >>> import allranks as dist
            >>> dist.init_process_group()
            >>> group = dist.group.WORLD
            >>> group.reconfigure(1, [group.reconfigure_handle()])
            >>> group.size()
            1
            >>> dist.destroy_process_group()
        """
        self.reconfigure_handle()
        assert self._place is not None
        seconds = self.timeout_s if timeout is None else seconds_of(timeout)
        reconfigure.reconfigure(self, self._place, uuid, handles, seconds)

    @classmethod
    def unconnected(cls, backend: str, name: str, timeout_s: float, number: int) -> ProcessGroup:
        """Return a group without members before its first reconfiguration. Its rank and size are -1.

        Args:
            backend: The engine that it gets then.
            name: The name of the group.
            timeout_s: The timeout of its calls, in seconds.
            number: The number by which handles are sorted.
        """
        made = cls(reconfigure.Unconnected(backend, name), name, 0, [this_member(0, 1)], timeout_s)
        made._rank = made._size = -1
        made._place = reconfigure.Place(number)
        return made

    @property
    def _reconfigured(self) -> bool:
        """Whether its members are those of a reconfiguration."""
        return self._place is not None and bool(self._place.used)

    def successor(self, engine: Engine, rank: int, members: Sequence[Member]) -> ProcessGroup:
        """Close this group, and return a group that replaces it."""
        lineage, self.lineage = self.lineage, None
        self.close()
        made = ProcessGroup(engine, self.name, rank, members, self.timeout_s)
        made.lineage, made.register = lineage, self.register
        return made

    @property
    def engine(self) -> Engine:
        """The engine that transfers the group's tensors."""
        return self._existing()

    def meet_again(self, members: Sequence[Member], engine: Engine) -> None:
        """Set the members and register a new engine. The ranks are the same, but some are other processes now."""
        for close in self._recorded:
            close()
        unwatch(self)
        self.members = tuple(members)
        self._record(engine, self._rank)

    def use(self, engine: Engine) -> None:
        """Send calls to this engine from now on. The present engine was a `Prelude` in front of it."""
        self._engine = engine
        self._shorten(engine)

    def renumbered(self) -> ProcessGroup:
        """Turn this group into the world: its ranks become the world's. Return it."""
        members = [msgspec.structs.replace(m, rank=r, world_size=self._size) for r, m in enumerate(self.members)]
        self.members = tuple(members)
        self.ranks = tuple(range(self._size))
        self.in_world_order = True
        return self

    def ballot(self) -> Tensor:
        """Return a tensor of one integer for ``agree``, on a device whose tensors the group transfers."""
        if self._ballot is None:
            import torch

            self._ballot = torch.zeros(1, dtype=torch.int64, device=self.device)
        return self._ballot

    def _become(self, engine: Engine, rank: int, members: Sequence[Member]) -> None:
        """Put a new engine, rank and members into this object. The old engine is closed."""
        old = self._engine
        # Remove the fast path first, so that no call uses an engine that is being closed.
        self._shorten(None)
        if old is not None:
            old.close()
            unwatch(self)
            for close in self._recorded:
                close()
        self.members = tuple(members)
        self.ranks = tuple(member.rank for member in members)
        self.in_world_order = self.ranks == tuple(range(len(self.ranks)))
        self._rank = rank
        self._size = len(self.ranks)
        self._engine = engine
        self._shorten(engine)
        self._record(engine, rank)
        if self.renewed is not None:
            self.renewed()

    def parent_of(self, ranks: Sequence[int]) -> Parent:
        """Return this group as the parent through which a group of these ranks of the world is created."""
        return Parent(self._live(), [self.ranks.index(rank) for rank in ranks])

    @property
    def _is_open(self) -> bool:
        return self._engine is not None

    def _close_because(self, why: str) -> None:
        """Leave the group. Later calls raise an error with this reason."""
        if self._is_open:
            self._closed_why = why
        self.before_close = None
        self.close()

    def close(self) -> None:
        """Leave the group. Later calls raise. Idempotent."""
        if self._place is not None:
            self._place.close()
            self._place = None
        if self._engine is not None:
            if self.before_close is not None and not self.inherited:
                self.before_close()
            if not self.inherited:
                self._engine.close()
                unwatch(self)
                for close in self._recorded:
                    close()
            self._engine = None
            self._shorten(None)
            if self.closing is not None:
                self.closing()

    @property
    def closed(self) -> bool:
        """Whether this rank has left the group."""
        return self._engine is None

    @property
    def inherited(self) -> bool:
        """Whether this process is a forked child and the group belongs to its parent."""
        return self._forks != forks()

    def abandon(self) -> None:
        """Release the group in a forked child, in which only the attributes of the group can be read."""
        self._shorten(None)
        if self._engine is not None:
            self._engine.abandon()

    def _tell(self, plan: Plan) -> None:
        """Register a plan, which the group notifies when its engine is replaced or closed."""
        self._plans.add(plan)

    def _prepare(self, verb: str, given: Mapping[str, Any]) -> Callable[[], bool] | None:
        """Return a callable that makes a blocking call with these arguments; see ``Engine.prepare``."""
        engine = self._engine
        if (
            engine is None
            or verb == "all_to_all"
            or any(given.get(f"{what}_split_sizes") for what in ("input", "output"))
        ):
            return None
        tensor = given.get("tensor", given.get("input"))
        pieces = next((given[name] for name in ("outputs", "inputs", "output") if name in given), None)
        return engine.prepare(verb, tensor, pieces, given.get("op"), given.get("dst", given.get("src", -1)))

    def _shorten(self, engine: Engine | None) -> None:
        """Use the fast paths of this engine from now on. None: there are none."""
        self.now = never if engine is None else engine.now
        self._begin = not_begun if engine is None else engine.begin
        for plan in [*self._plans]:
            plan._forget()

    def _live(self) -> Engine:
        if self.inherited:
            raise refusal(f"process group '{self.name}'")
        return self._existing()

    def _existing(self) -> Engine:
        if self._engine is None:
            raise NotInitializedError(f"process group '{self.name}' {self._closed_why}")
        return self._engine

    def _member(self, rank: int, what: str) -> int:
        number = integer_of(rank)
        if number is None:
            raise TypeError(f"{what} must be a rank, not {type(rank).__name__}")
        if not 0 <= number < self._size:
            raise UsageError(f"{what}={number} is not a rank of group '{self.name}': expected 0 to {self._size - 1}")
        return number

    def _other(self, rank: int, what: str) -> int:
        number = self._member(rank, what)
        if number == self._rank:
            raise UsageError(f"{what}={number} is this rank itself (group '{self.name}')")
        return number

    def _source(self, src: int | None) -> int:
        if self._size == 1:
            raise UsageError(f"recv: this rank is alone in group '{self.name}'")
        return -1 if src is None else self._other(src, "src")

    def _only_on(self, tensors: Sequence[Tensor] | None, root: int, name: str, role: str) -> None:
        if root == self._rank and not tensors:
            raise UsageError(f"{name} must be given on the {role} rank ({root})")
        if root != self._rank and tensors:
            raise UsageError(f"{name} must not be given on rank {self._rank}: {role} is rank {root}")

    def _in_torchs_words(self, missing: Sequence[int], seconds: float, all_of_them: bool) -> str:
        """Return the text of torch's monitored_barrier, for programs that search for it."""
        if self._rank:
            return (
                f"Rank {self._rank} successfully reached monitoredBarrier, "
                "but received errors while waiting for send/recv from rank 0"
            )
        text = f"Rank 0 timed out in monitoredBarrier after {seconds * 1000:.0f} ms"
        named = ", ".join(map(str, missing if all_of_them else missing[:1]))
        return f"{text}: Rank{'s' if ',' in named else ''} {named} failed to pass monitoredBarrier" if named else text

    def _split(self, tensor: Tensor, sizes: Sequence[int] | None, what: str) -> list[Tensor]:
        """Return one slice of ``tensor`` per rank, along its first dimension."""
        if tensor.dim() == 0:
            raise UsageError(f"all_to_all_single: the {what} has no dimension to split")
        rows = tensor.shape[0]
        if not sizes:
            if rows % self._size:
                raise UsageError(
                    f"all_to_all_single: the {rows} rows of the {what} cannot be cut in {self._size} equal parts"
                )
            sizes = [rows // self._size] * self._size
        numbers = [number for size in sizes if (number := integer_of(size)) is not None]
        if len(numbers) < len(sizes):
            raise TypeError(f"all_to_all_single: {what}_split_sizes must be integers, not {list(sizes)!r}")
        if len(numbers) != self._size or sum(numbers) != rows or min(numbers) < 0:
            raise UsageError(
                f"all_to_all_single: {what}_split_sizes {numbers} must be {self._size} sizes that sum up to {rows}"
            )
        return [tensor[end - size : end] for size, end in zip(numbers, accumulate(numbers), strict=True)]


def _showing(work: Work | None, tensors: Sequence[Tensor] | Callable[[], Sequence[Tensor]]) -> Work | None:
    """Set the tensors that a work, if there is one, returns as its result."""
    if work is not None:
        work.shown = tensors
    return work


def _only(listed: Any, verb: str) -> Any:
    """Return the tensor, or the list, that torch's methods take in a list of one."""
    if not isinstance(listed, (list, tuple)):
        return listed
    if len(listed) != 1:
        raise UsageError(f"{verb}: expected a list of one, not of {len(listed)}: one call moves one tensor")
    return listed[0]


def _tag(tag: int) -> int:
    number = integer_of(tag)
    if number is None:
        raise TypeError(f"tag must be an integer, not {type(tag).__name__}")
    if not 0 <= number < 1 << 31:
        raise UsageError(f"tag must be an integer from 0 to 2**31 - 1, not {number}")
    return number


publish(globals())
