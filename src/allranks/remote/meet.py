"""How the master and the workers of master-worker mode come together, and how they end.

Either all of them are started as the ranks of a job are, and meet as ranks do (``_rendezvous``); or the master starts
the workers itself (``crew``) and tells them where it is. In both cases the master then serves a store, on which groups
are made (``board``), and opens a door, through which each worker comes once: that connection is its line, on which
commands travel. Who comes through proves that it knows a token of this job only. On one host all of it goes over unix
sockets.

A worker ends when its line does: by itself where it listens, else by a thread that watches the line.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import importlib
import os
import secrets
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, TypeVar

import msgspec

from allranks._base.errors import ConfigError, JoinError, StoreLostError, TimeoutError, UsageError, rank_list
from allranks._base.forks import forks
from allranks._base.threads import Daemon
from allranks._cluster.env import read_env, read_int
from allranks._cluster.hostlist import Slots, parse_hosts
from allranks._cluster.network import machine, nearest_first, published_addresses
from allranks._rendezvous import rendezvous
from allranks._rendezvous.rendezvous import Member, this_member
from allranks._store import Store, StoreClient, StoreServer, load_secret
from allranks.launch.agents.door import Door, dial, store_secret
from allranks.launch.jobs.spread import is_here
from allranks.launch.ranks.rank import this_rank
from allranks.launch.spec.messages import Again, Ended
from allranks.launch.spec.target import MASTER
from allranks.remote.board import Board
from allranks.remote.crew import Crew, describe_end, read_status

if TYPE_CHECKING:
    from allranks._group.process_group import ProcessGroup

__all__ = ["Line", "Post", "Workers", "attend", "gather_workers", "serve_here"]

SERVE = "allranks.remote.worker.interpreter:serve"

_TIMEOUT_S = 300.0
_RESPAWN_S = 60.0
_PATIENCE_S = 1e6  # the master's script may take long before it calls; a worker ends with its launcher
_GRACE_S = 1.0  # from the end of its line to that of a worker that does not notice
_LOOK_S = 0.1
_HELLO_S = 10.0
_KNOWN_S = 1.0  # between the end of a line and word of how its process ended
_LIMIT = 1 << 20

T = TypeVar("T")


class Spot(msgspec.Struct, frozen=True):
    """Where a master is to be found.

    Attributes:
        machine: its host, see ``_cluster.network.machine``.
        store: its store, for workers of its host.
        door: the unix socket of its door, for the same.
        stores: its store, for workers of other hosts.
        addresses: its door, for the same.
        port: of these addresses.
        size: how many processes there are.
        token: what opens the door and the store; "" where that follows from the salt and the job's secret.
        salt: text of this job only.
    """

    machine: str
    store: str
    door: str
    stores: tuple[str, ...]
    addresses: tuple[str, ...]
    port: int
    size: int
    token: str
    salt: str

    def secret(self) -> bytes:
        """What opens the door and the store."""
        return self.token.encode() or store_secret(load_secret(), self.salt)


class _Hello(msgspec.Struct, frozen=True):
    """A worker's first word on its line."""

    member: Member


class _Welcome(msgspec.Struct, frozen=True):
    """The master's answer: on what device to work, and what function is the worker's program."""

    device: str
    serve: str


class _Ready(msgspec.Struct, frozen=True):
    """The worker's last word before its program begins. ``trouble``: why it cannot."""

    trouble: str = ""


@dataclass
class Line:
    """The master's connection with one worker.

    Attributes:
        rank: the worker's.
        host: where it is.
        pid: its process there.
        socket: a connected stream.
    """

    rank: int
    host: str
    pid: int
    socket: socket.socket

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


class Post:
    """A worker's place: its connection with the master, and the groups that it is in.

    Attributes:
        rank: this worker, 1 to n.
        socket: the connection with the master, a stream.
        device: where it keeps its tensors.
    """

    def __init__(self, rank: int, sock: socket.socket, device: str, serve: str, board: Board) -> None:
        self.rank = rank
        self.socket = sock
        self.device = device
        self._serve = serve
        self._board = board
        Daemon(target=_end_with, args=(sock,), name="allranks-line").start()
        self.leave = board.close
        atexit.register(self.leave)

    def make_group(self, name: str, ranks: Sequence[int], timeout_s: float) -> ProcessGroup:
        """Makes a group together with its other members; see ``Board.make_group``."""
        return self._board.make_group(name, ranks, timeout_s)

    def serve(self) -> NoReturn:
        """Runs the worker's program, and then ends this process."""
        module, _, name = self._serve.partition(":")
        program: Callable[[Post], None] = getattr(importlib.import_module(module), name)
        try:
            program(self)
        except Exception:
            if not _is_over(self.socket):
                raise
        raise SystemExit(0)


