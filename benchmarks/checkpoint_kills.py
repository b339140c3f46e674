"""Jobs that are killed while they save: the newest announced checkpoint must exist, and every bit must be right.

    python benchmarks/checkpoint_kills.py --seeds 0:200            # a kill per seed
    python benchmarks/checkpoint_kills.py --seeds 17:18 --verbose  # repeat one kill
    python benchmarks/checkpoint_kills.py --seeds 0:200 --apart    # each rank has a separate folder

A seed decides the kill (`Plan`): the victim, the save and its phase, the size of the state, and whether saves run in
the background. The job records each step that a save has announced. After the kill, the newest complete checkpoint
must be of that step or a later one, and every byte of it must be right.

A thread of the rank writes background saves. A kill of the writer is therefore a kill of its rank at a moment when
that thread writes. The launcher restarts the ranks after each kill (``--restarts``), forked from a process that has
imported torch. A killed launcher is replaced by a new one. Each rank records its activity in memory that is mapped
from a file. The benchmark reads this record after the rank's death, so it knows whether the kill hit a save.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

RANKS = 2
SIZES = (1_000, 300_000, 3_000_000)  # numbers in the state
VICTIMS = ("rank 0", "rank 1", "both ranks", "writer of rank 0", "writer of rank 1", "launcher")
PATIENCE_S = 600.0
PHASES = ("between saves", "in the call", "in the background")
BETWEEN, IN_THE_CALL, IN_THE_BACKGROUND = range(len(PHASES))


class Plan(NamedTuple):
    """The kill that a seed decides.

    Attributes:
        victim: one of ``VICTIMS``.
        numbers: numbers in the state.
        background: saves run in the background.
        step: the save that the kill should hit.
        part: time from the beginning of that save to the kill, as a part of the duration of the previous save.
    """

    victim: str
    numbers: int
    background: bool
    step: int
    part: float

    @classmethod
    def of(cls, seed: int) -> Plan:
        """Return the plan for a seed. The same seed always gives the same plan."""
        pick = random.Random(seed)
        victim, numbers, background = pick.choice(VICTIMS), pick.choice(SIZES), pick.random() < 0.5
        background = background or victim.startswith("writer")
        return cls(victim, numbers, background, pick.randint(2, 8), round(pick.random(), 4))

    @property
    def ranks(self) -> list[int]:
        """The ranks to kill."""
        if self.victim == "launcher":
            return []
        return [0, 1] if self.victim == "both ranks" else [int(self.victim[-1])]


class Notes:
    """The activity of a rank, in memory that outlives the rank. Each note is one store of 8 bytes."""

    def __init__(self, path: Path) -> None:
        with open(path, "a+b") as file:
            file.truncate(mmap.PAGESIZE)
            self._words = memoryview(mmap.mmap(file.fileno(), mmap.PAGESIZE)).cast("Q")

    @property
    def pid(self) -> int:
        """Process id of the rank; 0 if the rank has not begun."""
        return self._words[0]

    @property
    def position(self) -> tuple[int, int]:
        """The current step and its phase."""
        return divmod(self._words[1], len(PHASES))

    def begin(self) -> None:
        """Record that the rank has begun."""
        self._words[0] = os.getpid()

    def note(self, step: int, phase: int) -> None:
        """Record that the rank enters a phase."""
        now = time.monotonic_ns()
        self._words[2 + self.position[1]] = now - self._words[5]  # duration of the phase that ends now
        self._words[5] = now
        self._words[1] = step * len(PHASES) + phase

    def lasted_s(self, *phases: int) -> float:
        """Return the most recent total duration of these phases in seconds."""
        return sum(self._words[2 + phase] for phase in phases) / 1e9


def value(step: int, size: int) -> Any:
    """Return the value of the tensor for a step."""
    import torch

    return torch.arange(size, dtype=torch.float32) * 0.5 + step


class Job:
    """A launcher, and the orders to its ranks for each start."""

    def __init__(self, verbose: bool = False) -> None:
        self._base = tempfile.TemporaryDirectory(prefix="kills-")
        self._turn = 0
        quiet, program = None if verbose else subprocess.DEVNULL, [__file__, "--work", self._base.name]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "allranks", "run", "-n", str(RANKS), "--restarts", "1000000", *program],
            stdout=quiet,
            stderr=quiet,
            start_new_session=True,
        )

    def begin(self, folder: Path, plan: Plan, apart: bool) -> None:
        """Order the most recently started ranks to save into a folder."""
        order = json.dumps([str(folder), plan.numbers, plan.background, apart])
        _write_whole(Path(self._base.name) / f"turn-{self._turn}", order)
        self._turn += 1

    def end(self) -> None:
        """Terminate the launcher and its ranks."""
        self.process.terminate()
        self.process.wait(PATIENCE_S)
        self._base.cleanup()


def _write_whole(path: Path, text: str) -> None:
    """Write a file atomically: a concurrent reader finds the new content or the previous content."""
    path.with_suffix(".new").write_text(text)
    os.replace(path.with_suffix(".new"), path)


def start(base: Path) -> None:
    """Entry point of the ranks: wait for the order, and execute it."""
    turn = base / f"turn-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    while not turn.exists():
        time.sleep(0.002)
    folder, *more = json.loads(turn.read_text())
    work(Path(folder), *more)


def work(folder: Path, size: int, background: bool, apart: bool) -> None:
    """Save in an endless loop."""
    import torch

    import allranks as dist
    from allranks import checkpoint

    torch.set_num_threads(1)
    dist.init_process_group(timeout=300)
    rank = dist.get_rank()
    notes = Notes(folder / f"notes-{rank}")
    notes.begin()
    saved = folder / (f"saved-{rank}" if apart else "saved")
    tensors = {"x": value(0, size), "mine": torch.tensor(float(rank))}
    state = {"tensors": tensors, "step": 0}
    for step in range(1, 1_000_000):
        state["step"] = step
        tensors["x"] += 1
        tensors["mine"].fill_(step * 10 + rank)
        notes.note(step, IN_THE_CALL)
        if background:
            saving = checkpoint.save_async(state, saved, step=step, keep=2)
            notes.note(step, IN_THE_BACKGROUND)
            tensors["x"] *= 1  # the program continues to change the tensor
            saving.wait()
        else:
            checkpoint.save(state, saved, step=step, keep=2)
        notes.note(step, BETWEEN)
        if rank == 0:
            _write_whole(folder / "announced", str(step))


class Kills:
    """A sequence of kills, with as few jobs as possible."""

    def __init__(self, verbose: bool = False, apart: bool = False) -> None:
        self._verbose, self._apart = verbose, apart
        self._job: Job | None = None

    def __enter__(self) -> Kills:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        if self._job is not None:
            self._job.end()
            self._job = None

    def run(self, seed: int) -> dict[str, Any]:
        """Do one kill.

        Returns:
            The victim and moment of the kill, and under ``wrong`` a description of the damage, or "".
        """
        plan = Plan.of(seed)
        self._job = self._job or Job(self._verbose)
        with tempfile.TemporaryDirectory(prefix="kills-") as name:
            hit = _kill(self._job, plan, Path(name), self._apart)
            if not plan.ranks:
                self._end()
            judge_it = judge_apart if self._apart else judge
            wrong, announced, newest = judge_it(Path(name), plan.numbers)
        return _record(seed, plan, hit, wrong, announced, newest)


def _kill(job: Job, plan: Plan, folder: Path, apart: bool) -> list[tuple[int, int]]:
    """Kill according to the plan. Return the step and the phase in which each victim died."""
    notes = [Notes(folder / f"notes-{rank}") for rank in range(RANKS)]
    job.begin(folder, plan, apart)
    _wait_for(plan, notes, job)
    pids = [note.pid for note in notes]
    for pid in [pids[rank] for rank in plan.ranks] or [job.process.pid]:
        os.kill(pid, signal.SIGKILL)
    found = [note.position for note in notes]
    job_ended = lambda: plan.ranks or job.process.poll() is not None  # noqa: E731
    gone = lambda: job_ended() and not any(Path(f"/proc/{pid}").exists() for pid in pids)  # noqa: E731
    _wait_until(gone, "the ranks have not ended")
    # The killed ranks stopped at their last recorded position. The other ranks have raised an error since.
    return [notes[rank].position for rank in plan.ranks] or found


def _record(
    seed: int, plan: Plan, hit: list[tuple[int, int]], wrong: str, announced: int, newest: int
) -> dict[str, Any]:
    return {
        "seed": seed,
        **plan._asdict(),
        "killed in": [f"step {step}, {PHASES[phase]}" for step, phase in hit],
        "inside": any(phase != BETWEEN for _, phase in hit),
        "announced": announced,
        "newest": newest,
        "wrong": wrong,
    }


def _wait_for(plan: Plan, notes: list[Notes], job: Job) -> None:
    """Wait for the moment of the kill."""
    watched = notes[plan.ranks[0] if plan.ranks else 0]
    first = IN_THE_BACKGROUND if plan.victim.startswith("writer") else IN_THE_CALL

    def is_there() -> bool:
        if (code := job.process.poll()) is not None:
            raise RuntimeError(f"the job exited before it was killed, with exit code {code}")
        step, phase = watched.position
        return (step == plan.step and phase in (first, IN_THE_BACKGROUND)) or step > plan.step

    _wait_until(is_there, f"step {plan.step} has not begun")
    time.sleep(plan.part * watched.lasted_s(*range(first, len(PHASES))))


def _wait_until(is_so: Any, trouble: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > until:
            raise TimeoutError(f"{trouble} within {PATIENCE_S:g} s")
        time.sleep(0.0005)


def judge_apart(folder: Path, size: int) -> tuple[str, int, int]:
    """Compare the checkpoint that the ranks find together with the announced steps, by rank."""
    import warnings

    import allranks as dist
    from allranks.testing import run_ranks

    def body() -> tuple[str, int, int]:
        warnings.simplefilter("ignore")
        own = folder / f"saved-{dist.get_rank()}"
        return judge(folder, size, own, dist.group.WORLD, dist.get_rank())

    judged = [each for each in run_ranks(RANKS, body) if each is not None]
    return next((each for each in judged if each[0]), judged[0])


def judge(folder: Path, size: int, saved: Path | None = None, group: Any = None, rank: int = 0) -> tuple[str, int, int]:
    """Compare the existing checkpoints with the announced step.

    Returns:
        A description of the damage, and the found and announced steps (0 for none).
    """
    from allranks import checkpoint

    announced = int((folder / "announced").read_text()) if (folder / "announced").exists() else 0
    newest = checkpoint.latest(saved or folder / "saved", group=group)
    if newest is None:
        return f"step {announced} was announced, and there is none" if announced else "", announced, 0
    return _wrong(newest, announced, size, rank), announced, newest.step


def _wrong(newest: Any, announced: int, size: int, rank: int) -> str:
    import torch

    from allranks import checkpoint

    if newest.step < announced:
        return f"step {announced} was announced, and the newest is {newest.step}"
    if problems := checkpoint.verify(newest):
        return str(problems)
    found = checkpoint.load(newest)
    right = found["step"] == newest.step and torch.equal(found["tensors"]["x"], value(newest.step, size))
    right = right and found["tensors"]["mine"] == newest.step * 10 + rank
    return "" if right else f"step {newest.step} is not what it was"


def report(kills: list[dict[str, Any]], apart: bool) -> str:
    """Return all kills as JSON, one per line."""
    victims = {victim: sum(kill["victim"] == victim for kill in kills) for victim in VICTIMS}
    about = {
        "kills": len(kills),
        "inside": sum(kill["inside"] for kill in kills),
        "apart": apart,
        "victims": victims,
        "wrong": {kill["seed"]: kill["wrong"] for kill in kills if kill["wrong"]},
    }
    lines = ",\n".join("  " + json.dumps(kill) for kill in kills)
    return json.dumps(about, indent=1).removesuffix("\n}") + f',\n "each": [\n{lines}\n ]\n}}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:20", help="FIRST:END")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--json", type=Path, help="write the results to this file after each kill")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--apart", action="store_true", help="use a separate folder for each rank")
    options = parser.parse_args()
    if options.work:
        start(options.work)
        return
    kills: list[dict[str, Any]] = []
    with Kills(options.verbose, options.apart) as jobs:
        for seed in range(*map(int, options.seeds.split(":"))):
            kills.append(kill := jobs.run(seed))
            if options.verbose or kill["wrong"]:
                print(json.dumps(kill), flush=True)
            if options.json:
                options.json.write_text(report(kills, options.apart))
    wrong = sum(bool(kill["wrong"]) for kill in kills)
    print(f"{len(kills)} kills, {sum(kill['inside'] for kill in kills)} of them in a save, {wrong} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
