"""Diagnosis for programs: the last calls of this process, stragglers, files with all calls, and replicas that differ.

Calls are always recorded, in a ring in memory (docs/tracing.md). The functions that read it do not communicate with
other ranks. They also work in a program that runs on torch.distributed with the allranks plugin. `check_replicas` works
with all backends of torch.distributed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from allranks._api.world import behind, is_initialized, resolve_group
from allranks._base.errors import MismatchError, NotInitializedError, UsageError
from allranks._elastic.training.reachable import WRAPPERS
from allranks._group.process_group import ProcessGroup
from allranks._trace import flight_recorder, memory
from allranks._trace.matching import read_process
from allranks._trace.reader import RecordedCall, RecordedGroup, TraceReader
from allranks.parallel import drift

__all__ = [
    "Straggler",
    "Stragglers",
    "TracedCall",
    "check_replicas",
    "flight_dump",
    "last_calls",
    "record",
    "stragglers",
]


@dataclass(frozen=True)
class TracedCall:
    """A call of this process: a collective or a message. Ranks are ranks of the world.

    Attributes:
        group: Name of its group.
        verb: Verb, such as ``all_reduce``.
        number: Number among the group's collectives, from 1. 0 for a message.
        tag: Tag of a message.
        dtype: Data type, such as ``float32``. "" for none.
        op: Op of a reduction, such as ``SUM``. "" for other verbs.
        count: Number of elements.
        peer: The root, or the other side of a message. None: no peer, or any rank.
        line: Call site, such as ``train.py:12 in step``. "" if it was not determined.
        began: Start of the call, in seconds of ``time.monotonic``.
        seconds: Duration of the call so far, in seconds.
        waited: Part of ``seconds`` until the last rank entered the call. None if unknown.
        last: The rank that entered the call last. None if unknown.
        outcome: "", or the description of its failure.
        under_way: The call has not ended.
        async_op: The caller did not wait.
    """

    group: str
    verb: str
    number: int
    tag: int
    dtype: str
    op: str
    count: int
    peer: int | None
    line: str
    began: float
    seconds: float
    waited: float | None
    last: int | None
    outcome: str
    under_way: bool
    async_op: bool

    @property
    def title(self) -> str:
        """Short description, such as ``all_reduce #42`` or ``send to rank 3``."""
        if self.verb in ("send", "recv"):
            way = "to" if self.verb == "send" else "from"
            return f"{self.verb} {way} {'any rank' if self.peer is None else f'rank {self.peer}'}"
        return f"{self.verb} #{self.number}"

    def __str__(self) -> str:
        what = f"{self.count} x {self.dtype}" if self.dtype and self.count else ""
        tensor = f"({', '.join(filter(None, (what, self.op)))})" if what or self.op else ""
        parts = [f"{self.title}{tensor}" + (f" on '{self.group}'" if self.group != "world" else "")]
        if self.line:
            parts.append(f"at {self.line}")
        parts.append(f"{'under way for' if self.under_way else 'took'} {_duration(self.seconds)}")
        if self.waited is not None and self.last is not None:
            parts.append(f"{_duration(self.waited)} until rank {self.last} arrived last")
        if self.outcome:
            parts.append(self.outcome)
        return ", ".join(parts)


@dataclass(frozen=True)
class Straggler:
    """Statistics of the calls that a rank entered last.

    Attributes:
        rank: Rank of the world.
        times: Number of calls that it entered last.
        share: Share of all compared calls, 0 to 1.
        seconds: Average delay after the last but one rank in these calls, in seconds.
        recent_times: ``times`` of the recent calls.
        recent_share: ``share`` of the recent calls.
        recent_seconds: ``seconds`` of the recent calls.
    """

    rank: int
    times: int
    share: float
    seconds: float
    recent_times: int
    recent_share: float
    recent_seconds: float