class Workers:
    """What a master has: its workers.

    Attributes:
        lines: the connections with them, by rank from 1 on.
        on_lost: called with a worker's rank, in another thread, when it is gone.
    """

    def __init__(
        self,
        house: _House,
        lines: list[Line],
        crew: Crew | None,
        welcome: _Welcome,
        told: StoreClient | None = None,
    ) -> None:
        self.lines = lines
        self._welcome = welcome
        self._new: deque[Line] = deque()  # to be watched
        self.on_lost: Callable[[int], None] | None = None
        self._house = house
        self._crew = crew
        self._told = told  # the launcher's store, where it says how workers of any host have ended
        self._forks = forks()
        self._lost: set[int] = set()
        self._closed = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._changed = threading.Condition()
        self._watcher = Daemon(target=self._watch, name="allranks-lines")
        self._watcher.start()
        atexit.register(self.close)

    def make_group(self, name: str, ranks: Sequence[int], timeout_s: float) -> ProcessGroup:
        """Makes a group together with its other members; see ``Board.make_group``."""
        return self._house.board.make_group(name, ranks, timeout_s)

    def how_ended(self, rank: int) -> str:
        """How a worker's process ended, as ``killed by signal 9 (SIGKILL)`` or ``exit code 3``; "" if not known."""
        line = self.lines[rank - 1]
        if self._crew is None and self._told is None and line.socket.family != socket.AF_UNIX:
            return ""
        until = time.monotonic() + _KNOWN_S
        while (status := self._status(line)) is None and time.monotonic() < until:
            time.sleep(_LOOK_S / 10)
        return "" if status is None else describe_end(status)

    def _status(self, line: Line) -> int | str | None:
        if self._crew is not None:
            return self._crew.ended.get(line.rank)
        if self._told is None:
            return read_status(line.pid)
        told = self._told.peek([Ended.key(line.rank)])[0]
        ended = msgspec.json.decode(told, type=Ended) if told is not None else None
        # Of the rank's last process, it may be.
        return ended.status if ended is not None and ended.pid in (0, line.pid) else None

    def respawn(self, rank: int, timeout_s: float = _RESPAWN_S) -> Line:
        """Starts a new worker in the place of one, which is killed if it still lives.

        Args:
            rank: the worker's.
            timeout_s: how long to wait for it.

        Returns:
            The connection with it, which also takes the old one's place in ``lines``.

        Raises:
            UsageError: there is no such worker, or nobody is there who could start one.
            ConfigError: it ended while it was started.
            TimeoutError: it did not come in time.

        Cost:
            a start of python and an import of torch.
        """
        if not isinstance(rank, int) or not 1 <= rank <= len(self.lines):
            raise UsageError(f"respawn: rank {rank!r} is no worker; expected 1 to {len(self.lines)}")
        launched = this_rank()
        if self._crew is None and (launched is None or launched.target.mode != "master"):
            raise UsageError(
                f"respawn: rank {rank} was started neither by this process (workers=, hosts=) nor by"
                " allranks run --mode master, and nobody is there who could start it.\n  Start the job again"
            )
        until = time.monotonic() + timeout_s
        old = self.lines[rank - 1]
        with contextlib.suppress(OSError):  # it is gone
            old.socket.shutdown(socket.SHUT_RDWR)
        with self._changed:
            if not self._changed.wait_for(lambda: rank in self._lost, timeout_s):
                raise TimeoutError(f"respawn: the end of {old} was not noticed in {timeout_s:.1f} s")
        old.socket.close()
        self._house.board.admit(rank)
        try:
            if self._crew is not None:
                self._crew.respawn(rank, until)
            else:
                assert launched is not None
                launched.want(Again(rank, {MASTER: msgspec.json.encode(self._house.spot).decode()}))
            line = self._house.gather([rank], until, self._welcome, self._crew)[0]
        except BaseException:
            self._house.board.lose(rank, f"{old} is gone, and no other has come")
            raise
        self.lines[rank - 1] = line
        self._lost.discard(rank)
        self._new.append(line)
        os.eventfd_write(self._wake, 1)
        return line

    def close(self) -> None:
        """Ends all workers: asks them, waits a moment, and kills those that this process has started. Idempotent."""
        global _workers
        if self._closed or self._forks != forks():
            return
        self._closed = True
        if _workers is self:
            _workers = None
        atexit.unregister(self.close)
        os.eventfd_write(self._wake, 1)
        self._watcher.join()
        os.close(self._wake)
        for line in self.lines:
            _hang_up(line.socket)
        if self._crew is not None:
            self._crew.close()
        if self._told is not None:
            self._told.close()
        self._house.close()

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        watched: dict[int, Line] = {}
        self._new.extend(self.lines)
        while not self._closed:
            while self._new:
                line = self._new.popleft()
                watched[line.socket.fileno()] = line
                poll.register(line.socket, select.POLLRDHUP)
            for fd, _ in poll.poll():
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                else:
                    poll.unregister(fd)
                    self._lose(watched.pop(fd))

    def _lose(self, line: Line) -> None:
        self._house.board.lose(line.rank, f"{line} is gone")
        with self._changed:
            self._lost.add(line.rank)
            self._changed.notify_all()
        if self.on_lost is not None:
            self.on_lost(line.rank)


