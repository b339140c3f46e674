"""torch's DistributedDataParallel, its hooks, and the optimizers used with it."""

import copy

import torch
import torch.distributed as td
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging import averagers, hierarchical_model_averager, utils
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from support.worlds import refusal


class _Branches(nn.Module):
    """Model with layers for several buckets; ``branch`` selects one of two layers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 64)
        self.branches = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.norm = nn.BatchNorm1d(64)
        self.last = nn.Linear(64, 4)

    def forward(self, x, branch=None):
        x = torch.tanh(self.first(x))
        for i, layer in enumerate(self.branches):
            if branch in (None, i):
                x = torch.tanh(layer(x))
        return self.last(self.norm(x))


def _batch(step, rows=6):
    generator = torch.Generator().manual_seed(100 * step + td.get_rank())
    return torch.randn(rows, 8, generator=generator), torch.randn(rows, 4, generator=generator)


def _state(model, optimizer=None):
    model = getattr(model, "module", model)
    gradients = [p.grad if p.grad is None else p.grad.detach().clone() for p in model.parameters()]
    kept = {"gradients": gradients, "weights": copy.deepcopy(model.state_dict())}
    return kept if optimizer is None else kept | {"optimizer": copy.deepcopy(optimizer.state_dict())}


def _trained(model, steps=3, optimizer=None, branches=(None,)):
    """Train the model; return its state after each step."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    states = []
    for step in range(steps):
        optimizer.zero_grad()
        x, y = _batch(step)
        branch = branches[step % len(branches)]
        out = model(x) if branch is None else model(x, branch)
        nn.functional.mse_loss(out.float(), y).backward()
        optimizer.step()
        states.append(_state(model))
    return states


def _ddp(**options):
    return DistributedDataParallel(_Branches(), **options)


def plain():
    return _trained(_ddp())


def small_buckets_as_views():
    return _trained(_ddp(bucket_cap_mb=0.001, gradient_as_bucket_view=True))


def unused_parameters():
    return _trained(_ddp(find_unused_parameters=True, bucket_cap_mb=0.001), branches=[td.get_rank(), 0, None])


def static_graph():
    return _trained(_ddp(static_graph=True, bucket_cap_mb=0.001), branches=[1])


def buffers_of_rank_0_or_each():
    return [_trained(_ddp(broadcast_buffers=given)) for given in (True, False)]


def sync_batch_norm():
    """Return the error of SyncBatchNorm, which torch supports only on GPUs."""
    return refusal(lambda: _trained(DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(_Branches()))))


def accumulation_without_sync():
    model = _ddp()
    with model.no_sync():
        model(_batch(0)[0]).sum().backward()
        local = _state(model)
    model(_batch(1)[0]).sum().backward()
    return local, _state(model)


def uneven_inputs():
    """Train with more inputs on rank 1.

    The model has no batch norm, because its buffers could then come from any rank.
    """
    results = []
    for divide in (True, False):
        model = DistributedDataParallel(nn.Linear(8, 4), bucket_cap_mb=0.0001)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
        with Join([model, optimizer], divide_by_initial_world_size=divide):
            for step in range(2 + 3 * td.get_rank()):
                optimizer.zero_grad()
                model(_batch(step)[0]).sum().backward()
                optimizer.step()
        results.append(_state(model))
    return results


def builtin_hooks():
    results = []
    for kind in (td.BuiltinCommHookType.ALLREDUCE, td.BuiltinCommHookType.FP16_COMPRESS):
        model = _ddp(bucket_cap_mb=0.001)
        model._register_builtin_comm_hook(kind)
        results.append(_trained(model))
    return results


def hooks():
    results = []
    for hook in (
        default_hooks.allreduce_hook,
        default_hooks.fp16_compress_hook,
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
        debugging_hooks.noop_hook,
    ):
        model = _ddp(bucket_cap_mb=0.001, gradient_as_bucket_view=True)
        model.register_comm_hook(None, hook)
        results.append(_trained(model, 2))
    return results


