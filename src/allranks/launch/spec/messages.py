"""The messages between an agent and its launcher.

Typed and free of objects of this process, as an agent may run on another host. An agent sends the events of
``events`` and its answers. The launcher sends commands: what to start and which ranks to signal. ``launch/policy``
decides what an event means for the job.
"""

from __future__ import annotations

import msgspec

from allranks.launch.spec.events import Event, RestartRank
from allranks.launch.spec.options import RankOptions
from allranks.launch.spec.stdio import Stdio

__all__ = [
    "Answered",
    "Command",
    "RequestStacks",
    "EndAgent",
    "Ended",
    "Finish",
    "Finished",
    "AgentHello",
    "Inspect",
    "ReadOutput",
    "Message",
    "Prepare",
    "AgentReady",
    "Resize",
    "Signal",
    "StartRanks",
    "Unable",
]


class Ended(msgspec.Struct, frozen=True, tag=True):
    """How a worker has ended, for the master, whose host gets this: it lies in the job's store from then on.

    Attributes:
        rank: the worker.
        pid: its process; 0 where its whole host was lost.
        status: as in ``Exited``, or why the host was lost.
    """

    rank: int
    pid: int
    status: int | str

    @staticmethod
    def key(rank: int) -> str:
        """Where it lies."""
        return f"ended/{rank}"


class AgentHello(msgspec.Struct, frozen=True, tag=True):
    """An agent is there.

    Attributes:
        host: the name that its host has for itself, or that a scheduler has for it.
        version: of allranks.
        python: of the interpreter.
        node: its number, if its command line has it.
        nproc: ranks that are wanted there, if its command line has that.
        cpus: how many it may use.
        gpus: how many it has; None if it was not requested.
        now: its clock.
        run: name of the job that it wants to take part in, if its command line has it; else "".
        role: name of what its ranks do, likewise.
    """

    host: str
    version: str
    python: str
    node: int | None
    nproc: int | None
    cpus: int
    gpus: int | None
    now: float
    run: str = ""
    role: str = ""


class AgentReady(msgspec.Struct, frozen=True, tag=True):
    """An agent has done what ``Prepare`` asked.

    Attributes:
        stores: where the ranks' store is for other hosts' ranks, as addresses of which any may be the one that they
            reach; empty if it is elsewhere, or of this host alone.
        port: a TCP port that is free there.
        now: its clock.
        addresses: of the host, where other hosts have ranks and the store is elsewhere.
    """

    stores: tuple[str, ...]
    port: int
    now: float
    addresses: tuple[str, ...] = ()


class Unable(msgspec.Struct, frozen=True, tag=True):
    """An agent cannot do what it was asked."""

    why: str


class Finished(msgspec.Struct, frozen=True, tag=True):
    """Nothing is left of the ranks of this round."""


Message = Event | AgentHello | AgentReady | Unable | Finished
"""What an agent sends."""


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """All that an agent can do before the other hosts are known.

    Attributes:
        ranks: what it starts, and how.
        nproc: how many it will start.
        folder: the working directory; "" for the agent's own.
        environ: variables on top of the agent's own.
        secret: guards the job's store; empty where the agent has connected, and makes it from ``salt``.
        salt: see ``_net.secret.store_secret``.
        serves: the store is there: with rank 0, except in an elastic job, whose launcher has it.
        spans: other hosts have ranks, too.
        master: what rank 0's host is called, for programs that use torch.distributed; "" for its address.
    """

    ranks: RankOptions
    nproc: int
    folder: str
    environ: dict[str, str]
    secret: bytes
    salt: str
    serves: bool
    spans: bool
    master: str = ""


class StartRanks(msgspec.Struct, frozen=True, tag=True):
    """Start the ranks.

    Attributes:
        first: number of the first one there; the others follow.
        count: how many there are.
        world_size: how many there are in the job.
        node: number of the host.
        nodes: how many hosts there are.
        stores: where the store may be reached, from other hosts than its own.
        port: a port that was free on rank 0's host, for programs that use torch.distributed.
        run: name of the job.
        restart: how often it has been started again.
        restarts: how often it may be.
        role_first: number of the first one there among the ranks of its role.
        role_size: how many of that role there are in the job.
        stdio: what stdout and stderr of each rank are; empty where the agent shows them itself.
        leader: addresses of the host of rank 0, where the store is elsewhere.
        starts: where these ranks come from a lost host: how many processes had the seat of each before. Others are not
            started. Each is reported by ``RankRestarted``. Empty where all start for the first time.
    """

    first: int
    count: int
    world_size: int
    node: int
    nodes: int
    stores: tuple[str, ...]
    port: int
    run: str
    restart: int
    restarts: int
    role_first: int
    role_size: int
    stdio: tuple[Stdio, ...]
    leader: tuple[str, ...] = ()
    starts: dict[int, int] = {}


class Signal(msgspec.Struct, frozen=True, tag=True):
    """Send a signal to the process groups of ranks; ``alone``: to python ranks without their children."""

    number: int
    ranks: list[int]
    alone: bool = False


class RequestStacks(msgspec.Struct, frozen=True, tag=True):
    """Tell the stacks of ranks."""

    ranks: list[int]


class Inspect(msgspec.Struct, frozen=True, tag=True):
    """Tell what ranks do, and their newest calls: ``recent`` of them. Of ranks that have ended, too."""

    ranks: list[int]
    recent: int = 0


class Answered(msgspec.Struct, frozen=True, tag=True):
    """Answers ``Asked``: what the ranks of the job do, as it is sent to who has asked."""

    answer: bytes


class ReadOutput(msgspec.Struct, frozen=True, tag=True):
    """Read what ranks write, or let it wait."""

    on: bool


class Resize(msgspec.Struct, frozen=True, tag=True):
    """The terminal has another size."""

    rows: int
    columns: int


class Finish(msgspec.Struct, frozen=True, tag=True):
    """Kill what is left of the ranks; another round may follow. ``patience_s``: until processes they left are."""

    patience_s: float = 0.0


class EndAgent(msgspec.Struct, frozen=True, tag=True):
    """The job is over.

    Attributes:
        code: its exit code.
        text: why, where it failed.
    """

    code: int
    text: bytes = b""


Command = (
    Prepare
    | StartRanks
    | Signal
    | RestartRank
    | Ended
    | RequestStacks
    | Inspect
    | Answered
    | ReadOutput
    | Resize
    | Finish
    | EndAgent
)
"""What a launcher sends to an agent."""
