"""The interface of a scheduler or launcher: one ``Scheduler``, defined in its own file.

``allranks env``, ``init_process_group`` and ``allranks run`` use it for detection. ``allranks run`` starts its agents
with it, and ``allranks submit`` writes its job file with it. docs/extending.md has a worked example.
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
"""Version of the classes in this file. It increases when schedulers written for the previous version stop working."""

Detect: TypeAlias = Callable[[Environ, bool], LaunchContext | None]
"""Examines an environment. Arguments: the environment; whether the caller is ``allranks run`` (False: a program that
may be a rank). Returns None if nothing is found. Raises ConfigError if variables are missing or contradict each
other."""

PerHost: TypeAlias = Callable[[str, Sequence[str], str], list[str]]
"""Returns a command. Arguments: the host; the agent's command; the user's replacement for the program, or ""."""


@dataclass(frozen=True)
class RemoteCommand:
    """How agents are started on other hosts. Set ``per_host`` or ``for_all``.

    Attributes:
        name: The program, which must be installed, such as "srun".
        per_host: Returns the command that runs the agent's command on one host, and passes its stdin and stdout
            through.
        for_all: Returns commands that run the agent's command on the hosts without stdin: the agents connect to the
            launcher. Arguments: the hosts; the agent's command.
        environ: Returns the environment of the command, from the launcher's environment.
        carries_environ: Variables of the command's environment reach the agents. If False, agents read the secret from
            a file in the user's home, which the hosts must share.
        takes_names: The command starts agents on any host that the user names. If False, ``--hosts`` uses ssh.
        explain: Returns the cause of a failure, from the output of the command. Arguments: the host, the exit code or
            None, stderr. Returns "" if the cause is unknown.
        noise: Texts in lines of stderr that are meaningless and are dropped.
        outlives: Options for a job that continues after the loss of a host, inserted directly after the program's name.
            With them the command survives the loss of any host but its own. It exits soon after its own host vanishes.
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
    """The resources and settings of a job, independent of the syntax of any scheduler.

    Attributes:
        name: Name of the job in the queue.
        words: The words after ``allranks run`` and the options that this job determines: ``script.py ...``, ``-m module
            ...``, ``-- command``.
        nodes: Number of hosts.
        nproc: Number of ranks on each host.
        cpus: CPUs for each rank.
        gpus: GPUs on each host.
        memory_mib: Memory on each host, in MiB. None: the default of the queue.
        time_s: Time limit in seconds. None: the default of the queue.
        queue: Partition or queue.
        account: Account or project.
        folder: Working directory. "" if the image sets it.
        python: The interpreter.
        venv: The virtual environment of the interpreter, or "".
        image: Containers only: the image.
        namespace: Kubernetes only: the namespace in which the job runs.
        secret: Containers only: the secret that they prove to each other.
        least: The job continues after losses as long as at least this number of ranks remains. None: any loss ends it.
        spares: Number of the hosts that run no rank at first.
        respawns: How often a lost rank is restarted. Containers only: also how often a lost container is restarted.
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
        file: Returns the text of the job file.
        command: Submits the job file, which it reads from stdin.
        id: Regular expression whose group 1 is the job's id in the output of the command. It is matched against each
            line.
        state: Command that shows the job's state. In this and the next attributes these fields are replaced: ``{id}``,
            ``{name}``, ``{number}`` (the id up to its first dot), ``{nodes}`` and ``{space}`` (the option of a
            namespace).
        output: Command that shows the job's output.
        stop: Command that ends the job.
        containers: The ranks run in containers, whose image cannot be inspected from this host.
        check: Raises ConfigError if a job cannot be written for this scheduler.
        name_for: Returns the name of the job, from the name of the script.
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
    """A scheduler, or another system that starts processes.

    Attributes:
        name: Name for ``ALLRANKS_ENV``, ``--env`` and ``submit --to``.
        title: Name in the spelling of its users, such as "SLURM".
        interface: Version of the interface for which the scheduler was written: the value of ``INTERFACE`` at that
            time.
        proof: The variables that it sets, in words. The error shows them if the scheduler is named but not found.
        kinds: Values of ``kind`` in the contexts that it finds.
        rank: Detects a process that is one rank, before ``tasks`` are examined.
        tasks: Variables of processes that are ranks.
        node: Detects a process that stands for its host, on which an agent is to start ranks.
        allocation: Detects hosts on which nothing has been started yet.
        read_hosts: Returns the hosts of an allocation, if no variable lists them.
        remote_commands: Commands that start agents on the hosts of an allocation.
        submission: How a job is submitted. None if ``allranks submit`` does not support the scheduler.
        carries: Variables that ranks on other hosts also receive, because each task of a job has them.
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