_workers: Workers | None = None


def gather_workers(
    init_method: str | None = None,
    *,
    workers: int | None = None,
    hosts: str | Sequence[str] | None = None,
    timeout_s: float = _TIMEOUT_S,
    worker_device: str = "cpu",
    threads: int | None = None,
    world_size: int = -1,
    rank: int = -1,
    serve: str = SERVE,
) -> Workers:
    """Meets the workers; in a worker, serves the master and does not return.

    Args:
        init_method: how master and workers find each other where all have been started, see ``init_process_group``.
        workers: starts so many on this host.
        hosts: starts workers on these hosts by ssh: ``"node1:2,node2"`` or ``["node1:2", "node2"]``.
        timeout_s: how long to wait for them.
        worker_device: where they keep their tensors; where a host has several of a kind, each takes another.
        threads: of each worker that is started; None for a fair share of the CPUs.
        world_size: of all processes, where none is started; -1: from the environment.
        rank: this process; -1: from the environment.
        serve: the worker's program, ``module:function``; called with its ``Post``.

    Raises:
        UsageError: the arguments contradict each other, or there are workers already.
        ConfigError: a worker cannot be had: says where and why.
        JoinError: some did not come in time.
        SystemExit: this is a worker, and the master has ended.

    Cost:
        one import of torch, in parallel on all hosts, and about 30 ms for each worker.
    """
    global _workers
    _check(init_method, workers, hosts, timeout_s, worker_device, threads, world_size, rank)
    if workers is None and hosts is None:
        made = _gather_ranks(init_method, world_size, rank, timeout_s, worker_device, serve)
    else:
        here = [Slots(socket.gethostname(), workers)]
        used = here if hosts is None else parse_hosts(hosts if isinstance(hosts, str) else ",".join(hosts), "hosts")
        made = _gather_crew(used, timeout_s, worker_device, threads, serve)
    _workers = made
    return made


