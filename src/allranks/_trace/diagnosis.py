"""Why ranks wait: the rank for which each waits, the ranks that delay all others, and cycles of waits. Pure functions.

A rank in a collective waits for the members of the group that have not begun the collective. A rank in ``recv`` waits
for the sender. A rank in ``send`` waits for the receiver. A rank that others wait for may itself wait. At the end of
such chains are ranks that wait for no other rank: they are late. If a chain returns to one of its own ranks, none of
its ranks can continue. Ranks that make different calls under the same number of a group are out of step: torch's own
backends compare no calls, so these ranks wait for data that no rank sends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from allranks._base.errors import rank_list
from allranks._trace.state import CREATION, CallState, RankState

__all__ = ["Diagnosis", "Mismatch", "RankWait", "diagnose"]

_HALTED = ("gone", "stopped", "being debugged")

# Collectives in which all ranks pass the same number of elements.
_SAME_SIZE = frozenset(("all_reduce", "broadcast", "reduce"))


@dataclass(frozen=True)
class RankWait:
    """A rank that waits in a call for others.

    Attributes:
        rank: The rank that waits.
        call: The call in which it waits.
        awaited: The ranks for which it waits. Empty: all have arrived, or the ranks are unknown.
    """

    rank: int
    call: CallState
    awaited: tuple[int, ...]


@dataclass(frozen=True)
class Mismatch:
    """Different calls under one number of a group, of which at least one waits.

    Attributes:
        calls: The call of each rank, by rank.
        odd: The ranks whose call differs from that of most ranks. Empty if no call is that of most ranks.
    """

    calls: Mapping[int, CallState]
    odd: tuple[int, ...]


@dataclass(frozen=True)
class Diagnosis:
    """The causes of waiting.

    Attributes:
        waits: The wait of each waiting rank, by rank.
        late: Ranks that others wait for, and that wait for no rank.
        circles: Ranks that wait for each other: each for the next, and the last for the first.
        states: All known states, by rank.
        mismatches: Ranks that are out of step.
    """

    waits: Mapping[int, RankWait]
    late: tuple[int, ...]
    circles: tuple[tuple[int, ...], ...]
    states: Mapping[int, RankState]
    mismatches: tuple[Mismatch, ...] = ()

    def waiting_for(self, rank: int) -> list[int]:
        """Return the ranks that wait for a rank, directly or through other ranks."""
        return sorted(r for r in self.waits if rank in self._ends(r))

    def _ends(self, rank: int) -> set[int]:
        seen, todo = {rank}, [rank]
        while todo:
            wait = self.waits.get(todo.pop())
            for awaited in wait.awaited if wait is not None else ():
                if awaited not in seen:
                    seen.add(awaited)
                    todo.append(awaited)
        return seen - {rank}

    def key(self) -> tuple[object, ...]:
        """Return a key that is equal for two diagnoses with the same content."""
        waits = sorted((w.rank, w.call.title, w.call.group, w.call.site, w.awaited) for w in self.waits.values())
        return tuple(waits), self.late, self.circles, tuple(tuple(sorted(each.calls)) for each in self.mismatches)

    def lines(
        self,
        hosts: Mapping[int, str] | None = None,
        places: Mapping[int, str] | None = None,
        problems: Mapping[int, str] | None = None,
    ) -> list[str]:
        """Return the diagnosis as text: one line for each late rank and each cycle.

        Args:
            hosts: Host of each rank, if there are several.
            places: Line of the program, by rank, for ranks that could report it.
            problems: Why a rank did not report its state itself, by rank.
        """
        texts = [_describe_mismatch(mismatch) for mismatch in self.mismatches]
        out_of_step = {rank for mismatch in self.mismatches for rank in mismatch.calls}
        for circle in self.circles:
            if not out_of_step & set(circle):
                texts.append(self._circle(circle))
        in_circle = {rank for circle in self.circles for rank in circle}
        alike: dict[tuple[int, ...], list[int]] = {}
        # That a rank is out of step explains why others wait for it.
        for late in (rank for rank in self.late if rank not in out_of_step):
            alike.setdefault(tuple(r for r in self.waiting_for(late) if r not in in_circle), []).append(late)
        for waiting, late_ranks in alike.items():
            if waiting:
                texts.append(self._late(waiting, late_ranks, hosts or {}, places or {}, problems or {}))
        return texts

    def _late(
        self,
        waiting: Sequence[int],
        late: Sequence[int],
        hosts: Mapping[int, str],
        places: Mapping[int, str],
        problems: Mapping[int, str],
    ) -> str:
        # Report the most informative wait: that of the rank that waits longest and directly for a late rank.
        direct = [w for w in (self.waits[r] for r in waiting) if set(late) & set(w.awaited)]
        first = max(direct or [self.waits[r] for r in waiting], key=lambda w: w.call.seconds)
        waiting_ranks = rank_list(sorted(waiting))
        awaited = [
            f"rank {r}{_at(hosts.get(r, ''))}, {self._whereabouts(r, places.get(r, ''), problems.get(r, ''))}"
            for r in late[:3]
        ]
        if len(late) > 3:
            awaited = [f"{rank_list(sorted(late))}: {awaited[0]}"]
        verb = "has" if len(waiting) == 1 else "have"
        waited = f"{waiting_ranks} {verb} waited {_duration(first.call.seconds)} in {_call(first.call)}"
        return f"{waited} for {'; '.join(awaited)}"

    def _whereabouts(self, rank: int, place: str, problem: str) -> str:
        """Return the place of a late rank, and the state of its process."""
        state = self.states.get(rank)
        if problem and (state is None or state.process not in ("gone", "stopped")):
            where = f", is at {place}" if place else ""
            process = f"; its process is {_process(state)}" if state is not None and where else ""
            return f"which {problem}{where}{process}"
        if state is None:
            return "whose state is not known"
        if state.doing and state.process not in ("gone", "stopped"):
            return f"which executes {state.doing}; its process is {_process(state)}"
        if place and state.process not in ("gone", "stopped"):
            return f"which is at {place}; its process is {_process(state)}"
        process = "whose process has exited" if state.process == "gone" else f"whose process is {state.process}"
        if state.last is not None:
            return f"{process}, after {state.last.title}{_at(state.last.site or _near(state.near))}"
        return f"{process}, before its first call" if state.recorded else process

    def _circle(self, circle: Sequence[int]) -> str:
        parts = []
        for place, rank in enumerate(circle):
            wait = self.waits[rank]
            parts.append(f"rank {rank} in {_call(wait.call)} for rank {circle[(place + 1) % len(circle)]}")
        seconds = max(self.waits[rank].call.seconds for rank in circle)
        ranks = rank_list(sorted(circle))
        return f"deadlock: {ranks} have waited for each other for {_duration(seconds)}: {'; '.join(parts)}"


def diagnose(states: Iterable[RankState]) -> Diagnosis:
    """Return the waits between ranks.

    Args:
        states: States of all known ranks of the job, taken at about the same time.
    """
    by_rank = {state.rank: state for state in states}
    waits = {}
    for state in by_rank.values():
        call = state.waiting
        if call is not None and state.process not in _HALTED:
            waits[state.rank] = RankWait(state.rank, call, _awaited(state, call, by_rank))
    waited_for = {rank for wait in waits.values() for rank in wait.awaited}
    # A waiting rank for which no awaited rank is known is not blocked, so it may be late itself.
    blocked = {rank for rank, wait in waits.items() if wait.awaited}
    late = tuple(sorted(waited_for - blocked))
    return Diagnosis(waits, late, tuple(_circles(waits)), by_rank, tuple(_mismatches(by_rank, waits)))


def _awaited(state: RankState, call: CallState, states: Mapping[int, RankState]) -> tuple[int, ...]:
    if call.met:
        return ()
    others = [rank for rank in call.ranks if rank != state.rank]
    if call.number == 0:
        awaited = tuple(others) if call.peer < 0 else (call.peer,)
        partners = [rank for rank in awaited if rank in states and _has_other_side(states[rank], state.rank, call)]
        # If both processes run, their data is on its way.
        return tuple(rank for rank in partners if states[rank].process in _HALTED) if partners else awaited
    key = call.group, call.ranks
    behind = tuple(rank for rank in others if _number(states.get(rank), key) < call.number)
    # If all have begun it, a rank that was halted inside it delays the others.
    return behind or tuple(rank for rank in others if rank in states and states[rank].process in _HALTED)


def _has_other_side(state: RankState, rank: int, call: CallState) -> bool:
    """Return whether a rank has begun the matching call of another rank's message."""
    return any(
        not each.ended
        and each.number == 0
        and (each.group, each.ranks) == (call.group, call.ranks)
        and {each.verb, call.verb} == {"send", "recv"}
        and each.tag == call.tag
        and each.peer in (rank, -1)
        for each in state.calls
    )


