"""Sixty seeded faults: each job ends with the correct weights or a typed error, without leftovers.

benchmarks/faults.py defines the jobs, the faults and the verdict. It describes how to run a failed seed again.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from support import cluster, sshd
from support.benchmark_modules import benchmark

EPOCHS = 12
FAULTS = 60  # 0.8 s of CPU time each; benchmarks/faults.py injects thousands


@pytest.fixture(scope="module")
def faults() -> Iterator[ModuleType]:
    with benchmark("faults") as module:
        yield module


@pytest.mark.timeout(900)
def test_sixty_random_faults_give_the_correct_weights_or_a_typed_error(faults: ModuleType) -> None:
    """Run jobs on one host, and on three hosts with a spare. Several run concurrently because they mostly wait."""
    reason = cluster.trouble() or sshd.trouble()
    assert not reason or os.environ.get("ALLRANKS_TEST_HOSTS") != "required", reason
    kind = faults.Kind(EPOCHS, faults=26)
    right = faults.undisturbed(kind)
    hits: Counter[str] = Counter()
    on_hosts = 0
    with contextlib.nullcontext() if reason else faults.four_hosts() as ssh, ThreadPoolExecutor(4) as pool:

        def jobs(seeds: range, most: int, where: Any) -> list[Future[Any]]:
            return [pool.submit(faults.run, replace(kind, faults=most), seed, right, ssh=where) for seed in seeds]

        there, here = jobs(range(0 if reason else 1), 10, ssh), jobs(range(2), 26, None)
        for first in range(2, 20):
            for job in (*there, *here):
                outcome = job.result()
                assert not outcome.trouble, f"seed {outcome.seed}: {outcome.trouble}"
                hits.update(fault.kind for fault in outcome.faults)
                on_hosts += len(outcome.faults) * (job in there)
            if hits.total() >= FAULTS and (reason or on_hosts >= 5):
                break
            there = jobs(range(first, first + 1), 10, ssh) if not reason and on_hosts < 5 else []
            here = jobs(range(first, first + 1), 26, None) if hits.total() < FAULTS else []
    assert hits.total() >= FAULTS, hits
    assert reason or on_hosts >= 5, hits
    kinds = {"kill", "kill of rank 0", "two at once", "during recovery", "of the joiner", "stop and go on"}
    assert kinds <= hits.keys(), hits


def test_wrong_value_in_one_step_is_detected(faults: ModuleType) -> None:
    """Simulate a job that has only two of three ranks for a while. Any wrong value in a step must be detected."""
    training = importlib.import_module("faults_training")
    kind = faults.Kind(2, faults=0)

    def steps_of(two: range) -> list[object]:
        found, epoch, index, left = [], 0, 0, 1200
        while epoch < kind.epochs:
            size = 2 if len(found) in two else 3
            if left // size < 8:
                epoch, index, left = epoch + 1, 0, 1200
                continue
            found.append(training.StepDone(len(found) + 1, epoch, index, size, 0, 0.0, float(len(found))))
            index, left = index + 1, left - 8 * size
        return found

    def verdict(steps: list[object]) -> str:
        return str(faults.compare([[steps]], faults.Undisturbed("", {}), kind)[0])

    steps, others = steps_of(range(20, 75)), steps_of(range(20, 74))
    values, other_values = training.expected(steps), training.expected(others)
    good = [replace(step, value=value) for step, value in zip(steps, values, strict=True)]
    assert verdict(good) == ""
    wrong = [*good[:40], replace(good[40], value=good[40].value + 1e-6), *good[41:]]
    assert verdict(wrong) == "round 0: a wrong number after step 41 on rank 0"
    moved = [replace(step, value=value) for step, value in zip(good, other_values, strict=False)]
    # As if a rank had joined one step earlier.
    assert verdict(moved) == "round 0: a wrong number after step 75 on rank 0"
    assert verdict([*good[:40], *good[41:]]).startswith("round 0: steps are missing")
    assert verdict([replace(step, size=3) for step in good]) == "round 0: epoch 0 has no step 50 with 3 ranks"
    twice = [*good[:40], replace(good[39], done=41, at=40.0)]
    assert verdict(twice).startswith("round 0: after 40 steps, step 40 of epoch 0 is due")
