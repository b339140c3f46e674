"""Run a simulation with thousands of seeds, and replay one of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

import pytest

__all__ = ["each_thousand", "replay", "run_seeds"]

_ONE = os.environ.get("ALLRANKS_SEED")


class Simulation(Protocol):
    """A simulated job, which raises if the result is wrong."""

    def run(self) -> None: ...


def each_thousand(seeds: int) -> pytest.MarkDecorator:
    """Call a test with ``thousand`` from 0 on, so that workers share the seeds. With ALLRANKS_SEED, call it once."""
    return pytest.mark.parametrize("thousand", range(seeds // 1000) if _ONE is None else ["one"])


def run_seeds(thousand: int, simulation: Callable[..., Simulation]) -> None:
    """Run a thousand seeds, or that of ALLRANKS_SEED. An error contains the seed and its events.

    Args:
        thousand: The argument of the test.
        simulation: Creates the job of a seed. A list as the second argument receives its events.
    """
    for seed in range(thousand * 1000, thousand * 1000 + 1000) if _ONE is None else [int(_ONE)]:
        try:
            simulation(seed).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}\n" + "\n".join(replay(seed, simulation))) from error
        if _ONE is not None:
            print("\n".join(replay(seed, simulation)))


def replay(seed: int, simulation: Callable[..., Simulation]) -> list[str]:
    """Return the events of a seed, with the error that ended it."""
    events: list[str] = []
    try:
        simulation(seed, events).run()
    except Exception as error:  # noqa: BLE001
        events.append(repr(error))
    return events
