"""Programs that need four ranks: meshes of two dimensions, and models that PyTorch distributes over them."""

import torch
import torch.distributed as td
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(8, 16)
        self.narrow = nn.Linear(16, 8)

    def forward(self, x):
        return x + self.narrow(torch.tanh(self.wide(x)))


def _batch(seed):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def _here(tensors):
    return [t.to_local().clone() if hasattr(t, "to_local") else t.detach().clone() for t in tensors]


def _trained(model, seed, steps=2):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(_batch(10 * step + seed)).pow(2).mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    return losses, _here(model.parameters())


def hybrid_sharding():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(_Block(), _Block())
    for block in model:
        fully_shard(block, mesh=mesh)
    results = [_trained(fully_shard(model, mesh=mesh), td.get_rank())]
    for strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2):
        wrapped = FullyShardedDataParallel(
            _Block(), device_mesh=mesh, sharding_strategy=strategy, use_orig_params=True, device_id=torch.device("cpu")
        )
        results.append(_trained(wrapped, td.get_rank()))
    return results


def tensor_and_data_parallel():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plan = {"0.wide": ColwiseParallel(), "0.narrow": RowwiseParallel()}
    results = []
    for data_parallel in (
        lambda model: fully_shard(model, mesh=mesh["data"]),
        lambda model: DistributedDataParallel(model, device_mesh=mesh["data"]),
    ):
        model = parallelize_module(nn.Sequential(_Block()), mesh["tensor"], plan)
        try:
            results.append(_trained(data_parallel(model), mesh.get_local_rank("data")))
        except (RuntimeError, ValueError) as refused:
            results.append(str(refused)[:40])
    return results


def redistribution_on_two_dimensions():
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(60.0).reshape(10, 6)
    layouts = [
        (Shard(0), Shard(1)),
        (Shard(1), Shard(0)),
        (Shard(0), Shard(0)),
        (Replicate(), Shard(1)),
        (Replicate(),) * 2,
    ]
    results = []
    for given in layouts:
        tensor = distribute_tensor(whole, mesh, given)
        for wanted in layouts:
            moved = tensor.redistribute(mesh, wanted)
            results.append(moved.to_local().clone())
            assert torch.equal(moved.full_tensor(), whole)
    partial = distribute_tensor(whole, mesh, (Replicate(), Shard(0))).sum(0)
    assert partial.placements[1] == Partial()
    return results, partial.full_tensor()


def meshes_are_cut_and_flattened():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    flat = mesh[("data", "tensor")]._flatten("all")
    seen = []
    for part in (mesh["data"], mesh["tensor"], flat):
        group = part.get_group()
        tensor = torch.tensor([2.0 ** td.get_rank()])
        td.all_reduce(tensor, group=group)
        seen.append((tensor, td.get_process_group_ranks(group), td.get_backend(group) == td.get_backend()))
    return seen, mesh.get_coordinate()


def pipelines():
    """Run pipelines with one stage on each rank, and with two stages on each rank."""
    rank, size = td.get_rank(), td.get_world_size()
    results = []
    for schedule_class, per_rank in ((ScheduleGPipe, 1), (Schedule1F1B, 1), (ScheduleInterleaved1F1B, 2)):
        torch.manual_seed(4)
        blocks = [_Block() for _ in range(size * per_rank)]
        mine = [blocks[rank + size * i] for i in range(per_rank)]
        stages = [
            PipelineStage(block, rank + size * i, size * per_rank, torch.device("cpu")) for i, block in enumerate(mine)
        ]
        schedule = schedule_class(
            stages if per_rank > 1 else stages[0],
            n_microbatches=4,
            loss_fn=lambda out, target: (out - target).pow(2).sum(),
        )
        losses = []
        x, target = _batch(1), _batch(2)
        for _ in range(2):
            given = (x,) if rank == 0 else ()
            wanted = {"target": target, "losses": losses} if rank == size - 1 else {}
            schedule.step(*given, **wanted)
        results.append((losses, [p.grad.clone() for block in mine for p in block.parameters()]))
    return results


def subgroups():
    mine, all_of_them = td.new_subgroups(2)
    by_list, _ = td.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    some = td.new_group([3, 1])
    seen = [[td.get_process_group_ranks(group) for group in all_of_them]]
    for group in (mine, by_list):
        tensor = torch.tensor([10.0 ** td.get_rank()])
        td.all_reduce(tensor, group=group)
        gathered = [None] * td.get_world_size(group)
        td.all_gather_object(gathered, {"rank": td.get_rank()}, group=group)
        seen.append((tensor, gathered, td.get_rank(group), td.get_group_rank(group, td.get_rank())))
    if td.get_rank() in (1, 3):
        tensor = torch.tensor([td.get_rank()])
        td.broadcast(tensor, src=3, group=some)
        td.broadcast(tensor.clone(), group_src=1, group=some)
        seen.append((tensor, td.get_global_rank(some, 1), td.get_process_group_ranks(some)))
    else:
        seen.append(some == td.GroupMember.NON_GROUP_MEMBER)
    return seen
