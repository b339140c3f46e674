"""Every error that allranks raises by intent.

A message names the call, what was seen against what was expected (rank, host, pid,
bytes, seconds) and what to do next. The docstrings are the catalogue of errors: ``docs/errors.py`` makes docs/errors.md
of their sections Causes and Remedy. The tree::

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
    |-- StateLostError                no rank is left that has the state of the training, or a part of it
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
import itertools
import os
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
    "StateLostError",
    "StoreLostError",
    "TimeoutError",
    "UsageError",
    "WorkerLost",
    "WorkerReplaced",
]

DOCUMENTATION = "https://allranks.readthedocs.io"
"""Where a release publishes the site that ``make docs`` makes; ``[project.urls]`` in pyproject.toml has it too."""

_CATALOGUE = "/docs/errors.html"


class AllranksError(RuntimeError):
    """Root of the errors of allranks.

    A traceback ends with a link to the error's section of the catalogue. ``str()`` of the error has no link.

    Remedy:
        It is never raised itself: ``except dist.AllranksError`` catches all errors of this page.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        if notes := self._links():
            self.__notes__ = notes  # what Python prints below the message, from 3.11 on

    def _links(self) -> list[str]:
        base = os.environ.get("ALLRANKS_DOCS", DOCUMENTATION)
        if base in ("", "0") or any(isinstance(text, str) and f"{base}{_CATALOGUE}" in text for text in self.args):
            return []  # the message has another error's traceback, with its link
        name = next(each.__name__ for each in type(self).__mro__ if each.__name__ in __all__)
        return [f"  See {base}{_CATALOGUE}#{name.lower()}"]


class UsageError(AllranksError, ValueError):
    """The call itself is wrong: an argument, a tensor, or the moment of the call.

    Causes:
        - an argument of the wrong type or value, a tensor with a wrong shape, dtype or device
        - a call at a moment when it cannot be made, as a second ``init_process_group``

    Remedy:
        The message has what was seen and what is expected. No rank has changed a tensor. It is also a
        ``ValueError``.
    """


class NotInitializedError(UsageError):
    """A call that needs a process group, before ``init_process_group`` or after ``destroy_process_group``.

    Causes:
        - a collective before ``init_process_group``, or after ``destroy_process_group``

    Remedy:
        Call ``init_process_group()`` first, in every process. ``allranks env`` prints who a process would be.
    """


class ConfigError(AllranksError, ValueError):
    """A setting is missing or wrong: an environment variable, a URL, a command-line option.

    Causes:
        - a variable such as ``RANK`` or ``MASTER_ADDR`` is missing or has a value that cannot be
        - an option of the command line, or a URL of ``init_method``, is wrong
        - the system refuses what a job needs: open files (``ulimit -n``), memory, processes, room in ``/dev/shm``

    Remedy:
        The message has the variable, its value and an example (docs/launching.md). ``allranks env`` prints which
        variables decide, and ``allranks doctor`` checks the host.
    """


class SecretError(ConfigError):
    """The two sides do not have the same secret.

    Causes:
        - hosts with different homes, and no ``ALLRANKS_SECRET``
        - a process of another job, or of another user, at the same address and port

    Remedy:
        Give all hosts one secret (docs/security.md). Is the port that of another job? Take another ``MASTER_PORT``.
    """


_losses = itertools.count()
_losses_seen = 0


def losses_seen() -> int:
    """How many errors of lost ranks, aborted groups and timeouts this process has made so far.

    A program may catch such an error; a training loop must learn of it all the same, as the call did not happen.
    """
    return _losses_seen


def _count_loss() -> None:
    global _losses_seen
    _losses_seen = next(_losses) + 1  # atomic: errors are made in several threads


class TimeoutError(AllranksError, builtins.TimeoutError):
    """A call did not finish in the group's timeout. The message names the ranks it waited for.

    Attributes:
        ranks: those ranks (in the group's numbering), where the call was one on a group.

    Causes:
        - a rank is late: it loads data, compiles, is stopped in a debugger, or waits for something else
        - ranks wait for each other in different calls

    Remedy:
        The message names the ranks that have not come. ``allranks trace show`` prints what each does
        (docs/debugging.md#a-job-that-hangs). Give a longer ``timeout`` where the work takes so long.
    """

    ranks: tuple[int, ...] = ()

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        if type(self) is TimeoutError:
            _count_loss()


class JoinError(TimeoutError):
    """The ranks did not all meet in time, or two of them disagree on who they are. Names them.

    Causes:
        - not all ranks were started, or some cannot reach rank 0
        - ``WORLD_SIZE`` differs, or two processes have one rank

    Remedy:
        The message names who is missing and who came twice. In a job of several hosts ``allranks run -- allranks
        doctor`` tries each pair.
    """


