"""Features that observe or call torch's operators: modes, profilers, subclasses, tracing, functional collectives."""

import torch
import torch.distributed as td
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map


def _mine(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(td.get_rank()))


def _every_call():
    """Call every function of torch.distributed that moves tensors."""
    rank, size = td.get_rank(), td.get_world_size()
    rows = [torch.empty(3) for _ in range(size)]
    td.all_reduce(_mine(3))
    td.all_reduce(_mine(3), async_op=True).wait()
    td.all_reduce_coalesced([_mine(3), _mine(2)])
    td.broadcast(_mine(3), src=1)
    td.reduce(_mine(3), dst=0)
    td.all_gather(rows, _mine(3))
    td.all_gather_into_tensor(torch.empty(3 * size), _mine(3))
    td.gather(_mine(3), rows if rank == 0 else None)
    td.scatter(torch.empty(3), rows if rank == 0 else None)
    td.reduce_scatter(torch.empty(3), rows)
    td.reduce_scatter_tensor(torch.empty(3), torch.ones(3 * size))
    td.all_to_all_single(torch.empty(2 * size), _mine(2 * size))
    td.send(_mine(2), dst=1) if rank == 0 else td.recv(torch.empty(2), src=0) if rank == 1 else None
    td.barrier()


class _Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            self.operators.append(str(func))
            if func.namespace == "c10d":
                groups = [each for each in args if "ProcessGroup" in str(getattr(each, "_type", str)())]
                assert [td.ProcessGroup.unbox(group) for group in groups] == [td.group.WORLD]
        return func(*args, **(kwargs or {}))


def seen_by_a_mode():
    with _Seen() as seen:
        _every_call()
        functional.wait_tensor(functional.all_reduce(_mine(3), "sum", td.group.WORLD))
    return seen.operators


def seen_by_two_modes():
    with _Seen() as outer, _Seen() as inner:
        td.all_reduce(tensor := _mine(3))
        functional.wait_tensor(functional.all_gather_tensor(_mine(3), 0, td.group.WORLD))
    return outer.operators, inner.operators, tensor


def seen_by_a_profiler():
    with torch.profiler.profile() as profile:
        _every_call()
    return sorted({event.key for event in profile.key_averages() if event.key.startswith("c10d::")})


def counted():
    """Count the calls of collectives, of DTensor and of FSDP2."""
    mesh, counts = init_device_mesh("cpu", (td.get_world_size(),)), []
    with CommDebugMode() as debug:
        _every_call()
    counts.append(debug.get_comm_counts())
    with CommDebugMode() as debug:
        sharded = distribute_tensor(torch.arange(24.0).reshape(4, 6), mesh, [Shard(0)])
        whole = sharded.redistribute(placements=[Replicate()])
        swapped = sharded.redistribute(placements=[Shard(1)])
        total = sharded.sum().full_tensor()
    counts += [debug.get_comm_counts(), whole.to_local(), swapped.to_local(), total]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    with CommDebugMode() as debug:
        model(_mine(2, 6)).sum().backward()
    counts.append(debug.get_comm_counts())
    return [{str(k): v for k, v in each.items()} if isinstance(each, dict) else each for each in counts]


class _Pair(torch.Tensor):
    """Tensor that contains two tensors; each operation runs on both."""

    @staticmethod
    def __new__(cls, a, b):
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)

    def __init__(self, a, b):
        self.parts = a, b

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        done = [
            func(*tree_map(lambda t: t.parts[i] if isinstance(t, cls) else t, args), **(kwargs or {}))  # noqa: B023
            for i in range(2)
        ]
        if func.namespace == "c10d":
            td.Work.unbox(done[1][-1]).wait()  # torch waits only for the work that is returned
        return done[0]


