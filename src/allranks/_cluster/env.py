"""The environment variables of a job: a table of all variables, and the settings that this process derives from them.

Every launcher (torchrun, mpirun with exports, a user with three shells, ``allranks run``) gives a process its rank
through the environment. Most failed starts are caused by a variable that is missing or wrong. All variables are
therefore in one table and are read in one place. An error shows the value found, the expected value and an example. If
none of them is set, the variables of launchers and schedulers (mpirun, srun, ...) apply: ``_cluster.detection`` has the
list. ``_net.secret`` reads and checks the secret.

Source: torchrun's variables, and THD's (``MASTER_ADDR=host:port`` on the workers, ``MASTER_PORT`` on rank 0).
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from allranks._base.errors import ConfigError
from allranks._cluster.context import LaunchContext
from allranks._cluster.detection import CHOICES, detect

__all__ = ["DEFAULT_BACKEND", "VARIABLES", "JobEnv", "Variable", "is_master", "read_env", "read_int", "split_host_port"]


_log = logging.getLogger("allranks")


DEFAULT_BACKEND = "cpu:native,cuda:nccl"
"""The engines of a world if neither the caller nor the environment names any."""


NOTICE_S = 10.0
"""Default of the seconds that a rank may wait in one call before the ranks for which it waits are reported."""

NOTICE_AFTER = "ALLRANKS_NOTICE_AFTER"
ABORT_AFTER = "ALLRANKS_ABORT_AFTER"
WATCH = "ALLRANKS_WATCH"
WATCH_FOLDER = "ALLRANKS_WATCH_FOLDER"


@dataclass(frozen=True)
class Variable:
    """One row of the table of environment variables.

    Attributes:
        name: Name of the variable.
        set_by: The program or user that sets it.
        meaning: One sentence.
        default: Description of the default. "" if there is none. None if the variable is internal to allranks.
    """

    name: str
    set_by: str
    meaning: str
    default: str | None = ""


_LAUNCHERS = "allranks run, torchrun, user"
VARIABLES: tuple[Variable, ...] = (
    Variable("RANK", _LAUNCHERS, "Number of this process in the job, 0..WORLD_SIZE-1."),
    Variable("WORLD_SIZE", _LAUNCHERS, "Number of processes in the job."),
    Variable("LOCAL_RANK", "allranks run, torchrun", "Number of this process on its host, 0..LOCAL_WORLD_SIZE-1."),
    Variable("LOCAL_WORLD_SIZE", "allranks run, torchrun", "Number of the job's processes on this host."),
    Variable("GROUP_RANK", "allranks run, torchrun", "Number of this host in the job."),
    Variable("NODE_RANK", "user, Lightning", "Number of this host in the job, if GROUP_RANK is not set."),
    Variable("MASTER_ADDR", _LAUNCHERS, "Host of rank 0, or host:port. Optional on rank 0."),
    Variable(
        "MASTER_PORT", _LAUNCHERS, "Port on which rank 0 listens. The other ranks need it if MASTER_ADDR has no port."
    ),
    Variable("TORCHELASTIC_USE_AGENT_STORE", "torchrun", "True: the agent serves a store at MASTER_ADDR:MASTER_PORT."),
    Variable("TORCHELASTIC_RUN_ID", "torchrun", "Name of the job on the agent's store."),
    Variable("TORCHELASTIC_RESTART_COUNT", "torchrun", "Number of times that the agent has restarted the ranks."),
    Variable(
        "TORCHELASTIC_ERROR_FILE",
        "caller of a launcher",
        "File to which the launcher writes why the job failed, as JSON.",
    ),
    Variable("ALLRANKS_ENV", "user", f"What started this process: {', '.join(CHOICES)}.", "auto"),
    Variable(
        "ALLRANKS_BACKEND",
        "user, --backend",
        "Backend of init_process_group() if the program names none.",
        DEFAULT_BACKEND,
    ),
    Variable(
        "ALLRANKS_TORCH_WORLD", "user", "0: allranks creates no default group of torch.distributed for the world.", "1"
    ),
    Variable(
        "ALLRANKS_INSTEAD_OF_GLOO", "user, --instead-of-gloo", "1: torch.distributed's gloo groups use allranks.", "0"
    ),
    Variable(
        "ALLRANKS_IFACE",
        "user, --iface",
        "Interfaces (eth0) or networks (10.0.0.0/16) for traffic between hosts.",
        "all except those of containers",
    ),
    Variable(
        "ALLRANKS_FABRIC",
        "user",
        "Network between the hosts: off (TCP), or a provider of libfabric: cxi, efa, opx, psm3, verbs, tcp, udp.",
        "the first of cxi, efa, opx, psm3, verbs that all hosts can use",
    ),
    Variable(
        "ALLRANKS_SECRET",
        "user",
        "Secret of the job, at least 16 characters.",
        "this user's own, ~/.config/allranks/secret",
    ),
    Variable("ALLRANKS_SECRET_FILE", "user", "File that holds the secret (mode 0600).", "none"),
    Variable(
        "ALLRANKS_INSECURE", "user", "1: no secret. Any process that can reach the ports of the job can join it.", "0"
    ),
    Variable("ALLRANKS_TLS_CERT", "user", "TLS for TCP stores: this host's certificate (PEM file).", "no TLS"),
    Variable("ALLRANKS_TLS_KEY", "user", "The certificate's key (PEM file, mode 0600, without a password).", "no TLS"),
    Variable("ALLRANKS_TLS_CA", "user", "The authority that signs all hosts' certificates (PEM file).", "no TLS"),
    Variable("ALLRANKS_PICKLE", "user", "0: object collectives carry plain values and tensors only, no pickle.", "1"),
    Variable(
        "ALLRANKS_MESSAGE_BUFFER",
        "user",
        "Limit in MiB for the messages that a rank buffers from each rank. Beyond the limit, a send waits for its"
        " recv.",
        "8",
    ),
    Variable(
        "ALLRANKS_TUNING",
        "user",
        "File that `allranks tune` has written for this host. The value of the first rank on each host applies.",
        "built-in tuning",
    ),
    Variable(
        "ALLRANKS_TOPOLOGY",
        "user",
        "Groups of nearby CPUs of the host: lists separated by `/`, such as `0-7,64-71/8-15,72-79`. If a host has many "
        "ranks, they synchronize in these groups. Applies to ranks that are bound to CPUs of one list.",
        "reported by the kernel",
    ),
    Variable(
        NOTICE_AFTER,
        "user",
        "How long a rank may wait in one call before a report names the ranks for which it waits. 0: no reports.",
        "10s",
    ),
    Variable(
        WATCH,
        "user, allranks run, allranks watch",
        "1: waits in torch.distributed's own backends are reported, too.",
        "0; 1 under allranks run",
    ),
    Variable(
        ABORT_AFTER,
        "user, allranks watch",
        "How long a rank may wait in a call of torch.distributed before all ranks print the report and exit.",
        "never",
    ),
    Variable(
        WATCH_FOLDER,
        "user, allranks watch",
        "Folder of the files with the stacks of all ranks that belong to a report.",
        "the folder of temporary files",
    ),
    Variable("ALLRANKS_RECORD", "user", "0: calls are not recorded, so no tool can report them.", "1"),
    Variable(
        "ALLRANKS_TRACE",
        "user, allranks run --trace",
        "Folder in which every rank records all its calls in its own file.",
        "none",
    ),
    Variable(
        "ALLRANKS_RECORD_MEMORY", "allranks run", "Memory of the agent for the record of this rank's calls.", None
    ),
    Variable(
        "ALLRANKS_DOCS",
        "user",
        "Site with the pages, to which tracebacks then link instead of naming a command. 0: neither.",
        "allranks help",
    ),
    Variable(
        "ALLRANKS_DEBUG", "user", "Debug level: OFF (or 0), INFO, DETAIL (or 1). Overrides torch's variable.", "OFF"
    ),
    Variable("ALLRANKS_STORE", "allranks run", "Address of the launcher's store. Overrides MASTER_ADDR.", None),
    Variable(
        "ALLRANKS_ELASTIC", "allranks run --elastic", "1: the launcher decides which ranks belong to the job.", None
    ),
    Variable("ALLRANKS_START", "allranks run --elastic", "Number of earlier processes in this rank slot.", None),
    Variable(
        "ALLRANKS_REHEARSAL",
        "allranks run --rehearse",
        "Folder and phase of a rehearsal: where it records, and when it kills ranks.",
        None,
    ),
    Variable(
        "ALLRANKS_SEAL",
        "allranks run",
        "Distinguishes a rank from the processes that it starts, such as nested jobs.",
        None,
    ),
    Variable("ALLRANKS_CPUS", "allranks run --bind", "CPUs shared by the ranks of this host.", None),
    Variable("ALLRANKS_MACHINE", "allranks run", "Identity of the host, constant while the agent runs.", None),
    Variable("ALLRANKS_MASTER", "init_master_worker", "Address of the master, for the workers that it starts.", None),
    Variable("ALLRANKS_BENCH_CPUS", "allranks bench", "CPUs for the ranks that mpirun starts.", None),
    Variable("ALLRANKS_BENCH_MPIRUN", "allranks bench", "Options with which it called mpirun.", None),
    Variable("TORCH_DISTRIBUTED_DEBUG", "user", "Debug level under torch's name: OFF, INFO, DETAIL."),
)

_ANY = ("0.0.0.0", "::", "*")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_EXPECTED = {
    "RANK": ("the number of this process", "RANK=0"),
    "WORLD_SIZE": ("the number of processes", "WORLD_SIZE=4"),
    "MASTER_ADDR": ("a host name", "MASTER_ADDR=node0"),
    "MASTER_PORT": ("a port", "MASTER_PORT=29500"),
}


@dataclass(frozen=True)
class JobEnv:
    """The rank of this process and how it meets the others, from arguments and environment together.

    Attributes:
        rank: Number of this process.
        world_size: Number of processes.
        master: Host and port of rank 0's store. None if it is not needed: one process, or a launcher's store. An empty
            host (rank 0 only) means every interface.
        store: Address of the launcher's store, or "".
        local_rank: Number of this process on its host, if the launcher has set it.
        local_world_size: Number of processes on this host, if the launcher has set it.
        node_rank: Number of this host, if the launcher has set it.
        agent: If torchrun's agent serves a store at ``master``: the prefix of this job's keys in that store. Else "".
        place: The context of another launcher that started this process as one of several ranks, if the ranks must meet
            by that context.
    """

    rank: int
    world_size: int
    master: tuple[str, int] | None = None
    store: str = ""
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    agent: str = ""
    place: LaunchContext | None = None


def read_env(
    rank: int = -1, world_size: int = -1, environ: Mapping[str, str] | None = None, *, by_env: bool = True
) -> JobEnv:
    """Return the rank of this process, from arguments and, for arguments that are not given, from the environment.

    Args:
        rank: Rank as an argument; -1 if not given.
        world_size: World size as an argument; -1 if not given.
        environ: The environment; ``os.environ`` if None.
        by_env: The ranks meet by the environment (``env://``). If False, no address is read, and rank and world size
            must be given as arguments or by the environment.

    Returns:
        The resolved settings: the given values, else the values set by mpirun, srun or a similar launcher. If no value
        is given anywhere under ``env://``: rank 0 of 1.

    Raises:
        ConfigError: A value is missing, is not a number, or is out of range.
    """
    env = os.environ if environ is None else environ
    meeting = any(env.get(n) for n in ("MASTER_ADDR", "MASTER_PORT", "ALLRANKS_STORE"))
    place = _read_place(rank, world_size, env, by_env and not meeting)
    if place is not None:
        job = JobEnv(place.rank or 0, place.size or 1, None, "", place.local_rank, place.local_size, place.node)
        if not by_env or job.world_size == 1:
            return job
        store = env.get("ALLRANKS_STORE", "")
        if store or not meeting:
            return replace(job, store=store, place=None if store else place)
        return replace(job, master=_read_master(job.rank, job.world_size, env))
    nothing = rank == -1 and world_size == -1 and not any(env.get(n) for n in ("RANK", "WORLD_SIZE"))
    if nothing and by_env and not meeting:
        return JobEnv(0, 1)
    rank, world_size = _read_rank(rank, world_size, env)
    store = env.get("ALLRANKS_STORE", "") if by_env else ""
    master = _read_master(rank, world_size, env) if by_env and world_size > 1 and not store else None
    node_rank = read_int(env, "GROUP_RANK", 0)
    return JobEnv(
        rank,
        world_size,
        master=master,
        store=store,
        local_rank=read_int(env, "LOCAL_RANK", 0),
        local_world_size=read_int(env, "LOCAL_WORLD_SIZE", 1),
        node_rank=read_int(env, "NODE_RANK", 0) if node_rank is None else node_rank,
        agent=_read_agent(env) if master else "",
    )


def is_master(address: str, environ: Mapping[str, str]) -> bool:
    """Return whether MASTER_ADDR and MASTER_PORT name ``host:port``. False if any of them cannot be parsed."""
    try:
        host, port = split_host_port(address, "the address")
        master, inner = split_host_port(environ.get("MASTER_ADDR", ""), "MASTER_ADDR")
        outer = read_int(environ, "MASTER_PORT", 1, 65535)
    except ConfigError:
        return False
    same = host == master or (host in _LOOPBACK and master in _LOOPBACK)
    return same and port is not None and {inner, outer} - {None} == {port}


def read_int(environ: Mapping[str, str], name: str, low: int, high: int | None = None) -> int | None:
    """Read one whole number from the environment. Return None if the variable is not set or empty.

    Raises:
        ConfigError: The value is not a whole number, or not in low..high.
    """
    text = environ.get(name, "").strip()
    if not text:
        return None
    expected = f"a whole number, {low} or more" if high is None else f"a whole number in {low}..{high}"
    try:
        value = int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not a number. Expected {expected}.") from None
    if value < low or (high is not None and value > high):
        raise ConfigError(f"{name}={value} is out of range. Expected {expected}.")
    return value


def parse_seconds(text: str) -> float:
    """Return the seconds of a duration such as ``30``, ``30s``, ``5m`` or ``2h``.

    Raises:
        ValueError: The text is not a duration.
    """
    # Without ASCII, \d also matches the digits of other scripts.
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)([smh]?)", text, re.ASCII)
    if match is None:
        raise ValueError(f"{text!r} is not a time (30 or 30s, 5m, 2h)")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def read_seconds(environ: Mapping[str, str], name: str) -> float | None:
    """Read one duration from the environment, in seconds. Return None if the variable is not set or empty.

    Raises:
        ConfigError: The value is not a duration.
    """
    text = environ.get(name, "").strip()
    try:
        return parse_seconds(text) if text else None
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


def notice_seconds(environ: Mapping[str, str]) -> float:
    """Return the seconds that a rank may wait in one call before the wait is reported. 0: waits are never reported.

    Raises:
        ConfigError: The value of the variable is not a duration.
    """
    asked = read_seconds(environ, NOTICE_AFTER)
    return NOTICE_S if asked is None else asked


def split_host_port(text: str, source: str) -> tuple[str, int | None]:
    """Split ``host``, ``host:port``, ``[ipv6]:port`` or a bare IPv6 address.

    Args:
        text: The text to split.
        source: Origin of the text, for the error message.

    Raises:
        ConfigError: The port is not a number in 1..65535.
    """
    host, colon, port = text.strip().rpartition(":")
    if not colon or text.strip().endswith("]") or (":" in host and not host.startswith("[")):
        host, port = text.strip(), ""
    elif not port:
        raise ConfigError(f"{source}={text!r} ends in a colon. Expected host:port, for example node0:29500.")
    host = host.removeprefix("[").removesuffix("]")
    return host, read_int({f"the port in {source}": port}, f"the port in {source}", 1, 65535)


def _read_place(rank: int, world_size: int, env: Mapping[str, str], meets: bool) -> LaunchContext | None:
    """Return the context of another launcher, if neither the arguments nor torch's variables give the rank.

    If both arguments are given but no meeting point (``meets``), the context is returned if it agrees with them.
    """
    given = any(env.get(n) for n in ("RANK", "WORLD_SIZE")) or (-1 not in (rank, world_size) and not meets)
    if given or world_size == 1:
        return None
    place = detect(env, launcher=False)
    if place.role == "none" and rank == world_size == -1 and meets and place.hint:
        _log.warning("%s", place.hint)
    if place.role != "rank" or rank not in (-1, place.rank) or world_size not in (-1, place.size):
        return None
    return place


def _read_rank(rank: int, world_size: int, env: Mapping[str, str]) -> tuple[int, int]:
    size = read_int(env, "WORLD_SIZE", 1) if world_size == -1 else world_size
    number = read_int(env, "RANK", 0) if rank == -1 else rank
    if size is None or (number is None and size != 1):
        missing = (["RANK"] if number is None else []) + (["WORLD_SIZE"] if size is None else [])
        known = (
            f"world size {size}"
            if size
            else f"rank {number}"
            if number is not None
            else "rank and world size are unknown"
        )
        raise _missing(missing, known, size)
    number = number or 0
    if size < 1:
        raise ConfigError(f"world_size={size} is out of range. Expected a whole number, 1 or more.")
    if not 0 <= number < size:
        name = "RANK" if rank == -1 else "rank"
        raise ConfigError(f"{name}={number} is out of range. Expected 0..{size - 1}, as the world size is {size}.")
    return number, size


def _read_master(rank: int, world_size: int, env: Mapping[str, str]) -> tuple[str, int]:
    where = f"rank {rank} of {world_size}"
    address = env.get("MASTER_ADDR", "").strip()
    host, addr_port = split_host_port(address, "MASTER_ADDR") if address else ("", None)
    if re.search(r"[\s,/]", host):
        raise ConfigError(
            f"MASTER_ADDR={address!r} is neither a host name nor an address. Expected one of those, for example"
            " MASTER_ADDR=node0."
        )
    host = host.removesuffix(".")  # The trailing dot means the DNS root. Names in /etc/hosts have no such dot.
    if host in _ANY:  # An address to listen on. Other ranks can use it only if they run on the same host.
        host = "localhost" if rank else ""
    if rank and not host:
        missing = ["MASTER_ADDR"] if addr_port or env.get("MASTER_PORT") else ["MASTER_ADDR", "MASTER_PORT"]
        raise _missing(missing, where, world_size)
    # THD's rule: rank 0 listens on MASTER_PORT, the other ranks connect to the port in MASTER_ADDR. torch sets one port
    # only.
    if rank and addr_port is not None:
        return host, addr_port
    port = read_int(env, "MASTER_PORT", 1, 65535)
    if port is not None and addr_port not in (None, port):
        _log.warning(
            "rank 0 listens on MASTER_PORT=%d, but ranks with MASTER_ADDR=%s connect to its port %d. They can connect"
            " only if one port is forwarded to the other.\n  Otherwise, set the same port in both variables.",
            port,
            address,
            addr_port,
        )
        return "", port
    port = addr_port if port is None else port
    if port is None:
        raise _missing(["MASTER_PORT"], where, world_size)
    return host, port


def _read_agent(env: Mapping[str, str]) -> str:
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # the literal value that torchrun sets
        return ""
    run, restart = env.get("TORCHELASTIC_RUN_ID", "none"), env.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"allranks/{run}/{restart}"


def _missing(names: list[str], known: str, world_size: int | None) -> ConfigError:
    verb = "is" if len(names) == 1 else "are"
    expected = " and ".join(_EXPECTED[n][0] for n in names)
    example = " ".join(_EXPECTED[n][1] for n in names)
    return ConfigError(
        f"{' and '.join(names)} {verb} not set ({known}). Expected {expected}, for example {example}.\n"
        f"  Set {'it' if len(names) == 1 else 'them'}, or start the ranks with"
        f" `allranks run -n {world_size or 4} train.py`."
    )
