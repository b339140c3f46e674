"""The loop of a running job: shows output, stops everybody when one fails, passes the user's signals on.

What is decided here is only when to send which signal to whom. The cause of a failure is ``blame``'s business.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace

from allranks._base.errors import rank_list
from allranks.launch import stacks
from allranks.launch.agents.fleet import Fleet
from allranks.launch.jobs.job_control import SIGNALS, JobControl
from allranks.launch.jobs.root_cause import Blame, Failure, describe_failure, describe_interrupt
from allranks.launch.output.screen import Screen
from allranks.launch.ranks.agent import Agent
from allranks.launch.signals import FORWARDED, handled
from allranks.launch.spec.messages import Again, Asked, Begun, Came, Event, Exited, Failed, Lost, Noted, Output, Stacks
from allranks.launch.voice import Voice

__all__ = ["FORWARDED", "Supervisor"]

_STRAGGLERS_S = 0.5
_LINGER_S = 10.0  # from the first rank's end to a word about it
_WORKERS_S = 1.0  # what workers have to end when their master has
_DRAIN_S = 1.0  # the least that a reader gets for what is left when a job was stopped
_LOST_CODE = 255  # as ssh has it
_HINT_S = 1.5  # from Ctrl-C to a word about who does not end
_DUMP_S = 1.0  # what a signal waits for stacks, which take milliseconds
_IDLE_DUMP_S = 2.0  # the same where they are all that is wanted
_QUIET_S = 0.2  # after the last of a rank's stacks; they have no end of their own
_IDLE_CODE = 124  # as timeout(1) has it
_KILLED_S = 3.0  # after SIGKILL: whoever is not gone then is frozen, or cut off, and with it perhaps its agent
_BACKLOG = 1 << 20  # more than this waits in the ranks' pipes, and then the ranks wait


@dataclass
class _Dump:
    """Stacks that were asked for.

    Attributes:
        awaited: ranks that have said nothing yet.
        until: when not to wait any longer.
        then: what to do next.
        texts: what ranks said.
        whys: why ranks cannot say anything.
        last: when something was last heard.
    """

    awaited: set[int]
    until: float
    then: Callable[[], None]
    texts: dict[int, bytes] = field(default_factory=dict)
    whys: dict[int, str] = field(default_factory=dict)
    last: float = 0.0

    def take(self, event: Stacks) -> None:
        self.awaited.discard(event.rank)
        self.last = time.monotonic()
        if event.why:
            self.whys[event.rank] = event.why
        else:
            self.texts[event.rank] = self.texts.get(event.rank, b"") + event.text

    def ends_at(self) -> float:
        return self.until if self.awaited else min(self.until, self.last + (_QUIET_S if self.texts else 0.0))

    def places(self, ranks: Sequence[int]) -> dict[str, list[int]]:
        places: dict[str, list[int]] = {}
        for rank in ranks:
            if place := stacks.main_place(self.texts.get(rank, b"").decode(errors="replace")):
                places.setdefault(place, []).append(rank)
        return places


class Supervisor:
    """Sees one job through.

    Args:
        agent: its ranks, started.
        screen: where their output goes.
        grace_s: time between the signal that asks ranks to end and the one that makes them.
        voice: says what becomes of the job.
        hosts: the host of each rank, where there are several.
        idle_s: how long ranks may write nothing before the job is stopped; None for ever.
        signals: those that are passed on and stop nothing.
        until: when the job is stopped if it still runs (``time.monotonic``); None for never.
        tells: says on the screen how the job failed.
        master: the rank that all others work for: they may die one by one, and end with it. -1: that is the caller,
            who says when it is over (``kill``). None: the ranks are all alike.
        control: handles the keys of a terminal.

    Attributes:
        ended: the status of each rank that has ended, as in ``Exited``, or why its host was lost; its last process'.
        begun: how often each rank has been started again.
        results: what ranks that ran a function returned, pickled.
        late: once it has run: it was ended because it took too long.
        caught: the last signal that this process itself got; None if it got none.
        failed: once it has run: a rank failed or hung, or a host was lost; nobody asked for the end.
        joined: once it has run: it was ended so that a host that came can take part.
        last_words: once it has run: how it ended, as it was told.
    """

    def __init__(
        self,
        agent: Agent | Fleet,
        screen: Screen,
        grace_s: float,
        voice: Voice,
        hosts: Sequence[str] = (),
        *,
        idle_s: float | None = None,
        signals: Sequence[int] = (),
        until: float | None = None,
        tells: bool = True,
        master: int | None = None,
        control: JobControl | None = None,
    ) -> None:
        self.ended: dict[int, int | str] = {}
        self.begun: dict[int, int] = {}
        self.results: dict[int, bytearray] = {}
        self._master = master
        self._control = control
        self._size = screen.size()
        self._wanted: deque[Again] = deque()
        self.late = False
        self.caught: int | None = None
        self._until = until
        self._tells = tells
        self.failed = False
        self.joined = False
        self.last_words = b""
        self._hosts = hosts
        self._agent = agent
        self._screen = screen
        self._grace_s = grace_s
        self._voice = voice.through(screen.note)
        self._blame = Blame()
        self._cause: Failure | None = None
        self._signalled: int | None = None
        self._kill_at: float | None = None  # set once the job is being stopped
        self._stopped_at = 0.0
        self._killed_at: float | None = None
        self._tails: dict[int, tuple[bytes, ...]] = {}  # of ranks that are shown elsewhere
        self._received: deque[int] = deque()
        self._output_lost = False
        self._asked = False  # to end, by a signal
        self._left: list[int] = []  # who ended well while all was well
        self._linger_at: float | None = None
        self._signals = signals
        self._hint_at: float | None = None
        self._idle_s = idle_s
        self._idle_at: float | None = None
        self._idled = False
        self._dump: _Dump | None = None
        self._dumped: _Dump | None = None
        self._unasked: list[int] = []  # who was ended by a signal when the job was stopped, and so said nothing

    @property
    def cause(self) -> Failure | None:
        """Once it has run: the first failure; None if there was none."""
        return self._cause

    def run(self, mask: Set[int]) -> int:
        """Runs the job to its end.

        Args:
            mask: the signal mask to restore once the handlers stand.

        Returns:
            The exit code of the command.
        """
        numbers = (*FORWARDED, *self._signals, signal.SIGWINCH, *(SIGNALS if self._control is not None else ()))
        with handled(numbers, self._receive, self._agent.wake, mask):
            if self._screen.logs.temporary is not None:
                self._voice.remark(f"log files are in {self._screen.logs.temporary}")
            self._voice.tell(f"{rank_list(self._agent.running)} started")
            self._stay_awake()
            while (self._agent.running or (self._master == -1 and self._kill_at is None)) and not self._is_over():
                self._round(self._agent.poll(self._timeout_s()))
            until = time.monotonic() + _STRAGGLERS_S
            while self._agent.heard and (left := until - time.monotonic()) > 0:
                self._round(self._agent.poll(left))
            self._round(self._agent.finish())
            for rank in self._screen.ranks:
                self._screen.end(rank)
            self._screen.settle()
            code = self._last_words()
            self._write()
            self._drain()
        return code or self._own_code()

    @property
    def places(self) -> dict[str, list[int]]:
        """Where ranks were when a signal stopped them."""
        places = self._dumped.places(self._unasked) if self._dumped is not None else {}
        for failure in self._failures():
            if failure.report is not None and failure.report.interrupted and failure.report.where:
                places.setdefault(failure.report.where, []).append(failure.rank)
        return places

    @property
    def signalled(self) -> int | None:
        """The signal that ended the job; None if none did."""
        return self._signalled

    def again(self, wanted: Again) -> None:
        """Starts a worker again. May be called in any thread."""
        self._wanted.append(wanted)
        os.write(self._agent.wake, b"!")

    def kill(self) -> None:
        """Ends the job at once. May be called in any thread."""
        self._received.append(signal.SIGKILL)
        os.write(self._agent.wake, b"!")

    def _receive(self, number: int) -> None:
        self._received.append(number)
        if number in FORWARDED:
            self.caught = number

    def _is_over(self) -> bool:
        """Whether nobody is waited for any more."""
        return self._killed_at is not None and time.monotonic() >= self._killed_at + _KILLED_S

    def _timeout_s(self) -> float | None:
        times = [self._screen.due(), self._dump.ends_at() if self._dump is not None else None]
        if self._kill_at is None:
            times += [self._blame.settles_at(), self._linger_at, self._idle_at, self._until]
        else:
            times += [self._kill_at if self._killed_at is None else self._killed_at + _KILLED_S, self._hint_at]
        due = [at for at in times if at is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _round(self, events: list[Event]) -> None:
        for event in events:
            self._take(event)
        while self._wanted:
            self._take(self._wanted.popleft())
        now = time.monotonic()
        settles_at = self._blame.settles_at()
        if self._kill_at is None and settles_at is not None and now >= settles_at:
            self._cause = self._blame.cause()
            self._stop(signal.SIGTERM, [rank for rank in self._agent.running if rank != self._cause.rank])
        if self._kill_at is None and self._until is not None and now >= self._until and self._agent.running:
            self.late = True
            self._take_signal(signal.SIGINT)  # python ranks tell where it met them
        if self._control is not None and self._control.borrower is not None and self._screen.size() != self._size:
            self._take_signal(signal.SIGWINCH)  # which the kernel sends to the borrower only
        while self._received:  # after the failures: one that came before is the cause
            self._take_signal(self._received.popleft())
        if self._dump is not None and now >= self._dump.ends_at():
            self._dumped, self._dump = self._dump, None
            self._dumped.then()
        if self._kill_at is None and self._dump is None and self._idle_at is not None and now >= self._idle_at:
            self._idle_at = None
            self._ask(_IDLE_DUMP_S, self._stop_idle)
        if self._kill_at is None and self._linger_at is not None and now >= self._linger_at:
            self._linger_at = None
            if self._master is None:
                self._say_who_lingers()
            elif self._agent.running:
                self._stop(signal.SIGTERM, self._agent.running)
        if self._hint_at is not None and now >= self._hint_at:
            self._hint_at = None
            if (running := self._agent.running) and self._killed_at is None:
                who = rank_list(running)
                self._voice.remark(f"waiting up to {self._grace_s:g} s for {who} (--grace); Ctrl-C again kills")
        if self._kill_at is not None and now >= self._kill_at and self._killed_at is None and self._agent.running:
            self._kill(f"did not end within {self._grace_s:g} s")
        self._write()

    def _take(self, event: Event) -> None:
        if isinstance(event, Output):
            if event.data:  # empty: it was shown elsewhere
                self._screen.take(event)
            self._stay_awake()
        elif isinstance(event, Stacks):
            if (dump := self._dump or self._dumped) is not None:  # late is better than never
                dump.take(event)
        elif isinstance(event, Failed):
            self._screen.log(event.rank, event.report.text)
            if self._may_die(event.rank):
                lines = event.report.text.rstrip("\n").split("\n") if event.report.text else []
                self._screen.say([event.rank], [line.encode() for line in lines])
                return
            failed = Failure(event.rank, event.pid, event.report.code, event.report.at, event.report)
            self._blame.add(self._placed(failed))
            if event.report.interrupted and self._has_keys(event.rank):
                self._interrupt([event.rank])
        elif isinstance(event, Exited):
            self._take_exit(event)
        elif isinstance(event, Lost):
            for rank in event.ranks:
                self._screen.end(rank)
            if self._dump is not None:
                self._dump.awaited.difference_update(event.ranks)
            self.ended |= dict.fromkeys(event.ranks, event.why)
            if all(map(self._may_die, event.ranks)):
                self._voice.say(event.why)
            elif self._kill_at is None:
                lost = Failure(event.ranks[0], 0, _LOST_CODE, time.monotonic(), host=event.host, lost=event.why)
                self._blame.add(lost)
            elif self._killed_at is not None:
                self._voice.say(event.why)
        elif isinstance(event, Noted):
            self._screen.note(event.host.encode() + b": " + event.text)
        elif isinstance(event, Again):
            if self._may_die(event.rank) and self._kill_at is None:
                self._agent.again(event)
        elif isinstance(event, Begun):
            self.ended.pop(event.rank, None)
            self._voice.tell(f"rank {event.rank} started again")
            self.begun[event.rank] = self.begun.get(event.rank, 0) + 1
        elif isinstance(event, Asked):
            self._received.append(event.signal)
        elif isinstance(event, Came):
            self._take_came(event)
        else:
            self.results.setdefault(event.rank, bytearray()).extend(event.piece)

    def _has_keys(self, rank: int) -> bool:
        """Whether Ctrl-C is a rank's, and not ours, as long as the job goes on."""
        return self._kill_at is None and self._control is not None and self._control.borrower == rank

    def _placed(self, failure: Failure) -> Failure:
        return replace(failure, host=self._hosts[failure.rank]) if self._hosts else failure

    def _take_came(self, event: Came) -> None:
        if self._kill_at is None:
            self.joined = True
            self._voice.say(f"{event.host} has come; the ranks start again")
            self._stop(signal.SIGTERM, self._agent.running)

    def _may_die(self, rank: int) -> bool:
        """Whether the others go on without this rank."""
        return self._master is not None and rank != self._master

    def _take_exit(self, event: Exited) -> None:
        self._screen.end(event.rank)
        self.ended[event.rank] = event.status
        self._tails[event.rank] = event.tail
        failure = self._placed(Failure(event.rank, event.pid, event.status, time.monotonic()))
        self._voice.tell(str(failure))
        if self._dump is not None:
            self._dump.awaited.discard(event.rank)
        if event.status == -signal.SIGINT and self._has_keys(event.rank):
            self._interrupt([event.rank])
        if self._control is not None and self._control.borrower == event.rank:
            self._control.reclaim(restore=event.status < 0)
        if self._kill_at is not None:
            told = self._blame.failures.get(event.rank)
            silent = told is None or told.report is None or not told.report.where
            if self._signalled is not None and silent and event.status in (-self._signalled, -signal.SIGKILL):
                self._unasked.append(event.rank)
            return
        if self._may_die(event.rank):
            if event.status:
                self._voice.remark(f"{failure}; the others go on")
            return
        if event.status != 0:
            self._blame.add(failure)
            return
        if not self._left:
            self._linger_at = time.monotonic() + (_LINGER_S if self._master is None else _WORKERS_S)
        self._left.append(event.rank)

    def _say_who_lingers(self) -> None:
        """A rank that never joins leaves the others waiting for it; nobody else would say so for long."""
        if running := self._agent.running:
            verb = "is" if len(running) == 1 else "are"
            left = f"{rank_list(sorted(self._left))} exited with code 0 before the others"
            self._voice.remark(f"{left}; {rank_list(running)} {verb} still running")

    def _take_signal(self, number: int) -> None:
        if number == signal.SIGWINCH:
            self._screen.resized()
            self._size = self._screen.size()
            self._agent.resize(*self._screen.size())
            return
        if number == signal.SIGKILL:
            self._kill_at = self._stopped_at = time.monotonic()
            self._kill("")
            return
        if self._control is not None and number in SIGNALS:
            if why := self._control.take(number):
                self._voice.say(why)
                self._output_lost = True
                self._stop(signal.SIGTERM, self._agent.running)
            self._stay_awake()
            return
        if number in self._signals:
            self._voice.tell(f"{signal.Signals(number).name} is passed on to {rank_list(self._agent.running)}")
            self._agent.signal(number, self._agent.running, alone=True)
            return
        self._asked = True
        if self._kill_at is None:
            if number == signal.SIGINT:
                self._interrupt()
            else:
                self._signalled = number
                self._stopped_at = time.monotonic()
                self._ask(_DUMP_S, lambda: self._stop(number, self._agent.running))
                self._kill_at = self._stopped_at + _DUMP_S + self._grace_s
        elif number == signal.SIGINT:  # asked again; batch systems and closed terminals repeat the others themselves
            self._kill("")

    def _interrupt(self, spared: Sequence[int] = ()) -> None:
        """Stops the job by SIGINT: python says itself where it was, if it still runs python."""
        self._signalled = signal.SIGINT
        self._stop(signal.SIGINT, [rank for rank in self._agent.running if rank not in spared])
        self._ask(_DUMP_S, lambda: None)
        self._hint_at = time.monotonic() + _HINT_S

    def _stay_awake(self) -> None:
        if self._idle_s is not None and self._dump is None and not self._idled:
            self._idle_at = time.monotonic() + self._idle_s

    def _ask(self, wait_s: float, then: Callable[[], None]) -> None:
        """Asks all ranks where they are, before something else is done to them."""
        running = self._agent.running
        self._dump = _Dump(set(running), time.monotonic() + wait_s, then, last=time.monotonic())
        self._agent.dump(running)

    def _stop_idle(self) -> None:
        assert self._dumped is not None
        dump = self._dumped
        self._idled = True
        idle = f"no rank has written anything for {self._idle_s:g} s"
        self._voice.say(f"{idle} (--idle-timeout); this is where they are:")
        for ranks, lines in stacks.render({r: text.decode(errors="replace") for r, text in dump.texts.items()}):
            self._screen.say(ranks, [line.encode() for line in lines])
        silent = dict.fromkeys(sorted(dump.awaited), "did not say where it is (blocked signals, or the kernel)")
        for rank, why in (dump.whys | silent).items():
            self._voice.say(f"{rank_list([rank])} {why}")
        self._stop(signal.SIGTERM, self._agent.running)

    def _stop(self, number: int, ranks: list[int]) -> None:
        if self._control is not None:
            self._control.reclaim()  # the keys are ours again: Ctrl-C kills
        self._dump = None
        self._stopped_at = time.monotonic()
        self._kill_at = self._stopped_at + self._grace_s
        if ranks:
            self._voice.tell(f"{signal.Signals(number).name} to {rank_list(ranks)}")
        self._agent.signal(number, ranks)
        self._agent.signal(signal.SIGCONT, ranks)  # a stopped process would not see the signal

    def _kill(self, why: str) -> None:
        self._dump = None
        if self._killed_at is None:
            self._killed_at = time.monotonic()
        running = self._agent.running
        if running and why:
            verb = "was" if len(running) == 1 else "were"
            self._voice.remark(f"{rank_list(running)} {why} and {verb} killed")
        self._agent.signal(signal.SIGKILL, running)

    def _write(self) -> None:
        while lost := self._screen.flush():
            for name, error in lost:
                gone = isinstance(error, BrokenPipeError)  # what SIGPIPE would tell, which python ignores
                if not gone:
                    self._output_lost = True
                    self._voice.say(f"cannot write to {name}: {error.strerror}")
                if self._kill_at is None:
                    self._signalled = signal.SIGPIPE if gone else None
                    self._stop(signal.SIGTERM, self._agent.running)
        self._agent.heed(self._screen.blocked)
        self._agent.listen(self._screen.backlog < _BACKLOG)
        if self._screen.backlog >= _BACKLOG:  # ranks cannot write
            self._stay_awake()

    def _drain(self) -> None:
        """Waits for whoever reads our output; after a failure only for the grace, after a signal hardly at all."""
        self._asked = False
        until = time.monotonic() + _DRAIN_S
        if self._kill_at is not None and self._signalled is None:
            until = max(until, self._kill_at)
        while self._screen.backlog and not self._asked:
            left = None if self._kill_at is None else until - time.monotonic()
            if left is not None and left <= 0:
                break
            self._round(self._agent.poll(left))

    def _failures(self) -> list[Failure]:
        return sorted(self._blame.failures.values(), key=lambda failure: failure.rank)

    def _last_words(self) -> int:
        failures = self._failures()
        if self._signalled is not None:
            if self._signalled != signal.SIGPIPE and self._tells:
                name = signal.Signals(self._signalled).name
                places = self._dumped.places(self._unasked) if self._dumped is not None else {}
                self._screen.note(describe_interrupt(name, failures, self._voice, places))
            return self._own_code()
        if self.joined:  # what ranks said when they were asked to end
            return 0
        if self._idled:
            return self._say_idled()
        if self._cause is None and failures and not self._output_lost:  # echoes, and all were gone before they settled
            self._cause = self._blame.cause()
            self._stopped_at = time.monotonic()
        if self._cause is None:
            return self._own_code()
        before = [failure for failure in failures if failure.at < self._stopped_at]
        tail = self._screen.tail(self._cause.rank) or self._tails.get(self._cause.rank, ())
        self.failed = True
        self.last_words = describe_failure(self._cause, before, tail, self._voice, sorted(self._left))
        if self._tells:
            self._screen.note(self.last_words)
        return self._cause.exit_code

    def _say_idled(self) -> int:
        """After all that ranks said when they were stopped, once more and in short."""
        assert self._dumped is not None
        self.failed = True
        lines = [self._voice.line(f"stopped, as no rank had written anything for {self._idle_s:g} s")]
        for place, ranks in self._dumped.places(sorted(self._dumped.texts)).items():
            lines.append(self._voice.line(f"{rank_list(ranks)}: at {place}"))
        self.last_words = "\n".join(lines).encode()
        self._screen.note(self.last_words)
        return _IDLE_CODE

    def _own_code(self) -> int:
        """The exit code where no rank is to blame."""
        if self._signalled is not None:
            return 128 + self._signalled
        return 1 if self._output_lost else 0
