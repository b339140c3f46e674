"""Where this process runs: which launcher or scheduler started it, and what the environment says about its place.

Launchers and schedulers each have their own words for a process's number, the number of processes, the hosts of a job.
They stand here in one table, innermost launcher first, so that a program that something else has started knows who it
is (``launcher=False``), and ``allranks run`` knows what is left for it to do (``launcher=True``): start ranks on the
nodes of an allocation, on this node only, or none at all. Every finding comes with the variables that led to it.

Only the environment is read here, and ``read_hosts`` reads one file; nothing is connected to. ``_rendezvous`` decides
how the ranks then meet. The table of our own variables is in ``_cluster.env``.

Source: srun(1) and sbatch(1); the variables that Open MPI's prte, MPICH's and Intel MPI's hydra set; the manuals of
MVAPICH2, Cray PALS, LSF (jsrun, blaunch), PBS, SGE and Flux; Kubernetes' Indexed Job, JobSet, and Kubeflow's
PyTorchJob and Trainer v2; SageMaker's training toolkit. Those of SLURM, Open MPI and MPICH are tried for real.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from allranks._base.errors import ConfigError
from allranks._cluster.hostlist import (
    Slots,
    count_lines,
    expand_counts,
    expand_hosts,
    expand_numbers,
    parse_pairs,
    parse_pe_hostfile,
)

__all__ = [
    "PORTS_TRIED",
    "CHOICES",
    "Clue",
    "Place",
    "Role",
    "detect",
    "read_hosts",
    "job_ports",
    "job_secret",
    "with_domain",
]

Role: TypeAlias = Literal["rank", "node", "allocation", "none"]
_Env: TypeAlias = Mapping[str, str]

PORTS_TRIED = 6
"""How many ports are tried in turn, as some may be taken."""

_PORTS = range(24_000, 32_000)  # below those that systems hand out by themselves: 32768 and more, on Linux
_SPECIAL_STEPS = 0xFFFFFFFA  # from here on: SLURM's interactive, batch, extern and pending step


@dataclass(frozen=True)
class Clue:
    """One variable that led to a finding.

    Attributes:
        name: the variable.
        value: what it holds.
        meaning: what follows from it, in a sentence.
    """

    name: str
    value: str
    meaning: str


@dataclass(frozen=True)
class Place:
    """Where this process runs.

    Attributes:
        kind: who started it, or whose allocation it is: "allranks", "torchrun", "openmpi", "mvapich", "mpich", "pals",
            "jsrun", "flux", "slurm", "kubeflow", "pytorchjob", "jobset", "indexedjob", "sagemaker", "pbs", "lsf",
            "sge"; "local" for none of them.
        role: "rank": this process is one rank of a job. "node": one agent is wanted in this process' place, which
            starts the ranks of this node. "allocation": the nodes are ours, and nothing is started on the others yet.
            "none": alone.
        rank: number of this process (role "rank").
        size: number of processes.
        local_rank: its number on its node; None where nobody says.
        local_size: the number of processes on its node.
        node: number of this node.
        nodes: number of nodes; None where nobody says.
        leader: host of node 0, which is rank 0's; "" where nobody says.
        ports: reserved for this job.
        hosts: its nodes, in order, and how many processes each is meant for.
        hostfile: where they stand in a file: ``read_hosts`` reads it.
        ways: how the nodes of the allocation can be reached, best first.
        job: text that no other job of this scheduler has; "" where there is none.
        pmi: the descriptor of a PMI-1 server; None where there is none.
        hint: what looks like an oversight, as a sentence; "" where nothing does.
        why: what led to this.
    """

    kind: str
    role: Role
    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    node: int | None = None
    nodes: int | None = None
    leader: str = ""
    ports: tuple[int, ...] = ()
    hosts: tuple[Slots, ...] = ()
    hostfile: str = ""
    ways: tuple[str, ...] = ()
    job: str = ""
    pmi: int | None = None
    hint: str = ""
    why: tuple[Clue, ...] = field(default=(), compare=False)

    @property
    def way(self) -> str:
        """The first of ``ways`` whose command is here; else ssh."""
        return next((way for way in self.ways if shutil.which(way)), "ssh")


def detect(environ: Mapping[str, str], override: str = "auto", *, launcher: bool) -> Place:
    """Says where this process runs.

    Args:
        environ: the environment.
        override: one of ``CHOICES``: looks only for that. "auto": for what ALLRANKS_ENV says, else for all.
        launcher: this process is to start ranks. Otherwise it is a program that may be one.

    Returns:
        The place; ``kind="local"`` and ``role="none"`` where nothing is found.

    Raises:
        ConfigError: variables are missing, contradict each other, or are not what they should be; or what ``override``
            names is not found.
    """
    source = "--env"
    if override == "auto":
        source, override = "ALLRANKS_ENV", environ.get("ALLRANKS_ENV", "").strip() or "auto"
    if override not in CHOICES:
        raise ConfigError(f"{source}={override!r} is not known. Expected one of {', '.join(CHOICES)}.")
    finders = [finder for names, finder in _FINDERS if override == "auto" or override in names]
    for finder in finders:
        if (place := finder(environ, launcher)) is not None:
            return place
    if finders and override != "auto" and launcher:
        raise ConfigError(
            f"{source}={override}, but this environment has nothing of it: expected {_PROOFS[override]}.\n"
            "  Start this where that scheduler has set them, or leave the choice to allranks: --env auto"
        )
    return Place("local", "none")


def read_hosts(place: Place) -> tuple[Slots, ...]:
    """The nodes of a place, also where they stand in a file.

    Raises:
        ConfigError: the file cannot be read, or is not what it should be.
    """
    if place.hosts or not place.hostfile:
        return place.hosts
    name, _, path = place.hostfile.partition("=")
    try:
        text = Path(path).read_text()
    except OSError as error:
        why = str(error.strerror or error).lower()
        raise ConfigError(f"{place.hostfile}: the list of this job's hosts cannot be read: {why}.") from None
    hosts = parse_pe_hostfile(text, path) if name == "PE_HOSTFILE" else count_lines(text, path)
    if name == "LSB_DJOB_RANKFILE" and len(hosts) > 1:
        hosts = hosts[1:]  # the first is the host that jsrun was called on
    return hosts


def with_domain(leader: str, own: str) -> str:
    """The leader's name with the domain of this pod's, as a name in a cluster is found by that only.

    Args:
        leader: its name.
        own: this pod's full name.
    """
    _, dot, domain = own.partition(".")
    return leader if "." in leader or not dot else f"{leader}.{domain}"


def job_secret(place: Place, secret: bytes) -> bytes:
    """What the processes of this job know, and no other job of this user.

    Args:
        place: of one of them.
        secret: this user's.
    """
    return hmac.digest(secret, f"allranks-job|{place.kind}|{place.job}|{place.size}".encode(), "sha256")


def job_ports(secret: bytes) -> list[int]:
    """Where to look for the first process of a job, if nobody says: the same ports for all who know the job's secret.

    Others may hold some of them; who answers there must prove that it is of the job.
    """
    digest = hashlib.sha256(b"allranks-ports|" + secret).digest()
    numbers = (int.from_bytes(digest[at : at + 4], "big") for at in range(0, 4 * PORTS_TRIED, 4))
    return list(dict.fromkeys(_PORTS[number % len(_PORTS)] for number in numbers))


# Reading.


class _Reader:
    """Reads variables, and remembers them as what led to a finding."""

    def __init__(self, environ: _Env, kind: str) -> None:
        self.environ = environ
        self.kind = kind
        self.clues: dict[str, Clue] = {}

    def text(self, name: str, meaning: str) -> str:
        value = self.environ.get(name, "").strip() if name else ""
        if value:
            self.clues[name] = Clue(name, value, meaning)
        return value

    def number(self, name: str, meaning: str, low: int = 0, high: int | None = None) -> int | None:
        value = self.text(name, meaning)
        if not value:
            return None
        if not value.isdecimal() or int(value) < low or (high is not None and int(value) > high):
            expected = f"{low} or more" if high is None else f"in {low}..{high}"
            raise ConfigError(f"{name}={value!r}: Expected a whole number, {expected} ({self.kind}: {meaning})")
        return int(value)

    def require(self, *names: str) -> None:
        """Raises where some of the variables that belong together are not set."""
        missing = [name for name in names if not self.environ.get(name, "").strip()]
        if missing:
            there = ", ".join(f"{n}={self.environ[n]}" for n in names if n not in missing)
            raise ConfigError(
                f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set, but {there or self.kind} is:"
                f" {self.kind} sets all of {', '.join(names)}.\n"
                "  Was the environment cleaned on the way (ssh, sudo, a container)? Hand the missing ones on, or say"
                " what this process is: RANK and WORLD_SIZE, or ALLRANKS_ENV=local for a process alone."
            )

    @property
    def why(self) -> tuple[Clue, ...]:
        return tuple(self.clues.values())


@dataclass(frozen=True)
class _Row:
    """The words of one launcher whose processes are ranks."""

    kind: str
    rank: str
    size: str
    local_rank: str = ""
    local_size: str = ""
    node: str = ""
    nodes: str = ""
    proof: str = ""
    """The variable that only this launcher sets, where it is not the rank's."""
    more: Callable[[_Reader, Place], Place] = lambda read, place: place

    def find(self, environ: _Env) -> Place | None:
        proofs = (self.proof,) if self.proof else (self.rank, self.size)
        if not any(environ.get(name, "").strip() for name in proofs):
            return None
        read = _Reader(environ, self.kind)
        read.require(self.rank, self.size)
        size = read.number(self.size, "The number of processes.", 1)
        assert size is not None
        rank = read.number(self.rank, "The number of this process.", 0, size - 1)
        place = Place(
            self.kind,
            "rank",
            rank,
            size,
            local_rank=read.number(self.local_rank, "Its number on this node."),
            local_size=read.number(self.local_size, "The number of processes on this node.", 1),
            node=read.number(self.node, "The number of this node."),
            nodes=read.number(self.nodes, "The number of nodes.", 1),
        )
        place = self.more(read, place)
        return replace(place, why=read.why)


