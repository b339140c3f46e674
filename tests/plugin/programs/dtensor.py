"""DTensor, tensor parallelism, and functional collectives, eager and compiled."""

import contextlib

import torch
import torch.distributed as td
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as with_gradients
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, ones, zeros
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)


def _mesh():
    return init_device_mesh("cpu", (td.get_world_size(),), mesh_dim_names=("all",))


def _mine(*shape):
    generator = torch.Generator().manual_seed(td.get_rank())
    return torch.randn(*shape, generator=generator)


def layouts():
    mesh = _mesh()
    whole = torch.arange(35.0).reshape(7, 5)  # uneven shards
    results = []
    for given in (Shard(0), Shard(1), Replicate()):
        tensor = distribute_tensor(whole, mesh, [given])
        for wanted in (Shard(0), Shard(1), Replicate()):
            results.append(tensor.redistribute(mesh, [wanted]).to_local().clone())
    partial = DTensor.from_local(_mine(4, 6), mesh, [Partial()])
    results += [partial.redistribute(mesh, [wanted]).to_local() for wanted in (Shard(0), Shard(1), Replicate())]
    results += [DTensor.from_local(_mine(4), mesh, [Partial(op)]).full_tensor() for op in ("avg", "max", "min")]
    return results


def arithmetic():
    mesh = _mesh()
    torch.manual_seed(0)
    a, b = torch.randn(6, 8), torch.randn(8, 4)
    results = []
    for left, right in ((Shard(0), Replicate()), (Replicate(), Shard(1)), (Shard(1), Shard(0))):
        x = distribute_tensor(a, mesh, [left]).requires_grad_()
        y = distribute_tensor(b, mesh, [right]).requires_grad_()
        out = torch.relu(x @ y).sum(1).softmax(0)
        out.max().full_tensor().backward()
        results += [out.full_tensor(), x.grad.full_tensor(), y.grad.full_tensor()]
    made = ones(6, 3, device_mesh=mesh, placements=[Shard(0)]) + zeros(6, 3, device_mesh=mesh, placements=[Shard(0)])
    doubled = local_map(lambda t: 2 * t, out_placements=[Shard(0)])(made)
    return [*results, doubled.full_tensor(), doubled.std().full_tensor()]


class _Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.norm = nn.LayerNorm(8)
        self.wide = nn.Linear(8, 16)
        self.narrow = nn.Linear(16, 8)
        self.out = nn.Linear(8, 12)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.out(x + self.narrow(torch.relu(self.wide(self.norm(x)))))


def tensor_parallel():
    mesh = _mesh()
    results = []
    sequence = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "wide": ColwiseParallel(input_layouts=Shard(1)),
        "narrow": RowwiseParallel(output_layouts=Shard(1)),
        "out": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    plain = {
        "wide": ColwiseParallel(),
        "narrow": RowwiseParallel(),
        "out": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate(), use_local_output=True),
        "embedding": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Replicate()),
    }
    for plan, loss_context in ((sequence, loss_parallel), (plain, contextlib.nullcontext)):
        torch.manual_seed(3)
        model = parallelize_module(_Layer(), mesh, plan)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)
        tokens = torch.arange(8).reshape(2, 4)
        for _ in range(2):
            with loss_context():
                loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            results.append(loss.full_tensor() if isinstance(loss, DTensor) else loss.detach())
        results += [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]
    return results


def functional_collectives():
    group, rank, size = td.group.WORLD, td.get_rank(), td.get_world_size()
    some = [_mine(4, 3), _mine(2, 6)]
    results = [
        *(functional.all_reduce(_mine(4, 3), op, group) for op in ("sum", "avg", "min", "max", "product")),
        *functional.all_reduce_coalesced([t.clone() for t in some], "sum", group),
        *(functional.all_gather_tensor(_mine(4, 3), dim, group) for dim in (0, 1)),
        *functional.all_gather_into_tensor_coalesced(some, group),
        *(functional.reduce_scatter_tensor(_mine(4, 6), op, dim, group) for op in ("sum", "avg") for dim in (0, 1)),
        *functional.reduce_scatter_tensor_coalesced(some, "sum", [0, 1], group),
        functional.all_to_all_single(_mine(4, 3), None, None, group),
        functional.all_to_all_single(
            _mine(3 * size, 2), [2, 1] if rank == 0 else [4, 5], [2, 4] if rank == 0 else [1, 5], group
        ),
        functional.broadcast(_mine(4), 1, group),
        functional.permute_tensor(_mine(4), [1, 0], group),
        functional.all_reduce(_mine(4), "sum", [0, 1]),
        functional.all_reduce(_mine(4), "sum", _mesh()),
        functional.all_reduce(_mine(4), "sum", (_mesh(), 0)),
    ]
    return [functional.wait_tensor(t).clone() for t in results]


def collectives_with_gradients():
    group, size = td.group.WORLD, td.get_world_size()
    calls = [
        lambda t: functional.all_gather_tensor_autograd(t, 0, group),
        lambda t: functional.reduce_scatter_tensor_autograd(t, "sum", 0, group),
        lambda t: functional.all_to_all_single_autograd(t, None, None, group),
        lambda t: functional.all_reduce(t, "sum", group),
        lambda t: with_gradients.all_reduce(t),
        lambda t: with_gradients.broadcast(t, 1),
        lambda t: torch.cat(with_gradients.all_gather(t)),
        lambda t: torch.cat(with_gradients.all_to_all([torch.empty(2, 3) for _ in range(size)], list(t.chunk(size)))),
        lambda t: with_gradients.all_to_all_single(torch.empty(4, 3), t),
        lambda t: with_gradients.reduce_scatter(torch.empty(2, 3), list(t.chunk(size))),
        lambda t: with_gradients.reduce(t, 0) if td.get_rank() == 0 else with_gradients.reduce(t, 0) * 0,
        lambda t: torch.cat(with_gradients.gather(t, 1)),
        lambda t: with_gradients.scatter(list(t.chunk(size)), 1),
    ]
    results = []
    for call in calls:
        x = _mine(4, 3).requires_grad_()
        out = call(x)
        (out * torch.arange(out.numel()).reshape(out.shape)).sum().backward()
        results += [out.detach().clone(), x.grad]
    return results


def compiled_collectives():
    torch._dynamo.reset()
    group, size = td.group.WORLD, td.get_world_size()

    def step(x):
        y = functional.all_gather_tensor(x * 2, 0, group)
        y = functional.reduce_scatter_tensor(y.relu() + 1, "avg", 0, group)
        out = torch.empty(size * 4, 3)
        td.all_gather_into_tensor(out, y)  # torch replaces it by a functional collective
        total = x.sum()
        td.all_reduce(total)
        return out, functional.all_reduce(y, "sum", group) / total

    compiled = torch.compile(step, fullgraph=True)
    return [*compiled(_mine(4, 3)), *compiled(_mine(4, 3) + 1), *step(_mine(4, 3))]


def mesh_from_a_group():
    mesh = DeviceMesh.from_group(td.new_group(), "cpu")
    return distribute_tensor(torch.arange(6.0), mesh, [Shard(0)]).sum().full_tensor(), mesh.get_coordinate()
