"""FSDP2 on a mesh with a replicated dimension, under losses: the final weights equal those of an undisturbed run.

A job has four ranks, and two of them have each shard. Kills are written STEP:MOMENT:RANK. The n-th kill of a rank hits
the n-th process in its rank slot.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from allranks.checkpoint import latest
from allranks.launch.ranks.environ import free_port
from support import warm

PROGRAM = """
import hashlib, os, signal, sys
import torch
import torch.distributed as td
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
import allranks as dist

torch.set_num_threads(1)
mode, begins, extents = os.environ["MODE"], os.environ["BEGINS"], eval(os.environ["MESH"])
if begins == "torch":
    td.init_process_group("allranks")
else:
    dist.init_process_group(timeout=30)
mine = [kill.split(":")[:2] for kill in os.environ["KILLS"].split() if kill.split(":")[2] == os.environ["RANK"]]
start = int(os.environ["ALLRANKS_START"])
at, moment = mine[start] if start < len(mine) else ("-1", "")
mesh = init_device_mesh("cpu", extents, mesh_dim_names=("replicate", "shard")[-len(extents):])


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(x + self.outer(F.dropout(F.relu(self.inner(x)), 0.2)))


torch.manual_seed(3)
model = nn.Sequential(nn.Linear(5, 7), *[Block(7) for _ in range(3)], nn.Linear(7, 3))
options = {}
if mode == "mixed":
    options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in model[1:4]:
    fully_shard(block, mesh=mesh, reshard_after_forward=mode != "kept", **options)
fully_shard(model, mesh=mesh, **options)
if mode == "prefetch":
    model[1].set_modules_to_forward_prefetch([model[2], model[3]])
    model[3].set_modules_to_backward_prefetch([model[2], model[1]])
    for module in (model, *model[1:4]):
        module._set_unshard_async_op(True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
history = torch.distributed.tensor.DTensor.from_local(torch.zeros(2), mesh, [td.tensor.Replicate()] * len(extents))
state = dist.resilience.State(model=model, optimizer=optimizer, scheduler=scheduler, history=history)
here = ""


def die(now, nth=1):
    if moment == now and step.steps == int(at):
        die.count += 1
        if die.count == nth:
            os.kill(os.getpid(), signal.SIGKILL)


def dying(verb, nth):
    # Their names before torch 2.12.
    old = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}
    name = verb if hasattr(td, verb) else old[verb]
    call = getattr(td, name)

    def first(*args, **named):
        die(f"{verb}{nth}", nth)
        return call(*args, **named)

    setattr(td, name, first)


die.count = 0
model[2].register_forward_pre_hook(lambda *_: die("forward"))
if moment[:-1] in ("all_gather_single", "reduce_scatter_single", "all_reduce"):
    dying(moment[:-1], int(moment[-1]))
optimizer.register_step_pre_hook(lambda *_: die("optimizer"))
for epoch in state.epochs(2):
    for step in state.steps(8):
        with step:
            step.steps = state.steps_done
            optimizer.zero_grad()
            for micro in range(2 if mode == "accumulate" else 1):
                last = mode != "accumulate" or micro == 1
                model.set_requires_gradient_sync(last)
                model.set_is_last_backward(last)
                out = model(torch.randn(6, 5))
                out.register_hook(lambda _: die("backward"))
                loss = (out**2).mean()
                loss.backward()
                die(f"micro{micro}")
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with torch.no_grad():
                history += norm.full_tensor()
            optimizer.step()
            scheduler.step()
        die("between")
weights = [*model.parameters(), history]
digest = hashlib.sha256(b"".join(w.full_tensor().detach().float().numpy().tobytes() for w in weights)).hexdigest()
print("end", dist.get_rank(), digest[:16], state.replaced, flush=True)
"""


def _run(kills: str, mode: str = "", begins: str = "allranks", mesh: str = "(2, 2)") -> tuple[list[str], str, int]:
    """Run a job. Return the final lines of the ranks, the standard error output and the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "program.py"
        script.write_text(PROGRAM)
        words = [sys.executable, "-m", "allranks", "run", "-n", "4", "--elastic", "1", str(script)]
        environ = os.environ | {"KILLS": kills, "MODE": mode, "BEGINS": begins, "MESH": mesh}
        done = warm.run(words, timeout=110, env=environ)
    ends = sorted(line.partition("end ")[2] for line in done.stdout.splitlines() if "end " in line)
    return ends, done.stderr, done.returncode


