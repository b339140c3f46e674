"""Deaths at fixed moments that random kills seldom hit.

They hit a worker of a DataLoader, a recovery, the middle of a large call, a checkpoint, the launcher, and a stopped
rank. One job has most of these deaths, one after the other. It ends with the weights of a job without deaths.

The rank program patches the calls in which a rank must die. ``slot`` and ``start`` select the process to kill.
``start`` is 0 for the first process of a rank, and 1 for its first replacement.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import warm
from support.marked import Marked, wait_for

HEAD = """
import os, signal, sys, threading, time
from pathlib import Path
import torch
import allranks as dist
from allranks._group.process_group import ProcessGroup
from allranks._elastic.training import handover

FOLDER = Path(os.environ["FOLDER"])
slot, start = int(os.environ["RANK"]), int(os.environ["ALLRANKS_START"])
torch.set_num_threads(1)


def die(why):
    with (FOLDER / "deaths").open("a") as file:
        print(slot, start, why, file=file)
    os.kill(os.getpid(), signal.SIGKILL)


def after_some(name, verb, act):
    # Calls act in the second message of tensors of a handover.
    count, inner, outer = [0, False], getattr(ProcessGroup, verb), getattr(handover, name)

    def message(self, tensor, *more):
        if count[1] and tensor.is_floating_point():
            count[0] += 1
            if count[0] == 2:
                act()
        return inner(self, tensor, *more)

    def within(*given):
        count[1] = True
        try:
            return outer(*given)
        finally:
            count[1] = False

    setattr(ProcessGroup, verb, message)
    setattr(handover, name, within)
"""

PROGRAM = (
    HEAD
    + """
import hashlib
from torch.utils.data import DataLoader

HIT = os.environ["HIT"] == "1"
LARGE = 16 << 20  # floats: 64 MB
AGAIN = 8  # the first step with a large call


def deadly(rank, start_, step):
    return HIT and (slot, start) == (rank, start_) and state.steps_done == step


if HIT and (slot, start) == (0, 1):
    after_some("send", "send", lambda: die("donor"))
if HIT and (slot, start) == (2, 1):
    after_some("receive", "recv", lambda: die("receiver"))
fsync = os.fsync
if HIT and (slot, start) == (1, 1):
    def deadly_fsync(fd):
        if threading.current_thread() is not threading.main_thread():
            die("checkpoint")
        fsync(fd)
    os.fsync = deadly_fsync


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 77

    def __getitem__(self, index):
        with (FOLDER / "workers").open("a") as file:
            print(os.getpid(), file=file)
        return torch.tensor([index / 77.0])


def in_the_middle_of(tensor):
    # Ends this process when the call has written the first numbers of its result, and not yet the last ones.
    old, run = tensor[0].item(), True
    def watch():
        while run and tensor[0].item() == old:
            pass
        if run and tensor[-1].item() == old:
            die("all_reduce")
    thread = threading.Thread(target=watch)
    thread.start()
    dist.all_reduce(tensor)
    run = False
    thread.join()


dist.init_process_group(timeout=60)
torch.manual_seed(1)
nn = torch.nn
model = nn.Sequential(nn.Linear(1, 300), nn.Tanh(), nn.Linear(300, 300), nn.Linear(300, 1))
wrapped = dist.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
sampler = dist.data.DistributedSampler(Samples())
loader = DataLoader(Samples(), batch_size=4, sampler=sampler, num_workers=2)
seen, total = torch.zeros(77), torch.zeros(1, dtype=torch.float64)
state = dist.resilience.State(
    model=wrapped,
    optimizer=optimizer,
    seen=seen,
    total=total,
    checkpoints=dist.resilience.Checkpoints(FOLDER / f"checkpoints{HIT}", every=7),
)
for epoch in state.epochs(2):
    sampler.set_epoch(epoch)
    for step in state.steps(loader):
        with step:
            if deadly(0, 0, 2):
                children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
                workers = set(children) & set((FOLDER / "workers").read_text().split())
                os.kill(int(workers.pop()), signal.SIGKILL)
                time.sleep(20)  # torch interrupts it
            if deadly(2, 0, 4) or deadly(1, 0, 5):
                die("step")
            optimizer.zero_grad()
            (wrapped(step.batch) - step.batch.sin()).square().mean().backward()
            samples = (step.batch * 77).round().long().flatten()
            dealt = torch.zeros(77).index_add(0, samples, torch.ones(len(samples)))
            dist.all_reduce(dealt)
            if state.steps_done >= AGAIN:
                large = torch.full((LARGE,), float(dist.get_rank() + state.steps_done))
                if HIT and (slot, start) == (1, 2):
                    in_the_middle_of(large)
                else:
                    dist.all_reduce(large)
                assert (large[0], large[-1]) == (3.0 * state.steps_done + 3,) * 2
            step.commit()
            seen += dealt
            if state.steps_done >= AGAIN:
                total += large.mean(dtype=torch.float64)
            optimizer.step()
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]
print("end", slot, digest, total.item(), bool((seen >= 2).all()), int(seen.sum()), flush=True)
"""
)


def _environ(folder: Path, **more: str) -> dict[str, str]:
    return os.environ | {"FOLDER": str(folder)} | more


def _words(folder: Path, program: str, *options: str) -> list[str]:
    script = folder / "program.py"
    script.write_text(program)
    return [sys.executable, "-m", "allranks", "run", "-n", "3", "--elastic", "2", *options, str(script)]


def _ends(out: str) -> list[str]:
    return sorted(line.partition("end ")[2] for line in out.splitlines() if "end " in line)


def _is_there(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


STOPPED = (
    HEAD
    + """
