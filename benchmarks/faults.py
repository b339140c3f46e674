"""Jobs under random faults: does each end with the weights of an undisturbed one, or a typed error, and in time?

    python benchmarks/faults.py --seeds 0:100              # a job per seed, several faults in each
    python benchmarks/faults.py --seeds 17:18 --verbose    # one again
    python benchmarks/faults.py --seeds 0:100 --hosts      # three hosts and a spare one (namespaces, sshd; root)
    python benchmarks/faults.py --seeds 0:100 --sharded    # a model that FSDP2 shards on a mesh of 2 x 2 ranks
    python benchmarks/faults.py --seeds 0:100 --checkpoints    # all ranks are killed, too, and checkpoints are written

A job is ``allranks run -n 3 --elastic 1`` on this file, which trains a small model with batch normalisation and
dropout. A seed decides which ranks are killed, stopped for a while, or killed together, and when: also in an all_reduce
of 64 MB, while the others recover, and while the process that takes a place joins. Afterwards the weights of all ranks
must be those of the job without a fault, to the last bit; and no process may be left.

With ``--hosts`` each rank is on a host of its own. Then the agent of a host is killed, too, and a host is unplugged and
plugged in again: its rank is started on the spare host, and it is the spare host when it is back.

With ``--checkpoints`` all ranks are killed at once, too, and the job is started again from its newest checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from support.sshd import Ssh

ROOT = Path(__file__).parents[1]
SHARDED = "--sharded" in sys.argv  # each shard is on two ranks
EVERY = 7  # steps, between two checkpoints
RANKS = 4 if SHARDED else 3
STEP_S = 0.008
LONG_S = 180.0
GHOSTS_S = 15.0  # for ranks of a host that was unplugged to learn that they are out
BIG = 16 << 20  # numbers in the large all_reduce
FEWER = "ended with it; the others go on"
OVER = "has ended, as the others had gone on without it"
ERRORS = (
    "all ranks that had the state of the training are lost",
    "ranks are left before the training loop",
    "no rank that is left has the same shards",
    "no rank is left that has the state of the program",  # and its hosts are lost: it is not restarted
)


def train(folder: Path, steps: int, checkpoints: bool = False) -> None:
    """What the ranks run."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import allranks as dist

    start = 1000 * int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + int(os.environ.get("ALLRANKS_START", "0"))
    (folder / f"pid-{os.environ['RANK']}-{start}").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    dist.init_process_group(timeout=30)
    torch.manual_seed(1 + dist.get_rank())
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(1200, 20, generator=generator)
    dist.all_reduce(torch.ones(4))
    net = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 2))
    model = shard(net) if SHARDED else dist.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    sampler = dist.data.DistributedSampler(data, drop_last=True)  # type: ignore[arg-type]
    loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
    kept = dist.resilience.Checkpoints(folder / "kept", every=EVERY) if checkpoints else None
    state = dist.resilience.State(model=model, optimizer=optimizer, checkpoints=kept)
    pauses, before, last = [0.0], 0, time.monotonic()
    for epoch in state.epochs(steps // len(loader)):
        sampler.set_epoch(epoch)
        for step in state.steps(loader):
            with step:
                images, labels = step.batch
                optimizer.zero_grad()
                F.cross_entropy(model(images), labels).backward()
                if step.index == 20:
                    dist.all_reduce(torch.ones(BIG))
                optimizer.step()
                time.sleep(STEP_S)
            if state.lost > before:
                pauses.append(time.monotonic() - last)
                before = state.lost
            last = time.monotonic()
    whole = [parameter.full_tensor() if SHARDED else parameter for parameter in net.parameters()]  # type: ignore[operator]
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in whole)
    found = {"weights": hashlib.sha256(weights).hexdigest()[:16], "lost": state.lost, "pauses": pauses[1:]}
    (folder / f"end-{os.environ['RANK']}").write_text(json.dumps(found))


