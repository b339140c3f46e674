"""The errors of the native engine: the facts of the core, with the names and hosts of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from allranks import _core
from allranks._base.errors import (
    AbortedError,
    AllranksError,
    MismatchError,
    PeerLostError,
    TimeoutError,
    UsageError,
    rank_list,
)
from allranks._base.forks import refusal
from allranks._base.verbs import REDUCING, VERBS
from allranks._call.purpose import whole_call

if TYPE_CHECKING:
    from allranks._rendezvous.rendezvous import Member

__all__ = ["explain"]

_SAME_ARGUMENTS = "Pass the same dtype, number of elements, op and root on all ranks."
_SAME_CALLS = "Make the same calls in the same order on all ranks: look for a branch or loop that depends on the rank."
_SHRINK = "Call shrink() to continue with a new group; no other call is possible."


def explain(
    failure: _core.Failure,
    verb: str,
    *,
    group: str,
    rank: int,
    members: Sequence[Member],
    last_calls: Sequence[tuple[int, _core.Call]],
    trouble_with: Callable[[int], str | None],
    goes_on: bool = False,
) -> AllranksError:
    """Return the error for the facts that the core reports.

    Args:
        failure: The facts. Another rank may have detected them, in another call.
        verb: The call of this rank.
        group: The name of the group.
        rank: This rank.
        members: The ranks of the group.
        last_calls: Number and fingerprint of each rank's last collective.
        trouble_with: Returns why this rank has no connection with another rank, if the reason is known.
        goes_on: The call has not ended; only this wait for it has.
    """
    kind, peer, reporter, call, theirs, seconds, calls, waiting_for, sites, text, waits, unasked = failure.args
    # Collectives that allranks makes for another call carry a purpose. The user knows only the outer call.
    verb = theirs[0] if reporter == rank and theirs[0] in _core.PURPOSES else whole_call() or verb
    if kind == "system":
        return AllranksError(text)
    if kind == "forked":
        return refusal(f"{verb} on group '{group}': the group")
    ranks = _Ranks(rank, members, last_calls)
    number, within, noticed = "", "", ""
    # Facts of another rank belong to its call. Only this rank's own facts have the number of this call.
    if reporter == rank:
        number = f" #{call}" if call else ""
    elif reporter >= 0:
        within = "" if theirs[0] == "none" else f" in {theirs[0]}{f' #{call}' if call else ''}"
        noticed = f"\n  detected by {ranks.name(reporter)}{within}"
    here = f"{verb}{number} on group '{group}' (rank {rank} of {len(members)})"
    if kind == "mismatch":
        return MismatchError(_mismatch(verb if text else theirs[0], call, peer, calls, sites, text, group, ranks))
    if kind == "timeout":
        # The core knows the missing ranks of its own deadline only. For a timeout of `wait`, they follow from the call
        # numbers.
        missing = ranks.behind() if peer == -1 else waiting_for or [peer]  # -1: a wait with a timeout of its own
        goes_on = goes_on or peer == -1
        if rank in missing and reporter not in (-1, rank) and not _cycle(waits):
            return _late(here, ranks, missing, f"{ranks.name(reporter)} timed out{within}", seconds)
        return _timeout(f"{here}: ", noticed, ranks, missing, goes_on, seconds, waits, unasked)
    if kind == "closed":
        return UsageError(
            f"{here}: the group was destroyed while the call was pending.\n"
            "  Wait for all pending calls before destroy_process_group()."
        )
    who = ranks.name(peer)
    if kind == "aborted":
        return AbortedError(f"{here}: {who} has called abort() on the group.{noticed}\n  {_SHRINK}", peer)
    if kind == "memory":
        return AllranksError(
            f"{here}: {who} ran out of memory during the call, so the group cannot continue.{noticed}\n"
            "  Reduce the memory that the job uses on this host, or use a host with more memory."
        )
    # If another rank could not use its connection with this rank, this rank may know the reason, too.
    trouble = trouble_with(reporter if peer == rank else peer)
    return PeerLostError(f"{here}: {who} {_loss(kind, ranks.last_call(peer), noticed, trouble)}", peer)


class _Ranks(NamedTuple):
    """The ranks of the group, for messages.

    Attributes:
        rank: This rank.
        members: As in `explain`, like ``last_calls``.
    """

    rank: int
    members: Sequence[Member]
    last_calls: Sequence[tuple[int, _core.Call]]

    def name(self, other: int) -> str:
        return f"rank {other} ({self.members[other].host}, pid {self.members[other].pid})" if other >= 0 else "any rank"

    def last_call(self, other: int) -> str:
        if not 0 <= other < len(self.last_calls):
            return ""
        number, (last, *_) = self.last_calls[other]
        known = f"last called {last} #{number}" if number else "had not called any collective that this rank knows of"
        return f"  rank {other} {known}."

    def behind(self) -> list[int]:
        """Return the ranks that have begun fewer collectives than this one."""
        # Call numbers have 32 bits and wrap around, so the difference is compared modulo 2^32.
        begun = self.last_calls[self.rank][0]
        return [
            other for other, (number, _) in enumerate(self.last_calls) if 0 < (begun - number) % (1 << 32) < 1 << 31
        ]


def _timeout(
    here: str,
    noticed: str,
    ranks: _Ranks,
    missing: Sequence[int],
    goes_on: bool,
    seconds: float,
    waits: Sequence[tuple[int, int, str, str]],
    unasked: Sequence[tuple[int, int, _core.Call, int]],
) -> TimeoutError:
    # torch's own tests, and programs, look for " timeout " in this error.
    hint = "  Set a longer timeout with init_process_group(timeout=...)."
    if goes_on:
        hint = "  The call continues. Call wait() again to wait longer."
    lines = [f"{here}no data from {', '.join(map(ranks.name, missing)) or 'other ranks'} for {seconds:.1f} s."]
    cycle = _cycle(waits)
    # A cycle is a deadlock of the program. A longer timeout would not help, so the hint differs.
    if cycle:
        missing = cycle
        hint = "  Let one of these ranks send first, or use isend or irecv."
        lines = [f"{here}{rank_list(sorted(cycle))} have waited for each other for {seconds:.1f} s."]
    if len(waits) > 1:
        lines.append(_chain(waits))
    else:
        lines += [ranks.last_call(other) for other in missing[:4] if other >= 0]
    if unasked:
        lines.append(_unasked(unasked))
    error = TimeoutError("\n".join([*lines, hint]) + noticed)
    error.ranks = tuple(missing)
    return error


def _late(here: str, ranks: _Ranks, missing: Sequence[int], what: str, seconds: float) -> TimeoutError:
    """Return the error of a rank for which another rank has waited too long."""
    awaited = ["this rank", *(ranks.name(other) for other in missing if other != ranks.rank)]
    error = TimeoutError(
        f"{here}: {what}, after it had waited for {' and '.join(awaited)} for {seconds:.1f} s.\n"
        "  Set a longer timeout with init_process_group(timeout=...)."
    )
    error.ranks = tuple(missing)
    return error


def _loss(kind: str, last_call: str, noticed: str, trouble: str | None) -> str:
    """Return what happened to a rank, as the text after its name."""
    if kind == "interrupted":
        return f"was interrupted (Ctrl-C).{noticed}"
    if kind == "left":
        return (
            f"has left the group: it called destroy_process_group, or its process exited.\n{last_call}{noticed}"
            "\n  Check the end of its output."
        )
    if kind == "unreachable" and trouble is not None:
        return f"cannot be reached: {trouble}{noticed}"
    if kind == "unreachable":
        return (
            f"cannot be reached: its host has not responded for some seconds, or the connection failed.\n{last_call}"
            f"{noticed}\n  Check the host and the network. allranks does not reconnect: restart the job."
        )
    return (
        f"died.\n{last_call}{noticed}"
        "\n  Check its output and exit code. An unexpected SIGKILL often comes from the kernel's out-of-memory killer."
    )


def _cycle(waits: Sequence[tuple[int, int, str, str]]) -> list[int]:
    """Return the ranks that wait for each other. Empty if there are none."""
    ranks = [rank for rank, *_ in waits]
    last = waits[-1][1] if waits else -1
    # The chain of waits ends in a rank that it already contains. Only the ranks from there on form the cycle.
    return ranks[ranks.index(last) :] if last in ranks else []


def _chain(waits: Sequence[tuple[int, int, str, str]]) -> str:
    """Return which rank waits for which, and at which call site."""
    links = []
    for _, peer, verb, site in waits:
        awaited = f"rank {peer}" if peer >= 0 else "any rank"
        links.append(f"waits for {awaited} ({verb}, {_line(site)})")
    return f"  rank {waits[0][0]} {', which '.join(links)}."


def _unasked(unasked: Sequence[tuple[int, int, _core.Call, int]]) -> str:
    """Return the messages that no recv has requested."""
    shown = [
        f"from rank {source} with tag {tag}: {_amount(first)}{f' and {count - 1} more' if count > 1 else ''}"
        for source, tag, first, count in sorted(unasked)[:4]
    ]
    more = f"; and messages with {len(unasked) - 4} more tags" if len(unasked) > 4 else ""
    return f"  Messages that no recv has requested: {'; '.join(shown)}{more}."


def _mismatch(
    verb: str,
    call: int,
    peer: int,
    calls: list[_core.Call],
    sites: list[str],
    text: str,
    group: str,
    ranks: _Ranks,
) -> str:
    # A mismatch of a message concerns two ranks, and does not end the group.
    if verb == "recv":
        sent, wanted = calls
        return (
            f"recv on group '{group}' (rank {ranks.rank}): {ranks.name(peer)} sent {_amount(sent)}, "
            f"but the tensor to receive into holds {_amount(wanted)}. The message was dropped.\n"
            "  Pass tensors of one dtype and size to send and recv."
        )
    here = f"call #{call} on group '{group}'"
    where = "".join(
        f"\n  rank {other} at {_line(place) if calls and calls[other][0] in _core.PURPOSES else place}"
        for other, place in enumerate(sites)
        if place
    )
    if text:
        return f"{here}: {verb}: {text}. No tensor was changed.{where}\n  Pass the same size on both ranks."
    ranks_of: dict[_core.Call, list[int]] = {}
    for other, fingerprint in enumerate(calls):
        ranks_of.setdefault(fingerprint, []).append(other)
    if len(ranks_of) > 1:
        alike = len({_call(fingerprint) for fingerprint in ranks_of}) < len(ranks_of)  # different parts of one call
        parts = [
            f"{rank_list(callers)} called {_call(fingerprint)}{f' ({_amount(fingerprint)})' if alike else ''}"
            for fingerprint, callers in ranks_of.items()
        ]
        one_verb = len({fingerprint[0] for fingerprint in ranks_of}) == 1 and calls[0][0] not in _core.PURPOSES
        advice = _SAME_ARGUMENTS if one_verb else _SAME_CALLS
        return f"{here}: {', '.join(parts)}. No tensor was changed.{where}\n  {advice}"
    if peer >= 0:
        return (
            f"{here}: the ranks made their calls of {_call(calls[0])} in different orders: one rank reached two call "
            "sites in one order, and another rank in the opposite order. If all ranks should use the same order, the "
            f"earlier of these calls has mixed up their tensors.{where}\n  Make the calls in one order on all ranks."
        )
    return (
        f"{here}: the ranks called {_call(calls[0])} with tensors of different shapes. No tensor was changed.{where}\n"
        "  Pass tensors of one shape on all ranks."
    )


def _line(site: str) -> str:
    """Return the call site without the shape of the tensor."""
    return site.split(", shape ")[0]


def _amount(fingerprint: _core.Call) -> str:
    return f"{fingerprint[4]} x {fingerprint[1]}"


def _call(fingerprint: _core.Call) -> str:
    verb, dtype, op, root, _ = fingerprint
    if verb == "barrier" or verb in _core.PURPOSES:
        return verb
    arguments = [dtype if verb == "all_to_all" else _amount(fingerprint)]
    if verb in REDUCING:
        arguments.append(op)
    if root >= 0:
        arguments.append(f"{VERBS[verb].root}={root}")
    return f"{verb}({', '.join(arguments)})"
