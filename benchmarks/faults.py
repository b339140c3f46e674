"""Jobs under random faults: each must finish in time, with the right weights or with a typed error.

    python benchmarks/faults.py --seeds 0:100              # a job per seed, several faults in each
    python benchmarks/faults.py --seeds 17:18 --verbose    # repeat one job
    python benchmarks/faults.py --seeds 0:100 --hosts      # three hosts and a spare one (namespaces, sshd; root)
    python benchmarks/faults.py --seeds 0:100 --sharded    # a model that FSDP2 shards on a mesh of 2 x 2 ranks
    python benchmarks/faults.py --seeds 0:100 --checkpoints    # also kills all ranks, and writes checkpoints
    python benchmarks/faults.py --seeds 0:100 --until 1000 --json benchmarks/faults.json    # continues earlier results

A job is ``allranks run -n 3 --elastic 1`` on this file, which trains a small model with batch normalization and
dropout (faults_training.py). A seed decides which ranks are killed, paused, or killed together. It also decides when:
during computation, during the recovery of the other ranks, or while a replacement process joins.

Every step of every process must have the same result as without a fault, bit for bit. If the job continues with fewer
ranks, the result must equal that of one process that trains on the same samples (``expected``). At the end, the
weights of all ranks must be equal, and no process may remain. A job that fails must report the reason: no remaining
rank has the state.

A fault counts only if it has hit a live process in an unfinished training.

With ``--hosts`` each rank is on a separate host. The agent of a host is also killed, and a host is disconnected and
reconnected. Its rank starts on the spare host, and the reconnected host becomes the spare host. Each job gets each of
these faults once, and not while ranks recover: if more hosts fail than are spare, the state is soon lost.

With ``--checkpoints`` all ranks are also killed simultaneously, and the job restarts from its newest checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faults_training import (
    ROUNDING,
    STEP_S,
    StepDone,
    Unlawful,
    expected,
    expected_end,
    identity,
    read_steps,
    train,
)

if TYPE_CHECKING:
    from support.sshd import Ssh

ROOT = Path(__file__).parents[1]
PROGRAM = str(Path(__file__).absolute())
SPARES = 1
PATIENCE_S = 120.0  # without a step or a fault: the job hangs
# until all ranks train again before the next fault; later, some ranks are left out because no host is free
RECOVERY_S = 30.0
GHOSTS_S = 15.0  # for the ranks of a disconnected host to detect that they are excluded
FEWER = "terminated with it; the other ranks continue"
OVER = "exited because the other ranks had continued without it"
AGAIN = "restarting ("
AGAIN_KIND = "nobody had the state: started again"
ERRORS = (
    "all ranks that had the state of the training are lost",
    "ranks remain before the training loop",
    "no remaining rank has the same shards",
    "no remaining rank has the state of the program",  # its hosts are lost, so the job is not restarted
    # The disconnected host has the only rank with the state.
    "is lost (no answer), so the remaining ranks cannot agree on a new group",
)
ON_ONE_HOST = ("kill", "kill", "two at once", "during recovery", "of the joiner", "stop and go on")
ON_HOSTS = ("host lost", "host unplugged")  # each job has one of each, or only one, because there is one spare host
OF_ALL = ("all at once",) * 3
# The random generator belongs to the process: two threads would draw from each other's seeds.
_ORACLE = threading.Lock()


@dataclass(frozen=True)
class Kind:
    """Properties of jobs.

    Attributes:
        epochs: epochs of each training.
        faults: planned faults of each job.
        sharded: FSDP2 shards the model.
        checkpoints: the jobs write checkpoints, and all ranks are killed, too.
        step_s: seconds that each step sleeps.
        disk: folder of the checkpoints, on a disk that may be full.
    """

    epochs: int
    faults: int
    sharded: bool = False
    checkpoints: bool = False
    step_s: float = STEP_S
    disk: Path | None = None

    @property
    def ranks(self) -> int:
        return 4 if self.sharded else 3


@dataclass(frozen=True)
class Fault:
    """A fault that has hit.

    Attributes:
        kind: kind of the fault.
        over: time at which it was over: the processes had exited, or were resumed.
        killed: number of killed ranks.
        left: number of ranks that were alive then and had done a step.
    """

    kind: str
    over: float
    killed: int
    left: int


@dataclass
class Outcome:
    """The result of a job.

    Attributes:
        seed: seed of its faults.
        planned: the planned faults.
        faults: the faults that have hit.
        trouble: description of what is wrong, or "".
        error: the job failed with a typed error.
        steps: compared steps of all processes.
        alone: the number of these steps that fewer ranks did than there are rank slots.
        recoveries: kind and seconds, from a fault to the first step that all ranks have done after it.
        seconds: duration of the whole job.
    """

    seed: int
    planned: Sequence[str]
    faults: Sequence[Fault] = ()
    trouble: str = ""
    error: bool = False
    steps: int = 0
    alone: int = 0
    recoveries: list[tuple[str, float]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def result(self) -> str:
        return "wrong" if self.trouble else "typed error" if self.error else "right"


class Job:
    """One job and the faults that it receives.

    Args:
        kind: kind of the job.
        verbose: show its output.
        ssh: the hosts; None for this host.
    """

    def __init__(self, kind: Kind, verbose: bool = False, ssh: Ssh | None = None) -> None:
        self.kind = kind
        self.folder = Path(tempfile.mkdtemp(prefix="faults-"))
        self.cluster = None if ssh is None else ssh.hosts
        where = ["-n", str(kind.ranks)] if ssh is None else ["-H", "node0:1,node1:1,node2:1,node3:1", "--spares", "1"]
        words = [sys.executable, "-m", "allranks", "run", *where]
        words += ["--elastic", "1", "--respawns", "1000", "--restarts", "50" if kind.checkpoints else "3"]
        words += [PROGRAM, "--train", str(self.folder), "--epochs", str(kind.epochs)]
        words += ["--sharded"] * kind.sharded + ["--checkpoints"] * kind.checkpoints
        words += ["--step-s", str(kind.step_s)] + ([] if kind.disk is None else ["--disk", str(kind.disk)])
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            words if ssh is None else ssh.hosts.hosts[0].inside(*words),
            env=None
            if ssh is None
            else {**ssh.environ, "PYTHONPATH": str(ROOT / "src"), "ALLRANKS_SECRET": "of faults"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.output = ""
        self.faults: list[Fault] = []
        self.verbose = verbose
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.output += line
                if self.verbose:
                    print("   ", line, end="", flush=True)

    # --- observation ---

    @property
    def is_over(self) -> bool:
        """Whether the job or the training has finished, so that no fault can hit."""
        return self.process.poll() is not None or any(self.folder.glob("end-*"))

    def newest(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the newest process of each rank, by rank: its round and start, and its identity."""
        found: dict[str, tuple[tuple[int, ...], str]] = {}
        for path in self.folder.glob("pid-*"):
            start, rank = _start_of(path)
            if (known := path.read_text()) and (rank not in found or start > found[rank][0]):
                found[rank] = start, known
        return found

    def alive(self) -> dict[str, int]:
        """Return the process ids of the ranks whose newest process is alive."""
        pids = {rank: int(known.split()[0]) for rank, (_, known) in self.newest().items() if _is_alive(known)}
        return {} if self.is_over else pids

    def all_train(self, since: float) -> bool:
        """Return whether the initial number of ranks exists, and all have done a step since then."""
        last = [step for step in self._last_steps() if step.at > since]
        return len({step.rank for step in last}) == self.kind.ranks == max(last, key=lambda step: step.at).size

    def _last_steps(self) -> list[StepDone]:
        """Return the last step of each newest process that is alive and has done a step."""
        paths = [
            self.folder / f"steps-{start[0]}-{rank}-{start[1]}"
            for rank, (start, known) in self.newest().items()
            if _is_alive(known)
        ]
        return [steps[-1] for path in paths if path.exists() and (steps := read_steps(path))]

    def host_of(self, pid: int) -> int:
        """Return the number of the host of a process; 0 if it is unknown."""
        assert self.cluster is not None
        networks = {_network(host.holder): number for number, host in enumerate(self.cluster.hosts)}
        return networks.get(_network(pid), 0)

    def away(self) -> dict[str, int]:
        """Return the live ranks on other hosts than the launcher's."""
        return {rank: pid for rank, pid in self.alive().items() if self.host_of(pid)}

    # --- faults ---

    def kill(self, ranks: Sequence[str], kind: str) -> bool:
        """Kill these ranks simultaneously. Return whether all of them were hit."""
        pids = self.alive()
        hit = [rank for rank in ranks if rank in pids and _signal(pids[rank], signal.SIGKILL)]
        if hit:
            whole = len(hit) == len(ranks)
            named = kind if whole else "kill"
            self._count("kill of rank 0" if (named, hit) == ("kill", ["0"]) else named, [pids[r] for r in hit], hit)
        return len(hit) == len(ranks)

    def stop(self, rank: str, seconds: float) -> None:
        """Pause a rank for some seconds."""
        pid = self.alive().get(rank)
        if pid is not None and _signal(pid, signal.SIGSTOP):
            time.sleep(seconds)
            _signal(pid, signal.SIGCONT)
            self._count("stop and go on", [], [rank])

    def kill_agent(self, rank: str) -> None:
        """Kill the agent of a rank, and thereby its host."""
        pid = self.away().get(rank)
        if pid is not None:
            parent = parent_of(pid)
            if "allranks.launch" in _command(parent) and _signal(parent, signal.SIGKILL):
                self._count("host lost", [parent, pid], [rank])

    def unplug(self, rank: str, seconds: float, kind: str = "host unplugged") -> None:
        """Disconnect the host of a rank for some seconds."""
        pid = self.away().get(rank)
        if pid is not None and self.cluster is not None:
            host = self.host_of(pid)
            self.cluster.cut(host)
            time.sleep(seconds)
            hit = not self.is_over
            self.cluster.plug(host)
            if hit:
                self._count(kind, [], [rank], killed=0)

    def _count(self, kind: str, pids: Sequence[int], ranks: Sequence[str], killed: int | None = None) -> None:
        """Count a fault that has hit, after these processes have exited and so have written their last step."""
        until = time.monotonic() + PATIENCE_S
        while any(identity(pid) for pid in pids) and time.monotonic() < until:
            time.sleep(0.001)
        count = len(ranks) * bool(pids) if killed is None else killed
        self.faults.append(Fault(kind, time.monotonic(), count, len(self._last_steps())))
        if self.verbose:
            print(f"--- {kind}: rank {', '.join(ranks)}", flush=True)

    # --- the end ---

    def end(self) -> list[dict[str, Any]]:
        """Wait until the job finishes, and return the results of the ranks. Call ``check`` afterwards."""
        while self.process.poll() is None:
            times = [path.stat().st_mtime for path in self.folder.glob("*-*-*-*")]
            if time.time() - max(times, default=time.time()) > PATIENCE_S or (
                not times and time.monotonic() - self.began > PATIENCE_S
            ):
                os.killpg(self.process.pid, signal.SIGKILL)
                self.output += f"--- the job hangs: nothing has happened for {PATIENCE_S:g} s\n"
                break
            time.sleep(0.1)
        self.process.wait()
        self._reader.join()
        found = [json.loads(path.read_text()) for path in sorted(self.folder.glob("end-*"))]
        until = time.monotonic() + (0 if self.cluster is None else GHOSTS_S)
        while (left := self._left()) and time.monotonic() < until:
            time.sleep(0.1)
        if left:
            self.output += f"--- processes are left: {left}\n"
            found = []
        return found

    def rounds(self) -> list[list[list[StepDone]]]:
        """Return the steps of each process, by round of the job."""
        found: dict[int, list[list[StepDone]]] = {}
        for path in self.folder.glob("steps-*"):
            if steps := read_steps(path):
                found.setdefault(_start_of(path)[0][0], []).append(steps)
        return [found[number] for number in sorted(found)]

    def _left(self) -> list[str]:
        return [known for path in self.folder.glob("pid-*") if _is_alive(known := path.read_text())]


