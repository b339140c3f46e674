"""Jobs that save, and are killed while they do: is the newest checkpoint that was announced there, to the last bit?

    python benchmarks/checkpoint_kills.py --seeds 0:200            # a kill per seed
    python benchmarks/checkpoint_kills.py --seeds 17:18 --verbose  # one again
    python benchmarks/checkpoint_kills.py --seeds 0:200 --apart    # each rank has a folder of its own

A seed decides the kill (`Plan`): who is killed, in which save and at which part of it, how large the state is, and
whether saves go on in the background. The job notes each step that a save has announced; afterwards the newest complete
checkpoint must be of that step or a later one, and every byte of it right.

The writer of a save in the background is a thread of its rank. So a kill of the writer is one of its rank, in a moment
in which that thread writes. The launcher starts the ranks again after each kill (``--restarts``), forked from a process
that has torch; a launcher that was killed is followed by another one. Each rank notes what it does in memory that is
shared with a file. It is read when the rank has died, so it is known whether the kill fell inside a save.
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
    """What a seed decides.

    Attributes:
        victim: one of ``VICTIMS``.
        numbers: in the state.
        background: saves go on in the background.
        step: the save in which the kill is to fall.
        part: of the time that the save before it has taken, from its beginning to the kill.
    """

    victim: str
    numbers: int
    background: bool
    step: int
    part: float

    @classmethod
    def of(cls, seed: int) -> Plan:
        """The same for the same seed."""
        pick = random.Random(seed)
        victim, numbers, background = pick.choice(VICTIMS), pick.choice(SIZES), pick.random() < 0.5
        background = background or victim.startswith("writer")
        return cls(victim, numbers, background, pick.randint(2, 8), round(pick.random(), 4))

    @property
    def ranks(self) -> list[int]:
        """Those that are killed."""
        if self.victim == "launcher":
            return []
        return [0, 1] if self.victim == "both ranks" else [int(self.victim[-1])]


class Notes:
    """What a rank does, in memory that outlives it: each note is one store of 8 bytes."""

    def __init__(self, path: Path) -> None:
        with open(path, "a+b") as file:
            file.truncate(mmap.PAGESIZE)
            self._words = memoryview(mmap.mmap(file.fileno(), mmap.PAGESIZE)).cast("Q")

    @property
    def pid(self) -> int:
        """Of the rank; 0: it has not begun."""
        return self._words[0]

    @property
    def position(self) -> tuple[int, int]:
        """The step, and the phase of it."""
        return divmod(self._words[1], len(PHASES))

    def begin(self) -> None:
        """A rank has begun."""
        self._words[0] = os.getpid()

    def note(self, step: int, phase: int) -> None:
        """A rank goes on."""
        now = time.monotonic_ns()
        self._words[2 + self.position[1]] = now - self._words[5]  # what the phase that ends has taken
        self._words[5] = now
        self._words[1] = step * len(PHASES) + phase

    def lasted_s(self, *phases: int) -> float:
        """How long these phases took when they last ended."""
        return sum(self._words[2 + phase] for phase in phases) / 1e9


def value(step: int, size: int) -> Any:
    """What the tensor of a step is."""
    import torch

    return torch.arange(size, dtype=torch.float32) * 0.5 + step


class Job:
    """A launcher, and what its ranks are to do at each start."""

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
        """Lets the ranks that were started last save into a folder."""
        order = json.dumps([str(folder), plan.numbers, plan.background, apart])
        _write_whole(Path(self._base.name) / f"turn-{self._turn}", order)
        self._turn += 1

    def end(self) -> None:
        """Ends it with its ranks."""
        self.process.terminate()
        self.process.wait(PATIENCE_S)
        self._base.cleanup()


def _write_whole(path: Path, text: str) -> None:
    """Who looks meanwhile finds all of it, or what was there before."""
    path.with_suffix(".new").write_text(text)
    os.replace(path.with_suffix(".new"), path)


def start(base: Path) -> None:
    """What the ranks run: they wait for what they are to do, and do it."""
    turn = base / f"turn-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    while not turn.exists():
        time.sleep(0.002)
    folder, *more = json.loads(turn.read_text())
    work(Path(folder), *more)


def work(folder: Path, size: int, background: bool, apart: bool) -> None:
    """Saves without end."""
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
            tensors["x"] *= 1  # the program goes on
            saving.wait()
        else:
            checkpoint.save(state, saved, step=step, keep=2)
        notes.note(step, BETWEEN)
        if rank == 0:
            _write_whole(folder / "announced", str(step))


class Kills:
    """Kills in turn, of as few jobs as are needed."""

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
        """One kill. Returns what was killed when, and as ``wrong`` what is wrong; "" for nothing."""
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
    """Returns where those were that died: the step, and the phase of it."""
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
    # The ranks that were killed died where they were. The others have had an error since.
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
    """Waits for the moment of the kill."""
    watched = notes[plan.ranks[0] if plan.ranks else 0]
    first = IN_THE_BACKGROUND if plan.victim.startswith("writer") else IN_THE_CALL

    def is_there() -> bool:
        if (code := job.process.poll()) is not None:
            raise RuntimeError(f"the job has ended before it was killed, with exit code {code}")
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
    """Compares what the ranks find together with what was announced, by rank."""
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
    """Compares what is there with what was announced. Returns what is wrong, and the steps of both; 0 for none."""
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
    """All kills as JSON, one in a line."""
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
    parser.add_argument("--json", type=Path, help="written after each kill")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--apart", action="store_true", help="each rank has a folder of its own")
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
    print(f"{len(kills)} kills, {sum(kill['inside'] for kill in kills)} of them inside a save, {wrong} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
