"""Interface between a rendezvous method and ``join``: one ``Method`` for a URL scheme creates one ``Finder`` for each
rendezvous.

A finder provides a store that all ranks reach. The ranks then write the same keys there for all methods
(``join_protocol``). docs/extending.md has a complete example of a method that a program adds.
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
    """The store cannot be found yet. The message contains the reason."""


@dataclass(frozen=True)
class Request:
    """The request of one call of ``join``.

    Attributes:
        init_method: The argument as the user passed it, for error messages.
        url: The same, split into parts.
        rank: The rank of this process. -1: neither an argument nor the URL contains it.
        world_size: The number of processes. -1: neither an argument nor the URL contains it.
        timeout_s: Seconds to wait for the other ranks.
        deadline: The end of the timeout, in seconds of ``time.monotonic``.
        environ: The environment.
    """

    init_method: str
    url: SplitResult
    rank: int
    world_size: int
    timeout_s: float
    deadline: float
    environ: Mapping[str, str]

    def read_job(self, *, by_env: bool) -> JobEnv:
        """Return rank and world size of this process and the job's settings. ``by_env`` is as in ``read_env``."""
        return read_env(self.rank, self.world_size, self.environ, by_env=by_env)

    def left_s(self) -> float:
        """Return the seconds until the deadline."""
        return self.deadline - time.monotonic()


class Finder(ABC):
    """The access of one rank to the store of one rendezvous.

    Attributes:
        request: The request of the user.
        job: The rank of this process and the settings of the job.
        me: The description of this process for the other ranks. Set by ``open``.
        where: Name of the store in error messages. Set by ``open`` at the latest.
        advice: What the user should check if the store does not answer.
        started: The number of ranks started on each host, if a scheduler has set it.
        fresh: Rank 0 serves the store for this rendezvous only.
        server: The store, if this process serves it.
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
        """Prepare the search. Called once before ``find``, in a job of several ranks.

        Raises:
            ConfigError: A setting is missing or wrong, or a port is taken.
        """
        self.me = me

    @abstractmethod
    def find(self) -> Store:
        """Try once to find the store. The caller repeats this until the deadline.

        Raises:
            NotYet: The store is not available yet. The errors of ``StoreClient.connect`` have the same meaning.
        """

    def disconnect(self) -> None:
        """Close the connection that ``find`` created, if there is one. Idempotent."""
        if self._client is not None:
            self._client.close()

    def finish(self) -> None:
        """End the search when all ranks have joined. The connection stays open without a deadline."""
        if self._client is not None:
            self._client.deadline = float("inf")

    def find_again(self, timeout_s: float) -> Store:
        """Return the store on a new connection, after the rendezvous, if the store outlives it.

        Raises:
            StoreLostError, TimeoutError, NotYet: The store does not answer in time.
        """
        self._client = None
        self.request = replace(self.request, deadline=time.monotonic() + timeout_s)
        store = self.find()
        self.finish()
        return store

    def close(self, linger_s: float) -> None:
        """Close the connection and the server. Idempotent.

        Args:
            linger_s: Seconds for which a server waits for the other ranks to leave.
        """
        # First, because the server waits until all clients have disconnected.
        self.disconnect()
        if self.server is not None:
            self.server.close(linger_s)

    def dial(self, address: str, secret: bytes) -> Store:
        """Connect to a store of allranks."""
        # A single attempt: the state machine repeats it, and each repetition may find another address.
        self._client = StoreClient.connect(address, secret, max(self.request.left_s(), 0.01), retry=False)
        self._client.timeout_s = self.request.timeout_s
        # The grace time lets this rank read the verdict after the timeout.
        self._client.deadline = self.request.deadline + GRACE_S
        return self._client


class ServedFinder(Finder):
    """Finder of a store that rank 0 serves for this rendezvous. The other ranks search for it.

    Attributes:
        secret: The secret that both sides of a connection to the store prove.
    """

    fresh = True
    advice = "Check that rank 0 is running with the same address and that this host can reach it."
    secret = b""

    def open(self, me: Member) -> None:
        super().open(me)
        if me.rank == 0:
            self.server = self.serve().start()

    @abstractmethod
    def serve(self) -> StoreServer:
        """Bind the server. Called on rank 0.

        Raises:
            ConfigError: The address is taken.
        """

    @abstractmethod
    def locate(self) -> str:
        """Return the address of rank 0. Called on the other ranks.

        Raises:
            NotYet: Rank 0 cannot be found yet.
        """

    def find(self) -> Store:
        # Rank 0 is a client of its own server, so all ranks run the same protocol.
        address = self.server.here if self.server is not None else self.locate()
        return self.dial(address, self.secret)


@dataclass(frozen=True)
class Method:
    """A rendezvous method.

    Attributes:
        scheme: The scheme of its URLs.
        form: The form of its URLs, for error messages.
        make: Creates the finder of one rendezvous. It opens nothing.
    """

    scheme: str
    form: str
    make: Callable[[Request], Finder]


def notify(line: str) -> None:
    """Write a line to stderr in one call, because other ranks write to the same stderr."""
    if sys.stderr is not None:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
