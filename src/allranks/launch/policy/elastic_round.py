"""The rules of an elastic round, in which a lost rank does not stop the others."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from allranks._base.errors import rank_list
from allranks._base.exit_codes import LOST
from allranks._elastic.rank_slots import RankSlots
from allranks._elastic.slot_table import START
from allranks.launch.policy.interface import (
    Level,
    PrintReport,
    StartElsewhere,
)
from allranks.launch.policy.root_cause import Failure, consequence
from allranks.launch.policy.round_state import Phase, RoundState
from allranks.launch.spec.events import (
    FailureKind,
    HostJoined,
    HostLost,
    RankFailed,
    RestartRank,
)

__all__ = ["ElasticRound"]

LEAVE_S = 0.5  # seconds; the minimum for a rank of an elastic round to exit after its failure


class ElasticRound(RoundState):
    """A round that can lose ranks."""

    def _take_elastic_report(self, event: RankFailed, slots: RankSlots[Failure]) -> None:
        """Process a failure report. The decision follows when the process has exited, unless the failure is an echo."""
        failure = self._on_host(Failure(event.rank, event.pid, event.report.code, event.report.at, event.report))
        if self._has_cause():
            self._root_cause.add(failure)
        elif _has_no_state(failure):
            self._root_cause.add(failure)
            self._print("no remaining rank has the complete state of the program; the job stops")
        elif failure.echo and not _is_excluded(failure):
            self._root_cause.add(failure)
            if slots.last_loss is not None:
                self._stop_for_echo(failure, slots.last_loss)
        else:
            self._reports[event.rank] = failure
            # A failed rank may hang at its exit, and the decision about it waits for the exit.
            self._leaving[event.rank] = self._now + max(self.rules.grace_s, LEAVE_S)

    def _take_elastic_exit(self, failure: Failure, slots: RankSlots[Failure]) -> None:
        rank = failure.rank
        reported = self._reports.pop(rank, None)
        if reported is not None and failure.status >= 0:
            failure = reported
        excluded = _is_excluded(failure)
        if rank in self._root_cause.failures or slots.is_gone(rank):
            return  # an echo, whose cause has not arrived yet
        if self._has_failures() and not excluded:
            self._take_cause(failure)
            return
        # A new process needs the state of a rank that runs and has not failed itself.
        restarts = bool(self.running.difference(self._reports)) and not excluded and slots.may_start(rank)
        slots.lose(failure, restarts)
        # Published before the restart, so that the other ranks see the loss first.
        self._publish()
        if not (restarts or self._can_continue(slots)):
            self._root_cause.add(failure)
            self._report_lost_starting(slots)
        elif excluded:
            self._report_continuation(f"rank {rank} exited because the other ranks had continued without it", slots)
        else:
            if reported is not None and reported.report is not None:
                self._actions.append(PrintReport(rank, reported.report.text))
            if restarts:
                how_often = f"{slots.respawned(rank)} of {slots.respawns}"
                self._print(f"{failure}; restarted ({how_often})", Level.REMARK)
                self._actions.append(RestartRank(rank, {START: str(slots.start_of(rank))}))
            else:
                self._report_continuation(str(failure), slots)
        self._give_up_starting(slots)

    def _take_elastic_loss(self, event: HostLost, slots: RankSlots[Failure]) -> None:
        if event.host in slots.spares:
            slots.spares.remove(event.host)
            self._print(consequence(event.why, f"{_spares(slots.spares)} left"), Level.REMARK)
            return
        # A rank that was being started on this host is lost, too. The pool reports it a second time.
        starting = [rank for rank in slots.starting if rank not in event.ranks]
        there = [rank for rank in sorted({*event.ranks, *starting}) if self._hosts[rank] == event.host]
        ranks = [rank for rank in there if not slots.is_gone(rank)]
        if not ranks:
            return
        for rank in ranks:
            # The exit that would follow the report cannot arrive any more.
            self._reports.pop(rank, None)
        losses = [Failure(rank, 0, LOST, self._now, host=event.host, lost=event.why) for rank in ranks]
        if self._has_failures():
            self._take_cause(losses[0])
            return
        spare = slots.spares.pop(0) if slots.spares and self.running.difference(self._reports) else ""
        for loss in losses:
            slots.lose(loss, again=bool(spare))
        if not spare:
            slots.vacant[event.host] = tuple(ranks)
        self._publish()
        if spare:
            for rank in ranks:
                self._hosts[rank] = spare
            verb = "is" if len(ranks) == 1 else "are"
            self._print(consequence(event.why, f"{rank_list(ranks)} {verb} started on {spare}"), Level.REMARK)
            starts = {rank: slots.start_of(rank) for rank in ranks}
            self._actions.append(StartElsewhere(event.host, spare, starts))
        elif self._can_continue(slots):
            self._report_continuation(consequence(event.why, f"{rank_list(ranks)} terminated with it"), slots)
        else:
            self._root_cause.add(losses[0])
            self._report_lost_starting(slots)
        self._give_up_starting(slots)

    def _take_elastic_end(self, rank: int, slots: RankSlots[Failure]) -> None:
        """Process the exit of a rank with code 0."""
        slots.end(rank)
        self._publish()
        self._give_up_starting(slots)

    def _take_newcomers(self, event: HostJoined, slots: RankSlots[Failure]) -> None:
        """Process a host that has joined: its new ranks join the others."""
        # No rank is left that could give new ranks the state, or the round is about to end.
        if self.stopping or self.phase is not Phase.RUNNING or self._has_failures() or not self.running:
            return
        lost, starts = slots.join(event.host, event.room)
        if not starts:
            self._print(f"{event.host} has joined; it is a spare host", Level.REMARK)
            return
        self._publish()
        self._hosts += [""] * (max(starts) + 1 - len(self._hosts))
        for rank in starts:
            self._hosts[rank] = event.host
        self._all_ranks |= starts.keys()
        verb = "joins" if len(starts) == 1 else "join"
        self._print(f"{event.host} has joined; {rank_list(list(starts))} {verb} the other ranks", Level.REMARK)
        self._actions.append(StartElsewhere(lost, event.host, starts))

    def _check_leaving(self) -> None:
        """Kill ranks that have failed and whose process does not exit."""
        late = [rank for rank, at in self._leaving.items() if self._now >= at]
        for rank in late:
            del self._leaving[rank]
        self._signal(signal.SIGKILL, self.running.intersection(late).intersection(self._reports))

    def _give_up_starting(self, slots: RankSlots[Failure]) -> None:
        """Give up ranks that are being restarted if no running rank has the state of the program."""
        if self.running or self._has_failures() or not (starting := slots.starting):
            return
        for rank in starting:
            slots.lose(slots.losses[rank], again=False)
        self._report_lost_starting(slots, starting)
        self._publish()
        if not self._can_continue(slots):
            self._root_cause.add(slots.losses[starting[0]])

    def _report_lost_starting(self, slots: RankSlots[Failure], starting: Sequence[int] = ()) -> None:
        """Print that ranks which are being started cannot continue, if no rank is left that has the state."""
        starting = starting or slots.starting
        if starting and not self._exited and not self.running.difference(self._reports):
            self._print(f"no remaining rank has the state of the program; {rank_list(starting)} cannot continue")

    def _can_continue(self, slots: RankSlots[Failure]) -> bool:
        return slots.is_enough() and bool(self.running or self._exited)

    def _report_continuation(self, what: str, slots: RankSlots[Failure]) -> None:
        left = f"the other ranks continue ({slots.left} of at least {slots.table.least})"
        self._print(consequence(what, left), Level.REMARK)


def _is_excluded(failure: Failure) -> bool:
    """Return whether a rank exited because the others had continued without it."""
    return failure.report is not None and failure.report.kind is FailureKind.EXCLUDED


def _has_no_state(failure: Failure) -> bool:
    """Return whether a rank exited because no rank has the state any more, which is true for all ranks."""
    return failure.report is not None and failure.report.kind is FailureKind.STATE_LOST


def _spares(hosts: Sequence[str]) -> str:
    if not hosts:
        return "no spare host is"
    return "1 spare host is" if len(hosts) == 1 else f"{len(hosts)} spare hosts are"
