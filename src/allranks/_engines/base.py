"""The seam between a group and what moves its tensors."""

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

__all__ = ["Begin", "Engine", "Now", "Parent", "never", "not_begun"]


class Now(Protocol):
    """The short way of a blocking collective with arguments as the user gave them, unchecked.

    Args:
        verb: its name, a literal.
        tensor: its tensor; None of barrier.
        pieces: those by rank, if it has any; of all_to_all the output, to be cut evenly.
        op: if it reduces.
        root: if it has one.

    Returns:
        False: nothing was done, because something is out of the ordinary. The verb itself copes or complains.
    """

    def __call__(
        self, verb: str, tensor: object, pieces: object = None, op: object = None, root: object = -1, /
    ) -> bool: ...


class Begin(Protocol):
    """The same of an asynchronous collective, with the arguments of Now.

    Returns:
        None: nothing was done.
    """

    def __call__(
        self, verb: str, tensor: object, pieces: object = None, op: object = None, root: object = -1, /
    ) -> Work | None: ...


class Parent(NamedTuple):
    """The group through which the members of a new one meet.

    Attributes:
        engine: its engine.
        ranks: their ranks in it, by rank in the new group.
    """

    engine: Engine
    ranks: Sequence[int]


def never(verb: str, tensor: object, pieces: object = None, op: object = None, root: object = -1, /) -> bool:
    """The Now of an engine that has no short way."""
    return False


def not_begun(verb: str, tensor: object, pieces: object = None, op: object = None, root: object = -1, /) -> Work | None:
    """The Begin of an engine that has no short way."""
    return None


class Engine(abc.ABC):
    """Moves the tensors of one group.

    Ranks are the group's, already checked, as are the lengths of all_to_all's lists; other tensors are not.
    Methods block and return None unless ``async_op``. Where pieces are given by rank, a sequence holds one tensor
    each, and a single tensor holds all of them in turn.
    """

    name: str
    device = "cpu"
    """The type of device whose tensors it moves for certain."""

    highest_tag = (1 << 31) - 1
    """Of messages."""

    now: Now = staticmethod(never)
    begin: Begin = staticmethod(not_begun)

    def prepare(
        self, verb: str, tensor: object, pieces: object = None, op: object = None, root: object = -1
    ) -> Callable[[], bool] | None:
        """What makes a blocking collective with the arguments of ``now`` as often as it is called.

        It returns False, and has done nothing, where a tensor lies elsewhere than before. None: it cannot be prepared.
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
        """``source`` < 0: any rank. Returns the sender."""

    @abc.abstractmethod
    def irecv(self, tensor: Tensor, source: int, tag: int) -> Work:
        """As ``recv``, asynchronous."""

    def empty_shared(self, nbytes: int) -> Tensor:
        """Bytes that collectives of this group move with fewer copies. Called by all ranks, in the same order."""
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def record_in(self, recorder: _core.Recorder, group: int) -> bool:
        """Records calls there, as calls of that group. Before the first call. False: the engine cannot."""
        return False

    def parts(self) -> Mapping[str, Engine]:
        """The engines that it consists of, by a type of device that each moves tensors of."""
        return {self.device: self}

    def last_numbers(self) -> Sequence[int] | None:
        """The number of the last collective that each rank has begun, as far as is known here; None: it is not."""
        return None

    def liveness(self, ranks: Sequence[int]) -> _core.Liveness | None:
        """Sockets that end with the processes of these ranks, which a group of them may share; None: there are none."""
        return None

    def lost(self) -> Sequence[int]:
        """The ranks that are known here to be gone, by their process, their host or their leaving."""
        return ()

    def find_gone(self, ranks: Sequence[int]) -> Sequence[int]:
        """Those of these ranks of other hosts whose processes are found to be gone when their hosts are asked."""
        return ()

    def abort(self) -> None:
        """Ends all calls of the group, on every rank: those that are pending, now, and all later ones."""
        raise UsageError(f"abort: the {self.name} engine cannot end the calls of other ranks: use the native engine")

    @abc.abstractmethod
    def stats(self) -> Stats: ...

    @abc.abstractmethod
    def close(self) -> None:
        """Leaves the group. Never hangs; may be called twice."""

    @abc.abstractmethod
    def abandon(self) -> None:
        """In a forked child: lets go of what belongs to the parent."""
