"""The rendezvous under thousands of simulated faults: every surviving rank gets the right result in time.

``ALLRANKS_SEED=n pytest -s tests/rendezvous/test_simulation.py`` runs one seed and prints its events.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from simulation import Job, Wrong

from allranks._rendezvous.join_protocol import JoinProtocol
from allranks._store.wire import Add, Set
from support.seeds import each_thousand, replay, run_seeds

SEEDS = 10_000


@each_thousand(SEEDS)
def test_seeds(thousand: int) -> None:
    run_seeds(thousand, Job)


def test_a_seed_replays() -> None:
    assert len(replay(4710, Job)) > 5
    assert replay(4710, Job) == replay(4710, Job)


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
