"""A parameter server built from messages: rank 0 holds the weights, and the other ranks send gradients.

    allranks run -n 4 examples/parameter_server/train.py

No rank waits for the slowest one. The server receives the next gradient from any rank (`recv` without a source),
applies it, and sends the weights back to that rank alone.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import allranks as dist

GRADIENT, WEIGHTS = 1, 2  # tags


def data(seed):
    """Return points on two spirals."""
    generator = torch.Generator().manual_seed(seed)
    t = torch.rand(256, generator=generator) * 3 + 0.5
    label = torch.randint(2, (256,), generator=generator)
    angle = 2 * t + label * torch.pi
    return torch.stack([t * angle.cos(), t * angle.sin()], 1), label


def serve(net, updates):
    weights = nn.utils.parameters_to_vector(net.parameters()).detach()
    optimizer = torch.optim.Adam([weights], lr=0.01)
    gradient = torch.empty(len(weights) + 1)  # the last element marks the rank's last gradient
    for worker in range(1, dist.get_world_size()):
        dist.send(weights, worker, tag=WEIGHTS)
    came = [0] * dist.get_world_size()
    for _ in range(updates * (dist.get_world_size() - 1)):
        worker = dist.recv(gradient, tag=GRADIENT)
        weights.grad = gradient[:-1]
        optimizer.step()
        came[worker] += 1
        if gradient[-1] == 0:
            dist.send(weights, worker, tag=WEIGHTS)
    nn.utils.vector_to_parameters(weights, net.parameters())
    x, y = data(0)
    accuracy = (net(x).argmax(1) == y).float().mean().item()
    print(f"{sum(came)} gradients, {min(came[1:])} of each worker: accuracy {accuracy:.0%}")


def work(net, updates):
    weights = torch.empty(sum(parameter.numel() for parameter in net.parameters()))
    x, y = data(dist.get_rank())
    for update in range(updates):
        dist.recv(weights, 0, tag=WEIGHTS)
        nn.utils.vector_to_parameters(weights, net.parameters())
        net.zero_grad()
        F.cross_entropy(net(x), y).backward()
        last = torch.tensor([float(update + 1 == updates)])
        dist.send(torch.cat([*(parameter.grad.flatten() for parameter in net.parameters()), last]), 0, tag=GRADIENT)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=300, help="number of gradients of each worker")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
    (serve if dist.get_rank() == 0 else work)(net, args.updates)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
