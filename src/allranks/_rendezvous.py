"""How the ranks of a job find each other: from ``init_method`` to a store that all of them share.

Every way of meeting comes down to one store, either a launcher's (torchrun's too) or a user's, which outlives the
meeting, or one that rank 0 serves for this meeting only (TCP, or a unix socket whose address stands in a file).
On it the ranks register, and each gets the same verdict: everyone is here, or who is missing, twice, or of another
opinion. What is done with the store afterwards (channels, groups) is the business of ``_world``; how it is
guarded and what travels, of ``_store``.

A process may join, leave and join again. On a store that outlives the meeting, each process counts its own
joins there, and the count is part of the meeting's keys. A store that rank 0 serves is new each time: who finds
that it has joined there before has met the last one, on its way out, and tries again.
"""

from __future__ import annotations

import importlib
import itertools
import math
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, parse_qs, urlsplit

import msgspec

from allranks._env import read_env, read_int, split_host_port
from allranks._errors import ConfigError, JoinError, StoreLostError, TimeoutError, UsageError, rank_list
from allranks._network import machine, published_addresses
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

__all__ = ["Meeting", "Member", "join"]

_SCHEMES = "env://, tcp://HOST:PORT, file:///PATH"
_LINGER_S = 3.0  # how long rank 0, when it leaves, keeps the store for those who have not left yet
_GRACE_S = 0.5  # to say at the end who is missing
_NOTICE_S = 5.0  # a rank that waits longer says so, once: the timeout may be half an hour away
_PROCESS = uuid.uuid4().hex  # with the pid, unlike the pid alone: no two processes share it, in any container


class Member(msgspec.Struct, frozen=True):
    """One rank of a meeting, as it describes itself.

    Attributes:
        rank: its number.
        pid: its process on its host.
        host: its host's name.
        machine: the same for all processes that share memory and unix sockets.
        world_size: how many ranks it expects.
        addresses: where other hosts may reach its host.
    """

    rank: int
    pid: int
    host: str
    machine: str
    world_size: int
    addresses: tuple[str, ...] = ()

    @classmethod
    def here(cls, rank: int, world_size: int) -> Member:
        """This process."""
        addresses = published_addresses() if world_size > 1 else ()
        return cls(rank, os.getpid(), socket.gethostname(), machine(), world_size, addresses)

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


class _Verdict(msgspec.Struct, frozen=True):
    error: str
    members: tuple[Member, ...] = ()
    missing: tuple[int, ...] = ()


class _Spot(msgspec.Struct, frozen=True):
    """What the file of ``file://`` holds."""

    address: str
    token: str
    host: str
    machine: str


class _NotYet(Exception):
    """Nobody can be found in the file yet."""


@dataclass
class Meeting:
    """All ranks of a job have met.

    Attributes:
        rank: this process.
        world_size: how many there are.
        store: what they share; its keys are this meeting's own.
        members: all of them, by rank.
        local_rank: this process among those of its host.
        local_world_size: how many share its host.
    """

    rank: int
    world_size: int
    store: Store
    members: tuple[Member, ...]
    local_rank: int
    local_world_size: int
    _client: Store | None = field(default=None, repr=False)
    _server: StoreServer | None = field(default=None, repr=False)
    _times: Iterator[int] = field(default_factory=itertools.count, repr=False)

    def exchange(self, record: bytes, timeout_s: float) -> list[bytes]:
        """Gives every rank every rank's record, by rank. Called by all of them."""
        time = next(self._times)
        self.store.set(f"exchange/{time}/{self.rank}", record)
        return [self.store.get(f"exchange/{time}/{rank}", timeout_s) for rank in range(self.world_size)]

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
    env = read_env(rank, world_size, environ, by_env=store is None and url.scheme == "env")
    me = Member.here(env.rank, env.world_size)
    if env.world_size == 1:
        return Meeting(0, 1, HashStore(), (me,), 0, 1)
    attempt = _Attempt(me, time.monotonic() + timeout_s, timeout_s)
    try:
        if store is not None:
            attempt.use(store if isinstance(store, Store) else ForeignStore(store), "the store given as store=")
        elif env.store:
            secret = b"" if env.store.startswith("unix:") else load_secret(environ)
            attempt.use_launcher(env.store, secret)
        elif url.scheme == "file":
            attempt.meet_in_file(_file_path(url, init_method))
        else:
            host, port = env.master or _tcp_target(url, init_method, me)
            if env.agent:
                attempt.use_agent(host, port, env.agent)
            else:
                attempt.meet_on_port(host, port, load_secret(environ))
        members = attempt.register()
    except BaseException as error:
        attempt.leave(_GRACE_S if isinstance(error, JoinError) else 0.0)
        if isinstance(error, JoinError) or not isinstance(error, StoreLostError | TimeoutError):
            raise
        raise JoinError(
            f"{me}: {attempt.where} went away while the ranks joined ({reason(error.__cause__ or error)}).\n"
            "  Look at the end of its output."
        ) from error
    near = [m.rank for m in members if m.machine == me.machine]
    return Meeting(
        rank=me.rank,
        world_size=me.world_size,
        store=attempt.store,
        members=members,
        local_rank=near.index(me.rank) if env.local_rank is None else env.local_rank,
        local_world_size=len(near) if env.local_world_size is None else env.local_world_size,
        _client=attempt.client,
        _server=attempt.server,
    )


