"""The thread that detects a long wait of this rank, collects the states of all ranks, and reports.

Once per second it reads counters of this process, which costs microseconds. Shortly before a wait reaches the limit, it
requests the state of all ranks. Usually several ranks reach the limit at the same moment; the lowest of them reports.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from allranks._base.errors import AllranksError
from allranks._base.exit_codes import IDLE
from allranks._base.forks import forks
from allranks._base.threads import Daemon
from allranks._cluster.network import machine, published_addresses
from allranks._trace.inspection import next_limit
from allranks._trace.kernel import kernel_wait, process_state
from allranks._trace.notes import Notes
from allranks._trace.offered_stacks import find_ranks, offer_stacks, stacks_of
from allranks._trace.stacks import main_place, parse
from allranks._trace.state import CallState, GroupState, RankState
from allranks._watch.arrivals import ArrivalStats
from allranks._watch.evidence import Evidence
from allranks._watch.exchange import Announce, Collect, Compare, InspectProcess, Peer, RankAnswer, Request, Server, ask
from allranks._watch.report import diagnose_answers, report_lines, write_report

__all__ = ["Watcher"]

_LOOK_S = 1.0  # between two checks
_LOOK_OFTEN_S = 0.1  # between two checks of a wait that is about to reach the limit
_READERS_S = 1.0  # at the exit of rank 0, for the other ranks to read the addresses
_EARLY_S = 2.0  # how long before the limit the states are collected, so that the report comes in time
_ANSWER_SHARE = 0.75  # of that time, for a rank to answer: about 50 ms, or 1 s if all CPUs are busy
_STAGGER_S = 0.05  # by how much each rank of a group collects later than the one before it
_STAGGER_MOST_S = 0.3
_SAME_S = 0.1  # two calls that began within this time are the same call
_NATIVE_S = 10.0  # for py-spy to read the native stacks of one process: it reads the symbols of torch first
_MOST_NATIVE = 4  # processes
_FIRST_S = 0.1  # until the first check, and until the second attempt to read the addresses of the ranks
_PREFIX = "allranks/watch"
_TOKEN_BYTES = 16
_FIRST_SAMPLE_S = 15.0  # until the ranks' calls are first compared; then after twice this time, and so on
_SAMPLE_S = 60.0  # the longest time between two comparisons: one costs 60 ms in each rank, 0.1 % of the time
_NOT_JOINED = "has not called init_process_group"


class Watcher:
    """The watcher of one rank.

    Args:
        rank: World rank.
        world_size: Number of ranks.
        store: torch's store of the default group, or a copy with its own connection, which this object uses alone.
        limit_s: Seconds of waiting after which a report is made.
        abort_s: Seconds of waiting after which all ranks exit; 0: never.
        folder: Folder of the files with reports; "" for the folder of temporary files.
        number: How many watchers this process had before: a program may create its default group again.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Any,
        limit_s: float,
        abort_s: float = 0.0,
        folder: str = "",
        number: int = 0,
    ) -> None:
        self._rank = rank
        self._size = world_size
        self._store = store
        self._own_store = store if rank == 0 else None  # kept, see `_leave_store`
        self._limit_s = limit_s
        self._early_s = min(_EARLY_S, limit_s / 2)
        self._answer_s = self._early_s * _ANSWER_SHARE
        self._abort_s = abort_s
        self._folder = folder
        self._number = number
        self._retry_s = _FIRST_S
        self.evidence = Evidence(rank, world_size)
        self._machine = machine()
        self._peers: dict[int, Peer] = {}
        self._token = b""
        self._server: Server | None = None
        self._began = self._reported_s = self._look_at = 0.0
        self._reported: set[tuple[object, ...]] = set()
        self._collecting = False
        self._stragglers = ArrivalStats()
        self._notes = Notes()
        self._sample_at = time.monotonic() + _FIRST_SAMPLE_S
        self._sample_s = _FIRST_SAMPLE_S
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._forks = forks()
        self._thread = Daemon(target=self._run, name="allranks-watch")

    def start(self) -> None:
        """Start the thread."""
        offer_stacks()
        self._thread.start()
        # A thread that is in torch's code when the interpreter ends would end the process with SIGABRT.
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the thread: the process ends, or creates another default group."""
        atexit.unregister(self.stop)
        # In a forked child, the thread does not exist, locks stay as they were, and the connection is the parent's.
        if self._forks != forks():
            return
        self._stop.set()
        self._thread.join(_EARLY_S)
        self._leave_store()
        for line in self._late_ranks():
            self._say(f"allranks watch: {line}\n")
        if self._server is not None:
            self._server.close()

    def _leave_store(self) -> None:
        """Finish with the store. Rank 0, whose process usually serves it, waits for the other ranks.

        A short program may exit while its ranks still read the addresses. Without the server, torch would print a
        warning with a stack on each of them.
        """
        try:
            if self._rank:
                self._note_read()
            deadline = time.monotonic() + _READERS_S
            while self._own_store is not None and time.monotonic() < deadline:
                if self._own_store.add(self._key("left"), 0) >= self._size - 1:
                    return
                time.sleep(_READERS_S / 200)
        except RuntimeError:  # the process that serves the store has exited
            pass

    def _note_read(self) -> None:
        """Notify rank 0 that this rank makes no more requests to the store."""
        with self._lock:
            store, self._store = self._store, None
        if store is not None and self._rank:
            store.add(self._key("left"), 1)

    def _run(self) -> None:
        try:
            self._publish()
        except (OSError, RuntimeError, AllranksError) as error:  # torch's errors of stores are RuntimeErrors
            sys.stderr.write(f"allranks watch: rank {self._rank}: waits are not reported: {error}\n")
            return
        pause_s = _FIRST_S
        while not self._stop.wait(pause_s):
            self._read_peers()
            pause_s = self._look()
            if self._rank == 0 and time.monotonic() > self._sample_at and self._store is None:
                self._compare()
            if self._store is not None:
                self._retry_s = min(2 * self._retry_s, _LOOK_S)
                pause_s = min(pause_s, self._retry_s)

    def _publish(self) -> None:
        """Publish the address of this rank in the store, and agree on the token."""
        # The first value stays. torch's stores return the stored value.
        self._token = bytes(self._store.compare_set(self._key("token"), "", os.urandom(_TOKEN_BYTES).hex()))
        # Between the ranks of one host, a port is neither needed nor opened.
        one_host = os.environ.get("LOCAL_WORLD_SIZE") == str(self._size)
        addresses = () if one_host else published_addresses()
        name = f"allranks-watch-{os.getpid()}-{os.urandom(8).hex()}"
        self._server = Server(name, addresses, self._token, self._respond)
        port = self._server.port
        me = Peer(self._rank, os.getpid(), _namespace(), socket.gethostname(), self._machine, name, addresses, port)
        self._peers[self._rank] = me
        self._store.set(self._key(str(self._rank)), msgspec.json.encode(me).decode())
        self._store.add(self._key("count"), 1)

    def _read_peers(self, some: bool = False) -> None:
        """Read the addresses that the ranks have published, once all ranks have.

        Args:
            some: Read those that exist, although ranks are missing. This costs a request for each rank.
        """
        store = self._store  # `stop` may set it to None in another thread
        if store is None:
            return
        try:
            if some:
                ranks = [r for r in range(self._size) if r not in self._peers and store.check([self._key(str(r))])]
            elif store.add(self._key("count"), 0) == self._size:
                ranks = list(range(self._size))
            else:
                return
            for data in store.multi_get([self._key(str(rank)) for rank in ranks]):
                peer = msgspec.json.decode(bytes(data), type=Peer)
                self._peers[peer.rank] = peer
            if len(self._peers) == self._size:
                self._note_read()
        except RuntimeError:
            # The process that serves the store has exited. The known addresses remain. Another attempt would print
            # torch's warnings.
            self._store = None

    def _key(self, name: str) -> str:
        return f"{_PREFIX}/{self._number}/{name}"

    def _look(self) -> float:
        """Check once. Return the seconds until the next check."""
        now = time.monotonic()
        if now < self._look_at:
            return min(_LOOK_S, self._look_at - now)
        # The first test costs microseconds, the second one milliseconds.
        first_s = self._limit_s - self._early_s
        if self.evidence.longest_wait_s() < first_s:
            return _LOOK_S
        _, call = self.evidence.inspect()
        if call is None:
            self._look_at = now + first_s / 2
            return _LOOK_S
        self._note_wait(call)
        limit_s = next_limit(self._limit_s, self._reported_s)
        abort = 0 < self._abort_s <= limit_s
        limit_s = self._abort_s if abort else limit_s
        left_s = limit_s - self._early_s + min(self._rank * _STAGGER_S, _STAGGER_MOST_S) - call.seconds
        if left_s > 0:
            # A wait that begins now is found in time, too.
            self._look_at = now + min(left_s, first_s)
            return min(left_s, _LOOK_S)
        self._reported_s = limit_s
        self._report(call, limit_s, abort)
        return _LOOK_OFTEN_S

    def _compare(self) -> None:
        """Compare when the ranks began their collectives."""
        others = [peer for rank, peer in self._peers.items() if rank != self._rank]
        answers, _ = ask(others, Compare(), self._token, self._machine, self._answer_s)
        answers[self._rank] = self.evidence.arrivals()
        found = {rank: answer.arrivals for rank, answer in answers.items() if answer.arrivals is not None}
        self._stragglers.add(found, {rank: peer.machine for rank, peer in self._peers.items()})
        with suppress(OSError):  # `allranks top` then shows less
            self._notes.write(self._late_ranks())
        self._sample_s = min(2 * self._sample_s, _SAMPLE_S)
        self._sample_at = time.monotonic() + self._sample_s

    def _late_ranks(self) -> list[str]:
        return self._stragglers.warnings({peer.rank: peer.host for peer in self._peers.values()})

    def _note_wait(self, call: CallState) -> None:
        """Forget which limit was reported if this rank waits in another call than at the last check."""
        # The start of a call is computed from two clocks, so it differs by microseconds.
        if abs(call.began - self._began) > _SAME_S:
            self._began, self._reported_s = call.began, 0.0

    def _report(self, call: CallState, limit_s: float, abort: bool) -> None:
        """Collect the states of all ranks. Report why this rank waits, if it still does at the limit."""
        with self._lock:
            self._collecting = True
        try:
            answers = self._collect(call, limit_s)
            collected = time.monotonic()
            # If the late rank was only slow, this rank proceeds before the limit.
            while answers is not None:
                mine, now_waiting = self.evidence.inspect()
                if now_waiting is None or abs(now_waiting.began - call.began) > _SAME_S:
                    return
                if now_waiting.seconds >= limit_s:
                    answers[self._rank] = mine
                    self._print(answers, time.monotonic() - collected, limit_s, abort)
                    return
                if self._stop.wait(min(limit_s - now_waiting.seconds, _LOOK_OFTEN_S)):
                    return
        finally:
            with self._lock:
                self._collecting = False

    def _collect(self, call: CallState, limit_s: float) -> dict[int, RankAnswer] | None:
        """Return the state of each other rank; None if a lower rank collects them, too."""
        self._read_peers(some=True)
        others = [peer for rank, peer in self._peers.items() if rank != self._rank]
        answers, problems = ask(others, Collect(self._rank, limit_s), self._token, self._machine, self._answer_s)
        if any(answer.collecting and rank < self._rank for rank, answer in answers.items()):
            return None
        for rank, problem in problems.items():
            answers[rank] = self._inspect(self._peers[rank], problem, answers)
        if missing := set(range(self._size)) - set(self._peers):
            pids = find_ranks()
            answers |= {rank: self._search(rank, pids.get(rank, 0), call.group) for rank in missing}
        return answers

    def _search(self, rank: int, pid: int, creation: str) -> RankAnswer:
        """Return the state of a rank that has not created its default group.

        Args:
            rank: The rank.
            pid: Its process, if it is on this host; else 0.
            creation: The name under which the creation of the default group is reported.
        """
        if not pid:
            state = RankState(rank, 0, "not visible from here", time.monotonic())
            return RankAnswer(state, problem=f"{_NOT_JOINED} or is not started")
        answer = inspect_process(Peer(rank, pid, _namespace(), "", self._machine, ""), _NOT_JOINED)
        if not any(
            frame.function == "init_process_group" for _, frames in parse(answer.stacks)[:1] for frame in frames
        ):
            return answer
        # torch's store in rank 0 waits for all ranks before it creates the group.
        group = GroupState(creation, tuple(range(self._size)), "", 1, True)
        return msgspec.structs.replace(answer, state=msgspec.structs.replace(answer.state, groups=(group,)), problem="")

    def _inspect(self, peer: Peer, problem: str, answers: Mapping[int, RankAnswer]) -> RankAnswer:
        """Return the state of a rank that does not answer, as far as its host knows it."""
        if peer.machine == self._machine:
            return inspect_process(peer, _explain(problem))
        neighbours = [each for each in self._peers.values() if each.machine == peer.machine and each.rank in answers]
        found: dict[int, RankAnswer] = {}
        if neighbours:
            found, _ = ask(
                neighbours[:1], InspectProcess(peer.rank, peer.pid), self._token, self._machine, 2 * self._answer_s
            )
        if found:
            return msgspec.structs.replace(next(iter(found.values())), problem=_explain(problem))
        process = "gone" if problem == "has exited" else "not visible from here"
        if problem == "does not answer":
            problem = "does not answer, because it is stopped or a thread holds the GIL"
        return RankAnswer(RankState(peer.rank, peer.pid, process, time.monotonic()), problem=problem)

    def _respond(self, request: Request) -> RankAnswer | None:
        if isinstance(request, Collect):
            with self._lock:
                collecting = self._collecting
            answer, call = self.evidence.inspect(collecting)
            if not collecting and call is not None:
                # The report of the collector includes the wait of this rank.
                self._note_wait(call)
                self._reported_s = max(self._reported_s, request.limit_s)
            return answer
        if isinstance(request, Compare):
            return self.evidence.arrivals()
        if isinstance(request, InspectProcess):
            peer = self._peers.get(request.rank)
            return None if peer is None else inspect_process(peer, "")
        sys.stderr.write(request.text)
        sys.stderr.flush()
        os._exit(IDLE)

    def _print(self, answers: Mapping[int, RankAnswer], age_s: float, limit_s: float, abort: bool) -> None:
        found = diagnose_answers(answers, self._rank, age_s)
        lines = report_lines(found, answers, self._peers, self._machine)
        if abort and not lines:
            lines = [f"rank {self._rank} has waited {limit_s:g} s for ranks that are not known"]
        key = (*found.key(), limit_s)
        if not lines or key in self._reported:
            return
        self._reported.add(key)
        if abort:
            lines.append(f"all ranks exit, because a wait has lasted {self._abort_s:g} s (--abort-after)")
        text = "".join(f"allranks watch: {line}\n" for line in lines)
        self._say(text)
        native = {
            rank: native_stacks(peer.pid)
            for rank in found.late[:_MOST_NATIVE]
            if (peer := self._peers.get(rank)) is not None and peer.machine == self._machine
        }
        try:
            path = write_report(lines, answers, native, self._rank, self._folder)
            self._say(f"allranks watch: calls and stacks of all ranks: {path}\n")
        except OSError as error:
            self._say(f"allranks watch: calls and stacks are not written into a file: {error}\n")
        if abort:
            others = [peer for rank, peer in self._peers.items() if rank != self._rank]
            ask(others, Announce(text), self._token, self._machine, self._answer_s)
            os._exit(IDLE)

    def _say(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def native_stacks(pid: int) -> str:
    """Return the stacks of Python and native code of a process of this host; "" without py-spy or the permission."""
    command = shutil.which("py-spy")
    if command is None:
        return ""
    try:
        done = subprocess.run(
            [command, "dump", "--native", "--pid", str(pid)],
            capture_output=True, text=True, errors="replace", timeout=_NATIVE_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def inspect_process(peer: Peer, problem: str) -> RankAnswer:
    """Return the state of another process of this host from the kernel, with its stacks if it offers them."""
    if peer.namespace != _namespace():
        return RankAnswer(RankState(peer.rank, peer.pid, "not visible from here", time.monotonic()), problem=problem)
    process = process_state(peer.pid)
    stacks = "" if process in ("gone", "stopped") else stacks_of(peer.pid)
    state = RankState(peer.rank, peer.pid, process, time.monotonic(), kernel=kernel_wait(peer.pid))
    return RankAnswer(state, main_place(stacks), stacks, problem)


def _explain(problem: str) -> str:
    """Return the problem of a process that this host can inspect."""
    return "does not answer, because a thread holds the GIL" if problem == "does not answer" else problem


def _namespace() -> str:
    return os.readlink("/proc/self/ns/pid")
