"""The ranks that save or load together: those of a group of ours, of torch's, or one process alone.

What they tell each other is msgpack of known types, and no pickle: so it works with ``ALLRANKS_PICKLE=0``, too.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import torch
from torch import Tensor

from allranks._api import objects
from allranks._api.world import is_initialized, resolve_group
from allranks._base.errors import AllranksError, CheckpointError, UsageError
from allranks._group.process_group import ProcessGroup

__all__ = ["Company", "alone", "company_of", "failure_of", "in_words", "this_process", "together"]

T = TypeVar("T")


class Company(Protocol):
    """Ranks.

    Attributes:
        rank: this one.
        size: how many there are.
        identity: of the group.
    """

    rank: int
    size: int
    identity: object

    def exchange(self, value: T, kind: Any) -> list[T]:
        """Every rank's value, by rank. All of them call it.

        Args:
            value: of this rank; what msgspec encodes.
            kind: its type.
        """

    def apart(self, finish: Callable[[], None]) -> Company:
        """The same ranks, whose calls do not mix with those of the program. All of them call it.

        Args:
            finish: called before these ranks part: waits for what still needs them.
        """

    def is_open(self) -> bool:
        """Whether they can still be called."""

    def send(self, tensor: Tensor, rank: int) -> None:
        """Sends the bytes of a tensor on the CPU to a rank, which receives them."""

    def receive(self, tensor: Tensor, rank: int) -> Callable[[], object]:
        """Begins to receive. Returns what waits for it."""


class _Alone:
    rank, size = 0, 1
    identity: object = None

    def send(self, tensor: Tensor, rank: int) -> None:
        raise AssertionError("a process alone has nobody to send to")

    def receive(self, tensor: Tensor, rank: int) -> Callable[[], object]:
        raise AssertionError("a process alone has nobody to receive from")

    def is_open(self) -> bool:
        return True

    def exchange(self, value: T, kind: Any) -> list[T]:
        return [value]

    def apart(self, finish: Callable[[], None]) -> Company:
        return self


class _Ours:
    def __init__(self, group: ProcessGroup) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._group = group
        self.identity: object = group

    def is_open(self) -> bool:
        return not self._group.closed and not self._group.failed_ranks()

    def exchange(self, value: T, kind: Any) -> list[T]:
        found: list[Any] = [None] * self.size
        objects.all_gather_object(found, msgspec.msgpack.encode(value), self._group)
        return _decoded(found, kind)

    def send(self, tensor: Tensor, rank: int) -> None:
        self._group.send(tensor, rank)

    def receive(self, tensor: Tensor, rank: int) -> Callable[[], object]:
        return self._group.irecv(tensor, rank).wait

    def apart(self, finish: Callable[[], None]) -> Company:
        from allranks._api.groups import split_group  # late: only for saves in the background

        made = split_group(self._group, [list(range(self.size))], group_desc="checkpoints")
        assert made is not None
        made.is_passing = True
        made.before_close = finish
        return _Ours(made)


class _Torchs:
    def __init__(self, group: Any) -> None:
        self._distributed: Any = torch.distributed
        self.rank, self.size = self._distributed.get_rank(group), self._distributed.get_world_size(group)
        self._group = group
        self.identity: object = group

    def is_open(self) -> bool:
        return bool(self._distributed.is_initialized())

    def exchange(self, value: T, kind: Any) -> list[T]:
        found: list[Any] = [None] * self.size
        self._distributed.all_gather_object(found, msgspec.msgpack.encode(value), group=self._group)
        return _decoded(found, kind)

    def send(self, tensor: Tensor, rank: int) -> None:
        self._distributed.send(tensor, group=self._group, group_dst=rank)

    def receive(self, tensor: Tensor, rank: int) -> Callable[[], object]:
        wait: Callable[[], object] = self._distributed.irecv(tensor, group=self._group, group_src=rank).wait
        return wait

    def apart(self, finish: Callable[[], None]) -> Company:
        ranks = self._distributed.get_process_group_ranks(self._group or self._distributed.group.WORLD)
        backend = "gloo" if self._distributed.get_backend(self._group) == "nccl" else None
        return _Torchs(self._distributed.new_group(ranks, backend=backend, use_local_synchronization=True))


def _decoded(found: list[Any], kind: Any) -> list[Any]:
    decode = msgspec.msgpack.Decoder(kind).decode
    return [decode(each) for each in found]


class _Outcome(NamedTuple):
    """How something went for a rank.

    Attributes:
        trouble: why it failed; "" if it did not.
        is_usage: whether that is a UsageError.
        process: host and pid.
    """

    trouble: str
    is_usage: bool
    process: tuple[str, int]


def together(company: Company, act: Callable[[], T]) -> T:
    """All ranks of a load do something. Returns what this one has come to; a failure of one is raised on all.

    Raises:
        CheckpointError: another rank has failed. UsageError if it has raised one.
    """
    found: T
    failure: Exception | None = None
    try:
        found = act()
        mine = _Outcome("", False, this_process())
    except Exception as error:  # noqa: BLE001 - raised when the others are told
        failure, mine = error, _Outcome(in_words(error), isinstance(error, UsageError), this_process())
    outcomes = company.exchange(mine, _Outcome)
    if failure is not None:
        raise failure
    for rank, outcome in enumerate(outcomes):
        if outcome.trouble:
            raise failure_of(rank, outcome.process, outcome.trouble, outcome.is_usage)
    return found


def failure_of(rank: int, process: tuple[str, int], trouble: str, is_usage: bool) -> AllranksError:
    """The error of a load that has failed on another rank."""
    kind = UsageError if is_usage else CheckpointError
    words = trouble.removeprefix("checkpoint.load: ")
    return kind(f"checkpoint.load: rank {rank} ({process[0]}, pid {process[1]}): {words}")


def in_words(error: BaseException) -> str:
    """The text of an error, as it can be told to other ranks: names of files may be no Unicode."""
    return (str(error) or repr(error)).encode("utf-8", "backslashreplace").decode()


def company_of(group: Any = None) -> Company:
    """The ranks of a group; None: of the world, which is this process alone where there is none."""
    if isinstance(group, ProcessGroup) or (group is None and is_initialized()):
        return _Ours(resolve_group(group))
    distributed: Any = torch.distributed
    if group is not None or (distributed.is_available() and distributed.is_initialized()):
        return _Torchs(group)
    return alone()


def alone() -> Company:
    """This process, whatever groups it is in."""
    return _Alone()


def this_process() -> tuple[str, int]:
    """Host and pid."""
    return socket.gethostname(), os.getpid()
