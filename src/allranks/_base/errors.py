"""All errors that allranks raises intentionally.

A message names the call, the observed and the expected values (rank, host, pid, bytes, seconds), and the next step. The
docstrings are the catalogue of errors: ``docs/errors.py`` generates docs/errors.md from their sections Causes and
Remedy. The tree::

    AllranksError(RuntimeError)
    |-- UsageError(ValueError)        the call is wrong: argument, tensor, state
    |   |-- NotInitializedError       a call before init_process_group or after destroy_process_group
    |-- ConfigError(ValueError)       a setting is missing or wrong: variable, URL, option
    |   |-- SecretError               two sides of a connection do not have the same secret
    |-- TimeoutError(builtins.TimeoutError)
    |   |-- JoinError                 ranks did not join in time; the message names the missing ranks
    |   |-- QueueEmptyError           a queue of a store is empty, and the call does not wait
    |-- PeerLostError                 a rank died, left or gave up; `.rank` is its number
    |-- AbortedError                  a rank aborted the group with abort(); `.rank` is its number
    |-- ExcludedError                 the other ranks have continued without this process
    |-- StateLostError                no remaining rank has the training state, or a part of it
    |-- CheckpointError               a checkpoint is damaged, or could not be written
    |-- StoreLostError                the connection to the store broke: its server exited
    |-- MismatchError                 ranks made different calls
    |-- RankError                     a rank of a job started from Python failed; `.rank` is its number
    |-- RemoteError                   an operation on a worker failed (master-worker mode); names it and its call site
    |-- WorkerLost                    a worker and its tensors are lost (master-worker mode); `.rank` is its number
    |   `-- WorkerReplaced            the worker was replaced, the kept state was restored; `.snapshot` is the number

torch's names of exceptions are aliases: DistError is AllranksError, DistBackendError (a collective failed) is
PeerLostError, DistNetworkError (a connection failed) is StoreLostError, and DistStoreError (a wait for a key of a store
failed) is TimeoutError.
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

_CATALOG = "/docs/errors.html"
_HELP = "See: allranks help "


class AllranksError(RuntimeError):
    """Base class of the errors of allranks.

    A traceback ends with the command that prints the error's section of this page. ``str()`` of the error does not
    contain it. ``ALLRANKS_DOCS`` replaces it by a link to a site.

    Remedy:
        ``except dist.AllranksError`` catches all errors of this page. Errors without a more specific class have this
        class; their message names the cause.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        if notes := self._links():
            self.__notes__ = notes  # Python prints them below the message, from 3.11 on

    def _links(self) -> list[str]:
        base = os.environ.get("ALLRANKS_DOCS")
        mark = _HELP if base is None else f"{base}{_CATALOG}"
        if base in ("", "0") or any(isinstance(text, str) and mark in text for text in self.args):
            return []  # the message contains the traceback of another error, with its reference
        name = next(each.__name__ for each in type(self).__mro__ if each.__name__ in __all__)
        return [f"  {_HELP}{name}" if base is None else f"  See {base}{_CATALOG}#{name.lower()}"]


class UsageError(AllranksError, ValueError):
    """The call is wrong: an argument, a tensor, or the moment of the call.

    Causes:
        - an argument has a wrong type or value, or a tensor has a wrong shape, dtype or device
        - the call is not allowed in this state, for example a second ``init_process_group``

    Remedy:
        The message contains the observed and the expected value. No rank has changed a tensor. The error is also a
        ``ValueError``.
    """


class NotInitializedError(UsageError):
    """A call that needs a process group was made before ``init_process_group`` or after ``destroy_process_group``.

    Causes:
        - a collective before ``init_process_group``, or after ``destroy_process_group``

    Remedy:
        Call ``init_process_group()`` first, in every process. ``allranks env`` prints the rank that a process would
        have.
    """


class ConfigError(AllranksError, ValueError):
    """A setting is missing or wrong: an environment variable, a URL, a command-line option.

    Causes:
        - a variable such as ``RANK`` or ``MASTER_ADDR`` is missing or has an invalid value
        - an option of the command line, or a URL of ``init_method``, is wrong
        - the system refuses a resource that a job needs: open files (``ulimit -n``), memory, processes, space in
          ``/dev/shm``

    Remedy:
        The message contains the variable, its value and an example (docs/launching.md). ``allranks env`` prints the
        variables that take effect, and ``allranks doctor`` checks the host.
    """


