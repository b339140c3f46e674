"""Lightning with checkpoints of allranks: shards through ModelParallelStrategy, or one file through a CheckpointIO.

    pip install lightning
    allranks run -n 2 examples/trainers/lightning_train.py --sharded --folder out/lightning
    allranks run -n 2 examples/trainers/lightning_train.py --sharded --folder out/lightning --steps 20    # continues

With ``--sharded``, FSDP2 shards the model. Lightning saves with torch's distributed checkpoint and has no parameter
for a writer, so the calls are inside ``checkpoint.as_default``. Without it, the ranks are data-parallel, and rank 0
saves one file through the ``CheckpointIO`` that the trainer receives.
"""

import argparse
import contextlib
import hashlib
import os
from pathlib import Path

import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from allranks import checkpoint


class WholeFile(TorchCheckpointIO):
    """CheckpointIO that writes each file atomically and syncs it to the disk."""

    def save_checkpoint(self, state, path, storage_options=None):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        checkpoint.save(state, path)


class Model(LightningModule):
    """A small network, sharded if the strategy has a mesh."""

    def __init__(self, sharded):
        super().__init__()
        self.sharded = sharded
        self.net = nn.Sequential(nn.Linear(8, 30), nn.Tanh(), nn.Linear(30, 1))

    def configure_model(self):
        if self.sharded:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, index):
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()

    seed_everything(1)
    ranks = int(os.environ["WORLD_SIZE"])
    data = TensorDataset(torch.randn(80, 8), torch.randn(80, 1))
    model = Model(options.sharded)
    saves = ModelCheckpoint(
        options.folder,
        save_last="link",  # link to an existing checkpoint, because each checkpoint has a unique path
        enable_version_counter=False,  # a continued run moves the link, and creates no last-v1.ckpt
        save_top_k=-1,
        every_n_train_steps=5,
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=ModelParallelStrategy(ranks, 1) if options.sharded else DDPStrategy(),
        plugins=[] if options.sharded else [WholeFile()],
        callbacks=[saves],
        max_steps=options.steps,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    last = options.folder / "last.ckpt"
    with checkpoint.as_default() if options.sharded else contextlib.nullcontext():
        trainer.fit(model, DataLoader(data, batch_size=8), ckpt_path=last if last.exists() else None)
    weights = [p.full_tensor() if options.sharded else p for p in model.parameters()]
    digest = hashlib.sha256(b"".join(bytes(w.detach().numpy()) for w in weights)).hexdigest()[:16]
    print(f"step {trainer.global_step}: weights {digest}", flush=True)


if __name__ == "__main__":
    main()
