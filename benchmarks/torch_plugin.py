"""Measure PyTorch's own tools on allranks, through the plugin, against the same tools on gloo.

    allranks run -n 2 benchmarks/torch_plugin.py --json out/torch_plugin.json

The benchmark measures torch.distributed's all_reduce by size, and training steps of an MLP with 10 M parameters under
torch's DistributedDataParallel and FSDP2. It uses two groups of the same processes. Blocks and steps alternate, and
medians are compared.

A third group, whose backend is written in Python and does nothing, shows the cost of torch itself. The model of these
steps is tiny, and a compiled function makes one call of torch's functional all_reduce.
"""

import argparse
import copy
import json
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from ddp_step import WIDTHS, mlp, step
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

SIZES = (4, 1 << 10, 1 << 16, 1 << 20, 1 << 24)


def all_reduces(groups, blocks):
    """Return the seconds per call by bytes and group: the median of blocks, each with the time of its slowest rank."""
    table = {}
    for nbytes in SIZES:
        tensor = torch.ones(nbytes // 4)
        calls = {4: 200, 1 << 10: 200, 1 << 16: 60, 1 << 20: 12, 1 << 24: 3}[nbytes]
        seconds = {name: [] for name in groups}
        for block in range(-2, blocks):
            for name, group in groups.items():
                n = calls if name == "allranks" else max(2, calls // 10)
                dist.barrier()
                began = time.perf_counter()
                for _ in range(n):
                    dist.all_reduce(tensor, group=group)
                elapsed = slowest((time.perf_counter() - began) / n)
                if block >= 0:  # earlier blocks warm up
                    seconds[name].append(elapsed)
                expected = float(dist.get_world_size()) ** n
                if expected < 1e30 and not torch.all(tensor == expected):
                    raise SystemExit(f"wrong sum of {nbytes} bytes on {name}")
                tensor.fill_(1.0)
        table[nbytes] = {name: statistics.median(values) for name, values in seconds.items()}
    return table


def slowest(seconds):
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def contenders(groups):
    model = mlp()
    models = {}
    for name, group in groups.items():
        models["ddp", name] = nn.parallel.DistributedDataParallel(copy.deepcopy(model), process_group=group)
    for name, group in groups.items():
        sharded = copy.deepcopy(model)
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in sharded:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        models["fsdp2", name] = fully_shard(sharded, mesh=mesh)
    return models


def steps(models, count, batch_size):
    torch.manual_seed(1 + dist.get_rank())
    data, target = torch.randn(batch_size, WIDTHS[0]), torch.randn(batch_size, WIDTHS[-1])
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=1e-3) for name, model in models.items()}
    seconds = {name: [] for name in models}
    names = list(models)
    for i in range(-5, count):
        # Rotate the order, because the position in a round influences the state of the caches.
        for name in names[i % len(names) :] + names[: i % len(names)]:
            dist.barrier()
            began = time.perf_counter()
            step(models[name], optimizers[name], data, target)
            elapsed = slowest(time.perf_counter() - began)
            if i >= 0:
                seconds[name].append(elapsed)
    losses = {name: nn.functional.mse_loss(model(data), target).item() for name, model in models.items()}
    if len({round(loss, 5) for loss in losses.values()}) > 1:
        raise SystemExit(f"the losses differ: {losses}")
    return {name: statistics.median(values) for name, values in seconds.items()}


class Done(dist.Work):
    """Work returned by the backend that does nothing. Asynchronous calls must return a new one each time."""

    def __init__(self, tensors):
        super().__init__()
        self.tensors = tensors

    def wait(self, timeout=None):
        return True

    def get_future(self):
        return torch._C.fork(lambda: self.tensors)  # C++ also receives a list of tensors


