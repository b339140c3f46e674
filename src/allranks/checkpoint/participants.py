"""The ranks that save or load together: a group of allranks, a group of torch, or a single process.

They exchange msgpack of declared types, and no pickle, so checkpoints also work with ``ALLRANKS_PICKLE=0``.
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

__all__ = [
    "Participants",
    "error_text",
    "participants_of",
    "remote_load_error",
    "run_on_all_ranks",
    "single_process",
    "this_process",
]

T = TypeVar("T")


class Participants(Protocol):
    """Ranks that save or load together.

    Attributes:
        rank: Rank of this process.
        size: Number of ranks.
        identity: The group.
    """

    rank: int
    size: int
    identity: object

    def exchange(self, value: T, kind: Any) -> list[T]:
        """Return every rank's value, by rank. All ranks call it.

        Args:
            value: Value of this rank, which msgspec can encode.
            kind: Type of the value.
        """

    def duplicate(self, before_close: Callable[[], None]) -> Participants:
        """Return the same ranks in a separate group, so that calls do not mix with the program's. All ranks call it.

        Args:
            finish: Called before a group of allranks is closed, unless the group is lost. It waits for the operations
                that still use the group. Not called for torch's groups.
        """

    def is_open(self) -> bool:
        """Return whether the group can still be used."""

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send the bytes of a CPU tensor to a rank, which must receive them."""

    def receive(self, tensor: Tensor, rank: int) -> Callable[[], object]:
        """Start to receive, and return a function that waits for the data."""


class _SingleProcess:
    rank, size = 0, 1
    identity: object = None

    def send(self, tensor: Tensor, rank: int) -> None:
        raise AssertionError("cannot send: this process is the only rank")

    def receive(self, tensor: Tensor, rank: int) -> Callable[[], object]:
        raise AssertionError("cannot receive: this process is the only rank")

    def is_open(self) -> bool:
        return True

    def exchange(self, value: T, kind: Any) -> list[T]:
        return [value]

    def duplicate(self, before_close: Callable[[], None]) -> Participants:
        return self


class _AllranksRanks:
    def __init__(self, group: ProcessGroup) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._group = group
        self.identity: object = group

    def is_open(self) -> bool:
        # A group with a lost rank can complete no further call, and must be created again.
        return not self._group.closed and not self._group.failed_ranks()

    def exchange(self, value: T, kind: Any) -> list[T]:
        encoded: list[Any] = [None] * self.size
        objects.all_gather_object(encoded, msgspec.msgpack.encode(value), self._group)
        return _decoded(encoded, kind)

    def send(self, tensor: Tensor, rank: int) -> None:
        self._group.send(tensor, rank)

    def receive(self, tensor: Tensor, rank: int) -> Callable[[], object]:
        return self._group.irecv(tensor, rank).wait

    def duplicate(self, before_close: Callable[[], None]) -> Participants:
        from allranks._api.groups import split_group  # late: few saves and loads need it

        duplicate = split_group(self._group, [list(range(self.size))], group_desc="checkpoints")
        assert duplicate is not None
        duplicate.recreated_on_close = True
        # The save thread may be in a call on this group when the program closes the world.
        duplicate.before_close = before_close
        return _AllranksRanks(duplicate)


class _TorchRanks:
    def __init__(self, group: Any) -> None:
        self._distributed: Any = torch.distributed
        self.rank, self.size = self._distributed.get_rank(group), self._distributed.get_world_size(group)
        self._group = group
        self.identity: object = group

    def is_open(self) -> bool:
        return bool(self._distributed.is_initialized())

    def exchange(self, value: T, kind: Any) -> list[T]:
        encoded: list[Any] = [None] * self.size
        self._distributed.all_gather_object(encoded, msgspec.msgpack.encode(value), group=self._group)
        return _decoded(encoded, kind)

    def send(self, tensor: Tensor, rank: int) -> None:
        self._distributed.send(tensor, group=self._group, group_dst=rank)

    def receive(self, tensor: Tensor, rank: int) -> Callable[[], object]:
        wait: Callable[[], object] = self._distributed.irecv(tensor, group=self._group, group_src=rank).wait
        return wait

    def duplicate(self, before_close: Callable[[], None]) -> Participants:
        ranks = self._distributed.get_process_group_ranks(self._group or self._distributed.group.WORLD)
        # A checkpoint exchanges CPU tensors, which NCCL does not support.
        backend = "gloo" if self._distributed.get_backend(self._group) == "nccl" else None
        # use_local_synchronization: otherwise torch requires ranks outside of the group to call new_group, too.
        return _TorchRanks(self._distributed.new_group(ranks, backend=backend, use_local_synchronization=True))


def _decoded(encoded: list[Any], kind: Any) -> list[Any]:
    decode = msgspec.msgpack.Decoder(kind).decode
    return [decode(each) for each in encoded]


class _Outcome(NamedTuple):
    """Result of an action on one rank.

    Attributes:
        trouble: Why it failed; "" if it succeeded.
        is_usage: The failure is a UsageError.
        process: Host and pid.
    """

    trouble: str
    is_usage: bool
    process: tuple[str, int]


def run_on_all_ranks(participants: Participants, action: Callable[[], T]) -> T:
    """Run an action of a load on all ranks and return this rank's result. If it fails on one rank, raise on all ranks.

    Raises:
        CheckpointError: Another rank has failed. UsageError if that rank has raised one.
    """
    result: T
    failure: Exception | None = None
    try:
        result = action()
        own_outcome = _Outcome("", False, this_process())
    except Exception as error:  # noqa: BLE001 - raised after the other ranks have received it
        failure, own_outcome = error, _Outcome(error_text(error), isinstance(error, UsageError), this_process())
    # Also after a failure: the other ranks wait in this exchange.
    outcomes = participants.exchange(own_outcome, _Outcome)
    # The original exception has the traceback, so it has priority over the reports of other ranks.
    if failure is not None:
        raise failure
    for rank, outcome in enumerate(outcomes):
        if outcome.trouble:
            raise remote_load_error(rank, outcome.process, outcome.trouble, outcome.is_usage)
    return result


def remote_load_error(rank: int, process: tuple[str, int], trouble: str, is_usage: bool) -> AllranksError:
    """Return the error of a load that has failed on another rank."""
    kind = UsageError if is_usage else CheckpointError
    words = trouble.removeprefix("checkpoint.load: ")
    return kind(f"checkpoint.load: rank {rank} ({process[0]}, pid {process[1]}): {words}")


def error_text(error: BaseException) -> str:
    """Return the text of an error in a form that can be sent: file names may not be valid Unicode."""
    return (str(error) or repr(error)).encode("utf-8", "backslashreplace").decode()


def participants_of(group: Any = None) -> Participants:
    """Return the ranks of a group. None: the world, or this process alone if there is no world."""
    if isinstance(group, ProcessGroup) or (group is None and is_initialized()):
        return _AllranksRanks(resolve_group(group))
    distributed: Any = torch.distributed
    if group is not None or (distributed.is_available() and distributed.is_initialized()):
        return _TorchRanks(group)
    return single_process()


def single_process() -> Participants:
    """Return this process alone, regardless of its groups."""
    return _SingleProcess()


def this_process() -> tuple[str, int]:
    """Return host and pid."""
    return socket.gethostname(), os.getpid()
