"""Models of anemoi, a package for weather forecasts, sharded over the ranks of one group.

    allranks run -n 2 benchmarks/programs/anemoi_sharding.py --backend allranks

It needs the package `anemoi-models`. The program checks what the package's own distributed tests check: gathers and
transposes of parts of different sizes, sums, the exchange of halos, and a graph transformer, all with gradients. The
expected values come from the whole tensors, which every rank has. Then it trains the graph transformer. With
`--backend gloo` it must print the same output. On gloo the package pads tensors of different sizes and replaces
all-to-all by messages; on other backends it calls `all_gather` and `all_to_all` directly.
"""

import argparse
import time

import torch
import torch.distributed as dist
from anemoi.models.distributed import graph, halo, khop_edges
from anemoi.models.distributed.balanced_partition import get_balanced_partition_sizes
from anemoi.models.distributed.shapes import GraphShardInfo
from anemoi.models.layers.processor import GraphTransformerProcessor
from anemoi.models.layers.utils import load_layer_kernels

EDGE_FEATURES = 4


def expect(actual, expected, tolerance=0.0):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def check_layouts(group, nodes):
    """Move tensors between the layouts "whole", "sharded by rows" and "sharded by columns", and check the gradients."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    whole = torch.arange(nodes * 6.0).reshape(nodes, 6)
    factors = whole % 7 + 1  # the gradient of each element
    for dim in (0, 1, -1):
        sizes = get_balanced_partition_sizes(whole.size(dim), size)
        parts, part_factors = whole.split(sizes, dim), factors.split(sizes, dim)

        x = whole.clone().requires_grad_()
        part = graph.shard_tensor(x, dim, sizes, group)
        expect(part, parts[rank])
        (part * part_factors[rank]).sum().backward()
        expect(x.grad, factors)

        x = parts[rank].clone().requires_grad_()
        gathered = graph.gather_tensor(x, dim, sizes, group)
        expect(gathered, whole)
        (gathered * factors).sum().backward()
        expect(x.grad, part_factors[rank])

        x = parts[rank].clone().requires_grad_()
        (graph.sync_tensor(x, dim, sizes, group) * factors).sum().backward()
        expect(x.grad, part_factors[rank] * size)

        x = (whole + rank).requires_grad_()
        part = graph.reduce_shard_tensor(x, dim, sizes, group)
        expect(part, (whole * size + sum(range(size))).split(sizes, dim)[rank])
        (part * part_factors[rank]).sum().backward()
        expect(x.grad, factors)
    rows, columns = (get_balanced_partition_sizes(length, size) for length in whole.shape)
    x = whole.split(rows)[rank].clone().requires_grad_()
    moved = graph.all_to_all_transpose(x, 1, columns, 0, rows, group)
    expect(moved, whole.split(columns, 1)[rank])
    (moved * factors.split(columns, 1)[rank]).sum().backward()
    expect(x.grad, factors.split(rows)[rank])
    for dtype in (torch.float32, torch.bfloat16):
        expect(
            graph.reduce_tensor(torch.full((3, 2), rank + 1, dtype=dtype), group),
            torch.full((3, 2), size * (size + 1) / 2, dtype=dtype),
        )


def ring(nodes):
    """Return a symmetric graph, sorted by destination, in which each node has neighbors at four distances."""
    node = torch.arange(nodes)
    sources = torch.cat([(node + shift) % nodes for shift in (-9, -2, -1, 1, 2, 9)])
    return khop_edges.sort_edge_index_by_dst(torch.stack([sources, node.repeat(6)]), nodes)[0]


def check_halo(group, nodes, edges):
    """Exchange the rows of neighbors, and return the gradients to their owners."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    partition = khop_edges.build_graph_partition(edges, size, (nodes, nodes))
    info = halo.build_halo_info(partition, edges, group, debug=True)
    if dist.get_backend(group) != "gloo":  # this check of the package calls all_to_all, which gloo lacks
        halo.verify_halo_info(info, partition, group)
    whole = torch.arange(nodes * 3.0).reshape(nodes, 3)
    x = whole.split(partition.dst_splits)[rank].clone().requires_grad_()
    extended = graph.halo_exchange(x, info, group)
    expect(extended[info.num_local_nodes :], whole[torch.cat(info.recv_global_ids)])
    extended.sum().backward()
    uses = torch.ones(len(x))  # by the owner, and by each rank that receives the row
    for indices in info.send_indices:
        uses[indices] += 1
    expect(x.grad, uses[:, None].expand(-1, 3))


def transformer(strategy, channels):
    torch.manual_seed(0)
    return GraphTransformerProcessor(
        num_layers=2,
        num_channels=channels,
        num_chunks=1,
        num_heads=4,
        mlp_hidden_ratio=2,
        cpu_offload=False,
        layer_kernels=load_layer_kernels(instance=False),
        graph_attention_backend="pyg",
        edge_dim=EDGE_FEATURES,
        shard_strategy=strategy,
    )


def train(group, strategy, nodes, channels, edges, steps):
    """Train a sharded model, after its first result has been compared with the same model on the whole graph."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    draw = torch.Generator().manual_seed(1)
    features = torch.randn(edges.size(1), EDGE_FEATURES, generator=draw)
    x, target = (torch.randn(nodes, channels, generator=draw) for _ in range(2))
    model = transformer(strategy, channels)

    loss = (model(x, 1, GraphShardInfo(), features, edges) - target).square().sum()
    loss.backward()
    alone = [parameter.grad.clone() for parameter in model.parameters()]

    rows = get_balanced_partition_sizes(nodes, size)
    own, own_target = x.split(rows)[rank], target.split(rows)[rank]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    losses, times = [], []
    for step in range(steps):
        optimizer.zero_grad()
        begun = time.perf_counter()
        loss = (
            (model(own, 1, GraphShardInfo(nodes=rows), features, edges, model_comm_group=group) - own_target)
            .square()
            .sum()
        )
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)
        dist.all_reduce(total := loss.detach(), group=group)
        times.append(time.perf_counter() - begun)
        if step == 0:
            for parameter, expected in zip(model.parameters(), alone, strict=True):
                expect(parameter.grad, expected, 1e-3)
        optimizer.step()
        losses.append(total.item())
    return losses, model, times


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--nodes", type=int, default=1201, help="of the graph; a prime number gives different parts")
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    dist.init_process_group(args.backend)
    group, rank = dist.group.WORLD, dist.get_rank()
    edges = ring(args.nodes)
    check_layouts(group, args.nodes)
    check_halo(group, args.nodes, edges)
    if rank == 0:
        print("result: layouts and halos are as expected")
    times = []
    for strategy in ("edges", "heads"):
        losses, model, each = train(group, strategy, args.nodes, args.channels, edges, args.steps)
        weights = sum(parameter.double().sum().item() for parameter in model.parameters())
        print(f"result: rank {rank}, {strategy}, losses {losses!r}, weights {weights!r}")
        times += each[1:]
    if rank == 0:
        print(f"seconds of a step: {sorted(times)[len(times) // 2]:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
