"""Every error that allranks raises by intent.

A message names the call, what was seen against what was expected (rank, host, pid,
bytes, seconds) and what to do next. The tree::

    AllranksError(RuntimeError)
    |-- UsageError(ValueError)        the call itself is wrong: argument, tensor, state
    |   |-- NotInitializedError       a call before init_process_group or after destroy_process_group
    |-- ConfigError(ValueError)       a setting is missing or wrong: variable, URL, option
    |   |-- SecretError               two sides of a connection do not have the same secret
    |-- TimeoutError(builtins.TimeoutError)
    |   |-- JoinError                 ranks did not meet in time: names those that are missing
    |   |-- QueueEmptyError           a queue of a store holds nothing, and the call does not wait
    |-- PeerLostError                 a rank died, left or broke off; `.rank` is which
    |-- AbortedError                  a rank has ended the group by abort(); `.rank` is which
    |-- ExcludedError                 the others have gone on without this process
    |-- CheckpointError               a checkpoint is damaged, or could not be written
    |-- StoreLostError                the connection to the store broke: its server ended
    |-- MismatchError                 ranks disagree on what they call
    |-- RankError                     a rank of a job started from Python failed; `.rank` is which
    |-- RemoteError                   an operation on a worker failed (master-worker mode); names it and its line
    |-- WorkerLost                    a worker is gone, and its tensors (master-worker mode); `.rank` is which
    |   `-- WorkerReplaced            it has been replaced, and what is kept restored; `.snapshot` is the number

torch's names for what programs catch are aliases: DistError is AllranksError, DistBackendError (a collective broke)
PeerLostError, DistNetworkError (a connection did) StoreLostError, DistStoreError (a wait in a store did) TimeoutError.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence

__all__ = [
    "AbortedError",
    "AllranksError",
    "CheckpointError",
    "ConfigError",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "ExcludedError",
    "JoinError",
    "MismatchError",
    "NotInitializedError",
    "PeerLostError",
    "QueueEmptyError",
    "RankError",
    "RemoteError",
    "SecretError",
    "StoreLostError",
    "TimeoutError",
    "UsageError",
    "WorkerLost",
    "WorkerReplaced",
]


class AllranksError(RuntimeError):
    """Root of the errors of allranks."""


class UsageError(AllranksError, ValueError):
    """The call itself is wrong: an argument, a tensor, or the moment of the call."""


class NotInitializedError(UsageError):
    """A call that needs a process group, before ``init_process_group`` or after ``destroy_process_group``."""


class ConfigError(AllranksError, ValueError):
    """A setting is missing or wrong: an environment variable, a URL, a command-line option."""


class SecretError(ConfigError):
    """The two sides do not have the same secret."""


class TimeoutError(AllranksError, builtins.TimeoutError):
    """A call did not finish in the group's timeout. The message names the ranks it waited for.

    Attributes:
        ranks: those ranks (in the group's numbering), where the call was one on a group.
    """

    ranks: tuple[int, ...] = ()


class JoinError(TimeoutError):
    """The ranks did not all meet in time, or two of them disagree on who they are. Names them."""


class QueueEmptyError(TimeoutError):
    """``queue_pop(block=False)`` of a store's queue that is empty."""


class _OfRankError(AllranksError):
    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type[_OfRankError], tuple[str, int]]:
        return type(self), (str(self), self.rank)


class PeerLostError(_OfRankError):
    """Another rank died, left the group, or gave up in the middle of a call.

    Attributes:
        rank: the rank that was lost (in the group's numbering).
    """


class AbortedError(_OfRankError):
    """A rank has called ``abort()``: all calls of the group end, on every rank.

    Attributes:
        rank: the rank that called it (in the group's numbering).
    """


class ExcludedError(AllranksError):
    """The other ranks have gone on without this process, which they took for lost. It must end, and change nothing."""


class CheckpointError(AllranksError):
    """A checkpoint is damaged, or could not be written. Names the file, the tensor, the rank, or the cause."""


class StoreLostError(AllranksError):
    """The connection to the store broke: its server ended, or this client was closed."""


class MismatchError(AllranksError):
    """The ranks called different things: verb, element count, dtype, reduce op, root. Names them."""


class RankError(_OfRankError):
    """A rank of a job that Python started (``run``, ``testing.run_ranks``) failed. The message has its traceback.

    Attributes:
        rank: the rank.
    """


class RemoteError(_OfRankError):
    """An operation failed on a worker. What depends on it raises this; the worker goes on.

    It is also of the type that was raised there, and has that as its cause: ``except torch.linalg.LinAlgError`` catches
    it.

    Attributes:
        rank: the worker.
        operation: what failed, as ``aten::index_select``.
        line: ``file:line`` of the master's program that queued it; "" where that is not known.
        traceback: the worker's.
    """

    def __init__(self, message: str, rank: int, operation: str = "", line: str = "", traceback: str = "") -> None:
        super().__init__(message, rank)
        self.operation = operation
        self.line = line
        self.traceback = traceback

    def __str__(self) -> str:  # that of KeyError is another
        return str(self.args[0])

    def __reduce__(self) -> tuple[type[RemoteError], tuple[str, int, str, str, str]]:  # type: ignore[override]
        return RemoteError, (str(self), self.rank, self.operation, self.line, self.traceback)


class WorkerLost(_OfRankError):
    """A worker is gone, and its tensors with it. ``respawn`` starts another in its place.

    Attributes:
        rank: the worker.
    """


class WorkerReplaced(WorkerLost):
    """A worker was lost, and has been replaced (`Master.on_lost`). The step under way is to be made again.

    Attributes:
        rank: the worker.
        snapshot: the number of the snapshot that what is kept has been restored from; 0 for none.
    """

    def __init__(self, message: str, rank: int, snapshot: int = 0) -> None:
        super().__init__(message, rank)
        self.snapshot = snapshot

    def __reduce__(self) -> tuple[type[WorkerReplaced], tuple[str, int, int]]:  # type: ignore[override]
        return type(self), (str(self), self.rank, self.snapshot)


# torch's tree, on ours: the last three are errors of the first.
DistError = AllranksError
DistBackendError = PeerLostError
DistNetworkError = StoreLostError
DistStoreError = TimeoutError

for _name in __all__:
    globals()[_name].__module__ = "allranks"  # where users find it, and what tracebacks show


def spans(numbers: Sequence[int], separator: str) -> str:
    """Several numbers in few words: ``0-3,7``."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return separator.join(str(low) if low == high else f"{low}-{high}" for low, high in found)


def rank_list(ranks: Sequence[int]) -> str:
    """How errors name several ranks: ``rank 1``, ``ranks 0-3, 7``."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {spans(ranks, ', ')}"
