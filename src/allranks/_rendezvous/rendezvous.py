"""How the ranks of a job find each other: from ``init_method`` to a store that all of them share.

Every way of meeting comes down to one store, either a launcher's (torchrun's too) or a user's, which outlives the
meeting, or one that rank 0 serves for this meeting only (TCP, or a unix socket whose address stands in a file). Where
mpirun, srun or the like started the ranks, and nobody has said where they meet, it is one that all can find by what
that launcher has told them: a unix socket or one of some ports whose names and numbers follow from the job's, or an
address that travels by PMI.
On it the ranks register, and each gets the same verdict: everyone is here, or who is missing, twice, or of another
opinion. What is asked there, and what it means, is in ``join_protocol``: a state machine, which this file connects with
the system. ``_api.world`` then uses the store for channels and groups; ``_store`` guards it and defines what travels.

A process may join, leave and join again. On a store that outlives the meeting, each process counts its own
joins there, and the count is part of the meeting's keys. A store that rank 0 serves is new each time: who finds
that it has joined there before has met the last one, on its way out, and tries again.
"""

from __future__ import annotations

import importlib
import itertools
import math
import os
import secrets
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar
from urllib.parse import SplitResult, parse_qs, urlsplit

import msgspec

from allranks._base.errors import ConfigError, JoinError, StoreLostError, TimeoutError, UsageError
from allranks._base.threads import Daemon
from allranks._cluster.context import PORTS_TRIED, LaunchContext, job_ports, job_secret
from allranks._cluster.detection import read_hosts
from allranks._cluster.env import is_master, read_env, read_int, split_host_port
from allranks._cluster.hostlist import Slots
from allranks._cluster.network import machine, published_addresses
from allranks._rendezvous.join_protocol import (
    GRACE_S,
    NOTICE_S,
    TABLE,
    Act,
    Answer,
    Connect,
    Joining,
    Leave,
    Lost,
    Member,
    Pause,
    Say,
    Steps,
    exchange,
    unpack_members,
)
from allranks._rendezvous.pmi import PmiBoard, mpi_runs
from allranks._rendezvous.pmix import host_of_rank_0
from allranks._store import (
    ForeignStore,
    HashStore,
    PrefixStore,
    Store,
    StoreClient,
    StoreServer,
    load_secret,
    reason,
)

__all__ = ["Meeting", "Member", "join", "this_member"]

_T = TypeVar("_T")

_SCHEMES = "env://, tcp://HOST:PORT, file:///PATH"
_LINGER_S = 3.0  # how long rank 0, when it leaves, keeps the store for those who have not left yet
_NOTICE_S = NOTICE_S
_LOOK_S = 0.1
_BOARD_S = 1.0  # how long to wait on a board before the state machine looks at its clock
_PROCESS = uuid.uuid4().hex  # with the pid, unlike the pid alone: no two processes share it, in any container


def this_member(rank: int, world_size: int) -> Member:
    """This process, as it describes itself to the others."""
    addresses = published_addresses() if world_size > 1 else ()
    return Member(rank, os.getpid(), socket.gethostname(), machine(), world_size, addresses)


class _Spot(msgspec.Struct, frozen=True):
    """What the file of ``file://`` holds."""

    address: str
    token: str
    host: str
    machine: str
    far: tuple[str, ...] = ()  # addresses for other hosts, once one has asked for them
    trouble: str = ""  # why there are none


class _NotYet(Exception):
    """Nobody can be found yet."""