def power_sgd():
    results = []
    for warm_start in (True, False):
        model = _ddp()  # one bucket: with several, gloo's two threads deadlock
        hook_state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=2, warm_start=warm_start, random_seed=3
        )
        model.register_comm_hook(hook_state, powerSGD_hook.powerSGD_hook)
        results.append(_trained(model, 5))
    return results


def hook_that_calls_again_in_callbacks():
    """Make a second call in the callback of a hook, in one bucket: with several, gloo's two threads deadlock."""

    def hook(_, bucket):
        def again(future):
            tensor = future.value()[0]
            td.all_reduce(tensor)
            return tensor / 3

        return td.all_reduce(bucket.buffer(), async_op=True).get_future().then(again)

    model = _ddp()
    model.register_comm_hook(None, hook)
    return _trained(model)


def optimizer_in_backward():
    results = []
    for as_view in (True, False):
        model = _ddp(gradient_as_bucket_view=as_view)
        optimizer = torch.optim.SGD
        model._register_fused_optim(optimizer, lr=0.1)
        for step in range(2):
            model(_batch(step)[0]).sum().backward()
        results.append(_state(model))
    return results


def mixed_precision():
    from torch.nn.parallel.distributed import _MixedPrecision

    policy = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    return refusal(lambda: _trained(_ddp(mixed_precision=policy)))


def sub_groups_and_meshes():
    alone = td.new_subgroups(1)[0]
    reverse = td.new_group([1, 0])
    mesh = init_device_mesh("cpu", (td.get_world_size(),))
    return [
        _trained(_ddp(**given))
        for given in ({"process_group": alone}, {"process_group": reverse}, {"device_mesh": mesh})
    ]


def checkpointed_layers():
    """Train with re-entrant checkpoints, which call backward within backward."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.last = nn.Linear(8, 4)

        def forward(self, x):
            x = x.requires_grad_()
            for layer in self.layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
            return self.last(x)

    return _trained(DistributedDataParallel(Checkpointed(), static_graph=True, bucket_cap_mb=0.0001))


def sparse_gradients():
    inner = nn.EmbeddingBag(20, 3, sparse=True, mode="sum")
    model = DistributedDataParallel(inner)
    for step in range(2):
        rows = torch.tensor([[step, 5 + td.get_rank(), 7], [3, 2, td.get_rank()]])
        model(rows).sum().backward()
    gradient = inner.weight.grad.coalesce()
    return gradient.indices(), gradient.values()


def zero_redundancy():
    results = []
    for options in ({}, {"parameters_as_bucket_view": True}):
        model = _ddp()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01, **options)
        results.append(_trained(model, optimizer=optimizer))
        optimizer.consolidate_state_dict(to=1)
        if td.get_rank() == 1:
            results.append(optimizer.state_dict()["state"])
    return results


def local_sgd():
    model = _ddp()
    hook_state = post_localSGD_hook.PostLocalSGDState(None, td.new_subgroups(1)[0], start_localSGD_iter=2)
    model.register_comm_hook(hook_state, post_localSGD_hook.post_localSGD_hook)
    averager = averagers.PeriodicModelAverager(period=2, warmup_steps=2)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
    return _trained(model, 6, optimizer)


def model_averaging():
    model = _Branches()
    with torch.no_grad():
        for p in model.parameters():
            p += td.get_rank()
    utils.average_parameters(model.parameters(), td.group.WORLD)
    results = [_state(model)]
    averager = hierarchical_model_averager.HierarchicalModelAverager({2: td.get_world_size()}, warmup_steps=0)
    for _ in range(3):
        with torch.no_grad():
            for p in model.parameters():
                p += td.get_rank()
                p.grad = torch.zeros_like(p)
        averager.average_parameters(list(model.parameters()))
        results.append(_state(model))
    return results


def logging_data():
    data = _ddp()._get_ddp_logging_data()
    return {key: data[key] for key in ("world_size", "rank", "module_name", "bucket_cap_bytes", "has_sync_bn")}


def compiled():
    torch._dynamo.reset()
    model = _ddp()
    return _trained(torch.compile(model, backend="aot_eager"))
