"""Simulation of the rendezvous of whole jobs: real state machines, a simulated clock and unreliable links.

The seed determines every event: start times and hosts, slow or cut links, deaths and restarts, duplicate ranks, wrong
world sizes, server restarts and unauthenticated clients. The links carry the real bytes (handshake, frames, requests),
split at random positions. ``Job.run`` then compares the result of every process with the simulated events.
"""

from __future__ import annotations

import heapq
import itertools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from allranks._base.errors import AllranksError, ConfigError, JoinError, SecretError
from allranks._net.frames import FrameDecoder, WireError, pack_frame
from allranks._net.handshake import (
    HANDSHAKE_FRAME,
    HANDSHAKE_S,
    NONCE,
    PROVED,
    ServerHandshake,
)
from allranks._rendezvous.join_protocol import (
    GRACE_S,
    TABLE,
    Answer,
    Connect,
    JoinProtocol,
    Leave,
    Lost,
    Member,
    Notify,
    Pause,
    Steps,
    unpack_members,
)
from allranks._store.table import KeyTable
from allranks._store.wire import FRAME_LIMIT, CompareSet, FoundValues, WaitForKeys, decode_reply, decode_request, encode
from support.handshakes import first_frame, prove, server_side

SECRET, ANOTHER = b"the secret of this job", b"the secret of another job"
LINGER_S = 3.0
LATE_S = 1.0  # a rank must return or raise at most this long after its timeout
NEVER_S = 1e6
FAST_S = 0.02  # on a link with a shorter delay, the report of missing ranks arrives in time
SOON_S = 2.0  # a healthy rank registers this soon after it and the server have started


class Wrong(AssertionError):
    """A result of a process or server contradicts the simulated events."""


class Link:
    """Connection with a delay. Each direction preserves the order of the data."""

    def __init__(self, job: Job, number: int, delay_s: float, server: Server, owner: Dialer) -> None:
        self.job, self.number, self.delay_s, self.server, self.owner = job, number, delay_s, server, owner
        self.handshake: ServerHandshake | None = server_side(server.secret, job.rng.randbytes(NONCE))
        self.decoder = FrameDecoder(HANDSHAKE_FRAME)  # of the server's end
        self.lost = False  # data is dropped silently: neither end receives a reset
        self._arrivals = [0.0, 0.0]
        self._open = [True, True]  # the client's end, the server's end

    def send(self, to_server: bool, data: bytes | None) -> None:
        """Send data to the other end. ``None`` closes the sender's end."""
        if not self._open[not to_server]:
            return
        self._open[not to_server] = data is not None
        rng = self.job.rng
        pieces = [data]
        if data and len(data) > 1 and rng.random() < 0.15:
            cut = rng.randrange(1, len(data))
            pieces = [data[:cut], data[cut:]]
        for piece in pieces:
            at = self.job.now + self.delay_s * (1.0 + rng.random() * 0.5)
            at = self._arrivals[to_server] = max(at, self._arrivals[to_server])
            self.job.at(at, self._arrive, to_server, piece)

    def cut(self) -> None:
        """Reset the connection, as a device between the two ends would."""
        for to_server in (True, False):
            self.job.at(self.job.now + self.delay_s, self._arrive, to_server, None)

    def _arrive(self, to_server: bool, data: bytes | None) -> None:
        if self.lost or not self._open[to_server]:
            return
        if to_server:
            self.server.receive(self, data)
        else:
            if data is None:
                self._open[0] = False
            self.owner.receive(self, data)