def _check(
    init_method: str | None,
    workers: int | None,
    hosts: str | Sequence[str] | None,
    timeout_s: float,
    worker_device: str,
    threads: int | None,
    world_size: int,
    rank: int,
) -> None:
    if _workers is not None:
        raise UsageError("init_master_worker: this process has workers already; close them first")
    if sum(given is not None for given in (init_method, workers, hosts)) > 1:
        raise UsageError("init_master_worker: expected one of init_method, workers and hosts, not several")
    if workers is not None and (not isinstance(workers, int) or isinstance(workers, bool) or workers < 1):
        raise UsageError(f"init_master_worker: workers={workers!r}: expected how many to start, 1 or more")
    names = [hosts] if isinstance(hosts, str) else () if hosts is None else hosts
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"init_master_worker: hosts={hosts!r}: expected 'node1:2,node2', or a list of such words")
    if (workers is not None or hosts is not None) and (world_size, rank) != (-1, -1):
        raise UsageError("init_master_worker: world_size= and rank= are of processes that are there; see workers=")
    if threads is not None and (not isinstance(threads, int) or threads < 1):
        raise UsageError(f"init_master_worker: threads={threads!r}: a worker has one at least")
    if not timeout_s > 0:
        raise UsageError(f"init_master_worker: timeout must be positive, not {timeout_s!r}")
    if not isinstance(worker_device, str) or not worker_device:
        raise UsageError(f"init_master_worker: worker_device={worker_device!r}: expected a device's name, as 'cpu'")
    if workers is None and hosts is None:
        if threads is not None:
            raise UsageError("init_master_worker: threads= is for workers that it starts; see workers= and hosts=")
        return
    env = read_env()
    if env.world_size > 1:
        argument = "workers" if workers is not None else "hosts"
        raise UsageError(
            f"init_master_worker: this process is rank {env.rank} of {env.world_size} already, and {argument}= would"
            " start workers of each of them.\n  Leave it out, and rank 0 is the master of the others; or start this"
            " program alone, without a launcher"
        )


def _gather_ranks(
    init_method: str | None, world_size: int, rank: int, timeout_s: float, device: str, serve: str
) -> Workers:
    meeting = rendezvous.join(init_method, rank=rank, world_size=world_size, timeout_s=timeout_s)
    try:
        if meeting.world_size == 1:
            raise ConfigError(
                "init_master_worker: this process is alone, and a master needs one worker at least.\n"
                "  Start it with: allranks run --mode master -n 5 script.py. Or have it start workers:"
                " init_master_worker(workers=4)"
            )
        if meeting.rank:
            post = _attend_in(meeting, timeout_s)
        else:
            far = len({member.machine for member in meeting.members}) > 1
            house = _House(meeting.members[0], far, derived=far)
            try:
                meeting.store.set("master", msgspec.json.encode(house.spot))
                welcome = _Welcome(device, serve)
                lines = house.gather(range(1, meeting.world_size), time.monotonic() + timeout_s, welcome)
                return Workers(house, lines, None, welcome, _launchers_store() if far else None)
            except BaseException:
                house.close()
                raise
    finally:
        meeting.close()
    return post.serve()


def _launchers_store() -> StoreClient | None:
    """That of ``allranks run --mode master``; None where something else has started this process."""
    launched = this_rank()
    if launched is None or launched.target.mode != "master":
        return None
    return StoreClient.connect(os.environ["ALLRANKS_STORE"], load_secret(), _TIMEOUT_S)


def _gather_crew(hosts: Sequence[Slots], timeout_s: float, device: str, threads: int | None, serve: str) -> Workers:
    size = 1 + sum(1 if host.count is None else host.count for host in hosts)
    if size == 1:
        raise UsageError("init_master_worker: hosts= has no slot for a worker")
    far = not all(is_here(host.name) for host in hosts)
    house = _House(this_member(0, size), far)
    environ = {MASTER: msgspec.json.encode(house.spot).decode()}
    if far:
        environ["ALLRANKS_SECRET"] = load_secret().decode()  # groups that span hosts prove it
    crew = Crew(hosts, environ, threads, timeout_s)
    try:
        crew.start()
        welcome = _Welcome(device, serve)
        return Workers(house, house.gather(range(1, size), time.monotonic() + timeout_s, welcome, crew), crew, welcome)
    except BaseException:
        house.close()
        crew.close()
        raise


