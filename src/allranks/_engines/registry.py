"""Which engines there are: those of allranks, and those of installed packages. Torch is not imported.

The table of allranks' own is complete without a look at what is installed. Entry points are read where a name is not in
the table, and where all engines are listed: reading them takes milliseconds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import allranks
from allranks._base.errors import ConfigError
from allranks._base.forks import guard
from allranks._engines.c10d import GLOO, NCCL
from allranks._engines.mpi import MPI
from allranks._engines.native import NATIVE, TCP
from allranks._engines.spec import INTERFACE, OLDEST, EngineSpec

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["ALIASES", "BUILT_IN", "ENTRY_POINTS", "Listed", "find", "is_here", "is_known", "listing", "names"]

BUILT_IN: dict[str, EngineSpec] = {spec.name: spec for spec in (NATIVE, TCP, GLOO, MPI, NCCL)}
"""Allranks' own engines, by name."""

ALIASES = {"allranks": "native"}
"""Other names of them: what torch.distributed calls it."""

ENTRY_POINTS = "allranks.engines"
"""The group of entry points. An entry point's name is the engine's, its object an EngineSpec."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_loaded: dict[str, EngineSpec] = {}


@dataclass(frozen=True)
class Listed:
    """A line of the list of engines.

    Attributes:
        name: the engine's.
        package: what brings it, with its version; "" for allranks itself.
        here: whether it can be used.
        error: why it cannot be loaded; "" where it can.
    """

    name: str
    package: str
    here: bool
    error: str


def find(name: str) -> EngineSpec | None:
    """The engine of that name; None: there is none.

    Raises:
        ConfigError: an installed package brings it, and is broken or made for another version of allranks.
    """
    spec = BUILT_IN.get(name) or _loaded.get(name)
    if spec is None:
        points = [point for point in _entry_points() if point.name.lower() == name]
        if points:
            spec = _loaded[name] = _load(points)
    return spec


def is_here(spec: EngineSpec) -> bool:
    """Whether an engine can be used in this process.

    Raises:
        ConfigError: an installed package's engine fails to answer.
    """
    if spec.name in BUILT_IN:
        return spec.available()
    try:
        return bool(spec.available())
    except Exception as error:
        packages = ", ".join(_package(point) for point in _entry_points() if point.name == spec.name)
        raise ConfigError(
            f"backend {spec.name!r}: {packages} cannot say whether it is available: {_described(error)}"
        ) from error


def is_known(name: str) -> bool:
    """Whether an engine, or an alias, has that name. Nothing is imported for it."""
    return name in BUILT_IN or name in ALIASES or name in map(str.lower, names())


def names() -> list[str]:
    """The names of all engines. Nothing is imported for it."""
    return list(dict.fromkeys([*BUILT_IN, *(point.name for point in _entry_points())]))


def listing() -> list[Listed]:
    """All engines. One that cannot be loaded has an error."""
    lines = [Listed(spec.name, "", is_here(spec), "") for spec in BUILT_IN.values()]
    by_name: dict[str, list[EntryPoint]] = {}
    for point in _entry_points():
        by_name.setdefault(point.name, []).append(point)
    for name, points in by_name.items():
        packages = ", ".join(_package(point) for point in points)
        try:
            spec = _loaded.get(name) or _load(points)
            lines.append(Listed(name, packages, is_here(spec), ""))
        except ConfigError as error:
            lines.append(Listed(name, packages, False, str(error)))
    return lines


def _entry_points() -> list[EntryPoint]:
    from importlib.metadata import entry_points  # late: the launcher starts without it

    return list(entry_points(group=ENTRY_POINTS))


def _load(points: list[EntryPoint]) -> EngineSpec:
    """The spec that an entry point names; of several with one name none is taken."""
    point = points[0]
    name, package = point.name, _package(point)
    here = f"backend {name!r}: {package}"
    if len(points) > 1:
        several = " and ".join(_package(each) for each in points)
        raise ConfigError(f"backend {name!r}: {several} bring an engine of this name. Uninstall all but one of them")
    if name in BUILT_IN or name in ALIASES:
        raise ConfigError(
            f"{here} brings an engine of this name, which is allranks' own. The package's engine is not used: it must "
            "have another name"
        )
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{here} brings an engine whose name is wrong. Expected small letters, digits and underscores, as in 'mine'"
        )
    try:
        with guard:  # Python's lock of a module would stay held in a child that is forked meanwhile
            spec = point.load()
    except Exception as error:
        raise ConfigError(
            f"{here} cannot be loaded ({point.value}): {_described(error)}.\n  Install a release of it for this "
            f"allranks ({allranks.__version__}, engine interface {_versions()}), or uninstall it"
        ) from error
    if not isinstance(spec, EngineSpec):
        raise ConfigError(f"{here} names {point.value}, which is a {type(spec).__name__}. Expected an EngineSpec")
    if not OLDEST <= spec.interface <= INTERFACE:
        newer, older = (package, "allranks") if spec.interface < OLDEST else ("allranks", package)
        raise ConfigError(
            f"{here} is made for version {spec.interface} of the engine interface; this allranks "
            f"({allranks.__version__}) takes {_versions()}.\n  Install a newer {newer.partition(' ')[0]}, or an older "
            f"{older.partition(' ')[0]}"
        )
    if spec.name != name:
        raise ConfigError(f"{here} names {point.value}, whose name is {spec.name!r}. Expected {name!r}")
    return spec


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "a package without a name"


def _versions() -> str:
    return f"version {INTERFACE}" if OLDEST == INTERFACE else f"versions {OLDEST} to {INTERFACE}"


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
