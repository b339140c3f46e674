"""Extensions that an installed package provides through an entry point: an engine, a scheduler.

A problem with such a package raises a ConfigError that names the package, its version and the remedy. Reading entry
points takes milliseconds, and importing ``importlib.metadata`` takes another 50 ms. Callers therefore read them only
for names that are not built in.
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
    """Return all entry points of a group without importing the packages."""
    from importlib import metadata  # late: the launcher does not need it to start

    return list(metadata.entry_points(group=group))


def load(points: Sequence[EntryPoint], what: str, part: str, kind: type[T], versions: tuple[int, int]) -> T:
    """Load the object that an entry point names.

    Args:
        points: All entry points with one name.
        what: Description of the object for errors: "backend 'mine'".
        part: Kind of extension for errors: "engine".
        kind: The required class of the object.
        versions: The oldest and the newest version of the interface that this allranks supports.

    Raises:
        ConfigError: Several packages provide the name. Or the object cannot be loaded, is of another class, has another
            name, or requires another version of the interface.
    """
    point = points[0]
    here = f"{what}: {package_of(point)}"
    article = "an" if part[0] in "aeiou" else "a"
    if len(points) > 1:
        several = " and ".join(map(package_of, points))
        raise ConfigError(f"{what}: {several} provide {article} {part} of this name.\n  Uninstall all except one.")
    import allranks

    oldest, newest = versions
    taken = f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"
    try:
        with guard:  # a child that is forked during the import would inherit Python's import lock as held
            found = point.load()
    except Exception as error:
        raise ConfigError(
            f"{here} cannot be loaded ({point.value}): {described(error)}.\n  Install a release that supports this "
            f"allranks ({allranks.__version__}, {part} interface {taken}), or uninstall it."
        ) from error
    if not isinstance(found, kind):
        kinds = f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"
        raise ConfigError(f"{here} names {point.value}, which is a {type(found).__name__}. Expected {kinds}")
    if not oldest <= found.interface <= newest:
        package = package_of(point).partition(" ")[0]
        newer, older = (package, "allranks") if found.interface < oldest else ("allranks", package)
        raise ConfigError(
            f"{here} requires version {found.interface} of the {part} interface, but this allranks "
            f"({allranks.__version__}) supports {taken}.\n  Install a newer {newer}, or an older {older}."
        )
    if found.name != point.name:
        raise ConfigError(f"{here} names {point.value}, whose name is {found.name!r}. Expected {point.name!r}")
    return found


def package_of(point: EntryPoint) -> str:
    """Return the package that provides an entry point, with its version."""
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an unnamed package"


def described(error: BaseException) -> str:
    """Return type and message of an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