class SecretError(ConfigError):
    """The two sides do not have the same secret.

    Causes:
        - the hosts have different home directories, and ``ALLRANKS_SECRET`` is not set
        - a process of another job, or of another user, uses the same address and port

    Remedy:
        Give all hosts one secret (docs/security.md). If another job uses the port, choose another ``MASTER_PORT``.
    """


_losses = itertools.count()
_losses_seen = 0


def losses_seen() -> int:
    """Return the number of errors about lost ranks, aborted groups and timeouts that this process has created.

    A program may catch such an error. A training loop compares the number to detect it anyway, because the call failed.
    """
    return _losses_seen


def _count_loss() -> None:
    global _losses_seen
    _losses_seen = next(_losses) + 1  # `next` is atomic: several threads create errors


class TimeoutError(AllranksError, builtins.TimeoutError):
    """A call did not finish within the group's timeout. The message names the ranks for which it waited.

    Attributes:
        ranks: These ranks (in the group's numbering), if it was a call on a group.

    Causes:
        - a rank is late: it loads data, compiles, is stopped in a debugger, or waits for something else
        - ranks wait for each other in different calls

    Remedy:
        The message names the ranks that did not enter the call. ``allranks trace show`` prints the activity of each
        rank (docs/debugging.md#a-job-that-hangs). If the work takes longer than the timeout, pass a longer ``timeout``.
    """

    ranks: tuple[int, ...] = ()

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        if type(self) is TimeoutError:
            _count_loss()


class JoinError(TimeoutError):
    """Not all ranks joined in time, or processes disagree on rank or world size. The message names them.

    Causes:
        - not all ranks were started, or some cannot reach rank 0
        - ``WORLD_SIZE`` differs, or two processes have the same rank

    Remedy:
        The message names the missing and the duplicate ranks. In a job of several hosts, ``allranks run -- allranks
        doctor`` tests the connection of each pair.
    """


