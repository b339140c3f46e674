"""torch's own DistributedDataParallel in the loop of `State`, with replaced ranks and with fewer ranks.

If ranks are replaced, the weights have the same bits as in an undisturbed run. With fewer ranks, no sample is lost or
repeated, and the weights equal those of one process that computes the same steps. tests/hosts/test_training_hosts.py
tests more ranks.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import allranks as dist
from allranks.testing import run_ranks
from support import warm

# A kill is written STEP:MOMENT:RANK. The wrappers differ in the state that a new Reducer must restore.
PROGRAM = """
import hashlib, os, signal
import torch
import torch.distributed as td
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
import allranks as dist

if BEGINS == "torch":
    td.init_process_group("allranks")
else:
    dist.init_process_group(timeout=30)
torch.set_num_threads(1)
mine = [kill.split(":")[:2] for kill in KILLS.split() if kill.split(":")[2] == os.environ["RANK"]]
at, moment = mine[0] if mine and os.environ["ALLRANKS_START"] == "0" else ("-1", "")


def die(now):
    if now == moment and step.index == int(at):
        os.kill(os.getpid(), signal.SIGKILL)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 32), nn.Linear(32, 1)
        )
        self.sometimes = nn.Linear(1, 1)

    def forward(self, x, more):
        out = self.layers(x)
        return self.sometimes(out) if more else out


torch.manual_seed(0)
small = {"bucket_cap_mb": 0.002}
wrappers = {
    "plain": DistributedDataParallel(Net(), find_unused_parameters=True, **small),
    "static": DistributedDataParallel(Net(), static_graph=True, **small),
    "views": DistributedDataParallel(Net(), gradient_as_bucket_view=True, **small),
    "hook": DistributedDataParallel(Net(), **small),
    "builtin": DistributedDataParallel(Net(), **small),
    "of_a_group": DistributedDataParallel(Net(), process_group=td.new_group(), **small),
}
wrappers["hook"].register_comm_hook(None, default_hooks.fp16_compress_hook)
wrappers["builtin"]._register_builtin_comm_hook(td.BuiltinCommHookType.FP16_COMPRESS)
optimizer = torch.optim.SGD([p for each in wrappers.values() for p in each.parameters()], lr=0.1, momentum=0.9)
state = dist.resilience.State(optimizer=optimizer, **wrappers)
for step in state.steps(16):
    with step:
        optimizer.zero_grad()
        for name, wrapper in wrappers.items():
            out = wrapper(torch.randn(8, 4), name != "plain" or (step.index + dist.get_rank()) % 3 > 0)
            if name == "hook":
                die("forward")
                out.register_hook(lambda _: die("backward"))
            out.square().mean().backward()
            if name == "static":
                die("between")
        die("commit")
        optimizer.step()
        die("after")
