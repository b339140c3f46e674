"""One round of a job as a pure state machine: which ranks to signal, kill or blame, and when the round ends.

``step(state, event, now)`` returns actions. It has no clock, no process and no terminal. ``runtime/loop`` performs the
actions on real ranks. The tests perform them on simulated hosts, in thousands of rounds that each follow from a seed.

The phases: (1) ranks run; (2) they have exited, but processes that they left behind may still write; (3) the remaining
processes are killed and reaped; (4) the output is written; (5) the end. The rules of the first phase:

- The first failure that is no echo stops the round. The other ranks receive SIGTERM, and SIGKILL after the grace time.
- SIGINT stops the round; a second SIGINT kills the ranks. SIGTERM and SIGHUP stop it after the stacks of the ranks have
  arrived.
- Each of these decisions is made once. A later failure is a consequence.
- A rank receives signals only while it runs as far as is known: not after its exit, and not after the loss of its host.

In an elastic round (``Rules.elastic``), a lost rank does not stop the round. ``_elastic.rank_slots`` has the rules.
Each change of its table is published before the action that follows from it. Three conditions still stop an elastic
round. Too few ranks are left. Or a rank has found that no rank has the state any more, so another process could not
continue. Or a rank fails only because another was lost (an echo): the program then does not survive losses.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

from allranks._base.errors import rank_list
from allranks._base.exit_codes import IDLE, LOST, SIGNAL, UNWRITABLE
from allranks._elastic.rank_slots import RankSlots
from allranks.launch.policy.elastic_round import ElasticRound
from allranks.launch.policy.inquiry import Inquiry
from allranks.launch.policy.interface import (
    Action,
    AnswerStates,
    AwaitOutput,
    Conclude,
    Ending,
    EndRound,
    Event,
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
    PrintReport,
    PrintStacks,
    RanksFinished,
    RanksStarted,
    ReaderChanged,
    SignalReceived,
    StatesRequested,
    TerminalLent,
    TimePassed,
)
from allranks.launch.policy.root_cause import Failure
from allranks.launch.policy.round_state import DUMP_S, Phase, Rules
from allranks.launch.policy.stack_request import Purpose, StackRequest
from allranks.launch.spec.events import (
    Exited,
    FailureKind,
    HostJoined,
    HostLost,
    LongWait,
    Output,
    RankFailed,
    RankRestarted,
    RankState,
    RestartRank,
    Stacks,
    StopRequested,
)

__all__ = ["DUMP_S", "Phase", "Round", "Rules", "step"]

STRAGGLERS_S = 0.5  # seconds for processes that ranks left behind to close their pipes
LINGER_S = 10.0  # seconds from the first rank's exit to a remark about the other ranks
WORKERS_S = 1.0  # seconds for workers to exit after their master
DRAIN_S = 1.0  # seconds; the minimum for a reader of the launcher's output after a job was stopped
IDLE_DUMP_S = 2.0  # seconds that an idle job waits for stacks, which are its only purpose
LAST_CALLS = 64  # calls of each rank that are kept after a failure
KILLED_S = 3.0  # seconds after SIGKILL: a rank that has not exited by then is frozen, or its agent is unreachable


class Round(ElasticRound):
    """A round. ``take`` processes an event."""

    def deadline(self) -> float | None:
        """Return the time when ``TimePassed`` is due even without an event; None for never."""
        if self.phase is Phase.ENDED or self.phase is Phase.FINISHING:
            return None
        if self.phase is Phase.DRAINING:
            # After a clean end there is no time limit: a slow reader gets all output.
            return self._phase_ends_at if self.stopping else None
        times = [
            self._hint_at,
            self._request.ends_at() if self._request is not None else None,
            self._wait_reports.deadline(),
            self._inquiry.deadline() if self._inquiry is not None else None,
        ]
        if self.phase is Phase.CLOSING:
            times.append(self._phase_ends_at)
        elif self._killed_at is not None:
            times.append(self._killed_at + KILLED_S)
        if not self.stopping:
            times += [self._root_cause.settles_at(), self._linger_at]
            times += [self._idle_at] if self._request is None and self.phase is Phase.RUNNING else []
            times += [self.rules.until] if self.running else []
            times += self._leaving.values()
        elif self._killed_at is None and self.running:
            times.append(self._kill_at)
        return min((at for at in times if at is not None), default=None)

    def take(self, event: Event, now: float) -> list[Action]:
        """See ``step``."""
        self._now, self._actions = now, []
        if self.phase is Phase.ENDED:
            return []
        match event:
            case RanksStarted(ranks):
                self.running = set(ranks)
                self._all_ranks = frozenset(ranks)
                self._print(f"{rank_list(sorted(self.running))} started", Level.DETAIL)
                if self.rules.elastic is not None:
                    self._slots = RankSlots(self.rules.elastic, ranks)
                    self._publish()
                self._restart_idle_time()
            case TimePassed():
                self._check_deadlines()
            case Output() | OutputBlocked():
                self._restart_idle_time()
            case SignalReceived(number):
                self._take_signal(number)
            case StopRequested(number):
                self._take_signal(number)
            case KillRequested():
                # This makes the round ``stopping``, so the exits that follow are no failures.
                self._kill_at = self._stopped_at = now
                self._kill("")
            case LongWait() | StatesRequested() | RankState() | Stacks():
                self._take_state(event)
            case RankFailed():
                self._take_report(event)
            case Exited():
                self._take_exit(event)
            case HostLost():
                self._take_loss(event)
            case RestartRank(rank, _):
                if self._may_fail(rank) and not self.stopping and self.phase is Phase.RUNNING:
                    self._actions.append(event)
            case RankRestarted(rank):
                self._take_restart(rank)
            case HostJoined():
                self._take_host(event)
            case ReaderChanged() | TerminalLent() | LauncherContinued():
                self._take_job_control(event)
            case OutputLost():
                self._take_output_lost(event)
            case OutputClosed():
                if self.phase is Phase.CLOSING:
                    self._finish()
            # A cause that has settled by now must be selected before the outcome is judged.
            case RanksFinished():
                self._check_deadlines()
                self._conclude()
            case OutputWritten():
                if self.phase is Phase.DRAINING:
                    self._end()
        return self._actions

    def _take_report(self, event: RankFailed) -> None:
        if self._may_fail(event.rank):
            self._actions.append(PrintReport(event.rank, event.report.text))
            return
        interrupts = event.report.interrupted and self._has_keys(event.rank)
        if self._slots is not None and not self.stopping and not interrupts:
            self._take_elastic_report(event, self._slots)
            return
        self._add_failure(Failure(event.rank, event.pid, event.report.code, event.report.at, event.report))
        if interrupts:
            self._interrupt([event.rank])

    def _take_exit(self, event: Exited) -> None:
        self.running.discard(event.rank)
        failure = self._on_host(Failure(event.rank, event.pid, event.status, self._now))
        self._print(str(failure), Level.DETAIL)
        # The request must not wait for stacks that cannot arrive any more.
        if self._request is not None:
            self._request.awaited.discard(event.rank)
        # Ctrl-C reached only the rank that has the keys; if it ends this rank, it ends the job.
        if event.status == -signal.SIGINT and self._has_keys(event.rank):
            self._interrupt([event.rank])
        # A killed rank could not restore the modes of the terminal itself.
        if self._borrower == event.rank:
            self._reclaim(restore=event.status < 0)
        if self.stopping:
            # A rank that the signal killed reports no line; the stacks that were requested before show it.
            known = self._root_cause.failures.get(event.rank)
            silent = known is None or known.report is None or not known.report.where
            if self.signalled is not None and silent and event.status in (-self.signalled, -signal.SIGKILL):
                self._silent.append(event.rank)
        elif self._may_fail(event.rank):
            if event.status:
                self._print(f"{failure}; the other ranks continue", Level.REMARK)
        elif self._slots is not None and (event.status or event.rank in self._reports):
            self._take_elastic_exit(failure, self._slots)
        elif event.status:
            self._add_failure(failure)
        else:
            if not self._exited:
                self._linger_at = self._now + (LINGER_S if self.rules.master is None else WORKERS_S)
            self._exited.append(event.rank)
            if self._slots is not None:
                self._take_elastic_end(event.rank, self._slots)

    def _take_loss(self, event: HostLost) -> None:
        self.running.difference_update(event.ranks)
        if self._request is not None:
            self._request.awaited.difference_update(event.ranks)
        if self._slots is not None and not self.stopping:
            self._take_elastic_loss(event, self._slots)
        elif event.ranks and all(map(self._may_fail, event.ranks)):
            self._print(event.why)
        elif not self.stopping and event.ranks:
            lost = Failure(event.ranks[0], 0, LOST, self._now, host=event.host, lost=event.why)
            self._root_cause.add(lost)
        elif self._killed_at is not None:
            self._print(event.why)

    def _take_restart(self, rank: int) -> None:
        if self.phase is not Phase.RUNNING:
            return  # the rank is reaped with the others
        self.running.add(rank)
        self._print(f"rank {rank} restarted", Level.DETAIL)
        if self._slots is not None and self._slots.start(rank):
            self._publish()
        elif self._slots is not None and not self.stopping:  # too late: no rank has the state that it needs
            self._signal(signal.SIGKILL, [rank])
        if self._killed_at is not None:
            self._signal(signal.SIGKILL, [rank])
        elif self.stopping:
            # The signal was sent while this process did not exist.
            self._signal(self._stop_number, [rank], alone=self._stop_number != signal.SIGINT)

    def _take_host(self, event: HostJoined) -> None:
        if self._slots is not None:
            self._take_newcomers(event, self._slots)
        elif not self.stopping and self.phase is Phase.RUNNING:
            self.joined = True
            self._print(f"{event.host} has joined; all ranks restart")
            self._stop(signal.SIGTERM, self.running)

    def _take_output_lost(self, event: OutputLost) -> None:
        if not event.reader_gone:  # a closed pipe is reported as SIGPIPE would report it, which python ignores
            self._output_lost = True
            self._print(f"cannot write to {event.name}: {event.why}")
        if not self.stopping:
            self.signalled = signal.SIGPIPE if event.reader_gone else None
            self._stop(signal.SIGTERM, self.running)

    def _take_signal(self, number: int) -> None:
        if number == signal.SIGTSTP:
            self._suspend(number)
            return
        if number in self.rules.passed_on:
            name = signal.Signals(number).name
            self._print(f"forwarding {name} to {rank_list(sorted(self.running))}", Level.DETAIL)
            self._signal(number, self.running, alone=True)
            return
        # While the output drains, any signal ends the wait for its reader.
        self._second_signal = True
        if not self.stopping and number == signal.SIGINT:
            self._interrupt()
        elif not self.stopping:
            self.signalled = number
            self._stopped_at = self._now
            self._stop_number = number
            self._request_stacks(DUMP_S, Purpose.STOP_BY_SIGNAL)
            # Set before the ranks are signaled: the round is ``stopping`` while it waits for the stacks.
            self._kill_at = self._now + DUMP_S + self.rules.grace_s
        elif number == signal.SIGINT:  # batch systems and closed terminals repeat the other signals themselves
            self._kill("")

    def _take_job_control(self, event: ReaderChanged | TerminalLent | LauncherContinued) -> None:
        if isinstance(event, ReaderChanged):
            self._restart_idle_time()
            if self.rules.reader not in self.running or self.rules.reader is None or event.stopped_by is None:
                return
            if event.stopped_by == signal.SIGTSTP:
                self._suspend(event.stopped_by)
            elif event.stopped_by in (signal.SIGTTIN, signal.SIGTTOU):
                self._lent_after = event.stopped_by
                self._actions.append(LendTerminal(self.rules.reader))
        elif isinstance(event, TerminalLent):
            number, self._lent_after = self._lent_after, None
            if event.lent:
                self._borrower = self.rules.reader
            if number is not None and event.lent and self.rules.reader is not None:
                self._signal(signal.SIGCONT, [self.rules.reader])
            elif number is not None:
                self._suspend(number)
        elif self._suspension is not None:
            suspension, self._suspension = self._suspension, None
            self._restart_idle_time()
            # Before SIGCONT: without the terminal, the next read would stop the rank again.
            if suspension.had_terminal and self.rules.reader in self.running:
                self._actions.append(LendTerminal(self.rules.reader))
            # If SIGTTIN or SIGTTOU stopped nothing, no shell could continue the job, and the read would never succeed.
            if event.stopped or suspension.number == signal.SIGTSTP:
                self._signal(signal.SIGCONT, self.running.intersection(suspension.ranks))
            else:
                self._print(f"rank {self.rules.reader} waits for the terminal, which another job uses")
                self._output_lost = True
                self._stop(signal.SIGTERM, self.running)

    def _check_deadlines(self) -> None:
        now = self._now
        if self.phase is Phase.DRAINING:
            if self._second_signal or (self.stopping and now >= self._phase_ends_at):
                self._end()
            return
        if not self.stopping:
            self._check_leaving()
        settles_at = self._root_cause.settles_at()
        if not self.stopping and settles_at is not None and now >= settles_at:
            self.cause = self._root_cause.select()
            # Before any signal, so that the states show what led to the failure.
            self._actions.append(InspectRanks(tuple(sorted(self._all_ranks)), LAST_CALLS))
            if self._others_were_late(self.cause):
                self._stopped_at = now
                self._request_stacks(DUMP_S, Purpose.STOP_AFTER_FAILURE)
                self._kill_at = now + DUMP_S + self.rules.grace_s
            else:
                self._stop(signal.SIGTERM, self._without_cause(self.cause))
        if not self.stopping and self.rules.until is not None and now >= self.rules.until and self.running:
            self.late = True
            self._take_signal(signal.SIGINT)  # SIGINT, so that a python rank reports the line where it was interrupted
        if self._request is not None and now >= self._request.ends_at():
            self._answered, self._request = self._request, None
            if self._answered.purpose is Purpose.STOP_BY_SIGNAL:
                self._stop(self._stop_number, self.running)
            elif self._answered.purpose is Purpose.STOP_AFTER_FAILURE and self.cause is not None:
                self._stop(signal.SIGTERM, self._without_cause(self.cause))
            elif self._answered.purpose is Purpose.STOP_IDLE:
                self._stop_idle(self._answered)
        if self.stopping or self._request is not None:
            self._wait_reports.forget()
        self._actions += self._wait_reports.check(self.running, self._borrower, now)
        self._answer_inquiry()
        self._check_waiting()
        if self._kill_at is not None and now >= self._kill_at and self._killed_at is None and self.running:
            self._kill(f"did not exit within {self.rules.grace_s:g} s")
        if self.phase is Phase.RUNNING and self._is_over():
            self.phase = Phase.CLOSING
            self._phase_ends_at = now + STRAGGLERS_S
            # The ranks have exited, but processes that they left behind may still write to their pipes.
            self._actions.append(AwaitOutput())
        elif self.phase is Phase.CLOSING and now >= self._phase_ends_at:
            self._finish()

    def _check_waiting(self) -> None:
        """Check the deadlines for idle ranks, for ranks that outlive the others, and for ranks that survive Ctrl-C."""
        now, stopping = self._now, self.stopping
        idles = not stopping and self._request is None and self.phase is Phase.RUNNING
        if idles and self._idle_at is not None and now >= self._idle_at:
            self._idle_at = None
            self._request_stacks(IDLE_DUMP_S, Purpose.STOP_IDLE)
        if not stopping and self._linger_at is not None and now >= self._linger_at:
            # Once per round, not at every later deadline.
            self._linger_at = None
            if self.rules.master is not None and self.running:
                self._stop(signal.SIGTERM, self.running)
            elif self.running:
                # A rank that never joins makes the others wait for it, and no other message appears for a long time.
                verb = "is" if len(self.running) == 1 else "are"
                left = f"{rank_list(sorted(self._exited))} exited with code 0 before the other ranks"
                self._print(f"{left}; {rank_list(sorted(self.running))} {verb} still running", Level.REMARK)
        if self._hint_at is not None and now >= self._hint_at:
            self._hint_at = None
            if self.running and self._killed_at is None:
                wait = f"waiting up to {self.rules.grace_s:g} s for {rank_list(sorted(self.running))} (--grace)"
                self._print(f"{wait}; press Ctrl-C again to kill", Level.REMARK)

    def _is_over(self) -> bool:
        """Return whether the round no longer waits for any rank."""
        if self._killed_at is not None and self._now >= self._killed_at + KILLED_S:
            return True
        return not self.running and (self.rules.master != -1 or self.stopping)

    def _restart_idle_time(self) -> None:
        if self.rules.idle_s is not None and self._request is None and not self._stopped_idle:
            self._idle_at = self._now + self.rules.idle_s

    def _take_state(self, event: LongWait | StatesRequested | RankState | Stacks) -> None:
        match event:
            case LongWait():
                if not self.stopping and self._request is None and self.phase is Phase.RUNNING:
                    self._actions += self._wait_reports.take_wait(event, sorted(self._all_ranks), self._now)
            case StatesRequested(recent, stacks):
                self._start_inquiry(recent, stacks)
            case RankState():
                if self.cause is not None:
                    # The first state counts: later ones show ranks that are being stopped.
                    self._last_states.setdefault(event.rank, event)
                self._wait_reports.take_state(event)
                if self._inquiry is not None:
                    self._inquiry.take_state(event)
            case Stacks():
                self._wait_reports.take_stacks(event, self._now)
                if self._inquiry is not None:
                    self._inquiry.take_stacks(event, self._now)
                # stacks that arrive after the deadline still help
                if (request := self._request or self._answered) is not None:
                    request.add(event, self._now)

    def _start_inquiry(self, recent: int, stacks: bool) -> None:
        if self._inquiry is not None:  # the pending request also answers this one
            return
        self._inquiry = Inquiry(sorted(self._all_ranks), recent, _in_no_call if stacks else _no_ranks, self._now)
        self._actions += self._inquiry.begin()

    def _answer_inquiry(self) -> None:
        if (inquiry := self._inquiry) is None:
            return
        self._actions += inquiry.check(self.running, self._now)
        if inquiry.done:
            self._inquiry = None
            states = [inquiry.states[rank] for rank in sorted(inquiry.states)]
            self._actions.append(AnswerStates(states, dict(inquiry.stacks), dict(inquiry.reasons)))

    def _stop_idle(self, answered: StackRequest) -> None:
        self._stopped_idle = True
        idle = f"no rank has written anything for {self.rules.idle_s:g} s"
        self._print(f"{idle} (--idle-timeout); stacks of all ranks:")
        self._actions.append(PrintStacks(dict(answered.texts)))
        silent = dict.fromkeys(
            sorted(answered.awaited), "did not report its stacks (blocked signals, or a system call)"
        )
        for rank, why in (answered.reasons | silent).items():
            self._print(f"{rank_list([rank])} {why}")
        self._stop(signal.SIGTERM, self.running)

    def _conclude(self) -> None:
        self._outcome = self._determine_outcome()
        self.failed = self._outcome.ending in (Ending.FAILED, Ending.IDLE)
        self.phase = Phase.DRAINING
        # Signals that stopped the round must not end the output, too.
        self._second_signal = False
        # After a failure, output is written for the grace time; after a signal, for ``DRAIN_S`` only.
        self._phase_ends_at = self._now + DRAIN_S
        if self._kill_at is not None and self.signalled is None:
            self._phase_ends_at = max(self._phase_ends_at, self._kill_at)
        self._actions.append(Conclude(self._outcome))

    def _determine_outcome(self) -> Outcome:
        failures = sorted(self._root_cause.failures.values(), key=lambda failure: failure.rank)
        stacks = self._answered.texts if self._answered is not None else {}
        # A signal precedes failures: once the ranks are signaled, failures are consequences.
        if self.signalled is not None:
            places = {rank: stacks[rank] for rank in self._silent if rank in stacks}
            return self._result(Ending.SIGNALLED, self._own_code(), failures, places)
        if self.joined:  # failures are reports of ranks that were requested to exit
            return self._result(Ending.JOINED, 0, failures)
        if self._stopped_idle:
            return self._result(Ending.IDLE, IDLE, failures, {rank: stacks[rank] for rank in sorted(stacks)})
        # echoes, and all ranks had exited before they settled
        if self.cause is None and failures and not self._output_lost:
            self.cause = self._root_cause.select()
            self._stopped_at = self._now
        if self.cause is None:
            return self._result(Ending.CLEAN, self._own_code(), failures)
        places = {rank: stacks[rank] for rank in sorted(stacks)}
        return self._result(Ending.FAILED, self.cause.exit_code, failures, places)

    def _result(
        self, ending: Ending, code: int, failures: Sequence[Failure], stacks: dict[int, bytes] | None = None
    ) -> Outcome:
        # Failures after the stop are consequences of it.
        before = [failure for failure in failures if failure.at < self._stopped_at]
        return Outcome(
            ending,
            code,
            self.cause,
            failures,
            before,
            sorted(self._exited),
            self.signalled,
            dict(stacks or {}),
            [self._last_states[rank] for rank in sorted(self._last_states)],
        )

    def _own_code(self) -> int:
        """Return the exit code if no rank is to blame."""
        if self.signalled is not None:
            return SIGNAL + self.signalled
        return UNWRITABLE if self._output_lost else 0

    def _end(self) -> None:
        self.phase = Phase.ENDED
        self._actions.append(EndRound(self._outcome.code or self._own_code()))

    def _others_were_late(self, cause: Failure) -> bool:
        """Return whether a rank failed because others were late: the stacks of the late ranks show the reason."""
        return cause.report is not None and cause.report.kind is FailureKind.LATE and bool(self.running)


def _in_no_call(states: Mapping[int, RankState]) -> list[int]:
    return [rank for rank, state in states.items() if state.waiting is None]


def _no_ranks(states: Mapping[int, RankState]) -> list[int]:
    return []


def step(state: Round, event: Event, now: float) -> list[Action]:
    """Process one event, and decide.

    Args:
        state: the round, which is changed.
        event: what happened.
        now: the time, on any monotonic clock. ``FailureReport.at`` and ``Rules.until`` are on the same clock.

    Returns:
        The actions to perform, in this order.
    """
    return state.take(event, now)
