"""The colors of calls in pictures and pages."""

from __future__ import annotations

from allranks._base.verbs import VERBS

__all__ = ["COLOURS", "colour", "pale"]

COLOURS = {**{verb.name: verb.color for verb in VERBS.values()}, "command": "#3d6b85"}


def colour(verb: str) -> str:
    """Return the color of a verb."""
    return COLOURS.get(verb, "#444444")


def pale(verb: str) -> str:
    """Return the color of the waiting part of a call: the color of its verb, mixed with 72 % white."""
    value = colour(verb)
    parts = (int(value[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - part) * 0.28):02x}" for part in parts)