@dataclass(frozen=True)
class Stragglers:
    """The ranks that entered calls of a group last, as this process has observed. Iterates over ``ranks``.

    Attributes:
        group: Name of the group.
        compared: Number of calls whose last rank is known. 0: no data, for example with other engines than native. In a
            group that spans hosts, calls are missing if the clocks do not show which rank was last.
        recent: Number of these calls that count as recent: the last 512 to 1,024.
        ranks: The compared ranks, in descending order of the lost time.
    """

    group: str
    compared: int
    recent: int
    ranks: tuple[Straggler, ...]

    def __iter__(self) -> Iterator[Straggler]:
        return iter(self.ranks)

    def __len__(self) -> int:
        return len(self.ranks)

    def __str__(self) -> str:
        if not self.compared:
            return f"group '{self.group}': the rank that arrived last is not known for any call"
        lines = [
            f"group '{self.group}': ranks that arrived last in {self.compared} calls (in the last {self.recent} calls)"
        ]
        lines += [
            f"  rank {each.rank}: {each.share:.0%} by {_duration(each.seconds)}"
            f" ({each.recent_share:.0%} by {_duration(each.recent_seconds)})"
            for each in self.ranks
        ]
        return "\n".join(lines)


def last_calls(n: int = 16) -> list[TracedCall]:
    """Return the newest calls of this process in all its groups, oldest first.

    Args:
        n: Maximum number of calls. 2,048 calls are kept.

    Returns:
        The calls. Empty before the first group, and if calls are not recorded (ALLRANKS_RECORD=0).

    Raises:
        UsageError: n is negative.

    Cost:
        about 10 microseconds for each call; no communication with other ranks.

    Example:
        >>> import torch, allranks as dist
        >>> dist.init_process_group()  # one process: the world is this one
        >>> dist.all_reduce(torch.ones(3))
        >>> call = dist.trace.last_calls()[-1]
        >>> call.title, call.count, call.dtype, call.under_way
        ('all_reduce #1', 3, 'float32', False)
        >>> dist.destroy_process_group()
    """
    if n < 0:
        raise UsageError(f"last_calls: n={n} is out of range. Expected 0 or more.")
    reader = memory.reader()
    if reader is None or n == 0:
        return []
    groups = reader.groups()
    now = time.monotonic_ns()
    return [_traced(call, groups.get(call.group), now) for call in reader.last(n)]


def stragglers(group: ProcessGroup | int | None = None) -> Stragglers:
    """Return which ranks enter the calls of a group last, how often, and with what delay.

    A rank that enters a call last delays all other ranks. In the native engine every rank observes which rank this is,
    at no cost. On several hosts their clocks are compared. A call counts if the difference is larger than the error.

    Args:
        group: The process group. None: the world.

    Returns:
        The ranks, as ranks of the world, including those that were never last.

    Raises:
        NotInitializedError: The group does not exist.
        UsageError: This rank is not in the group.

    Cost:
        no communication with other ranks.

    Example:
        >>> import torch, allranks as dist
        >>> dist.init_process_group()
        >>> dist.trace.stragglers().compared  # a single rank waits for no other
        0
        >>> dist.destroy_process_group()
    """
    ours = resolve_group(_world() if group is None else group)
    reader = memory.reader()
    recorded = [] if reader is None else _recorded(reader, ours)
    compared = sum(part.compared for part in recorded)
    recent = sum(part.recently for part in recorded)
    found = [_straggler(rank, recorded, compared, recent) for rank in ours.ranks] if compared else []
    found.sort(key=lambda each: (-each.times * each.seconds, each.rank))
    return Stragglers(ours.name, compared, recent, tuple(found))