class Nothing(dist.ProcessGroup):
    def __init__(self, about):
        super().__init__(about.group_rank, about.group_size)

    def getBackendName(self):
        return "nothing"

    def _set_group_name(self, name):
        self.known_as = name

    def _set_group_desc(self, desc):
        self.desc = desc

    def getGroupName(self):
        return self.known_as

    def getGroupDesc(self):
        return self.desc

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    # DistributedDataParallel compares the gathered values in its constructor
    def allgather(self, outputs, inputs, opts):
        for output in outputs[0]:
            output.copy_(inputs[0])
        return Done(outputs[0])

    def broadcast(self, tensors, opts):
        return Done(tensors)

    allreduce = broadcast

    def all_gather_single(self, output, given, opts):
        return Done([output])

    _allgather_base = reduce_scatter_single = _reduce_scatter_base = all_gather_single

    def barrier(self, opts=None):
        return Done([])


def paths(groups, count):
    """Return the seconds of a tiny step, or of one compiled call, by caller and group: medians and minimums."""
    torch.manual_seed(0)
    tiny = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    data, target = torch.randn(4, 8), torch.randn(4, 8)
    calls = {}
    for name, group in groups.items():
        wrapped = nn.parallel.DistributedDataParallel(copy.deepcopy(tiny), process_group=group)
        sharded = fully_shard(copy.deepcopy(tiny), mesh=DeviceMesh.from_group(group, "cpu"))
        for kind, model in (("ddp", wrapped), ("fsdp2", sharded)):
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            calls[kind, name] = lambda model=model, optimizer=optimizer: step(model, optimizer, data, target)
        reduced = torch.compile(lambda x, group=group: functional.all_reduce(x, "sum", group) + 0, fullgraph=True)
        calls["compiled", name] = lambda reduced=reduced: reduced(data)
        if name == "allranks" and not torch.equal(reduced(data), data * dist.get_world_size()):
            raise SystemExit("wrong sum of a compiled call")
    seconds = {way: [] for way in calls}
    ways = list(calls)
    for i in range(-10, count):
        for way in ways[i % len(ways) :] + ways[: i % len(ways)]:
            dist.barrier()
            began = time.perf_counter()
            for _ in range(10):
                calls[way]()
            elapsed = (time.perf_counter() - began) / 10
            if i >= 0:
                seconds[way].append(elapsed)
    return {
        kind: {
            name: {"median": statistics.median(seconds[kind, name]), "fastest": min(seconds[kind, name])}
            for name in groups
        }
        for kind in ("ddp", "fsdp2", "compiled")
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    dist.init_process_group("allranks")
    groups = {"allranks": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    torch.manual_seed(0)
    calls = all_reduces(groups, args.blocks)
    medians = steps(contenders(groups), args.steps, args.batch_size)
    dist.Backend.register_backend("nothing", lambda about, _: Nothing(about), extended_api=True, devices=["cpu"])
    floors = paths({"allranks": groups["allranks"], "nothing": dist.new_group(backend="nothing")}, args.steps)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    if rank > 0:
        return
    for nbytes, row in calls.items():
        print(f"all_reduce {nbytes:>9} B: {row['allranks'] * 1e6:9.1f} us, gloo {row['gloo'] * 1e6:9.1f} us, ", end="")
        print(f"{row['gloo'] / row['allranks']:.1f} times as fast")
    for kind in ("ddp", "fsdp2"):
        ours, theirs = medians[kind, "allranks"], medians[kind, "gloo"]
        print(f"a step of {kind:5}: {ours * 1e3:6.1f} ms, on gloo {theirs * 1e3:6.1f} ms, {theirs / ours:.2f} times")
    for kind, row in floors.items():
        ours, floor = row["allranks"]["fastest"], row["nothing"]["fastest"]
        print(f"{kind:8} of a tiny model: {ours * 1e6:6.1f} us, on a backend that does nothing {floor * 1e6:6.1f} us")
    if args.json:
        report = {
            "ranks": ranks,
            "cpus": os.cpu_count(),
            "torch": torch.__version__,
            "all_reduce_s": calls,
            "paths_s": floors,
            "step_s": {kind: {name: medians[kind, name] for name in groups} for kind in ("ddp", "fsdp2")},
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
