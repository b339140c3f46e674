"""Reads the variables of a launcher or scheduler. An error about a missing or invalid variable names the variable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from allranks._base.errors import ConfigError
from allranks._cluster.context import Clue, LaunchContext
from allranks._cluster.hostlist import Slots

__all__ = ["Environ", "Reader", "TaskVariables", "allocation_of", "host_of", "node_or_hint", "port_of", "read_pmi"]

Environ: TypeAlias = Mapping[str, str]


class Reader:
    """Read variables, and record them as the reasons for a finding."""

    def __init__(self, environ: Environ, kind: str) -> None:
        self.environ = environ
        self.kind = kind
        self.clues: dict[str, Clue] = {}

    def text(self, name: str, meaning: str) -> str:
        """Return the value of a variable. "" if it is not set."""
        value = self.environ.get(name, "").strip() if name else ""
        if value:
            self.clues[name] = Clue(name, value, meaning)
        return value

    def number(self, name: str, meaning: str, low: int = 0, high: int | None = None) -> int | None:
        """Return the value of a variable as a number. None if it is not set. Raise ConfigError for any other value."""
        value = self.text(name, meaning)
        if not value:
            return None
        if not value.isdecimal() or int(value) < low or (high is not None and int(value) > high):
            expected = f"{low} or more" if high is None else f"in {low}..{high}"
            raise ConfigError(f"{name}={value!r}: expected a whole number, {expected} ({self.kind}: {meaning})")
        return int(value)

    def require(self, *names: str) -> None:
        """Raise ConfigError if some of the variables that belong together are not set."""
        missing = [name for name in names if not self.environ.get(name, "").strip()]
        if missing:
            there = ", ".join(f"{n}={self.environ[n]}" for n in names if n not in missing)
            raise ConfigError(
                f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set, but {there or self.kind} is:"
                f" {self.kind} sets all of {', '.join(names)}.\n"
                "  If ssh, sudo or a container removed variables, pass the missing ones on. Otherwise set RANK and"
                " WORLD_SIZE, or ALLRANKS_ENV=local for a single process."
            )

    @property
    def why(self) -> tuple[Clue, ...]:
        """The variables that were read."""
        return tuple(self.clues.values())


@dataclass(frozen=True)
class TaskVariables:
    """The variables of one launcher whose processes are ranks. The name is "" if the launcher does not set one."""

    kind: str
    rank: str
    size: str
    local_rank: str = ""
    local_size: str = ""
    node: str = ""
    nodes: str = ""
    proof: str = ""
    """The variable that only this launcher sets, if it is not the variable of the rank."""
    more: Callable[[Reader, LaunchContext], LaunchContext] = lambda read, context: context
    """Reads the other variables that this launcher sets."""
    applies: Callable[[Environ], bool] = lambda environ: True
    """Returns whether the variables belong to this process, and were not inherited from another job."""
    is_mpi: bool = False
    """The row belongs to an MPI launcher. Only the first such launcher that is found counts."""

    def find(self, environ: Environ) -> LaunchContext | None:
        """Return the context of this process. None if this launcher did not start it.

        Raises:
            ConfigError: Variables are missing or wrong.
        """
        proofs = (self.proof,) if self.proof else (self.rank, self.size)
        if not any(environ.get(name, "").strip() for name in proofs):
            return None
        read = Reader(environ, self.kind)
        read.require(self.rank, self.size)
        size = read.number(self.size, "The number of processes.", 1)
        assert size is not None
        rank = read.number(self.rank, "The number of this process.", 0, size - 1)
        context = LaunchContext(
            self.kind,
            "rank",
            rank,
            size,
            local_rank=read.number(self.local_rank, "Its number on this node."),
            local_size=read.number(self.local_size, "The number of processes on this node.", 1),
            node=read.number(self.node, "The number of this node."),
            nodes=read.number(self.nodes, "The number of nodes.", 1),
        )
        context = self.more(read, context)
        # After `more`, which reads further variables.
        return replace(context, why=read.why)


def read_pmi(read: Reader, context: LaunchContext) -> LaunchContext:
    """Add the launcher's PMI server to the context."""
    return replace(context, pmi=read.number("PMI_FD", "Descriptor of a PMI server. The ranks find each other over it."))


def node_or_hint(context: LaunchContext, launcher: bool) -> LaunchContext | None:
    """Return the context of one process per host, which should be a launcher. A program gets role "none" and a hint."""
    if launcher:
        return context
    hint = ""
    if context.nodes != 1:
        many = f"{context.nodes} nodes" if context.nodes else "several nodes"
        hint = (
            f"{context.kind} started one process on each of {many}. This process is the program itself, which has"
            " no rank. Start it on each node with: allranks run train.py"
        )
    return LaunchContext(context.kind, "none", hint=hint, why=context.why)


def allocation_of(read: Reader, kind: str, **known: Any) -> LaunchContext:
    """Return the context of an allocation. ``known`` has further fields of ``LaunchContext``."""
    hosts: tuple[Slots, ...] = known.get("hosts", ())
    leader = hosts[0].name if hosts else ""
    return LaunchContext(kind, "allocation", nodes=len(hosts) or None, leader=leader, why=read.why, **known)


def host_of(address: str) -> str:
    """Return the host of HOST, HOST:PORT or [HOST]:PORT."""
    host, colon, _ = address.rpartition(":")
    return host.strip("[]") if colon and (":" not in host or address.startswith("[")) else address


def port_of(number: int | None) -> tuple[int, ...]:
    """Return a port as the ``ports`` of a context."""
    return () if number is None else (number,)
