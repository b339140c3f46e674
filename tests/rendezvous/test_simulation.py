"""The rendezvous under thousands of simulated faults: every surviving rank gets the right result in time.

``ALLRANKS_SEED=n pytest -s tests/rendezvous/test_simulation.py`` runs one seed and prints its events.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest
from simulation import Job, Wrong

from allranks._rendezvous.join_protocol import JoinProtocol
from allranks._store.wire import Add, Set

SEEDS = 10_000
ONE = os.environ.get("ALLRANKS_SEED")


@pytest.mark.parametrize("thousand", range(SEEDS // 1000) if ONE is None else ["one"])
def test_seeds(thousand: int) -> None:
    for seed in range(thousand * 1000, thousand * 1000 + 1000) if ONE is None else [int(ONE)]:
        try:
            Job(seed).run()
        except Exception as error:
            events = replay(seed)
            raise Wrong(f"seed {seed}: {error!r}\n" + "\n".join(events)) from error
        if ONE is not None:
            print("\n".join(replay(seed)))


def replay(seed: int) -> list[str]:
    events: list[str] = []
    try:
        Job(seed, events).run()
    except Exception as error:  # noqa: BLE001
        events.append(repr(error))
    return events


def test_a_seed_replays() -> None:
    assert len(replay(4710)) > 5
    assert replay(4710) == replay(4710)


def count_by_add(self: JoinProtocol) -> Any:
    return (yield from self._perform(Add(f"joins/{self.me.rank}/{self.process}", 1)))


def settle_by_set(self: JoinProtocol, verdict: Any) -> Any:
    yield from self._request(Set(f"{self._key_prefix}verdict", msgspec.msgpack.encode(verdict)))
    return verdict


def run_all(seeds: range) -> None:
    for seed in seeds:
        Job(seed).run()


@pytest.mark.parametrize(("method", "broken"), [("_count_joins", count_by_add), ("_write_verdict", settle_by_set)])
def test_simulation_detects_broken_join_protocol(method: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace a step of the protocol by a variant that looks right. An early version used the first variant."""
    monkeypatch.setattr(JoinProtocol, method, broken)
    with pytest.raises(Wrong):
        run_all(range(5000))