def _number(state: RankState | None, key: tuple[str, tuple[int, ...]]) -> int:
    """Return the number of the last collective of a group that a rank has begun."""
    if state is None:
        return 0
    return max((group.number for group in state.groups if (group.name, group.ranks) == key), default=0)


def _circles(waits: Mapping[int, RankWait]) -> list[tuple[int, ...]]:
    """Return each set of ranks that wait for each other once, as the shortest cycle from its lowest rank."""
    found: list[tuple[int, ...]] = []
    taken: set[int] = set()
    for start in sorted(waits):
        if start in taken or (circle := _shortest_circle(start, waits)) is None:
            continue
        if not taken & set(circle):
            found.append(circle)
            taken |= set(circle)
    return found


def _shortest_circle(start: int, waits: Mapping[int, RankWait]) -> tuple[int, ...] | None:
    came_from: dict[int, int] = {}
    todo = [start]
    while todo:
        following = []
        for rank in todo:
            wait = waits.get(rank)
            for awaited in wait.awaited if wait is not None else ():
                if awaited == start:
                    way = [rank]
                    while way[-1] != start:
                        way.append(came_from[way[-1]])
                    return tuple(reversed(way))
                if awaited not in came_from:
                    came_from[awaited] = rank
                    following.append(awaited)
        todo = following
    return None