class QueueEmptyError(TimeoutError):
    """``queue_pop(block=False)`` was called on an empty queue of a store.

    Causes:
        - ``queue_pop(block=False)`` was executed before the ``queue_push``

    Remedy:
        Retry later, or let the call wait.
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
    """Another rank died, left the group, or gave up during a call.

    Attributes:
        rank: The rank that was lost (in the group's numbering).

    Causes:
        - a rank was killed: by the kernel because memory ran out (``dmesg``), by a scheduler, by a user
        - its process exited with an exception; the launcher prints the traceback
        - the network between two hosts failed

    Remedy:
        Check the last output of the named rank. The launcher names the rank that failed first. docs/resilience.md
        describes how a job continues without the rank, or with a replacement.
    """


class AbortedError(_OfRankError):
    """A rank called ``abort()``, which ends all calls of the group on every rank.

    Attributes:
        rank: The rank that called it (in the group's numbering).

    Causes:
        - a rank called ``abort()``

    Remedy:
        ``rank`` is the rank that called it. Continue with ``shrink``, or exit.
    """


class ExcludedError(AllranksError):
    """The other ranks have continued without this process. It must exit without changing anything.

    Causes:
        - this process was stopped, swapped out or disconnected for so long that the other ranks considered it lost

    Remedy:
        Exit the process: its results are no longer used. The launcher has started a replacement, if restarts are
        allowed.
    """


class StateLostError(AllranksError):
    """No remaining rank has the training state, or a part of it. The training cannot continue. Raised on every rank.

    Causes:
        - all ranks that had the state, or the same shards, were lost before another rank received them
        - a rank was lost together with its backup rank, which had the only copy of its values
        - the values of the ranks differ: the program changes something that the State does not cover, or memory is
          damaged

    Remedy:
        Restart the job from a checkpoint; ``allranks run --restarts`` does this automatically. After this error the
        launcher does not restart single ranks.
    """


class CheckpointError(AllranksError):
    """A checkpoint is damaged, or could not be written. The message names the file, the tensor, the rank, or the cause.

    Causes:
        - a disk is full, a folder is not writable or was removed
        - a file was changed or damaged: its checksum is wrong
        - a saved tensor has another shape or dtype than the tensor that receives it

    Remedy:
        The message names the file, tensor and rank. ``allranks checkpoint verify FOLDER --all`` checks all checkpoints;
        ``checkpoint.latest(folder, verify=True)`` returns the newest intact one (docs/checkpoints.md).
    """


class StoreLostError(AllranksError):
    """The connection to the store broke: its server exited, or this client was closed.

    Causes:
        - the process that serves the store exited: rank 0, the launcher's agent, or a server that the user started

    Remedy:
        Find out why it exited. Ranks need the store to join and to create groups, but not in collectives.
    """


class MismatchError(AllranksError):
    """The calls of the ranks differ in verb, element count, dtype, reduce op or root, or their models differ.

    Causes:
        - a branch depends on the rank, so that some ranks make other calls, or make them in another order
        - the last batch of an epoch is smaller on some ranks
        - some ranks do not use a parameter
        - the replicas of a model differ (``DistributedDataParallel``, ``trace.check_replicas``): the program updates
          them differently, or memory is damaged

    Remedy:
        The message contains the call of each rank and its call site, or the first differing element of a tensor. A call
        that differs has changed no tensor. ``ALLRANKS_DEBUG=1`` also detects tensors of different shapes with the same
        number of elements, and swapped calls that look alike.
    """


class RankError(_OfRankError):
    """A rank of a job that Python started (``run``, ``testing.run_ranks``) failed. The message has its traceback.

    Attributes:
        rank: The rank.

    Causes:
        - the function of ``allranks.run`` or ``testing.run_ranks`` raised an exception on a rank, or the process of a
          rank was killed

    Remedy:
        Fix the cause that the traceback of the rank in the message shows.
    """


class RemoteError(_OfRankError):
    """An operation failed on a worker. Operations that depend on its result raise this error; the worker continues.

    The error is also an instance of the type that was raised on the worker, and has the original as its cause:
    ``except torch.linalg.LinAlgError`` catches it.

    Attributes:
        rank: The worker.
        operation: The operation that failed, for example ``aten::index_select``.
        line: Call site ``file:line`` in the master's program that queued the operation; "" if it is unknown.
        traceback: The traceback of the worker.

    Causes:
        - an operation that the master queued failed on a worker: wrong shapes, no memory, a singular matrix

    Remedy:
        ``line`` is the call site in the master's program, ``traceback`` is the worker's traceback. The worker
        continues. Operations that depend on the result raise this error, too.
    """

    def __init__(self, message: str, rank: int, operation: str = "", line: str = "", traceback: str = "") -> None:
        super().__init__(message, rank)
        self.operation = operation
        self.line = line
        self.traceback = traceback

    def __str__(self) -> str:  # an instance that is also a KeyError would print the repr of the message
        return str(self.args[0])

    def __reduce__(self) -> tuple[type[RemoteError], tuple[str, int, str, str, str]]:  # type: ignore[override]
        # Not `type(self)`: that class may be made at run time from two classes, and pickle cannot import it.
        return RemoteError, (str(self), self.rank, self.operation, self.line, self.traceback)


class WorkerLost(_OfRankError):
    """A worker and its tensors are lost. ``respawn`` starts a replacement.

    Attributes:
        rank: The worker.

    Causes:
        - a worker was killed, or its host failed

    Remedy:
        ``respawn`` starts a replacement. The tensors are lost unless they were kept (docs/master_worker.md).
    """


class WorkerReplaced(WorkerLost):
    """A worker was lost and has been replaced (`Master.on_lost`). The program must repeat the current step.

    Attributes:
        rank: The worker.
        snapshot: Number of the snapshot from which the kept state was restored; 0 for none.

    Causes:
        - a worker was lost, and ``Master.on_lost`` has replaced it

    Remedy:
        Repeat the step: the kept state was restored from the snapshot with that number.
    """

    def __init__(self, message: str, rank: int, snapshot: int = 0) -> None:
        super().__init__(message, rank)
        self.snapshot = snapshot

    def __reduce__(self) -> tuple[type[WorkerReplaced], tuple[str, int, int]]:  # type: ignore[override]
        return type(self), (str(self), self.rank, self.snapshot)


# torch's tree of exceptions, mapped to the tree of allranks: the last three are subclasses of the first.
DistError = AllranksError
DistBackendError = PeerLostError
DistNetworkError = StoreLostError
DistStoreError = TimeoutError

for _name in __all__:
    globals()[_name].__module__ = "allranks"  # the public module, which tracebacks show


def spans(numbers: Sequence[int], separator: str) -> str:
    """Return a short text for several numbers: ``0-3,7``."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return separator.join(str(low) if low == high else f"{low}-{high}" for low, high in found)


def rank_list(ranks: Sequence[int]) -> str:
    """Return how errors name several ranks: ``rank 1``, ``ranks 0-3, 7``."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {spans(ranks, ', ')}"