def _read_pmi(read: _Reader, place: Place) -> Place:
    return replace(place, pmi=read.number("PMI_FD", "A PMI server answers on this descriptor: the ranks meet by it."))


def _read_openmpi(read: _Reader, place: Place) -> Place:
    read.text("PMIX_HOSTNAME", "This host, as Open MPI calls it.")
    job = read.text("PMIX_NAMESPACE", "The job; its PMIx server says where rank 0 is.")
    return replace(place, job=job)


def _read_pals(read: _Reader, place: Place) -> Place:
    hostfile = read.text("PBS_NODEFILE", "The nodes stand in this file.")
    place = replace(place, hostfile=f"PBS_NODEFILE={hostfile}" if hostfile else "")
    return _read_pmi(read, replace(place, job=read.text("PALS_APID", "The job's name.")))


def _read_jsrun(read: _Reader, place: Place) -> Place:
    hostfile = read.text("LSB_DJOB_RANKFILE", "The nodes stand in this file, behind the launch host.")
    job = read.text("LSB_JOBID", "The job.")
    return replace(place, hostfile=f"LSB_DJOB_RANKFILE={hostfile}" if hostfile else "", job=job)


def _read_flux(read: _Reader, place: Place) -> Place:
    return _read_pmi(read, replace(place, job=read.text("FLUX_JOB_ID", "The job.")))