class QueueEmptyError(TimeoutError):
    """``queue_pop(block=False)`` of a store's queue that is empty.

    Causes:
        - ``queue_pop(block=False)`` came before the ``queue_push``

    Remedy:
        Ask again later, or let the call wait.
    """


class _OfRankError(AllranksError):
    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank
        if isinstance(self, (PeerLostError, AbortedError)):
            _count_loss()

    def __reduce__(self) -> tuple[type[_OfRankError], tuple[str, int]]:
        return type(self), (str(self), self.rank)


class PeerLostError(_OfRankError):
    """Another rank died, left the group, or gave up in the middle of a call.

    Attributes:
        rank: the rank that was lost (in the group's numbering).

    Causes:
        - a rank was killed: by the kernel for want of memory (``dmesg``), by a scheduler, by a person
        - its process ended by an exception, whose traceback the launcher prints
        - the network between two hosts is gone

    Remedy:
        Look at what the named rank printed last: the launcher names the rank that failed first. To go on without
        it, or with another in its place: docs/resilience.md.
    """


class AbortedError(_OfRankError):
    """A rank has called ``abort()``: all calls of the group end, on every rank.

    Attributes:
        rank: the rank that called it (in the group's numbering).

    Causes:
        - some rank called ``abort()``

    Remedy:
        ``rank`` is which. Go on with ``shrink``, or end.
    """


class ExcludedError(AllranksError):
    """The other ranks have gone on without this process, which they took for lost. It must end, and change nothing.

    Causes:
        - this process was stopped, swapped out or unplugged for so long that the others took it for lost

    Remedy:
        End the process: nothing that it does counts any more. The launcher has started another, where it may.
    """


class StateLostError(AllranksError):
    """No rank is left that has the state of a training, or a part of it: nobody can go on. Raised on every rank.

    Causes:
        - all ranks that had the state were lost, or all that had the same shards, before another had received them
        - a rank was lost together with the one that kept what only it had

    Remedy:
        Start the job again from a checkpoint; ``allranks run --restarts`` does so by itself. The launcher starts no
        single rank again after this error.
    """


class CheckpointError(AllranksError):
    """A checkpoint is damaged, or could not be written. Names the file, the tensor, the rank, or the cause.

    Causes:
        - a disk is full, a folder cannot be written or was removed
        - a file was changed or damaged: its checksum is wrong
        - a state has another shape or dtype than what is loaded into

    Remedy:
        The message names the file, tensor and rank. ``allranks checkpoint verify FOLDER --all`` looks through all;
        ``checkpoint.latest(folder, verify=True)`` finds the newest that is whole (docs/checkpoints.md).
    """


class StoreLostError(AllranksError):
    """The connection to the store broke: its server ended, or this client was closed.

    Causes:
        - the process that has the store ended: rank 0, the launcher's agent, or a server of one's own

    Remedy:
        Look for why it ended. Ranks need the store to meet and to make groups, not in collectives.
    """


class MismatchError(AllranksError):
    """The ranks called different things: verb, element count, dtype, reduce op, root. Names them.

    Causes:
        - a branch on the rank, so that some ranks call something else or in another order
        - the last batch of an epoch is smaller on some ranks
        - a parameter that some ranks do not use

    Remedy:
        The message has the call of each rank, and its line. No tensor was changed. ``ALLRANKS_DEBUG=1`` also finds
        tensors of other shapes with as many elements, and calls that look alike and are swapped.
    """


class RankError(_OfRankError):
    """A rank of a job that Python started (``run``, ``testing.run_ranks``) failed. The message has its traceback.

    Attributes:
        rank: the rank.

    Causes:
        - the function that ``allranks.run`` or ``testing.run_ranks`` called raised on a rank, or its process was
          killed

    Remedy:
        The message has that rank's traceback.
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

    Causes:
        - an operation that the master queued failed on a worker: wrong shapes, no memory, a singular matrix

    Remedy:
        ``line`` is where the master queued it, ``traceback`` the worker's. The worker goes on; what depends on the
        result raises this too.
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

    Causes:
        - a worker was killed, or its host is gone

    Remedy:
        ``respawn`` starts another; its tensors are gone unless they were kept (docs/master_worker.md).
    """


class WorkerReplaced(WorkerLost):
    """A worker was lost, and has been replaced (`Master.on_lost`). The step under way is to be made again.

    Attributes:
        rank: the worker.
        snapshot: the number of the snapshot that what is kept has been restored from; 0 for none.

    Causes:
        - a worker was lost and ``Master.on_lost`` has put another in its place

    Remedy:
        Make the step again: what is kept has been restored from the snapshot with that number.
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
