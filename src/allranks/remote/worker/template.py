"""The worker's description of a call: the function that runs it, and its form. The master sends it once."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["Code", "Slots", "CallTemplate"]

Slots = dict[int, Any]


class Code(NamedTuple):
    """A template's call as a line of Python, with gaps: ``{i[0]}`` tensors, ``{o[0]}`` results, ``{n[0]}`` numbers."""

    text: str
    layout: struct.Struct  # the ids and numbers in a frame
    space: dict[str, Any]


class CallTemplate(NamedTuple):
    """The worker's description of a call."""

    name: str
    inputs: int
    outputs: int
    nbytes: int  # length of a call's frame, without the template's number
    changes: tuple[int, ...]  # positions of the inputs that the operator changes
    run: Callable[[Slots, Any, int], None]
    code: Code | None = None  # None: the template is a captured step