def _read_slurm(read: _Reader, place: Place) -> Place:
    step = read.text("SLURM_STEP_ID", "The step: srun started this process.")
    nodelist = read.text("SLURM_STEP_NODELIST", "The nodes of this step.")
    names = expand_hosts(nodelist, "SLURM_STEP_NODELIST") if nodelist else []
    per_node = read.text("SLURM_STEP_TASKS_PER_NODE", "The number of tasks on each of them.")
    counts = expand_counts(per_node, "SLURM_STEP_TASKS_PER_NODE") if per_node else []
    ports = read.text("SLURM_STEP_RESV_PORTS", "Ports that SLURM has reserved for this step.")
    if counts and names and (len(counts) != len(names) or sum(counts) != place.size):
        raise ConfigError(
            f"SLURM_STEP_NODELIST={nodelist}, SLURM_STEP_TASKS_PER_NODE={per_node} and"
            f" SLURM_STEP_NUM_TASKS={place.size} contradict each other: some of them are left over from another step.\n"
            "  Start with srun --export=ALL from a fresh shell, or set RANK and WORLD_SIZE."
        )
    node = place.node
    if node is not None and node < len(counts):
        place = replace(place, local_size=counts[node])
    slots: list[int | None] = [*counts] or [None] * len(names)
    job = f"{read.text('SLURM_JOB_ID', 'The job.')}.{step}"
    return _read_pmi(
        read,
        replace(
            place,
            nodes=len(names) or place.nodes,
            leader=names[0] if names else "",
            hosts=tuple(Slots(name, count) for name, count in zip(names, slots, strict=True)),
            ports=tuple(expand_numbers(ports, "SLURM_STEP_RESV_PORTS")) if ports else (),
            job=job,
        ),
    )