dist.init_process_group(timeout=3)
weight = torch.zeros(3)
state = dist.resilience.State(weight=weight)
path = FOLDER / "written by the one that was stopped"
try:
    for step in state.steps(1000000):
        with step:
            if slot == 1 and step.index == 10:
                path.write_text("as of step 10")
                before = weight.clone()
                pid = os.getpid()
                if os.fork() == 0:
                    time.sleep(20)
                    os.kill(pid, signal.SIGCONT)
                    os._exit(0)
                os.kill(pid, signal.SIGSTOP)
            gradient = torch.full((4,), dist.get_rank() + 1.0)
            gradient[3] = (FOLDER / "back").exists()
            dist.all_reduce(gradient)
            step.commit()
            weight += gradient[:3]
            if slot == 1 and step.index >= 10:
                path.write_text("after the stop")
            time.sleep(0.02)
        if gradient[3]:
            break
    assert weight.tolist() == [6.0 * 10 + 3.0 * (step.index - 9)] * 3
    print("end", dist.get_rank(), dist.get_world_size(), flush=True)
except dist.ExcludedError as error:
    assert weight.equal(before) and path.read_text() == "as of step 10"
    with path.open("a") as file:
        print(f"; {error}", file=file, end="")
    (FOLDER / "back").touch()
    raise
"""
)


@pytest.fixture(scope="module", autouse=True)
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Start a job that mostly waits, so it runs concurrently with the other tests of this file."""
    folder = tmp_path_factory.mktemp("stopped")
    words, environ = _words(folder, STOPPED), _environ(folder)
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) as job:
        yield job, folder
        job.kill()


def test_consecutive_deaths_do_not_change_the_final_weights(tmp_path: Path) -> None:
    done = []
    for hit in ("0", "1"):
        words, environ = _words(tmp_path, PROGRAM), _environ(tmp_path, HIT=hit)
        done.append(warm.run(words, timeout=110, env=environ))
    calm, job = done
    assert calm.returncode == 0, calm
    assert job.returncode == 0, job
    assert [end.split()[3:] for end in _ends(calm.stdout)] == [["True", "156"]] * 3
    assert _ends(job.stdout) == _ends(calm.stdout)
    assert "DataLoader worker" in job.stderr
    assert "rank 0 (pid" in job.stderr
    deaths = (tmp_path / "deaths").read_text().splitlines()
    # The donor and the receiver die in one handover, in either order.
    assert sorted(deaths) == sorted(
        ["2 0 step", "0 1 donor", "2 1 receiver", "1 0 step", "1 1 checkpoint", "1 2 all_reduce"]
    ), job.stderr
    assert not [pid for pid in set((tmp_path / "workers").read_text().split()) if _is_there(int(pid))]


RECEIVERS = (
    HEAD
    + """
if slot == 3 and 0 < start < 3:
    after_some("receive", "recv", lambda: die("receiver"))


def stop_the_launcher():
    launcher = os.getppid()
    if os.fork() == 0:
        time.sleep(1.5)
        os.kill(launcher, signal.SIGCONT)
        os._exit(0)
    os.kill(launcher, signal.SIGSTOP)


dist.init_process_group(timeout=60)
weight, other = torch.zeros(1 << 20), torch.zeros(1 << 20)  # more than is sent before it is received
state = dist.resilience.State(weight=weight, other=other)
for epoch in state.epochs(2):
    for step in state.steps(20 if epoch else 1000000):
        with step:
            if start == 0 and slot >= 2 and (epoch, step.index) == (0, 4):
                if slot == 2:
                    stop_the_launcher()
                die("step")
            gradient = torch.tensor([dist.get_rank() + 1.0])
            dist.all_reduce(gradient)
            step.commit()
            weight += gradient
        if epoch == 0 and state.replaced:
            break
print("end", slot, dist.get_world_size(), weight[-1].item(), state.replaced, state.lost, flush=True)
"""
)


