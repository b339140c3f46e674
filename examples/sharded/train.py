"""torch's own sharding on the allranks backend: FSDP2 and tensor parallelism, with the same losses as one process.

    allranks run -n 2 examples/sharded/train.py fsdp
    allranks run -n 2 examples/sharded/train.py tensor

The programs use only torch. The only difference is the name of the backend, which torch finds without an import.
"""

import argparse

import torch
import torch.distributed as td
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))


def train(net, rows):
    """Train on this rank's rows of each batch; return the loss of the whole batch."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        x = torch.randn(32, 16, generator=generator)
        y = x[:, :4].argmax(1)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
    return loss.detach()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=["fsdp", "tensor"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    td.init_process_group("allranks")
    size = td.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    net = network()
    if args.way == "fsdp":
        fully_shard(net[0], mesh=mesh)
        fully_shard(net, mesh=mesh)
        loss = train(net, slice(td.get_rank(), None, size))
        td.all_reduce(loss)
        loss /= size
    else:
        parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        loss = train(net, slice(None))
    mine = sum(parameter.to_local().numel() for parameter in net.parameters() if hasattr(parameter, "to_local"))
    if td.get_rank() == 0:
        alone = train(network(), slice(None))
        close = torch.allclose(loss, alone, rtol=1e-4)
        print(f"{args.way}: loss {loss:.4f}, as one process: {close}; {mine} of 1,348 weights on rank 0")
    td.barrier()
    td.destroy_process_group()


if __name__ == "__main__":
    main()
