"""Random training programs under ``allranks.resilience.State``: the loss of a rank must not change the result.

    python benchmarks/random_programs.py --count 300                 # seeds 0 to 299
    python benchmarks/random_programs.py --seed 17 --keep            # repeat one, and keep its files
    python benchmarks/random_programs.py --show 17                   # print its source
    python benchmarks/random_programs.py --count 300 --kills 0       # no kill in the second run: all must be the same
    python benchmarks/random_programs.py --count 300 --kills 2       # another rank, or the replacement, is killed later
    python benchmarks/random_programs.py --count 5000 --json benchmarks/random_programs.json

A seed decides everything about a program (random_programs_text.py): wrapper, model, optimizers, schedulers, loaders,
random numbers, logs, loops. The program runs twice on 2 to 4 ranks. In the second run one rank kills itself (SIGKILL)
at a random moment, and the launcher replaces it. The verdict compares the last line that every rank prints. It contains
digests of weights, buffers, optimizers, schedulers, averaged weights, and logs that are equal on all ranks:

    same       the second run printed the same digests on every rank, with exit code 0
    refused    State raised UsageError in the first run: the program contains an object that it cannot protect
    error      the second run ended with a nonzero exit code and a typed error of allranks on its ranks; or all ranks
               were killed simultaneously, and the launcher reports it
    warned     a rank was lost together with the backup of its buffers: other digests, and a warning that reports it
    WRONG      anything else: other digests with exit code 0, fewer ranks, a hang, another exception
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from random_programs_jobs import Done, Jobs
from random_programs_text import Choices, Program, choose, write

ROOT = Path(__file__).parents[1]
HARNESS = Path(__file__).with_name("random_programs_harness.py")
LIMIT_S = 60.0  # limit of one run; most take less than a second
VERDICTS = ("same", "refused", "error", "warned", "WRONG")
_END = re.compile(r"END (\d+) (\d+) (\d+) (.*)")
_KILLED = "was killed by SIGKILL"


@dataclass
class Outcome:
    """The verdict on a program.

    Attributes:
        seed: seed of the program.
        verdict: one of VERDICTS.
        reason: the reason, in one line.
        kill: KILL of the second run (random_programs_harness.py); "" if there was none.
        place: the place of the call of die().
        choices: the dimensions of the program.
        output: output of the run that decided.
        seconds: wall-clock time of both runs.
        cpu_s: their CPU time.
    """

    seed: int
    verdict: str
    reason: str
    kill: str
    place: str
    choices: Choices
    output: str
    seconds: float
    cpu_s: float


@dataclass(frozen=True)
class _End:
    """The last line of a rank."""

    rank: int
    size: int
    visits: int
    digests: dict[str, str]


def _ends(done: Done) -> dict[int, _End]:
    found = {}
    for rank, size, visits, digests in _END.findall(done.out):
        pairs = dict(each.split("=") for each in digests.split())
        found[int(rank)] = _End(int(rank), int(size), int(visits), pairs)
    return found


def _exceptions(text: str) -> list[str]:
    """Return the exception with which each traceback in an output ends, as "name: message" in one line."""
    found: list[str] = []
    inside = chained = False
    continues = False  # a message of allranks: its last line is the address of its documentation
    for line in text.splitlines():
        line = re.sub(r"^\[[\d, -]+\] ?", "", line)
        if continues and line and "See: allranks help" not in line:
            found[-1] += f" {line.strip()}"
            continue
        continues = False
        if line.startswith("Traceback (most recent call last):"):
            inside = True
        elif line.startswith(("The above exception was the direct", "During handling of the above")):
            chained = True
        elif inside and line and not line.startswith((" ", "|", "+")):
            if chained:
                found.pop()
            found.append(line)
            inside = chained = False
            continues = _is_typed(line)
    return found


def _is_typed(exception: str) -> bool:
    return exception.startswith("allranks.")


def run(jobs: Jobs, seed: int, keep: Path | None = None, kills: int = 1) -> Outcome:
    """Run a program twice, and judge it.

    Args:
        jobs: starts its jobs.
        seed: seed of the program.
        keep: a folder for its files; None for a temporary one.
        kills: number of processes that are killed in the second run: 0, 1 or 2.
    """
    program = write(choose(seed))
    folder = Path(tempfile.mkdtemp(prefix=f"program-{seed}-")) if keep is None else keep
    try:
        return _run(jobs, program, folder, kills)
    finally:
        if keep is None:
            shutil.rmtree(folder)


def _run(jobs: Jobs, program: Program, folder: Path, kills: int) -> Outcome:
    choices = program.choices
    runs: list[Done] = []

    def start(name: str, kill: str) -> Done:
        place = folder / name
        place.mkdir(parents=True)
        (place / "program.py").write_text(program.text)
        shutil.copy(HARNESS, place)
        # A replacement that fails is not replaced again, and no rank may be missing, so its error terminates the job.
        respawns = 0 if not kill else 2 if ".1:" in kill else 1  # per rank
        words = ["run", "-n", choices.ranks, "--elastic", choices.ranks, "--respawns", respawns, "program.py"]
        environ = {"KILL": kill, "XDG_STATE_HOME": str(place)}  # the launcher writes a file there if the job fails
        done = jobs.run([str(word) for word in words], place, environ, LIMIT_S)
        runs.append(done)
        return done

    def outcome(verdict: str, reason: str, kill: str = "") -> Outcome:
        output = runs[-1].out + runs[-1].err
        seconds, cpu_s = sum(done.seconds for done in runs), sum(done.cpu_s for done in runs)
        return Outcome(choices.seed, verdict, reason, kill, program.place, choices, output, seconds, cpu_s)

    calm = start("undisturbed", "")
    ends = _ends(calm)
    if calm.code != 0 or set(ends) != set(range(choices.ranks)):
        verdict, reason = _judge_refusal(calm)
        return outcome(verdict, reason)
    kill = _choose_kill(choices.seed, ends, kills)
    if not kill:
        return outcome("WRONG", f"the undisturbed run never reached die() ({program.place})")
    hit = start("killed", kill if kills else "")
    verdict, reason = _judge(hit, ends, kills > 0)
    return outcome(verdict, reason, kill)


def _choose_kill(seed: int, ends: dict[int, _End], kills: int) -> str:
    """Choose a rank, and one of its calls of die(). The second process to kill is another rank, or the replacement.

    The program may end before the second kill.
    """
    rng = random.Random(f"kill {seed}")
    moments = [(rank, visit) for rank, end in sorted(ends.items()) for visit in range(end.visits)]
    if not moments:
        return ""
    first, visit = rng.choice(moments)
    second = rng.randrange(len(ends))
    start, begin = (1, 0) if second == first else (0, visit)
    again = begin + rng.randrange(max(1, min(ends[second].visits - visit, 12)))
    return f"{first}:{visit}" + (f",{second}.{start}:{again}" if kills > 1 else "")


def _judge_refusal(calm: Done) -> tuple[str, str]:
    """Judge an undisturbed run that did not exit with code 0."""
    if calm.code is None:
        return "WRONG", f"the undisturbed run hangs: no end within {LIMIT_S:g} s"
    exceptions = _exceptions(calm.err)
    own = [each for each in exceptions if "PeerLostError" not in each]
    if own and all(each.startswith("allranks.UsageError: ") for each in own):
        return "refused", own[0]
    return "WRONG", f"the undisturbed run failed with exit code {calm.code}: {(own or exceptions or ['?'])[0]}"


def _judge(hit: Done, calm: dict[int, _End], killed: bool) -> tuple[str, str]:
    """Judge the second run."""
    if killed and _KILLED not in hit.err:
        return "WRONG", "the second run did not reach the kill"
    if hit.code is None:
        return "WRONG", f"hang: no end within {LIMIT_S:g} s"
    exceptions = _exceptions(hit.err)
    if hit.code:
        untyped = [each for each in exceptions if not _is_typed(each)]
        if untyped:
            return "WRONG", f"exit code {hit.code}, untyped: {untyped[0]}"
        if not exceptions:
            last = re.search(r"allranks run: (no remaining rank has .*|.* did not survive the loss of .*)", hit.err)
            if last is not None:  # all ranks were killed simultaneously, or outside the loop
                return "error", last[1]
            return "WRONG", f"exit code {hit.code} without an error of a rank"
        return "error", exceptions[0]
    ends = _ends(hit)
    if set(ends) != set(calm) or any(end.size != len(calm) for end in ends.values()):
        return "WRONG", f"exit code 0 with the results of ranks {sorted(ends)} of {len(calm)}"
    names = {
        name
        for rank, end in calm.items()
        for name, digest in end.digests.items()
        if ends[rank].digests.get(name) != digest
    }
    if names:
        if "is not bit-identical to that of an undisturbed run" in hit.err:
            return "warned", "buffers were lost together with their backup"
        ranks = sorted(rank for rank, end in calm.items() if ends[rank].digests != end.digests)
        return "WRONG", f"exit code 0, on ranks {ranks} other {', '.join(sorted(names))}"
    return "same", ""


def run_all(seeds: Iterable[int], at_once: int = 2, kills: int = 1) -> Iterator[Outcome]:
    """Run programs, several concurrently. Yield each outcome when it is known."""
    with Jobs() as jobs, ThreadPoolExecutor(at_once) as pool:
        try:
            for future in as_completed([pool.submit(run, jobs, seed, None, kills) for seed in seeds]):
                yield future.result()
        finally:  # after Ctrl-C: do not run the rest
            pool.shutdown(wait=False, cancel_futures=True)


def count_dimensions(outcomes: Sequence[Outcome]) -> dict[str, dict[str, dict[str, int]]]:
    """Count the verdicts for each value of each dimension."""
    table: dict[str, dict[str, Counter[str]]] = {}
    for outcome in outcomes:
        values = {**asdict(outcome.choices), "place": outcome.place}
        for name, value in values.items():
            if name != "seed":
                table.setdefault(name, {}).setdefault(str(value), Counter())[outcome.verdict] += 1
    return {name: {value: dict(counts) for value, counts in rows.items()} for name, rows in table.items()}


def format_dimensions(outcomes: Sequence[Outcome]) -> str:
    """Return a table of the dimensions, sorted by the share of WRONG programs per value."""
    total = sum(outcome.verdict == "WRONG" for outcome in outcomes) / max(1, len(outcomes))
    rows = []
    for name, values in count_dimensions(outcomes).items():
        for value, counts in values.items():
            programs = sum(counts.values())
            rows.append((counts.get("WRONG", 0) / programs, name, value, programs, counts))
    lines = [f"{'dimension':44} programs" + "".join(f"{verdict:>9}" for verdict in VERDICTS) + "   WRONG %"]
    lines += [f"{'all':44} {len(outcomes):8}" + " " * 36 + f"{100 * total:10.0f}"]
    for share, name, value, programs, counts in sorted(rows, key=lambda row: (-row[0], row[1])):
        numbers = "".join(f"{counts.get(verdict, 0):9}" for verdict in VERDICTS)
        lines.append(f"{f'{name} {value}':44} {programs:8}{numbers}{100 * share:10.0f}")
    return "\n".join(lines)


@dataclass
class Report:
    """The counts of many programs."""

    outcomes: list[Outcome] = field(default_factory=list)

    def facts(self, seconds: float, at_once: int) -> dict[str, Any]:
        """Everything that the JSON file contains."""
        counts = Counter(outcome.verdict for outcome in self.outcomes)
        return {
            "at_once": at_once,
            "programs": len(self.outcomes),
            "seeds": [min(o.seed for o in self.outcomes), max(o.seed for o in self.outcomes)],
            "verdicts": {verdict: counts[verdict] for verdict in VERDICTS},
            "seconds": round(seconds, 1),
            "cpu_s_per_program": round(sum(o.cpu_s for o in self.outcomes) / len(self.outcomes), 3),
            "wrong": [
                {"seed": o.seed, "reason": o.reason, "kill": o.kill, "place": o.place}
                for o in sorted(self.outcomes, key=lambda o: o.seed)
                if o.verdict == "WRONG"
            ],
            "reasons": dict(
                Counter(_generalize(f"{o.verdict}: {o.reason:.400}") for o in self.outcomes if o.reason).most_common()
            ),
            "dimensions": count_dimensions(self.outcomes),
        }


def _generalize(reason: str) -> str:
    """Remove the parts of a message that differ from program to program."""
    return re.sub(r"program\.py:\d+|line \d+|rank \d+|ranks \[.*?\]|step \d+|call #\d+", "...", reason)


def reproduce(seed: int, kills: int) -> str:
    """Return the command that runs a program again."""
    return f"python benchmarks/random_programs.py --seed {seed} --keep{f' --kills {kills}' if kills != 1 else ''}"


def _run_one(seed: int, keep: bool, kills: int) -> int:
    folder = Path(tempfile.mkdtemp(prefix=f"program-{seed}-")) if keep else None
    with Jobs() as jobs:
        outcome = run(jobs, seed, folder, kills)
    print(outcome.output)
    kill = f", KILL={outcome.kill} at: {outcome.place}" if outcome.kill else ""
    print(f"seed {seed}: {outcome.verdict}{kill}\n  {outcome.reason}")
    if folder is not None:
        size = outcome.choices.ranks
        print(f"  files: {folder}; run it there:")
        print(f"  cd {folder}/killed && KILL={outcome.kill} allranks run -n {size} --elastic {size} program.py")
    return int(outcome.verdict == "WRONG")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="number of programs")
    parser.add_argument("--first", type=int, default=0, help="seed of the first program")
    parser.add_argument("--seeds", metavar="N,N,...", help="run these programs instead")
    parser.add_argument("--seed", type=int, help="run this program only, and print its output")
    parser.add_argument("--show", type=int, metavar="SEED", help="print the source of a program")
    parser.add_argument("--keep", action="store_true", help="keep the files of --seed")
    parser.add_argument("--kills", type=int, choices=(0, 1, 2), default=1, help="processes killed in the second run")
    parser.add_argument("--at-once", type=int, default=2, help="number of programs that run concurrently")
    parser.add_argument("--table", action="store_true", help="print the verdicts for each value of each dimension")
    parser.add_argument("--json", type=Path, help="write counts, failures, and facts about the machine to this file")
    options = parser.parse_args()
    if options.show is not None:
        program = write(choose(options.show))
        print(f"{program.text}\n# die() is called at: {program.place}")
        return 0
    if options.seed is not None:
        return _run_one(options.seed, options.keep, options.kills)
    report, began = Report(), time.monotonic()
    seeds: Sequence[int] = range(options.first, options.first + options.count)
    if options.seeds:
        seeds = [int(seed) for seed in options.seeds.split(",")]
    for outcome in run_all(seeds, options.at_once, options.kills):
        report.outcomes.append(outcome)
        if outcome.verdict == "WRONG":
            print(f"seed {outcome.seed}: WRONG ({outcome.place}): {outcome.reason}", flush=True)
            print(f"  {reproduce(outcome.seed, options.kills)}", flush=True)
    seconds = time.monotonic() - began
    facts = report.facts(seconds, options.at_once)
    if options.table:
        print(format_dimensions(report.outcomes))
        for reason, count in facts["reasons"].items():
            print(f"{count:5}  {reason}")
    print(", ".join(f"{verdict} {count}" for verdict, count in facts["verdicts"].items()), end="; ")
    print(f"{seconds / len(seeds):.2f} s and {facts['cpu_s_per_program']} CPU s per program")
    if options.json:
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    return int(facts["verdicts"]["WRONG"] > 0)


if __name__ == "__main__":
    sys.exit(main())
