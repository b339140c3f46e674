"""What a rendezvous method is to ``join``: one ``Method`` for a scheme of URL, which makes a ``Finder`` per meeting.

A finder provides a store that all ranks reach. What the ranks then write there is the same for all methods
(``join_protocol``). docs/extending.md has a worked example of a method that a program brings.
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from urllib.parse import SplitResult

from allranks._cluster.env import JobEnv, read_env
from allranks._rendezvous.join_protocol import GRACE_S, Member
from allranks._store import Store, StoreClient, StoreServer

__all__ = ["Finder", "Method", "NotYet", "Request", "ServedFinder", "notify"]


class NotYet(Exception):
    """The store cannot be found yet. The message has the reason."""


@dataclass(frozen=True)
class Request:
    """One call of ``join``.

    Attributes:
        init_method: as the user gave it, for errors.
        url: the same in parts.
        rank: this process; -1: not given as an argument or in the URL.
        world_size: the number of processes; -1: not given.
        timeout_s: how long to wait for the others.
        deadline: the same as a time of ``time.monotonic``.
        environ: the environment.
    """

    init_method: str
    url: SplitResult
    rank: int
    world_size: int
    timeout_s: float
    deadline: float
    environ: Mapping[str, str]

    def read_job(self, *, by_env: bool) -> JobEnv:
        """Who this process is; ``by_env`` as in ``read_env``."""
        return read_env(self.rank, self.world_size, self.environ, by_env=by_env)

    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()


class Finder(ABC):
    """One rank's way to the store of one meeting.

    Attributes:
        request: what the user asked for.
        job: who this process is.
        me: the same, as the others see it. Set by ``open``.
        where: what errors call the store; set by ``open`` at the latest.
        advice: what to look at where the store does not answer.
        started: how many ranks were started on each host, where a scheduler has set it.
        fresh: rank 0 serves the store for this meeting only.
        server: the store, where this process serves it.
    """

    me: Member
    where = ""
    advice = ""
    fresh = False
    server: StoreServer | None = None
    _client: StoreClient | None = None

    def __init__(self, request: Request, job: JobEnv) -> None:
        self.request = request
        self.job = job
        self.started: Mapping[str, int] = {}

    def open(self, me: Member) -> None:
        """Called once, in a job of several ranks, before ``find``.

        Raises:
            ConfigError: a setting is missing or wrong, or a port is taken.
        """
        self.me = me

    @abstractmethod
    def find(self) -> Store:
        """Looks for the store once. It is called again until the deadline.

        Raises:
            NotYet: it is not there. The errors of ``StoreClient.connect`` mean the same.
        """

    def disconnect(self) -> None:
        """Ends the connection that ``find`` made, if it made one. Idempotent."""
        if self._client is not None:
            self._client.close()

    def finish(self) -> None:
        """All ranks have met: the store stays, and nobody looks for it any more."""
        if self._client is not None:
            self._client.deadline = float("inf")

    def find_again(self, timeout_s: float) -> Store:
        """After the meeting, where the store outlives it: the store, on a connection of its own.

        Raises:
            StoreLostError, TimeoutError, NotYet: it does not answer in time.
        """
        self._client = None
        self.request = replace(self.request, deadline=time.monotonic() + timeout_s)
        store = self.find()
        self.finish()
        return store

    def close(self, linger_s: float) -> None:
        """Ends what was opened. Idempotent.

        Args:
            linger_s: how long a server waits for others to leave.
        """
        self.disconnect()
        if self.server is not None:
            self.server.close(linger_s)

    def dial(self, address: str, secret: bytes) -> Store:
        """Connects to a store of allranks."""
        self._client = StoreClient.connect(address, secret, max(self.request.left_s(), 0.01), retry=False)
        self._client.timeout_s = self.request.timeout_s
        self._client.deadline = self.request.deadline + GRACE_S
        return self._client


class ServedFinder(Finder):
    """Rank 0 serves the store for this meeting. The other ranks look for it.

    Attributes:
        secret: what both sides of a connection to it prove to have.
    """

    fresh = True
    advice = "Is rank 0 running, with the same address, and can this host reach it?"
    secret = b""

    def open(self, me: Member) -> None:
        super().open(me)
        if me.rank == 0:
            self.server = self.serve().start()

    @abstractmethod
    def serve(self) -> StoreServer:
        """Binds the server, on rank 0.

        Raises:
            ConfigError: the address is taken.
        """

    @abstractmethod
    def locate(self) -> str:
        """The address of rank 0, on another rank.

        Raises:
            NotYet: rank 0 cannot be found.
        """

    def find(self) -> Store:
        address = self.server.here if self.server is not None else self.locate()
        return self.dial(address, self.secret)


@dataclass(frozen=True)
class Method:
    """A rendezvous method.

    Attributes:
        scheme: of its URLs.
        form: a URL of it, for errors.
        make: makes the finder of one meeting. It opens nothing.
    """

    scheme: str
    form: str
    make: Callable[[Request], Finder]


def notify(line: str) -> None:
    """Writes a line to stderr, in one piece, as other ranks write there too."""
    if sys.stderr is not None:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
