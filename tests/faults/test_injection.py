"""Failures of system calls, one in each run: a correct result or a documented error, and no leftovers.

benchmarks/injection.py describes the job and the verdicts; `make injection` injects all failures. To repeat one:

    python benchmarks/injection.py --only "rank1.0 recovery recvmsg 1 EMFILE" --keep
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import ModuleType

import pytest

from support.benchmark_modules import benchmark

SAMPLE = 20  # of about 3,000; half a second each
SEED = 36
FOUND = (
    "rank1.0 recovery recvmsg 1 EMFILE",  # the replacement waited forever
    "launcher before epoll_ctl 1 ENOMEM",
    "launcher before recvmsg 1 ECONNRESET",
    "launcher before pipe2 1 EMFILE",
    "rank0.0 start socket 1 EMFILE",
    "rank0.0 start open 1 EACCES",
    "rank0.0 recovery bind 1 EADDRINUSE",
    "rank2.1 start mmap 1 ENOMEM",
)


@pytest.fixture(scope="module")
def injection() -> Iterator[ModuleType]:
    with benchmark("injection") as module:
        yield module


@pytest.mark.timeout(900)
def test_failed_system_calls_give_a_correct_result_or_a_documented_error(injection: ModuleType) -> None:
    with injection.Injection() as job:
        possible = job.faults()
        by_name = {str(fault): fault for fault in possible}
        chosen = [by_name[name] for name in FOUND if name in by_name]
        assert len(chosen) >= len(FOUND) - 1  # the phase of a socket call depends on timing
        chosen += random.Random(SEED).sample(possible, SAMPLE)
        outcomes = list(job.run_all(chosen, at_once=1))
    wrong = [f"{each.fault}: {each.reason}\n{each.output}" for each in outcomes if each.verdict == "WRONG"]
    assert not wrong, "\n".join(wrong)
    assert sum(each.verdict != "missed" for each in outcomes) >= 0.8 * len(chosen)
