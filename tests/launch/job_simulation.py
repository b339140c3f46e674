"""Simulation of whole jobs: the real loop of the launcher, a simulated clock, and ranks and hosts that fail.

A seed determines the whole run:

- the number of hosts and ranks, and the delay of each agent
- the time and kind of each failure, and which failures are echoes
- which ranks ignore signals, hang, stop or cannot be killed, and which hosts are lost
- when the user presses Ctrl-C or Ctrl-Z, and when an output breaks or is read slowly
- the requests of the master, and the delay with which the launcher processes events

Messages of one host arrive in order. Messages of different hosts can overtake each other.

``runtime.loop.RoundLoop`` runs each round with simulated agents, screen, terminal, signals and clock. During the
round, every action is checked against the previous events, which ``Watch`` records. After the round, the outcome is
checked against the simulated facts.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import math
import os
import random
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from allranks._base.exit_codes import IDLE, LOST
from allranks._elastic.rank_slots import ElasticRules
from allranks.launch.policy import job as job_policy
from allranks.launch.policy import round as round_policy
from allranks.launch.policy.interface import (
    Action,
    AwaitOutput,
    Conclude,
    DumpStacks,
    Ending,
    EndRound,
    Event,
    FinishRanks,
    KillRequested,
    LauncherContinued,
    LendTerminal,
    Outcome,
    OutputBlocked,
    OutputLost,
    RanksStarted,
    ReaderChanged,
    ReclaimTerminal,
    SignalRanks,
    SignalReceived,
    StopLauncher,
    TimePassed,
)
from allranks.launch.policy.root_cause import SETTLE_S
from allranks.launch.policy.round import (
    DUMP_S,
    IDLE_DUMP_S,
    KILLED_S,
    STRAGGLERS_S,
    WORKERS_S,
    Phase,
    Round,
    Rules,
)
from allranks.launch.reporter import Reporter
from allranks.launch.runtime import loop as runtime
from allranks.launch.spec.events import (
    Exited,
    FailureReport,
    HostJoined,
    HostLost,
    Output,
    RankFailed,
    RankRestarted,
    RestartRank,
    Stacks,
)

LAG_S = 0.02  # maximum delay between the arrival of an event and its processing by the launcher
CLOCK_S = 0.002  # maximum apparent difference between the clocks of two hosts
QUIET_S = 0.2  # maximum delay between the last stacks and the stop of the ranks
LONG_S = 300.0  # maximum duration of a round
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MANY = 5000  # maximum number of loop turns in a round


class Wrong(AssertionError):
    """Error: the launcher performed a forbidden action or omitted a required action."""


@dataclass(eq=False)
class Process:
    """One process of a rank.

    Attributes:
        stubborn: signals that do not terminate the process.
        slow_s: seconds until the process terminates after any other signal.
        frozen: not even SIGKILL terminates the process.
        failed_at: time at which the process failed without a signal of the launcher; None if it did not.
        echo: the process failed because another rank had failed.
        code: exit code of this failure, as a shell reports it.
        held: the agent has stopped the process with SIGSTOP.
    """

    rank: int
    host: Host
    pid: int
    stubborn: frozenset[int]
    slow_s: float
    frozen: bool
    alive: bool = True
    failed_at: float | None = None
    echo: bool = False
    reported: bool = False
    code: int = 0
    held: bool = False
    ending: bool = False


@dataclass(eq=False)
class Host:
    """A host and its agent. Its messages arrive in order, after at least ``delay_s``."""

    name: str
    ranks: tuple[int, ...]
    delay_s: float
    lost: bool = False  # the actual state, which the launcher may not know yet
    silent: bool = False  # its agent is frozen
    arrival: float = 0.0


@dataclass
class Watch:
    """Knowledge of the launcher, recorded independently of the policy, and the times of its actions."""

    running: set[int] = field(default_factory=set)
    observed: list[tuple[Process | Host, bool]] = field(default_factory=list)  # failures while the round was well
    known_failures: set[int] = field(default_factory=set)
    at_decision: list[tuple[Process | Host, bool]] | None = None
    stop_at: float | None = None  # time of the first signal that stops the ranks
    decided_at: float | None = None  # time at which the launcher received the first stop signal
    kill_at: float | None = None
    closing_at: float | None = None
    stopped: bool = False  # check_stop has checked the first stop
    finished: bool = False
    concluded: bool = False
    suspended: tuple[int, ...] = ()
    last_output: float = 0.0
    asked: list[int] = field(default_factory=list)  # signals that the launcher received
    reader_gone: bool = False
    output_lost: bool = False
    joined: bool = False
    killed_by_caller: bool = False
    clean_exit_at: float | None = None
    awaited: set[int] = field(default_factory=set)  # ranks that have not answered a request for stacks
    answered_at: float = 0.0


class SimulatedAgents:
    """Agents of all hosts of a round."""

    wake = os.open(os.devnull, os.O_WRONLY)

    def __init__(self, world: SimulatedRound) -> None:
        self.world = world

    @property
    def running(self) -> list[int]:
        return sorted(rank for rank, process in self.world.processes.items() if process.alive)

    @property
    def output_open(self) -> bool:
        return self.world.job.local and self.world.now < self.world.pipes_until

    def poll(self, timeout_s: float | None) -> list[Any]:
        if self.world.due:
            raise Wrong(f"{self.world.due} were not passed to the policy")
        self.world.wait(timeout_s)
        events, self.world.inbox[:] = list(self.world.inbox), []
        self.world.due += events
        return events

    def signal(self, number: int, ranks: list[int], alone: bool = False) -> None:
        for rank in ranks:
            self.world.at(self.world.now + self.world.processes[rank].host.delay_s, self.world.deliver, number, rank)

    def dump(self, ranks: list[int]) -> None:
        for rank in ranks:
            self.world.at(self.world.now + self.world.rng.choice([0.01, 0.3, 1.5]), self.world.answer_dump, rank)

    def inspect(self, ranks: list[int], recent: int = 0) -> None:
        pass

    def restart(self, wanted: RestartRank) -> None:
        self.world.at(self.world.now + 0.01, self.world.restart, wanted.rank)

    def start_elsewhere(self, lost: str, spare: str, starts: Mapping[int, int]) -> None:
        self.world.start_elsewhere(lost, spare, dict(starts))

    def answer(self, answer: bytes) -> None:
        pass

    def watch(self, fd: int) -> None:
        pass

    unwatch = watch_writable = read_output = watch

    def resize(self, rows: int, columns: int) -> None:
        pass

    def finish(self, patience_s: float) -> list[Any]:
        return self.world.finish()


class SimulatedScreen:
    """Screen whose output is read slowly or breaks."""

    def __init__(self, world: SimulatedRound) -> None:
        self.world = world
        self.ranks = tuple(world.ranks)
        self.logs = SimpleNamespace(temporary=None, folder=None)
        self.blocked: set[int] = set()
        self.broken: list[tuple[str, OSError]] = []
        self.full = False

    @property
    def backlog(self) -> int:
        if self.full:
            return runtime._BACKLOG
        return int(self.world.now < self.world.backlog_until)

    def flush(self) -> list[tuple[str, OSError]]:
        self.full = self.world.rng.random() < 0.01
        if self.full:
            self.world.at(self.world.now + self.world.rng.random(), lambda: None)  # the reader continues
        broken, self.broken = self.broken, []
        return broken

    def size(self) -> tuple[int, int]:
        return 24, 80

    def due(self) -> float | None:
        return None

    def tail(self, rank: int) -> list[bytes]:
        return []

    def ignore(self, *arguments: Any) -> None:
        pass

    take = end = log = note = print_lines = move = settle = resized = ignore


class SimulatedTerminal:
    """Terminal of a job on one host."""

    def __init__(self, world: SimulatedRound) -> None:
        self.world = world
        self.reader = world.rules.reader

    @property
    def borrower(self) -> int | None:
        return self.world.lent

    def stopped_by(self) -> int | None:
        number, self.world.reader_stopped = self.world.reader_stopped, None
        return number

    def lend(self, rank: int) -> bool:
        lent = self.world.rng.random() < 0.8
        if lent:
            self.world.lent = rank
        return lent

    def reclaim(self, restore: bool = False) -> None:
        self.world.lent = None

    def stop_launcher(self, number: int) -> bool:
        stopped = self.world.rng.random() < 0.7
        self.world.advance(self.world.now + (self.world.rng.random() * 3.0 if stopped else 0.0))
        return stopped


class NoInquiries:
    """Source of inquiries that never receives one."""

    fd = -1

    def take(self) -> list[Any]:
        return []

    def close(self) -> None:
        pass


class CheckedLoop(runtime.RoundLoop):
    """Loop of the launcher that checks each event, and each action before it is performed."""

    def __init__(self, world: SimulatedRound, spec: runtime.RoundSpec, ports: runtime.Ports) -> None:
        super().__init__(spec, ports)
        self.world = world

    def _pass(self, event: Event) -> None:
        super()._pass(event)
        self.world.check_table()

    def _handle(self, event: Event) -> None:
        world = self.world
        before = Before(world.well, self._round.phase)
        world.observe(event, before)
        actions = round_policy.step(self._round, event, world.now)
        world.job.log("%.3f %s -> %s", world.now, event, actions)
        world.note_decision()
        for action in actions:
            world.perform(action)
            self._perform(action)
        world.check_answer(event, actions, before)
        if isinstance(event, TimePassed):
            world.check_turn()


class SimulatedRound:
    """One round: the ranks, the hosts, and the loop of the launcher."""

    def __init__(self, job: Job, hosts: list[Host], began: float) -> None:
        rng = self.rng = job.rng
        self.job = job
        self.hosts = hosts
        self.now = began
        self.began = began
        self.master: int | None = job.master
        self.ranks = [rank for host in hosts for rank in host.ranks]
        reader = rng.choice(self.ranks) if job.local and rng.random() < 0.3 else None
        grace = rng.choice([0.0, 0.5, 2.0, 10.0])
        idle = rng.choice([0.7, 3.0]) if rng.random() < 0.15 else None
        until = began + rng.uniform(0.1, 6.0) if rng.random() < 0.15 else None
        names = [] if job.local else [host.name for host in hosts for _ in host.ranks]
        if self.master == -1:
            names = [names[0] if names else "here", *names] if names else []
        self.rules = Rules(grace, names, idle, until, (signal.SIGUSR1,), self.master, reader, job.slots)
        self.watch = Watch(last_output=began)
        self.processes: dict[int, Process] = {}
        self.all: list[Process] = []
        self.inbox: list[Event] = []
        self.due: list[Any] = []  # events that the loop has received but not yet passed to the policy
        self.woken = False
        self.turns = 0
        self.source: dict[int, Any] = {}  # id of an event -> the process or host that failed
        self.kept: list[Event] = []
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.number = itertools.count()
        self.lent: int | None = None
        self.backlog_until = 0.0
        self.pipes_until = 0.0
        self.code: int | None = None
        self.outcome: Outcome | None = None
        self.disturbances = 0
        self.reader_stopped: int | None = None  # number of the signal that stopped the terminal reader
        self.receive: Callable[[int], object] = lambda number: None
        self.screen = SimulatedScreen(self)
        ports: Any = runtime.Ports(
            agents=SimulatedAgents(self),
            screen=self.screen,  # type: ignore[arg-type]
            reporter=Reporter(put=lambda text: None),
            control=SimulatedTerminal(self) if job.local else None,  # type: ignore[arg-type]
            store=SimpleNamespace(set_locally=lambda key, value: None),  # type: ignore[arg-type]
            inquiries=NoInquiries,  # type: ignore[arg-type]
            signals=self.handle_signals,
            clock=lambda: self.now,
        )
        self.loop = CheckedLoop(self, runtime.RoundSpec(self.rules), ports)
        self.state: Round = self.loop._round

    @contextlib.contextmanager
    def handle_signals(self, numbers: Any, receive: Callable[[int], object], wake: int, mask: Any) -> Iterator[None]:
        self.receive = receive
        yield

    # Simulated hosts and ranks.

    def at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self.heap, (max(when, self.now), next(self.number), call, arguments))

    def send(self, host: Host, event: Event) -> None:
        """Send an event from the agent of a host."""
        if host.lost:
            return
        host.arrival = max(host.arrival, self.now + host.delay_s * self.rng.uniform(1.0, 2.0))
        self.at(host.arrival, self.arrive, host, event)

    def arrive(self, host: Host, event: Event) -> None:
        if not host.silent:
            self.inbox.append(event)

    def start(self, rank: int, host: Host) -> Process:
        rng = self.rng
        stubborn = frozenset(n for n in STOPPING if rng.random() < 0.15)
        frozen = rng.random() < 0.02
        process = Process(rank, host, next(self.job.pids), stubborn, rng.choice([0.0, 0.01, 0.3, 4.0]), frozen)
        self.processes[rank] = process
        self.all.append(process)
        return process

    def plan(self) -> None:
        """Schedule the events of the round. The launcher may prevent some of them."""
        rng, began = self.rng, self.began
        calm = rng.random() < 0.25
        burst = began + rng.random() * 2.0 if rng.random() < 0.15 else None  # several ranks fail almost simultaneously
        for host in self.hosts:
            for rank in host.ranks:
                process = self.start(rank, host)
                roll = rng.random()
                when = began + rng.choice([0.0, 0.5, 2.0]) + rng.random() * rng.choice([0.05, 1.0, 5.0])
                if burst is not None and roll < 0.7:
                    self.at(burst + rng.random() * LAG_S / 2, self.fail, process, rng.choice(["raise", "exit", "kill"]))
                elif roll < (0.04 if calm else 0.2):
                    self.at(when, self.fail, process, rng.choice(["raise", "exit", "kill", "interrupted"]))
                elif roll < 0.93:
                    self.at(when + rng.random() * 3.0, self.end, process, 0)
                if rng.random() < 0.5:
                    self.at(began + rng.random() * 4.0, self.write, process)
        if not calm:
            self.plan_trouble()
        for at_s in (60.0, 70.0):  # the user interrupts a job that hangs
            self.at(began + at_s, self.interrupt_launcher, signal.SIGINT)
        if self.rules.master == -1:
            self.at(began + rng.random() * 8.0, self.request, KillRequested())
        if self.job.elastic and rng.random() < 0.1:
            self.at(began + rng.random() * 3.0, self.inbox.append, HostJoined("node9"))
        if self.rules.reader is not None and rng.random() < 0.6:
            self.at(began + rng.random() * 2.0, self.read_terminal)
        if self.master is not None and rng.random() < 0.5:
            for _ in range(rng.randrange(1, 4)):
                self.at(began + rng.random() * 4.0, self.request, RestartRank(rng.choice(self.ranks), {}))

    def plan_trouble(self) -> None:
        rng, began = self.rng, self.began
        for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
            number = rng.choice([*STOPPING, signal.SIGINT, signal.SIGUSR1])
            self.at(began + rng.random() * 5.0, self.interrupt_launcher, number)
            self.disturbances += 1
        if self.job.local and rng.random() < 0.15:
            self.at(began + rng.random() * 3.0, self.interrupt_launcher, signal.SIGTSTP)
        for host in self.hosts:
            if not self.job.local and rng.random() < 0.12:
                self.at(began + rng.random() * 5.0, self.lose, host)
                self.disturbances += 1
        if rng.random() < 0.06:
            self.at(began + rng.random() * 5.0, self.break_output, rng.choice([errno.ENOSPC, errno.EPIPE]))
            self.disturbances += 1
        if rng.random() < 0.1:
            self.backlog_until = began + rng.choice([3.0, 20.0, LONG_S * 10])
        if rng.random() < 0.1:
            self.pipes_until = began + rng.choice([3.0, LONG_S * 10])

    def request(self, event: KillRequested | RestartRank) -> None:
        """Simulate a request from another thread of the launcher."""
        self.loop.kill() if isinstance(event, KillRequested) else self.loop.restart(event)
        self.due.append(event)
        self.woken = True

    def interrupt_launcher(self, number: int) -> None:
        self.receive(number)
        self.due += [SignalReceived(number)] if number != signal.SIGCHLD else []
        self.woken = True

    def break_output(self, code: int) -> None:
        """Make all further writes to an output of the launcher fail."""
        self.screen.broken.append(("stdout", OSError(code, os.strerror(code))))
        self.woken = True

    def write(self, process: Process) -> None:
        if process.alive and not process.held:
            self.send(process.host, Output(process.rank, 1, b"x"))
            if self.rng.random() < 0.7:
                self.at(self.now + self.rng.random(), self.write, process)

    def read_terminal(self) -> None:
        process = self.processes[self.rules.reader] if self.rules.reader is not None else None
        if process is not None and process.alive:
            number = self.rng.choice([signal.SIGTTIN, signal.SIGTTOU, signal.SIGTSTP])
            self.reader_stopped = number
            self.interrupt_launcher(signal.SIGCHLD)

    def fail(self, process: Process, how: str) -> None:
        """Make a rank fail. Other ranks may fail as echoes."""
        if not process.alive or process.held or process.ending:
            return
        process.failed_at = self.now
        self.job.log("%.3f rank %d fails: %s", self.now, process.rank, how)
        if how == "kill":
            self.end(process, -self.rng.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGINT]))
        elif how == "exit":
            self.end(process, self.rng.randrange(1, 100))
        else:
            self.report(process, interrupted=how == "interrupted")
        for other in self.processes.values():
            if other is not process and self.rng.random() < 0.6:
                self.at(self.now + self.rng.random() * self.rng.choice([0.01, 0.3]), self.echo, other)

    def echo(self, process: Process) -> None:
        if process.alive and not process.held and not process.ending:
            process.failed_at, process.echo = self.now, True
            self.report(process, echo=True)

    def report(self, process: Process, echo: bool = False, interrupted: bool = False) -> None:
        process.ending = process.reported = True
        process.code = 130 if interrupted else self.rng.randrange(1, 100)
        error = 0.0 if self.job.local else self.rng.random() * CLOCK_S
        at = self.now + min(error, process.host.delay_s)
        event = RankFailed(
            process.rank, process.pid, FailureReport(process.code, "T", "text", "x.py:1", echo, interrupted, at)
        )
        self.note(event, process)
        self.send(process.host, event)
        self.at(self.now + self.rng.random() * 0.3, self.end, process, process.code)

    def end(self, process: Process, status: int) -> None:
        """Terminate a process."""
        if not process.alive:
            return
        if process.held and status != -signal.SIGKILL:
            self.at(self.now + 0.2, self.end, process, status)
            return
        process.alive = False
        if process.failed_at is not None and not process.reported:
            process.code = status if status >= 0 else 128 - status
        event = Exited(process.rank, process.pid, status)
        if process.failed_at is not None:
            self.note(event, process)
        self.send(process.host, event)

    def note(self, event: Event, who: Process | Host) -> None:
        self.source[id(event)] = who
        self.kept.append(event)  # a reference keeps the id unique

    def lose(self, host: Host) -> None:
        """Lose a host with its ranks, as if its network failed or its agent was killed."""
        if host.lost:
            return
        self.job.log("%.3f %s is lost", self.now, host.name)
        for process in self.all:
            if process.host is host:
                process.alive = False
        host.lost = True
        self.at(max(host.arrival, self.now + self.rng.random()), self.detect_loss, host)

    def detect_loss(self, host: Host) -> None:
        ranks = tuple(rank for rank in host.ranks if rank in self.watch.running)
        pending = {e.rank for e in self.inbox if isinstance(e, Exited)}
        ranks = tuple(rank for rank in ranks if rank not in pending)
        if ranks and not self.watch.finished:
            event = HostLost(host.name, ranks, f"{host.name}: the connection is gone")
            self.note(event, host)
            self.inbox.append(event)

    def deliver(self, number: int, rank: int) -> None:
        """Deliver a signal of the launcher to a rank."""
        process = self.processes.get(rank)
        if process is None or not process.alive or process.host.lost:
            return
        rng = self.rng
        if number == signal.SIGSTOP:
            process.held = True
        elif number == signal.SIGCONT:
            process.held = False
        elif number == signal.SIGKILL:
            if not process.frozen:
                self.at(self.now + rng.random() * 0.1, self.end, process, -signal.SIGKILL)
        elif number in STOPPING and number not in process.stubborn and not process.ending:
            if number == signal.SIGINT and rng.random() < 0.8:
                self.at(self.now + process.slow_s, self.obey_interrupt, process)
            else:
                self.at(self.now + process.slow_s, self.end, process, -number)

    def obey_interrupt(self, process: Process) -> None:
        if process.alive and not process.ending:
            self.report(process, interrupted=True)

    def restart(self, rank: int) -> None:
        host = next(host for host in self.hosts if rank in host.ranks)
        if host.lost or self.watch.finished:
            return
        process = self.processes[rank]
        if process.alive:
            process.ending = True
            self.end(process, -signal.SIGKILL)
        self.start(rank, host)
        self.at(self.now + self.rng.random() * 3.0, self.end, self.processes[rank], self.rng.choice([0, 0, 3]))
        self.send(host, RankRestarted(rank))

    def answer_dump(self, rank: int) -> None:
        process = self.processes[rank]
        roll = self.rng.random()
        if process.alive and roll < 0.7:
            self.send(process.host, Stacks(rank, b"stack of %d" % rank))
        elif process.alive and roll < 0.85:
            self.send(process.host, Stacks(rank, why="runs no python script"))

    # The launcher.

    def run(self) -> None:
        self.plan()
        self.code = self.loop.run(set())

    def wait(self, timeout_s: float | None) -> None:
        """Advance the clock until the next event, plus a random lag."""
        self.turns += 1
        if self.now > self.began + LONG_S or self.turns > MANY:
            raise Wrong(f"the round does not end: {self.state.phase} at {self.now:.1f}")
        deadline = math.inf if timeout_s is None else self.now + timeout_s
        if timeout_s and deadline == self.now:
            deadline = math.nextafter(self.now, math.inf)
        if self.state.phase is Phase.DRAINING:
            self.at(self.backlog_until, lambda: None)
        while not (self.inbox or self.woken):
            next_at = self.heap[0][0] if self.heap else math.inf
            if deadline <= next_at:
                if deadline == math.inf:
                    raise Wrong(f"no event is scheduled in phase {self.state.phase}")
                self.advance(deadline)
                break
            self.advance(next_at)
            if self.state.phase in (Phase.CLOSING, Phase.DRAINING):
                break
        self.advance(self.now + self.rng.choice([0.0, 0.0, self.rng.random() * LAG_S]))
        self.woken = False

    def advance(self, until: float) -> None:
        while self.heap and self.heap[0][0] <= until:
            when, _, call, arguments = heapq.heappop(self.heap)
            self.now = max(self.now, when)
            call(*arguments)
        self.now = max(self.now, until)

    def perform(self, action: Action) -> None:
        """Check an action that the loop is about to perform."""
        watch = self.watch
        if watch.finished and isinstance(action, (SignalRanks, DumpStacks, RestartRank, LendTerminal, FinishRanks)):
            raise Wrong(f"{action} after the ranks were finished")
        if self.code is not None:
            raise Wrong(f"{action} after the end")
        match action:
            case SignalRanks(number, ranks):
                self.check_targets(action, ranks)
                self.check_kill(number)
                if number in STOPPING and watch.stop_at is None:
                    watch.stop_at = self.now
                if number == signal.SIGKILL and watch.kill_at is None:
                    watch.kill_at = self.now
            case DumpStacks(ranks):
                self.check_targets(action, ranks)
                watch.awaited, watch.answered_at = set(ranks), self.now
            case RestartRank(rank):
                if watch.stop_at is not None or watch.decided_at is not None or not self.may_fail(rank):
                    raise Wrong(f"forbidden action {action}: the end was decided, or the rank may not fail")
            case LendTerminal(rank):
                if rank != self.rules.reader or not self.job.local:
                    raise Wrong(f"{action}, but the reader is {self.rules.reader}")
            case ReclaimTerminal(rank):
                if rank != self.lent:
                    raise Wrong(f"{action}, but {self.lent} has the terminal")
            case StopLauncher():
                unstopped = [rank for rank in watch.running if rank not in watch.suspended]
                if unstopped:
                    raise Wrong(f"the launcher stops, but ranks {unstopped} do not")
            case AwaitOutput():
                watch.closing_at = self.now
            case FinishRanks(_):
                watch.finished = True
            case Conclude(outcome):
                if watch.concluded:
                    raise Wrong("the round is concluded twice")
                watch.concluded, self.outcome = True, outcome
            case EndRound(code):
                self.code = code
            case _:
                pass
        if isinstance(action, SignalRanks) and action.number == signal.SIGSTOP:
            watch.suspended = action.ranks

    def finish(self) -> list[Any]:
        """Kill all processes and return the events that have arrived, except output and new hosts."""
        left = [event for event in self.inbox if not isinstance(event, (Output, HostJoined))]
        self.inbox.clear()
        for process in self.all:
            process.alive = False
        return left

    # Invariants.

    def may_fail(self, rank: int) -> bool:
        return self.master is not None and rank != self.master

    @property
    def well(self) -> bool:
        """Whether the launcher knows of no reason to end the round."""
        watch = self.watch
        return watch.stop_at is None and watch.decided_at is None and not watch.killed_by_caller

    def check_targets(self, action: Action, ranks: tuple[int, ...]) -> None:
        if gone := [rank for rank in ranks if rank not in self.watch.running]:
            raise Wrong(f"{action}: ranks {gone} have exited, or their host is lost")

    def observe(self, event: Event, before: Before) -> None:
        watch = self.watch
        if event in self.due:
            self.due.remove(event)
        match event:
            case RanksStarted(ranks):
                watch.running = set(ranks)
            case Stacks(rank):
                watch.awaited.discard(rank)
                watch.answered_at = self.now
            case Exited(rank, _, status):
                watch.running.discard(rank)
                watch.awaited.discard(rank)
                if not self.may_fail(rank) and before.well and status == 0 and watch.clean_exit_at is None:
                    watch.clean_exit_at = self.now
            case HostLost(_, ranks):
                watch.running.difference_update(ranks)
                watch.awaited.difference_update(ranks)
            case RankRestarted(rank):
                if not watch.finished and self.state.phase is Phase.RUNNING:
                    watch.running.add(rank)
            case SignalReceived(number):
                watch.asked.append(number)
                if number in STOPPING and watch.decided_at is None and watch.stop_at is None:
                    watch.decided_at = self.now
            case KillRequested():
                watch.killed_by_caller = True
            case OutputLost():
                watch.reader_gone |= event.reader_gone
                watch.output_lost |= not event.reader_gone
            case HostJoined():
                watch.joined |= before.well
            case _:
                pass
        if before.well and self.lent is not None and getattr(event, "rank", None) == self.lent:
            # The rank that has the terminal received Ctrl-C. If it is the only rank, the launcher signals no rank.
            reported = isinstance(event, RankFailed) and event.report.interrupted and not self.may_fail(event.rank)
            if reported or (isinstance(event, Exited) and event.status == -signal.SIGINT):
                watch.stop_at = self.now
        if isinstance(event, (Output, OutputBlocked, ReaderChanged, LauncherContinued)):
            watch.last_output = self.now
        if isinstance(event, (Exited, RankFailed, HostLost)) and before.well and (who := self.source.get(id(event))):
            rank = event.ranks[0] if isinstance(event, HostLost) else event.rank
            whole = all(map(self.may_fail, event.ranks)) if isinstance(event, HostLost) else self.may_fail(rank)
            if not whole and rank not in watch.known_failures:
                watch.known_failures.add(rank)
                watch.observed.append((who, isinstance(event, RankFailed)))

    def note_decision(self) -> None:
        """Record the known failures when the policy names a cause."""
        watch = self.watch
        if self.state.cause is None or watch.at_decision is not None:
            return
        watch.at_decision = list(watch.observed)
        if watch.stop_at is None:  # also if no other rank remains that could be signaled
            watch.stop_at = self.now
        if watch.observed and all(isinstance(who, Process) and who.echo for who, _ in watch.observed):
            first = min(who.failed_at or 0.0 for who, _ in watch.observed if isinstance(who, Process))
            if self.now < first + SETTLE_S and not watch.finished:
                raise Wrong(f"an echo was accepted as the cause after {self.now - first:.3f} s")

    def check_answer(self, event: Event, actions: list[Action], before: Before) -> None:
        """Check the actions that an event requires immediately."""
        watch = self.watch
        signalled = {a.number: set(a.ranks) for a in actions if isinstance(a, SignalRanks)}
        if watch.stop_at is not None and not watch.stopped and before.phase is Phase.RUNNING:
            watch.stopped = True
            self.check_stop(event, signalled)
        if isinstance(event, RankRestarted) and not before.well and before.phase is Phase.RUNNING:  # noqa: SIM102
            if {event.rank} not in signalled.values():
                raise Wrong(f"{event} arrives after the end was decided, but the rank receives no signal")
        if before.phase is not Phase.RUNNING or not watch.running:
            return
        if isinstance(event, SignalReceived) and event.number == signal.SIGINT:
            expected = signal.SIGINT if before.well else signal.SIGKILL
            if not watch.running <= signalled.get(expected, set()):
                raise Wrong(f"Ctrl-C leads to {actions}, but {watch.running} run")
        elif isinstance(event, SignalReceived) and event.number == signal.SIGUSR1:
            if signalled.get(signal.SIGUSR1) != watch.running:
                raise Wrong(f"SIGUSR1 is not forwarded to {watch.running}: {actions}")
        elif isinstance(event, KillRequested) and signalled.get(signal.SIGKILL) != watch.running:
            raise Wrong(f"the caller requests a kill, but the actions are {actions}")
        elif isinstance(event, LauncherContinued):
            held, watch.suspended = watch.suspended, ()
            if left := watch.running.intersection(held) - signalled.get(signal.SIGCONT, set()):
                raise Wrong(f"ranks {left} stay stopped: {actions}")
        for number, ranks in signalled.items():
            stops = number in STOPPING and not isinstance(event, (SignalReceived, RankRestarted))
            if stops and not ranks <= signalled.get(signal.SIGCONT, set()):
                raise Wrong(f"a stopped rank would not receive signal {number}: {actions}")

    def check_stop(self, event: Event, signalled: dict[int, set[int]]) -> None:
        """Check the recipients and the number of the first stop signal."""
        watch = self.watch
        if isinstance(event, RankRestarted):  # it arrived while the launcher waited for stacks of other ranks
            if not any(event.rank in ranks for ranks in signalled.values()):
                raise Wrong(f"{event} arrives after the end was decided, but the rank receives no signal")
            watch.stop_at, watch.stopped = None, False
            return
        spared = {self.state.cause.rank} if self.state.cause is not None else {getattr(event, "rank", -1)}
        numbers = [number for number in signalled if number in STOPPING]
        reached = signalled[numbers[0]] if numbers else set()
        if left := watch.running - reached - spared:
            raise Wrong(f"the round is stopped after {event}, but ranks {left} receive no signal")
        asked = next((number for number in watch.asked if number in STOPPING), None)
        if watch.decided_at is not None and numbers and numbers[0] != asked:
            raise Wrong(f"{asked} was received, but {numbers} are forwarded")

    def check_kill(self, number: int) -> None:
        """Check that SIGKILL is not sent before the grace time is over."""
        watch = self.watch
        if number != signal.SIGKILL or watch.killed_by_caller or signal.SIGINT in watch.asked:
            return
        limit = watch.stop_at
        if limit is None and watch.decided_at is not None:
            limit = watch.decided_at + DUMP_S
        if limit is None or self.now < limit + self.rules.grace_s:
            raise Wrong(f"ranks are killed before the grace time is over, {watch}")

    def check_table(self) -> None:
        """Check the slot table after each event. Only ``ElasticRound`` has a slot table."""

    def check_turn(self) -> None:
        """Check that no required action is overdue."""
        watch, rules, now = self.watch, self.rules, self.now
        if self.state.phase is not Phase.RUNNING or not watch.running:
            return
        late = LAG_S + 1e-6
        if self.well:
            for who, reported in watch.observed:
                if isinstance(who, Host) or not who.echo:
                    raise Wrong(f"{who} failed ({reported}), but ranks {watch.running} receive no stop signal")
                if who.failed_at is not None and now > who.failed_at + SETTLE_S + CLOCK_S + late and who.failed_at:
                    raise Wrong(f"an echo was not accepted as the cause after {SETTLE_S} s: {who}")
            if rules.until is not None and now > rules.until + late:
                raise Wrong("the time is over, but the ranks receive no stop signal")
            if rules.idle_s is not None and now > watch.last_output + rules.idle_s + IDLE_DUMP_S + 2 * late:
                raise Wrong("no rank writes, but the round continues")
            ended_at = watch.clean_exit_at
            if rules.master == 0 and ended_at is not None and now > ended_at + WORKERS_S + late:
                raise Wrong("the master has exited, but its workers continue")
            return
        limit = rules.grace_s + (DUMP_S if watch.decided_at is not None else 0.0)
        began = watch.stop_at if watch.stop_at is not None else watch.decided_at
        if (
            watch.decided_at is not None
            and watch.stop_at is None
            and watch.kill_at is None
            and now > watch.decided_at + DUMP_S + late
        ):
            raise Wrong("a signal was received, but the ranks receive no stop signal")
        waits = watch.decided_at is not None and watch.stop_at is None and watch.kill_at is None
        if waits and not watch.awaited and now > watch.answered_at + QUIET_S + late:
            raise Wrong("all stacks have arrived, but the ranks receive no stop signal")
        if began is not None and watch.kill_at is None and now > began + limit + late:
            raise Wrong(f"ranks {watch.running} did not exit within {limit} s, but are not killed")
        if watch.kill_at is not None and now > watch.kill_at + KILLED_S + late:
            raise Wrong(f"{now - watch.kill_at} s after SIGKILL the launcher still waits for ranks {watch.running}")

    def check_end(self) -> None:
        """Check the outcome against the simulated facts."""
        watch, outcome = self.watch, self.outcome
        if not watch.finished or outcome is None:
            raise Wrong("the round ends, but its ranks are not reaped")
        if watch.closing_at is None:
            raise Wrong("the round ends without waiting for output")
        if any(process.alive for process in self.all):
            raise Wrong("a process still runs")
        late = OutputLost("stdout", "gone", False)
        for event in (TimePassed(), KillRequested(), SignalReceived(signal.SIGTERM), late):
            if actions := round_policy.step(self.state, event, self.now + 1.0):
                raise Wrong(f"{actions} after the end")
        match outcome.ending:
            case Ending.FAILED:
                self.check_blame(outcome)
            case Ending.SIGNALLED:
                self.check_signal(outcome)
            case Ending.CLEAN:
                if watch.observed and not (watch.output_lost or watch.killed_by_caller):
                    raise Wrong(f"{watch.observed} failed, but the round is clean")
                if self.code == 1 and not (watch.output_lost or self.rules.reader is not None):
                    raise Wrong("code 1, but no output was lost")
            case Ending.IDLE:
                if self.rules.idle_s is None or self.code != IDLE:
                    raise Wrong("the round ended as idle without an idle timeout, or with another exit code")
            case Ending.JOINED:
                if not watch.joined:
                    raise Wrong("no host has joined")
        if self.state.failed != (outcome.ending in (Ending.FAILED, Ending.IDLE)):
            raise Wrong(f"failed is {self.state.failed}: {outcome}")

    def check_signal(self, outcome: Outcome) -> None:
        watch, number = self.watch, outcome.signal
        known = [n for n in watch.asked if n in STOPPING]
        if self.state.late or self.rules.reader is not None:
            known.append(signal.SIGINT)
        if watch.reader_gone:
            known.append(signal.SIGPIPE)
        if number not in known or outcome.code != 128 + number:
            raise Wrong(f"ended by {number} with code {outcome.code}; received: {known}")
        if self.rules.reader is None and not watch.reader_gone and not self.state.late and number != known[0]:
            raise Wrong(f"the first signal was {known[0]}, but {number} is named")

    def check_blame(self, outcome: Outcome) -> None:
        cause, observed = outcome.cause, self.watch.at_decision
        if cause is None or not observed:
            raise Wrong(f"a failure is named, but none was observed: {outcome}")
        if cause.lost:
            blamed: Process | Host = next(host for host in self.hosts if host.name == cause.host)
            if not isinstance(blamed, Host) or not blamed.lost or self.code != LOST:
                raise Wrong(f"{cause.host} is named, but was not lost")
        else:
            blamed = next(process for process in self.all if process.pid == cause.pid)
            if blamed.failed_at is None or self.code != blamed.code:
                raise Wrong(f"{blamed} is named with code {self.code}")
        if blamed not in [who for who, _ in observed]:
            raise Wrong(f"{blamed} is named, but was not known: {observed}")
        own = [(who, reported) for who, reported in observed if isinstance(who, Host) or not who.echo]
        if not own:
            if isinstance(blamed, Process) and not blamed.echo:
                raise Wrong(f"{blamed} is named, but only echoes were known")
            first = min(who.failed_at or 0.0 for who, _ in observed if isinstance(who, Process))
            if isinstance(blamed, Process) and (blamed.failed_at or 0.0) > first + 2 * CLOCK_S:
                raise Wrong(f"{blamed} is named, but another echo arrived first")
            return
        if blamed not in [who for who, _ in own]:
            raise Wrong(f"{blamed} is named, but is only an echo of {own}")
        killed = [who for who, reported in own if isinstance(who, Host) or (not reported and not self.by_exit(who))]
        if killed:
            if blamed is not killed[0]:
                raise Wrong(f"{blamed} is named, but {killed[0]} was killed")
            return
        times = {who: self.known_at(who, reported) for who, reported in own if isinstance(who, Process)}
        if isinstance(blamed, Process) and times[blamed] > min(times.values()) + 2 * CLOCK_S:
            raise Wrong(f"{blamed} is named, but was not the first of {own}")

    def by_exit(self, process: Process) -> bool:
        return process.code < 128

    def known_at(self, process: Process, reported: bool) -> float:
        """Return the time of a failure as the launcher can know it.

        If only the exit shows the failure, the launcher knows no time before the arrival of the exit.
        """
        failed_at = process.failed_at or 0.0
        return failed_at if reported else failed_at + LAG_S + 2 * process.host.delay_s


@dataclass(frozen=True)
class Before:
    """State before an event: whether the round was well, and its phase."""

    well: bool
    phase: Phase


class Job:
    """All rounds of a job.

    Args:
        seed: seed of all random decisions.
        events: list that receives one line per event.
    """

    def __init__(self, seed: int, events: list[str] | None = None) -> None:
        self.rng = random.Random(seed)
        self.events = events
        self.pids = itertools.count(100)
        rng = self.rng
        self.local = rng.random() < 0.4
        self.master: int | None = rng.choice([None, None, None, 0, -1])
        count = 1 if self.local else rng.randrange(1, 5)
        self.least = rng.randrange(1, count + 1)
        self.elastic = self.least < count
        self.replaces = not self.local and rng.random() < 0.3
        self.restarts = rng.choice([0, 0, 1, 2])
        self.hosts = count
        self.rounds: list[SimulatedRound] = []
        self.slots: ElasticRules | None = None

    def log(self, line: str, *arguments: object) -> None:
        if self.events is not None:
            self.events.append(line % arguments)

    def run(self) -> None:
        rules = job_policy.JobRules(self.restarts, self.least, self.elastic, self.replaces)
        state = job_policy.JobState(rules)
        event: job_policy.Event = job_policy.JobStarted()
        now, free, paid = 0.0, 0, 0
        while True:
            action = job_policy.step(state, event)
            self.log("%s -> %s", event, action)
            match action:
                case job_policy.StartRound(restart):
                    if restart != len(self.rounds) or self.hosts < self.least:
                        raise Wrong(f"round {len(self.rounds)} starts as {restart} on {self.hosts} hosts")
                    if paid > self.restarts or restart > paid + free:
                        raise Wrong(f"{restart} restarts, but {self.restarts} are allowed and {free} were free")
                    simulated = self.new_round(self.new_hosts(), now)
                    self.rounds.append(simulated)
                    simulated.run()
                    simulated.check_end()
                    assert simulated.code is not None
                    now = simulated.now
                    lost = sum(host.lost for host in simulated.hosts)
                    known = 0 if self.local else lost
                    self.hosts -= known
                    failed, joined = simulated.state.failed, simulated.state.joined
                    if joined or (failed and known and self.elastic):
                        free += 1
                    elif failed and (self.elastic or self.replaces or not known):
                        paid += 1
                    event = job_policy.RoundEnded(simulated.code, failed, joined, known)
                case job_policy.CountHosts():
                    may_return = self.elastic or self.replaces
                    self.hosts += self.rng.choice([0, 0, 1]) if may_return else 0
                    event = job_policy.HostsCounted(self.hosts, may_return and self.rng.random() < 0.7)
                case job_policy.AwaitHosts(count):
                    if count >= self.least:
                        raise Wrong("the job waits for hosts that are available")
                    event = job_policy.HostsMissing()
                    if self.rng.random() < 0.5:
                        self.hosts = self.least
                        event = job_policy.HostsCounted(self.least)
                case job_policy.EndJob(code):
                    self.check_job(code)
                    if job_policy.step(state, job_policy.JobStarted()) is not None:
                        raise Wrong("a round starts after the end")
                    return
                case _:
                    raise Wrong(f"no action follows {event}")
            if free > 12:
                return  # hosts could be lost and added without end

    def check_job(self, code: int) -> None:
        last = self.rounds[-1]
        if code != last.code:
            raise Wrong(f"the exit code of the job is {code}, that of the last round {last.code}")
        failed = [each for each in self.rounds if each.state.failed]
        may_restart = self.hosts >= self.least and len(failed) <= self.restarts
        if last in failed and may_restart and not self.elastic and (self.local or self.replaces):
            raise Wrong(f"{len(failed)} rounds failed, {self.restarts} restarts are allowed, but the job ends")

    def new_round(self, hosts: list[Host], began: float) -> SimulatedRound:
        return SimulatedRound(self, hosts, began)

    def new_hosts(self) -> list[Host]:
        first = 1 if self.master == -1 else 0
        hosts = []
        for number in range(self.hosts):
            count = self.rng.randrange(1, 5 if self.hosts == 1 else 4)
            ranks = tuple(range(first, first + count))
            first += count
            delay_s = 0.0 if self.local else self.rng.choice([0.0005, 0.005, 0.1])
            hosts.append(Host(f"node{number}", ranks, delay_s))
        return hosts


__all__ = ["STRAGGLERS_S", "Job", "SimulatedRound", "Wrong"]