_OPENMPI = _Row(
    "openmpi",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",  # OMPI_COMM_WORLD_NODE_RANK is no number of a node
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    more=_read_openmpi,
)
_MVAPICH = _Row(
    "mvapich",
    "MV2_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    more=_read_pmi,
)
_PALS = _Row(
    "pals",
    "PALS_RANKID",
    "PMI_SIZE",
    "PALS_LOCAL_RANKID",
    "PMI_LOCAL_SIZE",
    "PALS_NODEID",
    proof="PALS_RANKID",
    more=_read_pals,
)
_MPICH = _Row("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", more=_read_pmi)
_JSRUN = _Row(
    "jsrun",
    "JSM_NAMESPACE_RANK",
    "JSM_NAMESPACE_SIZE",
    "JSM_NAMESPACE_LOCAL_RANK",
    "JSM_NAMESPACE_LOCAL_SIZE",
    more=_read_jsrun,
)
_FLUX = _Row("flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", nodes="FLUX_JOB_NNODES", more=_read_flux)
_SLURM = _Row(
    "slurm",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    node="SLURM_NODEID",
    nodes="SLURM_STEP_NUM_NODES",
    proof="SLURM_STEP_ID",
    more=_read_slurm,
)
_OF_MPI = (_OPENMPI, _MVAPICH, _PALS, _MPICH)
_OF_SCHEDULERS = (_JSRUN, _FLUX, _SLURM)


def _in_step(environ: _Env) -> bool:
    """SLURM_PROCID alone proves nothing: a batch script and an interactive shell have it, too.

    Nor does the step where sbatch was called in one: all its variables are then in the batch script, but those that the
    batch script has, too, are its own.
    """
    step = environ.get("SLURM_STEP_ID", "").strip()
    if not step.isdecimal() or int(step) >= _SPECIAL_STEPS:
        return False
    pairs = (("SLURM_NNODES", "SLURM_STEP_NUM_NODES"), ("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"))
    return all(environ.get(a, b_value) == b_value for a, b in pairs if (b_value := environ.get(b)))


def _find_task(environ: _Env, launcher: bool, rows: tuple[_Row, ...]) -> Place | None:
    """A process that MPI's launcher or a scheduler started as one of several.

    MPI's variables win, as a scheduler's stay in the environment of what is started inside. Where both say the same,
    they are one launcher's, and the scheduler knows more: the nodes.
    """
    place: Place | None = None
    for row in rows:
        if row is _SLURM and not _in_step(environ):
            continue
        if place is not None and row in _OF_MPI:
            continue
        try:
            found = row.find(environ)
        except ConfigError:
            if place is None:
                raise
            continue  # leftovers, beside what proves itself
        if found is None:
            continue
        if place is None:
            place = found
        elif (found.rank, found.size) == (place.rank, place.size):
            place = replace(found, pmi=found.pmi if place.pmi is None else place.pmi, why=place.why + found.why)
            break
    if place is not None and launcher:
        return _as_node(place)
    return place


