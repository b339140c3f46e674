"""``allranks run`` in a real SLURM: as launcher of an allocation, as one agent per node, or as one rank of several."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.jobs import Done, Jobs, finish, jobs, read_until
from support.prompt import COMMAND_S
from support.slot_watch import SLOT_WATCH
from support.slurm import Slurm

RUN = (sys.executable, "-m", "allranks", "run")
MEET = """
    import os, socket, torch, allranks as dist
    dist.init_process_group()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    print("meet", int(tensor), dist.get_rank(), os.environ.get("LOCAL_RANK", "-"), socket.gethostname(), flush=True)
    dist.destroy_process_group()
"""
FAIL = """
    import os, sys, time
    print("up", flush=True)
    if os.environ["RANK"] == "3":
        time.sleep(0.3)
        sys.exit(9)
    time.sleep(100)
"""


@pytest.fixture
def job(slurm: Slurm, tmp_path: Path) -> Iterator[Jobs]:
    with jobs(slurm.hosts, slurm.environ, tmp_path, patience_s=20) as made:  # the daemons of SLURM are slow
        yield made


def said(done: Done) -> list[str]:
    """Return the output of the ranks without prefixes, ordered by rank."""
    found = re.findall(r"meet (\d+ \d+ \S+ \S+)", done.out)
    return sorted(found, key=lambda line: int(line.split()[1]))


def test_salloc_starts_ranks_on_all_nodes(job: Jobs) -> None:
    """One rank on each node for each task that the allocation has on the node."""
    done = finish(job.start_any(0, "salloc", "-N2", "--ntasks-per-node=2", *RUN, job.write(MEET), torch=True))
    assert (done.code, said(done)) == (0, ["4 0 0 node0", "4 1 1 node0", "4 2 0 node1", "4 3 1 node1"]), done


HETEROGENEOUS = ("salloc", "-N1", "-n1", ":", "-N1", "-n2")


def test_a_heterogeneous_allocation_is_one_job(job: Jobs) -> None:
    """Components whose nodes can differ in kind and size."""
    done = finish(job.start_any(0, *HETEROGENEOUS, *RUN, job.write(MEET), torch=True))
    assert (done.code, said(done)) == (0, ["3 0 0 node0", "3 1 0 node1", "3 2 1 node1"]), done


def test_tasks_of_a_heterogeneous_step_are_ranks(job: Jobs) -> None:
    srun = ("srun", "--het-group=0,1", sys.executable, job.write(MEET))
    done = finish(job.start_any(0, *HETEROGENEOUS, *srun, torch=True))
    assert (done.code, said(done)) == (0, ["3 0 - node0", "3 1 - node1", "3 2 - node1"]), done


def test_agent_gets_all_cpus_of_its_node(job: Jobs) -> None:
    """sbatch's variables for srun would limit the agent, a single task, to the CPUs of one rank."""
    shown = 'echo "$RANK: $SLURM_CPUS_ON_NODE here, $SLURM_CPUS_PER_TASK each"'
    words = ("salloc", "-N2", "--ntasks-per-node=2", "--cpus-per-task=2", *RUN, "--", "sh", "-c", shown)
    done = finish(job.start_any(0, *words, SRUN_CPUS_PER_TASK="2"))
    assert done.code == 0, done
    assert sorted(re.findall(r"\d: \d here, \d each", done.out)) == [f"{rank}: 4 here, 2 each" for rank in range(4)]


def test_sbatch_starts_ranks_on_all_nodes(job: Jobs) -> None:
    """With ``-n``, which sets the total number of ranks."""
    batch = job.folder / "job.sh"
    batch.write_text(f"#!/bin/bash\n#SBATCH -N2 -n4 -o {job.folder}/out\n{' '.join(RUN)} -n 2 {job.write(MEET)}\n")
    finish(job.start_any(0, "sbatch", str(batch), torch=True))
    await_lines(job.folder / "out", "meet", 2)
    assert said(Done(0, (job.folder / "out").read_text(), ""))[0][:3] == "2 0"


def test_allranks_run_starts_a_function_in_an_allocation(job: Jobs) -> None:
    call = "import allranks, socket; print('meet', *sorted(allranks.run(socket.gethostname)))"
    words = ("salloc", "-N2", "--ntasks-per-node=2", sys.executable, "-c", call)
    done = finish(job.start_any(0, *words, torch=True))
    assert (done.code, done.out) == (0, "meet node0 node0 node1 node1\n"), done