@functools.cache
def _right(mode: str) -> str:
    ends, errors, code = _run("", mode)
    assert len(ends) == 4, errors
    assert code == 0, errors
    (weights,) = {end.split()[1] for end in ends}
    return weights


MOMENTS = ["forward", "backward", "reduce_scatter_single1", "all_reduce2", "optimizer"]


@pytest.mark.parametrize("turn", range(len(MOMENTS)))
def test_loss_of_each_rank_at_each_moment_keeps_the_weights(turn: int) -> None:
    kills = [f"{2 + 3 * rank}:{MOMENTS[(turn + rank) % len(MOMENTS)]}:{rank}" for rank in range(4)]
    ends, errors, code = _run(" ".join(kills))
    assert ends == [f"{rank} {_right('')} 4" for rank in range(4)], errors
    assert errors.count("killed by SIGKILL") == 4, errors
    assert code == 0


@pytest.mark.parametrize(
    ("mode", "kills"),
    [
        ("", "3:reduce_scatter_single4:1 3:reduce_scatter_single4:2 6:all_gather_single2:0 6:all_gather_single2:1"),
        ("", "2:between:0 4:all_reduce4:2 4:all_reduce4:3 4:backward:0 9:forward:3"),
        ("accumulate", "2:micro0:1 5:micro1:2 8:reduce_scatter_single2:3"),
        ("prefetch", "2:all_gather_single3:1 5:all_gather_single6:2 8:reduce_scatter_single1:0"),
        ("kept", "2:all_reduce2:1 5:backward:2"),
        ("mixed", "2:reduce_scatter_single3:1 5:forward:0"),
    ],
)
def test_simultaneous_losses_and_other_modes_of_sharding_keep_the_weights(mode: str, kills: str) -> None:
    ends, errors, code = _run(kills, mode)
    assert [end.split()[:2] for end in ends] == [[str(rank), _right(mode)] for rank in range(4)], errors
    assert errors.count("killed by SIGKILL") == len(kills.split()), errors
    assert code == 0


def test_world_created_by_torch_survives_losses() -> None:
    ends, errors, code = _run("2:forward:1 5:all_reduce2:0", begins="torch")
    assert ends == [f"{rank} {_right('')} 2" for rank in range(4)], errors
    assert code == 0


def test_loss_of_every_copy_of_a_shard_stops_the_job() -> None:
    ends, errors, code = _run("3:backward:0 3:backward:2")
    assert not ends
    assert code
    assert "no remaining rank has the same shards of model.0.weight, model.0.bias" in errors
    assert "each rank has shards" not in errors


def test_model_without_a_replicated_dimension_causes_a_warning() -> None:
    ends, errors, code = _run("3:backward:1", mesh="(4,)")
    assert not ends
    assert code
    assert "UserWarning: State: each rank has shards of model: 0.weight that no other rank has" in errors
    assert "State: rank 1 was lost, and no remaining rank has the same shards of model.0.weight" in errors