def _as_node(place: Place) -> Place:
    """One task on each node, and so the only one here: an agent is wanted, not a rank."""
    one_each = place.size == place.nodes if place.nodes is not None else place.local_size == 1
    if not one_each or any(slots.count not in (None, 1) for slots in place.hosts):
        return place
    return replace(place, role="node", node=place.rank, nodes=place.size, local_rank=None, local_size=None)


# Launchers of torch's style, and those that start one process on each node.


def _find_torch(environ: _Env, launcher: bool) -> Place | None:
    if not environ.get("RANK", "").strip() and not environ.get("WORLD_SIZE", "").strip():
        return None
    if launcher and not environ.get("LOCAL_RANK", "").strip() and environ.get("KUBERNETES_SERVICE_HOST"):
        return None  # they count pods: PyTorchJob
    read = _Reader(environ, "torchrun")
    for name, kind, meaning in (
        ("TORCHELASTIC_RUN_ID", "torchrun", "torchrun, or a launcher of its style, started this process."),
        ("ALLRANKS_STORE", "allranks", "allranks run started this process; the ranks meet on its store."),
    ):
        if read.text(name, meaning):
            read.kind = kind
    read.require("RANK", "WORLD_SIZE")
    size = read.number("WORLD_SIZE", "The number of processes.", 1)
    assert size is not None
    place = Place(
        read.kind,
        "rank",
        read.number("RANK", "The number of this process.", 0, size - 1),
        size,
        local_rank=read.number("LOCAL_RANK", "Its number on this node."),
        local_size=read.number("LOCAL_WORLD_SIZE", "The number of processes on this node.", 1),
        node=read.number("GROUP_RANK", "The number of this node."),
        nodes=read.number("GROUP_WORLD_SIZE", "The number of nodes.", 1),
        leader=_host_of(read.text("MASTER_ADDR", "Host of rank 0.")),
    )
    return replace(place, why=read.why)


def _find_kubeflow(environ: _Env, launcher: bool) -> Place | None:
    if not environ.get("PET_NODE_RANK", "").strip():
        return None
    read = _Reader(environ, "kubeflow")
    read.require("PET_NODE_RANK", "PET_NNODES")
    nodes = read.text("PET_NNODES", "The number of pods.")  # may be MIN:MAX
    count = int(nodes) if nodes.isdecimal() else None
    leader = read.text("PET_MASTER_ADDR", "Host of the first pod.") or read.text(
        "MASTER_ADDR", "Host of the first pod."
    )
    port = "PET_MASTER_PORT" if environ.get("PET_MASTER_PORT") else "MASTER_PORT"
    place = Place(
        "kubeflow",
        "node",
        node=read.number("PET_NODE_RANK", "The number of this pod.", 0, None if count is None else count - 1),
        nodes=count,
        leader=_host_of(leader),
        ports=_port(read.number(port, "The port there.", 1, 65535)),
    )
    return _node_or_hint(replace(place, why=read.why), launcher)


def _find_pytorchjob(environ: _Env, launcher: bool) -> Place | None:
    if not launcher or not environ.get("KUBERNETES_SERVICE_HOST") or environ.get("LOCAL_RANK", "").strip():
        return None
    if not environ.get("RANK", "").strip():
        return None
    read = _Reader(environ, "pytorchjob")
    read.require("RANK", "WORLD_SIZE", "MASTER_ADDR")
    nodes = read.number("WORLD_SIZE", "The number of pods, as nobody says LOCAL_RANK.", 1)
    assert nodes is not None
    place = Place(
        "pytorchjob",
        "node",
        node=read.number("RANK", "The number of this pod.", 0, nodes - 1),
        nodes=nodes,
        leader=_host_of(read.text("MASTER_ADDR", "Host of the first pod.")),
        ports=_port(read.number("MASTER_PORT", "The port there.", 1, 65535)),
    )
    return replace(place, why=read.why)