def test_one_task_per_node_is_an_agent(job: Jobs) -> None:
    words = ("srun", "-N2", "--ntasks-per-node=1", *RUN, "--nproc-per-node", "2", job.write(MEET))
    done = finish(job.start_any(0, *words, torch=True))
    assert (done.code, said(done)) == (0, ["4 0 0 node0", "4 1 1 node0", "4 2 0 node1", "4 3 1 node1"]), done


def test_each_of_several_tasks_of_a_node_is_a_rank(job: Jobs) -> None:
    done = finish(job.start_any(0, "srun", "-N2", "-n3", *RUN, job.write(MEET), torch=True))
    assert done.code == 0, done
    assert [line.split()[:2] for line in said(done)] == [["3", "0"], ["3", "1"], ["3", "2"]]


@pytest.mark.parametrize("words", [("salloc", "-N2", "-n4"), ("srun", "-N2", "--ntasks-per-node=1")], ids=str)
def test_a_failure_stops_all_nodes(job: Jobs, words: tuple[str, ...]) -> None:
    process = job.start_any(0, *words, *RUN, "--nproc-per-node", "2", "--grace", "60", job.write(FAIL))
    read_until(process, 4)
    began = time.monotonic()
    done = finish(process)
    assert time.monotonic() - began < COMMAND_S
    assert done.code == 9
    assert re.search(r"rank 3 \(host node1, pid \d+\) exited with code 9", done.err)


def test_scancel_reaches_the_ranks(job: Jobs, slurm: Slurm) -> None:
    """SIGTERM before SIGKILL, so that ranks can write a checkpoint, and a signal of the user's choice."""
    script = """
        import os, signal, sys, time
        def write(number, frame):
            print("got", signal.Signals(number).name, flush=True)
            if number == signal.SIGTERM:
                sys.exit(0)
        signal.signal(signal.SIGTERM, write)
        signal.signal(signal.SIGUSR1, write)
        print("up", flush=True)
        while True:
            time.sleep(0.1)
    """
    batch = job.folder / "job.sh"
    text = f"#!/bin/bash\n#SBATCH -N2 -n2 -o {job.folder}/out\nexec {' '.join(RUN)} {job.write(script)}\n"
    batch.write_text(text)
    number = finish(job.start_any(0, "sbatch", "--parsable", str(batch))).out.strip()
    out = job.folder / "out"
    await_lines(out, "up", 2)
    # to the agents and all processes that they started
    assert slurm.run("scancel", "--signal=USR1", number).returncode == 0
    await_lines(out, "got SIGUSR1", 2)
    assert slurm.run("scancel", "--signal=USR1", "--full", number).returncode == 0
    await_lines(out, "got SIGUSR1", 2)
    assert slurm.run("scancel", number).returncode == 0
    await_lines(out, "got SIGTERM", 2)


@pytest.mark.parametrize("victim", ["srun", "launcher", "agent"])
def test_killed_part_of_a_job_leaves_no_processes(job: Jobs, victim: str) -> None:
    script = job.write("import time; print('up', flush=True); time.sleep(100)")
    process = job.start_any(0, "salloc", "-N2", "-n2", *RUN, script)
    read_until(process, 2)
    words = {"srun": "srun --nodes", "launcher": "-m allranks run", "agent": "agents.serve --dial"}
    pids = [pid for pid in job.on(0 if victim != "agent" else 1, words[victim]) if "salloc" not in job.processes()[pid]]
    os.kill(min(pids), signal.SIGKILL)
    done = finish(process)
    assert done.code != 0 or victim == "launcher"  # salloc does not report that its command was killed
    assert not job.left(15)


def await_lines(path: Path, words: str, count: int) -> None:
    until = time.monotonic() + 30
    while not path.exists() or path.read_text().count(words) < count:
        assert time.monotonic() < until, path.read_text() if path.exists() else "nothing"
        time.sleep(0.05)


