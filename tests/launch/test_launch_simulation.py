"""Loop and policy of the launcher in thousands of simulated jobs: they end in time and name the correct rank.

``ALLRANKS_SEED=n pytest -s tests/launch/test_launch_simulation.py`` runs one seed and prints its events.
"""

from __future__ import annotations

import ast
import signal
from pathlib import Path
from typing import Any

import pytest
from job_simulation import Job, Wrong

from allranks.launch import policy
from allranks.launch.policy import job
from allranks.launch.policy.interface import KillRequested, SignalRanks
from allranks.launch.policy.root_cause import Failure, RootCause
from allranks.launch.policy.round import Round
from allranks.launch.runtime.loop import RoundLoop
from allranks.launch.spec.events import Exited
from support.seeds import each_thousand, replay, run_seeds

SEEDS = 5_000


@each_thousand(SEEDS)
def test_seeds(thousand: int) -> None:
    run_seeds(thousand, Job)


def test_a_seed_replays() -> None:
    assert len(replay(4710, Job)) > 5
    assert replay(4710, Job) == replay(4710, Job)


def run_all() -> None:
    for seed in range(SEEDS):
        Job(seed).run()


def stop_without_kill(self: Round, number: int, ranks: Any) -> None:
    stop(self, number, ranks)
    self._kill_at = self._now + 1e9


def stop_all_but_one(self: Round, number: int, ranks: Any) -> None:
    stop(self, number, sorted(ranks)[1:])


def believe_echoes(self: RootCause) -> float | None:
    return min((failure.at for failure in self.failures.values()), default=None)


def select_the_last(self: RootCause) -> Failure:
    return max(self.failures.values(), key=lambda failure: failure.at)


def wait_for_ever(self: Round) -> bool:
    return not self.running


def restart_always(state: job.JobState, event: job.RoundEnded) -> bool:
    return event.failed


def signal_the_dead(self: Round, event: Any) -> None:
    take_exit(self, event)
    self.running.add(event.rank)


def sleep_for_ever(self: RoundLoop) -> float | None:
    return None


def send_no_signal(self: RoundLoop, action: Any) -> None:
    if not isinstance(action, SignalRanks):
        perform(self, action)


def lose_exits(self: RoundLoop, event: Any) -> None:
    if not isinstance(event, Exited):
        take(self, event)


def forget_requests(self: RoundLoop, event: Any) -> None:
    if not isinstance(event, KillRequested):
        pass_on(self, event)


stop, take_exit = Round._stop, Round._take_exit
perform, take, pass_on = RoundLoop._perform, RoundLoop._take, RoundLoop._pass


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (Round, "_stop", stop_without_kill),
        (Round, "_stop", stop_all_but_one),
        (Round, "_is_over", wait_for_ever),
        (Round, "_take_exit", signal_the_dead),
        (RootCause, "settles_at", believe_echoes),
        (RootCause, "select", select_the_last),
        (job, "_goes_on", restart_always),
        (RoundLoop, "_timeout_s", sleep_for_ever),
        (RoundLoop, "_perform", send_no_signal),
        (RoundLoop, "_take", lose_exits),
        (RoundLoop, "_pass", forget_requests),
    ],
)
def test_simulation_detects_a_broken_rule(owner: Any, name: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(Wrong):
        run_all()


PURE = {"__future__", "collections", "dataclasses", "enum", "signal", "typing", "allranks"}


@pytest.mark.parametrize("path", sorted(Path(str(policy.__file__)).parent.glob("*.py")), ids=lambda path: path.name)
def test_policy_performs_no_input_or_output(path: Path) -> None:
    """Check that the policy imports no module that reads a clock, creates processes or opens files.

    From ``signal``, the policy uses only constants.
    """
    tree = ast.parse(path.read_text())
    used = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            used |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            used.add(str(node.module).partition(".")[0])
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "signal":
            assert node.attr == "Signals" or isinstance(getattr(signal, node.attr), signal.Signals)
        elif isinstance(node, ast.Name):
            assert node.id not in ("open", "print", "input", "exec", "eval", "__import__")
    assert used <= PURE
