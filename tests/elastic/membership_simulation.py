"""Simulation of whole groups that lose ranks: the real state machine, the real store table and a simulated clock.

A seed decides everything: the number of ranks, and which ranks die and when. Ranks also die during a decision or while
other ranks connect. The seed decides which ranks are stopped and continued, and how late deaths are detected. It also
decides whether a launcher replaces processes and how often, and which additional processes join later. It sets the
value that each rank contributes to an agreement that the loss interrupts. Several ranks may share a replica of a model:
then only whole replicas continue. ``Group.run`` compares the outcome of every process with the simulated events.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from allranks._base.errors import AllranksError, ExcludedError
from allranks._elastic.membership_change import Decision, DetectLosses, MembershipChange, Proposal, Vote, exchange
from allranks._elastic.slot_table import GONE, OPTIONAL, RUNNING, STARTING, TABLE_KEY, RankSlot, SlotTable
from allranks._rendezvous.join_protocol import Member
from allranks._store.table import KeyTable
from allranks._store.wire import Set, WaitForKeys

PREFIX = "group/"
TIMEOUT_S = 20.0
LONG_S = 400.0
WORK_S = 20.0  # no rank is lost after this time
END_S = 120.0


class Wrong(AssertionError):
    """The protocol violated an invariant or missed a required outcome."""


@dataclass(eq=False)
class Process:
    """A simulated process in a rank slot.

    Attributes:
        sees_after_s: Delay after which it detects a death itself; None: never (another host, no report of a launcher).
        vote: Its agreements before the loss.
        late_s: Delay until it detects that the group is broken.
        stopped: Begin and end of the interval in which it executes nothing.
        outcome: Its last decision or its error; None until it has one.
    """

    slot: int
    start: int
    sees_after_s: float | None
    vote: Vote
    late_s: float
    stopped: tuple[float, float] = (LONG_S, LONG_S)
    dead_at: float = LONG_S * 10
    outcome: Any = None
    decisions: list[Decision] = field(default_factory=list)
    ended: bool = False
    later: bool = False

    @property
    def key(self) -> tuple[int, int]:
        return self.slot, self.start


class Group:
    """One simulated run."""

    def __init__(self, seed: int, replica: int = 1) -> None:
        self.rng = rng = random.Random(seed)
        self.replica = replica
        self.size = -(-rng.randint(2, 7) // replica) * replica
        self.launched = rng.random() < 0.6
        self.replaces = self.launched and rng.random() < 0.6
        self.now = 0.0
        self.table = KeyTable()
        self.waiting: dict[Any, Callable[[Any], None]] = {}
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.members = dict.fromkeys(range(self.size), 0)
        self.processes: dict[tuple[int, int], Process] = {}
        self.slots = SlotTable(1, 1, tuple(RankSlot(slot, 0, RUNNING) for slot in range(self.size)))
        self.respawns = rng.randint(0, 2)
        self.cut = rng.random() < 0.7  # the loss interrupts an agreement
        self.values = {slot: rng.randint(0, 3) for slot in range(self.size)}
        self._make_processes()
        if self.launched:
            self._set_table()
        self.later: list[Process] = []
        for number in range(rng.choice([0, 0, 1, 2]) if self.replaces else 0):
            self.at(rng.random() * 3, lambda number=number: self._come(self.size + number))

    def _come(self, number: int) -> None:
        """Add a host with one more rank."""
        rng = self.rng
        self.slots = self.slots.changed([RankSlot(number, 0, OPTIONAL)])
        self._set_table()
        process = Process(number, 0, None, Vote(), rng.random(), later=True)
        if rng.random() < 0.2:
            process.dead_at = self.now + rng.random() * 2
        self.later.append(process)
        self._add(process)
        self._plan(process)

    def _make_processes(self) -> None:
        rng = self.rng
        reached = rng.random() < 0.5  # some ranks already have the outcome of the agreement
        for slot in range(self.size):
            has = self.cut and reached and rng.random() < 0.5
            outcome = min(self.values.values())
            voting = self.cut and not has and (reached or rng.random() < 0.9)
            vote = Vote(8, outcome) if has else Vote(7, 1, self.values[slot] if voting else None)
            # If a rank can have the outcome, every rank has voted.
            late = rng.random() * (5 if rng.random() < 0.2 else 0.2)
            sees = rng.random() * 0.1 if self.launched or rng.random() < 0.9 else None
            self._add(Process(slot, 0, sees, vote, late))
        victims = rng.sample(range(self.size), rng.randint(1, self.size - 1))
        for slot in victims:
            process = self.processes[slot, 0]
            if rng.random() < 0.2:
                begin = rng.random()
                process.stopped = (begin, begin + rng.choice([1.0, 60.0]))
            else:
                process.dead_at = rng.choice([0.0, rng.random() * 0.3, rng.random() * 3])
        for process in self.processes.values():
            self._plan(process)

    def _add(self, process: Process) -> None:
        self.processes[process.key] = process

    def _plan(self, process: Process) -> None:
        if process.dead_at < LONG_S:
            self.at(process.dead_at, lambda: self._die(process))
        self.at(self.now + process.late_s, lambda: self._begin(process))

    # The clock.

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.events, (when, next(self.order), what))

    def run(self) -> None:
        planned: set[float] = set()
        while self.events:
            when, _, what = heapq.heappop(self.events)
            if when > END_S:
                break
            self.now = max(self.now, when)
            what()
            self._deliver(self.table.expire(self.now))
            due = self.table.next_deadline()
            if due is not None and due not in planned:  # otherwise every iteration adds an event for each long wait
                planned.add(due)
                self.at(due, lambda: None)
        self._check()

    # The launcher.

    def _die(self, process: Process) -> None:
        if process.ended and process.outcome is not None:
            return
        process.ended = True
        if self.launched:
            self.at(self.now + self.rng.random() * 0.05, lambda: self._tell(process))

    def _tell(self, process: Process) -> None:
        slot = self.slots.find(process.slot)
        assert slot is not None
        if self.replaces and slot.start < self.respawns:
            state = OPTIONAL if process.later else STARTING
            self.slots = self.slots.changed([RankSlot(slot.number, slot.start + 1, state)])
            begins = self.now + 0.2 + self.rng.random() * 2
            after = Process(slot.number, slot.start + 1, None, Vote(), 0.0, later=process.later)
            if self.rng.random() < 0.2:
                after.dead_at = begins + self.rng.random()
            self.at(begins, lambda: (self._add(after), self._plan(after)))  # type: ignore[func-returns-value]
        else:
            self.slots = self.slots.changed([RankSlot(slot.number, slot.start, GONE)])
        self._set_table()

    def _set_table(self) -> None:
        self._deliver(self.table.handle("launcher", Set(TABLE_KEY, self.slots.encode()), self.now))

    # The processes.

    def _begin(self, process: Process) -> None:
        if not process.ended:
            self._step(process, self._life(process), None, first=True)

    def _life(self, process: Process) -> Generator[Any, Any, None]:
        generation, members, vote = 0, dict(self.members), process.vote
        newcomer = process.start > 0 or process.later
        out: Sequence[tuple[int, int]] = ()
        waiting: Sequence[tuple[int, int]] = ()
        for _ in range(30):
            member = Member(process.slot, 1, "host", "machine", self.size)
            progress = -1 if newcomer else 5
            proposal = Proposal(
                process.slot,
                process.start,
                member,
                vote=vote,
                progress=progress,
                place=process.slot,
                replica=self.replica,
            )
            machine = MembershipChange(
                PREFIX,
                generation,
                proposal,
                members,
                self.launched,
                self.replaces,
                self.now,
                TIMEOUT_S,
                out=out,
                waiting=waiting,
            )
            decision = yield from machine.steps()
            process.decisions.append(decision)
            out, waiting = decision.out, decision.waiting
            generation, members = decision.generation, {c.slot: c.start for c in decision.proposals}
            rank = decision.rank_of(*process.key)
            if rank is None:
                newcomer = True
                continue
            vote = Vote(decision.ended, decision.outcome)
            records = yield from exchange(PREFIX, rank, decision, b"%d" % process.slot, self.now, 5.0, "the store")
            if records is not None:
                if records != [b"%d" % proposal.slot for proposal in decision.proposals]:
                    raise Wrong(f"{process.key} got {records}")
                process.outcome = decision
                if (yield from self._work(decision)):
                    return
                process.outcome = None
        raise Wrong(f"{process.key} was in 30 generations")

    def _work(self, decision: Decision) -> Generator[Any, Any, bool]:
        """Work as a group. Return False if a member dies: the other members detect this in their next call."""
        members = [(proposal.slot, proposal.start) for proposal in decision.proposals]
        while self.now < WORK_S:
            if any(self.processes[key].dead_at <= self.now for key in members):
                return False
            yield WaitForKeys(["never"], 1.0, True)
        return True

    def _step(self, process: Process, life: Generator[Any, Any, None], answer: Any, first: bool = False) -> None:
        if process.dead_at <= self.now:
            return
        begin, end = process.stopped
        if begin <= self.now < end:
            self.at(end, lambda: self._step(process, life, answer, first))
            return
        try:
            act = next(life) if first else life.send((self.now, answer))
        except StopIteration:
            process.ended = True
            return
        except AllranksError as error:
            process.ended, process.outcome = True, error
            return
        delay = self.rng.random() * (0.002 if self.rng.random() < 0.95 else 0.2)
        if isinstance(act, DetectLosses):
            self.at(self.now + 1e-5, lambda: self._step(process, life, self._sight(process)))
            return

        def ask() -> None:
            self.waiting[process.key] = lambda reply: self.at(
                self.now + delay, lambda: self._step(process, life, reply)
            )
            self._deliver(self.table.handle(process.key, act, self.now))

        self.at(self.now + delay, ask)

    def _sight(self, process: Process) -> frozenset[tuple[int, int]]:
        after = process.sees_after_s
        if after is None:
            return frozenset()
        return frozenset(
            other.key
            for other in self.processes.values()
            if other.start == 0 and process.start == 0 and other.dead_at + after <= self.now
        )

    def _deliver(self, due: list[tuple[Any, Any]]) -> None:
        for who, reply in due:
            if who in self.waiting:
                self.waiting.pop(who)(reply)

    # Invariants.

    def _check(self) -> None:
        made: dict[int, Decision] = {}
        for process in self.processes.values():
            for decision in process.decisions:
                if made.setdefault(decision.generation, decision) != decision:
                    raise Wrong(f"two decisions about generation {decision.generation}")
        agreed = [p.vote.outcome for p in self.processes.values() if p.vote.ended == 8]
        for decision in made.values():
            slots = [proposal.slot for proposal in decision.proposals]
            if self.replica > 1:
                self._check_replicas(decision)
            elif slots != sorted(set(slots)):
                raise Wrong(f"slots {slots} in generation {decision.generation}")
            survivors = [c for c in decision.proposals if c.vote.ended == 8 and c.progress >= 0]
            if survivors and decision.generation == 1 and (decision.ended, decision.outcome) != (8, agreed[0]):
                raise Wrong(f"the agreement returned {decision.outcome}, but {agreed[0]} is known")
        for process in self.processes.values():
            waits = process.later or (self.replica > 1 and bool(process.decisions))  # for the rest of a replica
            if process.dead_at > self.now and process.outcome is None and not (waits and self._goes_on()):
                raise Wrong(f"{process.key} has neither a group nor an error")
            if process.later and isinstance(process.outcome, Decision):
                self._check_company(process, process.outcome)
            if isinstance(process.outcome, ExcludedError) and process.stopped[0] >= LONG_S and self._was_seen(process):
                raise Wrong(f"{process.key} was excluded without a reason: {process.outcome}")

    def _check_replicas(self, decision: Decision) -> None:
        """Check that members form as many whole replicas as possible, and that they hold each available shard."""
        keys = [(proposal.slot, proposal.start) for proposal in decision.proposals]
        if len(set(keys)) < len(keys) or set(keys) & {*decision.waiting, *decision.out}:
            raise Wrong(f"members {keys} in {decision}")
        full = {proposal.place % self.replica for proposal in decision.proposals if proposal.progress >= 0}
        places = [proposal.place % self.replica for proposal in decision.proposals]
        whole = places == list(range(self.replica)) * (len(places) // self.replica)
        if whole and full and len(full) < self.replica and decision.generation == 1:
            lost = {*range(self.replica)} - full
            if any(
                slot % self.replica in lost and (slot, start) in decision.waiting
                for slot, start in self.members.items()
            ):
                raise Wrong(f"shards {lost} are waiting in {decision}")
        waiting = [slot % self.replica for slot, _ in decision.waiting]
        if whole and decision.generation == 1 and set(waiting) == set(range(self.replica)):
            raise Wrong(f"a replica is waiting in {decision}")

    def _goes_on(self) -> bool:
        """Return whether a live group exists. It admits waiting processes at its next membership change."""
        return any(isinstance(p.outcome, Decision) and p.dead_at > self.now for p in self.processes.values())

    def _check_company(self, process: Process, decision: Decision) -> None:
        """Check that a late-joining process is in no group without state while other processes have the state."""
        if any(proposal.progress >= 0 for proposal in decision.proposals):
            return
        if any(
            not p.later and p.start == 0 and p.dead_at > LONG_S and p.stopped[0] >= LONG_S
            for p in self.processes.values()
        ):
            raise Wrong(f"{process.key} is in {decision}, but other processes with the state are alive")

    def _was_seen(self, process: Process) -> bool:
        """Return whether the process joined in time, so that the other processes had to include it."""
        return process.start == 0 and process.late_s < TIMEOUT_S / 2 and process.dead_at > LONG_S
