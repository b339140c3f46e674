"""The state of this rank: the calls that torch has recorded, its messages, and the places of its threads."""

from __future__ import annotations

import importlib
import inspect
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from allranks._trace import memory
from allranks._trace.inspection import rank_state
from allranks._trace.kernel import KernelWait
from allranks._trace.state import CREATION, CallState, GroupState, RankState
from allranks._watch.arrivals import arrivals_of
from allranks._watch.exchange import RankAnswer
from allranks._watch.messages import Message, recorded_messages
from allranks._watch.recorded import FlightCall, FlightGroup, group_states, in_progress, read_dump
from allranks._watch.threads import ThreadPlace, places, render, site

__all__ = ["Evidence", "torch_groups"]

_RECENT = 64  # ended calls in a report, so that ranks that are out of step can be compared
_CREATIONS = 64  # groups whose creation is reported


class _Creation(NamedTuple):
    """The creation of a group by this rank.

    Attributes:
        ranks: The members, as world ranks.
        began: When it began, in seconds of ``time.monotonic``.
        thread: The thread that creates the group. 0 after the creation.
    """

    ranks: tuple[int, ...]
    began: float
    thread: int


class Evidence:
    """The state of a rank whose groups are torch's.

    Args:
        rank: World rank.
        world_size: Number of ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world = tuple(range(world_size))
        self._torch_distributed = os.path.dirname(sys.modules["torch.distributed"].__file__ or "?") + os.sep
        self._creations: dict[str, _Creation] = {}
        # What `longest_wait_s` has last observed, and since when it has not changed: the counters of each group, and
        # the position of each thread.
        self._since: dict[str, tuple[object, float]] = {}
        self._positions: dict[int, tuple[tuple[int, int], float]] = {}

    def begin_creation(self, name: str, ranks: Sequence[int], thread: int) -> None:
        """Record that this rank creates a group, which may wait for the other ranks."""
        self._creations[name] = _Creation(tuple(ranks) or self._world, time.monotonic(), thread)
        # No rank waits for a creation so long ago: the members of a group create it together.
        if len(self._creations) > _CREATIONS:
            self._creations.pop(next(iter(self._creations)))

    def end_creation(self, name: str) -> None:
        """Record that the group has been created."""
        if name in self._creations:
            self._creations[name] = self._creations[name]._replace(thread=0)

    def longest_wait_s(self) -> float:
        """Return the seconds that this rank may have waited. 0 if no call is in progress.

        A thread may have begun a call and be elsewhere; `inspect` excludes that. Cost: microseconds.
        """
        now = time.monotonic()
        status = _status()
        self._since = {
            name: (value, self._since[name][1] if self._since.get(name, (None,))[0] == value else now)
            for name, value in status.items()
        }
        waits = [now - since for _, since in self._since.values()]
        waits += [now - each.began for each in self._creations.values() if each.thread]
        waits += self._still_threads(now)
        return max(waits, default=0.0)

    def _still_threads(self, now: float) -> list[float]:
        """Return the seconds since the innermost frame has moved, of threads that may wait for a rank."""
        senders = {message.thread for message in recorded_messages() if _is_pending(message)}
        before, self._positions = self._positions, {}
        for ident, frame in sys._current_frames().items():
            if ident in senders or frame.f_code.co_filename.startswith(self._torch_distributed):
                position = id(frame), frame.f_lasti
                known = before.get(ident)
                self._positions[ident] = known if known is not None and known[0] == position else (position, now)
        return [now - since for _, since in self._positions.values()]

    def inspect(self, collecting: bool = False) -> tuple[RankAnswer, CallState | None]:
        """Return the state of this rank, and the call of torch in which it waits; None if it waits in none.

        A wait in a group of allranks is part of the state, but the launcher or ``_trace/watcher.py`` reports it.
        """
        now, wall_ns = time.monotonic(), time.time_ns()
        found = places()
        groups = torch_groups()
        recorded = read_dump(_dump(), groups, wall_ns, now)
        calls = [_with_wait(call, found) for call in in_progress(recorded)]
        calls += self._messages(found, groups, now, wall_ns)
        calls += self._creation_calls(found, now)
        waiting_call = min((call for call in calls if call.waits), key=lambda call: call.began, default=None)
        own = rank_state(self._rank, os.getpid(), memory.reader())
        calls += own.calls
        ended = [call.state for call in recorded if call.state.ended][-_RECENT:]
        newest = max((call.state for call in recorded), key=lambda call: call.began, default=None)
        waiting = next((each for each in found if each.api), found[0] if found else None)
        kernel = found[0].kernel if found else KernelWait()
        state = RankState(
            self._rank,
            os.getpid(),
            # The thread of a watcher may run; the main thread's state is that of the rank.
            "sleeping" if kernel.call else "running",
            now,
            recorded=bool(groups) or own.recorded,
            kernel=kernel,
            calls=tuple(sorted(calls, key=lambda call: call.began)),
            last=newest or own.last,
            near=newest.site if newest is not None else own.near,
            recent=tuple(ended),
            groups=(*group_states(recorded, groups), *self._creation_groups(), *own.groups),
        )
        answer = RankAnswer(
            state,
            waiting.site if waiting is not None else "",
            "\n".join(render(found)),
            collecting=collecting,
        )
        return answer, waiting_call

    def arrivals(self) -> RankAnswer:
        """Return when this rank began the collectives that the Flight Recorder has kept. Cost: 60 ms."""
        now, wall_ns = time.monotonic(), time.time_ns()
        calls = read_dump(_dump(), torch_groups(), wall_ns, now)
        state = RankState(self._rank, os.getpid(), "running", now)
        return RankAnswer(state, arrivals=arrivals_of(calls, wall_ns, now))

    def _creation_groups(self) -> list[GroupState]:
        return [GroupState(CREATION + name, each.ranks, "", 1, True) for name, each in self._creations.items()]

    def _creation_calls(self, found: Sequence[ThreadPlace], now: float) -> list[CallState]:
        calls = []
        for name, creation in self._creations.items():
            place = next((each for each in found if each.thread == creation.thread), None)
            if place is not None and creation.thread:
                title = place.api or "init_process_group"
                calls.append(_call(title, CREATION + name, creation.ranks, 1, place.site, creation.began, now))
        return calls

    def _messages(
        self, found: Sequence[ThreadPlace], groups: Mapping[str, FlightGroup], now: float, wall_ns: int
    ) -> list[CallState]:
        """Return the messages for which a thread waits."""
        pending = [message for message in recorded_messages() if _is_pending(message)]
        calls = []
        for place in found:
            mine = [message for message in pending if message.thread == place.thread]
            if not mine or place.elsewhere or (place.api and place.api not in ("send", "recv", "isend", "irecv")):
                continue
            exact = [message for message in mine if message.work() is place.waited]
            message = exact[0] if exact else mine[0] if not place.api else mine[-1]
            group = group_of(message.group, groups)
            if group is None or "gloo" not in group.backend:  # NCCL records its messages
                continue
            peer = -1 if message.peer is None else message.peer
            if message.of_group and peer >= 0:
                peer = group.ranks[peer]
            seconds = (wall_ns - message.began_ns) / 1e9
            other = ("any rank" if peer < 0 else f"rank {peer}") + (f", tag {message.tag}" if message.tag else "")
            call = _call(
                f"{message.verb} {'to' if message.verb == 'send' else 'from'} {other}",
                group.title, group.ranks, 0, site(message.code, message.position), now - seconds, now,
            )  # fmt: skip
            dtype = str(message.dtype).removeprefix("torch.")
            calls.append(
                msgspec.structs.replace(
                    call, verb=message.verb, tag=message.tag, dtype=dtype, count=message.count, peer=peer
                )
            )
        return calls


def _is_pending(message: Message) -> bool:
    work = message.work()
    # Works of Python classes, such as those of allranks, complete the message in the thread that polls them.
    if work is None or type(work) is not sys.modules["torch._C._distributed_c10d"].Work:
        return False
    # gloo reports a message as completed only after the program has waited for it.
    return not work.is_completed()


def _with_wait(call: FlightCall, found: Sequence[ThreadPlace]) -> CallState:
    """Return a call in progress, with whether a thread waits for it, and with the root, which torch does not record."""
    if call.on_device:
        # Work on a GPU is ordered by its stream. The kernel waits for the other ranks once it has started.
        return msgspec.structs.replace(call.state, waits=call.on_device == "started")
    thread = next((each for each in found if each.thread == call.thread), found[0] if found else None)
    if thread is None:
        return call.state
    if thread.api and thread.peer is not None and not thread.peer_of_group:
        return msgspec.structs.replace(call.state, waits=True, peer=thread.peer)
    return msgspec.structs.replace(call.state, waits=not thread.elsewhere)


def _call(
    title: str, group: str, ranks: tuple[int, ...], number: int, site: str, began: float, now: float
) -> CallState:
    """Return a call in which this rank waits."""
    return CallState(
        0, title, title, group, ranks, number, 0, "", 0, -1, site, began, now - began, False, -1, "", False, True
    )


def _dump_function() -> Callable[..., bytes] | None:
    """Return torch's function that dumps gloo's Flight Recorder. None if this torch has none."""
    dump = getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_fr_trace", None)
    # `_plugin.recorder` wraps it to dump groups of allranks, which report their waits themselves.
    return None if dump is None else inspect.unwrap(dump)


def _status() -> dict[str, object]:
    """Return for each group with a collective in progress a value that is equal as long as none begins or ends."""
    dump = _dump_function()
    if dump is None:
        return {}
    # Without the calls, the dump holds only the counters of each group, and costs microseconds.
    content = pickle.loads(dump(includeCollectives=False, includeStackTraces=False, onlyActive=False))
    return {
        name: (counters["last_enqueued_collective"], counters["last_completed_collective"])
        for name, counters in content.get("pg_status", {}).items()
        if counters["last_enqueued_collective"] != counters["last_completed_collective"]
    }


def _dump() -> Mapping[str, Any]:
    """Return the dump of the Flight Recorder with the Python frames of the calls. Empty if this torch has none."""
    dump = _dump_function()
    if dump is None:
        return {}
    torch = sys.modules["torch"]
    # For the frames of compiled code, the dump reads torch._inductor.codecache, which imports the compiler: 2 s with
    # the GIL held, and 100 MB. A process that has not imported it has no compiled code.
    stands_in = "torch._inductor" not in sys.modules and "_inductor" not in vars(torch)
    if stands_in:
        torch._inductor = _Inductor(threading.get_ident())  # type: ignore[attr-defined]
    try:
        content: Mapping[str, Any] = pickle.loads(dump(True, True, False))
        return content
    finally:
        # The program may have imported the compiler since.
        if stands_in and isinstance(vars(torch).get("_inductor"), _Inductor):
            del torch._inductor


class _Inductor:
    """Replaces torch._inductor during a dump: only the thread of the dump finds it empty."""

    def __init__(self, thread: int) -> None:
        self._thread = thread

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() == self._thread:
            raise AttributeError(name)
        return getattr(importlib.import_module("torch._inductor"), name)


def torch_groups() -> dict[str, FlightGroup]:
    """Return the groups of torch.distributed of this process, by name, without those of allranks."""
    c10d = sys.modules["torch.distributed.distributed_c10d"]
    world = c10d._world
    found = {}
    for group, ranks in list(world.pg_group_ranks.items()):
        name = world.pg_names.get(group)
        backend = str(world.pg_map.get(group, ("",))[0])
        if name is None:
            continue
        description = getattr(group, "group_desc", "") or ""
        title = "" if description == "default_pg" else description if description != "undefined" else name
        # `ranks` maps world ranks to ranks of the group.
        members = tuple(sorted(ranks, key=ranks.__getitem__))
        found[name] = FlightGroup(name, title, members, backend)
    return found


def group_of(group: Any, groups: Mapping[str, FlightGroup]) -> FlightGroup | None:
    """Return the description of a group that was passed to a function; None for the default group."""
    c10d = sys.modules["torch.distributed.distributed_c10d"]
    if group is None:
        return next((each for each in groups.values() if not each.title), None)
    return groups.get(c10d._world.pg_names.get(group, ""))