class _House:
    """What a master opens: the store with its board, and the door.

    Args:
        me: the master.
        far: other hosts have workers.
        derived: the token follows from the job's secret, and need not be sent.
    """

    def __init__(self, me: Member, far: bool, derived: bool = False) -> None:
        salt = secrets.token_hex(16)
        token = store_secret(load_secret(), salt) if derived else secrets.token_hex(32).encode()
        name = f"allranks-{secrets.token_hex(16)}"
        with contextlib.ExitStack() as opened:
            self._server = opened.enter_context(StoreServer.unix(token).start())
            stores = self._server.listen_to_other_hosts() if far else []
            addresses = published_addresses() if far else ()
            self._door = Door(addresses, 0, token, name)
            opened.callback(self._door.close)
            self.board = Board(StoreClient.connect(self._server.address, token), me)
            opened.callback(self.board.close)
            self.board.enter()
            self._opened = opened.pop_all()
        self.spot = Spot(
            *(me.machine, self._server.address, name, tuple(stores), addresses, self._door.port, me.world_size),
            "" if derived else token.decode(),
            salt,
        )

    def gather(self, ranks: Sequence[int], until: float, welcome: _Welcome, crew: Crew | None = None) -> list[Line]:
        """Lets these workers in.

        Raises:
            ConfigError: one cannot work; says why.
            JoinError: some did not come in time.
        """
        began = time.monotonic()
        lines: dict[int, Line] = {}
        ready = False
        try:
            while missing := [rank for rank in ranks if rank not in lines]:
                if time.monotonic() > until:
                    raise JoinError(
                        f"init_master_worker: {rank_list(missing)} did not come in {until - began:.1f} s."
                        "\n  Look at their output.    Longer: init_master_worker(timeout=...)"
                    )
                _raise_trouble(crew, missing)
                lines |= self.let_in(welcome, missing)
            for line in lines.values():
                if trouble := _await_ready(line, until):
                    raise ConfigError(f"init_master_worker: {line}: {trouble}")
            ready = True
        finally:
            if not ready:
                for line in lines.values():
                    _hang_up(line.socket)
        return [lines[rank] for rank in sorted(lines)]

    def let_in(self, welcome: _Welcome, missing: Sequence[int]) -> dict[int, Line]:
        """Who has come through the door; waits a moment for somebody to do so."""
        found: dict[int, Line] = {}
        select.select([self._door.wake], [], [], _LOOK_S)
        for sock in self._door.take():
            try:
                member = _receive(sock, _Hello, time.monotonic() + _HELLO_S).member
                if member.rank not in missing or member.rank in found:
                    raise ConnectionError(f"nobody waits for {member}")
                _say(sock, welcome)
            except (OSError, msgspec.MsgspecError):  # it has died, or is of no use: it is missed if it was awaited
                sock.close()
                continue
            found[member.rank] = Line(member.rank, member.host, member.pid, sock)
        return found

    def close(self) -> None:
        """Closes all of it."""
        self._opened.close()


def _raise_trouble(crew: Crew | None, missing: Sequence[int]) -> None:
    if crew is None:
        return
    if crew.trouble is not None:
        raise crew.trouble
    for rank in missing:
        if rank in crew.ended:
            raise ConfigError(
                f"init_master_worker: rank {rank} ended while it was started ({describe_end(crew.ended[rank])}); look"
                " at its output"
            )


def _await_ready(line: Line, until: float) -> str:
    """What keeps a worker from working; "" if nothing does."""
    try:
        return _receive(line.socket, _Ready, until).trouble
    except builtins.TimeoutError:
        return "it did not get ready in time; longer: init_master_worker(timeout=...)"
    except OSError:
        return "it ended while it was started; look at its output"


def attend(timeout_s: float = _TIMEOUT_S, environ: Mapping[str, str] = os.environ) -> Post:
    """Goes to the master, as a worker that runs no program of the user's.

    Args:
        timeout_s: how long to wait for it.
        environ: says where it is, or which rank of a job this process is.

    Raises:
        ConfigError: it cannot be found.
        JoinError: it did not come in time.
    """
    if told := environ.get(MASTER):
        rank, local_rank = read_int(environ, "RANK", 1), read_int(environ, "LOCAL_RANK", 0)
        if rank is None:
            raise ConfigError(f"{MASTER} is set, and RANK is not: this is no worker that allranks has started")
        spot = msgspec.json.decode(told, type=Spot)
        return _enter(spot, this_member(rank, spot.size), local_rank or 0, timeout_s)
    meeting = rendezvous.join("env://", timeout_s=timeout_s, environ=environ)
    try:
        return _attend_in(meeting, timeout_s)
    finally:
        meeting.close()