class Server:
    """Equivalent of ``StoreServer`` without sockets."""

    def __init__(self, job: Job, secret: bytes) -> None:
        self.job, self.secret = job, secret
        self.table = KeyTable()
        self.links: dict[int, Link] = {}
        self.listens = True
        self.began = job.now
        self.closed = self.ended = float("inf")  # when it stopped listening, when it stopped serving
        self.claims: dict[tuple[str, int], tuple[float, int]] = {}  # (table, rank) to (time, pid) of the registration
        self.verdicts: dict[str, tuple[float, str, tuple[int, ...]]] = {}
        self._tick_at = float("inf")

    def accept(self, link: Link) -> None:
        self.links[link.number] = link
        self.job.at(self.job.now + HANDSHAKE_S, self._no_stranger, link)

    def receive(self, link: Link, data: bytes | None) -> None:
        if link.number not in self.links:
            return
        try:
            if data is None:
                raise WireError("closed")
            link.decoder.feed(data)
            while link.number in self.links and (frame := link.decoder.next()) is not None:
                if link.handshake is None:
                    self._serve(link, frame)
                elif (answer := link.handshake.step(frame)) is not None:
                    link.send(False, pack_frame(answer))
                else:
                    if link.owner.secret != self.secret:
                        raise Wrong("an unauthenticated client was admitted")
                    link.handshake = None
                    link.decoder.limit = FRAME_LIMIT
                    link.send(False, pack_frame(PROVED))
        except (WireError, ConfigError, msgspec.MsgspecError) as error:
            self.job.log("the server drops link %d: %s", link.number, error)
            self.drop(link)

    def drop(self, link: Link) -> None:
        if self.links.pop(link.number, None):
            self.table.remove_client(link.number)
            link.send(False, None)
            self._end_when_alone()

    def stop(self, linger_s: float) -> None:
        """Stop listening. The server ends when all clients have disconnected, or after ``linger_s``."""
        if self.listens:
            self.listens, self.closed = False, self.job.now
            self.job.at(self.job.now + linger_s, self.end)
            self._end_when_alone()

    def end(self, silent: bool = False) -> None:
        self.listens, self.closed = False, min(self.closed, self.job.now)
        self.ended = min(self.ended, self.job.now)
        for link in list(self.links.values()):
            link.lost |= silent
            self.drop(link)

    def _end_when_alone(self) -> None:
        if not self.listens and all(link.handshake for link in self.links.values()):
            self.ended = min(self.ended, self.job.now)

    def _no_stranger(self, link: Link) -> None:
        if link.handshake is not None:
            self.drop(link)

    def _serve(self, link: Link, frame: bytes) -> None:
        request = decode_request(frame)
        if self.table.is_waiting(link.number):
            raise Wrong("two requests are in progress simultaneously")
        due = self.table.handle(link.number, request, self.job.now)
        self.job.log("link %d asks %r", link.number, request)
        if isinstance(request, CompareSet) and due[0][1] == FoundValues([request.desired]):
            self._note(request)
        self._send(due)

    def _note(self, request: CompareSet) -> None:
        board, _, what = request.key.partition("join/")
        if what == "verdict":
            record = msgspec.msgpack.decode(request.desired)
            self.verdicts.setdefault(board, (self.job.now, record["error"], tuple(record["missing"])))
        elif what.startswith("member/"):
            record = msgspec.msgpack.decode(request.desired)
            self.claims.setdefault((board, int(what[7:])), (self.job.now, record["member"]["pid"]))

    def _send(self, due: list[tuple[object, object]]) -> None:
        for who, reply in due:
            link = self.links.get(who)  # type: ignore[call-overload]
            if link is not None:
                link.send(False, pack_frame(encode(reply)))
        deadline = self.table.next_deadline()
        if deadline is not None and deadline < self._tick_at:
            self._tick_at = deadline
            self.job.at(deadline, self._tick)

    def _tick(self) -> None:
        self._tick_at = float("inf")
        self._send(self.table.expire(self.job.now))


class Dialer:
    """Client that connects to the server."""

    secret = b"none"

    def receive(self, link: Link, data: bytes | None) -> None:
        """Receive data from the server. ``None`` means that the server closed the connection."""


