"""Statistics of a job's calls: from the records of all ranks to a table, JSON, and the text format of Prometheus.

This module performs no I/O. Agents read the records of their ranks (``rank_stats``) and send the results to the
launcher.

All ranks of a group count how often each rank arrived last. Their counts differ slightly, because each rank counts only
the calls that it has completed. The counts of the rank that has compared the most calls are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from allranks._trace.reader import COMMAND, TraceReader

__all__ = ["GroupStats", "JobStats", "LateRank", "RankStats", "VerbRow", "VerbStats", "prometheus", "rank_stats"]

# In a group of two, each rank arrives last in about half of the calls by chance.
_OFTEN = {2: 2 / 3}  # by group size: a rank stands out if it arrived last in a larger share of the calls
_OFTEN_OF_MORE = 1 / 2
_COSTLY = 0.05  # and if this has cost at least this share of the time
_FEW = 20  # fewer compared calls than this are not significant


class VerbStats(msgspec.Struct, frozen=True):
    """The calls of one verb on one rank. ``seconds`` is the time inside calls, and ``waiting`` is a part of it."""

    calls: int
    bytes: int
    seconds: float
    waiting: float


class GroupStats(msgspec.Struct, frozen=True):
    """The calls of one rank in one group.

    Attributes:
        name: Name of the group.
        ranks: Members, as world ranks. Empty if unknown.
        verbs: Statistics by verb.
        compared: Number of calls for which the last rank to arrive is known.
        late: By world rank: how often it arrived last, and by how many seconds in all.
    """

    name: str
    ranks: tuple[int, ...]
    verbs: dict[str, VerbStats]
    compared: int = 0
    late: dict[int, tuple[int, float]] = {}


class RankStats(msgspec.Struct, frozen=True, tag=True):
    """The calls of one rank.

    Attributes:
        rank: World rank.
        host: Host on which it runs.
        seconds: Seconds since it began to record.
        groups: Groups that it has created.
        commands: Worker only: number of commands that it has executed.
        command_seconds: Seconds inside these commands.
    """

    rank: int
    host: str
    seconds: float
    groups: tuple[GroupStats, ...] = ()
    commands: int = 0
    command_seconds: float = 0.0


def rank_stats(rank: int, reader: TraceReader, now_ns: int) -> RankStats:
    """Return the statistics of a rank of this host until ``now_ns`` (CLOCK_MONOTONIC)."""
    identity = reader.identity
    groups, commands = [], [0, 0.0]
    for group in reader.groups().values():
        executed = group.totals.pop(COMMAND, None)
        if executed is not None:
            commands = [commands[0] + executed.calls, commands[1] + executed.seconds]
        verbs = {v: VerbStats(t.calls, t.bytes, t.seconds, t.waiting) for v, t in group.totals.items()}
        late = {group.world_rank(r): (each.times, each.seconds) for r, each in enumerate(group.late) if each.times}
        if verbs:
            groups.append(GroupStats(group.name, group.ranks, verbs, group.compared, late))
    seconds = (now_ns - identity.monotonic_ns) / 1e9
    return RankStats(rank, identity.host, seconds, tuple(groups), int(commands[0]), commands[1])


@dataclass(frozen=True)
class VerbRow:
    """The calls of one verb on all ranks.

    Attributes:
        verb: Name of the verb.
        calls: Number of calls of all ranks together.
        bytes: Bytes of these calls.
        seconds: Seconds inside these calls.
        waiting: Part of these seconds until all ranks had arrived.
        share: Share of the time of all ranks.
    """

    verb: str
    calls: int
    bytes: int
    seconds: float
    waiting: float
    share: float


@dataclass(frozen=True)
class LateRank:
    """How often a rank arrived last in a group.

    Attributes:
        group: Name of the group.
        ranks: Members of the group.
        rank: World rank.
        host: Host on which it runs.
        times: How often it arrived last.
        compared: Number of calls that were compared.
        seconds: By how many seconds it was late, in all.
        share: Share of the time of the job.
        stands_out: It arrived last so often, and this cost so much, that it deserves attention.
    """

    group: str
    ranks: tuple[int, ...]
    rank: int
    host: str
    times: int
    compared: int
    seconds: float
    share: float
    stands_out: bool


class JobStats:
    """The calls of all ranks of a job.

    Attributes:
        ranks: Number of known ranks.
        seconds: The longest time for which any rank has recorded.
        share: Share of the time of all ranks that was spent in calls.
        verbs: Verbs that were called, the most expensive first.
        late: Ranks that arrived last, the most expensive first. Ranks that never did are left out.
        workers: Ranks that have executed commands.
    """

    def __init__(self, ranks: Iterable[RankStats]) -> None:
        all_ranks = list(ranks)
        self.ranks = len(all_ranks)
        self.seconds = max((rank.seconds for rank in all_ranks), default=0.0)
        total = sum(rank.seconds for rank in all_ranks)
        self.verbs = _verb_rows(all_ranks, total)
        self.share = sum(row.share for row in self.verbs)
        self.late = _late_ranks(all_ranks, self.seconds)
        self.workers = sorted((rank for rank in all_ranks if rank.commands), key=lambda rank: rank.rank)

    def lines(self) -> list[str]:
        """Return the table as text, and one line for each rank that stands out."""
        if not self.verbs and not self.workers:
            return ["no rank has made a call"]
        lines = [f"{self.ranks} rank{'s' * (self.ranks > 1)}, {self.seconds:.1f} s, {self.share:.0%} of it in calls"]
        rows = [["worker", "commands", "seconds", "of the time"]]
        for w in self.workers:
            share = _share(w.command_seconds, w.seconds)
            rows.append([f"rank {w.rank}", f"{w.commands:,}", f"{w.command_seconds:.2f}", f"{share:.1%}"])
        lines += _columns(rows) if self.workers else []
        rows = [["", "calls", "bytes", "seconds", "waiting", "of the time"]]
        for v in self.verbs:
            numbers = [f"{v.calls:,}", _human(v.bytes), f"{v.seconds:.2f}", f"{v.waiting:.2f}", f"{v.share:.1%}"]
            rows.append([v.verb, *numbers])
        lines += _columns(rows) if self.verbs else []
        rows = [["arrived last", "group", "calls", "of", "seconds", "of the time"]]
        for each in self.late:
            numbers = [f"{each.times:,}", f"{each.compared:,}", f"{each.seconds:.2f}", f"{each.share:.1%}"]
            rows.append([f"rank {each.rank}", each.group, *numbers])
        lines += _columns(rows, words=2) if self.late else []
        return lines + self.warnings()

    def warnings(self) -> list[str]:
        """Return one line for each rank that stands out."""
        return [
            f"warning: rank {each.rank}{f' ({each.host})' if each.host else ''} arrived last in {each.times:,} of "
            f"{each.compared:,} calls of group '{each.group}', by {each.seconds:.1f} s in total: {each.share:.0%} of "
            "the time"
            for each in self.late
            if each.stands_out
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the statistics as JSON values."""
        return {
            "ranks": self.ranks,
            "seconds": self.seconds,
            "share_in_calls": self.share,
            "verbs": {row.verb: msgspec.to_builtins(row) for row in self.verbs},
            "late": [msgspec.to_builtins(each) for each in self.late],
            "workers": [
                {"rank": w.rank, "host": w.host, "commands": w.commands, "seconds": w.command_seconds}
                for w in self.workers
            ],
        }


