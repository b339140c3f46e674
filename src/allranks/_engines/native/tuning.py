"""The sizes that select the algorithm of a call within a host, and the CPUs of the host that are near each other.

The sizes are the defaults, or the result of `allranks tune` on a machine. On each host, the table of the first rank
applies to all ranks (core/channel/segment.h). The topology comes from the kernel, or from the user. Each rank publishes
the CPUs on which it may run, and all ranks derive the same groups of ranks from this. Results are the same with every
table and topology.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

from allranks import _core
from allranks._base.errors import ConfigError
from allranks._base.files import read_bytes

__all__ = ["LIMITS", "NEVER", "read_topology", "read_tuning", "tuning_of"]

NEVER = 1 << 30
"""As the number of ranks from which an algorithm is used: it is never used."""

LIMITS = {
    "levels_from": (3, NEVER),
    "crowded_levels_from": (3, NEVER),
    "group": (2, 16),
    "one_shot": (0, 1 << 20),
    "one_shot_of_all": (0, 1 << 24),
}
"""The entries of a table, and their minimum and maximum (core/channel/segment.h describes their meaning)."""

_CPUS = 1024
"""The number of CPUs that the core can represent."""

# The file is read once per process, because each group reads the table.
_read: dict[str, dict[str, int]] = {}


def read_tuning(environ: Mapping[str, str]) -> _core.Tuning:
    """Return the table of the file that ``ALLRANKS_TUNING`` names, else the default table.

    Raises:
        ConfigError: The file cannot be read, or was not written by `allranks tune`.
    """
    path = environ.get("ALLRANKS_TUNING", "").strip()
    if not path:
        return _core.Tuning()
    if path not in _read:
        _read[path] = _table(path)
    return tuning_of(_read[path])


def tuning_of(table: Mapping[str, int]) -> _core.Tuning:
    """Return the default table with these values replaced."""
    tuning = _core.Tuning()
    for name, value in table.items():
        setattr(tuning, name, value)
    return tuning


def read_topology(environ: Mapping[str, str]) -> list[list[int]]:
    """Return the CPUs that are near each other, one list per place, from ``ALLRANKS_TOPOLOGY``. []: use the kernel's.

    Raises:
        ConfigError: It does not have the form ``0-7,64-71/8-15,72-79``, or contains a CPU twice.
    """
    text = environ.get("ALLRANKS_TOPOLOGY", "").strip()
    if not text:
        return []
    lists = [[cpu for part in each.split(",") for cpu in _cpus(part.strip(), text)] for each in text.split("/")]
    seen: set[int] = set()
    for cpu in itertools.chain.from_iterable(lists):
        if cpu in seen:
            raise ConfigError(f"ALLRANKS_TOPOLOGY={text!r}: CPU {cpu} occurs twice. {_FORM}")
        seen.add(cpu)
    return lists


_FORM = "Expected lists of neighboring CPUs, separated by /, such as 0-7,64-71/8-15,72-79."


def _cpus(part: str, text: str) -> range:
    first, dash, last = part.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise ConfigError(f"ALLRANKS_TOPOLOGY={text!r}: {part!r} is not a CPU or a range of CPUs. {_FORM}")
    cpus = range(int(first), int(last if dash else first) + 1)
    if not cpus or cpus[-1] >= _CPUS:
        raise ConfigError(f"ALLRANKS_TOPOLOGY={text!r}: {part!r} is not within 0-{_CPUS - 1}. {_FORM}")
    return cpus


def _table(path: str) -> dict[str, int]:
    where = f"ALLRANKS_TUNING={path!r}"
    try:
        found: Any = json.loads(read_bytes(path))
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}.\n  Create it with `allranks tune`.") from None
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}.\n  Create it with `allranks tune`.") from None
    table = found.get("tuning") if isinstance(found, dict) else None
    if not isinstance(table, dict):
        raise ConfigError(f"{where} has no table 'tuning'.\n  Create it with `allranks tune`.")
    for name, value in table.items():
        if name not in LIMITS:
            raise ConfigError(f"{where}: {name!r} is not known. Expected some of {', '.join(LIMITS)}.")
        low, high = LIMITS[name]
        # bool is a subclass of int, so JSON's true would pass as 1.
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ConfigError(f"{where}: {name}={value!r}. Expected a whole number in {low}..{high}.")
    return table
