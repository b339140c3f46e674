"""The loop of a running round: passes events to ``policy/round``, and performs the actions that it returns.

This module decides nothing. The loop also writes the output of the ranks to the screen, whose readers may be slow.
Agents, output, terminal, store, signals and clock are passed in (`Ports`), so the tests run the same loop on simulated
ones.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from allranks._base.console import printable
from allranks._elastic.rank_slots import ElasticRules
from allranks._elastic.slot_table import TABLE_KEY
from allranks._store import StoreServer
from allranks._trace import stacks
from allranks._trace.jobs import JobAnswer
from allranks.launch.agents.inquiries import Inquiries
from allranks.launch.output.bar import JobBar
from allranks.launch.output.screen import Screen
from allranks.launch.policy import interface
from allranks.launch.policy.interface import (
    Action,
    AnswerStates,
    AwaitOutput,
    Conclude,
    DumpStacks,
    Ending,
    EndRound,
    FinishRanks,
    InspectRanks,
    KillRequested,
    LauncherContinued,
    LendTerminal,
    Level,
    Outcome,
    OutputBlocked,
    OutputClosed,
    OutputLost,
    OutputWritten,
    Print,
    PrintReport,
    PrintStacks,
    PrintWaitReport,
    PublishSlots,
    RanksFinished,
    RanksStarted,
    ReaderChanged,
    ReclaimTerminal,
    SignalRanks,
    SignalReceived,
    StartElsewhere,
    StatesRequested,
    StopLauncher,
    TerminalLent,
    TimePassed,
)
from allranks.launch.policy.root_cause import Failure
from allranks.launch.policy.round import Phase, Round, Rules, step
from allranks.launch.reporter import Reporter
from allranks.launch.runtime.agents import Agents
from allranks.launch.runtime.job_control import SIGNALS, JobControl
from allranks.launch.runtime.last_calls import describe_calls, differ, report, write_report
from allranks.launch.runtime.statistics import Statistics
from allranks.launch.runtime.summaries import describe_failure, describe_idle, describe_interrupt, ranks_by_line
from allranks.launch.signals import FORWARDED, handled
from allranks.launch.spec.events import (
    Asked,
    Event,
    Exited,
    HostLost,
    HostMessage,
    LeftBehind,
    Output,
    RankFailed,
    RankProgress,
    RankRestarted,
    RankStats,
    RestartRank,
    Returned,
    StopRequested,
)
from allranks.launch.spec.options import Options

__all__ = ["FORWARDED", "Ports", "RoundLoop", "RoundSpec", "elastic_rules"]

_BACKLOG = 1 << 20  # bytes; more output waits in the ranks' pipes, and the ranks block when these are full


def elastic_rules(options: Options, spares: Sequence[str] = (), most: int | None = None) -> ElasticRules | None:
    """Return the policy's rules for an elastic job; None if the job is not elastic.

    Args:
        options: the options of the job.
        spares: hosts that run no rank at first.
        most: the number of ranks above which no rank joins later, if the options do not have it.
    """
    if options.elastic is None:
        return None
    least, greatest = options.elastic
    return ElasticRules(least, options.respawns, tuple(spares), most if greatest is None else greatest)


@dataclass(frozen=True)
class RoundSpec:
    """Fixed parameters of one round.

    Attributes:
        rules: The rules of the policy.
        command: The command line of the ranks, for commands that request their state.
        restart: Number of restarts of the job so far.
        prints: Print why the job failed.
        table: Print a table of the durations of calls.
        metrics: The file for these durations, or None.
    """

    rules: Rules
    command: str = ""
    restart: int = 0
    prints: bool = True
    table: bool = False
    metrics: Path | None = None


@dataclass(frozen=True)
class Ports:
    """Everything outside the loop that it uses.

    Attributes:
        agents: The ranks, started.
        screen: Receives the output of the ranks.
        reporter: Prints the launcher's own lines.
        control: The terminal, if the job is on this host.
        store: The job's store, which holds the table of rank slots of an elastic round.
        bar: Shows the progress of the ranks, or None.
        inquiries: Opens the socket on which other commands request the state of the ranks.
        signals: Installs the handlers of signals.
        clock: Returns the time in seconds, as ``time.monotonic``.
    """

    agents: Agents
    screen: Screen
    reporter: Reporter
    control: JobControl | None = None
    store: StoreServer | None = None
    bar: JobBar | None = None
    inquiries: Callable[[], Inquiries] = Inquiries
    signals: Callable[[Iterable[int], Callable[[int], object], int, Set[int]], AbstractContextManager[None]] = handled
    clock: Callable[[], float] = time.monotonic


class RoundLoop:
    """Runs one round of a job.

    Attributes:
        ended: How the last process of each rank exited: the status, as in ``Exited``, or why its host was lost.
        restarts: How often each rank has been restarted.
        results: Return values of ranks that ran a function, pickled.
        last_signal: The last signal that this process received; None if it received none.
        summary: After `run`: the printed result of the round.
    """

    def __init__(self, spec: RoundSpec, ports: Ports) -> None:
        self.ended: dict[int, int | str] = {}
        self.restarts: dict[int, int] = {}
        self.results: dict[int, bytearray] = {}
        self.last_signal: int | None = None
        self.summary = b""
        self._spec = spec
        self._round = Round(spec.rules)
        self._store = ports.store
        self._bar = ports.bar
        self._agents = ports.agents
        self._screen = ports.screen
        self._reporter = ports.reporter.through(ports.screen.note)
        self._control = ports.control
        self._handled = ports.signals
        self._clock = ports.clock
        self._inquiries = ports.inquiries()
        self._statistics = Statistics(spec.table, spec.metrics, self._reporter)
        self._size = self._screen.size()
        self._tails: dict[int, tuple[bytes, ...]] = {}  # of ranks whose output another host shows
        self._signals: deque[int] = deque()  # received, and not passed to the round yet
        self._requests: deque[RestartRank | KillRequested] = deque()  # from other threads; append needs no lock
        self._answers: deque[interface.Event] = deque()  # replies to actions that were just performed
        self._outcome = Outcome(Ending.CLEAN, 0)
        self._code: int | None = None
        self._command = printable(spec.command)
        self._began = self._clock()

    @property
    def late(self) -> bool:
        """After `run`: the round was stopped because it took too long."""
        return self._round.late

    @property
    def failed(self) -> bool:
        """After `run`: a rank failed or hung, or a host was lost; the end was not requested."""
        return self._round.failed

    @property
    def joined(self) -> bool:
        """After `run`: the round was stopped so that a host that has joined can take part."""
        return self._round.joined

    @property
    def signalled(self) -> int | None:
        """The signal that ended the round; None if none did."""
        return self._round.signalled

    @property
    def cause(self) -> Failure | None:
        """After `run`: the failure that caused the others; None if there was none."""
        return self._round.cause

    @property
    def places(self) -> dict[str, list[int]]:
        """The source lines of ranks when a signal stopped them: line -> ranks."""
        places = ranks_by_line(self._outcome.stacks)
        for failure in self._outcome.failures:
            if failure.report is not None and failure.report.interrupted and failure.report.where:
                places.setdefault(failure.report.where, []).append(failure.rank)
        return places

    def restart(self, wanted: RestartRank) -> None:
        """Restart a worker. Any thread may call this method."""
        # Queued before the byte is written, so that the loop finds it when it wakes.
        self._requests.append(wanted)
        os.write(self._agents.wake, b"!")

    def kill(self) -> None:
        """Stop the round immediately. Any thread may call this method."""
        self._requests.append(KillRequested())
        os.write(self._agents.wake, b"!")

    def run(self, mask: Set[int]) -> int:
        """Run the round to its end.

        Args:
            mask: the signal mask to restore after the handlers are installed.

        Returns:
            The exit code of the command.
        """
        numbers = (*FORWARDED, *self._round.rules.passed_on, signal.SIGWINCH)
        numbers += SIGNALS if self._control is not None else ()
        with self._handled(numbers, self._receive, self._agents.wake, mask):
            if self._screen.logs.temporary is not None:
                self._reporter.remark(f"log files are in {self._screen.logs.temporary}")
            self._agents.watch(self._inquiries.fd)
            try:
                self._pass(RanksStarted(tuple(self._agents.running)))
                while self._code is None:
                    self._turn(self._agents.poll(self._timeout_s()))
            finally:
                self._agents.unwatch(self._inquiries.fd)
                self._inquiries.close()
        return self._code

    def _receive(self, number: int) -> None:
        # Only recorded, because python runs this handler between any two instructions of the loop.
        self._signals.append(number)
        if number in FORWARDED:
            self.last_signal = number

    def _timeout_s(self) -> float | None:
        times = [self._round.deadline()]
        # While the output drains, no line waits for other ranks, and the bar has ended (``_conclude``).
        if self._round.phase is not Phase.DRAINING:
            times.append(self._screen.due())
            times.append(self._bar.due if self._bar is not None else None)
        due = [at for at in times if at is not None]
        return max(0.0, min(due) - self._clock()) if due else None

    # Events.

    def _turn(self, events: list[Event]) -> None:
        """Process pending events: failures before signals, because an earlier failure is the cause."""
        for event in events:
            self._take(event)
        self._statistics.write_if_due()
        for question in self._inquiries.take():
            self._pass(StatesRequested(question.recent, question.stacks))
        while self._requests and isinstance(self._requests[0], RestartRank):
            self._pass(self._requests.popleft())
        # Before the signals: a cause that has settled is selected before a signal stops the round.
        self._pass(TimePassed())
        if self._control is not None and self._control.borrower is not None and self._screen.size() != self._size:
            self._signals.append(signal.SIGWINCH)  # the kernel sends it to the borrower only
        while self._signals:
            self._take_signal(self._signals.popleft())
        while self._requests:
            self._pass(self._requests.popleft())
        # Signals and requests may have stopped the round or ended its phase, which only a check of the deadlines
        # detects.
        self._pass(TimePassed())
        if self._round.phase is Phase.CLOSING and not self._agents.output_open:
            self._pass(OutputClosed())
        if self._bar is not None:
            self._bar.draw(len(self._agents.running), self._clock())
        if self._code is None:
            self._write()
        if self._round.phase is Phase.DRAINING and not self._screen.backlog:
            self._pass(OutputWritten())

    def _take(self, event: Event) -> None:
        """Process the parts of an event that need no decision, and pass it on."""
        match event:
            case Output():
                if event.data:  # empty: another host has shown it
                    self._screen.take(event)
            case RankFailed(rank, _, report):
                self._screen.log(rank, report.text)
            case Exited(rank, _, status, tail):
                self._screen.end(rank)
                self.ended[rank] = status
                self._tails[rank] = tail
            case HostLost(_, ranks, why):
                for rank in ranks:
                    self._screen.end(rank)
                self.ended |= dict.fromkeys(ranks, why)
            case RankRestarted(rank):
                self.ended.pop(rank, None)
            case HostMessage(host, text):
                self._screen.note(host.encode() + b": " + text)
            case LeftBehind(rank, what):
                hint = "to keep a process, start it with setsid"
                self._reporter.remark(f"rank {rank} left {what} running; the launcher terminates it ({hint})")
                return
            case Returned(rank, piece):
                self.results.setdefault(rank, bytearray()).extend(piece)
            case RankStats():
                self._statistics.take(event)
                return
            case RankProgress():
                if self._bar is not None:
                    self._bar.take(event)
                return
            case Asked(recent, wanted):
                self._pass(StatesRequested(recent, wanted))
                return
            case StopRequested(number):  # queued like a local signal: failures of this turn precede it
                self._signals.append(number)
                return
        self._pass(event)
        if isinstance(event, RankRestarted):
            self.restarts[event.rank] = self.restarts.get(event.rank, 0) + 1

    def _take_signal(self, number: int) -> None:
        if number == signal.SIGWINCH:
            self._screen.resized()
            self._size = self._screen.size()
            self._agents.resize(*self._size)
        elif number == signal.SIGCHLD and self._control is not None:
            self._pass(ReaderChanged(self._control.stopped_by()))
        else:
            self._pass(SignalReceived(number))

    def _write(self) -> None:
        # OutputLost may add lines about it, whose write can fail as well.
        while lost := self._screen.flush():
            for name, error in lost:
                self._pass(OutputLost(name, str(error.strerror), isinstance(error, BrokenPipeError)))
        self._agents.watch_writable(self._screen.blocked)
        self._agents.read_output(self._screen.backlog < _BACKLOG)
        if self._screen.backlog >= _BACKLOG:
            # Ranks that cannot write are not idle.
            self._pass(OutputBlocked())

    # Actions.

    def _pass(self, event: interface.Event) -> None:
        """Pass an event to the round and perform its actions, and then pass their replies."""
        # A queue instead of recursion: a reply must not precede the remaining actions of its event.
        self._answers.append(event)
        while self._answers:
            self._handle(self._answers.popleft())

    def _handle(self, event: interface.Event) -> None:
        for action in step(self._round, event, self._clock()):
            self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case Print(text, level):
                put = {
                    Level.ESSENTIAL: self._reporter.report,
                    Level.REMARK: self._reporter.remark,
                    Level.DETAIL: self._reporter.detail,
                }
                put[level](text)
            case PrintReport(rank, text):
                lines = text.rstrip("\n").split("\n") if text else []
                self._screen.print_lines([rank], [line.encode() for line in lines])
            case PrintStacks(texts):
                readable = {rank: text.decode(errors="replace") for rank, text in texts.items()}
                for ranks, lines in stacks.render(readable):
                    self._screen.print_lines(ranks, [line.encode() for line in lines])
            case PrintWaitReport(diagnosis, texts):
                places = {rank: stacks.main_place(text.decode(errors="replace")) for rank, text in texts.items()}
                for line in diagnosis.lines(dict(enumerate(self._round.hosts)), places):
                    self._reporter.report(line)
            case AnswerStates():
                self._answer(action)
            case SignalRanks(number, chosen, alone):
                self._agents.signal(number, list(chosen), alone)
            case DumpStacks(chosen):
                self._agents.dump(list(chosen))
            case InspectRanks(chosen, recent):
                self._agents.inspect(list(chosen), recent)
            case RestartRank():
                self._agents.restart(action)
            case StartElsewhere(lost, spare, starts):
                self._screen.move(starts, spare)
                self._agents.start_elsewhere(lost, spare, starts)
            case PublishSlots(slots):
                assert self._store is not None
                self._store.set_locally(TABLE_KEY, slots.encode())
            case LendTerminal(rank):
                self._answers.append(TerminalLent(self._control is not None and self._control.lend(rank)))
            case ReclaimTerminal(_, restore):
                if self._control is not None:
                    self._control.reclaim(restore)
            case StopLauncher(number):
                stopped = self._control is not None and self._control.stop_launcher(number)
                self._answers.append(LauncherContinued(stopped))
            case AwaitOutput():
                pass  # `_turn` checks ``output_open`` of the agents each time
            case FinishRanks(patience_s):
                # The last reports and exits must reach the round before it concludes.
                for event in self._agents.finish(patience_s):
                    self._take(event)
                self._answers.append(RanksFinished())
            case Conclude(outcome):
                self._conclude(outcome)
                if table := self._statistics.conclude():
                    self._screen.note(table)
            case EndRound(code):
                self._code = code

    def _report_calls(self, outcome: Outcome) -> None:
        """Print the last calls of ranks, if they have made any, and write all known states to a file."""
        if outcome.ending is not Ending.FAILED or not any(state.last is not None for state in outcome.states):
            return
        hosts = self._round.hosts
        call_lines = describe_calls(outcome, hosts)
        for line in call_lines:
            self._reporter.remark(line)
        if call_lines or differ(outcome):
            path = write_report(report(outcome, hosts, self._command), self._screen.logs.folder, os.environ)
            if path is not None:
                self._reporter.remark(f"the last calls of all ranks are in {path}")

    def _answer(self, action: AnswerStates) -> None:
        places = {rank: stacks.main_place(text.decode(errors="replace")) for rank, text in action.stacks.items()}
        hosts = tuple(self._round.hosts)
        answer = JobAnswer(
            launcher=os.getpid(),
            launcher_host=socket.gethostname(),
            command=self._command,
            size=len(self._screen.ranks),
            hosts=hosts,
            seconds=self._clock() - self._began,
            states=tuple(action.states),
            places={rank: place for rank, place in places.items() if place},
            reasons=dict(action.reasons),
            restarts=self._spec.restart,
        )
        data = msgspec.json.encode(answer) + b"\n"
        self._inquiries.answer(data)
        self._agents.answer(data)

    def _conclude(self, outcome: Outcome) -> None:
        self._outcome = outcome
        if self._bar is not None:
            self._bar.end(outcome.ending is Ending.CLEAN, self._clock())
        for rank in self._screen.ranks:
            self._screen.end(rank)
        self._screen.settle()
        shown = self._spec.prints
        if outcome.ending is Ending.SIGNALLED:
            assert outcome.signal is not None
            # A program that SIGPIPE ends prints nothing either.
            if self._spec.prints and outcome.signal != signal.SIGPIPE:
                name = signal.Signals(outcome.signal).name
                places = ranks_by_line(outcome.stacks)
                self._screen.note(describe_interrupt(name, outcome.failures, self._reporter, places))
            return
        if outcome.ending is Ending.IDLE:
            self.summary = describe_idle(outcome, self._round.rules.idle_s or 0.0, self._reporter)
            shown = True
        elif outcome.cause is not None and outcome.ending is Ending.FAILED:
            # An agent that shows its own ranks has sent the hidden lines with the exit.
            tail = self._screen.tail(outcome.cause.rank) or self._tails.get(outcome.cause.rank, ())
            self.summary = describe_failure(outcome.cause, outcome.before, tail, self._reporter, outcome.exited)
        if self.summary and shown:
            self._screen.note(self.summary)
            self._report_calls(outcome)