def prometheus(ranks: Iterable[RankStats]) -> str:
    """Return the numbers of all ranks in the text format of Prometheus, version 0.0.4."""
    all_ranks = sorted(ranks, key=lambda rank: rank.rank)
    metrics = _Metrics()
    for rank in all_ranks:
        metrics.add("rank_seconds", rank.seconds, rank=rank.rank, host=rank.host)
        if rank.commands:
            metrics.add("commands_total", rank.commands, rank=rank.rank, host=rank.host)
            metrics.add("command_seconds_total", rank.command_seconds, rank=rank.rank, host=rank.host)
        for group in _merged(rank.groups):
            for verb, v in group.verbs.items():
                labels = {"rank": rank.rank, "host": rank.host, "group": group.name, "verb": verb}
                metrics.add("calls_total", v.calls, **labels)
                metrics.add("bytes_total", v.bytes, **labels)
                metrics.add("call_seconds_total", v.seconds, **labels)
                metrics.add("waiting_seconds_total", v.waiting, **labels)
    metrics.add("ranks", len(all_ranks))
    hosts = {rank.rank: rank.host for rank in all_ranks}
    for group in _most_compared(all_ranks):
        metrics.add("compared_calls_total", group.compared, group=group.name)
        for late, (times, seconds) in sorted(group.late.items()):
            labels = {"rank": late, "host": hosts.get(late, ""), "group": group.name}
            metrics.add("last_calls_total", times, **labels)
            metrics.add("late_seconds_total", seconds, **labels)
    return metrics.text()


