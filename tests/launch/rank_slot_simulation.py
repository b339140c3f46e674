"""Elastic jobs on the simulated hosts of ``job_simulation``: lost ranks and hosts, and restarted ranks.

``ElasticRound`` records the events and requests of the launcher independently of the policy. After each event, it
checks the slot table against this record. Exactly the ranks that run, as far as the launcher knows, have a running
slot. Exactly the ranks that the launcher has requested have a starting slot. A round continues only with enough ranks.
It fails only for an observable reason.
"""

from __future__ import annotations

import signal

from job_simulation import LAG_S, Before, Host, Job, Process, SimulatedRound, Wrong

from allranks._elastic.rank_slots import ElasticRules
from allranks._elastic.slot_table import GONE, OPTIONAL, RUNNING, START, STARTING, SlotTable
from allranks.launch.policy.elastic_round import LEAVE_S
from allranks.launch.policy.interface import (
    Action,
    Ending,
    Event,
    LauncherContinued,
    Outcome,
    PublishSlots,
    RestartRank,
    SignalRanks,
    StartElsewhere,
)
from allranks.launch.policy.round_state import Phase
from allranks.launch.spec.events import (
    Exited,
    FailureKind,
    FailureReport,
    HostJoined,
    HostLost,
    RankFailed,
    RankRestarted,
)

_LEGAL = {
    RUNNING: (STARTING, GONE),
    STARTING: (RUNNING, GONE, STARTING),  # STARTING again: the previous start failed
    OPTIONAL: (OPTIONAL, GONE),
    GONE: (OPTIONAL,),  # on a host that has joined
}