def shard(net: nn.Sequential) -> nn.Module:
    """The same weights on all ranks, sharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import allranks as dist

    for parameter in net.parameters():
        dist.broadcast(parameter.data, 0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(net[0], mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


class Job:
    """One job, and what is done to it.

    Args:
        steps: of its training.
        verbose: show what it writes.
        ssh: the hosts; None: this one.
        checkpoints: it writes some.
    """

    def __init__(self, steps: int, verbose: bool = False, ssh: Ssh | None = None, checkpoints: bool = False) -> None:
        self.checkpoints = checkpoints
        self.folder = Path(tempfile.mkdtemp(prefix="faults-"))
        self.cluster = None if ssh is None else ssh.hosts
        where = ["-n", str(RANKS)] if ssh is None else ["-H", "node0:1,node1:1,node2:1,node3:1", "--spares", "1"]
        words = [sys.executable, "-m", "allranks", "run", *where]
        words += ["--elastic", "1", "--respawns", "100", "--restarts", "50" if checkpoints else "3"]
        words += [__file__, "--train", str(self.folder), "--steps", str(steps), *["--sharded"] * SHARDED]
        words += ["--checkpoints"] * checkpoints
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

    def pids(self) -> dict[str, int]:
        """The newest process of each rank, by rank."""
        found: dict[str, tuple[int, int]] = {}
        for path in self.folder.glob("pid-*"):
            _, rank, start = path.name.split("-")
            text = path.read_text()
            if text and (rank not in found or int(start) > found[rank][0]):
                found[rank] = int(start), int(text)
        return {rank: pid for rank, (_, pid) in found.items()}

    def strike(self, number: int, ranks: list[str]) -> None:
        pids = self.pids()
        for rank in ranks:
            if rank in pids and self.process.poll() is None:
                try:
                    os.kill(pids[rank], number)
                except ProcessLookupError:
                    continue
                self._tell(f"{signal.Signals(number).name} to rank {rank}")

    def host_of(self, rank: str) -> int:
        """Where a rank is now; 0 if that is not known."""
        networks = {_network(host.holder): number for number, host in enumerate(self.cluster.hosts)}  # type: ignore[union-attr]
        return networks.get(_network(self.pids().get(rank, 0)), 0)

    def kill_agent(self, rank: str) -> None:
        """Kills the agent of a rank, and so its host; not that of the launcher's host, which would end with it."""
        pid = self.pids().get(rank, 0)
        if self.host_of(rank) and _alive(pid):
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if parent > 1:
                os.kill(parent, signal.SIGKILL)
                self._tell(f"the agent of rank {rank} is killed")

    def unplug(self, rank: str, seconds: float) -> None:
        """Unplugs the host of a rank for a while; not that of the launcher."""
        host = self.host_of(rank)
        if host and self.cluster is not None:
            self._tell(f"node{host} with rank {rank} is unplugged for {seconds:.1f} s")
            self.cluster.cut(host)
            time.sleep(seconds)
            self.cluster.plug(host)

    def _tell(self, what: str) -> None:
        if self.verbose:
            print(f"--- {what}", flush=True)

    def end(self) -> list[dict[str, object]]:
        """Waits; returns what the ranks found."""
        try:
            self.process.wait(max(1.0, self.began + LONG_S - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.output += f"--- the job had not ended after {LONG_S:g} s\n"
        self._reader.join()
        found = [json.loads(path.read_text()) for path in sorted(self.folder.glob("end-*"))]
        until = time.monotonic() + (0 if self.cluster is None else GHOSTS_S)
        while (left := self._left()) and time.monotonic() < until:
            time.sleep(0.1)
        if left:
            self.output += f"--- processes are left: {left}\n"
            found = []
        shutil.rmtree(self.folder)
        return found

    def _left(self) -> list[int]:
        return [pid for path in self.folder.glob("pid-*") if _alive(pid := int(path.read_text() or "0"))]


def _network(pid: int) -> str:
    """The network of a process; "" if it is gone."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def _alive(pid: int) -> bool:
    if not pid:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "zombie" not in Path(f"/proc/{pid}/status").read_text()


def disturb(job: Job, pick: random.Random, most: int) -> tuple[int, int]:
    """Does up to so many things to a job. Returns how many, and how many ranks were killed."""
    killed = 0

    def one() -> list[str]:
        return [str(pick.randrange(RANKS))]

    def kill(ranks: list[str]) -> None:
        nonlocal killed
        killed += len(ranks)
        job.strike(signal.SIGKILL, ranks)

    def two() -> None:
        kill([str(rank) for rank in pick.sample(range(RANKS), 2)])

    def during_recovery() -> None:
        first, second = pick.sample(range(RANKS), 2)
        kill([str(first)])
        time.sleep(pick.random() * 0.4)
        kill([str(second)])

    def the_joiner() -> None:
        (rank,) = one()
        before = job.pids().get(rank)
        kill([rank])
        until = time.monotonic() + 5
        while job.pids().get(rank) == before and time.monotonic() < until and job.process.poll() is None:
            time.sleep(0.005)
        time.sleep(pick.random() * 0.3)
        kill([rank])

    def stop() -> None:
        ranks = one()
        job.strike(signal.SIGSTOP, ranks)
        time.sleep(pick.random() * 0.7)
        job.strike(signal.SIGCONT, ranks)

    def lose_host() -> None:
        nonlocal killed
        killed += 1
        job.kill_agent(one()[0])

    def unplug() -> None:
        nonlocal killed
        killed += 1
        job.unplug(one()[0], pick.choice([1.0, 9.0]) + pick.random() * 3)

    kinds: list[Callable[[], None]] = [lambda: kill(one()), lambda: kill(one()), two, during_recovery, the_joiner, stop]
    if job.cluster is not None:
        kinds += [lose_host, lose_host, unplug]
    if job.checkpoints:
        kinds += [lambda: kill([str(rank) for rank in range(RANKS)])] * 3
    while not job.pids() and job.process.poll() is None:
        time.sleep(0.01)
    time.sleep(pick.random() * 2.5)
    faults = 0
    for _ in range(pick.randint(1, most)):
        if job.process.poll() is not None:
            break
        pick.choice(kinds)()
        faults += 1
        time.sleep(0.2 + pick.random() * 1.2)
    return faults, killed


def undisturbed(steps: int) -> str:
    """The weights of a job to which nothing is done."""
    job = Job(steps)
    (weights,) = {str(each["weights"]) for each in job.end()} or {job.output}
    return weights


def run(
    seed: int,
    right: str,
    steps: int,
    most: int,
    verbose: bool = False,
    ssh: Ssh | None = None,
    checkpoints: bool = False,
) -> tuple[str, int, int, list[float]]:
    """One job. Returns what it came to ("": right), the number of faults and of ranks killed, and the pauses."""
    job = Job(steps, verbose, ssh, checkpoints)
    faults, killed = disturb(job, random.Random(seed), most)
    found = job.end()
    pauses = [pause for each in found for pause in each["pauses"]]  # type: ignore[attr-defined]
    # A rank that is killed behind the loop is not replaced: the training is over.
    all_there = len(found) == RANKS or OVER in job.output
    weights = {each["weights"] for each in found}
    # With fewer ranks, as a host was lost and no spare one was left, the sums are others.
    same = weights == {right} or (len(weights) == 1 and FEWER in job.output)
    if same and all_there and job.process.returncode == 0:
        return "", faults, killed, pauses
    if not checkpoints and any(error in job.output for error in ERRORS) and job.process.returncode and killed > 1:
        return "typed error", faults, killed, pauses
    ended = f"exit code {job.process.returncode}, weights {[each['weights'] for each in found]}"
    return f"WRONG: {ended}\n{job.output}", faults, killed, pauses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:20", help="FIRST:END")
    parser.add_argument("--steps", type=int, default=400, help="of each job, at least 10 ms each")
    parser.add_argument("--most", type=int, default=4, help="faults in a job")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--hosts", action="store_true", help="on three hosts, and a spare one")
    where.add_argument("--sharded", action="store_true", help="a model that FSDP2 shards, on four ranks")
    parser.add_argument("--checkpoints", action="store_true", help="all ranks are killed, too")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.steps, options.checkpoints)
        return
    with four_hosts() if options.hosts else contextlib.nullcontext() as ssh:
        judge(options, ssh)


@contextlib.contextmanager
def four_hosts() -> Iterator[Ssh]:
    """Hosts as those of the tests."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support import cluster, sshd

    with cluster.cluster(RANKS + 1) as hosts, sshd.sshd(hosts) as made:
        yield made


def judge(options: argparse.Namespace, ssh: Ssh | None) -> None:
    """Runs the jobs, and says what they came to."""
    first, end = map(int, options.seeds.split(":"))
    weights = undisturbed(options.steps)
    results: dict[str, int] = {"right": 0, "typed error": 0, "wrong": 0}
    faults, kills, pauses, began = 0, 0, [], time.monotonic()
    with contextlib.suppress(KeyboardInterrupt):  # what was done until then is told
        for seed in range(first, end):
            outcome, struck, killed, more = run(
                seed, weights, options.steps, options.most, options.verbose, ssh, options.checkpoints
            )
            faults += struck
            kills += killed
            pauses += more
            kind = "wrong" if outcome.startswith("WRONG") else outcome or "right"
            results[kind] += 1
            if kind == "wrong":
                print(f"seed {seed}: {outcome}", flush=True)
    seconds, jobs = time.monotonic() - began, sum(results.values())
    longest = f", pauses median {statistics.median(pauses):.2f} s, longest {max(pauses):.2f} s" if pauses else ""
    print(f"{jobs} jobs, {faults} faults, {kills} ranks killed, {results}{longest}; {seconds:.0f} s", flush=True)
    if options.json:
        figures = {
            "jobs": jobs,
            "faults": faults,
            "killed": kills,
            "results": results,
            "pauses_s": sorted(pauses),
        }
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    sys.exit(results["wrong"] > 0)


if __name__ == "__main__":
    main()
