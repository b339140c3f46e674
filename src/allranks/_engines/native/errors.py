"""The native engine's failures in words: the core's facts, with hosts and names, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from allranks import _core
from allranks._base.errors import AllranksError, MismatchError, PeerLostError, TimeoutError, UsageError, rank_list
from allranks._base.forks import refusal

if TYPE_CHECKING:
    from allranks._rendezvous.rendezvous import Member

__all__ = ["explain"]


def explain(
    failure: _core.Failure,
    verb: str,
    *,
    group: str,
    rank: int,
    members: Sequence[Member],
    last_calls: Sequence[tuple[int, _core.Call]],
    troubles: Mapping[int, str],
) -> AllranksError:
    """The error that the core's facts amount to.

    Args:
        failure: the facts. They may have been noticed by another rank, in another call.
        verb: what this rank called.
        group: the group's name.
        rank: this rank.
        members: the ranks of the group.
        last_calls: number and fingerprint of each rank's last collective.
        troubles: why this rank could not be connected with others.
    """
    kind, peer, reporter, call, theirs, seconds, calls, waiting_for, sites, text, waits, unasked = failure.args

    def who(other: int) -> str:
        return f"rank {other} ({members[other].host}, pid {members[other].pid})" if other >= 0 else "any rank"

    def last_call(other: int) -> str:
        number, (last, *_) = last_calls[other]
        said = f"last called {last} #{number}" if number else "had not called any collective"
        return f"  rank {other} {said}."

    if reporter == rank and theirs[0] in _core.PURPOSES:
        verb = theirs[0]
    if kind == "system":
        return AllranksError(text)
    if kind == "forked":
        return refusal(f"{verb} on group '{group}': the group")
    number, noticed = "", ""
    if reporter == rank:
        number = f" #{call}" if call else ""
    elif reporter >= 0:
        noticed = f"\n  noticed by {who(reporter)} in {theirs[0]}{f' #{call}' if call else ''}"
    here = f"{verb}{number} on group '{group}' (rank {rank} of {len(members)})"
    if kind == "mismatch":
        return MismatchError(_mismatch(verb if text else theirs[0], call, peer, calls, sites, text, group, rank, who))
    if kind == "timeout":
        missing = waiting_for or [peer]
        hint = "  A longer timeout is given by init_process_group(timeout=...)"
        if peer == -1:  # a wait with a timeout of its own: who is behind in its calls?
            begun = last_calls[rank][0]
            missing = [
                other for other, (number, _) in enumerate(last_calls) if 0 < (begun - number) % (1 << 32) < 1 << 31
            ]
            hint = "  The call goes on: wait() may be called again."
        lines = [f"{here}: no data from {', '.join(map(who, missing)) or 'other ranks'} for {seconds:.1f} s."]
        circle = _circle(waits)
        if circle:
            missing = circle
            hint = "  Each of them waits for another: let one of them send first, or start with isend or irecv"
            lines = [f"{here}: {rank_list(sorted(circle))} wait for each other, for {seconds:.1f} s."]
        if len(waits) > 1:
            lines.append(_chain(waits))
        else:
            lines += [last_call(other) for other in missing[:4] if other >= 0]
        if unasked:
            lines.append(_unasked(unasked))
        error = TimeoutError("\n".join([*lines, hint]) + noticed)
        error.ranks = tuple(missing)
        return error
    if kind == "closed":
        return UsageError(f"{here}: the group was destroyed while the call was pending")
    if kind == "interrupted":
        return PeerLostError(f"{here}: {who(peer)} was interrupted (Ctrl-C).{noticed}", peer)
    if kind == "memory":
        return AllranksError(
            f"{here}: {who(peer)} ran out of memory in the middle of the call, so that the group cannot go on.{noticed}"
        )
    if kind == "left":
        return PeerLostError(
            f"{here}: {who(peer)} has left the group: it called destroy_process_group or its process ended."
            f"\n{last_call(peer)}{noticed}",
            peer,
        )
    if kind == "unreachable" and peer in troubles:
        return PeerLostError(f"{here}: {who(peer)} cannot be reached: {troubles[peer]}{noticed}", peer)
    if kind == "unreachable":
        return PeerLostError(
            f"{here}: {who(peer)} cannot be reached: its host has not answered for some seconds, or the connection"
            f" broke.\n{last_call(peer)}{noticed}\n  Is the host up, and the network between? allranks does not connect"
            " again: start the job anew.",
            peer,
        )
    return PeerLostError(
        f"{here}: {who(peer)} died.\n{last_call(peer)}{noticed}"
        "\n  Look at its output and exit code; a SIGKILL that nobody sent is often the kernel, out of memory.",
        peer,
    )


def _circle(waits: Sequence[tuple[int, int, str, str]]) -> list[int]:
    """The ranks that wait for each other; empty if none do."""
    ranks = [rank for rank, *_ in waits]
    last = waits[-1][1] if waits else -1
    return ranks[ranks.index(last) :] if last in ranks else []


def _chain(waits: Sequence[tuple[int, int, str, str]]) -> str:
    """Who waits for whom, and where."""
    said = []
    for _, peer, verb, site in waits:
        awaited = f"rank {peer}" if peer >= 0 else "any rank"
        said.append(f"waits for {awaited} ({verb}, {_line(site)})")
    return f"  rank {waits[0][0]} {', which '.join(said)}."


def _unasked(unasked: Sequence[tuple[int, int, _core.Call, int]]) -> str:
    """The messages that no recv has asked for."""
    shown = [
        f"from rank {source} with tag {tag}: {_amount(first)}{f' and {count - 1} more' if count > 1 else ''}"
        for source, tag, first, count in sorted(unasked)[:4]
    ]
    more = f"; and of {len(unasked) - 4} more tags" if len(unasked) > 4 else ""
    return f"  Messages that no recv has asked for: {'; '.join(shown)}{more}."


def _mismatch(
    verb: str,
    call: int,
    peer: int,
    calls: list[_core.Call],
    sites: list[str],
    text: str,
    group: str,
    rank: int,
    who: object,
) -> str:
    if verb == "recv":
        sent, wanted = calls
        return (
            f"recv on group '{group}' (rank {rank}): {who(peer)} sent {_amount(sent)}, "  # type: ignore[operator]
            f"but the tensor to receive into holds {_amount(wanted)}. The message was dropped."
        )
    here = f"call #{call} on group '{group}'"
    where = "".join(
        f"\n  rank {other} at {_line(place) if calls and calls[other][0] in _core.PURPOSES else place}"
        for other, place in enumerate(sites)
        if place
    )
    if text:
        return f"{here}: {verb}: {text}. No tensor was changed.{where}"
    ranks_of: dict[_core.Call, list[int]] = {}
    for other, fingerprint in enumerate(calls):
        ranks_of.setdefault(fingerprint, []).append(other)
    if len(ranks_of) > 1:
        alike = len({_call(fingerprint) for fingerprint in ranks_of}) < len(ranks_of)  # other parts of one call
        said = [
            f"{rank_list(ranks)} called {_call(fingerprint)}{f' ({_amount(fingerprint)})' if alike else ''}"
            for fingerprint, ranks in ranks_of.items()
        ]
        return f"{here}: {', '.join(said)}. No tensor was changed.{where}"
    if peer >= 0:
        return (
            f"{here}: the ranks make their calls of {_call(calls[0])} in different orders: each of two places in the "
            "program was reached by one rank before, and by another after, the other place. If they were meant to be "
            f"called in one order, the earlier of these calls has mixed their tensors up.{where}"
        )
    return f"{here}: the ranks called {_call(calls[0])} with tensors of different shapes. No tensor was changed.{where}"


def _line(site: str) -> str:
    """A call's place without the shape of its tensor."""
    return site.split(", shape ")[0]


def _amount(fingerprint: _core.Call) -> str:
    return f"{fingerprint[4]} x {fingerprint[1]}"


def _call(fingerprint: _core.Call) -> str:
    verb, dtype, op, root, _ = fingerprint
    if verb == "barrier" or verb in _core.PURPOSES:
        return verb
    said = [dtype if verb == "all_to_all" else _amount(fingerprint)]
    if verb in ("all_reduce", "reduce", "reduce_scatter"):
        said.append(op)
    if root >= 0:
        said.append(f"{'dst' if verb in ('reduce', 'gather') else 'src'}={root}")
    return f"{verb}({', '.join(said)})"
