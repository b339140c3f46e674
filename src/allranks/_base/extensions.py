"""Parts that an installed package brings by an entry point: an engine, a scheduler.

What is wrong with such a package is a ConfigError that names the package, its version and what to do. Reading entry
points takes milliseconds, and importing what reads them fifty more: callers ask only for names that they do not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from allranks._base.errors import ConfigError
from allranks._base.forks import guard

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["described", "entry_points", "load", "package_of"]


class _Part(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def interface(self) -> int: ...


T = TypeVar("T", bound=_Part)


def entry_points(group: str) -> list[EntryPoint]:
    """All entry points of a group. Nothing of the packages is imported."""
    from importlib import metadata  # late: the launcher starts without it

    return list(metadata.entry_points(group=group))


def load(points: Sequence[EntryPoint], what: str, part: str, kind: type[T], versions: tuple[int, int]) -> T:
    """The object that an entry point names.

    Args:
        points: those of one name.
        what: what is loaded, for errors: "backend 'mine'".
        part: what the package brings, for errors: "engine".
        kind: the class that the object must have.
        versions: the oldest and the newest version of the interface that this allranks takes.

    Raises:
        ConfigError: several packages have the name, or the one cannot be loaded, is made for another version, or names
            something else.
    """
    point = points[0]
    here = f"{what}: {package_of(point)}"
    article = "an" if part[0] in "aeiou" else "a"
    if len(points) > 1:
        several = " and ".join(map(package_of, points))
        raise ConfigError(f"{what}: {several} bring {article} {part} of this name. Uninstall all but one of them")
    import allranks

    oldest, newest = versions
    taken = f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"
    try:
        with guard:  # Python's lock of a module would stay held in a child that is forked meanwhile
            found = point.load()
    except Exception as error:
        raise ConfigError(
            f"{here} cannot be loaded ({point.value}): {described(error)}.\n  Install a release of it for this "
            f"allranks ({allranks.__version__}, {part} interface {taken}), or uninstall it"
        ) from error
    if not isinstance(found, kind):
        kinds = f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"
        raise ConfigError(f"{here} names {point.value}, which is a {type(found).__name__}. Expected {kinds}")
    if not oldest <= found.interface <= newest:
        package = package_of(point).partition(" ")[0]
        newer, older = (package, "allranks") if found.interface < oldest else ("allranks", package)
        raise ConfigError(
            f"{here} is made for version {found.interface} of the {part} interface; this allranks "
            f"({allranks.__version__}) takes {taken}.\n  Install a newer {newer}, or an older {older}"
        )
    if found.name != point.name:
        raise ConfigError(f"{here} names {point.value}, whose name is {found.name!r}. Expected {point.name!r}")
    return found


def package_of(point: EntryPoint) -> str:
    """The package that brings it, with its version."""
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "a package without a name"


def described(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
