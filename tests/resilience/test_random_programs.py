"""Random training programs lose a rank: each has the result of an undisturbed run, or ends with a typed error.

benchmarks/random_programs.py describes the programs and the verdicts. To run one program of this test again:

    RANDOM_PROGRAM=17 pytest tests/resilience/test_random_programs.py
    python benchmarks/random_programs.py --seed 17 --keep
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from types import ModuleType

import pytest

from support.benchmark_modules import benchmark

PROGRAMS = 24  # 1.3 s to 3 s of CPU time each; benchmarks/random_programs.py runs thousands
FOUND = (1049, 1545, 2015, 3284, 3994, 4031, 4068, 4212, 4282, 4392, 20189, 20320, 20398)  # seeds that once failed
FOUND_TWICE = (30089,)  # seeds that once failed with two kills
AT_ONCE = 1
MOST_REFUSED = 0.15  # 8.5 % of 5,000 programs are refused; more means that State refuses ordinary programs


@pytest.fixture(scope="module")
def programs() -> Iterator[ModuleType]:
    with benchmark("random_programs") as module:
        yield module


@pytest.mark.timeout(1200)
def test_no_program_ends_with_a_wrong_result(programs: ModuleType) -> None:
    seed = os.environ.get("RANDOM_PROGRAM")
    seeds = [*range(PROGRAMS), *FOUND, *FOUND_TWICE] if seed is None else [int(seed)]
    twice = {*range(0, PROGRAMS, 2), *FOUND_TWICE}
    outcomes = list(programs.run_all([seed for seed in seeds if seed not in twice], AT_ONCE, kills=1))
    outcomes += programs.run_all([seed for seed in seeds if seed in twice], AT_ONCE, kills=2)
    counts = Counter(outcome.verdict for outcome in outcomes)
    wrong = sorted((o for o in outcomes if o.verdict == "WRONG"), key=lambda o: o.seed)
    lines = [
        f"seed {o.seed} ({o.place}): {o.reason}\n  {programs.reproduce(o.seed, 2 if o.seed in twice else 1)}"
        for o in wrong
    ]
    verdicts = ", ".join(f"{verdict} {counts[verdict]}" for verdict in programs.VERDICTS)
    assert not wrong, "\n".join([verdicts, *lines])
    refused = sum(o.verdict == "refused" and o.seed < PROGRAMS for o in outcomes)
    assert refused <= MOST_REFUSED * PROGRAMS, verdicts


def test_each_program_compiles_and_calls_die_once(programs: ModuleType) -> None:
    for seed in range(1000):
        program = programs.write(programs.choose(seed))
        compile(program.text, f"program {seed}", "exec")
        calls = program.text.count(" die()\n") + program.text.count("hook(die)") + program.text.startswith("die()")
        assert calls == 1 or "\ndie()\n" in program.text, f"seed {seed}\n{program.text}"


@pytest.mark.parametrize(
    ("output", "exceptions"),
    [
        ("Traceback (most recent call last):\n  File x\nKeyError: 'a'\n", ["KeyError: 'a'"]),
        (
            "[1] Traceback (most recent call last):\n[1]   File x\n[1] allranks.UsageError: State: a\n[1]   b\n"
            "[1]   See: allranks help UsageError\n",
            ["allranks.UsageError: State: a b"],
        ),
        (
            "Traceback (most recent call last):\n  File x\nKeyError: 'a'\n\nDuring handling of the above exception,"
            " another exception occurred:\n\nTraceback (most recent call last):\n  File x\n"
            "allranks.StateLostError: b\n",
            ["allranks.StateLostError: b"],
        ),
    ],
)
def test_the_last_exception_of_each_traceback_is_found(
    programs: ModuleType, output: str, exceptions: list[str]
) -> None:
    assert programs._exceptions(output) == exceptions
