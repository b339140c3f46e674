"""Accelerate with FSDP2, whose save_state and load_state write and read checkpoints of allranks.

    pip install accelerate
    allranks run -n 2 examples/trainers/accelerate_train.py --folder out/accelerate
    allranks run -n 2 examples/trainers/accelerate_train.py --folder out/accelerate --steps 20    # continues

Accelerate always uses torch's FileSystemWriter and has no parameter for another writer. The calls are therefore inside
``checkpoint.as_default``.
"""

import argparse
import hashlib
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType, set_seed
from torch import nn

from allranks import checkpoint


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()

    cpu = not torch.cuda.is_available()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", auto_wrap_policy="NO_WRAP"
    )
    accelerator = Accelerator(cpu=cpu, fsdp_plugin=plugin)
    if cpu:  # Accelerate shards on devices only, and would ignore the plugin
        accelerator.state.fsdp_plugin = plugin
        accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    set_seed(1)
    model = nn.Sequential(nn.Linear(8, 30), nn.Tanh(), nn.Linear(30, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))

    begin = 0
    with checkpoint.as_default():
        if saved := sorted(options.folder.glob("step-*"), key=lambda path: int(path.name[5:])):
            accelerator.load_state(saved[-1])
            begin = int(saved[-1].name[5:])
        for step in range(begin, options.steps):
            torch.manual_seed(step * accelerator.num_processes + accelerator.process_index)
            loss = model(torch.randn(4, 8).to(accelerator.device)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if step % 5 == 4:
                accelerator.save_state(options.folder / f"step-{step + 1}")
    digest = hashlib.sha256(
        b"".join(bytes(parameter.full_tensor().detach().cpu().numpy()) for parameter in model.parameters())
    )
    print(f"step {options.steps}: weights {digest.hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    main()
