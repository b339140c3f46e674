"""Random kills of ranks in examples/digits/train.py: the weights must not change; measures each recovery.

    python benchmarks/digits_kills.py --kills 200 --json benchmarks/digits_kills.json
    python benchmarks/digits_kills.py --kills 5 --epochs 60

Each run is ``allranks run -n 3 --elastic 1 examples/digits/train.py``. A seed decides which rank is killed (SIGKILL)
and when: up to 0.6 s after all ranks have finished a step since the previous kill. Each run prints a fingerprint of
the weights, which must equal that of a run without a kill. A recovery is the time from the kill until all ranks have
finished a step. Most of it is the time of the example's imports in the new process (scikit-learn, rich).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import runpy
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from faults_training import StepDone, identity, read_steps

from faults import recovered

TRAIN = Path(__file__).parents[1] / "examples" / "digits" / "train.py"
RANKS = 3
LONGEST_S = 0.6  # maximum time between two kills
PATIENCE_S = 300.0


def train(folder: Path, options: list[str]) -> None:
    """Entry point of the ranks: run the unchanged example, and write a line for each finished step."""
    import allranks as dist

    leave = dist.resilience.Step.__exit__
    rank, start = os.environ["RANK"], os.environ["ALLRANKS_START"]
    (folder / f"pid-{rank}-{start}").write_text(identity(os.getpid()))
    with open(folder / f"steps-{rank}-{start}", "a", buffering=1) as notes:

        def leave_and_note(step: Any, *error: Any) -> bool:
            handled = leave(step, *error)
            if step.committed:
                size, number = dist.get_world_size(), step._state.steps_done + 1
                notes.write(f"{number} 0 {step.index} {size} {dist.get_rank()} 0x0p+0 {time.monotonic()!r}\n")
            return handled

        dist.resilience.Step.__exit__ = leave_and_note  # type: ignore[method-assign]
        sys.argv = [str(TRAIN), *options]
        sys.path.insert(0, str(TRAIN.parent))
        runpy.run_path(str(TRAIN), run_name="__main__")


def run(epochs: int, seed: int | None, most: int) -> dict[str, Any]:
    """Do one run with up to ``most`` kills, or without kills if seed is None."""
    with tempfile.TemporaryDirectory(prefix="digits-kills-") as name:
        folder = Path(name)
        words = [sys.executable, "-m", "allranks", "run", "-n", str(RANKS), "--elastic", "1", "--respawns", "1000"]
        words += [__file__, "--train", name, "--batch-size", "63", "--epochs", str(epochs), "--out", name]
        job = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        killed = [] if seed is None else kill(job, folder, random.Random(seed), most)
        output, _ = job.communicate(timeout=PATIENCE_S)
        steps = [step for path in folder.glob("steps-*") for step in read_steps(path)]
    ends = [recovered(steps, at) for at in killed]
    took = [end - at for end, at in zip(ends, killed, strict=True) if end is not None]
    found = re.search(r", weights (\w{12})$", output, re.MULTILINE)
    return {
        "seed": seed,
        "kills": len(took),  # a kill after the last step has not hit the training
        "weights": found[1] if found and job.returncode == 0 else f"exit code {job.returncode}: {output[-2000:]}",
        "steps": max((step.done for step in steps), default=0),
        "recovery_s": [round(seconds, 4) for seconds in took],
    }


def kill(job: subprocess.Popen[str], folder: Path, pick: random.Random, most: int) -> list[float]:
    """Kill ranks until the training is over or ``most`` ranks are killed. Return the time of each death."""
    killed: list[float] = []
    while job.poll() is None and len(killed) < most:
        last = killed[-1] if killed else 0.0
        if sum(step is not None and step.at > last for _, step in alive(folder).values()) < RANKS:
            # One kill at a time: a rank and the rank that keeps a backup of its loss sum must not die together.
            time.sleep(0.02)
            continue
        time.sleep(pick.random() * LONGEST_S)
        processes, rank = alive(folder), str(pick.randrange(RANKS))
        if rank in processes:
            pid, _ = processes[rank]
            known = identity(pid)
            os.kill(pid, signal.SIGKILL)
            while known and identity(pid) == known:
                time.sleep(0.0005)
            killed.append(time.monotonic())
    return killed


def alive(folder: Path) -> dict[str, tuple[int, StepDone | None]]:
    """Return the newest process of each rank and its last step, if the process is alive."""
    newest: dict[str, int] = {}
    for path in folder.glob("pid-*"):
        _, rank, start = path.name.split("-")
        newest[rank] = max(newest.get(rank, 0), int(start))
    found: dict[str, tuple[int, StepDone | None]] = {}
    for rank, start in newest.items():
        known = (folder / f"pid-{rank}-{start}").read_text()
        if known and identity(int(known.split()[0])) == known:
            notes = folder / f"steps-{rank}-{start}"
            steps = read_steps(notes) if notes.exists() else []
            found[rank] = int(known.split()[0]), steps[-1] if steps else None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--most", type=int, default=25, help="maximum number of kills in a run")
    parser.add_argument("--epochs", type=int, default=100, help="epochs of each run, with 23 steps each")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the first run; each further run uses the next seed"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args()
    if options.train:
        train(options.train, [*rest, "--epochs", str(options.epochs)])
        return
    calm = run(options.epochs, None, 0)
    print(f"undisturbed: weights {calm['weights']}", flush=True)
    found: dict[str, Any] = {"ranks": RANKS, "cpus": os.cpu_count(), "epochs": options.epochs, **calm, "runs": []}
    del found["seed"], found["recovery_s"]
    while found["kills"] < options.kills:
        most = min(options.most, options.kills - found["kills"])
        one = run(options.epochs, options.seed + len(found["runs"]), most)
        print(f"seed {one['seed']}: {one['kills']} kills, weights {one['weights']}", flush=True)
        if not one["kills"]:
            sys.exit("no rank was killed: the training is too short")
        found["runs"].append(one)
        took = [seconds for each in found["runs"] for seconds in each["recovery_s"]]
        found["kills"] = len(took)
        found["equal"] = sum(each["kills"] for each in found["runs"] if each["weights"] == calm["weights"])
        found["recovery_s"] = {"median": statistics.median(took), "max": max(took)}
        if options.json:
            options.json.write_text(json.dumps(found) + "\n")
    print(f"{found['equal']} of {found['kills']} kills ended with the same weights; {found['recovery_s']}")
    sys.exit(found["equal"] != found["kills"])


if __name__ == "__main__":
    main()