def _start_of(path: Path) -> tuple[tuple[int, int], str]:
    """Return the round and the start, and the rank, of a file that a process has written."""
    _, number, rank, start = path.name.split("-")
    return (int(number), int(start)), rank


def _network(pid: int) -> str:
    """Return the network namespace of a process, or "" if it has exited."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def _is_alive(known: str) -> bool:
    return bool(known) and identity(int(known.split()[0])) == known


def _signal(pid: int, number: int) -> bool:
    """Send a signal. Return whether the process was alive."""
    if not pid or not identity(pid):
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def plan(kind: Kind, seed: int, hosts: bool) -> list[str]:
    """Return the faults that a seed stands for."""
    pick = random.Random(seed)
    planned = pick.choices([*ON_ONE_HOST, *OF_ALL * kind.checkpoints], k=kind.faults)
    if hosts:
        of_hosts = pick.sample(ON_HOSTS, pick.randint(1, 2))
        for place, fault in zip(pick.sample(range(kind.faults), len(of_hosts)), of_hosts, strict=True):
            planned[place] = fault
    return planned


def disturb(job: Job, seed: int, planned: Sequence[str]) -> None:
    """Apply the planned faults to a job while it trains."""
    pick, places = random.Random(f"moments of {seed}"), [str(rank) for rank in range(job.kind.ranks)]
    _await(lambda: job.all_train(0.0), job, PATIENCE_S)
    for kind, following in zip(planned, [*planned[1:], ""], strict=True):
        time.sleep(pick.random() * 0.4)
        one, other = pick.sample(places, 2)
        moment = pick.random()
        if kill_ranks(job, kind, one, other, moment):
            pass
        elif kind == "of the joiner":
            before = job.newest().get(one)
            if job.kill([one], "kill"):
                _await(lambda was=before, rank=one: job.newest().get(rank) != was, job, 5.0)
                time.sleep(moment * 0.3)
                job.kill([one], kind if job.newest().get(one) != before else "kill")
        elif kind == "stop and go on":
            job.stop(one, moment * 0.7)
        elif away := sorted(job.away()):
            if kind == "host lost":
                job.kill_agent(pick.choice(away))
            else:
                job.unplug(pick.choice(away), pick.choice([1.0, 9.0]) + moment * 3)
        if job.is_over:
            return
        # Otherwise the next fault hits regardless of the ranks' progress. Ranks always recover before and after the
        # loss of a host: the replacement of a lost rank receives the state from a host that can be the next one to
        # fail.
        waits = pick.random() < 0.75 or {kind, following} & {*ON_HOSTS}
        if job.faults and waits:
            since = job.faults[-1].over
            _await(lambda at=since: job.all_train(at), job, RECOVERY_S)


def kill_ranks(job: Job, kind: str, one: str, other: str, moment: float) -> bool:
    """Apply a fault that only kills ranks.

    Args:
        job: the job.
        kind: kind of the fault.
        one: a rank.
        other: another rank.
        moment: when the other rank is killed during the recovery, from 0 to 1.

    Returns:
        Whether it is a fault of this kind.
    """
    if kind == "kill":
        job.kill([one], kind)
    elif kind == "two at once":
        job.kill([one, other], kind)
    elif kind == "all at once":
        job.kill([str(rank) for rank in range(job.kind.ranks)], kind)
    elif kind == "during recovery":
        job.kill([one], "kill")
        time.sleep(moment * 0.4)
        job.kill([other], kind)
    else:
        return False
    return True


def _await(condition: Any, job: Job, patience_s: float) -> None:
    until = time.monotonic() + patience_s
    while not job.is_over and time.monotonic() < until and not condition():
        time.sleep(0.02)


@dataclass(frozen=True)
class Undisturbed:
    """The results of a job without a fault.

    Attributes:
        weights: weights at its end.
        values: value of each step on each rank.
    """

    weights: str
    values: dict[tuple[int, int], float]


def undisturbed(kind: Kind) -> Undisturbed:
    """Run a job without faults, and compare it with one process.

    Raises:
        RuntimeError: they differ, so that this benchmark cannot judge other jobs.
    """
    job = Job(kind)
    found = job.end()
    rounds = job.rounds()
    shutil.rmtree(job.folder)
    if {each["weights"] for each in found} != {found[0]["weights"] if found else ""} or len(rounds) != 1:
        raise RuntimeError(f"an undisturbed job failed: {found}\n{job.output}")
    steps = [step for process in rounds[0] for step in process]
    values = {(step.done, step.rank): step.value for step in steps}
    if len(values) != expected_end(kind.epochs, kind.ranks) * kind.ranks:
        raise RuntimeError(f"an undisturbed job has executed {len(values)} steps\n{job.output}")
    if not kind.sharded:
        (trouble, _) = compare(rounds, Undisturbed("", {}), kind)
        if trouble:
            raise RuntimeError(f"the result of an undisturbed job differs from that of one process: {trouble}")
    return Undisturbed(str(found[0]["weights"]), values)


def compare(rounds: Sequence[Sequence[Sequence[StepDone]]], right: Undisturbed, kind: Kind) -> tuple[str, bool]:
    """Return a description of wrong steps of a job, and whether all ranks did all steps."""
    before: list[StepDone] = []
    whole = True
    for number, processes in enumerate(rounds):
        steps: dict[int, StepDone] = {}
        values: dict[tuple[int, int], float] = {}
        for step in sorted((step for process in processes for step in process), key=lambda step: step.at):
            first = steps.setdefault(step.done, step)
            if (first.epoch, first.index, first.size) != (step.epoch, step.index, step.size):
                return f"round {number}: two processes have done different steps: {first} and {step}", False
            if values.setdefault((step.done, step.rank), step.value) != step.value:
                return f"round {number}: a process differs from the one before it in {step}", False
        begin, end = min(steps), max(steps)
        if set(steps) != set(range(begin, end + 1)):
            return f"round {number}: steps are missing between {begin} and {end}", False
        if begin > 1 and (not kind.checkpoints or begin > len(before) + 1):
            return f"round {number} begins with step {begin}", False
        before = before[: begin - 1] + [steps[done] for done in range(begin, end + 1)]
        is_whole = all(step.size == kind.ranks for step in before)
        whole = whole and is_whole
        if is_whole and right.values:
            wrong = next((key for key, value in values.items() if right.values.get(key) != value), None)
        else:
            try:
                with _ORACLE:
                    oracle = expected(before)
            except Unlawful as error:
                return f"round {number}: {error}", False
            wrong = next(((d, r) for (d, r), v in values.items() if not abs(v - oracle[d - 1]) <= ROUNDING), None)
        if wrong is not None:
            return f"round {number}: a wrong number after step {wrong[0]} on rank {wrong[1]}", False
    return "", whole


def check(job: Job, right: Undisturbed, outcome: Outcome, found: Sequence[dict[str, Any]]) -> None:
    """Judge a finished job."""
    kind, rounds, code = job.kind, job.rounds(), job.process.returncode
    outcome.trouble, whole = compare(rounds, right, kind)
    steps = [step for processes in rounds for process in processes for step in process]
    outcome.steps, outcome.alone = len(steps), sum(step.size < kind.ranks for step in steps)
    begins = [min(process[0].at for process in processes) for processes in rounds[1:]]
    for fault in job.faults:
        end = recovered(steps, fault.over)
        if end is not None:
            again = any(fault.over < begin <= end for begin in begins)
            outcome.recoveries.append((AGAIN_KIND if again else fault.kind, end - fault.over))
    # A rank that is killed after the training loop is not replaced, because the training is over.
    all_there = len(found) == kind.ranks or OVER in job.output or FEWER in job.output
    weights = {each["weights"] for each in found}
    same = len(weights) == 1 and (not whole or weights == {right.weights})
    killed = sum(fault.killed for fault in job.faults)
    # If the last remaining rank is killed and no host has a free slot for a replacement, this kill is the root cause.
    nobody = code == 128 + signal.SIGKILL and FEWER in job.output and job.faults[-1].left == 0
    outcome.error = bool(code) and killed > 1 and (nobody or any(error in job.output for error in ERRORS))
    *failed, _ = job.output.split(AGAIN)
    if outcome.trouble:
        pass
    elif any(not kind.checkpoints and not any(error in part for error in ERRORS) for part in failed):
        outcome.trouble = "the job was restarted although a rank had the state"
    elif outcome.error and not kind.checkpoints:
        pass
    elif code or not same or not all_there:
        outcome.trouble = f"exit code {code}, weights {[each['weights'] for each in found]}"
    elif whole and max(step.done for step in steps) != expected_end(kind.epochs, kind.ranks):
        outcome.trouble = f"the training ended after {max(step.done for step in steps)} steps"
    if outcome.trouble:
        outcome.trouble += f"\n{job.output}"


def recovered(steps: Sequence[StepDone], since: float) -> float | None:
    """Return the time of the first step after ``since`` that all its ranks have done, or None."""
    ranks: dict[tuple[int, int], set[int]] = {}
    for step in sorted((step for step in steps if step.at > since), key=lambda step: step.at):
        mine = ranks.setdefault((step.done, step.size), set())
        mine.add(step.rank)
        if len(mine) == step.size:
            return step.at
    return None


def run(kind: Kind, seed: int, right: Undisturbed, verbose: bool = False, ssh: Ssh | None = None) -> Outcome:
    """Run and judge one job."""
    outcome = Outcome(seed, plan(kind, seed, ssh is not None))
    job = Job(kind, verbose, ssh)
    disturb(job, seed, outcome.planned)
    found = job.end()
    outcome.faults, outcome.seconds = job.faults, time.monotonic() - job.began
    check(job, right, outcome, found)
    shutil.rmtree(job.folder)
    return outcome


@contextlib.contextmanager
def four_hosts(ranks: int = 3) -> Iterator[Ssh]:
    """Create hosts like those of the tests."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support import cluster, sshd

    with cluster.cluster(ranks + SPARES) as hosts, sshd.sshd(hosts) as made:
        yield made