def subclasses():
    size, results = td.get_world_size(), []
    td.all_reduce(pair := _Pair(_mine(3), _mine(3) + 1))
    results.append(pair.parts)
    work = td.all_reduce(pair := _Pair(_mine(3), _mine(3) * 2), td.ReduceOp.MAX, async_op=True)
    work.wait()
    results.append(pair.parts)
    td.broadcast(pair := _Pair(_mine(3), _mine(3) * 2), src=1)
    results.append(pair.parts)
    pairs = [_Pair(torch.empty(3), torch.empty(3)) for _ in range(size)]
    td.all_gather(pairs, _Pair(_mine(3), _mine(3) * 2))
    results += [pair.parts for pair in pairs]
    whole = _Pair(torch.empty(3 * size), torch.empty(3 * size))
    td.all_gather_into_tensor(whole, _Pair(_mine(3), _mine(3) * 2))
    results.append(whole.parts)
    td.reduce_scatter_tensor(part := _Pair(torch.empty(1), torch.empty(1)), _Pair(_mine(size), _mine(size) + 1))
    results.append(part.parts)
    pending = functional.all_reduce(_mine(3), "sum", td.group.WORLD)
    td.all_reduce(pending)
    results.append(pending + 0)
    return results


def called_as_operators():
    pg, rank, size, results = td.group.WORLD, td.get_rank(), td.get_world_size(), []
    boxed, c10d, calls = pg.boxed(), torch.ops.c10d, torch.ops._c10d_functional

    def done(returned):
        td.Work.unbox(returned[1] if isinstance(returned, tuple) else returned).wait()

    done(c10d.barrier(torch.empty(1), boxed, []))
    done(c10d.broadcast_([told := _mine(3)], boxed, 1, 0))
    done(c10d.allgather_([rows := [torch.empty(3) for _ in range(size)]], [_mine(3)], boxed))
    done(c10d._allgather_base_(flat := torch.empty(3 * size), _mine(3), boxed))
    done(c10d.allgather_into_tensor_coalesced_([into := torch.empty(3 * size)], [_mine(3)], boxed))
    done(c10d.gather_([gathered := [torch.empty(3) for _ in range(size)]] if rank == 0 else [], [_mine(3)], boxed, 0))
    done(c10d.scatter_([part := torch.empty(2)], [list(_mine(2 * size).chunk(size))] if rank == 1 else [], boxed, 1))
    done(c10d.alltoall_base_(swapped := torch.empty(2 * size), _mine(2 * size), boxed, [], []))
    if rank < 2:
        done(c10d.send([_mine(2)], boxed, 1, 5) if rank == 0 else c10d.recv_([got := torch.empty(2)], boxed, 0, 5))
        done(c10d.send([_mine(2)], boxed, 1, 5) if rank == 0 else c10d.recv_any_source_([got], boxed, 5))
        results.append(got if rank else None)
    c10d.monitored_barrier_(torch.empty(1), boxed, [], 20_000, True)
    results += [told, rows, flat, into, gathered if rank == 0 else None, part, swapped]

    name = pg.group_name
    out = torch.empty(3 * size)
    calls.wait_tensor(calls.all_gather_into_tensor_out(_mine(3), size, name, out=out))
    results.append(out)
    for each in (
        calls.all_reduce(_mine(3), "max", name),
        calls.all_reduce_(_mine(3), "avg", name),
        calls.all_gather_into_tensor(_mine(3), size, name),
        calls.reduce_scatter_tensor(_mine(2 * size), "sum", size, name),
        calls.all_to_all_single(_mine(2 * size), [2] * size, [2] * size, name),
        calls.broadcast(_mine(3), 1, name),
        calls.broadcast_(_mine(3), 1, name),
        *calls.all_reduce_coalesced([_mine(3), _mine(2)], "sum", name),
        *calls.all_gather_into_tensor_coalesced([_mine(3), _mine(2)], size, name),
        *calls.reduce_scatter_tensor_coalesced([_mine(2 * size), _mine(size)], "sum", size, name),
    ):
        results.append(calls.wait_tensor(each))
    return results


def functorch():
    """Make a call within a transform, for which torch has no kernel; return the results or error types."""
    results = []
    for transform in (torch.vmap, torch.func.functionalize):

        def call(x):
            td.all_reduce(x := x.clone())
            return x

        try:
            results.append(transform(call)(_mine(2, 3)))
        except Exception as error:  # noqa: BLE001 - any error, but the same in both worlds
            results.append(type(error).__name__)
    return results


def traced():
    """Trace a call with torch.fx into a graph, and run the graph."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def step(x):
        return functional.wait_tensor(functional.all_reduce(x * 2, "sum", td.group.WORLD)) + 1

    graph = make_fx(step)(_mine(3))
    return graph(_mine(3)), [str(node.target) for node in graph.graph.nodes]
