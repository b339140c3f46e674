"""Checks: functions without arguments that return a ``Finding``. The function name is the name of the check.

A check tests an operation: it binds, maps, writes, resolves or starts something. An exception in a check counts as a
failure with that cause. A check therefore does not need to expect every possible fault of a host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

__all__ = ["Check", "Finding", "Verdict", "fail", "ok", "run", "warn"]

Verdict: TypeAlias = Literal["ok", "warn", "FAIL"]


class Finding(NamedTuple):
    """The result of a check.

    Attributes:
        verdict: ``warn``: some programs may fail or be slow. ``FAIL``: something does not work.
        measured: The observation.
        advice: The recommended action; "" if nothing is wrong.
    """

    verdict: Verdict
    measured: str
    advice: str = ""


class Check(NamedTuple):
    """A finding together with the name of its check."""

    name: str
    verdict: Verdict
    measured: str
    advice: str = ""


def ok(measured: str) -> Finding:
    """Return a finding without problems."""
    return Finding("ok", measured)


def warn(measured: str, advice: str) -> Finding:
    """Return a warning: some programs may fail or be slow."""
    return Finding("warn", measured, advice)


def fail(measured: str, advice: str) -> Finding:
    """Return a failure: something does not work."""
    return Finding("FAIL", measured, advice)


def run(check: Callable[[], Finding]) -> Check:
    """Run one check. An exception becomes a failed check."""
    name = check.__name__.replace("_", " ")
    try:
        return Check(name, *check())
    except Exception as error:  # noqa: BLE001 - a broken library may raise anything, and that is the finding
        text = " ".join(str(error).split()) or "no message"
        return Check(
            name,
            "FAIL",
            f"{type(error).__name__}: {text}",
            "The check failed with this exception. Fix its cause, or report it with this output.",
        )
