"""The registry of engines: allranks's own, and those of installed packages. It does not import torch.

The table of allranks's engines is complete without reading installed packages. Entry points are read only if a name is
not in the table, or if all engines are listed, because reading them takes milliseconds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from allranks._base.errors import ConfigError
from allranks._base.extensions import described, entry_points, load, package_of
from allranks._engines.c10d import GLOO, NCCL
from allranks._engines.mpi import MPI
from allranks._engines.native import NATIVE, TCP
from allranks._engines.spec import INTERFACE, OLDEST, EngineSpec

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["ALIASES", "BUILT_IN", "ENTRY_POINTS", "Listed", "find", "is_here", "is_known", "listing", "names"]

BUILT_IN: dict[str, EngineSpec] = {spec.name: spec for spec in (NATIVE, TCP, GLOO, MPI, NCCL)}
"""Allranks's own engines, by name."""

ALIASES = {"allranks": "native"}
"""Other names of engines: the names under which torch.distributed knows them."""

ENTRY_POINTS = "allranks.engines"
"""The group of entry points. The name of an entry point is that of the engine. Its object is an EngineSpec."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")
# Specs of installed packages that were loaded. A package is imported once.
_loaded: dict[str, EngineSpec] = {}


@dataclass(frozen=True)
class Listed:
    """A row of the list of engines.

    Attributes:
        name: The name of the engine.
        package: The package that provides it, with its version. "" for allranks itself.
        here: Whether it can be used.
        error: Why it cannot be loaded, else "".
    """

    name: str
    package: str
    here: bool
    error: str


def find(name: str) -> EngineSpec | None:
    """Return the engine of this name, or None if it does not exist.

    Raises:
        ConfigError: An installed package provides it, and is broken or made for another version of allranks.
    """
    # First the own table: its engines cannot be replaced, and packages are then not searched.
    spec = BUILT_IN.get(name) or _loaded.get(name)
    if spec is None:
        points = [point for point in _entry_points() if point.name.lower() == name]
        if points:
            spec = _loaded[name] = _load(points)
    return spec


def is_here(spec: EngineSpec) -> bool:
    """Return whether an engine can be used in this process.

    Raises:
        ConfigError: The availability check of an installed package's engine fails.
    """
    if spec.name in BUILT_IN:
        return spec.available()
    try:
        return bool(spec.available())
    # The check is code of an installed package, which may raise anything.
    except Exception as error:
        packages = ", ".join(package_of(point) for point in _entry_points() if point.name == spec.name)
        raise ConfigError(
            f"backend {spec.name!r}: {packages} cannot report whether it is available: {described(error)}.\n"
            f"  Update or uninstall {packages}."
        ) from error


def is_known(name: str) -> bool:
    """Return whether an engine or an alias has this name. It imports nothing."""
    return name in BUILT_IN or name in ALIASES or name in map(str.lower, names())


def names() -> list[str]:
    """Return the names of all engines. It imports nothing."""
    return list(dict.fromkeys([*BUILT_IN, *(point.name for point in _entry_points())]))


def listing() -> list[Listed]:
    """Return all engines. An engine that cannot be loaded has an error."""
    lines = [Listed(spec.name, "", is_here(spec), "") for spec in BUILT_IN.values()]
    by_name: dict[str, list[EntryPoint]] = {}
    for point in _entry_points():
        by_name.setdefault(point.name, []).append(point)
    for name, points in by_name.items():
        packages = ", ".join(package_of(point) for point in points)
        try:
            spec = _loaded.get(name) or _load(points)
            lines.append(Listed(name, packages, is_here(spec), ""))
        # A broken package must not hide the other engines in the list.
        except ConfigError as error:
            lines.append(Listed(name, packages, False, str(error)))
    return lines


def _entry_points() -> list[EntryPoint]:
    return entry_points(ENTRY_POINTS)


def _load(points: list[EntryPoint]) -> EngineSpec:
    """Return the spec of an entry point. If several have the same name, none is used."""
    name, package = points[0].name, package_of(points[0])
    what = f"backend {name!r}"
    if len(points) == 1 and (name in BUILT_IN or name in ALIASES):
        raise ConfigError(
            f"{what}: {package} provides an engine of this name, which allranks reserves. The package's engine is "
            "not used.\n  Rename the engine in the package, or uninstall the package."
        )
    if len(points) == 1 and not _NAME.fullmatch(name):
        raise ConfigError(
            f"{what}: {package} provides an engine with an invalid name. Expected lowercase letters, digits and "
            "underscores, as in 'mine'"
        )
    return load(points, what, "engine", EngineSpec, (OLDEST, INTERFACE))