digest = {
    name: hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in wrapper.state_dict().values())).hexdigest()[:12]
    for name, wrapper in wrappers.items()
}
print("end", dist.get_rank(), td.get_world_size(), state.replaced, digest, flush=True)
"""


def _run(folder: Path, kills: str, begins: str = "allranks") -> tuple[list[str], str]:
    script = folder / "program.py"
    script.write_text(f"KILLS, BEGINS = {kills!r}, {begins!r}\n{PROGRAM}")
    words = [sys.executable, "-m", "allranks", "run", "-n", "3", "--elastic", "1", str(script)]
    done = warm.run(words, timeout=110)
    assert done.returncode == 0, done
    return sorted(line.partition("end ")[2] for line in done.stdout.splitlines() if "end " in line), done.stderr


def test_replaced_ranks_end_with_the_weights_of_an_undisturbed_run(tmp_path: Path) -> None:
    calm, _ = _run(tmp_path, "")
    assert len(calm) == 3
    hit, errors = _run(tmp_path, "2:backward:1 5:forward:0 5:between:2 9:commit:0", begins="torch")
    assert errors.count("killed by SIGKILL") == 3, errors
    assert hit == [end.replace("3 0", "3 3", 1) for end in calm]


SIZE, BATCH, EPOCHS = 50, 2, 2
DEATH = 3  # the step of the first epoch in which rank 1 dies


def _net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 1)).double()


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    x = batch.double().unsqueeze(1) / SIZE
    return F.mse_loss(model(x), torch.sin(6 * x))


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _alone(moment: str) -> torch.Tensor:
    """Return the weights of one process that has all samples, and averages one batch for each rank."""
    model = _net()
    optimizer = _optimizer(model)
    ranks = 3
    for epoch in range(EPOCHS):
        rest = torch.randperm(SIZE, generator=torch.Generator().manual_seed(epoch))
        step = 0
        while len(rest):
            if epoch == 0 and step == DEATH + (moment == "after"):
                ranks = 2
            batches = [rest[rank : ranks * BATCH : ranks] for rank in range(ranks)]
            rest = rest[ranks * BATCH :]
            optimizer.zero_grad()
            (sum(_loss(model, batch) for batch in batches if len(batch)) / ranks).backward()  # type: ignore[union-attr]
            optimizer.step()
            step += 1
    return _weights(model)


@pytest.mark.parametrize("moment", ["forward", "backward", "after"])
def test_remaining_ranks_average_only_over_themselves(moment: str) -> None:
    def main() -> Any:
        torch.set_num_threads(1)
        models = [_net(), _net()]
        wrappers = [
            DistributedDataParallel(models[0], bucket_cap_mb=0.001),
            DistributedDataParallel(models[1], static_graph=True, gradient_as_bucket_view=True),
        ]
        optimizers = [_optimizer(model) for model in models]
        sampler = DistributedSampler(range(SIZE))  # type: ignore[var-annotated, arg-type]
        loader = DataLoader(range(SIZE), batch_size=BATCH, sampler=sampler)  # type: ignore[arg-type, var-annotated]
        state = dist.resilience.State(a=wrappers[0], b=wrappers[1], c=optimizers[0], d=optimizers[1], local=["seen"])
        doomed = dist.get_rank() == 1
        seen = []
        for epoch in state.epochs(EPOCHS):
            sampler.set_epoch(epoch)
            seen.append(torch.zeros(SIZE))
            for step in state.steps(loader):
                dies = doomed and epoch == 0 and step.index == DEATH
                with step:
                    for wrapper, optimizer in zip(wrappers, optimizers, strict=True):
                        optimizer.zero_grad()
                        loss = _loss(wrapper, step.batch)
                        if dies and moment == "forward":
                            os.kill(os.getpid(), signal.SIGKILL)
                        if dies and moment == "backward":
                            loss.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
                        loss.backward()
                    count = torch.zeros(SIZE).index_add(0, step.batch, torch.ones(len(step.batch)))
                    dist.all_reduce(count)
                    for optimizer in optimizers:
                        optimizer.step()
                    if dies and moment == "after":
                        os.kill(os.getpid(), signal.SIGKILL)
                if step.committed:
                    seen[-1] += count
        assert torch.distributed.get_process_group_ranks(None) == [0, 1]
        return [_weights(model) for model in models], seen, state.lost

    results = run_ranks(3, main, may_die=[1])
    (first, seen, lost), (second, _, _) = results[0], results[2]
    assert lost == 1
    assert all(bool((epoch == 1).all()) for epoch in seen)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, _alone(moment), rtol=1e-9, atol=1e-12)


def test_wrappers_on_another_backend_or_on_a_subgroup_are_refused() -> None:
    def of_another_backend() -> None:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        model = DistributedDataParallel(nn.Linear(1, 1))
        torch.distributed.destroy_process_group()
        dist.init_process_group()
        with pytest.raises(dist.UsageError, match=r"State: model is torch's .* on a group of another backend"):
            dist.resilience.State(model=model)

    def of_some_ranks() -> None:
        model = DistributedDataParallel(nn.Linear(1, 1), process_group=torch.distributed.new_group([0, 1]))
        state = dist.resilience.State(model=model)

        def train() -> None:
            for step in state.steps(4):
                with step:
                    if step.index == 2 and dist.get_rank() == 1:
                        os.kill(os.getpid(), signal.SIGKILL)

        with pytest.raises(dist.UsageError, match="on a group other than the world cannot continue with a different"):
            train()

    run_ranks(1, of_another_backend, init=False)
    run_ranks(2, of_some_ranks, may_die=[1])
