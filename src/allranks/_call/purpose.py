"""Collectives that are parts of another call: errors, on every rank, name the call that the program has made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from allranks import _core

__all__ = ["part_of"]


@contextlib.contextmanager
def part_of(name: str) -> Iterator[None]:
    """Collectives that this thread calls meanwhile are parts of ``name``, one of the core's ``Purpose``.

    Ranks compare it: a collective of the program's never meets a part of another call.
    """
    before = _core.part_of(name)
    try:
        yield
    finally:
        _core.part_of(before)