class Report:
    """The results of jobs, and the file that is updated after each job.

    Args:
        path: the file, whose previous content counts; None for no file.
        facts: facts about the jobs.
    """

    def __init__(self, path: Path | None, facts: dict[str, Any]) -> None:
        self._path, self._facts = path, facts
        self.jobs: list[dict[str, Any]] = json.loads(path.read_text())["jobs"] if path and path.exists() else []
        self._lock = threading.Lock()

    @property
    def effective(self) -> int:
        return sum(sum(job["effective"].values()) for job in self.jobs)

    def add(self, outcome: Outcome) -> None:
        recoveries: dict[str, list[float]] = {}
        for kind, seconds in outcome.recoveries:
            recoveries.setdefault(kind, []).append(round(seconds, 4))
        job = {
            "seed": outcome.seed,
            "result": outcome.result,
            "planned": dict(Counter(outcome.planned)),
            "effective": dict(Counter(fault.kind for fault in outcome.faults)),
            "killed": sum(fault.killed for fault in outcome.faults),
            "steps": outcome.steps,
            "steps_of_fewer": outcome.alone,
            "recovery_s": recoveries,
            "seconds": round(outcome.seconds, 1),
        }
        with self._lock:
            self.jobs = sorted([*self.jobs, job], key=lambda each: each["seed"])
            if self._path is not None:
                lines = ",\n".join(f"  {json.dumps(each)}" for each in self.jobs)
                head = json.dumps({**self._facts, **self.summary()}, indent=1).removesuffix("\n}")
                written = self._path.with_suffix(".new")
                written.write_text(f'{head},\n "jobs": [\n{lines}\n ]\n}}\n')
                written.replace(self._path)

    def summary(self) -> dict[str, Any]:
        effective: Counter[str] = Counter()
        recoveries: dict[str, list[float]] = {}
        for job in self.jobs:
            effective.update(job["effective"])
            for kind, seconds in job["recovery_s"].items():
                recoveries.setdefault(kind, []).extend(seconds)
        results = Counter(job["result"] for job in self.jobs)
        return {
            "results": {name: results[name] for name in ("right", "typed error", "wrong")},
            "planned": sum(sum(job["planned"].values()) for job in self.jobs),
            "effective": self.effective,
            "killed": sum(job["killed"] for job in self.jobs),
            "kinds": dict(sorted(effective.items())),
            "steps": sum(job["steps"] for job in self.jobs),
            "steps_of_fewer": sum(job["steps_of_fewer"] for job in self.jobs),
            "recovery_s": {
                kind: {"median": statistics.median(seconds), "max": max(seconds)}
                for kind, seconds in sorted(recoveries.items())
            },
        }


