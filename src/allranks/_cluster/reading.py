"""Reading a launcher's or scheduler's variables: what is missing or wrong is an error that names them."""

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
    """Reads variables, and remembers them as what led to a finding."""

    def __init__(self, environ: Environ, kind: str) -> None:
        self.environ = environ
        self.kind = kind
        self.clues: dict[str, Clue] = {}

    def text(self, name: str, meaning: str) -> str:
        """A variable's value; "" where it is not set."""
        value = self.environ.get(name, "").strip() if name else ""
        if value:
            self.clues[name] = Clue(name, value, meaning)
        return value

    def number(self, name: str, meaning: str, low: int = 0, high: int | None = None) -> int | None:
        """A variable's value as a number; None where it is not set. Raises ConfigError where it is something else."""
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
        """The variables that were read."""
        return tuple(self.clues.values())


@dataclass(frozen=True)
class TaskVariables:
    """The variables of one launcher whose processes are ranks. The names of those it does not have are ""."""

    kind: str
    rank: str
    size: str
    local_rank: str = ""
    local_size: str = ""
    node: str = ""
    nodes: str = ""
    proof: str = ""
    """The variable that only this launcher sets, where it is not the rank's."""
    more: Callable[[Reader, LaunchContext], LaunchContext] = lambda read, context: context
    """Reads what else this launcher sets."""
    applies: Callable[[Environ], bool] = lambda environ: True
    """Whether the variables are this process's own, and not left over."""
    is_mpi: bool = False
    """An MPI launcher's, of which only the first that is found counts."""

    def find(self, environ: Environ) -> LaunchContext | None:
        """The rank that this process is; None where it is none of this launcher's.

        Raises:
            ConfigError: variables are missing or wrong.
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
        return replace(context, why=read.why)


def read_pmi(read: Reader, context: LaunchContext) -> LaunchContext:
    """Adds the launcher's PMI server."""
    return replace(context, pmi=read.number("PMI_FD", "A PMI server answers on this descriptor: the ranks meet by it."))


def node_or_hint(context: LaunchContext, launcher: bool) -> LaunchContext | None:
    """For one process on each host, which is meant to be a launcher. A program in its place is alone, with a hint."""
    if launcher:
        return context
    hint = ""
    if context.nodes != 1:
        many = f"{context.nodes} nodes" if context.nodes else "several nodes"
        hint = (
            f"{context.kind} started one process on each of {many}. Here that process is the program itself, which has"
            " no rank. Start it there with: allranks run train.py"
        )
    return LaunchContext(context.kind, "none", hint=hint, why=context.why)


def allocation_of(read: Reader, kind: str, **known: Any) -> LaunchContext:
    """An allocation. ``known`` are further fields of ``LaunchContext``."""
    hosts: tuple[Slots, ...] = known.get("hosts", ())
    leader = hosts[0].name if hosts else ""
    return LaunchContext(kind, "allocation", nodes=len(hosts) or None, leader=leader, why=read.why, **known)


def host_of(address: str) -> str:
    """The host of HOST, HOST:PORT or [HOST]:PORT."""
    host, colon, _ = address.rpartition(":")
    return host.strip("[]") if colon and (":" not in host or address.startswith("[")) else address


def port_of(number: int | None) -> tuple[int, ...]:
    """A port as the ``ports`` of a context."""
    return () if number is None else (number,)
