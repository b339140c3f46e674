"""The debug level: the amount of additional checks and reports of the ranks.

``ALLRANKS_DEBUG`` or torch's ``TORCH_DISTRIBUTED_DEBUG`` sets it. ``ALLRANKS_DEBUG`` takes precedence.
"""

from __future__ import annotations

import enum
import os

from allranks._base.errors import ConfigError
from allranks._base.public import publish

__all__ = ["DebugLevel", "get_debug_level", "set_debug_level", "set_debug_level_from_env"]

_VARIABLES = ("ALLRANKS_DEBUG", "TORCH_DISTRIBUTED_DEBUG")


class DebugLevel(enum.IntEnum):
    """OFF, INFO or DETAIL, as in torch. INFO equals OFF, because allranks always makes the checks of torch's INFO."""

    OFF = 0
    INFO = 1
    DETAIL = 2


_OTHER_WORDS = {
    **dict.fromkeys(("", "0", "NO", "FALSE"), DebugLevel.OFF),
    **dict.fromkeys(("1", "ON", "YES", "TRUE"), DebugLevel.DETAIL),
}

_level: DebugLevel | None = None  # None until it is first read or set


def get_debug_level() -> DebugLevel:
    """Return the debug level: the one that was set, else the environment's, else OFF.

    Raises:
        ConfigError: The value in the environment is not a level.
    """
    if _level is None:
        set_debug_level_from_env()
        assert _level is not None
    return _level


def set_debug_level(level: DebugLevel) -> None:
    """Set the debug level of this process, for groups that it creates afterwards.

    Raises:
        TypeError: The argument is not a DebugLevel of allranks or of torch.
    """
    global _level
    name = str(getattr(level, "name", ""))
    if type(level).__name__ != "DebugLevel" or name not in DebugLevel.__members__:
        *others, last = (f"DebugLevel.{member}" for member in DebugLevel.__members__)
        raise TypeError(f"set_debug_level: expected {', '.join(others)} or {last}, not {level!r}")
    _level = DebugLevel[name]


def set_debug_level_from_env() -> None:
    """Set the debug level from the environment: ALLRANKS_DEBUG, else TORCH_DISTRIBUTED_DEBUG, else OFF.

    Raises:
        ConfigError: The value of the variable is not a level.
    """
    global _level
    variable = next((name for name in _VARIABLES if name in os.environ), None)
    text = os.environ[variable] if variable else "OFF"
    levels = {**DebugLevel.__members__, **_OTHER_WORDS}
    if text.upper() not in levels:
        raise ConfigError(f"{variable}={text!r} is not a debug level. Expected {', '.join(DebugLevel.__members__)}.")
    _level = levels[text.upper()]


publish(globals())
