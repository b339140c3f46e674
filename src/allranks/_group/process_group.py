"""ProcessGroup: ranks that call collectives together. The object behind the functions.

It checks what does not depend on the engine, once, and hands the call on. Ranks are the group's own here; the
functions (`_api`) translate the world's.
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

_SHORTEST_S = 1e-6  # a wait of zero would be the group's timeout


class ProcessGroup:
    """A group of ranks and this process' place in it.

    Attributes:
        name: the group's name, as it stands in errors.
        members: who they are, by rank in this group; ``members[i].rank`` is the rank in the world.
        ranks: the members' ranks in the world, by rank in this group.
        in_world_order: whether a rank has the same number here and in the world.
        timeout_s: how long its calls wait for other ranks, in seconds.
        before_close: called before the group closes, unless it is lost: what still needs it ends.
        closing: called when the group closes.
        lineage: its generations; None where its ranks cannot decide who goes on after a loss.
        entered: the decision by which this process came to ranks whose training loop had begun; None if it did not.
        register: called with each group that is made from this one by ``shrink``.
        early: the groups that are made before the training loop, of the world of an elastic job; None elsewhere.
        renewed: called when the group has a new engine after a loss.
        is_world: whether its ranks are those of the world.
        is_passing: whether whoever made it makes another where it is closed.
        now: the short way of its engine (see ``Engine.now``).
        record_numbers: of the group in the record of this process's calls, for each of its engines.
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
        """Lets each engine record the group's calls: those of several as several groups, as each counts its own."""
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
        """The number of the last collective that each rank has begun, as far as is known here; None: it is not."""
        return self._engine.last_numbers() if self._engine is not None and not self.inherited else None

    def rank(self) -> int:
        """This process, 0 to size - 1."""
        return self._rank

    def size(self) -> int:
        """The number of ranks."""
        return self._size

    @property
    def backend(self) -> str:
        """The name of the engine."""
        return self._existing().name

    @property
    def device(self) -> str:
        """The type of device whose tensors the group moves for certain."""
        return self._live().device

    @property
    def highest_tag(self) -> int:
        """Of the messages that the group can send."""
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
        from allranks._group import sparse  # made of dense calls, not the engine's

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
        # As gloo, and as nccl.
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
        """Prepares a call that is made many times on the same tensors, as MPI's persistent collectives.

        Args:
            verb: ``all_reduce``, ``reduce``, ``broadcast``, ``all_gather``, ``gather``, ``scatter``,
                ``reduce_scatter``, ``all_to_all``, ``all_to_all_single`` or ``barrier``.
            args: of this group's method of that name.
            named: of that method, too, but for ``async_op``.

        Returns:
            A plan: ``plan()`` makes the call, ``plan(async_op=True)`` starts it and returns a Work. It keeps the
            tensors, and looks at their memory in each call. For the other ranks it is the ordinary call: they may have
            a plan or none, and it stands in the trace as any other.

        Raises:
            UsageError: there is no such verb. What is wrong with tensors is raised by the plan's calls.
            TypeError: the method does not take these arguments.

        Cost:
            of a small call on the native engine some 0.2 us less than of the method.

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

    # Verbs with torch's own methods' names, for code that calls them. They take lists and return a Work.

    def allreduce(self, tensors: Sequence[Tensor] | Tensor, opts: Any = ReduceOp.SUM) -> Work:
        """``all_reduce`` of a tensor, or of a list of one, with a reduce op or torch's AllreduceOptions."""
        work = self.all_reduce(_only(tensors, "allreduce"), getattr(opts, "reduceOp", opts), True)
        assert work is not None
        return work

    def allgather(
        self, output_tensors: Sequence[Sequence[Tensor]], input_tensors: Sequence[Tensor] | Tensor, opts: Any = None
    ) -> Work:
        """``all_gather`` of a tensor into a list, or of lists of one; ``opts`` has no effect here."""
        outputs: Any = (
            _only(output_tensors, "allgather") if isinstance(input_tensors, (list, tuple)) else output_tensors
        )
        work = self.all_gather(outputs, _only(input_tensors, "allgather"), True)
        assert work is not None
        return work

    def alltoall(self, output_tensors: Sequence[Tensor], input_tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """``all_to_all``; ``opts`` has no effect here."""
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
        """See :func:`allranks.empty_shared`; as bytes."""
        return self._live().empty_shared(nbytes)

    def stats(self) -> Stats:
        """See :class:`allranks.Stats`."""
        return self._live().stats()

    # After a loss. See docs/resilience.md.

    def failed_ranks(self) -> list[int]:
        """The ranks of this group that are known here to be lost: dead, unreachable, or no longer in the group.

        The ranks of a host learn of a death within some milliseconds; ranks of other hosts when they call something,
        or by the heartbeats between hosts. Not the same on all ranks: ``agree`` and ``shrink`` are.

        Cost:
            a system call for each rank of this host.
        """
        return list(self._live().lost())

    def abort(self) -> None:
        """Ends all calls of the group, on every rank: those that are pending, now, and all later ones.

        They raise AbortedError. What is left to do with the group is ``shrink``. On gloo the others see that this rank
        has left. On nccl only this rank's calls end: each rank calls it.

        Raises:
            UsageError: the engine cannot: mpi.
        """
        self._live().abort()

    def agree(self, value: int = 1) -> int:
        """The least value of all ranks; the same on every rank that survives, whatever is lost meanwhile.

        A rank that is lost before it has given its value counts as 0, if no survivor has the outcome already. Called by
        all ranks, in the same order as the group's collectives. Afterwards the group may be broken: its next call shows
        that, and ``shrink`` mends it.

        Args:
            value: a whole number of 64 bits, at least 0; or a bool.

        Raises:
            ExcludedError: the others have gone on without this rank.
            StoreLostError: the store on which the ranks decide is gone.
            UsageError: a rank is lost, and the ranks have no store that outlives them.

        Cost:
            an all_reduce of 8 bytes; after a loss some round trips to the store.
        """
        return survival.agree(self, value)

    def shrink(self, ranks_to_exclude: Sequence[int] = (), timeout: timedelta | float | None = None) -> ProcessGroup:
        """The group of the ranks that are left. Called by all of them; this group is closed.

        The ranks decide on the store on which they met who is left: those of which nobody knows that they are lost. The
        decision is one, whatever is lost meanwhile; a rank that comes later raises ExcludedError. Ranks keep their
        order.

        Args:
            ranks_to_exclude: ranks of this group to leave out although they live. They must not call.
            timeout: how long to wait for ranks that are not known to be lost, a timedelta or seconds; they are left
                out then. None: the timeout of the group's calls.

        Raises:
            ExcludedError: the others have gone on without this rank.
            StoreLostError: the store is gone, and nobody can decide.
            UsageError: the ranks have no store that outlives them.

        Cost:
            some round trips to the store, and that of making a group.
        """
        return survival.shrink(self, ranks_to_exclude, None if timeout is None else seconds_of(timeout))

    def reconfigure_handle(self) -> str:
        """This process's part of the group, as a text for the other processes that are to be in it with this one.

        It stays the same as long as the group exists here. From the first call on a thread of this process serves
        those who come with it: on a socket of this host, and where the job may have other hosts on a TCP port, too,
        for holders of the job's secret.

        Raises:
            ConfigError: other hosts may come, and there is no secret, or no port.
        """
        self._live()
        if self._place is None:
            self._place = reconfigure.Place(self._rank)
        return self._place.handle

    def reconfigure(
        self, uuid: int, handles: Sequence[str] | AbstractSet[str], timeout: timedelta | float | None = None
    ) -> None:
        """Makes the processes with these handles the members of the group, in this object.

        Called by all of them, and by nobody else. They may be members of this group, of another one, or of none. Where
        it fails the group is as it was; the next attempt needs another uuid. When it has succeeded, what is pending in
        the group has ended with an error, and groups that were made from it remain as they are.

        Args:
            uuid: a whole number that none of the processes has used before, the same on all.
            handles: what ``reconfigure_handle`` has returned in each, the same on all: a list, in the order of the
                ranks; or a set, which is sorted: by rank when the handles were made.
            timeout: how long to wait for the others, a timedelta or seconds; None: the timeout of the group's calls.

        Raises:
            JoinError: processes did not come, or are gone; names them.
            MismatchError: another process was called with other handles, or has a group on another engine.
            UsageError: the uuid was used before, or a handle is wrong, there twice, or this process's own is missing.

        Cost:
            some round trips to the store of the first handle, and that of making a group.

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
        """A group that has no members before its first reconfiguration: rank and size are -1.

        Args:
            backend: the engine that it gets then.
            name: of the group.
            timeout_s: of its calls.
            number: by which handles are sorted.
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
        """Another group in this one's place, which is closed."""
        lineage, self.lineage = self.lineage, None
        self.close()
        made = ProcessGroup(engine, self.name, rank, members, self.timeout_s)
        made.lineage, made.register = lineage, self.register
        return made

    @property
    def engine(self) -> Engine:
        """What moves the group's tensors."""
        return self._existing()

    def meet_again(self, members: Sequence[Member], engine: Engine) -> None:
        """The same ranks, of which some are other processes now, on a new engine."""
        for close in self._recorded:
            close()
        unwatch(self)
        self.members = tuple(members)
        self._record(engine, self._rank)

    def use(self, engine: Engine) -> None:
        """Calls go to this engine from now on: the one that the present engine has stood before."""
        self._engine = engine
        self._shorten(engine)

    def renumbered(self) -> ProcessGroup:
        """This group as the world: its ranks are the world's."""
        members = [msgspec.structs.replace(m, rank=r, world_size=self._size) for r, m in enumerate(self.members)]
        self.members = tuple(members)
        self.ranks = tuple(range(self._size))
        self.in_world_order = True
        return self

    def ballot(self) -> Tensor:
        """One whole number for ``agree``, on a device whose tensors the group moves."""
        if self._ballot is None:
            import torch

            self._ballot = torch.zeros(1, dtype=torch.int64, device=self.device)
        return self._ballot

    def _become(self, engine: Engine, rank: int, members: Sequence[Member]) -> None:
        """Puts a new engine, rank and members into this object. The old engine is closed."""
        old = self._engine
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
        """This group as that through which a group of these ranks of the world is made."""
        return Parent(self._live(), [self.ranks.index(rank) for rank in ranks])

    @property
    def _is_open(self) -> bool:
        return self._engine is not None

    def _close_because(self, why: str) -> None:
        """Leaves the group; later calls give the reason."""
        if self._is_open:
            self._closed_why = why
        self.before_close = None
        self.close()

    def close(self) -> None:
        """Leaves the group; later calls raise. May be called twice."""
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
        """Whether it is the parent's, and this process a forked child."""
        return self._forks != forks()

    def abandon(self) -> None:
        """In a forked child, where only what the group knows of itself can be asked."""
        self._shorten(None)
        if self._engine is not None:
            self._engine.abandon()

    def _tell(self, plan: Plan) -> None:
        """Lets a plan know when the group gets another engine, or none."""
        self._plans.add(plan)

    def _prepare(self, verb: str, given: Mapping[str, Any]) -> Callable[[], bool] | None:
        """What makes a blocking call with these arguments of the method; see ``Engine.prepare``."""
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
        """Calls take the short ways of this engine from now on; None: there are none."""
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
        """The text of torch's monitored_barrier, for programs that look for it."""
        if self._rank:
            return (
                f"Rank {self._rank} successfully reached monitoredBarrier, "
                "but received errors while waiting for send/recv from rank 0"
            )
        text = f"Rank 0 timed out in monitoredBarrier after {seconds * 1000:.0f} ms"
        named = ", ".join(map(str, missing if all_of_them else missing[:1]))
        return f"{text}: Rank{'s' if ',' in named else ''} {named} failed to pass monitoredBarrier" if named else text

    def _split(self, tensor: Tensor, sizes: Sequence[int] | None, what: str) -> list[Tensor]:
        """One piece of ``tensor`` per rank, along its first dimension."""
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
    """Lets a work, if there is one, have these as its result."""
    if work is not None:
        work.shown = tensors
    return work


def _only(listed: Any, verb: str) -> Any:
    """The tensor, or the list, that torch's methods take in a list of one."""
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
