"""A check is a function without arguments that returns a ``Finding``; its name is what the check is called.

It measures something: binds, maps, writes, resolves, starts. One that raises has failed for that reason, so that a
check need not expect all that can be wrong with a host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

__all__ = ["Check", "Finding", "Verdict", "fail", "ok", "run", "warn"]

Verdict: TypeAlias = Literal["ok", "warn", "FAIL"]


class Finding(NamedTuple):
    """What a check has found.

    Attributes:
        verdict: ``warn``: some programs may fail or be slow; ``FAIL``: something does not work.
        measured: what was seen.
        advice: what to do; "" where nothing is wrong.
    """

    verdict: Verdict
    measured: str
    advice: str = ""


class Check(NamedTuple):
    """A finding, and the name of its check."""

    name: str
    verdict: Verdict
    measured: str
    advice: str = ""


def ok(measured: str) -> Finding:
    """Nothing is wrong."""
    return Finding("ok", measured)


def warn(measured: str, advice: str) -> Finding:
    """Some programs may fail or be slow."""
    return Finding("warn", measured, advice)


def fail(measured: str, advice: str) -> Finding:
    """Something does not work."""
    return Finding("FAIL", measured, advice)


def run(look: Callable[[], Finding]) -> Check:
    """Runs one check, whatever happens in it."""
    name = look.__name__.replace("_", " ")
    try:
        return Check(name, *look())
    except Exception as error:  # noqa: BLE001 - a broken library may raise anything, and that is the finding
        text = " ".join(str(error).split()) or "no message"
        return Check(
            name, "FAIL", f"{type(error).__name__}: {text}", "What the check asked for raised this: mend that."
        )