def judge(options: argparse.Namespace) -> None:
    """Run the jobs, and print their results."""
    kind = Kind(options.epochs or options.faults * 2, options.faults, options.sharded, options.checkpoints)
    where = "three hosts and a spare one" if options.hosts else "one host"
    facts = {"where": where, "ranks": kind.ranks, "cpus": os.cpu_count(), "faults_per_job": kind.faults}
    report = Report(options.json, facts)
    first, end = map(int, options.seeds.split(":"))
    seeds = iter(sorted({*range(first, end)} - {job["seed"] for job in report.jobs}))
    right, lock = undisturbed(kind), threading.Lock()

    def work() -> None:
        with four_hosts() if options.hosts else contextlib.nullcontext() as ssh:
            while report.effective < options.until:
                with lock:
                    seed = next(seeds, None)
                if seed is None:
                    return
                outcome = run(kind, seed, right, options.verbose, ssh)
                report.add(outcome)
                hits = f"{len(outcome.faults)} faults of {len(outcome.planned)} have hit"
                print(f"seed {seed}: {outcome.result}, {hits}, {outcome.seconds:.0f} s", flush=True)
                if outcome.trouble:
                    print(outcome.trouble, flush=True)

    with ThreadPoolExecutor(options.at_once) as pool:
        for future in [pool.submit(work) for _ in range(options.at_once)]:
            future.result()
    print(json.dumps(report.summary(), indent=1))
    sys.exit(any(job["result"] == "wrong" for job in report.jobs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:20", help="FIRST:END")
    parser.add_argument("--faults", type=int, default=20, help="number of faults planned for each job")
    parser.add_argument(
        "--epochs", type=int, help="epochs of each job, with 50 steps of at least 16 ms (default: 2 for each fault)"
    )
    parser.add_argument("--until", type=float, default=float("inf"), help="stop after this number of effective faults")
    parser.add_argument("--at-once", type=int, default=1, help="number of jobs that run concurrently")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--hosts", action="store_true", help="run on three hosts and a spare host")
    where.add_argument("--sharded", action="store_true", help="train a model that FSDP2 shards, on four ranks")
    parser.add_argument("--checkpoints", action="store_true", help="also kill all ranks")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument(
        "--json", type=Path, help="write the results to this file after each job; jobs in it are not run again"
    )
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--step-s", type=float, default=STEP_S, help=argparse.SUPPRESS)
    parser.add_argument("--disk", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.epochs, options.checkpoints, options.sharded, options.step_s, options.disk)
    else:
        judge(options)


if __name__ == "__main__":
    main()
