"""What an agent and its launcher say to each other.

Typed and free of objects of this process, as an agent may sit on another host. Upwards goes what ranks write, why
they fail, that they are gone; downwards what to start and whom to signal. What it means for the job is decided in
``supervise`` and ``blame``.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from allranks.launch.spec.options import Bind
from allranks.launch.spec.stdio import Stdio
from allranks.launch.spec.target import Target

__all__ = [
    "Again",
    "Asked",
    "Begun",
    "Came",
    "Command",
    "Dump",
    "End",
    "Ended",
    "Event",
    "Exited",
    "Failed",
    "Finish",
    "Finished",
    "Hello",
    "Listen",
    "Lost",
    "Message",
    "Noted",
    "Output",
    "Prepare",
    "Ready",
    "Report",
    "Resize",
    "Returned",
    "Signal",
    "Stacks",
    "Start",
    "Unable",
]


class Report(msgspec.Struct, frozen=True, tag=True):
    """How a python rank failed, told by the rank itself at the moment it happens.

    Attributes:
        code: the exit code that the interpreter will end with.
        title: the last line of the traceback, for example ``ValueError: boom``; "" for ``sys.exit(3)``.
        text: the formatted traceback; "" if there is none, or if the rank prints it by a hook of its own.
        where: the innermost line of the user's own code, for example ``train.py:12 in step``.
        echo: the failure only tells of another rank's: a ``PeerLostError`` or what came of one.
        interrupted: it is a KeyboardInterrupt.
        at: when, on the clock that all processes of a host share (``time.monotonic``).
        error: what a function raised, pickled, where it can be.
    """

    code: int
    title: str = ""
    text: str = ""
    where: str = ""
    echo: bool = False
    interrupted: bool = False
    at: float = 0.0
    error: bytes = b""


class Output(msgspec.Struct, frozen=True, tag=True):
    """Bytes that a rank wrote. ``stream`` is 1 or 2; a rank with one channel for both says 1."""

    rank: int
    stream: int
    data: bytes


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A rank reported its failure. Its process is still on its way out."""

    rank: int
    pid: int
    report: Report


class Exited(msgspec.Struct, frozen=True, tag=True):
    """A rank's process is gone.

    Attributes:
        status: its exit code, or minus the signal that killed it.
        tail: its last lines, where its agent shows what ranks write, and has not shown them.
    """

    rank: int
    pid: int
    status: int
    tail: tuple[bytes, ...] = ()


class Stacks(msgspec.Struct, frozen=True, tag=True):
    """More of the stacks that ``Dump`` asked for. ``why``: there are none, and the reason."""

    rank: int
    text: bytes = b""
    why: str = ""


class Returned(msgspec.Struct, frozen=True, tag=True):
    """A rank that ran a function is through with it. ``piece``: more of what it returned, pickled."""

    rank: int
    piece: bytes


class Asked(msgspec.Struct, frozen=True, tag=True):
    """An agent was sent a signal, by a batch system for example, that is meant for the whole job."""

    signal: int


class Again(msgspec.Struct, frozen=True, tag=True):
    """Start a rank again, alone; what is left of its process is killed first. A master asks for it, of a worker.

    Attributes:
        rank: the rank.
        environ: variables on top of the rank's own.
    """

    rank: int
    environ: dict[str, str]


class Begun(msgspec.Struct, frozen=True, tag=True):
    """A rank has been started again. All that was told of its last process came before."""

    rank: int


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


class Lost(msgspec.Struct, frozen=True, tag=True):
    """A host is gone, with all its ranks: its agent ended, or the connection to it."""

    host: str
    ranks: tuple[int, ...]
    why: str


class Came(msgspec.Struct, frozen=True, tag=True):
    """A host is there that could take part. Told by a fleet, not by an agent."""

    host: str


class Noted(msgspec.Struct, frozen=True, tag=True):
    """A line that is no rank's: what ssh or an agent itself says on stderr."""

    host: str
    text: bytes