@dataclass
class Meeting:
    """All ranks of a job have met.

    Attributes:
        rank: this process.
        world_size: how many there are.
        store: what they share; its keys are this meeting's own.
    """

    rank: int
    world_size: int
    store: Store
    _me: Member = field(repr=False)
    _timeout_s: float = field(repr=False)
    _local: tuple[int | None, int | None] = field(default=(None, None), repr=False)
    _client: Store | None = field(default=None, repr=False)
    _server: StoreServer | None = field(default=None, repr=False)
    _times: Iterator[int] = field(default_factory=itertools.count, repr=False)
    _members: tuple[Member, ...] = field(default=(), repr=False)

    @property
    def members(self) -> tuple[Member, ...]:
        """All of them, by rank. Asks the store, once."""
        if not self._members:  # not cached_property, which has one lock for all meetings, before Python 3.12
            alone = self.world_size == 1
            self._members = (self._me,) if alone else unpack_members(self.store.get(TABLE, self._timeout_s))
        return self._members

    @property
    def local_rank(self) -> int:
        """This process among those of its host: what the launcher said, else by rank."""
        return self._near.index(self.rank) if self._local[0] is None else self._local[0]

    @property
    def local_world_size(self) -> int:
        """How many share its host."""
        return len(self._near) if self._local[1] is None else self._local[1]

    @property
    def _near(self) -> list[int]:
        return [m.rank for m in self.members if m.machine == self._me.machine]

    def exchange(self, record: bytes, timeout_s: float) -> list[bytes]:
        """Gives every rank every rank's record, by rank. Called by all of them.

        Raises:
            TimeoutError: some did not come in time; names them.
        """
        place = f"exchange/{next(self._times)}/"
        steps = exchange(place, self.rank, self.world_size, record, timeout_s)
        return _drive(steps, self.store._ask)  # type: ignore[arg-type]

    def close(self) -> None:
        """Leaves. Rank 0, where it serves the store, first waits a little for the others to leave. Idempotent."""
        if self._client is not None:
            self._client.close()
        if self._server is not None:
            self._server.close(_LINGER_S)


