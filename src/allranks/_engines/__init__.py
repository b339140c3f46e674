"""The engines that move tensors: a name, and what makes one.

An engine belongs to one group. To add one: a file beside this one, and an entry below.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from allranks._errors import ConfigError

if TYPE_CHECKING:
    from allranks._engines.base import Engine
    from allranks._engines.native_connect import Exchange
    from allranks._rendezvous import Member

__all__ = ["ENGINES", "check_backend", "make_engine"]

ENGINES = ("native",)
_PLANNED = ("tcp", "gloo", "nccl", "mpi")


def check_backend(backend: str | None) -> str:
    """The engine meant by ``init_process_group(backend=...)``.

    Raises:
        ConfigError: no such engine, or not in this version.
    """
    name = (backend or "native").lower()
    if name.startswith("cpu:"):
        name = name.removeprefix("cpu:")
    if name in ENGINES:
        return name
    known = ", ".join(f"'{e}'" for e in ENGINES)
    if any(part.rpartition(":")[2] in _PLANNED for part in name.split(",")):
        raise ConfigError(f"backend {backend!r} is not in this version of allranks yet; it has {known}")
    raise ConfigError(f"unknown backend {backend!r}: expected {known} (or None, which means 'native')")


def make_engine(
    name: str, rank: int, members: Sequence[Member], exchange: Exchange, group_name: str, timeout_s: float
) -> Engine:
    """Connects an engine with the other members of a group.

    Args:
        name: one of ENGINES.
        rank: this process in the group.
        members: who is in the group, by rank.
        exchange: how they hear of each other.
        group_name: for errors.
        timeout_s: of the connecting and of every later call.
    """
    assert name == "native"
    from allranks._engines.native import NativeEngine

    return NativeEngine(rank, members, exchange, group_name, timeout_s)
