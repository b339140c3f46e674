"""The engines that move tensors: a name, and what makes one.

An engine belongs to one group. To add one: a file beside this one, and an entry in each table below.

A group's backend is written as torch does, ``gloo`` or ``cpu:gloo,cuda:nccl``; ``check_backend`` brings it to one
form, in which engines of devices that this process does not have are left out, and one engine is named alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from allranks._base.errors import ConfigError

if TYPE_CHECKING:
    from allranks._engines.base import Engine, Parent
    from allranks._engines.native_connect import Exchange
    from allranks._rendezvous.rendezvous import Member

__all__ = ["DEFAULT", "ENGINES", "available", "check_backend", "engines_of", "make_engine", "meetings", "moves"]

ENGINES: dict[str, str | None] = {"native": None, "tcp": None, "gloo": "cpu", "mpi": None, "nccl": "cuda"}
"""The engines, and the type of device whose tensors each moves; None: any."""

DEFAULT = "cpu:native,cuda:nccl"
_ALIASES = {"allranks": "native"}  # what torch.distributed calls it
_MPI = "Install it with an MPI: pip install 'allranks[mpi]', or mpi4py beside the MPI that is here"
_INSTEAD = (
    ".\n  Give backend='native', which moves tensors of CPUs and GPUs in every build of torch; or none, which means"
    f" {DEFAULT!r} with those of the two that are here. For nccl install torch with CUDA."
)
_OURS = ("native", "tcp")
_PLANNED = ("ucc", "xccl")


def available(name: str) -> bool:
    """Whether the engine is here: ours always, gloo and nccl where torch was built with them, mpi beside mpi4py."""
    if name not in ENGINES or name in _OURS:
        return name in ENGINES
    if name == "mpi":
        from allranks._engines import mpi_job

        return mpi_job.installed()
    import torch.distributed

    return bool(getattr(torch.distributed, f"is_{name}_available")())


def check_backend(backend: str | None) -> str:
    """What is meant by ``init_process_group(backend=...)``: a name of ENGINES, or ``cpu:NAME,cuda:NAME``.

    Raises:
        ConfigError: no such engine, or not here.
    """
    given = (backend or DEFAULT).lower()
    given = _ALIASES.get(given, given)
    if ":" not in given:
        _check_engine(given, backend)
        if not available(given):
            why = f"needs mpi4py. {_MPI}" if given == "mpi" else f"is not in this torch: it was built without {given}"
            raise ConfigError(f"backend {backend!r} {why}{'' if given == 'mpi' else _INSTEAD}")
        if not _has(ENGINES[given] or "cpu"):
            raise ConfigError(f"backend {backend!r}: this process sees no {ENGINES[given]} device{_INSTEAD}")
        return given
    chosen: dict[str, str] = {}
    for part in given.split(","):
        device, _, name = part.strip().partition(":")
        name = _ALIASES.get(name, name)
        _check_engine(name, backend)
        if ENGINES[name] not in (None, device) or device in chosen or not _is_device(device):
            known = ", ".join(f"{kind or 'any device'}:{engine}" for engine, kind in ENGINES.items())
            raise ConfigError(
                f"backend {backend!r}: {part.strip()!r} is wrong there. Expected each type of device once, with an "
                f"engine for it: {known}"
            )
        chosen[device] = name
    here = {device: name for device, name in chosen.items() if available(name) and _has(device)}
    if not here:
        raise ConfigError(f"backend {backend!r}: this process has neither the engine nor the device{_INSTEAD}")
    one, *others = dict.fromkeys(here.values())
    if others and "cpu" not in here:
        raise ConfigError(f"backend {backend!r}: of several engines one must be for the CPU, as in cpu:native")
    return ",".join(f"{device}:{name}" for device, name in here.items()) if others else one


def engines_of(backend: str) -> dict[str, str]:
    """The engine by type of device, of what ``check_backend`` has returned; one that moves any stands for the CPU."""
    if ":" not in backend:
        return {ENGINES[backend] or "cpu": backend}
    return {device: name for device, _, name in (part.partition(":") for part in backend.split(","))}


def moves(backend: str, device: str) -> bool:
    """Whether a group on what ``check_backend`` has returned moves tensors of that type of device."""
    return device in engines_of(backend) or (ENGINES.get(backend, "") is None and _is_device(device))


def meetings(backend: str, size: int) -> int:
    """How many times making a group of that size calls its Exchange."""
    return sum(1 for name in engines_of(backend).values() if name not in _OURS or size > 1)


def make_engine(
    backend: str,
    rank: int,
    members: Sequence[Member],
    exchange: Exchange,
    group_name: str,
    timeout_s: float,
    parent: Parent | None = None,
) -> Engine:
    """Connects an engine with the other members of a group.

    Args:
        backend: what ``check_backend`` has returned.
        rank: this process in the group.
        members: who is in the group, by rank.
        exchange: how they hear of each other.
        group_name: for errors.
        timeout_s: of the connecting and of every later call.
        parent: the group that ``exchange`` goes through, on every rank, or None.
    """
    made: dict[str, Engine] = {}
    try:
        for device, name in engines_of(backend).items():
            made[device] = _make_one(name, parent)(rank, members, exchange, group_name, timeout_s)
    except BaseException:
        for engine in made.values():
            engine.close()
        raise
    if len(made) == 1:
        return next(iter(made.values()))
    from allranks._engines.by_device import ByDevice

    return ByDevice(backend, made, group_name)


def _make_one(name: str, parent: Parent | None) -> Callable[[int, Sequence[Member], Exchange, str, float], Engine]:
    if name in _OURS:
        from allranks._engines.native import NativeEngine, TcpEngine

        return partial(TcpEngine if name == "tcp" else NativeEngine, parent=parent)
    if name == "mpi":
        from allranks._engines.mpi import MpiEngine

        return MpiEngine
    from allranks._engines.c10d import C10dEngine

    return partial(C10dEngine, name)


def _check_engine(name: str, backend: str | None) -> None:
    if name in ENGINES:
        return
    known = ", ".join(f"'{e}'" for e in ENGINES)
    if name in _PLANNED:
        raise ConfigError(f"backend {backend!r} is not in this version of allranks yet; it has {known}")
    raise ConfigError(f"unknown backend {backend!r}: expected {known}, 'cpu:gloo,cuda:nccl' or the like, or None")


def _is_device(name: str) -> bool:
    """Whether torch knows this type of device, and has data on it."""
    import torch

    try:
        return torch.device(name).type == name != "meta"
    except RuntimeError:
        return False


def _has(device: str) -> bool:
    import torch

    module = getattr(torch, device, None)
    # is_available would keep forked children from using CUDA.
    return device == "cpu" or (module is not None and module.device_count() > 0)