def join(
    init_method: str | None,
    *,
    rank: int = -1,
    world_size: int = -1,
    timeout_s: float,
    store: object | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Meeting:
    """Meets the other ranks of the job.

    Args:
        init_method: ``env://`` (also if None), ``tcp://host:port`` or ``file:///path``; the last two may end in
            ``?rank=0&world_size=2``.
        rank: this process's number; -1: from the URL or the environment.
        world_size: how many processes there are; -1: from the URL or the environment.
        timeout_s: how long to wait for the others.
        store: a store to meet on, ours or one with torch's methods, in place of ``init_method``. It stays open.
        environ: the environment.

    Returns:
        The meeting; to be closed.

    Raises:
        ConfigError: a setting is missing or wrong, a port is taken, the secrets differ.
        JoinError: ranks are missing when the time is over, or two disagree on who they are.
    """
    if store is not None and init_method is not None:
        raise UsageError(f"init_method={init_method!r} and store= are given. Expected one of them.")
    try:
        url = urlsplit(init_method or "env://")
    except ValueError as error:
        raise ConfigError(f"init_method={init_method!r} is not a URL ({error}). Expected one of {_SCHEMES}.") from None
    if url.scheme not in ("env", "tcp", "file"):
        raise ConfigError(f"init_method={init_method!r} is not known. Expected one of {_SCHEMES}, or none.")
    query = {name: values[-1] for name, values in parse_qs(url.query).items()}
    rank = _given(rank, query, "rank", 0)
    world_size = _given(world_size, query, "world_size", 1)
    # tcp://$MASTER_ADDR:$MASTER_PORT says no more than the environment does, which knows of a launcher's store, too:
    # torchrun's agent holds that port itself.
    by_env = url.scheme == "env" or (url.scheme == "tcp" and is_master(url.netloc, environ))
    env = read_env(rank, world_size, environ, by_env=by_env and store is None)
    me = this_member(env.rank, env.world_size)
    if env.world_size == 1:
        return Meeting(0, 1, HashStore(), me, timeout_s, (0, 1))
    attempt = _Attempt(me, time.monotonic(), timeout_s)
    try:
        if store is not None:
            attempt.use(store if isinstance(store, Store) else ForeignStore(store))
        elif env.store:
            attempt.use_launcher(env.store, b"" if env.store.startswith("unix:") else load_secret(environ))
        elif env.place is not None:
            attempt.meet_by_place(env.place, environ)
        elif url.scheme == "file":
            attempt.meet_in_file(_file_path(url, init_method))
        else:
            host, port = env.master or _tcp_target(url, init_method, me)
            if env.agent:
                attempt.use_agent(host, port, env.agent)
            else:
                attempt.meet_on_port(host, port, load_secret(environ))
        shared = attempt.run()
    except BaseException as error:
        attempt.leave(GRACE_S if isinstance(error, JoinError) else 0.0)
        raise
    return Meeting(
        rank=me.rank,
        world_size=me.world_size,
        store=shared,
        _me=me,
        _timeout_s=timeout_s,
        _local=(env.local_rank, env.local_world_size),
        _client=attempt.client,
        _server=attempt.server,
    )


class _Attempt:
    """One rank's way to a meeting. Does what the state machine asks for, and remembers what it opened."""

    def __init__(self, me: Member, began: float, timeout_s: float) -> None:
        self.me = me
        self.deadline = began + timeout_s
        self.timeout_s = timeout_s
        self.client: StoreClient | None = None
        self.server: StoreServer | None = None
        self._root: Store | None = None
        self._find: Callable[[], Store] = HashStore
        self._joining = Joining(me, f"{_PROCESS}.{me.pid}", began, timeout_s, "", "")
        self._file: Path | None = None
        self._file_was_there = False
        self._tries = itertools.count()
        self._porter: threading.Thread | None = None
        self._request: Path | None = None
        self._over = threading.Event()

    def leave(self, linger_s: float) -> None:
        """Gives back everything, after a failure."""
        self._remove_file()
        if self.client is not None:
            self.client.close()
        if self.server is not None:
            self.server.close(linger_s)

    # The ways to a store.

    def use(self, root: Store) -> None:
        """Takes a store that outlives this meeting."""
        self._go("the store given as store=", "Is its server running?", lambda: root)

    def use_launcher(self, address: str, secret: bytes) -> None:
        """Takes the launcher's store."""
        where = f"the launcher's store at {address}"
        self._go(where, "Is the launcher running, and can this host reach it?", lambda: self._dial(address, secret))

    def use_agent(self, host: str, port: int, prefix: str) -> None:
        """Takes the store of torchrun's agent, which holds MASTER_PORT."""

        def find() -> Store:
            try:
                # torch's client tries for long, and fills stderr meanwhile: it comes when the agent is there.
                socket.create_connection((host, port), min(max(self._left(), 0.01), 3.0)).close()
                # By name, as a plain import would bring torch to the launcher.
                connect = importlib.import_module("allranks._engines.torchrun").connect
                store = connect(host, port, max(self._left(), 1.0), self.timeout_s)
            except (OSError, RuntimeError, UnicodeError) as error:
                raise _NotYet(reason(error).partition("\n")[0]) from error
            # Its keys outlive the ranks: those that the agent starts again must not meet the ones that failed.
            return PrefixStore(prefix, ForeignStore(store))

        where = f"the store of torchrun's agent at {host}:{port}"
        self._go(where, "Is torchrun still running there, and can this host reach it?", find)

    def meet_on_port(self, host: str, port: int, secret: bytes) -> None:
        """Serves on a TCP port as rank 0, or finds rank 0 there."""
        address = f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}"
        self._meet(
            f"rank 0 (the server at {address})",
            lambda: StoreServer.tcp(host, port, secret),
            lambda: (address, secret),
            secret,
        )

    def meet_in_file(self, path: Path) -> None:
        """Serves on a unix socket as rank 0 and writes its address to the file, or finds rank 0 there.

        A rank of another host asks for a TCP port, by a file beside the file: a job on one host opens none.
        """
        if not path.parent.is_dir() or path.is_dir():
            raise ConfigError(f"file://{path}: Expected a file, not yet there, in a folder that is.")
        token = secrets.token_hex(32)
        self._meet(
            f"rank 0 (the server named in {path})",
            lambda: StoreServer.unix(token.encode()),
            lambda: _read_spot(path, self.me, next(self._tries)),
            token.encode(),
        )
        if self.server is not None:
            spot = _Spot(self.server.address, token, self.me.host, self.me.machine)
            self._write_file(path, spot)
            self._porter = Daemon(target=self._await_other_hosts, args=(path, spot))
            self._porter.start()

    def _await_other_hosts(self, path: Path, spot: _Spot) -> None:
        assert self.server is not None
        self._request = _request_for_port(path, spot.token)
        while not self._over.wait(_LOOK_S):
            try:
                # Listed, not asked for by name: over NFS what was not there a moment ago is not asked for again.
                if self._request.name not in os.listdir(path.parent):
                    continue
            except OSError:  # a network file system that is away for a moment
                continue
            try:
                answer = msgspec.structs.replace(spot, far=tuple(self.server.listen_to_other_hosts()))
            except ConfigError as error:
                answer = msgspec.structs.replace(spot, trouble=f"rank 0: {error}")
            try:
                self._write_file(path, answer)
            except ConfigError as error:
                self._perform(
                    Say(f"allranks: {self.me}: ranks of other hosts cannot be told where to connect: {error}")
                )
            return

    def meet_by_place(self, place: LaunchContext, environ: Mapping[str, str]) -> None:
        """Meets by what the launcher, not one of ours or torch's, knows of this job.

        Raises:
            ConfigError: it does not know enough.
        """
        self._joining.started = {slots.name: slots.count for slots in place.hosts if slots.count is not None}
        mpi = mpi_runs()
        if place.job and place.local_size == place.size:
            self.meet_by_name(job_secret(place, load_secret(environ)).hex()[:32])
        elif place.pmi is not None and not mpi:
            self.meet_on_board(PmiBoard(place.pmi), place.local_size != place.size)
        elif place.job and (place.hosts or place.hostfile or place.kind == "openmpi"):
            hosts = read_hosts(place) or (Slots(host_of_rank_0()),)
            self.meet_on_some_port(replace(place, hosts=hosts), job_secret(place, load_secret(environ)))
        else:
            why = f"{place.kind} does not say where rank 0 is"
            if mpi and place.pmi is not None:
                why = "MPI has been started in this process, and PMI is its own from then on"
            raise ConfigError(
                f"rank {place.rank} of {place.size}: the ranks cannot find each other: {why}.\n"
                "  Set MASTER_ADDR and MASTER_PORT, the same on all ranks, or, where MPI is to move the tensors:"
                " init_process_group('mpi')."
            )

    def meet_by_name(self, name: str) -> None:
        """Serves on the unix socket of that name as rank 0, or finds rank 0 there: all ranks are on this host."""
        address = f"unix:@allranks-{name}"
        self._meet(
            f"rank 0 (the server at {address}, on this host)",
            lambda: StoreServer.unix(name=f"allranks-{name}"),
            lambda: (address, b""),
            b"",
        )

    def meet_on_some_port(self, place: LaunchContext, secret: bytes) -> None:
        """Serves on one of some ports as rank 0, or looks for rank 0 on them.

        Any other program may hold one of them, also another job of this user: who does not prove that it knows this
        job's secret is passed by.
        """
        hosts = [slots.name for slots in place.hosts]
        ports = [*place.ports[:PORTS_TRIED], *job_ports(secret)]
        own = hosts[place.node] if place.node is not None and place.node < len(hosts) else hosts[0]
        self._meet(
            f"rank 0 (a server on host {hosts[0]}, at one of the ports {', '.join(map(str, ports))})",
            lambda: _serve_on_one(own, ports, secret),
            lambda: (self._look_for(hosts, ports, secret), secret),
            secret,
        )

    def _look_for(self, hosts: list[str], ports: list[int], secret: bytes) -> str:
        turn = next(self._tries)
        # The first, but for srun --distribution=arbitrary.
        host = hosts[0] if turn % 4 != 3 else hosts[(turn // 4 + 1) % len(hosts)]
        met: dict[str, list[int]] = {}
        for port in ports:
            address = f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}"
            try:
                StoreClient.connect(address, secret, max(min(self._left(), 3.0), 0.01), retry=False).close()
            except (JoinError, ConfigError) as error:  # nobody, or somebody else
                why = reason(error.__cause__ or error).partition("\n")[0]
                met.setdefault(why, []).append(port)
            else:
                return address
        most = max(met, key=lambda why: len(met[why]))
        others = [f"; at port {', '.join(map(str, met[why]))}: {why}" for why in met if why != most]
        raise _NotYet(f"host {host}: {most}{''.join(others)}")

    def meet_on_board(self, board: PmiBoard, elsewhere: bool) -> None:
        """Serves on a unix socket as rank 0, and for other hosts on a port, and tells the others where, on a board."""
        if self.me.rank == 0:
            token = secrets.token_hex(32)
            server = self._serve(StoreServer.unix(token.encode()))
            far = tuple(server.listen_to_other_hosts()) if elsewhere else ()
            spot = _Spot(server.address, token, self.me.host, self.me.machine, far)
            board.post(msgspec.json.encode(spot).hex())
        self._joining.fresh = True
        where = "rank 0 (whose address comes by PMI)"
        advice = "Who prints no such line has not called init_process_group: look at its output."
        self._go(where, advice, lambda: self._dial(*self._read_board(board)))

    def _read_board(self, board: PmiBoard) -> tuple[str, bytes]:
        text = board.read(min(_BOARD_S, max(self._left(), 0.0)))
        if text is None:
            raise _NotYet("not all ranks have come there yet")
        spot = msgspec.json.decode(bytes.fromhex(text), type=_Spot)
        return _way_to(spot, self.me, next(self._tries)), spot.token.encode()

    def _serve(self, server: StoreServer) -> StoreServer:
        self.server = server.start()
        self._joining.listens = server.whereabouts
        self._joining.refusals = server.refusals.values
        return server

    def _meet(
        self, where: str, serve: Callable[[], StoreServer], find: Callable[[], tuple[str, bytes]], secret: bytes
    ) -> None:
        if self.me.rank == 0:
            server = self._serve(serve())
            find = lambda: (server.here, secret)  # noqa: E731
        self._joining.fresh = True
        advice = "Is rank 0 running, with the same address, and can this host reach it?"
        self._go(where, advice, lambda: self._dial(*find()))

    def _go(self, where: str, advice: str, find: Callable[[], Store]) -> None:
        self._joining.where, self._joining.advice, self._find = where, advice, find

    def _dial(self, address: str, secret: bytes) -> Store:
        self.client = StoreClient.connect(address, secret, max(self._left(), 0.01), retry=False)
        self.client.timeout_s = self.timeout_s
        self.client.deadline = self.deadline + GRACE_S
        return self.client

    def _left(self) -> float:
        return self.deadline - time.monotonic()

    # The state machine's hands.

    def run(self) -> Store:
        """Meets the others; returns the store, with this meeting's keys only."""
        self._joining.notice_s = _NOTICE_S
        prefix = _drive(self._joining.steps(), self._perform)
        assert self._root is not None
        if self.client is not None:
            self.client.deadline = math.inf
        self._remove_file()
        return PrefixStore(prefix, self._root)

    def _perform(self, act: Act) -> Answer:
        match act:
            case Pause(seconds):
                time.sleep(max(seconds, 0.0))
            case Say(line):
                if sys.stderr is not None:
                    sys.stderr.write(line + "\n")  # in one piece, as other ranks write there, too
                    sys.stderr.flush()
            case Leave():
                if self.client is not None:
                    self.client.close()
            case Connect():
                try:
                    self._root = self._find()
                except _NotYet as error:
                    return Lost(str(error), error)
                except (StoreLostError, TimeoutError) as error:
                    return Lost(reason(error.__cause__ or error), error)
            case request:
                assert self._root is not None
                try:
                    return self._root._ask(request)
                except (StoreLostError, TimeoutError) as error:
                    return Lost(reason(error.__cause__ or error), error)
        return None

    # The file of file://.

    def _write_file(self, path: Path, spot: _Spot) -> None:
        draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            if self._file is None:
                self._file_was_there = path.exists() and path.stat().st_size == 0
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(msgspec.json.encode(spot))
            self._file = draft.replace(path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise ConfigError(f"file://{path}: cannot be written: {reason(error)}.") from None

    def _remove_file(self) -> None:
        self._over.set()
        if self._porter is not None:
            self._porter.join()
        if self._request is not None:
            self._request.unlink(missing_ok=True)
        path, self._file = self._file, None
        if path is None or self.server is None:
            return
        with suppress(FileNotFoundError):
            if self.server.address.encode() not in path.read_bytes():
                return
            if self._file_was_there:  # empty, as tempfile makes it: its owner expects to find it again
                os.truncate(path, 0)
            else:
                path.unlink()


def _drive(steps: Steps[_T], perform: Callable[[Act], Answer]) -> _T:
    """Runs a state machine to its end."""
    try:
        act = next(steps)
        while True:
            answer = perform(act)
            act = steps.send((time.monotonic(), answer))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def _read_spot(path: Path, me: Member, turn: int) -> tuple[str, bytes]:
    """Where rank 0 is, and its token; of several addresses another at each turn."""
    try:
        spot = msgspec.json.decode(path.read_bytes(), type=_Spot)
        if spot.machine != me.machine and not spot.far and not spot.trouble:
            _request_for_port(path, spot.token).touch(0o600)
            raise _NotYet(f"rank 0, on host {spot.host}, does not listen for other hosts yet")
    except FileNotFoundError:
        raise _NotYet("the file is not there") from None
    except msgspec.MsgspecError:
        raise _NotYet("the file names no server") from None
    except OSError as error:
        raise ConfigError(f"file://{path}: cannot be read, or the folder not written: {reason(error)}.") from None
    if spot.trouble:
        raise _NotYet(spot.trouble)
    return _way_to(spot, me, turn), spot.token.encode()


def _way_to(spot: _Spot, me: Member, turn: int) -> str:
    """The address to dial; of several another one at each turn."""
    if spot.machine == me.machine:
        return spot.address
    if not spot.far:
        raise _NotYet(f"rank 0, on host {spot.host}, listens on its host only")
    return spot.far[turn % len(spot.far)]


def _serve_on_one(host: str, ports: list[int], secret: bytes) -> StoreServer:
    troubles = []
    for port in ports:
        try:
            return StoreServer.tcp(host, port, secret)
        except ConfigError as error:  # taken
            troubles.append(str(error).partition("\n")[0])
    raise ConfigError(
        "rank 0 can have none of the ports on which the others look for it:\n  "
        + "\n  ".join(troubles)
        + "\n  Set MASTER_ADDR and MASTER_PORT, the same on all ranks."
    )


def _request_for_port(path: Path, token: str) -> Path:
    return path.with_name(f".{path.name}.{token[:8]}.far")


def _file_path(url: SplitResult, init_method: str | None) -> Path:
    if url.netloc not in ("", "localhost") or not url.path.startswith("/"):
        raise ConfigError(f"init_method={init_method!r} has no absolute path. Expected file:///folder/name.")
    return Path(url.path)


def _tcp_target(url: SplitResult, init_method: str | None, me: Member) -> tuple[str, int]:
    host, port = split_host_port(url.netloc, "init_method")
    if port is None or (not host and me.rank):
        raise ConfigError(f"init_method={init_method!r} is incomplete. Expected tcp://HOST:PORT.")
    return host, port


def _given(value: int, query: Mapping[str, str], name: str, low: int) -> int:
    found = read_int(query, name, low) if value == -1 else value
    return -1 if found is None else found