class Stranger(Dialer):
    """Unauthenticated client: sends junk, text, half a handshake, a recorded handshake, or nothing."""

    def __init__(self, job: Job, at: float) -> None:
        self._job = job
        job.at(at, self._knock)

    def _knock(self) -> None:
        link = self._job.dial(self, 0.001)
        if link is not None:
            rng = self._job.rng
            hello = pack_frame(first_frame(rng.randbytes(NONCE)))
            said = [rng.randbytes(50), b"GET / HTTP/1.1\r\n\r\n", hello[: rng.randrange(40)], hello + hello, b""]
            link.send(True, said[rng.randrange(5)] or None)

    def receive(self, link: Link, data: bytes | None) -> None:
        if data and self._job.rng.random() < 0.5:
            link.send(True, data)  # reflects the data of the server


@dataclass(eq=False)
class Process(Dialer):
    """Process that joins once.

    Attributes:
        clean: no fault affects the process or its link, its rank is unique and its world size is right.
    """

    job: Job
    rank: int
    size: int
    pid: int
    host: str
    start: float
    timeout_s: float
    delay_s: float
    secret: bytes = SECRET
    die_at_step: int = 0
    die_at: float = 0.0
    silent_death: bool = False
    back_after: float | None = None
    cut_at: float = 0.0
    silent_cut: bool = False
    clean: bool = True
    dead: bool = False
    ended: float | None = None
    error: AllranksError | None = None
    members: tuple[Member, ...] = ()
    said: list[str] = field(default_factory=list)
    server: Server | None = None
    board: str = ""
    _steps_done: int = 0
    _turn: int = 0
    _link: Link | None = None
    _decoder: FrameDecoder = field(default_factory=lambda: FrameDecoder(HANDSHAKE_FRAME))
    _nonce: bytes = b""

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    def begin(self) -> None:
        job = self.job
        if job.served and self.rank == 0:
            if job.server is not None and job.now < job.server.ended:
                self._end(ConfigError("the port is taken"))
                return
            job.server = self.server = Server(job, self.secret)
            job.servers.append(self.server)
        if self.die_at:
            job.at(self.start + self.die_at, self.die)
        if self.cut_at:
            job.at(self.start + self.cut_at, self._cut)
        me = Member(self.rank, self.pid, self.host, self.host, self.size, (f"10.0.0.{self.host}",))
        self._joining = JoinProtocol(
            me, f"p{self.pid}", job.now, self.timeout_s, "the store", "Look.", fresh=job.served
        )
        self._machine = self._whole()
        self._perform(next(self._machine))

    def _whole(self) -> Steps[None]:
        self.board = yield from self._joining.steps()
        self.ended = self.job.now
        self.job.log("%s has met", self)
        _, answer = yield WaitForKeys([f"{self.board}/{TABLE}"], self.timeout_s, True)
        if isinstance(answer, FoundValues):
            self.members = unpack_members(answer.values[0] or b"")
        elif not isinstance(answer, Lost):
            raise Wrong(f"{self} has joined, but no table of members exists")

    def _resume(self, answer: Answer) -> None:
        self._turn += 1
        self._steps_done += 1
        if self._steps_done == self.die_at_step:
            self.die()
        if self.dead:
            return
        try:
            act = self._machine.send((self.job.now, answer))
        except StopIteration:
            self.job.at(self.job.now + self.job.rng.random() * 0.2, self._leave, LINGER_S)
        except AllranksError as error:
            self._end(error)
        else:
            self._perform(act)

    def _perform(self, act: object) -> None:
        job = self.job
        match act:
            case Connect():
                self._close()
                self._decoder = FrameDecoder(HANDSHAKE_FRAME)
                self._nonce = job.rng.randbytes(NONCE)
                self._link = job.dial(self, 1e-5 if self.server is not None else self.delay_s)
                if self._link is None:
                    job.at(job.now + self.delay_s, self._answered, self._turn, Lost("connection refused"))
                    return
                self._link.send(True, pack_frame(first_frame(self._nonce)))
                self._limit(HANDSHAKE_S)
            case Leave():
                self._close()
                self._resume(None)
            case Pause(seconds):
                job.at(job.now + max(seconds, 0.0), self._answered, self._turn, None)
            case Notify(line):
                job.log("%s prints %s", self, line)
                self.said.append(line)
                self._resume(None)
            case request:
                if self._link is None:
                    self._resume(Lost("closed"))
                    return
                self._link.send(True, pack_frame(encode(request)))
                self._limit(request.timeout_s + GRACE_S if isinstance(request, WaitForKeys) else self.timeout_s)

    def _limit(self, seconds: float) -> None:
        end = self.job.now + seconds
        if self.ended is None:
            end = min(end, self.start + self.timeout_s + GRACE_S)
        self.job.at(end, self._answered, self._turn, Lost("no answer"))

    def _answered(self, turn: int, answer: Answer) -> None:
        if turn == self._turn and not self.dead:
            if isinstance(answer, Lost):
                self._close()
            self._resume(answer)

    def receive(self, link: Link, data: bytes | None) -> None:
        if link is not self._link or self.dead:
            return
        if data is None:
            self._answered(self._turn, Lost("it closed the connection"))
            return
        self._decoder.feed(data)
        frame = self._decoder.next()
        if frame is None:
            return
        if self._decoder.limit == FRAME_LIMIT:
            self._resume(decode_reply(frame))
            return
        if frame == PROVED:
            self._decoder.limit = FRAME_LIMIT
            self._resume(None)
            return
        proof, right = prove(self.secret, self._nonce, frame)
        link.send(True, pack_frame(proof))
        if not right:
            self._end(SecretError("its secret differs from this process's"))

    def _end(self, error: AllranksError) -> None:
        self.job.log("%s fails: %s", self, error)
        self.error, self.ended = error, self.job.now
        self._leave(GRACE_S if isinstance(error, JoinError) else 0.0)

    def _leave(self, linger_s: float) -> None:
        if not self.dead:
            self._turn += 1
            self._close()
            if self.server is not None:
                self.server.stop(linger_s)

    def _close(self) -> None:
        if self._link is not None:
            self._link.send(True, None)
            self._link = None

    def _cut(self) -> None:
        if self._link is not None:
            self.job.log("the link of %s is cut", self)
            if self.silent_cut:
                self._link.lost = True
            else:
                self._link.cut()

    def die(self) -> None:
        if self.ended is not None or self.dead:
            return
        self.job.log("%s dies", self)
        self.dead = True
        if self._link is not None:
            self._link.lost |= self.silent_death
        self._close()
        if self.server is not None:
            self.server.end(self.silent_death)
        if self.back_after is not None:
            self.job.double(self, self.job.now + self.back_after)


