"""One long training under random faults: the same bits as without faults, and no growth of memory, files or threads.

    python benchmarks/long_run.py --minutes 120
    python benchmarks/long_run.py --minutes 3 --between 3,8 --seed 5     # a short one

The job of faults.py trains with one rank on each of three hosts (namespaces, sshd; root), with a spare host and with
checkpoints on a small disk. Every 10 to 60 s a random fault hits: a rank, two ranks or all ranks are killed; a rank
is killed during the recovery of another one; a rank or the launcher is stopped for some seconds; a host is
disconnected, for a short time or until it is lost; the disk of the checkpoints is full for some seconds.

Every step of every process is compared with an undisturbed run (``faults.check``). Meanwhile, the memory, descriptors
and threads of the launcher, the agents and the ranks are sampled. The results compare the first quarter of the run with
the last one. The exit code is 1 if a number is wrong, a process remains, or something has grown.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faults import Job, Kind, Outcome, check, four_hosts, kill_ranks, parent_of, undisturbed

if TYPE_CHECKING:
    from support.sshd import Ssh

STEP_S = 0.1
STEPS_PER_EPOCH = 50
DISK = "32m"
SAMPLE_S = 10.0
FAULTS = {
    "kill": 4,
    "two at once": 2,
    "all at once": 1,
    "during recovery": 2,
    "stop and go on": 2,
    "launcher stopped": 2,
    "host unplugged": 2,
    "host lost": 1,
    "disk full": 2,
}
QUARTER = 4
MORE_MEMORY = 1.2  # times; an allocator keeps some more than is needed
MORE_OTHERS = 3  # threads and descriptors that a recovery needs may be there in one sample and not in another


class LongJob(Job):
    """The job, with the faults that only the long run has.

    Args:
        kind: kind of the job.
        ssh: the hosts.
        disk: the disk of the checkpoints.
    """

    def __init__(self, kind: Kind, ssh: Ssh, disk: Path) -> None:
        super().__init__(kind, ssh=ssh)
        self._disk = disk

    def fill_disk(self, seconds: float) -> None:
        """Leave no space on the disk of the checkpoints for some seconds."""
        filler = self._disk / "filler"
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1 << 16))
            except OSError:
                pass  # full
        time.sleep(seconds)
        filler.unlink()
        self._count("disk full", [], [])

    def stop_launcher(self, seconds: float) -> None:
        """Pause the launcher for some seconds."""
        self.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.process.send_signal(signal.SIGCONT)
        self._count("launcher stopped", [], [])

    def members(self) -> dict[str, list[int]]:
        """Return the processes of the job, by role."""
        ranks = list(self.alive().values())
        parents = {parent_of(rank) for rank in ranks} - {0}
        return {"launcher": [self.process.pid], "agent": sorted(parents - {self.process.pid}), "rank": ranks}


def hit(job: LongJob, pick: random.Random) -> None:
    """Apply one random fault."""
    (kind,) = pick.choices([*FAULTS], weights=[*FAULTS.values()])
    one, other = pick.sample([str(rank) for rank in range(job.kind.ranks)], 2)
    moment = pick.random()
    if kill_ranks(job, kind, one, other, moment):
        return
    if kind == "stop and go on":
        job.stop(one, moment * 5)
    elif kind == "launcher stopped":
        job.stop_launcher(moment * 10)
    elif kind == "disk full":
        job.fill_disk(2 + moment * 8)
    elif away := sorted(job.away()):
        # An interruption of up to 7 s loses no host. A host that does not respond is lost after 15 s.
        job.unplug(pick.choice(away), moment * 6 if kind == "host unplugged" else 20 + moment * 5, kind)


class Samples:
    """Memory (MiB), descriptors and threads of each process of a job at intervals.

    Args:
        job: the job.
    """

    def __init__(self, job: LongJob) -> None:
        self._job = job
        self.all: list[dict[str, Any]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        began = time.monotonic()
        while not self._over.wait(SAMPLE_S) and not self._job.is_over:
            for role, pids in self._job.members().items():
                for pid in pids:
                    try:
                        found = _usage(pid)
                    except OSError:
                        continue  # has exited
                    self.all.append({"at": time.monotonic() - began, "role": role, **found})

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def growth(self) -> tuple[dict[str, dict[str, Any]], list[str]]:
        """Return medians and maxima of the first and the last quarter by role, and what has grown."""
        table: dict[str, dict[str, Any]] = {}
        grown = []
        last = max((sample["at"] for sample in self.all), default=0.0)
        for role in dict.fromkeys(sample["role"] for sample in self.all):
            mine = [sample for sample in self.all if sample["role"] == role]
            first = [sample for sample in mine if sample["at"] <= last / QUARTER]
            final = [sample for sample in mine if sample["at"] >= last - last / QUARTER]
            for name in [key for key in mine[0] if key not in ("at", "role")]:
                early, late = ([sample[name] for sample in part] for part in (first, final))
                if not early or not late:
                    continue
                before, after = statistics.median(early), statistics.median(late)
                table.setdefault(role, {})[name] = {
                    "first_quarter": {"median": before, "max": max(early)},
                    "last_quarter": {"median": after, "max": max(late)},
                }
                limit = before * MORE_MEMORY if name == "memory_mib" else before + MORE_OTHERS
                if after > limit:
                    grown.append(f"{role}: {name} {before:g} -> {after:g}")
        return table, grown


def _usage(pid: int) -> dict[str, float]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "memory_mib": round(int(status["RssAnon"].split()[0]) / 1024, 1) if "RssAnon" in status else 0.0,
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status["Threads"]),
    }


def train(options: argparse.Namespace, disk: Path) -> tuple[Outcome, Samples, LongJob, float]:
    """Run the disturbed job beside the undisturbed one, and compare them."""
    epochs = max(round(options.minutes * 60 / STEPS_PER_EPOCH / (STEP_S + 0.01)), 1)
    kind = Kind(epochs, 0, checkpoints=True, step_s=STEP_S, disk=disk / "kept")
    shortest, longest = map(float, options.between.split(","))
    pick = random.Random(options.seed)
    outcome = Outcome(options.seed, [])
    with four_hosts() as ssh, ThreadPoolExecutor(1) as pool:
        right = pool.submit(undisturbed, Kind(epochs, 0, step_s=0.0))
        began = time.monotonic()
        job = LongJob(kind, ssh, disk)
        samples = Samples(job)
        try:
            while not job.is_over:
                due = time.monotonic() + pick.uniform(shortest, longest)
                while time.monotonic() < due and not job.is_over:
                    time.sleep(0.05)
                if not job.is_over:
                    hit(job, pick)
                    print(f"{time.monotonic() - began:.0f} s: {dict(Counter(f.kind for f in job.faults))}", flush=True)
            found = job.end()
        finally:
            samples.end()
            if job.process.poll() is None:
                job.process.kill()
                job.process.wait()
        outcome.faults, outcome.seconds = job.faults, time.monotonic() - began
        check(job, right.result(), outcome, found)
    return outcome, samples, job, epochs


def recoveries(found: Sequence[tuple[str, float]]) -> dict[str, dict[str, float]]:
    kinds: dict[str, list[float]] = {}
    for kind, seconds in found:
        kinds.setdefault(kind, []).append(round(seconds, 3))
    return {kind: {"median": statistics.median(each), "max": max(each)} for kind, each in sorted(kinds.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120, help="duration of the training, without the pauses")
    parser.add_argument("--between", default="10,60", help="seconds between two faults: SHORTEST,LONGEST")
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--samples", type=Path, help="write all samples to this file")
    options = parser.parse_args()
    disk = Path(tempfile.mkdtemp(prefix="long-run-disk-"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "long-run", str(disk)], check=True)
    try:
        outcome, samples, job, epochs = train(options, disk)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
        disk.rmdir()
    table, grown = samples.growth()
    if options.samples:
        options.samples.write_text(json.dumps(samples.all))
    results = {
        "seconds": round(outcome.seconds),
        "steps": epochs * STEPS_PER_EPOCH,
        "result": outcome.result,
        "trouble": outcome.trouble,
        "faults": dict(sorted(Counter(fault.kind for fault in outcome.faults).items())),
        "rank_kills": sum(fault.killed for fault in outcome.faults),
        "restarts_from_checkpoint": len(job.rounds()) - 1,
        "steps_of_processes": outcome.steps,
        "steps_of_fewer": outcome.alone,
        "recovery_s": recoveries(outcome.recoveries),
        "usage": table,
        "grown": grown,
    }
    print(json.dumps(results, indent=1))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    shutil.rmtree(job.folder)
    sys.exit(outcome.result != "right" or bool(grown))


if __name__ == "__main__":
    main()
