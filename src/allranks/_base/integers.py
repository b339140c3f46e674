"""Integers that programs pass as arguments: int, NumPy's integers, and integer tensors of one element."""

from __future__ import annotations

import operator

__all__ = ["integer_of"]


def integer_of(value: object) -> int | None:
    """Return the value as an int if it is an integer of any library (``operator.index``), otherwise None.

    Cost:
        30 ns for an int.
    """
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor on meta, or with several elements
        return None
