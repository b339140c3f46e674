"""Reports why ranks wait if no agent does: under srun, mpirun or torchrun, or if ranks are started manually.

Once per second, a thread of each rank checks whether this rank has been in one call for a long time. Such a rank waits
without the GIL, so the thread can run. The thread reads the records of the ranks of its host. For ranks on other hosts
it uses the number of their last collective, which the group provides. One rank reports for all: the lowest waiting rank
on the host of a late rank. If no rank waits on that host, the lowest waiting rank of the group reports.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from allranks._base.forks import forks
from allranks._base.threads import Daemon
from allranks._trace import memory
from allranks._trace.diagnosis import Diagnosis, diagnose
from allranks._trace.inspection import QuietClock, rank_state
from allranks._trace.offered_stacks import offer_stacks, stacks_of
from allranks._trace.stacks import main_place
from allranks._trace.state import CallState, GroupState, RankState

__all__ = ["WatchedPeer", "choose_teller", "unwatch", "watch"]

_LOOK_S = 1.0  # between two checks


class _Group(Protocol):
    name: str
    ranks: tuple[int, ...]

    def last_numbers(self) -> Sequence[int] | None:
        """Return the number of each rank's last collective, as far as this rank knows. None if it knows none."""


@dataclass(frozen=True)
class WatchedPeer:
    """A rank of the world: its number, its process, its host, and whether that is this host."""

    rank: int
    pid: int
    host: str
    here: bool


class _Watcher:
    def __init__(self, me: int, notice_s: float) -> None:
        self._me = me
        self._peers: dict[int, WatchedPeer] = {}
        self._notice_s = notice_s
        self._clock = QuietClock()
        self._reported: set[tuple[object, ...]] = set()
        self._groups: weakref.WeakSet[_Group] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def add(self, group: _Group, peers: Iterable[WatchedPeer]) -> None:
        with self._lock:
            self._peers |= {peer.rank: peer for peer in peers}
            self._groups.add(group)
            if self._thread is None:
                offer_stacks()
                self._stop = threading.Event()
                self._thread = Daemon(target=self._run, args=(self._stop,), name="allranks-notices")
                self._thread.start()

    def remove(self, group: _Group) -> None:
        with self._lock:
            self._groups.discard(group)
            if self._groups or self._thread is None:
                return
            thread, self._thread = self._thread, None
            self._stop.set()
        if thread is not threading.current_thread():
            # Outside the lock, so that other threads can add groups. Limited, because a check may wait for stacks.
            thread.join(_LOOK_S)

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(_LOOK_S):
            reader = memory.reader()
            if reader is not None and (found := self._clock.long_wait(reader, self._notice_s)) is not None:
                self._look(found[1])

    def _look(self, limit_s: float) -> None:
        # A copy, because `add` may change the dict in another thread.
        states = {peer.rank: self._state(peer) for peer in list(self._peers.values()) if peer.here}
        mine = states[self._me].waiting
        if mine is None:
            return
        group = next((g for g in list(self._groups) if (g.name, g.ranks) == (mine.group, mine.ranks)), None)
        numbers = group.last_numbers() if group is not None else None
        for place, rank in enumerate(mine.ranks):
            if rank not in states and numbers is not None:
                states[rank] = _far_state(self._peers[rank], mine, numbers[place])
        found = diagnose(states.values())
        # A rank on another host may have no known state.
        # A rank that reads standard input waits for the user, for example in a debugger.
        late = tuple(rank for rank in found.late if rank in states and not states[rank].reads_stdin)
        found = replace(found, late=late)
        # With the limit, so that the same wait is reported again after the next limit.
        key = (*found.key(), limit_s)
        if (not late and not found.circles) or key in self._reported:
            return
        self._reported.add(key)
        if choose_teller(found, self._peers, mine) == self._me:
            self._tell(found)

    def _state(self, peer: WatchedPeer) -> RankState:
        return rank_state(peer.rank, peer.pid, memory.reader() if peer.rank == self._me else memory.memory_of(peer.pid))

    def _tell(self, found: Diagnosis) -> None:
        places = {}
        for rank in found.late:
            peer = self._peers[rank]
            # A stopped process runs no signal handler, so it cannot write its stacks.
            if peer.here and found.states[rank].process not in ("gone", "stopped"):
                places[rank] = main_place(stacks_of(peer.pid))
        hosts = {rank: peer.host for rank, peer in self._peers.items() if not peer.here}
        for line in found.lines(hosts, places):
            sys.stderr.write(f"allranks: rank {self._me}: {line}\n")
        sys.stderr.flush()


def choose_teller(found: Diagnosis, peers: Mapping[int, WatchedPeer], mine: CallState) -> int:
    """Return the rank that reports: the same on every waiting rank. ``mine``: the call in which this rank waits."""
    concerned = found.late or tuple(rank for circle in found.circles for rank in circle)
    waiting = set(found.waits) | {rank for rank in mine.ranks if _has_begun(found.states.get(rank), mine)}
    waiting -= set(found.late)
    there = [rank for rank in waiting if concerned and peers[rank].host == peers[min(concerned)].host]
    return min(there or waiting, default=-1)


def _has_begun(state: RankState | None, call: CallState) -> bool:
    """Return whether a rank has begun a collective, as far as this rank knows."""
    if state is None or not call.number:
        return False
    return any(g.number >= call.number for g in state.groups if (g.name, g.ranks) == (call.group, call.ranks))


def _far_state(peer: WatchedPeer, call: CallState, number: int) -> RankState:
    """Return the known state of a rank on another host."""
    group = GroupState(call.group, call.ranks, "", number, True)
    return RankState(peer.rank, peer.pid, "not visible from here", 0.0, groups=(group,))


_watcher: _Watcher | None = None
_made = -1


def watch(group: _Group, me: int, peers: Callable[[], Iterable[WatchedPeer]], notice_s: float) -> None:
    """Watch the calls of a group. The first group of a process starts the thread."""
    global _watcher, _made
    # An agent reports waits itself, so a second report from the ranks would be redundant.
    if memory.has_agent or notice_s <= 0 or memory.reader() is None:
        return
    # A forked child has a copy of the parent's watcher, but not its thread.
    if _made != forks():
        _watcher, _made = _Watcher(me, notice_s), forks()
    assert _watcher is not None
    _watcher.add(group, peers())


def unwatch(group: _Group) -> None:
    """Stop watching a group that is destroyed. After the last group, the thread ends."""
    if _watcher is not None and _made == forks():
        _watcher.remove(group)
