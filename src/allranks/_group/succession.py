"""A group's way through its generations: who goes on after a loss, and a new engine for them.

``_rendezvous/succession`` decides, as a pure state machine; here it gets what this process knows, and its decision
becomes a connected engine. Where a member is lost meanwhile there is another generation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from allranks import _engines
from allranks._base.errors import JoinError, PeerLostError, TimeoutError, UsageError, rank_list
from allranks._rendezvous import succession
from allranks._rendezvous.replicas import complete
from allranks._rendezvous.seats import GONE, OPTIONAL
from allranks._rendezvous.succession import NEWCOMER, Claim, Decision, See, Vote, claim_key

if TYPE_CHECKING:
    from allranks._engines.base import Engine
    from allranks._rendezvous.board import Board
    from allranks._rendezvous.rendezvous import Member

__all__ = ["Lineage", "Successor", "Tally", "no_board"]

_CONNECT_S = 10.0  # for members that have all claimed: those that are lost meanwhile are seen earlier
_VAIN = 5  # so many generations of the same members that could not connect are enough


@dataclass(frozen=True)
class Successor:
    """The next generation of a group, connected.

    Attributes:
        engine: moves its tensors.
        rank: this process in it.
        members: who is in it, by rank; ``rank`` is their seat.
        decision: what was decided.
    """

    engine: Engine
    rank: int
    members: tuple[Member, ...]
    decision: Decision


@dataclass(frozen=True)
class Tally:
    """What has happened to the seats of a group over its generations.

    Each generation counts, also one in which the ranks did not get to a step: so all that are in the same one have
    counted the same, whatever each has seen of those before.

    Attributes:
        replaced: how often another process has taken a lost member's seat.
        lost: how many members were lost.
        joined: how many seats have come.
    """

    replaced: int = 0
    lost: int = 0
    joined: int = 0

    def after(self, before: Sequence[tuple[int, int]], now: Sequence[tuple[int, int]]) -> Tally:
        """With the next generation: pairs of seat and start."""
        old, new = dict(before), dict(now)
        again = sum(seat in new and new[seat] != start for seat, start in old.items())
        gone, come = len(old.keys() - new.keys()), len(new.keys() - old.keys())
        return self + Tally(again, again + gone, come)

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.replaced + other.replaced, self.lost + other.lost, self.joined + other.joined)

    def __sub__(self, other: Tally) -> Tally:
        return Tally(self.replaced - other.replaced, self.lost - other.lost, self.joined - other.joined)


@dataclass
class Lineage:
    """The generations of one group, as far as this process is in them.

    Attributes:
        board: where they are decided.
        prefix: of their keys.
        backend: the engine of every generation.
        name: the group's name.
        timeout_s: of its calls.
        seat: this process's place.
        members: seat and start of the members of the present generation, by rank.
        generation: its number.
        vote: this rank's agreements in it.
        decided: the next generation, if it has been decided already.
        out: who was left out of earlier generations.
        replaces: processes that take lost seats are waited for: in agreements too, whose decision is also that about
            the next generation.
        tally: of the generations that this process has followed.
        place: see ``Claim``.
        replica: see ``Claim``.
        aside: those that are no members, and for whom nobody waits: see ``Decision``.
        on_aside: called when this process has the state of the program, but not all others of its replica are left, so
            that it waits for those that come.
        before: the members of the generation before.
    """

    board: Board
    prefix: str
    backend: str
    name: str
    timeout_s: float
    seat: int
    members: Sequence[tuple[int, int]]
    generation: int = 0
    vote: Vote = field(default_factory=Vote)
    decided: Decision | None = None
    out: Sequence[tuple[int, int]] = ()
    replaces: bool = False
    tally: Tally = Tally()
    place: int = 0
    replica: int = 1
    aside: Sequence[tuple[int, int]] = ()
    on_aside: Callable[[], None] | None = None
    before: Sequence[tuple[int, int]] = ()
    _own: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self._own = (self.seat, self.board.start)

    def decide(
        self,
        look: See,
        *,
        without: Sequence[int] = (),
        progress: int = 0,
        replaces: bool = False,
        timeout_s: float | None = None,
    ) -> Decision:
        """Decides with the others who is in the next generation. The same decision again until it is connected.

        Args:
            look: finds the members that this process knows to be lost.
            without: seats to do without.
            progress: how far this process's program has come; ``NEWCOMER``: it is new.
            replaces: wait for processes that take lost seats.
            timeout_s: how long to wait for members that are not known to be lost; None: the group's timeout.

        Raises:
            ExcludedError: this process is not.
            StoreLostError: the store is gone.
            AllranksError: too few are left.
        """
        if self.decided is None:
            claim = Claim(
                self.seat,
                self._own[1],
                msgspec.structs.replace(self.board.me, rank=self.seat),
                without=tuple(without),
                vote=self.vote,
                progress=progress,
                place=self.place,
                replica=self.replica,
            )
            machine = succession.Succession(
                self.prefix,
                self.generation,
                claim,
                dict(self.members),
                self.board.launched,
                replaces,
                time.monotonic(),
                self.timeout_s if timeout_s is None else timeout_s,
                self.board.where,
                self.out,
                self.aside,
            )
            self.decided = self.board.drive(machine.steps(), look)
        return self.decided

    def succeed(
        self,
        look: See,
        *,
        without: Sequence[int] = (),
        progress: int = 0,
        replaces: bool = False,
        timeout_s: float | None = None,
        waits: bool = True,
    ) -> Successor | Decision:
        """Decides, and connects those who are in the next generation. Arguments and errors as ``decide``.

        Args:
            waits: a newcomer that is too late for a generation waits for the next one.

        Returns:
            The next generation; the decision about it, which does not name this process, if a newcomer does not wait.

        Raises:
            JoinError: the members, of whom none is lost, cannot connect.
        """
        vain, trouble = 0, JoinError("")
        while vain < _VAIN:
            before = self.members
            decision = self.decide(look, without=without, progress=progress, replaces=replaces, timeout_s=timeout_s)
            members = [(claim.seat, claim.start) for claim in decision.claims]
            if self._own not in members:  # a newcomer, too late for this generation, or without the rest of a replica
                self.begin(decision)
                if not waits:
                    return decision
                if progress >= 0:
                    progress = NEWCOMER  # what it has is soon that of an earlier step
                    look = _sees_nobody  # that the others have left its engine is no loss
                    if self.on_aside is not None:
                        self.on_aside()
                continue
            rank = members.index(self._own)
            engine = None
            try:
                engine = self._connect(decision, rank, look)
            except (JoinError, PeerLostError, TimeoutError) as error:
                trouble = error if isinstance(error, JoinError) else JoinError(str(error))
                vain = vain + 1 if members == list(before) else 0
                # Others may not have noticed yet that this cannot connect: that takes them so long.
                timeout_s = max(self.timeout_s if timeout_s is None else timeout_s, 2 * _CONNECT_S)
            self.begin(decision)
            if engine is not None:
                found = tuple(claim.member for claim in decision.claims)
                return Successor(engine, rank, found, decision)
        raise JoinError(
            f"group '{self.name}': {rank_list([seat for seat, _ in self.members])} could not connect with each other,"
            f" although none of them is lost: {trouble}"
        ) from trouble

    def somebody_waits(self) -> bool:
        """Whether processes wait to be in the next generation: one that comes later than the others, or a replica."""
        table = self.board.table()
        known = {*self.members, *self.out}
        waiting = [
            claim_key(self.prefix, self.generation, seat.number, seat.start)
            for seat in (() if table is None else table.seats)
            if (seat.state == OPTIONAL or (self.replica > 1 and seat.state != GONE))
            and (seat.number, seat.start) not in known
        ]
        found = [claim for claim in self.board.peek(waiting) if claim is not None] if waiting else []
        if self.replica == 1:
            return bool(found)
        return complete([msgspec.msgpack.decode(claim, type=Claim) for claim in found], self.replica)

    def others_have_ended(self) -> bool:
        """Whether the members of the generation before have ended with code 0."""
        table = self.board.table()
        seats = [None if table is None else table.find(number) for number, _ in self.before]
        return bool(seats) and all(seat is not None and seat.done for seat in seats)

    def begin(self, decision: Decision) -> None:
        """The generation that was decided is the present one."""
        members = [(claim.seat, claim.start) for claim in decision.claims]
        self.tally = self.tally.after(self.members or members, members)
        self.before, self.members = self.members, members
        self.generation = decision.generation
        self.out, self.aside = decision.out, decision.aside
        self.vote = Vote(decision.ended, decision.outcome)
        self.decided = None

    def _connect(self, decision: Decision, rank: int, look: See) -> Engine:
        def exchange(record: bytes) -> list[bytes]:
            steps = succession.exchange(
                self.prefix, rank, decision, record, time.monotonic(), _CONNECT_S, self.board.where
            )
            records = self.board.drive(steps, look)
            if records is None:
                raise JoinError(f"group '{self.name}': a member was lost while the ranks were connecting")
            return records

        members = [claim.member for claim in decision.claims]
        return _engines.make_engine(
            self.backend, rank, members, exchange, self.name, self.timeout_s, connect_s=_CONNECT_S
        )


def _sees_nobody(missing: Sequence[tuple[int, int]]) -> frozenset[tuple[int, int]]:
    return frozenset()


def no_board(name: str, call: str, reconfigured: bool = False) -> UsageError:
    """The error of a group whose ranks have no store on which they could decide who goes on.

    Args:
        name: the group's.
        call: what was called.
        reconfigured: its members are those of its last reconfiguration.
    """
    if reconfigured:
        return UsageError(
            f"{call} on group '{name}': its members, which reconfigure brought together, have no store in common on"
            " which they could decide who goes on.\n  Call reconfigure with the handles of those that are left."
        )
    return UsageError(
        f"{call} on group '{name}': the ranks have nowhere to decide who goes on, as the store on which they met was"
        " rank 0's and ended with the meeting.\n  Start the program with allranks run, or give init_process_group a"
        " store= that outlives every rank."
    )