def test_process_that_dies_repeatedly_while_receiving_the_state_is_replaced(tmp_path: Path) -> None:
    """Kill one of two receivers twice, although the other receiver and its donor have finished.

    The recovery must succeed on all ranks or on none. The program leaves a section if ranks were replaced, so all ranks
    must detect the replacement in the same step. The launcher serves the store. After the first loss it does not
    respond for 1.5 s, as on a busy host.
    """
    words = [*_words(tmp_path, RECEIVERS)]
    words[words.index("-n") + 1] = "4"
    job = warm.run(words, timeout=110, env=_environ(tmp_path))
    assert job.returncode == 0, job
    deaths = (tmp_path / "deaths").read_text().splitlines()
    assert sorted(deaths[:2]) == ["2 0 step", "3 0 step"]
    assert deaths[2:] == [f"3 {start} receiver" for start in (1, 2)]
    assert _ends(job.stdout) == [f"{slot} 4 250.0 4 4" for slot in range(4)], job


# Rank 1 is lost and replaced. The job ends long before the end of the loop.
HEALED = """
dist.init_process_group(timeout=60)
state = dist.resilience.State(weight=torch.zeros(1 << 20), other=torch.zeros(1 << 20))
for step in state.steps(1_000_000):
    with step:
        if (slot, start, step.index) == (1, 0, 3):
            die("step")
        dist.barrier()
"""

STATELESS = (
    HEAD
    + """
(FOLDER / f"pid{slot}").write_text(str(os.getpid()))


def kill_others():
    for other in (0, 2):
        os.kill(int((FOLDER / f"pid{other}").read_text()), signal.SIGKILL)


if (slot, start) == (1, 1):
    after_some("receive", "recv", kill_others)
"""
    + HEALED
)


def test_job_stops_immediately_if_the_last_ranks_with_the_state_are_lost(tmp_path: Path) -> None:
    """Kill them while a replacement process receives the state. No rank may restart once the loss is known."""
    words, environ = _words(tmp_path, STATELESS, "--elastic", "1"), _environ(tmp_path)
    job = warm.run(words, timeout=110, env=environ)
    assert job.returncode == 1, job
    assert job.stderr.count("; restarted (1 of 3)") == job.stderr.count("restarted") == 3, job
    assert job.stderr.count("no remaining rank has the complete state of the program; the job stops") == 1, job
    assert "all ranks that had the state of the training are lost" in job.stderr


ORPHANED = (
    HEAD
    + """
(FOLDER / "store").write_text(os.environ["ALLRANKS_STORE"])


def halt():
    (FOLDER / "healing").touch()
    time.sleep(100)


if (slot, start) == (1, 1):
    after_some("receive", "recv", halt)
"""
    + HEALED
)


def test_ranks_exit_if_the_launcher_is_killed_during_recovery(tmp_path: Path) -> None:
    """Kill the launcher while a rank waits for the rest of its state. No process remains that could decide."""
    marked = Marked(tmp_path)
    job = marked.open(_words(tmp_path, ORPHANED), _environ(tmp_path))
    try:
        wait_for(lambda: (tmp_path / "healing").exists() or job.poll() is not None, 60)
        assert job.poll() is None, job.communicate()
        assert len(marked.alive()) >= 4
        store = (tmp_path / "store").read_text().partition("@")[2]
        assert store in Path("/proc/net/unix").read_text()
        job.kill()
        _, errors = job.communicate(timeout=60)
        assert marked.wait_gone(30) == []
        assert b"rank 1 (pid " in errors
        assert not list(Path("/dev/shm").glob(f"*{job.pid}*"))
        assert store not in Path("/proc/net/unix").read_text()
    finally:
        marked.end(30)


def test_rank_that_was_stopped_for_20_s_exits_as_excluded(stopped: tuple[subprocess.Popen[str], Path]) -> None:
    job, folder = stopped
    out, errors = job.communicate(timeout=60)
    assert job.returncode == 0, errors
    assert _ends(out) == ["0 2", "1 2"]
    assert "rank 1 exited because the other ranks had continued without it" in errors
    written = (folder / "written by the one that was stopped").read_text()
    assert written.startswith("as of step 10; rank 1 ("), written
    assert "ranks 0, 2 continued without it" in written
    assert "Exit this process: the job does not use its results any more" in written