class ElasticRound(SimulatedRound):
    """One round in which ranks are lost, restarted and added.

    Attributes:
        table: the last published slot table.
        asked: ranks that the launcher has requested and that have not reported their start yet.
        starts: number of the last requested start of each rank; 0 is the first start.
        ended: ranks that have exited with code 0, as far as the launcher knows.
        echoed: the launcher knows of a rank that failed because another rank was lost.
        stateless: the launcher knows of a rank that failed because no rank has the state.
        unused: spare hosts without ranks.
        losses: lost ranks and hosts that the launcher knows of, except echoes.
        lonely: no rank was running when a rank was lost, as far as the launcher knew.
    """

    def __init__(self, job: Job, hosts: list[Host], began: float) -> None:
        super().__init__(job, hosts, began)
        self.table: SlotTable | None = None
        self.unused = list(self.slots.spares)
        self.asked: set[int] = set()
        self.starts = dict.fromkeys(self.ranks, 0)
        self.ended: set[int] = set()
        self.echoed = self.lonely = self.stateless = False
        self.echoes = job.rng.choice([0.0, 0.0, 0.0, 0.3])
        self.excluded: set[int] = set()  # pids of excluded processes
        self.lost_events: set[Host] = set()
        self.asked_at: dict[int, Host] = {}
        self.respawned = dict.fromkeys(self.ranks, 0)
        self.late: set[int] = set()
        self.losses: list[Event] = []
        self.continued_at = 0.0  # time at which the stopped launcher continued

    @property
    def slots(self) -> ElasticRules:
        assert self.rules.elastic is not None
        return self.rules.elastic

    # Simulated hosts and ranks.

    def plan(self) -> None:
        super().plan()
        for number in range(0 if self.job.local else self.rng.choice([0, 0, 1, 2])):
            self.at(self.began + self.rng.random() * 5.0, self.come, number)

    def come(self, number: int) -> None:
        """Add a new host, or a host that was lost."""
        if self.watch.finished:
            return
        lost = [host.name for host in self.lost_events if not self.is_there(host.name)]
        name = lost[0] if lost and self.rng.random() < 0.5 else f"new{number}"
        if not self.is_there(name):
            self.hosts.append(Host(name, (), self.rng.choice([0.0005, 0.1])))
            self.inbox.append(HostJoined(name, self.rng.randrange(1, 4)))

    def is_there(self, name: str) -> bool:
        return any(host.name == name and host not in self.lost_events for host in self.hosts)

    def fail(self, process: Process, how: str) -> None:
        if not process.alive or process.held or process.ending:
            return
        rng = self.rng
        process.failed_at = self.now
        self.job.log("%.3f rank %d fails: %s", self.now, process.rank, how)
        if how == "kill":
            self.end(process, -rng.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM]))
        elif how == "exit":
            self.end(process, rng.randrange(1, 100))
        elif rng.random() < 0.2:
            self.exclude(process)
        else:
            self.report(process)
        for other in self.processes.values():
            if other is not process and rng.random() < self.echoes:
                self.at(self.now + rng.random() * rng.choice([0.01, 0.3]), self.echo, other)

    def exclude(self, process: Process) -> None:
        """Make a rank fail because the other ranks have excluded it or because no rank has the state."""
        process.ending = process.reported = True
        process.code = 1
        process.failed_at = self.now
        kind = FailureKind.EXCLUDED
        if self.rng.random() < 0.2:
            kind = FailureKind.STATE_LOST
        else:
            self.excluded.add(process.pid)
        report = FailureReport(1, "T", "text", "x.py:1", at=self.now, kind=kind)
        self.send(process.host, RankFailed(process.rank, process.pid, report))
        self.at(self.now + self.rng.random() * 0.3, self.end, process, 1)

    def end(self, process: Process, status: int) -> None:
        """Terminate a process. Some failed ranks do not exit until they are killed."""
        if process.reported and status != -signal.SIGKILL and self.well and self.rng.random() < 0.1:
            return
        super().end(process, status)

    def restart(self, rank: int) -> None:
        self.start_again(rank, self.asked_at[rank])

    def start_again(self, rank: int, host: Host) -> None:
        if host.lost or self.watch.finished:
            return
        if rank in self.processes and self.processes[rank].alive:
            raise Wrong(f"rank {rank} is started, but its process is alive")
        process = self.start(rank, host)
        rng = self.rng
        self.send(host, RankRestarted(rank))
        if rng.random() < 0.4:
            self.at(self.now + rng.random() * rng.choice([0.0, 0.1, 2.0]), self.fail, process, "kill")
        elif rng.random() < 0.9:
            self.at(self.now + rng.random() * 3.0, self.end, process, 0)

    def detect_loss(self, host: Host) -> None:
        """Report a lost host with its running and requested ranks, as the agent pool does."""
        self.lost_events.add(host)
        exited = {event.rank for event in self.inbox if isinstance(event, Exited)}
        again = {event.rank for event in self.inbox if isinstance(event, RankRestarted)}
        last = {event.rank: event for event in self.inbox if isinstance(event, (Exited, RankRestarted))}
        there = (self.watch.running - exited) | (self.asked - again - exited)
        there |= {rank for rank, event in last.items() if isinstance(event, RankRestarted)}
        ranks = tuple(rank for rank in host.ranks if rank in there)
        if (ranks or host.name in self.unused) and not self.watch.finished:
            self.lose_ranks(host, ranks)

    def lose_ranks(self, host: Host, ranks: tuple[int, ...]) -> None:
        event = HostLost(host.name, ranks, f"{host.name}: the connection is gone")
        if ranks:
            self.note(event, host)
        self.inbox.append(event)

    # The launcher.

    def perform(self, action: Action) -> None:
        if isinstance(action, PublishSlots):
            self.check_publication(action.table)
            self.table = action.table
        if isinstance(action, RestartRank):
            self.check_restart(action)
            self.asked.add(action.rank)
            self.starts[action.rank] += 1
            self.respawned[action.rank] += 1
            host = next(host for host in self.hosts if action.rank in host.ranks)
            self.asked_at[action.rank] = host
            if host in self.lost_events:
                self.lose_ranks(host, (action.rank,))
        kill_at = self.watch.kill_at
        super().perform(action)
        if isinstance(action, SignalRanks) and action.number == signal.SIGKILL and self.well:
            self.check_single_kill(action)
            self.watch.kill_at = kill_at  # only a kill of the whole round counts

    def start_elsewhere(self, lost_host: str, spare_host: str, starts: dict[int, int]) -> None:
        action = StartElsewhere(lost_host, spare_host, starts)
        ranks = tuple(sorted(action.starts))
        lost = next((h for h in self.hosts if h.name == action.lost and set(ranks) <= set(h.ranks)), None)
        spare = next(h for h in self.hosts if h.name == action.spare and not h.ranks and h not in self.lost_events)
        if (lost is not None and not lost.lost) or spare.name not in self.unused or not self.well:
            raise Wrong(f"{action}: unused spare hosts are {self.unused}")
        if not self.watch.running:
            raise Wrong(f"{action}, but no rank has the state of the program")
        if (lost is None) != (not set(ranks) & self.starts.keys()) or (lost is None) != (not action.lost):
            raise Wrong(f"{action}: the ranks are neither those of a lost host nor new")
        self.unused.remove(spare.name)
        spare.ranks = ranks
        if lost is not None:
            lost.ranks = ()
        for rank in ranks:
            self.asked.add(rank)
            self.starts[rank] = self.starts.get(rank, -1) + 1
            self.respawned.setdefault(rank, 0)
            self.ended.discard(rank)
            self.at(self.now + self.rng.random(), self.start_again, rank, spare)
        if action.starts != {rank: self.starts[rank] for rank in ranks}:
            raise Wrong(f"{action}, but ranks were started {self.starts} times")
        if spare in self.lost_events:
            self.lose_ranks(spare, ranks)

    def observe(self, event: Event, before: Before) -> None:
        super().observe(event, before)
        match event:
            case LauncherContinued():
                self.continued_at = self.now
            case HostJoined(host):
                self.unused.append(host)
            case RankRestarted(rank):
                self.asked.discard(rank)
                slot = self.table.find(rank) if self.table is not None else None
                if slot is not None and slot.state == GONE:
                    self.late.add(rank)
            case Exited(rank, pid, status):
                self.asked.discard(rank)
                process = next((each for each in self.all if each.pid == pid), None)
                if before.well and status == 0 and not (process is not None and process.reported):
                    self.ended.add(rank)
                elif before.well:
                    self.lonely |= not self.watch.running
                    if process is not None and not process.echo and pid not in self.excluded:
                        self.losses.append(event)
                if before.well and not self.watch.running and self.asked:
                    self.lonely = True
            case HostLost(_, ranks):
                self.asked.difference_update(ranks)
                self.losses += [event] if before.well and ranks else []
                if before.well and not self.watch.running:
                    self.lonely = True
            case RankFailed(_, pid, report):
                self.echoed |= before.well and report.echo
                self.stateless |= before.well and report.kind is FailureKind.STATE_LOST
            case _:
                pass

    # Invariants.

    def may_fail(self, rank: int) -> bool:
        return True

    def check_kill(self, number: int) -> None:
        """Check SIGKILL only if the round ends. A failed rank that does not exit may be killed alone."""
        if not self.well:
            super().check_kill(number)

    def check_turn(self) -> None:
        super().check_turn()
        if not self.well or self.state.phase is not Phase.RUNNING or self.is_doomed():
            return
        for rank in self.watch.running:
            process = self.processes[rank]
            limit = max(self.rules.grace_s, LEAVE_S) + LAG_S + 1.0
            stuck = process.host.lost or process.frozen or process.held
            since = max(process.failed_at or self.now, self.continued_at)
            if process.reported and not stuck and self.now > since + limit:
                raise Wrong(f"{process} does not exit, but is not killed")

    def check_single_kill(self, action: SignalRanks) -> None:
        """Check that each killed rank has failed and has not exited within the grace time."""
        for rank in action.ranks:
            process = self.processes[rank]
            if rank in self.late:
                continue
            if not process.ending or self.now < (process.failed_at or self.now) + self.rules.grace_s - 1e-6:
                raise Wrong(f"{process} is killed")

    def check_stop(self, event: Event, signalled: dict[int, set[int]]) -> None:
        """Check that the first stop signal reaches all running ranks that are not already exiting."""
        if isinstance(event, RankRestarted):
            super().check_stop(event, signalled)
            return
        numbers = [number for number in signalled if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
        reached = signalled[numbers[0]] if numbers else set()
        left = {rank for rank in self.watch.running - reached if not self.processes[rank].ending}
        spared = {getattr(event, "rank", -1)} if self.state.cause is None else set()
        if left - spared:
            raise Wrong(f"the round is stopped after {event}, but ranks {left} receive no signal")

    def check_restart(self, action: RestartRank) -> None:
        rank = action.rank
        others = self.watch.running - {rank}
        slot = self.table.find(rank) if self.table is not None else None
        if not others or rank in self.watch.running or rank in self.asked:
            raise Wrong(f"{action}: {self.watch.running} run, but {self.asked} were requested")
        if self.respawned[rank] >= self.slots.respawns:
            raise Wrong(f"rank {rank} is restarted more than {self.slots.respawns} times")
        if slot is None or slot.state not in (STARTING, OPTIONAL) or action.environ != {START: str(slot.start)}:
            raise Wrong(f"{action}, but the table contains {slot}")

    def check_publication(self, table: SlotTable) -> None:
        before = self.table
        if before is None:
            return
        if table.version <= before.version or table.least != self.slots.least:
            raise Wrong(f"{table} follows {before}")
        more, limit = table.slots[len(before.slots) :], self.slots.most
        left = [slot for slot in table.slots if slot.state != GONE or slot.number in self.ended]
        if more and limit is not None and len(left) > limit:
            raise Wrong(f"{table}, but at most {limit} were requested")
        for new in more:
            if (new.start, new.state) != (0, OPTIONAL):
                raise Wrong(f"{new} is new")
        for old, new in zip(before.slots, table.slots, strict=False):
            again = int(new.state in (STARTING, OPTIONAL) and new != old)
            if new != old and (new.state not in _LEGAL[old.state] or new.start != old.start + again):
                raise Wrong(f"{new} follows {old}")

    def check_table(self) -> None:
        """Check the table against the events that the launcher has received, while the round continues."""
        table = self.table
        if table is None or not self.well or self.state.phase is not Phase.RUNNING or self.is_doomed():
            return
        watch, lost = self.watch, 0
        if not watch.running - self.late:
            if any(slot.state not in (GONE, OPTIONAL) for slot in table.slots):
                raise Wrong(f"no rank has the state of the program, but {table} has ranks to wait for")
            return
        for slot in table.slots:
            runs, asked = slot.number in watch.running, slot.number in self.asked
            lost += slot.state == GONE and slot.number not in self.ended
            right = (slot.state == RUNNING, slot.state == STARTING)
            if slot.state == OPTIONAL:
                right = (not asked, asked)
            if (runs, asked) != right or slot.start != self.starts[slot.number]:
                raise Wrong(f"{slot}; runs: {runs}, requested: {asked}, restarts: {self.starts[slot.number]}")
        if len(table.slots) - lost < table.least:
            raise Wrong(f"{lost} of {len(table.slots)} ranks are lost, but the others continue")

    def is_doomed(self) -> bool:
        """Whether a known failure stops the round at the next ``TimePassed`` or when it is settled."""
        return bool(self.state._root_cause.failures)

    def check_end(self) -> None:
        super().check_end()
        assert self.outcome is not None
        if self.outcome.ending is Ending.CLEAN and (self.echoed or self.stateless) and not self.watch.output_lost:
            raise Wrong("a rank did not survive the loss of another, but the round is clean")

    def check_blame(self, outcome: Outcome) -> None:
        cause, table = outcome.cause, self.table
        if cause is None or table is None:
            raise Wrong(f"no cause: {outcome}")
        gone = [slot for slot in table.slots if slot.state == GONE and slot.number not in self.ended]
        enough = len(table.slots) - len(gone) >= table.least
        if enough and not (self.echoed or self.lonely or self.stateless):
            raise Wrong(
                f"{len(gone)} of {len(table.slots)} ranks were lost, but {table.least} are enough: the round fails"
            )
        if cause.echo and self.losses:
            raise Wrong(f"{cause} is named, but is only an echo of one of {self.losses}")


class ElasticJob(Job):
    """Job that can continue after the loss of ranks."""

    def __init__(self, seed: int, events: list[str] | None = None) -> None:
        super().__init__(seed, events)
        self.master = None
        self.least, self.elastic = self.hosts, False

    def new_round(self, hosts: list[Host], began: float) -> SimulatedRound:
        count = sum(len(host.ranks) for host in hosts)
        spares = [] if self.local else [f"spare{number}" for number in range(self.rng.choice([0, 0, 1, 2]))]
        most = self.rng.choice([None, count, count + 2])
        self.slots = ElasticRules(self.rng.randrange(1, count + 1), self.rng.choice([0, 1, 3]), tuple(spares), most)
        hosts += [Host(name, (), self.rng.choice([0.0005, 0.1])) for name in spares]
        return ElasticRound(self, hosts, began)