class _Attempt:
    """One rank's way to a meeting: first to a store, then through the registration. Remembers what it opened."""

    store: Store

    def __init__(self, me: Member, deadline: float, timeout_s: float) -> None:
        self.me = me
        self.deadline = deadline
        self.timeout_s = timeout_s
        self._began = deadline - timeout_s
        self._noticed = False
        self.client: StoreClient | None = None
        self.server: StoreServer | None = None
        self.where = ""
        self._file: Path | None = None
        self._file_was_there = False

    def leave(self, linger_s: float) -> None:
        """Gives back everything, after a failure."""
        self._remove_file()
        if self.client is not None:
            self.client.close()
        if self.server is not None:
            self.server.close(linger_s)

    # The ways to a store.

    def use(self, root: Store, where: str) -> None:
        """Takes a store that outlives this meeting."""
        self.where = where
        self._enter(root, generation=self._count(root))

    def use_launcher(self, address: str, secret: bytes) -> None:
        """Connects to the launcher's store."""
        self.where = f"the launcher's store at {address}"
        self.client = StoreClient.connect(address, secret, self.timeout_s, on_failure=self._notice_failure)
        self.client.deadline = self.deadline + _GRACE_S
        self.use(self.client, self.where)

    def use_agent(self, host: str, port: int, prefix: str) -> None:
        """Connects to the store of torchrun's agent, which holds MASTER_PORT."""
        self.where = f"the store of torchrun's agent at {host}:{port}"
        store = None
        while store is None:
            try:
                # torch's client tries for long, and fills stderr meanwhile: it comes when the agent is there.
                socket.create_connection((host, port), min(max(self._left(), 0.01), 3.0)).close()
                # By name, as a plain import would bring torch to the launcher.
                connect = importlib.import_module("allranks._engines.torchrun").connect
                store = connect(host, port, max(self._left(), 1.0), self.timeout_s)
            except (OSError, RuntimeError, UnicodeError) as error:
                trouble = reason(error).partition("\n")[0]
                if self._left() <= 0:
                    raise JoinError(
                        f"{self.me}: {self.where} did not answer for {self.timeout_s:.1f} s (last: {trouble}).\n"
                        "  Is torchrun still running there, and can this host reach it?"
                        "    Longer: init_process_group(timeout=...)"
                    ) from error
                self._notice_failure(trouble)
                time.sleep(min(0.1, max(self._left(), 0.0)))
        # Its keys outlive the ranks: those that the agent starts again must not meet the ones that failed.
        self.use(PrefixStore(prefix, ForeignStore(store)), self.where)

    def meet_on_port(self, host: str, port: int, secret: bytes) -> None:
        """Serves on a TCP port as rank 0, or finds rank 0 there."""
        address = f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}"
        self.where = f"rank 0 (the server at {address})"
        if self.me.rank == 0:
            self._serve(StoreServer.tcp(host, port, secret), secret)
        else:
            self._find_server(lambda: (address, secret))

    def meet_in_file(self, path: Path) -> None:
        """Serves on a unix socket as rank 0 and writes its address to the file, or finds rank 0 there."""
        self.where = f"rank 0 (the server named in {path})"
        if not path.parent.is_dir() or path.is_dir():
            raise ConfigError(f"file://{path}: Expected a file, not yet there, in a folder that is.")
        if self.me.rank == 0:
            token = uuid.uuid4().hex
            server = StoreServer.unix(token.encode())
            self._serve(server, token.encode())
            self._write_file(path, _Spot(server.address, token, self.me.host, self.me.machine))
        else:
            self._find_server(lambda: _read_spot(path, self.me))

    def _serve(self, server: StoreServer, secret: bytes) -> None:
        self.server = server.start()
        self.client = StoreClient.connect(server.here, secret, self.timeout_s)
        self.client.deadline = self.deadline + _GRACE_S
        self._enter(self.client, 1)

    def _find_server(self, find: Callable[[], tuple[str, bytes]]) -> None:
        pause_s = 0.01
        while True:
            try:
                address, secret = find()
                self.client = StoreClient.connect(address, secret, max(self._left(), 0.01), retry=False)
                self.client.deadline = self.deadline + _GRACE_S
                if self._count(self.client) == 1:
                    self._enter(self.client, 1)
                    return
                trouble = "it still serves the last meeting"
                self.client.close()
            except _NotYet as error:
                trouble = str(error)
            except (StoreLostError, TimeoutError) as error:
                trouble = reason(error.__cause__ or error)
                if self.client is not None:
                    self.client.close()
            if self._left() <= 0:
                raise JoinError(
                    f"{self.me}: {self.where} never answered for {self.timeout_s:.1f} s (last: {trouble}).\n"
                    "  Is rank 0 running, with the same address, and can this host reach it?"
                    "    Longer: init_process_group(timeout=...)"
                )
            self._notice_failure(trouble)
            time.sleep(min(pause_s, max(self._left(), 0.0)))
            pause_s = min(pause_s * 1.5, 0.1)

    # The registration.

    def register(self) -> tuple[Member, ...]:
        """Tells the others who this is and waits for all of them.

        Raises:
            JoinError: the same on all ranks that wait.
        """
        members = self._register(PrefixStore("join", self.store))
        if self.client is not None:
            self.client.deadline = math.inf
        self._remove_file()
        return members

    def _register(self, board: Store) -> tuple[Member, ...]:
        me, mine = self.me, msgspec.msgpack.encode(self.me)
        if board.add("first", 1) == 1:
            board.set("size", mine)
        first = msgspec.msgpack.decode(board.get("size", self._left()), type=Member)
        if first.world_size != me.world_size:
            error = (
                f"The ranks disagree on the world size: {first} says {first.world_size}, {me} says {me.world_size}.\n"
                "  Start all of them with the same WORLD_SIZE (or world_size=)."
            )
            self._settle(board, _Verdict(error))
            raise JoinError(error)
        if board.add(f"claims/{me.rank}", 1) > 1:
            raise self._duplicate(board)
        board.set(f"member/{me.rank}", mine)
        # Whoever comes last tells all; nobody has to read all the others.
        if board.add("joined", 1) == me.world_size:
            self._settle(board, self._roll_call(board))
        try:
            verdict = self._await_verdict(board)
        except TimeoutError:
            self._settle(board, self._roll_call(board))
            verdict = board.get("verdict", _GRACE_S)
        outcome = msgspec.msgpack.decode(verdict, type=_Verdict)
        if outcome.error:
            listened = self.server.whereabouts() if self.server is not None and outcome.missing else ""
            raise JoinError(outcome.error + (f"\n  Rank 0 listened {listened}." if listened else ""))
        return outcome.members

    def _await_verdict(self, board: Store) -> bytes:
        calm_s = self._began + _NOTICE_S - time.monotonic()
        if calm_s < self._left():
            try:
                return board.get("verdict", max(calm_s, 0.0))
            except TimeoutError:
                self._notice_missing(board)
        return board.get("verdict", self._left())

    def _settle(self, board: Store, verdict: _Verdict) -> None:
        # The first verdict counts, so that no rank goes on where another one has given up.
        if board.add("verdicts", 1) == 1:
            board.set("verdict", msgspec.msgpack.encode(verdict))

    def _roll_call(self, board: Store) -> _Verdict:
        size = self.me.world_size
        found = board.peek([f"member/{rank}" for rank in range(size)])
        members = tuple(msgspec.msgpack.decode(value, type=Member) for value in found if value is not None)
        if len(members) == size:
            return _Verdict("", members)
        missing = [rank for rank, value in enumerate(found) if value is None]
        lines = [
            f"{len(missing)} of {size} ranks did not join in {self.timeout_s:.1f} s: missing {rank_list(missing)}.",
            f"Joined: {', '.join(map(str, members[:8]))}{' and others' if len(members) > 8 else ''}.",
            *(self.server.refusals.values() if self.server is not None else ()),
            "Look at the output of those that are missing.    Longer: init_process_group(timeout=...)",
        ]
        return _Verdict("\n  ".join(lines), missing=tuple(missing))

    # What a rank that waits long says.

    def _notice_missing(self, board: Store) -> None:
        # One rank speaks for all that wait: rank 0, or the first that is here. Only it reads the list.
        if self.me.rank and board.check(["member/0"]):
            return
        found = board.peek([f"member/{rank}" for rank in range(self.me.world_size)])
        missing = [rank for rank, value in enumerate(found) if value is None]
        if missing and not any(found[: self.me.rank]):
            listens = self.server.whereabouts() if self.server is not None else ""
            self._notice(f"for {rank_list(missing)} " + (f"(it listens {listens})" if listens else f"on {self.where}"))

    def _notice_failure(self, trouble: str) -> None:
        if not self._noticed and time.monotonic() - self._began >= _NOTICE_S:
            self._noticed = True
            self._notice(f"for {self.where}; last: {trouble}")

    def _notice(self, facts: str) -> None:
        waited_s = time.monotonic() - self._began
        line = (
            f"allranks: rank {self.me.rank} has waited {waited_s:.0f} s {facts};"
            f" it gives up after {self.timeout_s:.0f} s, see init_process_group(timeout=...)\n"
        )
        if sys.stderr is not None:
            sys.stderr.write(line)  # in one piece, as other ranks write there, too
            sys.stderr.flush()

    def _duplicate(self, board: Store) -> JoinError:
        try:
            other = str(
                msgspec.msgpack.decode(board.get(f"member/{self.me.rank}", min(1.0, self._left())), type=Member)
            )
        except TimeoutError:
            other = f"another process with rank {self.me.rank}"
        return JoinError(
            f"Two processes have the same rank: {other} joined first, then {self.me}.\n"
            "  Give each process a rank of its own (RANK, or rank=). One that was started again cannot join again"
            " alone: start all ranks."
        )

    # The file of file://.

    def _write_file(self, path: Path, spot: _Spot) -> None:
        draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            self._file_was_there = path.exists() and path.stat().st_size == 0
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(msgspec.json.encode(spot))
            self._file = draft.replace(path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise ConfigError(f"file://{path}: cannot be written: {reason(error)}.") from None

    def _remove_file(self) -> None:
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

    def _count(self, root: Store) -> int:
        return root.add(f"allranks/joins/{self.me.rank}/{_PROCESS}.{self.me.pid}", 1)

    def _enter(self, root: Store, generation: int) -> None:
        self.store = PrefixStore(f"allranks/{generation}", root)

    def _left(self) -> float:
        return self.deadline - time.monotonic()


def _read_spot(path: Path, me: Member) -> tuple[str, bytes]:
    try:
        spot = msgspec.json.decode(path.read_bytes(), type=_Spot)
    except FileNotFoundError:
        raise _NotYet("the file is not there") from None
    except msgspec.MsgspecError:
        raise _NotYet("the file names no server") from None
    except OSError as error:
        raise ConfigError(f"file://{path}: cannot be read: {reason(error)}.") from None
    if spot.machine != me.machine:
        raise _NotYet(f"the file is of host {spot.host}, this is {me.host}; between hosts use tcp://")
    return spot.address, spot.token.encode()


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