def test_elastic_job_survives_the_loss_of_a_node(job: Jobs) -> None:
    """srun receives an option that keeps the step after the exit of the node's agent."""
    body = """
import socket
say("start", start, socket.gethostname())
LOST = (2, 3)
if rank == 0:
    wait_for(2, 0, "gone")
    wait_for(3, 0, "gone")
    tell("end")
await_key("end")
"""
    script = job.write(SLOT_WATCH + body)
    process = job.start_any(0, "salloc", "-N2", "--ntasks-per-node=2", *RUN, "-v", "--elastic", "2", script)
    assert sorted(read_until(process, 4)) == [f"[node{r // 2}:{r}] start 0 node{r // 2}" for r in range(4)]
    for pid in job.on(1, "agents.serve"):
        os.kill(pid, signal.SIGKILL)
    done = finish(process)
    assert done.code == 0, done.err
    assert "srun --no-kill --kill-on-bad-exit=0" in done.err
    assert "; ranks 2-3 terminated with it; the other ranks continue (2 of at least 2)" in done.err


TRAINING = """
import os, signal, time
import torch
import allranks as dist
from torch.utils.data import DataLoader

SAMPLES = 96
dist.init_process_group(timeout=60)
model = torch.nn.Linear(1, 1)
wrapped = dist.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
sampler = dist.data.DistributedSampler(range(SAMPLES))
loader = DataLoader(range(SAMPLES), batch_size=4, sampler=sampler)
seen = {"sum": torch.zeros(SAMPLES)}
state = dist.resilience.State(model=wrapped, optimizer=optimizer, seen=seen, leave_on=[signal.SIGUSR1])
for step in state.steps(loader):
    with step:
        if dist.get_rank() == 0 and step.index == 2 and not os.path.exists("lost"):
            print("dealt", flush=True)
            while not os.path.exists("lost"):
                time.sleep(0.01)
        optimizer.zero_grad()
        wrapped(step.batch.float().unsqueeze(1) / SAMPLES).square().mean().backward()
        count = torch.zeros(SAMPLES).index_add(0, step.batch, torch.ones(len(step.batch)))
        dist.all_reduce(count)
        seen["sum"] = seen["sum"] + count
        optimizer.step()
weights = sum(float(p.detach().double().sum()) for p in model.parameters())
print(f"epoch {dist.get_world_size()} {weights!r} {state.lost} {bool((seen['sum'] == 1).all())}", flush=True)
for step in state.steps(1000000):
    with step:
        dist.barrier()
        time.sleep(0.01)
"""


def test_training_survives_a_lost_node_and_finishes_on_a_signal(job: Jobs, slurm: Slurm) -> None:
    """A node loses its power during an epoch. Later, the job receives the signal of sbatch --signal."""
    out = job.folder / "out"
    words = f"{' '.join(RUN)} --elastic 2 {job.write(TRAINING)}"
    directives = f"#SBATCH -N2 --ntasks-per-node=2 --no-kill -o {out}\n"
    (job.folder / "job.sh").write_text(f"#!/bin/bash\n{directives}cd {job.folder}\nexec {words}\n")
    handed_in = finish(job.start_any(0, "sbatch", "--parsable", str(job.folder / "job.sh"), torch=True))
    number = handed_in.out.strip()
    await_lines(out, "dealt", 1)
    with slurm.lost(1):
        (job.folder / "lost").touch()
        await_lines(out, "epoch", 2)
        assert slurm.run("scancel", "--signal=USR1", number).returncode == 0
        shown = await_end(slurm, number)
    assert "JobState=COMPLETED" in shown, shown + out.read_text()
    assert "ExitCode=0:0" in shown
    text = out.read_text()
    assert "; ranks 2-3 terminated with it; the other ranks continue (2 of at least 2)" in text
    ends = re.findall(r"epoch (.*)", text)
    assert len(ends) == 2
    assert len(set(ends)) == 1
    assert (ends[0].split()[0], ends[0].split()[2:]) == ("2", ["2", "True"])


def await_end(slurm: Slurm, number: str) -> str:
    """Return SLURM's record of a job after the end of the job."""
    until = time.monotonic() + 60
    while not re.search("JobState=(COMPLETED|FAILED|CANCELLED|NODE_FAIL|TIMEOUT)", shown := _shown(slurm, number)):
        assert time.monotonic() < until, shown
        time.sleep(0.1)
    return shown


def _shown(slurm: Slurm, number: str) -> str:
    return slurm.run("scontrol", "show", "job", number).stdout