def _find_indexed_job(environ: _Env, launcher: bool) -> Place | None:
    if not environ.get("JOB_COMPLETION_INDEX", "").strip() or not launcher:
        return None  # an Indexed Job is often a heap of programs that know nothing of each other
    read = _Reader(environ, "indexedjob")
    index = read.number("JOB_COMPLETION_INDEX", "The number of this pod.")
    jobset = read.text("JOBSET_NAME", "The JobSet, and the domain of its pods.")
    own = read.text("HOSTNAME", "This pod; the first has the same name, with a 0 at its end.")
    stem, dash, last = own.partition(".")[0].rpartition("-")
    known = bool(dash) and last == str(index)
    leader = f"{stem}-0" if known else ""
    job, dash, number = stem.rpartition("-")
    if jobset:
        read.kind = "jobset"
        leader = f"{job}-0-0.{jobset}" if known and dash and number.isdecimal() else ""
    return Place(read.kind, "node", node=index, leader=leader, job=own and stem, why=read.why)


def _find_sagemaker(environ: _Env, launcher: bool) -> Place | None:
    if not environ.get("SM_HOSTS", "").strip() and not environ.get("SM_CURRENT_HOST", "").strip():
        return None
    read = _Reader(environ, "sagemaker")
    read.require("SM_HOSTS", "SM_CURRENT_HOST")
    text = read.text("SM_HOSTS", "The hosts.")
    here = read.text("SM_CURRENT_HOST", "This one.")
    read.text("SM_NETWORK_INTERFACE_NAME", "The interface between them.")
    try:
        names = json.loads(text)
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or here not in names:
        raise ConfigError(
            f"SM_HOSTS={text!r} and SM_CURRENT_HOST={here!r}: Expected a JSON list of hosts, with this one in it."
        )
    place = Place(
        "sagemaker",
        "node",
        node=names.index(here),
        nodes=len(names),
        leader=names[0],
        hosts=tuple(Slots(name) for name in names),
        why=read.why,
    )
    return _node_or_hint(place, launcher)


def _node_or_hint(place: Place, launcher: bool) -> Place | None:
    """One process on each node, meant for a launcher; a program that is started there in its place is alone."""
    if launcher:
        return place
    hint = ""
    if place.nodes != 1:
        many = f"{place.nodes} nodes" if place.nodes else "several nodes"
        hint = (
            f"{place.kind} started one process on each of {many}, and here it is the program itself, with no rank."
            " Start it there with: allranks run train.py"
        )
    return Place(place.kind, "none", hint=hint, why=place.why)


# Allocations: nodes on which nothing is started yet.


def _find_slurm_allocation(environ: _Env, launcher: bool) -> Place | None:
    read = _Reader(environ, "slurm")
    job = read.text("SLURM_JOB_ID", "The job.")
    if not job:
        return None
    if not launcher:
        return _alone(read, "SLURM_NTASKS", "srun python train.py, or allranks run train.py")
    read.require("SLURM_JOB_ID", "SLURM_JOB_NODELIST")
    names = expand_hosts(read.text("SLURM_JOB_NODELIST", "Its nodes."), "SLURM_JOB_NODELIST")
    per_node = read.text("SLURM_TASKS_PER_NODE", "How many tasks each is meant for.")
    counts: list[int | None] = [*expand_counts(per_node, "SLURM_TASKS_PER_NODE")] if per_node else []
    if len(counts) != len(names):
        counts = [None] * len(names)
    hosts = tuple(Slots(name, count) for name, count in zip(names, counts, strict=True))
    return _allocation(read, "slurm", hosts=hosts, ways=("srun",), job=job)


def _find_pbs_allocation(environ: _Env, launcher: bool) -> Place | None:
    read = _Reader(environ, "pbs")
    path = read.text("PBS_NODEFILE", "Its nodes stand in this file.")
    job = read.text("PBS_JOBID", "The job.")
    if not path or not launcher:
        return None
    return _allocation(read, "pbs", hostfile=f"PBS_NODEFILE={path}", ways=("pbsdsh",), job=job)


def _find_lsf_allocation(environ: _Env, launcher: bool) -> Place | None:
    read = _Reader(environ, "lsf")
    path = read.text("LSB_DJOB_HOSTFILE", "Its hosts stand in this file.")
    pairs = read.text("LSB_MCPU_HOSTS", "Its hosts, and how many processes each is meant for.")
    job = read.text("LSB_JOBID", "The job.")
    if not (path or pairs) or not launcher:
        return None
    hosts = parse_pairs(pairs, "LSB_MCPU_HOSTS") if pairs else ()
    hostfile = f"LSB_DJOB_HOSTFILE={path}" if path else ""
    return _allocation(read, "lsf", hosts=hosts, hostfile=hostfile, ways=("blaunch",), job=job)


