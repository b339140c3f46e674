"""Collectives that are part of another call. On every rank, errors name the call that the program has made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from allranks import _core

__all__ = ["part_of", "whole_call"]


@contextlib.contextmanager
def part_of(name: str) -> Iterator[None]:
    """Mark the collectives of this thread in this block as parts of the call ``name``, one of the core's ``Purpose``.

    Ranks compare it, so a collective of the program is never matched with a part of another call.
    """
    before = _core.part_of(name)
    try:
        yield
    finally:
        _core.part_of(before)


def whole_call() -> str:
    """Return the call of which this thread's collectives are currently parts; "" if they are calls of their own."""
    name = _core.part_of("")  # the core has no getter: set it, which returns the previous value, then restore it
    _core.part_of(name)
    return name