_METRICS = {
    "ranks": ("gauge", "Ranks of the job that record their calls."),
    "rank_seconds": ("gauge", "Time since the rank began to record its calls."),
    "calls_total": ("counter", "Calls that succeeded."),
    "bytes_total": ("counter", "Bytes of the tensors of these calls."),
    "call_seconds_total": ("counter", "Time inside these calls."),
    "waiting_seconds_total": ("counter", "Part of that time until all ranks had arrived."),
    "commands_total": ("counter", "Commands that the worker has executed."),
    "command_seconds_total": ("counter", "Time inside these commands."),
    "compared_calls_total": ("counter", "Calls of a group for which the last rank is known."),
    "last_calls_total": ("counter", "Of these, the calls in which the rank arrived last."),
    "late_seconds_total": ("counter", "Delay of the rank in these calls after the last but one rank."),
}


class _Metrics:
    def __init__(self) -> None:
        self._samples: dict[str, dict[str, float]] = {name: {} for name in _METRICS}

    def add(self, name: str, value: float, **labels: object) -> None:
        """Add to a sample. Groups that had the same name one after the other share one sample."""
        given = ",".join(f'{label}="{_escaped(str(each))}"' for label, each in labels.items())
        key = f"{{{given}}}" if given else ""
        samples = self._samples[name]
        samples[key] = samples.get(key, 0) + value

    def text(self) -> str:
        lines = []
        for name, (kind, about) in _METRICS.items():
            lines += [f"# HELP allranks_{name} {about}", f"# TYPE allranks_{name} {kind}"]
            lines += [f"allranks_{name}{labels} {value!r}" for labels, value in self._samples[name].items()]
        return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _verb_rows(ranks: Sequence[RankStats], total_s: float) -> list[VerbRow]:
    found: dict[str, VerbRow] = {}
    for rank in ranks:
        for group in rank.groups:
            for verb, v in group.verbs.items():
                old = found.get(verb, VerbRow(verb, 0, 0, 0.0, 0.0, 0.0))
                found[verb] = VerbRow(
                    verb,
                    old.calls + v.calls,
                    old.bytes + v.bytes,
                    old.seconds + v.seconds,
                    old.waiting + v.waiting,
                    old.share + _share(v.seconds, total_s),
                )
    return sorted(found.values(), key=lambda row: -row.seconds)


def _merged(groups: Sequence[GroupStats]) -> list[GroupStats]:
    """Merge the groups of one rank that have the same name and members: each of them has replaced the one before."""
    found: dict[tuple[str, tuple[int, ...]], GroupStats] = {}
    for group in groups:
        key = group.name, group.ranks
        if key not in found:
            found[key] = group
            continue
        old = found[key]
        verbs = dict(old.verbs)
        for verb, v in group.verbs.items():
            o = verbs.get(verb, VerbStats(0, 0, 0.0, 0.0))
            verbs[verb] = VerbStats(o.calls + v.calls, o.bytes + v.bytes, o.seconds + v.seconds, o.waiting + v.waiting)
        late = dict(old.late)
        for rank, (times, seconds) in group.late.items():
            before = late.get(rank, (0, 0.0))
            late[rank] = before[0] + times, before[1] + seconds
        found[key] = GroupStats(*key, verbs, old.compared + group.compared, late)
    return list(found.values())


def _most_compared(ranks: Sequence[RankStats]) -> list[GroupStats]:
    """Return each group once, with the counts of the rank that has compared the most calls."""
    found: dict[tuple[str, tuple[int, ...]], GroupStats] = {}
    for rank in sorted(ranks, key=lambda rank: rank.rank):
        for group in _merged(rank.groups):
            key = group.name, group.ranks
            if group.compared and (key not in found or group.compared > found[key].compared):
                found[key] = group
    return list(found.values())


def _late_ranks(ranks: Sequence[RankStats], seconds: float) -> list[LateRank]:
    hosts = {rank.rank: rank.host for rank in ranks}
    found = []
    for group in _most_compared(ranks):
        often = _OFTEN.get(len(group.ranks), _OFTEN_OF_MORE)
        for rank, (times, late_s) in group.late.items():
            share = _share(late_s, seconds)
            out = group.compared >= _FEW and times > often * group.compared and share >= _COSTLY
            host = hosts.get(rank, "")
            found.append(
                LateRank(group.name, group.ranks, rank, host, times, group.compared, late_s, share, stands_out=out)
            )
    return sorted(found, key=lambda each: -each.seconds)


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _human(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if nbytes < 1024 or unit == "TiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError(nbytes)


def _columns(rows: list[list[str]], words: int = 1) -> list[str]:
    """Return the rows as lines. The first ``words`` columns are text, the others are numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if index < words else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines
