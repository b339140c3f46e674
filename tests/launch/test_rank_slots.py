"""Elastic rounds with thousands of simulated losses: the slot table is correct after every event.

``ALLRANKS_SEED=n pytest -s tests/launch/test_rank_slots.py`` runs one seed and prints its events.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from job_simulation import Wrong
from rank_slot_simulation import ElasticJob

from allranks._elastic.rank_slots import RankSlots
from allranks.launch.policy.root_cause import Failure
from allranks.launch.policy.round import Round
from support.seeds import each_thousand, run_seeds

SEEDS = 5_000


@each_thousand(SEEDS)
def test_seeds(thousand: int) -> None:
    run_seeds(thousand, ElasticJob)


def run_all() -> None:
    for seed in range(SEEDS):
        ElasticJob(seed).run()


def nothing(*arguments: Any) -> None:
    return None


def always(*arguments: Any) -> bool:
    return True


def lose_for_good(self: RankSlots, failure: Failure, again: bool) -> None:
    lose(self, failure, False)


def count_no_start(self: RankSlots, rank: int) -> int:
    return 0


def join_without_limit(self: RankSlots, host: str, room: int) -> tuple[str, dict[int, int]]:
    self._rules = replace(self._rules, most=None)
    return join(self, host, room)


def join_on_two_hosts(self: RankSlots, host: str, room: int) -> tuple[str, dict[int, int]]:
    vacant = dict(self.vacant)
    found = join(self, host, room)
    self.vacant = vacant
    return found


lose = RankSlots.lose
join = RankSlots.join


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (Round, "_publish", nothing),
        (Round, "_give_up_starting", nothing),
        (Round, "_check_leaving", nothing),
        (Round, "_can_continue", always),
        (Round, "_has_failures", lambda self: False),
        (RankSlots, "may_start", always),
        (RankSlots, "is_enough", always),
        (RankSlots, "start_of", count_no_start),
        (RankSlots, "lose", lose_for_good),
        (RankSlots, "end", nothing),
        (RankSlots, "join", join_without_limit),
        (RankSlots, "join", join_on_two_hosts),
        (RankSlots, "start", always),
    ],
)
def test_simulation_detects_a_broken_rule(owner: Any, name: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(Wrong):
        run_all()