# Every rank also computes each step alone, with the samples of all current ranks, and compares the results.
REPLICAS = """
import os, signal, sys
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import allranks as dist
from allranks.resilience import Checkpoints, State

torch.set_num_threads(1)
dist.init_process_group(timeout=100)
slot = int(os.environ["RANK"])
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
replicate, shard = mesh["replicate"], mesh["shard"]
place = shard.get_local_rank()


def net():  # shards of whole vectors, which the CPU computes as it does the same part of a whole tensor
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64))


model, plain = net(), net()
fully_shard(model[0], mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer, alone = torch.optim.AdamW(model.parameters(), lr=0.01), torch.optim.AdamW(plain.parameters(), lr=0.01)
state = State(
    model=model, optimizer=optimizer, plain=plain, alone=alone, checkpoints=Checkpoints(sys.argv[1], every=1, keep=9)
)


def check():
    for mine, right in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.device_mesh is mesh
        assert torch.equal(mine.full_tensor(), right)
        for name, value in optimizer.state.get(mine, {}).items():
            whole = value.full_tensor() if name != "step" else value
            assert torch.equal(whole, alone.state[right][name]), name
    rows = dist.get_world_size() // 2
    assert (mesh.size(0), replicate.size(), shard.size()) == (rows, rows, 2)
    assert mesh.mesh.tolist() == [[2 * row, 2 * row + 1] for row in range(rows)]
    assert list(mesh.get_coordinate()) == [*divmod(dist.get_rank(), 2)]
    assert shard.get_local_rank() == place
    for each in (replicate, shard):
        group = each.get_group()
        assert torch.distributed.get_process_group_ranks(group) == each.mesh.tolist()
        assert torch.distributed.get_world_size(group) == each.size()


def train(dies=False):
    check()
    mine = torch.randn(4, 16)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    optimizer.zero_grad()
    out = model(mine)
    if dies:
        out.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    out.square().mean().backward()
    gradients = [torch.autograd.grad(plain(each).square().mean(), plain.parameters()) for each in every]
    for parameter, *each in zip(plain.parameters(), *gradients, strict=True):
        parameter.grad = sum((a + b) / 2 for a, b in zip(each[::2], each[1::2], strict=True)) / (len(every) // 2)
    optimizer.step()
    alone.step()


for epoch in state.epochs(3):
    if epoch == 1:
        for step in state.steps(1000000 if GROWS else 6):
            with step:
                train(dies=slot == 2 and step.index == 3)
            if GROWS and step.index == 6 and dist.get_rank() == 0:
                print("alone", dist.get_world_size(), flush=True)
            if state.joined:
                break
    for step in state.steps(3):
        with step:
            train()
for step in state.steps(1):
    with step:
        check()
print("end", slot, dist.get_rank(), dist.get_world_size(), state.lost, state.joined, state.steps_done, flush=True)
"""


def test_rank_of_an_incomplete_replica_waits_until_the_job_finishes(tmp_path: Path) -> None:
    """Lose rank 2 permanently. Rank 3 has the other half of the replica and waits until the other ranks finish.

    A checkpoint is written after each step. The loss interrupts one of them, which is not a failure of rank 3.
    """
    script, folder = tmp_path / "program.py", tmp_path / "checkpoints"
    script.write_text(f"GROWS = False\n{REPLICAS}")
    words = [sys.executable, "-m", "allranks", "run", "-n", "4", "--elastic", "2", "--respawns", "0"]
    done = warm.run([*words, str(script), str(folder)], timeout=110)
    assert done.returncode == 0, done
    ends = sorted(line.partition("end ")[2].split() for line in done.stdout.splitlines() if "end " in line)
    assert [end[:4] for end in ends] == [["0", "0", "2", "2"], ["1", "1", "2", "2"]], done
    assert "State: rank 3 waits. A rank of its replica of the model is lost" in done.stderr
    assert "exited with code" not in done.stderr, done.stderr
    saved = latest(folder)
    assert saved is not None
    assert (saved.step, saved.ranks) == (int(ends[0][-1]), 2)


def test_incomplete_replica_continues_when_a_rank_joins(tmp_path: Path) -> None:
    """Lose rank 2 permanently. Rank 3 has the other half of the replica and waits until another rank joins."""
    script, folder = tmp_path / "program.py", tmp_path / "checkpoints"
    script.write_text(f"GROWS = True\n{REPLICAS}")
    words = [sys.executable, "-m", "allranks", "run", "-N", "1:2", "--master-addr", f"127.0.0.1:{free_port()}"]
    words += ["--elastic", "2:4", "--respawns", "0", "--rdzv-conf", "last_call_timeout=1", "--nproc-per-node", "4"]

    def start(node: int) -> subprocess.Popen[str]:
        options = ["--node-rank", str(node), str(script), str(folder)]
        return subprocess.Popen([*words, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    with start(0) as leader:
        assert leader.stdout is not None
        assert leader.stdout.readline().endswith("alone 2\n"), leader.communicate()
        with start(1) as later:
            out, errors = leader.communicate()
            more, _ = later.communicate()
    assert leader.returncode == later.returncode == 0, errors
    ends = sorted(line.partition("end ")[2].split() for line in (out + more).splitlines() if "end " in line)
    assert [end[:5] for end in ends] == [[slot, rank, "4", "2", "2"] for slot, rank in ("00", "11", "33", "42")], errors
