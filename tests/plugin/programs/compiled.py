"""Calls under torch.compile with inductor: results, calls in the generated code, number of graph breaks."""

import re

import torch
import torch.distributed as td
import torch.distributed._functional_collectives as functional
from torch._dynamo import config as dynamo_config
from torch._dynamo.utils import counters
from torch._functorch import config as autograd_config
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.utils._pytree import tree_map_only

_breaks = {}  # number of graph breaks by function in the first world, which is on gloo


def _mine(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(td.get_rank()))


def _compiled(function, *given, fullgraph=True, **settings):
    """Compile the function again, because torch would reuse the code from the other world; return results and code."""
    torch._dynamo.reset()
    if not fullgraph:  # the first compilation in a process breaks a graph more often
        torch.compile(function, backend="eager")(*given)
        torch._dynamo.reset()
    counters.clear()
    settings |= {"fx_graph_cache": False, "compile_threads": 1}
    with config.patch(settings), autograd_config.patch(enable_autograd_cache=False):
        result, codes = run_and_get_code(torch.compile(function, fullgraph=fullgraph), *given)
    calls = [re.findall(r"torch\.ops\.(_?c10d\w*\.\w+)", code) for code in codes]
    breaks = counters["graph_break"].total()
    assert breaks <= _breaks.setdefault(function.__qualname__, breaks), counters["graph_break"]
    eager = tree_map_only(torch.Tensor, torch.clone, function(*given))  # the clone waits for the result
    return result, eager, calls, counters["stats"]["unique_graphs"]


def functional_collectives():
    world, size = td.group.WORLD, td.get_world_size()

    def step(x):
        y = functional.all_reduce(x * 2, "sum", world) + 1
        gathered = functional.all_gather_tensor(y, 0, world)
        part = functional.reduce_scatter_tensor(gathered * x.sum(), "avg", 0, world)
        swapped = functional.all_to_all_single(gathered, None, None, world)
        told = functional.broadcast(part - 1, 1, world)
        pair = functional.all_reduce_coalesced([told, swapped], "max", world)
        rows = functional.all_gather_into_tensor_coalesced([part, part + 1], world)
        parts = functional.reduce_scatter_tensor_coalesced([gathered, swapped], "sum", [0, 0], world)
        return y, gathered, part, swapped, told, [each * 2 for each in (*pair, *rows, *parts)]

    return _compiled(step, _mine(size, 3))


def with_gradients():
    world, size = td.group.WORLD, td.get_world_size()

    def step(x):
        gathered = functional.all_gather_tensor_autograd(x * 2, 0, world)
        part = functional.reduce_scatter_tensor_autograd(gathered.sin(), "sum", 0, world)
        swapped = functional.all_to_all_single_autograd(part * 3, [1] * size, [1] * size, world)
        loss = (swapped * part).sum()
        loss.backward()
        return loss

    results = []
    for call in (step, lambda x: _compiled(step, x, fullgraph=False)[2:]):
        x = _mine(size, 3).requires_grad_()
        results += [call(x), x.grad]
    return results


def functions_of_torch_distributed():
    """Compile functions of torch.distributed, which the compiler replaces by functional collectives."""
    size = td.get_world_size()

    def step(x):
        total, whole, part = x.clone(), x.new_empty(size * x.shape[0], 3), x.new_empty(x.shape[0] // size, 3)
        td.all_reduce(total)
        td.all_gather_into_tensor(whole, x)
        td.reduce_scatter_tensor(part, x * 2)
        rank = td.get_rank() + td.get_world_size()
        return total + rank, whole * 2, part - 1

    return _compiled(step, _mine(size, 3))


def messages():
    rank, size = td.get_rank(), td.get_world_size()

    def batch(x):
        x = x * 2
        got = torch.empty_like(x)
        works = td.batch_isend_irecv(
            [td.P2POp(td.isend, x, (rank + 1) % size), td.P2POp(td.irecv, got, (rank - 1) % size)]
        )
        for work in works:
            work.wait()
        return got + x

    def one_by_one(x):
        x = x + 1
        got = torch.empty_like(x)
        work = td.isend(x, (rank + 1) % size)
        td.recv(got, (rank - 1) % size)
        work.wait()
        return got * 3

    results = [_compiled(step, _mine(4), fullgraph=False) for step in (batch, one_by_one)]
    if hasattr(dynamo_config, "enable_p2p_compilation"):  # not in torch 2.10
        with dynamo_config.patch(enable_p2p_compilation=True):
            results.append(_compiled(batch, _mine(4)))
    return results


def in_buckets():
    """Compile several calls, which inductor merges into one if the settings require it."""
    world, size = td.group.WORLD, td.get_world_size()

    def step(*given):
        gathered = [functional.all_gather_tensor(x * 2, 0, world) for x in given]
        parts = [functional.reduce_scatter_tensor(x + 1, "sum", 0, world) for x in given]
        totals = [functional.all_reduce(x - 1, "sum", world) for x in given]
        return [each.sin() for each in (*gathered, *parts, *totals)]

    given, results = [_mine(size, 4) + i for i in range(3)], []
    names = ["bucket_all_gathers_fx", "bucket_reduce_scatters_fx", "bucket_all_reduces_fx"]
    for kind in ("none", "all"):
        results.append(_compiled(step, *given, **{name: kind for name in names if hasattr(config, name)}))
    assert len(results[1][2][0]) < len(results[0][2][0]), results[1][2]
    return results


def calls_that_break_a_graph():
    world = td.group.WORLD

    def step(x):
        x = functional.all_reduce(x, "sum", world)
        torch._dynamo.graph_break()
        td.all_reduce(x, async_op=True).wait()
        td.barrier()
        return functional.all_reduce(x * 2, "avg", world), td.get_world_size(world), world.rank()

    return _compiled(step, _mine(3), fullgraph=False)