Event = Output | Failed | Exited | Stacks | Returned | Again | Begun | Asked | Lost | Came | Noted
"""What happens while ranks run."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """An agent is there.

    Attributes:
        host: the name that its host has for itself, or that a scheduler has for it.
        version: of allranks.
        python: of the interpreter.
        node: its number, where whoever started it said so.
        nproc: ranks that are wanted there, where whoever started it said so.
        cpus: how many it may use.
        gpus: how many it has; None where nobody asked.
        now: its clock.
        run: name of the job that it wants to take part in, where whoever started it said so; else "".
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


class Ready(msgspec.Struct, frozen=True, tag=True):
    """An agent has done what ``Prepare`` asked.

    Attributes:
        stores: where the ranks' store is for other hosts' ranks, as addresses of which any may be the one that they
            reach; empty if it is elsewhere, or of this host alone.
        port: a TCP port that is free there.
        now: its clock.
    """

    stores: tuple[str, ...]
    port: int
    now: float


class Unable(msgspec.Struct, frozen=True, tag=True):
    """An agent cannot do what it was asked."""

    why: str


class Finished(msgspec.Struct, frozen=True, tag=True):
    """Nothing is left of the ranks of this round."""


Message = Event | Hello | Ready | Unable | Finished
"""What an agent says."""


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """All that an agent can do before it knows the other hosts.

    Attributes:
        target: what its ranks run.
        nproc: how many it will start.
        start: fork or spawn.
        folder: the working directory; "" for the agent's own.
        environ: variables on top of the agent's own.
        threads: threads per rank; None to decide.
        secret: guards the job's store; empty where the agent has dialled, and makes it from ``salt``.
        salt: see ``door.store_secret``.
        serves: rank 0 is there, and the store with it.
        spans: other hosts have ranks, too.
        bind: what CPUs a rank is bound to.
        one_gpu_per_rank: each rank sees one GPU only.
        role: name of what the ranks do.
        virtual_local_rank: LOCAL_RANK is 0 for all, as each sees one GPU.
        master: what rank 0's host is called, for programs that use torch.distributed; "" for its address.
        signals: those that an agent passes on to its ranks; they stop nothing.
    """

    target: Target
    nproc: int
    start: Literal["fork", "spawn"]
    folder: str
    environ: dict[str, str]
    threads: int | None
    secret: bytes
    salt: str
    serves: bool
    spans: bool
    bind: Bind = "none"
    one_gpu_per_rank: bool = False
    role: str = "default"
    virtual_local_rank: bool = False
    master: str = ""
    signals: tuple[int, ...] = ()


class Start(msgspec.Struct, frozen=True, tag=True):
    """Start the ranks.

    Attributes:
        first: number of the first one there; the others follow.
        count: how many there are.
        world_size: how many there are in the job.
        node: number of the host.
        nodes: how many hosts there are.
        stores: where the store may be reached, from other hosts than rank 0's.
        port: a port that was free on rank 0's host, for programs that use torch.distributed.
        run: name of the job.
        restart: how often it has been started again.
        restarts: how often it may be.
        role_first: number of the first one there among the ranks of its role.
        role_size: how many of that role there are in the job.
        stdio: what stdout and stderr of each rank are; empty where the agent shows them itself.
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


class Signal(msgspec.Struct, frozen=True, tag=True):
    """Send a signal to the process groups of ranks; ``alone``: to python ranks without their children."""

    number: int
    ranks: list[int]
    alone: bool = False


class Dump(msgspec.Struct, frozen=True, tag=True):
    """Tell the stacks of ranks."""

    ranks: list[int]


class Listen(msgspec.Struct, frozen=True, tag=True):
    """Read what ranks write, or let it wait."""

    on: bool


class Resize(msgspec.Struct, frozen=True, tag=True):
    """The terminal has another size."""

    rows: int
    columns: int


class Finish(msgspec.Struct, frozen=True, tag=True):
    """Kill what is left of the ranks; another round may follow."""


class End(msgspec.Struct, frozen=True, tag=True):
    """The job is over.

    Attributes:
        code: its exit code.
        text: why, where it failed.
    """

    code: int
    text: bytes = b""


Command = Prepare | Start | Signal | Again | Ended | Dump | Listen | Resize | Finish | End
"""What a launcher says to an agent."""
