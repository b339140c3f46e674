"""The colors of verbs in pictures and pages: dark enough for white text, and distinguishable by lightness, too."""

from __future__ import annotations

__all__ = ["COLOURS", "colour", "pale"]

COLOURS = {
    "all_reduce": "#2563a8",
    "reduce": "#6b4fa0",
    "broadcast": "#0f7b6c",
    "all_gather": "#c05a1c",
    "gather": "#94701a",
    "scatter": "#a0527c",
    "reduce_scatter": "#7a4a35",
    "all_to_all": "#b3343f",
    "barrier": "#5b6673",
    "send": "#3f7d3a",
    "recv": "#6f9a2e",
    "command": "#3d6b85",
}


def colour(verb: str) -> str:
    """Return the color of a verb."""
    return COLOURS.get(verb, "#444444")


def pale(verb: str) -> str:
    """Return the color of the waiting part of a call: the color of its verb, mixed with 72 % white."""
    value = colour(verb)
    parts = (int(value[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - part) * 0.28):02x}" for part in parts)