def _find_sge_allocation(environ: _Env, launcher: bool) -> Place | None:
    read = _Reader(environ, "sge")
    path = read.text("PE_HOSTFILE", "Its hosts stand in this file.")
    job = read.text("JOB_ID", "The job.")
    if not path or not launcher:
        return None
    return _allocation(read, "sge", hostfile=f"PE_HOSTFILE={path}", ways=("qrsh",), job=job)


def _find_flux_allocation(environ: _Env, launcher: bool) -> Place | None:
    read = _Reader(environ, "flux")
    if not read.text("FLUX_URI", "A Flux instance, whose nodes are ours.") or not launcher:
        return None
    return _allocation(read, "flux", ways=("flux",))


def _allocation(read: _Reader, kind: str, **known: Any) -> Place:
    hosts: tuple[Slots, ...] = known.get("hosts", ())
    leader = hosts[0].name if hosts else ""
    return Place(kind, "allocation", nodes=len(hosts) or None, leader=leader, why=read.why, **known)


def _alone(read: _Reader, tasks: str, instead: str) -> Place | None:
    count = read.number(tasks, "The number of tasks that were asked for.")
    if count is None or count < 2:
        return None
    hint = (
        f"this process was not started by srun, and is alone, in a job of {count} tasks ({tasks}). Start with {instead}"
    )
    return Place(read.kind, "none", hint=hint, why=read.why)


def _host_of(address: str) -> str:
    host, colon, _ = address.rpartition(":")
    return host.strip("[]") if colon and (":" not in host or address.startswith("[")) else address


def _port(number: int | None) -> tuple[int, ...]:
    return () if number is None else (number,)


def _tasks(*rows: _Row) -> Callable[[_Env, bool], Place | None]:
    return lambda environ, launcher: _find_task(environ, launcher, rows)


# Who asks first is right: our own launcher's and torch's variables, then what started this process, then what started
# one process for each node, then allocations. First the names in ALLRANKS_ENV and --env that ask for it.
_FINDERS: tuple[tuple[tuple[str, ...], Callable[[_Env, bool], Place | None]], ...] = (
    (("torchrun",), _find_torch),
    ((), _tasks(*_OF_MPI, *_OF_SCHEDULERS)),
    (("mpi",), _tasks(*_OF_MPI)),
    (("slurm",), _tasks(_SLURM)),
    (("lsf",), _tasks(_JSRUN)),
    (("flux",), _tasks(_FLUX)),
    (("k8s",), _find_kubeflow),
    (("k8s",), _find_pytorchjob),
    (("k8s",), _find_indexed_job),
    (("sagemaker",), _find_sagemaker),
    (("slurm",), _find_slurm_allocation),
    (("pbs",), _find_pbs_allocation),
    (("lsf",), _find_lsf_allocation),
    (("sge",), _find_sge_allocation),
    (("flux",), _find_flux_allocation),
)

_PROOFS = {
    "torchrun": "RANK and WORLD_SIZE",
    "mpi": f"one of {', '.join(row.rank for row in _OF_MPI)}",
    "slurm": "SLURM_JOB_ID",
    "pbs": "PBS_NODEFILE",
    "lsf": "LSB_DJOB_HOSTFILE, LSB_MCPU_HOSTS or JSM_NAMESPACE_RANK",
    "sge": "PE_HOSTFILE",
    "flux": "FLUX_URI or FLUX_TASK_RANK",
    "k8s": "PET_NODE_RANK, JOB_COMPLETION_INDEX, or RANK without LOCAL_RANK in a pod",
    "sagemaker": "SM_HOSTS",
}

CHOICES: tuple[str, ...] = ("auto", "local", "ssh", *_PROOFS)
"""What ALLRANKS_ENV and ``--env`` may say; "local" and "ssh": there is nothing to be found."""