def _attend_in(meeting: rendezvous.Meeting, timeout_s: float) -> Post:
    spot = msgspec.json.decode(meeting.store.get("master", timeout_s), type=Spot)
    return _enter(spot, meeting.members[meeting.rank], meeting.local_rank, timeout_s)


def _enter(spot: Spot, me: Member, local_rank: int, timeout_s: float) -> Post:
    timeout_s = min(timeout_s, _TIMEOUT_S)  # it is there, or it is gone
    secret, until = spot.secret(), time.monotonic() + timeout_s
    near = spot.machine == machine()
    board = Board(_reach(spot, near, secret, timeout_s), me)
    board.enter()
    hosts = nearest_first(spot.addresses)
    sock = dial([(f"@{spot.door}", 0)] if near else [(host, spot.port) for host in hosts], secret, until, whom="master")
    try:
        _say(sock, _Hello(me))
        welcome = _receive(sock, _Welcome, until)
        device, trouble = _choose_device(welcome.device, local_rank)
        _say(sock, _Ready(trouble))
    except OSError as error:
        raise SystemExit(0) from error  # the master has ended, and says why
    if trouble:
        raise SystemExit(0)  # the master says so
    sock.settimeout(None)
    return Post(me.rank, sock, device, welcome.serve, board)


def _reach(spot: Spot, near: bool, secret: bytes, timeout_s: float) -> Store:
    if near:
        return StoreClient.connect(spot.store, secret, timeout_s)
    tried = []
    for store in spot.stores:
        try:
            return StoreClient.connect(store, secret, min(timeout_s, 5.0), retry=False)
        except (ConfigError, JoinError, StoreLostError, OSError) as error:
            tried.append(f"{store}: {str(error).partition(chr(10))[0]}")
    raise ConfigError(
        f"{socket.gethostname()} cannot reach the master at {'; '.join(tried) or 'any address'}.\n"
        "  A firewall between the hosts must let workers connect; ALLRANKS_IFACE names the interface to use."
    )


def _choose_device(wanted: str, local_rank: int) -> tuple[str, str]:
    """The device that is meant by a name, and why it cannot be used; "" if it can."""
    import torch

    try:
        device = torch.device(wanted)
        if device.type == "meta":
            raise ValueError("it holds no data")
        if device.type != "cpu" and device.index is None:
            count = torch.get_device_module(device.type).device_count()
            device = torch.device(device.type, local_rank % max(1, count))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ValueError, TypeError) as error:
        return "", f"worker_device={wanted!r} cannot be used there: {str(error).partition(chr(10))[0]}"
    return str(device), ""


def serve_here() -> NoReturn:
    """What a process does that was started as a worker."""
    try:
        post = attend(_PATIENCE_S)
    except (ConfigError, JoinError) as error:
        print(f"allranks: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    os.environ.pop(MASTER, None)  # what the worker starts is none
    try:
        post.serve()
    except SystemExit as error:  # a function of the user's may raise it, too
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)
        post.leave()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 0xFF)  # taking torch apart takes 0.2 s
    raise AssertionError


# --- lines ----------------------------------------------------------------------------------------------------


def _say(sock: socket.socket, message: msgspec.Struct) -> None:
    payload = msgspec.json.encode(message)
    sock.sendall(len(payload).to_bytes(4, "big") + payload)


def _receive(sock: socket.socket, kind: type[T], until: float) -> T:
    """Takes one message, and nothing of what follows it."""
    size = int.from_bytes(_read(sock, 4, until), "big")
    if size > _LIMIT:
        raise ConnectionError(f"{size} bytes are announced")
    return msgspec.json.decode(_read(sock, size, until), type=kind)


def _read(sock: socket.socket, size: int, until: float) -> bytes:
    data = b""
    while len(data) < size:
        sock.settimeout(max(0.001, until - time.monotonic()))
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionResetError("it closed the connection")
        data += more
    sock.settimeout(None)
    return data


def _hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other side was quicker
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def _is_over(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))


def _end_with(sock: socket.socket) -> None:
    """Ends this process when the master is gone, where the worker's program does not."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    poll.poll()
    time.sleep(_GRACE_S)
    os._exit(0)


def _abandon_in_child() -> None:
    global _workers
    _workers = None


os.register_at_fork(after_in_child=_abandon_in_child)