def check_replicas(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    group: Any = None,
    *,
    buffers: Collection[str] | None = None,
) -> None:
    """Raise on every rank if the replicas of a model, or of its optimizer's state, are not equal on all ranks.

    Replicas become different if a program updates them differently on the ranks, or if memory is damaged. Training
    continues in both cases, with a wrong result. Call this on all ranks at the same moment: after ``optimizer.step()``,
    every 100 steps for example, and after a checkpoint is loaded. It works in a program that runs on torch.distributed,
    with each of its backends.

    Args:
        model: The model, or the DistributedDataParallel of torch or allranks that contains it. Parameters and buffers
            that DistributedDataParallel ignores are not compared. Of DTensors, ranks with equal shards are compared.
        optimizer: Its optimizer. Its state and the settings of its parameter groups, such as the learning rate, are
            compared. State that only some ranks have is compared among them.
        group: The ranks that have replicas: a group of allranks or of torch.distributed. None: the world.
        buffers: Names of the buffers that must be equal. None: all except the statistics of batch normalization, which
            each rank computes from its own inputs. ``()``: none.

    Raises:
        MismatchError: They differ. The error names the first tensor that differs, the first and the last element that
            differ in it, with values and ranks. Raised on every rank.
        NotInitializedError: No process group is initialized.
        UsageError: This rank is not in the group, or an argument is not a model, an optimizer or the name of a buffer.

    Cost:
        a hash of all values (10 GB/s on the CPU; on a GPU it is calculated there), and an all_gather_object of 8 bytes.

    Example:
        >>> import torch, allranks as dist
        >>> dist.init_process_group()
        >>> model = torch.nn.Linear(3, 2)
        >>> dist.trace.check_replicas(model, torch.optim.SGD(model.parameters()))
        >>> dist.destroy_process_group()
    """
    ranks, gather = _exchange_of(_world() if group is None else group)
    plain = model.module if isinstance(model, WRAPPERS) else model
    if not isinstance(plain, nn.Module) or not isinstance(optimizer, (torch.optim.Optimizer, type(None))):
        raise UsageError(
            f"check_replicas: got {type(model).__name__} and {type(optimizer).__name__}.\n"
            "  Pass a module and its optimizer."
        )
    if unknown := sorted(set(buffers or ()) - {name for name, _ in plain.named_buffers()}):
        raise UsageError(f"check_replicas: the model has no buffer {unknown[0]}.\n  Pass names of named_buffers().")
    values = drift.replicated_values(plain, optimizer, buffers)
    # Each rank has other shards, and an optimizer's state can be distributed over the ranks.
    required = {name for name, _ in plain.named_parameters()} & values.keys()
    difference = drift.find(values, ranks, gather, required)
    if difference is not None:
        raise MismatchError(
            f"check_replicas: the replicas differ: {difference}.\n  "
            + (
                f"{difference.memory_fault} Restart from a checkpoint."
                if difference.memory_fault
                else "Look for code that depends on the rank and changes this value: a setting, a hook, an update that"
                " some ranks skip, a forward that calls the wrapped module, a parameter that was replaced after"
                " wrapping."
            )
        )


def _exchange_of(group: Any) -> tuple[Sequence[int], drift.Gather]:
    """Return the ranks of a group, and the exchange of objects among them."""
    if not hasattr(group, "_get_backend") or behind(group) is not None:
        ours = resolve_group(group)
        return ours.ranks, drift.gather_in(ours)
    from torch import distributed

    ranks = distributed.get_process_group_ranks(group)

    def gather(mine: Any) -> list[Any]:
        found: list[Any] = [None] * len(ranks)
        distributed.all_gather_object(found, mine, group=group)
        return found

    return ranks, gather


