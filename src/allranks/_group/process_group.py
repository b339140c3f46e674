"""ProcessGroup: ranks that call collectives together. The object behind the public functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

from allranks._base.errors import UsageError
from allranks._base.public import publish
from allranks._base.timeouts import seconds_of
from allranks._elastic import recovery
from allranks._group import reconfigure
from allranks._group.communicator import Communicator
from allranks._group.plan import Plan
from allranks._rendezvous.rendezvous import this_member

if TYPE_CHECKING:
    from datetime import timedelta

    from allranks._engines.base import Engine
    from allranks._rendezvous.rendezvous import Member

__all__ = ["ProcessGroup"]


class ProcessGroup(Communicator):
    """A group of ranks and the rank of this process in it.

    Attributes:
        name: The name of the group in error messages.
        members: The members, by rank in this group. ``members[i].rank`` is the rank in the world.
        ranks: The ranks of the members in the world, by rank in this group.
        timeout_s: Seconds that a call waits for other ranks.
        register: Called with each group that ``shrink`` creates from this one.
    """

    def __init__(self, engine: Engine, name: str, rank: int, members: Sequence[Member], timeout_s: float) -> None:
        super().__init__(engine, name, rank, members, timeout_s)
        self.register: Callable[[ProcessGroup], None] | None = None
        self._handle_store: reconfigure.HandleStore | None = None

    def close(self) -> None:
        """Leave the group. Later calls raise. Idempotent."""
        if self._handle_store is not None:
            self._handle_store.close()
            self._handle_store = None
        super().close()

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
        return recovery.agree(self, value)

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Change the timeout of the calls of this rank that begin later.

        Calls that have already begun keep their timeout. The group keeps the new one after ``shrink``, ``reconfigure``
        and a loss. Groups that were created from it keep their own. All ranks should set the same timeout.

        Args:
            timeout: The timeout, a timedelta or seconds.

        Raises:
            UsageError: The timeout is not positive.
            NotInitializedError: The group is closed.

        Example:
            >>> group = dist.new_group(timeout=600)  # the first step compiles the model
            >>> group.set_timeout(60)
        """
        seconds = seconds_of(timeout)
        if seconds <= 0:
            raise UsageError(f"set_timeout: timeout must be positive, not {timeout!r}")
        self._live().set_timeout(seconds)
        self.timeout_s = seconds
        if self.history is not None:
            self.history.timeout_s = seconds

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
        history = recovery.history_of(self, "shrink")
        following, members = recovery.shrink(self, ranks_to_exclude, None if timeout is None else seconds_of(timeout))
        self.history = None
        self.close()
        made = ProcessGroup(following.engine, self.name, following.rank, members, self.timeout_s)
        made.history, made.register = history, self.register
        if self.register is not None:
            self.register(made)
        return made

    def reconfigure_handle(self) -> str:
        """Return the handle of this process's part of the group, a text for the other processes of a reconfiguration.

        It does not change while the group exists in this process. From the first call on, a thread of this process
        serves the other processes. It listens on a socket of this host. If the job may span other hosts, it also
        listens on a TCP port, for processes that have the job's secret.

        Raises:
            ConfigError: Other hosts may take part, and there is no secret or no port.
        """
        self._live()
        if self._handle_store is None:
            self._handle_store = reconfigure.HandleStore(self._rank)
        return self._handle_store.handle

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
        assert self._handle_store is not None
        seconds = self.timeout_s if timeout is None else seconds_of(timeout)
        reconfigure.reconfigure(self, self._handle_store, uuid, handles, seconds)

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
        made._handle_store = reconfigure.HandleStore(number)
        return made


publish(globals())
