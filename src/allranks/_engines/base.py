"""The interface between a group and the engine that transfers its tensors."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from allranks._base.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from allranks import _core
    from allranks._call.types import PremulSum, ReduceOp, Stats
    from allranks._call.work import Work

__all__ = ["Begin", "Engine", "EngineWindow", "Now", "Parent", "never", "not_begun"]


class Now(Protocol):
    """The fast path of a blocking collective. Its arguments are those of the user, unchecked.

    Args:
        verb: The name of the collective, a literal.
        tensor: Its tensor. None for barrier.
        pieces: Its tensors by rank, if it has any. For all_to_all: the output, which is split evenly.
        op: The reduce op, if it reduces.
        root: The root, if it has one.

    Returns:
        False if nothing was done, because an argument or the state is unusual. The ordinary verb then makes the call or
        raises the error.
    """

    def __call__(
        self, verb: str, tensor: object, pieces: object = None, op: object = None, root: object = -1, /
    ) -> bool: ...


class Begin(Protocol):
    """The fast path of an asynchronous collective, with the arguments of Now.

    Returns:
        None if nothing was done.
    """

    def __call__(
        self, verb: str, tensor: object, pieces: object = None, op: object = None, root: object = -1, /
    ) -> Work | None: ...


class Parent(NamedTuple):
    """The group through which the members of a new group exchange their records.

    Attributes:
        engine: The engine of the group.
        ranks: The ranks of the members in it, by rank in the new group.
    """

    engine: Engine
    ranks: Sequence[int]


def never(verb: str, tensor: object, pieces: object = None, op: object = None, root: object = -1, /) -> bool:
    """The Now of an engine without a fast path."""
    return False


def not_begun(verb: str, tensor: object, pieces: object = None, op: object = None, root: object = -1, /) -> Work | None:
    """The Begin of an engine without a fast path."""
    return None


class EngineWindow(Protocol):
    """The transfers of one window. Arguments are checked, tensors are contiguous bytes, and offsets are in bytes."""

    def register(self, tensor: Tensor | None, about: bytes, refused: str) -> list[bytes]:
        """Make the memory of a tensor accessible to all ranks. Collective.

        Args:
            tensor: The tensor. None if this rank takes part only to report why it has none.
            about: A description of the tensor, the same number of bytes on all ranks.
            refused: Why this rank has no tensor. The call then fails on all ranks.

        Returns:
            The descriptions of all ranks.
        """
        ...

    def deregister(self) -> None:
        """Withdraw the memory. Collective. Afterwards no rank accesses it."""
        ...

    def view(self, rank: int) -> Tensor | None:
        """Return the registered bytes of a rank, or None if this process cannot map them."""
        ...

    def shares_memory(self, rank: int) -> bool:
        """Return whether the rank is on the same host."""
        ...

    def put(self, given: Tensor, rank: int, offset: int) -> None:
        """Write bytes, then send a signal."""
        ...

    def get(self, into: Tensor, rank: int, offset: int) -> None:
        """Read bytes."""
        ...

    def signal(self, rank: int) -> None:
        """Send a signal."""
        ...

    def has_signal(self, rank: int) -> bool:
        """Return whether a signal of a rank has arrived for which no call has waited."""
        ...

    def wait_signal(self, rank: int, timeout_s: float) -> None:
        """Wait for one signal of a rank, and consume it."""
        ...


class Engine(abc.ABC):
    """The engine that transfers the tensors of one group.

    Ranks are those of the group, already checked, and so are the lengths of all_to_all's lists. Other tensors are not
    checked. Methods block and return None unless ``async_op``. If an argument has one tensor per rank, a sequence holds
    one tensor for each rank, and a single tensor holds all of them in order of the ranks.
    """

    name: str
    device = "cpu"
    """The type of device whose tensors it can always transfer."""

    highest_tag = (1 << 31) - 1
    """The highest tag of messages."""

    now: Now = staticmethod(never)
    begin: Begin = staticmethod(not_begun)

    def prepare(
        self, verb: str, tensor: object, pieces: object = None, op: object = None, root: object = -1
    ) -> Callable[[], bool] | None:
        """Return a callable that makes a blocking collective with the arguments of ``now``, each time it is called.

        It returns False without any effect if the memory of a tensor has moved. None: the call cannot be prepared.
        """
        return None

    @abc.abstractmethod
    def all_reduce(self, tensor: Tensor, op: ReduceOp | PremulSum, async_op: bool) -> Work | None: ...

    @abc.abstractmethod
    def reduce(self, tensor: Tensor, root: int, op: ReduceOp | PremulSum, async_op: bool) -> Work | None: ...

    @abc.abstractmethod
    def broadcast(self, tensor: Tensor, root: int, async_op: bool) -> Work | None: ...

    @abc.abstractmethod
    def all_gather(self, outputs: Sequence[Tensor] | Tensor, tensor: Tensor, async_op: bool) -> Work | None: ...

    @abc.abstractmethod
    def gather(self, tensor: Tensor, outputs: Sequence[Tensor] | None, root: int, async_op: bool) -> Work | None: ...

    @abc.abstractmethod
    def scatter(self, tensor: Tensor, inputs: Sequence[Tensor] | None, root: int, async_op: bool) -> Work | None: ...

    @abc.abstractmethod
    def reduce_scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor] | Tensor, op: ReduceOp | PremulSum, async_op: bool
    ) -> Work | None: ...

    @abc.abstractmethod
    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], async_op: bool) -> Work | None: ...

    @abc.abstractmethod
    def barrier(self, async_op: bool) -> Work | None: ...

    @abc.abstractmethod
    def send(self, tensor: Tensor, to: int, tag: int, async_op: bool) -> Work | None: ...

    @abc.abstractmethod
    def recv(self, tensor: Tensor, source: int, tag: int) -> int:
        """Receive a message. ``source`` < 0: from any rank. Return the sender."""

    @abc.abstractmethod
    def irecv(self, tensor: Tensor, source: int, tag: int) -> Work:
        """Receive a message asynchronously, see ``recv``."""

    def empty_shared(self, nbytes: int) -> Tensor:
        """Return bytes that collectives of this group transfer with fewer copies. All ranks call it, in one order."""
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def open_window(self) -> EngineWindow:
        """Return a new window without memory. All ranks call it, in one order."""
        raise UsageError(
            f"new_window: the {self.name} engine has no windows.\n  Create the group with backend='native'."
        )

    def record_in(self, recorder: _core.Recorder, group: int) -> bool:
        """Record calls in this recorder, as calls of this group. Called before the first call. False: not supported."""
        return False

    def parts(self) -> Mapping[str, Engine]:
        """Return the engines that it consists of, by a type of device that each of them transfers."""
        return {self.device: self}

    def last_numbers(self) -> Sequence[int] | None:
        """Return the number of the last collective that each rank has begun, as known here. None: unknown."""
        return None

    def liveness(self, ranks: Sequence[int]) -> _core.Liveness | None:
        """Return sockets that close when the processes of these ranks exit, for a group of them. None: no sockets."""
        return None

    def lost(self) -> Sequence[int]:
        """Return the ranks detected as lost: their process or host is gone, or they have left the group."""
        return ()

    def find_gone(self, ranks: Sequence[int]) -> Sequence[int]:
        """Query the hosts of these ranks of other hosts. Return the ranks whose processes no longer exist."""
        return ()

    def set_timeout(self, timeout_s: float) -> None:
        """Change the timeout of calls that begin later, in seconds."""
        raise UsageError(
            f"set_timeout: the {self.name} engine cannot change the timeout of a group.\n"
            "  Pass timeout= to init_process_group or new_group."
        )

    def abort(self) -> None:
        """Abort all calls of the group, on every rank: the pending calls immediately, and all later calls."""
        raise UsageError(
            f"abort: the {self.name} engine cannot abort the calls of other ranks.\n"
            "  Create the group with backend='native'."
        )

    @abc.abstractmethod
    def stats(self) -> Stats: ...

    @abc.abstractmethod
    def close(self) -> None:
        """Leave the group. Never blocks for long. Idempotent."""

    @abc.abstractmethod
    def abandon(self) -> None:
        """Release the resources that belong to the parent. Called in a forked child."""
