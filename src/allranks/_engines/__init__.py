"""The engines that transfer tensors, and the meaning of backend names.

An engine belongs to one group. A new engine needs a folder beside this file and a row in `registry`, or an installed
package (docs/extending.md).

The name of a group's backend has torch's form: ``gloo`` or ``cpu:gloo,cuda:nccl``. ``check_backend`` normalizes it. It
removes engines for devices that this process does not have, and returns the bare name if one engine is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from allranks._base.errors import ConfigError
from allranks._base.system import refusals
from allranks._cluster.env import DEFAULT_BACKEND
from allranks._engines import registry
from allranks._engines.spec import RECORD_BYTES, EngineSpec, Exchange, GroupSetup, Meeting

if TYPE_CHECKING:
    from allranks._engines.base import Engine, Parent
    from allranks._rendezvous.rendezvous import Member

__all__ = ["available", "check_backend", "engines_of", "make_engine", "meetings", "meets_by", "moves"]

_INSTEAD = (
    ".\n  Pass backend='native', which supports CPU and GPU tensors in every build of torch. Or omit backend to use the"
    f" available engines of {DEFAULT_BACKEND!r}."
)
_PLANNED = ("ucc", "xccl")


def available(name: str) -> bool:
    """Return whether the engine can be used: its library, or its package, is installed and loads without an error."""
    try:
        spec = registry.find(name)
        return spec is not None and registry.is_here(spec)
    except ConfigError:  # init_process_group and `allranks doctor` report the error
        return False


def check_backend(backend: str | None) -> str:
    """Return the meaning of ``init_process_group(backend=...)``: the name of an engine, or ``cpu:NAME,cuda:NAME``.

    Raises:
        ConfigError: The engine does not exist, or is not available.
    """
    given = (backend or DEFAULT_BACKEND).lower()
    given = registry.ALIASES.get(given, given)
    if ":" not in given:
        spec = _known(given, backend)
        if not registry.is_here(spec):
            raise ConfigError(f"backend {backend!r} {spec.missing}{_INSTEAD}")
        if not any(_has(device) for device in _devices(spec)):
            raise ConfigError(f"backend {backend!r}: this process has no {' or '.join(spec.devices)} device{_INSTEAD}")
        return given
    chosen: dict[str, EngineSpec] = {}
    for part in given.split(","):
        device, _, name = part.strip().partition(":")
        spec = _known(registry.ALIASES.get(name, name), backend)
        if (spec.devices and device not in spec.devices) or device in chosen or not _is_device(device):
            known = ", ".join(
                f"{kind}:{name}" for name, own in registry.BUILT_IN.items() for kind in own.devices or ["any device"]
            )
            raise ConfigError(
                f"backend {backend!r}: {part.strip()!r} is invalid. Expected each type of device once, with an "
                f"engine for it: {known}"
            )
        chosen[device] = spec
    here = {device: spec.name for device, spec in chosen.items() if _has(device) and registry.is_here(spec)}
    if not here:
        raise ConfigError(f"backend {backend!r}: no pair of device and engine is available in this process{_INSTEAD}")
    one, *others = dict.fromkeys(here.values())
    # Calls without a tensor, such as barrier, go to the engine of the CPU.
    if others and "cpu" not in here:
        raise ConfigError(
            f"backend {backend!r}: no engine for the CPU is available, which calls without a tensor need.\n"
            "  Add one, as in cpu:native."
        )
    return ",".join(f"{device}:{name}" for device, name in here.items()) if others else one


def engines_of(backend: str) -> dict[str, str]:
    """Return the engine of each type of device of a normalized backend. ``cpu`` stands for any device."""
    if ":" not in backend:
        return dict.fromkeys(_devices(_known(backend, backend)), backend)
    return {device: name for device, _, name in (part.partition(":") for part in backend.split(","))}


def moves(backend: str, device: str) -> bool:
    """Return whether a group on a normalized backend transfers tensors of this type of device."""
    if device in engines_of(backend):
        return True
    return ":" not in backend and not _known(backend, backend).devices and _is_device(device)


def meets_by(backend: str) -> Callable[[int, int, float], Meeting] | None:
    """Return the rendezvous of the ranks of a world on a normalized backend. None: by ``init_method``."""
    ways = (_known(name, backend).meets_by for name in engines_of(backend).values())
    return next((way for way in ways if way is not None), None)


def meetings(backend: str) -> int:
    """Return how often the creation of a group of several ranks calls its Exchange. A single rank does not call it."""
    return len(set(engines_of(backend).values()))


def make_engine(
    backend: str,
    rank: int,
    members: Sequence[Member],
    exchange: Exchange,
    group_name: str,
    timeout_s: float,
    parent: Parent | None = None,
    connect_s: float | None = None,
) -> Engine:
    """Connect an engine with the other members of a group.

    Args:
        backend: The result of ``check_backend``.
        rank: The rank of this process in the group.
        members: The members of the group, by rank.
        exchange: Gives every rank the records of all ranks.
        group_name: The name of the group for error messages.
        timeout_s: The timeout of every later call, in seconds.
        parent: The group that ``exchange`` uses, on every rank, or None.
        connect_s: The timeout of the connection, in seconds. None: ``timeout_s``.

    Raises:
        ConfigError: The system refused memory, a socket or another resource.
    """
    engines = engines_of(backend)
    made: dict[str, Engine] = {}
    try:
        for name in dict.fromkeys(engines.values()):
            once = _Once(name, exchange, len(members) == 1, timeout_s if connect_s is None else connect_s)
            setup = GroupSetup(rank, members, once, group_name, timeout_s, parent)
            with refusals(f"rank {rank} of {len(members)} cannot connect group '{group_name}' ({name})"):
                made[name] = _known(name, backend).make(setup)
            # The other ranks wait in the exchange, whether the engine needs it or not.
            once.call()
    except BaseException:
        # The engines that have connected must leave, otherwise the other ranks would wait for this rank.
        for engine in made.values():
            engine.close()
        raise
    if len(made) == 1:
        return next(iter(made.values()))
    from allranks._engines.by_device import ByDevice

    return ByDevice(backend, {device: made[name] for device, name in engines.items()}, group_name)


class _Once:
    """An Exchange that takes place exactly once, whatever the engine does: other ranks may wait in it for this rank."""

    def __init__(self, engine: str, exchange: Exchange, alone: bool, connect_s: float) -> None:
        # Seconds in which the engine may connect, if the engine distinguishes this from the timeout of calls.
        self.connect_s = connect_s
        self._engine = engine
        self._exchange = exchange
        self._alone = alone
        self._called = False

    def __call__(self, record: bytes) -> list[bytes]:
        if self._called:
            raise ConfigError(f"the {self._engine} engine calls the exchange of a group twice. Expected one call")
        if len(record) > RECORD_BYTES:
            raise ConfigError(
                f"the {self._engine} engine exchanges a record of {len(record)} bytes. Expected at most {RECORD_BYTES}"
            )
        self._called = True
        # One length for all ranks: the records travel in an all_gather.
        record = record.ljust(RECORD_BYTES, b"\0")
        return [record] if self._alone else self._exchange(record)

    def call(self) -> None:
        """Take part in the exchange if the engine has not."""
        if not self._called:
            self(b"")


def _devices(spec: EngineSpec) -> Sequence[str]:
    return spec.devices or ("cpu",)


def _known(name: str, backend: str | None) -> EngineSpec:
    spec = registry.find(name)
    if spec is not None:
        return spec
    known = ", ".join(f"'{each}'" for each in registry.names())
    if name in _PLANNED:
        raise ConfigError(f"backend {backend!r} is not supported by this version of allranks. Expected {known}")
    raise ConfigError(f"unknown backend {backend!r}: expected {known}, 'cpu:gloo,cuda:nccl' or similar, or None")


def _is_device(name: str) -> bool:
    """Return whether torch has this type of device, with data on it."""
    import torch

    try:
        return torch.device(name).type == name != "meta"
    except RuntimeError:
        return False


def _has(device: str) -> bool:
    import torch

    module = getattr(torch, device, None)
    # torch.cuda.is_available would prevent forked children from using CUDA.
    return device == "cpu" or (module is not None and module.device_count() > 0)
