"""The messages between an agent and its launcher.

The messages are typed and contain no objects of this process, because an agent may run on another host. An agent sends
the events of ``events`` and its replies. The launcher sends commands: which ranks to start and which ranks to signal.
``launch/policy`` decides what an event means for the job.
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
    """Exit status of a worker, sent to the master's host, which then keeps it in the job's store.

    Attributes:
        rank: the worker.
        pid: its process; 0 if its whole host was lost.
        status: as in ``Exited``, or the reason why the host was lost.
    """

    rank: int
    pid: int
    status: int | str

    @staticmethod
    def key(rank: int) -> str:
        """Return the key in the store."""
        return f"ended/{rank}"


class AgentHello(msgspec.Struct, frozen=True, tag=True):
    """Announces an agent to the launcher.

    Attributes:
        host: the name that its host has for itself, or the scheduler's name for it.
        version: version of allranks.
        python: version of the interpreter.
        node: its number, if its command line has it.
        nproc: number of ranks requested there, if its command line has it.
        cpus: number of CPUs that it may use.
        gpus: number of its GPUs; None if it was not requested.
        now: time of its clock.
        run: name of the job that it requests to join, if its command line has it; else "".
        role: name of the task of its ranks, if its command line has it.
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
    """An agent has executed ``Prepare``.

    Attributes:
        stores: addresses of the ranks' store for ranks of other hosts. Any of them may be the one that these ranks can
            reach. Empty if the store is on another host, or for this host only.
        port: a TCP port that is free there.
        now: time of its clock.
        addresses: addresses of the host, if other hosts have ranks and the store is on another host.
    """

    stores: tuple[str, ...]
    port: int
    now: float
    addresses: tuple[str, ...] = ()


class Unable(msgspec.Struct, frozen=True, tag=True):
    """An agent cannot execute a command."""

    why: str


class Finished(msgspec.Struct, frozen=True, tag=True):
    """All processes of the ranks of this round have exited."""


Message = Event | AgentHello | AgentReady | Unable | Finished
"""Any message from an agent."""


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Everything that an agent can prepare before the other hosts are known.

    Attributes:
        ranks: the target and the options of its ranks.
        nproc: number of ranks that it will start.
        folder: the working directory; "" for the agent's own.
        environ: variables on top of the agent's own.
        secret: protects the job's store. Empty if the agent has connected to the launcher: it then derives it from
            ``salt``.
        salt: see ``_net.secret.store_secret``.
        serves: this host runs the store: the host of rank 0, except in an elastic job, whose launcher runs it.
        spans: other hosts have ranks, too.
        master: name of rank 0's host, for programs that use torch.distributed; "" for its address.
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
        first: number of the first rank of this host; the others follow.
        count: number of ranks of this host.
        world_size: number of ranks in the job.
        node: number of the host.
        nodes: number of hosts.
        stores: addresses of the store, for hosts other than the store's own.
        port: a port that was free on rank 0's host, for programs that use torch.distributed.
        run: name of the job.
        restart: number of restarts of the job so far.
        restarts: greatest number of restarts.
        role_first: number of the first rank of this host among the ranks of its role.
        role_size: number of ranks of that role in the job.
        stdio: stdout and stderr of each rank; empty if the agent shows them itself.
        leader: addresses of the host of rank 0, if the store is on another host.
        starts: for ranks that come from a lost host: the number of processes that each rank slot had before. Other
            ranks are not started. Each is reported by ``RankRestarted``. Empty if all ranks start for the first time.
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
    """Send a signal to the process groups of ranks. If ``alone`` is set, exclude the children of python ranks."""

    number: int
    ranks: list[int]
    alone: bool = False


class RequestStacks(msgspec.Struct, frozen=True, tag=True):
    """Send the stacks of ranks."""

    ranks: list[int]


class Inspect(msgspec.Struct, frozen=True, tag=True):
    """Send the state of ranks, with their ``recent`` newest calls. This includes ranks that have exited."""

    ranks: list[int]
    recent: int = 0


class Answered(msgspec.Struct, frozen=True, tag=True):
    """Answers ``Asked``: the state of the ranks of the job, in the form that the requesting command receives."""

    answer: bytes


class ReadOutput(msgspec.Struct, frozen=True, tag=True):
    """Read the output of the ranks, or leave it in their pipes."""

    on: bool


class Resize(msgspec.Struct, frozen=True, tag=True):
    """The size of the terminal has changed."""

    rows: int
    columns: int


class Finish(msgspec.Struct, frozen=True, tag=True):
    """Kill the remaining processes of the ranks; another round may follow.

    ``patience_s``: seconds that processes which ranks left behind have to exit first.
    """

    patience_s: float = 0.0


class EndAgent(msgspec.Struct, frozen=True, tag=True):
    """The job is over.

    Attributes:
        code: its exit code.
        text: the reason, if it failed.
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
"""Any command from a launcher to an agent."""
