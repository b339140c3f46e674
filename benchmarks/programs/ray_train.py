"""Ray Train's TorchTrainer with two workers on CPUs.

    python benchmarks/programs/ray_train.py --backend allranks

It needs the package `ray[train]`. With `--backend gloo` it must print the same output.
"""

import argparse
import tempfile

import ray
import ray.train
import ray.train.torch
import torch


def train(config):
    """Train on one worker. Ray Train has created the process group."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    model = ray.train.torch.prepare_model(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rank = ray.train.get_context().get_world_rank()
    draw = torch.Generator().manual_seed(rank)
    for _ in range(30):
        x = torch.randn(64, 20, generator=draw)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    total = sum(value.double().sum().item() for value in model.state_dict().values())
    print(f"result: rank {rank}, loss {loss.item()!r}, weights {total!r}", flush=True)
    ray.train.report({"loss": loss.item()})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="gloo")
    backend = parser.parse_args().backend
    # Ray creates its sockets in its folder, and the path of a socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:
        ray.init(num_cpus=4, include_dashboard=False, _temp_dir=folder)
        ray.train.torch.TorchTrainer(
            train,
            torch_config=ray.train.torch.TorchConfig(backend=backend),
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(storage_path=f"{folder}/results"),
        ).fit()
        ray.shutdown()


if __name__ == "__main__":
    main()
