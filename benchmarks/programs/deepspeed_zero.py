"""DeepSpeed's ZeRO on CPUs.

    allranks run -n 2 benchmarks/programs/deepspeed_zero.py --backend allranks --stage 3

benchmarks/programs.py runs it on gloo and on allranks. At its first start DeepSpeed compiles extensions, which takes
one or two minutes. If this build is killed, its lock stays in TORCH_EXTENSIONS_DIR (~/.cache/torch_extensions). Every
later start then waits for the lock forever, on any backend. In this case, delete the folder.
"""

import argparse

import deepspeed
import torch
import torch.distributed as dist


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--stage", type=int, default=1, help="of ZeRO")
    args = parser.parse_args()
    deepspeed.init_distributed(args.backend)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    config = {
        "train_micro_batch_size_per_gpu": 32,
        "zero_optimization": {"stage": args.stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    draw = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(10):
        x = torch.randn(32, 20, generator=draw)
        loss = (engine(x) - x.sum(1, keepdim=True)).square().mean()
        engine.backward(loss)
        engine.step()
        print(f"result: rank {dist.get_rank()}, loss {loss.item()!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