def _mismatches(states: Mapping[int, RankState], waits: Mapping[int, RankWait]) -> Iterator[Mismatch]:
    """Yield each number of a group under which ranks have made different calls, if a rank waits in one of them."""
    seen = set()
    for wait in waits.values():
        key = wait.call.group, wait.call.ranks, wait.call.number
        if wait.call.number == 0 or wait.call.met or key in seen:
            continue
        seen.add(key)
        calls = {}
        for rank in wait.call.ranks:
            state = states.get(rank)
            for call in (*state.recent, *state.calls) if state is not None else ():
                if (call.group, call.ranks, call.number) == key:
                    calls[rank] = call
        kinds: dict[tuple[object, ...], list[int]] = {}
        for rank, call in calls.items():
            kinds.setdefault(_kind(call), []).append(rank)
        # torch records no root, so it is known only of ranks that wait in the call.
        roots: dict[int, list[int]] = {}
        for rank, call in calls.items():
            if call.peer >= 0:
                roots.setdefault(call.peer, []).append(rank)
        if len(kinds) > 1 or len(roots) > 1:
            alike = max((kinds if len(kinds) > 1 else roots).values(), key=len)
            odd = [rank for rank in calls if rank not in alike] if 2 * len(alike) > len(calls) else []
            yield Mismatch(dict(sorted(calls.items())), tuple(sorted(odd)))


def _kind(call: CallState) -> tuple[object, ...]:
    """Return what must be equal in the calls of all ranks, except the root."""
    return call.verb, call.dtype, call.count if call.verb in _SAME_SIZE else 0


def _describe_mismatch(mismatch: Mismatch) -> str:
    alike: dict[str, list[int]] = {}
    for rank, call in mismatch.calls.items():
        alike.setdefault(f"in {_call(call)}{_arguments(call)}", []).append(rank)
    places = "; ".join(
        f"{rank_list(ranks)} {'is' if len(ranks) == 1 else 'are'} {place}" for place, ranks in alike.items()
    )
    number = next(iter(mismatch.calls.values())).number
    same = len({call.verb for call in mismatch.calls.values()}) == 1
    what = "passed different arguments to" if same else "made different calls as"
    differ = "differs" if len(mismatch.odd) == 1 else "differ"
    culprit = f" {rank_list(mismatch.odd).capitalize()} {differ} from most ranks." if mismatch.odd else ""
    return (
        f"{rank_list(sorted(mismatch.calls))} {what} collective {number} of the group: {places}.{culprit}"
        " All ranks must make the same calls in the same order."
    )


def _arguments(call: CallState) -> str:
    root = f", root {call.peer}" if call.peer >= 0 else ""
    return f" of {call.count} {call.dtype}{root}" if call.dtype else root


def _process(state: RankState) -> str:
    waits = state.kernel.describe() if state.process in ("sleeping", "in uninterruptible sleep") else ""
    return f"{state.process}, {waits}" if waits else state.process


def _call(call: CallState) -> str:
    named = call.group not in ("", "world") and not call.group.startswith(CREATION)
    group = f" of group '{call.group}'" if named else ""
    return f"{call.title}{group}{_at(call.site)}"


def _at(site: str) -> str:
    return f" ({site})" if site else ""


def _near(site: str) -> str:
    return f"near {site}" if site else ""


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