@contextlib.contextmanager
def record(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Record all calls of this process in this context in a file.

    Call it on every rank that should be recorded. ``allranks trace timeline PATH`` draws the files of all ranks.
    ``allranks run --trace DIR`` and ALLRANKS_TRACE do the same for a whole run. In the master of workers it also
    records the workers: the commands that they execute, in separate files.

    Args:
        path: A folder, which is created if it is missing. Rank 3 writes ``rank-3.trace`` in it. If that file exists, it
            writes ``rank-3.1.trace``, and so on.

    Yields:
        The file of this process. It contains 64 bytes per call, and at most the 4,194,304 newest calls.

    Raises:
        NotInitializedError: No group exists yet.
        UsageError: The file cannot be created, or this process already records its calls in another file.

    Cost:
        about 100 nanoseconds per call.

    Note:
        If the disk becomes full, the program continues. The file then contains the calls until then, and a warning is
        logged.

    Example:
        >>> import tempfile, torch, allranks as dist
        >>> dist.init_process_group()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with dist.trace.record(folder) as file:
        ...         dist.all_reduce(torch.ones(3))
        ...     file.name
        'rank-0.trace'
        >>> dist.destroy_process_group()
    """
    recording = memory.record_in(Path(path))
    with contextlib.ExitStack() as ends:
        # First on the stack, so that it also runs if a follower fails to start, and after the followers have stopped.
        ends.callback(recording.stop)
        for follow in memory.followers:
            ends.callback(follow(Path(path).absolute()))
        yield recording.path


def flight_dump(folder: str | os.PathLike[str]) -> Path:
    """Write the newest calls of this process in the format of torch's Flight Recorder.

    Call it on every rank that should be compared, for example when a timeout is caught. ``torchfrtrace FOLDER`` then
    reports which rank has not made the calls of the other ranks. ``allranks trace flight`` creates these files from
    trace files, which contain all calls of all ranks.

    Args:
        folder: One folder for all ranks, which is created if it is missing, and contains no other files.

    Returns:
        The file: ``allranks_trace_rank_3`` on rank 3.

    Raises:
        NotInitializedError: No group exists yet, or calls are not recorded (ALLRANKS_RECORD=0).
        UsageError: The file cannot be written.

    Cost:
        about 20 microseconds for each call in memory (2,048 at most); no communication with other ranks.
    """
    reader = memory.reader()
    if reader is None:
        raise NotInitializedError(
            "flight_dump: no calls are available: no group exists yet, or calls are not recorded.\n"
            "  Call init_process_group() first, and do not set ALLRANKS_RECORD=0."
        )
    process = read_process(0, "memory", reader)
    ((dump, _),) = flight_recorder.dumps([process]).values()
    try:
        return flight_recorder.write(Path(folder), dump, process, first=process.missing)
    except OSError as error:
        raise UsageError(
            f"flight_dump: cannot write to {os.fspath(folder)!r}: {error.strerror}.\n"
            "  Pass a folder that this process can write to."
        ) from error


def _world() -> Any:
    """Return the world, or torch's world in a program on torch.distributed."""
    if is_initialized():
        return None
    from torch import distributed

    return distributed.group.WORLD if distributed.is_available() and distributed.is_initialized() else None


def _recorded(reader: TraceReader, group: ProcessGroup) -> list[RecordedGroup]:
    """Return the group's entries in the record, one for each of its engines."""
    groups = reader.groups()
    return [groups[number] for number in group.record_numbers if number in groups and number != 0]


def _straggler(rank: int, parts: list[RecordedGroup], compared: int, recent: int) -> Straggler:
    places = [(part, part.ranks.index(rank)) for part in parts if rank in part.ranks]
    times = sum(part.late[i].times for part, i in places)
    seconds = sum(part.late[i].seconds for part, i in places)
    recent_times = sum(part.recently_late[i].times for part, i in places)
    recent_seconds = sum(part.recently_late[i].seconds for part, i in places)
    return Straggler(
        rank=rank,
        times=times,
        share=times / compared,
        seconds=seconds / times if times else 0.0,
        recent_times=recent_times,
        recent_share=recent_times / recent if recent else 0.0,
        recent_seconds=recent_seconds / recent_times if recent_times else 0.0,
    )


def _traced(call: RecordedCall, group: RecordedGroup | None, now_ns: int) -> TracedCall:
    def world(rank: int) -> int | None:
        return None if rank < 0 else group.world_rank(rank) if group is not None else rank

    ended = call.returned_ns != 0
    known = call.last >= 0 and call.met_ns != 0
    return TracedCall(
        group=group.name if group is not None else "",
        verb=call.purpose or call.verb,
        number=call.number,
        tag=call.tag,
        dtype=call.dtype if call.verb != "barrier" else "",
        op=call.op,
        count=call.count,
        peer=world(call.peer),
        line=call.site,
        began=call.entered_ns / 1e9,
        seconds=((call.returned_ns if ended else now_ns) - call.entered_ns) / 1e9,
        waited=(call.met_ns - call.entered_ns) / 1e9 if known else None,
        last=world(call.last) if known else None,
        outcome=call.outcome,
        under_way=not ended,
        async_op=call.async_op,
    )


def _duration(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.0f} us"