class Job:
    """Job that a seed determines. ``run`` raises ``Wrong`` if a process returns or raises a wrong result."""

    def __init__(self, seed: int, events: list[str] | None = None) -> None:
        self.rng = rng = random.Random(seed)
        self.now = 0.0
        self._events = events
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = itertools.count()
        self._pids = itertools.count(100)
        self._links = itertools.count()
        self.processes: list[Process] = []
        self.servers: list[Server] = []
        self.server: Server | None = None
        self.size = rng.choice((2, 2, 2, 3, 3, 4, 5, 6, 8, 12))
        self.served = rng.random() < 0.5  # rank 0 runs the server; otherwise the launcher does
        hosts = rng.randint(1, 4)
        self.timeout_s = rng.choice((0.3, 1.0, 3.0, 8.0, 20.0))
        spread = rng.choice((0.0, 0.1, 1.0, self.timeout_s, 1.5 * self.timeout_s))
        delay_s = rng.choice((0.0001, 0.001, 0.02))
        trouble = set[str]()
        if rng.random() < 0.7:
            kinds = (
                "death",
                "death",
                "double",
                "size",
                "never",
                "secret",
                "cut",
                "cut",
                "restart",
                "slow",
                "strangers",
            )
            trouble = set(rng.choices(kinds, k=rng.choice((1, 1, 2, 3))))
        for rank in range(self.size):
            self._start(rank, str(rank % hosts), rng.random() * spread, delay_s * (1 + rng.random()))
        self._hurt(trouble)
        if not self.served:
            self.server = Server(self, SECRET)
            self.servers.append(self.server)
            if "restart" in trouble:
                self.at(rng.random() * self.timeout_s * 1.2, self._restart)
        if "strangers" in trouble:
            for _ in range(rng.randint(1, 6)):
                Stranger(self, rng.random() * self.timeout_s)
        self.trouble = trouble
        self.spread = spread

    def _start(self, rank: int, host: str, at: float, delay_s: float) -> Process:
        process = Process(self, rank, self.size, next(self._pids), host, at, self.timeout_s, delay_s)
        self.processes.append(process)
        return process

    def _hurt(self, trouble: set[str]) -> None:
        rng = self.rng
        for process in list(self.processes):
            hit = rng.random() < 0.3
            if "death" in trouble and hit:
                process.clean = False
                process.die_at_step = rng.randrange(13)
                process.die_at = 0.0 if process.die_at_step else 0.001 + rng.random() * self.timeout_s
                process.silent_death = rng.random() < 0.3
                process.back_after = rng.random() * 2 if rng.random() < 0.5 else None
            if "cut" in trouble and rng.random() < 0.3:
                process.clean = False
                process.cut_at = rng.choice((0.01, 0.1, 1.0, self.timeout_s)) * rng.random()
                process.silent_cut = rng.random() < 0.4
            if "slow" in trouble and rng.random() < 0.3:
                process.clean = False
                process.delay_s = 0.05 + rng.random() * 0.5
            if rng.random() < 0.1:
                process.timeout_s = rng.choice((0.3, 1.0, 3.0, 8.0))
        victim = rng.choice(self.processes)
        if "size" in trouble:
            victim.size, victim.clean = max(self.size + rng.choice((-1, 1)), victim.rank + 1, 2), False
        if "secret" in trouble and victim.rank:
            victim.secret, victim.clean = ANOTHER, False
        if "double" in trouble:
            self.double(rng.choice(self.processes), rng.random() * self.timeout_s)
        if "never" in trouble:
            late = rng.choice((self.processes[0], rng.choice(self.processes)))
            late.start, late.clean = late.start + rng.choice((self.timeout_s, 2 * self.timeout_s, NEVER_S)), False

    def double(self, first: Process, at: float) -> None:
        """Start another process with the same rank."""
        first.clean = False
        second = self._start(first.rank, first.host, at, first.delay_s)
        second.clean = False
        if self.now:
            self.at(at, second.begin)

    def _restart(self) -> None:
        assert self.server is not None
        self.log("the server restarts")
        self.server.end()
        self.at(self.now + self.rng.choice((0.0, 0.05, 1.0)), self._serve_again)

    def _serve_again(self) -> None:
        self.server = Server(self, SECRET)
        self.servers.append(self.server)

    def log(self, text: str, *facts: object) -> None:
        if self._events is not None:
            self._events.append(f"{self.now:9.4f} s  {text % facts}")

    def at(self, when: float, call: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._heap, (when, next(self._order), call, arguments))

    def dial(self, owner: Dialer, delay_s: float) -> Link | None:
        server = self.server
        if server is None or not server.listens:
            return None
        link = Link(self, next(self._links), delay_s, server, owner)
        server.accept(link)
        if isinstance(owner, Process):
            self.log("%s connects, link %d", owner, link.number)
        return link

    def run(self) -> None:
        for process in self.processes:
            self.at(process.start, process.begin)
        while self._heap and self._heap[0][0] < NEVER_S:
            self.now, _, call, arguments = heapq.heappop(self._heap)
            call(*arguments)
        for process in self.processes:
            if not process.dead and process.start < NEVER_S:
                self._check(process)
        for server in self.servers:
            for board, (when, error, missing) in server.verdicts.items():
                self._check_verdict(server, board, when, error, missing)
        self._check_memberships()

    # Invariants.

    def _check(self, process: Process) -> None:
        if process.ended is None:
            raise Wrong(f"{process} never returns")
        if process.ended > process.start + process.timeout_s + LATE_S:
            raise Wrong(f"{process} returns after {process.ended - process.start:.2f} s, timeout {process.timeout_s} s")
        if len(process.said) > 1:
            raise Wrong(f"{process} prints more than one line: {process.said}")
        error = process.error
        if error is None:
            return
        text = str(error)
        if m := re.match(r"Two processes have the same rank: rank (\d+) .*pid (\d+)\) joined.*pid (\d+)\)\.", text):
            pids = {p.pid for p in self.processes if p.rank == process.rank == int(m[1])}
            if m[2] == m[3] or not {int(m[2]), int(m[3])} <= pids or process.pid != int(m[3]):
                raise Wrong(f"{process} reports a duplicate rank that does not exist: {text}")
        elif m := re.search(r"disagree.*pid (\d+)\) has (\d+), rank .*pid (\d+)\) has (\d+)\.", text):
            sizes = {p.pid: p.size for p in self.processes}
            if m[2] == m[4] or sizes[int(m[1])] != int(m[2]) or sizes[int(m[3])] != int(m[4]):
                raise Wrong(f"{process} reports wrong sizes: {text}")
        elif "ranks did not join" in text:
            if not any(text == said for s in self.servers for _, said, _ in s.verdicts.values()):
                raise Wrong(f"{process} reports missing ranks that no server has reported: {text}")
        elif re.search("did not answer|did not report the missing ranks|became unreachable", text):
            if (
                process.clean
                and process.delay_s < FAST_S
                and any(s.began <= process.start and s.closed >= process.ended for s in self.servers)
            ):
                raise Wrong(f"{process} reports an unreachable server that was always reachable: {text}")
        elif not isinstance(error, ConfigError):
            raise Wrong(f"{process} reports {text}")

    def _check_verdict(self, server: Server, board: str, when: float, error: str, missing: tuple[int, ...]) -> None:
        if "ranks did not join" not in error:
            return
        named = set(_ranks(re.search(r"missing ranks? ([-\d, ]+)\.", error)[1]))  # type: ignore[index]
        if named != set(missing):
            raise Wrong(f"{error} names {named}, but {missing} are missing")
        for rank in range(int(re.match(r"\d+ of (\d+)", error)[1])):  # type: ignore[index]
            claimed, _ = server.claims.get((board, rank), (float("inf"), 0))
            if (claimed < when - LATE_S) if rank in named else (claimed > when):
                raise Wrong(f"at {when}: {error}, but rank {rank} registered at {claimed}")
            for process in self.processes:
                ready = max(process.start, server.began) + SOON_S
                healthy = process.clean and ready < min(when, process.start + process.timeout_s, process.ended or when)
                # A process that started with an earlier server may still be connected to it.
                healthy &= server is self.servers[0] or process.start > server.began
                if rank in named and process.rank == rank and healthy:
                    raise Wrong(f"at {when}: {error}, but {process} was healthy")
            doubles = [p for p in self.processes if p.rank == rank]
            if f"same rank: rank {rank} " in error and len(doubles) < 2:
                raise Wrong(f"{error}, but only one process has rank {rank}")

    def _check_memberships(self) -> None:
        met = [p for p in self.processes if p.ended is not None and p.error is None and not p.dead]
        truth, tables = {p.pid: p for p in self.processes}, set[tuple[Member, ...]]()
        for process in met:
            if process.members:
                mine = process.members[process.rank]
                if [m.rank for m in process.members] != list(range(process.size)) or mine.pid != process.pid:
                    raise Wrong(f"{process} joined {process.members}")
                if any((truth[m.pid].rank, truth[m.pid].host) != (m.rank, m.host) for m in process.members):
                    raise Wrong(f"{process} joined members that do not exist: {process.members}")
                tables.add(process.members)
        # If no rank was started twice, the job has at most one membership, whatever happens.
        if len(tables) > 1 and len(truth) == self.size:
            raise Wrong(f"two memberships: {tables}")
        begun, end = max(p.start for p in truth.values()), min(p.start + p.timeout_s for p in truth.values())
        if not self.trouble and begun + SOON_S < end and len(met) != self.size:
            raise Wrong(f"no fault was injected, but {len(met)} of {self.size} joined")


def _ranks(words: str) -> Iterator[int]:
    for part in words.split(", "):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
