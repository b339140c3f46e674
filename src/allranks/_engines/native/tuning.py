"""From which sizes on calls within a host go which way: what is shipped, or what `allranks tune` found on a machine.

Of the ranks of a host, the first one's holds for all (core/channel/segment.h): results are the same with every table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from allranks import _core
from allranks._base.errors import ConfigError

__all__ = ["LIMITS", "NEVER", "read_tuning", "tuning_of"]

NEVER = 1 << 30
"""As the number of ranks from which on something is done: it is not done."""

LIMITS = {
    "levels_from": (3, NEVER),
    "crowded_levels_from": (3, NEVER),
    "group": (2, 16),
    "one_shot": (0, 1 << 20),
    "one_shot_of_all": (0, 1 << 24),
}
"""What a table may have, and between which numbers (core/channel/segment.h says what they mean)."""

_read: dict[str, dict[str, int]] = {}


def read_tuning(environ: Mapping[str, str]) -> _core.Tuning:
    """The table of the file that ``ALLRANKS_TUNING`` names; else the one that is shipped.

    Raises:
        ConfigError: the file cannot be read, or is none that `allranks tune` writes.
    """
    path = environ.get("ALLRANKS_TUNING", "").strip()
    if not path:
        return _core.Tuning()
    if path not in _read:
        _read[path] = _table(path)
    return tuning_of(_read[path])


def tuning_of(table: Mapping[str, int]) -> _core.Tuning:
    """With these numbers in place of the shipped ones."""
    tuning = _core.Tuning()
    for name, value in table.items():
        setattr(tuning, name, value)
    return tuning


def _table(path: str) -> dict[str, int]:
    where = f"ALLRANKS_TUNING={path!r}"
    try:
        with open(path, encoding="utf-8") as file:
            found: Any = json.load(file)
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}. allranks tune writes such a file.") from None
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}. allranks tune writes such a file.") from None
    table = found.get("tuning") if isinstance(found, dict) else None
    if not isinstance(table, dict):
        raise ConfigError(f"{where} has no table 'tuning'. allranks tune writes such a file.")
    for name, value in table.items():
        if name not in LIMITS:
            raise ConfigError(f"{where}: {name!r} is not known. Expected some of {', '.join(LIMITS)}.")
        low, high = LIMITS[name]
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ConfigError(f"{where}: {name}={value!r}. Expected a whole number in {low}..{high}.")
    return table
