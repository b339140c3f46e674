"""Collectives that are parts of another call: errors, on every rank, name the call that the program has made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from allranks import _core

__all__ = ["part_of", "whole_call"]


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


def whole_call() -> str:
    """The call of the program that this thread's collectives are parts of at present; empty: they are whole calls."""
    name = _core.part_of("")
    _core.part_of(name)
    return name
