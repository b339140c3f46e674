"""What a worker knows of a call that the master has described once: the function that runs it, and its form."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["Code", "Slots", "CallTemplate"]

Slots = dict[int, Any]


class Code(NamedTuple):
    """A template's call as a line of Python, with gaps: ``{i[0]}`` tensors, ``{o[0]}`` results, ``{n[0]}`` numbers."""

    text: str
    layout: struct.Struct  # of the ids and numbers in a frame
    space: dict[str, Any]


class CallTemplate(NamedTuple):
    """What a worker knows of a call."""

    name: str
    inputs: int
    outputs: int
    nbytes: int  # of a call's frame, without the template's number
    changes: tuple[int, ...]  # which inputs the operator writes to
    run: Callable[[Slots, Any, int], None]
    code: Code | None = None  # None: it is a program itself
