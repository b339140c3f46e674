"""What a scheduler or launcher is to the rest of the package: one ``Scheduler``, defined in a file of its own.

``allranks env``, ``init_process_group`` and ``allranks run`` detect by it. ``allranks run`` starts its agents by it,
and ``allranks submit`` writes its job file by it. docs/extending.md has a worked example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from allranks._cluster.context import LaunchContext
from allranks._cluster.hostlist import Slots
from allranks._cluster.reading import Environ, TaskVariables

__all__ = ["INTERFACE", "Detect", "Job", "PerHost", "RemoteCommand", "Scheduler", "Submission"]

INTERFACE = 1
"""The version of this file's classes. It is raised when a scheduler that was written for them no longer works."""

Detect: TypeAlias = Callable[[Environ, bool], LaunchContext | None]
"""Looks at an environment. Arguments: the environment; whether ``allranks run`` asks, not a program that may be a rank.
Returns None where nothing is found; raises ConfigError where variables are missing or contradict each other."""

PerHost: TypeAlias = Callable[[str, Sequence[str], str], list[str]]
"""Makes a command. Arguments: the host; the agent's command; what the user calls in place of the program, or ""."""


@dataclass(frozen=True)
class RemoteCommand:
    """How agents are started on other hosts. Give ``per_host`` or ``for_all``.

    Attributes:
        name: the program, which must be installed, such as "srun".
        per_host: the command that runs the agent's command on one host, with its stdin and stdout connected to ours.
        for_all: commands that run the agent's command on the hosts without stdin: agents connect to the launcher.
            Arguments: the hosts; the agent's command.
        environ: the environment of the command, made from the launcher's.
        carries_environ: variables of the command's environment reach the agents. Otherwise the secret is read from a
            file in the home of the user, which the hosts must share.
        takes_names: it starts on any host that a user names. Otherwise ``--hosts`` goes by ssh.
        explain: the reason in what the command printed. Arguments: the host, the exit code or None, stderr.
            Returns "" where it knows none.
        noise: lines of stderr that mean nothing.
        outlives: options for a job that goes on when a host is lost, right behind the program's name: the command ends
            with none but its own host, and ends soon when that has vanished.
    """

    name: str
    per_host: PerHost | None = None
    for_all: Callable[[Sequence[Slots], Sequence[str]], list[list[str]]] | None = None
    environ: Callable[[Mapping[str, str]], dict[str, str]] = dict
    carries_environ: bool = True
    takes_names: bool = True
    explain: Callable[[str, int | None, str], str] = lambda host, code, stderr: ""
    noise: tuple[bytes, ...] = ()
    outlives: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job:
    """What a job asks for, before any system's spelling of it.

    Attributes:
        name: what queues call it.
        words: what follows ``allranks run`` and the options that are made of this job: ``script.py ...``,
            ``-m module ...``, ``-- command``.
        nodes: number of hosts.
        nproc: ranks on each.
        cpus: CPUs for each rank.
        gpus: GPUs on each host.
        memory_mib: memory on each host; None for the queue's default.
        time_s: how long it may take; None for the queue's default.
        queue: partition or queue.
        account: account or project.
        folder: where it runs; "" where the image sets it.
        python: the interpreter.
        venv: the virtual environment that this is of, or "".
        image: of containers: the image.
        namespace: Kubernetes: where it runs.
        secret: of containers: what they prove to each other.
        least: the job goes on after losses as long as so many ranks are left; None: any loss ends it.
        spares: how many of the hosts run no rank at first.
        respawns: how often a lost rank is started again; of containers, also a lost container.
    """

    name: str
    words: tuple[str, ...]
    nodes: int = 1
    nproc: int = 1
    cpus: int = 1
    gpus: int = 0
    memory_mib: int | None = None
    time_s: int | None = None
    queue: str = ""
    account: str = ""
    folder: str = ""
    python: str = ""
    venv: str = ""
    image: str = ""
    namespace: str = ""
    secret: str = field(default="", repr=False)
    least: int | None = None
    spares: int = 0
    respawns: int = 0


@dataclass(frozen=True)
class Submission:
    """How a job is submitted.

    Attributes:
        file: the job file's text.
        command: submits the file, which it reads from stdin.
        id: a regular expression whose group 1 is the job's id in what the command prints; matched line by line.
        state: the command that shows the job's state. Here and below ``{id}``, ``{name}``, ``{number}`` (the id up to
            its first dot), ``{nodes}`` and ``{space}`` (the option of a namespace) are filled in.
        output: the command that shows what it prints.
        stop: the command that ends it.
        containers: ranks run in containers, of an image that cannot be seen from here.
        check: raises ConfigError where a job cannot be written for this system.
        name_for: the job's name, made from the script's.
    """

    file: Callable[[Job], str]
    command: tuple[str, ...]
    id: str
    state: str
    output: str
    stop: str
    containers: bool = False
    check: Callable[[Job], None] = lambda job: None
    name_for: Callable[[str], str] | None = None


@dataclass(frozen=True)
class Scheduler:
    """A scheduler, or another thing that starts processes.

    Attributes:
        name: for ``ALLRANKS_ENV``, ``--env`` and ``submit --to``.
        title: as users write it, such as "SLURM".
        interface: the version of this interface that it was written for; ``INTERFACE`` at that time.
        proof: the variables that it sets, in words, for the error where it is named and not found.
        kinds: the ``kind`` of the contexts that it finds.
        rank: finds a process that is one rank, before ``tasks`` are looked at.
        tasks: the variables of processes that are ranks.
        node: finds a process that stands for its host, on which an agent is to start ranks.
        allocation: finds hosts on which nothing is started yet.
        read_hosts: the hosts of an allocation, where they stand in no variable.
        remote_commands: how agents are started on the hosts of an allocation.
        submission: how a job is submitted; None where ``allranks submit`` cannot.
        carries: variables that ranks on other hosts get, too, as each of a job's tasks has them.
    """

    name: str
    title: str
    interface: int
    proof: str
    kinds: tuple[str, ...]
    rank: Detect | None = None
    tasks: tuple[TaskVariables, ...] = ()
    node: Detect | None = None
    allocation: Detect | None = None
    read_hosts: Callable[[LaunchContext], tuple[Slots, ...]] | None = None
    remote_commands: tuple[RemoteCommand, ...] = ()
    submission: Submission | None = None
    carries: tuple[str, ...] = ()
